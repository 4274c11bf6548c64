"""Writes the figures of a model to files."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from vit_jax.analysis import (
    DATASET_FIGURES,
    FIGURES,
    IMAGE_FIGURES,
    LAYER_FIGURES,
    WEIGHT_FIGURES,
    canvas,
    plots,
)
from vit_jax.analysis.canvas import Picture, UniqueStems
from vit_jax.analysis.loaded_model import Batch, LoadedModel, read_batches
from vit_jax.analysis.pca_plot import PCAPlot
from vit_jax.analysis.plots import ImageOptions
from vit_jax.analysis.representations import MIN_CKA_IMAGES
from vit_jax.analysis.window_plot import WindowPlot
from vit_jax.data.inputs import Named
from vit_jax.errors import UserError
from vit_jax.models.intermediates import Layer


@runtime_checkable
class DatasetPlot(Protocol):
    """A figure of all images together."""

    def update(self, layer: Layer, images: range) -> None:
        """Adds a layer of a chunk; `images` are the chunk's indices in the batch."""

    def end_batch(self, batch: Batch) -> None:
        """Adds a batch whose layers have all been passed to `update`."""

    def draw(self) -> Picture:
        """Draws the figure of all batches.

        Raises:
          UserError: there were too few images.
        """


@runtime_checkable
class ImagePlot(Protocol):
    """One figure per image, or a sheet of them."""

    def draw(self, batch: Batch) -> Iterator[Picture]:
        """Draws the images of a batch, then discards what was kept of them.

        Args:
          batch: the first images of the batch, all or fewer.
        """


@runtime_checkable
class LayerPlot(ImagePlot, Protocol):
    """One figure per image, of the layers of an encoder."""

    def update(self, layer: Layer, images: range) -> None:
        """Adds a layer of a chunk; `images` are the chunk's indices in the batch."""


@dataclasses.dataclass(frozen=True)
class FigureOptions:
    """The figures to draw.

    Attributes:
      figures: names from FIGURES.
      image_options: options of the figures of single images.
      max_shown: maximum number of images that get figures of their own.
      batch_size: images in the model at a time; 0 chooses by memory.
      layer: index of the layer whose position embeddings are compared.
      explicit: whether these figures were requested by name. If not, a figure that the
        images are too few for is skipped instead of an error.
    """

    figures: Sequence[str]
    image_options: ImageOptions = dataclasses.field(default_factory=ImageOptions)
    max_shown: int = 16
    batch_size: int = 0
    layer: int = 0
    explicit: bool = True

    @property
    def reads_all_images(self) -> bool:
        """Whether a figure needs all images, not only those with own figures."""
        return not {*DATASET_FIGURES}.isdisjoint(self.figures)


def write_figures(
    loaded: LoadedModel,
    images: Iterable[Named],
    options: FigureOptions,
    out: pathlib.Path,
    *,
    other: LoadedModel | None = None,
    on_unreadable: Callable[[str, str], None],
    on_skipped: Callable[[str], None] = print,
    on_progress: Callable[[int], object] = lambda num_images: None,
) -> Iterator[str]:
    """Draws figures and writes them to a folder.

    Args:
      loaded: the model.
      images: from `data.inputs.find`; not read for figures of weights alone.
      options: what to draw.
      out: folder; created if missing.
      other: a second model; "cka" compares its layers with those of the first.
      on_unreadable: called with the name of each unreadable image and the reason.
      on_skipped: called with one line per skipped figure.
      on_progress: called with the number of further images that are complete.

    Yields:
      Names of the files, relative to `out`, as they are written.

    Raises:
      UserError: the model lacks what a figure needs, an option is out of range, an
        output is not finite, there are too few images, matplotlib is missing, or a file
        cannot be written.
    """
    # Options are checked and weights are drawn before the first file is written.
    weight_pictures = list(_draw_weights(loaded, options))
    dataset_plots, image_plots = _create_plots(loaded, other, options)
    for picture in weight_pictures:
        yield from canvas.save(picture, out)
    if not dataset_plots and not image_plots:
        return
    limit, num_seen = options.max_shown if image_plots else 0, 0
    chunk_size, batch_size = chunk_and_batch_size(loaded, options)
    needs_originals = {"rollout", "relevance"} & {*options.figures}
    for batch in read_batches(
        images,
        [loaded, other] if other else [loaded],
        batch_size,
        on_unreadable,
        num_originals=limit if needs_originals else 0,
        min_batch_size=MIN_CKA_IMAGES if "cka" in options.figures else 0,
    ):
        if not num_seen:  # Later batches are padded to this size.
            chunk_size = min(chunk_size, len(batch.names))
        shown = batch.first(max(0, limit - num_seen))
        batch = batch if dataset_plots else shown
        num_seen += len(batch.names)
        active = image_plots if shown.names else []
        _feed_plots(loaded, batch, chunk_size, dataset_plots, active, len(shown.names))
        on_progress(len(batch.names) - len(shown.names))
        for plot in active:
            for picture in plot.draw(shown):
                yield from canvas.save(picture, out)
                if plot is active[-1]:
                    on_progress(1)
        if not dataset_plots and num_seen >= limit:
            break
    if not num_seen:
        raise UserError("--images: none of the images could be read; give others")
    for picture in _draw_dataset_plots(dataset_plots, options.explicit, on_skipped):
        yield from canvas.save(picture, out)


