"""Lets a process of the tests trace and lower programs sooner; results are the same."""

import gc

from jax._src.interpreters import mlir

# A context of MLIR is made in the time in which a small program is lowered. It keeps the
# constants of programs, which is why it does not serve all of them.
_PROGRAMS = 100
_contexts = {}


def hurry():
    """Shares contexts of MLIR between programs, and collects garbage seldom.

    What is imported is left out of collections: a trace is many small objects, all kept.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)
    create = getattr(mlir, "make_ir_context", None)  # As in jax 0.10.

    def share():
        context, left = _contexts.get("last", (None, 0))
        context = context if left else create()
        _contexts["last"] = context, (left or _PROGRAMS) - 1
        return context

    if create:
        mlir.make_ir_context = share
