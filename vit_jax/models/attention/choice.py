"""Which way of attention, for a place."""

from vit_jax.errors import UserError
from vit_jax.models.attention import cudnn

NAMES = ("auto", "einsum", "cudnn", "splash")  # What a config can say.
# What a module is told. "einsum16" keeps logits in the dtype of the computation.
WAYS = ("einsum", "einsum16", "cudnn", "splash")

# From this many tokens on splash attention moves fewer bytes than einsums with bfloat16
# logits, by the compiler's own count; just about as many at 577, clearly fewer at 1,025
# (docs/decisions.md).
SPLASH_TOKENS = 577


def choose(
    name: str,
    *,
    platform: str,
    dtype: str,
    tokens: int,
    head_width: int,
    relative: bool,
) -> str:
    """Finds the way in which a model attends.

    Args:
      name: one of NAMES; "auto" is the fastest that the place and the model allow.
      platform: "cpu", "gpu", "tpu", ...; as jax.Device.platform.
      dtype: of the computation.
      tokens: of the encoder's sequence.
      head_width: features a head.
      relative: whether there are relative positions.

    Returns:
      One of WAYS.

    Raises:
      UserError: the choice is not possible there.
    """
    if name not in NAMES:
        raise UserError(f"model.attention={name!r} is not one of {', '.join(NAMES)}")
    obstacle = {
        "cudnn": _no_cudnn(platform, dtype, head_width, relative),
        "splash": _no_splash(platform, relative),
    }
    if name in obstacle:
        if obstacle[name]:
            raise UserError(
                f"model.attention={name!r} {obstacle[name]}: set it to 'auto' or "
                "'einsum'"
            )
        return name
    if name == "auto" and not obstacle["cudnn"]:
        return "cudnn"
    many = dtype != "float32" and tokens >= SPLASH_TOKENS
    if name == "auto" and not obstacle["splash"] and many:
        return "splash"
    # CPUs multiply bfloat16 into float32 faster than into bfloat16.
    rounded = dtype != "float32" and platform != "cpu"
    return "einsum16" if rounded else "einsum"


def _no_cudnn(platform: str, dtype: str, head_width: int, relative: bool) -> str:
    if platform not in ("gpu", "cuda"):
        return f"needs an NVIDIA GPU, but this is for platform {platform!r}"
    if dtype not in cudnn.DTYPES:
        return f"needs model.dtype='bfloat16', not {dtype!r}"
    if head_width % cudnn.HEAD_STEP or head_width > cudnn.HEAD_LIMIT:
        return (
            f"takes heads of a multiple of {cudnn.HEAD_STEP} features up to "
            f"{cudnn.HEAD_LIMIT}, not {head_width}"
        )
    return "knows no model.posemb='relative'" if relative else cudnn.missing()


def _no_splash(platform: str, relative: bool) -> str:
    if platform != "tpu":
        return f"needs a TPU, but this is for platform {platform!r}"
    return "knows no model.posemb='relative'" if relative else ""
