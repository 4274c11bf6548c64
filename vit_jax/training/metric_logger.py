"""Metrics of a run while it trains: progress, metrics.jsonl, TensorBoard."""

import contextlib
import json
import os
import sys
import time

import jax
import numpy as np
from clu import parameter_overview

from vit_jax.config import fields
from vit_jax.distributed import chips
from vit_jax.distributed import mesh as meshes
from vit_jax.evaluators import classification
from vit_jax.printing import print_line
from vit_jax.progress import StepBar
from vit_jax.training import run_report
from vit_jax.training.callbacks import Callbacks, Run
from vit_jax.training.config import TrainConfig
from vit_jax.training.metric_writer import MultiWriter, WorkdirWriter
from vit_jax.training.timers import (
    CompilationCounter,
    DataStallTimer,
    StartupTimer,
    StepTimer,
    data_stall_advice,
)
from vit_jax.training.train_step import TrainSetup


class MetricLogger:
    """Logs progress, metrics, start-up and slow steps; a context manager.

    Args:
      config: complete config.
      workdir: folder of the run.
      setup: of the run.
      start: steps taken before.
      replicas_per_shard: processes that load the same shard of every batch.
      startup: phases so far; the first step ends the last one.
      compilations: counts compiled programs.
      callbacks: told what is logged.

    Attributes:
      step_timer: measures the phases of every step.
      stall_timer: measures the time in which the device waits for input.
    """

    def __init__(
        self,
        config: TrainConfig,
        workdir: str | os.PathLike,
        setup: TrainSetup,
        start: int,
        *,
        replicas_per_shard: int,
        startup: StartupTimer,
        compilations: CompilationCounter,
        callbacks: Callbacks,
    ):
        self._callbacks = callbacks
        self._config, self._workdir, self._setup = config, workdir, setup
        self._start, self._replicas = start, replicas_per_shard
        self._startup, self._compilations = startup, compilations
        self._advised = False
        active = jax.process_index() == 0
        device = jax.devices()[0].device_kind
        self._progress = Progress(
            start,
            setup.total_steps,
            config.batch_size,
            jax.device_count(),
            active=active,
            ideal=ideal_seconds(setup.training_flops, device),
        )
        self._files = WorkdirWriter(workdir, start, active=active)
        more = config.tracker.writers(os.fspath(workdir)) if active else ()
        self._writer = MultiWriter([self._files, *more])
        self.step_timer = StepTimer(config.slow_step_factor, jax.process_index())
        self.stall_timer = DataStallTimer()
        self.info = self._progress.info

    def log_header(self, examples: int) -> None:
        """Logs the config, the model and the data.

        Args:
          examples: size of the training split.
        """
        config, setup = self._config, self._setup
        text = json.dumps(fields.to_json(config), indent=2)
        self._writer.write_hparams(fields.flatten(fields.to_json(config)))
        self._writer.write_texts(0, {"config": text})
        overview = parameter_overview.get_parameter_overview(
            setup.disk_shapes.params, include_stats=False
        )
        self._writer.write_texts(0, {"parameters": overview})
        count = sum(x.size for x in jax.tree.leaves(setup.shapes.params))
        self.info(
            f"{config.name}: {config.model.variant}, {count:,} parameters, "
            f"{examples:,} images, {setup.total_steps:,} steps of {config.batch_size} on "
            f"{jax.device_count()} x {jax.devices()[0].device_kind}; "
            f"workdir {self._workdir}"
        )
        self._callbacks.begin(
            Run(config, os.fspath(self._workdir), self._start, setup.total_steps, count)
        )

    def step_done(self, step: int) -> None:
        """Notes that the result of a step is there."""
        self._progress.step_done(step, self.stall_timer.seconds)
        if step == self._start + 1:
            self._startup.end_phase("first step")
            self.info(f"{self._startup.summary()}; {self._compilations.summary()}")

    def log_metrics(
        self,
        step: int,
        values: dict[str, float],
        *,
        skipped: int,
        failed_saves: int,
        read_ahead: bool,
    ) -> None:
        """Prints a progress line and writes the metrics of a step; all processes call it.

        Args:
          step: that is done.
          values: its metrics, such as its loss.
          skipped: damaged images that this process left out so far.
          failed_saves: saves of this start that failed.
          read_ahead: whether settings could make the input faster.
        """
        # The slowest input holds all up.
        own = meshes.process_allgather(skipped=skipped, waited=self.stall_timer.seconds)
        waited, lost = float(own["waited"].max()), int(own["skipped"].sum())
        lost //= self._replicas
        memory, timings = device_memory(), self.step_timer.summary()
        speed = self._progress.log(
            step,
            values["loss"],
            waited,
            timings["checkpoint_stall"],
            memory.get("memory_gib", 0.0),
        )
        values = values | speed | timings | memory | self._startup.new_metrics()
        values["compile_seconds"] = self._compilations.seconds
        values |= {"skipped": lost} if lost else {}
        values |= {"failed_saves": failed_saves} if failed_saves else {}
        if speed and read_ahead and not self._advised:
            self._advised = self._progress.advise(speed, self._config.data)
        named = {f"train/{k}": v for k, v in values.items()}
        self._writer.write_scalars(step, named)
        self._callbacks.log(step, named)

    def log_scores(
        self, step: int, scores: dict, confusions: dict, pictures: dict
    ) -> None:
        """Prints the scores of evaluations, and writes those not written yet.

        Args:
          step: steps taken.
          scores: evaluation to set of parameters to metrics.
          confusions: the same to `classification.Confusion`, of some.
          pictures: the same to strips of pictures, of some.
        """
        for name, kinds in scores.items():
            if self.has_scores(step, name):
                continue
            self._writer.write_scalars(step, run_report.flatten_scores({name: kinds}))
            for kind, table in confusions.get(name, {}).items():
                if jax.process_index() == 0:
                    picture = np.asarray(classification.draw_confusion(table))[None]
                    self.images(f"{name}/{kind}/confusion", picture, step)
            for kind, strips in pictures.get(name, {}).items():
                self.images(f"{name}/{kind}/pictures", strips, step)
        self._writer.flush()
        self.info(
            f"step {step}/{self._setup.total_steps}  {run_report.scores_line(scores)}"
        )
        self._callbacks.evaluate(step, run_report.flatten_scores(scores))

    def images(self, name: str, images: np.ndarray, step: int) -> None:
        """Writes up to 16 images, uint8 (..., Y, X, C)."""
        shown = images.reshape(-1, *images.shape[-3:])[:16]
        self._writer.write_images(step, {name: shown})

    def has_scores(self, step: int, name: str) -> bool:
        """Returns whether the scores of an evaluation are written for a step."""
        return self._files.has(step, f"{name}/params/")

    @property
    def history(self) -> list[dict]:
        """The lines of metrics.jsonl: "step", and the metrics by name."""
        return self._files.lines

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
        self._progress.close()
        self._writer.close()


