"""The explorer's models, and their outputs for the most recent images.

Letters: N tokens, P patches, D width; Y, X and C the input's height, width and channels.
"""

import collections
import dataclasses
import functools
import hashlib
import io
import itertools
import math
import threading
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Num, UInt8
from PIL import Image

from vit_jax.analysis.attention import relevance, relevance_to_text, rollout_step
from vit_jax.analysis.loaded_model import LoadedModel, check_finite
from vit_jax.analysis.representations import enlarge, project, to_intensities
from vit_jax.command_line.printing import address
from vit_jax.data import bands, decode, display, masks
from vit_jax.data.config import MAX_MEGAPIXELS
from vit_jax.data.preprocess import Preprocess, warn_of_dark
from vit_jax.errors import UserError
from vit_jax.evaluators import label_maps, prediction
from vit_jax.models import intermediates, text
from vit_jax.models.network import BlockWindows
from vit_jax.tools.explorer.images import (
    MAX_BYTES,
    Folder,
    Refused,
    check,
    damaged,
)
from vit_jax.tools.explorer.rows import AttentionRows, WindowRows
from vit_jax.weights import segmenter
from vit_jax.weights.pretrained import Pretrained
from vit_jax.weights.text_tower import text_tower

BUDGET = 1 << 30  # Bytes of attention to keep; the last image is always kept.
TOPK = 5
_KEPT_FEATURES = 8  # Number of images whose patch features are kept.


@dataclasses.dataclass(frozen=True)
class ModelOutput:
    """Output of a model for an image.

    Attributes:
      classes: most probable classes, best first; empty without a classifier.
      box: top, left, bottom and right of the model's input, as fractions of the image.
      picture: the model's input as a PNG file, see `display.to_display`.
      pixels: the model's input.
      grid: number of patches down and across; of the first stage if patches are merged.
      rows: attention from each token.
      relevances: relevance of each patch, by class label, for a saved page.
      mask: colours of the pixels' classes as a PNG file; b"" without a segmentation
        head. With a mask, `classes` have their fractions of the pixels as
        probabilities.
    """

    classes: tuple[prediction.Prediction, ...]
    box: tuple[float, float, float, float]
    picture: bytes
    pixels: Num[np.ndarray, "Y X C"]
    grid: tuple[int, int]
    rows: AttentionRows | WindowRows
    relevances: Mapping[int, Sequence[float]] = dataclasses.field(default_factory=dict)
    mask: bytes = b""

    def summary(self) -> dict:
        """Returns classes, sizes, box and resolution for JSON."""
        return {
            "classes": [
                {"label": c.label, "name": c.name, "probability": c.probability}
                for c in self.classes
            ],
            "grid": self.grid,
            "size": self.pixels.shape[:2],
            "box": self.box,
            "steps": self.rows.steps,
            "pool": self.rows.pool,
        }


