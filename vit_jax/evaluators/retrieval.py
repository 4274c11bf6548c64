"""Retrieval: the caption of an image among all captions, and the image of a caption.

Needs a text tower, and captions in the data (`caption_key`). Letters: N images, M captions,
E width of the shared space.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int

from vit_jax.config.fields import key
from vit_jax.data.captions import TEXT
from vit_jax.errors import UserError
from vit_jax.evaluators.forward_passes import Outputs, Wanted
from vit_jax.evaluators.protocol import Evaluator, Pass, Scored, mean
from vit_jax.evaluators.splits import EvalConfig, EvalSplit

_BLOCK = 2**24  # Similarities at once.


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrievalConfig(EvalConfig):
    """Captions found for images, and images for captions."""

    fractions: ClassVar = ("*_recall*",)

    kind: str = key("retrieval", "What is evaluated.")
    split: str = key("", 'Its images; "" is the split that the data set is tested on.')
    k: tuple[int, ...] = key(
        (1, 5, 10), "Among how many of the best it is looked for.", at_least=1
    )

    def open(self, name, splits):
        split = splits.open(name, self, self.split, model_classes=False, labelled=False)
        if not split.data.caption_key:
            raise UserError(
                f"evals.{name} needs captions: state evals.{name}.caption_key or "
                "data.caption_key, the column, feature or suffix of them"
            )
        captions = functools.cache(lambda: _captions(split))
        return Evaluator(
            (Pass(split, Wanted(features=True), texts=lambda: captions()[0]),),
            lambda outputs, stop: score(*outputs, *captions(), self.k, stop),
        )


def _captions(split: EvalSplit) -> tuple[list[str], Int[np.ndarray, " M"]]:
    """Returns all captions of a split, and the record of each."""
    texts, records = [], []
    for record in range(len(split.source)):
        texts_here = split.source[record].get(TEXT, ())
        texts_here = [texts_here] if isinstance(texts_here, str) else list(texts_here)
        texts += texts_here
        records += [record] * len(texts_here)
    if not texts:
        raise UserError(f"{split.title} has no caption: check data.caption_key")
    return texts, np.array(records)


def score(
    outputs: Outputs,
    captions: Sequence[str],
    records: Int[np.ndarray, " M"],
    k: Sequence[int],
    stop: Callable[[], bool] = lambda: False,
) -> Scored | None:
    """Computes recalls both ways.

    Args:
      outputs: with the embeddings of images and captions.
      captions: of all records.
      records: of each caption.
      k: among how many of the best the right one is looked for.
      stop: see `best_ranks`.
    """
    images, texts = outputs.image_embeddings, outputs.text_embeddings
    there = np.isin(records, outputs.records)  # Damaged images may be skipped.
    texts, records = texts[there], records[there]
    _, words = np.unique(np.array(captions)[there], return_inverse=True)
    # A caption of the same words as an image's own is right for it too.
    pairs = np.unique(np.stack([records, words]), axis=1)
    metrics = {}
    for way, rows, columns, of_row, of_column, right in (
        ("image_to_text", images, texts, outputs.records, words, pairs),
        ("text_to_image", texts, images, words, outputs.records, pairs[::-1]),
    ):
        ranks = best_ranks(rows, columns, of_row, of_column, right, stop)
        if ranks is None:
            return None
        metrics |= {f"{way}_recall{n}": mean(ranks < n) for n in k}
    return Scored(metrics)


def best_ranks(
    rows: Float[np.ndarray, "N E"],
    columns: Float[np.ndarray, "M E"],
    of_row: Int[np.ndarray, " N"],
    of_column: Int[np.ndarray, " M"],
    pairs: Int[np.ndarray, "2 P"],
    stop: Callable[[], bool] = lambda: False,
) -> Int[np.ndarray, " R"] | None:
    """Returns the rank of the best right answer of each row that has one, from 0.

    Of equal similarities the wrong ones count as better.

    Args:
      rows, columns: embeddings.
      of_row, of_column: number of what each is.
      pairs: numbers of rows and of columns that are right for each other.
      stop: called before every block of rows; True stops.
    """
    ranks_found = []
    size = max(1, _BLOCK // len(columns))
    width = int(of_column.max()) + 1
    known = pairs[0] * width + pairs[1]
    for start in range(0, len(rows), size):
        if stop():
            return None
        similar = rows[start : start + size] @ columns.T
        numbers = of_row[start : start + size, None] * width + of_column[None]
        right: Bool[np.ndarray, "R M"] = np.isin(numbers, known)
        best = np.where(right, similar, -np.inf).max(1, keepdims=True)
        ranks = ((similar >= best) & ~right).sum(1)
        ranks_found.append(ranks[right.any(1)])
    return np.concatenate(ranks_found)
