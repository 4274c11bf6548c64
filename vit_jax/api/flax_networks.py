"""Networks as ordinary Flax modules with dicts of parameters, for loops of users."""

import dataclasses
import os
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax

from vit_jax.api.models import create_model
from vit_jax.api.open_network import NetworkArguments, open_network
from vit_jax.config import arguments
from vit_jax.config.fields import key as field
from vit_jax.data.config import MAX_CHANNELS
from vit_jax.errors import UserError
from vit_jax.models.flax_network import FlaxNetwork
from vit_jax.weights import placement, surgery
from vit_jax.weights.placement import Shardings


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Arguments(NetworkArguments):
    variant: str = field("", "Name of a network.")
    channels: int = field(3, "Channels per image.", at_least=1, at_most=MAX_CHANNELS)


_checked = arguments.checked(_Arguments)


@_checked
def load_flax(
    source: str | os.PathLike,
    *,
    image_size: int | Sequence[int] | None = None,
    num_classes: int | None = None,
    step: int | None = None,
    use_ema: bool = True,
    num_heads: int = 0,
    architecture: str = "",
    shardings: Shardings | None = None,
    tell: Callable[[str], None] = print,
    **options,
) -> tuple[nn.Module, dict]:
    """Opens weights of any format as a Flax module and its parameters.

    The network computes in its `dtype`, "float32" unless it is given: parameters and
    images are cast to it. If they have fewer bits, a warning says so once. Parameters
    are float32 arrays; outputs are float32.

    Args:
      source, image_size, num_classes, step, use_ema, num_heads, architecture, tell: see
        `load_model`.
      shardings: where each parameter is put as soon as it is read: a mesh, see
        `vit_jax.distributed.mesh.create`, over which parameters are split as in
        training; a `jax.sharding.Sharding` for all of them; a nested dict of these with
        the names of the parameters; or a function that returns such a dict for the
        shapes. None is the default device.
      **options: keys of the network (`config.model`) that keep the shapes of its
        parameters, such as `dtype="bfloat16"` or `drop_path_rate=0.1`.

    Returns:
      A `flax.linen.Module`, and a nested dict of arrays. `module.apply({"params":
      params}, images, train=True, rngs={"dropout": key})` returns "logits" (B,
      num_classes) and "pre_logits" (B, width) for normalised images (B, height, width,
      channels), see `load_preprocess`. `module.model` has other functions of
      parameters, see `vit_jax.models.Model`. Running means of a network with BatchNorm
      are in `params["batch_stats"]`: pass them as the collection of this name.

    Raises:
      UserError: the weights cannot be opened, or an argument does not fit them.

    Example:
      >>> import jax, vit_jax
      >>> module, params = vit_jax.load_flax(
      ...     "runs/digits", num_classes=5, dropout=0.1, tell=lambda line: None
      ... )
      >>> images = jax.numpy.zeros((2, 8, 8, 1))
      >>> rngs = {"dropout": jax.random.key(0)}
      >>> outputs = module.apply({"params": params}, images, train=True, rngs=rngs)
      >>> outputs["logits"].shape
      (2, 5)
    """
    pretrained, how = open_network(
        source,
        options,
        image_size=image_size,
        num_classes=num_classes,
        step=step,
        use_ema=use_ema,
        num_heads=num_heads,
        architecture=architecture,
        images=False,
        tell=tell,
    )
    model, params = surgery.fit_network(pretrained, how)
    del pretrained  # Its arrays are freed while they are put on devices.
    where = placement.resolve(shardings, model)
    return FlaxNetwork(model), placement.place(params, model, where)


@_checked
def create_flax(
    variant: str,
    *,
    num_classes: int = 1_000,
    image_size: int | Sequence[int] = 224,
    channels: int = 3,
    key: jax.Array | None = None,
    shardings: Shardings | None = None,
    **options,
) -> tuple[nn.Module, dict]:
    """Builds a Flax module with random parameters.

    Args:
      variant, num_classes, image_size, channels, **options: see `create_model`.
      key: random key of the parameters; `jax.random.key(0)` if None.
      shardings: where each parameter is put, see `load_flax`.

    Returns:
      A `flax.linen.Module` and a nested dict of arrays, see `load_flax`.

    Raises:
      UserError: the variant or an option is unknown, or values contradict each other.

    Example:
      >>> import jax, vit_jax
      >>> module, params = vit_jax.create_flax("Ti/16", image_size=32, depth=1)
      >>> images = jax.numpy.zeros((2, 32, 32, 3))
      >>> module.apply({"params": params}, images)["logits"].shape
      (2, 1000)
    """
    model = create_model(
        variant,
        num_classes=num_classes,
        image_size=image_size,
        channels=channels,
        **options,
    )
    key = jax.random.key(0) if key is None else key
    if not isinstance(key, jax.Array):
        raise UserError(f"key={key!r}: give a random key, such as jax.random.key(0)")
    where = placement.resolve(shardings, model)
    if where is None:
        return FlaxNetwork(model), model.init(key)
    where = placement.nested(where)
    return FlaxNetwork(model), jax.jit(model.init, out_shardings=where)(key)
