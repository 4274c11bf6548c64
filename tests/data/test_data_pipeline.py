import dataclasses
import pathlib

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import order
from vit_jax.data.pipeline import eval_batches, train_batches
from vit_jax.data.sources.base import _warned
from vit_jax.data.sources.open import open_source
from vit_jax.data.transforms import host as host_transforms
from vit_jax.errors import UserError

TRAIN = {"batch_size": 12, "seed": 3, "start": 0, "stop": 4}


@pytest.fixture
def make(data_config, folder):
    """Makes the config and the training source of the image folder."""

    def from_keys(**keys):
        plain = {
            "train_transform": "inception_crop | flip",
            "eval_transform": "resize",
            "prefetch": 4,
        }
        keys = {**plain, **keys}
        data = data_config(name="folder", data_dir=str(folder), **keys)
        return data, open_source(data, "train")

    return from_keys


def stream(source, data, **arguments):
    with train_batches(source, data, **{**TRAIN, **arguments}) as batches:
        return list(batches)


def assert_equal_streams(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        for key in x:
            np.testing.assert_array_equal(x[key], y[key], err_msg=key)


def test_a_training_batch_has_the_promised_arrays(make):
    data, source = make()
    for batch in stream(source, data):
        kinds = {key: (value.shape, value.dtype.name) for key, value in batch.items()}
        assert kinds == {
            "image": ((12, 13, 17, 3), "uint8"),
            "label": ((12,), "int32"),
            "index": ((12,), "uint32"),
            "skipped": ((12,), "int32"),
        }


@pytest.mark.parametrize("keys", [{"num_workers": 2}, {"prefetch": 0}])
def test_threads_and_processes_change_nothing(make, keys):
    data, source = make()
    other, _ = make(**keys)
    result = stream(source, other)
    assert_equal_streams(result, stream(source, data))
    for value in (v for batch in result for v in batch.values()):
        assert type(value) is np.ndarray
        assert value.flags.owndata
        assert value.flags.c_contiguous


def test_processes_share_the_same_global_batch_of_images_in_memory(data_config):
    data = data_config(num_examples=19)
    source = open_source(data, "train")
    whole = stream(source, data)
    parts = [stream(source, data, data_shard=p, num_data_shards=4) for p in range(4)]
    joined = [
        {key: np.concatenate([part[key] for part in step]) for key in step[0]}
        for step in zip(*parts, strict=True)
    ]
    assert_equal_streams(joined, whole)


def test_a_resumed_stream_equals_the_undisturbed_one(make):
    data, source = make()
    whole = stream(source, data)
    for start in (1, 4):
        assert_equal_streams(stream(source, data, start=start), whole[start:])


def test_the_rows_are_the_records_of_the_order(data_config):
    data = data_config(num_examples=19)
    source = open_source(data, "train")
    batches = stream(source, data)
    records = order.records_at(np.arange(48), 19, 3)
    for key, expected in (("image", source.images), ("label", source.labels)):
        joined = np.concatenate([batch[key] for batch in batches])
        np.testing.assert_array_equal(joined, expected[records])
    joined = np.concatenate([batch["index"] for batch in batches])
    np.testing.assert_array_equal(joined, np.arange(48))


def test_a_late_step_starts_at_once_and_its_index_wraps(make):
    data, source = make()
    step = 2**32 // 12 + 10**9
    (batch,) = stream(source, data, start=step, stop=step + 1)
    np.testing.assert_array_equal(batch["index"], (step * 12 + np.arange(12)) % 2**32)


def test_augmentation_differs_between_epochs_and_seeds(make):
    data, source = make()
    kept = stream(source, data, stop=20)
    record = order.records_at(np.arange(240), 19, 3)
    first, second = np.flatnonzero(record == 7)[:2]
    images = np.concatenate([batch["image"] for batch in kept])
    assert (images[first] != images[second]).any()
    other = stream(source, data, seed=4)
    assert (other[0]["image"] != kept[0]["image"]).any()


def test_evaluation_images_are_resized_in_order(make):
    data, source = make()
    with eval_batches(source, data, batch_size=5) as batches:
        assert len(batches) == 4
        third = next(batches)["image"][3]
    from vit_jax.data import decode

    expected = host_transforms.resize_bilinear(
        decode.decode(source[3]["image"]), (13, 17)
    )
    np.testing.assert_array_equal(third, expected)


@pytest.fixture
def damaged(make):
    """Cuts off the file of the record that stands first in the run."""
    _, source = make()
    record = int(order.records_at(np.array([0]), 19, 3)[0])
    with open(source.describe(record), "r+b") as file:
        file.truncate(99)
    return record


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_a_user_error_that_names_the_file(make, damaged, workers):
    data, source = make(num_workers=workers)
    where = rf"{source.describe(damaged)} \(record {damaged}\)"
    match = rf"{where} cannot be decoded.*data\.on_error=skip"
    with pytest.raises(UserError, match=match):
        stream(source, data)
    if workers:
        return
    with (
        eval_batches(source, data, batch_size=19) as batches,
        pytest.raises(UserError, match=match),
    ):
        next(batches)


def test_a_file_that_vanishes_is_a_user_error(make):
    data, source = make()
    paths = [path.replace("train", "gone") for path in source.paths]
    source = dataclasses.replace(source, paths=paths)
    with pytest.raises(
        UserError, match=r"gone.*record \d+\) cannot be read \(.*No such"
    ):
        stream(source, data)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_skipped_image_is_replaced_by_the_next_and_counted(make, damaged, workers):
    data, source = make(on_error="skip", num_workers=workers)
    batches = stream(source, data)
    records = order.records_at(np.arange(48), 19, 3)
    skipped = np.concatenate([batch["skipped"] for batch in batches])
    np.testing.assert_array_equal(skipped, records == damaged)
    next_label = source[(damaged + 1) % 19]["label"]
    assert batches[0]["label"][0] == next_label


def test_up_to_one_percent_of_damaged_images_are_skipped_and_named(
    make, damaged, caplog
):
    data, source = make(on_error="skip_few")
    stream(source, data)
    (line,) = [line for line in caplog.messages if source.describe(damaged) in line]
    assert "left out, 1 of at most 1 (--config.data.on_error=raise" in line
    second = source.describe((damaged + 1) % 19)
    pathlib.Path(second).write_bytes(b"")
    match = r"as 1 others: more than 1 % of 19 images.*data\.on_error=skip"
    with pytest.raises(UserError, match=match):
        stream(source, data)


@pytest.mark.parametrize("exif", [False, True])
def test_a_tag_that_is_not_read_is_one_line(
    make, damaged, encode, photograph, caplog, exif
):
    _warned.discard("data.exif")
    tags = Image.Exif()
    tags[0x0112] = 6  # Turned by a quarter.
    data, source = make(exif=exif)
    for i in (damaged, (damaged + 1) % 19):
        content = encode(photograph, "JPEG", exif=tags)
        pathlib.Path(source.describe(i)).write_bytes(content)
    stream(source, data)
    lines = [line for line in caplog.messages if "data.exif=True turns" in line]
    assert len(lines) == (not exif)


def test_evaluation_masks_a_skipped_image_and_counts_it(make, damaged):
    data, source = make(on_error="skip")
    with eval_batches(source, data, batch_size=20) as batches:
        (batch,) = batches
    np.testing.assert_array_equal(batch["skipped"], np.arange(20) == damaged)
    there = (np.arange(20) != damaged) & (np.arange(20) < 19)
    np.testing.assert_array_equal(batch["mask"], there)


def test_nothing_readable_is_a_user_error(make, folder):
    data, source = make(on_error="skip")
    for path in folder.rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="none of the 19 records can be read"):
        stream(source, data)


