import os

from jax._src import cloud_tpu_init, xla_bridge  # There is no public API.

# libtpu, which the extra `tpu` installs for `compile`, prints errors where it finds no chip.
if not (cloud_tpu_init.running_in_cloud_tpu_vm or os.environ.get("JAX_PLATFORMS")):
    xla_bridge._backend_factories.pop("tpu", None)
