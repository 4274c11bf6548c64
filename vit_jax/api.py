"""vit_jax in Python: models by name, weights that classify, training on arrays.

Everything here is an attribute of `vit_jax` itself, and imported when it is first used.
"""

import contextlib
import copy
import dataclasses
import fnmatch
import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Array, Float
from PIL import Image

from vit_jax import models
from vit_jax.analysis.attention import attention_maps
from vit_jax.config import fields, loading
from vit_jax.data import decode
from vit_jax.data.sources.arrays import IN_MEMORY, open_arrays
from vit_jax.data.sources.open import opened_by
from vit_jax.data.transforms import device as transforms
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.evaluators import forward_passes, prediction, suite
from vit_jax.printing import print_line
from vit_jax.tools.finetuning import run as finetuning
from vit_jax.training import loop
from vit_jax.training.callbacks import Callback
from vit_jax.training.config import EvaluationConfig, TrainConfig
from vit_jax.training.timers import StartupTimer
from vit_jax.training.train_step import TrainSetup, build_train_setup
from vit_jax.weights import surgery
from vit_jax.weights import workdir as workdirs
from vit_jax.weights.pretrained import Preprocess, Pretrained, prepare_image, upright
from vit_jax.weights.text_tower import TextTower

# What other libraries call an argument here.
_SYNONYMS = {
    "img_size": "image_size",
    "input_size": "image_size",
    "resolution": "image_size",
    "in_chans": "channels",
    "num_channels": "channels",
    "num_labels": "num_classes",
    "embed_dim": "width",
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "num_attention_heads": "num_heads",
    "drop_path": "drop_path_rate",
    "drop_rate": "dropout",
    "global_pool": "pool",
}
# Keys of `data` that say where files are and what is in them.
_OF_FILES = {"data_dir", "num_examples", "exclude", "label_key", "image_key"}
_OF_FILES |= {"image_dir", "image_suffix"}
_BATCH = 32  # Images that pass through a network at once.

Images = (
    str
    | os.PathLike
    | bytes
    | np.ndarray
    | Image.Image
    | Sequence["str | os.PathLike | bytes | np.ndarray | Image.Image"]
)
Arrays = tuple[np.ndarray, np.ndarray]


def list_models(pattern: str = "*") -> list[str]:
    """Returns the names of the models whose numbers are published.

    Args:
      pattern: as in a shell; "*/16" are those with patches of 16 pixels.

    Example:
      >>> import vit_jax
      >>> vit_jax.list_models("B/*")
      ['B/8', 'B/14', 'B/16', 'B/32']
    """
    return fnmatch.filter(models.names(), pattern)


def create_model(
    variant: str,
    *,
    num_classes: int = 1_000,
    image_size: int | Sequence[int] = 224,
    **options,
) -> models.Model:
    """Builds a model, whose `init` draws parameters and whose `apply` computes.

    Args:
      variant: one of `list_models()`, or of the same form, as "S/8".
      num_classes: width of the classifier; 0 is none.
      image_size: side of the images in pixels, or (height, width).
      **options: see `vit_jax.models.create`.

    Raises:
      UserError: unknown variant or option, or numbers that do not fit each other.

    Example:
      >>> import jax, vit_jax
      >>> model = vit_jax.create_model("Ti/16", num_classes=10, image_size=64)
      >>> params = model.init(jax.random.key(0))
      >>> model.apply(params, jax.numpy.zeros((2, 64, 64, 3)))["logits"].shape
      (2, 10)
    """
    if re.match(r"(vit|deit3?|swin(v2)?|mixer|resnetv2)_", variant):
        raise UserError(
            f"{variant!r} is a name of timm: load_model('timm/{variant}') opens weights, "
            "and list_models() has the names here"
        )
    for name, ours in _SYNONYMS.items():
        if name in options:
            raise UserError(
                f"{name}={options[name]!r}: this argument is called {ours} here"
            )
    return models.create(
        variant, num_classes=num_classes, image_size=_sides(image_size), **options
    )


