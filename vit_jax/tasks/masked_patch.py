"""Masked patch prediction (ViT, arXiv:2010.11929, section 4.6 and appendix B.1.2).

Half of the patch embeddings are corrupted: most become a learned mask token, some the
embedding of another patch, some stay. The colours of the corrupted patches are
predicted from their representations. No code was published; docs/decisions.md records
how this file settles what the paper leaves open. Letters: B images, Y by X pixels, C
channels, N patches, S cells of a patch, D width, L colour classes, P side of a patch.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from vit_jax.config.fields import key
from vit_jax.data.config import DataConfig
from vit_jax.data.transforms import device as device_transforms
from vit_jax.errors import UserError
from vit_jax.models import Model
from vit_jax.models.layers import Dense
from vit_jax.tasks.masking import MaskedImageTask, mean_over, patchify, ranks
from vit_jax.tasks.task import TaskConfig

_LEVELS = 8  # Levels per channel: 3 bits.
NUM_COLORS = _LEVELS**3


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedPatchConfig(TaskConfig):
    """Masked patch prediction: predicts the colours of corrupted patches."""

    has_pictures: ClassVar[bool] = True
    needs_all_patches: ClassVar[bool] = True

    name: str = key("masked_patch", "Task to train.")
    mask_ratio: float = key(
        0.5, "Fraction of the patch embeddings that is corrupted.", above=0, below=1
    )
    mask_share: float = key(
        0.8,
        "Fraction of the corrupted embeddings that become the mask token.",
        at_most=1,
    )
    swap_share: float = key(
        0.1,
        "Fraction of the corrupted embeddings that become the embedding of another "
        "patch; the rest stay as they are.",
        at_most=1,
    )
    target: str = key(
        "mean_color",
        'Target of a patch: "mean_color", its mean colour as one of 512 classes; '
        '"colors_4x4", one of 512 classes for each of 4x4 cells; or "pixels", the '
        "pixels, with a squared error.",
        choices=("mean_color", "colors_4x4", "pixels"),
    )

    def __post_init__(self):
        if self.mask_share + self.swap_share > 1:
            raise UserError(
                f"task.mask_share={self.mask_share} and task.swap_share="
                f"{self.swap_share} are more than all patches: lower one of them"
            )

    def build(self, model, data, run, saved=None) -> "MaskedPatch":
        return MaskedPatch(self, model, data)


class MaskedPatch(MaskedImageTask):
    """The task of masked patches; parameters: "network", "mask_token" and "decoder".

    If targets are colours, `extra` holds how often each colour was seen, for the
    accuracy of always predicting the most frequent colour.

    Raises:
      UserError: no or all patches are corrupted, or the target does not suit the
        channels or the patch size.
    """

    def __init__(self, config: MaskedPatchConfig, model: Model, data: DataConfig):
        super().__init__("masked_patch", model, data)
        self.config = config
        self._num_corrupted = round(self.num_patches * config.mask_ratio)
        if not 0 < self._num_corrupted < self.num_patches:
            raise UserError(
                f"task.mask_ratio={config.mask_ratio} corrupts {self._num_corrupted} of "
                f"{self.num_patches} patches: choose one that corrupts some, but not all"
            )
        self._in_colors = config.target != "pixels"
        # A run that starts from another one continues its counts.
        self.statistics = ("color_counts",) if self._in_colors else ()
        if self._in_colors and data.channels != 3:
            raise UserError(
                f"task.target={config.target!r} needs colours, but data.channels="
                f'{data.channels}: set task.target to "pixels"'
            )
        cells = 4 if config.target == "colors_4x4" else 1
        if model.config.patch_size % cells:
            raise UserError(
                f"task.target={config.target!r} needs patches whose side is a multiple "
                f"of 4, not {model.config.patch_size}: choose another model.variant or target"
            )
        self._cell = model.config.patch_size // cells
        size = model.config.patch_size**2 * data.channels
        outputs = cells**2 * NUM_COLORS if self._in_colors else size
        self._decoder = Dense(outputs, kernel_init=nn.initializers.zeros)

    def draw(self, index, rng):
        key = jax.random.fold_in(rng, 0x636F7272)
        numbers = device_transforms.example_uniform(index, key, 3 * self.num_patches)
        order, lot, source = jnp.split(numbers, 3, axis=1)
        source = jnp.floor(source * self.num_patches).astype(jnp.int32)
        return {"order": order, "lot": lot, "source": source}

    def init(self, rng):
        network_key, token_key, decoder_key = jax.random.split(rng, 3)
        width = self.model.options["width"]
        token = nn.initializers.normal(0.02)(token_key, (1, 1, width))
        decoder = self._decoder.init(decoder_key, jnp.zeros((1, width)))["params"]
        network = self.model.init(network_key)
        params = {"network": network, "mask_token": token, "decoder": decoder}
        extra = {"color_counts": jnp.zeros(NUM_COLORS)} if self._in_colors else None
        return params, extra

    def chosen(self, batch: dict) -> Bool[Array, "B N"]:
        """Returns which patches are predicted, including those that stay unchanged."""
        return ranks(batch["order"]) < self._num_corrupted

    def corrupt(
        self, patches: Float[Array, "B N D"], token: Float[Array, "1 1 D"], batch: dict
    ) -> Float[Array, "B N D"]:
        """Corrupts a part of the patch embeddings.

        Args:
          patches: embeddings without positions.
          token: mask token.
          batch: random numbers of `draw`: order (B, N), whose lowest numbers choose the
            patches; lot (B, N) in [0, 1), which decides between masking, swapping and
            keeping; source (B, N), index of the patch that replaces a swapped one.
        """
        config, chosen, lot = self.config, self.chosen(batch), batch["lot"]
        masked = chosen & (lot < config.mask_share)
        swapped = chosen & ~masked & (lot < config.mask_share + config.swap_share)
        others = jnp.take_along_axis(patches, batch["source"][..., None], axis=1)
        patches = jnp.where(swapped[..., None], others, patches)
        return jnp.where(masked[..., None], token.astype(patches.dtype), patches)

    def predict(self, params, batch, *, train=False, key=None):
        x = self.model.encode(
            params["network"],
            batch["image"].astype(self.model.options["dtype"]),
            train=train,
            key=key,
            edit_patches=lambda x: self.corrupt(x, params["mask_token"], batch),
        )
        x = x[:, self.model.num_prefix_tokens :].astype(jnp.float32)
        with self.model.config.matmul_precision():
            predicted = self._decoder.apply({"params": params["decoder"]}, x)
        return predicted, self.chosen(batch)

    def loss(self, params, extra, batch, rng):
        loss, (metrics, stats) = super().loss(params, extra, batch, rng)
        if self._in_colors:
            targets = self.colors(batch["image"])
            counts = jnp.zeros(NUM_COLORS).at[targets.reshape(-1)].add(1)
            stats = {"color_share": counts / targets.size}
        return loss, (metrics, stats)

    def update(self, extra, params, stats, step):
        if not self._in_colors:
            return extra
        return {"color_counts": extra["color_counts"] + stats["color_share"]}

    def metrics(self, extra, batch, predicted, mask):
        """Returns the loss per image, and accuracies if the targets are colours."""

        def over_chosen(values):
            """Averages (B, N) or (B, N, S) over the chosen patches."""
            return mean_over(values.reshape(*mask.shape, -1).mean(-1), mask)

        if not self._in_colors:
            images = batch["image"].astype(jnp.float32)
            targets = patchify(images, self.model.config.patch_size)
            return {"loss": over_chosen(jnp.square(predicted - targets))}
        targets = self.colors(batch["image"])
        logits = predicted.reshape(*targets.shape, NUM_COLORS)
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, targets)
        commonest = extra["color_counts"].argmax()
        neighbors = self.colors_of_neighbors(batch["image"], mask)
        return {
            "loss": over_chosen(losses),
            "color_accuracy": over_chosen(logits.argmax(-1) == targets),
            "commonest_accuracy": over_chosen(targets == commonest),
            "neighbors_accuracy": over_chosen(targets == neighbors[..., None]),
        }

    def colors(self, images: Float[Array, "B Y X C"]) -> Int[Array, "B N S"]:
        """Returns the colour classes of the cells of each patch, row by row.

        The class is R + 8 G + 64 B of the mean colour, in 8 equal levels per channel; a
        mean on a boundary gets the upper level. Integer sums make it exact.

        Args:
          images: normalised images.
        """
        sums = self._sums(images, self._cell)
        classes = _color_classes(sums, 255 * self._cell**2)
        across = self.model.grid[1] * (self.model.config.patch_size // self._cell)
        classes = classes.reshape(len(sums), -1, across, 1)
        return patchify(classes, self.model.config.patch_size // self._cell)

    def _sums(self, images: Float[Array, "B Y X C"], side: int) -> Int[Array, "B M 3"]:
        """Returns the sums of the pixels, 0 to 255, of each square of an image."""
        pixels = jnp.round(255 * self.pixels(images)).astype(jnp.int32)
        return patchify(pixels, side).reshape(len(pixels), -1, side**2, 3).sum(2)

    def colors_of_neighbors(
        self, images: Float[Array, "B Y X C"], chosen: Bool[Array, "B N"]
    ) -> Int[Array, "B N"]:
        """Returns the class of the mean colour of the neighbours that are not corrupted.

        A patch has up to eight neighbours; if all are corrupted, the mean is that of
        all uncorrupted patches of the image.
        """
        (rows, columns), side = self.model.grid, self.model.config.patch_size
        shown = ~chosen[..., None]
        colors = jnp.where(shown, self._sums(images, side), 0)
        # The fourth channel is the largest possible sum.
        full = 255 * side**2 * shown
        x = jnp.concatenate([colors, full], axis=-1).reshape(-1, rows, columns, 4)
        window = (1, 3, 3, 1)
        around = jax.lax.reduce_window(x, 0, jax.lax.add, window, (1,) * 4, "SAME")
        everywhere = x.sum((1, 2), keepdims=True)
        x = jnp.where(around[..., 3:] > 0, around, everywhere).reshape(*chosen.shape, 4)
        return _color_classes(x[..., :3], x[..., 3:])

    def pixels_of(self, predicted, images):
        """Returns normalised pixels: the likeliest colour of each cell."""
        if not self._in_colors:
            return predicted
        B, N, _ = predicted.shape
        cells = self.model.config.patch_size // self._cell
        classes = predicted.reshape(B, N, cells, cells, NUM_COLORS).argmax(-1)
        levels = jnp.stack([classes // _LEVELS**i % _LEVELS for i in range(3)], axis=-1)
        pixels = ((levels + 0.5) / _LEVELS).repeat(self._cell, 2).repeat(self._cell, 3)
        pixels = pixels.reshape(B, N * self.model.config.patch_size, -1, 3)
        pixels = device_transforms.normalize(
            255 * pixels, self.data.mean, self.data.std
        )
        return pixels.reshape(B, N, -1)


def _color_classes(total: Array, full: Array | int) -> Int[Array, "..."]:
    """Returns the classes of colour sums (..., 3), whose largest value is `full`."""
    levels = jnp.minimum(_LEVELS * total // full, _LEVELS - 1).astype(jnp.int32)
    return levels[..., 0] + _LEVELS * levels[..., 1] + _LEVELS**2 * levels[..., 2]
