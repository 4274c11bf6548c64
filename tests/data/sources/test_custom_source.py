import dataclasses
import pathlib
import re
import textwrap

import numpy as np
import pytest

from vit_jax.config.fields import is_custom
from vit_jax.data import pipeline
from vit_jax.data.fingerprint import fingerprint
from vit_jax.data.sources.arrays import ArraySource, open_arrays
from vit_jax.data.sources.open import open_source
from vit_jax.data.splits import Numbering
from vit_jax.errors import UserError

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "data.md"
# The example there: a table of image files and labels.
(EXAMPLE,) = re.findall(
    r"^```python\n# listed.py\n(import csv.*?)^```$",
    PAGE.read_text(),
    re.DOTALL | re.MULTILINE,
)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, code):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))

    return write


@pytest.fixture
def listed(module, tmp_path, photograph, encode, data_config):
    module("listed_photographs", EXAMPLE)
    lines = []
    for i in range(7):
        (tmp_path / f"{i}.png").write_bytes(encode(photograph, "PNG"))
        lines.append(f"{i}.png,{i % 3}\n")
    (tmp_path / "train.csv").write_text("".join(lines))
    name = "listed_photographs:open_source"
    return data_config(name=name, data_dir=str(tmp_path), image_size=(37, 53))


def test_the_example_of_the_readme_is_read(listed, photograph, tmp_path):
    (tmp_path / "left_out").write_text("train/2.png\n")
    listed = dataclasses.replace(
        listed,
        exclude=str(tmp_path / "left_out"),
        train_transform="",
        eval_transform="",
    )
    source = open_source(listed, "train")
    with pipeline.eval_batches(source, listed, batch_size=4) as batches:
        first, second = batches
    np.testing.assert_array_equal(first["image"][3], photograph)
    assert [*first["label"], *second["label"][:2]] == [0, 1, 0, 1, 2, 0]
    assert source.describe(2) == "train/3.png"


def test_the_example_is_about_20_lines_and_imports_nothing_of_ours():
    assert len([line for line in EXAMPLE.splitlines() if line.strip()]) <= 20
    assert "vit_jax" not in EXAMPLE


def test_arrays_in_memory_need_five_lines(module, data_config):
    module(
        "my_arrays",
        """
        import numpy as np
        from vit_jax.data.sources.arrays import open_arrays

        images = np.arange(5 * 7 * 9 * 3, dtype=np.uint8).reshape(5, 7, 9, 3)
        labels = np.array([2, 0, 1, 1, 0])

        def open_source(data, split):
            return open_arrays({"train": (images, labels)}, split, "mine")
        """,
    )
    data = data_config(name="my_arrays:open_source")
    source = open_source(data, "train[1:]")
    assert isinstance(source, ArraySource)
    np.testing.assert_array_equal(source.labels, [0, 1, 1, 0])
    assert source.record_id(2) == "train/3"
    assert source.describe(2) == "mine train[1:] record 2"
    with pytest.raises(UserError, match="mine has no split 'val'; it has train"):
        open_source(data, "val")
    data = dataclasses.replace(data, num_classes=2)
    with pytest.raises(UserError, match=r"mine train record 0 has label 2"):
        open_source(data, "train")


IMAGES = np.random.default_rng(0).integers(0, 256, (6, 7, 9, 3))
LABELS = np.array([2, 0, 1, 1, 0, 2])


