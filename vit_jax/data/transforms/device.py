"""Transforms of a whole batch, run inside the training step.

Every choice for an example is a function of the key and of the example's position in
the run, so that a run does not depend on how its batches are spread over devices.
Mixup and cutmix draw once per batch, from the key and the batch's first position in the
run, so from the step; the neighbour of an example is the one before it in the global
batch, on any number of hosts. Letters: B examples, H and W height and width, h and w
after enlarging, C channels, K classes.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Key, Num, UInt32

from vit_jax.config.fields import key as field
from vit_jax.data.transforms.base import (
    DeviceTransform,
    Given,
    Size,
    check_part,
    pair,
)
from vit_jax.errors import UserError

Images = Num[Array, "B H W C"]
Labels = Float[Array, "B K"]

_ATTEMPTS = 10  # Shapes that random erasing draws for an example.
_GREY = (0.299, 0.587, 0.114)  # Rec. 601, as Pillow's mode L.

_applied = contextvars.ContextVar("applied", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list]:
    """Gives a list to which `apply` adds the operations that it is called with."""
    found = []
    token = _applied.set(found)
    try:
        yield found
    finally:
        _applied.reset(token)


def apply(
    ops: Sequence,
    images: Images,
    labels: Labels,
    index: UInt32[Array, " B"],
    key: Key[Array, ""],
) -> tuple[Float[Array, "B h w C"], Labels]:
    """Applies device operations in order.

    Args:
      ops: `parse_train(...).device`.
      images: values 0..255.
      labels: one-hot or soft.
      index: position of each example in the run, modulo 2**32. The choices repeat
        after 4.3e9 examples; the order of the records does not.
      key: of the run; the same at every step.

    Returns:
      Images, still 0..255 but float32 and enlarged if asked for, and labels.
    """
    for number, op in enumerate(ops):
        images, labels = op(images, labels, index, jax.random.fold_in(key, number))
    if (applied := _applied.get()) is not None:
        applied.extend(ops)
    return images.astype(jnp.float32), labels


def normalize(
    images: Images, mean: Sequence[float], std: Sequence[float]
) -> Float[Array, "B H W C"]:
    """Returns (images / 255 - mean) / std, with one mean and std, or one a channel."""
    # One product and one sum a pixel, with the constants worked out beforehand.
    mean, std = np.asarray(mean, np.float32), np.asarray(std, np.float32)
    factor, offset = 1 / (255 * std), -mean / std
    shape = (1, 1, 1, -1)
    return images.astype(jnp.float32) * factor.reshape(shape) + offset.reshape(shape)


def example_keys(index: UInt32[Array, " B"], key: Key[Array, ""]) -> Key[Array, " B"]:
    """Returns a separate key for each example, by its position in the run."""
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(index)


def example_uniform(
    index: UInt32[Array, " B"], key: Key[Array, ""], count: int
) -> Float[Array, "B {count}"]:
    """Draws `count` numbers in [0, 1) per example, each from the example's key."""
    return jax.vmap(lambda k: jax.random.uniform(k, (count,)))(example_keys(index, key))


def where_drawn(
    p: Given,
    changed: Num[Array, "B H W C"],
    images: Images,
    index: UInt32[Array, " B"],
    key: Key[Array, ""],
) -> Num[Array, "B H W C"]:
    """Returns the changed image of each example with probability p, else the image."""
    if p == 1:
        return changed
    drawn = example_uniform(index, key, 1)[:, 0] < p
    return jnp.where(drawn[:, None, None, None], changed, images)


@dataclasses.dataclass(frozen=True)
class Flip(DeviceTransform):
    """Flips left and right with probability 0.5 per example."""

    def __call__(self, images: Images, labels: Labels, index, key):
        heads = example_uniform(index, key, 1)[:, 0] < 0.5
        return jnp.where(heads[:, None, None, None], images[:, :, ::-1], images), labels


