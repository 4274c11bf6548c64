"""What ends a run before its time: signals, and errors of memory, devices and disks."""

import contextlib
import errno
import os
import re
import signal
import traceback
from typing import NoReturn

import jax
from jax.experimental import multihost_utils

from vit_jax.data import workers
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import Interrupted, Preempted, UserError
from vit_jax.training.callbacks import Run
from vit_jax.training.config import TrainConfig

_CTRL_C = "Ctrl-C"
# By importance: where several have come, the first is named.
_SIGNALS = {signal.SIGINT: _CTRL_C, signal.SIGHUP: "SIGHUP", signal.SIGTERM: "SIGTERM"}


class Preemption:
    """Notices SIGTERM, SIGHUP, Ctrl-C and killed loader processes; a context manager.

    Several processes agree on the moment through JAX's coordination service, which looks
    for SIGTERM: it is the same one in their common sequence of questions, so all must ask
    equally often.
    """

    def __init__(self):
        self._signals, self._killed_by = set(), 0
        self._before = {}
        self._listening = workers.listening(self._on_killed)
        self._questions = 0

    def reached(self) -> bool:
        """Returns whether to end here, the same in all processes."""
        if jax.process_count() == 1:
            return bool(self._signals or self._killed_by)
        # Not the number of the step: evaluations ask between two steps.
        self._questions += 1
        return multihost_utils.reached_preemption_sync_point(self._questions)

    def why(self) -> str:
        """Returns the reason, the same in all processes; all must call it."""
        own = [number in self._signals for number in _SIGNALS]
        found = meshes.process_allgather(signals=own, killed_by=self._killed_by)
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


def end_early(run: Run) -> NoReturn:
    """Saves the state, unless it is saved already, and ends a run before its last step.

    Raises:
      Preempted, Interrupted: the state is saved.
      UserError: it could not be saved.
    """
    why, data = run.preemption.why(), run.config.data
    saved = "nothing to save yet"
    if run.step:
        saved = f"step {run.step} of {run.total_steps} is saved"
        if run.step != run.checkpoints.latest:
            run.save()
            run.checkpoints.demand(run.step, why)
    remedy = ""
    if why not in _SIGNALS.values():
        remedy = (
            f"lower data.num_workers (now {data.num_workers}) or data.prefetch (now "
            f"{data.prefetch}); "
        )
    text = (
        f"{why}: {saved} in {run.workdir}; {remedy}the same command resumes from there"
    )
    raise Interrupted(text) if why == _CTRL_C else Preempted(text)


@contextlib.contextmanager
def clear_errors(config: TrainConfig):
    """Turns errors of devices, memory and disks into one line with the remedy.

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
            f"({ours[-1].line}): lower optim.learning_rate or set optim.grad_clip_norm"
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
            f"raise optim.grad_accum_steps (now {config.optim.grad_accum_steps}), set "
            "model.dtype='bfloat16', or choose a smaller data.image_size or model"
        ) from error
