"""What a person sees of a run: one line that moves, or a plain log."""

import sys
import time

from vit_jax.printing import printable
from vit_jax.report.waiting import advice


class Progress:
    """Reports progress and keeps the time spent in steps.

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
        self._terminal = sys.stdout.isatty()
        self._active = active
        self._step = self._logged = start
        self._seconds = self._logged_seconds = self._logged_waited = 0.0
        self._since = None
        self._width = 0
        self._first = start + 1
        self._rate = 0.0

    def done(self, step: int, waited: float = 0.0) -> None:
        """Notes that `step` steps are done (called when their result is there).

        Args:
          step: steps taken.
          waited: see `log`.
        """
        self._settle()
        self._step = step
        if step == self._first:  # It compiled: the clock starts here.
            self._logged, self._seconds, self._logged_seconds = step, 0.0, 0.0
            self._since, self._logged_waited = time.perf_counter(), waited

    def pause(self) -> None:
        """Stops the clock."""
        self._settle()
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
        if speed:
            left = (self._total - step) * speed["step_seconds"]
            parts.append(f"{_clock(left)} left")
        self._print("  ".join(filter(None, parts)))
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
        """Says what to raise if the input is the bottleneck; tells whether it is.

        Args:
          speed: what `log` returned.
          data: `config.data`.
        """
        text = advice(speed["input_wait"], speed["images_per_second"], data)
        if text:
            self.say(text)
        return bool(text)

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        if self._active:
            if self._terminal and self._width:
                print("\r" + " " * self._width + "\r", end="")
                self._width = 0
            print("\n".join(map(printable, text.split("\n"))), flush=True)

    def _print(self, line: str) -> None:
        if not self._active:
            return
        if self._terminal:
            print("\r" + line.ljust(self._width), end="", flush=True)
            self._width = len(line)
        else:
            print(line, flush=True)

    def _settle(self) -> None:
        if self._since is not None:
            now = time.perf_counter()
            self._seconds += now - self._since
            self._since = now


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
