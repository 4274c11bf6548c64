"""What is used of JAX without a public API is where this release of JAX should have it."""

import functools

import jax
import pytest
from jax._src import xla_bridge

from vit_jax.distributed import internals


@pytest.mark.parametrize(
    "path",
    [
        "cloud_tpu_init.running_in_cloud_tpu_vm",
        *(f"clusters.{name}Cluster" for name in ("Ompi", "Mpi4py", "Slurm", "K8s")),
        *("clusters.GkeTpuCluster", "clusters.GceTpuCluster", "clusters.ClusterEnv"),
        "distributed.global_state.client",
        "distributed.global_state.coordinator_address",
        "distributed.global_state.num_processes",
        "distributed.global_state.process_id",
        "hardware_utils.num_available_tpu_chips_and_device_id",
        "xla_bridge._backend_factories",
    ],
)
def test_it_is_in_this_release(path):
    try:
        functools.reduce(getattr, path.split("."), internals)
    except AttributeError:
        pytest.fail(f"jax {jax.__version__} has moved jax._src.{path}")


def test_the_platform_of_tpus_stays_known_and_is_silent(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(internals.cloud_tpu_init, "running_in_cloud_tpu_vm", False)
    one = next(iter(xla_bridge._backend_factories.values()))
    monkeypatch.setattr(xla_bridge, "_backend_factories", {"tpu": one})
    internals.silence_tpu()
    silent = xla_bridge._backend_factories["tpu"]
    assert silent.factory() is None and silent.fail_quietly
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setattr(xla_bridge, "_backend_factories", {"tpu": one})
    internals.silence_tpu()
    assert xla_bridge._backend_factories["tpu"] is one
