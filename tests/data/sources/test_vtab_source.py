import collections
import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest
from tfds_sets import builder_class, png

from vit_jax.data import catalogue
from vit_jax.data.sources import vtab
from vit_jax.data.sources.open import open_source
from vit_jax.errors import UserError

ROOT = pathlib.Path(__file__).parents[3]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "vtab1k.json").read_text())["tasks"]


@pytest.mark.parametrize("name", GOLDEN)
def test_a_task_is_defined_as_in_the_reference_codes(name):
    task, golden = vtab.TASKS[name], GOLDEN[name]
    parts = task.splits["train800"], task.splits["val200"]
    assert parts[0] == "train[:800]"
    assert task.splits["train800val200"] == "+".join(parts) == golden["train"]
    assert task.splits["test"] == golden["test"]
    assert task.num_classes == golden["classes"]
    assert ("+".join(task.ops) or "none") == golden["ops"]
    reference, _, label = golden["key"].partition(" ")
    assert task.tfds.startswith(reference)
    assert re.fullmatch(r"[^:]+:\d+\.[\d*]+\.[\d*]+", task.tfds)
    if label.startswith("label_"):
        key, _, bins = label.partition("/")
        assert task.label.key == key
        assert not bins or task.label.num_classes == int(bins)


def test_every_task_is_in_the_reference():
    groups = collections.Counter(task.group for task in vtab.TASKS.values())
    assert groups == {"natural": 7, "specialised": 4, "structured": 8}
    assert list(vtab.TASKS) == list(GOLDEN)
    assert [f"vtab/{name}" for name in GOLDEN] == list(catalogue.ENTRIES)[-19:]


# Written out from github.com/google-research/task_adaptation, data/clevr.py.
@pytest.mark.parametrize(
    ("distance", "label"),
    [(0.1, 0), (8.0, 0), (8.01, 1), (8.5, 1), (8.7, 2), (9.2, 3), (9.6, 4), (10.0, 4)]
    + [(10.01, 5), (17.0, 5)],
)
def test_clevr_distance_is_that_of_the_closest_object(distance, label):
    coordinates = [[1, 2, distance + 3], [300, 200, distance], [0, 0, distance + 1]]
    record = {"objects": {"pixel_coords": np.float32(coordinates)}}
    assert vtab.clevr_distance(record) == label


# The same, data/kitti.py.
@pytest.mark.parametrize(
    ("types", "depths", "label"),
    [
        ([0, 3], [7.9, 1.0], 0),
        ([4, 2, 1], [1.0, 8.0, 30.0], 0),
        ([1], [8.1], 1),
        ([2], [20.0], 1),
        ([0, 0], [45.0, 20.5], 2),
        ([3, 5], [2.0, 9.0], 3),
        ([], [], 3),
    ],
)
def test_kitti_distance_is_that_of_the_closest_car_van_or_truck(types, depths, label):
    location = [np.float32([-3, 1.5, depth]) for depth in depths]
    record = {"objects": {"type": types, "location": location}}
    assert vtab.kitti_distance(record) == label


