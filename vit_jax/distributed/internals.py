"""What this package needs of JAX that has no public API, in one place.

tests/distributed/test_internals.py names the part that another release of JAX has moved.

- `cloud_tpu_init`: whether this machine is a TPU VM, before a backend is made.
- `clusters`: JAX's readers of the variables of schedulers, which `initialize` uses.
- `distributed`: the client of the key-value store and the number of this process, as Orbax
  takes them; `jax.process_index()` would make the backend first.
- `hardware_utils`: the number of TPU chips of this machine.
- `xla_bridge`: the table of platforms, see `silence_tpu`.
"""

import dataclasses
import os

from jax._src import (
    cloud_tpu_init,
    clusters,
    distributed,
    hardware_utils,
    xla_bridge,
)

__all__ = ["cloud_tpu_init", "clusters", "distributed", "hardware_utils", "silence_tpu"]


def silence_tpu() -> None:
    """Has libtpu, which the extra `tpu` installs for `compile`, find no chip in silence.

    It prints errors where there is none. The platform stays known: parts of JAX that are
    imported later register rules for it. On a TPU VM, or where JAX_PLATFORMS is set,
    nothing changes.
    """
    tpu = xla_bridge._backend_factories.get("tpu")
    chosen = cloud_tpu_init.running_in_cloud_tpu_vm or os.environ.get("JAX_PLATFORMS")
    if tpu and not chosen:
        xla_bridge._backend_factories["tpu"] = dataclasses.replace(
            tpu, factory=lambda: None, fail_quietly=True
        )
