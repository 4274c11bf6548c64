"""Random numbers of the examples of a batch, each from its place in the run.

Letters: B examples.
"""

import jax
from jaxtyping import Array, Float, Key, UInt32


def keys(index: UInt32[Array, " B"], key: Key[Array, ""]) -> Key[Array, " B"]:
    """Gives each example a key of its own.

    Args:
      index: position of each example in the run, modulo 2**32.
      key: of the operation, the same at every step.
    """
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(index)


def uniform(
    index: UInt32[Array, " B"], key: Key[Array, ""], count: int
) -> Float[Array, "B {count}"]:
    """Draws `count` numbers in [0, 1) an example, from its own key."""
    return jax.vmap(lambda k: jax.random.uniform(k, (count,)))(keys(index, key))
