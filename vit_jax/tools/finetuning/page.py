"""The parts that the HTML pages of all kinds of annotation share.

A page is one file that loads no other files: heading, scores, learning curves, then the
tables, charts and galleries of its kind, then settings and commands. A kind's page is a
template that extends "finetuning/frame.html" and fills the block `results`; its macros
are in "finetuning/macros.html" (`gallery`, `drawing`) and "report/macros.html"
(`table`). For example:

```python
def write_page(self, config, result, score):
    common = page.common(config, result, score, "age", {"mae": "mean absolute error"})
    worst = [page.picture(source, record, "31 predicted as 58") for record in ...]
    scatter = page.draw(charts.Chart("scatter", "", "true age", "predicted age", ...))
    values = {"worst": worst, "scatter": scatter}
    return page.write("finetuning/numbers_page.html", common, result.workdir, **values), []
```

```
{% extends "finetuning/frame.html" %}
{% from "finetuning/macros.html" import drawing, gallery %}
{% block results %}
<h2>Predicted and true age</h2>
{{ drawing(scatter) }}
<h2>The largest errors</h2>
{{ gallery(worst) }}
{% endblock %}
```

The page contains thumbnails of the images, so it is as private as they are.
"""

import base64
import contextlib
import dataclasses
import datetime
import io
import math
import os
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from etils import epath
from PIL import Image

import vit_jax
from vit_jax.analysis import charts
from vit_jax.analysis.charts import Chart, Matrix
from vit_jax.command_line.files import replace_text
from vit_jax.command_line.printing import masked
from vit_jax.config import fields
from vit_jax.config.fields import Choice, Named, Section
from vit_jax.data import bands
from vit_jax.data.decode import DamagedImage
from vit_jax.data.sources.base import Source
from vit_jax.errors import UserError
from vit_jax.tools.finetuning.kind import Result
from vit_jax.tools.report import results, run_charts, templates
from vit_jax.tools.report.blocks import Table
from vit_jax.tools.sweeps import runs
from vit_jax.training import run_report
from vit_jax.training.config import TrainConfig

