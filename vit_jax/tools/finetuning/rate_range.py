"""Learning rate range test: one short run whose learning rate rises at every step.

The rate at which the loss falls fastest is a good peak rate. Source: Smith, "Cyclical
learning rates" (arXiv:1506.01186), section 3.3, with a geometric rise and a smoothed
loss as in fastai.
"""

import functools
import importlib.util
import math
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from etils import epath

from vit_jax.analysis import charts
from vit_jax.command_line.files import replace_bytes, replace_text
from vit_jax.errors import UserError
from vit_jax.tools.finetuning import trial
from vit_jax.training.callbacks import Callback

FILE = "rate_range"  # Name of the .csv file, and of the .png with the extra `plots`.
STEPS = 100
# Lowest and highest rate, relative to the rate that is chosen without a test.
_SPAN = (1e-3, 1e2)
_SMOOTHING = 0.9
_DIVERGED = 4.0  # The test ends at this multiple of the smallest loss.


class RateRange(NamedTuple):
    """Learning rate, loss and smoothed loss of each step until the loss diverged.

    `suggestion` is the rate at which the smoothed loss falls fastest.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    suggestion: float


class _Losses(Callback):
    def __init__(self):
        self.steps: list[tuple[float, float]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if math.isfinite(metrics["train/loss"]):
            self.steps.append((metrics["train/learning_rate"], metrics["train/loss"]))


def run(
    raw: Mapping, steps: int = STEPS, say: Callable[[str], None] = lambda line: None
) -> RateRange:
    """Runs the test in a temporary folder.

    `raw` is a complete config as a dict, with the rate that is chosen without a test.

    Raises:
      UserError: the loss does not fall at any rate, or the run is invalid.
    """
    rate = raw["optim"]["learning_rate"]
    low, high = (part * rate for part in _SPAN)
    say(f"range test: {steps} steps with rates from {low:g} to {high:g}")
    optim = {k: v for k, v in raw["optim"].items() if not k.startswith("warmup")}
    schedule = {"name": "exponential", "start_fraction": low / high}
    raw = {
        **raw,
        "total_steps": steps,
        "epochs": 0.0,
        "optim": optim | {"learning_rate": high, "schedule": schedule},
        "ema": {"decay": 0.0},
        "log_every_steps": 1,
    }
    losses = _Losses()
    try:
        trial.train(raw, [losses])
    except UserError:
        # If there are losses, the run diverged at a high rate, as intended.
        if not losses.steps:
            raise
    return judge(losses.steps)


def judge(steps: list[tuple[float, float]]) -> RateRange:
    """Returns the rate at which the loss falls fastest, from each step's rate and loss.

    Raises:
      UserError: the loss does not fall at any rate.
    """
    average, smoothed = 0.0, []
    for i, (_, loss) in enumerate(steps, 1):
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        smoothed.append(average / (1 - _SMOOTHING**i))
        if smoothed[-1] > _DIVERGED * min(smoothed):
            break
    rates, losses = zip(*steps[: len(smoothed)], strict=True)
    best = int(np.argmin(smoothed))
    if best < 2:
        raise UserError(
            "the loss did not fall in the range test: lower --config.optim.learning_rate, "
            "the centre of its range"
        )
    slopes = np.gradient(np.array(smoothed), np.log(rates))[: best + 1]
    suggestion = rates[int(np.argmin(slopes))]
    return RateRange(rates, losses, tuple(smoothed), float(f"{suggestion:.2g}"))


def write(result: RateRange, workdir: str | os.PathLike) -> list[str]:
    """Writes a table and, with matplotlib, a figure of the losses; returns the paths."""
    series = functools.partial(charts.Series, marked=False)
    ends = min(result.smoothed), max(result.smoothed)
    chart = charts.Chart(
        FILE,
        f"Range test: the loss falls fastest at a rate of {result.suggestion:g}",
        "learning rate",
        "training loss",
        (
            series(
                "steps", result.rates, result.losses, colour=6, line=False, marked=True
            ),
            series("smoothed", result.rates, result.smoothed),
            series("suggestion", (result.suggestion,) * 2, ends, colour=1, dashes=1),
        ),
        log_x=True,
    )
    folder = epath.Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{FILE}.csv"]
    replace_text(paths[0], charts.to_csv(chart))
    if importlib.util.find_spec("matplotlib"):
        paths.append(folder / f"{FILE}.png")
        replace_bytes(paths[1], charts.to_png(charts.draw(chart)))
    return [str(path) for path in paths]