@pytest.mark.parametrize("in_memory", [True, False])
def test_another_image_size_than_the_models_is_a_user_error(
    make, data_config, in_memory
):
    data, source = make(train_transform="resize((5, 7))")
    if in_memory:
        data = data_config(name="digits", num_classes=10)
        source = open_source(data, "train")
    found = "8x8x3" if in_memory else "5x7x3"
    with pytest.raises(
        UserError, match=rf"data\.train_transform gives .* of {found}.*13x17x3"
    ):
        stream(source, data)


def test_a_crop_larger_than_an_image_names_the_file(make):
    data, source = make(train_transform="random_crop(99)")
    with pytest.raises(
        UserError,
        match=r"data\.train_transform: .*\.png \(record.*: crop of 99x99.*37x53",
    ):
        stream(source, data)


def test_a_label_out_of_range_names_the_file(make):
    data, source = make()
    labels = [label + 1 for label in source.labels_of_paths]
    source = dataclasses.replace(source, labels_of_paths=labels)
    with pytest.raises(
        UserError, match=r"cat.*\.png \(record.* has label 3, but data\.num_classes=3"
    ):
        stream(source, data)


def test_a_batch_that_does_not_divide_over_the_processes_is_a_user_error(make):
    data, source = make()
    with pytest.raises(
        UserError, match="batch_size=12 does not divide over 5 processes"
    ):
        train_batches(source, data, **TRAIN, num_data_shards=5)


def test_grey_images_keep_one_channel(make):
    data, source = make(channels=1)
    assert stream(source, data)[0]["image"].shape == (12, 13, 17, 1)
