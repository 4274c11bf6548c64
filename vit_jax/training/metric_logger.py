"""Metrics of a run while it trains: progress, metrics.jsonl, TensorBoard."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator

import jax
import numpy as np
from clu import parameter_overview

from vit_jax.command_line.printing import print_line
from vit_jax.command_line.progress import StepBar
from vit_jax.config import fields
from vit_jax.data import display, fingerprint, pipeline
from vit_jax.data import fields as records
from vit_jax.distributed import chips
from vit_jax.distributed import mesh as meshes
from vit_jax.training import run_report
from vit_jax.training.actions import Interval
from vit_jax.training.callbacks import Callback, Run
from vit_jax.training.metric_writer import WorkdirWriter
from vit_jax.training.timers import (
    CompilationCounter,
    DataStallTimer,
    StartupTimer,
    StepTimer,
    data_stall_advice,
)


class MetricLogger(Callback):
    """Logs progress, metrics, start-up and slow steps; a context manager.

    Attributes:
      info: prints lines in process 0.
      step_timer: timer of the phases of every step.
    """

    on_every_host = True

    def __init__(self, startup: StartupTimer, compilations: CompilationCounter):
        self._startup, self._compilations = startup, compilations
        self._closing = contextlib.ExitStack()
        self._advise = False  # Whether to log advice if the input is the bottleneck.
        self._skipped = 0  # Number of damaged images that this process skipped.

    def begin(self, run: Run) -> None:
        self._run, config, setup = run, run.config, run.setup
        active, device = jax.process_index() == 0, jax.devices()[0].device_kind
        self._interval = Interval(
            config.log_every_steps, config.log_every_epochs, setup
        )
        self._files = WorkdirWriter(run.workdir, run.start, active=active)
        more = config.tracker.writers(run.workdir) if active else ()
        self._writers = [self._files, *more]
        for writer in self._writers:
            self._closing.callback(writer.close)
        sizes = run.start, setup.total_steps, config.batch_size, jax.device_count()
        ideal = ideal_seconds(setup.training_flops, device)
        self._progress = Progress(*sizes, active=active, ideal=ideal)
        self._closing.callback(self._progress.close)
        self.info = self._progress.info
        self.step_timer = StepTimer(config.slow_step_factor, jax.process_index())
        self._stall_timer = self._closing.enter_context(DataStallTimer())
        keys = fields.to_json(config)
        overview = parameter_overview.get_parameter_overview(
            setup.layout.disk.shapes.params, include_stats=False
        )
        texts = {"config": json.dumps(keys, indent=2), "parameters": overview}
        for writer in self._writers:
            writer.write_hparams(fields.flatten(keys))
            writer.write_texts(0, texts)
        self.info(
            f"{config.name}: {config.model.variant}, {run.num_parameters:,} parameters, "
            f"{len(setup.source):,} images, {setup.total_steps:,} steps of "
            f"{config.batch_size} on {jax.device_count()} x {device}; workdir {run.workdir}"
        )
        parts = records.parts(config.data)
        unchecked = fingerprint.unchecked(run.checkpoints.data, parts)
        notes = [*run.notes, *setup.notes, *setup.suite.notes, unchecked]
        for note in filter(None, notes):
            self.info(note)

    def steps(self, batches: pipeline.Batches) -> Iterator[tuple[int, dict]]:
        """Yields the number and the batch of each step to take, and measures steps."""
        self._advise = batches.read_ahead
        timed = self._stall_timer.iterate(batches)
        for step, batch in enumerate(timed, self._run.start + 1):
            self.step_timer.mark("input")
            self._skipped += int(batch.pop("skipped").sum())
            if step == 1 and "grids" not in batch:  # Not rows of patches.
                self._write_images("train/images", batch["image"], 0)
            yield step, batch
            if line := self.step_timer.end_step(step):
                self.info(line)
            if step == self._run.last_step:  # Early stopping may have lowered it.
                return

    def step_started(self, metrics: object) -> None:
        """Records that a step was queued on the device; `metrics` are its results."""
        self._stall_timer.step_started(metrics)

    def step_done(self, step: int) -> None:
        """Records that the device has computed a step."""
        self.step_timer.mark("device step")
        self._progress.step_done(step, self._stall_timer.seconds)
        if step == self._run.start + 1:
            self._startup.end_phase("first step")
            self.info(f"{self._startup.summary()}; {self._compilations.summary()}")

    def after_step(self, step: int) -> None:
        if not self._interval.is_due(step):
            return
        values = self._run.metrics()
        if warning := self._run.setup.task.warning(values):
            self.info(f"step {step}/{self._run.setup.total_steps}  warning: {warning}")
        waited, skipped = self._of_all_processes()
        memory, timings = memory_use(), self.step_timer.summary()
        speed = self._progress.log(
            step,
            values["loss"],
            waited,
            timings["checkpoint_stall"],
            memory.get("memory_gib", 0.0),
        )
        if speed and self._advise:
            speeds = speed["input_wait"], speed["images_per_second"]
            if advice := data_stall_advice(*speeds, self._run.config.data):
                self.info(advice)
                self._advise = False
        values = values | speed | timings | memory | self._startup.new_metrics()
        values["compile_seconds"] = self._compilations.seconds
        failed = self._run.checkpoints.failures
        counts = {"skipped": skipped, "failed_saves": failed}
        values |= {name: count for name, count in counts.items() if count}
        values = {f"train/{k}": v for k, v in values.items()}
        for writer in self._writers:
            writer.write_scalars(step, values)
        self._run.notify("log", step, values)
        self.step_timer.mark("logging")

    def _of_all_processes(self) -> tuple[float, int]:
        """Returns the longest wait for input in seconds, and the skipped images."""
        each = meshes.process_allgather(
            waited=self._stall_timer.seconds, skipped=self._skipped
        )
        # Processes that load the same shard of every batch skip the same images.
        _, shards = meshes.data_shard(self._run.setup.mesh)
        skipped = int(each["skipped"].sum()) // (jax.process_count() // shards)
        return float(each["waited"].max()), skipped

    def log_scores(
        self, step: int, scores: dict, confusions: dict, pictures: dict
    ) -> None:
        """Prints the scores of evaluations, and writes those not written yet.

        Each argument is a nested dict by evaluation and set of parameters.

        Args:
          step: number of steps taken.
          scores: metrics by name.
          confusions: `protocol.Confusion`, for evaluations that have one.
          pictures: strips of pictures, for evaluations that have some.
        """
        for name, kinds in scores.items():
            if self.has_scores(step, name):
                continue
            for writer in self._writers:
                writer.write_scalars(step, run_report.flatten_scores({name: kinds}))
            for kind, table in confusions.get(name, {}).items():
                self._write_confusion(f"{name}/{kind}/confusion", table, step)
            for kind, strips in pictures.get(name, {}).items():
                self._write_images(f"{name}/{kind}/pictures", strips, step)
        for writer in self._writers:
            writer.flush()
        self.info(
            f"step {step}/{self._run.setup.total_steps}  "
            + run_report.scores_line(scores, self._run.config.checkpoint.best_metric)
        )
        self._run.notify("evaluate", step, run_report.flatten_scores(scores))

    def _write_confusion(self, name: str, table: object, step: int) -> None:
        if jax.process_index() == 0:
            from vit_jax.evaluators.result_tables import draw_confusion

            self._write_images(name, np.asarray(draw_confusion(table)), step)

    def _write_images(self, name: str, images: np.ndarray, step: int) -> None:
        """Writes up to 16 images, (..., Y, X, C)."""
        shown = images.reshape(-1, *images.shape[-3:])[:16]
        shown = np.stack([display.to_display(image) for image in shown])
        for writer in self._writers:
            writer.write_images(step, {name: shown})

    @property
    def history(self) -> list[dict]:
        """The lines of metrics.jsonl: dicts of "step" and the metrics by name."""
        return self._files.lines

    def has_scores(self, step: int, name: str) -> bool:
        """Returns whether the scores of an evaluation are written for a step."""
        return self._files.has(step, f"{name}/params/")

    @contextlib.contextmanager
    def pause(self, phase: str = ""):
        """Stops the clock of training steps while it is open.

        Args:
          phase: phase of the `StepTimer` that the time is added to; "": none.
        """
        self._progress.pause()
        yield
        self._progress.resume()
        if phase:
            self.step_timer.mark(phase)

    def measured(self) -> dict:
        """Returns the measurements for `report.json`; all processes call it."""
        return {
            "startup": {k: round(v, 3) for k, v in self._startup.seconds.items()},
            "compile_seconds": round(self._compilations.seconds, 3),
            "images_per_second": round(self._progress.images_per_second, 3) or None,
            "skipped_images": self._of_all_processes()[1],
        }

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self._closing.close()


class Progress:
    """Prints progress, shows a bar on terminals and measures the time spent in steps.

    The first step of a start is not counted, since it compiles. The time between
    `pause` and `resume` (evaluation, waiting for a save) is not counted either.

    Args:
      start: number of steps taken by earlier starts.
      total: number of steps of the run.
      batch_size: number of images per step.
      devices: number of devices.
      active: whether this process prints.
      ideal: result of `ideal_seconds`.
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
        self._ideal, self._active = ideal, active
        # If output goes to a pipe, such as to tee, lines would mix with the bar.
        self._bar = StepBar(start, total, active=active and sys.stdout.isatty())
        self._step = self._logged = start
        self._seconds = self._logged_seconds = self._logged_waited = 0.0
        self._since = None
        self._first = start + 1
        self._rate = 0.0

    def step_done(self, step: int, waited: float = 0.0) -> None:
        """Records that the device has computed a step; for `waited` see `log`."""
        self._count()
        self._step = step
        if step == self._first:  # The first step compiles: the clock starts after it.
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
        """Mean over all counted steps of this start; 0 if no step was counted."""
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
        """Prints a line and returns the speed since the previous line.

        Args:
          step: number of steps taken.
          loss: training loss.
          waited: seconds of this start in which the device waited for input.
          stalled: seconds since the previous line in which the loop waited for saves.
          memory: GiB in use on a device; 0 if unknown.

        Returns:
          step_seconds, images_per_second, images_per_second_per_device, input_wait (the
          fraction of the time in which the device waited for input), and, if the
          device's peak is known, mfu (model FLOPs utilisation). Empty if no step was
          counted yet.
        """
        speed, shown = self._speed(step, waited), [f"loss {loss:.4f}"]
        parts = [f"step {step}/{self._total}", *shown]
        if speed:
            left = _clock((self._total - step) * speed["step_seconds"])
            shown += [f"{left} left", f"{self._rate:.0f} images/s"]
            each, wait = " a device" * (self._devices > 1), speed["input_wait"]
            parts += [
                f"{speed['step_seconds']:.3f} s",
                f"{speed['images_per_second_per_device']:.0f} images/s{each}",
                f"MFU {speed['mfu']:.0%}" if self._ideal else "",
                f"input wait {wait:.0%}" if wait >= 0.01 else "",
            ]
        parts += [
            f"saving {stalled:.1f} s" if stalled >= 0.05 else "",
            f"{memory:.1f} GiB" if memory else "",
            *shown[1:2],
        ]
        self.info("  ".join(filter(None, parts)))
        self._bar.show(step, *shown)
        return speed

    def _speed(self, step: int, waited: float) -> dict[str, float]:
        """Returns the result of `log`, and begins the next interval."""
        steps, wait = step - self._logged, 0.0
        seconds = self._seconds - self._logged_seconds
        if steps and seconds:
            self._rate = steps * self._batch / seconds
            # Two threads measure these times, so the fraction may exceed 1 slightly.
            wait = min(1.0, (waited - self._logged_waited) / seconds)
        self._logged, self._logged_seconds = step, self._seconds
        self._logged_waited = waited
        if not self._rate:
            return {}
        per_device = self._rate / self._devices
        speed = {
            "step_seconds": self._batch / self._rate,
            "images_per_second": self._rate,
            "images_per_second_per_device": per_device,
            "input_wait": wait,
        }
        return speed | ({"mfu": per_device * self._ideal} if self._ideal else {})

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

    Model FLOPs utilisation is this number times the images per second per device.

    Args:
      flops: floating-point operations of training per image, or None.
      device_kind: name of the device in JAX.

    Returns:
      Seconds; 0 if `flops` is None or the peak of the device is unknown, as for a CPU.
    """
    chip = chips.find(device_kind)
    return 0.0 if chip is None or flops is None else flops / chip.peak_flops


def memory_use() -> dict[str, float]:
    """Returns memory_gib and memory_peak_gib, the memory in use and its peak, in GiB.

    Both are maxima over the devices of this process; the peak is since the process
    began. The dict is empty if devices do not report their memory, as for a CPU.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    names = {"memory_gib": "bytes_in_use", "memory_peak_gib": "peak_bytes_in_use"}
    return {
        name: max(each[key] for each in stats) / 2**30
        for name, key in names.items()
        if all(key in each for each in stats)
    }
