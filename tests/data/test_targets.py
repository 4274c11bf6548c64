"""Numbers of images, `data.target_key`, from every kind of data set into batches."""

import csv
import json
import sys
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tar_files
from PIL import Image
from tfds_sets import builder_class, png

from vit_jax.data import pipeline
from vit_jax.data.fields.target import check_precision, number, read_targets
from vit_jax.data.fingerprint import differences, fingerprint
from vit_jax.data.sources.arrays import check_pair, open_arrays
from vit_jax.data.sources.open import open_source
from vit_jax.errors import UserError

N, SIZE = 6, (9, 13)
# Of image i; "dark" is its grey value, so that rows can be told apart.
DARK = [10.0 * i for i in range(N)]
AGES = [3.5, None, 40, 0, -2, 7]


def pixels(i):
    return np.full((*SIZE, 3), DARK[i], np.uint8)


def files(root):
    for i in range(N):
        root.mkdir(exist_ok=True)
        Image.fromarray(pixels(i)).save(root / f"{i}.png")
    return [
        {"file_name": f"{i}.png", "age": AGES[i], "dark": DARK[i]} for i in range(N)
    ]


def as_csv(root):
    rows = files(root)
    with open(root / "t.csv", "w", newline="") as file:
        table = csv.DictWriter(file, rows[0].keys())
        table.writeheader()
        table.writerows([rows[1] | {"age": "N/A"}, *rows[:1], *rows[2:]])
    return {"name": "table", "data_dir": root / "t.csv", "image_key": "file_name"}


def as_json_lines(root):
    lines = map(json.dumps, files(root))
    (root / "t.jsonl").write_text("\n".join(lines))
    return {"name": "table", "data_dir": root / "t.jsonl", "image_key": "file_name"}


def as_folder(root):
    lines = map(json.dumps, files(root))
    (root / "metadata.jsonl").write_text("\n".join(lines))
    return {"name": "folder", "data_dir": root}


def as_parquet(root):
    root.mkdir()
    images = [{"bytes": png(pixels(i)).read(), "path": None} for i in range(N)]
    columns = {"image": images, "age": [*map(_float, AGES)], "dark": DARK}
    pq.write_table(pa.table(columns), root / "all-00000-of-00001.parquet")
    return {"name": "parquet", "data_dir": root}


def as_tar(root):
    samples = (
        {
            f"{i}.png": png(pixels(i)).read(),
            f"{i}.json": json.dumps({"age": AGES[i], "dark": DARK[i]}).encode(),
        }
        for i in range(N)
    )
    tar_files.shard(root / "all" / "0.tar", *samples)
    return {"name": "tar", "data_dir": root}


def as_tfds(root):
    import tensorflow_datasets as tfds

    features = {
        "image": tfds.features.Image(shape=(*SIZE, 3), encoding_format="png"),
        "age": np.float32,
        "dark": np.int64,
    }

    def examples():
        for i in range(N):
            age = np.nan if AGES[i] is None else AGES[i]
            yield {"image": png(pixels(i)), "age": age, "dark": int(DARK[i])}

    code = root / "code"
    code.mkdir(parents=True)
    builder = builder_class("aged_set", "1.0.0", features, {"train": examples}, code)
    builder(data_dir=root, file_format="array_record").download_and_prepare()
    return {"name": "aged_set", "data_dir": root, "split": "train"}


def as_arrays(root):
    images = np.stack([pixels(i) for i in range(N)])
    targets = np.array([[_float(a), d] for a, d in zip(AGES, DARK, strict=True)])
    return _custom(
        lambda data, split: open_arrays(
            {"all": (images, targets)}, split, "arrays", num_targets=len(data.targets)
        )
    )


def as_custom(root):
    class Source:
        class_names, images = (), None

        def __len__(self):
            return N

        def __getitem__(self, i):
            return {"image": pixels(i), "targets": [AGES[i], DARK[i]]}

        def describe(self, i):
            return f"image {i}"

        record_id = describe

    return _custom(lambda data, split: Source())


def _float(value):
    return np.nan if value is None else float(value)


def _custom(open_split):
    module = types.ModuleType("aged_module")
    module.open_split = open_split
    sys.modules[module.__name__] = module
    return {"name": "aged_module:open_split"}


@pytest.fixture
def make(data_config):
    def make(keys, **more):
        keys = keys | {"data_dir": str(keys.get("data_dir", "")), "num_classes": 0}
        usual = {"target_key": "age, dark", "image_size": SIZE, "split": "all"}
        return data_config(**usual | keys | more)

    return make


