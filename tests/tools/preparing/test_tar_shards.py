"""Tar shards of WebDataset, img2dataset and timm as data sets."""

import gzip
import io
import pathlib
import re
import signal
import subprocess
import sys
import tarfile
import time

import numpy as np
import pytest
from helpers import tiny_config
from PIL import Image
from tar_files import jpeg, pair, shard, write_tar

from vit_jax.data import pipeline
from vit_jax.data.sources.open import open_source
from vit_jax.data.sources.tfds import open_tfds
from vit_jax.errors import UserError
from vit_jax.tools.preparing import build, metadata, tar_shards
from vit_jax.tools.preparing.request import Request

pytest.importorskip("tensorflow_datasets")
ROOT = pathlib.Path(__file__).parents[3]
NAME = metadata.DatasetName("pairs", "", "1.0.0")


def cut_at_a_member(data):
    """Returns a tar file without its last sample and without the mark of its end."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return data[: tar.getmember("000010002.jpg").offset]


@pytest.fixture
def root(tmp_path):
    """Two shards of img2dataset, of 5 and 3 pairs, with the files that it adds."""
    shard(tmp_path / "00000.tar", *map(pair, range(5)))
    shard(tmp_path / "00001.tar", *map(pair, range(10_000, 10_003)))
    (tmp_path / "00000_stats.json").write_text('{"successes": 5}')
    (tmp_path / "00000.parquet").write_bytes(b"PAR1")
    return tmp_path


@pytest.fixture
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("out")


def prepare(root, out, processes=1, **options):
    request = Request("webdataset", root, NAME, **options)
    job = tar_shards.open_tar_shards(request)
    return build.build(job, NAME.folder(out), processes)


def texts(out, split="train"):
    source = open_tfds("pairs", str(out), split, "image", None, caption_key="text")
    return [source[i]["text"][0] for i in range(len(source))]


def paths(out, split="train"):
    source = open_tfds("pairs", str(out), split, "image", None)
    return [path.decode() for path in source.read_feature("path")]


def test_pairs_of_img2dataset_keep_bytes_order_and_captions(root, out):
    content = prepare(root, out)
    source = open_tfds("pairs", str(out), "train", "image", None, caption_key="text")
    numbers = [*range(5), *range(10_000, 10_003)]
    assert [source[i]["image"] for i in range(8)] == [jpeg(i) for i in numbers]
    assert texts(out) == [f"caption {i}" for i in numbers]
    assert paths(out)[5] == "00001.tar/000010000.jpg"
    assert content["splits"]["train"]["records"] == 8
    assert content["skipped"] == [] and content["skipped_counts"] == {}
    assert set(source.records[0]) == {"image", "text", "path"}
    assert metadata.verify(NAME.folder(out)) == content


@pytest.mark.parametrize(
    ("caption", "expected"),
    [("json:alt", "alt 3"), ("txt", "caption 3"), ("json:cut", "a ?")],
)
def test_a_caption_is_a_member_or_a_field(root, out, caption, expected):
    prepare(root, out, caption=caption)
    assert texts(out)[3] == expected


def test_an_unknown_field_is_named_beside_those_there_are(root, out):
    with pytest.raises(UserError, match="field 'title' of its json is missing.*alt"):
        prepare(root, out, caption="json:title")


def test_shards_hold_whole_tar_files_and_processes_write_the_same(root, out):
    content = prepare(root, out / "one", shard_bytes=1)
    assert [s["records"] for s in content["splits"]["train"]["shards"]] == [5, 3]
    assert prepare(root, out / "two", 2, shard_bytes=1) == content
    assert len(prepare(root, out / "whole")["splits"]["train"]["shards"]) == 1
    # Of 10,240 bytes each, the size to which tar files are padded.
    (root / "00002.tar").write_bytes((root / "00001.tar").read_bytes())
    sizes = [path.stat().st_size for path in sorted(root.glob("*.tar"))]
    parts = tar_shards._group("train", sizes, sizes[0] + sizes[1])
    assert [(p.start, p.stop) for p in parts] == [
        (0, sum(sizes[:2])),
        (sum(sizes[:2]), sum(sizes)),
    ]


def test_every_reason_is_counted(root, out):
    failed = pair(1, status="failed_to_download", error_message="404")
    del failed["000000001.jpg"]
    no_image, no_text, damaged = pair(2), pair(3), pair(4)
    del no_image["000000002.jpg"]
    del no_text["000000003.txt"]
    damaged["000000004.jpg"] = damaged["000000004.jpg"][:-99]
    bad_json = pair(7) | {"000000007.json": b'{"error_message":'}
    shard(
        root / "00000.tar",
        pair(0),
        failed,
        no_image,
        no_text,
        damaged,
        pair(5, " \n"),
        pair(6, "ümlaut"),
        bad_json,
    )
    cut = cut_at_a_member((root / "00001.tar").read_bytes())
    (root / "00001.tar").write_bytes(cut)
    with pytest.raises(UserError, match=r"00000.tar/000000001 .*404.*--on_error=skip"):
        prepare(root, out)

    (NAME.folder(out).parent).rename(out / "given_up")
    content = prepare(root, out, on_error="skip")
    reasons = "status not success,no image,no caption,damaged image,empty caption"
    reasons = f"{reasons},damaged json,damaged tar".split(",")
    assert content["skipped_counts"] == dict.fromkeys(reasons, 1)
    assert content["skipped"][-1]["record"] == "00001.tar"
    assert texts(out) == ["caption 0", "ümlaut", "caption 10000"]


def test_unchecked_images_are_not_decoded(root, out):
    damaged = pair(0) | {"000000000.jpg": b"no image"}
    shard(root / "00000.tar", damaged)
    assert prepare(root, out, decode=False)["splits"]["train"]["records"] == 4


@pytest.mark.parametrize("ending", ["tar.gz", "tgz"])
def test_compressed_shards(root, out, ending):
    expected = prepare(root, out / "plain")["splits"]["train"]["shards"][0]
    for path in root.glob("*.tar"):
        path.with_suffix(f".{ending}").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    content = prepare(root, out)
    assert content["splits"]["train"]["shards"][0]["records"] == expected["records"]
    assert texts(out) == texts(out / "plain")
    short = root / f"00001.{ending}"
    short.write_bytes(short.read_bytes()[:-30])
    content = prepare(root, out / "short", on_error="skip")
    assert content["skipped_counts"] == {"damaged tar": 1}


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (cut_at_a_member, 5 + 1),  # The second may lack a member too.
        (lambda data: data[:512], 5),
        (lambda data: b"", 5),
        (lambda data: b"<html>", 5),
        (lambda data: data + data, 5 + 2),
        (lambda data: data[:600] + b"x" * 4_000 + data[4_600:], 5),
    ],
    ids=["between members", "header", "empty", "page", "joined", "overwritten"],
)
def test_a_damaged_tar_file_is_found_however_it_is_cut(root, out, change, left):
    path = root / "00001.tar"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(
        UserError, match=r"00001.tar is damaged or truncated .*--on_err"
    ):
        prepare(root, out / "raise")
    content = prepare(root, out, on_error="skip")
    assert content["skipped_counts"]["damaged tar"] == 1
    assert content["splits"]["train"]["records"] == left


def classes(path, labels):
    samples = (
        {f"{i:04d}.jpg": jpeg(i), f"{i:04d}.cls": str(label).encode()}
        for i, label in enumerate(labels)
    )
    shard(path, *samples)


def labels_of(out, split):
    source = open_tfds("pairs", str(out), split, "image", "label")
    return [source[i]["label"] for i in range(len(source))], source.class_names


def test_classes_of_timm_have_splits_in_their_file_names(tmp_path, out):
    classes(tmp_path / "imagenet1k-train-0000.tar", [3, 0])
    classes(tmp_path / "imagenet1k-train-0001.tar", [7])
    classes(tmp_path / "imagenet1k-validation-00.tar", [5])
    (tmp_path / "_info.json").write_text("{}")
    prepare(tmp_path, out)
    assert labels_of(out, "train") == ([3, 0, 7], ())
    assert labels_of(out, "validation") == ([5], ())


def test_classes_in_folders_of_splits_and_their_names(tmp_path, out):
    classes(tmp_path / "train" / "0.tar", [1, 0])
    classes(tmp_path / "test" / "deep" / "0.tar", [1])
    (tmp_path / "notes").mkdir()
    (tmp_path / "classnames.txt").write_text("red ant\nbee\n")
    prepare(tmp_path, out)
    assert labels_of(out, "train") == ([1, 0], ("red ant", "bee"))
    assert labels_of(out, "test") == ([1], ("red ant", "bee"))
    assert paths(out, "test") == ["test/deep/0.tar/0000.jpg"]
    prepare(tmp_path, out / "one", splits=("test",))
    assert not list(NAME.folder(out / "one").glob("*train*"))
    classes(tmp_path / "train" / "0.tar", [1, 2, "cat"])
    for label in (2, "cat"):
        with pytest.raises(UserError, match=f"cls '{label}', not a class from 0 to 1"):
            prepare(tmp_path, out / str(label))
        classes(tmp_path / "train" / "0.tar", [1, "cat"])


def test_keys_end_at_the_first_dot_of_the_last_part(tmp_path, out):
    image = jpeg(1)
    write_tar(
        tmp_path / "a.tar",
        [
            ("./v1.0/x.seg.png", b"not the image"),
            ("./v1.0/x.JPG", image),
            ("./v1.0/x.txt", b"one"),
            ("v2.0/x.npy", b"its features"),
            ("v2.0/x.jpg", image),
            ("v2.0/._x.jpg", b"of macOS"),
            ("v2.0/x.txt", b"two"),
        ],
    )
    prepare(tmp_path, out)
    assert texts(out) == ["one", "two"]
    assert paths(out) == ["a.tar/v1.0/x.jpg", "a.tar/v2.0/x.jpg"]


@pytest.mark.parametrize("between", [[], [pair(7)]])
def test_a_sample_of_a_name_that_was_there_is_no_second_one(root, out, between):
    shard(root / "00000.tar", pair(4), *between, pair(4, "again"))
    with pytest.raises(
        UserError, match="00000.tar/000000004 has the name of an earlier"
    ):
        prepare(root, out / "raise")
    content = prepare(root, out, on_error="skip")
    assert content["skipped_counts"] == {"name there twice": 1}
    assert texts(out)[0] == "caption 4"
    assert "again" not in texts(out)
    # Names are unique in a tar file, not in a set.
    shard(root / "00001.tar", pair(4))
    content = prepare(root, out / "set", on_error="skip")
    assert content["skipped_counts"] == {"name there twice": 1}


@pytest.mark.parametrize("label", ["1_0", "+1", "9" * 20])
def test_a_label_is_a_number_of_digits(tmp_path, out, label):
    classes(tmp_path / "0.tar", [1, f" {12}\n", label])
    with pytest.raises(UserError, match=f"cls '{re.escape(label[:20])}', not a class"):
        prepare(tmp_path, out / "raise")
    prepare(tmp_path, out, on_error="skip")
    assert labels_of(out, "train")[0] == [1, 12]


def test_the_features_are_told_with_the_fields_that_may_be_captions(root, out, capsys):
    prepare(root, out / "txt")
    assert "records have image, text, path\n" in capsys.readouterr().out
    without = [{k: v for k, v in pair(i).items() if k[-3:] != "txt"} for i in range(2)]
    shard(root / "00000.tar", *without)
    (root / "00001.tar").unlink()
    prepare(root, out / "json")
    told = r"records have image, path; .*--caption=json:FIELD, .*alt"
    assert re.search(told, capsys.readouterr().out)


def test_images_alone_make_a_set_without_labels(tmp_path, out):
    write_tar(tmp_path / "0.tar", [(f"{i}.jpg", jpeg(i)) for i in range(3)])
    assert prepare(tmp_path, out)["splits"]["train"]["records"] == 3
    source = open_tfds("pairs", str(out), "train", "image", None)
    assert set(source.records[0]) == {"image", "path"}


def test_folders_of_something_else_are_refused(root, tmp_path_factory, out):
    with pytest.raises(UserError, match="--splits=val: .* no such split; it has train"):
        prepare(root, out, splits=("val",))
    shard(root / "val" / "0.tar", pair(1))
    with pytest.raises(UserError, match="tar files, such as 00000.tar, .* in val"):
        prepare(root, out)
    other = tmp_path_factory.mktemp("other")
    with pytest.raises(UserError, match="no tar files .*/train/\\*.tar"):
        prepare(other, out)
    (other / "0.tar.zst").write_bytes(b"")
    with pytest.raises(UserError, match="0.tar.zst is not one of .tar, .*unpack"):
        prepare(other, out)
    (other / "0.tar.zst").unlink()
    classes(other / "0.tar", [0, 1])
    (other / "classnames.txt").write_text("ant\nant\n")
    with pytest.raises(UserError, match="two classes named 'ant'"):
        prepare(other, out)
    (other / "classnames.txt").write_text("ant\n\nbee\n")
    with pytest.raises(UserError, match="classnames.txt has no name in line 2"):
        prepare(other, out)


def test_a_killed_run_ends_with_the_same_bytes(tmp_path, out):
    for number in range(6):
        samples = [pair(100 * number + i) for i in range(60)]
        for sample in samples:
            noise = np.random.default_rng(number).integers(
                0, 256, (200, 200, 3), np.uint8
            )
            name = next(iter(sample))
            stream = io.BytesIO()
            Image.fromarray(noise).save(stream, "JPEG")
            sample[name] = stream.getvalue()
        shard(tmp_path / f"{number:05d}.tar", *samples)
    expected = prepare(tmp_path, out / "undisturbed", shard_bytes=10**6)
    target = NAME.folder(out)
    command = [
        sys.executable,
        "-m",
        "vit_jax.prepare",
        "--dataset=webdataset",
        "--name=pairs",
    ]
    command += [
        f"--from={tmp_path}",
        f"--data_dir={out}",
        "--shard_mb=1",
        "--processes=2",
    ]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    state = target.with_name("1.0.0.incomplete") / ".state"
    deadline = time.monotonic() + 60
    while len(list(state.glob("pairs-*.json"))) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    done = {path.stem for path in state.glob("pairs-*.json")}
    assert 2 <= len(done) < 6 and not target.exists()
    inodes = {name: (state.parent / name).stat().st_ino for name in done}
    assert prepare(tmp_path, out, shard_bytes=10**6) == expected
    assert {name: (target / name).stat().st_ino for name in done} == inodes
    found = {p.name: p.read_bytes() for p in target.iterdir()}
    first = NAME.folder(out / "undisturbed")
    assert found == {p.name: p.read_bytes() for p in first.iterdir()}


def batch(out, **keys):
    """Returns the one batch of an epoch of training on a prepared set of 8 images."""
    data = {"name": "pairs", "data_dir": str(out), "num_examples": 8, "num_workers": 0}
    data = tiny_config(data=data | {"train_transform": "resize"} | keys).data
    source, where = open_source(data, data.split), {"seed": 1, "start": 0, "stop": 1}
    with pipeline.train_batches(source, data, batch_size=8, **where) as batches:
        return next(iter(batches))


def test_training_reads_captions_and_classes(root, out):
    prepare(root, out / "pairs")
    captions = {"num_classes": 0, "caption_key": "text", "tokenizer": "bytes"}
    tokens = batch(out / "pairs", **captions, num_tokens=16)["text"]
    letters = {bytes((row[row > 1] - 2).tolist()).decode() for row in tokens}
    assert letters == set(texts(out / "pairs"))
    labels = [3, 0, 4, 1, 1, 2, 0, 3]
    classes(root / "classes" / "0.tar", labels)
    prepare(root / "classes", out / "classes")
    found = batch(out / "classes", num_classes=5)
    assert found["image"].shape == (8, 8, 12, 3)
    assert sorted(found["label"].tolist()) == sorted(labels)
