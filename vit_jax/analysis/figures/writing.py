"""Reads images, passes them to the figures of a model, and writes the drawings."""

import dataclasses
import io
import os
import pathlib
import re
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)

import numpy as np
from etils import epath
from jaxtyping import UInt8

from vit_jax.analysis import charts
from vit_jax.analysis.figures import FIGURES, create
from vit_jax.analysis.figures.figure import Figure, Picture
from vit_jax.analysis.loaded_model import LoadedModel
from vit_jax.command_line.files import replace_bytes, unique_stem, writing_out
from vit_jax.data import bands, image_files
from vit_jax.data.preprocess import warn_of_dark
from vit_jax.errors import UserError


def write_figures(
    loaded: LoadedModel,
    images: Iterable[image_files.Named],
    figures: Mapping[str, Figure],
    out: epath.Path,
    *,
    other: LoadedModel | None = None,
    max_shown: int = 16,
    batch_size: int = 0,
    on_unreadable: Callable[[str, str], None],
    on_too_few: Callable[[str], None] | None = None,
    on_progress: Callable[[int], object] = lambda num_images: None,
) -> Iterator[str]:
    """Draws figures and writes them to a folder.

    Args:
      loaded: the model.
      images: output of `data.image_files.find`; not read for figures that need only weights.
      figures: figures by name; an object draws one model only.
      out: folder; created if missing.
      other: second model; "cka" compares its layers with those of the first.
      max_shown: maximum number of images for figures of single images.
      batch_size: number of images in the model at a time; 0 chooses by memory.
      on_unreadable: function called with each unreadable image's name and the reason.
      on_too_few: function called with a line per figure that got too few images; if
        None, that is an error.
      on_progress: function called with the number of further completed images.

    Yields:
      Names of the files, relative to `out`, as they are written.

    Raises:
      UserError: a figure does not fit the model, the images or its options, an output
        is not finite, matplotlib is missing, or a file cannot be written.
    """
    _start(figures, loaded, other, batch_size)
    reading = {
        name: f for name, f in figures.items() if images and f.reads != "weights"
    }
    # Figures of weights are drawn before any file is written, since drawing checks
    # them.
    of_weights = [name for name in figures if name not in reading]
    pictures = [(name, one) for name in of_weights for one in figures[name].draw()]
    for name, picture in pictures:
        yield from save(name, picture, out)
    if not reading:
        return
    kinds = reading.values()
    chunk_size, size = chunk_and_batch_size(loaded, kinds, batch_size, max_shown)
    batches = read_batches(
        images,
        [loaded, other] if other else [loaded],
        size,
        on_unreadable,
        num_originals=max_shown if any(f.reads_originals for f in kinds) else 0,
        min_batch_size=max(figure.min_images for figure in kinds),
    )
    num_seen = yield from _write_batches(
        loaded, batches, reading, out, chunk_size, max_shown, on_progress
    )
    if not num_seen:
        raise UserError("--images: none of the images could be read; give others")
    for name, picture in _draw_seen(reading, num_seen, on_too_few):
        yield from save(name, picture, out)


def _draw_seen(
    figures: Mapping[str, Figure],
    num_seen: int,
    on_too_few: Callable[[str], None] | None,
) -> Iterator[tuple[str, Picture]]:
    """Draws the figures of all batches, except those that got too few images."""
    for name, figure in figures.items():
        if too_few := figure.too_few(name, num_seen):
            if on_too_few is None:
                raise UserError(too_few)
            on_too_few(f"figure skipped: {too_few}")
        else:
            yield from ((name, picture) for picture in figure.draw())


def _start(
    figures: Mapping[str, Figure],
    loaded: LoadedModel,
    other: LoadedModel | None,
    batch_size: int,
) -> None:
    for name, figure in figures.items():
        if missing := figure.missing(loaded):
            possible = ",".join(available_figures(loaded, None))
            raise UserError(
                f"--figure={name}: {loaded.name}: {missing}; or draw some of {possible}"
            )
        figure.start(loaded, batch_size, other)


def _write_batches(
    loaded: LoadedModel,
    batches: Iterable["Batch"],
    figures: Mapping[str, Figure],
    out: epath.Path,
    chunk_size: int,
    max_shown: int,
    on_progress: Callable[[int], object],
) -> Generator[str, None, int]:
    """Passes images to figures, writes their drawings, and returns their number."""
    num_seen, all_images = 0, _reads_all(figures.values())
    for batch in batches:
        fitted = loaded.fitted(batch.pixels[0].shape[1:3])
        for figure in figures.values():
            figure.loaded = fitted
        if not num_seen:  # Later batches are padded to this size.
            chunk_size = min(chunk_size, len(batch.names))
        shown = batch.first(max(0, max_shown - num_seen))
        batch = batch if all_images else shown
        num_seen += len(batch.names)
        parts = [
            (name, figure, batch if figure.reads == "all images" else shown)
            for name, figure in figures.items()
        ]
        parts = [part for part in parts if part[-1].names]
        _update_layers(fitted, batch, chunk_size, parts)
        num_drawn = 0
        for name, figure, part in parts:
            for picture in figure.draw_batch(part):
                yield from save(name, picture, out)
                if figure is parts[-1][1]:
                    num_drawn += 1
                    on_progress(1)
        on_progress(len(batch.names) - num_drawn)
        if not all_images and num_seen >= max_shown:
            break
    return num_seen


def _update_layers(
    loaded: LoadedModel,
    batch: "Batch",
    chunk_size: int,
    parts: Sequence[tuple[str, Figure, "Batch"]],
) -> None:
    """Passes the layers of a batch to the figures that read them, for their images."""
    layered = [
        (figure, len(part.names)) for _, figure, part in parts if figure.reads_layers
    ]
    if not layered:
        return
    for layer, images in loaded.iter_layers(batch.pixels[0], batch.names, chunk_size):
        for figure, num_images in layered:
            if images.start < num_images:
                figure.update(layer, images)
        del layer  # Frees its attention before the next is computed.


