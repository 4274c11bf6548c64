"""Image transforms as a readable line: "inception_crop(224) | flip | mixup(0.2)".

Operations stand between bars and take Python literals, by position or by name. Host
operations (`host_ops.py`) run in the loader, image by image; device operations
(`device_ops.py`) run in the training step, on the batch, and come last. The size of
a crop or resize is `data.image_size` unless given, as 224 or as (160, 224).

A level of AugReg, "inception_crop | augreg('medium2') | flip", is RandAugment where it
stands and mixup after the last operation: "... | randaugment(2, 15) | flip |
mixup(0.5)".
"""

import ast
import dataclasses
import inspect
from collections.abc import Sequence
from typing import NamedTuple

from vit_jax.data import host_ops
from vit_jax.data.randaugment import LEVELS, AugReg, RandAugment
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
      UserError: unknown operation or argument, a host after a device operation, two
        that mix examples, or an enlargement to another size than the image's.
    """
    # Only here, so that loader processes start without JAX.
    from vit_jax.data.device_ops import DEVICE_OPS

    known = {**host_ops.HOST_OPS, **DEVICE_OPS}
    parsed = _parse("data.ops", spec, known, image_size)
    host, device, last = [], [], []
    for name, op in parsed:
        if name in DEVICE_OPS:
            device.append(op)
        elif device:
            raise UserError(
                f"data.ops={spec!r}: {name} runs in the loader, so it must stand "
                f"before {', '.join(DEVICE_OPS)}, which run on the device"
            )
        elif isinstance(op, AugReg):
            level = LEVELS[op.level]
            if level.layers:
                host.append(RandAugment(level.layers, level.magnitude))
            if level.alpha:
                last.append(DEVICE_OPS["mixup"](level.alpha))
        else:
            host.append(op)
    device += last
    _check_device(spec, device, image_size)
    return Ops(tuple(host), tuple(device))


def loaded_size(
    ops: Ops, image_size: Sequence[int], in_memory: Sequence[int] | None = None
) -> tuple[int, int]:
    """Returns the height and width that the loader makes of the training images.

    It is `image_size` unless the device enlarges them.

    Args:
      ops: `parse_train(...)`.
      image_size: `data.image_size`.
      in_memory: height and width of the images of a source that holds them.

    Raises:
      UserError: images are enlarged, but nothing says from which size.
    """
    from vit_jax.data.device_ops import Upsample

    if not any(isinstance(op, Upsample) for op in ops.device):
        return tuple(image_size)
    sized = (op for op in reversed(ops.host) if not isinstance(op, RandAugment))
    last = next(sized, None)
    if last is None and in_memory is not None:
        return tuple(in_memory)
    if last is None or isinstance(last, host_ops.ResizeSmall):
        raise UserError(
            "data.ops: upsample needs images of one size: put before it, and before "
            "the other operations on the device, resize or a crop, as resize(32)"
        )
    return host_ops.pair(last.size)


def parse_eval(spec: str, image_size: Sequence[int]) -> tuple:
    """Parses `data.eval_ops`, which holds host operations without randomness.

    Args and Raises: as `parse_train`.
    """
    known = {name: host_ops.HOST_OPS[name] for name in host_ops.EVAL_OPS}
    return tuple(op for _, op in _parse("data.eval_ops", spec, known, image_size))


def _check_device(spec: str, device: list, image_size: Sequence[int]) -> None:
    from vit_jax.data.device_ops import Upsample
    from vit_jax.data.mixing import MIXING

    if sum(isinstance(op, MIXING) for op in device) > 1:
        raise UserError(
            f"data.ops={spec!r} mixes examples twice: keep one of mixup, cutmix, "
            "mixup_or_cutmix and a level of augreg that has mixup"
        )
    sizes = [host_ops.pair(op.size) for op in device if isinstance(op, Upsample)]
    if sizes and sizes[-1] != tuple(image_size):
        raise UserError(
            f"data.ops={spec!r} enlarges images to {sizes[-1]}, but data.image_size "
            f"is {tuple(image_size)}: make them equal"
        )


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
