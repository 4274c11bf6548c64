"""Parses lines of image transforms: "random_resized_crop(224) | flip | mixup(0.2)".

Transforms are separated by bars, and arguments are Python literals, by position or by
name. Host transforms run in the loader, image by image; device transforms run in the
training step, on the batch, and come last. The size of a crop or resize is
`data.image_size` unless given, as one number (224) or as height and width (160, 224).

A user's transform is named with its module: "my_module:MyTransform(0.5) | flip";
base.py describes its interface. `data.transforms` is the result for a config, parsed
once.

A level of AugReg is replaced by RandAugment at its place and mixup after the last
transform: "random_resized_crop | augreg('medium2') | flip" is the same line as
"random_resized_crop | randaugment(2, 15) | flip | mixup(0.5)".
"""

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from vit_jax.config import fields
from vit_jax.data import fields as records
from vit_jax.data.config import DataConfig
from vit_jax.data.fields.base import Spec
from vit_jax.data.fields.image import Image
from vit_jax.data.transforms import DEVICE_TRANSFORMS, HOST_TRANSFORMS, KNOWN
from vit_jax.data.transforms.base import HostTransform, Size, Transform, check_arguments
from vit_jax.errors import UserError

_CUSTOM = re.compile(
    r"(?P<name>[A-Za-z_][\w.]*:[A-Za-z_]\w*)\s*(?P<call>\(.*\))?", re.DOTALL
)


class Transforms(NamedTuple):
    """Transforms to apply in order: first host, then device."""

    host: tuple
    device: tuple

    @property
    def views(self) -> HostTransform | None:
        """The host transform that makes several arrays from an image, or None."""
        return self.host[-1] if self.host and self.host[-1].makes_arrays else None

    @property
    def packs(self) -> int:
        """Number of images that share a row of the arrays in a batch."""
        return self.views.packs if self.views else 1


def parsed(data: DataConfig) -> Transforms:
    """Parses `data.train_transform`, and checks it against the fields of a record.

    Raises:
      UserError: `parse_train` or the `check` of a field raised it.
    """
    transforms = parse_train(data.train_transform, data.image_size)
    records.check_ops((*transforms.host, *transforms.device), data)
    return transforms


def parse_train(spec: str, image_size: Sequence[int]) -> Transforms:
    """Parses `data.train_transform`.

    Args:
      spec: line of transforms.
      image_size: default height and width in pixels.

    Raises:
      UserError: a transform or an argument is unknown; a host transform comes after a
        device transform, or after one that returns several arrays; two transforms mix
        examples; or images are enlarged to another size than `image_size`.
    """
    parse = lambda text: _parse("data.train_transform", text, image_size)
    before, device, last = [], [], []
    for name, transform in parse(spec):
        if transform.runs_on == "device":
            device.append(transform)
        elif device:
            raise UserError(
                f"data.train_transform={spec!r}: {name} runs in the loader, so it must stand "
                f"before {', '.join(DEVICE_TRANSFORMS)}, which run on the device"
            )
        elif transform.expand:
            here, at_end = map(parse, transform.expand())
            before += [each for _, each in here]
            last += [each for _, each in at_end]
        else:
            before.append(transform)
    _check_host(spec, before)
    device += last
    _check_device(spec, device, image_size)
    return Transforms(tuple(before), tuple(device))


def loaded(
    transforms: Transforms, data: DataConfig, in_memory: Size | None = None
) -> dict[str, Spec]:
    """Returns shape and dtype of the arrays that the loader makes from an image.

    Args:
      transforms: parsed transforms.
      data: `config.data`.
      in_memory: height and width of images that are in memory, else None.

    Raises:
      UserError: images are enlarged on the device, but the host transforms do not end
        in a fixed size.
    """
    if transforms.views:
        return transforms.views.specs(data.channels, data.pixels)
    size, image = tuple(data.image_size), Image(data)
    resizing = [op for op in transforms.device if op.output_size]
    if resizing:
        size = size_after(transforms.host, in_memory and tuple(in_memory))
    if size is None:
        raise UserError(
            f"data.train_transform: {_name(resizing[0])} needs images of one size: put "
            "resize or a crop, such as resize(32), before it and before the other "
            "operations on the device"
        )
    return {"image": image.spec(size)}


