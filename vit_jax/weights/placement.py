"""Puts parameters on devices, one array after another."""

from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, Sharding

from vit_jax.distributed import sharding
from vit_jax.distributed.mesh import AXES
from vit_jax.errors import UserError
from vit_jax.models import Model, stacking
from vit_jax.weights.formats import files

Shardings = Mesh | Sharding | Mapping | Callable[[Mapping], Mapping]


def resolve(shardings: Shardings | None, model: Model) -> Mapping | None:
    """Returns the sharding of each parameter of a network, by path; None for None.

    Args:
      shardings: nested dict of shardings, one for each parameter; or a sharding of all;
        or a function that returns such a dict for a nested dict of
        jax.ShapeDtypeStruct; or a mesh, for `sharding.parameters` with its usual rules.
      model: network of the parameters.

    Raises:
      UserError: the shardings do not fit the parameters or the mesh.
    """
    if shardings is None:
        return None
    shapes = model.shapes
    if isinstance(shardings, Mesh):
        shardings = _by_rules(shardings, model)
    elif isinstance(shardings, Sharding):
        shardings = dict.fromkeys(flatten_dict(shapes, sep="/"), shardings)
    elif callable(shardings):
        shardings = shardings(shapes)
    if not isinstance(shardings, Mapping):
        raise UserError(
            f"shardings={shardings!r}: give a mesh, a jax.sharding.Sharding, or a "
            "nested dict of these with the names of the parameters"
        )
    given, wanted = (flatten_dict(dict(tree), sep="/") for tree in (shardings, shapes))
    if wrong := sorted(given.keys() ^ wanted.keys()):
        what = "lacks" if wrong[0] in wanted else "has a needless"
        raise UserError(
            f"shardings {what} entry {wrong[0]}: give one for each of the "
            f"{len(wanted)} parameters"
        )
    return given


def _by_rules(mesh: Mesh, model: Model) -> dict:
    if missing := [axis for axis in AXES if axis not in mesh.axis_names]:
        raise UserError(
            f"mesh with the axes {mesh.axis_names} has no axis {missing[0]!r}: make it "
            "by vit_jax.distributed.mesh.create"
        )
    size = sharding.ShardingConfig().min_size
    axes = model.config.model_axes
    return sharding.parameters(model.shapes, mesh, axes, min_size=size)


def place(
    params: dict, model: Model, shardings: Mapping[str, Sharding] | None = None
) -> dict:
    """Puts each array on its devices, while the host holds one more array at a time.

    Args:
      params: parameters with separate blocks, nested dict of arrays on the host. It is
        emptied, so that each array is freed once it is on its devices, unless the
        caller keeps it elsewhere.
      model: network of the parameters; blocks are stacked if it has a scan.
      shardings: result of `resolve`; None for the default device.

    Returns:
      Nested dict of arrays on devices. Of a file that is mapped, each process reads
      only what its devices hold.
    """
    placed = {}
    for path, value in _arrays(params, stacked=model.config.stacked):
        where = shardings and shardings[path]
        placed[path] = jax.block_until_ready(_put(value, where))
        del value
    return nested(placed)


def nested(by_path: Mapping[str, object]) -> dict:
    """Returns the nested dict of values by path."""
    return unflatten_dict(dict(by_path), sep="/")


def _arrays(params: dict, *, stacked: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Yields parameters by path, stacked for a scan, and frees each afterwards."""
    groups = {}
    for path, value in flatten_dict(params, sep="/").items():
        name, number = stacking.split_path(path) if stacked else (path, None)
        groups.setdefault(name, {})[number] = value
    params.clear()
    del value
    for name in [*groups]:
        parts = groups.pop(name)
        if None in parts:
            yield name, parts[None]
        else:
            yield name, np.stack([parts[i] for i in range(len(parts))])
        for part in parts.values():
            files.release(part)
        del parts, part


def _put(value: np.ndarray, where: Sharding | None) -> jax.Array:
    if where is None:
        return jax.device_put(files.in_memory(value))
    if where.is_fully_replicated:  # One copy on the host for all devices.
        whole = files.in_memory(value)
        return jax.make_array_from_callback(value.shape, where, lambda _: whole)
    return jax.make_array_from_callback(
        value.shape, where, lambda index: files.in_memory(value[index])
    )
