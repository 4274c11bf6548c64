"""Names of published weights, and every place that has a copy of them.

`augreg:B/16` is pretrained on ImageNet-21k, `augreg:B/16-i1k-384` then fine-tuned on
ImageNet-1k at 384 pixels, `augreg-i1k:B/16-224` trained on ImageNet-1k alone (arXiv:
2106.10270); `paper:B/16-i21k` and `paper:B/16` (fine-tuned at 384; -224 at 224) are of
arXiv:2010.11929, `sam:` of 2106.01548, `deit:` of 2012.12877, `bit:` BiT-M of
1912.11370, `big_vision:` of 2205.01580.

Sources of the names, as of November 2026:
- buckets: google-research/vision_transformer, README.md, issues 88 and 139, and
  google-research/big_transfer, README.md; google-research/big_vision, models/vit.py and
  models/bit_paper.py; jeonsworld/ViT-pytorch, issue 25; the lists of files in
  FedML-AI/FedCV and maciejbalawejder/Vision-Transformer;
- timm/...: `default_cfgs` of timm 1.0.31 (vision_transformer.py, deit.py, resnetv2.py,
  vision_transformer_hybrid.py), where the bucket's file stands beside each name, and
  the release files that its comments list, with eight digits of their SHA-256;
- google/... and facebook/...: the files pages of these repositories on huggingface.co;
- vit-keras: vit_keras/vit.py of faustomorales/vit-keras and its tests/test_urls.py.
"""

import re

from vit_jax.weights.places import mirror_places


def families() -> tuple[str, ...]:
    """Returns what a name begins with, up to the colon."""
    return tuple(dict.fromkeys(name.partition(":")[0] for name in _PLACES))


def names(family: str) -> tuple[str, ...]:
    """Returns the names of a family."""
    return tuple(name for name in _PLACES if name.startswith(f"{family}:"))


def places(name: str) -> tuple[str, ...]:
    """Returns where weights are to be had, the original first; nothing if unknown."""
    return _PLACES.get(name, ())


def copies(place: str) -> tuple[str, ...]:
    """Returns the other places of the weights that are at a place."""
    found = (many for many in _PLACES.values() if place in many)
    return tuple(other for many in found for other in many if other != place)


# Name; augmentation, weight decay, dropout and stochastic depth of the pretraining;
# rate of the fine-tuning: timm's choice for each size out of the many in the bucket.
_AUGREG = (
    ("augreg:Ti/16", "none", 0.03, 0.0, 0),
    ("augreg:Ti/16-i1k-224", "none", 0.03, 0.0, 0.03),
    ("augreg:Ti/16-i1k-384", "none", 0.03, 0.0, 0.03),
    ("augreg:S/32", "light1", 0.03, 0.0, 0),
    ("augreg:S/32-i1k-224", "light1", 0.03, 0.0, 0.03),
    ("augreg:S/32-i1k-384", "light1", 0.03, 0.0, 0.03),
    ("augreg:S/16", "light1", 0.03, 0.0, 0),
    ("augreg:S/16-i1k-224", "light1", 0.03, 0.0, 0.03),
    ("augreg:S/16-i1k-384", "light1", 0.03, 0.0, 0.03),
    ("augreg:B/32", "medium1", 0.03, 0.0, 0),
    ("augreg:B/32-i1k-224", "medium1", 0.03, 0.0, 0.03),
    ("augreg:B/32-i1k-384", "light1", 0.1, 0.0, 0.03),
    ("augreg:B/16", "medium1", 0.1, 0.0, 0),
    ("augreg:B/16-i1k-224", "medium1", 0.1, 0.0, 0.01),
    ("augreg:B/16-i1k-384", "medium1", 0.1, 0.0, 0.01),
    ("augreg:B/8", "medium1", 0.1, 0.0, 0),
    ("augreg:B/8-i1k-224", "medium1", 0.1, 0.0, 0.01),
    ("augreg:L/16", "medium1", 0.1, 0.1, 0),
    ("augreg:L/16-i1k-224", "medium1", 0.1, 0.1, 0.01),
    ("augreg:L/16-i1k-384", "medium1", 0.1, 0.1, 0.01),
    ("augreg:R+Ti/16", "none", 0.03, 0.0, 0),
    ("augreg:R+Ti/16-i1k-224", "none", 0.03, 0.0, 0.03),
    ("augreg:R+Ti/16-i1k-384", "none", 0.03, 0.0, 0.03),
    ("augreg:R26+S/32", "medium2", 0.03, 0.0, 0),
    ("augreg:R26+S/32-i1k-224", "light0", 0.03, 0.1, 0.03),
    ("augreg:R26+S/32-i1k-384", "medium2", 0.03, 0.0, 0.03),
    ("augreg:R50+L/32", "medium2", 0.1, 0.0, 0),
    ("augreg:R50+L/32-i1k-224", "medium1", 0.1, 0.1, 0.01),
    ("augreg:R50+L/32-i1k-384", "medium2", 0.1, 0.0, 0.01),
    ("augreg-i1k:S/16-224", "medium2", 0.1, 0.0, 0.01),
    ("augreg-i1k:S/16-384", "medium2", 0.1, 0.0, 0.01),
    ("augreg-i1k:B/32-224", "medium2", 0.1, 0.1, 0.01),
    ("augreg-i1k:B/32-384", "medium2", 0.1, 0.1, 0.01),
    ("augreg-i1k:B/16-224", "strong2", 0.1, 0.1, 0.01),
    ("augreg-i1k:B/16-384", "strong2", 0.1, 0.1, 0.01),
)

_TIMM_STEMS = {
    "Ti/16": "vit_tiny_patch16",
    "S/32": "vit_small_patch32",
    "S/16": "vit_small_patch16",
    "B/32": "vit_base_patch32",
    "B/16": "vit_base_patch16",
    "B/8": "vit_base_patch8",
    "L/16": "vit_large_patch16",
    "R+Ti/16": "vit_tiny_r_s16_p8",
    "R26+S/32": "vit_small_r26_s32",
    "R50+L/32": "vit_large_r50_s32",
}


def _augreg() -> dict[str, tuple[str, ...]]:
    table = {}
    for name, augmentation, decay, drop, rate in _AUGREG:
        family, _, rest = name.partition(":")
        variant, _, end = rest.partition("-")
        upstream = "i1k" if family == "augreg-i1k" else "i21k"
        file = variant.replace("/", "_").replace("+", "_")
        file += f"-{upstream}-300ep-lr_0.001"
        file += f"-aug_{augmentation}-wd_{decay}-do_{drop}-sd_{drop}"
        size, data = "224", f"in{upstream[1:]}"
        if rate:
            size = end.removeprefix("i1k-")
            file += f"--imagenet2012-steps_20k-lr_{rate}-res_{size}"
            data += "_ft_in1k" if upstream == "i21k" else ""
        timm = f"{_TIMM_STEMS[variant]}_{size}.augreg_{data}"
        table[name] = (f"gs://vit_models/augreg/{file}.npz", f"hf://timm/{timm}")
    return table


def _hashed(place: str) -> str:
    """Adds the hash to a place whose file is named by its beginning (torch.hub's)."""
    found = re.search(r"-([0-9a-f]{8})\.pth$", place)
    return f"{place}#sha256={found[1]}" if found else place


_PLACES = {
    name: tuple(map(_hashed, places_of_name))
    for name, places_of_name in (
        mirror_places.PAPER
        | _augreg()
        | mirror_places.SAM
        | mirror_places.DEIT
        | mirror_places.BIT
        | mirror_places.BIG_VISION
    ).items()
}
