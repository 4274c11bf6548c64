"""Image transforms as a readable line: "inception_crop(224) | flip | mixup(0.2)".

Operations stand between bars and take Python literals, by position or by name. Host
operations (`host_ops.py`) run in the loader, image by image; device operations
(`device_ops.py`) run in the training step, on the batch, and come last. The size of
a crop or resize is `data.image_size` unless given, as 224 or as (160, 224).
"""

import ast
import dataclasses
import inspect
from collections.abc import Sequence
from typing import NamedTuple

from vit_jax.data import host_ops
from vit_jax.errors import UserError


class Ops(NamedTuple):
    """Operations to apply in order: first host, then device."""

    host: tuple
    device: tuple


def parse_train(spec: str, image_size: Sequence[int]) -> Ops:
    """Parses `data.ops`.

    Args:
      spec: operations between bars; "" is none.
      image_size: default height and width in pixels.

    Raises:
      UserError: unknown operation or argument, or a host after a device operation.
    """
    # Only here, so that loader processes start without JAX.
    from vit_jax.data.device_ops import DEVICE_OPS

    known = {**host_ops.HOST_OPS, **DEVICE_OPS}
    parsed = _parse("data.ops", spec, known, image_size)
    host, device = [], []
    for name, op in parsed:
        if name in DEVICE_OPS:
            device.append(op)
        elif device:
            raise UserError(
                f"data.ops={spec!r}: {name} runs in the loader, so it must stand "
                f"before {', '.join(DEVICE_OPS)}, which run on the device"
            )
        else:
            host.append(op)
    return Ops(tuple(host), tuple(device))


def parse_eval(spec: str, image_size: Sequence[int]) -> tuple:
    """Parses `data.eval_ops`, which holds host operations without randomness.

    Args and Raises: as `parse_train`.
    """
    known = {name: host_ops.HOST_OPS[name] for name in host_ops.EVAL_OPS}
    return tuple(op for _, op in _parse("data.eval_ops", spec, known, image_size))


def _parse(key: str, spec: str, known: dict, image_size: Sequence[int]) -> list[tuple]:
    parts = [part.strip() for part in spec.split("|")] if spec.strip() else []
    return [_parse_one(f"{key}={spec!r}", part, known, image_size) for part in parts]


def _parse_one(
    where: str, part: str, known: dict, image_size: Sequence[int]
) -> tuple[str, object]:
    try:
        node = ast.parse(part, mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        name = call.func.id
        args = [ast.literal_eval(arg) for arg in call.args]
        named = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, AttributeError, TypeError) as error:
        raise UserError(
            f"{where}: cannot read {part!r}; write as 'inception_crop(224) | flip'"
        ) from error
    if name not in known:
        raise UserError(
            f"{where}: unknown operation {name!r}; known here are {', '.join(known)}"
        )
    op = known[name]
    try:
        given = inspect.signature(op).bind(*args, **named).arguments
        fields = [field.name for field in dataclasses.fields(op)]
        if "size" in fields and given.get("size") is None:
            given["size"] = tuple(image_size)
        return name, op(**given)
    except (TypeError, ValueError, IndexError) as error:
        usage = f"{name}({', '.join(_parameters(op))})"
        raise UserError(f"{where}: {error}; it is {usage}") from error


def _parameters(op: type) -> list[str]:
    empty = inspect.Parameter.empty
    parameters = inspect.signature(op).parameters.values()
    return [str(parameter.replace(annotation=empty)) for parameter in parameters]
