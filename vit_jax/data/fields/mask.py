"""Label maps: the class of each pixel, from the mask of an image."""

import dataclasses

from vit_jax.data import masks
from vit_jax.data.config import DataConfig
from vit_jax.data.fields.base import Field
from vit_jax.data.transforms import KNOWN, where_of
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class LabelMap(Field):
    """The classes of an image's pixels, int16 (H, W), or masks.IGNORED."""

    name = "label_map"
    blank = masks.IGNORED
    moves = True

    data: DataConfig

    @classmethod
    def of(cls, data, source):
        return cls(data)

    @classmethod
    def part(cls, data):
        return "masks"

    @classmethod
    def missing(cls, data):
        return (
            "data.mask_key='': masks are not read, but this task learns from them: set it "
            "to the feature, column or folder of the masks"
        )

    @classmethod
    def check(cls, ops, data):
        """Raises UserError if a transform cannot act on masks.

        A transform of colours that moves no pixels changes only the images.
        """
        for op in ops:
            if not (op.moves_masks if op.moves_pixels else op.on_colors):
                acting = ", ".join(
                    name
                    for name, kind in KNOWN.items()
                    if kind.moves_pixels and kind.moves_masks
                )
                raise UserError(
                    f"{where_of(op, 'data.train_transform')} does not act on masks, and "
                    f"data.mask_key={data.mask_key!r}: remove it; {acting} do, and "
                    "transforms of colours that move no pixels change only the images"
                )

    def spec(self, size):
        return size, "int16"

    def read(self, record, size):
        return masks.read(record["mask"], self.data, size)

    def seen_by(self, op):
        return op.sees_mask

    def row(self, value, rng):
        return value[..., 0]

    def inspect(self, source, records):
        masks.warn_of_one_class(source, self.data, records)
