"""vit_jax in Python: models by name, weights that classify, training on arrays.

Everything here is an attribute of `vit_jax` itself, and imported when it is first used.
"""

import contextlib
import copy
import dataclasses
import fnmatch
import functools
import numbers
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Array, Float
from PIL import Image

from vit_jax import finetune as _finetune
from vit_jax import models, weights
from vit_jax import train as _train
from vit_jax.analysis.attention import attention_maps
from vit_jax.config import arguments, fields, loading
from vit_jax.config.fields import key
from vit_jax.data import decode, inputs
from vit_jax.data.config import DataConfig
from vit_jax.data.sources.arrays import IN_MEMORY, check_pair, open_arrays
from vit_jax.data.sources.open import opened_by
from vit_jax.data.transforms import device as transforms
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.evaluators import prediction, suite
from vit_jax.models.text_tower import TextTower
from vit_jax.printing import print_error, print_line
from vit_jax.tools.finetuning import run as finetuning
from vit_jax.training import loop
from vit_jax.training.callbacks import Callback
from vit_jax.training.config import EvaluationConfig, TrainConfig
from vit_jax.training.timers import StartupTimer
from vit_jax.training.train_step import TrainSetup, build_train_setup
from vit_jax.weights import surgery
from vit_jax.weights import workdir as workdirs
from vit_jax.weights.hub import mirrors
from vit_jax.weights.pretrained import Preprocess, Pretrained, prepare_image, upright
from vit_jax.weights.text_tower import text_tower

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Arguments:
    """What an argument of these functions may be; the same name is the same in all."""

    pattern: str = key("", "Of names.")
    pretrained: bool = key(False, "Whether names are of weights.")
    variant: str = key("", "Name of a network.")
    num_classes: int = key(0, "Width of the classifier.", below=2**31)
    source: str = key("", "Weights.")
    model: str = key("", "Weights.")
    workdir: str = key("", "Folder of a run.")
    class_names: tuple[str, ...] = key((), "In label order.")
    step: int = key(0, "Of a checkpoint.")
    use_ema: bool = key(True, "Averaged parameters.")
    num_heads: int = key(0, "Attention heads.", below=2**31)
    architecture: str = key("", "timm's name of a network.")
    tokenizer: str = key("", "Of a text tower.")
    topk: int = key(5, "Classes per image.", at_least=1)
    threshold: float = key(0.5, "Least probability.", at_most=1)
    tokens: bool = key(False, "Whether features are of patches.")
    texts: tuple[str, ...] = key((), "To compare images with.")
    prompts: tuple[str, ...] = key(("{}",), "With {} for a class.")
    minutes: float = key(0.0, "To train in.", below=2**31)
    folds: int = key(0, "Runs on other parts.")
    num_examples: int = key(1, "Images per epoch.", at_least=1)
    callbacks: tuple[Callback, ...] = key((Callback(),), "What else happens.")
    tell: Callable = key(print, "Called with lines.")


_checked = arguments.checked(_Arguments)

Images = (
    str
    | os.PathLike
    | bytes
    | np.ndarray
    | Image.Image
    | Sequence["str | os.PathLike | bytes | np.ndarray | Image.Image"]
)
Arrays = tuple[np.ndarray, np.ndarray]


@_checked
def list_models(pattern: str = "*", *, pretrained: bool = False) -> list[str]:
    """Returns the names of the models whose numbers are published.

    Args:
      pattern: as in a shell; "*/16" are those with patches of 16 pixels.
      pretrained: return short names of weights for `load_model`, as "deit:Ti/16".

    Example:
      >>> import vit_jax
      >>> vit_jax.list_models("B/*")
      ['B/8', 'B/14', 'B/16', 'B/32']
      >>> vit_jax.list_models("deit:S*", pretrained=True)
      ['deit:S/16', 'deit:S/16-distilled']
    """
    families = mirrors.families() if pretrained else ()
    names = (name for family in families for name in mirrors.names(family))
    return fnmatch.filter(names if pretrained else models.names(), pattern)


@_checked
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
    kind = models.VARIANTS.find(variant, "model")
    about, defaults = fields.fields(kind), fields.defaults(kind)
    for name in about.keys() & options.keys():
        if not isinstance(options[name], str) or options[name] not in about[name].names:
            of_key = name, about[name], options[name], defaults[name]
            options[name] = arguments.take(*of_key)
    return models.create(
        variant, num_classes=num_classes, image_size=_sides(image_size), **options
    )