def open_mine(images, labels, names=("a", "b", "c")):
    good = (IMAGES.astype(np.uint8), LABELS)
    return open_arrays({"train": good, "test": (images, labels)}, "test", "mine", names)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (
            (IMAGES / 255).astype(np.float32),
            (
                r"float32 (6, 7, 9, 3) from 0 to 1: not whole numbers from 0 to 255; take "
                "(images * 255).round().astype('uint8')"
            ),
        ),
        (
            IMAGES / 127.5 - 1,
            (
                "float64 (6, 7, 9, 3) from -1 to 1: not whole numbers from 0 to 255; scale "
                "them to 0..255 and take .round().astype('uint8')"
            ),
        ),
        (
            IMAGES * 3,
            "int64 (6, 7, 9, 3) from 0 to 765: not whole numbers from 0 to 255",
        ),
        (IMAGES > 9, "bool (6, 7, 9, 3): not whole numbers from 0 to 255"),
        (
            np.moveaxis(IMAGES, -1, 1),
            (
                "int64 (6, 3, 7, 9) from 0 to 255: channels do not stand last; take "
                "np.moveaxis(images, 1, -1)"
            ),
        ),
        (IMAGES.astype(object), "object (6, 7, 9, 3): not whole numbers from 0 to 255"),
        (IMAGES.astype(str), "<U21 (6, 7, 9, 3): not whole numbers from 0 to 255"),
        (np.uint8(3), "uint8 () from 3 to 3: not (N, H, W), (N, H, W, 1)"),
        (IMAGES.reshape(6, -1), "(6, 189) from 0 to 255: not (N, H, W), (N, H, W, 1)"),
    ],
)
def test_arrays_that_are_no_images_are_refused_when_opened(images, message):
    with pytest.raises(
        UserError, match=re.escape("mine test: images=") + ".*"
    ) as found:
        open_mine(images, LABELS)
    assert message in str(found.value)


@pytest.mark.parametrize(
    ("labels", "names", "message"),
    [
        (
            LABELS[:5],
            "abc",
            "mine test: 6 images, but 5 labels; give one label per image",
        ),
        (np.eye(3)[LABELS], "abc", "labels=float64 (6, 3) from 0 to 1: not one whole"),
        (LABELS + 0.0, "abc", "labels=float64 (6,) from 0 to 2: not one whole number"),
        (None, "abc", "mine test: labels=object (): not one whole number per image"),
        (LABELS + 1, "abc", "mine test: record 0 has label 3; give labels from 0 to 2"),
        (LABELS - 1, "", "mine test: record 1 has label -1; give labels from 0"),
    ],
)
def test_labels_that_do_not_fit_are_refused_when_opened(labels, names, message):
    with pytest.raises(UserError, match=re.escape(message)):
        open_mine(IMAGES, labels, tuple(names))


def test_of_a_split_that_is_not_opened_only_the_length_is_checked():
    good = (IMAGES.astype(np.uint8), LABELS)
    for hidden in (None, np.full(6, -1), LABELS + 0.5):
        source = open_arrays(
            {"train": good, "test": (IMAGES / 255, hidden)}, "train", "mine"
        )
        assert len(source) == 6
    with pytest.raises(UserError, match="mine test: 6 images, but 5 labels"):
        open_arrays({"train": good, "test": (IMAGES, LABELS[1:])}, "train", "mine")


def test_uint8_images_are_not_read_for_their_range(monkeypatch):
    class Unread(np.ndarray):
        def min(self, *_, **__):
            raise AssertionError("read")

        max = min

    # As of a memory-mapped file, of which asarray keeps the class here.
    monkeypatch.setattr(np, "asarray", np.asanyarray)
    images = IMAGES.astype(np.uint8).view(Unread)
    assert len(open_arrays({"train": (images, LABELS)}, "train", "mine")) == 6


def test_grey_images_with_and_without_a_channel_axis_are_one_set():
    grey = IMAGES[..., 0]
    both = {"train": (grey, LABELS), "val": (grey[..., None], LABELS)}
    source = open_arrays(both, "train+val", "mine")
    np.testing.assert_array_equal(source.images, [*IMAGES[..., :1]] * 2)
    both["val"] = IMAGES, LABELS
    with pytest.raises(UserError, match=r"shapes \(7, 9, 1\) and \(7, 9, 3\); make"):
        open_arrays(both, "train+val", "mine")


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.int16])
def test_whole_numbers_up_to_255_and_grey_images_are_taken(dtype, data_config):
    grey = IMAGES[..., 0].astype(dtype)
    source = open_arrays({"train": (grey, LABELS)}, "train[1:]", "mine")
    assert source.images.dtype == np.uint8
    np.testing.assert_array_equal(source.images, IMAGES[1:, ..., :1])
    data = data_config(channels=1, image_size=(7, 9), eval_transform="resize")
    with pipeline.eval_batches(source, data, batch_size=5) as batches:
        (batch,) = batches
    np.testing.assert_array_equal(batch["image"], IMAGES[1:, ..., :1])


