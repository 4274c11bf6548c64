"""The HTML page of mistakes of a fine-tuned network, with the photographs.

It is one file that loads no other files. It contains thumbnails of the images, so it is
as private as they are.
"""

import base64
import dataclasses
import functools
import importlib.util
import io
import math
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import numpy as np
from etils import epath
from jaxtyping import Integer
from PIL import Image

from vit_jax import weights
from vit_jax.command_line.files import replace_text
from vit_jax.data import bands, pipeline
from vit_jax.data.config import DataConfig
from vit_jax.data.decode import DamagedImage
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.open import Spec, open_source
from vit_jax.distributed import compilation
from vit_jax.evaluators.splits import Subset
from vit_jax.models import patches
from vit_jax.tools.finetuning import mistakes
from vit_jax.tools.finetuning.mistakes import Answers
from vit_jax.tools.near_duplicates import scan
from vit_jax.tools.report import templates
from vit_jax.tools.report.blocks import Table
from vit_jax.training.config import TrainConfig
from vit_jax.weights import surgery
from vit_jax.weights.calibration import Calibration
from vit_jax.weights.network_images import network_input

FILE = "report.html"
_SHOWN, _PAIRS, _OF_PAIR = 12, 8, 6
_SIDE = 112  # Side of a thumbnail on the page, in pixels.
_COMPARED = 20_000  # Maximum number of training images to check for doubtful labels.


def write(
    config: TrainConfig, workdir: str, split: str, headline: str
) -> tuple[str, Answers, int | None]:
    """Writes the page of a run; returns its path, and what a summary needs of it.

    Args:
      config: config of the run.
      workdir: workdir of the run, whose best checkpoint is evaluated.
      split: evaluation whose images are shown: "val" or "test".
      headline: score as a sentence, for the title.

    Returns:
      The path, the outputs that the page shows, and the number of validation images
      that are near-duplicates of training images, None if unknown.
    """
    pretrained = weights.open_pretrained(workdir)
    data, one_each = config.data, not config.data.multi_label
    # Images are prepared as in the evaluations of the run.
    how = Preprocess(image_size=data.image_size, mean=data.mean, std=data.std)
    model, params = surgery.fit_network(pretrained, how)
    options = compilation.options(bfloat16=model.config.rounds_products)

    @functools.partial(jax.jit, compiler_options=options)
    def step(params, batch):
        images = patches.of_batch(batch, batch["image"])
        images = network_input(images, how, model.options["dtype"])
        outputs = model.apply(params, images)
        return outputs["logits"], outputs["pre_logits"]

    forward = functools.partial(step, jax.device_put(params))
    source = open_source(data, config.evals[split].split)
    seen = _evaluate(forward, data, source, config.batch_size)
    numbered = tuple(f"class {k}" for k in range(data.num_classes))
    names = tuple(pretrained.class_names or source.class_names or numbered)
    labels = (
        np.eye(data.num_classes, dtype=int)[seen.labels] if one_each else seen.labels
    )
    decisions = pretrained.calibration or Calibration()
    answers = Answers(seen.logits, labels, names, one_each, decisions)
    doubts = None
    if one_each:
        train = open_source(data, data.split)
        most = num_checked(config, len(train))
        if len(train) > most:
            train = Subset(train, np.linspace(0, len(train) - 1, most).astype(int))
        seen_in_training = _evaluate(forward, data, train, config.batch_size)
        doubts = _doubts(seen_in_training, train, names)
    title = title_of(config, headline)
    twins, command = _twins(config)
    page = render(title, answers, source, seen.records, twins, command, doubts)
    path = epath.Path(workdir) / FILE
    replace_text(path, page)
    return str(path), answers, twins


