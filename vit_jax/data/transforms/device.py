"""Transforms of a whole batch, run inside the training step.

Every choice for an example is a function of the key and of the example's position in
the run, so that a run does not depend on how its batches are spread over devices.
Mixup and cutmix draw once per batch, from the key and the batch's first position in the
run, so from the step; the neighbour of an example is the one before it in the global
batch, on any number of hosts, or before the copies of its image (`data.repeats`).
Grayscale, blur, solarize and colour jitter are the colour augmentations of BYOL
(arXiv:2006.07733, appendix B) and DINO; values are not rounded between them. Letters: B
examples, H and W height and width, h and w after enlarging, C channels, K classes.
"""

import contextlib
import contextvars
import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int16, Key, Num, UInt8, UInt32

from vit_jax.config.fields import key as field
from vit_jax.data import imagenet
from vit_jax.data.transforms import photometric
from vit_jax.data.transforms.base import (
    DeviceTransform,
    Given,
    check_part,
    check_range,
    pair,
    to_size,
)
from vit_jax.data.transforms.photometric import Images, PerImage
from vit_jax.errors import UserError

Labels = Float[Array, "B K"]

_ATTEMPTS = 10  # Shapes that random erasing draws for an example.
_REACH = 4  # Standard deviations to each side: less than a grey level lies beyond.

_applied = contextvars.ContextVar("applied", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list]:
    """Yields a list to which `apply` adds the transforms that it is called with."""
    applied = []
    token = _applied.set(applied)
    try:
        yield applied
    finally:
        _applied.reset(token)


def apart(ops: Sequence, copies: int) -> tuple:
    """Returns transforms for batches with so many successive copies of each image."""
    return tuple(op.apart(copies) for op in ops)


def apply(
    ops: Sequence,
    images: Images,
    labels: Labels,
    index: UInt32[Array, " B"],
    key: Key[Array, ""],
) -> tuple[Float[Array, "B h w C"], Labels]:
    """Applies device transforms in order.

    Args:
      ops: `parse_train(...).device`.
      images: values 0..255, or uint16.
      labels: one-hot or soft.
      index: position of each example in the run, modulo 2**32. The choices repeat
        after 4.3e9 examples; the order of the records does not.
      key: random key, the same at every step.

    Returns:
      Images, still 0..255 but float32 and perhaps enlarged, and labels.
    """
    images = _levels(images)
    for number, op in enumerate(ops):
        images, labels = op(images, labels, index, jax.random.fold_in(key, number))
    if (applied := _applied.get()) is not None:
        applied.extend(ops)
    return images.astype(jnp.float32), labels


def apply_to_maps(
    ops: Sequence,
    maps: Int16[Array, "B H W"],
    index: UInt32[Array, " B"],
    key: Key[Array, ""],
) -> Int16[Array, "B h w"]:
    """Moves the pixels of label maps as `apply` moves those of their images.

    Transforms that change colours alone are left out. Class numbers are not mixed: where
    pixels of an image are interpolated, the nearest is taken.

    Args:
      ops, index, key: as given to `apply` with the images.
      maps: class numbers; IGNORED, -1, where a pixel counts for no class, as those do that
        come from outside of the image.
    """
    maps = (maps + 1)[..., None]  # Black, 0, counts for no class.
    labels = jnp.zeros((len(index), 1))
    for number, op in enumerate(ops):
        if op.moves_pixels:
            maps, _ = op(maps, labels, index, jax.random.fold_in(key, number))
    return maps[..., 0] - 1


def _levels(images: Images) -> Images:
    """Returns images of 16 bits as floats from 0 to 255."""
    if images.dtype != jnp.uint16:
        return images
    return images.astype(jnp.float32) * np.float32(1 / 257)


def normalize(
    images: Images, mean: Sequence[float], std: Sequence[float]
) -> Float[Array, "B H W C"]:
    """Returns (images / 255 - mean) / std, with one mean and std, or one per channel.

    Images of uint16 are divided by 65,535.
    """
    images = _levels(images)
    # One product and one sum per pixel; the constants are computed beforehand.
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

    moves_pixels = True

    def __call__(self, images: Images, labels: Labels, index, key):
        heads = example_uniform(index, key, 1)[:, 0] < 0.5
        return jnp.where(heads[:, None, None, None], images[:, :, ::-1], images), labels


