"""The schema of configs: defaults, checks, overrides and lengths."""

import dataclasses
import json
import pathlib
import re
import textwrap

import pytest
from ml_collections import ConfigDict

import vit_jax
from vit_jax.config import fields, loading
from vit_jax.errors import UserError
from vit_jax.training import config, optim


def stated(**sections):
    """Returns the least that a recipe states, with sections updated."""
    raw = {"batch_size": 8, "data": {"classes": 3}, "optim": {"rate": 0.1}}
    for name, value in sections.items():
        merge = isinstance(value, dict) and name in raw
        raw[name] = raw[name] | value if merge else value
    return raw


@pytest.fixture
def recipe(tmp_path):
    """Returns the path of a recipe that notes its argument in `name`."""
    path = tmp_path / "configs" / "tiny.py"
    path.parent.mkdir()
    path.write_text(
        textwrap.dedent(
            """
            from ml_collections import ConfigDict

            def get_config(arg=None):
                c = ConfigDict()
                c.batch_size, c.epochs = 8, 2
                c.data = dict(name="made", classes=3)
                c.optim = dict(name="sgd", rate=0.1)
                c.evals = dict(val="test")
                if arg:
                    c.name = arg
                return c
            """
        )
    )
    return str(path)


def test_text_for_a_tuple_of_numbers_is_refused():
    data = {"name": "made", "classes": 3, "mean": "a=b"}
    raw = {"batch_size": 8, "optim": {"rate": 0.1}, "data": data}
    with pytest.raises(UserError, match=r"data\.mean\[0\]='a=b' is str, but it takes"):
        config.complete(raw)


def test_complete_adds_every_default_and_freezes():
    c = config.complete(stated(model={"dropout": 0.3}))
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.model.dropout = 0.2
    assert (c.model.dropout, c.model.variant, c.every.log) == (0.3, "B/16", 50)
    assert c.data.image_size == (224, 224)


def test_complete_takes_a_config_dict_and_is_idempotent():
    once = config.complete(ConfigDict(stated(evals={"val": "test"})))
    assert config.complete(once) == once
    assert fields.differences(once, config.complete(fields.to_json(once))) == []


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (stated(sed=1), "unknown config key sed; the nearest known key is seed"),
        (
            stated(model={"droput": 0.1}),
            "unknown config key model.droput; the nearest known key is model.dropout",
        ),
        (stated(optimizer={"rate": 1.0}), "unknown config key optimizer; .* is optim"),
        (stated(mesh={"dta": 1}), "unknown config key mesh.dta; .* is mesh.data"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest(raw, message):
    with pytest.raises(UserError, match=message):
        config.complete(raw)


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        ({"momentum": 0.9}, "optim.momentum is read only with optim.name=sgd"),
        ({"name": "sgd", "b1": 0.9}, "optim.b1 is read only with optim.name=adam"),
        ({"timescale": 7}, "optim.timescale is read only with optim.decay=rsqrt"),
        (
            {"decay": "constant", "end_rate": 1e-5},
            "optim.end_rate is read only with optim.decay=linear or cosine",
        ),
    ],
)
def test_key_of_another_choice_is_refused(optim, message):
    with pytest.raises(UserError, match=message):
        config.complete(stated(optim=optim))


def test_choice_brings_its_keys():
    c = config.complete(stated(optim={"name": "sgd", "decay": "rsqrt"}))
    assert (c.optim.momentum, c.optim.timescale) == (0.9, 10_000)
    assert not hasattr(c.optim, "b1")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (stated(optim={"name": "adm"}), "optim.name='adm' is not one of adam, sgd"),
        (stated(optim={"name": ["sgd"]}), r"optim.name=\['sgd'\] is not one of"),
        (stated(init_head="new"), "init_head='new' is not one of replace, keep, drop"),
        (stated(seed="1"), r"seed='1' is str, but it takes int \(as 0\)"),
        (stated(seed=1.0), "seed=1.0 is float, but it takes int"),
        (stated(seed=True), "seed=True is bool, but it takes int"),
        (
            stated(model={"dropout": "0"}),
            "model.dropout='0' is str, but it takes float",
        ),
        (stated(data={"image_size": 32}), "data.image_size=32 is int, .* tuple"),
        (stated(evals={"val": 3}), "evals.val=3 is int, but it takes str"),
        (stated(optim=3), "optim=3 is a section, .* as optim.name"),
        (stated(evals="test"), "evals='test' is a section, .* as evals.name"),
        (stated(data={"classes": 0}), "data.classes=0 must be at least 1"),
        (stated(profile=(15, 10)), r"profile=\(15, 10\) is not \(first step, last"),
        (stated(profile=(0, 10)), r"profile=\(0, 10\) is not \(first step, last"),
        (stated(profile=(10,)), r"profile=\(10,\) is not \(first step, last"),
        (stated(profile=(-1, 10)), r"profile=\(-1, 10\) must be at least 0"),
        (stated(slow_step=-3.0), "slow_step=-3.0 must be at least 0"),
        (stated(data={"image_size": (8, 8, 3)}), r"\(8, 8, 3\) is not \(height, width"),
        (stated(optim={"rate": 0.0}), "set exactly one"),
        (
            stated(optim={"rate_per_256": 1e-3}),
            "rate=0.1 and .*=0.001: set exactly one",
        ),
    ],
)
def test_wrong_value_is_refused_with_its_key(raw, message):
    with pytest.raises(UserError, match=message):
        config.complete(raw)