def _draw_dataset_plots(
    dataset_plots: Iterable[DatasetPlot],
    explicit: bool,
    on_skipped: Callable[[str], None],
) -> Iterator[Picture]:
    for plot in dataset_plots:
        try:
            yield plot.draw()
        except UserError as error:
            if explicit:
                raise
            on_skipped(f"figure skipped: {error}")


def available_figures(loaded: LoadedModel, num_images: int | None) -> tuple[str, ...]:
    """Returns the names of the figures that a model supports.

    Args:
      loaded: the model.
      num_images: None if unknown.
    """
    options = loaded.model.options
    unsupported = set()
    if not loaded.model.has_encoder or options["posemb"] == "none":
        unsupported.add("posemb")
    if not options["num_classes"]:
        unsupported.add("relevance")
    if not loaded.model.has_patch_features:
        unsupported.add("pca")
    if not loaded.model.has_windows:
        unsupported.add("windows")
    if loaded.pictures is None:
        unsupported.add("reconstruction")
    names = WEIGHT_FIGURES if num_images == 0 else FIGURES
    if not _has_attention(loaded):
        unsupported |= {*LAYER_FIGURES}
    return tuple(name for name in names if name not in unsupported)


def chunk_and_batch_size(
    loaded: LoadedModel, options: FigureOptions
) -> tuple[int, int]:
    """Returns the images per forward pass, and the images per batch.

    A chunk is what fits in memory. CKA needs MIN_CKA_IMAGES images per batch, which may
    be several chunks.
    """
    chunk_size = options.batch_size or loaded.max_chunk_size()
    if not options.reads_all_images:
        chunk_size = min(chunk_size, options.max_shown)
    minimum = MIN_CKA_IMAGES if "cka" in options.figures else 1
    return chunk_size, chunk_size * -(-minimum // chunk_size)


def _has_attention(loaded: LoadedModel) -> bool:
    return loaded.model.has_encoder


def _draw_weights(loaded: LoadedModel, options: FigureOptions) -> Iterator[Picture]:
    if "filters" in options.figures:
        yield plots.plot_filters(loaded)
    if "posemb" in options.figures:
        yield plots.plot_position_similarity(loaded, options.layer)


def _create_plots(
    loaded: LoadedModel, other: LoadedModel | None, options: FigureOptions
) -> tuple[list[DatasetPlot], list[ImagePlot]]:
    if not {*DATASET_FIGURES, *IMAGE_FIGURES} & {*options.figures}:
        return [], []
    for each in filter(None, (loaded, other)):
        if {*LAYER_FIGURES} & {*options.figures} and not _has_attention(each):
            possible = ",".join(available_figures(each, None))
            raise UserError(
                f"{each.name}: no attention to draw; give a Vision Transformer or a "
                f"hybrid, or draw only {possible}"
            )
    if "reconstruction" in options.figures and loaded.pictures is None:
        raise UserError(
            f"{loaded.name}: no task that predicts images travels with it; give the "
            "workdir of a run of masked_patch, mae or simmim, or a file of MAE with its "
            "decoder"
        )
    stems, image_options = UniqueStems(), options.image_options
    query = plots.Query(loaded, image_options.query)
    chunk_size, _ = chunk_and_batch_size(loaded, options)
    other_chunk_size = options.batch_size or (other or loaded).max_chunk_size()
    dataset_plots = {
        "distance": lambda: plots.DistancePlot(loaded),
        "norms": lambda: plots.NormPlot(loaded),
        "cka": lambda: plots.CKAPlot(loaded, other, other_chunk_size),
    }
    image_plots = {
        "attention": lambda: plots.AttentionPlot(loaded, query, stems, image_options),
        "rollout": lambda: plots.RolloutPlot(loaded, query, stems, image_options),
        "relevance": lambda: plots.RelevancePlot(
            loaded, stems, image_options, chunk_size
        ),
        "windows": lambda: WindowPlot(loaded, stems),
        "pca": lambda: PCAPlot(loaded, stems),
        "reconstruction": lambda: plots.ReconstructionPlot(loaded, UniqueStems()),
    }
    return tuple(
        [create() for name, create in creators.items() if name in options.figures]
        for creators in (dataset_plots, image_plots)
    )


def _feed_plots(
    loaded: LoadedModel,
    batch: Batch,
    chunk_size: int,
    dataset_plots: Sequence[DatasetPlot],
    image_plots: Sequence[ImagePlot],
    num_shown: int,
) -> None:
    """Runs a batch through the model; image plots get the first `num_shown` images."""
    image_plots = [p for p in image_plots if isinstance(p, LayerPlot)]
    if not dataset_plots and not image_plots:
        return
    for layer, images in loaded.iter_layers(batch.pixels[0], batch.names, chunk_size):
        shown = images.start < num_shown
        for plot in [*dataset_plots, *(image_plots if shown else [])]:
            plot.update(layer, images)
        del layer  # Frees its attention before the next is computed.
    for plot in dataset_plots:
        plot.end_batch(batch)
