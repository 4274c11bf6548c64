"""The HTML page of a network that was fine-tuned on labels, with its mistakes.

page.py has the parts that it shares with the pages of other annotations.
"""

import functools
import importlib.util
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Integer

from vit_jax.data.sources.base import Source
from vit_jax.data.sources.open import Spec, open_source
from vit_jax.tools.finetuning import confusion, mistakes, page
from vit_jax.tools.finetuning.evaluated import SplitOutputs, TrainedNetwork
from vit_jax.tools.finetuning.kind import Result
from vit_jax.tools.finetuning.mistakes import Answers
from vit_jax.tools.near_duplicates import scan
from vit_jax.tools.report.blocks import Table
from vit_jax.training.config import TrainConfig
from vit_jax.weights.calibration import Calibration

_TEMPLATE = "finetuning/page.html"
_SHOWN, _PAIRS, _OF_PAIR = 12, 8, 6  # Most images, pairs of classes, images of a pair.
_CLASSES = 25  # Number of classes whose scores are shown without a click.
_LEAST_LOSS = 0.005  # In nats; less is shown as 0.
_COMPARED = 20_000  # Maximum number of training images to check for doubtful labels.

# Classes of images, as in `Source.known_labels`.
Labels = np.ndarray | Sequence[Sequence[int]]


def write(
    config: TrainConfig, result: Result, score: str, network: TrainedNetwork
) -> tuple[str, Answers, int | None]:
    """Writes the page of a run; returns its path, and what a summary needs of it.

    Args:
      config: config of the run.
      result: result of the run, whose best checkpoint is evaluated again.
      score: score as a sentence.
      network: network of the run.

    Returns:
      The path, the outputs that the page shows, and the number of validation images
      that are near-duplicates of training images, None if unknown.
    """
    data, one_each = config.data, not config.data.multi_label
    pretrained = network.pretrained
    seen, source, _ = network.of_evaluation(result.split)
    numbered = tuple(f"class {k}" for k in range(data.num_classes))
    names = tuple(pretrained.class_names or source.class_names or numbered)
    labels = (
        np.eye(data.num_classes, dtype=int)[seen.labels] if one_each else seen.labels
    )
    decisions = result.decisions or pretrained.calibration or Calibration()
    answers = Answers(seen.logits, labels, names, one_each, decisions)
    train = open_source(data, data.split)
    splits = {"train": train}
    if result.split != "val":
        splits["val"] = open_source(data, config.evals["val"].split)
    known = {name: one.known_labels() for name, one in splits.items()}
    counts = {name: labels for name, labels in known.items() if labels is not None}
    doubts = None
    if one_each:
        trained = network.of_training(num_checked(config, len(train)))
        doubts = _doubts(trained, names)
    what = f"{len(names):,} {'classes' if one_each else 'tags'}"
    common = page.common(config, result, score, what, _curves(result))
    values = contents(answers, source, seen.records, counts, result.split)
    num_twins, dedup_command = _twins(config)
    values |= {"num_twins": num_twins, "dedup_command": dedup_command}
    values |= {"doubts": doubts}
    path = page.write(_TEMPLATE, common, result.workdir, **values)
    return path, answers, num_twins


def _curves(result: Result) -> dict[str, str]:
    """Returns the metrics whose curves are drawn, with descriptions."""
    if result.metric == "map":
        return {"map": "mean average precision"}
    accuracy = {"top1": "accuracy"}
    if result.is_uneven:
        return {"balanced_accuracy": "balanced accuracy"} | accuracy
    return accuracy


