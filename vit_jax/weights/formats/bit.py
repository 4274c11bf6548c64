"""The npz formats of BiT ResNets (arXiv:1912.11370): big_vision's and the original."""

from collections.abc import Collection

from vit_jax.errors import UserError
from vit_jax.weights.formats import linen, tables
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.registry import READERS, Reader
from vit_jax.weights.pretrained import Pretrained

_ANCHOR = "root_block/conv_root/kernel"
# Name in big_vision's other ResNet, and in hybrids.
_FIRST_VERSION = "conv_root/kernel"


def recognises(tensors: Tensors) -> bool:
    """Returns whether a file is in one of the two formats."""
    names = tensors.flat.keys()
    original = any(n.startswith("resnet/root_block/standardized_conv2d") for n in names)
    return (
        original
        or linen.find_prefix(names, _ANCHOR) is not None
        or _is_first_version(names)
    )


def _is_first_version(names: Collection[str]) -> bool:
    return (
        linen.find_prefix(names, _FIRST_VERSION) is not None
        and linen.find_prefix(names, "embedding/kernel") is None
    )


def read(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a checkpoint; see `registry.Reader`."""
    if _is_first_version(tensors.flat):
        raise UserError(
            f"{tensors.path}: norms after the convolutions (ResNet V1, bit.py of "
            "big_vision) are not supported: give weights of a BiT ResNet (V2, "
            "bit_paper.py of big_vision)"
        )
    flat, notes = tensors.flat, ()
    if linen.find_prefix(flat, _ANCHOR) is None:
        flat = tables.rename(flat, _NAMES)
        if "head/kernel" in flat:  # The original format has a 1x1 convolution.
            kernel = flat["head/kernel"]
            flat["head/kernel"] = kernel.reshape(-1, kernel.shape[-1])
    else:
        flat, notes = linen.strip(flat, _ANCHOR)
    flat = linen.flatten_norms(flat)
    blocks = linen.stem_blocks(flat)
    channels, stem_width = flat[_ANCHOR].shape[2:]
    options = {
        **linen.resnet_options(blocks, int(stem_width)),
        "image_size": (224, 224),  # Any size works; files do not record one.
        "channels": int(channels),
        # As in big_vision, for files in both formats. The original code pads with
        # zeros.
        "zero_pool": False,
    }
    preprocess = linen.whole_image(options["image_size"])
    notes = (*notes, "image size: not in the file, assumed 224x224")
    return linen.finish(tensors, flat, options, "bit", preprocess, notes)


# Patterns in the original names and their replacements. Some published files number
# their convolutions: standardized_conv2d_17.
_NAMES = (
    (r"^resnet/", ""),
    (r"standardized_conv2d(_\d+)?", "conv"),
    (r"group_norm(_\d+)?", "gn"),
    (r"/gamma$", "/scale"),
    (r"/beta$", "/bias"),
    (r"^root_block/conv/", "root_block/conv_root/"),
    (r"^gn/", "norm-pre-head/"),
    (r"^head/conv2d/", "head/"),
    (r"/a/proj/conv/", "/conv_proj/"),
    (r"/a/(conv|gn)/", r"/\g<1>1/"),
    (r"/b/(conv|gn)/", r"/\g<1>2/"),
    (r"/c/(conv|gn)/", r"/\g<1>3/"),
)


READERS["BiT"] = Reader(recognises, read)
