"""Compiled steps in files: a run that loads one, and what is refused."""

import json

import jax
import pytest
from helpers import run_command, tiny_config
from jax.experimental.compilation_cache import compilation_cache

from vit_jax.config import fields
from vit_jax.errors import UserError
from vit_jax.training import compiled_step, loop

CONFIG = tiny_config(total_steps=2, evals={}, checkpoint_every_steps=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The functions of a run, and a file with its compiled step."""
    folder = tmp_path_factory.mktemp("compiled")
    setup = loop.build_setup(CONFIG, folder / "none")
    lowered = setup.train_step.lower(setup.layout.shapes, setup.layout.batch)
    path = folder / "step"
    # Without the cache: XLA does not serialise again what it has read from there.
    cache = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    size = compiled_step.save(path, CONFIG, setup.mesh, lowered, lowered.compile())
    jax.config.update("jax_compilation_cache_dir", cache)
    compilation_cache.reset_cache()
    assert size == path.stat().st_size
    return setup, path


def test_a_run_with_it_is_the_run_that_compiles(saved, tmp_path):
    recipe = tmp_path / "recipe.py"
    keys = json.loads(json.dumps(fields.to_dict(CONFIG)))
    text = "from ml_collections import ConfigDict\ndef get_config(arg=None): return "
    recipe.write_text(f"{text}ConfigDict({keys})\n")
    words = [f"--config={recipe}", f"--workdir={tmp_path / 'run'}"]
    assert not run_command("train", [*words, f"--compiled={saved[1]}"])
    report = json.loads((tmp_path / "run/report.json").read_text())
    compiled = loop.train(CONFIG, tmp_path / "other")
    assert report["params_sha256"] == compiled["params_sha256"]


def edited(path, folder, **changes):
    line, _, executable = path.read_bytes().partition(b"\n")
    other = folder / "edited"
    header = json.dumps(json.loads(line) | changes).encode()
    other.write_bytes(header + b"\n" + executable)
    return other


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"format": "of tomorrow"}, "not a file of .*of tomorrow"),
        ({"devices": "8 x NVIDIA H100"}, "for 8 x NVIDIA H100, but this .* 1 x cpu"),
        ({"versions": "jax 0.1"}, r"for jax 0\.1, but this machine has jax"),
        ({"program": "0"}, "another number of --examples, or other code"),
    ],
)
def test_a_step_of_other_things_is_refused(saved, tmp_path, changes, match):
    setup, path = saved
    with pytest.raises(UserError, match=match):
        compiled_step.load(edited(path, tmp_path, **changes), CONFIG, setup)


def test_a_step_of_another_config_is_refused_with_the_key(saved, tmp_path):
    other = fields.replace(CONFIG, {"optim.learning_rate": 0.5})
    setup = loop.build_setup(other, tmp_path / "none")
    with pytest.raises(UserError, match=r"optim.learning_rate: 0.01 -> 0.5"):
        compiled_step.load(saved[1], other, setup)


def test_a_damaged_file_is_refused(saved, tmp_path):
    setup, path = saved
    cut = tmp_path / "cut"
    cut.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="damaged"):
        compiled_step.load(cut, CONFIG, setup)
    with pytest.raises(UserError, match="not a file of"):
        compiled_step.load(tmp_path / "missing", CONFIG, setup)


def test_a_file_that_cannot_be_written_is_named(saved, tmp_path):
    setup, _ = saved
    lowered = setup.train_step.lower(setup.layout.shapes, setup.layout.batch)
    missing = tmp_path / "no/step"
    with pytest.raises(UserError, match="cannot be written"):
        compiled_step.save(missing, CONFIG, setup.mesh, lowered, lowered.compile())
