"""NVIDIA GPUs by name, for compilation on a machine without a GPU.

XLA compiles for a GPU from a description of it (`GpuTargetConfigProto`). The numbers
are those in the tests of openxla/xla
(xla/backends/gpu/target_config/specs, read in November 2026). JAX is imported late,
because it reads the environment that `Gpus.prepare` sets.
"""

import dataclasses
import importlib.util
import os

from vit_jax.command_line.printing import versions
from vit_jax.distributed import chips
from vit_jax.errors import UserError

_ENVIRONMENT = {
    # Without a GPU, "cpu" would not load the compiler for GPUs.
    "JAX_PLATFORMS": "cpu,cuda",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # The check needs a driver.
    # Programs for other GPUs cannot be loaded on this machine.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}
# Autotuning would run kernels on the GPU.
COMPILER_OPTIONS = {"xla_gpu_autotune_level": "0"}
# Fraction of a GPU's memory that JAX allocates at its start, unless the variable is
# set.
_FRACTION, _FRACTION_VARIABLE = 0.75, "XLA_PYTHON_CLIENT_MEM_FRACTION"


def has_compiler() -> bool:
    """Whether a plugin of JAX for NVIDIA GPUs is installed."""
    return any(
        map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))
    )


def _version(*packages: str) -> list[str]:
    """Returns the three version numbers of the first of the packages that is installed."""
    return versions(packages).split()[1].split(".")[:3]


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A kind of GPU, as described to XLA's compiler.

    Attributes:
      kind: JAX's `device_kind`.
      capability: compute capability.
      cores: number of streaming multiprocessors.
      lanes: number of float32 units per core.
      threads: maximum number of threads per core.
      shared: KiB of shared memory per core.
      block_shared: KiB of shared memory that a block can request.
      clock: clock rate in GHz.
      memory: size of the memory in bytes.
      bandwidth: bandwidth of the memory in bytes per second.
      l2: size of the second-level cache in bytes.
    """

    kind: str
    capability: str
    cores: int
    lanes: int
    threads: int
    shared: int
    block_shared: int
    clock: float
    memory: int
    bandwidth: int
    l2: int

    @property
    def target(self) -> str:
        """The `GpuTargetConfigProto` in text form."""
        major, minor = self.capability.split(".")
        cudnn = _version("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
        # The package for CUDA 13 has no number in its name.
        runtime = ".".join(_version("nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime"))
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 32
              shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared * 1024}
              shared_memory_per_block_optin: {self.block_shared * 1024}
              threads_per_core_limit: {self.threads}
              core_count: {self.cores}
              fpus_per_core: {self.lanes}
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              memory_bandwidth: {self.bandwidth}
              l2_cache_size: {self.l2}
              clock_rate_ghz: {self.clock}
              device_memory_size: {self.memory}
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              dnn_version: "{".".join(cudnn)}"
              runtime_version: "{runtime}"
              compile_time_toolkit_version: "{runtime}"
              driver_version: "13.0.0"
            }}
            platform_name: "CUDA"
            dnn_version_info {{
              major: {cudnn[0]} minor: {cudnn[1]} patch: {cudnn[2]}
            }}
            device_description_str: "{self.kind}"
        """