def load_model(
    source: str | os.PathLike,
    *,
    image_size: int | Sequence[int] | None = None,
    class_names: Sequence[str] = (),
    step: int | None = None,
    use_ema: bool = True,
    num_heads: int = 0,
    tokenizer: str = "",
    tell: Callable[[str], None] = print,
    **preprocess,
) -> "PretrainedModel":
    """Opens weights of any format, ready for images.

    Args:
      source: workdir of a run; a file or folder of Google, timm, Hugging Face and others;
        a name as "deit:Ti/16" or "timm/vit_base_patch16_224.augreg_in21k"; or a URL, as
        "hf://owner/name".
      image_size: side of the images in pixels, or (height, width), if not the weights'.
      class_names: in label order, if not the weights'.
      step: of a run's checkpoint; the best, or else the last, if None.
      use_ema: a run's averaged parameters if it has them, not its last ones.
      num_heads: attention heads, for files that do not state them.
      tokenizer: of a text tower if not the weights', see `config.data.tokenizer`.
      tell: called with a line about each thing that had to be guessed.
      **preprocess: fields of `vit_jax.weights.Preprocess`, if not the weights'.

    Raises:
      UserError: there are no such weights, or something does not fit.

    Example:
      >>> import vit_jax
      >>> model = vit_jax.load_model("runs/digits", tell=lambda line: None)
      >>> model
      PretrainedModel('Ti/2' of 'runs/digits', 10 classes, images (8, 8, 1))
    """
    known = {field.name for field in dataclasses.fields(Preprocess)}
    if unknown := sorted(preprocess.keys() - known):
        hint = _SYNONYMS.get(unknown[0], f"not one of {', '.join(sorted(known))}")
        raise UserError(f"{unknown[0]}={preprocess[unknown[0]]!r}: {hint}")
    if image_size is not None:
        preprocess |= {"image_size": _sides(image_size), "cut": (0, 0)}
    found, how = forward_passes.open_weights(
        _at_step(source, step),
        preprocess,
        use_ema=use_ema,
        num_heads=num_heads,
        with_task=True,
        tell=tell,
    )
    found = dataclasses.replace(found, tokenizer=tokenizer or found.tokenizer)
    return PretrainedModel(found, upright(how), tuple(class_names))


