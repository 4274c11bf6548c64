"""A field of a user's own module: the program of docs/extending.md, and what it refuses."""

import dataclasses
import pathlib
import sys

import numpy as np
import pytest
from helpers import tiny_config

from vit_jax.data import pipeline
from vit_jax.data.fields.base import Field
from vit_jax.data.sources.open import open_source
from vit_jax.errors import UserError
from vit_jax.training import loop

EXAMPLES = pathlib.Path(__file__).parents[2] / "docs" / "examples"
HOW = {"batch_size": 6, "seed": 3, "start": 0}


@pytest.fixture(autouse=True, scope="module")
def _examples():
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


def ages_config(evals=(), **data):
    keys = {"name": "ages:open_source", "fields": ("ages:Age",), "num_classes": 0}
    keys |= {"num_examples": 40, "image_size": (8, 8), "channels": 1}
    sections = {"data": keys | data, "task": {"name": "ages:AgeConfig"}}
    sections["evals"] = dict(evals)
    return tiny_config(total_steps=2, **sections)


def batches_of(data, stop=9):
    source = open_source(data, "train")
    with pipeline.train_batches(source, data, **HOW, stop=stop) as batches:
        return list(batches)


@pytest.mark.parametrize(
    ("workers", "line"),
    [
        (0, ""),
        (0, "flip | affine(shift=0.1)"),
        pytest.param(1, "", marks=pytest.mark.slow),
        (1, "flip | affine(shift=0.1)"),
    ],
)
def test_a_field_has_the_row_of_its_record(workers, line):
    data = ages_config(num_workers=workers, train_transform=line).data
    batches = batches_of(data)
    ages = np.concatenate([batch["age"] for batch in batches])
    assert ages.dtype == np.float32
    assert sorted(ages[:40]) == list(range(20, 60))  # An epoch.
    if not line:
        people = open_source(data, "train")
        for batch in batches:
            for image, age in zip(batch["image"], batch["age"], strict=True):
                np.testing.assert_array_equal(image, people[int(age) - 20]["image"])


def test_a_run_learns_from_a_field_and_scores_it_on_held_out_images(tmp_path):
    evals = {"val": {"kind": "task", "split": "all"}}
    report = loop.train(ages_config(evals=evals), tmp_path / "run")
    assert report["steps"] == 2
    # The first predictions are about 0; the mean age is 39.5 years.
    assert report["final"]["val"]["params"]["years_off"] == pytest.approx(39.5, abs=9)


class Name(Field):
    """A word as a field of a taken name."""

    name = "label_map"

    @classmethod
    def of(cls, data, source):
        return cls()

    def spec(self, size):
        return (), "int32"

    def read(self, record, size):
        return 0


@dataclasses.dataclass(frozen=True)
class Cut(Name):
    """The pixel in the corner, which moves with the image."""

    name = "corner"
    moves = True

    def spec(self, size):
        return (*size, 1), "int16"

    def read(self, record, size):
        assert size == record["image"].shape[:2]
        return record["image"].astype(np.int16)


@dataclasses.dataclass(frozen=True)
class Peek:
    """Cuts the first pixels off; it would choose by a mask, and there is none."""

    runs_on = "host"
    moves_pixels = sees_mask = True

    def __call__(self, image, rng, *seen):
        assert not seen
        return image[3:, 1:]


@pytest.mark.parametrize("line", ["random_crop", "test_field:Peek"])
def test_a_field_that_moves_goes_where_the_pixels_go(monkeypatch, line):
    monkeypatch.setitem(sys.modules, "test_field", sys.modules[__name__])
    data = ages_config(
        fields=("ages:Age", "test_field:Cut"),
        train_transform=line,
        image_size=(5, 7),
    ).data
    for batch in batches_of(data):
        np.testing.assert_array_equal(batch["image"].astype(np.int16), batch["corner"])
        assert batch["corner"].any()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ages:People", r"data.fields='ages:People' is <class 'ages.People'>"),
        ("ages:Nobody", "data.fields='ages:Nobody'"),
        ("test_field:Name", "data.fields='test_field:Name' is called 'label_map'"),
    ],
)
def test_what_is_no_field_is_refused(text, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "test_field", sys.modules[__name__])
    data = ages_config(fields=(text,)).data
    with pytest.raises(UserError, match=message):
        batches_of(data)


def test_a_record_without_it_is_damaged(monkeypatch):
    import ages

    whole = ages.People.__getitem__

    def without(self, i):
        item = whole(self, i)
        return item if i else {"image": item["image"]}

    monkeypatch.setattr(ages.People, "__getitem__", without)
    with pytest.raises(UserError, match="person 0 has no age"):
        batches_of(ages_config().data)
    skipping = batches_of(ages_config(on_error="skip").data)
    ages_seen = np.concatenate([batch["age"] for batch in skipping])[:40]
    assert sorted(ages_seen) == [21, *range(21, 60)]
