import dataclasses
import pickle
import time

import numpy as np
import pytest

from vit_jax.data import splits
from vit_jax.data.sources import open as opening
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.open import open_source
from vit_jax.errors import UserError


@pytest.fixture
def listed(tmp_path):
    def write(*lines):
        path = tmp_path / "listed.txt"
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    return write


def test_excluded_records_are_left_out_of_the_training_split_alone(
    data_config, folder, listed
):
    data = data_config(name="folder", data_dir=str(folder))
    full = open_source(data, "train")
    names = [full.record_id(i) for i in range(len(full))]
    out = {names[0], names[1], names[7], names[18]}
    data = dataclasses.replace(
        data, exclude=listed("# near-duplicates", "", *out, "val/ant/0.png")
    )

    source = open_source(data, "train")
    kept = [source.record_id(i) for i in range(len(source))]
    assert kept == [name for name in names if name not in out]
    for i in range(len(source)):
        where = names.index(kept[i])
        assert source.describe(i) == full.describe(where)
        assert source[i] == full[where]
    assert len(open_source(data, "val")) == 4
    with pytest.raises(IndexError, match="15"):
        source[15]


def test_a_set_in_memory_is_still_gathered_without_the_excluded(data_config, listed):
    data = data_config(name="synthetic", num_examples=11)
    full = open_source(data, "train")
    data = dataclasses.replace(data, exclude=listed("train/0", "train/5", "train/6"))
    source = pickle.loads(pickle.dumps(open_source(data, "train")))
    kept = [1, 2, 3, 4, 7, 8, 9, 10]
    np.testing.assert_array_equal(source.images, full.images[kept])
    np.testing.assert_array_equal(source.labels, full.labels[kept])
    np.testing.assert_array_equal(source[5]["image"], full.images[8])
    assert source.record_id(5) == "train/8"
    assert source.describe(5) == "made train record 8"


@pytest.mark.parametrize("wrong", ["train/11", "val/x", "trian/3", "train/03", "3"])
def test_an_unknown_record_is_named_with_its_line(data_config, listed, wrong):
    path = listed("# list", "train/4", wrong)
    data = data_config(name="synthetic", num_examples=11, exclude=path)
    with pytest.raises(UserError, match=f"line 3 names record '{wrong}'.*'train/0'"):
        open_source(data, "train")


def test_nothing_left_and_no_file_are_user_errors(data_config, listed, tmp_path):
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    for path, match in (
        (listed("train/2", "train/0", "train/1"), "names all 3 records"),
        (str(tmp_path / "absent.txt"), r"absent\.txt' cannot be read"),
        (str(tmp_path / "binary.txt"), r"binary\.txt' cannot be read"),
    ):
        with pytest.raises(UserError, match=match):
            open_source(data_config(num_examples=3, exclude=path), "train")


@pytest.mark.parametrize(
    ("split", "left_out", "kept"),
    [
        ("train[3:9]", ("train/4", "val/2"), [3, 5, 6, 7, 8]),  # Others change nothing.
        ("train[:4]+train[2:6]", ("train/3",), [0, 1, 2, 2, 4, 5]),  # Each time.
    ],
)
def test_records_are_left_out_of_sub_splits(data_config, listed, split, left_out, kept):
    data = data_config(num_examples=11, split=split, exclude=listed(*left_out))
    source = open_source(data, split)
    found = [source.record_id(i) for i in range(len(source))]
    assert found == [f"train/{i}" for i in kept]


def test_a_source_that_cannot_find_by_name_is_searched(listed):
    class Own(Source):
        class_names, images, labels = (), None, None
        __len__ = lambda self: 5
        __getitem__ = lambda self, i: {"image": b"", "label": i}
        describe = record_id = lambda self, i: f"page-{i}"

    source = opening.exclude(Own(), listed("page-3", "page-0"))
    assert [source[i]["label"] for i in range(len(source))] == [1, 2, 4]
    with pytest.raises(UserError, match="'page-9'"):
        opening.exclude(Own(), listed("page-3", "page-9"))


def test_fourteen_million_records_cost_neither_time_nor_memory(listed):
    numbering = splits.Numbering.of("full[51200:]", {"full": 14_197_122}, "x")

    class Huge(Source):
        class_names, images, labels = (), None, None
        __len__ = lambda self: len(numbering)
        __getitem__ = lambda self, i: {"label": i}
        record_id = lambda self, i: numbering.record_id(i)
        locate = lambda self, ids: numbering.locate(ids)

    left_out = range(51_200, 14_000_000, 1_000)
    start = time.process_time()
    source = opening.exclude(Huge(), listed(*(f"full/{i}" for i in left_out)))
    assert time.process_time() - start < 2
    assert len(source) == 14_197_122 - 51_200 - len(left_out)
    assert (source[0]["label"], source.record_id(999)) == (1, "full/52201")
    assert source.gaps.nbytes < 200_000
