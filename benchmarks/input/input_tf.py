"""The contender tf.data of `input.py`: big_vision's inception crop, in TensorFlow.

Runs in an environment of its own (extra `prepare`), so it imports nothing of this
project.
"""

import os
import pathlib
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import input_serve
import numpy as np
import tensorflow as tf

SIZE = 224


def resize(image, antialias):
    """Resizes and casts as big_vision's `get_resize`."""
    image = tf.image.resize(image, (SIZE, SIZE), "bilinear", antialias=antialias)
    return tf.cast(tf.clip_by_value(image, 0, 255), tf.uint8)


def preprocess(path, antialias):
    """Reads, decodes a random part only, resizes, flips."""
    data = tf.io.read_file(path)
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        tf.image.extract_jpeg_shape(data),
        tf.zeros([0, 0, 4], tf.float32),
        area_range=(0.05, 1.0),
        min_object_covered=0,  # Not 0.1, so that the areas are as asked for.
        use_image_if_no_bounding_boxes=True,
    )
    window = tf.concat([begin[:2], size[:2]], 0)
    image = tf.image.decode_and_crop_jpeg(data, window, channels=3)
    return tf.image.random_flip_left_right(resize(image, antialias))


def batches(paths, batch, antialias):
    """Iterates over shuffled batches for ever."""
    data = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths)).repeat()
    data = data.map(
        lambda path: preprocess(path, antialias), num_parallel_calls=tf.data.AUTOTUNE
    )
    return iter(data.batch(batch, drop_remainder=True).prefetch(2))


def crops(pairs, antialias):
    """Returns crops of files; each pair is a path and a box."""
    images = []
    for path, box in pairs:
        data = pathlib.Path(path).read_bytes()
        image = tf.image.decode_and_crop_jpeg(data, box, channels=3)
        images.append(resize(image, antialias).numpy())
    return np.stack(images)


def main():
    """Serves batches of JPEG files."""
    folder, batch, antialias = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
    paths = sorted(map(str, pathlib.Path(folder).glob("train/*/*.jpg")))
    stream = batches(paths, batch, antialias)
    input_serve.serve(stream, lambda pairs: crops(pairs, antialias))


if __name__ == "__main__":
    main()
