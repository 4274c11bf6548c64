"""Loaded weights that classify and embed images and show their attention."""

import dataclasses
import functools
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int16, Num

from vit_jax import models
from vit_jax.analysis.attention import attention_maps
from vit_jax.analysis.loaded_model import LoadedModel
from vit_jax.api import images as given_images
from vit_jax.api.images import Images
from vit_jax.api.open_network import NetworkArguments, open_network
from vit_jax.config import arguments, fields
from vit_jax.config.fields import key
from vit_jax.data import image_files
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.evaluators import (
    image_features,
    label_maps,
    neighbours,
    numbers,
    prediction,
    sliding_window,
)
from vit_jax.evaluators.local_devices import LocalDevices
from vit_jax.models import layer_features, patches
from vit_jax.models.patches import PatchSequences
from vit_jax.models.text_tower import TextTower
from vit_jax.weights import placement, surgery
from vit_jax.weights.network_images import network_input, prepare_image, prepare_pixels
from vit_jax.weights.pretrained import Pretrained
from vit_jax.weights.text_tower import text_tower

_BATCH = 32  # Images per batch.


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Arguments(NetworkArguments):
    tokenizer: str = key("", "Tokenizer of a text tower.")
    topk: int = key(5, "Classes per image.", at_least=1)
    threshold: float = key(0.5, "Smallest probability.", at_most=1)
    coverage: float = key(0.9, "Coverage of sets of classes.", above=0, below=1)
    neighbors: str = key("", "Labelled images that vote.")
    k: int = key(20, "Number of nearest images that vote.", at_least=1)
    layers: tuple[int, ...] = key((0,), "Layers.", at_least=None, distinct=True)
    norm: bool = key(True, "Whether to apply the final norm to features.")
    tokens: str = key("pooled", "Tokens.", choices=layer_features.TOKENS)
    reshape: bool = key(True, "Whether to arrange patches in their grid.")
    resize: str = key("cover", "Resizing of images.", choices=sliding_window.RESIZES)
    overlap: float = key(1 / 3, "Overlap of neighbouring windows.", below=1)
    batch_size: int = key(32, "Images per batch.", at_least=1)
    texts: tuple[str, ...] = key((), "Texts to compare images with.")
    prompts: tuple[str, ...] = key(("{}",), "Texts with {} in place of a class.")


_checked = arguments.checked(_Arguments)

Best = tuple[prediction.Prediction | numbers.Number, ...]
# With images of any size, one array per image.
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
    mesh: Mesh | None = None,
    tell: Callable[[str], None] = print,
    **options,
) -> "PretrainedModel":
    """Opens weights of any format, ready for images.

    Args:
      source: workdir of a run; a file or folder of Google, timm, Hugging Face and
        others; a name such as "deit:Ti/16" or "timm/vit_base_patch16_224.augreg_in21k";
        or a URL such as "hf://owner/name".
      image_size: side of the images in pixels, or (height, width); the size stored with
        the weights if None.
      num_classes: number of classes of a new classifier, initialised with zeros, that
        replaces the one of the weights; 0 removes the classifier.
      class_names: class names in label order; those stored with the weights if None.
      step: step of a run's checkpoint; the best checkpoint, or else the last, if None.
      use_ema: whether to use the averaged parameters of a run or of a PyTorch training
        checkpoint, if it has any, instead of the last ones.
      num_heads: number of attention heads, for files that do not record it.
      architecture: timm's name of the network, for timm files without a config.json.
      tokenizer: tokenizer of a text tower, see `config.data.tokenizer`; the one stored
        with the weights if None.
      token_merging: number of similar patches that each block merges (ToMe,
        arXiv:2210.09461), which makes a Vision Transformer faster and a little less
        accurate.
      mesh: result of `vit_jax.distributed.mesh.create`, over which the parameters are
        split as in training while they are read, and each batch of images; without one
        each device of this process has a copy.
      tell: function that receives a line about each thing that had to be guessed.
      **options: fields of `vit_jax.weights.Preprocess` that replace those stored with
        the weights, such as `max_tokens=256` to keep the aspect ratio of images or
        `patch=8` for smaller patches; and keys of the network (`config.model`) that
        keep the shapes of its parameters, such as `dtype="bfloat16"` to compute in it
        or `drop_path_rate=0.1` to train it further.

    Raises:
      UserError: the weights cannot be opened, or an argument does not fit them.

    Example:
      >>> import vit_jax
      >>> model = vit_jax.load_model("runs/digits", tell=lambda line: None)
      >>> model
      PretrainedModel('Ti/2' of 'runs/digits', 10 classes, images (8, 8, 1))
    """
    if not isinstance(mesh, Mesh | None):
        raise UserError(
            f"mesh={fields.shown(mesh)}: give the result of "
            "vit_jax.distributed.mesh.create"
        )
    pretrained, how = open_network(
        source,
        options,
        image_size=image_size,
        num_classes=num_classes,
        step=step,
        use_ema=use_ema,
        num_heads=num_heads,
        architecture=architecture,
        token_merging=token_merging,
        tell=tell,
    )
    if tokenizer:
        pretrained = dataclasses.replace(pretrained, tokenizer=tokenizer)
    return PretrainedModel(pretrained, how.upright(), tuple(class_names), mesh)


