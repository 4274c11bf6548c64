"""`python -m vit_jax.transfer`: from the command line to `transfer.json`."""

import json
import pathlib
import re
import signal

import hosts
import numpy as np
import pytest
from helpers import run_command, without_times, write_weights
from PIL import Image

from vit_jax import transfer
from vit_jax.command_line import cli
from vit_jax.errors import UserError
from vit_jax.training import config as configuration
from vit_jax.training import loop

ROOT = pathlib.Path(__file__).parents[1]
DIGITS = f"{ROOT}/configs/digits.py"


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Returns the workdir of a small digits model that has hardly been trained."""
    workdir = tmp_path_factory.mktemp("runs") / "digits"
    overrides = {"epochs": 2, "model.width": 24, "model.depth": 1, "batch_size": 32}
    overrides |= {"optim.warmup_epochs": 0.5}
    loop.train(configuration.load(DIGITS, overrides), workdir)
    return str(workdir)


def parse(*words):
    return cli.parse(transfer.parser(), ["--model=m", "--dataset=digits", *words])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--learning_rates=0.1,x", "--learning_rates: '0.1,x' is not numbers above 0"),
        ("--learning_rates=0", "'0' is not numbers above 0"),
        ("--learning_rates=inf", "'inf' is not numbers above 0"),
        ("--seeds=0", "'0' is not a whole number from 1 on"),
        ("--resolution=a", "'a' is not a whole number"),
        ("--mode=half", "invalid choice: 'half'"),
    ],
)
def test_flags_that_make_no_sense_end_with_one_line(word, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(word)
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_flags_are_read():
    words = ["--learning_rates=0.1,1e-2", "--resolution=16x24", "--config.batch_size=8"]
    flags = parse(*words)
    assert (flags.learning_rates, flags.resolution) == ((0.1, 0.01), (16, 24))
    assert flags.overrides == {"batch_size": 8}
    assert (flags.seeds, flags.mode, flags.layer_decay) == (3, "full", 0.0)


def test_a_command_without_a_workdir_has_the_same_one_each_time():
    flags = parse("--model=hf://a/b-c/", "--dataset=vtab/dtd,vtab/pets")
    found = transfer.default_workdir(flags)
    assert found == "runs/transfer/hf-a-b-c_vtab-dtd-vtab-pets"
    flags.data_dir = "/v2/sets"
    assert transfer.default_workdir(flags) == f"{found}_v2-sets"


def start(*words):
    return hosts.alone("transfer", *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model=nowhere"], "nowhere"),
        (["--dataset=nothing"], "data.name='nothing': no such prepared TFDS data set"),
        (["--config.evals.x=test"], "--config.evals.x: the recipe sets the splits"),
        (["--dataset=vtab/dtd", "--data_dir=."], "vit_jax.prepare --dataset=dtd"),
    ],
)
def test_bad_input_is_refused(tmp_path, words, message):
    size = (8, 8)
    path = tmp_path / "small.safetensors"
    write_weights(path, variant="Ti/4", num_classes=10, image_size=size, channels=1)
    workdir = f"--workdir={tmp_path}/w"
    # Of a flag that is given twice the last counts.
    words = [f"--model={path}", "--dataset=digits", workdir, *words]
    with pytest.raises(UserError, match=message):
        run_command("transfer", words)
    assert not list(tmp_path.glob("w/*/*"))


def kill_at(process, *parts):
    """Kills when lines with each of the parts have been printed, in that order."""
    for part in parts:
        hosts.wait_for(process, part)
    process.kill()
    assert process.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_a_study_of_digits_that_is_killed_ends_as_the_undisturbed_one(digits, tmp_path):
    words = [f"--model={digits}", "--dataset=digits", "--resolution=12", "--seeds=2"]
    words += ["--learning_rates=0.03,0.3", "--config.checkpoint_every_steps=10"]
    keys = "total_steps=40", "batch_size=32", "log_every_steps=5"
    words += [f"--config.{key}" for key in keys]

    out = hosts.finish(start(*words, f"--workdir={tmp_path}/undisturbed"))
    expected = json.loads((tmp_path / "undisturbed" / "transfer.json").read_text())
    assert expected["mean"] > 0.2  # Chance is a tenth.
    assert f"top-1 {expected['mean']:.2%} ± {100 * expected['std']:.2f}, 2 runs" in out
    assert re.search(r"\n +trial  steps .*\nlearning_rate=0.03 +40 ", out)

    words += [f"--workdir={tmp_path}/killed"]
    kill_at(start(*words), "trial 2 of 2", "step 30/40")
    kill_at(start(*words), "final run 1 of 2", "step 30/40")
    last = hosts.finish(start(*words))
    # Nothing that was done is done again, and what was begun is resumed.
    folders = [line for line in last.splitlines() if "; workdir " in line]
    names = [line.rsplit("/", 2)[1:] for line in folders]
    assert names == [["runs", "seed0"], ["runs", "seed1"]]
    assert "resume: step " in last
    found = json.loads((tmp_path / "killed" / "transfer.json").read_text())
    assert without_times(found) == without_times(expected)

    with pytest.raises(
        UserError, match="study with another command .--learning_rates: "
    ):
        run_command("transfer", [*words, "--learning_rates=0.03,0.1,0.3"])


@pytest.mark.slow
def test_a_folder_of_images_is_learnt_by_each_mode(digits, tmp_path, capsys):
    rng = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 7)):
        for label, name in enumerate(("dark", "bright", "left")):
            (tmp_path / "data" / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 60, (9, 11), np.uint8) + 90 * (label == 1)
                pixels[:, :5] += 120 * (label == 2)
                Image.fromarray(pixels).save(
                    tmp_path / "data" / split / name / f"{i}.png"
                )
    words = [f"--model={digits}", f"--dataset={tmp_path}/data", "--resolution=8"]
    words += ["--learning_rates=0.03,0.3", "--seeds=1", "--layer_decay=0.8", "--json"]
    words += ["--config.total_steps=60", "--config.batch_size=16"]
    for mode in ("head", "head_then_all"):
        end = [f"--workdir={tmp_path}/{mode}", f"--mode={mode}"]
        assert run_command("transfer", words + end) == 0
        report = json.loads((tmp_path / mode / "transfer.json").read_text())
        out = capsys.readouterr().out
        assert json.loads(out.splitlines()[-1]) == report
        assert "not in the paper: like its sets of this size, 10 %" in out
        assert report["dataset"] == "data"
        assert report["mean"] > 0.9, (mode, report["trials"])
