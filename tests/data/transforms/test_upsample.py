"""Small images travel small and are enlarged on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from vit_jax.data import pipeline
from vit_jax.data.sources.arrays import ArraySource
from vit_jax.data.sources.folder import open_folder
from vit_jax.data.transforms import device as device_transforms
from vit_jax.data.transforms import geometric, parse
from vit_jax.errors import UserError

KEY = jax.random.key(0)
SIZE = (33, 51)


def memory(images):
    labels = np.arange(len(images)) % 3
    return ArraySource("some", images, labels, class_names=())


def first_batch(source, data):
    arguments = {"batch_size": 4, "seed": 0, "start": 0, "stop": 1}
    with pipeline.train_batches(source, data, **arguments) as batches:
        return next(batches)


def test_upsampling_is_pillows_bilinear_on_photographs(natural):
    small = np.stack([image[3:100, 5:202] for image in natural])
    op = geometric.Upsample((224, 391))
    index = jnp.arange(2, dtype=jnp.uint32)
    out, _ = jax.jit(op)(jnp.asarray(small), jnp.eye(2), index, KEY)
    for ours, image in zip(out, small, strict=True):
        theirs = Image.fromarray(image).resize((391, 224), Image.Resampling.BILINEAR)
        # Pillow rounds twice; once alone is 0.25 on average.
        error = np.abs(np.asarray(ours) - np.asarray(theirs, float))
        assert error.mean() < 0.3
        assert error.max() < 1.1


@pytest.mark.slow
def test_a_set_in_memory_is_gathered_as_small_as_it_is(data_config):
    images = np.random.default_rng(0).integers(0, 256, (9, 8, 13, 3), dtype=np.uint8)
    data = data_config(train_transform="flip | pad_crop(2) | upsample", image_size=SIZE)
    batch = first_batch(memory(images), data)
    assert batch["image"].shape == (4, 8, 13, 3)
    device = parse.parse_train(data.train_transform, SIZE).device
    batch = jax.tree.map(jnp.asarray, batch)
    labels = jax.nn.one_hot(batch["label"], 3)
    out, _ = device_transforms.apply(
        device, batch["image"], labels, batch["index"], KEY
    )
    assert out.shape == (4, *SIZE, 3)


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        ("resize(11) | upsample", (11, 11)),
        ("resize_small(20) | random_crop((7, 9)) | randaugment | upsample", (7, 9)),
        ("random_resized_crop((7, 9)) | augreg('light2') | flip | upsample", (7, 9)),
    ],
)
def test_the_last_crop_or_resize_says_what_is_loaded(folder, data_config, spec, size):
    source = open_folder(str(folder), "train", "train")
    batch = first_batch(source, data_config(train_transform=spec, image_size=SIZE))
    assert batch["image"].shape == (4, *size, 3)


@pytest.mark.parametrize("spec", ["upsample", "resize_small(20) | upsample"])
def test_images_of_no_one_size_are_refused(folder, data_config, spec):
    with pytest.raises(UserError, match=r"upsample needs images of one size.*resize"):
        first_batch(
            open_folder(str(folder), "train", "train"),
            data_config(train_transform=spec, image_size=SIZE),
        )


def test_larger_images_are_not_shrunk():
    with pytest.raises(UserError, match="upsample to 33x51, but images have 34x50"):
        geometric.Upsample(SIZE)(jnp.zeros((2, 34, 50, 3)), jnp.eye(2), None, KEY)
