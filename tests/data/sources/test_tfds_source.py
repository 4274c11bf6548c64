import dataclasses
import json
import shutil

import numpy as np
import pytest
from tfds_sets import builder_class, png

from vit_jax.data import pipeline
from vit_jax.data.fingerprint import differences, fingerprint
from vit_jax.data.sources import arrays
from vit_jax.data.sources.arrays import ArraySource
from vit_jax.data.sources.open import open_source, open_unchecked
from vit_jax.errors import NoLabels, UserError
from vit_jax.tools.preparing import metadata

SIZES = {"train": 23, "test": 7}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Prepares a small data set, `tiny_set/red:1.2.0`, as any user would."""
    tfds = pytest.importorskip("tensorflow_datasets")
    features = {
        "picture": tfds.features.Image(shape=(5, 9, 3), encoding_format="png"),
        "kind": tfds.features.ClassLabel(names=["a", "b", "c"]),
    }
    splits = {
        name: lambda size=size: (
            {"picture": png(pixels(i)), "kind": i % 3} for i in range(size)
        )
        for name, size in SIZES.items()
    }
    code = tmp_path_factory.mktemp("code")
    builder = builder_class("tiny_set", "1.2.0", features, splits, code, config="red")
    where = tmp_path_factory.mktemp("tfds")
    builder(
        data_dir=where, config="red", file_format="array_record"
    ).download_and_prepare()
    return where


def pixels(i):
    return np.full((5, 9, 3), (i, 100, 200), np.uint8)


@pytest.fixture
def make(data_config, prepared):
    keys = {"image_key": "picture", "label_key": "kind", "data_dir": str(prepared)}
    return lambda **more: data_config(**{"name": "tiny_set/red", **keys, **more})


@pytest.mark.parametrize(
    "name", ["tiny_set/red", "tiny_set/red:1.2.0", "tiny_set/red:1.*.*"]
)
def test_a_small_tfds_set_lies_in_memory(make, name):
    source = open_source(make(name=name), "train")
    assert isinstance(source, ArraySource)
    assert source.class_names == ("a", "b", "c")
    assert sorted(source.images[:, 0, 0, 0]) == list(range(23))  # TFDS shuffles them.
    for i in range(23):
        number = source.images[i, 0, 0, 0]
        np.testing.assert_array_equal(source.images[i], pixels(number))
        assert source.labels[i] == number % 3
    assert source.describe(4) == f"{name} train record 4"


def test_a_set_that_is_not_prepared_says_how_to_prepare_it(make, prepared):
    for name in ("tiny_set/blue", "no_such_set", "tiny_set/red:9.9.9"):
        match = rf"'{name}'.*{prepared}.*vit_jax.prepare --dataset={name} --data_dir={prepared}"
        with pytest.raises(UserError, match=match):
            open_source(make(name=name), "train")


SUB_SPLITS = ("train[:80%]", "train[5:9]+test[:3]", "train[-4:]", "test[50%:]+train")


@pytest.mark.parametrize("split", SUB_SPLITS)
def test_sub_splits_are_those_of_tfds(make, prepared, split):
    tfds = pytest.importorskip("tensorflow_datasets")
    builder = tfds.core.read_only_builder.builder_from_files(
        "tiny_set/red", data_dir=prepared
    )
    decoders = {"picture": tfds.decode.SkipDecoding()}
    expected = [r["kind"] for r in builder.as_data_source(split, decoders=decoders)]
    source = open_source(make(), split)
    assert source.labels.tolist() == expected
    name, _, number = source.record_id(len(source) - 1).partition("/")
    whole = open_source(make(), name)
    np.testing.assert_array_equal(source.images[-1], whole.images[int(number)])


@pytest.mark.parametrize(
    ("split", "keys", "match"),
    [
        ("val", {}, r"no split 'val'; it has test, train"),
        ("train", {"image_key": "x"}, r"data\.image_key='x'.*it has kind, picture"),
        (
            "train",
            {"label_key": "x"},
            r"label_key='x': tiny_set/red has no such feature; .*; or set .*classes=0",
        ),
        ("train", {"label_key": "picture"}, "'picture'.*is not a class number but"),
    ],
)
def test_what_a_set_lacks_is_a_user_error(make, split, keys, match):
    with pytest.raises(UserError, match=match):
        open_source(make(**keys), split)


@pytest.fixture
def copied(prepared, tmp_path):
    shutil.copytree(prepared / "tiny_set", tmp_path / "tiny_set")
    (shard,) = (tmp_path / "tiny_set/red/1.2.0").glob("*train.array_record*")
    return tmp_path, shard


def test_no_module_that_a_set_names_is_imported(make, copied, tmp_path, monkeypatch):
    (tmp_path / "foreign_features.py").write_text("raise SystemExit('it was run')")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "tiny_set/red/1.2.0/features.json"
    text = path.read_text()
    named = "tensorflow_datasets.core.features.class_label_feature.ClassLabel"
    assert named in text
    path.write_text(text.replace(named, "foreign_features.Label"))
    for read in (
        lambda: open_source(make(data_dir=str(tmp_path)), "train"),
        lambda: metadata.read_info(path.parent),
    ):
        with pytest.raises(
            UserError, match=r"names 'foreign_features\.Label', a class"
        ):
            read()


def test_a_missing_shard_and_another_format_are_user_errors(make, copied):
    data_dir, shard = copied
    shard.unlink()
    with pytest.raises(UserError, match=f"lacks {shard}: prepare it again"):
        open_source(make(data_dir=str(data_dir)), "train")
    info = shard.with_name("dataset_info.json")
    text = json.dumps(json.loads(info.read_text()) | {"fileFormat": "tfrecord"})
    info.write_text(text)
    with pytest.raises(UserError, match="prepared as tfrecord, but only array_record"):
        open_source(make(data_dir=str(data_dir)), "train")


def test_a_damaged_shard_names_set_split_and_record(make, copied, monkeypatch):
    monkeypatch.setattr(arrays, "_MEMORY", 0)
    data_dir, shard = copied
    content = bytearray(shard.read_bytes())
    last = content.rfind(b"PNG")
    content[last - 20 : last + 40] = b"\xff" * 60
    shard.write_bytes(content)
    data = make(data_dir=str(data_dir), image_size=(5, 9), eval_transform="")
    source = open_source(data, "train[2:]")
    batches = pipeline.eval_batches(source, data, batch_size=4)
    match = r"tiny_set/red train\[2:\] record \d+ .*cannot be"
    with batches, pytest.raises(UserError, match=match):
        list(batches)
    with pytest.raises(IndexError, match="21"):
        source[21]


def test_a_bucket_without_its_packages_says_what_to_install(make, monkeypatch):
    import tensorflow_datasets as tfds

    def without_gcsfs(name, data_dir):
        assert data_dir == "gs://bucket/~sets"  # As it was given.
        raise ImportError("Please install gcsfs to access Google Storage")

    reader = tfds.core.read_only_builder
    monkeypatch.setattr(reader, "builder_from_files", without_gcsfs)
    with pytest.raises(UserError, match=r"'gs://bucket/~sets'.*-e '\.\[gcs\]'"):
        open_source(make(data_dir="gs://bucket/~sets"), "train")


@pytest.mark.parametrize("memory", [0, 2**29])
def test_labels_are_not_read_without_classes(make, monkeypatch, memory):
    monkeypatch.setattr(arrays, "_MEMORY", memory)
    data = make(label_key="absent", num_classes=0, image_size=(5, 9))
    data = dataclasses.replace(data, eval_transform="")
    source = open_source(data, "train[2:]")
    assert (source.images is None) == (not memory)
    assert (len(source), source.class_names, source.labels) == (21, (), None)
    assert source[3].keys() == {"image"}
    with pipeline.eval_batches(source, data, batch_size=21) as batches:
        (batch,) = batches
    assert batch.keys() == {"image", "index", "mask", "skipped"}
    assert len(set(batch["image"][:, 0, 0, 0])) == 21
    with pytest.raises(NoLabels, match="it has kind, picture$"):
        open_unchecked(make(label_key="absent"), "train")


@pytest.mark.parametrize("prepared_by_us", [False, True])
def test_a_resumed_run_recognises_shards(make, copied, monkeypatch, prepared_by_us):
    monkeypatch.setattr(arrays, "_MEMORY", 0)
    data_dir, shard = copied
    data = make(data_dir=str(data_dir))
    manifest = shard.with_name("manifest.json")

    def write(digest):
        part = {"shards": [{"file": shard.name, "sha256": digest}]}
        manifest.write_text(json.dumps({"splits": {"train": part}}))

    if prepared_by_us:
        write("00")
    stored = fingerprint(open_source(data, "train"))
    moved = data_dir / "moved"
    shutil.copytree(data_dir / "tiny_set", moved / "tiny_set")
    assert fingerprint(open_source(make(data_dir=str(moved)), "train")) == stored
    if prepared_by_us:
        write("01")
    else:
        path = shard.with_name("dataset_info.json")
        info = json.loads(path.read_text())
        for each in info["splits"]:
            each["numBytes"] = "12345"
        path.write_text(json.dumps(info))
    lines = differences(stored, open_source(data, "train"))
    assert lines == ["sizes or contents of the shards differ"]


def test_bands_of_eurosat_are_read(data_config, tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")
    features = {
        "sentinel2": tfds.features.Tensor(shape=(64, 64, 13), dtype=np.float32),
        "label": tfds.features.ClassLabel(names=["forest", "river"]),
    }
    made = [
        np.random.default_rng(i).uniform(0, 9_000, (64, 64, 13)).astype(np.float32)
        for i in range(6)
    ]
    splits = {
        "train": lambda: ({"sentinel2": x, "label": i % 2} for i, x in enumerate(made))
    }
    builder = builder_class(
        "eurosat", "2.0.0", features, splits, tmp_path, config="all"
    )
    builder(
        data_dir=tmp_path, config="all", file_format="array_record"
    ).download_and_prepare()
    data = data_config(
        name="eurosat/all",
        data_dir=str(tmp_path),
        image_key="sentinel2",
        num_classes=2,
        image_size=(64, 64),
        channels=3,
        bands=(3, 2, 1),
        pixels="float32",
        mean=(0.5,),
        train_transform="",
    )
    source = open_source(data, "train")
    with pipeline.eval_batches(
        source, dataclasses.replace(data, eval_transform=""), batch_size=6
    ) as batches:
        (batch,) = batches
    for image, label in zip(batch["image"], batch["label"], strict=True):
        # Floats are fractions of white, 255.
        same = [np.allclose(image, x[..., 3:0:-1] * 255) for x in made]
        assert same.count(True) == 1 and same.index(True) % 2 == label
    assert source.class_names == ("forest", "river")
