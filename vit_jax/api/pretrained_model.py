"""Weights of any format, which classify, embed and show their attention."""

import dataclasses
import functools
import os
from collections.abc import Callable, Hashable, Mapping, Sequence

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float, Int16, Num

from vit_jax import models, weights
from vit_jax.analysis.attention import attention_maps
from vit_jax.analysis.loaded_model import LoadedModel
from vit_jax.api import images as given_images
from vit_jax.api.images import Images
from vit_jax.api.models import check_names, network_keys, sides
from vit_jax.config import arguments
from vit_jax.config.fields import key
from vit_jax.data.preprocess import FIELDS, Preprocess, checked_fields
from vit_jax.errors import UserError
from vit_jax.evaluators import label_maps, prediction, sliding_window
from vit_jax.evaluators.local_devices import LocalDevices
from vit_jax.models import layer_features, patches
from vit_jax.models.patches import PatchSequences
from vit_jax.models.text_tower import TextTower
from vit_jax.weights import checkpoint_folders, surgery
from vit_jax.weights.network_images import network_input, prepare_pixels
from vit_jax.weights.pretrained import Pretrained
from vit_jax.weights.text_tower import text_tower

_BATCH = 32  # Images that pass through a network at once.


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsArguments:
    """Arguments of all functions that open weights."""

    source: str = key("", "Weights.")
    class_names: tuple[str, ...] = key((), "In label order.")
    step: int = key(0, "Step of a checkpoint.")
    use_ema: bool = key(True, "Whether to take averaged parameters.")
    num_heads: int = key(0, "Attention heads.", below=2**31)
    architecture: str = key("", "timm's name of a network.")
    tell: Callable = key(print, "Called with lines.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Arguments(WeightsArguments):
    num_classes: int = key(0, "Width of the classifier.", below=2**31)
    tokenizer: str = key("", "Tokenizer of a text tower.")
    token_merging: int = key(0, "Tokens that each block merges.", below=2**31)
    topk: int = key(5, "Classes per image.", at_least=1)
    threshold: float = key(0.5, "Least probability.", at_most=1)
    layers: tuple[int, ...] = key((0,), "Layers.", at_least=None, distinct=True)
    norm: bool = key(True, "Whether features are normalised.")
    tokens: str = key("pooled", "Tokens.", choices=layer_features.TOKENS)
    reshape: bool = key(True, "Whether patches stand in their grid.")
    resize: str = key("cover", "How windows are cut.", choices=sliding_window.RESIZES)
    overlap: float = key(1 / 3, "Of windows.", below=1)
    batch_size: int = key(32, "Images at once.", at_least=1)
    texts: tuple[str, ...] = key((), "To compare images with.")
    prompts: tuple[str, ...] = key(("{}",), "With {} for a class.")


_checked = arguments.checked(_Arguments)

Best = tuple[prediction.Prediction, ...]
# Of images of any size one array each.
Features = Float[np.ndarray, "B ..."] | list[Float[np.ndarray, "..."]]


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
    token_merging: int = 0,
    tell: Callable[[str], None] = print,
    **options,
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
      use_ema: averaged parameters of a run or a training checkpoint of PyTorch if it has
        them, not the last ones.
      num_heads: attention heads, for files that do not state them.
      architecture: timm's name of the network, for its files without a config.json.
      tokenizer: of a text tower if not the weights', see `config.data.tokenizer`.
      token_merging: similar patches that each block merges (ToMe, arXiv:2210.09461),
        which makes a Vision Transformer faster and a little less accurate.
      tell: called with a line about each thing that had to be guessed.
      **options: fields of `vit_jax.weights.Preprocess`, if not the weights', as
        `max_tokens=256` to keep the aspect of images, or `patch=8` for smaller patches;
        and keys of the network, as of `create_model`, that its parameters fit, as
        `dtype="bfloat16"` to compute in it, or `drop_path_rate=0.1` to train it on.

    Raises:
      UserError: there are no such weights, or something does not fit.

    Example:
      >>> import vit_jax
      >>> model = vit_jax.load_model("runs/digits", tell=lambda line: None)
      >>> model
      PretrainedModel('Ti/2' of 'runs/digits', 10 classes, images (8, 8, 1))
    """
    check_names(options)
    preprocess = checked_fields(options)
    if image_size is not None:
        preprocess |= {"image_size": sides(image_size), "cut": (0, 0)}
    pretrained, how = weights.open_weights(
        at_step(source, step),
        preprocess,
        use_ema=use_ema,
        num_heads=num_heads,
        architecture=architecture,
        with_task=True,
        token_merging=token_merging,
        tell=tell,
    )
    pretrained = _with_network_keys(
        pretrained, {k: v for k, v in options.items() if k not in preprocess}
    )
    if tokenizer:
        pretrained = dataclasses.replace(pretrained, tokenizer=tokenizer)
    if num_classes is not None:
        pretrained = surgery.replace_head(pretrained, num_classes)
    return PretrainedModel(pretrained, how.upright(), tuple(class_names))


def _with_network_keys(
    pretrained: Pretrained, given: Mapping[str, object]
) -> Pretrained:
    """Returns weights whose network has other values of some keys.

    Raises:
      UserError: it has no such key, or parameters of other shapes by it.
    """
    variant = pretrained.options["variant"]
    known = network_keys(variant, pretrained.options).keys() - {"variant"}
    if unknown := sorted(given.keys() - known):
        raise UserError(
            f"{unknown[0]}={given[unknown[0]]!r}: not one of "
            f"{', '.join(sorted(FIELDS))} for images, nor a key of {variant}: "
            f"{', '.join(sorted(known))}"
        )
    changed = network_keys(variant, given)
    options = pretrained.options | changed
    before, after = (
        flatten_dict(models.create(**each).shapes, sep="/")
        for each in (pretrained.options, options)
    )
    try:
        surgery.check_keys(before, after, None)
    except UserError as error:
        named = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        raise UserError(f"{named}: {error}; leave it out") from error
    return dataclasses.replace(pretrained, options=options)


class PretrainedModel:
    """A network with its parameters, which knows how its images are prepared.

    Images are given as a path, the content of a file, an array of uint8 (height, width,
    channels) or grey (height, width), of NumPy, JAX or another library, a PIL image, or a
    list of these, which an array with one more dimension is. A folder is all images in it,
    in the order of their paths. Called with images, it returns the logits of the classes.

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
      >>> model.features(images, tokens="patches").shape
      (2, 4, 4, 48)
      >>> first, last = model.features(images, layers=(0, -1), tokens="all")
      >>> first.shape, last.shape
      ((2, 17, 48), (2, 17, 48))
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
        self._pretrained, self._given_names = pretrained, class_names
        self._sigmoid = pretrained.loss == "sigmoid"
        self._devices = LocalDevices()

    def __repr__(self) -> str:
        options = self.model.options
        return (
            f"PretrainedModel({options['variant']!r} of {self._pretrained.source!r}, "
            f"{len(self.class_names)} classes, images {self.model.image_shape})"
        )

    def apply(
        self,
        params: models.Params,
        images: Float[Array, "B Y X C"] | PatchSequences,
        **more,
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
            images, "logits", lambda *args: self.model.apply(*args)["logits"]
        )

    @_checked
    def preprocess(self, images: Images) -> Float[Array, "B Y X C"] | PatchSequences:
        """Returns images as the network takes them: resized, cropped and normalised.

        Args:
          images: see the class.

        Raises:
          UserError: an image cannot be read.
        """
        return self._normed(
            patches.stack([self._prepare(one) for one in self._each(images)])
        )

    @_checked
    def predict(
        self, images: Images, topk: int = 5, *, threshold: float | None = None
    ) -> list[Best] | Best:
        """Returns the most probable classes, best first.

        Args:
          images: see the class.
          topk: classes an image.
          threshold: smallest probability of the classes to return, in place of `topk`;
            0.5 by default if the network was trained on several labels an image.

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
        return self._best(images, logits, self.class_names, topk, **how)

    @_checked
    def zero_shot(
        self,
        images: Images,
        texts: Sequence[str],
        *,
        prompts: Sequence[str] = ("{}",),
        topk: int = 5,
    ) -> list[Best] | Best:
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
        return self._best(images, logits, texts, topk, sigmoid=self.tower.sigmoid)

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
        self,
        images: Images,
        *,
        layers: Sequence[int] | None = None,
        norm: bool = True,
        tokens: str = "pooled",
        reshape: bool = True,
        batch_size: int = _BATCH,
    ) -> Features | tuple[Features, ...]:
        """Returns features of any layers, the same as timm's `forward_intermediates`.

        Batches are split over the devices of this process. At another resolution:
        `load_model(..., image_size=(448, 672))`.

        Args:
          images: see the class.
          layers: numbers from 0, or negative ones counted from the last; what they are
            in each network says `Model.layer_features`. None: the last layer.
          norm: whether to apply the network's final norm.
          tokens: "patches", "prefix" (class token and registers), "all" of both, or
            "pooled": one vector per image; without `layers` the one that the classifier
            sees.
          reshape: whether patches stand in their grid.
          batch_size: images that pass through the network at once.

        Returns:
          A float32 array for each of the layers, or a single one without `layers`: for
          "patches" (B, rows, columns, D), without `reshape` (B, patches, D); for
          "prefix" and "all" (B, tokens, D); for "pooled" (B, D). With `max_tokens` a list
          of arrays without B for "patches" and "all", each of its image's own size.

        Raises:
          UserError: the network has no such features, or an image cannot be read.
        """
        if layers is None and norm and tokens == "pooled":
            if not self.model.representations:
                raise UserError(
                    f"{self._pretrained.source} has no features of whole images"
                )
            return self._in_batches(
                images,
                "pre_logits",
                lambda *args: self.model.apply(*args)["pre_logits"],
                batch_size,
            )
        how = {"norm": norm, "tokens": tokens, "reshape": reshape}
        chosen = (-1,) if layers is None else layers
        layer_features.check_all(self.model, chosen)
        if self.preprocessing.max_tokens and tokens in ("patches", "all"):
            found = self._of_any_size(images, chosen, batch_size, how)
        else:
            found = self._in_batches(
                images,
                (chosen, *how.values()),
                lambda *args: self.model.layer_features(*args, chosen, **how),
                batch_size,
            )
        return found[0] if layers is None else found

    def _of_any_size(self, images, layers, batch_size, how) -> tuple[list, ...]:
        """Returns for each layer the tokens of each image, whose number differs."""
        flat = how | {"reshape": False}
        *found, grids = self._in_batches(
            images,
            (layers, *how.values()),
            lambda params, sequences: (
                *self.model.layer_features(params, sequences, layers, **flat),
                sequences.grids,
            ),
            batch_size,
        )
        prefix = self.model.num_prefix_tokens if how["tokens"] == "all" else 0

        def cut(x, grid):
            x = x[: prefix + grid.prod()]
            whole = how["reshape"] and how["tokens"] == "patches"
            return x.reshape(*grid, -1) if whole else x

        return tuple(
            [cut(x, grid[0]) for x, grid in zip(layer, grids, strict=True)]
            for layer in found
        )

    @_checked
    def segment(
        self,
        images: Images,
        *,
        resize: str = "cover",
        overlap: float = 1 / 3,
        batch_size: int = _BATCH,
    ) -> list[Int16[np.ndarray, "H W"]] | Int16[np.ndarray, "H W"]:
        """Returns the class of each pixel of images of any size, at their own sizes.

        With `max_tokens` an image is one sequence of patches; otherwise windows are cut.

        Args:
          images: see the class.
          resize: "cover" resizes an image until it just covers a window of the network's
            size, "none" keeps its size, "whole" resizes all of it to one window.
          overlap: least part of a window's side that the next one covers too.
          batch_size: windows that pass through the network at once.

        Returns:
          For each image its class numbers; for a single image these alone.

        Raises:
          UserError: there is no head for masks, or an image cannot be read.
        """
        read = ((None, self._read(one)) for one in self._each(images))
        found = self.segmenter.label_maps(read, batch_size, resize, overlap)
        maps = [label_map for _, label_map in found]
        return maps[0] if self._is_single(images) else maps

    @functools.cached_property
    def segmenter(self) -> label_maps.PixelClassifier:
        """The head for masks, with the names of its classes; UserError if there is none."""
        return label_maps.PixelClassifier(
            self._pretrained, self.preprocessing, self._given_names
        )

    @_checked
    def attention(self, images: Images) -> Features:
        """Returns the attention from each token to each, by layer and head.

        Tokens are the prefix, as the class token, then the patches row by row.

        Args:
          images: see the class.

        Returns:
          (B, L, H, N, N) of L layers and H heads; with `max_tokens` a list of arrays
          (L, H, N, N) of each image's own N tokens. These are computed one by one and
          compiled for each grid; after 32 grids JAX's caches are emptied.

        Raises:
          UserError: the network has no attention between all tokens, or an image cannot
            be read.
        """
        if self.preprocessing.max_tokens:
            return [self._attention_of(one) for one in self._each(images)]
        maps = attention_maps(self.model, self.params, self.preprocess(images))
        return np.stack([np.asarray(layer) for layer in maps], axis=1)

    def _attention_of(self, image) -> Float[np.ndarray, "L H N N"]:
        """Returns the attention in an image of any size, by a network of its grid."""
        loaded = self._of_grids
        pixels = loaded.prepare(self._read(image))
        own = loaded.fitted(pixels.shape[:2])
        maps = attention_maps(own.model, own.params, own.normalize(pixels[None]))
        return np.stack([np.asarray(layer[0]) for layer in maps])

    @functools.cached_property
    def _of_grids(self) -> LoadedModel:
        how = self.preprocessing
        if how.patch != self.model.config.patch_size:  # Another kernel.
            return LoadedModel.from_pretrained("", self._pretrained, how)
        return LoadedModel("", self.model, self.params, how)

    def _in_batches(
        self,
        images: Images,
        name: Hashable,
        function: Callable,
        batch_size: int = _BATCH,
    ):
        """Returns the outputs of all images.

        Args:
          images: see the class.
          name: of the function; it is compiled once for each name.
          function: function of parameters and normalised images.
          batch_size: images at once.
        """

        def of_pixels(params, pixels):
            return function(params, self._normed(pixels))

        listed, results = self._each(images), []
        rows = min(batch_size, len(listed))  # All batches have one shape.
        for i in range(0, len(listed), batch_size):
            some = listed[i : i + batch_size]
            pixels = patches.stack([self._prepare(one) for one in some])
            results.append(
                self._devices.run(name, of_pixels, self.params, pixels, rows)
            )
        return jax.tree.map(lambda *parts: np.concatenate(parts), *results)

    def _normed(self, pixels):
        dtype = self.model.options["dtype"]
        return network_input(pixels, self.preprocessing, dtype)

    def _best(self, images: Images, logits, names: Sequence[str], topk: int, **how):
        """Returns the most probable classes of each image, or of the single one."""
        best = [prediction.rank(row, names, topk, **how) for row in logits]
        return best[0] if self._is_single(images) else best

    def _is_single(self, images: Images) -> bool:
        return given_images.is_single(images, self.model.image_shape[-1])

    def _each(self, images: Images) -> list:
        return given_images.listed(images, self.model.image_shape[-1])

    def _read(self, image) -> Num[np.ndarray, "H W C"]:
        channels = self.model.image_shape[-1]
        return given_images.prepare(image, self.preprocessing, channels)

    def _prepare(self, image) -> np.ndarray | PatchSequences:
        channels = self.model.image_shape[-1]
        how = self.preprocessing
        return given_images.prepare(image, how, channels, prepare_pixels)


def at_step(source: str | os.PathLike, step: int | None) -> str:
    """Returns the weights that a source and a run's step name."""
    if step is None:
        return os.fspath(source)
    return checkpoint_folders.at_step(source, step)
