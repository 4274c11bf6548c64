"""From a checkpoint and images to files of figures."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from vit_jax.analysis import cka
from vit_jax.analysis.batches import Batch, read
from vit_jax.analysis.figures import canvas, choices, of_images, of_sets, of_weights
from vit_jax.analysis.figures.canvas import Picture
from vit_jax.analysis.figures.choices import Choice
from vit_jax.analysis.figures.names import NAMES, OF_IMAGES, OF_SETS, OF_WEIGHTS
from vit_jax.analysis.figures.parts import OfAll, OfEach
from vit_jax.analysis.subject import Subject
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Order:
    """What is to be drawn.

    Attributes:
      figures: some of NAMES.
      choice: for those of single images.
      shown: images at most that get figures of their own.
      batch_size: images at once in the network; 0 is as many as memory should hold.
      layer: whose position embeddings are compared, from 0.
      named: whether somebody asked for these figures. If not, one that the images are
        too few for is left out.
    """

    figures: Sequence[str]
    choice: Choice = dataclasses.field(default_factory=Choice)
    shown: int = 16
    batch_size: int = 0
    layer: int = 0
    named: bool = True

    @property
    def of_sets(self) -> bool:
        """Whether all images are looked at, not only those that are shown."""
        return not {*OF_SETS}.isdisjoint(self.figures)


def make(
    subject: Subject,
    images: Iterable,
    order: Order,
    out: pathlib.Path,
    *,
    other: Subject | None = None,
    tell: Callable[[str, str], None],
    note: Callable[[str], None] = print,
    done: Callable[[int], object] = lambda images: None,
) -> Iterator[str]:
    """Draws figures into a folder.

    Args:
      subject: the network.
      images: as from `evaluation.inputs.find`; not looked at for figures of weights.
      order: what is drawn.
      out: folder, made if need be.
      other: a second network, whose layers "cka" compares with those of the first.
      tell: is given the name of each image that cannot be read, and why.
      note: is given a line on each figure that is left out.
      done: is given how many more images were looked at, and drawn if they are.

    Yields:
      Names of the files, relative to `out`, as they are written.

    Raises:
      UserError: the network or the images have nothing for a figure, or are not finite;
        a choice is none that there is; matplotlib is missing, or the folder cannot be
        written.
    """
    # Before anything is written all choices are looked at.
    of_parameters = list(_of_weights(subject, order))
    sets, singles = _parts(subject, other, order)
    for picture in of_parameters:
        yield from canvas.save(picture, out)
    if not sets and not singles:
        return
    subjects = [subject] if other is None else [subject, other]
    rows, size = sizes(subject, order)
    limit, seen = order.shown if singles else 0, 0
    laid_over = not {"rollout", "relevance"}.isdisjoint(order.figures)
    for batch in read(
        images,
        subjects,
        size,
        tell,
        originals=limit if laid_over else 0,
        least=cka.LEAST if "cka" in order.figures else 0,
    ):
        if not seen:  # Later batches are filled up to the first.
            rows = min(rows, len(batch.names))
        shown = batch.first(max(0, limit - seen))
        batch = batch if sets else shown
        seen += len(batch.names)
        drawing = singles if shown.names else []
        _look(subject, batch, rows, sets, drawing, len(shown.names))
        done(len(batch.names) - len(shown.names))
        for part in drawing:
            for picture in part.pictures(shown):
                yield from canvas.save(picture, out)
                if part is drawing[-1]:
                    done(1)
        if not sets and seen >= limit:
            break
    if not seen:
        raise UserError("none of the images could be read: there is nothing to draw")
    for part in sets:
        try:
            picture = part.picture()
        except UserError as error:
            if order.named:
                raise
            note(f"a figure is left out: {error}")
            continue
        yield from canvas.save(picture, out)


def possible(subject: Subject, images: int | None) -> tuple[str, ...]:
    """Returns those of NAMES that a network has something for.

    Args:
      subject: the network.
      images: how many there are; None if that is not known.
    """
    options = subject.model.options
    lacking = {
        "posemb": options.get("posemb", "none") == "none",
        "relevance": not options["classes"],
    }
    names = NAMES if _attends(subject) and images != 0 else OF_WEIGHTS
    return tuple(name for name in names if not lacking.get(name))


def sizes(subject: Subject, order: Order) -> tuple[int, int]:
    """Returns how many images are in the network at once, and how many in a batch.

    The first are what memory has room for; CKA may need more of them together.
    """
    rows = order.batch_size or subject.batch_size()
    if not order.of_sets:
        rows = min(rows, order.shown)
    least = cka.LEAST if "cka" in order.figures else 1
    return rows, rows * -(-least // rows)


def _attends(subject: Subject) -> bool:
    return "heads" in subject.model.options


def _of_weights(subject: Subject, order: Order) -> Iterator[Picture]:
    if "filters" in order.figures:
        yield of_weights.filters_picture(subject)
    if "posemb" in order.figures:
        yield of_weights.positions_picture(subject, order.layer)


def _parts(subject, other, order: Order) -> tuple[list[OfAll], list[OfEach]]:
    """Makes the figures of all images together, and those of single ones."""
    if not {*OF_SETS, *OF_IMAGES} & {*order.figures}:
        return [], []
    for each in filter(None, (subject, other)):
        if not _attends(each):
            raise UserError(
                f"{each.name} has no attention to look at: give a Vision Transformer or "
                f"a hybrid, or draw only {','.join(OF_WEIGHTS)}"
            )
    names, choice = choices.Names(), order.choice
    query = choices.Query(subject, choice.query)
    sets = {
        "distance": lambda: of_sets.Distance(subject),
        "norms": lambda: of_sets.Norms(subject),
        "cka": lambda: of_sets.Cka(
            subject, other, order.batch_size or (other or subject).batch_size()
        ),
    }
    rows, _ = sizes(subject, order)
    singles = {
        "attention": lambda: of_images.Attention(subject, query, names, choice),
        "rollout": lambda: of_images.Rollout(subject, query, names, choice),
        "relevance": lambda: of_images.Relevance(subject, names, choice, rows),
    }
    return tuple(
        [part() for name, part in known.items() if name in order.figures]
        for known in (sets, singles)
    )


def _look(
    subject: Subject,
    batch: Batch,
    rows: int,
    sets: list[OfAll],
    singles: list[OfEach],
    shown: int,
) -> None:
    """Takes a batch through the network: its first images to the figures of single ones."""
    for layer, images in subject.look(batch.pixels[0], batch.names, rows):
        for part in [*sets, *(singles if images.start < shown else [])]:
            part.see(layer, images)
        del layer  # Before the next one is computed.
    for part in sets:
        part.end(batch)
