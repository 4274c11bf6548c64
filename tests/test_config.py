"""The schema of configs: defaults, checks, overrides and lengths."""

import dataclasses
import json
import pathlib
import re

import pytest
from hosts import write_recipe
from ml_collections import ConfigDict

import vit_jax
from vit_jax.config import fields, loading
from vit_jax.config.lengths import RunLength, length_in_steps
from vit_jax.errors import UserError
from vit_jax.training import config
from vit_jax.training.optim import outside


def stated(**sections):
    """Returns the least that a recipe states, with sections updated."""
    raw = {"batch_size": 8, "data": {"num_classes": 3}, "optim": {"learning_rate": 0.1}}
    for name, value in sections.items():
        merge = isinstance(value, dict) and name in raw
        raw[name] = raw[name] | value if merge else value
    return raw


@pytest.fixture
def recipe(tmp_path):
    """Returns the path of a recipe that notes its argument in `name`."""
    (tmp_path / "configs").mkdir()
    lines = "c.update({'name': arg} if arg else {})", "c.evals = dict(val='test')"
    return str(write_recipe(tmp_path / "configs" / "tiny.py", *lines))


def test_complete_adds_every_default_and_freezes():
    c = config.complete(stated(model={"dropout": 0.3}))
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.model.dropout = 0.2
    assert (c.model.dropout, c.model.variant, c.log_every_steps) == (0.3, "B/16", 50)
    assert c.data.image_size == (224, 224)


def test_complete_takes_a_config_dict_and_json_and_is_idempotent():
    once = config.complete(ConfigDict(stated(evals={"val": "test"})))
    assert config.complete(once) == once
    back = json.loads(json.dumps(fields.to_json(once)))
    assert fields.differences(once, config.complete(back)) == []


def test_values_take_the_type_of_their_key():
    data, optim = {"image_size": [8, 12]}, {"learning_rate": 1, "freeze": "head"}
    c = config.complete(stated(epochs=5, data=data, optim=optim))
    assert (type(c.epochs), type(c.optim.learning_rate)) == (float, float)
    assert (c.data.image_size, c.optim.freeze) == ((8, 12), ("head",))


@pytest.mark.parametrize(
    ("init", "overrides", "found"),
    [
        ("a", {}, ("a", "new")),
        ({"checkpoint": "a", "head": "keep"}, {"init": "b"}, ("b", "keep")),
        ("a", {"init.head": "keep"}, ("a", "keep")),
        ("a", {"init.head": "keep", "init": "b"}, ("b", "keep")),
        ("", {"init": {"checkpoint": "b"}}, ("b", "new")),
    ],
)
def test_a_text_for_init_is_its_checkpoint(init, overrides, found):
    raw = stated(init=init)
    loading.override(config.TrainConfig, raw, overrides)
    done = config.complete(raw).init
    assert (done.checkpoint, done.head) == found


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ({"optim.name": "adam"}, ("adam", "linear")),
        ({"optim.name": "adam", "optim.b1": 0.8}, ("adam", "linear")),
        ({"optim.schedule.name": "rsqrt"}, ("sgd", "rsqrt")),
        (
            {"optim.schedule.timescale": 9, "optim.schedule.name": "rsqrt"},
            ("sgd", "rsqrt"),
        ),
    ],
)
def test_another_choice_drops_the_keys_of_the_old_one(overrides, found):
    schedule = {"name": "linear", "end_learning_rate": 0.1}
    optim = {"name": "sgd", "momentum": 0.5, "nesterov": True, "weight_decay": 0.1}
    raw = stated(optim=optim | {"schedule": schedule})
    loading.override(config.TrainConfig, raw, overrides)
    done = config.complete(raw).optim
    assert (done.name, done.schedule.name, done.weight_decay) == (*found, 0.1)
    assert getattr(done, "momentum", 0.5) == 0.5


