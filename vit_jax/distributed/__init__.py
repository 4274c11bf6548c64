import dataclasses
import os

from jax._src import cloud_tpu_init, xla_bridge  # There is no public API.

# libtpu, which the extra `tpu` installs for `compile`, prints errors where it finds no chip.
# The platform stays known: parts of JAX that are imported later register rules for it.
_tpu = xla_bridge._backend_factories.get("tpu")
_chosen = cloud_tpu_init.running_in_cloud_tpu_vm or os.environ.get("JAX_PLATFORMS")
if _tpu and not _chosen:
    xla_bridge._backend_factories["tpu"] = dataclasses.replace(
        _tpu, factory=lambda: None, fail_quietly=True
    )
