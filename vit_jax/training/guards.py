"""What ends a run before its time: signals, numbers that are not finite, memory."""

import contextlib
import errno
import math
import os
import re
import signal
import traceback

import jax
from jax.experimental import multihost_utils

from vit_jax.data import workers
from vit_jax.data.config import DataConfig
from vit_jax.errors import Diverged, Interrupted, Preempted, UserError
from vit_jax.parallel import distributed
from vit_jax.training.checkpoint import Checkpointer
from vit_jax.training.config import TrainConfig

_CTRL_C = "Ctrl-C"
# By importance: where several have come, the first is named.
_SIGNALS = {signal.SIGINT: _CTRL_C, signal.SIGHUP: "SIGHUP", signal.SIGTERM: "SIGTERM"}


class Preemption:
    """Notices what ends a run early; use as a context manager around the loop.

    That is SIGTERM, SIGHUP, Ctrl-C, or the death of a loader process. Several processes
    agree on the moment through JAX's coordination service, which looks for SIGTERM: it is
    the same one in their common sequence of questions, so all must ask equally often.
    """

    def __init__(self):
        self._signals, self._killed_by = set(), 0
        self._before = {}
        self._listening = workers.listening(self._on_killed)
        self._questions = 0

    def reached(self) -> bool:
        """Tells, the same in all processes, whether to end here."""
        if jax.process_count() == 1:
            return bool(self._signals or self._killed_by)
        # Not the number of the step: evaluations ask between two steps.
        self._questions += 1
        return multihost_utils.reached_preemption_sync_point(self._questions)

    def why(self) -> str:
        """Returns what ends the run, the same in all processes; all must ask."""
        own = [number in self._signals for number in _SIGNALS]
        found = distributed.gather(signals=own, killed_by=self._killed_by)
        came = found["signals"].any(axis=0)
        for name, here in zip(_SIGNALS.values(), came, strict=True):
            if here:
                return name
        killed_by = int(found["killed_by"].max())
        return workers.killed(killed_by) if killed_by else "SIGTERM"  # JAX's handler.

    def __enter__(self):
        for number in _SIGNALS:
            # With several processes JAX's own handler must stay.
            jaxs = number == signal.SIGTERM and jax.process_count() > 1
            # As nohup does, or a script for what it starts in the background.
            ignored = signal.getsignal(number) == signal.SIG_IGN
            if not (jaxs or ignored):
                # Not in the main thread, as in a notebook, where none can be set.
                with contextlib.suppress(ValueError):
                    self._before[number] = signal.signal(number, self._on_signal)
        self._listening.__enter__()
        return self

    def __exit__(self, *_) -> None:
        self._listening.__exit__(None, None, None)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame) -> None:
        if number == signal.SIGINT and number in self._signals:
            signal.default_int_handler(number, frame)  # Raises KeyboardInterrupt.
        self._signals.add(number)
        self._tell_others()

    def _on_killed(self, number: int) -> None:
        self._killed_by = number
        self._tell_others()

    def _tell_others(self) -> None:
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)


def ended(
    why: str, saved: str, workdir: str | os.PathLike, data: DataConfig
) -> Preempted | Interrupted:
    """Returns what ends the run when its state is saved.

    Args:
      why: from `Preemption.why`.
      saved: what is saved, as "step 3 of 9 is saved".
      workdir: of the run.
      data: `config.data`.
    """
    remedy = ""
    if why not in _SIGNALS.values():
        remedy = (
            f"lower data.workers (now {data.workers}) or data.prefetch (now "
            f"{data.prefetch}); "
        )
    text = f"{why}: {saved} in {workdir}; {remedy}the same command goes on from there"
    return Interrupted(text) if why == _CTRL_C else Preempted(text)


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
def clear_errors(config: TrainConfig):
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