def test_images_in_memory_of_a_source_are_checked_too(module, data_config):
    module(
        "in_memory",
        """
        import numpy as np

        class Mine:
            class_names = ()
            def __init__(self, images, labels=np.zeros(2, int)):
                self.images, self.labels = images, labels
            def __len__(self): return len(self.labels)
            def __getitem__(self, i): return {"image": self.images[i], "label": 0}
            def describe(self, i): return str(i)
            record_id = describe

        def floats(data, split): return Mine(np.zeros((2, 5, 5, 3)))
        def short(data, split): return Mine(np.zeros((3, 5, 5, 3), np.uint8))
        def parts(data, split):
            return Mine(np.zeros((2, 5, 5, 3), np.uint8), np.array([0.9, 1.7]))
        def negative(data, split):
            return Mine(np.zeros((2, 5, 5, 3), np.uint8), np.array([0, -3]))
        def no_images(data, split): return Mine(None, np.array([0, 1.7]))
        def listed(data, split):
            return Mine(np.zeros((2, 5, 5, 3), np.uint8), [0, 1])
        """,
    )
    for function, message in (
        ("parts", r"returned labels=float64 \(2,\) from 0.9 to 1.7: not one whole"),
        ("negative", "returned record 1 has label -3; give labels from 0"),
        ("no_images", "returned labels=float64"),
        ("listed", "returned labels of type list; make them a NumPy array"),
    ):
        with pytest.raises(UserError, match=f"'in_memory:{function}' {message}"):
            open_source(data_config(name=f"in_memory:{function}"), "train")
    with pytest.raises(
        UserError, match=r"images=float64 \(2, 5, 5, 3\) from 0 to 0: not"
    ):
        open_source(data_config(name="in_memory:floats"), "train")
    with pytest.raises(
        UserError, match="returned 3 images, 2 labels and a length of 2"
    ):
        open_source(data_config(name="in_memory:short"), "train")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("no_such_module:f", "no module 'no_such_module'"),
        ("json:no_function", "has no 'no_function'"),
        ("no_such.package:f", r"no module 'no_such\.package'"),
    ],
)
def test_a_missing_module_or_function_is_a_user_error(data_config, name, match):
    with pytest.raises(UserError, match=rf"data\.name='{re.escape(name)}'.*{match}"):
        open_source(data_config(name=name), "train")


def test_what_an_own_module_imports_itself_is_not_blamed_on_the_name(
    module, data_config
):
    module("broken_module", "import no_such_thing")
    with pytest.raises(UserError, match="ModuleNotFoundError: .*'no_such_thing'; mend"):
        open_source(data_config(name="broken_module:f"), "train")


@pytest.mark.parametrize(
    ("code", "match"),
    [
        ("def f(data, split): return 1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(data, split): raise SystemExit(3)", "SystemExit: 3"),
        ("def f(data): return data", "TypeError: .*positional argument"),
        ("raise KeyError('at import')", "KeyError: 'at import'"),
    ],
)
def test_an_own_source_that_raises_is_told_to_run_code(
    module, data_config, code, match, request
):
    name = f"raises_{request.node.callspec.indices['code']}"
    module(name, code)
    line = rf"data\.name='{name}:f': runs the code of that module, which raised {match}"
    with pytest.raises(UserError, match=f"{line}.*; mend it, --debug shows"):
        open_source(data_config(name=f"{name}:f"), "train")


def test_a_function_of_another_module_is_told_to_run_code(data_config):
    with pytest.raises(UserError, match=r"'os:system': runs the code .* TypeError: "):
        open_source(data_config(name="os:system"), "train")


