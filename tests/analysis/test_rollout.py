"""Attention rollout, against loops."""

import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.analysis.rollout import rollout
from vit_jax.errors import UserError

L, B, H, N = 4, 2, 3, 7


def drawn():
    weights = np.random.default_rng(1).random((L, B, H, N, N)).astype(np.float32)
    return weights / weights.sum(-1, keepdims=True)


def by_loops(maps, heads, least):
    """Follows each token's attention down, one image and one row at a time."""
    results = []
    for b in range(B):
        product = np.eye(N)
        for layer in maps:
            mixed = np.zeros((N, N))
            for n in range(N):
                row = [[layer[b, h, n, m] for h in range(H)] for m in range(N)]
                row = [sum(r) / H if heads == "mean" else max(r) for r in row]
                for m in sorted(range(N), key=row.__getitem__)[:least]:
                    row[m] = 0
                row[n] += 1
                mixed[n] = np.array(row) / sum(row)
            product = mixed @ product
        results.append(product)
    return results


@pytest.mark.parametrize("heads", ["mean", "max"])
@pytest.mark.parametrize(("discard", "least"), [(0.0, 0), (0.3, 2), (0.9, 6)])
def test_it_is_that_of_loops(heads, discard, least):
    maps = drawn()
    found = rollout(map(jnp.array, maps), heads, discard)
    np.testing.assert_allclose(found, by_loops(maps, heads, least), atol=1e-6)
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize("heads", ["mean", "max"])
@pytest.mark.parametrize("discard", [0.0, 0.5])
def test_of_identity_attention_it_is_the_identity(heads, discard):
    eye = jnp.broadcast_to(jnp.eye(N), (B, H, N, N))
    np.testing.assert_allclose(
        rollout([eye] * L, heads, discard), np.array([np.eye(N)] * B), atol=1e-7
    )


def test_of_uniform_attention_it_forgets_half_a_layer():
    uniform = jnp.full((B, H, N, N), 1 / N)
    own = 2.0**-L
    wanted = own * np.eye(N) + (1 - own) / N
    np.testing.assert_allclose(rollout([uniform] * L)[0], wanted, rtol=1e-5)


def test_bad_choices_are_refused():
    maps = [jnp.full((B, H, N, N), 1 / N)]
    with pytest.raises(UserError, match=r"heads='min' is not one of mean, max"):
        rollout(maps, "min")
    for discard in (1.0, -0.1, float("nan")):
        with pytest.raises(UserError, match=r"discard=.* is not a fraction from 0 to"):
            rollout(maps, discard=discard)
    with pytest.raises(UserError, match="no layer to roll out"):
        rollout([])
