"""Records the keys from which random numbers are drawn."""

import jax
import numpy as np

DRAWS = ("bits", "uniform", "bernoulli", "normal", "beta", "permutation")


def record(monkeypatch):
    """Returns a list that grows by (function, key) with each draw from `jax.random`.

    Of a function under `jax.vmap` each key counts, also in a compiled program; call
    `jax.effects_barrier` before reading. Draws that share a key have the same random
    numbers.
    """
    draws = []

    def note(name, key):
        draws.append((name, *np.asarray(key).ravel().tolist()))

    for name in DRAWS:
        original = getattr(jax.random, name)

        def draw(key, *args, name=name, original=original, **more):
            jax.debug.callback(
                lambda key, name=name: note(name, key), jax.random.key_data(key)
            )
            return original(key, *args, **more)

        monkeypatch.setattr(jax.random, name, draw)
    return draws