class PretrainedModel:
    """A network with its parameters, which knows how its images are prepared.

    Images are given as a path, the content of a file, an array of uint8 (height, width,
    channels) or grey (height, width), a PIL image, or a list of these, which an array
    with one more dimension is.

    Args:
      pretrained: the weights.
      preprocess: how images are prepared.
      class_names: in label order; those of the weights if empty.

    Attributes:
      model: the network, whose `apply` is this one's.
      params: nested dict of arrays on the default device.
      preprocessing: how images are prepared.
      class_names: in label order; empty without a classifier.

    Example:
      >>> import numpy as np, vit_jax
      >>> model = vit_jax.load_model("runs/digits", tell=lambda line: None)
      >>> images = np.zeros((2, 8, 8, 1), np.uint8)
      >>> best = model.predict(images, topk=3)
      >>> len(best), len(best[0]), best[0][0].name in model.class_names
      (2, 3, True)
      >>> model.features(images).shape, model.attention(images).shape
      ((2, 48), (2, 4, 3, 17, 17))
      >>> model.features(images, tokens=True).shape
      (2, 4, 4, 48)
      >>> model.apply(model.params, model.preprocess(images))["logits"].shape
      (2, 10)
    """

    def __init__(
        self,
        pretrained: Pretrained,
        preprocess: Preprocess,
        class_names: tuple[str, ...] = (),
    ):
        model, params = surgery.fit_network(pretrained, preprocess)
        self.model, self.params = model, jax.device_put(params)
        self.preprocessing, self.class_names = preprocess, ()
        if pretrained.options["num_classes"]:
            self.class_names = prediction.names_of(pretrained, class_names)
        self._pretrained = pretrained
        self._sigmoid = pretrained.loss == "sigmoid"
        self._outputs = jax.jit(lambda p, pixels: model.apply(p, self._normed(pixels)))
        self._patches = jax.jit(
            lambda p, pixels: model.patch_features(p, self._normed(pixels))
        )

    def __repr__(self) -> str:
        options = self.model.options
        return (
            f"PretrainedModel({options['variant']!r} of {self._pretrained.source!r}, "
            f"{len(self.class_names)} classes, images {self.model.image_shape})"
        )

    def apply(
        self, params: models.Params, images: Float[Array, "B Y X C"], **more
    ) -> dict:
        """Computes "logits" and "pre_logits", see `vit_jax.models.Model.apply`.

        Args:
          params: such as `self.params`.
          images: prepared, as `preprocess` returns them.
        """
        return self.model.apply(params, images, **more)

    def preprocess(self, images: Images) -> Float[Array, "B Y X C"]:
        """Returns images as the network takes them: resized, cropped and normalised.

        Args:
          images: see the class.

        Raises:
          UserError: an image cannot be read.
        """
        return self._normed(self._prepare(images))

    def predict(
        self, images: Images, topk: int = 5, *, threshold: float | None = None
    ) -> list[tuple[prediction.Prediction, ...]] | tuple[prediction.Prediction, ...]:
        """Returns the most probable classes, best first.

        Args:
          images: see the class.
          topk: classes an image.
          threshold: smallest probability of the classes to return, in place of `topk`;
            0.5 unless stated if the network was trained on several labels an image.

        Returns:
          For each image its classes, with label, name and probability; for a single image
          these alone.

        Raises:
          UserError: there is no classifier, or an image cannot be read.
        """
        if not self.class_names:
            raise UserError(
                f"{self._pretrained.source} has no classifier (num_classes=0): give "
                "weights that have one, or use zero_shot if they have a text tower"
            )
        logits = self._in_batches(
            images, lambda p, pixels: self._outputs(p, pixels)["logits"]
        )
        if threshold is None:
            threshold = prediction.threshold_of(self._pretrained)
        how = {"sigmoid": self._sigmoid, "threshold": threshold}
        found = [prediction.rank(row, self.class_names, topk, **how) for row in logits]
        return found[0] if _is_single(images) else found

    def zero_shot(
        self,
        images: Images,
        texts: Sequence[str],
        *,
        prompts: Sequence[str] = ("{}",),
        topk: int = 5,
    ) -> list[tuple[prediction.Prediction, ...]] | tuple[prediction.Prediction, ...]:
        """Returns the texts that images are most like, best first.

        Args:
          images: see the class.
          texts: what images are compared with, as "a photo of a dog"; or classes, if
            there are prompts.
          prompts: texts with "{}" for a class; its embedding is the mean over them.
          topk: texts an image.

        Returns:
          As `predict`. Probabilities sum to 1 over the texts, except of weights trained
          with a sigmoid (SigLIP), where each text has one by itself.

        Raises:
          UserError: there is no text tower or no tokenizer, or an image cannot be read.
        """
        texts = tuple(texts)
        logits = self.tower.logits(
            self._image_embeddings(images), self.tower.classes(texts, prompts)
        )
        found = [
            prediction.rank(row, texts, topk, sigmoid=self.tower.sigmoid)
            for row in logits
        ]
        return found[0] if _is_single(images) else found

    def similarity(
        self, images: Images, texts: Sequence[str]
    ) -> Float[np.ndarray, "B K"]:
        """Returns the cosine similarity of each image with each text, for retrieval.

        Args:
          images: see the class.
          texts: see `zero_shot`.

        Raises:
          UserError: as `zero_shot`.
        """
        return self._image_embeddings(images) @ self.tower.embed(texts).T

    @functools.cached_property
    def tower(self) -> TextTower:
        """The text tower; UserError if the weights have none."""
        return TextTower.of(self._pretrained)

    def _image_embeddings(self, images: Images) -> Float[np.ndarray, "B E"]:
        return self.tower.embed_images(self.features(images))

    def features(
        self, images: Images, *, tokens: bool = False
    ) -> Float[np.ndarray, "B D"] | Float[np.ndarray, "B Y X D"]:
        """Returns what the classifier sees of each image, or the features of its patches.

        Args:
          images: see the class.
          tokens: return a grid of patch features, see `Model.patch_features`. At another
            resolution: `load_model(..., image_size=(448, 672))`.

        Raises:
          UserError: the network has no such features, or an image cannot be read.
        """
        if tokens:
            return self._in_batches(images, self._patches)
        if not self.model.representations:
            raise UserError(
                f"{self._pretrained.source} has no features of whole images"
            )
        return self._in_batches(
            images, lambda p, pixels: self._outputs(p, pixels)["pre_logits"]
        )

    def attention(self, images: Images) -> Float[np.ndarray, "B L H N N"]:
        """Returns the attention from each token to each, by layer and head.

        Tokens are the prefix, as the class token, then the patches row by row.

        Args:
          images: see the class.

        Raises:
          UserError: the network has no attention between all tokens, or an image cannot
            be read.
        """
        maps = attention_maps(self.model, self.params, self.preprocess(images))
        return np.stack([np.asarray(layer) for layer in maps], axis=1)

    def _in_batches(self, images: Images, compute: Callable) -> np.ndarray:
        pixels = self._prepare(images)
        parts = (pixels[i : i + _BATCH] for i in range(0, len(pixels), _BATCH))
        return np.concatenate(
            [np.asarray(compute(self.params, part)) for part in parts]
        )

    def _normed(self, pixels):
        how = self.preprocessing
        images = transforms.normalize(jax.numpy.asarray(pixels), how.mean, how.std)
        return images.astype(self.model.options["dtype"])

    def _prepare(self, images: Images) -> np.ndarray:
        listed = [images] if _is_single(images) else list(images)
        if not listed:
            raise UserError("images=[]: give at least one")
        channels = self.model.image_shape[-1]
        return np.stack([_prepare(one, self.preprocessing, channels) for one in listed])


