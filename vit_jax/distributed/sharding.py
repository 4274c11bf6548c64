"""Splits parameters over the mesh, and checks that they fit its memory.

Without rules in the config, "model" splits attention by heads and MLPs by hidden units
(Megatron-LM, arXiv:1909.08053, section 3), and "fsdp" splits every large parameter
along the largest axis that it divides (ZeRO, arXiv:1910.02054). Small parameters stay
whole: gathering a bias costs a message and saves nothing.
"""

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from vit_jax.config.fields import key
from vit_jax.distributed.mesh import AXES, BATCH_AXES
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """Splits further parameters than the default rules do."""

    rules: tuple[str, ...] = key(
        (),
        "Rules for splitting parameters along axes of the mesh, such as "
        '"head/kernel$ -> -, model", tried before the default rules; see '
        "vit_jax/distributed/sharding.py.",
        reason="custom networks",
    )
    min_size: int = key(
        32_768,
        "Smallest parameter that `mesh.fsdp` splits, in elements per layer.",
        reason="weighing memory against communication",
    )


# Regular expressions of parameter paths, each with a mesh axis for each parameter axis.
ModelAxes = Sequence[tuple[str, tuple[str | None, ...]]]

_BYTES = 4  # Per parameter, in float32.
_TRAINED = 16  # Per parameter with its gradient and Adam's two moments.
# Names of the axes of activations in the models.
_ACTIVATIONS = (
    ("batch", BATCH_AXES),
    ("heads", "model"),
    ("mlp", "model"),
    ("tokens", None),
    ("embed", None),
    ("classes", None),
)
# Blocks under a scan; their first axis is the depth.
_STACKED = "Transformer/encoderblock/"


def parameters(
    shapes: Mapping,
    mesh: Mesh | AbstractMesh,
    model_axes: ModelAxes,
    rules: Sequence[str] = (),
    min_size: int = 1,
) -> dict:
    """Returns the sharding of each parameter.

    Args:
      shapes: parameters or their shapes, nested dict, in either layout of the blocks.
      mesh: mesh of the axes "data", "fsdp" and "model".
      model_axes: axes that "model" splits, see `NetworkConfig.model_axes`.
      rules: "REGEX -> AXES", tried before the defaults; the first that matches a path
        applies. AXES lists, for each axis of the parameter, "data", "fsdp", "model",
        several joined by "+", or "-" for none: "head/kernel$ -> -, model". Missing
        axes at the end are "-". The depth of layers under a scan is not listed.
      min_size: parameters of fewer elements (in each layer) are not split over "fsdp".

    Returns:
      Nested dict of NamedSharding.

    Raises:
      UserError: a rule cannot be read or matches nothing, an axis of the mesh does not
        divide what it should split, or it would split nothing at all.
    """
    parsed = [_parse(rule, mesh) for rule in rules]
    leaves = [
        (_path(keys), tuple(leaf.shape))
        for keys, leaf in jax.tree.leaves_with_path(shapes)
    ]
    taken = set()
    for rule in parsed:
        matches = {path for path, shape in leaves if _matches(rule, path, shape)}
        if not matches:
            raise UserError(
                f"sharding.rules: {rule.text!r} matches none of the {len(leaves)} "
                f"parameters, such as {_each_block(leaves[0][0])}"
            )
        if matches <= taken:
            raise UserError(
                f"sharding.rules: {rule.text!r} never applies, because rules before it "
                f"match all {len(matches)} parameters that it matches: put it first"
            )
        taken |= matches
    specs = [_spec(*leaf, mesh, model_axes, parsed, min_size) for leaf in leaves]
    used = {axis for spec in specs for names in spec for axis in _names(names)}
    for axis in ("fsdp", "model"):
        if mesh.shape[axis] > 1 and axis not in used:
            why = (
                "attention heads and MLPs, which this network does not have"
                if axis == "model"
                else f"parameters of at least sharding.min_size={min_size} elements, "
                f"and none of the {len(leaves)} is as large"
            )
            raise UserError(
                f"mesh.{axis}={mesh.shape[axis]} splits {why}: set mesh.{axis}=1"
            )
    shardings = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]
    return jax.tree.unflatten(jax.tree.structure(shapes), shardings)


