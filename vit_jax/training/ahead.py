"""Compiling the training step while the state is made or restored."""

import concurrent.futures

from vit_jax.training.program import Program
from vit_jax.training.step import Step

_started: list[concurrent.futures.Future] = []


def under_way() -> bool:
    """Tells whether a compilation goes on, for which a process that ends would wait."""
    return any(not future.done() for future in _started)


class Ahead:
    """Compiles a program's step in a thread of its own.

    It is traced here and now, so that settings of this thread (such as `with
    jax.default_matmul_precision(...)`) hold for it.

    Args:
      program: of the run.
      debug_nans: whether a failed step is to be run again, operation by operation,
        which a compiled one cannot.
    """

    def __init__(self, program: Program, *, debug_nans: bool = False):
        self._step = program.step
        self._compiled: concurrent.futures.Future | None = None
        if debug_nans:
            return
        lowered = program.step.lower(program.shapes, program.batch_shapes)
        executor = concurrent.futures.ThreadPoolExecutor(1, "compile")
        self._compiled = executor.submit(lowered.compile)
        executor.shutdown(wait=False)
        _started.append(self._compiled)

    def step(self) -> Step:
        """Waits for the step.

        Raises:
          What compiling raised, such as that it does not fit the device's memory.
        """
        return self._compiled.result() if self._compiled else self._step
