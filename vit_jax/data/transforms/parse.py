"""Image transforms as a readable line: "random_resized_crop(224) | flip | mixup(0.2)".

Transforms stand between bars and take Python literals, by position or by name. Host
transforms run in the loader, image by image; device transforms run in the training step, on
the batch, and come last. The size of a crop or
resize is `data.image_size` unless given, as 224 or as (160, 224).

A user's transform is named with its module: "my_module:MyTransform(0.5) | flip"; base.py
describes its interface.

A level of AugReg, "random_resized_crop | augreg('medium2') | flip", is RandAugment in its place
and mixup after the last transform: "... | randaugment(2, 15) | flip | mixup(0.5)".
"""

import ast
import collections
import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from vit_jax.config import fields
from vit_jax.data import fields as records
from vit_jax.data.config import DataConfig
from vit_jax.data.decode import DamagedImage
from vit_jax.data.transforms import DEVICE_TRANSFORMS, HOST_TRANSFORMS
from vit_jax.data.transforms.base import Size, TooSmall, Transform, check_arguments
from vit_jax.errors import UserError

_KNOWN = collections.ChainMap(DEVICE_TRANSFORMS, HOST_TRANSFORMS)
_CUSTOM = re.compile(
    r"(?P<name>[A-Za-z_][\w.]*:[A-Za-z_]\w*)\s*(?P<call>\(.*\))?", re.DOTALL
)


class Transforms(NamedTuple):
    """Transforms to apply in order: first host, then device."""

    host: tuple
    device: tuple


@dataclasses.dataclass(frozen=True)
class CustomTransform:
    """A transform of the user's module, whose errors begin with `where`.

    It has the attributes of `transform`, or else those of `Transform`.
    """

    from_file: ClassVar[None] = None  # Its errors could not be told from ours.

    where: str
    transform: object

    def __getattr__(self, name):
        if name.startswith("__"):  # Pickle asks for some before there is a transform.
            raise AttributeError(name)
        owner = self.transform if hasattr(self.transform, name) else Transform
        return getattr(owner, name)

    def __call__(self, image, *args):
        if self.runs_on == "host":
            image = image.view()  # A set in memory would be changed for good.
            image.flags.writeable = False
        known = (DamagedImage, TooSmall)
        with fields.guarded(self.where, known=known):
            result = self.transform(image, *args)
            if self.runs_on == "device":
                return self._checked_batch(result, *args)
            # Masks are int16.
            self._check_host(result, np.int16 if image.dtype == np.int16 else np.uint8)
            return result

    def apart(self, copies: int) -> "CustomTransform":
        if not hasattr(self.transform, "apart"):
            return self
        return CustomTransform(self.where, self.transform.apart(copies))

    def _check_host(self, result, dtype: type) -> None:
        several = self.output_shapes is not None
        named = result if isinstance(result, dict) else {"image": result}
        arrays = list(named.values())
        good = all(
            isinstance(a, np.ndarray)
            and a.dtype == (np.int32 if name in self.numbers else dtype)
            for name, a in named.items()
        )
        if good and (isinstance(result, dict) if several else arrays[0].ndim == 3):
            return
        kinds = [f"{getattr(a, 'dtype', type(a))} {np.shape(a) or ''}" for a in arrays]
        wanted = (
            "a dict of uint8 arrays (int32 of `numbers`), as `output_shapes`"
            if several
            else f"{np.dtype(dtype)} (H, W, C)"
        )
        raise UserError(f"{self.where} returned {', '.join(kinds)}, not {wanted}")

    def _checked_batch(self, result, labels, *_) -> tuple:
        shapes = [getattr(array, "shape", ()) for array in result]
        if [len(shape) for shape in shapes] != [4, 2] or shapes[1] != labels.shape:
            raise UserError(
                f"{self.where} returned arrays of the shapes {shapes}, not images "
                f"(B, H, W, C) and labels {labels.shape}"
            )
        return tuple(result)


