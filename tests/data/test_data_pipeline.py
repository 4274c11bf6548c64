"""Batches of images in files: their arrays, resume, damaged and odd files."""

import dataclasses
import pathlib

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import order
from vit_jax.data.pipeline import eval_batches, train_batches
from vit_jax.data.sources.base import _warned
from vit_jax.data.sources.open import open_source
from vit_jax.errors import UserError

TRAIN = {"batch_size": 12, "seed": 3, "start": 0, "stop": 4}


@pytest.fixture
def make(data_config, folder):
    """Makes the config and the training source of the image folder."""

    def from_keys(**keys):
        plain = {
            "train_transform": "random_resized_crop | flip",
            "eval_transform": "resize",
        }
        keys = plain | {"prefetch": 4} | keys
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
def test_loader_processes_and_no_prefetch_change_nothing(make, keys):
    data, source = make()
    other, _ = make(**keys)
    result = stream(source, other)
    assert_equal_streams(result, stream(source, data))
    for value in (v for batch in result for v in batch.values()):
        assert type(value) is np.ndarray
        assert value.flags.owndata
        assert value.flags.c_contiguous


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


@pytest.fixture
def damaged(make):
    """Cuts off the file of the record that stands first in the run."""
    _, source = make()
    record = int(order.records_at(np.array([0]), 19, 3)[0])
    with open(source.describe(record), "r+b") as file:
        file.truncate(99)
    return record


def test_a_loader_process_names_a_damaged_file(make, damaged):
    data, source = make(num_workers=1)
    where = rf"{source.describe(damaged)} \(record {damaged}\)"
    match = rf"{where} cannot be decoded.*data\.on_error=skip"
    with pytest.raises(UserError, match=match):
        stream(source, data)


def test_what_does_not_fit_is_a_user_error(make, data_config, folder):
    data, source = make()
    gone = [path.replace("train", "gone") for path in source.paths]
    labels = [label + 1 for label in source.labels_of_paths]
    small, _ = make(train_transform="resize((5, 7))")
    large, _ = make(train_transform="random_crop(99)")
    grey = data_config(name="digits", num_classes=10)
    label = dataclasses.replace(source, labels_of_paths=labels)
    gone = dataclasses.replace(source, paths=gone)
    in_memory = open_source(grey, "train")
    for bad, other, match in (
        (gone, data, r"gone.*record \d+\) cannot be read \(.*No such"),
        (label, data, r"cat.*\.png \(record.* label 3, but data\.num_classes=3"),
        (source, small, r"data\.train_transform gives .* of 5x7x3.*13x17x3"),
        (in_memory, grey, r"data\.train_transform gives .* of 8x8x3.*13x17x3"),
        (source, large, r"transform: .*\.png \(record.*: crop of 99x99.*37x53"),
    ):
        with pytest.raises(UserError, match=match):
            stream(bad, other)
    with pytest.raises(UserError, match="batch_size=12 does not divide over 5"):
        train_batches(source, data, **TRAIN, num_data_shards=5)
    for path in folder.rglob("*.png"):
        path.write_bytes(b"")
    data, source = make(on_error="skip")
    with pytest.raises(UserError, match="none of the 19 records can be read"):
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
    match = r"like 1 others: more than 1 % of 19 images.*data\.on_error=skip"
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


def test_grey_images_keep_one_channel(make):
    data, source = make(channels=1)
    assert stream(source, data)[0]["image"].shape == (12, 13, 17, 1)


OPS = ["random_resized_crop", "resize_small(15) | random_crop((13, 15))", "resize"]


RED = Image.new("RGB", (50, 40), "red")


def bomb(encode):
    """A BMP header that promises 60,000x60,000 pixels, over a few bytes."""
    data = bytearray(encode(np.zeros((1, 1), np.uint8), "BMP"))
    data[18:26] = (60_000).to_bytes(4, "little") * 2
    return bytes(data)


