"""TPU slices by name, for a compiler that runs on a machine without TPUs.

JAX is imported only when a slice is described, because what `prepare` sets must be there
before.
"""

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping

from vit_jax.errors import UserError

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # What is computed here, such as random keys.
    # libtpu would look for a TPU and ask the cloud about it. The type of TPU does not
    # matter: each topology says its own.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # Two compilers at once are no conflict.
    # What is compiled here cannot be loaded here.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}

_HOST_SIDE = 2  # A host has 2 x 2 chips where a slice is large enough.


@dataclasses.dataclass(frozen=True)
class Generation:
    """A kind of TPU.

    Attributes:
      axes: of its interconnect, a torus or mesh of so many dimensions.
      example: a shape that can be had.
      options: what libtpu needs to be told.
    """

    axes: int
    example: str
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)


GENERATIONS = {
    "v2": Generation(2, "4x4"),
    "v3": Generation(2, "4x4"),
    # Without this each core is a device of its own, as no v4 is run.
    "v4": Generation(3, "4x4x4", {"chip_config_name": "megacore"}),
    "v5e": Generation(2, "16x16"),
    "v5p": Generation(3, "4x4x4"),
    "v6e": Generation(2, "8x8"),
    "tpu7x": Generation(3, "4x4x4"),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice, or several that are joined by the data centre's network.

    Attributes:
      generation: a key of GENERATIONS.
      shape: chips along each axis of one slice.
      slices: how many.
    """

    generation: str
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def name(self) -> str:
        """As --topology takes it."""
        return f"{self.generation}:{'x'.join(map(str, self.shape))}"

    def devices(self) -> list:
        """Returns its JAX devices, which can be compiled for and nothing else.

        Raises:
          UserError: libtpu is missing or does not know such a slice.
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


def parse(text: str, slices: int = 1) -> Topology:
    """Reads a topology.

    Args:
      text: as "v5e:16x16".
      slices: how many of them.

    Raises:
      UserError: an unknown generation, or a shape that it does not come in.
    """
    known = ", ".join(f"{name}:{g.example}" for name, g in GENERATIONS.items())
    name, _, shape = text.partition(":")
    if name not in GENERATIONS:
        raise UserError(
            f"--topology={text}: no TPU {name!r} is known; known are, with an example "
            f"of a shape, {known}"
        )
    axes, example = GENERATIONS[name].axes, GENERATIONS[name].example
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape) or shape.count("x") != axes - 1:
        raise UserError(
            f"--topology={text}: {shape!r} is not a shape of {name}, which has {axes} "
            f"axes: state it as {name}:{example}"
        )
    sides = tuple(map(int, shape.split("x")))
    for side in sides[:2]:
        if side > 1 and side % _HOST_SIDE:
            raise UserError(
                f"--topology={text}: a side of {side} chips does not divide into hosts "
                f"of {_HOST_SIDE} x {_HOST_SIDE}: state it as {name}:{example}"
            )
    return Topology(name, sides, slices)


def prepare() -> None:
    """Sets what libtpu and JAX read when they start; call before JAX is imported."""
    os.environ.update(_ENVIRONMENT)


def require_libtpu() -> None:
    """Raises UserError if the TPU compiler is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "libtpu, the compiler for TPUs, is not installed: "
            "pip install -e '.[tpu]' in the clone, or pip install 'jax[tpu]' of the "
            "same version as jax; it runs on any Linux machine"
        )


def versions() -> str:
    """Names the releases that compile."""
    names = ("jax", "libtpu")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def usable_memory(device) -> int | None:
    """Returns the bytes of a chip's memory that a program can have.

    The compiler says so when it refuses a program that is too large, so it is given
    one, of a kilobyte for every byte there is.

    Args:
      device: of a topology.

    Returns:
      Bytes, to 2 decimals of a GiB; None if it did not say.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from vit_jax.planning import memory

    place = NamedSharding(Mesh(np.asarray([device]), "x"), PartitionSpec())
    huge = jax.ShapeDtypeStruct((1 << 14, 1 << 30), jnp.uint8)
    flipped = jax.jit(
        lambda x: x[::-1] + jnp.uint8(1), in_shardings=place, out_shardings=place
    )
    try:
        flipped.lower(huge).compile()
    except jax.errors.JaxRuntimeError as error:
        shortage = memory.parse_shortage(str(error))
        return shortage and shortage.limit
    return None