def _reads_all(figures: Iterable[Figure]) -> bool:
    return any(figure.reads == "all images" for figure in figures)


def available_figures(loaded: LoadedModel, num_images: int | None) -> tuple[str, ...]:
    """Returns the names of the figures that a model supports.

    Args:
      loaded: the model.
      num_images: number of images; None if unknown.
    """
    return tuple(
        name
        for name, figure in create(FIGURES, {}).items()
        if not figure.missing(loaded) and (num_images != 0 or figure.reads == "weights")
    )


def chunk_and_batch_size(
    loaded: LoadedModel, figures: Collection[Figure], batch_size: int, max_shown: int
) -> tuple[int, int]:
    """Returns the images per forward pass, and the images per batch.

    A chunk is as large as memory allows. A figure's smallest number of images may span
    several chunks. Images of any size are processed one by one, since their grids
    differ.
    """
    if loaded.preprocess.max_tokens:
        return 1, 1
    chunk_size = batch_size or loaded.max_chunk_size()
    if not _reads_all(figures):
        chunk_size = min(chunk_size, max_shown)
    min_images = max(figure.min_images for figure in figures)
    return chunk_size, chunk_size * max(1, -(-min_images // chunk_size))


def save(name: str, picture: Picture, out: epath.Path) -> list[str]:
    """Writes a picture as PNG, SVG and npz; replaces each file atomically.

    Returns:
      The names of the files, relative to `out`.

    Raises:
      UserError: a file cannot be written.
    """
    path = f"{name}/{picture.stem}" if picture.stem else name
    arrays = io.BytesIO()
    np.savez_compressed(arrays, **picture.data)
    contents = {
        f"{path}.png": charts.to_png(picture.drawing),
        f"{path}.svg": charts.to_dark_svg(picture.drawing).encode(),
        f"{path}.npz": arrays.getvalue(),
    }
    for file, content in contents.items():
        target = epath.Path(out, file)
        with writing_out(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_bytes(target, content)
    return list(contents)


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of images.

    Attributes:
      names: names of the image files.
      stems: file names for figures, without suffix; distinct.
      originals: decoded images, RGB, of any size; only for the first images, as many as
        were requested.
      pixels: prepared images, one array (B, Y, X, C) per model.
    """

    names: list[str]
    stems: list[str]
    originals: list[UInt8[np.ndarray, "_ _ 3"]]
    pixels: list[UInt8[np.ndarray, "_ _ _ _"]]

    def first(self, count: int) -> "Batch":
        """Returns the first `count` images."""
        return Batch(
            self.names[:count],
            self.stems[:count],
            self.originals[:count],
            [of_model[:count] for of_model in self.pixels],
        )


def read_batches(
    images: Iterable[image_files.Named],
    models: Sequence[LoadedModel],
    batch_size: int,
    on_unreadable: Callable[[str, str], None],
    *,
    num_originals: int = 0,
    min_batch_size: int = 0,
) -> Iterator[Batch]:
    """Reads images in batches, prefetching in threads; each image is decoded once.

    Args:
      images: output of `data.image_files.find`.
      models: models that the images are prepared for.
      batch_size: images per batch; the last batch may be smaller.
      on_unreadable: function called with each unreadable image's name and the reason.
      num_originals: number of readable images whose originals are kept.
      min_batch_size: minimum size of the last batch. To reach it, the last batch may
        have up to `min_batch_size` - 1 images more than `batch_size`.
    """
    num_read, stems = 0, {}

    def load(image: image_files.Named):
        return image[0], image_files.attempt(image, prepare)

    def prepare(data: bytes, name: str):
        # This runs ahead of `num_read`, so slightly more originals are decoded than
        # kept.
        keep = num_read < num_originals
        # Grey images are decoded as grey, which differs from the mean of RGB.
        forms = {model.form for model in models}
        # One original is shown for all models.
        exif = any(model.preprocess.exif for model in models)
        for form in forms:
            warn_of_dark(data, form, name)
        decoded = {form: bands.read(data, form, exif=exif) for form in forms}
        prepared = [model.prepare(decoded[model.form]) for model in models]
        if not keep:
            return None, prepared
        for form, pixels in decoded.items():
            if form.is_photograph and form.channels == 3:
                return pixels, prepared
        limit = models[0].preprocess.max_megapixels
        return bands.picture(data, exif=exif, max_megapixels=limit), prepared

    threads = min(8, os.cpu_count() or 1)
    pending = []
    for name, result in image_files.ahead(
        images, load, threads=threads, limit=max(2, threads)
    ):
        if isinstance(result, str):
            on_unreadable(name, result)
            continue
        original, prepared = result
        stem = unique_stem(file_stem(name), stems)
        original = original if num_read < num_originals else None
        pending.append((name, stem, original, prepared))
        num_read += 1
        if len(pending) == batch_size + min_batch_size:
            yield _stack(pending[:batch_size])
            pending = pending[batch_size:]
    if pending:
        yield _stack(pending)


def _stack(images) -> Batch:
    names, stems, originals, prepared = zip(*images, strict=True)
    return Batch(
        list(names),
        list(stems),
        [original for original in originals if original is not None],
        [np.stack(of_model) for of_model in zip(*prepared, strict=True)],
    )


def file_stem(image: str) -> str:
    """Returns a file stem for an image, without characters that shells would quote."""
    return re.sub(r"[^\w.-]+", "_", pathlib.Path(image).stem).strip("._-") or "image"