def num_checked(config: TrainConfig, count: int) -> int:
    """Returns the number of training images to check for doubtful labels, at most.

    A forward pass takes a third of a step, so the check takes a ninth of the training.
    """
    return min(_COMPARED, config.num_steps(count) * config.batch_size // 3)


def contents(
    answers: Answers,
    source: Source,
    records: Integer[np.ndarray, " N"],
    counts: Mapping[str, Labels],
    split: str,
) -> dict:
    """Returns the variables of the page that describe scores and single images.

    Args:
      answers: outputs for the images that are scored.
      source: data set of the images.
      records: record number of each image.
      counts: labels of other splits, as in `Source.known_labels`, by name.
      split: name of the split that is scored.
    """
    names = answers.class_names
    bins, error = answers.calibration()
    what = "answers" if answers.one_each else "labels"
    binned = [(page.percent(p), page.percent(right), f"{n:,}") for p, right, n in bins]
    head = "probability", "accuracy", what
    confused = answers.confusion()
    matrix = None if confused is None else confusion.matrix(confused, names)
    return {
        "classes": _classes(answers, counts, split),
        "counted": (*counts, split),
        "confusion": matrix is not None and page.draw(matrix),
        **_galleries(answers, source, records),
        "bins": bins,
        "what": what,
        "calibration_error": error,
        "calibration": Table(
            "Accuracy by probability", head, tuple(binned), folded=True
        ),
        "decisions": decided(answers.decisions),
        "num_neighbours": mistakes.NEIGHBOURS,
    }


def _galleries(
    answers: Answers, source: Source, records: Integer[np.ndarray, " N"]
) -> dict:
    """Returns the variables of the page with images; no image is shown twice."""
    shown: set[int] = set()

    def pictures(
        images: Iterable[int], most: int, caption: Callable[[int], str]
    ) -> list[dict]:
        new = [i for i in images if i not in shown][:most]
        shown.update(new)
        return [page.picture(source, records[i], caption(i)) for i in new]

    names, wrong = answers.class_names, answers.mistakes()
    sure, losses = answers.probabilities.max(1), answers.losses
    described = functools.partial(_described, answers)
    confusions = [
        {
            "names": (names[pair.true], names[pair.predicted]),
            "count": len(pair.images),
            "pictures": pictures(
                pair.images, _OF_PAIR, lambda i: f"{sure[i]:.0%} confident"
            ),
        }
        for pair in answers.confusions(_PAIRS)
        if len(pair.images) > 1  # A single image is among the other mistakes.
    ]
    high = [i for i in answers.highest_losses(len(losses)) if losses[i] >= _LEAST_LOSS]
    return {
        "confusions": confusions,
        "num_mistakes": len(wrong),
        "mistakes": pictures(wrong, 2 * _SHOWN, described),
        "num_right": len(losses) - len(wrong),
        "right": pictures(answers.right_answers(), _SHOWN, described),
        "losses": pictures(
            high, _SHOWN, lambda i: f"loss {losses[i]:.2f}; {described(i)}"
        ),
    }


def _classes(answers: Answers, counts: Mapping[str, Labels], split: str) -> list[Table]:
    """Returns scores and numbers of images of the classes, the worst classes first.

    For the arguments see `contents`. Of many classes, a second table has the better
    ones.
    """
    numbers = [
        [f"{number:,}" for number in count(labels, len(answers.class_names))]
        for labels in counts.values()
    ]
    # A threshold per class, if there are any.
    limits = [[f"{x:.2f}"] for x in answers.decisions.thresholds]
    limits = limits or [[]] * len(answers.class_names)
    columns = zip(answers.by_class(), limits, *numbers, strict=True)
    scores = sorted(columns, key=lambda one: (one[0].f1, one[0].name))
    head = "class", *counts, split, "recall", "precision", "F1", "AP"
    head += ("threshold",) * bool(answers.decisions.thresholds)
    rows = tuple(
        (name, *of_splits, f"{images:,}", *map(page.percent, rest), *limit)
        for (name, images, *rest), limit, *of_splits in scores
    )
    tables = [Table("Scores of the classes", head, rows[:_CLASSES])]
    if others := rows[_CLASSES:]:
        title = f"The {len(others):,} other classes"
        tables.append(Table(title, head, others, folded=True))
    return tables


def count(labels: Labels, num_classes: int) -> list[int]:
    """Returns the number of images of each class; `labels` is as in `known_labels`."""
    if not isinstance(labels, np.ndarray):  # Several classes of each image.
        labels = np.array([k for classes in labels for k in classes], int)
    return np.bincount(labels, minlength=num_classes).tolist()


def decided(decisions: Calibration) -> Table | None:
    """Returns the scores before and after the calibration; None if it did not run."""
    measured = decisions.measured
    named = {"ece": "calibration error", "micro_f1": "micro F1", "macro_f1": "macro F1"}
    rows = [
        (title, *map(page.percent, measured[name]))
        for name, title in named.items()
        if name in measured
    ]
    rows += [
        (f"coverage of sets of {float(level):.0%}", "-", page.percent(covered))
        for level, covered in measured.get("coverage", {}).items()
    ]
    if not rows:
        return None
    title = f"Calibration, on {measured['images']:,} images of {measured['split']}"
    return Table(title, ("score", "before", "after"), tuple(rows))


def _twins(config: TrainConfig) -> tuple[int | None, str]:
    """Counts the validation images that are near-duplicates of training images.

    Returns:
      The number, None without faiss; and the command that lists them.
    """
    data = config.data
    train, apart = Spec.of(data, data.split), Spec.of(data, config.evals["val"].split)
    command = (
        f"python -m vit_jax.dedup --pretrain={train} --against={apart}"
        f" --image_key={data.image_key} --out=twins.txt"
    )
    for key in ("image_dir", "image_suffix"):
        if value := getattr(data, key):
            command += f" --{key}={value}"
    if importlib.util.find_spec("faiss") is None:
        return None, command
    with tempfile.TemporaryDirectory() as folder:
        pairs = scan.scan(train, [apart], pathlib.Path(folder)).pairs
    return len({pair.record for pair in pairs}), command


def _doubts(trained: SplitOutputs, names: tuple[str, ...]) -> list[dict[str, str]]:
    """Returns the images whose neighbours in feature space have another label."""
    seen, source, _ = trained
    doubts = mistakes.doubtful_labels(seen.features, seen.labels, 4 * _SHOWN)
    return [
        page.picture(
            source,
            seen.records[doubt.image],
            f"labelled {names[seen.labels[doubt.image]]}; {doubt.share:.0%} of its "
            f"neighbours are {names[doubt.other]}",
        )
        for doubt in doubts
    ]


def _described(answers: Answers, i: int) -> str:
    """Returns the classes and the prediction of an image."""
    names, predicted, labels = (
        answers.class_names,
        answers.predicted[i],
        answers.labels[i],
    )
    answer = ", ".join(
        f"{names[k]} {answers.probabilities[i, k]:.0%}"
        for k in np.flatnonzero(predicted)
    )
    if np.array_equal(predicted, labels):
        return f"{answer or 'nothing'}; right"
    truth = ", ".join(names[k] for k in np.flatnonzero(labels))
    return f"{truth or 'nothing'}; predicted as {answer or 'nothing'}"