@dataclasses.dataclass(frozen=True)
class PadCrop(DeviceTransform):
    """Shifts by up to `pad` pixels each way: pads with black and crops back."""

    pad: Given = field(4, "Largest shift, in pixels.")

    def __call__(self, images: Images, labels: Labels, index, key):
        _, H, W, _ = images.shape
        u = example_uniform(index, key, 2)
        shift = jnp.floor(u * (2 * self.pad + 1)).astype(jnp.int32) - self.pad
        rows = jnp.arange(H)[None, :] + shift[:, :1]
        columns = jnp.arange(W)[None, :] + shift[:, 1:]
        images = _take(images, rows[:, :, None], columns[:, None, :])
        return images, labels


@dataclasses.dataclass(frozen=True)
class Affine(DeviceTransform):
    """Shifts, rotates and scales about the centre, bilinear, black outside.

    Args:
      scale: smallest and largest factor; over 1 enlarges.
    """

    shift: Given = field(0.0, "Largest shift, as a fraction of height and width.")
    rotate: Given = field(0.0, "Largest turn, in degrees.")
    scale: Given = (1.0, 1.0)

    def __post_init__(self):
        super().__post_init__()
        if len(self.scale) != 2 or not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(f"scale={self.scale} is not 0 < least <= most")

    def __call__(self, images: Images, labels: Labels, index, key):
        _, H, W, _ = images.shape
        u = example_uniform(index, key, 4)
        angle = (2 * u[:, 0] - 1) * math.radians(self.rotate)
        scale = self.scale[0] + u[:, 1] * (self.scale[1] - self.scale[0])
        down = (2 * u[:, 2] - 1) * self.shift * H
        right = (2 * u[:, 3] - 1) * self.shift * W
        return warp(images, angle, scale, down, right), labels


@dataclasses.dataclass(frozen=True)
class Upsample(DeviceTransform):
    """Enlarges to exactly `size` pixels, bilinear with half-pixel centres.

    A set of small images is then stored and transferred small. The loader's images have
    the size of its last crop or resize, or of the set in memory.
    """

    size: Given = None

    def __call__(self, images: Images, labels: Labels, index, key):
        B, H, W, C = images.shape
        height, width = pair(self.size)
        if H > height or W > width:
            raise UserError(
                f"data.train_transform: upsample to {height}x{width} of images that have "
                f"{H}x{W}: end the operations of the loader with resize or a crop"
            )
        images = images.astype(jnp.float32)
        return jax.image.resize(images, (B, height, width, C), "linear"), labels

    def output_size(self, before: Size | None) -> Size:
        return pair(self.size)


@dataclasses.dataclass(frozen=True)
class ColorJitter(DeviceTransform):
    """Changes brightness, contrast, saturation and hue in a random order.

    What each does is as in torchvision's ColorJitter; between them values are cut to
    0..255 but not rounded. Grey images have neither saturation nor hue.

    Args:
      brightness: factors are drawn from 1 - brightness (at least 0) to 1 + brightness.
      contrast: the same, about the image's mean grey.
      saturation: the same, about each pixel's grey.
      hue: largest turn either way; 0.5 is half the circle, where red becomes cyan.
    """

    brightness: Given = field(0.4, "Largest change of the factor.")
    contrast: Given = field(0.4, "Largest change of the factor.")
    saturation: Given = field(0.4, "Largest change of the factor.")
    hue: Given = field(0.0, "Largest turn, as a fraction of the circle.", at_most=0.5)
    p: Given = field(1.0, "Probability for an image.", at_most=1)

    def __call__(self, images: Images, labels: Labels, index, key):
        u = example_uniform(index, key, 8)
        factors = []
        for i, strength in enumerate((self.brightness, self.contrast, self.saturation)):
            least = max(0.0, 1 - strength)
            factors.append(least + u[:, i] * (1 + strength - least))
        order = jnp.argsort(u[:, 4:], axis=1)
        turn = self.hue * (2 * u[:, 3] - 1) if self.hue else None
        changed = jitter(images, *factors, turn, order)
        drawn_by = jax.random.fold_in(key, 1)
        return where_drawn(self.p, changed, images, index, drawn_by), labels


