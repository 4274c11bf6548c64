"""A data set that notes who opens its splits and which records are read.

As `data.name` it is "watched:open_source".
"""

from vit_jax.data import splits
from vit_jax.data.sources import arrays

CLASSES = 5
SIZES = {"train": 40, "test": 13, "whole": 20}
events = []  # ("open" or "read", name of the split or of the record).


class Watched:
    """Small images of patterns, not in memory, so that every read is seen."""

    images = labels = None
    class_names = tuple("abcde")

    def __init__(self, split):
        self._parts = [
            f"{name}/{number}"
            for name, numbers in splits.select(split, SIZES, "watched")
            for number in numbers
        ]

    def __len__(self):
        return len(self._parts)

    def __getitem__(self, i):
        record = self._parts[i]
        events.append(("read", record))
        split, number = record.split("/")
        image = arrays.synthetic_image(split, int(number), CLASSES, (8, 12, 3))
        return {"image": image, "label": int(number) % CLASSES}

    def describe(self, i):
        return f"watched record {self._parts[i]}"

    def record_id(self, i):
        return self._parts[i]


def open_source(data, split):
    """Opens a split, as any source of a user's own."""
    events.append(("open", split))
    return Watched(split)
