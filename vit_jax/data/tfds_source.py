"""TFDS data sets prepared as ArrayRecord, read without TensorFlow."""

import dataclasses
import math
import os
from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer

from vit_jax.data import decode, splits
from vit_jax.data.arrays import ArraySource
from vit_jax.errors import UserError

# Sets of small images up to this size are decoded once, when opened.
_MEMORY = 2**29  # Bytes.
_SMALL_IMAGE = 64  # Pixels a side.


@dataclasses.dataclass(frozen=True)
class TfdsSource:
    """Records of a TFDS data set; images stay encoded."""

    name: str
    records: Sequence[dict]
    image_key: str
    label_key: str
    class_names: tuple[str, ...]
    numbering: splits.Numbering
    images = labels = None  # Not in memory.

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, i: int) -> dict:
        return self._named(self.records[i])

    def read(self, numbers: range) -> list[dict]:
        """Reads neighbouring records, each four times cheaper than alone."""
        return [self._named(record) for record in self.records.__getitems__(numbers)]

    def _named(self, record: dict) -> dict:
        return {"image": record[self.image_key], "label": int(record[self.label_key])}

    def describe(self, i: int) -> str:
        return f"{self.name} record {i}"

    def record_id(self, i: int) -> str:
        return self.numbering.record_id(i)

    def locate(self, record_ids: Sequence[str]) -> Integer[np.ndarray, " M"]:
        return self.numbering.locate(record_ids)


def open_tfds(
    name: str, data_dir: str, split: str, image_key: str, label_key: str
) -> TfdsSource:
    """Opens a prepared data set from its files alone.

    Args:
      name: TFDS name, as "cifar10", "eurosat/rgb" or "eurosat/rgb:2.0.0".
      data_dir: where it was prepared; "" is TFDS's default.
      split: TFDS split expression.
      image_key: feature that holds the image.
      label_key: feature that holds the class number.

    Raises:
      UserError: not prepared, not as ArrayRecord, or no such split or feature.
    """
    import tensorflow_datasets as tfds

    builder = _builder(name, data_dir)
    features = builder.info.features
    for config_key, key in (("image_key", image_key), ("label_key", label_key)):
        if key not in features:
            raise UserError(
                f"data.{config_key}={key!r}: {name} has no such feature; "
                f"it has {', '.join(sorted(features))}"
            )
    sizes = {key: info.num_examples for key, info in builder.info.splits.items()}
    numbering = splits.Numbering.of(split, sizes, name)

    encoded = isinstance(features[image_key], tfds.features.Image)
    decoders = {image_key: tfds.decode.SkipDecoding()} if encoded else None
    return TfdsSource(
        name=f"{name} {split}",
        records=builder.as_data_source(split, decoders=decoders),
        image_key=image_key,
        label_key=label_key,
        class_names=tuple(getattr(features[label_key], "names", None) or ()),
        numbering=numbering,
    )


def small_in_memory(source: TfdsSource, channels: int) -> TfdsSource | ArraySource:
    """Decodes a set such as CIFAR once, so that a batch becomes one gather.

    Args:
      source: data set.
      channels: 1 or 3.

    Returns:
      The set in memory; `source` itself if it is too large, its images differ in
      size, or one is damaged, which is for `data.on_error` to settle.
    """
    try:
        shape = decode.decode(source[0]["image"], channels).shape
        if max(shape[:2]) > _SMALL_IMAGE or math.prod(shape) * len(source) > _MEMORY:
            return source
        images = np.empty((len(source), *shape), np.uint8)
        labels = np.empty(len(source), np.int64)
        for start in range(0, len(source), 1000):
            numbers = range(start, min(start + 1000, len(source)))
            for i, record in zip(numbers, source.read(numbers), strict=True):
                image = decode.decode(record["image"], channels)
                if image.shape != shape:
                    return source
                images[i], labels[i] = image, record["label"]
    except decode.DamagedImage:
        return source
    return ArraySource(
        source.name, images, labels, source.class_names, source.numbering
    )


def _builder(name: str, data_dir: str):
    import tensorflow_datasets as tfds

    data_dir = os.path.expanduser(data_dir) or None
    where = data_dir or tfds.core.constants.DATA_DIR
    build = (
        f"pip install 'vit_jax[prepare]', then tfds build {name} "
        f"--file_format=array_record --data_dir={where}"
    )
    try:
        builder = tfds.core.read_only_builder.builder_from_files(
            name, data_dir=data_dir
        )
    except (tfds.core.DatasetNotFoundError, ValueError) as error:
        raise UserError(
            f"data.name={name!r}: no such prepared TFDS data set in {where} "
            f"(the other names are 'digits', 'folder' and 'made'). To prepare: {build}"
        ) from error

    formats = builder.info.available_file_formats()
    if tfds.core.FileFormat.ARRAY_RECORD not in formats:
        found = ", ".join(sorted(f.value for f in formats)) or "an unknown format"
        raise UserError(
            f"data.name={name!r} in {builder.data_dir} is prepared as {found}, but "
            f"only array_record can be read in any order. To prepare: {build}"
        )
    return builder
