"""Which format a weight file is in, told by the names of its parameters."""

from types import ModuleType

from vit_jax.errors import UserError
from vit_jax.weights.formats import big_vision, bit, google, hugging_face, own, timm
from vit_jax.weights.formats.files import Tensors

# The first that recognises the names reads the file: big_vision's names include those
# of google, which come with its own preprocessing.
READERS = {
    "Hugging Face": hugging_face,
    "timm": timm,
    "BiT": bit,
    "google": google,
    "big_vision": big_vision,
}


def reader(tensors: Tensors) -> ModuleType:
    """Returns the module whose `read` understands a file.

    Args:
      tensors: of the file.

    Raises:
      UserError: the names are those of no known format.
    """
    if own.METADATA_KEY in tensors.metadata:
        return own
    for module in READERS.values():
        if module.recognises(tensors.flat.keys()):
            return module
    names = sorted(tensors.flat)
    shown = ", ".join(names[:: max(1, len(names) // 3)][:3])
    raise UserError(
        f"{tensors.path} is in none of the known formats ({', '.join(READERS)}, own "
        f"exports): its {len(names)} arrays have names such as {shown}"
    )
