"""What ends a run before its time: signals, numbers that are not finite, memory."""

import contextlib
import errno
import math
import re
import signal
import traceback

import jax
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from vit_jax.errors import Diverged, UserError
from vit_jax.training.checkpoint import Checkpointer


class Preemption:
    """Notices SIGTERM; use as a context manager around the loop.

    Several processes agree on the moment through JAX's coordination service: it is the
    same one in their common sequence of questions, so all must ask equally often.
    """

    def __init__(self):
        self._asked = False
        self._before = None
        self._questions = 0

    def reached(self) -> bool:
        """Tells, the same in all processes, whether to end here."""
        if jax.process_count() == 1:
            return self._asked
        # Not the number of the step: evaluations ask between two steps.
        self._questions += 1
        return multihost_utils.reached_preemption_sync_point(self._questions)

    def __enter__(self):
        # With several processes JAX's own handler must stay.
        if jax.process_count() == 1:
            with contextlib.suppress(ValueError):  # Not the main thread: a notebook.
                self._before = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, *_) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _on_signal(self, *_) -> None:
        self._asked = True


def check_finite(
    step: int, metrics: dict[str, float], checkpoints: Checkpointer
) -> None:
    """Refuses to go on from numbers that are not finite.

    Args:
      step: whose metrics these are.
      metrics: of the step.
      checkpoints: of the run.

    Raises:
      Diverged: naming the step, the metrics and the last good checkpoint.
    """
    bad = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    if bad:
        checkpoints.wait()  # The one under way is of finite numbers.
        what = ", ".join(f"{name}={value}" for name, value in bad.items())
        raise Diverged(
            f"training stopped at step {step}: {what}; {checkpoints.safe()}; lower "
            "optim.rate or set optim.clip_norm in another --workdir, or set "
            "debug_nans=True here to name the operation"
        )


@contextlib.contextmanager
def clear_errors(config: ConfigDict):
    """Turns what the device says into one line that names the remedy.

    Raises:
      UserError: device, host or disk are full, or `debug_nans` found an operation.
    """
    try:
        yield
    except FloatingPointError as error:
        # The first line says what; the rest is advice on JAX's own settings.
        what = str(error).splitlines()[0]
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if "vit_jax" in f.filename] or frames
        raise UserError(
            f"debug_nans: {what} at {ours[-1].filename}:{ours[-1].lineno} "
            f"({ours[-1].line}): lower optim.rate or set optim.clip_norm"
        ) from error
    except ImportError as error:
        if not re.search("gcsfs|google-cloud-storage|google.cloud", str(error)):
            raise
        raise UserError(
            "paths in a bucket (gs://) need more packages: pip install -e '.[gcs]' in "
            "the clone"
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(
            f"the workdir cannot be written ({error}): free space, then start again"
        ) from error
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        text = " ".join(str(error).split())
        on_device = "RESOURCE_EXHAUSTED" in text or "ut of memory" in text
        if not on_device and not isinstance(error, MemoryError):
            raise
        raise UserError(
            f"out of memory ({text[:200]}): lower batch_size (now {config.batch_size}), "
            f"raise optim.accumulate (now {config.optim.accumulate}), set "
            "model.dtype='bfloat16', or choose a smaller data.image_size or model"
        ) from error
