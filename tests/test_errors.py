"""What ends a run that has begun: exit code 2 and one line that says what to do.

tests/test_bad_input.py has what is refused before anything is trained.
"""

import json
import os
import re
import resource
import shutil
import subprocess
import sys

import hosts
import jax
import numpy as np
import pytest
from helpers import run_python
from PIL import Image

from vit_jax.errors import UserError
from vit_jax.weights import workdir as workdirs

pytestmark = pytest.mark.slow
# 27,005 parameters: a checkpoint takes about a megabyte.
LINES = (
    "c.total_steps, c.batch_size, c.model.mlp_dim = 6, 8, 1_000",
    'c.optim, c.evals = dict(learning_rate=0.01), dict(val="val")',
    "c.log_every_steps, c.checkpoint_every_steps = 2, 3",
)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts a training run: words of the command line -> its end."""
    recipe = hosts.write_recipe(tmp_path_factory.mktemp("errors") / "tiny.py", *LINES)

    def run(*words, limit=None):
        (process,) = hosts.start((f"--config={recipe}", *words))
        if limit:
            name, size = limit
            resource.prlimit(process.pid, getattr(resource, name), (size, size))
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    return run


@pytest.fixture
def refused(start):
    """Starts a run that must be refused and returns its one line."""

    def run(*words, **options):
        end = start(*words, **options)
        assert (end.returncode, end.stderr.count("\n")) == (2, 1), end.stderr
        assert end.stderr.startswith("error: ")
        assert "Traceback" not in end.stderr + end.stdout
        return end.stderr

    return run


def says(line, *parts):
    """Checks that the line names every one of the parts."""
    assert [part for part in map(str, parts) if part not in line] == [], line


def test_warning_is_no_failure_even_where_python_makes_it_an_error(tmp_path):
    old = "import warnings; warnings.warn('that is old', DeprecationWarning)"
    recipe = hosts.write_recipe(tmp_path / "old.py", old)
    words = "-W", "error", "-m", "vit_jax.summary", f"--config={recipe}"
    end = run_python(*words, JAX_PLATFORMS="cpu")
    assert end.returncode == 0, end.stderr
    assert "DeprecationWarning: that is old" in end.stderr


def test_damaged_image_is_named_or_skipped_and_counted(start, refused, tmp_path):
    rng = np.random.default_rng(0)
    for split, count in {"train": 6, "val": 2}.items():
        for name in "abcde":
            where = tmp_path / "images" / split / name
            where.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (8, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(where / f"{i}.png")
    damaged = tmp_path / "images" / "train" / "b" / "2.png"
    damaged.write_bytes(damaged.read_bytes()[:60])
    words = ["--config.data.name=folder", f"--workdir={tmp_path / 'run'}"]
    words += [f"--config.data.data_dir={tmp_path / 'images'}"]
    words += ["--config.data.num_examples=0"]
    says(refused(*words), damaged, "--config.data.on_error=skip")

    end = start(*words, "--config.data.on_error=skip")
    assert (end.returncode, end.stderr) == (0, "")
    count = json.loads((tmp_path / "run" / "report.json").read_text())["skipped_images"]
    assert count >= 1
    assert f"skipped damaged images {count} times" in end.stdout


@pytest.fixture(scope="module")
def finished(start, tmp_path_factory):
    """Returns the workdir of a finished run: checkpoints at 3 and 6."""
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    end = start(f"--workdir={workdir}")
    assert (end.returncode, end.stderr) == (0, "")
    return workdir


@pytest.fixture
def halfway(finished, tmp_path):
    """Copies a run as it was after its first checkpoint, of step 3 of 6."""
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    (tmp_path / "run" / "report.json").unlink()
    return tmp_path / "run"


@pytest.fixture
def disk(tmp_path):
    """Mounts a file system; skips where that is not permitted."""
    where = tmp_path / "disk"

    def mount(size):
        again = "remount," if where.exists() else ""
        where.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"{again}size={size}", "tmpfs", where]
        if sys.platform != "linux" or subprocess.run(command, check=False).returncode:
            pytest.skip("this user may not mount a file system")
        return where

    yield mount
    if os.path.ismount(where):
        subprocess.run(["umount", where], check=True)


def test_save_that_fails_midway_leaves_the_checkpoint_before_it(
    start, halfway, finished
):
    end = start(f"--workdir={halfway}", limit=("RLIMIT_FSIZE", 200_000))
    *failed, last = end.stderr.splitlines()
    assert end.returncode == 2
    assert len(failed) == 2  # At the end of the training, and once more a moment later.
    for line in failed:
        says(line, "step 6 could not be saved", "File too large")
        says(line, "step 3 is safe", halfway)
    says(last, "training is done and reported, but step 6 could not be saved")
    # The report was given.
    assert hosts.sha256_of(halfway) == hosts.sha256_of(finished)
    assert workdirs.load(halfway).step == 3
    assert [path.name for path in (halfway / "checkpoints").iterdir()] == ["3"]

    end = start(f"--workdir={halfway}")
    assert (end.returncode, end.stderr) == (0, "")
    assert f"resume: step 3 of {halfway}" in end.stdout
    assert hosts.sha256_of(halfway) == hosts.sha256_of(finished)


def test_disk_that_is_too_small_leaves_the_checkpoint_before_it(
    start, halfway, finished, disk
):
    used = sum(path.stat().st_size for path in halfway.rglob("*") if path.is_file())
    where = disk(used + 250_000)
    run = shutil.copytree(halfway, where / "run")
    end = start(f"--workdir={run}")
    first, *_, last = end.stderr.splitlines()
    assert end.returncode == 2
    says(first, "not enough disk", "takes 0.4", where, "step 3 is safe")
    says(first, "checkpoint.max_to_keep")
    says(last, "step 6 could not be saved", where, "free space", "start again")
    assert workdirs.load(run).step == 3

    disk("9m")
    end = start(f"--workdir={run}")
    assert (end.returncode, end.stderr) == (0, "")
    assert hosts.sha256_of(run) == hosts.sha256_of(finished)


def spoil(path):
    """Flips a bit, as bad disks do."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def test_damaged_checkpoint_is_named_and_the_one_before_it_taken(
    start, finished, tmp_path
):
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "report.json").unlink()
    spoilt = max(run.glob("checkpoints/6/**/*"), key=lambda path: path.stat().st_size)
    spoil(spoilt)
    with pytest.raises(UserError, match=rf"6 is damaged .*{spoilt.name}.* of step 3"):
        workdirs.load(run)

    end = start(f"--workdir={run}")
    assert end.returncode == 0, end.stderr
    named, aside = end.stderr.splitlines()
    says(named, run / "checkpoints" / "6", "is damaged", spoilt.name)
    says(aside, "resuming from step 3", run / "checkpoints" / "6.damaged")
    assert f"resume: step 3 of {run}" in end.stdout
    assert hosts.sha256_of(run) == hosts.sha256_of(finished)


