"""Compiles a config's training step for TPUs or GPUs and analyses its cost."""

import dataclasses
import itertools
import math
import os
import pathlib
import time
from collections.abc import Sequence

import jax
import jax.export
from jax.sharding import Mesh

from vit_jax.command_line.files import replace_bytes
from vit_jax.config import fields
from vit_jax.distributed import chips
from vit_jax.errors import UserError
from vit_jax.models import cost
from vit_jax.tools.planning import costs, gpus, hlo, topology
from vit_jax.tools.planning import movers as largest
from vit_jax.training import compiled_step, train_setup
from vit_jax.training.config import TrainConfig

TRACED = "counted in the trace, split evenly over the devices"
KERNEL = f"{TRACED}, attention as einsums: a lower bound, the kernel computes more"
COMPILED = "counted in the compiled program"
# Opcodes in loops that make a wrong trip count change the totals.
_WORK = ("dot", "convolution", "send", *costs.KINDS)
_ASSUMPTIONS = (
    "all products at the chip's bfloat16 peak, and nothing else is computed",
    "memory at its full bandwidth all the time",
    "transfers without latency",
    "asynchronous collectives overlap completely with computation, others not at all",
)
ASSUMPTIONS = {
    "tpu": (
        *_ASSUMPTIONS,
        "all links of a chip carry equal shares at the same time",
        "chips share their slice's network equally; if unknown, it is as fast as links",
    ),
    "gpu": (
        *_ASSUMPTIONS,
        "NVLink connects the GPUs of a host; a host has one network adapter per GPU",
        "kernels chosen without autotuning, which needs the GPU: tiles, workspace",
    ),
}


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Lower bounds on the time of a step, in seconds.

    Attributes:
      compute: time of the matrix products.
      memory: time to read and write main memory.
      overlapped: time of asynchronous collectives, over links and network at once.
      exposed: time of the other collectives.
      floor: lower bound on the whole step: the largest of compute, memory and
        overlapped, which run at the same time, plus exposed.
      bound: slowest resource: "compute", "memory" or "links".
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
      settings: mesh, scan, remat policy and others, see `settings`.
      parameters: number of model parameters.
      params_bytes, moments_bytes, average_bytes, batch_bytes: sizes of the step's
        arguments, without padding.
      state_bytes: size of a checkpoint, over all devices.
      host_state_bytes: bytes of the state on the devices of one host, without
        duplicates.
      argument_bytes: size of all arguments in the compiler's layout.
      peak_bytes: largest size of live arrays, including arguments; the requested size
        if the compiler rejected the program.
      limit_bytes: memory that a program can use.
      fits: whether the program was compiled.
      flops: operations in matrix products, 2 per multiply-accumulate, with
        rematerialisation.
      counted: how `flops` was counted, and whether it is a lower bound.
      model_flops: 3 times the operations of the model's forward pass.
      moved_bytes: bytes read and written in main memory.
      collectives: result of `costs.summarize_collectives`.
      kernels: number of executions of library kernels, such as cuDNN's attention, by
        name.
      platform: "tpu", "gpu" or "cpu".
      movers: the instructions that move the most bytes, see `movers.find`.
      unread_loops: number of loops with products or collectives that are counted once
        because their trip count is unknown. Other such loops, such as mixup's rejection
        sampling, move almost no data.
      roofline: None without a program, or for an unknown chip.
      compile_seconds: duration of the compilation.
      error: error of the compiler in one line; "" without an error.
    """

    settings: dict
    platform: str = ""
    parameters: int = 0
    params_bytes: int = 0
    moments_bytes: int = 0
    average_bytes: int = 0
    batch_bytes: int = 0
    flops: float = 0.0
    counted: str = ""
    model_flops: float = 0.0
    limit_bytes: int | None = None
    state_bytes: int = 0
    host_state_bytes: int = 0
    argument_bytes: int = 0
    peak_bytes: int = 0
    fits: bool = False
    moved_bytes: int = 0
    collectives: tuple[dict, ...] = ()
    kernels: dict[str, int] = dataclasses.field(default_factory=dict)
    movers: tuple[largest.Mover, ...] = ()
    unread_loops: int = 0
    roofline: Roofline | None = None
    compile_seconds: float = 0.0
    error: str = ""

    @property
    def unexpected(self) -> tuple[dict, ...]:
        """Collectives that grow with the batch although the mesh only copies parameters."""
        mesh = self.settings["mesh"]
        if mesh["fsdp"] * mesh["model"] > 1:
            return ()
        return tuple(r for r in self.collectives if r["purpose"] == costs.BATCH)

    @property
    def temporary_bytes(self) -> int:
        """Peak size without arguments: activations and gradients."""
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
    config: TrainConfig,
    mesh: Mesh,
    examples: int,
    limit: int | None,
    out: str | os.PathLike = "",
) -> Analysis:
    """Compiles a training step and analyses the compiled program.

    Args:
      config: complete config.
      mesh: devices of a topology.
      examples: number of training examples.
      limit: bytes of a chip that a program can use; None if unknown.
      out: file for the compiled step if it fits, see `compiled_step`; "" for none.

    Raises:
      UserError: the config does not fit the mesh, or the file cannot be written.
    """
    setup = train_setup.build(config, mesh, examples)
    traced = setup.train_step.trace(setup.layout.shapes, setup.layout.batch)
    before = _before(setup, traced, config, mesh, examples, limit)
    platform, options = lowering(mesh)
    lowered = traced.lower(lowering_platforms=(platform,))
    began = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        return _refused(before, str(error))
    seconds = time.perf_counter() - began
    after = _after(before, compiled, mesh, state_sizes(setup), seconds)
    if out and after.fits:
        compiled_step.save(out, config, mesh, lowered, compiled)
    return after


def lowering(mesh: Mesh) -> tuple[str, dict[str, str] | None]:
    """Returns the platform to lower for, and the options of the compiler."""
    platform = mesh.devices.flat[0].platform
    if platform == "gpu":
        return "cuda", gpus.COMPILER_OPTIONS
    return platform, None


def network_hosts(mesh: Mesh) -> list[int]:
    """Returns the host of each device if a network connects hosts, else zeros."""
    devices = list(mesh.devices.flat)
    return [d.process_index if d.platform == "gpu" else 0 for d in devices]


def _before(setup, traced, config, mesh, examples, limit) -> Analysis:
    """Returns the costs that are known before compilation."""
    shapes, shardings = setup.layout.shapes, setup.layout.shardings
    batch = {name: x.sharding for name, x in setup.layout.batch.items()}
    macs, counted = _macs(traced, config, mesh, examples)
    count = mesh.shape["model"]
    if count > 1:
        counted += (
            f"; a lower bound: each of the devices of mesh.model={count} repeats what is "
            "not split"
        )
    return Analysis(
        settings=settings(config, dict(mesh.shape)),
        platform=mesh.devices.flat[0].platform,
        parameters=sum(x.size for x in jax.tree.leaves(shapes.params)),
        params_bytes=bytes_per_device(shapes.params, shardings.params),
        moments_bytes=bytes_per_device(shapes.opt_state, shardings.opt_state),
        average_bytes=bytes_per_device(shapes.average, shardings.average),
        batch_bytes=bytes_per_device(setup.layout.batch, batch),
        flops=2.0 * macs / mesh.size,
        counted=counted,
        # For a user's network, this may be unknown.
        model_flops=(setup.training_flops or math.nan) * config.batch_size / mesh.size,
        limit_bytes=limit,
        state_bytes=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)),
        host_state_bytes=bytes_per_host(shapes, shardings),
    )


def _macs(traced, config, mesh, examples) -> tuple[int, str]:
    """Counts the multiply-accumulates of a step, and describes how."""
    try:
        return cost.macs_of(traced.jaxpr.jaxpr), TRACED
    except ValueError as error:
        if not config.model.has_encoder:
            raise UserError(
                f"model.variant={config.model.variant!r}: the products of its step "
                f"cannot be counted: {error}"
            ) from error
        # A trace does not show the products computed inside a kernel.
        twin = fields.replace(config, {"model.attention_impl": "einsum"})
        setup = train_setup.build(twin, mesh, examples)
        traced = setup.train_step.trace(setup.layout.shapes, setup.layout.batch)
        return cost.macs_of(traced.jaxpr.jaxpr), KERNEL


def settings(config: TrainConfig, sizes: dict[str, int]) -> dict:
    """Returns the settings that affect the compiled program most.

    Args:
      config: complete config.
      sizes: number of devices by mesh axis.

    Returns:
      Values by name; None for options that the network does not have ("scan" and
      "remat_policy" of a ResNet).
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
        "mu_dtype": optim.mu_dtype if optim.takes_mu_dtype else None,
        "grad_accum_steps": optim.grad_accum_steps,
        "average": config.ema.decay > 0 and not optim.has_average,
    }


