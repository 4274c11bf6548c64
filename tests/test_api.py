"""vit_jax in Python: the page of the site, the examples of docstrings, and bad arguments."""

import doctest
import functools
import importlib
import io
import os
import pathlib
import re
import shutil
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TINY, run_python, write_weights, write_workdir
from PIL import Image

import vit_jax
from vit_jax.api import (
    flax_networks,
    image_preprocess,
    models,
    nnx_networks,
    pretrained_model,
    training,
)
from vit_jax.config import fields
from vit_jax.errors import UserError
from vit_jax.training import callbacks
from vit_jax.training import config as configuration
from vit_jax.weights import Pretrained, export

ROOT = pathlib.Path(__file__).parents[1]
NOISE = np.random.default_rng(0).integers(0, 256, (64, 8, 8, 1), np.uint8)
LABELS = np.arange(64) % 4


def copy_recipes(folder):
    """Copies the recipes; that of digits has two layers, which compile sooner."""
    shutil.copytree(ROOT / "configs", folder / "configs")
    recipe = folder / "configs" / "digits.py"
    text = recipe.read_text()
    assert text.count("depth=4") == 1
    recipe.write_text(text.replace("depth=4", "depth=2"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The current folder, with recipes, a run whose parameters are drawn, and images."""
    folder, before = tmp_path_factory.mktemp("api"), os.getcwd()
    copy_recipes(folder)
    keys = {"epochs": 0, "total_steps": 1, "optim.warmup_epochs": 0}
    config = configuration.load(f"{folder}/configs/digits.py", keys)
    write_workdir(config, folder / "runs" / "digits")
    for i in range(40):
        path = folder / "photos" / f"class{i % 2}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(NOISE[i, ..., 0]).save(path)
    os.chdir(folder)
    yield
    os.chdir(before)


@pytest.mark.slow
def test_the_page_trains_loads_and_loops(tmp_path, monkeypatch):
    copy_recipes(tmp_path)
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "python.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    program = "\n".join(blocks)
    assert program.count("epochs=150") == 1
    short = 'epochs=10, **{"optim.warmup_epochs": 2}'
    program = program.replace("epochs=150", short)
    page = types.ModuleType("page")
    exec(compile(program, "docs/python.md", "exec"), vars(page))  # noqa: S102
    top1 = page.report["final"]["test"]["params"]["top1"]
    assert top1 > 0.3
    assert page.scores["test"]["weights"]["examples"] == 397
    assert [step for step, _ in page.callback.values] == [20, 40, 44]
    assert np.isfinite(float(page.metrics["loss"]))


@pytest.mark.parametrize(
    ("module", "examples"),
    [
        (models, 7),
        (pretrained_model, 14),
        (flax_networks, 10),
        (image_preprocess, 9),
        (nnx_networks, 3),
        pytest.param(training, 22, marks=pytest.mark.slow),
        (callbacks, 5),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_examples_of_docstrings(place, module, examples):
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(module):
        for example in test.examples:  # The run has two layers here, not four.
            example.want = example.want.replace("(2, 4, 3, 17", "(2, 2, 3, 17")
        runner.run(test)
    assert runner.summarize() == (0, examples)


def test_every_public_name_has_an_example_and_is_listed():
    assert {*vit_jax.__all__} <= {*dir(vit_jax)}
    page = (ROOT / "docs" / "api.md").read_text()
    for name in vit_jax.__all__:
        assert re.search(rf"\b{name}\b", page), name
        if name != "UserError":
            assert "Example:" in getattr(vit_jax, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'tran'"):
        _ = vit_jax.tran


def test_what_is_not_used_is_not_imported():
    program = """
import sys, vit_jax
assert not {"jax", "numpy", "flax"} & {*sys.modules}
vit_jax.create_model("Ti/16", num_classes=10, image_size=64)
of_models = ["api", "config", "data.config", "errors", "models", "command_line"]
for name in sys.modules:
    part = name.removeprefix("vit_jax.")
    assert part in (name, "data") or part.startswith(tuple(of_models)), name
assert [vit_jax.train.__name__, vit_jax.evaluate.__name__] == ["train", "evaluate"]
"""
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_weights_are_loaded_with_other_keys_of_their_network(place):
    load = functools.partial(vit_jax.load_model, "runs/digits", tell=lambda line: None)
    usual, half = load(), load(dtype="bfloat16", drop_path_rate=0.9, crop_fraction=0.5)
    assert (
        half.model.config.dtype == "bfloat16"
        and half.preprocessing.crop_fraction == 0.5
    )
    images = NOISE[:9]
    assert half.preprocess(images).dtype == jnp.bfloat16
    expected, found = usual(images), load(dtype="bfloat16")(images)
    assert 0 < abs(found - expected).max() < 0.1 * abs(expected).max()
    prepared, key = half.preprocess(images), jax.random.key(0)
    trained = half.apply(half.params, prepared, train=True, key=key)["logits"]
    still = half.apply(half.params, prepared)["logits"]
    assert abs(trained - still).max() > 1e-3
    # Halved by hand, they are computed in float32 all the same, which is said once.
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), usual.params)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        for _ in range(2):
            again = usual.apply(params, prepared)["logits"]
    assert again.dtype == jnp.float32
    # Checks of types hide from Python that it has warned.
    words = dict.fromkeys(str(w.message).split()[0] for w in warned)
    assert [*words] == ["params", "images"]


def test_weights_of_another_library_are_loaded_with_keys_that_it_has_not(tmp_path):
    model = vit_jax.create_model("Ti/16", num_classes=3, image_size=16)
    params = jax.tree.map(lambda s: np.ones(s.shape, s.dtype), model.shapes)
    made = Pretrained(params, model.options, "vit_jax", "made")
    export.export(made, "timm", tmp_path)
    rounded = vit_jax.load_model(
        tmp_path, matmul_dtype="bfloat16", tell=lambda line: None
    )
    assert rounded.model.config.rounds_products
    with pytest.raises(UserError, match="matmul='x'"):
        vit_jax.load_model(tmp_path, matmul="x", tell=lambda line: None)


def test_images_are_given_in_any_form(place, tmp_path):
    model = vit_jax.load_model("runs/digits", tell=lambda line: None)
    array = NOISE[3, ..., 0]
    picture = Image.fromarray(array)
    picture.save(tmp_path / "three.png")
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    path = tmp_path / "three.png"
    forms = [array, array[..., None], picture, path, str(path), stream.getvalue()]
    found = [model.predict(each, topk=2) for each in forms]
    assert all(each == found[0] for each in found)
    together = model.predict([array, picture, path], topk=2)
    assert [b.label for b in together[2]] == [b.label for b in found[0]]
    probability = together[0][0].probability
    assert probability == pytest.approx(found[0][0].probability, rel=1e-5)
    np.testing.assert_allclose(
        model.attention(array).sum(-1), np.ones((1, 2, 3, 17)), rtol=1e-5
    )
    bigger = vit_jax.load_model("runs/digits", image_size=12, tell=lambda line: None)
    assert bigger.model.image_shape == (12, 12, 1)


def test_models_are_called_and_take_folders(place):
    model = vit_jax.load_model("runs/digits", tell=lambda line: None)
    paths = sorted(pathlib.Path("photos").rglob("*.png"))
    logits = model(paths)
    assert logits.shape == (40, 10)
    np.testing.assert_array_equal(model("photos"), logits)
    assert model.predict("photos") == model.predict(paths)
    assert model.features(pathlib.Path("photos")).shape == (40, 48)
    np.testing.assert_array_equal(model(["photos/class0", "photos/class1"]), logits)
    best = logits.argmax(1)
    assert [found[0].label for found in model.predict("photos")] == best.tolist()


def test_a_new_head_is_one_of_zeros_on_the_same_body(place):
    model = vit_jax.load_model("runs/digits", tell=lambda line: None)
    fresh = vit_jax.load_model("runs/digits", num_classes=3, tell=lambda line: None)
    images = NOISE[:4]
    np.testing.assert_array_equal(fresh(images), np.zeros((4, 3)))
    # The layer before the old classifier goes with it.
    layer = jax.device_get(model.params["pre_logits"])
    seen = np.tanh(fresh.features(images) @ layer["kernel"] + layer["bias"])
    np.testing.assert_allclose(seen, model.features(images), atol=1e-5)
    assert fresh.class_names == ("class 0", "class 1", "class 2")
    bare = vit_jax.load_model("runs/digits", num_classes=0, tell=lambda line: None)
    np.testing.assert_array_equal(bare(images), fresh.features(images))


def test_arrays_are_fine_tuned_without_a_workdir(place, monkeypatch):
    given = {"model": "runs/digits", "minutes": 0, "total_steps": 2, "tell": str}
    result = vit_jax.finetune((NOISE, LABELS), class_names=list("abcd"), **given)
    assert result.workdir == "runs/finetune/runs-digits_in-memory"
    assert result.examples == 12
    model = vit_jax.load_model(result.workdir, tell=lambda line: None)
    assert model.class_names == tuple("abcd")
    shutil.rmtree(result.workdir)

    def train(config, *_, **__):
        assert fields.to_dict(config)["evals"] == {"val": "val"}
        raise vit_jax.UserError("far enough")

    # Pairs with images to validate on: none are set aside.
    monkeypatch.setattr(training.loop, "train", train)
    pairs = {"train": (NOISE, LABELS), "val": (NOISE[:8], LABELS[:8])}
    with pytest.raises(vit_jax.UserError, match="far enough"):
        vit_jax.finetune(pairs, **given)


@pytest.mark.slow
def test_callbacks_see_a_run_without_a_workdir_and_its_resumption(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    recipe = str(ROOT / "configs" / "digits.py")
    seen = []

    class Everything(vit_jax.Callback):
        def begin(self, run):
            seen.append(("begin", run.start, run.total_steps))
            assert run.num_parameters > 20_000 and run.config.epochs == 3

        def log(self, step, metrics):
            seen.append(("log", step))
            assert metrics["train/loss"] > 0

        def evaluate(self, step, scores):
            seen.append(("evaluate", step))
            assert 0 <= scores["test/params/top1"] <= 1

        def checkpoint(self, step):
            seen.append(("checkpoint", step))
            if step == 2 and stops:
                raise RuntimeError("as a kill would")

        def end(self, report):
            seen.append(("end", report["steps"]))

    stops = True
    keys = {
        "epochs": 3,
        "optim.warmup_epochs": 0,
        "log_every_steps": 1,
        "checkpoint_every_epochs": 0,
        "checkpoint_every_steps": 2,
        "eval_every_epochs": 0,
        "batch_size": 32,
        "model.depth": 1,
    }
    pairs = {"train": (NOISE, LABELS), "test": (NOISE[:9], LABELS[:9])}
    given = dict(data=pairs, callbacks=[Everything()], **keys)
    with pytest.raises(RuntimeError, match="as a kill would"):
        vit_jax.train(recipe, **given)
    (new,) = pathlib.Path("runs").iterdir()
    assert new.name.startswith("digits-")
    assert seen == [("begin", 0, 6), ("log", 1), ("log", 2), ("checkpoint", 2)]
    seen.clear()
    stops = False
    vit_jax.train(recipe, new, **given)
    assert seen[0] == ("begin", 2, 6) and seen[-1] == ("end", 6)
    assert ("evaluate", 6) in seen and ("checkpoint", 4) in seen
    changed = {**pairs, "train": (NOISE[::-1], LABELS)}
    with pytest.raises(vit_jax.UserError, match="data"):
        vit_jax.train(recipe, new, data=changed, **keys)


def test_arrays_are_not_found_by_a_command(place):
    config = training._config("configs/digits.py", {"data.name": "in_memory"})
    with pytest.raises(vit_jax.UserError, match="give them to vit_jax.train again"):
        vit_jax.train(config, "w")


def test_callbacks_of_other_hosts_ask_for_it(monkeypatch):
    class Here(vit_jax.Callback):
        count = 0

        def log(self, step, metrics):
            type(self).count += 1

    class Everywhere(Here):
        on_every_host = True
        count = 0

    monkeypatch.setattr(jax, "process_index", lambda: 1)
    run = importlib.import_module("vit_jax.training.callbacks").Run
    run.notify(types.SimpleNamespace(callbacks=[Here(), Everywhere()]), "log", 1, {})
    assert (Here.count, Everywhere.count) == (0, 1)


def test_features_of_any_layer_in_batches(tmp_path):
    sizes = TINY | {"variant": "Ti/2", "depth": 2, "num_classes": 3, "channels": 1}
    path = tmp_path / "two.safetensors"
    write_weights(path, "abc", image_size=(8, 8), **sizes)
    model = vit_jax.load_model(path, tell=lambda line: None)
    images = NOISE[:11]
    prepared = model.preprocess(images)
    of_first = functools.partial(model.model.layer_features, layers=(0,), norm=False)
    layers = jax.jit(of_first)(model.params, prepared)
    more = {"batch_size": 4}  # The last batch is not full.
    (found,) = model.features(images, layers=(0,), norm=False, tokens="patches", **more)
    assert found.shape == (11, 4, 4, 12) and isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, layers[0], atol=1e-5)
    (flat,) = model.features(images, layers=[-1], tokens="patches", reshape=False)
    patches = model.features(images, tokens="patches")
    np.testing.assert_allclose(flat, patches.reshape(flat.shape), atol=1e-6)
    fewer = model.features(images, tokens="patches", **more)
    np.testing.assert_allclose(fewer, patches, atol=1e-5)
    alone = model.features(images[0], tokens="patches")[0]
    np.testing.assert_allclose(alone, patches[0], atol=1e-5)
    model.params = jax.tree.map(lambda x: 0 * x, model.params)
    assert not model.features(images, tokens="patches").any()
