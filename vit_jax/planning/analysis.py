"""Compiles a config's training step for a slice and reads off what it costs."""

import dataclasses
import time

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.models import cost
from vit_jax.parallel import chips
from vit_jax.planning import collectives, hlo, memory, products, traffic
from vit_jax.planning.roofline import Roofline, estimate
from vit_jax.training import program as programs

TRACED = "counted in the trace, split evenly over the devices"
KERNEL = f"{TRACED}, attention as einsums: a floor, the kernel computes more"
COMPILED = "counted in the compiled program"
# What makes it matter how often a loop runs.
_WORK = ("dot", "convolution", "send", *collectives.KINDS)


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What a training step costs; bytes, operations and collectives are a device's.

    Attributes:
      settings: what shapes the program: mesh, scan, remat and so on.
      parameters: how many the model has.
      params_bytes, moments_bytes, average_bytes, batch_bytes: of the arrays that a step
        takes, without padding.
      argument_bytes: of all of them, as the compiler lays them out.
      peak_bytes: most that is live at once, arguments included; what the compiler
        wants where it refused the program.
      limit_bytes: what a program can have.
      fits: whether the program was compiled.
      flops: of products, 2 to a multiply-accumulate, rematerialised ones included.
      counted: how they were, and whether that is a floor.
      model_flops: the same of 3 times the model's forward pass.
      moved_bytes: read and written in main memory.
      collectives: see `collectives.summarize`.
      unread_loops: loops with products or collectives that count once because their
        rounds cannot be read. Others that do, such as mixup's, which draws numbers until
        they fit, move next to nothing.
      roofline: see there; None without a program, or for an unknown chip.
      compile_seconds: of the compilation alone.
      error: of the compiler, one line; "" if there is none.
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
        """Of the peak, what is not handed to the step: activations and gradients."""
        return self.peak_bytes - self.argument_bytes

    def to_json(self) -> dict:
        """Returns all of it as plain numbers and words."""
        row = dataclasses.asdict(self) | {"temporary_bytes": self.temporary_bytes}
        if self.roofline:
            row["roofline"] |= {
                "floor": self.roofline.floor,
                "bound": self.roofline.bound,
            }
        return row


def analyse(
    config: ConfigDict, mesh: Mesh, examples: int, limit: int | None
) -> Analysis:
    """Compiles a training step and reads the compiled program.

    Args:
      config: complete config.
      mesh: of a topology's devices.
      examples: size of the training split.
      limit: bytes of a chip that a program can have; None if that is not known.

    Raises:
      UserError: config and mesh do not fit each other.
    """
    program = programs.build(config, mesh, examples)
    traced = program.step.trace(program.shapes, program.batch_shapes)
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
    """Counts what is known without a compiler."""
    shapes, places = program.shapes, program.shardings
    batch = {name: x.sharding for name, x in program.batch_shapes.items()}
    macs, way = _macs(traced, config, mesh, examples)
    forward = cost.macs_per_image(program.model) * config.batch_size
    return Analysis(
        settings=settings(config, dict(mesh.shape)),
        parameters=sum(x.size for x in jax.tree.leaves(shapes.params)),
        params_bytes=memory.bytes_a_device(shapes.params, places.params),
        moments_bytes=memory.bytes_a_device(shapes.opt_state, places.opt_state),
        average_bytes=memory.bytes_a_device(shapes.average, places.average),
        batch_bytes=memory.bytes_a_device(program.batch_shapes, batch),
        flops=2.0 * macs / mesh.size,
        counted=way + _repeated(mesh),
        model_flops=6.0 * forward / mesh.size,
        limit_bytes=limit,
    )


def _macs(traced, config, mesh, examples) -> tuple[int, str]:
    """Counts the products of a step, and says how."""
    try:
        return cost.macs_of(traced.jaxpr.jaxpr), TRACED
    except ValueError:  # Of a kernel, whose products no trace shows.
        twin = config.copy_and_resolve_references().unlock()
        twin.model.attention = "einsum"
        program = programs.build(twin.lock(), mesh, examples)
        traced = program.step.trace(program.shapes, program.batch_shapes)
        return cost.macs_of(traced.jaxpr.jaxpr), KERNEL


def _repeated(mesh: Mesh) -> str:
    """Says what a count that is split evenly leaves out."""
    count = mesh.shape["model"]
    if count == 1:
        return ""
    return f"; a floor: what mesh.model={count} does not split, each of its devices repeats"


def settings(config: ConfigDict, sizes: dict[str, int]) -> dict:
    """Returns what of a config shapes the compiled program most.

    Args:
      config: complete config.
      sizes: of the mesh.

    Returns:
      Name to value; None what the network does not have ("scan" and "remat" of a
      ResNet).
    """
    model, optim = config.model, config.optim
    return {
        "variant": model.variant,
        "batch_size": config.batch_size,
        "image_size": list(config.data.image_size),
        "classes": config.data.classes,
        "mesh": sizes,
        "dcn": {key: config.mesh[key] for key in ("dcn_data", "dcn_fsdp")},
        "dtype": model.dtype,
        "scan": model.get("scan"),
        "remat": model.get("remat"),
        "attention": model.get("attention", ""),
        "moment_dtype": optim.moment_dtype,
        "accumulate": optim.accumulate,
        "average": config.average.decay > 0,
    }


def _refused(found: Analysis, message: str) -> Analysis:
    shortage = memory.parse_shortage(message)
    line = " ".join(message.split())[:300]
    if not shortage:
        return dataclasses.replace(found, error=line)
    return dataclasses.replace(
        found, peak_bytes=shortage.wanted, limit_bytes=shortage.limit, error=line
    )


def _read(found: Analysis, compiled, mesh: Mesh, seconds: float) -> Analysis:
    module = hlo.parse(compiled.as_text())
    exchanges = collectives.find(module, mesh.size)
    sent = {True: 0.0, False: 0.0}
    for one in exchanges:
        sent[one.overlapped] += one.times * one.sent
    moved = traffic.count(module)
    flops, counted = _products(found, module)
    chip = chips.find(mesh.devices.flat[0].device_kind)
    bounds = None
    if chip:
        bounds = estimate(chip, flops, moved, sent[True], sent[False])
    stats = compiled.memory_analysis()
    return dataclasses.replace(
        found,
        argument_bytes=stats.argument_size_in_bytes,
        peak_bytes=stats.peak_memory_in_bytes,
        fits=True,
        flops=flops,
        counted=counted,
        moved_bytes=moved,
        collectives=tuple(collectives.summarize(exchanges)),
        unread_loops=_unread(module),
        roofline=bounds,
        compile_seconds=round(seconds, 1),
    )


def _products(found: Analysis, module: hlo.Module) -> tuple[float, str]:
    """Counts a device's own products, and says how.

    The compiled program is a device's, so that it shows what several of them repeat; the
    trace stays where it does not show all: of kernels, or of loops that cannot be read.
    """
    flops = 2.0 * products.count(module)
    hidden = found.counted.startswith(KERNEL) or _unread(module)
    if hidden or flops < found.flops:
        return found.flops, found.counted
    return flops, COMPILED


def _unread(module: hlo.Module) -> int:
    """Counts the loops whose rounds cannot be read and matter."""
    return sum(
        any(
            inner.base in _WORK
            or inner.attribute("custom_call_target") == "tpu_custom_call"
            for run in module.body(loop)
            for inner in module.within(run.instruction)
        )
        for loop in module.unread()
    )