@dataclasses.dataclass(frozen=True)
class RandomErasing(DeviceTransform):
    """Replaces a rectangle of some images by noise or one value (arXiv:1708.04896).

    The ratio is drawn uniformly in its logarithm and a shape that does not fit is
    drawn again, ten times at most, as timm does.

    Args:
      area: smallest and largest part of the image's area.
      ratio: smallest and largest height by width of the part.
      fill: "pixel" for noise, uniform in 0..255 per pixel and channel, or one value
        for all.
    """

    p: Given = field(0.25, "Probability for an image.", at_most=1)
    area: Given = (0.02, 1 / 3)
    ratio: Given = (0.3, 1 / 0.3)
    fill: Given = "pixel"

    def __post_init__(self):
        super().__post_init__()
        check_part(self.area, self.ratio)
        number = type(self.fill) in (int, float) and 0 <= self.fill <= 255
        if self.fill != "pixel" and not number:
            raise ValueError(f"fill={self.fill!r} is not 'pixel' or a number in 0..255")

    def __call__(self, images: Images, labels: Labels, index, key):
        _, H, W, C = images.shape
        inside = self.parts(H, W, index, key)[..., None]
        if self.fill == "pixel":
            # Four values from each number drawn: a quarter of the time.
            words = -(-H * W * C // 4)
            keys = example_keys(index, jax.random.fold_in(key, 1))
            drawn = jax.vmap(lambda k: jax.random.bits(k, (words,), "uint32"))(keys)
            noise = jax.lax.bitcast_convert_type(drawn, jnp.uint8)
            noise = noise.reshape(len(index), -1)[:, : H * W * C]
            noise = noise.reshape(images.shape)
        else:
            noise = jnp.asarray(self.fill)
        return jnp.where(inside, noise.astype(images.dtype), images), labels

    def parts(self, H: int, W: int, index, key):
        """Draws the rectangles to erase: (B, H, W) bool, true inside."""
        u = example_uniform(index, key, 3 + 2 * _ATTEMPTS)
        area = self.area[0] + u[:, 3 : 3 + _ATTEMPTS] * (self.area[1] - self.area[0])
        low, high = map(math.log, self.ratio)
        ratio = jnp.exp(low + u[:, 3 + _ATTEMPTS :] * (high - low))
        h = jnp.round(jnp.sqrt(area * ratio * H * W))
        w = jnp.round(jnp.sqrt(area / ratio * H * W))

        fits = (h < H) & (w < W)
        first = fits.argmax(1, keepdims=True)
        erased = (u[:, 0] < self.p) & fits.any(1)
        inside = erased[:, None, None]
        for axis, length, part in ((0, H, h), (1, W, w)):
            part = jnp.take_along_axis(part, first, axis=1)
            start = jnp.floor(u[:, 1 + axis, None] * (length - part + 1))
            at = jnp.arange(length)[None, :]
            along = (at >= start) & (at < start + part)
            inside &= jnp.expand_dims(along, 2 - axis)
        return inside


@dataclasses.dataclass(frozen=True)
class Mixup(DeviceTransform):
    """Blends each example with its neighbour in the batch (arXiv:1710.09412).

    Args:
      alpha: of the Beta(alpha, alpha) from which one share per batch is drawn.
    """

    mixes_examples = True

    alpha: Given = field(dataclasses.MISSING, "Of Beta(alpha, alpha).", above=0)

    def __call__(self, images: Images, labels: Labels, index, key):
        share = _beta(jax.random.fold_in(key, index[0]), self.alpha)
        return _blend(images.astype(jnp.float32), share), _blend(labels, share)


@dataclasses.dataclass(frozen=True)
class Cutmix(DeviceTransform):
    """Pastes a part of its neighbour into each example (arXiv:1905.04899).

    The labels are weighted by the shares of pixels, counted after the part is cut off
    at the edges of the image.

    Args:
      alpha: of the Beta(alpha, alpha) that the share of pixels an example keeps is
        drawn from, before that cut.
    """

    mixes_examples = True

    alpha: Given = field(1.0, "Of Beta(alpha, alpha).", above=0)

    def __call__(self, images: Images, labels: Labels, index, key):
        kept, share = _cut(jax.random.fold_in(key, index[0]), self.alpha, images)
        neighbour = jnp.roll(images, 1, axis=0)
        return jnp.where(kept, images, neighbour), _blend(labels, share)


@dataclasses.dataclass(frozen=True)
class MixupOrCutmix(DeviceTransform):
    """Applies mixup or cutmix, drawn per batch, as DeiT (arXiv:2012.12877, table 9)."""

    mixes_examples = True

    mixup: Given = field(0.8, "Alpha of mixup.", above=0)
    cutmix: Given = field(1.0, "Alpha of cutmix.", above=0)
    switch: Given = field(0.5, "Probability of cutmix.", at_most=1)

    def __call__(self, images: Images, labels: Labels, index, key):
        key, switch, mixup = jax.random.split(jax.random.fold_in(key, index[0]), 3)
        cuts = jax.random.uniform(switch) < self.switch
        share = _beta(mixup, self.mixup)
        kept, kept_share = _cut(key, self.cutmix, images)
        weight = jnp.where(cuts, kept.astype(jnp.float32), share)
        images = _blend(images.astype(jnp.float32), weight)
        return images, _blend(labels, jnp.where(cuts, kept_share, share))


def warp(
    images: Images,
    angle: Float[Array, " B"],
    scale: Float[Array, " B"],
    down: Float[Array, " B"],
    right: Float[Array, " B"],
) -> Float[Array, "B H W C"]:
    """Rotates and scales images about their centres, then shifts them; bilinear.

    Args:
      images: values of any range; black (0) outside.
      angle: radians, positive from the vertical axis (down) towards the right.
      scale: factor; over 1 enlarges.
      down: shift in pixels.
      right: shift in pixels.
    """
    _, H, W, _ = images.shape
    angle, scale, down, right = (a[:, None, None] for a in (angle, scale, down, right))
    y = (jnp.arange(H) - (H - 1) / 2)[None, :, None] - down
    x = (jnp.arange(W) - (W - 1) / 2)[None, None, :] - right
    # Where each pixel of the result comes from: the inverse of the motion.
    sine, cosine = jnp.sin(angle) / scale, jnp.cos(angle) / scale
    source_y = cosine * y + sine * x + (H - 1) / 2
    source_x = cosine * x - sine * y + (W - 1) / 2

    images = images.astype(jnp.float32)
    top, left = jnp.floor(source_y), jnp.floor(source_x)
    total = jnp.zeros_like(images)
    for row in (top, top + 1):
        for column in (left, left + 1):
            weight = (1 - abs(source_y - row)) * (1 - abs(source_x - column))
            corner = _take(images, row.astype(jnp.int32), column.astype(jnp.int32))
            total += weight[..., None] * corner
    return total


def jitter(
    images: Images,
    brightness: Float[Array, " B"],
    contrast: Float[Array, " B"],
    saturation: Float[Array, " B"],
    hue: Float[Array, " B"] | None,
    order: Num[Array, "B 4"],
) -> Float[Array, "B H W C"]:
    """Changes colours by given amounts.

    Args:
      images: values 0..255.
      brightness: factor; 1 changes nothing.
      contrast: factor.
      saturation: factor.
      hue: turn as a fraction of the circle; None for no change, which saves work.
      order: for each example, which change comes first, second, ...: 0 brightness,
        1 contrast, 2 saturation, 3 hue.
    """
    x = images.astype(jnp.float32)
    wide = lambda a: a[:, None, None, None]
    factors = jnp.stack([brightness, contrast, saturation, jnp.ones_like(contrast)], 1)
    # Each round does for every example whichever change is next for it. The first
    # three are one blend, away from black, from the mean grey or from the pixel's grey.
    for i in range(4):
        now = order[:, i]
        own = grey(x)
        mean = own.mean((1, 2, 3), keepdims=True)
        base = jnp.where(wide(now == 1), mean, own) * wide(now != 0)
        factor = wide(jnp.take_along_axis(factors, now[:, None], axis=1)[:, 0])
        changed = jnp.clip(factor * x + (1 - factor) * base, 0, 255)
        if hue is not None and x.shape[-1] == 3:
            changed = jnp.where(wide(now == 3), turn_hue(x, hue), changed)
        x = changed
    return x


def turn_hue(
    images: Float[Array, "B H W 3"], turn: Float[Array, " B"]
) -> Float[Array, "B H W 3"]:
    """Rotates the hue and keeps saturation and value (of HSV).

    Args:
      images: values from 0.
      turn: fraction of the circle.
    """
    red, green, blue = images[..., 0], images[..., 1], images[..., 2]
    value, least = images.max(-1), images.min(-1)
    chroma = value - least
    safe = jnp.where(chroma > 0, chroma, 1)
    # Not `value == red`: a compiler that works red out twice may round it differently.
    hue = jnp.where(
        (red >= green) & (red >= blue),
        (green - blue) / safe,
        jnp.where(green >= blue, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    hue = hue[..., None] + 6 * turn[:, None, None, None]
    # A channel is full within one sixth of its own hue and gone beyond two.
    place = (hue + jnp.array([5, 3, 1], jnp.float32)[None, None, None, :]) % 6
    short = jnp.clip(jnp.minimum(place, 4 - place), 0, 1)
    return value[..., None] - chroma[..., None] * short


def grey(x: Float[Array, "B H W C"]) -> Float[Array, "B H W 1"]:
    """Returns the grey of each pixel, as Pillow's mode L but not rounded."""
    if x.shape[-1] == 1:
        return x
    weights = jnp.array(_GREY, jnp.float32)[None, None, None, :]
    return (x * weights).sum(-1, keepdims=True)


def _take(images: Images, rows, columns) -> Images:
    """Returns images[b, rows[b], columns[b]], black outside."""
    B, H, W, C = images.shape
    rows, columns = jnp.broadcast_arrays(rows, columns)
    inside = (rows >= 0) & (rows < H) & (columns >= 0) & (columns < W)
    flat = (rows.clip(0, H - 1) * W + columns.clip(0, W - 1)).reshape(B, -1, 1)
    taken = jnp.take_along_axis(images.reshape(B, H * W, C), flat, axis=1)
    taken = taken.reshape(*rows.shape, C)
    return jnp.where(inside[..., None], taken, jnp.zeros((), images.dtype))


def _blend(x: Float[Array, "B ..."], share: Float[Array, "..."]) -> Array:
    return share * x + (1 - share) * jnp.roll(x, 1, axis=0)


def _beta(key: Key[Array, ""], alpha: float) -> Float[Array, ""]:
    return jax.random.beta(key, alpha, alpha, dtype=jnp.float32)


def _cut(
    key: Key[Array, ""], alpha: float, images: Images
) -> tuple[Bool[Array, "1 H W 1"], Float[Array, ""]]:
    """Draws a part; returns which pixels an example keeps, and their share."""
    _, H, W, _ = images.shape
    centre, share = jax.random.split(key)
    side = jnp.sqrt(1 - _beta(share, alpha))  # Of the part, relative to the image.
    inside = []
    u = jax.random.uniform(centre, (2,))
    for length, place in zip((H, W), u, strict=True):
        part = jnp.floor(length * side)
        start = jnp.floor(place * length) - part // 2
        at = jnp.arange(length)
        inside.append((at >= start) & (at < start + part))
    rows, columns = inside
    kept = ~(rows[None, :, None, None] & columns[None, None, :, None])
    return kept, kept.sum().astype(jnp.float32) / (H * W)


TRANSFORMS = {
    "flip": Flip,
    "pad_crop": PadCrop,
    "affine": Affine,
    "color_jitter": ColorJitter,
    "random_erasing": RandomErasing,
    "upsample": Upsample,
    "mixup": Mixup,
    "cutmix": Cutmix,
    "mixup_or_cutmix": MixupOrCutmix,
}
