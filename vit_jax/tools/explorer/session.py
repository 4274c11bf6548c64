"""The explorer's models, and the outputs that they computed for the last images.

Attention is kept as rows.py says. Letters: N tokens, P patches, D width.
"""

import collections
import dataclasses
import functools
import hashlib
import io
import threading
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, UInt8
from PIL import Image

from vit_jax.analysis.attention import relevance, relevance_to_text, rollout_step
from vit_jax.analysis.loaded_model import LoadedModel, check_finite
from vit_jax.analysis.representations import project, to_intensities
from vit_jax.data import decode
from vit_jax.evaluators import prediction
from vit_jax.models import text
from vit_jax.models.network import BlockWindows
from vit_jax.printing import address
from vit_jax.tools.explorer.images import (
    MAX_BYTES,
    MAX_PIXELS,
    Folder,
    Refused,
    check,
    damaged,
)
from vit_jax.tools.explorer.rows import AttentionRows, WindowRows
from vit_jax.weights.pretrained import Preprocess, Pretrained, crop_box
from vit_jax.weights.text_tower import text_tower

BUDGET = 1 << 30  # Bytes of attention that are kept, besides that of the last image.
TOPK = 5
_KEPT_FEATURES = 8  # Images, whose features of patches are kept.


@dataclasses.dataclass(frozen=True)
class ModelOutput:
    """What a model computed for an image.

    Attributes:
      classes: the most probable ones, best first; none without a classifier.
      box: top, left, bottom and right of the model's input, as fractions of the image.
      picture: the model's input, a PNG file.
      rows: attention from each token.
      relevances: of each patch to classes, by label; for a page that is saved.
    """

    classes: tuple[prediction.Prediction, ...]
    box: tuple[float, float, float, float]
    picture: bytes
    rows: AttentionRows | WindowRows
    relevances: Mapping[int, Sequence[float]] = dataclasses.field(default_factory=dict)

    def summary(self) -> dict:
        """Returns what the page shows of it besides pictures, for JSON."""
        return {
            "classes": [
                {
                    "label": found.label,
                    "name": found.name,
                    "probability": found.probability,
                }
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
        if not self._model.has_windows:
            # Computes no layer yet, but refuses a network without attention.
            self._layers(self._black_image())
        self._tower = None
        if (
            text.TEXT in pretrained.task_params
            and not pretrained.options["num_classes"]
        ):
            self._tower = text_tower(pretrained)
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
        """Returns what the page needs to know about the model, for JSON.

        "heads" has a number for each layer, "labels" a name. Layers whose attention stays
        within windows have no "rollout", and no "relevance" of classes. "texts" says
        whether there is relevance to texts, "features" whether patches are compared.
        """
        options, model = self._model.options, self._model
        if model.has_windows:
            blocks = self._window_shapes
            grid = blocks[0].grid
            heads = [block.weights.shape[2] for block in blocks]
            labels = [f"{block.stage + 1}.{block.block + 1}" for block in blocks]
        else:
            grid, heads = model.grid, [options["num_heads"]] * options["depth"]
            labels = [str(i + 1) for i in range(options["depth"])]
        return {
            "name": self.name,
            "variant": options["variant"],
            "grid": grid,
            "size": model.image_shape[:2],
            "labels": labels,
            "heads": heads,
            "rollout": not model.has_windows,
            "relevance": bool(self._names) and not model.has_windows,
            "texts": self._tower is not None and not model.has_windows,
            "features": model.has_patch_features,
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
            exif = bool(self._loaded.preprocess.exif)
            whole = decode.decode(data, channels, exif=exif)
            pixels = self._loaded.prepare(whole)
        except decode.DamagedImage as error:
            raise damaged(error, name) from error
        rows, logits = self._attention(pixels, name)
        return ModelOutput(
            classes=self._classes(logits, name),
            box=crop_box(whole.shape[:2], self._loaded.preprocess),
            picture=_to_png(pixels),
            rows=rows,
        )

    def warm_up(self) -> None:
        """Compiles what `run` computes."""
        self._attention(self._black_image(), "a black image")

    def relevance(
        self, output: ModelOutput, label: int
    ) -> Float32[np.ndarray, " P"] | None:
        """Returns the relevance of each patch to a class, see `attention.relevance`.

        Args:
          output: of an image.
          label: of the class.

        Returns:
          None if the model has no such class, or no relevance.
        """
        if label >= len(self._names) or self._model.has_windows:
            return None
        images = self._input(output)
        labels = jnp.array([label])
        found = relevance(self._model, self._loaded.params, images, labels)
        return np.asarray(found)[0, len(self.extra) :]

    def relevance_to_text(
        self, output: ModelOutput, words: str
    ) -> Float32[np.ndarray, " P"] | None:
        """Returns the relevance of each patch to a text; None without a text tower.

        Args:
          output: of an image.
          words: the text.

        Raises:
          UserError: there is no tokenizer.
        """
        if self._tower is None or self._model.has_windows:
            return None
        images = self._input(output)
        of_network = self._model, self._loaded.params, images
        found = relevance_to_text(*of_network, self._tower, words)
        return np.asarray(found)[0, len(self.extra) :]

    def features(self, output: ModelOutput) -> Float32[np.ndarray, "Y X D"] | None:
        """Returns the features of the patches of an image; None if there are none.

        There is one for each patch of the page's grid; a network that merges patches has
        the same for all that it merged.
        """
        if not self._model.has_patch_features:
            return None
        features = self._loaded.patch_features(self._pixels(output))[0]
        check_finite(features, f"{self.name}'s features")
        rows, columns = (
            np.arange(to) * size // to
            for to, size in zip(
                self.describe()["grid"], features.shape[:2], strict=True
            )
        )
        return features[rows][:, columns]

    def _input(self, output: ModelOutput) -> Float[Array, "1 Y X C"]:
        """Returns what the network saw of an image."""
        return self._loaded.normalize(self._pixels(output))

    def _pixels(self, output: ModelOutput) -> UInt8[np.ndarray, "1 Y X C"]:
        """Returns an image as it was prepared for the network."""
        picture = Image.open(io.BytesIO(output.picture))
        return np.asarray(picture).reshape(1, *self._model.image_shape)

    def _attention(
        self, pixels: UInt8[np.ndarray, "h w c"], name: str
    ) -> tuple[AttentionRows | WindowRows, Float[np.ndarray, " classes"] | None]:
        """Returns attention from all tokens, and logits if there are classes."""
        if self._model.has_windows:
            images = self._loaded.normalize(pixels[None])
            outputs, blocks = self._windows(self._loaded.params, images)
            rows = WindowRows(blocks)
        else:
            rows, tokens = self._rows_of_layers(pixels, name)
            outputs = {}
            if self._names:
                outputs = self._model.classify_tokens(self._loaded.params, tokens)
        if not self._names:
            return rows, None
        logits = np.asarray(outputs["logits"])[0]
        check_finite(logits, f"{self.name}'s output for {name}")
        return rows, logits

    @functools.cached_property
    def _windows(self):
        return jax.jit(self._model.window_attention)

    @functools.cached_property
    def _window_shapes(self) -> list[BlockWindows]:
        images = jax.ShapeDtypeStruct((1, *self._model.image_shape), np.float32)
        return jax.eval_shape(self._windows, self._loaded.params, images)[1]

    def _rows_of_layers(
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
        self, logits: Float[np.ndarray, " classes"] | None, name: str
    ) -> tuple[prediction.Prediction, ...]:
        if logits is None:
            return ()
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
        self.models, self._budget = tuple(models), budget
        self._outputs: collections.OrderedDict[str, tuple[ModelOutput, ...]]
        self._outputs = collections.OrderedDict()
        self._features: collections.OrderedDict[tuple[str, int], np.ndarray]
        self._features = collections.OrderedDict()
        self._compute_lock, self._outputs_lock = threading.Lock(), threading.Lock()

    def about(self) -> dict:
        """Returns models, limits and names of images, for JSON."""
        names, more = self.folder.names() if self.folder else ([], False)
        return {
            "models": [model.describe() for model in self.models],
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
                outputs = tuple(model.run(data, name) for model in self.models)
                self._keep(key, outputs)
        return {
            "key": key,
            "name": name,
            "models": [output.summary() for output in outputs],
        }

    def relevance(self, key: str, model: int, label: int) -> Float32[np.ndarray, " P"]:
        """Returns the relevance of the patches of a kept image to a class.

        Raises:
          Refused: as in `output`, or there is none.
        """
        output = self.output(key, model)
        with self._compute_lock:
            found = self.models[model].relevance(output, label)
        if found is None:
            raise Refused(404, f"Model {model} has no relevance to a class {label}.")
        return found

    def relevance_to_text(
        self, key: str, model: int, words: str
    ) -> Float32[np.ndarray, " P"]:
        """Returns the relevance of the patches of a kept image to a text.

        Raises:
          Refused: as in `output`, or the model has no text tower.
          UserError: it has no tokenizer.
        """
        output = self.output(key, model)
        with self._compute_lock:
            found = self.models[model].relevance_to_text(output, words)
        if found is None:
            raise Refused(404, f"Model {model} has no relevance to texts.")
        return found

    def similarity(
        self, key: str, model: int, origin: str, patch: int
    ) -> Float32[np.ndarray, " P"]:
        """Returns the cosine of the features of each patch and of one of an image.

        Args:
          key: of the image whose patches are compared.
          model: number.
          origin: key of the image that the patch is of, perhaps the same.
          patch: its number in the grid.

        Raises:
          Refused: an image is not kept any more, or there is no such patch.
        """
        one = self._features_of(origin, model)
        if patch >= len(one):
            raise Refused(404, f"There is no patch {patch}.")
        return self._features_of(key, model) @ one[patch]

    def components(self, key: str, model: int) -> bytes:
        """Returns the principal components of patch features as colours, a PNG file.

        Raises:
          Refused: as in `output`, or there are no features.
        """
        flat = self._features_of(key, model)
        grid = self.models[model].describe()["grid"]
        found, _ = project(flat.reshape(1, *grid, -1))
        return _to_png(np.rint(255 * to_intensities(found)[0]).astype(np.uint8))

    def _features_of(self, key: str, model: int) -> Float32[np.ndarray, "P D"]:
        """Returns the features of patches, of length 1, computed once."""
        output = self.output(key, model)
        with self._compute_lock:
            if (key, model) not in self._features:
                found = self.models[model].features(output)
                if found is None:
                    raise Refused(404, f"Model {model} has no features of patches.")
                found = found.reshape(-1, found.shape[-1])
                lengths = np.linalg.norm(found, axis=1, keepdims=True)
                self._features[key, model] = found / np.maximum(lengths, 1e-12)
                while len(self._features) > _KEPT_FEATURES:
                    self._features.popitem(last=False)
            return self._features[key, model]

    def outputs(self, key: str) -> tuple[ModelOutput, ...]:
        """Returns what each model computed for an image.

        Raises:
          Refused: it is not kept any more.
        """
        outputs = self._find(key)
        if outputs is None:
            raise Refused(
                410, "This image is no longer kept by the server: open it again."
            )
        return outputs

    def output(self, key: str, model: int) -> ModelOutput:
        """Returns what a model computed for an image.

        Raises:
          Refused: it is not kept any more, or there is no such model.
        """
        outputs = self.outputs(key)
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
