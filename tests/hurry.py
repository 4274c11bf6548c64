"""Lets a process of the tests trace programs sooner; results are the same."""

import gc

import flax
import numpy as np

_param, _checked = flax.core.Scope.param, set()


def hurry():
    """Has this process check each kind of parameter once, and collect garbage seldom.

    The collector takes a sixth of the time otherwise: a trace is many small objects, all
    kept.
    """
    flax.core.Scope.param = _param_checked_once
    gc.set_threshold(10_000)


def _param_checked_once(self, name, init_fn, *args, unbox=True, **keys):
    """Returns a parameter; its initialiser has shown once that it makes such a shape.

    Flax evaluates the initialiser of each parameter in each trace, to compare the shapes:
    that is half of the time of a trace.
    """
    if keys or not self.has_variable("params", name):
        return _param(self, name, init_fn, *args, unbox=unbox, **keys)
    value = self.get_variable("params", name)
    case = init_fn, args, np.shape(value)
    try:
        known = case in _checked
    except TypeError:  # It cannot be hashed.
        return _param(self, name, init_fn, *args, unbox=unbox)
    if not known:
        value = _param(self, name, init_fn, *args, unbox=unbox)
        _checked.add(case)
        return value
    self.reserve(name, "params")
    return flax.core.meta.unbox(value) if unbox else value