@pytest.mark.parametrize(
    ("sections", "override", "gone"),
    [
        (
            {"optim": {"name": "sgd", "momentum": 0.5, "nesterov": True}},
            ("optim.name", "adam"),
            {"optim.momentum", "optim.nesterov"},
        ),
        (  # A text for a section is its kind.
            {"optim": {"schedule": {"name": "step", "boundaries": (3,)}}},
            ("optim.schedule", "linear"),
            {"optim.schedule.boundaries"},
        ),
        (
            {"task": {"name": "contrastive", "loss": "softmax", "text": {"depth": 2}}},
            ("task.name", "classification"),
            {"task.text"},
        ),
        (
            {"model": {"variant": "B/16", "pool": "gap", "dropout": 0.1}},
            ("model.variant", "R50x1"),
            {"model.pool", "model.dropout"},
        ),
        ({"evals": {"val": "test"}}, ("evals.val.kind", "knn"), {"evals.val.split"}),
    ],
)
def test_dropped_keys_are_named_in_one_line(tmp_path, capsys, sections, override, gone):
    path = tmp_path / "r.py"
    path.write_text(
        "from ml_collections import ConfigDict\n"
        f"def get_config(arg=None):\n    return ConfigDict({stated(**sections)!r})\n"
    )
    key, kind = override
    done = fields.flatten(config.load(str(path), {key: kind}))
    assert done.get(key, done.get(f"{key}.name")) == kind
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith((f"{key}='{kind}'", f"{key}.name='{kind}'"))
    assert (
        set(re.findall(r"\b[a-z]+\.[a-z_.]+\b", line.partition(" has no ")[2])) == gone
    )
    assert not gone & done.keys()
    config.load(str(path))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("order", [1, -1])
def test_another_choice_keeps_what_the_user_states(order):
    overrides = [("optim.name", "adam"), ("optim.momentum", 0.7)][::order]
    raw = stated(optim={"name": "sgd", "momentum": 0.5})
    loading.override(config.TrainConfig, raw, dict(overrides))
    with pytest.raises(
        UserError, match="optim.momentum is read only with optim.name=sgd"
    ):
        config.complete(raw)
    raw = stated(optim={"momentum": 0.5})  # No key of the default, adam.
    with pytest.raises(UserError, match="optim.name='adm' is not one of"):
        loading.override(config.TrainConfig, raw, {"optim.name": "adm"})


def test_choice_brings_its_keys():
    c = config.complete(stated(optim={"name": "sgd", "schedule": "rsqrt"}))
    assert (c.optim.momentum, c.optim.schedule.timescale) == (0.9, 10_000)
    assert not hasattr(c.optim, "b1")


