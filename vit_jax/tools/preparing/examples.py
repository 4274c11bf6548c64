"""Records of image data sets: their features, and how they are serialised for TFDS."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class ExampleFormat:
    """Features of a data set: "image", "path", and perhaps "label" and "text".

    Attributes:
      class_names: class names in label order; () without labels.
      labelled: whether records have a class number; always true with class names.
      captioned: whether records have a caption.
    """

    class_names: tuple[str, ...] = ()
    labelled: bool = False
    captioned: bool = False

    def features(self):
        """Returns the features as TFDS describes them."""
        import tensorflow_datasets as tfds

        features = {"image": tfds.features.Image(shape=(None, None, 3))}
        if self.class_names:
            names = list(self.class_names)
            features["label"] = tfds.features.ClassLabel(names=names)
        elif self.labelled:
            features["label"] = tfds.features.Scalar(np.int64)
        if self.captioned:
            features["text"] = tfds.features.Text(doc="Caption of the image.")
        features["path"] = tfds.features.Text(
            doc="Path of the image file, relative to the folder."
        )
        return tfds.features.FeaturesDict(features)

    def serializer(self) -> Callable[[Mapping], bytes]:
        """Returns a function from a record's features, files as bytes, to its example."""
        from tensorflow_datasets.core import example_serializer

        specs = self.features().get_serialized_info()
        serializer = example_serializer.ExampleSerializer(specs)
        # Otherwise, the order of a map's fields may differ between processes.
        return lambda record: serializer.get_tf_example(record).SerializeToString(
            deterministic=True
        )