class ExploredModel:
    """A checkpoint whose attention and classes are computed in one forward pass.

    Args:
      pretrained: result of `weights.open_pretrained`.
      preprocess: preprocessing of the images.
      class_names: class names in label order; those of the checkpoint if empty.
      shown_bands: bands of the model's input to show, see `display.to_display`.

    Raises:
      UserError: the network has no attention, the number of names is wrong, or a band
        does not exist.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        *,
        preprocess: Preprocess,
        class_names: tuple[str, ...] = (),
        shown_bands: tuple[int, ...] = (),
    ):
        # Two parts of the path, because weight files often have the same name.
        self.name = "/".join(address(pretrained.source).strip("/").split("/")[-2:])
        self._loaded = LoadedModel.from_pretrained(self.name, pretrained, preprocess)
        self._model, self._shown_bands = self._loaded.model, shown_bands
        channels = self._model.image_shape[-1]
        if shown_bands and max(shown_bands) >= channels:
            raise UserError(
                f"--show_bands={','.join(map(str, shown_bands))}: {pretrained.source} has "
                f"{channels} bands, counted from 0: choose among them"
            )
        if not self._model.config.has_windows:
            # This computes no layer, but rejects a network without attention.
            images = self._loaded.normalize(self._black_image()[None])
            intermediates.layers(self._model, self._loaded.params, images)
        self._tower, self._pixels, self._names, self._colors = None, None, (), ()
        self._sigmoid = pretrained.loss == "sigmoid"
        self._decisions = pretrained.calibration
        if pretrained.options["num_classes"] and not pretrained.targets:
            self._names = prediction.names_of(pretrained, class_names)
        elif text.TEXT in pretrained.task_params:
            self._tower = text_tower(pretrained)
        elif segmenter.has_segmenter(pretrained):
            self._pixels = label_maps.PixelClassifier(
                pretrained, preprocess, class_names
            )
            self._colors = masks.palette(len(self._pixels.class_names))
        names = {"class token": "CLS", "distillation token": "DIST"}
        self.extra = [
            names.get(name, name.replace("register ", "REG"))
            for name in self._model.config.prefix_tokens
        ]

    def describe(self) -> dict:
        """Returns the model's description for the page, for JSON.

        "labels" has a name per layer, "heads" a number, "extra" the names of the tokens
        before the patches. "grid" and "size" are those of the model; those of an output
        belong to its image. The supported features are "rollout", "relevance" (to
        classes), "texts" (relevance to texts), "features" (comparison of patches) and
        "colors" (one for each class of pixels).
        """
        options, model = self._model.options, self._model
        if model.config.has_windows:
            blocks = self._window_shapes
            heads = [block.weights.shape[2] for block in blocks]
            labels = [f"{block.stage + 1}.{block.block + 1}" for block in blocks]
        else:
            heads = [options["num_heads"]] * options["depth"]
            labels = [str(i + 1) for i in range(options["depth"])]
        return {
            "name": self.name,
            "variant": options["variant"],
            "grid": self._grid(self._loaded),
            "size": model.image_shape[:2],
            "labels": labels,
            "heads": heads,
            "rollout": not model.config.has_windows,
            "relevance": bool(self._names) and not model.config.has_windows,
            "texts": self._tower is not None and not model.config.has_windows,
            "features": model.has_patch_features,
            "colors": [f"#{bytes(color).hex()}" for color in self._colors],
            "extra": self.extra,
        }

    def run(self, data: bytes, name: str) -> ModelOutput:
        """Computes attention and classes of an image.

        Args:
          data: content of an image file.
          name: name of the image for messages.

        Raises:
          Refused: the image cannot be decoded.
          UserError: the network's output is not finite.
        """
        try:
            exif = bool(self._loaded.preprocess.exif)
            warn_of_dark(data, self._loaded.form, name)
            whole = bands.read(data, self._loaded.form, exif=exif)
            pixels = self._loaded.prepare(whole)
        except decode.DamagedImage as error:
            raise damaged(error, name) from error
        loaded = self._fitted(pixels)
        rows, classes = self._compute(loaded, pixels, name)
        mask = b""
        if self._pixels:
            mask, classes = self._segment(pixels)
        return ModelOutput(
            classes=classes,
            box=loaded.preprocess.crop_box(whole.shape[:2]),
            grid=self._grid(loaded),
            picture=_to_png(display.to_display(pixels, self._shown_bands)),
            pixels=pixels,
            rows=rows,
            mask=mask,
        )

    def _segment(
        self, pixels: Num[np.ndarray, "Y X C"]
    ) -> tuple[bytes, tuple[prediction.Prediction, ...]]:
        """Returns the mask as a PNG file, and its largest classes."""
        ((_, label_map),) = self._pixels.label_maps([(None, pixels)], 1)
        names, stream = self._pixels.class_names, io.BytesIO()
        parts = np.array(label_maps.shares(label_map, len(names)))
        largest = [k for k in np.argsort(-parts, kind="stable")[:TOPK] if parts[k]]
        picture = label_maps.picture(label_map, self._colors)
        picture.convert("RGB").save(stream, "PNG")
        return stream.getvalue(), tuple(
            prediction.Prediction(int(k), names[k], float(parts[k])) for k in largest
        )

    def warm_up(self) -> None:
        """Compiles the computation of `run`."""
        self._compute(self._loaded, self._black_image(), "a black image")

    def relevance(
        self, output: ModelOutput, target: int | str
    ) -> Float32[np.ndarray, " P"] | None:
        """Returns the relevance of each patch to a class or a text.

        See `analysis.attention.relevance` and `relevance_to_text`.

        Args:
          output: output for an image.
          target: label of the class, or the text.

        Returns:
          None if the model has no such class, no text tower, or no relevance.

        Raises:
          UserError: the tokenizer is missing.
        """
        known = self._tower if isinstance(target, str) else target < len(self._names)
        if not known or self._model.config.has_windows:
            return None
        loaded = self._fitted(output.pixels)
        args = loaded.model, loaded.params, loaded.normalize(output.pixels[None])
        if isinstance(target, str):
            values = relevance_to_text(*args, self._tower, target)
        else:
            values = relevance(*args, jnp.array([target]))
        return np.asarray(values)[0, len(self.extra) :]

    def features(self, output: ModelOutput) -> Float32[np.ndarray, "y x D"] | None:
        """Returns the features of each patch of the page's grid.

        Patches that the network merges have the same features. Returns None if the
        network has no patch features.
        """
        if not self._model.has_patch_features:
            return None
        loaded = self._fitted(output.pixels)
        features = loaded.patch_features(output.pixels[None])[0]
        check_finite(features, f"{self.name}'s features")
        return enlarge(features, output.grid)

    def _fitted(self, pixels: Num[np.ndarray, "Y X C"]) -> LoadedModel:
        return self._loaded.fitted(pixels.shape[:2])

    def _grid(self, loaded: LoadedModel) -> tuple[int, int]:
        """Returns the number of patches down and across that the page shows."""
        windows = self._model.config.has_windows
        return self._window_shapes[0].grid if windows else loaded.model.grid

    def _compute(
        self, loaded: LoadedModel, pixels: UInt8[np.ndarray, "h w c"], name: str
    ) -> tuple[AttentionRows | WindowRows, tuple[prediction.Prediction, ...]]:
        """Returns attention from all tokens, and the most probable classes."""
        params = loaded.params
        if self._model.config.has_windows:
            images = loaded.normalize(pixels[None])
            outputs, blocks = self._windows(params, images)
            rows = WindowRows(blocks)
        else:
            rows, tokens = self._rows_of_layers(loaded, pixels, name)
            outputs = loaded.classify(tokens) if self._names else {}
        if not self._names:
            return rows, ()
        logits = np.asarray(outputs["logits"])[0]
        check_finite(logits, f"{self.name}'s output for {name}")
        how = {"sigmoid": self._sigmoid, "decisions": self._decisions}
        return rows, prediction.rank(logits, self._names, TOPK, **how)

    @functools.cached_property
    def _windows(self):
        config, module = self._model.config, self._model.module
        return jax.jit(functools.partial(config.window_attention, module))

    @functools.cached_property
    def _window_shapes(self) -> list[BlockWindows]:
        images = jax.ShapeDtypeStruct((1, *self._model.image_shape), np.float32)
        return jax.eval_shape(self._windows, self._loaded.params, images)[1]

    def _rows_of_layers(
        self, loaded: LoadedModel, pixels: UInt8[np.ndarray, "h w c"], name: str
    ) -> tuple[AttentionRows, Float[Array, "1 N D"]]:
        """Returns attention from all tokens, and the tokens after the last layer."""
        options, extra = self._model.options, len(self.extra)
        count = extra + math.prod(loaded.model.grid)
        rows = AttentionRows.zeros(
            count, extra, options["depth"], options["num_heads"] + 1
        )
        depth, rollout = 0, None
        for layer, _ in loaded.iter_layers(pixels[None], [name], 1):
            rollout = rollout_step(rollout, layer.attention)
            rows.set_layer(depth, np.concatenate([layer.attention[0], rollout]))
            depth, tokens = depth + 1, layer.tokens
            del layer  # Frees its attention before the next is computed.
        return rows, tokens

    def _black_image(self) -> UInt8[np.ndarray, "h w c"]:
        return np.zeros(self._model.image_shape, np.uint8)


def _to_png(pixels: UInt8[np.ndarray, "h w c"]) -> bytes:
    stream = io.BytesIO()
    grey = pixels.shape[-1] == 1
    Image.fromarray(pixels[..., 0] if grey else pixels).save(stream, "PNG")
    return stream.getvalue()


class Session:
    """One or two models, and their outputs for the most recent images.

    Its methods may be called by several threads at once.

    Args:
      models: the models.
      folder: folder of images to choose from; None without one.
      budget: bytes of attention to keep; the last image is always kept.
      max_megapixels: size of the largest image to read, see `data.max_megapixels`.
    """

    def __init__(
        self,
        models: Sequence[ExploredModel],
        folder: Folder | None = None,
        budget: int = BUDGET,
        max_megapixels: float = MAX_MEGAPIXELS,
    ):
        self.folder, self._max_megapixels = folder, max_megapixels
        self.models, self._budget = tuple(models), budget
        self._outputs = collections.OrderedDict[str, tuple[ModelOutput, ...]]()
        cache = functools.lru_cache(_KEPT_FEATURES)
        self._unit_features = cache(self._compute_features)
        self._compute_lock, self._outputs_lock = threading.Lock(), threading.Lock()

    def about(self) -> dict:
        """Returns models, limits and names of images, for JSON."""
        names, more = self.folder.names() if self.folder else ([], False)
        return {
            "models": [model.describe() for model in self.models],
            "limits": {"bytes": MAX_BYTES},
            "images": names,
            "more": more,
        }

    def run(self, data: bytes, name: str) -> dict:
        """Runs all models on an image, unless their outputs are still kept.

        Args:
          data: content of an image file.
          name: name of the image for messages.

        Returns:
          The key for `output`, the name, and each model's summary, for JSON.

        Raises:
          Refused: the image is too large or cannot be decoded.
        """
        check(data, name, self._max_megapixels)
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

    def relevance(
        self, key: str, model: int, target: int | str
    ) -> Float32[np.ndarray, " P"]:
        """Returns the relevance of the patches of a kept image to a class or a text.

        Raises:
          Refused: `output` fails, or the model has no relevance to the target.
          UserError: the tokenizer is missing.
        """
        output = self.output(key, model)
        with self._compute_lock:
            values = self.models[model].relevance(output, target)
        if values is None:
            what = "texts" if isinstance(target, str) else f"a class {target}"
            raise Refused(404, f"Model {model} cannot show relevance to {what}.")
        return values

    def similarity(
        self, key: str, model: int, origin: str, patch: int
    ) -> Float32[np.ndarray, " P"]:
        """Returns the cosine similarity of each patch's features to those of one patch.

        Args:
          key: key of the image whose patches are compared.
          model: number of the model.
          origin: key of the image with the reference patch, which may be the same
            image.
          patch: number of the reference patch in the grid.

        Raises:
          Refused: `output` fails, the model has no features, or the patch does not
            exist.
        """
        features = self._features_of(origin, model)
        if patch >= len(features):
            raise Refused(404, f"Patch {patch} does not exist.")
        return self._features_of(key, model) @ features[patch]

    def components(self, key: str, model: int) -> bytes:
        """Returns the principal components of patch features as colours, a PNG file.

        Raises:
          Refused: `output` fails, or the model has no features.
        """
        flat = self._features_of(key, model)
        components, _ = project(flat)
        colours = np.rint(255 * to_intensities(components)).astype(np.uint8)
        return _to_png(colours.reshape(*self.output(key, model).grid, 3))

    def _features_of(self, key: str, model: int) -> Float32[np.ndarray, "P D"]:
        """Returns the features of patches, with length 1; computed once."""
        self.output(key, model)  # Raises Refused for images that are no longer kept.
        with self._compute_lock:
            return self._unit_features(key, model)

    def _compute_features(self, key: str, model: int) -> Float32[np.ndarray, "P D"]:
        features = self.models[model].features(self.output(key, model))
        if features is None:
            raise Refused(404, f"Model {model} has no patch features.")
        features = features.reshape(-1, features.shape[-1])
        lengths = np.linalg.norm(features, axis=1, keepdims=True)
        return features / np.maximum(lengths, 1e-12)

    def outputs(self, key: str) -> tuple[ModelOutput, ...]:
        """Returns the output of each model for an image.

        Raises:
          Refused: the image is no longer kept.
        """
        if outputs := self._find(key):
            return outputs
        raise Refused(410, "This image is no longer kept by the server: open it again.")

    def output(self, key: str, model: int) -> ModelOutput:
        """Returns the output of a model for an image.

        Raises:
          Refused: the image is no longer kept, or the model does not exist.
        """
        outputs = self.outputs(key)
        if not 0 <= model < len(outputs):
            raise Refused(404, f"Model {model} does not exist.")
        return outputs[model]

    def _find(self, key: str) -> tuple[ModelOutput, ...] | None:
        with self._outputs_lock:
            if key in self._outputs:
                self._outputs.move_to_end(key)
            return self._outputs.get(key)

    def _keep(self, key: str, outputs: tuple[ModelOutput, ...]) -> None:
        with self._outputs_lock:
            self._outputs[key] = outputs
            kept = itertools.chain.from_iterable(self._outputs.values())
            nbytes = sum(output.rows.nbytes for output in kept)
            while len(self._outputs) > 1 and nbytes > self._budget:
                _, oldest = self._outputs.popitem(last=False)
                nbytes -= sum(output.rows.nbytes for output in oldest)
