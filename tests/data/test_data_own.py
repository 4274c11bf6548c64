import pathlib
import re
import textwrap

import numpy as np
import pytest

from vit_jax.data import pipeline
from vit_jax.data.arrays import ArraySource
from vit_jax.data.own import is_own
from vit_jax.data.sources import open_source
from vit_jax.data.splits import Numbering
from vit_jax.errors import UserError

README = pathlib.Path(__file__).parents[2] / "README.md"
# The example there: a table of image files and labels.
(EXAMPLE,) = re.findall(
    r"^```python\n(import csv.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE
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
    listed.update(exclude=str(tmp_path / "left_out"), ops="", eval_ops="")
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
        from vit_jax.data.arrays import open_arrays

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
    data.classes = 2
    with pytest.raises(UserError, match=r"mine train record 0 has label 2"):
        open_source(data, "train")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("no_such_module:f", "no module 'no_such_module'"),
        ("json:no_function", "has no function 'no_function'"),
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
    with pytest.raises(ModuleNotFoundError, match="no_such_thing"):
        open_source(data_config(name="broken_module:f"), "train")


def test_what_is_no_source_says_what_it_lacks(module, data_config):
    module(
        "half", "class S:\n  images = labels = None\n\ndef f(data, split): return S()"
    )
    with pytest.raises(UserError, match="S, which lacks class_names.*__len__, __get"):
        open_source(data_config(name="half:f"), "train")


def test_versions_of_tfds_are_no_functions():
    assert is_own("my.module_2:open_source")
    for name in ("cifar10", "eurosat/rgb:2.0.0", "caltech101:3.*.*", "cifar10:3.0.2"):
        assert not is_own(name)


def test_numbering_counts_over_parts():
    numbering = Numbering.of("b[1:]+a", {"a": 2, "b": 3}, "x")
    assert [numbering.record_id(i) for i in range(4)] == ["b/1", "b/2", "a/0", "a/1"]
    assert list(numbering.locate(["a/1", "b/0", "b/2"])) == [3, 1]
    with pytest.raises(IndexError, match="0"):
        numbering.record_id(4)
