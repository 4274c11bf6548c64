"""A scaling study: architectures on nested parts of a data set, at equal length.

Its config takes three arguments: `model`, `images` (the part of the data set that is
pretrained on) and `part` ("pretrain" or "finetune"). Every model is pretrained on every
part and then fine-tuned, with what it came to as `init`. A study that is killed resumes
where it was when it is started again.
"""

import dataclasses
import itertools
import os
import re
from collections.abc import Mapping

from vit_jax import progress
from vit_jax.config import loading
from vit_jax.data.sources.open import opened_by
from vit_jax.errors import UserError
from vit_jax.models import variants
from vit_jax.tools.sweeps import runs
from vit_jax.tools.sweeps.runs import SplitCache, scores
from vit_jax.tools.sweeps.transfer import say
from vit_jax.training import config as training_config
from vit_jax.training import lock
from vit_jax.training.config import TrainConfig
from vit_jax.training.sweep import SweepCache

FILE = "study.json"
PARTS = ("pretrain", "finetune")
_ARGUMENTS = ("model", "images", "part")
# Keys that the study's config says for each run.
_TAKEN = ("name", "init.checkpoint", "data.split", "data.num_examples", "evals")
_COLUMNS = {"model": "", "images": ",", "upstream": ".2%", "finetuned": ".2%"}


@dataclasses.dataclass(frozen=True)
class Point:
    """A model on a part of the data set.

    Attributes:
      model: its name in the study.
      images: size of the part.
      pretrain: complete config.
      finetune: complete config; its `init` is the workdir of the pretraining.
    """

    model: str
    images: int
    pretrain: TrainConfig
    finetune: TrainConfig

    @property
    def name(self) -> str:
        """Returns the folder of its runs."""
        return f"{self.model}-{self.images}"

    @property
    def family(self) -> str:
        """Returns "vit", "hybrid" or "resnet"."""
        variant = variants.parse(self.pretrain.model.variant)
        if variant.size is None:
            return "resnet"
        return "hybrid" if variant.resnet else "vit"


@dataclasses.dataclass(frozen=True)
class Study:
    """All points of a study.

    Attributes:
      points: in the order in which they are run.
      workdir: folder of the study.
    """

    points: tuple[Point, ...]
    workdir: str | os.PathLike

    def run(self) -> dict:
        """Runs all that is not done yet, and writes `study.json` after each run.

        Returns:
          What the file holds: of each point its model, family, images, the exaFLOPs of
          its pretraining, the compute of its runs, and the top-1 on test: upstream,
          few-shot (by examples a class) and fine-tuned (None if that is not done);
          "diverged" is {part: one line} of a run whose numbers became infinite.

        Raises:
          UserError: the workdir holds another study, or as `loop.train`.
          Preempted: SIGTERM came; the same command resumes.
        """
        with lock.held(self.workdir):
            return self._run()

    def _run(self) -> dict:
        runs.check_command(self.workdir, self._command())
        rows = []
        with opened_by(SplitCache()):
            for number, point in enumerate(
                progress.each(self.points, "points", "points"), 1
            ):
                say(f"point {number} of {len(self.points)}: {point.name}")
                rows.append(_row(point))
                for part in PARTS:
                    done = self._train(point, part)
                    rows[-1] = _with(rows[-1], part, done)
                    self._write(rows)
                    if "diverged" in done:  # There is nothing to fine-tune.
                        say(f"{point.name}, {part}, diverged: {done['diverged']}")
                        break
        say(runs.format_table([_flat(row) for row in rows], _columns(rows)))
        say(_on_diverged(rows))
        return _report(rows)

    def _train(self, point: Point, part: str) -> dict:
        folder = os.path.join(self.workdir, point.name, part)
        config = point.pretrain if part == PARTS[0] else point.finetune
        # What was pretrained stays, for other uses.
        return runs.train(config, folder, SweepCache(), keep=part == PARTS[0])

    def _write(self, rows: list[dict]) -> None:
        runs.write_json(self.workdir, FILE, _report(rows))
        runs.write_table(self.workdir, "points", [_flat(row) for row in rows])

    def _command(self) -> dict:
        return {
            point.name: {
                "pretrain": runs.decisive(point.pretrain),
                "finetune": runs.decisive(point.finetune),
            }
            for point in self.points
        }


