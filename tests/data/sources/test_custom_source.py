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
from vit_jax.errors import UserError

# A table of image files and labels.
EXAMPLE = (
    pathlib.Path(__file__).parents[3] / "docs" / "examples" / "listed.py"
).read_text()


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


def test_arrays_in_memory_need_five_lines(module, data_config):
    module(
        "my_arrays",
        """
        import numpy as np
        from vit_jax.data.sources.arrays import open_arrays

        images = np.arange(5 * 7 * 9 * 3, dtype=np.uint8).reshape(5, 7, 9, 3)

        def open_source(data, split):
            return open_arrays({"train": (images, np.arange(5) % 3)}, split, "mine")
        """,
    )
    data = data_config(name="my_arrays:open_source")
    source = open_source(data, "train[1:]")
    assert isinstance(source, ArraySource)
    np.testing.assert_array_equal(source.labels, [1, 2, 0, 1])
    assert source.record_id(2) == "train/3"
    assert source.describe(2) == "mine train[1:] record 2"
    with pytest.raises(UserError, match="mine has no split 'val'; it has train"):
        open_source(data, "val")


IMAGES = np.random.default_rng(0).integers(0, 256, (6, 7, 9, 3))
LABELS = np.array([2, 0, 1, 1, 0, 2])


def open_mine(images, labels, names=("a", "b", "c")):
    good = (IMAGES.astype(np.uint8), LABELS)
    return open_arrays({"train": good, "test": (images, labels)}, "test", "mine", names)


WHOLE = r": not whole numbers from 0 to 255"


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (
            (IMAGES / 255).astype(np.float32),
            rf"float32 \(6, 7, 9, 3\) from 0 to 1{WHOLE}; take \(images \* 255\).round",
        ),
        (
            IMAGES / 127.5 - 1,
            rf"float64 \(6, 7, 9, 3\) from -1 to 1{WHOLE}; scale them to 0..255 and",
        ),
        (IMAGES * 3, rf"int64 \(6, 7, 9, 3\) from 0 to 765{WHOLE}"),
        (IMAGES > 9, rf"bool \(6, 7, 9, 3\){WHOLE}"),
        (
            np.moveaxis(IMAGES, -1, 1),
            r"int64 \(6, 3, 7, 9\) .*: channels are not last; take np\.moveaxis",
        ),
        (IMAGES.astype(object), rf"object \(6, 7, 9, 3\){WHOLE}"),
        (IMAGES.astype(str), rf"<U21 \(6, 7, 9, 3\){WHOLE}"),
        (np.uint8(3), r"uint8 \(\) from 3 to 3: not \(N, H, W\) or"),
        (IMAGES.reshape(6, -1), r"\(6, 189\) from 0 to 255: not \(N, H, W\) or"),
    ],
)
def test_arrays_that_are_no_images_are_refused_when_opened(images, message):
    with pytest.raises(UserError, match=f"mine test: images=.*{message}"):
        open_mine(images, LABELS)


@pytest.mark.parametrize(
    ("labels", "names", "message"),
    [
        (LABELS[:5], "abc", "mine test: 6 images, but 5 labels; give one label per"),
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


OWN = """
import numpy as np

class S:
    class_names, images, labels = (), IMAGES, LABELS
    def __len__(self): return 3
    def __getitem__(self, i): return ITEM
    def describe(self, i): return f"mine record {i}"
    record_id = describe

def f(data, split): return S()
"""


@pytest.fixture
def own(module, data_config, request):
    """Returns the config of a source whose records or arrays are given as code."""
    name = f"own_{abs(hash(request.node.name))}"

    def write(item="{}", images=None, labels=None, code=OWN):
        code = code.replace("ITEM", item).replace("IMAGES", f"{images}")
        module(name, code.replace("LABELS", f"{labels}"))
        return data_config(name=f"{name}:f", train_transform="")

    return write


UINT8 = "np.zeros((3, 5, 5, 3), np.uint8)"


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (UINT8, "np.array([0.9, 1.7, 1])", r"labels=float64 \(3,\) from 0.9 to 1.7:"),
        (UINT8, "np.array([0, -3, 1])", "record 1 has label -3; give labels from 0"),
        (None, "np.array([0, 1.7, 1])", "labels=float64"),
        (UINT8, "[0, 1, 2]", "labels of type list; make them a NumPy array"),
        (
            "np.zeros((3, 5, 5, 3))",
            "np.zeros(3, int)",
            r"images=float64 \(3, 5, 5, 3\) from 0 to 0: not",
        ),
        (UINT8, "np.zeros(2, int)", "3 images, 2 labels and a length of 3"),
    ],
)
def test_images_in_memory_of_a_source_are_checked_too(own, images, labels, message):
    with pytest.raises(UserError, match=f":f' returned {message}"):
        open_source(own(images=images, labels=labels), "train")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("no_such_module:f", "no module 'no_such_module'"),
        ("no_such.package:f", r"no module 'no_such\.package'"),
        ("json:no_function", "has no 'no_function'"),
        ("os:system", "runs the code .* TypeError: "),
    ],
)
def test_a_name_of_no_source_is_a_user_error(data_config, name, match):
    with pytest.raises(UserError, match=rf"data\.name='{re.escape(name)}'.*{match}"):
        open_source(data_config(name=name), "train")


