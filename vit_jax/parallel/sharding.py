"""Which axis of the mesh splits which axis of which parameter.

Without a rule of the user's, "model" splits attention by heads and the MLPs by hidden
units (Megatron-LM, arXiv:1909.08053, section 3), and "fsdp" the largest axis that it
divides of every large parameter (ZeRO, arXiv:1910.02054). Small ones stay whole: to
gather a bias costs a message and saves nothing.
"""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import flax.linen as nn
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.errors import UserError
from vit_jax.parallel.mesh import AXES, BATCH_AXES

# Heads and hidden units, by the names of models/layers.py. The products between the
# two kernels of each pair need no exchange, and what comes out is summed once.
_MODEL_RULES = (
    (r"MultiHeadDotProductAttention_\d+/(query|key|value)/kernel$", (None, "model")),
    (r"MultiHeadDotProductAttention_\d+/(query|key|value)/bias$", ("model",)),
    (r"MultiHeadDotProductAttention_\d+/out/kernel$", ("model",)),
    (r"(^|/)relative_embedding(_\d+)?$", ("model",)),
    (r"MlpBlock_\d+/Dense_0/kernel$", (None, "model")),
    (r"MlpBlock_\d+/Dense_0/bias$", ("model",)),
    (r"MlpBlock_\d+/Dense_1/kernel$", ("model",)),
)
# The names that the models give to the axes of activations.
_ACTIVATIONS = (
    ("batch", BATCH_AXES),
    ("heads", "model"),
    ("mlp", "model"),
    ("tokens", None),
    ("embed", None),
    ("classes", None),
)
# The blocks of a scan, whose first axis is the depth; and what they stand for.
_STACKED, _FIRST = "Transformer/encoderblock/", "Transformer/encoderblock_0/"


def parameters(
    shapes: Mapping, mesh: Mesh, rules: Sequence[str] = (), smallest: int = 1
) -> dict:
    """Decides how each parameter lies on the mesh.

    Args:
      shapes: nested dict of anything with a shape, in either layout of the blocks.
      mesh: from `mesh.create`.
      rules: "REGEX -> AXES", ahead of the defaults; the first that matches a path
        counts. AXES has for each of the parameter's axes "data", "fsdp", "model",
        several joined by "+", or "-" for none: "head/kernel$ -> -, model". What is
        missing at the end is "-". Of layers under a scan the depth is not counted.
      smallest: parameters of fewer elements (in each layer) are not split over "fsdp".

    Returns:
      Nested dict of NamedSharding.

    Raises:
      UserError: a rule cannot be read or matches nothing, an axis of the mesh does not
        divide what it should split, or it would split nothing at all.
    """
    parsed = [_parse(rule, mesh) for rule in rules]
    leaves = jax.tree.leaves_with_path(shapes)
    paths = [_path(keys) for keys, _ in leaves]
    for rule, pattern, _ in parsed:
        if not any(_matches(pattern, path) for path in paths):
            raise UserError(
                f"sharding.rules: {rule!r} matches none of the {len(paths)} "
                f"parameters, such as {paths[0]}"
            )
    specs = [
        _spec(path, tuple(leaf.shape), mesh, parsed, smallest)
        for path, (_, leaf) in zip(paths, leaves, strict=True)
    ]
    used = {axis for spec in specs for names in spec for axis in _names(names)}
    for axis in ("fsdp", "model"):
        if mesh.shape[axis] > 1 and axis not in used:
            why = (
                "attention heads and MLPs, of which this network has none"
                if axis == "model"
                else f"parameters of at least sharding.smallest={smallest} elements, "
                f"of which there are none among the {len(paths)}"
            )
            raise UserError(
                f"mesh.{axis}={mesh.shape[axis]} splits {why}: set mesh.{axis}=1"
            )
    shardings = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]
    return jax.tree.unflatten(jax.tree.structure(shapes), shardings)


