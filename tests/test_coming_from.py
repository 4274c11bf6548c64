"""docs/coming_from.md: all names in the columns of this project exist."""

import ast
import inspect
import pathlib
import re

import pytest

import vit_jax
from vit_jax.__main__ import COMMANDS, load
from vit_jax.config import fields, loading
from vit_jax.data.transforms import parse
from vit_jax.models.vit_config import ViTConfig
from vit_jax.training.config import TrainConfig
from vit_jax.weights.formats.registry import WRITERS

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "coming_from.md"
RECIPE = "configs/b16_i1k.py"
KEYS = {
    f"{where}.{name}".strip(".")
    for where, _, cls in (("", "", TrainConfig), *fields.sections(TrainConfig))
    for name in fields.fields(cls)
}
CHOICES = {(where, what) for where, what, _ in fields.sections(TrainConfig)}


def names():
    """Returns the code in the last column of the tables."""
    found = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("|") and not set(line) <= {*"|- "}:
            found += re.findall(r"`([^`]+)`", re.split(r"(?<!\\)\|", line)[-2])
    return [name.replace("\\|", "|") for name in dict.fromkeys(found)]


def check_call(text):
    call = ast.parse(text, mode="eval").body
    path, _, name = ast.unparse(getattr(call, "func", call)).rpartition(".")
    owner = vit_jax
    for part in path.split(".")[1:]:
        owner = getattr(owner, part)
    function = getattr(owner, name)
    assert callable(function)
    if isinstance(call, ast.Call):
        args = [ast.literal_eval(arg) for arg in call.args]
        keywords = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        if name.startswith("create_"):
            vit_jax.create_model(*args, **keywords)
        else:
            named = inspect.signature(function).parameters.keys()
            assert args[0].startswith(("hf://", "timm/"))
            assert keywords.keys() <= named | fields.fields(ViTConfig).keys()


def check_command(text):
    command, *flags = text.split()
    known = load(command).parser()._option_string_actions
    for flag in flags:
        name, _, value = flag.partition("=")
        assert name in known
        assert not value or value in (known[name].choices or WRITERS)


def check_key(text):
    key, _, value = text.partition("=")
    assert key in KEYS
    if key.startswith("evals.NAME."):
        assert ("evals.NAME", ast.literal_eval(value)) in CHOICES
    elif value:
        raw = loading.read(TrainConfig, RECIPE, {key: ast.literal_eval(value)})
        data = loading.complete(TrainConfig, raw).data
        parse.parse_train(data.train_transform, data.image_size)
        parse.parse_eval(data.eval_transform, data.image_size)


@pytest.mark.parametrize("name", names())
def test_what_the_page_names_exists(name):
    first = name.split()[0]
    if first.startswith("vit_jax."):
        check_call(name)
    elif first.startswith("PretrainedModel."):
        assert callable(getattr(vit_jax.PretrainedModel, name.partition(".")[2]))
    elif first.startswith("configs/"):
        loading.complete(TrainConfig, loading.read(TrainConfig, name))
    elif ":" in first:
        assert name in vit_jax.list_models(pretrained=True)
    elif first in COMMANDS:
        check_command(name)
    else:
        check_key(name)
