"""Label maps: the class of each pixel, of the mask of an image."""

import dataclasses

from vit_jax.data import masks
from vit_jax.data.config import DataConfig
from vit_jax.data.fields.base import LABEL_MAP, Field


@dataclasses.dataclass(frozen=True)
class LabelMap(Field):
    """The classes of an image's pixels, int16 (H, W), or masks.IGNORED."""

    name = LABEL_MAP
    blank = masks.IGNORED
    moves = True

    data: DataConfig

    @classmethod
    def of(cls, data, source):
        return cls(data)

    @classmethod
    def missing(cls, data):
        return (
            "data.mask_key='': masks are not read, but this task learns from them: set it "
            "to the feature, column or folder of the masks"
        )

    def spec(self, size):
        return size, "int16"

    def read(self, record, size):
        return masks.read(record["mask"], self.data, size)

    def row(self, value, rng):
        return value[..., 0]

    def inspect(self, source, records):
        masks.warn_of_one_class(source, self.data, records)