def beside(
    tree: object,
    mesh: Mesh | AbstractMesh,
    model_axes: ModelAxes,
    rules: Sequence[str] = (),
    min_size: int = 1,
) -> object:
    """Returns the shardings of the arrays that a task keeps beside its parameters.

    Args:
      tree: tree of arrays or shapes; a teacher's parameters are split as a network's.
      mesh, model_axes, rules, min_size: arguments of `parameters`; a rule may match
        nothing here.
    """
    parsed = [_parse(rule, mesh) for rule in rules]

    def place(keys, leaf):
        spec = _spec(_path(keys), leaf.shape, mesh, model_axes, parsed, min_size)
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map_with_path(place, tree)


def like(tree: object, *layouts: tuple[Mapping, Mapping]) -> object:
    """Returns, for every array of a tree, the sharding of the parameter it belongs to.

    Args:
      tree: tree of arrays or shapes, such as a training state. The path of a moment or
        an average ends in its parameter's path, and its shape in the parameter's shape,
        with further axes before; any other array is replicated.
      *layouts: shapes and shardings of the parameters, nested dicts, for each layout of
        the blocks in the tree.
    """
    known = {}
    for shapes, shardings in layouts:
        places = jax.tree.leaves(shardings)
        for (keys, leaf), place in zip(
            jax.tree.leaves_with_path(shapes), places, strict=True
        ):
            known[_path(keys)] = tuple(leaf.shape), place
    whole = NamedSharding(places[0].mesh, PartitionSpec())

    def find(keys, leaf):
        names = _path(keys).split("/")
        for i in range(len(names)):
            shape, place = known.get("/".join(names[i:]), (None, None))
            if place is None:
                continue
            more = len(leaf.shape) - len(shape)
            if more == 0 and leaf.shape == shape:
                return place
            if more > 0 and leaf.shape[more:] == shape:
                return NamedSharding(
                    place.mesh, PartitionSpec(*[None] * more, *place.spec)
                )
        return whole

    return jax.tree.map_with_path(find, tree)


@contextlib.contextmanager
def activations(mesh: Mesh) -> Iterator[None]:
    """Maps the models' names for axes of activations to axes of the mesh.

    Use it within a function that is traced for this mesh.
    """
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        nn.logical_axis_rules(_ACTIVATIONS),
    ):
        yield


def device_memory(devices: Sequence[jax.Device]) -> int | None:
    """Returns the memory of devices in bytes; None if unknown.

    For the CPU it is the memory of the host, once per process.

    Args:
      devices: devices of one kind, on any host.
    """
    if devices[0].platform == "cpu":
        return _host_memory() * len({device.process_index for device in devices})
    local = jax.local_devices()[0]
    if local.device_kind != devices[0].device_kind:  # A topology that is not here.
        return None
    limit = (local.memory_stats() or {}).get("bytes_limit")
    return limit and limit * len(devices)


def check_memory(
    shapes: dict, devices: Sequence[jax.Device] = (), extra: object = None
) -> None:
    """Checks before a network is built that its parameters fit the memory.

    Only parameters and `extra` count: a network that swapping, sharding or
    rematerialisation could make fit is not refused. The compiler reports further
    memory.

    Args:
      shapes: parameters, as jax.ShapeDtypeStruct.
      devices: devices that hold them together; if empty, this host's memory counts.
      extra: other arrays of the task, such as a teacher, as jax.ShapeDtypeStruct.

    Raises:
      UserError: they do not fit; the message has the memory needed and available.
    """
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    # Without a CPU backend, JAX has no device for the host's memory.
    available = device_memory(devices) if devices else _host_memory()
    leaves = jax.tree.leaves(extra)
    beside = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    if available and _BYTES * count + beside > available:
        also = f", the task keeps {beside / 1e9:,.1f} GB beside them" if beside else ""
        raise UserError(
            f"out of memory before the start: the network has {count:,} parameters, "
            f"{_BYTES * count / 1e9:,.1f} GB ({_TRAINED * count / 1e9:,.1f} GB with "
            f"gradients and Adam's moments){also}, and there are "
            f"{available / 1e9:,.1f} GB: choose a smaller image size or model, or more "
            "devices"
        )


def _host_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _Rule(NamedTuple):
    """A rule of the config: its text, its regular expression, the names per axis."""

    text: str
    pattern: str
    axes: tuple[tuple[str, ...], ...]