@dataclasses.dataclass(frozen=True)
class PadCrop(DeviceTransform):
    """Shifts by up to `pad` pixels each way: pads with black and crops back."""

    moves_pixels = True

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
    """Shifts, rotates and scales (by `scale`, smallest and largest) about the centre.

    Pixels are bilinear, and black outside.
    """

    moves_pixels = True

    shift: Given = field(0.0, "Largest shift, as a fraction of height and width.")
    rotate: Given = field(0.0, "Largest turn, in degrees.")
    scale: Given = (1.0, 1.0)

    def __post_init__(self):
        super().__post_init__()
        check_range("scale", self.scale)

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

    moves_pixels = True
    output_size = to_size

    size: Given = None

    def __call__(self, images: Images, labels: Labels, index, key):
        B, H, W, C = images.shape
        height, width = pair(self.size)
        if H > height or W > width:
            raise UserError(
                f"data.train_transform: upsample to {height}x{width} of images that have "
                f"{H}x{W}: end the operations of the loader with resize or a crop"
            )
        how = "nearest"
        if images.dtype != jnp.int16:
            images, how = images.astype(jnp.float32), "linear"
        return jax.image.resize(images, (B, height, width, C), how), labels


@dataclasses.dataclass(frozen=True)
class ColorJitter(DeviceTransform):
    """Changes brightness, contrast, saturation and hue in a random order.

    Each change is that of torchvision's ColorJitter; between them values are cut to 0..255
    but not rounded. Factors are drawn from 1 - strength (at least 0) to 1 + strength. Contrast
    is about the image's mean grey, saturation about each pixel's grey; a hue of 0.5 is half
    the circle, where red becomes cyan. Grey images have neither saturation nor hue.
    """

    on_colors = True

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
        changed = photometric.jitter(images, *factors, turn, order)
        key = jax.random.fold_in(key, 1)
        return where_drawn(self.p, changed, images, index, key), labels


@dataclasses.dataclass(frozen=True)
class Grayscale(DeviceTransform):
    """Replaces the colours of some images by their grey; grey images stay."""

    on_colors = True

    p: Given = field(0.2, "Probability for an image.", at_most=1)

    def __call__(self, images: Images, labels: Labels, index, key):
        changed = jnp.broadcast_to(
            photometric.grey(images.astype(jnp.float32)), images.shape
        )
        return where_drawn(self.p, changed, images, index, key), labels


@dataclasses.dataclass(frozen=True)
class GaussianBlur(DeviceTransform):
    """Blurs some images by a Gaussian; pixels at the border are repeated beyond it.

    DINO's code uses Pillow's blur, three box blurs, which on a photograph differ from the
    Gaussian by 0.6 of 255 on average, and by 4.5 at most. The standard deviation, in pixels,
    is drawn uniformly from `radius`, (smallest, largest).
    """

    p: Given = field(0.5, "Probability for an image.", at_most=1)
    radius: Given = (0.1, 2.0)

    def __post_init__(self):
        super().__post_init__()
        check_range("radius", self.radius)

    def __call__(self, images: Images, labels: Labels, index, key):
        least, most = self.radius
        u = example_uniform(index, jax.random.fold_in(key, 1), 1)[:, 0]
        blurred = photometric.blur(
            images, least + u * (most - least), math.ceil(_REACH * most)
        )
        return where_drawn(self.p, blurred, images, index, key), labels


@dataclasses.dataclass(frozen=True)
class Solarize(DeviceTransform):
    """Inverts the bright values of some images."""

    on_colors = True

    p: Given = field(0.2, "Probability for an image.", at_most=1)
    threshold: Given = field(128.0, "Values from here on are inverted.", at_most=255)

    def __call__(self, images: Images, labels: Labels, index, key):
        x = images.astype(jnp.float32)
        inverted = jnp.where(x < self.threshold, x, 255 - x)
        return where_drawn(self.p, inverted, images, index, key), labels


@dataclasses.dataclass(frozen=True)
class ThreeAugment(DeviceTransform):
    """Turns each image grey, inverts its bright values or blurs it (arXiv:2204.07118).

    The three are equally likely, as in DeiT III; its colour jitter and crop are separate
    transforms. The standard deviation of the blur is drawn from `radius`, in pixels.
    """

    on_colors = True

    radius: Given = (0.1, 2.0)

    def __post_init__(self):
        super().__post_init__()
        check_range("radius", self.radius)

    def __call__(self, images: Images, labels: Labels, index, key):
        three = Grayscale(1.0), Solarize(1.0), GaussianBlur(1.0, self.radius)
        drawn = jnp.floor(3 * example_uniform(index, key, 1)[:, 0])[:, None, None, None]
        changed = images
        for i, operation in enumerate(three):
            result, _ = operation(images, labels, index, jax.random.fold_in(key, 2))
            changed = jnp.where(drawn == i, result, changed)
        return changed, labels


