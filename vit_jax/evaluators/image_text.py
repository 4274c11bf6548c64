"""Images compared with texts: zero-shot classification, and retrieval of captions.

Both need a text tower, from weights or from a run of the task "contrastive". Letters: N
images, M captions, P pairs, K classes, E width of the shared space, R rows.
"""

import dataclasses
import functools
import string
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int

from vit_jax.config.fields import key
from vit_jax.data import class_names, imagenet
from vit_jax.data.captions import TEXT
from vit_jax.errors import UserError
from vit_jax.evaluators.forward_passes import TOP, Outputs, Wanted
from vit_jax.evaluators.protocol import Evaluator, Pass, Scored, check_labels, mean
from vit_jax.evaluators.splits import EvalConfig, EvalSplit
from vit_jax.models.text_tower import filled

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_BLOCK = 2**24  # Similarities per block.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroShotConfig(EvalConfig):
    """Zero-shot accuracy: classification by prompts with the class names."""

    fractions: ClassVar = ("top1", "top5")

    kind: str = key("zero_shot", "Kind of evaluation.")
    split: str = key("", 'Split to evaluate; "" is the test split of the data set.')
    classes: tuple[str, ...] = key(
        (),
        "Class names in label order, used instead of those of the data set; names that "
        "the data set has too may be in any order.",
        reason="data sets without names of classes",
    )
    imagenet_names: str = key(
        imagenet.CLIP,
        'Class names for data sets with WordNet ids, such as ImageNet: "clip" uses the '
        'names of the CLIP authors, "wordnet" the first word of each synset.',
        choices=(imagenet.CLIP, imagenet.WORDNET),
    )
    canonicalize: bool = key(
        False,
        "Whether to write names and prompts in lower case and without punctuation, as "
        "big_vision does for its text towers (LiT, SigLIP).",
    )
    prompts: tuple[str, ...] = key(
        ("a photo of a {}.",),
        "Texts with {} in place of a class name; the embedding of a class is the mean "
        "over them (CLIP, arXiv:2103.00020, section 3.1.4).",
    )

    def open(self, name, splits):
        split = splits.open(name, self, self.split, model_classes=False)
        classes = imagenet.in_words(split.source.class_names, self.imagenet_names)
        if self.classes:
            where = f"evals.{name}.classes"
            classes = class_names.arrange(self.classes, classes, where=where)
        if not classes:
            raise UserError(
                f"evals.{name}: {split.title} has no class names: set "
                f"evals.{name}.classes"
            )
        if not self.prompts:
            raise UserError(f"evals.{name}.prompts is empty: give at least ('{{}}',)")
        prompts, K = self.prompts, len(classes)
        if self.canonicalize:
            prompts = [canonical(prompt, "{}") for prompt in prompts]
            classes = [canonical(one, ",") for one in classes]
        texts = filled(prompts, classes)

        problem = f"but {K} classes are named: name all of them"
        check_labels(split.source.known_labels(), K, split.title, problem)

        def score(outputs, stop):
            (result,) = outputs
            check_labels(result.labels, K, split.title, problem)
            means = result.text_embeddings.reshape(K, len(self.prompts), -1).mean(1)
            means /= np.linalg.norm(means, axis=1, keepdims=True)
            similar = result.image_embeddings @ means.T
            best = np.argsort(-similar, axis=1, kind="stable")[:, :TOP]
            right = best == result.labels[:, None]
            metrics = {"top1": mean(right[:, 0])}
            if K > TOP:
                metrics["top5"] = mean(right.any(1))
            return Scored(metrics)

        wanted = Wanted(features=True)
        return Evaluator((Pass(split, wanted, texts=lambda: texts),), score)

    def summarize(self, metrics):
        return metrics["top1"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrievalConfig(EvalConfig):
    """Retrieval of captions from images, and of images from captions."""

    fractions: ClassVar = ("*_recall*",)

    kind: str = key("retrieval", "Kind of evaluation.")
    split: str = key("", 'Split to evaluate; "" is the test split of the data set.')
    k: tuple[int, ...] = key(
        (1, 5, 10),
        "Values of k for recall at k: the fraction of queries whose right answer is "
        "among the k best matches.",
        at_least=1,
    )

    def open(self, name, splits):
        split = splits.open(name, self, self.split, model_classes=False, labelled=False)
        if not split.data.caption_key:
            raise UserError(
                f"evals.{name} needs captions: set evals.{name}.caption_key or "
                "data.caption_key to their column, feature or suffix"
            )
        captions = functools.cache(lambda: _captions(split))
        return Evaluator(
            (Pass(split, Wanted(features=True), texts=lambda: captions()[0]),),
            lambda outputs, stop: score(*outputs, *captions(), self.k, stop),
        )


def canonical(text: str, kept: str) -> str:
    """Returns a text in lower case, with single blanks and no punctuation but `kept`.

    Source: `canonicalize_text` of google-research/big_vision 0127fb6,
    evaluators/proj/image_text/prompt_engineering.py.
    """
    parts = text.replace("_", " ").split(kept)
    text = kept.join(part.translate(_NO_PUNCTUATION) for part in parts)
    return " ".join(text.lower().split())


def _captions(split: EvalSplit) -> tuple[list[str], Int[np.ndarray, " M"]]:
    """Returns all captions of a split, and the record of each."""
    texts, records = [], []
    for record in range(len(split.source)):
        texts_here = split.source[record].get(TEXT, ())
        texts_here = [texts_here] if isinstance(texts_here, str) else list(texts_here)
        texts += texts_here
        records += [record] * len(texts_here)
    if not texts:
        raise UserError(f"{split.title} has no captions: check data.caption_key")
    return texts, np.array(records)


def score(
    outputs: Outputs,
    captions: Sequence[str],
    records: Int[np.ndarray, " M"],
    k: Sequence[int],
    stop: Callable[[], bool] = lambda: False,
) -> Scored | None:
    """Computes the recalls at `k` in both directions.

    "recall1" counts a caption as right only for the image that it belongs to, as retrieval on COCO and
    Flickr30k is reported (google-research/big_vision 0127fb6, image_text_retrieval.py);
    "recall1_of_words" for all images with a caption of the same words.

    Args:
      outputs: embeddings of images and captions.
      captions: captions of all records.
      records: record of each caption.
      k: numbers of best answers among which the right one counts.
      stop: function that is called before every block of rows; returning True stops.

    Returns:
      The scores; None if stopped.
    """
    images, texts = outputs.image_embeddings, outputs.text_embeddings
    evaluated = np.isin(records, outputs.records)  # Damaged images may be skipped.
    texts, records = texts[evaluated], records[evaluated]
    _, words = np.unique(np.array(captions)[evaluated], return_inverse=True)
    metrics = {}
    for suffix, numbers in (("", np.arange(len(texts))), ("_of_words", words)):
        pairs = np.unique(np.stack([records, numbers]), axis=1)
        for way, rows, columns, of_row, of_column, right in (
            ("image_to_text", images, texts, outputs.records, numbers, pairs),
            ("text_to_image", texts, images, numbers, outputs.records, pairs[::-1]),
        ):
            ranks = best_ranks(rows, columns, of_row, of_column, right, stop)
            if ranks is None:
                return None
            metrics |= {f"{way}_recall{n}{suffix}": mean(ranks < n) for n in k}
    return Scored(metrics)


def best_ranks(
    rows: Float[np.ndarray, "N E"],
    columns: Float[np.ndarray, "M E"],
    of_row: Int[np.ndarray, " N"],
    of_column: Int[np.ndarray, " M"],
    pairs: Int[np.ndarray, "2 P"],
    stop: Callable[[], bool] = lambda: False,
) -> Int[np.ndarray, " R"] | None:
    """Returns, for rows with a right answer, the rank from 0 of the best right answer.

    Equal similarities are ranked in the order of the columns. `of_row` and `of_column`
    number the images or texts; `pairs` has the pairs of numbers that match. `stop` is
    called before every block of rows; returning True stops.
    """
    all_ranks = []
    size = max(1, _BLOCK // len(columns))
    width = int(of_column.max()) + 1
    known = pairs[0] * width + pairs[1]
    for start in range(0, len(rows), size):
        if stop():
            return None
        similar = rows[start : start + size] @ columns.T
        numbers = of_row[start : start + size, None] * width + of_column[None]
        right: Bool[np.ndarray, "R M"] = np.isin(numbers, known)
        column = np.where(right, similar, -np.inf).argmax(1)[:, None]
        best = np.take_along_axis(similar, column, axis=1)
        before = (similar == best) & (np.arange(len(columns))[None] < column)
        ranks = ((similar > best) | before).sum(1)
        all_ranks.append(ranks[right.any(1)])
    return np.concatenate(all_ranks)
