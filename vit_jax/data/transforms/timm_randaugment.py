"""timm's RandAugment, with which DeiT, MAE, SimMIM and Swin were trained.

It differs from AugReg's (randaugment.py): each of two operations is skipped with
probability 0.5, magnitudes are random, colours are faded or enhanced, and cutout is not
used. Operations are Pillow's, as in timm 1.0.31 (timm/data/auto_augment.py,
`rand-m9-mstd0.5-inc1`), so results are equal to the bit.
"""

import dataclasses
import statistics

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageEnhance, ImageOps

from vit_jax.config.fields import key
from vit_jax.data.transforms.base import Given, HostTransform

_MOST = 10.0  # Magnitude of the strongest operations.
_NORMAL = statistics.NormalDist()
_FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}
_ENHANCERS = {
    "color": ImageEnhance.Color,
    "contrast": ImageEnhance.Contrast,
    "brightness": ImageEnhance.Brightness,
    "sharpness": ImageEnhance.Sharpness,
}
NAMES = (
    *("autocontrast", "equalize", "invert", "rotate", "posterize", "solarize"),
    *("solarize_add", *_ENHANCERS, "shear_x", "shear_y", "translate_x", "translate_y"),
)


@dataclasses.dataclass(frozen=True)
class TimmRandAugment(HostTransform):
    """Applies random operations of `NAMES`, each of a random strength."""

    on_colors = moves_pixels = True
    moves_masks = False

    magnitude: Given = key(9.0, "Mean strength of an operation.", at_most=_MOST)
    std: Given = key(0.5, "Standard deviation of the strength.")
    layers: Given = key(2, "Number of operations, drawn with replacement.")
    probability: Given = key(0.5, "Probability of each operation.", at_most=1)
    interpolation: Given = key(
        "bicubic", "Filter of rotations and shears.", choices=tuple(_FILTERS)
    )
    fill: Given = (124, 116, 104)  # Colour of pixels from outside.

    def __call__(
        self, image: UInt8[np.ndarray, "H W C"], rng: np.random.Generator
    ) -> UInt8[np.ndarray, "H W C"]:
        grey = image.shape[-1] == 1
        picture = Image.fromarray(image[..., 0] if grey else image)
        fill = round(sum(self.fill) / len(self.fill)) if grey else tuple(self.fill)
        for _ in range(self.layers):
            which, often, strength, sign = (rng.random() for _ in range(4))
            if often >= self.probability:
                continue
            # Not `rng.normal`, whose stream NumPy may change.
            drawn = self.magnitude + self.std * _NORMAL.inv_cdf(strength or 0.5)
            level = min(max(drawn, 0.0), _MOST) / _MOST
            filters = _FILTERS[self.interpolation]
            name = NAMES[int(which * len(NAMES))]
            picture = operate(name, picture, level, sign < 0.5, filters, fill)
        return np.array(picture).reshape(image.shape)


def operate(
    name: str,
    picture: Image.Image,
    level: float,
    negative: bool = False,
    resample: Image.Resampling = Image.Resampling.BICUBIC,
    fill: int | tuple[int, ...] = (124, 116, 104),
) -> Image.Image:
    """Returns a picture after one operation of `NAMES`.

    Args:
      name: operation.
      picture: picture in mode RGB or L.
      level: strength in [0, 1].
      negative: whether to rotate, shear or shift in the opposite direction, and to fade
        colours instead of enhancing them.
      resample: filter of operations that move pixels.
      fill: colour of pixels from outside of the picture.
    """
    sign = -1 if negative else 1

    def moved(*matrix):
        how = {"resample": resample, "fillcolor": fill}
        return picture.transform(picture.size, Image.Transform.AFFINE, matrix, **how)

    if name in _ENHANCERS:
        factor = max(0.1, 1.0 + sign * 0.9 * level)
        return _ENHANCERS[name](picture).enhance(factor)
    match name:
        case "autocontrast":
            return ImageOps.autocontrast(picture)
        case "equalize":
            return ImageOps.equalize(picture)
        case "invert":
            return ImageOps.invert(picture)
        case "rotate":
            return picture.rotate(sign * 30 * level, resample, fillcolor=fill)
        case "posterize":
            # Not ImageOps.posterize, which newer releases restrict to at least one bit.
            kept = 256 - 2 ** (4 + int(4 * level))
            return picture.point(
                [v & kept for v in range(256)] * len(picture.getbands())
            )
        case "solarize":
            return ImageOps.solarize(picture, 256 - min(256, int(256 * level)))
        case "solarize_add":
            added = min(128, int(110 * level))
            table = [min(255, v + added) if v < 128 else v for v in range(256)]
            return picture.point(table * len(picture.getbands()))
        case "shear_x":
            return moved(1, sign * 0.3 * level, 0, 0, 1, 0)
        case "shear_y":
            return moved(1, 0, 0, sign * 0.3 * level, 1, 0)
        case "translate_x":
            return moved(1, 0, sign * 0.45 * level * picture.width, 0, 1, 0)
        case "translate_y":
            return moved(1, 0, 0, 0, 1, sign * 0.45 * level * picture.height)
    raise ValueError(f"unknown operation {name!r}")