CONSTANT = {"name": "constant", "end_learning_rate": 1e-5}
REFUSED = [
    # Unknown keys, with the nearest.
    ({"sed": 1}, "unknown config key sed; the nearest known key is seed"),
    ({"model": {"droput": 0.1}}, "model.droput; .* known key is model.dropout"),
    ({"optimizer": {"rate": 1.0}}, "optimizer.rate; .* is optim.learning_rate"),
    ({"mesh": {"dta": 1}}, "unknown config key mesh.dta; .* is mesh.data"),
    ({"model": {"variant": "Ti/4", "head": 3}}, ".head; .* model.num_heads or model.p"),
    # Keys of another choice.
    ({"optim": {"momentum": 0.9}}, "optim.momentum is read only with optim.name=sgd"),
    ({"optim": {"name": "sgd", "b1": 0.9}}, "optim.b1 is read only with .*name=adam"),
    ({"optim": {"schedule": {"timescale": 7}}}, "timescale .*schedule.name=rsqrt"),
    ({"optim": {"schedule": CONSTANT}}, "only with optim.schedule.name=cosine or lin"),
    # Values.
    ({"optim": {"name": "adm"}}, "'adm' is not one of adam, adamw, sgd, lars, lamb"),
    ({"optim": {"name": ["sgd"]}}, r"optim.name=\['sgd'\] is not one of"),
    ({"init": {"head": "a"}}, "init.head='a' is not one of new, keep, drop"),
    ({"seed": "1"}, r"seed='1' is str, but it takes int \(as 0\)"),
    ({"seed": 1.0}, "seed=1.0 is float, but it takes int"),
    ({"seed": True}, "seed=True is bool, but it takes int"),
    ({"model": {"dropout": "0"}}, "model.dropout='0' is str, but it takes float"),
    ({"data": {"image_size": 32}}, "data.image_size=32 is int, .* tuple"),
    ({"data": {"mean": "a=b"}}, r"data\.mean='a=b' is not one of estimate"),
    ({"evals": {"val": 3}}, "evals.val=3 is a section, .* as evals.val.kind"),
    ({"optim": 3}, "optim=3 is a section, .* as optim.name"),
    ({"evals": "test"}, "evals='test' is a section, .* as evals.name"),
    ({"data": {"num_classes": -1}}, "data.num_classes=-1 must be at least 0"),
    ({"profile_steps": (15, 10)}, r"=\(15, 10\) is not \(first step, last"),
    ({"profile_steps": (0, 10)}, r"=\(0, 10\) is not \(first step, last"),
    ({"profile_steps": (10,)}, r"=\(10,\) is not \(first step, last"),
    ({"profile_steps": (-1, 10)}, r"profile_steps=\(-1, 10\) must be at least 0"),
    ({"slow_step_factor": -3.0}, "slow_step_factor=-3.0 must be at least 0"),
    ({"data": {"image_size": (8, 8, 3)}}, r"\(8, 8, 3\) is not \(height, width"),
    ({"optim": {"learning_rate": 0.0}}, r"^optim.learning_rate=0.0 and .*above 0"),
    ({"optim": {"base_learning_rate": 1e-3}}, "rate=0.1 and .*=0.001: set exactly one"),
    ({"name": "../x"}, r"^name='../x'"),
    ({"name": "a/b"}, "^name='a/b'"),
    ({"name": ".."}, r"^name='\.\.'"),
]


@pytest.mark.parametrize(("sections", "message"), REFUSED)
def test_what_does_not_fit_is_refused_with_its_key(sections, message):
    with pytest.raises(UserError, match=message):
        config.complete(stated(**sections))


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
    length = length_in_steps(node, "warmup", RunLength(200, 10.0))
    assert length == expected


@pytest.mark.parametrize(
    ("sections", "override", "gone"),
    [
        ({"epochs": 3}, {"total_steps": 7}, "epochs=3"),
        ({"total_steps": 9}, {"epochs": 2}, "total_steps=9"),
        (
            {"optim": {"warmup_epochs": 2.0}},
            {"optim.warmup_steps": 7},
            "optim.warmup_epochs=2.0",
        ),
        (
            {"optim": {"base_learning_rate": 0.1}},
            {"optim.learning_rate": 0.3},
            "optim.base_learning_rate=0.1",
        ),
        ({"epochs": 3}, {"total_steps": 0}, ""),
        ({"epochs": 3}, {"total_steps": 7, "epochs": 0}, ""),
        ({"eval_every_epochs": 1.0}, {"eval_every_steps": 5}, ""),
    ],
)
def test_a_length_that_is_set_replaces_that_of_the_recipe(sections, override, gone):
    raw, told = stated(**sections), []
    if "optim.learning_rate" in override:
        del raw["optim"]["learning_rate"]
    loading.override(config.TrainConfig, raw, override, told.append)
    done = fields.flatten(config.complete(raw))
    assert all(done[key] == value for key, value in override.items())
    if gone:
        (line,) = told
        assert line.startswith(f"{gone}: ") and next(iter(override)) in line
        assert done[gone.partition("=")[0]] == 0
    else:
        assert not told