# name     | kind                          | cc   | cores | lanes | threads
#          | shared, of a block | GHz | memory | bandwidth | L2
_TABLE = """
p100       | Tesla P100-SXM2-16GB          |  6.0 |  56 |  64 | 2048
           |  64 |  48 | 1.4805 |  17066885120 |  732160000000 |   4194304
v100       | Tesla V100-SXM2-16GB          |  7.0 |  80 |  64 | 2048
           |  96 |  96 |   1.53 |  16935682048 |  898048000000 |   6291456
a100       | NVIDIA A100-SXM4-80GB         |  8.0 | 108 |  64 | 2048
           | 164 | 163 |   1.41 |  85100068864 | 2039040000000 |  41943040
a100-40    | NVIDIA A100-SXM4-40GB         |  8.0 | 108 |  64 | 2048
           | 164 | 163 |   1.41 |  42331013120 | 1555200000000 |  41943040
a100-pcie  | NVIDIA A100 80GB PCIe         |  8.0 | 108 |  64 | 2048
           | 164 | 163 | 1.1105 |  79050250240 | 2039000000000 |  41943040
a6000      | NVIDIA RTX A6000              |  8.6 |  84 | 128 | 1536
           | 100 |  99 |    1.8 |  51041271808 |  768096000000 |   6291456
h100       | NVIDIA H100 80GB HBM3         |  9.0 | 132 | 128 | 2048
           | 228 | 227 |   1.98 |  84942979072 | 3352320000000 |  52428800
h100-pcie  | NVIDIA H100 PCIe              |  9.0 | 114 | 128 | 2048
           | 228 | 227 |  1.755 |  84942979072 | 2039040000000 |  52428800
h200       | NVIDIA H200                   |  9.0 | 132 | 128 | 2048
           | 228 | 227 |   1.98 | 151397597184 | 4800000000000 |  52428800
b200       | NVIDIA B200                   | 10.0 | 148 | 128 | 2048
           | 228 | 227 |  1.965 | 191514411008 | 7672320000000 | 132644864
gb200      | NVIDIA GB200                  | 10.0 | 152 | 128 | 2048
           | 228 | 227 |  2.062 | 197897748480 | 7928064000000 | 135528448
b300       | NVIDIA B300                   | 10.3 | 158 | 128 | 2048
           | 228 | 227 |  1.965 | 297021865984 | 7936000000000 | 135528448
gb300      | NVIDIA GB300                  | 10.3 | 152 | 128 | 2048
           | 228 | 227 |   2.07 | 297021079552 | 7928064000000 | 135528448
rtx6000pro | NVIDIA RTX PRO 6000 Blackwell | 12.0 | 188 | 128 | 1536
           | 128 |  99 |    2.6 | 103079215104 | 1792000000000 | 134217728
"""


def _gpu(line: str) -> tuple[str, Gpu]:
    name, kind, capability, *cells = (cell.strip() for cell in line.split("|"))
    *sizes, clock, memory, bandwidth, l2 = cells
    gpu = Gpu(
        kind,
        capability,
        *map(int, sizes),
        float(clock),
        int(memory),
        int(bandwidth),
        int(l2),
    )
    return name, gpu


# Each row of the table is two lines.
GPUS = dict(map(_gpu, _TABLE.strip().replace("\n  ", "").splitlines()))


@dataclasses.dataclass(frozen=True)
class Gpus:
    """GPUs of one kind in one or more equal hosts.

    Attributes:
      gpu: a key of GPUS.
      hosts: number of hosts.
      per_host: number of GPUs per host, connected by NVLink.
    """

    gpu: str
    hosts: int
    per_host: int

    @property
    def name(self) -> str:
        """Value of --topology."""
        hosts = f"{self.hosts}x" if self.hosts > 1 else ""
        return f"{self.gpu}:{hosts}{self.per_host}"

    text = name  # Name in reports.
    # Packages that determine the program.
    compilers = ("jax", *chips.CUDA_PACKAGES)

    @property
    def capability(self) -> float:
        """Compute capability."""
        return float(GPUS[self.gpu].capability)

    def prepare(self) -> None:
        """Sets JAX's environment; call before importing JAX."""
        os.environ.update(_ENVIRONMENT)

    def devices(self) -> list:
        """Returns JAX devices for which programs can be compiled but not run.

        Raises:
          UserError: the compiler for GPUs is missing, or rejects the topology.
        """
        if not has_compiler():
            raise UserError(
                f"--topology={self.name}: jax-cuda12-plugin, the compiler for NVIDIA GPUs, "
                "is not installed: pip install -e '.[cuda]' in the clone, or pip install "
                "'jax[cuda12]' or 'jax[cuda13]' of the same version as jax (5.5 GB); it "
                "runs on any Linux machine"
            )
        import jax
        from jax.experimental import topologies

        try:
            description = topologies.get_topology_desc(
                self.gpu,
                platform="cuda",
                target_config=GPUS[self.gpu].target,
                topology=f"1x{self.hosts}x{self.per_host}",
            )
        except jax.errors.JaxRuntimeError as error:
            raise UserError(f"--topology={self.name}: {error}") from error
        return list(description.devices)

    def usable_memory(self, device) -> int:
        """Returns the bytes of each GPU that a program can use."""
        fraction = float(os.environ.get(_FRACTION_VARIABLE, _FRACTION))
        return int(fraction * GPUS[self.gpu].memory)

    @property
    def memory_source(self) -> str:
        """Describes the source of `usable_memory` in reports."""
        share = os.environ.get(_FRACTION_VARIABLE, _FRACTION)
        return (
            f"{_FRACTION_VARIABLE}={share} of {GPUS[self.gpu].memory / 2**30:.2f} GiB"
        )