def _parse(rule: str, mesh: Mesh | AbstractMesh) -> _Rule:
    pattern, arrow, axes = rule.rpartition("->")
    pattern = pattern.strip()
    form = f"sharding.rules: {rule!r} is not 'REGEX -> AXIS, AXIS' with axes from "
    if not arrow or not pattern:
        raise UserError(f"{form}{', '.join(AXES)}, or - for none")
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(
            f"sharding.rules: {pattern!r} is not a regular expression ({error})"
        ) from error
    names = [_split(entry) for entry in axes.split(",")]
    flat = [name for entry in names for name in entry]
    if unknown := set(flat) - mesh.shape.keys():
        raise UserError(f"{form}{', '.join(AXES)}: {min(unknown)!r} is not an axis")
    if len(set(flat)) < len(flat):
        raise UserError(f"sharding.rules: {rule!r} names an axis of the mesh twice")
    return _Rule(rule, pattern, tuple(names))


def _split(entry: str) -> tuple[str, ...]:
    entry = entry.strip()
    return () if entry in ("", "-") else tuple(n.strip() for n in entry.split("+"))


def _spec(
    path: str,
    shape: tuple[int, ...],
    mesh: Mesh | AbstractMesh,
    model_axes: ModelAxes,
    rules: Sequence[_Rule],
    min_size: int,
) -> tuple:
    """Returns the mesh axes that split each axis of a parameter, None for none."""
    chosen = next((rule for rule in rules if _matches(rule, path, shape)), None)
    depth = (None,) if _STACKED in path else ()
    shape = shape[len(depth) :]
    if chosen:
        spec = [names or None for names in chosen.axes]
        _check(path, shape, spec, mesh, f"sharding.rules: {chosen.text!r}")
        return (*depth, *spec)
    spec = [None] * len(shape)
    if mesh.shape["model"] > 1:
        for pattern, axes in model_axes:
            if re.search(pattern, path):
                spec[: len(axes)] = axes
        _check(path, shape, spec, mesh, f"mesh.model={mesh.shape['model']}")
    fsdp = mesh.shape["fsdp"]
    unsplit = [i for i, name in enumerate(spec) if not name]
    # A vector that "model" splits has no other axis, and is small: it stays whole.
    if fsdp > 1 and unsplit and math.prod(shape) >= min_size:
        free = [i for i in unsplit if not shape[i] % fsdp]
        if not free:
            whose = " that mesh.model leaves" if any(spec) else ""
            raise UserError(
                f"mesh.fsdp={fsdp} divides no axis{whose} of {_each_block(path)} "
                f"{_by(shape)}: set mesh.fsdp to a number that does, or write a rule "
                f"for it, as sharding.rules=('{_each_block(path)}$ -> -',)"
            )
        spec[max(free, key=lambda i: shape[i])] = "fsdp"
    return (*depth, *spec)


def _check(path, shape, spec, mesh, whose) -> None:
    """Checks that the mesh divides the axes of a parameter."""
    if len(spec) > len(shape):
        raise UserError(
            f"{whose} has {len(spec)} axes, but {path} {_by(shape)} has {len(shape)}"
        )
    for length, names in zip(shape, spec, strict=False):
        parts = math.prod(mesh.shape[name] for name in _names(names))
        if length % parts:
            raise UserError(
                f"{whose}: {parts} devices do not divide {length} of {path} "
                f"{_by(shape)}: change the mesh, or the size of {length}"
            )


def _matches(rule: _Rule, path: str, shape: tuple[int, ...]) -> bool:
    """Returns whether a rule matches a parameter, or all layers of one."""
    if _STACKED not in path:
        return bool(re.search(rule.pattern, path))
    layers = [path.replace(_STACKED, f"{_STACKED[:-1]}_{i}/") for i in range(shape[0])]
    count = sum(bool(re.search(rule.pattern, layer)) for layer in layers)
    if 0 < count < len(layers):
        raise UserError(
            f"sharding.rules: {rule.text!r} matches only {count} of the {len(layers)} "
            "layers that lie in one array: set model.scan=False or match all of them"
        )
    return bool(count)


def _each_block(path: str) -> str:
    """Returns a path as a regular expression for all blocks."""
    return path.replace(_STACKED, rf"{_STACKED[:-1]}_\d+/")


def _path(keys: tuple) -> str:
    """Returns the path of a leaf from its dict keys only."""
    return "/".join(k.key for k in keys if isinstance(k, jax.tree_util.DictKey))


def _names(entry) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
