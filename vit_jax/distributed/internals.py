"""The private parts of JAX that this package needs, in one place.

tests/distributed/test_internals.py names the part that another release of JAX has
moved.

- `cloud_tpu_init`: whether this machine is a TPU VM, before a backend is made.
- `clusters`: JAX's readers of the variables of schedulers, which `initialize` uses.
- `distributed`: the client of the key-value store and the number of this process, as
  Orbax reads them; `jax.process_index()` would make the backend first.
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
    """Keeps libtpu from printing errors on a machine without TPU chips.

    The extra `tpu` installs libtpu on such machines for the command `compile`. The
    platform stays known, because parts of JAX that are imported later register rules
    for it. On a TPU VM, or if JAX_PLATFORMS is set, nothing changes.
    """
    tpu = xla_bridge._backend_factories.get("tpu")
    chosen = cloud_tpu_init.running_in_cloud_tpu_vm or os.environ.get("JAX_PLATFORMS")
    if tpu and not chosen:
        xla_bridge._backend_factories["tpu"] = dataclasses.replace(
            tpu, factory=lambda: None, fail_quietly=True
        )
