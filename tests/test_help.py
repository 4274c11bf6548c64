"""What --help shows: flags, and the keys of the config from their fields."""

import re

import pytest

from vit_jax.__main__ import COMMANDS, load
from vit_jax.command_line import cli
from vit_jax.config import fields, reference
from vit_jax.errors import UserError
from vit_jax.training.config import EvaluationConfig, TrainConfig
from vit_jax.weights.formats import registry


def help_of(verb, topic="all"):
    return load(verb).parser().help_text(topic)


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
    assert re.search(r"^  batch_size=0 +Images per step", shown, re.MULTILINE)
    assert max(map(len, shown.splitlines())) <= 100


def test_keys_of_a_choice_stand_under_its_name():
    shown = help_of("compile")
    before, _, after = shown.partition("optim, name=sgd")
    assert "optim.b1=0.9" in before
    assert "optim.momentum=0.9" in after


def test_a_key_that_no_recipe_sets_says_what_it_is_for():
    keys = reference.text(TrainConfig, "run").partition("debug_nans")[2]
    assert "For: debugging." in keys.partition("profile_steps")[0]


def test_a_section_is_listed_by_itself():
    whole, part = help_of("train"), help_of("train", "optim")
    lines = part.splitlines()[2:]
    assert "\n".join(lines) in whole
    keys = re.findall(r"^  ([\w.]+)=", part, re.MULTILINE)
    assert all(key.startswith("optim.") for key in keys)
    assert {"optim.learning_rate", "optim.momentum"} <= {*keys}
    assert help_of("train", "run").splitlines()[2].startswith("  name=")
    with pytest.raises(UserError, match="--help=optin"):
        help_of("train", "optin")


def test_a_recipe_is_listed_with_what_it_sets(capsys):
    parser = load("train").parser()
    shown = {}
    for words in (["--help"], ["--config=digits", "-h"], ["-h", "--config", "digits"]):
        with pytest.raises(SystemExit) as end:
            cli.parse(parser, words)
        assert end.value.code == 0
        shown[len(words), words[0]] = capsys.readouterr().out
    plain, one, other = shown.values()
    assert one == other
    assert "--help=SECTION" in plain and "optim" in plain
    assert len(plain.splitlines()) < 70
    keys = re.findall(r"^  ([\w.]+)=(\S+)", one, re.MULTILINE)
    assert ("epochs", "150.0") in keys and ("evals.test.split", "'test'") in keys
    assert {"optim.b1", "seed", "total_steps"} & {*dict(keys)} == {"seed"}


def test_a_verb_without_a_config_lists_no_keys():
    assert "config keys" not in help_of("predict")


@pytest.mark.parametrize("verb", COMMANDS)
def test_no_choice_is_listed_twice(verb):
    for choices in re.findall(r"\{([^{}]*)\}", help_of(verb, "")):
        listed = re.split(r",\s*", choices)
        assert len(listed) == len(set(listed))


def test_every_format_to_convert_to_is_listed_once():
    before = help_of("convert", "").partition("Class names and preprocessing")[0]
    listed = re.findall(r"^  ([a-z_0-9]+)  +\w", before, re.MULTILINE)
    assert sorted(listed) == sorted(registry.WRITERS)
