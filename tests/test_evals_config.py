"""What `config.evals` may hold, and configs of evaluations alone."""

import importlib
import itertools
import pathlib
import re

import pytest

from vit_jax.config import fields, loading
from vit_jax.errors import UserError
from vit_jax.evaluators import EVALUATORS, splits
from vit_jax.evaluators.classification import ClassificationConfig
from vit_jax.evaluators.fewshot import FewShotConfig
from vit_jax.training import config

ROOT = pathlib.Path(__file__).parent.parent
RECIPES = sorted(
    path.stem
    for path in (ROOT / "configs" / "eval").glob("*.py")
    if path.stem not in ("__init__", "common")
)


def complete(**given):
    raw = {"batch_size": 8, "data": {"num_classes": 3}, "optim": {"learning_rate": 0.1}}
    return config.complete(raw | {"evals": given})


def test_a_split_is_a_classification_and_a_kind_gets_its_keys():
    c = complete(val="val[:9]", few={"kind": "fewshot", "shots": [2], "l2": [64]})
    assert c.evals["val"] == ClassificationConfig(split="val[:9]")
    assert c.evals["few"] == FewShotConfig(shots=(2,), l2=(64.0,))
    assert fields.to_dict(c)["evals"]["val"] == "val[:9]"
    assert config.complete(fields.to_json(c)) == c
    c = complete(val={"split": "val", "every": 7})
    assert c.evals["val"].kind == "classification"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "evals.x=3 is a section, not a key: set a key of it, such as evals.x.kind"),
        ({"kind": "few"}, "evals.x.kind='few' is not one of classification, multi_lab"),
        ({"kind": "knn", "shots": (1,)}, "evals.x.shots is read only with .*=fewshot"),
        ({"kind": "knn", "kk": 1}, "unknown config key evals.x.kk; .* is evals.x.k$"),
        ({"kind": "knn", "k": 2.5}, "evals.x.k=2.5 is float, but it takes int"),
        ({"kind": "knn", "k": 0}, "evals.x.k=0 must be at least 1"),
        ({"kind": "knn", "temperature": 0}, "evals.x.temperature=0.0 must be above 0"),
        ({"kind": "fewshot", "shots": ()}, "evals.x.shots is empty"),
        ({"kind": "fewshot", "shots": (0, 5)}, r"shots=\(0, 5\) must be at least 1"),
        ({"kind": "fewshot", "l2": (1, 0)}, r"evals.x.l2=\(1.0, 0.0\) must be above 0"),
        ({"kind": "fewshot", "l2": (1, 1)}, "has a number twice"),
        ({"kind": "fewshot", "seeds": 0}, "evals.x.seeds=0 must be at least 1"),
        ({"kind": "probe", "held_out": 1.0}, "evals.x.held_out=1.0 must be below 1"),
        ({"every": -1}, "evals.x.every=-1 must be at least 0"),
        ({"kind": "probe", "seed": 10**20}, r"x.seed=1000.*0 must be below 2\*\*32"),
    ],
)
def test_what_no_evaluation_could_use_is_refused(value, message):
    with pytest.raises(UserError, match=message):
        complete(x=value)


def overridden(**given):
    """Returns the evaluations of a recipe with two of them after overrides."""
    keys = {key.replace("__", "."): value for key, value in given.items()}
    raw = {"evals": {"knn": {"kind": "knn"}, "val": "val"}}
    loading.override(config.TrainConfig, raw, keys)
    return raw["evals"]


def test_none_removes_one_evaluation_or_all():
    assert [*overridden(evals__knn=None)] == ["val"]
    assert overridden(evals=None) == overridden(evals=None, evals__knn=None) == {}
    # What is added stays.
    assert overridden(evals=None, evals__new="test") == {"new": {"split": "test"}}
    assert loading.read(config.TrainConfig, "mae:quick", {"evals": None})["evals"] == {}
    raw = {"batch_size": 8, "data": {"num_classes": 3}, "optim": {"learning_rate": 0.1}}
    assert config.complete(raw | {"evals": None}).evals == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"evals__no": None}, "evals.no=None: 'no' is not among the names knn, val;"),
        (
            {"evals__knn": None, "evals__knn__k": 3},
            "evals.knn=None removes 'knn', but evals.knn.k is set too",
        ),
        ({"evals": {"knn": None}}, "evals={'knn': None}: .* set evals.knn=None"),
        ({"evals": ()}, r"evals=\(\) is a section"),
    ],
)
def test_a_removal_that_says_too_little_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        overridden(**given)


@pytest.mark.parametrize("name", ["a/b", "skipped", ""])
def test_names_that_are_no_names_of_files_are_refused(name):
    with pytest.raises(UserError, match=f"evals: '{name}' cannot be a name here"):
        complete(**{name: "val"})