KINDS = as_csv, as_json_lines, as_folder, as_parquet, as_tar, as_tfds, as_arrays
KINDS = (*KINDS, as_custom)


@pytest.mark.parametrize("kind", KINDS)
def test_each_image_has_its_numbers(kind, make, tmp_path):
    data = make(kind(tmp_path / "set"))
    source = open_source(data, data.split)
    expected = {dark: _float(age) for age, dark in zip(AGES, DARK, strict=True)}
    for how in ({}, {"train": False}):
        if how:
            batches = pipeline.eval_batches(source, data, batch_size=4)
        else:
            keys = {"batch_size": N, "seed": 0, "start": 0, "stop": 1}
            batches = pipeline.train_batches(source, data, **keys)
        seen = []
        with batches:
            for batch in batches:
                assert batch["targets"].dtype == np.float32
                known = batch.get("mask", np.ones(N, bool))
                assert np.isnan(batch["targets"][~known]).all()
                seen += zip(batch["image"][known], batch["targets"][known], strict=True)
        assert len(seen) == N
        for image, (age, dark) in seen:
            assert image[0, 0, 0] == dark
            np.testing.assert_equal(float(age), np.float32(expected[float(dark)]))
    read = read_targets(source, data.targets)
    assert sorted(read[:, 1]) == DARK and np.isnan(read[:, 0]).sum() == 1


def test_changed_numbers_are_other_data(make, tmp_path):
    data = make(as_csv(tmp_path / "set"))
    before = fingerprint(open_source(data, data.split))
    table = tmp_path / "set" / "t.csv"
    table.write_text(table.read_text().replace("40,", "41,"))
    (line,) = differences(before, open_source(data, data.split))
    assert line == "targets of the image files differ"


@pytest.mark.parametrize(
    ("kind", "key", "message"),
    [
        (as_csv, "weight", "data.target_key='weight'.*file_name, age, dark"),
        (as_parquet, "weight", "data.target_key='weight'.*age, dark"),
        (as_csv, "file_name", "t.csv row 1 has '1.png' in 'file_name'"),
        (as_folder, "file_name", r"^\d.png has '\d.png' in 'file_name'"),
        (as_arrays, "a,b,c", r"targets=float64 \(6, 2\)"),
        (as_custom, "age", "image 0.*has 2 targets.*'age' has 1"),
    ],
)
def test_columns_without_numbers_are_refused(kind, key, message, make, tmp_path):
    data = make(kind(tmp_path / "set"), target_key=key)
    with pytest.raises(UserError, match=message):
        read_targets(open_source(data, data.split), data.targets)


def test_a_source_without_numbers_is_refused(make):
    data = make({"name": "synthetic"}, split="train")
    with pytest.raises(UserError, match="has no 'targets', which data.target_key='age"):
        read_targets(open_source(data, "train"), data.targets)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3.0),
        (" 4.5 ", 4.5),
        (b"1e3", 1000.0),
        ("", None),
        (None, None),
        ("n/a", None),
    ],
)
def test_cells_are_numbers_or_missing(value, expected):
    found = number(value, "age")
    assert np.isnan(found) if expected is None else found == expected


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([1.7e9, 1.7e9 + 20, 1.7e9 + 50], "1700000000 to 1700000050"),
        ([1.0, 1e39, 2.0], r"1 to 1e\+39"),
        ([1e-44, 2e-44, 3.1e-44], "1e-44"),
        ([1e6, 1e6 + 9.5, 1e6 + 20.25], ""),
        ([1e30, 2e30, 3e30], ""),
    ],
)
def test_numbers_that_float32_cannot_tell_apart_are_refused(values, problem):
    if not problem:
        return check_precision(np.array(values), "age")
    with pytest.raises(UserError, match=f"age has numbers from .*{problem}"):
        check_precision(np.array(values), "age")
    with pytest.raises(UserError, match=f"data train: targets.*{problem}"):
        pair = np.zeros((3, *SIZE), np.uint8), np.array(values)
        check_pair("data train: ", *pair, (), num_targets=1)


@pytest.mark.parametrize("value", ["3,5", "inf", [1], "old"])
def test_other_cells_are_refused(value):
    with pytest.raises(UserError, match="'age', which is not a number"):
        number(value, "age")