def test_integer_becomes_the_float_that_a_key_takes():
    c = config.complete(stated(epochs=5, optim={"rate": 1}))
    assert (type(c.epochs), type(c.optim.rate)) == (float, float)


def test_list_and_string_become_the_tuple_that_a_key_takes():
    c = config.complete(stated(data={"image_size": [8, 12]}, optim={"freeze": "head"}))
    assert (c.data.image_size, c.optim.freeze) == ((8, 12), ("head",))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 0),
        ({"warmup_steps": 7}, 7),
        ({"warmup_epochs": 1.5}, 15),
        ({"warmup_fraction": 0.25}, 50),
    ],
)
def test_length_is_in_steps_epochs_or_a_fraction(given, expected):
    node = config.complete(stated(optim=given)).optim
    length = optim.steps(node, "warmup", total_steps=200, steps_per_epoch=10.0)
    assert length == expected


def test_length_stated_twice_is_refused():
    node = config.complete(stated(optim={"warmup_steps": 7, "warmup_epochs": 1})).optim
    with pytest.raises(UserError, match=r"warmup_steps=7 and warmup_epochs=1.0: keep"):
        optim.steps(node, "warmup", total_steps=200, steps_per_epoch=10.0)


def test_run_is_as_long_as_its_steps_or_its_epochs():
    assert config.complete(stated(total_steps=9)).num_steps(100) == 9
    assert config.complete(stated(epochs=2)).num_steps(100) == 25
    assert config.complete(stated(epochs=0.001)).num_steps(100) == 1


@pytest.mark.parametrize("lengths", [{}, {"total_steps": 9, "epochs": 2}])
def test_run_without_one_length_is_refused(lengths):
    with pytest.raises(UserError, match="set exactly one of them"):
        config.complete(stated(**lengths)).num_steps(100)


def test_differences_are_listed_by_key():
    a = config.complete(stated(seed=1, evals={"val": "test"}))
    b = config.complete(stated(seed=2, model={"depth": 3}, evals={"dev": "val"}))
    assert fields.differences(a, b) == [
        "evals.dev: absent -> val",
        "evals.val: test -> absent",
        "model.depth: 0 -> 3",
        "seed: 1 -> 2",
    ]


def test_config_equals_itself_after_a_trip_through_json():
    c = config.complete(stated(data={"image_size": (8, 12)}))
    back = json.loads(json.dumps(fields.to_json(c)))
    assert back == fields.to_json(c)
    assert fields.differences(c, back) == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("true", True),
        ("False", False),
        ("(8, 12)", (8, 12)),
        ("B/16", "B/16"),
        ("train[:90%]", "train[:90%]"),
        ("", ""),
    ],
)
def test_override_text_becomes_a_value(text, value):
    parsed = loading.parse_override(text)
    assert (type(parsed), parsed) == (type(value), value)


def test_load_reads_file_argument_and_overrides(recipe):
    assert config.load(recipe).name == "tiny"
    c = config.load(f"{recipe}:a=1,b", {"seed": 7, "optim.rate": 1, "evals.dev": "val"})
    assert (c.name, c.seed, c.optim.rate) == ("a=1,b", 7, 1.0)
    assert fields.to_dict(c)["evals"] == {"val": "test", "dev": "val"}


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("optim.rte", "unknown config key optim.rte; the nearest .* is optim.rate"),
        ("optm.rate", "unknown config key optm.rate; the nearest .* is optim.rate"),
        ("seed.value", "unknown config key seed.value"),
        ("model.mlp.dim", "unknown config key model.mlp.dim; .* is model.mlp_dim"),
        ("optim.b1", "optim.b1 is read only with optim.name=adam"),
        ("data", "data=1 is a section, not a key"),
    ],
)
def test_override_of_an_unknown_key_is_refused(recipe, key, message):
    with pytest.raises(UserError, match=message):
        config.load(recipe, {key: 1})


def test_missing_config_file_is_named_with_those_that_exist(recipe):
    path = recipe.replace("tiny", "tidy")
    with pytest.raises(UserError, match=f"{re.escape(path)} not found; .* has tiny.py"):
        config.load(path)
    with pytest.raises(UserError, match="not found; nowhere/ has none"):
        config.load("nowhere/a.py")


def test_every_key_is_read_somewhere():
    """Model keys are read as arguments by name, lengths through optim.steps."""
    root = pathlib.Path(vit_jax.__file__).parent
    # A line that declares a key does not read it.
    declares = re.compile(
        r"^    \w+: .+ = (key|epochs|section|choice|named)\(.*$", re.MULTILINE
    )
    texts = [declares.sub("", path.read_text()) for path in root.rglob("*.py")]
    code = "\n".join(texts)
    unread = []
    for section, (field, about) in fields.fields(config.TrainConfig).items():
        if isinstance(about, fields.Named):
            types = about.choice.types.values()
        elif isinstance(about, fields.Choice):
            types = about.types.values()
        elif isinstance(about, fields.Section):
            types = [field.default_factory]
        else:
            types = []
            if not re.search(rf"\.{section}\b", code):
                unread.append(section)
        for key in {key for cls in types for key in fields.fields(cls)}:
            length, _, unit = key.rpartition("_")
            by_unit = unit in ("steps", "epochs", "fraction") and f'"{length}"' in code
            direct = rf"\.{key}\b" if section != "model" else rf"\b{key}\b"
            if not by_unit and not re.search(direct, code):
                unread.append(f"{section}.{key}")
    assert unread == []