def train(
    config: str | os.PathLike | Mapping | TrainConfig,
    workdir: str | os.PathLike,
    *,
    data: Arrays | Mapping[str, Arrays] | None = None,
    class_names: Sequence[str] = (),
    callbacks: Iterable[Callback] = (),
    **overrides,
) -> dict:
    """Trains, evaluates and reports; resumes where a run in `workdir` was interrupted.

    Args:
      config: file of a recipe, with its argument after a colon if it takes one; or a
        mapping or config of the same keys.
      workdir: folder for checkpoints, metrics and the report.
      data: images, uint8 (N, height, width, channels) or grey (N, height, width), and
        their labels, integers (N,), in place of the config's data set; or such pairs by
        the name of their split, of which "train" is trained on and all others are
        evaluated. Transforms of the config prepare them, as those of files.
      class_names: of `data`, in label order.
      callbacks: told what happens.
      **overrides: config keys, as `epochs=3` or `**{"optim.learning_rate": 0.01}`.

    Returns:
      The content of `report.json`: final accuracies, steps, seconds and more.

    Raises:
      UserError: bad input, or memory or disk is full.

    Example:
      >>> import numpy as np, vit_jax
      >>> images = np.random.default_rng(0).integers(0, 256, (256, 8, 8), np.uint8)
      >>> labels = np.arange(256) % 2
      >>> pairs = {"train": (images, labels), "test": (images[:64], labels[:64])}
      >>> report = vit_jax.train(
      ...     "configs/digits.py",
      ...     "runs/noise",
      ...     data=pairs,
      ...     epochs=2,
      ...     **{"optim.warmup_epochs": 0},
      ... )  # doctest: +ELLIPSIS
         0.0 s  imported; finding the devices
      ...
      >>> sorted(report["final"]["test"])
      ['ema', 'params']
    """
    if data is None:
        return loop.train(
            _config(config, overrides),
            workdir,
            StartupTimer(say=print_line),
            callbacks=callbacks,
        )
    arrays = dict(data) if isinstance(data, Mapping) else {"train": data}
    if "train" not in arrays:
        raise UserError(f"data has no 'train' among {', '.join(arrays) or 'nothing'}")
    images, labels = map(np.asarray, arrays["train"])
    stated = {
        "name": IN_MEMORY,
        "split": "train",
        "num_classes": len(class_names) or int(labels.max(initial=0)) + 1,
        "channels": images.shape[3] if images.ndim == 4 else 1,
    }
    sections = _sections(arrays, stated, arrays.keys() - {"train"})
    complete = _config(config, overrides, sections)
    with _opened(arrays, class_names):
        return loop.train(
            complete, workdir, StartupTimer(say=print_line), callbacks=callbacks
        )


