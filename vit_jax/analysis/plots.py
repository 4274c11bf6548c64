"""The figures of a model: of its weights, of sets of images, and of single images.

Plots of images are fed by `LoadedModel.iter_layers` and keep only what they draw.

Letters: L layers, B images of a batch, R images of a chunk, H heads, N tokens,
Y by X patches, T classes drawn, K classes.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vit_jax.analysis import (
    attention,
    canvas,
    charts,
    embeddings,
    overlay,
    representations,
)
from vit_jax.analysis.canvas import Picture, UniqueStems
from vit_jax.analysis.charts import Chart, Series
from vit_jax.analysis.loaded_model import Batch, LoadedModel, check_finite, pad_images
from vit_jax.errors import UserError
from vit_jax.models.intermediates import Layer

# Limits of what is drawn; the data files hold everything.
_FILTER_COLUMNS = 7  # As in the paper.
_MAX_POSITION_CELLS = 1500  # Across: 15 inches.
_MAX_LAYERS, _MAX_HEADS = 12, 16
# Arrays of attention's size in a backward pass: itself, two gradients, a temporary.
_BACKWARD_ARRAYS = 4


def plot_filters(loaded: LoadedModel) -> Picture:
    """Draws the principal components of the filters that are applied to the pixels.

    Above each stands its share of the variance of all filters.
    """
    kernel = embeddings.first_kernel(loaded.params)
    components, explained = embeddings.principal_components(kernel)
    tiles = embeddings.components_to_intensities(components)
    rgb = tiles if tiles.shape[-1] == 3 else tiles.mean(-1, keepdims=True).repeat(3, -1)
    figure = canvas.draw_tiles(
        list((255 * rgb).round().astype(np.uint8)),
        min(_FILTER_COLUMNS, len(components)),
        title=f"{loaded.name}: components of the first filters, with their variance",
        captions=[f"{fraction:.1%}" for fraction in explained],
        tile_width=0.8,
    )
    data = {"components": components, "explained": explained, "kernels": kernel}
    return Picture("filters", figure, data)


def plot_position_similarity(loaded: LoadedModel, layer: int = 0) -> Picture:
    """Draws the similarity of position embeddings as a grid of grids.

    Of a large grid only every few patches are drawn; the data has all.

    Args:
      loaded: the model.
      layer: see `embeddings.position_similarity`.

    Raises:
      UserError: there are no position embeddings, or they are not finite.
    """
    similarity = embeddings.position_similarity(loaded.model, loaded.params, layer)
    rows, columns = map(drawn_patches, similarity.shape[:2])
    kind = loaded.model.options["posemb"]
    figure = canvas.draw_heatmap(
        canvas.mosaic(similarity[np.ix_(rows, columns)]),
        title=f"{loaded.name}: similarity of positions ({kind})",
        x_label="column of the patch",
        y_label="row of the patch",
        colorbar_label="cosine similarity",
        limits=(-1, 1),
        ticks=(
            _grid_ticks(columns, similarity.shape[1]),
            _grid_ticks(rows, similarity.shape[0]),
        ),
        origin="upper",
    )
    return Picture("posemb", figure, {"similarity": similarity})


def drawn_patches(side: int) -> range:
    """Returns the rows (or columns) of patches whose grids fit into the figure.

    Args:
      side: number of patches down (or across).
    """
    step = 1
    while -(-side // step) * (side + 1) > max(_MAX_POSITION_CELLS, side + 1):
        step += 1
    return range(0, side, step)


def _grid_ticks(patches: range, side: int) -> tuple[list[float], list[str]]:
    """Returns grid centres of every few patches, and the patch numbers from 1."""
    shown = range(0, len(patches), -(-len(patches) // 16))
    return [i * (side + 1) + (side - 1) / 2 for i in shown], [
        f"{patches[i] + 1}" for i in shown
    ]


class _LayerBuffer:
    """An array per layer and chunk, assembled to one array per batch."""

    def __init__(self) -> None:
        self._layers: dict[int, list[np.ndarray]] = {}  # By first image of the chunk.

    def append(self, images: range, array: Float[Array, "R ..."]) -> None:
        """Adds the next layer of a chunk."""
        self._layers.setdefault(images.start, []).append(np.asarray(array))

    def pop(self, num_images: int) -> Float[np.ndarray, "L B ..."]:
        """Returns the first images of the batch, without padding; clears the buffer."""
        chunks = [np.stack(layers) for layers in self._layers.values()]
        self._layers = {}
        return np.concatenate(chunks, axis=1)[:, :num_images]


class DistancePlot:
    """Mean attention distance of each head by depth (arXiv:2010.11929, fig. 7 right)."""

    def __init__(self, loaded: LoadedModel):
        model = loaded.model
        self._name, self._num_prefix_tokens = loaded.name, model.num_prefix_tokens
        distances = attention.patch_distances(model.grid, model.patch_size)
        self._distances = jnp.asarray(distances)
        self._buffer, self._sums, self._num_images = _LayerBuffer(), 0.0, 0

    def update(self, layer: Layer, images: range) -> None:
        """Keeps the distance of each image and head."""
        distances = attention.head_distances(
            layer.attention, self._distances, self._num_prefix_tokens
        )
        self._buffer.append(images, distances)

    def end_batch(self, batch: Batch) -> None:
        """Adds the batch to the sums."""
        distances = self._buffer.pop(len(batch.names))
        self._sums = self._sums + distances.sum(1, dtype=np.float64)
        self._num_images += len(batch.names)

    def draw(self) -> Picture:
        """Draws one point per head, and the mean over heads as a line."""
        means = self._sums / self._num_images
        depth, num_heads = means.shape
        layers = tuple(range(1, depth + 1))
        x = tuple(np.repeat(layers, num_heads).tolist())
        y, line = (tuple(v.tolist()) for v in (means.ravel(), means.mean(1)))
        chart = Chart(
            "distance",
            f"{self._name}: attention distance, {self._num_images} images",
            "layer",
            "mean distance in pixels",
            (
                Series("a head", x, y, colour=0, line=False, hollow=True),
                Series("mean of the heads", layers, line, colour=1, marked=False),
            ),
            ticks=_layer_ticks(depth),
        )
        num_images = np.array(self._num_images)
        data = {"pixels": means.astype(np.float32), "images": num_images}
        return Picture("distance", charts.draw(chart), data)


class NormPlot:
    """Norms of the tokens by depth."""

    def __init__(self, loaded: LoadedModel):
        self._name, self._prefix = loaded.name, loaded.model.prefix_tokens
        self._histogram = representations.NormHistogram()
        self._buffer, self._prefix_sums, self._num_images = _LayerBuffer(), 0.0, 0

    def update(self, layer: Layer, images: range) -> None:
        """Keeps the norm of each token."""
        self._buffer.append(images, representations.token_norms(layer.tokens))

    def end_batch(self, batch: Batch) -> None:
        """Adds the batch to the histogram and the sums."""
        norms = self._buffer.pop(len(batch.names))
        self._histogram.update(list(norms[..., len(self._prefix) :]))
        prefix = norms[..., : len(self._prefix)].sum(1, dtype=np.float64)
        self._prefix_sums = self._prefix_sums + prefix
        self._num_images += len(batch.names)

    def draw(self) -> Picture:
        """Draws maximum and quantiles of the patches, and the mean of prefix tokens."""
        quantiles, maximum = self._histogram.quantiles(), self._histogram.max()
        low, _, median, _, high = quantiles.T
        prefix = self._prefix_sums / self._num_images
        lines = [("maximum", maximum), ("99 %", high), ("median", median), ("1 %", low)]
        lines += zip(self._prefix, prefix.T, strict=True)
        layers = tuple(range(1, len(maximum) + 1))
        chart = Chart(
            "norms",
            f"{self._name}: norms of patch tokens, {self._num_images} images",
            "layer",
            "Euclidean norm",
            tuple(
                Series(label, layers, tuple(map(float, line)), i, i, dashes=i % 4)
                for i, (label, line) in enumerate(lines)
            ),
            ticks=_layer_ticks(len(layers)),
        )
        factor = representations.OUTLIER_FACTOR
        data = {
            "quantiles": quantiles,
            "fractions": np.array(representations.QUANTILES),
            "longest": maximum,
            "front_tokens": prefix,
            f"beyond_{factor:g}_medians": self._histogram.outlier_fraction(factor),
            "images": np.array(self._num_images),
        }
        return Picture("norms", charts.draw(chart), data)


class CKAPlot:
    """CKA between the layers of one model, or of two.

    Args:
      loaded: the model whose layers are passed to `update`.
      other: the second model; it reads `batch.pixels[1]`.
      chunk_size: images per chunk in the second model, at most.
    """

    def __init__(
        self, loaded: LoadedModel, other: LoadedModel | None = None, chunk_size: int = 1
    ):
        self._loaded, self._other, self._chunk_size = loaded, other, chunk_size
        self._grams, self._cka = _GramMatrices(), representations.MinibatchCKA()
        self._num_skipped = 0

    def update(self, layer: Layer, images: range) -> None:
        """Keeps the tokens until the layer is complete, then its Gram matrix."""
        self._grams.update(layer, images)

    def end_batch(self, batch: Batch) -> None:
        """Adds the batch; skips it if it is too small, as only the first can be."""
        grams = self._grams.pop()
        if len(batch.names) < representations.MIN_CKA_IMAGES:
            self._num_skipped = len(batch.names)
            return
        self._cka.update(grams, self._other_grams(batch) if self._other else grams)

    def _other_grams(self, batch: Batch) -> list[np.ndarray]:
        if not self._cka.num_images:  # Later batches are padded to this size.
            self._chunk_size = min(self._chunk_size, len(batch.names))
        grams = _GramMatrices()
        for layer, images in self._other.iter_layers(
            batch.pixels[1], batch.names, self._chunk_size
        ):
            grams.update(layer, images)
            del layer  # Frees its attention before the next is computed.
        return grams.pop()

    def draw(self) -> Picture:
        """Draws the matrix of all pairs of layers."""
        num_images = self._cka.num_images
        representations.check_num_cka_images(num_images or self._num_skipped)
        matrix = self._cka.compute()
        other = self._other or self._loaded
        figure = canvas.draw_heatmap(
            matrix,
            title=f"linear CKA of layers, {num_images} images",
            x_label=f"layer of {other.name}",
            y_label=f"layer of {self._loaded.name}",
            colorbar_label="CKA",
            limits=(0, 1),
            ticks=tuple(
                ([number - 1 for number in numbers], list(map(str, numbers)))
                for numbers in map(_layer_ticks, matrix.shape[::-1])
            ),
        )
        return Picture("cka", figure, {"cka": matrix, "images": np.array(num_images)})


class _GramMatrices:
    """The Gram matrix of each layer of a batch.

    Keeps the tokens of one layer at a time, until all chunks have passed it.
    """

    def __init__(self) -> None:
        self._tokens, self._grams = [], []

    def update(self, layer: Layer, images: range) -> None:
        if images.start == 0:  # The first chunk of the next layer.
            self._end_layer()
        self._tokens.append(np.asarray(layer.tokens)[: len(images)])

    def pop(self) -> list[np.ndarray]:
        self._end_layer()
        grams, self._grams = self._grams, []
        return grams

    def _end_layer(self) -> None:
        if self._tokens:
            tokens = np.concatenate(self._tokens)
            self._grams.append(representations.gram_matrix(tokens))
        self._tokens = []


@dataclasses.dataclass(frozen=True)
class ImageOptions:
    """Options of the figures of single images.

    Attributes:
      query: row and column of the query patch; None is the token that the classifier
        reads, or the mean of all patches if it reads no single token.
      head_fusion: of rollout, "mean" or "max".
      discard_ratio: of rollout, fraction of the smallest attention set to 0.
      classes: classes of relevance; the most probable ones if empty.
      topk: number of most probable classes.
      layers: indices of the layers of attention; evenly spaced ones if empty.
    """

    query: tuple[int, int] | None = None
    head_fusion: str = "mean"
    discard_ratio: float = 0.0
    classes: tuple[int, ...] = ()
    topk: int = 2
    layers: tuple[int, ...] = ()


class Query:
    """The query whose attention is drawn, as weights of the tokens.

    Args:
      loaded: the model.
      patch: see `ImageOptions.query`.

    Attributes:
      name: for titles.
      weights: (N,) float32 of sum 1.
      centre: x and y of the patch as fractions of the image; None if the query is no
        single patch.

    Raises:
      UserError: the grid has no such patch.
    """

    def __init__(self, loaded: LoadedModel, patch: tuple[int, int] | None):
        model, (Y, X) = loaded.model, loaded.model.grid
        self.weights = np.zeros(model.num_prefix_tokens + Y * X, np.float32)
        self.centre = None
        if patch is not None:
            row, column = patch
            if not (0 <= row < Y and 0 <= column < X):
                raise UserError(
                    f"--query={row},{column}: no such patch; choose a row from 0 to "
                    f"{Y - 1} and a column from 0 to {X - 1}"
                )
            self.name = f"patch ({row}, {column})"
            self.weights[model.num_prefix_tokens + row * X + column] = 1
            self.centre = (column + 0.5) / X, (row + 0.5) / Y
        elif model.options.get("pool") == "token":
            self.name, self.weights[0] = "class token", 1
        else:
            self.name = "all patches"
            self.weights[model.num_prefix_tokens :] = 1 / (Y * X)


class AttentionPlot:
    """Attention of the query by layer and head.

    Raises:
      UserError: the model has no such layer.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        query: Query,
        stems: UniqueStems,
        options: ImageOptions,
    ):
        self._loaded, self._query, self._stems = loaded, query, stems
        self._layers, self._buffer = options.layers, _LayerBuffer()
        depth = loaded.model.options["depth"]
        for layer in options.layers:
            if layer >= depth:
                raise UserError(
                    f"--layers={layer}: {loaded.name} has {depth} layers; choose from "
                    f"0 to {depth - 1}"
                )

    def update(self, layer: Layer, images: range) -> None:
        """Keeps the attention of the query."""
        weights = _query_attention(layer.attention, jnp.asarray(self._query.weights))
        self._buffer.append(images, weights)

    def draw(self, batch: Batch) -> Iterator[Picture]:
        """Draws one sheet per image: a row per layer, a column per head, each with its scale."""
        maps = self._buffer.pop(len(batch.names)).swapaxes(0, 1)
        grid = np.array(self._loaded.model.grid)
        images = zip(batch.names, batch.pixels[0], maps, strict=True)
        for name, pixels, of_image in images:
            figure = self._draw_sheet(pixels, of_image)
            data = {"attention": of_image, "grid": grid, "image": pixels}
            yield Picture(f"attention/{self._stems.stem(name)}", figure, data)

    def _draw_sheet(self, pixels: np.ndarray, maps: Float[np.ndarray, "L H N"]):
        model, centre = self._loaded.model, self._query.centre
        depth, num_heads, _ = maps.shape
        layers = self._layers or _evenly_spaced(depth, _MAX_LAYERS)
        heads = _evenly_spaced(num_heads, _MAX_HEADS)
        patches = maps[..., model.num_prefix_tokens :].reshape(
            depth, num_heads, *model.grid
        )
        tiles: list[np.ndarray | None] = []
        captions: list[str] = []
        for layer in layers:
            tiles += [*(patches[layer, head] for head in heads), None]
            greatest = [f"to {patches[layer, head].max():.1%}" for head in heads]
            if not captions:
                greatest = [
                    f"head {head + 1}: {scale}"
                    for head, scale in zip(heads, greatest, strict=True)
                ]
            captions += [*greatest, "" if captions else "image"]
        image = len(heads)  # Index of the image's tile, at the end of the first row.
        tiles[image] = pixels.repeat(3 // pixels.shape[-1], axis=-1)
        return canvas.draw_tiles(
            tiles,
            1 + len(heads),
            title=f"{self._loaded.name}: attention of the {self._query.name}, from the "
            "least of a map (dark) to its greatest (yellow)",
            captions=captions,
            row_labels=[f"layer {layer + 1}" for layer in layers],
            tile_width=0.8,
            rings={image: centre} if centre else {},
        )


class RolloutPlot:
    """Attention rollout of the query, over the image.

    Raises:
      UserError: an option of rollout is out of range.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        query: Query,
        stems: UniqueStems,
        options: ImageOptions,
    ):
        attention.check_rollout_options(options.head_fusion, options.discard_ratio)
        self._loaded, self._query, self._stems = loaded, query, stems
        self._options, self._rollouts = options, {}  # By first image of the chunk.

    def update(self, layer: Layer, images: range) -> None:
        """Extends the rollout of the chunk by a layer."""
        self._rollouts[images.start] = attention.rollout_step(
            self._rollouts.get(images.start),
            layer.attention,
            self._options.head_fusion,
            self._options.discard_ratio,
        )

    def draw(self, batch: Batch) -> Iterator[Picture]:
        """Draws each image beside its overlay."""
        chunks = [
            np.einsum("n,bnm->bm", self._query.weights, np.asarray(rollout))
            for rollout in self._rollouts.values()
        ]
        self._rollouts = {}
        tokens = np.concatenate(chunks)[: len(batch.names)]
        loaded, options = self._loaded, self._options
        caption = f"{options.head_fusion} of the heads"
        if options.discard_ratio:
            caption += f" without their least {options.discard_ratio:.0%}"
        images = zip(batch.names, batch.originals, tokens, strict=True)
        for name, image, of_image in images:
            blended = _overlay_tokens(loaded, image, of_image)
            figure = canvas.draw_tiles(
                [image, blended],
                2,
                title=f"{loaded.name}: rollout, {self._query.name}",
                captions=["image", caption],
                tile_width=canvas.native_tile_width(image),
            )
            grid = np.array(loaded.model.grid)
            data = {"rollout": of_image, "grid": grid, "overlay": blended}
            yield Picture(f"rollout/{self._stems.stem(name)}", figure, data)


class ReconstructionPlot:
    """What the task of pretraining sees of images, and makes of it: a sheet.

    Args:
      loaded: a model with `pictures`.
      stems: file names.
    """

    def __init__(self, loaded: LoadedModel, stems: UniqueStems):
        self._loaded, self._stems = loaded, stems

    def draw(self, batch: Batch) -> Iterator[Picture]:
        """Draws a row for each image: as it is, hidden in part, and predicted."""
        found = self._loaded.draw_task(batch.pixels[0])
        rows = zip(*found.values(), strict=True)
        figure = canvas.draw_tiles(
            [tile.repeat(3 // tile.shape[-1], -1) for row in rows for tile in row],
            len(found),
            title=f"{self._loaded.name}: reconstruction",
            captions=[name.replace("_", " ") for name in found],
            tile_width=1.6,
        )
        stem = self._stems.stem("reconstruction")
        yield Picture(stem, figure, found | {"images": np.array(batch.names)})


class RelevancePlot:
    """Relevance of the patches to some classes, over the image.

    Args:
      loaded: a model with a classifier.
      stems: file names.
      options: the classes.
      chunk_size: images per chunk, at most.

    Raises:
      UserError: the model has no classifier, or no such class.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        stems: UniqueStems,
        options: ImageOptions,
        chunk_size: int,
    ):
        num_classes = loaded.model.options["num_classes"]
        if not num_classes:
            raise UserError(
                f"--figure=relevance: {loaded.name} has no classifier; leave it out"
            )
        for label in options.classes:
            if label >= num_classes:
                raise UserError(
                    f"--classes={label}: {loaded.name} has {num_classes} classes; "
                    f"choose from 0 to {num_classes - 1}"
                )
        self._loaded, self._stems, self._options = loaded, stems, options
        self._max_chunk_size = min(chunk_size, loaded.max_chunk_size(_BACKWARD_ARRAYS))
        self._chunk_size, self._tokens = 0, {}  # Tokens by first image of the chunk.

    def update(self, layer: Layer, images: range) -> None:
        """Keeps the tokens; those of the last layer give the logits."""
        self._tokens[images.start] = layer.tokens

    def draw(self, batch: Batch) -> Iterator[Picture]:
        """Draws each image beside one overlay per class."""
        loaded, num_images = self._loaded, len(batch.names)
        logits = self._logits(batch.names)
        labels = np.argsort(-logits, axis=1, kind="stable")[:, : self._options.topk]
        if self._options.classes:
            labels = np.tile(self._options.classes, (num_images, 1))
        relevances = self._relevance(batch.pixels[0], labels)
        images = zip(batch.names, batch.originals, strict=True)
        for i, (name, image) in enumerate(images):
            check_finite(relevances[i], f"{loaded.name}'s gradient for {name}")
            overlays = [_overlay_tokens(loaded, image, row) for row in relevances[i]]
            captions = [loaded.class_name(int(label))[:34] for label in labels[i]]
            figure = canvas.draw_tiles(
                [image, *overlays],
                1 + len(overlays),
                title=f"{loaded.name}: relevance",
                captions=["image", *captions],
                tile_width=canvas.native_tile_width(image),
            )
            data = {
                "relevance": relevances[i],
                "classes": labels[i],
                "logits": logits[i],
                "grid": np.array(loaded.model.grid),
            }
            yield Picture(f"relevance/{self._stems.stem(name)}", figure, data)

    def _logits(self, image_names: Sequence[str]) -> Float[np.ndarray, "B K"]:
        model, params = self._loaded.model, self._loaded.params
        chunks = [
            model.classify_tokens(params, tokens) for tokens in self._tokens.values()
        ]
        self._tokens = {}
        logits = np.concatenate([np.asarray(chunk["logits"]) for chunk in chunks])
        for name, of_image in zip(image_names, logits, strict=False):
            check_finite(of_image, f"{self._loaded.name}'s output for {name}")
        return logits[: len(image_names)]

    def _relevance(
        self, pixels: np.ndarray, labels: Int[np.ndarray, "B T"]
    ) -> Float[np.ndarray, "B T N"]:
        """Returns the relevance of all tokens to the labels of each image."""
        model, params, chunks = self._loaded.model, self._loaded.params, []
        # Later batches are padded to the chunk size of the first one: one program.
        size = self._chunk_size = self._chunk_size or min(
            self._max_chunk_size, len(pixels)
        )
        for start in range(0, len(pixels), size):
            chunk = slice(start, start + size)
            images = self._loaded.normalize(pad_images(pixels[chunk], size))
            chunk_labels = np.zeros((size, labels.shape[1]), np.int32)
            chunk_labels[: len(labels[chunk])] = labels[chunk]
            relevances = [
                attention.relevance(model, params, images, jnp.asarray(column))
                for column in chunk_labels.T
            ]
            chunks.append(np.stack(relevances, axis=1))
        return np.concatenate(chunks)[: len(pixels)]


@jax.jit
def _query_attention(attention, weights):
    return jnp.einsum("n,bhnm->bhm", weights, attention, precision="highest")


def _overlay_tokens(
    loaded: LoadedModel, image: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
    patches, grid = tokens[loaded.model.num_prefix_tokens :], loaded.model.grid
    return overlay.overlay_patches(image, patches, grid, loaded.preprocess)


def _layer_ticks(depth: int) -> tuple[int, ...]:
    """Returns layer numbers from 1, at most 12."""
    return tuple(range(1, depth + 1, -(-depth // 12)))


def _evenly_spaced(count: int, max_count: int) -> list[int]:
    """Returns indices below `count`: all, or `max_count` evenly spaced ones."""
    indices = np.linspace(0, count - 1, min(count, max_count))
    return [int(index) for index in np.unique(indices.round())]
