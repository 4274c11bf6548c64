"""What is refused before a study writes anything."""

import dataclasses
import re

import pytest
import watched
from PIL import Image

from vit_jax.data.sources import open as opening
from vit_jax.errors import UserError
from vit_jax.tools.sweeps import fine_tuning, recipes


def task(pretrained, recipe, rates=(0.1, 0.2), **overrides):
    return fine_tuning.task(
        pretrained, recipe, resolution=(8, 8), rates=rates, overrides=overrides
    )


@pytest.fixture
def opened(monkeypatch):
    """Splits that are opened, in their order."""
    found, real = [], opening.source_type

    def watched(name):
        def watch(data, split):
            found.append(split)
            return real(name).open(data, split)

        return dataclasses.replace(real(name), open=watch)

    monkeypatch.setattr(opening, "source_type", watched)
    return found


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("tset", "--test=tset: split 'tset': digits has no split 'tset'; it has test,"),
        ("test[:5]+val", "digits has no split 'val'"),
        ("test[400:]", "--test=test[400:]: split 'test[400:]' with 355 records"),
    ],
)
def test_a_test_split_that_is_not_there_is_told_from_its_name(
    pretrained, opened, test, message
):
    found = task(pretrained, recipes.find("digits", test=test), total_steps=2)
    with pytest.raises(UserError, match=re.escape(message)):
        fine_tuning.check_feasible(found)
    assert set(opened) <= {"train", "train[:1]"}


def test_a_folder_is_looked_at_without_its_test_images(pretrained, tmp_path, opened):
    for split in ("train", "test"):
        (tmp_path / split / "a").mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / split / "a" / "1.png")
    (tmp_path / "loop").symlink_to("loop")  # Neither a folder nor an error.
    fine_tuning.check_feasible(
        task(pretrained, recipes.find(str(tmp_path)), total_steps=2)
    )
    found = task(pretrained, recipes.find(str(tmp_path), test="val"), total_steps=2)
    with pytest.raises(UserError, match="has no folder 'val'; it has test, train"):
        fine_tuning.check_feasible(found)
    assert set(opened) == {"train"}


@pytest.mark.parametrize(
    ("dataset", "cooldown", "fits"),
    # Digits: 1,442 images in train and 1,298 in its part; watched: 40 and 36.
    [
        ("digits", 162, True),
        ("digits", 163, False),
        ("watched:open_source", 4, True),
        ("watched:open_source", 5, False),
    ],
)
def test_lengths_in_epochs_are_those_of_what_is_trained_on(
    pretrained, dataset, cooldown, fits
):
    schedule = {"name": "wsd", "cooldown_steps": cooldown}
    stated = {"batch_size": 8, "epochs": 1, "optim.schedule": schedule}
    found = task(pretrained, recipes.find(dataset), **stated)
    watched.events.clear()
    if fits:
        fine_tuning.check_feasible(found)
    else:
        steps = {"digits": 162, "watched:open_source": 4}[dataset]
        with pytest.raises(UserError, match=rf"the run \({steps} steps\)"):
            fine_tuning.check_feasible(found)
    assert not any("test" in name for _, name in watched.events)