@pytest.mark.parametrize(
    ("code", "match"),
    [
        ("def f(data, split): return 1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(data, split): raise SystemExit(3)", "SystemExit: 3"),
        ("def f(data): return data", "TypeError: .*positional argument"),
        ("raise KeyError('at import')", "KeyError: 'at import'"),
        ("import no_such_thing", "ModuleNotFoundError: .*'no_such_thing'"),
    ],
)
def test_an_own_source_that_raises_is_told_to_run_code(own, code, match):
    line = rf"runs the code of that module, which raised {match}"
    with pytest.raises(UserError, match=f":f': {line}.*; mend it, --debug shows"):
        open_source(own(code=code), "train")


def test_what_is_no_source_says_what_it_lacks(own):
    code = "class S:\n  images = labels = None\n\ndef f(data, split): return S()"
    with pytest.raises(UserError, match="S, which lacks class_names.*__len__, __get"):
        open_source(own(code=code), "train")


@pytest.mark.parametrize(
    ("item", "match"),
    [
        ("1 / 0", "ZeroDivisionError for record [0-2]: division by zero"),
        ("{'image': b''}", ':f\' gives record [0-2] no "label": add it'),
        ("{'image': b'', 'label': 'cat'}", "TypeError for record [0-2]: 'str'"),
        ("{'image': [9], 'label': 1}", "TypeError for record [0-2]: .* nor an array"),
        ("{'image': b'', 'label': 2.5}", "TypeError for record [0-2]: "),
        ("{'image': b'', 'label': float('nan')}", "TypeError for record [0-2]: "),
        ("{'image': b'', 'label': np.array([1, 2])}", "TypeError for record [0-2]: "),
        ("{'image': b'', 'label': None}", "TypeError for record [0-2]: "),
    ],
)
def test_an_own_source_that_raises_at_a_record_names_it(own, item, match):
    data = own(item)
    batches = pipeline.train_batches(
        open_source(data, "train"), data, batch_size=2, seed=0, start=0, stop=1
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
    ],
)
def test_labels_that_are_one_whole_number_are_taken(own, label, expected):
    source = open_source(own(f"{{'image': b'', 'label': {label}}}"), "train")
    assert source[0]["label"] == expected


def test_what_else_a_record_has_is_passed_on(own):
    data = own("{'image': b'', 'label': 1, 'mask': b'', 'text': f'pair {i}', 'age': 1}")
    wanted = {"image": b"", "label": 1, "text": "pair 2", "age": 1}
    assert open_source(data, "train")[2] == wanted


def test_other_methods_of_an_own_source_that_raise_are_one_line(own, tmp_path):
    more = """
    def entries(self): return 1 / 0
    def locate(self, ids):
        if ids[0] == "boom": raise ValueError("boom")
        raise KeyError(ids[0])
"""
    data = own(code=OWN.replace("\ndef f(", f"{more}\ndef f("))
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


def test_versions_of_tfds_are_no_functions():
    assert is_custom("my.module_2:open_source")
    for name in ("cifar10", "eurosat/rgb:2.0.0", "caltech101:3.*.*", "cifar10:3.0.2"):
        assert not is_custom(name)
