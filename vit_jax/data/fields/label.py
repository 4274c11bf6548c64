"""Labels: the class of an image, or its classes."""

import dataclasses

import numpy as np

from vit_jax.data.fields.base import Field
from vit_jax.data.sources.base import check_label


@dataclasses.dataclass(frozen=True)
class Label(Field):
    """The number of an image's class, int32."""

    name = "label"
    in_eval = True

    num_classes: int

    @classmethod
    def of(cls, data, source):
        return (Labels if data.multi_label else Label)(data.num_classes)

    @classmethod
    def part(cls, data):
        return "labels"

    @classmethod
    def missing(cls, data):
        if not data.num_classes:
            return (
                "data.num_classes=0: labels are not read, but this task learns from them: "
                "set --config.data.num_classes to the number of classes"
            )
        return (
            f"data.mask_key={data.mask_key!r}: masks are read instead of labels, but "
            "this task learns from labels: set data.mask_key=''"
        )

    def spec(self, size):
        return (), "int32"

    def read(self, record, size):
        check_label(record["label"], self.num_classes, "it")
        return record["label"]

    def column(self, source):
        return source.labels


class Labels(Label):
    """A 1 for each class that an image has, else 0, int32."""

    def spec(self, size):
        return (self.num_classes,), "int32"

    def read(self, record, size):
        labels = record["label"]
        for label in labels:
            check_label(label, self.num_classes, "it")
        present = np.zeros(self.num_classes, np.int32)
        present[list(labels)] = 1
        return present