def plan(
    spec: str,
    workdir: str | os.PathLike,
    *,
    models: tuple[str, ...] = (),
    images: tuple[int, ...] = (),
    overrides: Mapping[str, object] | None = None,
) -> Study:
    """Reads the configs of all runs, so that none begins if one of them is wrong.

    Args:
      spec: path of a config with the arguments `model`, `images` and `part`; others may
        be stated behind a colon.
      workdir: folder of the study.
      models, images: of those that the config takes; all if empty.
      overrides: dotted config key to value, for all runs.

    Raises:
      UserError: the config has no such arguments, a value is none of theirs, or an
        override is the study's to state.
    """
    path, _, rest = spec.partition(":")
    known = loading.arguments(path)
    for name in _ARGUMENTS:
        if not isinstance(known.get(name), tuple):
            raise UserError(
                f"--config={path} has no argument {name!r} with a list of values, which "
                "a study goes through: take one of configs/study/"
            )
        if re.search(rf"(^|,){name}(=|,|$)", rest):
            raise UserError(
                f"--config={spec}: the study goes through all of {name!r}; choose with "
                "--models and --images"
            )
    for key in overrides or {}:
        if key == "init" or re.match(
            rf"({'|'.join(map(re.escape, _TAKEN))})(\.|$)", key
        ):
            raise UserError(f"--config.{key}: the study's config says it for each run")
    chosen = _choose("--models", models, known["model"])
    sizes = sorted(_choose("--train_sizes", images, known["images"]))

    def load(model, size, part, more):
        words = [f"model={model}", f"images={size}", f"part={part}", rest]
        text = ",".join(filter(None, words))
        return training_config.load(f"{path}:{text}", dict(overrides or {}) | more)

    points = []
    # All models on the smallest part first: so a study cut short still compares them.
    for size, model in itertools.product(sizes, chosen):
        init = os.path.join(workdir, f"{model}-{size}", "pretrain")
        pretrain = load(model, size, "pretrain", {})
        finetune = load(model, size, "finetune", {"init": init})
        points.append(Point(model, size, pretrain, finetune))
    return Study(tuple(points), workdir)


def _choose(flag: str, wanted: tuple, known: tuple) -> tuple:
    for value in wanted:
        if value not in known:
            listed = ", ".join(map(str, known))
            raise UserError(f"{flag}={value}: the study has {listed}")
    return tuple(dict.fromkeys(wanted)) or known


def _row(point: Point) -> dict:
    """Returns a point of which nothing is done."""
    return {
        "model": point.model,
        "variant": point.pretrain.model.variant,
        "family": point.family,
        "images": point.images,
        "images_seen": None,
        "exaflops": None,
        "upstream": None,
        "fewshot": {},
        "finetuned": None,
        "compute": {},
    }


def _with(row: dict, part: str, done: dict) -> dict:
    """Adds what a run came to."""
    if "diverged" in done:
        return row | {"diverged": {part: done["diverged"]}}
    row = row | {"compute": row["compute"] | {part: done["compute"]}}
    top1 = scores(done, "test")["top1"]
    if part == "finetune":
        return row | {"finetuned": top1}
    used = {name: done["compute"][name] for name in ("images_seen", "exaflops")}
    return row | used | {"upstream": top1, "fewshot": _fewshot(done)}


def _on_diverged(rows: list[dict]) -> str:
    """Lists the runs that diverged; "" if none did."""
    lines = [
        f"{row['model']}-{row['images']}, {part} ({reason})"
        for row in rows
        for part, reason in row.get("diverged", {}).items()
    ]
    if not lines:
        return ""
    return (
        f"diverged: {'; '.join(lines)}; a lower rate in the study's config, and another "
        "--workdir, may mend that"
    )


def _report(rows: list[dict]) -> dict:
    return {"kind": "scaling", "points": rows}


def _fewshot(report: dict) -> dict[str, float]:
    """Returns the few-shot accuracies by the number of examples a class."""
    found = {}
    for name, value in scores(report, "fewshot").items():
        if match := re.fullmatch(r"(\d+)shot", name):
            found[match[1]] = value
    return found


def _flat(point: dict) -> dict:
    """Returns a point as a row of a table."""
    row = {name: value for name, value in point.items() if name != "fewshot"}
    return row | {f"{n}shot": value for n, value in point["fewshot"].items()}


def _columns(points: list[dict]) -> dict[str, str]:
    return _COLUMNS | {f"{n}shot": ".2%" for point in points for n in point["fewshot"]}
