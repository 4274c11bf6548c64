"""Heads that classify every pixel, on the features of some layers of a network.

The linear head is a BatchNorm and a linear layer for each patch, as in the segmentation
probes of DINOv2 (arXiv:2304.07193, section 7.4). The pyramid head uses maps of several
scales. They are outputs of the network, or they are computed from its concatenated
layers, as ViTDet does from the last layer (arXiv:2203.16527, section 3). The maps are
added as in Panoptic FPN (arXiv:1901.02446, section 3.1), without its convolutions
between upsampling steps.

Letters: B images, Y by X pixels, C channels, y by x cells of a grid, D features, L
classes.
"""

import dataclasses
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from vit_jax.errors import UserError
from vit_jax.models.kernels import gelu_erf
from vit_jax.models.layers import Dense, LayerNorm
from vit_jax.models.model import Model, Params
from vit_jax.models.network import STATE
from vit_jax.models.patches import PatchSequences

Map = Float[Array, "B _ _ _"]

_HEAD_INIT = nn.initializers.normal(0.01)


class LinearHead(nn.Module):
    """A BatchNorm and a linear layer; all maps are resized to the largest grid."""

    num_classes: int
    width: int  # Not used.
    dtype: str

    @nn.compact
    def __call__(
        self, maps: Sequence[Map], *, train: bool = False
    ) -> Float[Array, "B _ _ L"]:
        """Returns the logits of the cells of the largest grid."""
        grid = max(features.shape[1:3] for features in maps)
        x = jnp.concatenate([resize(features, grid) for features in maps], -1)
        # Momentum and epsilon of torch.nn.BatchNorm2d.
        norm = nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5)
        x = norm(x.astype(jnp.float32)).astype(self.dtype)
        return Dense(
            self.num_classes, dtype=self.dtype, kernel_init=_HEAD_INIT, name="head"
        )(x)


class PyramidHead(nn.Module):
    """The sum of maps of several scales, each convolved to `width` features.

    If all maps have the same grid, they are concatenated and converted to four scales:
    4 times and twice the resolution by transposed convolutions (see `depth_to_space`),
    the same resolution, and half of it by max pooling. Maps with several grids, such as
    those of a Swin Transformer, are used unchanged.
    """

    num_classes: int
    width: int
    dtype: str

    @nn.compact
    def __call__(
        self, maps: Sequence[Map], *, train: bool = False
    ) -> Float[Array, "B _ _ L"]:
        """Returns the logits of the cells of the finest map."""
        if len({features.shape[1:3] for features in maps}) == 1:
            maps = self._scales(jnp.concatenate(maps, -1).astype(self.dtype))
        grid = max(features.shape[1:3] for features in maps)
        total = sum(resize(self._lateral(features), grid) for features in maps)
        return Dense(
            self.num_classes, dtype=self.dtype, kernel_init=_HEAD_INIT, name="head"
        )(gelu_erf(total))

    def _scales(self, x: Map) -> list[Map]:
        half, quarter = x.shape[-1] // 2, x.shape[-1] // 4
        twice = self._enlarge(x, half)
        fine = gelu_erf(self._norm(self._enlarge(x, half)))
        coarse = nn.max_pool(x, window_shape=(2, 2), strides=(2, 2), padding="SAME")
        return [self._enlarge(fine, quarter), twice, x, coarse]

    def _enlarge(self, x, width):
        return depth_to_space(Dense(4 * width, dtype=self.dtype)(x))

    def _lateral(self, x):
        x = self._norm(nn.Conv(self.width, (1, 1), use_bias=False, dtype=self.dtype)(x))
        return self._norm(
            nn.Conv(self.width, (3, 3), use_bias=False, dtype=self.dtype)(x)
        )

    def _norm(self, x):
        return LayerNorm(dtype=self.dtype)(x)


# Names for the parameters and the running means of a head in a task.
NAMES = PARAMS, MEANS = "segmenter", "segmenter_means"
HEADS = {"linear": LinearHead, "pyramid": PyramidHead}