def like(tree: object, params: Mapping) -> object:
    """Gives every array that belongs to a parameter that parameter's sharding.

    Args:
      tree: such as a training state: moments and averages are found by their path,
        which ends as the parameter's, and by having as many axes.
      params: nested dict of NamedSharding, from `parameters`.

    Returns:
      Tree of NamedSharding; a whole copy everywhere for what belongs to none.
    """
    known = {_path(keys): s for keys, s in jax.tree.leaves_with_path(params)}
    whole = NamedSharding(next(iter(known.values())).mesh, PartitionSpec())

    def find(keys, leaf):
        sharding = known.get(_path(keys), whole)
        return sharding if len(sharding.spec) <= len(leaf.shape) else whole

    return jax.tree.map_with_path(find, tree)


@contextlib.contextmanager
def activations(mesh: Mesh) -> Iterator[None]:
    """Lets the models' names for axes of activations mean axes of the mesh.

    Use it within a function that is traced for this mesh.
    """
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        nn.logical_axis_rules(_ACTIVATIONS),
    ):
        yield


def _parse(rule: str, mesh: Mesh) -> tuple[str, str, tuple]:
    """Returns a rule of the user's, its expression, and the names for each axis."""
    pattern, arrow, axes = rule.rpartition("->")
    pattern = pattern.strip()
    form = f"sharding.rules: {rule!r} is not 'REGEX -> AXIS, AXIS' with axes out of "
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
        raise UserError(f"{form}{', '.join(AXES)}: there is no axis {min(unknown)!r}")
    if len(set(flat)) < len(flat):
        raise UserError(f"sharding.rules: {rule!r} names an axis of the mesh twice")
    return rule, pattern, tuple(names)


def _split(entry: str) -> tuple[str, ...]:
    entry = entry.strip()
    return () if entry in ("", "-") else tuple(n.strip() for n in entry.split("+"))


def _spec(
    path: str, shape: tuple[int, ...], mesh: Mesh, rules: Sequence, smallest: int
) -> tuple:
    """Returns what splits each axis of a parameter: None or names."""
    depth = (None,) if _STACKED in path else ()
    shape = shape[len(depth) :]
    for rule, pattern, names in rules:
        if _matches(pattern, path):
            spec = [entry or None for entry in names]
            _check(path, shape, spec, mesh, f"sharding.rules: {rule!r}")
            return (*depth, *spec)
    spec = [None] * len(shape)
    if mesh.shape["model"] > 1:
        for pattern, axes in _MODEL_RULES:
            if re.search(pattern, path):
                spec[: len(axes)] = axes
        _check(path, shape, spec, mesh, f"mesh.model={mesh.shape['model']}")
    fsdp = mesh.shape["fsdp"]
    if fsdp > 1 and math.prod(shape) >= smallest:
        free = [i for i, name in enumerate(spec) if not name and not shape[i] % fsdp]
        if not free and not any(spec):
            raise UserError(
                f"mesh.fsdp={fsdp} divides no axis of {path} {_by(shape)}: set "
                "mesh.fsdp to a number that does, or leave it whole by "
                f"sharding.rules=('{re.escape(path)}$ -> -',)"
            )
        for i in sorted(free, key=lambda i: shape[i])[-1:]:
            spec[i] = "fsdp"
    return (*depth, *spec)


def _check(path, shape, spec, mesh, whose) -> None:
    """Refuses axes that do not divide."""
    if len(spec) > len(shape):
        raise UserError(
            f"{whose} states {len(spec)} axes, but {path} {_by(shape)} has {len(shape)}"
        )
    for length, names in zip(shape, spec, strict=False):
        parts = math.prod(mesh.shape[name] for name in _names(names))
        if length % parts:
            raise UserError(
                f"{whose}: {parts} devices do not divide {length} of {path} "
                f"{_by(shape)}: change the mesh, or what is {length}"
            )


def _matches(pattern: str, path: str) -> bool:
    """Tells whether an expression means a parameter, in either layout."""
    return any(
        re.search(pattern, name) for name in {path, path.replace(_STACKED, _FIRST)}
    )


def _path(keys: tuple) -> str:
    """Names a leaf by its dict keys alone."""
    return "/".join(k.key for k in keys if isinstance(k, jax.tree_util.DictKey))


def _names(entry) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
