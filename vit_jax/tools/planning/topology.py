"""TPU slices and GPU hosts by name, for compilation on a machine without them.

JAX is imported late, because it reads the environment that `prepare` sets.
"""

import dataclasses
import importlib.util
import os
import re
from collections.abc import Mapping

from vit_jax.errors import UserError
from vit_jax.tools.planning import gpus

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # For small computations, such as random keys.
    # Keeps libtpu from looking for a TPU and asking the cloud about it. The type is
    # replaced by the one of each topology.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # Two compilers at the same time do not conflict.
    # Programs for TPUs cannot be loaded on this machine.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([BKMGT]?)"
_SHORTAGES = (
    # The live arrays do not fit at the same time.
    rf"Used {_SIZE} of {_SIZE} hbm",
    # Rejected before buffers are assigned.
    rf"temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)",
)
_HOST_SIDE = 2  # A host has 2 x 2 chips if a slice is large enough.


@dataclasses.dataclass(frozen=True)
class Generation:
    """A kind of TPU.

    Attributes:
      axes: number of dimensions of its interconnect, a torus or mesh.
      example: an existing shape.
      options: options of libtpu.
    """

    axes: int
    example: str
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)


GENERATIONS = {
    "v2": Generation(2, "4x4"),
    "v3": Generation(2, "4x4"),
    # Two cores are one device, which is how v4 is always used.
    "v4": Generation(3, "4x4x4", {"chip_config_name": "megacore"}),
    "v5e": Generation(2, "16x16"),
    "v5p": Generation(3, "4x4x4"),
    "v6e": Generation(2, "8x8"),
    "tpu7x": Generation(3, "4x4x4"),
}


@dataclasses.dataclass(frozen=True)
class Slices:
    """A TPU slice, or several joined by the data centre network.

    Attributes:
      shape: number of chips along each axis of one slice.
      shape: chips along each axis of one slice.
      slices: number of slices.
    """

    generation: str
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def name(self) -> str:
        """Value of --topology."""
        return f"{self.generation}:{'x'.join(map(str, self.shape))}"

    @property
    def text(self) -> str:
        """Number and name of the slices, in reports."""
        return f"{self.slices} x {self.name}"

    memory_source = "reported by the compiler"  # Source of `usable_memory` in reports.
    compilers = ("jax", "libtpu")  # Packages that determine the program.

    def prepare(self) -> None:
        """Sets the environment of libtpu and JAX; call before importing JAX."""
        os.environ.update(_ENVIRONMENT)

    def devices(self) -> list:
        """Returns JAX devices for which programs can be compiled but not run.

        Raises:
          UserError: libtpu is missing or does not support the slice.
        """
        require_libtpu()
        import jax
        from jax.experimental import topologies

        hosts = [min(side, _HOST_SIDE) for side in (*self.shape, 1)[:2]]
        options = dict(GENERATIONS[self.generation].options)
        options["chips_per_host_bounds"] = (*hosts, 1)
        if self.slices > 1:
            options["num_slices"] = self.slices
        try:
            description = topologies.get_topology_desc(
                platform="tpu", topology_name=self.name, **options
            )
        except jax.errors.JaxRuntimeError as error:
            raise UserError(f"--topology={self.name}: {error}") from error
        return list(description.devices)

    def usable_memory(self, device) -> int | None:
        """Returns the bytes of a chip's memory that a program can use.

        Args:
          device: one of `devices`.

        Returns:
          Number of bytes, exact to 0.01 GiB; None if the compiler did not report it.
        """
        import jax
        import jax.numpy as jnp
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        # The compiler reports the limit when it rejects a program, such as one of 16
        # TiB.
        sharding = NamedSharding(Mesh(np.asarray([device]), "x"), PartitionSpec())
        huge = jax.ShapeDtypeStruct((1 << 14, 1 << 30), jnp.uint8)
        flipped = jax.jit(
            lambda x: x[::-1] + jnp.uint8(1),
            in_shardings=sharding,
            out_shardings=sharding,
        )
        try:
            flipped.lower(huge).compile()
        except jax.errors.JaxRuntimeError as error:
            shortage = parse_shortage(str(error))
            return shortage and shortage.limit
        return None


def parse(text: str, slices: int = 1) -> Slices | gpus.Gpus:
    """Parses a topology.

    Args:
      text: generation and shape of a TPU slice, such as "v5e:16x16", or kind and number
        of GPUs, such as "h100:8" for one host and "h100:4x8" for four.
      slices: number of TPU slices.

    Raises:
      UserError: the kind is unknown, or does not have the shape.
    """
    name, _, shape = text.partition(":")
    if name in gpus.GPUS:
        return _parse_gpus(text, name, shape, slices)
    if name not in GENERATIONS:
        examples = [f"{name}:{g.example}" for name, g in GENERATIONS.items()]
        examples += [f"{name}:8" for name in gpus.GPUS]
        raise UserError(
            f"--topology={text}: no TPU or GPU {name!r} is known; known are, with an "
            f"example of a shape, {', '.join(examples)}"
        )
    axes, example = GENERATIONS[name].axes, GENERATIONS[name].example
    sides = _sides(shape)
    if len(sides) != axes:
        raise UserError(
            f"--topology={text}: {shape!r} is not a shape of {name}, which has {axes} "
            f"axes: write it as {name}:{example}"
        )
    for side in sides[:2]:
        if side > 1 and side % _HOST_SIDE:
            raise UserError(
                f"--topology={text}: a side of {side} chips does not divide into hosts "
                f"of {_HOST_SIDE} x {_HOST_SIDE}: write it as {name}:{example}"
            )
    return Slices(name, sides, slices)


def _parse_gpus(text, name, shape, slices) -> gpus.Gpus:
    sides = _sides(shape)
    if len(sides) not in (1, 2):
        raise UserError(
            f"--topology={text}: {shape!r} is not a number of GPUs: write it as "
            f"{name}:8, or for 4 hosts as {name}:4x8"
        )
    if slices > 1:
        raise UserError(
            f"--slices={slices} is for TPUs: write 4 hosts of 8 GPUs as {name}:4x8"
        )
    hosts, per_host = (1, *sides)[-2:]
    return gpus.Gpus(name, hosts, per_host)


def _sides(shape: str) -> tuple[int, ...]:
    """Parses "4x8"; returns an empty tuple if it is something else."""
    whole = re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape)
    return tuple(map(int, shape.split("x"))) if whole else ()


def require_libtpu() -> None:
    """Raises UserError if the TPU compiler is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "libtpu, the compiler for TPUs, is not installed: "
            "pip install -e '.[tpu]' in the clone, or pip install 'jax[tpu]' of the "
            "same version as jax; it runs on any Linux machine"
        )


@dataclasses.dataclass(frozen=True)
class Shortage:
    """Out-of-memory error of the compiler.

    Attributes:
      wanted: bytes per chip that the program needs.
      limit: bytes per chip that a program can use.
    """

    wanted: int
    limit: int


def parse_shortage(message: str) -> Shortage | None:
    """Parses the compiler's error; None unless it is about a chip's main memory."""
    for pattern in _SHORTAGES:
        if match := re.search(pattern, message):
            wanted, wanted_unit, limit, limit_unit = match.groups()
            return Shortage(
                round(float(wanted) * _UNITS[wanted_unit]),
                round(float(limit) * _UNITS[limit_unit]),
            )
    return None