@_checked
def load_model(
    source: str | os.PathLike,
    *,
    image_size: int | Sequence[int] | None = None,
    num_classes: int | None = None,
    class_names: Sequence[str] = (),
    step: int | None = None,
    use_ema: bool = True,
    num_heads: int = 0,
    architecture: str = "",
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
      num_classes: width of a new classifier, of zeros, in place of the weights'; 0 is none.
      class_names: in label order, if not the weights'.
      step: of a run's checkpoint; the best, or else the last, if None.
      use_ema: a run's averaged parameters if it has them, not its last ones.
      num_heads: attention heads, for files that do not state them.
      architecture: timm's name of the network, for its files without a config.json.
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
    usual = Preprocess(image_size=(1, 1))
    for name, value in preprocess.items():
        preprocess[name] = arguments.take(
            name, fields.Key(help="", at_least=None), value, getattr(usual, name)
        )
    if image_size is not None:
        preprocess |= {"image_size": _sides(image_size), "cut": (0, 0)}
    found, how = weights.open_weights(
        _at_step(source, step),
        preprocess,
        use_ema=use_ema,
        num_heads=num_heads,
        architecture=architecture,
        with_task=True,
        tell=tell,
    )
    found = dataclasses.replace(found, tokenizer=tokenizer or found.tokenizer)
    if num_classes is not None:
        found = surgery.replace_head(found, num_classes)
    return PretrainedModel(found, upright(how), tuple(class_names))


class PretrainedModel:
    """A network with its parameters, which knows how its images are prepared.

    Images are given as a path, the content of a file, an array of uint8 (height, width,
    channels) or grey (height, width), a PIL image, or a list of these, which an array
    with one more dimension is. A folder is all images in it, in the order of their paths.
    Called with images, it returns the logits of the classes.

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
      >>> model(images).shape, len(model.predict("photos"))
      ((2, 10), 40)
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

    def __call__(self, images: Images) -> Float[np.ndarray, "B K"]:
        """Returns the logits of the classes, or the features if there is no classifier.

        Args:
          images: see the class.

        Raises:
          UserError: an image cannot be read.
        """
        if not self.class_names:
            return self.features(images)
        return self._in_batches(
            images, lambda p, pixels: self._outputs(p, pixels)["logits"]
        )

    @_checked
    def preprocess(self, images: Images) -> Float[Array, "B Y X C"]:
        """Returns images as the network takes them: resized, cropped and normalised.

        Args:
          images: see the class.

        Raises:
          UserError: an image cannot be read.
        """
        return self._normed(np.stack([self._prepare(one) for one in _listed(images)]))

    @_checked
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
        logits = self(images)
        if threshold is None:
            threshold = prediction.threshold_of(self._pretrained)
        how = {"sigmoid": self._sigmoid, "threshold": threshold}
        found = [prediction.rank(row, self.class_names, topk, **how) for row in logits]
        return found[0] if _is_single(images) else found

    @_checked
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

    @_checked
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
        return text_tower(self._pretrained)

    def _image_embeddings(self, images: Images) -> Float[np.ndarray, "B E"]:
        return self.tower.embed_images(self.features(images))

    @_checked
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

    @_checked
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
        listed, found = _listed(images), []
        for i in range(0, len(listed), _BATCH):
            pixels = np.stack([self._prepare(one) for one in listed[i : i + _BATCH]])
            found.append(np.asarray(compute(self.params, pixels)))
        return np.concatenate(found)

    def _normed(self, pixels):
        how = self.preprocessing
        images = transforms.normalize(jax.numpy.asarray(pixels), how.mean, how.std)
        return images.astype(self.model.options["dtype"])

    def _prepare(self, image) -> np.ndarray:
        return _prepare(image, self.preprocessing, self.model.image_shape[-1])


@_checked
def train(
    config: str | os.PathLike | Mapping | TrainConfig,
    workdir: str | os.PathLike | None = None,
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
      workdir: folder for checkpoints, metrics and the report; a new one under runs/ if
        None.
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
    arrays, sections = {}, {}
    if data is not None:
        arrays = _arrays(data, "train", class_names)
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
            complete,
            workdir or _train.new_workdir(complete.name),
            StartupTimer(say=print_line),
            callbacks=callbacks,
        )


@_checked
def finetune(
    photos: str | os.PathLike | Arrays | Mapping[str, Arrays],
    workdir: str | os.PathLike | None = None,
    *,
    class_names: Sequence[str] = (),
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
        "owner/name" on the Hugging Face hub. Or images and labels, or such pairs by the
        name of their split, as `data` of `train`.
      workdir: folder of the run, which is a model for `load_model`; one under
        runs/finetune, the same for the same images and model, if None.
      class_names: of arrays, in label order.
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
    arrays, place = {}, photos
    if isinstance(photos, Mapping | tuple | list):
        arrays, place = _arrays(photos, "train", class_names), IN_MEMORY
    place = arguments.take("photos", fields.Key(help=""), place, "")
    with _opened(arrays, class_names):
        return finetuning.finetune(
            place,
            workdir or _finetune.default_workdir(model, place),
            model=model,
            minutes=minutes,
            folds=folds,
            overrides=overrides,
            callbacks=callbacks,
            say=tell,
        )


@_checked
def evaluate(
    source: str | os.PathLike,
    config: str | os.PathLike | Mapping | EvaluationConfig | None = None,
    *,
    data: Arrays | Mapping[str, Arrays] | None = None,
    class_names: Sequence[str] = (),
    step: int | None = None,
    use_ema: bool = True,
    num_heads: int = 0,
    architecture: str = "",
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
      num_heads, architecture: see `load_model`.
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
    arrays, sections = {}, {}
    if data is not None:
        arrays = _arrays(data, "", class_names)
        sections = _sections(arrays, {"name": IN_MEMORY}, arrays)
    elif config is None:
        raise UserError(
            "config=None: give a recipe, as 'configs/eval/fewshot.py:data=digits', or "
            "data=(images, labels) to classify"
        )
    config = {"batch_size": 2 * _BATCH} if config is None else config
    config = _config(config, overrides, sections, cls=EvaluationConfig)
    found, how = weights.open_weights(
        _at_step(source, step),
        {},
        use_ema=use_ema,
        num_heads=num_heads,
        architecture=architecture,
        with_task=True,
        tell=tell,
    )
    with _opened(arrays, class_names):
        return suite.evaluate(found, how, config, tell).scores


@_checked
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


def _arrays(
    data: Arrays | Mapping[str, Arrays], main: str, class_names: Sequence[str]
) -> dict[str, Arrays]:
    """Returns images and labels by the name of their split, checked.

    Args:
      data: pairs by name, or one pair.
      main: split that there has to be, and that one pair is; "" if there has to be none.
      class_names: in label order; may be empty.
    """
    arrays = dict(data) if isinstance(data, Mapping) else {main or "test": data}
    if main and main not in arrays:
        raise UserError(f"data has no {main!r} among {', '.join(arrays) or 'nothing'}")
    for name, pair in arrays.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            what = f"{type(pair).__name__} {fields.shown(pair)}"
            raise UserError(f"data {name}={what}: give a pair (images, labels)")
        check_pair(f"data {name}: ", *pair, class_names)
    return arrays


def _opened(arrays: Mapping[str, Arrays], class_names: Sequence[str]):
    """Opens arrays, if there are any, in place of every data set."""
    if not arrays:
        return contextlib.nullcontext()

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
    elif isinstance(config, cls):
        raw = fields.to_dict(config)
    else:
        raise UserError(
            f"config={fields.shown(config)} is {type(config).__name__}: give the file of a recipe, "
            f"a mapping of its keys or a {cls.__name__}"
        )
    for name, change in (sections or {}).items():
        raw[name] = change(raw.get(name, {}))
    for line in loading.override(TrainConfig, raw, overrides):
        print_error(line)
    return loading.complete(cls, raw)


def _at_step(source: str | os.PathLike, step: int | None) -> str:
    return os.fspath(source) if step is None else workdirs.at_step(source, step)


def _sides(image_size: int | Sequence[int]) -> tuple[int, int]:
    whole = fields.is_number(image_size, numbers.Integral)
    sides = (image_size, image_size) if whole else image_size
    if not isinstance(sides, Sequence | np.ndarray) or len(sides) != 2:
        raise UserError(
            f"image_size={image_size!r} is neither a side nor (height, width) in pixels"
        )
    about, default = fields.fields(DataConfig), fields.defaults(DataConfig)
    name = "image_size"
    return arguments.take(name, about[name], sides, default[name])


def _is_single(images: Images) -> bool:
    if isinstance(images, np.ndarray):
        # Three dimensions without channels are grey images, as of `train`.
        return images.ndim < 3 or (images.ndim == 3 and images.shape[-1] in (1, 3, 4))
    path = isinstance(images, str | os.PathLike)
    return isinstance(images, bytes | Image.Image) or (
        path and not os.path.isdir(images)
    )


def _listed(images: Images) -> list:
    """Returns single images, with those of folders in their place."""
    if not _is_single(images) and isinstance(images, str | os.PathLike):
        images = [images]
    elif _is_single(images):
        return [images]
    kinds = str | os.PathLike | bytes | np.ndarray | Image.Image
    listed = list(images) if isinstance(images, np.ndarray | Iterable) else [images]
    if not listed:
        raise UserError("images=[]: give at least one")
    found = []
    for one in listed:
        if not isinstance(one, kinds) or isinstance(images, Mapping):
            raise UserError(
                f"images={fields.shown(images)}: give a path, a folder, bytes, an array of uint8, a "
                "PIL image, or a list of these"
            )
        if isinstance(one, str | os.PathLike) and os.path.isdir(one):
            found += [path for _, path in inputs.find_some([os.fspath(one)])]
        else:
            found.append(one)
    return found


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
        name = f"the image of mode {image.mode}"
        with _readable(name):
            data = decode.to_pixels(image, channels)
    if isinstance(data, np.ndarray):
        data = data[..., None] if data.ndim == 2 else data
        if data.dtype != np.uint8 or data.ndim != 3 or not data.size:
            raise UserError(
                f"image of {data.dtype} {data.shape}: give uint8 (height, width, channels)"
            )
    with _readable(name):
        return prepare_image(data, preprocess, channels)


@contextlib.contextmanager
def _readable(name: str):
    try:
        yield
    except (decode.DamagedImage, OSError) as error:
        raise UserError(f"{name} {error}: give another image") from error
