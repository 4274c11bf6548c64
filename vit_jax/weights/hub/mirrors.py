"""Names of published weights, with the URLs of the originals and their mirrors.

`augreg:B/16` is pretrained on ImageNet-21k, `augreg:B/16-i1k-384` is then fine-tuned on
ImageNet-1k at 384 pixels, `augreg-i1k:B/16-224` is trained on ImageNet-1k only
(arXiv:2106.10270). `paper:B/16-i21k` and `paper:B/16` (fine-tuned at 384; -224 at 224)
come from arXiv:2010.11929, `sam:` from 2106.01548, `deit:` from 2012.12877, `bit:` is
BiT-M from 1912.11370, `big_vision:` from 2205.01580.

mirrors.tsv has one line per name: the URL of the original, then the URLs of copies,
which may lack a head or a representation layer that the original has. Of AugReg's many
files for each size, it has the one that timm chose. Sources of the names, as of
November 2026:
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

import importlib.resources

_ROWS = importlib.resources.files("vit_jax.weights.hub") / "mirrors.tsv"
_SOURCES = {
    name: tuple(urls)
    for name, *urls in map(str.split, _ROWS.read_text("utf-8").splitlines())
}


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
    """Returns the other URLs of the weights at a URL."""
    groups = (urls for urls in _SOURCES.values() if source in urls)
    return tuple(other for urls in groups for other in urls if other != source)