def num_checked(config: TrainConfig, count: int) -> int:
    """Returns the number of training images to check for doubtful labels, at most.

    A forward pass takes a third of a step, so the check takes a ninth of the training.
    """
    return min(_COMPARED, config.num_steps(count) * config.batch_size // 3)


def title_of(config: TrainConfig, headline: str) -> str:
    """Returns the title of a page: the score, the network and its initial weights."""
    network = f"{config.model.variant} from {config.init.checkpoint}"
    return f"{headline[0].upper()}{headline[1:]}; {network}"


def render(
    title: str,
    answers: Answers,
    source: Source,
    records: Integer[np.ndarray, " N"],
    num_twins: int | None,
    dedup_command: str,
    doubts: list[dict[str, str]] | None,
) -> str:
    """Returns the page.

    Args:
      source: data set of the images.
      records: record number of each image.
      num_twins: number of validation images that are near-duplicates of training
        images; None if unknown; `dedup_command` lists them.
      doubts: pictures of training images with doubtful labels; None omits the section.
    """

    def pictures(images: Iterable[int], caption: Callable[[int], str]) -> list[dict]:
        return [_picture(source, records[i], caption(i)) for i in images]

    names, wrong = answers.class_names, answers.mistakes()
    sure, losses = answers.probabilities.max(1), answers.losses
    bins, error = answers.calibration()
    what = "answers" if answers.one_each else "labels"
    scores = sorted(answers.by_class(), key=lambda one: (one.f1, one.name))
    confusions = [
        {
            "names": (names[pair.true], names[pair.predicted]),
            "count": len(pair.images),
            "pictures": pictures(
                pair.images[:_OF_PAIR], lambda i: f"{sure[i]:.0%} confident"
            ),
        }
        for pair in answers.confusions(_PAIRS)
    ]
    head = ("class", "images", "recall", "precision", "F1", "AP")
    rows = [(name, f"{n:,}", *map(percent, rest)) for name, n, *rest in scores]
    if answers.decisions.thresholds:
        head += ("threshold",)
        limits = dict(zip(names, answers.decisions.thresholds, strict=True))
        rows = [(*row, f"{limits[row[0]]:.2f}") for row in rows]
    binned = [(percent(p), percent(right), f"{n:,}") for p, right, n in bins]
    by_probability = ("probability", "accuracy", what), tuple(binned)
    return templates.render(
        "finetuning/page.html",
        title=title,
        classes=Table("Scores of the classes", head, tuple(rows)),
        confusions=confusions,
        num_mistakes=len(wrong),
        mistakes=pictures(wrong[:_SHOWN], lambda i: _described(answers, i)),
        losses=pictures(
            answers.highest_losses(_SHOWN),
            lambda i: f"loss {losses[i]:.2f}; {_described(answers, i)}",
        ),
        bins=bins,
        what=what,
        calibration_error=error,
        calibration=Table("Accuracy by probability", *by_probability),
        decisions=decided(answers.decisions),
        num_twins=num_twins,
        dedup_command=dedup_command,
        doubts=doubts,
        num_neighbours=mistakes.NEIGHBOURS,
    )


def decided(decisions: Calibration) -> Table | None:
    """Returns the scores before and after the calibration; None if it did not run."""
    measured = decisions.measured
    named = {"ece": "calibration error", "micro_f1": "micro F1", "macro_f1": "macro F1"}
    rows = [
        (title, *map(percent, measured[name]))
        for name, title in named.items()
        if name in measured
    ]
    rows += [
        (f"coverage of sets of {float(level):.0%}", "-", percent(covered))
        for level, covered in measured.get("coverage", {}).items()
    ]
    if not rows:
        return None
    title = f"Calibration, on {measured['images']:,} images of {measured['split']}"
    return Table(title, ("score", "before", "after"), tuple(rows))


class _Evaluated(NamedTuple):
    """Outputs, labels and record numbers of the images that could be read."""

    logits: np.ndarray
    features: np.ndarray
    labels: np.ndarray
    records: np.ndarray


def _evaluate(
    forward: Callable, data: DataConfig, source: Source, batch_size: int
) -> _Evaluated:
    columns = []
    # Damaged images are skipped; training has already reported them.
    data = dataclasses.replace(data, on_error="skip")
    with pipeline.eval_batches(source, data, batch_size=batch_size) as batches:
        for batch in batches:
            images = {k: batch[k] for k in ("image", "grids") if k in batch}
            outputs = jax.device_get(forward(images))
            rows = (*outputs, batch["label"], batch["index"])
            columns.append([np.asarray(values)[batch["mask"]] for values in rows])
    types = np.float32, np.float32, np.int64, np.int64
    joined = map(np.concatenate, zip(*columns, strict=True))
    return _Evaluated(*(x.astype(t) for x, t in zip(joined, types, strict=True)))


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


def _doubts(
    seen: _Evaluated, source: Source, names: tuple[str, ...]
) -> list[dict[str, str]]:
    """Returns the images whose neighbours in feature space have another label."""
    doubts = mistakes.doubtful_labels(seen.features, seen.labels, 4 * _SHOWN)
    return [
        _picture(
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


def _picture(source: Source, record: np.integer, caption: str) -> dict[str, str]:
    """Returns an image of a gallery: its thumbnail, caption, file and short name."""
    name = os.sep.join(source.record_id(int(record)).split(os.sep)[-2:])
    return {
        "image": _thumbnail(source, int(record)),
        "caption": caption,
        "file": source.describe(int(record)),
        "name": name,
    }


def _thumbnail(source: Source, record: int) -> str:
    """Returns an image as the data URL of a small JPEG; "" if it is damaged."""
    try:
        # All these images have been evaluated, so they are within the run's size limit.
        how = {"exif": True, "max_megapixels": math.inf}
        picture = Image.fromarray(bands.picture(source[record]["image"], **how))
    except (DamagedImage, OSError):
        return ""
    scale = _SIDE // max(picture.size)
    if scale > 1:
        size = picture.width * scale, picture.height * scale
        picture = picture.resize(size, Image.Resampling.NEAREST)
    picture.thumbnail((2 * _SIDE, 2 * _SIDE))
    return jpeg_url(picture)


def jpeg_url(picture: Image.Image) -> str:
    """Returns a picture as the data URL of a JPEG."""
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"


def percent(value: float) -> str:
    """Returns a fraction in percent; "-" for NaN."""
    return "-" if math.isnan(value) else f"{value:.1%}"
