"""The contender of `input.py` that is this project: JPEG files, or images in memory."""

import pathlib
import sys

import input_serve
import jax
import numpy as np

from vit_jax.data import order, pipeline
from vit_jax.data.sources.arrays import ArraySource
from vit_jax.data.sources.open import open_source
from vit_jax.data.transforms import geometric, parse
from vit_jax.training import config

SIZE, SEED = 224, 7


def data_config(folder, ops, batch, workers, **keys):
    """Returns a complete `config.data`."""
    data = {
        "name": "folder",
        "data_dir": folder,
        "num_classes": 1,
        "train_transform": ops,
    }
    data |= {"num_workers": workers, "num_threads": 2, "prefetch": 2, **keys}
    raw = {"batch_size": batch, "total_steps": 1, "optim": {"learning_rate": 0.1}}
    return config.complete({**raw, "data": data}).data


def device_stage(moves):
    """Compiles the device operations, which move pixels only, in uint8."""
    key = jax.random.key(SEED)

    @jax.jit
    def stage(images, index):
        labels = jax.numpy.zeros((len(images), 1))
        for op in moves:
            images, labels = op(images, labels, index, key)
        return images

    return stage


def ours(source, data, batch):
    """Iterates over batches of the product, device operations done on this CPU."""
    stage = device_stage(
        parse.parse_train(data.train_transform, data.image_size).device
    )
    with pipeline.train_batches(
        source, data, batch_size=batch, seed=SEED, start=0, stop=10**9 // batch
    ) as stream:
        for loaded in stream:
            yield stage(loaded["image"], loaded["index"]).block_until_ready()


def from_folder(folder, batch, options, workers):
    """Iterates over JPEG files, cropped as the options of the crop say and flipped."""
    spec = f"random_resized_crop({SIZE}, {options}) | flip"
    data = data_config(folder, spec, batch, workers)
    return ours(open_source(data, "train"), data, batch)


def from_memory(folder, batch, augment):
    """Iterates over 50,000 images of 32x32, flipped and cropped if so asked."""
    rng = np.random.default_rng(SEED)
    images = rng.integers(0, 256, (50_000, 32, 32, 3), dtype=np.uint8)
    source = ArraySource("synthetic", images, np.zeros(50_000, np.int64))
    spec = "flip | pad_crop(4)" if augment else ""
    data = data_config(folder, spec, batch, 0, image_size=(32, 32))
    return ours(source, data, batch)


def flips(batch):
    """Iterates over flipped batches, with nothing loaded."""
    stage = device_stage((geometric.Flip(),))
    images = np.zeros((batch, SIZE, SIZE, 3), np.uint8)
    for step in range(10**9):
        index = step * batch + np.arange(batch, dtype=np.uint32)
        yield stage(images, index).block_until_ready()


def crops(pairs, options):
    """Returns crops of files; each pair is a path and the box that seed i gives."""
    op, images = (
        parse.parse_train(f"random_resized_crop({SIZE}, {options})", ()).host[0],
        [],
    )
    for i, (path, box) in enumerate(pairs):
        if list(op.box(375, 500, np.random.default_rng(i))) != box:
            raise ValueError(f"seed {i} does not give box {box}")
        data = pathlib.Path(path).read_bytes()
        images.append(op.from_file(data, 3, np.random.default_rng(i)))
    return np.stack(images)


def order_of_14_million(batch):
    """Iterates over the records of batches all over two epochs of ImageNet-21k."""
    for first in range(0, 2 * 14_197_122, 1_000_003):
        yield order.records_at(first + np.arange(batch), 14_197_122, SEED)


def main():
    """Serves one kind of batches."""
    kind, folder, batch, options, workers = sys.argv[1:]
    batch, workers = int(batch), int(workers)
    streams = {
        "jpeg": lambda: from_folder(folder, batch, options, workers),
        "memory": lambda: from_memory(folder, batch, options == "augment"),
        "flip": lambda: flips(batch),
        "order": lambda: order_of_14_million(batch),
    }
    input_serve.serve(streams[kind](), lambda pairs: crops(pairs, options))


if __name__ == "__main__":
    main()