def finetune(
    photos: str | os.PathLike,
    workdir: str | os.PathLike,
    *,
    model: str | os.PathLike = "",
    minutes: int | float = finetuning.MINUTES,  # noqa: PYI041 (beartype knows)
    folds: int = 0,
    callbacks: Iterable[Callback] = (),
    tell: Callable[[str], None] = print,
    **overrides,
) -> finetuning.Result:
    """Fine-tunes weights on images of your own; resumes where it was interrupted.

    What is not stated is chosen by a rule, for the number and size of the images and the
    speed of the device; the choices are told, each with the key that changes it.

    Args:
      photos: folder with folders of classes, or of splits with those; a table of paths
        and labels (CSV, TSV, JSON Lines, Parquet); or the name of a data set, as
        "owner/name" on the Hugging Face hub.
      workdir: folder of the run, which is a model for `load_model`.
      model: weights, see `load_model`; DeiT-Ti on a CPU and AugReg S/16 elsewhere if
        empty.
      minutes: to train and evaluate in, by the measured speed; 0 is no limit.
      folds: train so often, each time with another part of the images to validate on, so
        that all of a small set are scored; the first run is the model.
      callbacks: told what happens.
      tell: called with lines about what was found and chosen.
      **overrides: config keys, as `epochs=3` or `**{"optim.learning_rate": 0.01}`.

    Returns:
      The score on the test images, or else on those that validate, with its 95 %
      interval, and the run's report.

    Raises:
      UserError: the images or the weights cannot be read or do not fit each other.

    Example:
      >>> import vit_jax
      >>> result = vit_jax.finetune(
      ...     "photos", "runs/photos", model="runs/digits", epochs=2
      ... )  # doctest: +ELLIPSIS
      runs/digits: ...
      >>> result.split, result.metric, result.interval[0] < result.score
      ('val', 'top1', True)
    """
    return finetuning.finetune(
        os.fspath(photos),
        os.fspath(workdir),
        model=os.fspath(model),
        minutes=float(minutes),
        folds=folds,
        overrides=overrides,
        callbacks=callbacks,
        say=tell,
    )


def evaluate(
    source: str | os.PathLike,
    config: str | os.PathLike | Mapping | EvaluationConfig | None = None,
    *,
    data: Arrays | Mapping[str, Arrays] | None = None,
    class_names: Sequence[str] = (),
    step: int | None = None,
    use_ema: bool = True,
    tell: Callable[[str], None] = print,
    **overrides,
) -> dict:
    """Runs the evaluations of a config on weights.

    Args:
      source: weights, see `load_model`.
      config: file of a recipe, as "configs/eval/fewshot.py:data=digits", or a mapping or
        config of the same keys; needed unless `data` is classified.
      data: images and labels to classify, as of `train`, in place of the config's data
        set and evaluations; or such pairs by the name of their split.
      class_names: of `data`, in label order.
      step: of a run's checkpoint, see `load_model`.
      use_ema: a run's averaged parameters if it has them, not its last ones.
      tell: called with lines about what happens.
      **overrides: config keys, as of `train`.

    Returns:
      Metrics by evaluation, as {"test": {"params": {"top1": 0.97, ...}}}.

    Raises:
      UserError: the weights or the data cannot be read or do not fit each other.

    Example:
      >>> import numpy as np, vit_jax
      >>> pair = np.zeros((20, 8, 8), np.uint8), np.arange(20) % 10
      >>> scores = vit_jax.evaluate("runs/digits", data=pair, tell=lambda line: None)
      >>> scores["test"]["weights"]["top1"]
      0.1
    """
    sections, opening = {}, contextlib.nullcontext()
    if data is not None:
        arrays = dict(data) if isinstance(data, Mapping) else {"test": data}
        sections = _sections(arrays, {"name": IN_MEMORY}, arrays)
        opening = _opened(arrays, class_names)
    config = config or {"batch_size": 2 * _BATCH}
    config = _config(config, overrides, sections, cls=EvaluationConfig)
    found, how = forward_passes.open_weights(
        _at_step(source, step),
        {},
        use_ema=use_ema,
        num_heads=0,
        with_task=True,
        tell=tell,
    )
    with opening:
        return suite.evaluate(found, how, config, tell).scores


