"""Names of published weights, and the URLs of their original and mirrors.

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


def families() -> tuple[str, ...]:
    """Returns the prefixes of the names, without the colon."""
    return tuple(dict.fromkeys(name.partition(":")[0] for name in _SOURCES))


def names(family: str) -> tuple[str, ...]:
    """Returns the names of a family."""
    return tuple(name for name in _SOURCES if name.startswith(f"{family}:"))


def sources(name: str) -> tuple[str, ...]:
    """Returns the URLs of named weights, the original first; () for unknown names."""
    return _SOURCES.get(name, ())


def copies(source: str) -> tuple[str, ...]:
    """Returns the other URLs of the weights that one URL has."""
    found = (urls for urls in _SOURCES.values() if source in urls)
    return tuple(other for urls in found for other in urls if other != source)


# For each name the original comes first, then copies; a copy may lack a head or a
# representation layer that the original has.
_BUCKET = "gs://vit_models"
_TIMM_FILES = (
    "https://github.com/huggingface/pytorch-image-models/releases/download/v0.1-vitjx"
)
_KERAS_FILES = "https://github.com/faustomorales/vit-keras/releases/download/dl"
_DEIT_FILES = "https://dl.fbaipublicfiles.com/deit"

_PAPER = {
    "paper:B/32-i21k": (
        f"{_BUCKET}/imagenet21k/ViT-B_32.npz",
        "hf://google/vit-base-patch32-224-in21k",
        "hf://timm/vit_base_patch32_224.orig_in21k",
        f"{_TIMM_FILES}/jx_vit_base_patch32_224_in21k-8db57226.pth",
        f"{_KERAS_FILES}/ViT-B_32_imagenet21k.npz",
    ),
    "paper:B/16-i21k": (
        f"{_BUCKET}/imagenet21k/ViT-B_16.npz",
        "hf://google/vit-base-patch16-224-in21k",
        "hf://timm/vit_base_patch16_224.orig_in21k",
        f"{_TIMM_FILES}/jx_vit_base_patch16_224_in21k-e5005f0a.pth",
        f"{_KERAS_FILES}/ViT-B_16_imagenet21k.npz",
    ),
    "paper:L/32-i21k": (
        f"{_BUCKET}/imagenet21k/ViT-L_32.npz",
        "hf://google/vit-large-patch32-224-in21k",
        "hf://timm/vit_large_patch32_224.orig_in21k",
        f"{_TIMM_FILES}/jx_vit_large_patch32_224_in21k-9046d2e7.pth",
        f"{_KERAS_FILES}/ViT-L_32_imagenet21k.npz",
    ),
    "paper:L/16-i21k": (
        f"{_BUCKET}/imagenet21k/ViT-L_16.npz",
        "hf://google/vit-large-patch16-224-in21k",
        "hf://timm/vit_large_patch16_224.orig_in21k",
        f"{_TIMM_FILES}/jx_vit_large_patch16_224_in21k-606da67d.pth",
        f"{_KERAS_FILES}/ViT-L_16_imagenet21k.npz",
    ),
    "paper:H/14-i21k": (
        f"{_BUCKET}/imagenet21k/ViT-H_14.npz",
        "hf://google/vit-huge-patch14-224-in21k",
        "hf://timm/vit_huge_patch14_224.orig_in21k",
    ),
    "paper:R50+B/16-i21k": (
        f"{_BUCKET}/imagenet21k/R50+ViT-B_16.npz",
        "hf://timm/vit_base_r50_s16_224.orig_in21k",
        f"{_TIMM_FILES}/jx_vit_base_resnet50_224_in21k-6f7c7740.pth",
    ),
    # Later files of the same folder, which nobody is known to have copied.
    "paper:B/8-i21k": (f"{_BUCKET}/imagenet21k/ViT-B_8.npz",),
    "paper:R26+B/32-i21k": (f"{_BUCKET}/imagenet21k/R26+ViT-B_32.npz",),
    "paper:R50+L/32-i21k": (f"{_BUCKET}/imagenet21k/R50+ViT-L_32.npz",),
    "paper:B/32": (
        f"{_BUCKET}/imagenet21k+imagenet2012/ViT-B_32.npz",
        "hf://google/vit-base-patch32-384",
        f"{_KERAS_FILES}/ViT-B_32_imagenet21k+imagenet2012.npz",
    ),
    "paper:B/16": (
        f"{_BUCKET}/imagenet21k+imagenet2012/ViT-B_16.npz",
        "hf://google/vit-base-patch16-384",
        "hf://timm/vit_base_patch16_384.orig_in21k_ft_in1k",
        f"{_TIMM_FILES}/jx_vit_base_p16_384-83fb41ba.pth",
        f"{_KERAS_FILES}/ViT-B_16_imagenet21k+imagenet2012.npz",
    ),
    "paper:B/16-224": (
        f"{_BUCKET}/imagenet21k+imagenet2012/ViT-B_16-224.npz",
        "hf://google/vit-base-patch16-224",
        "hf://timm/vit_base_patch16_224.orig_in21k_ft_in1k",
        f"{_TIMM_FILES}/jx_vit_base_p16_224-80ecf9dd.pth",
    ),
    "paper:L/32": (
        f"{_BUCKET}/imagenet21k+imagenet2012/ViT-L_32.npz",
        "hf://google/vit-large-patch32-384",
        "hf://timm/vit_large_patch32_384.orig_in21k_ft_in1k",
        f"{_TIMM_FILES}/jx_vit_large_p32_384-9b920ba8.pth",
        f"{_KERAS_FILES}/ViT-L_32_imagenet21k+imagenet2012.npz",
    ),
    "paper:L/16": (
        f"{_BUCKET}/imagenet21k+imagenet2012/ViT-L_16.npz",
        "hf://google/vit-large-patch16-384",
        f"{_KERAS_FILES}/ViT-L_16_imagenet21k+imagenet2012.npz",
    ),
    "paper:L/16-224": (
        f"{_BUCKET}/imagenet21k+imagenet2012/ViT-L_16-224.npz",
        "hf://google/vit-large-patch16-224",
    ),
    "paper:R50+B/16": (
        f"{_BUCKET}/imagenet21k+imagenet2012/R50+ViT-B_16.npz",
        "hf://timm/vit_base_r50_s16_384.orig_in21k_ft_in1k",
        f"{_TIMM_FILES}/jx_vit_base_resnet50_384-9fd3c705.pth",
    ),
}

_SAM = {
    "sam:B/32": (
        f"{_BUCKET}/sam/ViT-B_32.npz",
        "hf://timm/vit_base_patch32_224.sam_in1k",
    ),
    "sam:B/16": (
        f"{_BUCKET}/sam/ViT-B_16.npz",
        "hf://timm/vit_base_patch16_224.sam_in1k",
    ),
    "sam:L/32": (f"{_BUCKET}/sam/ViT-L_32.npz",),
    "sam:L/16": (f"{_BUCKET}/sam/ViT-L_16.npz",),
}

# Name; model name at all three hosts; hash at the end of Meta's file name.
_DEIT_MODELS = (
    ("Ti/16", "tiny_patch16_224", "a1311bcf"),
    ("S/16", "small_patch16_224", "cd65a155"),
    ("B/16", "base_patch16_224", "b5f2ef4d"),
    ("B/16-384", "base_patch16_384", "8de9b5d1"),
    ("Ti/16-distilled", "tiny_distilled_patch16_224", "b40b3cf7"),
    ("S/16-distilled", "small_distilled_patch16_224", "649709d9"),
    ("B/16-distilled", "base_distilled_patch16_224", "df68dfff"),
    ("B/16-distilled-384", "base_distilled_patch16_384", "d0272ac0"),
)
_DEIT = {
    f"deit:{name}": (
        f"hf://facebook/deit-{model.replace('_', '-')}",
        f"hf://timm/deit_{model}.fb_in1k",
        f"{_DEIT_FILES}/deit_{model}-{end}.pth",
    )
    for name, model, end in _DEIT_MODELS
}

# The widths and depths that were published, BiT-M upstream.
_BIT_MODELS = ("R50x1", "R50x3", "R101x1", "R101x3", "R152x2", "R152x4")
_BIT = {
    f"bit:{name}{end}": (
        f"gs://bit_models/BiT-M-{name}{file}.npz",
        f"hf://timm/resnetv2_{name[1:]}_bit.goog_{timm}",
    )
    for name in _BIT_MODELS
    for end, file, timm in (
        ("", "", "in21k"),
        ("-i1k", "-ILSVRC2012", "in21k_ft_in1k"),
    )
}

_BIG_VISION = {
    f"big_vision:S/16-i1k-{epochs}ep": (f"gs://big_vision/vit_s16_i1k_{epochs}ep.npz",)
    for epochs in (90, 150, 300)
}

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


def _add_hash(url: str) -> str:
    """Appends the hash to a URL whose file name ends in its beginning (torch.hub)."""
    found = re.search(r"-([0-9a-f]{8})\.pth$", url)
    return f"{url}#sha256={found[1]}" if found else url


_SOURCES = {
    name: tuple(map(_add_hash, urls))
    for name, urls in (_PAPER | _augreg() | _SAM | _DEIT | _BIT | _BIG_VISION).items()
}