def _refused(before: Analysis, message: str) -> Analysis:
    """Adds the compiler's error to an analysis."""
    shortage = topology.parse_shortage(message)
    line = " ".join(message.split())[:300]
    if not shortage:
        return dataclasses.replace(before, error=line)
    return dataclasses.replace(
        before, peak_bytes=shortage.wanted, limit_bytes=shortage.limit, error=line
    )


def state_sizes(setup: train_setup.TrainSetup) -> set[int]:
    """Returns the numbers of elements of all arrays in the training state.

    The sizes of a single layer and of each device's part are included; scalars are not.
    """
    shapes = (setup.layout.shapes, setup.layout.disk.shapes)
    sizes = {leaf.size for leaf in jax.tree.leaves(shapes)}
    split = itertools.product(*({1, setup.mesh.shape[a]} for a in ("fsdp", "model")))
    parts = {math.prod(each) for each in split}
    return {n // part for n in sizes for part in parts if n % part == 0} - {1}


def _after(
    before: Analysis, compiled, mesh: Mesh, state: set[int], seconds: float
) -> Analysis:
    """Adds the costs of the compiled program to an analysis."""
    module = hlo.parse(compiled.as_text())
    collectives = costs.find_collectives(module, network_hosts(mesh), state)
    moved = costs.count_bytes_moved(module)
    flops, counted = _products(before, module)
    chip = chips.find(mesh.devices.flat[0].device_kind)
    bounds = None
    if chip:
        bounds = estimate_roofline(chip, flops, moved, collectives)
    stats = compiled.memory_analysis()
    peak = stats.peak_memory_in_bytes
    if before.platform == "cpu":  # Its compiler does not report temporary memory.
        peak = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    # The compilers for GPUs and CPUs do not check the size.
    limited = before.platform != "tpu" and before.limit_bytes is not None
    return dataclasses.replace(
        before,
        argument_bytes=stats.argument_size_in_bytes,
        peak_bytes=peak,
        fits=not limited or peak <= before.limit_bytes,
        flops=flops,
        counted=counted,
        moved_bytes=moved,
        collectives=tuple(costs.summarize_collectives(collectives)),
        kernels=costs.count_kernels(module),
        movers=largest.find(module),
        unread_loops=_unread(module),
        roofline=bounds,
        compile_seconds=round(seconds, 1),
    )


def _products(before: Analysis, module: hlo.Module) -> tuple[float, str]:
    """Returns the operations per device, and how they were counted."""
    # The compiled program includes work that several devices repeat. It hides the work
    # of kernels and of loops with unknown trip counts; the trace's count is kept for
    # those.
    flops = 2.0 * costs.count_macs(module)
    kernel = before.counted.startswith(KERNEL) and before.platform != "gpu"
    hidden = kernel or _unread(module)
    if hidden or flops < before.flops:
        return before.flops, before.counted
    return flops, COMPILED


def _unread(module: hlo.Module) -> int:
    """Counts the loops with an unknown trip count and significant work."""
    return sum(
        any(
            inner.base in _WORK or costs.is_kernel(inner)
            for run in module.body(loop)
            for inner in module.within(run.instruction)
        )
        for loop in module.unread()
    )


def estimate_roofline(
    chip: chips.Chip,
    flops: float,
    moved: float,
    collectives: Sequence[costs.Collective],
) -> Roofline:
    """Returns lower bounds on the time of a step.

    Args:
      chip: kind of device.
      flops: operations per device, 2 per multiply-accumulate.
      moved: bytes read and written in main memory per device.
      collectives: collectives of the program.
    """

    def transfer(overlapped):
        chosen = [one for one in collectives if one.overlapped == overlapped]
        sent = sum(one.times * one.sent for one in chosen)
        # `sent` has the bytes between slices too: if their network is unknown, they are
        # counted at the speed of the links, which are faster.
        network = sum(
            one.times * (one.network or one.slices * one.sent) for one in chosen
        )
        # An unknown bandwidth makes the time unknown; 0 is still a lower bound.
        return max(
            sent / (chip.link_bandwidth or math.inf),
            network / (chip.network_bandwidth or math.inf),
        )

    return Roofline(
        compute=flops / chip.peak_flops,
        memory=moved / chip.memory_bandwidth,
        overlapped=transfer(True),
        exposed=transfer(False),
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
    """Returns the size of a tree of arrays on the first host, without duplicates.

    Args:
      shapes: tree of jax.ShapeDtypeStruct.
      shardings: tree of shardings with the same structure.
    """

    def size(x, sharding):
        indices = sharding.devices_indices_map(x.shape)
        host = min(device.process_index for device in indices)
        shards = {str(i) for d, i in indices.items() if d.process_index == host}
        return len(shards) * math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, shapes, shardings)))


def export_stablehlo(
    config: TrainConfig, mesh: Mesh, examples: int, path: pathlib.Path
) -> int:
    """Exports a config's training step for the platform of its mesh.

    The file is a portable StableHLO artifact: bytecode that later releases can read for
    five years. Its function takes the arrays of the state and of the batch in the order
    of `jax.tree.leaves`, and contains their shardings.

    Args:
      config: complete config.
      mesh: devices of a topology.
      examples: number of training examples.
      path: file to write, in an existing folder.

    Returns:
      Size of the file in bytes.

    Raises:
      UserError: the file cannot be written.
    """
    setup = train_setup.build(config, mesh, examples)
    exported = jax.export.export(setup.train_step, platforms=[lowering(mesh)[0]])(
        setup.layout.shapes, setup.layout.batch
    )
    content = exported.mlir_module_serialized
    try:
        replace_bytes(path, content)
    except OSError as error:
        raise UserError(f"--export={path}: cannot be written: {error}") from error
    return len(content)