def parse_train(spec: str, image_size: Sequence[int]) -> Transforms:
    """Parses `data.train_transform`; `image_size` is the default height and width in pixels.

    Raises:
      UserError: unknown transform or argument, a host after a device transform, one
        after a transform that returns several arrays, two that mix examples, or an
        enlargement to another size than the image's.
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


def loaded_shapes(
    transforms: Transforms,
    image_size: Sequence[int],
    channels: int,
    in_memory: Size | None = None,
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the arrays that the loader makes of a training image.

    `in_memory` are height and width of the images of a source that holds them.

    Raises:
      UserError: images are enlarged on the device, but the host transforms end in no
        fixed size.
    """
    if transforms.host and transforms.host[-1].output_shapes:
        shapes = transforms.host[-1].output_shapes(channels)
        return {name: tuple(shape) for name, shape in shapes.items()}
    resizing = [op for op in transforms.device if op.output_size]
    if not resizing:
        return {"image": (*image_size, channels)}
    size = _size_after(transforms.host, None if in_memory is None else tuple(in_memory))
    if size is None:
        raise UserError(
            f"data.train_transform: {_name(resizing[0])} needs images of one size: put before it, "
            "and before the other operations on the device, resize or a crop, as "
            "resize(32)"
        )
    return {"image": (*size, channels)}


def packs(data: DataConfig) -> int:
    """Returns the number of training images that share a row of a batch's arrays."""
    host = parse_train(data.train_transform, data.image_size).host
    return host[-1].packs if host else 1