def in_words(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Describes shapes for a message: "224x224x3", or "image of 2x224x224x3, ..."."""
    texts = {name: "x".join(map(str, shape)) for name, shape in shapes.items()}
    if texts.keys() == {"image"}:
        return texts["image"]
    return ", ".join(f"{name} of {text}" for name, text in texts.items())


def check_batch(spec: Mapping[str, object], data: DataConfig) -> None:
    """Raises UserError unless the loader makes the arrays of a task's `batch_spec`."""
    records.check(spec, data)
    before = Transforms(data.transforms.host, ())  # The device may enlarge images.
    made = {name: shape for name, (shape, _) in loaded(before, data).items()}
    others = records.names(data)
    wanted = {k: v.shape[1:] for k, v in spec.items() if k not in others}
    dims = {name: len(shape) for name, shape in made.items()}
    if any(len(shape) != dims.get(name) for name, shape in wanted.items()):
        raise UserError(
            f"data.train_transform={data.train_transform!r} makes {in_words(made)}, but "
            f"this task takes {in_words(wanted)}: change its last operation of the loader"
        )


def parse_eval(spec: str, image_size: Sequence[int]) -> tuple:
    """Parses `data.eval_transform`: host transforms without random choices."""
    parsed = _parse("data.eval_transform", spec, image_size)
    for name, transform in parsed:
        if not _in_eval(transform):
            known = (key for key, cls in HOST_TRANSFORMS.items() if _in_eval(cls))
            raise UserError(
                f"data.eval_transform={spec!r}: {name} is for training only; "
                f"transforms without random choices are {', '.join(known)}, and those "
                "of your modules with in_eval = True"
            )
    return tuple(transform for _, transform in parsed)


def filter_of(spec: str, image_size: Sequence[int]) -> str:
    """Returns the resize filter of `data.eval_transform`; "" if unknown."""
    if names_custom(spec):
        return ""
    ops = parse_eval(spec, image_size)
    return next((op.interpolation for op in ops if hasattr(op, "interpolation")), "")


def names_custom(spec: str) -> bool:
    """Returns whether a line has a transform of a user's module; imports nothing."""
    return any(_CUSTOM.fullmatch(part.strip()) for part in spec.split("|"))


def _in_eval(transform: Transform | type[Transform]) -> bool:
    if transform.runs_on != "host" or not transform.in_eval:
        return False
    # Evaluations read one image, or its patches.
    return not transform.makes_arrays or bool(transform.numbers)


def size_after(transforms: Iterable[Transform], size: Size | None) -> Size | None:
    """Returns height and width after some transforms; None if they are not fixed."""
    for transform in transforms:
        if transform.output_size:
            size = transform.output_size(size)
    return size


def _check_host(spec: str, host: list) -> None:
    for transform in host[:-1]:
        if transform.makes_arrays:
            raise UserError(
                f"data.train_transform={spec!r}: {_name(transform)} returns several "
                "arrays, so it must be the last transform that runs in the loader"
            )
    for transform in host[-1:]:
        shapes = transform.output_shapes(3) if transform.makes_arrays else ["image"]
        if "image" not in shapes or set(shapes) & set(records.RESERVED):
            raise UserError(
                f"data.train_transform={spec!r}: {_name(transform)} returns "
                f"{', '.join(shapes)}: one array must be called image, and no array "
                f"{', '.join(records.RESERVED)}"
            )


def _check_device(spec: str, device: list, image_size: Sequence[int]) -> None:
    if sum(op.mixes_examples for op in device) > 1:
        raise UserError(
            f"data.train_transform={spec!r} mixes examples twice: keep one of mixup, cutmix, "
            "mixup_or_cutmix and a level of augreg that has mixup"
        )
    size = size_after(device, None)
    if size is not None and size != tuple(image_size):
        raise UserError(
            f"data.train_transform={spec!r} enlarges images to {size}, but data.image_size "
            f"is {tuple(image_size)}: make them equal"
        )


def _name(transform: Transform) -> str:
    return type(getattr(transform, "transform", transform)).__name__.lower()


def _parse(key: str, spec: str, image_size: Sequence[int]) -> list[tuple[str, object]]:
    parts = [part.strip() for part in spec.split("|")] if spec.strip() else []
    return [_parse_one(key, spec, part, image_size) for part in parts]


def _parse_one(
    key: str, spec: str, part: str, image_size: Sequence[int]
) -> tuple[str, object]:
    where, custom = f"{key}={spec!r}", _CUSTOM.fullmatch(part)
    try:
        # A name with a colon is not a Python expression, so "called" replaces it.
        text = f"called{custom['call'] or ''}" if custom else part
        node = ast.parse(text, mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        name = custom["name"] if custom else call.func.id
        args = [ast.literal_eval(arg) for arg in call.args]
        named = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, AttributeError, TypeError) as error:
        raise UserError(
            f"{where}: cannot read {part!r}; write for example "
            "'random_resized_crop(224) | flip'"
        ) from error
    if custom:
        from vit_jax.data.transforms.custom import CustomTransform, find

        cls = find(name, key)
        with fields.guarded(f"{where}: {name}"):
            made = _make(where, name, cls, args, named, image_size)
        return name, CustomTransform(f"{where}: {name}", made)
    if name not in KNOWN:
        raise UserError(
            f"{where}: unknown operation {name!r}; known are {', '.join(KNOWN)}, and "
            "your transforms, as my_module:MyTransform"
        )
    return name, _make(where, name, KNOWN[name], args, named, image_size)


def _make(
    where: str,
    name: str,
    cls: type,
    args: list,
    named: Mapping[str, object],
    image_size: Sequence[int],
) -> object:
    """Builds a transform from its arguments, and checks their bounds."""
    try:
        given = inspect.signature(cls).bind(*args, **named).arguments
        names = [field.name for field in dataclasses.fields(cls)]
        if "size" in names and given.get("size") is None and not given.get("sizes"):
            given["size"] = tuple(image_size)
        made = cls(**given)
        check_arguments(made)
    except (TypeError, ValueError, IndexError) as error:
        raise UserError(f"{where}: {error}; it is {usage(name, cls)}") from error
    return made


def usage(name: str, cls: type) -> str:
    """Returns how a transform is written, with its defaults: "flip()"."""
    empty = inspect.Parameter.empty
    parameters = inspect.signature(cls).parameters.values()
    texts = [str(parameter.replace(annotation=empty)) for parameter in parameters]
    return f"{name}({', '.join(texts)})"