class Progress:
    """Prints lines, moves a bar on terminals and measures the time spent in steps.

    The first step of a start is not counted: it compiles. Nor is what happens between
    `pause` and `resume` (evaluation, waiting for a save).

    Args:
      start: steps taken before.
      total: steps of the run.
      batch_size: images a step, all devices.
      devices: number of devices.
      active: whether this process prints.
      ideal: seconds in which a device at its peak would train on one image; 0 if that
        is not known.
    """

    def __init__(
        self,
        start: int,
        total: int,
        batch_size: int,
        devices: int,
        *,
        active: bool,
        ideal: float = 0.0,
    ):
        self._total, self._batch, self._devices = total, batch_size, devices
        self._ideal = ideal
        self._active = active
        # Where lines go through a pipe, as to tee, they would come amidst the bar.
        self._bar = StepBar(start, total, active=active and sys.stdout.isatty())
        self._step = self._logged = start
        self._seconds = self._logged_seconds = self._logged_waited = 0.0
        self._since = None
        self._first = start + 1
        self._rate = 0.0

    def step_done(self, step: int, waited: float = 0.0) -> None:
        """Notes that the result of a step is there.

        Args:
          step: steps taken.
          waited: see `log`.
        """
        self._count()
        self._step = step
        if step == self._first:  # It compiled: the clock starts here.
            self._logged, self._seconds, self._logged_seconds = step, 0.0, 0.0
            self._since, self._logged_waited = time.perf_counter(), waited
        self._bar.show(step)

    def pause(self) -> None:
        """Stops the clock."""
        self._count()
        self._since = None

    def resume(self) -> None:
        """Starts the clock again."""
        if self._step >= self._first:
            self._since = time.perf_counter()

    @property
    def images_per_second(self) -> float:
        """Mean over all counted steps of this start; 0 if there was only one."""
        steps = self._step - self._first
        return steps * self._batch / self._seconds if self._seconds else 0.0

    def log(
        self,
        step: int,
        loss: float,
        waited: float,
        stalled: float = 0.0,
        memory: float = 0.0,
    ) -> dict[str, float]:
        """Prints a line and returns the speed since the last one.

        Args:
          step: steps taken.
          loss: of the step.
          waited: seconds of this start in which the device waited for input.
          stalled: seconds since the last line in which the loop stood still for saves.
          memory: GiB in use on a device, 0 if that is not known.

        Returns:
          step_seconds, images_per_second, images_per_second_per_device, input_wait (the
          fraction of the time in which the device waited for input), and mfu, the
          fraction of the device's peak that the model's operations make up, if that
          peak is known. Empty where no step was counted yet.
        """
        steps = step - self._logged
        seconds = self._seconds - self._logged_seconds
        wait = 0.0
        if steps and seconds:
            self._rate = steps * self._batch / seconds
            # Clocks of two threads may differ by a hair.
            wait = min(1.0, (waited - self._logged_waited) / seconds)
        self._logged, self._logged_seconds = step, self._seconds
        self._logged_waited = waited
        speed = self._speed(wait) if self._rate else {}
        parts = [f"step {step}/{self._total}", f"loss {loss:.4f}"]
        if speed:
            each = " a device" if self._devices > 1 else ""
            parts += [
                f"{speed['step_seconds']:.3f} s",
                f"{speed['images_per_second_per_device']:.0f} images/s{each}",
                f"MFU {speed['mfu']:.0%}" if self._ideal else "",
                f"input wait {wait:.0%}" if wait >= 0.01 else "",
            ]
        parts += [
            f"saving {stalled:.1f} s" if stalled >= 0.05 else "",
            f"{memory:.1f} GiB" if memory else "",
        ]
        shown = [f"loss {loss:.4f}"]
        if speed:
            left = f"{_clock((self._total - step) * speed['step_seconds'])} left"
            parts.append(left)
            shown += [left, f"{speed['images_per_second']:.0f} images/s"]
        self.info("  ".join(filter(None, parts)))
        self._bar.show(step, *shown)
        return speed

    def _speed(self, wait: float) -> dict[str, float]:
        each = self._rate / self._devices
        speed = {
            "step_seconds": self._batch / self._rate,
            "images_per_second": self._rate,
            "images_per_second_per_device": each,
            "input_wait": wait,
        }
        return speed | ({"mfu": each * self._ideal} if self._ideal else {})

    def advise(self, speed: dict[str, float], data) -> bool:
        """Prints what to raise if the input is the bottleneck; returns whether it is.

        Args:
          speed: what `log` returned.
          data: `config.data`.
        """
        text = data_stall_advice(speed["input_wait"], speed["images_per_second"], data)
        if text:
            self.info(text)
        return bool(text)

    def info(self, text: str) -> None:
        """Prints lines, above the bar."""
        if self._active:
            for line in text.split("\n"):
                print_line(line)

    def close(self) -> None:
        """Removes the bar."""
        self._bar.close()

    def _count(self) -> None:
        if self._since is not None:
            now = time.perf_counter()
            self._seconds += now - self._since
            self._since = now


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def ideal_seconds(flops: int | None, device_kind: str) -> float:
    """Returns the seconds in which a device at its peak would train on one image.

    Model FLOPs utilisation is this times the images a second of a device.

    Args:
      flops: floating-point operations per image, as of `Task.training_flops`; None if
        unknown.
      device_kind: as JAX says it.

    Returns:
      0 if the peak of the device is not known, as that of a CPU, or `flops`.
    """
    chip = chips.find(device_kind)
    if chip is None or flops is None:
        return 0.0
    return flops / chip.peak_flops


def device_memory() -> dict[str, float]:
    """Returns how full the fullest device of this process is, in GiB.

    Returns:
      memory_gib: now; memory_peak_gib: at most since the process began. Empty where the
      device does not tell, as a CPU.
    """
    found = [device.memory_stats() or {} for device in jax.local_devices()]
    names = {"memory_gib": "bytes_in_use", "memory_peak_gib": "peak_bytes_in_use"}
    return {
        name: max(stats[key] for stats in found) / 2**30
        for name, key in names.items()
        if all(key in stats for stats in found)
    }
