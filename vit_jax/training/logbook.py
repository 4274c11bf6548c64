"""What a run tells while it goes on: lines for people, numbers for TensorBoard."""

import contextlib
import json
import os

import jax
import numpy as np
from clu import parameter_overview

from vit_jax.config import fields
from vit_jax.parallel import distributed
from vit_jax.report import confusion, result
from vit_jax.report.compilations import Compilations
from vit_jax.report.laps import Laps
from vit_jax.report.progress import Progress
from vit_jax.report.startup import Startup
from vit_jax.report.waiting import InputWait
from vit_jax.report.writer import MetricWriter
from vit_jax.training import efficiency
from vit_jax.training.config import TrainConfig
from vit_jax.training.program import Program


class Logbook:
    """Progress, metrics, start-up and slow steps of a start; a context manager.

    Args:
      config: complete config.
      workdir: folder of the run.
      program: of the run.
      start: steps taken before.
      alike: processes that load the same part of every batch.
      startup: phases so far; the first step ends the last one.
      compilations: counts them.

    Attributes:
      laps: takes the time of every step's phases.
      wait: takes the time in which the device waits for input.
    """

    def __init__(
        self,
        config: TrainConfig,
        workdir: str | os.PathLike,
        program: Program,
        start: int,
        *,
        alike: int,
        startup: Startup,
        compilations: Compilations,
    ):
        self._config, self._workdir, self._program = config, workdir, program
        self._start, self._alike = start, alike
        self._startup, self._compilations = startup, compilations
        self._advised = False
        active = jax.process_index() == 0
        device = jax.devices()[0].device_kind
        self._progress = Progress(
            start,
            program.total,
            config.batch_size,
            jax.device_count(),
            active=active,
            ideal=efficiency.ideal_seconds(program.model, device),
        )
        self._writer = MetricWriter(workdir, start, active=active)
        self.laps, self.wait = Laps(config.slow_step, jax.process_index()), InputWait()
        self.say, self.images = self._progress.say, self._writer.images

    def head(self, examples: int) -> None:
        """Says what is trained on what.

        Args:
          examples: size of the training split.
        """
        config, program = self._config, self._program
        text = json.dumps(fields.to_json(config), indent=2)
        self._writer.text("config", text)
        overview = parameter_overview.get_parameter_overview(
            program.disk_shapes.params, include_stats=False
        )
        self._writer.text("parameters", overview)
        count = sum(x.size for x in jax.tree.leaves(program.shapes.params))
        self.say(
            f"{config.name}: {config.model.variant}, {count:,} parameters, "
            f"{examples:,} images, {program.total:,} steps of {config.batch_size} on "
            f"{jax.device_count()} x {jax.devices()[0].device_kind}; "
            f"workdir {self._workdir}"
        )

    def done(self, step: int) -> None:
        """Notes that a step is done, when its result is there."""
        self._progress.done(step, self.wait.seconds)
        if step == self._start + 1:
            self._startup.done("first step")
            self.say(f"{self._startup.line()}; {self._compilations.line()}")

    def log(
        self,
        step: int,
        values: dict[str, float],
        *,
        skipped: int,
        failed: int,
        read_ahead: bool,
    ) -> None:
        """Prints a line and writes the metrics of a step; all processes call it.

        Args:
          step: that is done.
          values: its metrics, such as its loss.
          skipped: damaged images that this process left out so far.
          failed: saves of this start that failed.
          read_ahead: whether settings could make the input faster.
        """
        # The slowest input holds all up.
        own = distributed.gather(skipped=skipped, waited=self.wait.seconds)
        waited, lost = float(own["waited"].max()), int(own["skipped"].sum())
        lost //= self._alike
        memory, laps = efficiency.memory(), self.laps.report()
        speed = self._progress.log(
            step,
            values["loss"],
            waited,
            laps["checkpoint_stall"],
            memory.get("memory_gib", 0.0),
        )
        values = values | speed | laps | memory | self._startup.news()
        values["compile_seconds"] = self._compilations.seconds
        values |= {"skipped": lost} if lost else {}
        values |= {"failed_saves": failed} if failed else {}
        if speed and read_ahead and not self._advised:
            self._advised = self._progress.advise(speed, self._config.data)
        self._writer.scalars(step, {f"train/{k}": v for k, v in values.items()})

    def scores(self, step: int, scores: dict, confusions: dict) -> None:
        """Prints what the evaluations gave, and writes it unless it is written.

        Args:
          step: steps taken.
          scores: evaluation to set of parameters to metrics.
          confusions: the same to `report.confusion.Confusion`, of some.
        """
        for name, kinds in scores.items():
            if self.has_scores(step, name):
                continue
            self._writer.scalars(step, result.flatten({name: kinds}))
            for kind, table in confusions.get(name, {}).items():
                if jax.process_index() == 0:
                    picture = np.asarray(confusion.draw(table))[None]
                    self.images(f"{name}/{kind}/confusion", picture, step)
        self.say(f"step {step}/{self._program.total}  {result.line(scores)}")

    def has_scores(self, step: int, name: str) -> bool:
        """Tells whether the scores of an evaluation are written for a step."""
        return self._writer.has(step, f"{name}/raw/")

    @contextlib.contextmanager
    def pause(self):
        """Stops the clock of steps for what happens within."""
        self._progress.pause()
        yield
        self._progress.resume()

    @property
    def images_per_second(self) -> float:
        """Mean over the counted steps of this start."""
        return self._progress.images_per_second

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self._writer.close()