@dataclasses.dataclass(frozen=True)
class Segmenter:
    """A network with a segmentation head, without their parameters.

    Attributes:
      model: the network.
      head: module of the head, see `HEADS`.
      layers: layers whose features are the input of the head, see
        `Model.layer_features`.

    Raises:
      UserError: the network does not have these layers, or features of patches.
    """

    model: Model
    head: nn.Module
    layers: tuple[int, ...]

    def __post_init__(self):
        jax.eval_shape(self._maps, self.model.shapes, self._image)

    @property
    def _image(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, *self.model.image_shape), jnp.float32)

    def init(self, key: Key[Array, ""]) -> tuple[Params, Params]:
        """Returns the parameters and the running means of the head, {} without any."""
        maps = jax.eval_shape(self._maps, self.model.shapes, self._image)
        zeros = [jnp.zeros(features.shape, features.dtype) for features in maps]
        variables = self.head.init(key, zeros)
        return variables["params"], variables.get(STATE, {})

    def logits(
        self,
        network: Params,
        head: Params,
        means: Params,
        images: Float[Array, "B Y X C"] | PatchSequences,
    ) -> Float[Array, "B y x L"]:
        """Classifies the cells of a grid: patches, or finer cells.

        Args:
          network: parameters of `model`.
          head, means: parameters and running means of the head, see `init`.
          images: normalised images. For a linear head they may be sequences of patches,
            one image per sequence; the logits are then (B, N, 1, L).

        Returns:
          Logits in float32; `resize` converts them to logits of pixels.

        Raises:
          UserError: the network or the head does not support sequences.
        """
        maps, variables = self._maps(network, images), {"params": head, STATE: means}
        with self.model.config.matmul_precision():
            return self.head.apply(variables, maps).astype(jnp.float32)

    def logits_and_means(
        self,
        network: Params,
        head: Params,
        means: Params,
        images: Float[Array, "B Y X C"],
        key: Key[Array, ""] | None,
    ) -> tuple[Float[Array, "B y x L"], Params]:
        """Returns the logits in training, and the new running means.

        Args:
          network, head, means, images: see `logits`.
          key: random key for dropout in the network; None turns dropout off.
        """
        maps = self._maps(network, images, key)
        variables = {"params": head, STATE: means}
        with self.model.config.matmul_precision():
            logits, changed = self.head.apply(
                variables, maps, train=True, mutable=[STATE]
            )
        return logits.astype(jnp.float32), changed.get(STATE, {})

    def _maps(self, network, images, key=None) -> tuple[Map, ...]:
        images = images.astype(self.model.options["dtype"])
        if not isinstance(images, PatchSequences):
            return self.model.layer_features(network, images, self.layers, key=key)
        check_sequences(next(n for n, k in HEADS.items() if isinstance(self.head, k)))
        # A linear head does not use neighbours, so patches may be arranged in a column.
        maps = self.model.layer_features(
            network, images, self.layers, reshape=False, key=key
        )
        return tuple(features[:, :, None] for features in maps)


def check_sequences(head: str) -> None:
    """Raises UserError if a head of `HEADS` does not support images of any size."""
    if head != "linear":
        raise UserError(
            f"task.head={head!r} needs a grid of one size, which images of any size do not "
            "have: set max_tokens to 0, or train task.head='linear'"
        )


def build(
    model: Model, head: str, layers: Sequence[int], width: int, num_classes: int
) -> Segmenter:
    """Builds a segmenter.

    Args:
      model: network.
      head: name of the head, a key of `HEADS`.
      layers: layers whose features are the input of the head.
      width: number of features of a pyramid head.
      num_classes: number of classes.
    """
    dtype = model.options["dtype"]
    return Segmenter(model, HEADS[head](num_classes, width, dtype), tuple(layers))


def depth_to_space(maps: Float[Array, "B y x F"]) -> Float[Array, "B Y X D"]:
    """Doubles the resolution: the features of a cell become those of four cells.

    After a linear layer this is the same as a transposed convolution of 2x2 cells with
    stride 2, but the gradient of XLA's convolution is ten times as slow on CPUs.
    """
    B, rows, columns, D = maps.shape
    maps = maps.reshape(B, rows, columns, 2, 2, D // 4).transpose(0, 1, 3, 2, 4, 5)
    return maps.reshape(B, 2 * rows, 2 * columns, D // 4)


def resize(
    maps: Float[Array, "B y x D"], size: Sequence[int]
) -> Float[Array, "B h w D"]:
    """Resizes maps by bilinear interpolation between centres of cells, not antialiased.

    The result is that of `jax.image.resize`, which jax2onnx does not support for a
    variable number of images.
    """
    rows, columns = size
    if maps.shape[1] != rows:
        down = _weights(maps.shape[1], rows)
        maps = jnp.einsum("hy,byxd->bhxd", down, maps, precision="highest")
    if maps.shape[2] != columns:
        across = _weights(maps.shape[2], columns)
        maps = jnp.einsum("wx,bhxd->bhwd", across, maps, precision="highest")
    return maps


def _weights(cells: int, length: int) -> Float[np.ndarray, "length cells"]:
    """Returns the weights of the old cells of an axis in each new cell."""
    at = ((np.arange(length) + 0.5) * (cells / length) - 0.5).clip(0, cells - 1)
    distance = np.abs(at[:, None] - np.arange(cells))
    return np.maximum(1 - distance, 0).astype(np.float32)
