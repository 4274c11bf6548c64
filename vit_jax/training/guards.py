"""Guards against signals, hangs, and errors of memory, devices and disks."""

import contextlib
import errno
import faulthandler
import os
import re
import signal
import sys
import threading
import time
import traceback
from typing import NoReturn

import jax
from jax.experimental import multihost_utils

from vit_jax.data import workers
from vit_jax.distributed import ending
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import Interrupted, Preempted, UserError
from vit_jax.training.callbacks import Run
from vit_jax.training.config import TrainConfig

_CTRL_C = "Ctrl-C"
# In order of importance: if several were received, messages name the first.
_SIGNALS = {signal.SIGINT: _CTRL_C, signal.SIGHUP: "SIGHUP", signal.SIGTERM: "SIGTERM"}

EXIT_STALLED = 70  # EX_SOFTWARE of sysexits.h.
_STARTING = 3  # Multiple of the watchdog's timeout before the first step.
# If C code keeps the watchdog's thread from running for longer, faulthandler ends the
# process.
_DEAF_SECONDS = 60.0
_NOTIFY_SECONDS = 30.0  # Time for notifying the other processes.
# If the watchdog's thread is later than this, the whole process was suspended.
_STOPPED_SECONDS = 5.0


class Preemption:
    """Detects SIGTERM, SIGHUP, Ctrl-C and killed loader processes; a context manager.

    Several processes agree on the call of `reached` that returns True through JAX's
    coordination service, which detects SIGTERM. The service counts calls, so all
    processes must call `reached` equally often.
    """

    def __init__(self):
        self._signals, self._killed_by = set(), 0
        self._before = {}
        self._listening = workers.listening(self._on_killed)
        self._questions = 0

    def reached(self) -> bool:
        """Returns whether the run must end now, equal on all processes."""
        if jax.process_count() == 1:
            return bool(self._signals or self._killed_by)
        # A count of calls, because evaluations call this several times per step.
        self._questions += 1
        return multihost_utils.reached_preemption_sync_point(self._questions)

    def why(self) -> str:
        """Returns the reason to end, equal on all processes; all must call this."""
        received = [number in self._signals for number in _SIGNALS]
        each = meshes.process_allgather(signals=received, killed_by=self._killed_by)
        anywhere = each["signals"].any(axis=0)
        for name, came in zip(_SIGNALS.values(), anywhere, strict=True):
            if came:
                return name
        killed_by = int(each["killed_by"].max())
        return workers.killed(killed_by) if killed_by else "SIGTERM"  # JAX's handler.

    def __enter__(self):
        for number in _SIGNALS:
            # With several processes JAX's handler must stay.
            of_jax = number == signal.SIGTERM and jax.process_count() > 1
            # Ignored by nohup, or by a shell for commands in the background.
            ignored = signal.getsignal(number) == signal.SIG_IGN
            if not (of_jax or ignored):
                # Only the main thread can set handlers; notebooks may use another.
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
        self._notify_others()

    def _on_killed(self, number: int) -> None:
        self._killed_by = number
        self._notify_others()

    def _notify_others(self) -> None:
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)


def end_early(run: Run) -> NoReturn:
    """Saves the state, unless it is saved already, and ends a run before its last step.

    Raises:
      Preempted, Interrupted: always, once the state is saved.
      UserError: the state could not be saved.
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
    """Converts errors of devices, memory and disks to one line with the remedy.

    Raises:
      UserError: device memory, host memory or disk is full, a package for buckets is
        missing, or `debug_nans` stopped at an operation.
    """
    try:
        yield
    except FloatingPointError as error:
        # The lines after the first are advice on JAX's settings.
        what = str(error).splitlines()[0]
        frames = traceback.extract_tb(error.__traceback__)
        frame = ([f for f in frames if "vit_jax" in f.filename] or frames)[-1]
        raise UserError(
            f"debug_nans: {what} at {frame.filename}:{frame.lineno} ({frame.line}): lower "
            "optim.learning_rate or set optim.grad_clip_norm"
        ) from error
    except ImportError as error:
        if not re.search("gcsfs|google-cloud-storage|google.cloud", str(error)):
            raise
        raise UserError(
            "paths in a bucket (gs://) need packages that are not installed: run pip "
            "install -e '.[gcs]' in the clone"
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


class Watchdog:
    """Ends the process if it makes no progress for some time; a context manager.

    A thread prints the stacks of all threads and of loader processes and the last
    event, notifies the other processes of the job, and exits with code 70, even if the
    main thread is blocked. If C code holds the interpreter's lock, so that no Python
    code can run, faulthandler prints the stacks and exits with code 1.

    Args:
      timeout: time without progress in seconds, `config.stall_timeout`; 0 disables the
        watchdog. Before the first step is done the time is 3 times as long, because
        compiling takes longer than any step.
    """

    def __init__(self, timeout: float):
        self._timeout, self._limit = timeout, _STARTING * timeout
        self._last, self._when = "the start", time.monotonic()
        self._done = threading.Event()

    def reset(self, what: str, *, step: bool = False) -> None:
        """Restarts the timeout.

        Args:
          what: event that has finished, such as "step 12".
          step: True for a training step.
        """
        if step:
            self._limit = self._timeout
        self._last, self._when = what, time.monotonic()

    def __enter__(self):
        if self._timeout:
            # Loader processes that start later print their stacks at SIGTERM.
            self._environment = os.environ.get("PYTHONFAULTHANDLER")
            os.environ["PYTHONFAULTHANDLER"] = "1"
            self.reset("the start")
            self._thread = threading.Thread(
                target=self._watch, daemon=True, name="watchdog"
            )
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        if not self._timeout:
            return
        self._done.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self._environment is None:
            os.environ.pop("PYTHONFAULTHANDLER", None)
        else:
            os.environ["PYTHONFAULTHANDLER"] = self._environment

    def _watch(self) -> None:
        poll = min(1.0, self._timeout / 10)
        deaf = max(self._limit, _DEAF_SECONDS)
        polled = time.monotonic()
        while not self._done.wait(poll):
            late = time.monotonic() - polled - poll
            polled = time.monotonic()
            if late > _STOPPED_SECONDS:
                self._when += late  # Suspended by SIGSTOP, or with the machine.
            if sys.__stderr__ is not None:  # Some notebooks set it to None.
                faulthandler.dump_traceback_later(deaf, exit=True, file=sys.__stderr__)
            if time.monotonic() - self._when > self._limit:
                self._end()

    def _end(self) -> None:
        ending.show_stacks("watchdog")
        leave = threading.Timer(_NOTIFY_SECONDS, os._exit, [EXIT_STALLED])
        leave.daemon = True
        leave.start()
        ending.end_job(
            EXIT_STALLED,
            f"watchdog: no step, evaluation batch or save was finished in "
            f"{self._limit:g} s (stall_timeout); the last was {self._last}; the stacks "
            "above show where each thread hangs; the same command resumes from the "
            "newest checkpoint",
            # The process that notices first may be waiting for another that hangs.
            stacks=True,
        )
