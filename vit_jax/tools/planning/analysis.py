"""Compiles a config's training step for a TPU slice and measures its cost."""

import dataclasses
import math
import pathlib
import time

import jax
import jax.export
from jax.sharding import Mesh

from vit_jax.config import fields
from vit_jax.distributed import chips
from vit_jax.errors import UserError
from vit_jax.models import cost
from vit_jax.tools.planning import costs, hlo, topology
from vit_jax.training import train_step
from vit_jax.training.config import TrainConfig

TRACED = "counted in the trace, split evenly over the devices"
KERNEL = f"{TRACED}, attention as einsums: a floor, the kernel computes more"
COMPILED = "counted in the compiled program"
# Opcodes whose trip count changes the totals.
_WORK = ("dot", "convolution", "send", *costs.KINDS)
ASSUMPTIONS = (
    "every product at the chip's bfloat16 peak, nothing else computed",
    "memory at its full bandwidth, all of the time",
    "all links of a chip carry its share at once, between slices as well",
    "a transfer takes no time to begin",
    "asynchronous collectives hide behind computation entirely, others not at all",
)


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Lower bounds, in seconds per step.

    Attributes:
      compute: for the matrix products.
      memory: for the bytes read and written.
      overlapped: for the bytes that asynchronous collectives send.
      exposed: for the bytes that the other collectives send.
      floor: for the step: the largest of compute, memory and overlapped, which run at
        the same time, plus exposed.
      bound: the slowest of them: "compute", "memory" or "links".
    """

    compute: float
    memory: float
    overlapped: float
    exposed: float

    @property
    def floor(self) -> float:
        return max(self.compute, self.memory, self.overlapped) + self.exposed

    @property
    def bound(self) -> str:
        links = self.overlapped + self.exposed
        times = {"compute": self.compute, "memory": self.memory, "links": links}
        return max(times, key=times.get)


@dataclasses.dataclass(frozen=True)
class Analysis:
    """Cost of a training step; bytes, operations and collectives are per device.

    Attributes:
      settings: what shapes the program: mesh, scan, remat and so on.
      parameters: number of model parameters.
      params_bytes, moments_bytes, average_bytes, batch_bytes: sizes of the step's
        arguments, without padding.
      state_bytes: of a whole checkpoint, that of all devices.
      host_state_bytes: of what the devices of one host hold of it, each part once.
      argument_bytes: all of them in the compiler's layout.
      peak_bytes: largest live size, arguments included; the size that the compiler
        asked for where it refused the program.
      limit_bytes: memory that a program can use.
      fits: whether the program was compiled.
      flops: of matrix products, 2 per multiply-accumulate, with rematerialisation.
      counted: how they were counted, and whether the count is a floor.
      model_flops: 3 times those of the model's forward pass.
      moved_bytes: read and written in main memory.
      collectives: see `costs.summarize_collectives`.
      unread_loops: loops with products or collectives that count once because their
        trip count is unknown. Other such loops, such as mixup's rejection sampling, move
        next to nothing.
      roofline: None without a program, or for an unknown chip.
      compile_seconds: of the compilation alone.
      error: the compiler's, one line; "" if there is none.
    """

    settings: dict
    parameters: int
    params_bytes: int
    moments_bytes: int
    average_bytes: int
    batch_bytes: int
    flops: float
    counted: str
    model_flops: float
    limit_bytes: int | None
    state_bytes: int = 0
    host_state_bytes: int = 0
    argument_bytes: int = 0
    peak_bytes: int = 0
    fits: bool = False
    moved_bytes: int = 0
    collectives: tuple[dict, ...] = ()
    unread_loops: int = 0
    roofline: Roofline | None = None
    compile_seconds: float = 0.0
    error: str = ""

    @property
    def temporary_bytes(self) -> int:
        """Peak without arguments: activations and gradients."""
        return self.peak_bytes - self.argument_bytes

    def to_json(self) -> dict:
        """Returns all fields as plain numbers and strings."""
        row = dataclasses.asdict(self) | {"temporary_bytes": self.temporary_bytes}
        if self.roofline:
            row["roofline"] |= {
                "floor": self.roofline.floor,
                "bound": self.roofline.bound,
            }
        return row


def analyse(
    config: TrainConfig, mesh: Mesh, examples: int, limit: int | None
) -> Analysis:
    """Compiles a training step and analyses the compiled program.

    Args:
      config: complete config.
      mesh: of a topology's devices.
      examples: size of the training split.
      limit: bytes of a chip that a program can use; None if unknown.

    Raises:
      UserError: the config does not fit the mesh.
    """
    program = train_step.build_train_setup(config, mesh, examples)
    traced = program.train_step.trace(program.shapes, program.batch_shapes)
    found = _before(program, traced, config, mesh, examples, limit)
    lowered = traced.lower(lowering_platforms=(mesh.devices.flat[0].platform,))
    began = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        return _refused(found, str(error))
    seconds = time.perf_counter() - began
    return _read(found, compiled, mesh, seconds)


def _before(program, traced, config, mesh, examples, limit) -> Analysis:
    """Returns the costs that are known before compilation."""
    shapes, places = program.shapes, program.shardings
    batch = {name: x.sharding for name, x in program.batch_shapes.items()}
    macs, way = _macs(traced, config, mesh, examples)
    return Analysis(
        settings=settings(config, dict(mesh.shape)),
        parameters=sum(x.size for x in jax.tree.leaves(shapes.params)),
        params_bytes=bytes_per_device(shapes.params, places.params),
        moments_bytes=bytes_per_device(shapes.opt_state, places.opt_state),
        average_bytes=bytes_per_device(shapes.average, places.average),
        batch_bytes=bytes_per_device(program.batch_shapes, batch),
        flops=2.0 * macs / mesh.size,
        counted=way + _repeated(mesh),
        model_flops=program.training_flops * config.batch_size / mesh.size,
        limit_bytes=limit,
        state_bytes=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)),
        host_state_bytes=bytes_per_host(shapes, places),
    )


def _macs(traced, config, mesh, examples) -> tuple[int, str]:
    """Returns the multiply-accumulates of a step, and how they were counted."""
    try:
        return cost.macs_of(traced.jaxpr.jaxpr), TRACED
    except ValueError as error:
        if not config.model.has_encoder:
            raise UserError(
                f"model.variant={config.model.variant!r}: the products of its step "
                f"cannot be counted: {error}"
            ) from error
        # A trace does not show the products inside a kernel.
        twin = fields.replace(config, {"model.attention_impl": "einsum"})
        program = train_step.build_train_setup(twin, mesh, examples)
        traced = program.train_step.trace(program.shapes, program.batch_shapes)
        return cost.macs_of(traced.jaxpr.jaxpr), KERNEL


def _repeated(mesh: Mesh) -> str:
    """Returns a note on what an even split over the devices leaves out."""
    count = mesh.shape["model"]
    if count == 1:
        return ""
    return f"; a floor: what mesh.model={count} does not split, each of its devices repeats"


def settings(config: TrainConfig, sizes: dict[str, int]) -> dict:
    """Returns the settings that shape the compiled program most.

    Args:
      config: complete config.
      sizes: mesh axis -> devices.

    Returns:
      Name -> value; None for what the network does not have ("scan" and "remat_policy" of
      a ResNet).
    """
    model, optim = config.model, config.optim
    return {
        "variant": model.variant,
        "batch_size": config.batch_size,
        "image_size": list(config.data.image_size),
        "num_classes": config.data.num_classes,
        "mesh": sizes,
        "dcn": {key: getattr(config.mesh, key) for key in ("dcn_data", "dcn_fsdp")},
        "dtype": model.dtype,
        "scan": getattr(model, "scan", None),
        "remat_policy": getattr(model, "remat_policy", None),
        "attention_impl": getattr(model, "attention_impl", ""),
        "mu_dtype": optim.mu_dtype,
        "grad_accum_steps": optim.grad_accum_steps,
        "average": config.ema.decay > 0,
    }


def _refused(found: Analysis, message: str) -> Analysis:
    shortage = topology.parse_shortage(message)
    line = " ".join(message.split())[:300]
    if not shortage:
        return dataclasses.replace(found, error=line)
    return dataclasses.replace(
        found, peak_bytes=shortage.wanted, limit_bytes=shortage.limit, error=line
    )


def _read(found: Analysis, compiled, mesh: Mesh, seconds: float) -> Analysis:
    module = hlo.parse(compiled.as_text())
    exchanges = costs.find_collectives(module, mesh.size)
    sent = {True: 0.0, False: 0.0}
    for one in exchanges:
        sent[one.overlapped] += one.times * one.sent
    moved = costs.count_bytes_moved(module)
    flops, counted = _products(found, module)
    chip = chips.find(mesh.devices.flat[0].device_kind)
    bounds = None
    if chip:
        bounds = estimate_roofline(chip, flops, moved, sent[True], sent[False])
    stats = compiled.memory_analysis()
    return dataclasses.replace(
        found,
        argument_bytes=stats.argument_size_in_bytes,
        peak_bytes=stats.peak_memory_in_bytes,
        fits=True,
        flops=flops,
        counted=counted,
        moved_bytes=moved,
        collectives=tuple(costs.summarize_collectives(exchanges)),
        unread_loops=_unread(module),
        roofline=bounds,
        compile_seconds=round(seconds, 1),
    )


def _products(found: Analysis, module: hlo.Module) -> tuple[float, str]:
    """Returns the operations of one device, and how they were counted.

    The compiled program includes work that several devices repeat. The count of the
    trace is kept where the program hides work: kernels, loops with unknown trip counts.
    """
    flops = 2.0 * costs.count_macs(module)
    hidden = found.counted.startswith(KERNEL) or _unread(module)
    if hidden or flops < found.flops:
        return found.flops, found.counted
    return flops, COMPILED


def _unread(module: hlo.Module) -> int:
    """Counts the loops with an unknown trip count whose work matters."""
    return sum(
        any(
            inner.base in _WORK
            or inner.attribute("custom_call_target") == "tpu_custom_call"
            for run in module.body(loop)
            for inner in module.within(run.instruction)
        )
        for loop in module.unread()
    )


def estimate_roofline(
    chip: chips.Chip, flops: float, moved: float, sent_async: float, sent_sync: float
) -> Roofline:
    """Returns lower bounds on the time of a step.

    Args:
      chip: kind of device.
      flops: operations per device, 2 per multiply-accumulate.
      moved: bytes read and written in main memory, per device.
      sent_async: bytes sent in asynchronous collectives, per device.
      sent_sync: bytes sent in other collectives, per device.
    """

    def over_links(sent):
        # Without known links the time is unknown; 0 is still a floor.
        return sent / chip.link_bandwidth if chip.link_bandwidth else 0.0

    return Roofline(
        compute=flops / chip.peak_flops,
        memory=moved / chip.memory_bandwidth,
        overlapped=over_links(sent_async),
        exposed=over_links(sent_sync),
    )


def bytes_per_device(shapes: object, shardings: object) -> int:
    """Returns the size of a tree of arrays on one device, without padding.

    Args:
      shapes: tree of jax.ShapeDtypeStruct.
      shardings: tree of shardings with the same structure.
    """
    sizes = jax.tree.map(
        lambda x, sharding: math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize,
        shapes,
        shardings,
    )
    return sum(jax.tree.leaves(sizes))


def bytes_per_host(shapes: object, shardings: object) -> int:
    """Returns the size of a tree of arrays on the first host, each part once.

    Args:
      shapes: tree of jax.ShapeDtypeStruct.
      shardings: tree of shardings with the same structure.
    """

    def size(x, sharding):
        places = sharding.devices_indices_map(x.shape)
        first = min(device.process_index for device in places)
        parts = {
            str(index)
            for device, index in places.items()
            if device.process_index == first
        }
        return len(parts) * math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, shapes, shardings)))


def export_stablehlo(
    config: TrainConfig, mesh: Mesh, examples: int, path: pathlib.Path
) -> int:
    """Exports a config's training step for the platform of its mesh.

    The file is a portable StableHLO artifact: bytecode that later releases read for
    five years. Its function takes the arrays of the state and of the batch in the order
    of `jax.tree.leaves`, and holds their shardings.

    Args:
      config: complete config.
      mesh: of a topology's devices.
      examples: size of the training split.
      path: file to write; its folder must exist.

    Returns:
      Size in bytes.

    Raises:
      UserError: the file cannot be written.
    """
    program = train_step.build_train_setup(config, mesh, examples)
    platform = mesh.devices.flat[0].platform
    exported = jax.export.export(program.train_step, platforms=[platform])(
        program.shapes, program.batch_shapes
    )
    try:
        return path.write_bytes(exported.mlir_module_serialized)
    except OSError as error:
        raise UserError(f"--export={path} cannot be written: {error}") from error