def in_words(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Returns shapes for a message: "224x224x3", or "image of 2x224x224x3, ..."."""
    texts = {name: "x".join(map(str, shape)) for name, shape in shapes.items()}
    if texts.keys() == {"image"}:
        return texts["image"]
    return ", ".join(f"{name} of {text}" for name, text in texts.items())


def check_batch(spec: Mapping[str, object], data: DataConfig) -> None:
    """Checks that the loader makes the arrays of a task's `batch_spec`; else raises UserError."""
    records.check(spec, data)
    transforms = parse_train(data.train_transform, data.image_size)
    check_masks((*transforms.host, *transforms.device), data)
    views = Transforms(transforms.host, ())  # The device may enlarge them.
    made = loaded_shapes(views, data.image_size, data.channels)
    others = records.names(data)
    wanted = {k: v.shape[1:] for k, v in spec.items() if k not in others}
    dims = {name: len(shape) for name, shape in made.items()}
    if any(len(shape) != dims.get(name) for name, shape in wanted.items()):
        raise UserError(
            f"data.train_transform={data.train_transform!r} makes {in_words(made)}, but "
            f"this task takes {in_words(wanted)}: change its last operation of the loader"
        )


def check_bands(
    ops: Iterable[Transform], data: DataConfig, where: str = "data.train_transform"
) -> None:
    """Raises UserError if a transform of colours would get other bands, or more depth."""
    for op in ops:
        if not op.on_colors:
            continue
        name = f"{_where(op, where)} changes colours"
        if data.channels not in (1, 3):
            raise UserError(
                f"{name}, and data.channels={data.channels} is neither 1 nor 3: remove it"
            )
        if op.runs_on == "host" and data.pixels != "uint8":
            raise UserError(
                f"{name} of 8 bits, and data.pixels={data.pixels!r}: remove it, or set "
                "--config.data.pixels=uint8"
            )


def check_masks(ops: Iterable[Transform], data: DataConfig) -> None:
    """Raises UserError if masks are read and a transform cannot act on them.

    A transform of colours that moves no pixels changes the images only.
    """
    for op in ops if data.mask_key else ():
        if not (op.moves_masks if op.moves_pixels else op.on_colors):
            known = _KNOWN.items()
            acting = ", ".join(
                name for name, cls in known if cls.moves_pixels and cls.moves_masks
            )
            raise UserError(
                f"{_where(op, 'data.train_transform')} does not act on masks, and "
                f"data.mask_key={data.mask_key!r}: remove it; {acting} do, and those of "
                "colours that move no pixels change the images only"
            )


def parse_eval(spec: str, image_size: Sequence[int]) -> tuple:
    """Parses `data.eval_transform`, host transforms without randomness, see `parse_train`."""
    parsed = _parse("data.eval_transform", spec, image_size)
    for name, transform in parsed:
        if not _in_eval(transform):
            known = (key for key, cls in HOST_TRANSFORMS.items() if _in_eval(cls))
            raise UserError(
                f"data.eval_transform={spec!r}: {name} is for training only; without random "
                f"choices and known here are {', '.join(known)}, and of yours those with "
                "in_eval = True"
            )
    return tuple(transform for _, transform in parsed)


def filter_of(data: DataConfig) -> str:
    """Returns the filter by which `data.eval_transform` resizes; "" if none is known."""
    if names_custom(data.eval_transform):
        return ""
    ops = parse_eval(data.eval_transform, data.image_size)
    return next((op.interpolation for op in ops if hasattr(op, "interpolation")), "")


def names_custom(spec: str) -> bool:
    """Returns whether a line names a transform of the user's; imports nothing."""
    return any(_CUSTOM.fullmatch(part.strip()) for part in spec.split("|"))


def _in_eval(transform: Transform | type[Transform]) -> bool:
    # Evaluations read one image, or its patches.
    one = not transform.output_shapes or bool(transform.numbers)
    return transform.runs_on == "host" and bool(transform.in_eval) and one


def all_transforms() -> dict[str, type]:
    """Returns every transform of this package by its name; imports them all."""
    return dict(_KNOWN)


def _size_after(transforms: Iterable[Transform], size: Size | None) -> Size | None:
    """Returns height and width after some transforms; None if they are not fixed."""
    for transform in transforms:
        if transform.output_size:
            size = transform.output_size(size)
    return size


def _check_host(spec: str, host: list) -> None:
    for transform in host[:-1]:
        if transform.output_shapes:
            raise UserError(
                f"data.train_transform={spec!r}: {_name(transform)} returns several "
                "arrays, so it must be the last of those that run in the loader"
            )
    for transform in host[-1:]:
        shapes = transform.output_shapes(3) if transform.output_shapes else ["image"]
        if "image" not in shapes or set(shapes) & set(records.RESERVED):
            raise UserError(
                f"data.train_transform={spec!r}: {_name(transform)} returns "
                f"{', '.join(shapes)}: one array must be called image, and none "
                f"{', '.join(records.RESERVED)}"
            )


def _check_device(spec: str, device: list, image_size: Sequence[int]) -> None:
    if sum(op.mixes_examples for op in device) > 1:
        raise UserError(
            f"data.train_transform={spec!r} mixes examples twice: keep one of mixup, cutmix, "
            "mixup_or_cutmix and a level of augreg that has mixup"
        )
    size = _size_after(device, None)
    if size is not None and size != tuple(image_size):
        raise UserError(
            f"data.train_transform={spec!r} enlarges images to {size}, but data.image_size "
            f"is {tuple(image_size)}: make them equal"
        )


def _where(transform: Transform, key: str) -> str:
    """Returns the key and the name of a transform for a message."""
    if isinstance(transform, CustomTransform):
        return transform.where
    names = {cls: name for name, cls in _KNOWN.items()}
    return f"{key}: {names[type(transform)]}"


def _name(transform: Transform) -> str:
    custom = isinstance(transform, CustomTransform)
    return type(transform.transform if custom else transform).__name__.lower()


def _parse(key: str, spec: str, image_size: Sequence[int]) -> list[tuple[str, object]]:
    parts = [part.strip() for part in spec.split("|")] if spec.strip() else []
    return [_parse_one(key, spec, part, image_size) for part in parts]


def _parse_one(
    key: str, spec: str, part: str, image_size: Sequence[int]
) -> tuple[str, object]:
    where, custom = f"{key}={spec!r}", _CUSTOM.fullmatch(part)
    try:
        # A module's name is no Python expression, so "called" stands for it.
        text = f"called{custom['call'] or ''}" if custom else part
        node = ast.parse(text, mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        name = custom["name"] if custom else call.func.id
        args = [ast.literal_eval(arg) for arg in call.args]
        named = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, AttributeError, TypeError) as error:
        raise UserError(
            f"{where}: cannot read {part!r}; write as 'random_resized_crop(224) | flip'"
        ) from error
    if custom:
        cls = _import(name, key)
        with fields.guarded(f"{where}: {name}"):
            made = _make(where, name, cls, args, named, image_size)
        return name, CustomTransform(f"{where}: {name}", made)
    if name not in _KNOWN:
        raise UserError(
            f"{where}: unknown operation {name!r}; known here are {', '.join(_KNOWN)}, "
            "and my_module:MyTransform"
        )
    return name, _make(where, name, _KNOWN[name], args, named, image_size)


def _import(name: str, key: str) -> type:
    cls = fields.import_custom(name, key)
    is_class = isinstance(cls, type) and dataclasses.is_dataclass(cls)
    if not is_class or getattr(cls, "runs_on", None) not in ("host", "device"):
        raise UserError(
            f"{key}={name!r} is {cls!r}: it must be a frozen dataclass with "
            'runs_on = "host" or "device", see vit_jax/data/transforms/base.py'
        )
    return cls


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