class PretrainedModel:
    """A network with its parameters and the preprocessing of its images.

    An image is a path, the content of a file, an array of uint8 (height, width,
    channels) or grey (height, width), of NumPy, JAX or another library, or a PIL image.
    Several images are a list of these, an array with one more dimension, or a folder,
    which stands for all images in it in the order of their paths. Calling the model
    with images returns the logits of the classes, or numbers for weights that predict
    numbers.

    Args:
      pretrained: the weights.
      preprocess: how images are prepared.
      class_names: class names in label order; those of the weights if empty.
      mesh: mesh that the parameters are split over, see `load_model`.

    Attributes:
      model: the network; its `apply` is called by the `apply` of this class.
      params: nested dict of arrays on the default device, or on the mesh.
      preprocessing: how images are prepared.
      class_names: class names in label order; empty without a classifier.
      targets: names, units and more of the numbers that the weights predict; None for
        classes.

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
        mesh: Mesh | None = None,
    ):
        model, params = surgery.fit_network(pretrained, preprocess)
        shardings = placement.resolve(mesh, model)
        self.model, self.params = model, placement.place(params, model, shardings)
        self.preprocessing, self.class_names = preprocess, ()
        self.targets = pretrained.targets
        if pretrained.options["num_classes"] and not self.targets:
            self.class_names = prediction.names_of(pretrained, class_names)
        self._pretrained, self._given_names = pretrained, class_names
        self._sigmoid = pretrained.loss == "sigmoid"
        self._devices = LocalDevices(model, mesh)

    def __repr__(self) -> str:
        options, what = self.model.options, f"{len(self.class_names)} classes"
        if self.targets:
            what = ", ".join(self.targets.names)
        return (
            f"PretrainedModel({options['variant']!r} of {self._pretrained.source!r}, "
            f"{what}, images {self.model.image_shape})"
        )

    def apply(
        self,
        params: models.Params,
        images: Float[Array, "B Y X C"] | PatchSequences,
        **more,
    ) -> dict:
        """Computes "logits" and "pre_logits", see `vit_jax.models.Model.apply`.

        Args:
          params: parameters, such as `self.params`.
          images: prepared images, as `preprocess` returns them.
          **more: further arguments of `vit_jax.models.Model.apply`.

        Raises:
          UserError: `rngs` is given, which only modules of Flax take.
        """
        if "rngs" in more:
            raise UserError(
                f"rngs={fields.shown(more['rngs'])}: give key=KEY here; the module of "
                "vit_jax.load_flax takes rngs"
            )
        return self.model.apply(params, images, **more)

    def __call__(self, images: Images) -> Float[np.ndarray, "B K"]:
        """Returns the logits of the classes, or the features without a classifier.

        Weights that predict numbers return them in their units.

        Args:
          images: one image or several, see the class.

        Raises:
          UserError: an image cannot be read.
        """
        if self.targets:
            return self.targets.decode(self._logits(images)).values
        return self._logits(images) if self.class_names else self.features(images)

    def _logits(self, images: Images) -> Float[np.ndarray, "B K"]:
        return self._in_batches(
            images, "logits", lambda *args: self.model.apply(*args)["logits"]
        )

    @_checked
    def preprocess(self, images: Images) -> Float[Array, "B Y X C"] | PatchSequences:
        """Returns images in the network's input format: resized, cropped, normalised.

        Args:
          images: one image or several, see the class.

        Raises:
          UserError: an image cannot be read.
        """
        return self._normed(
            patches.stack([self._prepare(one) for one in self._each(images)])
        )

    @_checked
    def predict(
        self,
        images: Images,
        topk: int = 5,
        *,
        threshold: float | None = None,
        coverage: float | None = None,
        neighbors: str | os.PathLike = "",
        k: int = neighbours.K,
    ) -> list[Best] | Best:
        """Returns the most probable classes, best first; or numbers.

        Args:
          images: one image or several, see the class.
          topk: number of classes per image.
          threshold: smallest probability of the classes to return, in place of `topk`;
            if the network was trained on several labels per image, by default the
            thresholds stored with it, or 0.5.
          coverage: probability with which the returned classes include the right one,
            in place of `topk`, for a calibrated model (docs/finetuning.md).
          neighbors: labelled images, whose features are computed in each call:
            "FOLDER", which has FOLDER/CLASS/*.jpg, a table of paths and labels, or the
            name of a data set. The images with the most similar features vote for their
            classes; a probability is the share of the votes. Weights without a
            classifier can predict so, too.
          k: number of nearest images that vote.

        Returns:
          A list with the classes of each image (label, name and probability); for a
          single image, only its classes. With `neighbors`, each class also has
          `images`, the names of its nearest images. Weights that predict numbers return
          these in place of classes, see `vit_jax.evaluators.numbers.Number`.

        Raises:
          UserError: the model has neither a classifier nor `neighbors`, it is not
            calibrated for `coverage`, or an image cannot be read.
        """
        if coverage is not None and (neighbors or threshold is not None):
            raise UserError(
                f"coverage={coverage:g}: {'neighbors' if neighbors else 'threshold'} also "
                "chooses the classes: leave one of them out"
            )
        if neighbors:
            return self._predict_by(neighbors, images, topk, threshold, k)
        if self.targets:
            each = numbers.numbers_of(self._logits(images), self.targets)
            return each[0] if self._is_single(images) else each
        if not self.class_names:
            raise UserError(
                f"{self._pretrained.source} has no classifier (num_classes=0): give "
                "labelled images as neighbors=FOLDER, weights that have a classifier, "
                "or use zero_shot if they have a text tower"
            )
        if threshold is None:
            threshold = prediction.threshold_of(self._pretrained, coverage)
        logits = self(images)
        how = {"sigmoid": self._sigmoid, "threshold": threshold}
        how |= {"decisions": self._pretrained.calibration}
        how |= {"at_least": 0 if coverage is None else 1}
        return self._best(images, logits, self.class_names, topk, **how)

    def _predict_by(self, place, images: Images, topk, threshold, k):
        """Returns the classes that the nearest labelled images of a place vote for."""
        from vit_jax.tools.finetuning import layout

        source = layout.labelled_images(os.fspath(place))
        labelled = image_features.of_split(source, self._stream, labelled=True)
        classifier = neighbours.NeighbourClassifier(labelled, source.class_names, k)
        best = classifier.rank(self.features(images), topk, threshold)
        return best[0] if self._is_single(images) else best

    def _stream(self, images: Iterable[image_files.Named]) -> Iterator[tuple]:
        """Yields the name of an image, and its features or why it cannot be read."""

        def prepare(data, name):
            channels = self.model.image_shape[-1]
            return prepare_image(data, self.preprocessing, channels, name)

        def features(params, pixels):
            return self.model.apply(params, self._normed(pixels))["pre_logits"]

        def compute(pixels, rows):
            return self._devices.run("pre_logits", features, self.params, pixels, rows)

        return prediction.stream(images, prepare, compute, batch_size=_BATCH)

    @_checked
    def zero_shot(
        self,
        images: Images,
        texts: Sequence[str],
        *,
        prompts: Sequence[str] = ("{}",),
        topk: int = 5,
    ) -> list[Best] | Best:
        """Returns the texts that are most similar to each image, best first.

        Args:
          images: one image or several, see the class.
          texts: texts to compare images with, such as "a photo of a dog"; or names of
            classes, if there are prompts.
          prompts: texts with "{}" in place of a class; the embedding of a class is the
            mean over all of them.
          topk: number of texts per image.

        Returns:
          The same as `predict`. Probabilities sum to 1 over the texts, except for
          weights trained with a sigmoid (SigLIP), which score each text independently.

        Raises:
          UserError: the weights have no text tower or no tokenizer, or an image cannot
            be read.
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
          images: one image or several, see the class.
          texts: texts to compare images with, as for `zero_shot`.

        Raises:
          UserError: the weights have no text tower or no tokenizer, or an image cannot
            be read.
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
        """Returns features from any layers, equal to timm's `forward_intermediates`.

        Batches are split over the devices of this process. At another resolution:
        `load_model(..., image_size=(448, 672))`.

        Args:
          images: one image or several, see the class.
          layers: layer indices, negative ones counted from the last;
            `Model.layer_features` says what each layer is. None: the last layer.
          norm: whether to apply the network's final norm.
          tokens: "patches"; "prefix" (class token and registers); "all" (both); or
            "pooled" (one vector per image, without `layers` the input of the
            classifier).
          reshape: whether to arrange patches in their grid.
          batch_size: number of images per batch.

        Returns:
          One float32 array per layer, or a single array without `layers`: for "patches"
          (B, rows, columns, D), or (B, patches, D) without `reshape`; for "prefix" and
          "all" (B, tokens, D); for "pooled" (B, D). With `max_tokens`, "patches" and
          "all" return a list of arrays without B, one per image.

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
            outputs = self._of_any_size(images, chosen, batch_size, how)
        else:
            outputs = self._in_batches(
                images,
                (chosen, *how.values()),
                lambda *args: self.model.layer_features(*args, chosen, **how),
                batch_size,
            )
        return outputs[0] if layers is None else outputs

    def _of_any_size(self, images, layers, batch_size, how) -> tuple[list, ...]:
        """Returns, for each layer, one array of tokens per image of any size."""
        flat = how | {"reshape": False}
        *outputs, grids = self._in_batches(
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
            for layer in outputs
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
        """Returns the class of each pixel of images of any size.

        With `max_tokens` each image is one sequence of patches; otherwise the network
        runs on windows of the image. Results have the size of the images.

        Args:
          images: one image or several, see the class.
          resize: "cover" resizes an image until it just covers a window of the
            network's input size, "none" keeps its size, "whole" resizes all of it to
            one window.
          overlap: smallest fraction of a window's side that the next window overlaps.
          batch_size: number of windows per batch.

        Returns:
          A list with the class numbers of each image; for a single image, only these numbers.

        Raises:
          UserError: the model has no segmentation head, or an image cannot be read.
        """
        read = ((None, self._read(one)) for one in self._each(images))
        outputs = self.segmenter.label_maps(read, batch_size, resize, overlap)
        maps = [label_map for _, label_map in outputs]
        return maps[0] if self._is_single(images) else maps

    @functools.cached_property
    def segmenter(self) -> label_maps.PixelClassifier:
        """The segmentation head and its class names; UserError without one."""
        return label_maps.PixelClassifier(
            self._pretrained, self.preprocessing, self._given_names
        )

    @_checked
    def attention(self, images: Images) -> Features:
        """Returns the attention of each token to every other, by layer and head.

        Tokens are the prefix (such as the class token), then the patches row by row.

        Args:
          images: one image or several, see the class.

        Returns:
          (B, L, H, N, N) for L layers and H heads; with `max_tokens` a list of arrays
          (L, H, N, N), where N is the number of tokens of the image. These are computed
          one image at a time and compiled once per grid; JAX's caches are cleared after
          32 grids.

        Raises:
          UserError: the network has no attention between all tokens, or an image cannot
            be read.
        """
        if self.preprocessing.max_tokens:
            return [self._attention_of(one) for one in self._each(images)]
        maps = attention_maps(self.model, self.params, self.preprocess(images))
        return np.stack([np.asarray(layer) for layer in maps], axis=1)

    def _attention_of(self, image) -> Float[np.ndarray, "L H N N"]:
        """Returns the attention in an image of any size, by a network for its grid."""
        loaded = self._of_grids
        pixels = loaded.prepare(self._read(image))
        fitted = loaded.fitted(pixels.shape[:2])
        maps = attention_maps(
            fitted.model, fitted.params, fitted.normalize(pixels[None])
        )
        return np.stack([np.asarray(layer[0]) for layer in maps])

    @functools.cached_property
    def _of_grids(self) -> LoadedModel:
        how = self.preprocessing
        if how.patch != self.model.config.patch_size:  # The stem needs another kernel.
            return LoadedModel.from_pretrained("", self._pretrained, how)
        return LoadedModel("", self.model, self.params, how)

    def _in_batches(
        self,
        images: Images,
        name: Hashable,
        function: Callable,
        batch_size: int = _BATCH,
    ):
        """Returns the outputs of a function for all images.

        Args:
          images: one image or several, see the class.
          name: name of the function, which is compiled once per name.
          function: function of parameters and normalised images.
          batch_size: number of images per batch.
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