@dataclasses.dataclass(frozen=True)
class RandomErasing(DeviceTransform):
    """Replaces a rectangle of some images by noise or one value (arXiv:1708.04896).

    The ratio is drawn uniformly in its logarithm and a shape that does not fit is
    drawn again, ten times at most, as timm does.

    Args:
      area: smallest and largest part of the image's area.
      ratio: smallest and largest height by width of the part.
      fill: "pixel" for uniform noise, "normal" for timm's, with ImageNet's mean and
        deviation, or one value for all.
    """

    p: Given = field(0.25, "Probability for an image.", at_most=1)
    area: Given = (0.02, 1 / 3)
    ratio: Given = (0.3, 1 / 0.3)
    fill: Given = "pixel"

    def __post_init__(self):
        super().__post_init__()
        check_part(self.area, self.ratio)
        number = type(self.fill) in (int, float) and 0 <= self.fill <= 255
        if self.fill not in ("pixel", "normal") and not number:
            raise ValueError(
                f"fill={self.fill!r} is not 'pixel', 'normal' or a number in 0..255"
            )

    def __call__(self, images: Images, labels: Labels, index, key):
        _, H, W, C = images.shape
        inside = self.parts(H, W, index, key)[..., None]
        if self.fill in ("pixel", "normal"):
            # Four values from each number drawn: a quarter of the time.
            words = -(-H * W * C // 4)
            keys = example_keys(index, jax.random.fold_in(key, 1))
            drawn = jax.vmap(lambda k: jax.random.bits(k, (words,), "uint32"))(keys)
            noise = jax.lax.bitcast_convert_type(drawn, jnp.uint8)
            noise = noise.reshape(len(index), -1)[:, : H * W * C]
            noise = noise.reshape(images.shape)
            if self.fill == "normal":
                # timm erases after the images are normalised: what exceeds white stays.
                images, noise = images.astype(jnp.float32), _normal(noise)
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


def _normal(noise: UInt8[Array, "B H W C"]) -> Float[Array, "B H W C"]:
    """Converts uniform bytes to pixels of ImageNet's mean and deviation, 256 quantiles."""
    mean, std = (255 * np.array(x, np.float32) for x in (imagenet.MEAN, imagenet.STD))
    if noise.shape[-1] != len(mean):
        mean, std = mean.mean(keepdims=True), std.mean(keepdims=True)
    normal = jax.scipy.special.ndtri((noise.astype(jnp.float32) + 0.5) / 256)
    return normal * std.reshape(1, 1, 1, -1) + mean.reshape(1, 1, 1, -1)


@dataclasses.dataclass(frozen=True)
class Mixing(DeviceTransform):
    """Base of the transforms that blend each example with another of its batch.

    Attributes:
      distance: places in the batch from an example back to that one.
    """

    mixes_examples = True

    distance: int = dataclasses.field(default=1, init=False)

    def apart(self, copies: int) -> "Mixing":
        other = copy.copy(self)
        object.__setattr__(other, "distance", copies)
        return other

    @jax.named_scope("mixup")
    def partner(self, x: Num[Array, "B ..."]) -> Num[Array, "B ..."]:
        """Returns for each example the other one."""
        return jnp.roll(x, self.distance, axis=0)

    def blend(self, x: Float[Array, "B ..."], share: Float[Array, "..."]) -> Array:
        """Returns `share` of each example and the rest of the other one."""
        return share * x + (1 - share) * self.partner(x)


@dataclasses.dataclass(frozen=True)
class Mixup(Mixing):
    """Blends each example with its neighbour in the batch (arXiv:1710.09412).

    One share per batch is drawn from Beta(alpha, alpha).
    """

    alpha: Given = field(
        dataclasses.MISSING, "Parameter of Beta(alpha, alpha).", above=0
    )

    def __call__(self, images: Images, labels: Labels, index, key):
        share = _beta(jax.random.fold_in(key, index[0]), self.alpha)
        return self.blend(images.astype(jnp.float32), share), self.blend(labels, share)


@dataclasses.dataclass(frozen=True)
class Cutmix(Mixing):
    """Pastes a part of its neighbour into each example (arXiv:1905.04899).

    The share of pixels that an example keeps is drawn from Beta(alpha, alpha). The labels are
    weighted by the shares of pixels after the part is cut off at the edges of the image.
    """

    alpha: Given = field(1.0, "Parameter of Beta(alpha, alpha).", above=0)

    def __call__(self, images: Images, labels: Labels, index, key):
        kept, share = _cut(jax.random.fold_in(key, index[0]), self.alpha, images)
        return jnp.where(kept, images, self.partner(images)), self.blend(labels, share)


@dataclasses.dataclass(frozen=True)
class MixupOrCutmix(Mixing):
    """Applies mixup or cutmix, drawn per batch, as DeiT (arXiv:2012.12877, table 9)."""

    mixup: Given = field(0.8, "Alpha of mixup.", above=0)
    cutmix: Given = field(1.0, "Alpha of cutmix.", above=0)
    switch: Given = field(0.5, "Probability of cutmix.", at_most=1)
    group: Given = field(
        0,
        "Images in a row that share a draw, as those of one GPU do in timm; 0: all of the "
        "batch.",
    )

    def __call__(self, images: Images, labels: Labels, index, key):
        key = jax.random.fold_in(key, index[0])
        if not self.group:
            weight, share = self._draw(key, images)
        else:
            group = jnp.arange(len(images)) // self.group
            keys = jax.random.split(key, -(-len(images) // self.group))
            weight, share = jax.vmap(lambda key: self._draw(key, images))(keys)
            share = share[group].reshape(-1, *(1,) * (labels.ndim - 1))
            weight = jnp.squeeze(weight, 1)[group]
        images = self.blend(images.astype(jnp.float32), weight)
        return images, self.blend(labels, share)

    def _draw(self, key: Key[Array, ""], images: Images):
        """Draws the weights of an example's pixels, (1, H, W, 1), and of its label."""
        key, switch, mixup = jax.random.split(key, 3)
        cuts = jax.random.uniform(switch) < self.switch
        share = _beta(mixup, self.mixup)
        kept, kept_share = _cut(key, self.cutmix, images)
        weight = jnp.where(cuts, kept.astype(jnp.float32), share)
        return weight, jnp.where(cuts, kept_share, share)


def warp(
    images: Images, angle: PerImage, scale: PerImage, down: PerImage, right: PerImage
) -> Num[Array, "B H W C"]:
    """Rotates and scales images about their centres, then shifts them; bilinear.

    Args:
      images: values of any range; the outside is black (0). Of int16, which are class
        numbers, the nearest is taken.
      angle: radians, positive from the vertical axis (down) towards the right.
      scale: factor; over 1 enlarges.
      down, right: shifts in pixels.
    """
    _, H, W, _ = images.shape
    angle, scale, down, right = (a[:, None, None] for a in (angle, scale, down, right))
    y = (jnp.arange(H) - (H - 1) / 2)[None, :, None] - down
    x = (jnp.arange(W) - (W - 1) / 2)[None, None, :] - right
    # Where each pixel of the result comes from: the inverse of the motion.
    sine, cosine = jnp.sin(angle) / scale, jnp.cos(angle) / scale
    source_y = cosine * y + sine * x + (H - 1) / 2
    source_x = cosine * x - sine * y + (W - 1) / 2

    if images.dtype == jnp.int16:
        nearest = (jnp.round(a).astype(jnp.int32) for a in (source_y, source_x))
        return _take(images, *nearest)
    images = images.astype(jnp.float32)
    top, left = jnp.floor(source_y), jnp.floor(source_x)
    total = jnp.zeros_like(images)
    for row in (top, top + 1):
        for column in (left, left + 1):
            weight = (1 - abs(source_y - row)) * (1 - abs(source_x - column))
            corner = _take(images, row.astype(jnp.int32), column.astype(jnp.int32))
            total += weight[..., None] * corner
    return total


def _take(images: Images, rows, columns) -> Images:
    """Returns images[b, rows[b], columns[b]], black outside."""
    B, H, W, C = images.shape
    rows, columns = jnp.broadcast_arrays(rows, columns)
    inside = (rows >= 0) & (rows < H) & (columns >= 0) & (columns < W)
    flat = (rows.clip(0, H - 1) * W + columns.clip(0, W - 1)).reshape(B, -1, 1)
    taken = jnp.take_along_axis(images.reshape(B, H * W, C), flat, axis=1)
    taken = taken.reshape(*rows.shape, C)
    return jnp.where(inside[..., None], taken, jnp.zeros((), images.dtype))


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
    "grayscale": Grayscale,
    "gaussian_blur": GaussianBlur,
    "solarize": Solarize,
    "three_augment": ThreeAugment,
    "random_erasing": RandomErasing,
    "upsample": Upsample,
    "mixup": Mixup,
    "cutmix": Cutmix,
    "mixup_or_cutmix": MixupOrCutmix,
}