def test_dsprites_values_are_grouped_evenly():
    def labels(task, key, count):
        label = vtab.TASKS[f"dsprites_{task}"].label
        return [label({f"label_{key}": np.int64(i)}) for i in range(count)]

    assert labels("position", "x_position", 32) == [i // 2 for i in range(32)]
    angle = labels("orientation", "orientation", 40)
    assert angle == [int(i / 2.5) for i in range(40)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Prepares sets that store records as clevr, kitti, dsprites and smallnorb do."""
    tfds = pytest.importorskip("tensorflow_datasets")
    where = tmp_path_factory.mktemp("vtab")
    code, f = tmp_path_factory.mktemp("code"), tfds.features
    number = lambda count: f.ClassLabel(num_classes=count)
    vector = f.Tensor(shape=(3,), dtype=np.float32)

    def prepare(name, version, split, features, examples):
        builder = builder_class(
            name, version, features, {split: lambda: examples}, code
        )
        builder(data_dir=where, file_format="array_record").download_and_prepare()

    picture = f.Image(shape=(7, 7, 1))
    colour = png(np.arange(5 * 9 * 3, dtype=np.uint8).reshape(5, 9, 3))
    grey = np.arange(7 * 7, dtype=np.uint8).reshape(7, 7)
    # Record i has 3 + i objects, the closest at 7.8 + i metres.
    near = lambda i, k: {"size": k % 2, "pixel_coords": [1, 2, 7.8 + i + k]}
    qa = f.Sequence({"question": f.Text(), "answer": f.Text()})
    objects = f.Sequence({"size": number(2), "pixel_coords": vector})
    clevr = [
        {
            "image": colour,
            "question_answer": [{"question": "?", "answer": "!"}],
            "objects": [near(i, k) for k in range(3 + i)],
        }
        for i in range(4)
    ]
    features = {"image": f.Image(), "question_answer": qa, "objects": objects}
    prepare("clevr", "3.1.0", "validation", features, clevr)
    norb = [
        {"image": png(grey), "image2": png(grey[::-1]), "label_azimuth": 17 - i}
        | {"label_elevation": i, "label_category": 0}
        for i in range(6)
    ]
    features = {"image": picture, "image2": picture, "label_azimuth": number(18)}
    features |= {"label_elevation": number(9), "label_category": number(5)}
    prepare("smallnorb", "2.0.0", "test", features, norb)
    shapes = [
        {"image": png(grey % 2), "label_x_position": 3 * i, "label_orientation": 3 * i}
        for i in range(8)
    ]
    features = {"image": picture, "label_x_position": number(32)}
    features |= {"label_orientation": number(40)}
    prepare("dsprites", "2.0.0", "train", features, shapes)
    return where


@pytest.fixture
def opened(data_config, prepared, monkeypatch):
    def open_task(name, split="test", test=None, **keys):
        task = vtab.TASKS[name]
        if test:  # The real sets are larger than these.
            task = dataclasses.replace(task, test=test)
            monkeypatch.setitem(vtab.TASKS, name, task)
        keys = {"num_classes": task.num_classes, "data_dir": str(prepared), **keys}
        return open_source(data_config(name=f"vtab/{name}", **keys), split)

    return open_task


@pytest.mark.parametrize(
    ("name", "labels", "test"),
    [
        ("clevr_count", [0, 1, 2, 3], None),
        ("clevr_distance", [0, 2, 4, 5], None),
        ("norb_azimuth", [14, 13, 12], "test[50%:]"),
        ("dsprites_position", [0, 1, 3, 4, 6, 7, 9, 10], "train"),
        ("dsprites_orientation", [0, 1, 2, 3, 4, 6, 7, 8], "train"),
    ],
)
def test_labels_are_made_of_the_records_that_tfds_stores(opened, name, labels, test):
    source = opened(name, test=test)
    found = [source[i]["label"] for i in range(len(source))]
    if name == "norb_azimuth":  # Half of a set that TFDS shuffles.
        assert len(set(found)) == 3
        assert set(found) < set(range(12, 18))
    else:
        assert sorted(found) == sorted(labels)
    assert source.describe(1).startswith(f"vtab/{name} (")


def test_the_elevation_and_azimuth_of_a_record_belong_together(opened):
    azimuth, elevation = opened("norb_azimuth"), opened("norb_elevation")
    for i in range(3):
        assert azimuth[i]["label"] == 17 - elevation[i]["label"]
    # Of the two cameras it is the first.
    np.testing.assert_array_equal(azimuth.images[0][..., 0].ravel(), np.arange(49))


def test_images_of_zeros_and_ones_become_black_and_white(opened):
    source = opened("dsprites_position", test="train")
    assert source.images.shape == (8, 7, 7, 3)
    expected = np.arange(49).reshape(7, 7) % 2 * 255
    np.testing.assert_array_equal(source.images[3][..., 2], expected)


@pytest.mark.parametrize(
    ("name", "split", "match"),
    [
        ("norb_azimuth", "train", "has only train800, val200, train800val200, test"),
        (
            "norb_azimuth",
            "test[:100]",
            "has only train800, val200, train800val200, test",
        ),
        ("clever", "test", r"'vtab/clever'.*one of caltech101, .*clevr_count"),
        ("dmlab", "val200", r"prepare --dataset=dmlab:2\.0\.1 --data_dir"),
    ],
)
def test_what_is_no_task_or_split_of_one_is_named(
    data_config, prepared, name, split, match
):
    num_classes = vtab.TASKS[name].num_classes if name in vtab.TASKS else 3
    keys = {"num_classes": num_classes, "data_dir": str(prepared)}
    with pytest.raises(UserError, match=match):
        open_source(data_config(name=f"vtab/{name}", **keys), split)