def train_setup(
    config: str | os.PathLike | Mapping | TrainConfig, num_examples: int, **overrides
) -> TrainSetup:
    """Returns what a training loop of one's own needs.

    Args:
      config: see `train`.
      num_examples: images of an epoch, for schedules.
      **overrides: config keys, as of `train`.

    Returns:
      Among others `initial_state()`, the jitted `train_step(state, batch)`, which returns
      the next state and metrics, and `total_steps`.

    Raises:
      UserError: bad input.

    Example:
      >>> import numpy as np, vit_jax
      >>> setup = vit_jax.train_setup("configs/digits.py", num_examples=1_442)
      >>> state = setup.initial_state()
      >>> batch = {
      ...     "image": np.zeros((64, 8, 8, 1), np.uint8),
      ...     "label": np.zeros(64, np.int32),
      ...     "index": np.arange(64, dtype=np.uint32),
      ... }
      >>> state, metrics = setup.train_step(state, batch)
      >>> round(float(metrics["loss"]), 3), int(state.step)
      (2.303, 1)
    """
    complete = _config(config, overrides)
    complete.task.check_without_records()
    return build_train_setup(complete, meshes.create(complete.mesh), num_examples)


def _sections(
    arrays: Mapping[str, Arrays], stated: Mapping, evaluated: Iterable[str]
) -> dict[str, Callable[[Mapping], Mapping]]:
    """Returns what arrays make of the sections `data` and `evals`."""
    evals = {name: {"split": name} for name in arrays if name in set(evaluated)}
    return {
        "data": lambda given: {k: given[k] for k in given.keys() - _OF_FILES} | stated,
        "evals": lambda _: evals,
    }


def _opened(arrays: Mapping[str, Arrays], class_names: Sequence[str]):
    """Opens arrays in place of every data set."""

    def opener(_, split: str, __):
        return open_arrays(arrays, split, IN_MEMORY, class_names)

    return opened_by(opener)


def _config(
    config, overrides: Mapping, sections: Mapping | None = None, cls=TrainConfig
):
    """Completes a config.

    Args:
      config: recipe, mapping or config of `cls`.
      overrides: dotted key to value.
      sections: name of a section to a function that changes it, before overrides.
      cls: dataclass of the config.
    """
    if isinstance(config, str | os.PathLike):
        raw = loading.read(TrainConfig, os.fspath(config))
    elif isinstance(config, Mapping):
        raw = copy.deepcopy(dict(config))
    else:
        raw = fields.to_dict(config)
    for name, change in (sections or {}).items():
        raw[name] = change(raw.get(name, {}))
    loading.override(TrainConfig, raw, overrides)
    return loading.complete(cls, raw)


def _at_step(source: str | os.PathLike, step: int | None) -> str:
    return os.fspath(source) if step is None else workdirs.at_step(source, step)


def _sides(image_size: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(image_size, int | np.integer):
        return int(image_size), int(image_size)
    sides = tuple(image_size)
    if len(sides) != 2 or not all(isinstance(side, int | np.integer) for side in sides):
        raise UserError(
            f"image_size={image_size!r} is neither a side nor (height, width) in pixels"
        )
    return sides


def _is_single(images: Images) -> bool:
    if isinstance(images, np.ndarray):
        # Three dimensions without channels are grey images, as of `train`.
        return images.ndim < 3 or (images.ndim == 3 and images.shape[-1] in (1, 3, 4))
    return isinstance(images, str | os.PathLike | bytes | Image.Image)


def _prepare(image, preprocess: Preprocess, channels: int) -> np.ndarray:
    name, data = "the image", image
    if isinstance(image, str | os.PathLike):
        name = os.fspath(image)
        try:
            with open(name, "rb") as file:
                data = file.read()
        except OSError as error:
            raise UserError(f"{name} cannot be read ({error.strerror})") from error
    elif isinstance(image, Image.Image):
        data = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    if isinstance(data, np.ndarray):
        data = data[..., None] if data.ndim == 2 else data
        if data.dtype != np.uint8 or data.ndim != 3:
            raise UserError(
                f"image of {data.dtype} {data.shape}: give uint8 (height, width, channels)"
            )
    try:
        return prepare_image(data, preprocess, channels)
    except decode.DamagedImage as error:
        raise UserError(f"{name} {error}: give another image") from error
