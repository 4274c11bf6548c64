"""Masked patch prediction (ViT, arXiv:2010.11929, section 4.6 and appendix B.1.2).

Half of the patch embeddings are corrupted: most become a learned mask token, some the
embedding of another patch, some stay. The colours of those patches are predicted from
their representations. No code of it was published; what the paper leaves open is decided
here and recorded in docs/decisions.md. Letters: B images, Y by X pixels, C channels,
N patches, S cells of a patch, D width, L colour classes, P side of a patch.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from vit_jax.config.fields import key
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
from vit_jax.data.transforms import device as transforms
from vit_jax.errors import UserError
from vit_jax.models import Model
from vit_jax.tasks.masking import MaskedImageTask, mean_over, patchify, ranks
from vit_jax.tasks.task import TaskConfig

_LEVELS = 8  # Of a channel: 3 bits.
NUM_COLORS = _LEVELS**3


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedPatchConfig(TaskConfig):
    """Colours of corrupted patches (masked patch prediction)."""

    has_pictures: ClassVar[bool] = True

    name: str = key("masked_patch", "What is learnt.")
    mask_ratio: float = key(
        0.5, "Part of the patch embeddings that is corrupted.", above=0, below=1
    )
    mask_share: float = key(
        0.8, "Part of these that become the mask token ...", at_most=1
    )
    swap_share: float = key(
        0.1, "... and another patch's embedding; the rest stay.", at_most=1
    )
    target: str = key(
        "mean_color",
        'What is predicted of a patch: "mean_color", one of 512; "colors_4x4", the same '
        'of 4x4 cells; "pixels", by square error.',
        choices=("mean_color", "colors_4x4", "pixels"),
    )

    def __post_init__(self):
        if self.mask_share + self.swap_share > 1:
            raise UserError(
                f"task.mask_share={self.mask_share} and task.swap_share="
                f"{self.swap_share} are more than all patches: lower one of them"
            )

    def build(
        self,
        model: Model,
        data: DataConfig,
        run: RunLength,
        saved: dict | None = None,
    ) -> "MaskedPatch":
        return MaskedPatch(self, model, data)


class MaskedPatch(MaskedImageTask):
    """See `task.Task`; parameters are "network", "mask_token" and "decoder".

    With colours as targets the state beside them counts how often each was seen, for the
    accuracy of always answering the commonest.

    Args:
      config: `config.task`.
      model: encoder.
      data: `config.data`.

    Raises:
      UserError: no or all patches are corrupted, or the images have no such colours.
    """

    def __init__(self, config: MaskedPatchConfig, model: Model, data: DataConfig):
        super().__init__("masked_patch", model, data)
        self.config = config
        self._num_corrupted = round(self.num_patches * config.mask_ratio)
        if not 0 < self._num_corrupted < self.num_patches:
            raise UserError(
                f"task.mask_ratio={config.mask_ratio} corrupts {self._num_corrupted} of "
                f"{self.num_patches} patches: choose one by which some are and some stay"
            )
        self._in_colors = config.target != "pixels"
        if self._in_colors and data.channels != 3:
            raise UserError(
                f"task.target={config.target!r} needs colours, but data.channels="
                f'{data.channels}: set task.target to "pixels"'
            )
        cells = 4 if config.target == "colors_4x4" else 1
        if model.patch_size % cells:
            raise UserError(
                f"task.target={config.target!r} needs patches whose side is a multiple "
                f"of 4, not {model.patch_size}: take another model.variant or target"
            )
        self._cell = model.patch_size // cells
        size = model.patch_size**2 * data.channels
        outputs = cells**2 * NUM_COLORS if self._in_colors else size
        self._decoder = nn.Dense(outputs, kernel_init=nn.initializers.zeros)

    def draw(self, index, rng):
        key = jax.random.fold_in(rng, 0x636F7272)
        numbers = transforms.example_uniform(index, key, 3 * self.num_patches)
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
        """Returns which patches are corrupted, those that stay as they are included."""
        return ranks(batch["order"]) < self._num_corrupted

    def corrupt(
        self, patches: Float[Array, "B N D"], token: Float[Array, "1 1 D"], batch: dict
    ) -> Float[Array, "B N D"]:
        """Returns patch embeddings of which some are corrupted.

        Args:
          patches: embeddings without positions.
          token: of what is masked.
          batch: of `draw`: order (B, N), by which patches are chosen, the lowest first;
            lot (B, N), what becomes of them; source (B, N), the patch of the same
            image that another is replaced by, which may be itself.
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
        """See `MaskedImageTask`; for colours also accuracies."""

        def over_chosen(values):
            """Averages (B, N) or (B, N, S) over what was chosen."""
            return mean_over(values.reshape(*mask.shape, -1).mean(-1), mask)

        if not self._in_colors:
            images = batch["image"].astype(jnp.float32)
            targets = patchify(images, self.model.patch_size)
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

        Class R + 8 G + 64 B, of the mean of the cell in 8 equal steps a channel; a mean
        between two steps is of the upper. Sums of whole numbers, so that it is exact.

        Args:
          images: normalised.
        """
        sums = self._sums(images, self._cell)
        classes = _color_classes(sums, 255 * self._cell**2)
        across = self.model.grid[1] * (self.model.patch_size // self._cell)
        classes = classes.reshape(len(sums), -1, across, 1)
        return patchify(classes, self.model.patch_size // self._cell)

    def _sums(self, images: Float[Array, "B Y X C"], side: int) -> Int[Array, "B M 3"]:
        """Returns the sums of the pixels, 0 to 255, of each square of an image."""
        pixels = jnp.round(255 * self.pixels(images)).astype(jnp.int32)
        return patchify(pixels, side).reshape(len(pixels), -1, side**2, 3).sum(2)

    def colors_of_neighbors(
        self, images: Float[Array, "B Y X C"], chosen: Bool[Array, "B N"]
    ) -> Int[Array, "B N"]:
        """Returns the class of the mean colour of the neighbours that are not corrupted.

        Of the up to eight neighbours of a patch; of all patches where there is none.
        """
        (rows, columns), side = self.model.grid, self.model.patch_size
        shown = ~chosen[..., None]
        colors = jnp.where(shown, self._sums(images, side), 0)
        # The last channel is the largest sum.
        full = 255 * side**2 * shown
        x = jnp.concatenate([colors, full], axis=-1).reshape(-1, rows, columns, 4)
        window = (1, 3, 3, 1)
        around = jax.lax.reduce_window(x, 0, jax.lax.add, window, (1,) * 4, "SAME")
        everywhere = x.sum((1, 2), keepdims=True)
        x = jnp.where(around[..., 3:] > 0, around, everywhere).reshape(*chosen.shape, 4)
        return _color_classes(x[..., :3], x[..., 3:])

    def pixels_of(self, predicted, images):
        """See `MaskedImageTask`; cells have the likeliest of the colours."""
        if not self._in_colors:
            return predicted
        B, N, _ = predicted.shape
        cells = self.model.patch_size // self._cell
        classes = predicted.reshape(B, N, cells, cells, NUM_COLORS).argmax(-1)
        levels = jnp.stack([classes // _LEVELS**i % _LEVELS for i in range(3)], axis=-1)
        pixels = ((levels + 0.5) / _LEVELS).repeat(self._cell, 2).repeat(self._cell, 3)
        pixels = pixels.reshape(B, N * self.model.patch_size, -1, 3)
        pixels = transforms.normalize(255 * pixels, self.data.mean, self.data.std)
        return pixels.reshape(B, N, -1)


def _color_classes(total: Array, full: Array | int) -> Int[Array, "..."]:
    """Returns the classes of sums (..., 3) of colours whose largest is `full`."""
    levels = jnp.minimum(_LEVELS * total // full, _LEVELS - 1).astype(jnp.int32)
    return levels[..., 0] + _LEVELS * levels[..., 1] + _LEVELS**2 * levels[..., 2]
