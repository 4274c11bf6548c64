import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest
from tfds_sets import builder_class, png

from vit_jax.data import catalogue, splits
from vit_jax.data.sources import vtab
from vit_jax.data.sources.open import open_source
from vit_jax.errors import UserError

ROOT = pathlib.Path(__file__).parents[3]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "vtab1k.json").read_text())["tasks"]
SHARED = ROOT.parent / "shared" / "paper" / "vtab1k.json"


def test_there_are_19_tasks_in_three_groups():
    groups = [task.group for task in vtab.TASKS.values()]
    counts = {group: groups.count(group) for group in groups}
    assert counts == {"natural": 7, "specialised": 4, "structured": 8}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_task_is_defined_as_in_the_reference_codes(name):
    task, golden = vtab.TASKS[name], GOLDEN[name]
    assert task.splits["train800val200"] == golden["train"]
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
    assert list(vtab.TASKS) == list(GOLDEN)
    assert [f"vtab/{name}" for name in GOLDEN] == list(catalogue.ENTRIES)[-19:]


def test_the_copy_of_the_reference_agrees_with_the_shared_file():
    if not SHARED.exists():
        pytest.skip(f"no {SHARED}")
    shared = json.loads(SHARED.read_text())["tasks"]
    assert [task["key"] for task in GOLDEN.values()] == list(shared)
    for task in GOLDEN.values():
        train, test, num_classes, ops = shared[task["key"]]
        if "task_adaptation says" in train:  # The one on which the codes disagree.
            train = train.replace("train[:1000]", "train[:800]").split(" (")[0]
        found = [task[k] for k in ("train", "test", "classes", "ops")]
        assert found == [train, test, num_classes, ops]


# Sizes of the TFDS sets that have no validation split, from the TFDS catalogue.
SIZES = {"caltech101": 3_060, "cifar100": 50_000, "pets": 3_680, "svhn": 73_257}
SIZES |= {"eurosat": 27_000, "resisc45": 31_500, "dsprites_position": 737_280}


@pytest.mark.parametrize("name", SIZES)
def test_training_validation_and_test_images_differ(name):
    sizes = {"train": SIZES[name], "test": 10_000}
    found = {
        role: {
            (s, n) for s, numbers in splits.select(split, sizes, name) for n in numbers
        }
        for role, split in vtab.TASKS[name].splits.items()
    }
    assert (len(found["train800"]), len(found["val200"])) == (800, 200)
    assert found["train800"] | found["val200"] == found["train800val200"]
    assert not found["train800"] & found["val200"]
    assert not found["train800val200"] & found["test"]


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
    position = [
        vtab.TASKS["dsprites_position"].label(r) for r in _values("x_position", 32)
    ]
    assert position == [i // 2 for i in range(32)]
    angle = [
        vtab.TASKS["dsprites_orientation"].label(r) for r in _values("orientation", 40)
    ]
    assert angle[:11] == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4]  # floor(i / 2.5)
    assert angle[-1] == 15
    counts = np.bincount(angle)
    assert (counts.min(), counts.max(), len(counts)) == (2, 3, 16)


def _values(name, count):
    return [{f"label_{name}": np.int64(i)} for i in range(count)]


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

    colour = np.arange(5 * 9 * 3, dtype=np.uint8).reshape(5, 9, 3)
    grey = np.arange(7 * 7, dtype=np.uint8).reshape(7, 7)
    # Record i has 3 + i objects, the closest at 7.8 + i metres.
    clevr = [
        {
            "image": png(colour),
            "question_answer": [{"question": "?", "answer": "!"}],
            "objects": [
                {"size": k % 2, "pixel_coords": [1, 2, 7.8 + i + k]}
                for k in range(3 + i)
            ],
        }
        for i in range(4)
    ]
    features = {"size": number(2), "pixel_coords": vector}
    qa = f.Sequence({"question": f.Text(), "answer": f.Text()})
    features = {
        "image": f.Image(),
        "question_answer": qa,
        "objects": f.Sequence(features),
    }
    prepare("clevr", "3.1.0", "validation", features, clevr)
    # Record i has i vehicles and a pedestrian at 1 metre.
    kitti = [
        {
            "image": png(colour),
            "objects": [{"type": 3, "location": [0, 0, 1]}]
            + [{"type": k % 3, "location": [0, 0, 6.5 * i + k]} for k in range(i)],
        }
        for i in range(5)
    ]
    features = f.Sequence({"type": number(8), "location": vector})
    features = {"image": f.Image(), "objects": features}
    prepare("kitti", "3.1.0", "test", features, kitti)
    norb = [
        {"image": png(grey), "image2": png(grey[::-1]), "label_azimuth": 17 - i}
        | {"label_elevation": i, "label_category": 0}
        for i in range(6)
    ]
    features = {"image": f.Image(shape=(7, 7, 1)), "image2": f.Image(shape=(7, 7, 1))}
    features |= {"label_azimuth": number(18), "label_elevation": number(9)}
    features |= {"label_category": number(5)}
    prepare("smallnorb", "2.0.0", "test", features, norb)
    pets = [{"image": png(colour), "label": i, "species": 0} for i in range(3)]
    features = {"image": f.Image(), "label": number(37), "species": number(2)}
    prepare("oxford_iiit_pet", "4.0.0", "test", features, pets)
    shapes = [
        {"image": png(grey % 2), "label_x_position": 3 * i, "label_orientation": 3 * i}
        for i in range(8)
    ]
    features = {"image": f.Image(shape=(7, 7, 1)), "label_x_position": number(32)}
    prepare(
        "dsprites",
        "2.0.0",
        "train",
        features | {"label_orientation": number(40)},
        shapes,
    )
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
        ("kitti_distance", [3, 0, 1, 1, 2], None),
        ("norb_azimuth", [14, 13, 12], "test[50%:]"),
        ("pets", [0, 1, 2], None),
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


def test_a_task_has_its_own_splits_alone(opened):
    for split in ("train", "validation", "test[:100]"):
        with pytest.raises(
            UserError, match="has train800, val200, train800val200, test"
        ):
            opened("pets", split)


def test_an_unknown_task_lists_the_known(data_config):
    with pytest.raises(
        UserError, match=r"'vtab/clever'.*one of caltech101, .*clevr_count"
    ):
        open_source(data_config(name="vtab/clever"), "test")


def test_a_task_that_is_not_prepared_says_how(data_config, tmp_path):
    data = data_config(name="vtab/dmlab", num_classes=6, data_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"prepare --dataset=dmlab:2\.0\.1 --data_dir"):
        open_source(data, "val200")
