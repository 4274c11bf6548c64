"""The explorer's models, and the outputs that they computed for the last images.

Attention is kept and sent as one byte per pair of tokens, see `AttentionRows`.
Letters: N tokens, E of them extra and P patches or blocks, L layers, M maps per layer.
"""

import collections
import dataclasses
import hashlib
import io
import threading
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Array, Float, Float32, UInt8
from PIL import Image

from vit_jax.analysis.attention import rollout_step
from vit_jax.analysis.loaded_model import LoadedModel, check_finite
from vit_jax.data import decode
from vit_jax.evaluators import prediction
from vit_jax.printing import address
from vit_jax.tools.explorer.images import (
    MAX_BYTES,
    MAX_PIXELS,
    Folder,
    Refused,
    check,
    damaged,
)
from vit_jax.weights.pretrained import Preprocess, Pretrained, crop_box

BUDGET = 1 << 30  # Bytes of attention that are kept, besides that of the last image.
LEVELS = 255
TOPK = 5


@dataclasses.dataclass(frozen=True)
class AttentionRows:
    """Attention from every token of an image, one byte per pair of tokens.

    For each query, layer and map (the heads, then the rollout) there are the attention
    to each extra token and the largest attention to a patch, float32, and the attention
    to each patch as an integer, 255 being that largest one. Extra tokens are separate
    because they may draw most of the attention, which would leave few levels for the
    patches. A file of limited size may have fewer levels, or blocks of patches instead
    of patches.

    Attributes:
      scales: attention to the extra tokens, then the largest to a patch.
      levels: attention to the patches, in `steps` of the largest.
      steps: the level that stands for the largest.
      pool: side of the blocks, in patches, whose mean each level stands for.
    """

    scales: Float32[np.ndarray, "N L M E1"]
    levels: UInt8[np.ndarray, "N L M P"]
    steps: int = LEVELS
    pool: int = 1

    @classmethod
    def zeros(cls, tokens: int, extra: int, layers: int, maps: int) -> "AttentionRows":
        """Returns rows of zeros, to be filled by `set_layer`."""
        return cls(
            np.zeros((tokens, layers, maps, extra + 1), np.float32),
            np.zeros((tokens, layers, maps, tokens - extra), np.uint8),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.scales.nbytes + self.levels.nbytes

    def set_layer(self, layer: int, maps: Float[np.ndarray, "M N N"]) -> None:
        """Sets the attention of one layer.

        Args:
          layer: its number.
          maps: from each query (the second axis) to each token (the last).
        """
        extra = self.scales.shape[-1] - 1
        rows = np.swapaxes(maps, 0, 1)
        patches = rows[..., extra:]
        peak = patches.max(axis=-1, keepdims=True)
        self.scales[:, layer, :, :extra] = rows[..., :extra]
        self.scales[:, layer, :, extra:] = peak
        # A row of zeros is divided by 1, since 0 / 0 is not a number.
        share = patches / np.where(peak > 0, peak, 1)
        self.levels[:, layer] = np.rint(share * self.steps)

    def to_bytes(self, query: int) -> bytes:
        """Returns the attention from one query: all its scales, then all its levels."""
        scales = self.scales[query].astype("<f4", copy=False)
        return scales.tobytes() + self.levels[query].tobytes()

    def requantize(self, steps: int) -> "AttentionRows":
        """Returns the same attention in fewer steps, which compress better."""
        table = np.rint(np.arange(self.steps + 1) * (steps / self.steps))
        levels = table.astype(np.uint8)[self.levels]
        return AttentionRows(self.scales, levels, steps, self.pool)

    def pool_patches(self, grid: tuple[int, int], side: int) -> "AttentionRows":
        """Returns the means of blocks of patches, scales rounded to 16 bits.

        Blocks of side 2 take a quarter of the bytes. The rounded scales take half, as
        zeros compress to nothing.

        Args:
          grid: patches down and across; none are pooled yet.
          side: of a block, in patches. The last blocks may be smaller.
        """
        N, L, M, _ = self.levels.shape
        starts = [np.arange(0, count, side) for count in grid]
        high, wide = (
            np.minimum(side, n - s) for n, s in zip(grid, starts, strict=True)
        )
        sizes = np.outer(high, wide).ravel().astype(np.float32)
        scales = self.scales.copy()
        levels = np.empty((N, L, M, len(sizes)), np.uint8)
        for layer in range(L):
            values = self.levels[:, layer].astype(np.float32).reshape(N, M, *grid)
            sums = np.add.reduceat(values, starts[0], axis=2)
            sums = np.add.reduceat(sums, starts[1], axis=3)
            means = sums.reshape(N, M, -1) / sizes
            peak = means.max(axis=-1, keepdims=True)
            scales[:, layer, :, -1:] *= peak / self.steps
            levels[:, layer] = np.rint(means / np.where(peak > 0, peak, 1) * LEVELS)
        # Rounded to the nearest number whose lower half is zeros.
        bits = (scales.view(np.uint32) + 0x8000) & np.uint32(0xFFFF0000)
        return AttentionRows(bits.view(np.float32), levels, LEVELS, side)

    def sample_maps(self, maps: int) -> "AttentionRows":
        """Returns random maps of any layers, as if they were of one layer.

        Args:
          maps: how many; all if there are fewer.
        """
        N, L, M, _ = self.levels.shape
        chosen = np.random.default_rng(0).permutation(L * M)[:maps]
        scales, levels = (
            array.reshape(N, 1, L * M, -1)[:, :, chosen]
            for array in (self.scales, self.levels)
        )
        return AttentionRows(scales, levels, self.steps, self.pool)


@dataclasses.dataclass(frozen=True)
class ModelOutput:
    """What a model computed for an image.

    Attributes:
      classes: the most probable ones, best first; none without a classifier.
      box: top, left, bottom and right of the model's input, as fractions of the image.
      picture: the model's input, a PNG file.
      rows: attention from each token.
    """

    classes: tuple[prediction.Prediction, ...]
    box: tuple[float, float, float, float]
    picture: bytes
    rows: AttentionRows

    def summary(self) -> dict:
        """Returns what the page shows of it besides pictures, for JSON."""
        return {
            "classes": [
                {"name": found.name, "probability": found.probability}
                for found in self.classes
            ],
            "box": self.box,
            "steps": self.rows.steps,
            "pool": self.rows.pool,
        }


class ExploredModel:
    """A checkpoint whose attention and classes are computed in one forward pass.

    Args:
      pretrained: what `weights.open_pretrained` returns.
      preprocess: how images are prepared for it.
      class_names: in label order; the checkpoint's if empty.

    Raises:
      UserError: it has no attention, or something does not fit.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        *,
        preprocess: Preprocess,
        class_names: tuple[str, ...] = (),
    ):
        # Two folders, because weight files often have the same name.
        self.name = "/".join(address(pretrained.source).strip("/").split("/")[-2:])
        self._loaded = LoadedModel.from_pretrained(self.name, pretrained, preprocess)
        self._model = self._loaded.model
        # Computes no layer yet, but refuses a network without attention.
        self._layers(self._black_image())
        self._names, self._sigmoid = (), pretrained.loss == "sigmoid"
        if pretrained.options["num_classes"]:
            self._names = prediction.names_of(pretrained, class_names)
        names = {"class token": "CLS", "distillation token": "DIST"}
        # In front of the patches.
        self.extra = [
            names.get(name, name.replace("register ", "REG"))
            for name in self._model.prefix_tokens
        ]

    def describe(self) -> dict:
        """Returns what the page needs to know about the model, for JSON."""
        options = self._model.options
        return {
            "name": self.name,
            "variant": options["variant"],
            "grid": self._model.grid,
            "size": self._model.image_shape[:2],
            "layers": options["depth"],
            "heads": options["num_heads"],
            "extra": self.extra,
        }

    def run(self, data: bytes, name: str) -> ModelOutput:
        """Computes attention and classes of an image.

        Args:
          data: content of an image file.
          name: of the image, for messages.

        Raises:
          Refused: it cannot be read.
          UserError: the network's output is not finite.
        """
        channels = self._model.image_shape[-1]
        try:
            whole = decode.decode(data, channels)
            pixels = self._loaded.prepare(whole)
        except decode.DamagedImage as error:
            raise damaged(error, name) from error
        rows, tokens = self._attention(pixels, name)
        return ModelOutput(
            classes=self._classes(tokens, name),
            box=crop_box(whole.shape[:2], self._loaded.preprocess),
            picture=_to_png(pixels),
            rows=rows,
        )

    def warm_up(self) -> None:
        """Compiles what `run` computes."""
        _, tokens = self._attention(self._black_image(), "a black image")
        self._classes(tokens, "a black image")

    def _attention(
        self, pixels: UInt8[np.ndarray, "h w c"], name: str
    ) -> tuple[AttentionRows, Float[Array, "1 N D"]]:
        """Returns attention from all tokens, and the tokens after the last layer."""
        options, extra = self._model.options, len(self.extra)
        count = extra + self._model.grid[0] * self._model.grid[1]
        rows = AttentionRows.zeros(
            count, extra, options["depth"], options["num_heads"] + 1
        )
        layers, rollout = self._layers(pixels), None
        for depth in range(options["depth"]):
            maps, tokens = next(layers)
            rollout = rollout_step(rollout, maps)
            check_finite(rollout, f"{self.name}'s output for {name}")
            rows.set_layer(depth, np.concatenate([maps[0], rollout]))
            del maps  # Frees this layer's attention before the next is computed.
        return rows, tokens

    def _classes(
        self, tokens: Float[Array, "1 N D"], name: str
    ) -> tuple[prediction.Prediction, ...]:
        if not self._names:
            return ()
        outputs = self._model.classify_tokens(self._loaded.params, tokens)
        logits = np.asarray(outputs["logits"])[0]
        check_finite(logits, f"{self.name}'s output for {name}")
        return prediction.rank(logits, self._names, TOPK, sigmoid=self._sigmoid)

    def _layers(
        self, pixels: UInt8[np.ndarray, "h w c"]
    ) -> Iterator[tuple[Array, Array]]:
        """Yields attention and tokens of each layer, computed on demand."""
        loaded = self._loaded
        return loaded.model.intermediates(loaded.params, loaded.normalize(pixels[None]))

    def _black_image(self) -> UInt8[np.ndarray, "h w c"]:
        return np.zeros(self._model.image_shape, np.uint8)


def _to_png(pixels: UInt8[np.ndarray, "h w c"]) -> bytes:
    stream = io.BytesIO()
    grey = pixels.shape[-1] == 1
    Image.fromarray(pixels[..., 0] if grey else pixels).save(stream, "PNG")
    return stream.getvalue()


class Session:
    """One or two models, and their outputs for the last images.

    Its methods may be called by several threads at once.

    Args:
      models: to run.
      folder: of images to choose from, if any.
      budget: bytes of attention that are kept.
    """

    def __init__(
        self,
        models: Sequence[ExploredModel],
        folder: Folder | None = None,
        budget: int = BUDGET,
    ):
        self.folder = folder
        self._models, self._budget = tuple(models), budget
        self._outputs: collections.OrderedDict[str, tuple[ModelOutput, ...]]
        self._outputs = collections.OrderedDict()
        self._compute_lock, self._outputs_lock = threading.Lock(), threading.Lock()

    def about(self) -> dict:
        """Returns models, limits and names of images, for JSON."""
        names, more = self.folder.names() if self.folder else ([], False)
        return {
            "models": [model.describe() for model in self._models],
            "limits": {"bytes": MAX_BYTES, "pixels": MAX_PIXELS},
            "images": names,
            "more": more,
        }

    def run(self, data: bytes, name: str) -> dict:
        """Runs all models on an image, unless their outputs are kept.

        Args:
          data: content of an image file.
          name: of the image, for messages.

        Returns:
          The key for `output`, and each model's summary, for JSON.

        Raises:
          Refused: it is too large or cannot be read.
        """
        check(data, name)
        key = hashlib.sha256(data).hexdigest()[:32]
        with self._compute_lock:  # Two images at the same time would only be slower.
            outputs = self._find(key)
            if outputs is None:
                outputs = tuple(model.run(data, name) for model in self._models)
                self._keep(key, outputs)
        return {
            "key": key,
            "name": name,
            "models": [output.summary() for output in outputs],
        }

    def output(self, key: str, model: int) -> ModelOutput:
        """Returns what a model computed for an image.

        Raises:
          Refused: it is not kept any more, or there is no such model.
        """
        outputs = self._find(key)
        if outputs is None:
            raise Refused(
                410, "This image is no longer kept by the server: open it again."
            )
        if not 0 <= model < len(outputs):
            raise Refused(404, f"There is no model {model}.")
        return outputs[model]

    def _find(self, key: str) -> tuple[ModelOutput, ...] | None:
        with self._outputs_lock:
            if key in self._outputs:
                self._outputs.move_to_end(key)
            return self._outputs.get(key)

    def _keep(self, key: str, outputs: tuple[ModelOutput, ...]) -> None:
        with self._outputs_lock:
            self._outputs[key] = outputs
            while len(self._outputs) > 1 and self._nbytes() > self._budget:
                self._outputs.popitem(last=False)

    def _nbytes(self) -> int:
        return sum(
            output.rows.nbytes
            for outputs in self._outputs.values()
            for output in outputs
        )
