"""The HTML page on the mistakes of a fine-tuned network, with the photographs.

It is one file without references to others. It contains thumbnails of the images, so it
is as private as they are.
"""

import base64
import dataclasses
import html
import importlib.util
import io
import math
import os
import pathlib
import tempfile
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from etils import epath
from jaxtyping import Integer
from PIL import Image

from vit_jax import weights
from vit_jax.data import pipeline
from vit_jax.data.config import DataConfig
from vit_jax.data.decode import DamagedImage, decode
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.open import Spec, open_source
from vit_jax.data.transforms import device as transforms
from vit_jax.evaluators.splits import Subset
from vit_jax.files import replace_text
from vit_jax.models import Model
from vit_jax.tools.finetuning import mistakes
from vit_jax.tools.finetuning.mistakes import Answers
from vit_jax.tools.near_duplicates import scan
from vit_jax.training.config import TrainConfig
from vit_jax.weights import surgery
from vit_jax.weights.pretrained import Preprocess

FILE = "report.html"
_SHOWN, _PAIRS, _OF_PAIR = 12, 8, 6
_SIDE = 112  # Side of a thumbnail on the page, in pixels.
_COMPARED = 20_000  # Most training images whose labels are compared with neighbours'.


def write(config: TrainConfig, workdir: str, split: str, headline: str) -> str:
    """Writes the page of a run; returns its path.

    Args:
      config: config of the run.
      workdir: workdir of the run, for its best checkpoint.
      split: evaluation whose images are shown: "val" or "test".
      headline: score in words, for the title.
    """
    pretrained = weights.open_pretrained(workdir)
    # Images are prepared as in the evaluations of the run.
    how = Preprocess(
        image_size=config.data.image_size, mean=config.data.mean, std=config.data.std
    )
    model, params = surgery.fit_network(pretrained, how)
    batch = config.batch_size
    source = open_source(config.data, config.evals[split].split)
    seen = _pass(model, params, config.data, source, batch)
    names = tuple(pretrained.class_names) or tuple(source.class_names)
    labels = seen.labels
    if not config.data.multi_label:
        labels = np.eye(config.data.num_classes, dtype=np.int64)[labels]
    names = names or tuple(f"class {k}" for k in range(config.data.num_classes))
    answers = Answers(seen.logits, labels, names, not config.data.multi_label)
    sections = [
        *_classes(answers),
        *_confusions(answers, source, seen.records),
        *_mistakes(answers, source, seen.records),
        *_calibration(answers),
        *_duplicates(config),
    ]
    if not config.data.multi_label:
        train = open_source(config.data, config.data.split)
        sections += _doubts(model, params, config.data, train, batch, names)
    title = f"{headline[0].upper()}{headline[1:]}; {config.model.variant} from {config.init.checkpoint}"
    path = epath.Path(workdir) / FILE
    replace_text(path, _page(title, sections))
    return str(path)


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Outputs, labels and record numbers of the images that could be read."""

    logits: np.ndarray
    features: np.ndarray
    labels: np.ndarray
    records: np.ndarray


def _pass(
    model: Model, params: dict, data: DataConfig, source: Source, batch_size: int
) -> _Seen:
    def forward(params, images):
        images = transforms.normalize(images, data.mean, data.std)
        outputs = model.apply(params, images.astype(model.options["dtype"]))
        return outputs["logits"], outputs["pre_logits"]

    step, columns = jax.jit(forward), []
    params = jax.device_put(params)
    # Damaged images are left out of the page; training has reported them.
    data = dataclasses.replace(data, on_error="skip")
    with pipeline.eval_batches(source, data, batch_size=batch_size) as batches:
        for batch in batches:
            outputs = jax.device_get(step(params, batch["image"]))
            kept = batch["mask"]
            rows = (*outputs, batch["label"], batch["index"])
            columns.append([np.asarray(values)[kept] for values in rows])
    logits, features, labels, records = map(np.concatenate, zip(*columns, strict=True))
    return _Seen(
        logits.astype(np.float32),
        features.astype(np.float32),
        labels.astype(np.int64),
        records.astype(np.int64),
    )


def _classes(answers: Answers) -> Iterable[str]:
    yield "<h2>Classes</h2>"
    head = ("class", "images", "recall", "precision", "F1", "AP")
    scores = sorted(answers.by_class(), key=lambda one: (one.f1, one.name))
    rows = [
        (
            one.name,
            f"{one.images:,}",
            *map(_percent, (one.recall, one.precision, one.f1)),
            _percent(one.average_precision),
        )
        for one in scores
    ]
    yield _table(head, rows)
    yield (
        "<p>The worst come first. Recall is the part of the class's images that are "
        "predicted as it, precision the part of these predictions that are right, AP the "
        "average precision over all thresholds.</p>"
    )


def _confusions(
    answers: Answers, source: Source, records: Integer[np.ndarray, " N"]
) -> Iterable[str]:
    pairs = answers.confusions(_PAIRS)
    if not pairs:
        return
    yield "<h2>Classes taken for each other</h2>"
    for pair in pairs:
        names = (answers.class_names[k] for k in (pair.true, pair.predicted))
        count = len(pair.images)
        images = f"{count:,} image{'s' * (count > 1)}"
        yield f"<h3>{' taken for '.join(map(_text, names))}: {images}</h3>"
        yield _gallery(
            source,
            [
                (records[i], f"{answers.probabilities[i].max():.0%} sure")
                for i in pair.images[:_OF_PAIR]
            ],
        )


def _mistakes(
    answers: Answers, source: Source, records: Integer[np.ndarray, " N"]
) -> Iterable[str]:
    wrong = answers.mistakes()
    yield f"<h2>The surest mistakes, of {len(wrong):,}</h2>"
    yield _gallery(
        source, [(records[i], _described(answers, i)) for i in wrong[:_SHOWN]]
    )
    yield "<h2>The highest losses</h2>"
    yield _gallery(
        source,
        [
            (records[i], f"loss {answers.losses[i]:.2f}; {_described(answers, i)}")
            for i in answers.highest_losses(_SHOWN)
        ],
    )


def _calibration(answers: Answers) -> Iterable[str]:
    rows, error = answers.calibration()
    yield "<h2>Calibration</h2>"
    yield _reliability(rows)
    what = "answers" if answers.one_each else "labels"
    yield (
        f"<p>Accuracy of the {what} by their probability; on the line they agree. The "
        f"expected calibration error is {error:.2%}.</p>"
    )
    head = ("probability", "accuracy", what)
    yield _table(
        head, [(_percent(mean), _percent(right), f"{n:,}") for mean, right, n in rows]
    )


def _duplicates(config: TrainConfig) -> Iterable[str]:
    """Counts the validation images that are near-duplicates of training images."""
    data = config.data
    train = Spec(data.name, data.data_dir, data.split, data.image_key)
    apart = dataclasses.replace(train, split=config.evals["val"].split)
    command = (
        f"python -m vit_jax.dedup --pretrain={train} --against={apart}"
        f" --image_key={data.image_key} --out=twins.txt"
    )
    yield "<h2>Near-duplicates of training and validation images</h2>"
    if importlib.util.find_spec("faiss") is None:
        yield (
            "<p>Not looked for: install the extra with "
            f"<code>pip install -e '.[dedup]'</code>, then <code>{_text(command)}</code></p>"
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        pairs = scan.scan(train, [apart], pathlib.Path(folder)).pairs
    twins = len({pair.record for pair in pairs})
    yield (
        f"<p>{twins:,} of the validation images show the same picture as a training "
        "image. "
        f"The list: <code>{_text(command)}</code></p>"
    )


def _doubts(
    model: Model,
    params: dict,
    data: DataConfig,
    source: Source,
    batch_size: int,
    names: tuple[str, ...],
) -> Iterable[str]:
    """Shows training images whose neighbours in feature space have another label."""
    if len(source) > _COMPARED:
        rows = np.linspace(0, len(source) - 1, _COMPARED).astype(np.int64)
        source = Subset(source, rows)
    seen = _pass(model, params, data, source, batch_size)
    doubts = mistakes.doubtful_labels(seen.features, seen.labels, 4 * _SHOWN)
    yield f"<h2>Training images that look mislabelled: {len(doubts)}</h2>"
    if doubts:
        yield (
            f"<p>Of their {mistakes.NEIGHBOURS} nearest neighbours in the network's "
            "features hardly any has their label.</p>"
        )
    images = []
    for doubt in doubts:
        label, other = names[seen.labels[doubt.image]], names[doubt.other]
        text = f"labelled {label}; {doubt.share:.0%} of its neighbours are {other}"
        images.append((seen.records[doubt.image], text))
    yield _gallery(source, images)


def _described(answers: Answers, i: int) -> str:
    """Returns the classes and the answer of an image."""
    probabilities, names = answers.probabilities[i], answers.class_names
    predicted = answers.predicted[i]
    truth = ", ".join(names[k] for k in np.flatnonzero(answers.labels[i]))
    answer = ", ".join(
        f"{names[k]} {probabilities[k]:.0%}" for k in np.flatnonzero(predicted)
    )
    answer = answer or "nothing"
    if np.array_equal(predicted, answers.labels[i]):
        return f"{answer}; right"
    return f"{truth or 'nothing'}; taken for {answer}"


def _gallery(source: Source, images: Iterable[tuple[np.integer, str]]) -> str:
    """Returns the images of record numbers with their captions."""
    figures = []
    for number, text in images:
        record = int(number)
        name = os.sep.join(source.record_id(record).split(os.sep)[-2:])
        figures.append(
            f'<figure><img src="{_thumbnail(source, record)}" alt="{_text(text)}" '
            f'title="{_text(source.describe(record))}"><figcaption>{_text(text)}'
            f"<br><small>{_text(name)}</small></figcaption></figure>"
        )
    if not figures:
        return "<p>None.</p>"
    return f'<div class="gallery">{"".join(figures)}</div>'


def _thumbnail(source: Source, record: int) -> str:
    """Returns an image as the data URL of a small JPEG, "" if it is damaged."""
    try:
        pixels = decode(source[record]["image"], exif=True)
    except (DamagedImage, OSError):
        return ""
    picture = Image.fromarray(pixels)
    if max(picture.size) < _SIDE:
        scale = _SIDE // max(picture.size)
        size = picture.width * scale, picture.height * scale
        picture = picture.resize(size, Image.Resampling.NEAREST)
    picture.thumbnail((2 * _SIDE, 2 * _SIDE))
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _reliability(rows: Sequence[tuple[float, float, int]]) -> str:
    """Returns an SVG of accuracy by probability; circles are larger for fuller bins."""
    side, margin = 240, 48
    most = max(number for _, _, number in rows)

    def at(x: float, y: float) -> tuple[float, float]:
        return margin + x * side, 8 + (1 - y) * side

    marks = []
    for tick in (0.0, 0.5, 1.0):
        x, y = at(tick, 0.0)
        marks.append(f'<text x="{x}" y="{y + 18}" class="x">{tick:g}</text>')
        x, y = at(0.0, tick)
        marks.append(f'<text x="{x - 8}" y="{y + 4}" class="y">{tick:g}</text>')
    for mean, right, number in rows:
        x, y = at(mean, right)
        radius = 3 + 7 * math.sqrt(number / most)
        marks.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"><title>{number:,} at '
            f"{mean:.1%}: {right:.1%} right</title></circle>"
        )
    (x0, y0), (x1, y1) = at(0.0, 0.0), at(1.0, 1.0)
    return (
        f'<svg viewBox="0 0 {side + margin + 12} {side + 46}" role="img" '
        'aria-label="accuracy by probability">'
        f'<rect x="{x0}" y="{y1}" width="{side}" height="{side}"/>'
        f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}"/>{"".join(marks)}'
        f'<text x="{x0 + side / 2}" y="{y0 + 34}" class="x">probability</text>'
        f'<text x="{-(y0 + y1) / 2}" y="{x0 - 36}" class="x" transform="rotate(-90)">'
        "accuracy</text></svg>"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th>{_text(name)}</th>" for name in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{cells}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def _text(text: str) -> str:
    # Names of files may have bytes that are not UTF-8.
    return html.escape(text.encode("utf-8", "replace").decode())


def _page(title: str, sections: Iterable[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{_text(title)}</h1>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


_STYLE = """
:root { color-scheme: light dark; --line: #8886; --mark: #2a6fb0; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 0 auto;
  padding: 1rem; }
h1, h2, h3 { overflow-wrap: anywhere; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
h3 { font-size: 1rem; font-weight: 600; margin-bottom: .3rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: .25rem clamp(.25rem, 1.2vw, .7rem); text-align: right; border-bottom: 1px solid var(--line); }
@media (max-width: 480px) { table { font-size: .78rem; }
  th, td { padding-inline: .12rem; } }
th:first-child, td:first-child { text-align: left; }
.gallery { display: grid; gap: .8rem;
  grid-template-columns: repeat(auto-fill, minmax(112px, 1fr)); }
figure { margin: 0; overflow-wrap: anywhere; font-size: .8rem; }
figure img { width: 100%; aspect-ratio: 1; object-fit: cover; border-radius: 4px; }
small { opacity: .7; }
code { overflow-wrap: anywhere; }
svg { width: 300px; max-width: 100%; }
svg rect { fill: none; stroke: var(--line); } svg line { stroke: var(--line); }
svg circle { fill: var(--mark); fill-opacity: .8; }
svg text { font-size: 12px; fill: currentColor; }
svg .x { text-anchor: middle; } svg .y { text-anchor: end; }
"""