def test_every_kind_has_its_code_and_every_key_is_read():
    package = ROOT / "vit_jax"
    paths = *package.glob("evaluators/*.py"), package / "training" / "actions.py"
    code = "".join(path.read_text() for path in paths)
    from_key = {"name", *splits.KEYS}
    for kind, cls in EVALUATORS.items():
        assert cls().kind == kind
        for key in fields.fields(cls):
            read = re.search(rf"(config|self|evaluation)\.{key}\b", code)
            assert key in from_key or read, (kind, key)


@pytest.fixture
def recipe(tmp_path):
    """Writes a config of an evaluation, whose body a test states."""

    def write(body):
        path = tmp_path / "one.py"
        lines = ["from ml_collections import ConfigDict", "def get_config(arg=None):"]
        lines += ["    c = ConfigDict()", f"    {body}", "    return c"]
        path.write_text("\n".join(lines))
        return str(path)

    return write


def test_keys_of_an_evaluation_are_set_from_the_command_line(recipe):
    path = recipe("c.batch_size = 8; c.evals = dict(few=dict(kind='fewshot'), v='val')")
    c = config.load_evaluation(path, {"evals.few.seeds": 3, "data.name": "digits"})
    found = c.evals["few"].seeds, c.evals["v"].split, c.data.name
    assert found == (3, "val", "digits")
    c = config.load_evaluation(path, {"evals.new.kind": "knn", "evals.new.k": 5})
    assert c.evals["new"].k == 5
    c = config.load_evaluation(path, {"evals.v.every": 3})
    assert (c.evals["v"].split, c.evals["v"].every) == ("val", 3)
    with pytest.raises(UserError, match="unknown config key evals.few.a.b"):
        config.load_evaluation(path, {"evals.few.a.b": 3})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("c.evals = {}", "has no evaluations"),
        ("c.seed = 3; c.evals = dict(v='val')", "key seed is not read by"),
        ("c.model = dict(variant='B/16')", "key model is not read by"),
        ("c.data = dict(train_transform='flip')", "data.train_transform is not read"),
        ("c.data = 3; c.evals = dict(v='v')", "data=3 is a section"),
    ],
)
def test_what_evaluation_alone_does_not_read_is_refused(recipe, body, message):
    with pytest.raises(UserError, match=message):
        config.load_evaluation(recipe(f"c.batch_size = 8; {body}"))


def arguments(stem):
    """Returns all combinations of a recipe's arguments."""
    known = importlib.import_module(f"configs.eval.{stem}").ARGUMENTS
    choices = {
        name: (value, not value) if isinstance(value, bool) else (value,)
        for name, value in known.items()
    }
    choices |= {
        name: value for name, value in known.items() if isinstance(value, tuple)
    }
    if "objectnet" in choices:
        choices["objectnet"] = ("", "somewhere")
    return [
        dict(zip(choices, x, strict=True)) for x in itertools.product(*choices.values())
    ]


@pytest.mark.parametrize("stem", RECIPES)
def test_recipe_builds_with_every_argument(stem):
    path = f"{ROOT}/configs/eval/{stem}.py"
    for chosen in arguments(stem):
        text = ",".join(f"{k}={v}" for k, v in chosen.items())
        c = config.load_evaluation(f"{path}:{text}")
        assert c.evals
    plain = config.load_evaluation(path)
    first = ",".join(f"{k}={v}" for k, v in arguments(stem)[0].items())
    assert fields.differences(plain, config.load_evaluation(f"{path}:{first}")) == []
    assert pathlib.Path(path).read_text().count("\n") < 80
    doc = importlib.import_module(f"configs.eval.{stem}").__doc__
    for part in (f"configs/eval/{stem}.py", "\nRun:", "\nResult:"):
        assert part in doc


def test_a_split_may_have_commas_and_a_folder_may_not(tmp_path):
    path = f"{ROOT}/configs/eval/probe.py"
    c = config.load_evaluation(f"{path}:train=even_splits(train, 3)[0],held_out=0.2")
    found = c.evals["probe"].train, c.evals["probe"].held_out
    assert found == ("even_splits(train, 3)[0]", 0.2)
    message = "'b' is unknown.*--config.data.data_dir=FOLDER"
    with pytest.raises(UserError, match=message):
        config.load_evaluation(f"{path}:data=/a,b")
    stated = {"data.name": "folder", "data.data_dir": "/a,b"}
    assert config.load_evaluation(path, stated).data.data_dir == "/a,b"


def test_a_data_set_is_a_folder_or_a_name_with_its_place(tmp_path, monkeypatch):
    def data(text):
        c = config.load_evaluation(f"{ROOT}/configs/eval/probe.py:data={text}")
        return c.data.name, c.data.data_dir

    assert data("cifar10") == ("cifar10", "")
    assert data("eurosat/rgb:2.0.0@/data/tfds") == ("eurosat/rgb:2.0.0", "/data/tfds")
    assert data(tmp_path) == ("folder", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flowers@home").mkdir()
    assert data("flowers@home") == ("folder", "flowers@home")
