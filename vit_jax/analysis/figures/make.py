"""From a checkpoint and images to files of figures."""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from vit_jax.analysis import cka
from vit_jax.analysis.figures import canvas, choices, of_images, of_sets, of_weights
from vit_jax.analysis.figures.canvas import Picture
from vit_jax.analysis.figures.choices import Choice
from vit_jax.analysis.figures.names import NAMES, OF_IMAGES, OF_SETS, OF_WEIGHTS
from vit_jax.analysis.subject import Batch, Subject, read
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Order:
    """What is to be drawn.

    Attributes:
      figures: some of NAMES.
      choice: for those of single images.
      shown: images at most that get figures of their own.
      batch_size: images at once; 0 is as many as memory should hold.
      layer: whose position embeddings are compared, from 0.
    """

    figures: Sequence[str]
    choice: Choice = dataclasses.field(default_factory=Choice)
    shown: int = 16
    batch_size: int = 0
    layer: int = 0


def make(
    subject: Subject,
    images: Iterable,
    order: Order,
    out: pathlib.Path,
    *,
    other: Subject | None = None,
    tell: Callable[[str, str], None],
    progress: Callable[[Iterator[Batch]], Iterator[Batch]] = iter,
) -> Iterator[str]:
    """Draws figures into a folder.

    Args:
      subject: the network.
      images: as from `evaluation.inputs.find`; not looked at for figures of weights.
      order: what is drawn.
      out: folder, made if need be.
      other: a second network, whose layers "cka" compares with those of the first.
      tell: is given the name of each image that cannot be read, and why.
      progress: wraps the batches.

    Yields:
      Names of the files, relative to `out`, as they are written.

    Raises:
      UserError: the network or the images have nothing for a figure, matplotlib is
        missing, or the folder cannot be written.
    """
    for picture in _of_weights(subject, order):
        yield from canvas.save(picture, out)
    sets, singles = _parts(subject, other, order)
    if not sets and not singles:
        return
    subjects = [subject] if other is None else [subject, other]
    size = order.batch_size or max(
        min(each.batch_size() for each in subjects),
        cka.LEAST if "cka" in order.figures else 1,
    )
    seen = 0
    for batch in progress(read(images, subjects, size, tell)):
        room = order.shown - seen
        seen += len(batch.names)
        # Beyond those shown, images need not be drawn.
        drawing = singles if room > 0 else []
        _look(subject, batch, [*sets, *drawing])
        for part in sets:
            part.end(batch)
        for part in drawing:
            for picture in itertools.islice(part.pictures(batch), room):
                yield from canvas.save(picture, out)
        if not sets and seen >= order.shown:
            break
    if not seen:
        raise UserError("none of the images could be read: there is nothing to draw")
    for part in sets:
        yield from canvas.save(part.picture(), out)


def possible(subject: Subject, images: int | None) -> tuple[str, ...]:
    """Returns those of NAMES that a network and so many images have something for.

    Args:
      subject: the network.
      images: how many there are; None if that is not known.
    """
    options = subject.model.options
    attends = "heads" in options and images != 0
    classifies = options["classes"] and options.get("head") != "none"
    lacking = {
        "posemb": options.get("posemb", "none") == "none",
        "cka": images is not None and images < cka.LEAST,
        "relevance": not classifies,
    }
    names = NAMES if attends else OF_WEIGHTS
    return tuple(name for name in names if not lacking.get(name))


def _of_weights(subject: Subject, order: Order) -> Iterator[Picture]:
    if "filters" in order.figures:
        yield of_weights.filters_picture(subject)
    if "posemb" in order.figures:
        yield of_weights.positions_picture(subject, order.layer)


def _parts(subject, other, order: Order) -> tuple[list, list]:
    """Makes the figures of all images together, and those of single ones."""
    if not {*OF_SETS, *OF_IMAGES} & {*order.figures}:
        return [], []
    names, choice = choices.Names(), order.choice
    query = choices.Query(subject, choice.query)
    sets = {
        "distance": lambda: of_sets.Distance(subject),
        "norms": lambda: of_sets.Norms(subject),
        "cka": lambda: of_sets.Cka(subject, other),
    }
    singles = {
        "attention": lambda: of_images.Attention(subject, query, names),
        "rollout": lambda: of_images.Rollout(subject, query, names, choice),
        "relevance": lambda: of_images.Relevance(subject, names, choice),
    }
    return tuple(
        [part() for name, part in known.items() if name in order.figures]
        for known in (sets, singles)
    )


def _look(subject: Subject, batch: Batch, parts: list) -> None:
    """Takes a batch through the network, one layer in memory at a time."""
    for layer in subject.model.inside(subject.params, subject.images(batch.pixels[0])):
        for part in parts:
            part.see(layer)
        del layer