def test_run_without_an_intact_checkpoint_is_refused_and_left_as_it_is(start, halfway):
    spoil(halfway / "checkpoints" / "3" / "state" / "manifest.ocdbt")
    before = sorted((halfway / "checkpoints").rglob("*"))
    end = start(f"--workdir={halfway}")
    assert end.returncode == 2
    says(end.stderr, "manifest.ocdbt has changed since it was written")
    line = end.stderr.splitlines()[-1]
    says(line, "no checkpoint under", halfway, "intact", "move that folder away")
    assert sorted((halfway / "checkpoints").rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--config.data.image_size=(704,1056)", "--config.data.num_examples=2"], "8"),
        (["--config.batch_size=1000000000000"], "lower batch"),
    ],
    ids=["device", "host"],
)
def test_lack_of_memory_names_what_to_lower_on_the(refused, tmp_path, words, part):
    # The limit of 69 GB is not filled: one array of 0.2 TB or 8 TB is refused.
    line = refused(f"--workdir={tmp_path}", *words, limit=("RLIMIT_AS", 2**36))
    says(line, "out of memory", "batch_size", "optim.grad_accum_steps", "image_size")
    says(line, f"now {part}" if part == "8" else part)


DIVERGES = (
    "--config.optim.name=sgd",
    "--config.optim.learning_rate=1e18",
    "--config.checkpoint_every_steps=1",
)


def test_number_that_is_not_finite_ends_the_run_before_it_is_saved(refused, tmp_path):
    line = refused(f"--workdir={tmp_path}", *DIVERGES)
    says(line, "stopped at step 2", "param_norm=inf", "checkpoint of step 1", "lower")
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["1"]
    last = workdirs.load(tmp_path, use_ema=False)
    assert last.step == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(last.params))


def test_debug_nans_names_the_operation_and_its_line(refused, tmp_path):
    words = *DIVERGES, "--config.debug_nans=True"
    line = refused(f"--workdir={tmp_path}", *words)
    assert re.search(r"debug_nans: .*\(inf\) encountered in \w+ at .*\.py:\d+ \(", line)
    says(line, "lower optim.learning_rate")
