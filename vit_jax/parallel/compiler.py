"""Options for XLA, by the kind of device."""

import functools

import jax

# On CPU XLA hands matrix products to a library that reaches 150 to 290 GFLOP/s where
# Eigen reaches 210 to 350; this leaves it the reductions only (docs/decisions.md).
_CPU = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}


def options(platform: str = "") -> dict[str, str]:
    """Returns what to pass to `jax.jit` as `compiler_options` for large networks.

    Args:
      platform: "cpu", "gpu" or "tpu", which the program is for; JAX's own if empty.
    """
    return _for_cpu() if (platform or jax.default_backend()) == "cpu" else {}


@functools.cache  # To ask takes a compilation.
def _for_cpu() -> dict[str, str]:
    return known(_CPU)


def known(options: dict[str, str]) -> dict[str, str]:
    """Returns the options if this release of XLA knows them all, else none.

    They are experimental, so that one may be gone in the next release.
    """
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return {}
    return options
