"""What --help shows: flags, and the keys of the config from their fields."""

import re

import pytest

from vit_jax.__main__ import COMMANDS, load
from vit_jax.config import fields
from vit_jax.training.config import EvaluationConfig, TrainConfig
from vit_jax.weights.formats import registry


def help_of(verb):
    return load(verb).parser().format_help()


@pytest.mark.parametrize(
    ("verb", "cls"),
    [
        ("compile", TrainConfig),
        ("transfer", TrainConfig),
        ("evaluate", EvaluationConfig),
    ],
)
def test_help_lists_every_key_with_its_default(verb, cls):
    shown = help_of(verb)
    assert "--config" in shown
    keys = set(re.findall(r"^  ([\w.]+)=", shown, re.MULTILINE))
    wanted = {
        f"{where}.{name}".strip(".")
        for where, kind, section in [("", "", cls), *fields.sections(cls)]
        for name, about in fields.fields(section).items()
        if not isinstance(about, fields.Section)
    }
    # What chooses a dataclass stands in its heading.
    chosen = {name for name in wanted - keys if f"by {name}" in shown}
    assert keys | chosen == wanted
    assert re.search(r"^  batch_size=0 +Images a step", shown, re.MULTILINE)
    assert max(map(len, shown.splitlines())) <= 100


def test_keys_of_a_choice_stand_under_its_name():
    shown = help_of("compile")
    before, _, after = shown.partition("optim, name=sgd")
    assert "optim.b1=0.9" in before
    assert "optim.momentum=0.9" in after


def test_a_verb_without_a_config_lists_no_keys():
    assert "config keys" not in help_of("predict")


@pytest.mark.parametrize("verb", COMMANDS)
def test_no_choice_is_listed_twice(verb):
    for choices in re.findall(r"\{([^{}]*)\}", help_of(verb)):
        listed = re.split(r",\s*", choices)
        assert len(listed) == len(set(listed))


def test_every_format_to_convert_to_is_listed_once():
    before = help_of("convert").partition("Class names and preprocessing")[0]
    listed = re.findall(r"^  ([a-z_0-9]+)  +\w", before, re.MULTILINE)
    assert sorted(listed) == sorted(registry.WRITERS)