FAULTS = {
    "zero bytes": (lambda encode: b"", "is empty"),
    "no image": (lambda encode: b"<html>404</html>", "of no known format"),
    "header bomb": (bomb, "60000x60000 pixels.*max_megapixels=100.*set it to 3600"),
    "121 megapixels in few bytes": (
        lambda encode: encode(Image.new("1", (11_000, 11_000)), "PNG"),
        r"11000x11000 pixels.*max_megapixels=100 \(data.max_megapixels.*set it to 121",
    ),
    "truncated": (lambda encode: encode(RED, "JPEG")[:-40], "cannot be decoded"),
    "only a header": (lambda encode: encode(RED, "PNG")[:33], "cannot be decoded"),
}


@pytest.fixture
def with_file(make):
    """Puts a file in the place of record 4; returns config and source."""

    def put(content, **keys):
        plain = {"eval_transform": "resize_small(15) | central_crop((13, 15)) | resize"}
        data, source = make(**plain | {"train_transform": OPS[0]} | keys)
        pathlib.Path(source.describe(4)).write_bytes(content)
        return data, source

    return put


@pytest.mark.parametrize("ops", OPS[::2])
def test_the_limit_of_large_images_is_a_key(with_file, encode, ops):
    large = RED.resize((60, 40))  # The others have 53x37 pixels.
    data, source = with_file(encode(large, "JPEG"), train_transform=ops)
    epoch(source, dataclasses.replace(data, max_megapixels=0.002_4))
    where = rf"{source.describe(4)} \(record 4\).*60x40 pixels.*data\.max_megapixels"
    with pytest.raises(UserError, match=where):
        epoch(source, dataclasses.replace(data, max_megapixels=0.002_3))


def epoch(source, data):
    return stream(source, data, batch_size=len(source), stop=1)[0]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_can_be_skipped(with_file, encode, fault):
    make, says = FAULTS[fault]
    data, source = with_file(make(encode))
    where = rf"{source.describe(4)} \(record 4\).*{says}"
    with pytest.raises(UserError, match=where):
        epoch(source, data)
    with (
        eval_batches(source, data, batch_size=19) as batches,
        pytest.raises(UserError, match=where),
    ):
        next(batches)

    data, source = with_file(make(encode), on_error="skip")
    batch = epoch(source, data)
    assert batch["skipped"].tolist().count(1) == 1
    assert batch["image"].any(axis=(1, 2, 3)).all()  # No blank row is trained on.
    with eval_batches(source, data, batch_size=20) as batches:
        batch = next(batches)
    np.testing.assert_array_equal(batch["skipped"], np.arange(20) == 4)
    np.testing.assert_array_equal(batch["mask"], ~np.isin(np.arange(20), (4, 19)))


@pytest.mark.parametrize("size", [(1, 1), (1, 10_000), (10_000, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("ops", OPS)
def test_odd_shapes_give_an_image_of_their_own_colour(with_file, encode, size, ops):
    pixels = Image.new("RGB", size, (200, 100, 50))
    end = "" if ops.endswith("resize") else " | resize"
    data, source = with_file(encode(pixels, "PNG"), train_transform=ops + end)
    image = epoch(source, data)["image"]
    flat = (image == np.array([200, 100, 50], np.uint8)).all(axis=(1, 2, 3))
    assert flat.sum() == 1


@pytest.mark.parametrize("size", [(1, 10_000), (10_000, 1)], ids=str)
def test_a_line_that_would_grow_beyond_all_bounds_is_refused(with_file, encode, size):
    line = "resize_small(256) | random_crop | resize"
    content = encode(Image.new("RGB", size, "red"), "PNG")
    data, source = with_file(content, train_transform=line)
    says = r"\(record 4\) has (1x10000|10000x1) pixels, .*(256x2560000|2560000x256)"
    with pytest.raises(UserError, match=says):
        epoch(source, data)