def test_none_removes_an_evaluation():
    evals = {"val": "test", "knn": {"kind": "knn"}}
    raw = stated(evals=evals)
    loading.override(config.TrainConfig, raw, {"evals.knn": None})
    assert [*config.complete(raw).evals] == ["val"]
    with pytest.raises(UserError, match="evals.test=None: .*among .*val"):
        loading.override(config.TrainConfig, raw, {"evals.test": None})


def test_length_given_twice_is_refused():
    node = config.complete(stated(optim={"warmup_steps": 7, "warmup_epochs": 1})).optim
    with pytest.raises(UserError, match=r"warmup_steps=7 and warmup_epochs=1.0: keep"):
        length_in_steps(node, "warmup", RunLength(200, 10.0))


def test_run_is_as_long_as_its_steps_or_its_epochs():
    assert config.complete(stated(total_steps=9)).num_steps(100) == 9
    assert config.complete(stated(epochs=2)).num_steps(100) == 25
    assert config.complete(stated(epochs=0.001)).num_steps(100) == 1
    for lengths in ({}, {"total_steps": 9, "epochs": 2}):
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
    c = config.load(
        f"{recipe}:a=1,b", {"seed": 7, "optim.learning_rate": 1, "evals.dev": "val"}
    )
    assert (c.name, c.seed, c.optim.learning_rate) == ("a=1,b", 7, 1.0)
    assert fields.to_dict(c)["evals"] == {"val": "test", "dev": "val"}


def test_a_section_is_set_before_its_keys_whatever_the_order(recipe):
    keys = {"optim.schedule.end_learning_rate": 1e-5, "optim.schedule": "linear"}
    for order in (keys, dict(reversed(keys.items()))):
        schedule = config.load(recipe, order).optim.schedule
        assert (schedule.name, schedule.end_learning_rate) == ("linear", 1e-5)
    with pytest.raises(UserError, match="evals='val' is a section, not a key"):
        config.load(recipe, {"evals": "val", "evals.val.every": 3})


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("optim.learning_rte", "optim.learning_rte; .* is optim.learning_rate"),
        ("optm.rate", "unknown config key optm.rate; .* is optim.learning_rate"),
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


@pytest.mark.slow
def test_every_key_is_read_somewhere():
    """Model keys are read as arguments by name, lengths through optim.steps.

    Keys of optax's optimisers are arguments of its functions.
    """
    root = pathlib.Path(vit_jax.__file__).parent
    # A line that declares a key does not read it.
    declares = re.compile(
        r"^    \w+: .+ = (key|epochs|section|choice|named)\(.*$", re.MULTILINE
    )
    texts = [declares.sub("", path.read_text()) for path in root.rglob("*.py")]
    code = "\n".join(texts)
    unread = []
    whole = [("", "", config.TrainConfig)]
    for section, _, cls in (*whole, *fields.sections(config.TrainConfig)):
        if issubclass(cls, outside.OutsideConfig):
            continue
        for key in fields.fields(cls):
            length, _, unit = key.rpartition("_")
            by_unit = unit in ("steps", "epochs", "fraction") and f'"{length}"' in code
            direct = rf"\.{key}\b" if section != "model" else rf"\b{key}\b"
            if not by_unit and not re.search(direct, code):
                unread.append(f"{section}.{key}")
    assert unread == []


def test_a_stored_config_loses_keys_that_have_gone_if_they_had_no_effect():
    stored = fields.to_json(config.complete(stated(task={"name": "dinov2"})))
    gone = {"teacher_momentum_epochs": 0.0, "small_weight_fraction": 0.5}
    stored["task"] |= gone
    stored["optim"]["weight_decay_epochs"] = 0.0
    loading.drop_former_keys(stored)
    assert "weight_decay_epochs" not in stored["optim"]
    assert stored["task"].keys() & gone.keys() == {"small_weight_fraction"}
    key = "points.b.train.optim.weight_decay_epochs"
    assert loading.is_former(f"{key}: 0.0 -> absent")
    assert not loading.is_former(f"{key}: 2.0 -> absent")