FILE = "report.html"
SIDE = 112  # Side of a thumbnail on the page, in pixels.
_FLAGS = "--model", "--aspect"
_PIXELS_PER_INCH = 76  # At which a chart is shown: its letters have 11 pixels.


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A chart for a page.

    Attributes:
      svg: element of the page, whose colours are those of the page.
      width: width at which letters are readable, in pixels.
      label: description, for readers who do not see it.
      note: text below the chart.
    """

    svg: str
    width: int
    label: str
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Common:
    """What the pages of all kinds have, see `common`.

    Attributes:
      title: name of the task in a few words.
      score: score as a sentence.
      notes: further sentences about the scores.
      facts: names and values: paths, network, length, date, version.
      curves: learning curves; None stands for one that matplotlib would draw.
      settings: config keys that differ from their defaults.
      again: command that trains the same network.
      commands: purposes and commands to continue with.
    """

    title: str
    score: str
    notes: Sequence[str]
    facts: Sequence[tuple[str, str]]
    curves: Sequence[Drawing | None]
    settings: Table
    again: str
    commands: Sequence[tuple[str, str]]


def common(
    config: TrainConfig,
    result: Result,
    score: str,
    what: str,
    metrics: Mapping[str, str],
) -> Common:
    """Returns the parts of a page that all kinds have.

    Args:
      config: config of the run.
      result: result of the run, or of the first of several.
      score: score as a sentence.
      what: what is learnt, in a few words, such as "5 classes".
      metrics: descriptions by name of the metrics whose curves are drawn.
    """
    recorded = runs.recorded(result.workdir)
    place = masked(str(recorded.get("images") or config.data.name))
    name = os.path.splitext(os.path.basename(place.rstrip("/\\")))[0] or place
    lines = [line.partition(":") for line in result.kind.commands(result.workdir)]
    return Common(
        title=f"{name}: {what}",
        score=f"{score[0].upper()}{score[1:]}.",
        notes=[line.partition("note: ")[2] for line in result.kind.notes(result)],
        facts=_facts(config, result, place),
        curves=_curves(result, metrics),
        settings=_settings(config),
        again=_again(recorded, result),
        commands=[(purpose, command.strip()) for purpose, _, command in lines],
    )


def write(template: str, common: Common, workdir: str, **values: object) -> str:
    """Renders a template that extends "finetuning/frame.html"; returns the page's path.

    Args:
      template: template, such as "finetuning/page.html".
      common: parts that all kinds have.
      workdir: folder that the page is written to.
      **values: variables of the block `results`.
    """
    path = epath.Path(workdir) / FILE
    replace_text(path, templates.render(template, common=common, **values))
    return str(path)


def draw(chart: Chart | Matrix) -> Drawing | None:
    """Draws a chart for a page; returns None if matplotlib is not installed."""
    with contextlib.suppress(UserError), warnings.catch_warnings():
        # Letters that matplotlib's font lacks are drawn by the browser.
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure = charts.draw(chart)
        width = round(_PIXELS_PER_INCH * figure.get_size_inches()[0])
        svg = charts.to_inline_svg(charts.to_svg(figure, "none"), chart.name)
        return Drawing(svg, width, chart.title or chart.name, chart.note)
    return None


def picture(source: Source, record: int | np.integer, caption: str) -> dict[str, str]:
    """Returns an image of a gallery: its thumbnail, caption, file and short name."""
    return {
        "image": _thumbnail(source, int(record)),
        "caption": caption,
        "file": source.describe(int(record)),
        "name": os.sep.join(source.record_id(int(record)).split(os.sep)[-2:]),
    }


def _thumbnail(source: Source, record: int) -> str:
    """Returns an image as the data URL of a small JPEG; "" if it is damaged."""
    try:
        # All these images have been evaluated, so they are within the run's size limit.
        how = {"exif": True, "max_megapixels": math.inf}
        shown = Image.fromarray(bands.picture(source[record]["image"], **how))
    except (DamagedImage, OSError):
        return ""
    scale = SIDE // max(shown.size)
    if scale > 1:
        size = shown.width * scale, shown.height * scale
        shown = shown.resize(size, Image.Resampling.NEAREST)
    shown.thumbnail((2 * SIDE, 2 * SIDE))
    return jpeg_url(shown)


def jpeg_url(shown: Image.Image) -> str:
    """Returns a picture as the data URL of a JPEG."""
    stream = io.BytesIO()
    shown.save(stream, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"


def percent(value: float) -> str:
    """Returns a fraction in percent; "-" for NaN."""
    return "-" if math.isnan(value) else f"{value:.1%}"


def _facts(config: TrainConfig, result: Result, place: str) -> list[tuple[str, str]]:
    report, data = result.report, config.data
    version = f"vit_jax {vit_jax.__version__}"
    if commit := report.get("commit"):
        version += f", commit {commit}"
    steps = f"{report['steps']:,} steps of {config.batch_size} images"
    if best := (report.get("best") or {}).get("step"):
        steps += f"; the network of step {best:,}"
    seconds = datetime.timedelta(seconds=round(report.get("wall_seconds", 0)))
    return [
        ("images", place),
        ("training images", f"{report['examples']:,}"),
        ("image size", "x".join(map(str, data.image_size)) + " pixels"),
        ("network", f"{config.model.variant} from {masked(config.init.checkpoint)}"),
        (
            "training",
            f"{steps}; {seconds} on {report['devices']} x {report['device_kind']}",
        ),
        ("workdir", result.workdir),
        ("date", f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"),
        ("code", version),
    ]


def _curves(result: Result, metrics: Mapping[str, str]) -> list[Drawing | None]:
    """Returns the curves of the loss and of each metric, from metrics.jsonl."""
    (run,) = results.read_runs([result.workdir])
    kind, _ = run_report.quoted_scores(result.report["final"].get("val", {}))
    drawn = []
    for metric, what in {"loss": "loss", **metrics}.items():
        named = {f"train/{metric}": "training batches"}
        named[f"val/{kind}/{metric}"] = "validation images"
        if chart := run_charts.learning_curve(run, metric, what, named):
            drawn.append(draw(chart))
    return drawn


def _settings(config: TrainConfig) -> Table:
    rows = tuple(dict(_changed(config)).items())
    title = f"Settings: {len(rows)} keys that differ from their defaults"
    return Table(title, ("config key", "value"), rows, folded=True)


def _changed(config: object, where: str = "") -> Iterator[tuple[str, str]]:
    """Yields keys and values of a config that differ from their defaults."""
    defaults = fields.defaults(type(config))
    for name, about in fields.fields(type(config)).items():
        value, path = getattr(config, name), f"{where}{name}"
        if isinstance(about, Named):
            for part, inner in value.items():
                yield from _changed_in(about.choice, inner, f"{path}.{part}")
        elif isinstance(about, Section):
            yield from _changed_in(about, value, path)
        elif fields.is_read(about, config) and value != defaults.get(name):
            yield path, masked(str(value))


def _changed_in(about: Section, value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yields those of a section, beginning with its kind."""
    if isinstance(about, Choice):  # The default of the key is that of the kind.
        kind = getattr(value, about.text_key, about.default)
        if kind != about.default:
            yield f"{path}.{about.text_key}", str(kind)
    yield from _changed(value, f"{path}.")


def _again(recorded: Mapping, result: Result) -> str:
    """Returns the command of the run, from the record in its workdir."""
    words = ["python", "-m", "vit_jax.finetune", str(recorded.get("images", "PHOTOS"))]
    words += [f"--workdir={result.workdir}"]
    words += [f"{flag}={recorded[flag]}" for flag in _FLAGS if flag in recorded]
    if "--minutes" in recorded:  # Of each run.
        words.append(f"--minutes={recorded['--minutes'] * (result.folds or 1):g}")
    if result.folds:
        words.append(f"--folds={result.folds}")
    if result.decisions and result.decisions.scales:
        words.append("--calibrate")
    keys = recorded.get("config", {}).items()
    return shlex.join(words + [f"--config.{key}={value}" for key, value in keys])
