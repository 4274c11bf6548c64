"""Short runs in temporary folders, and the speed of such a run."""

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterable, Mapping

from vit_jax.training import loop
from vit_jax.training.callbacks import Callback
from vit_jax.training.config import complete

STEPS = 12


def train(raw: Mapping, callbacks: Iterable[Callback] = ()) -> dict:
    """Trains a complete config in a temporary folder, without evaluations.

    Returns:
      The report of the run; for errors see `loop.train`.
    """
    raw = {**raw, "evals": {}, "checkpoint": {}, "early_stopping_evals": 0}
    with tempfile.TemporaryDirectory() as folder:
        return loop.train(complete(raw), folder, callbacks=callbacks)


def measure(raw: Mapping, say: Callable[[str], None]) -> float:
    """Returns the training speed of a config with `STEPS` steps in images per second."""
    say(f"measuring the speed with {STEPS} steps of {raw['batch_size']} images")
    quiet = contextlib.redirect_stdout(io.StringIO())
    with quiet, contextlib.redirect_stderr(io.StringIO()):
        return train(raw)["images_per_second"]