RECORDS = """
import numpy as np

class S:
    class_names, images, labels = (), None, None
    def __len__(self): return 3
    def __getitem__(self, i): return ITEM
    def describe(self, i): return f"mine record {i}"
    record_id = describe

def f(data, split): return S()
"""


@pytest.mark.parametrize(
    ("item", "match"),
    [
        ("1 / 0", "ZeroDivisionError for record [0-2]: division by zero"),
        ("{'image': b''}", 'record_1:f\' gives record [0-2] no "label": add it'),
        ("{'image': b'', 'label': 'cat'}", "TypeError for record [0-2]: 'str'"),
        (
            "{'image': [9, 9], 'label': 1}",
            "TypeError for record [0-2]: .* nor an array",
        ),
    ],
)
def test_an_own_source_that_raises_at_a_record_names_it(
    module, data_config, item, match, request
):
    name = f"record_{request.node.callspec.indices['item']}"
    module(name, RECORDS.replace("ITEM", item))
    data = data_config(name=f"{name}:f", train_transform="")
    source = open_source(data, "train")
    batches = pipeline.train_batches(
        source, data, batch_size=2, seed=0, start=0, stop=1
    )
    with batches, pytest.raises(UserError, match=match):
        next(batches)


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("np.bool_(True)", 1),
        ("True", 1),
        ("np.float32(3)", 3),
        ("2.0", 2),
        ("np.array([2])", 2),
        ("np.array(2)", 2),
        ("2.5", None),
        ("float('nan')", None),
        ("np.array([1, 2])", None),
        ("None", None),
    ],
)
def test_labels_that_are_one_whole_number_are_taken(
    module, data_config, label, expected, request
):
    name = f"label_{request.node.callspec.indices['label']}"
    module(name, RECORDS.replace("ITEM", f"{{'image': b'', 'label': {label}}}"))
    source = open_source(data_config(name=f"{name}:f"), "train")
    if expected is None:
        with pytest.raises(UserError, match="TypeError for record 0: "):
            source[0]
    else:
        assert source[0]["label"] == expected


def test_other_methods_of_an_own_source_that_raise_are_one_line(
    module, data_config, tmp_path
):
    more = """
    def entries(self): return 1 / 0
    def locate(self, ids):
        if ids[0] == "boom": raise ValueError("boom")
        raise KeyError(ids[0])
"""
    code = RECORDS.replace("ITEM", "{}").replace("\ndef f(", f"{more}\ndef f(")
    module("methods", code)
    data = data_config(name="methods:f")
    with pytest.raises(UserError, match="ZeroDivisionError: division by zero; mend it"):
        fingerprint(open_source(data, "train"))
    data = dataclasses.replace(data, exclude=str(tmp_path / "left_out"))
    for line, match in (
        ("boom", "which raised ValueError: boom; mend it"),
        ("gone", "line 1 names record 'gone', which the data set lacks"),
    ):
        (tmp_path / "left_out").write_text(f"{line}\n")
        with pytest.raises(UserError, match=match):
            open_source(data, "train")


def test_what_is_no_source_says_what_it_lacks(module, data_config):
    module(
        "half", "class S:\n  images = labels = None\n\ndef f(data, split): return S()"
    )
    with pytest.raises(UserError, match="S, which lacks class_names.*__len__, __get"):
        open_source(data_config(name="half:f"), "train")


def test_versions_of_tfds_are_no_functions():
    assert is_custom("my.module_2:open_source")
    for name in ("cifar10", "eurosat/rgb:2.0.0", "caltech101:3.*.*", "cifar10:3.0.2"):
        assert not is_custom(name)


def test_numbering_counts_over_parts():
    numbering = Numbering.of("b[1:]+a", {"a": 2, "b": 3}, "x")
    assert [numbering.record_id(i) for i in range(4)] == ["b/1", "b/2", "a/0", "a/1"]
    assert list(numbering.locate(["a/1", "b/0", "b/2"])) == [3, 1]
    with pytest.raises(IndexError, match="0"):
        numbering.record_id(4)
