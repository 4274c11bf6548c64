"""Heads that classify every pixel, on the features of some layers of a network.

Linear: a BatchNorm and a linear layer of each patch, as the segmentation probes of DINOv2
(arXiv:2304.07193, section 7.4). Pyramid: maps of several scales, which a network has or
which are made of its joined layers, as ViTDet makes them of the last one (arXiv:2203.16527,
section 3). They are added up as in Panoptic FPN (arXiv:1901.02446, section 3.1), without its
convolutions between the steps of enlarging.

Letters: B images, Y by X pixels, C channels, y by x cells of a grid, D features, L classes.
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
from vit_jax.models.layers import LayerNorm
from vit_jax.models.model import Model, Params
from vit_jax.models.network import STATE
from vit_jax.models.patches import PatchSequences

Map = Float[Array, "B y x D"]

_HEAD_INIT = nn.initializers.normal(0.01)


class LinearHead(nn.Module):
    """A BatchNorm and a linear layer; maps of other grids are resized to the largest."""

    num_classes: int
    width: int  # Not read.
    dtype: str

    @nn.compact
    def __call__(
        self, maps: Sequence[Map], *, train: bool = False
    ) -> Float[Array, "B y x L"]:
        """Returns the logits of the cells of the largest grid."""
        grid = max(features.shape[1:3] for features in maps)
        x = jnp.concatenate([resize(features, grid) for features in maps], -1)
        # As torch.nn.BatchNorm2d.
        norm = nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5)
        x = norm(x.astype(jnp.float32)).astype(self.dtype)
        return nn.Dense(
            self.num_classes, dtype=self.dtype, kernel_init=_HEAD_INIT, name="head"
        )(x)


class PyramidHead(nn.Module):
    """Maps of several scales, each convolved to `width` features, and their sum.

    Maps of one grid are joined and become four: four times and twice as fine by transposed
    convolutions (see `depth_to_space`), as they are, and half as fine by a maximum. Maps of
    several grids, such as a Swin Transformer's, are used as they are.
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
        return nn.Dense(
            self.num_classes, dtype=self.dtype, kernel_init=_HEAD_INIT, name="head"
        )(gelu_erf(total))

    def _scales(self, x: Map) -> list[Float[Array, "B _ _ _"]]:
        half, quarter = x.shape[-1] // 2, x.shape[-1] // 4
        twice = self._enlarge(x, half)
        fine = gelu_erf(self._norm(self._enlarge(x, half)))
        coarse = nn.max_pool(x, window_shape=(2, 2), strides=(2, 2), padding="SAME")
        return [self._enlarge(fine, quarter), twice, x, coarse]

    def _enlarge(self, x, width):
        return depth_to_space(nn.Dense(4 * width, dtype=self.dtype)(x))

    def _lateral(self, x):
        x = self._norm(nn.Conv(self.width, (1, 1), use_bias=False, dtype=self.dtype)(x))
        return self._norm(
            nn.Conv(self.width, (3, 3), use_bias=False, dtype=self.dtype)(x)
        )

    def _norm(self, x):
        return LayerNorm(dtype=self.dtype)(x)


# Names of the parameters and of the running means of a head in a task.
NAMES = PARAMS, MEANS = "segmenter", "segmenter_means"
HEADS = {"linear": LinearHead, "pyramid": PyramidHead}


@dataclasses.dataclass(frozen=True)
class Segmenter:
    """A network and a head, without their parameters.

    Attributes:
      model: the network.
      head: one of `HEADS`.
      layers: the layers whose features the head gets, see `Model.layer_features`.

    Raises:
      UserError: the network has no such layers, or no features of patches.
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
        """Returns the head's parameters and its running means, {} if it has none."""
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
        """Classifies the cells of a grid, the patches or finer ones.

        Args:
          network: parameters of `model`.
          head, means: of the head, see `init`.
          images: normalised images, or sequences of the patches of one image each for a
            linear head, whose logits are (B, N, 1, L).

        Returns:
          Logits in float32; `resize` makes them those of pixels.

        Raises:
          UserError: the network or the head takes no sequences.
        """
        maps, variables = self._maps(network, images), {"params": head, STATE: means}
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
          key: of the network's dropout; None: it works as in an evaluation.
        """
        maps = self._maps(network, images, key)
        variables = {"params": head, STATE: means}
        logits, changed = self.head.apply(variables, maps, train=True, mutable=[STATE])
        return logits.astype(jnp.float32), changed.get(STATE, {})

    def _maps(self, network, images, key=None) -> tuple[Map, ...]:
        images = images.astype(self.model.options["dtype"])
        if not isinstance(images, PatchSequences):
            return self.model.layer_features(network, images, self.layers, key=key)
        check_sequences(next(n for n, k in HEADS.items() if isinstance(self.head, k)))
        # A linear head looks at no neighbours: patches may stand in one column.
        maps = self.model.layer_features(
            network, images, self.layers, reshape=False, key=key
        )
        return tuple(features[:, :, None] for features in maps)


def check_sequences(head: str) -> None:
    """Raises UserError if a head, one of `HEADS`, takes no images of any size."""
    if head != "linear":
        raise UserError(
            f"task.head={head!r} joins neighbours in a grid of one size, which images of any "
            "size do not have: set max_tokens to 0, or train task.head='linear'"
        )


def build(
    model: Model, head: str, layers: Sequence[int], width: int, num_classes: int
) -> Segmenter:
    """Builds a segmenter.

    Args:
      model: network.
      head: one of `HEADS`.
      layers: layers whose features the head gets.
      width: features of a pyramid.
      num_classes: number of classes.
    """
    dtype = model.options["dtype"]
    return Segmenter(model, HEADS[head](num_classes, width, dtype), tuple(layers))


def depth_to_space(maps: Float[Array, "B y x F"]) -> Float[Array, "B Y X D"]:
    """Returns a map twice as fine: the features of a cell are those of four, row by row.

    After a linear layer it is a transposed convolution of 2x2 cells with stride 2, whose
    gradient XLA computes ten times slower on CPUs.
    """
    B, rows, columns, D = maps.shape
    maps = maps.reshape(B, rows, columns, 2, 2, D // 4).transpose(0, 1, 3, 2, 4, 5)
    return maps.reshape(B, 2 * rows, 2 * columns, D // 4)


def resize(
    maps: Float[Array, "B y x D"], size: Sequence[int]
) -> Float[Array, "B h w D"]:
    """Resizes maps by bilinear interpolation between the centres of cells, without antialias.

    As `jax.image.resize`, which jax2onnx cannot write for any number of images.
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
    """Returns the weights of the cells of an axis in each of the new ones."""
    at = ((np.arange(length) + 0.5) * (cells / length) - 0.5).clip(0, cells - 1)
    distance = np.abs(at[:, None] - np.arange(cells))
    return np.maximum(1 - distance, 0).astype(np.float32)
