"""What a user can get wrong ends with exit code 2 and one line that says what to do.

What is refused before anything is trained runs in one warm process, all else in processes
forked from one that has imported JAX. test_config.py has the values of keys.
"""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import forked
import jax
import numpy as np
import pytest
import warm
from hosts import xla_flags
from PIL import Image

from vit_jax.errors import UserError
from vit_jax.weights import workdir as workdirs

ROOT = pathlib.Path(__file__).parents[1]
PIPE = subprocess.PIPE

# 27,005 parameters: a checkpoint takes about a megabyte.
RECIPE = """
from ml_collections import ConfigDict


def get_config(arg=None):
    c = ConfigDict()
    c.name, c.seed, c.total_steps, c.batch_size = "tiny", 3, 6, 8
    c.data = dict(name="synthetic", num_classes=5, image_size=(8, 12))
    c.model = dict(variant="Ti/4", width=12, depth=1, num_heads=3, mlp_dim=1_000)
    c.optim = dict(learning_rate=0.01)
    c.evals = dict(val="val")
    c.log_every_steps = 2; c.checkpoint_every_steps = 3
    return c
"""

# Limits a resource of this process, then becomes the program.
LIMITED = (
    "import os, resource, sys\n"
    "name, size = sys.argv[1:3]\n"
    "resource.setrlimit(getattr(resource, name), (int(size), int(size)))\n"
    "os.execv(sys.executable, [sys.executable, *sys.argv[3:]])"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Returns a folder that holds the recipe, tiny.py."""
    folder = tmp_path_factory.mktemp("errors")
    (folder / "tiny.py").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def start(place):
    """Starts a training run of the recipe: words of the command line -> its end."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags()}

    def run(*words, limit=None, **more_environment):
        if not any(str(word).startswith("--config=") for word in words):
            words = (f"--config={place / 'tiny.py'}", *words)
        options = {"cwd": ROOT, "env": environment | more_environment, "text": True}
        if limit:
            pytest.importorskip("resource")
            command = [sys.executable, "-c", LIMITED, *map(str, limit)]
            command += ["-m", "vit_jax.train", *map(str, words)]
            process = subprocess.Popen(command, stdout=PIPE, stderr=PIPE, **options)
        else:
            options |= {"stdout": PIPE, "stderr": PIPE}
            process = forked.Popen("vit_jax.train", words, **options)
        with process:
            out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    return run


@pytest.fixture(scope="module")
def refused(start, place):
    """Starts a run that must be refused and returns its one line."""
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags()}

    def run(*words, apart=False, **options):
        if not any(str(word).startswith("--config=") for word in words):
            words = (f"--config={place / 'tiny.py'}", *words)
        if apart or options:  # A run that has begun ends its process.
            end = start(*words, **options)
            code, out, err = end.returncode, end.stdout, end.stderr
        else:
            end = process.run("train", list(map(str, words)), seconds=100)
            code, out, err = end.code, end.out, end.err
        assert (code, err.count("\n")) == (2, 1), err
        assert err.startswith("error: ")
        assert "Traceback" not in err + out
        return err

    with warm.Process(ROOT, **environment) as process:
        yield run


def says(line, *parts):
    """Checks that the line names every one of the parts."""
    assert [part for part in map(str, parts) if part not in line] == [], line


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        pytest.param(
            ["--config.optim.learning_rte=1"],
            [
                "unknown config key optim.learning_rte",
                "nearest known key is optim.learning_rate",
            ],
            id="unknown config key",
        ),
        pytest.param(
            ["--config.total_steps"],
            ["--config.total_steps has no value", "--help"],
            id="config key without a value",
        ),
        pytest.param(
            ["--config=configs/digits.py:quik"],
            ["config argument 'quik'", "it takes quick"],
            id="config argument that does not exist",
        ),
        pytest.param(
            ["--config=configs/digit.py"],
            ["config file configs/digit.py not found", "digits.py"],
            id="config file that does not exist",
        ),
        pytest.param(
            ["--config=configs/digits_finetune.py"],
            [
                "init='?'",
                "configs/digits_finetune.py",
                "--config.init",
                "paper:B/16-i21k",
            ],
            id="fine-tuning config whose init is not stated",
        ),
        pytest.param(
            ["--workdri=w"], ["unrecognized", "--workdri=w", "--help"], id="bad flag"
        ),
    ],
)
def test_command_line_is_refused_at_once_for_an(refused, words, parts):
    says(refused(*words), *parts)


def test_command_line_without_a_config_is_refused(start):
    end = subprocess.run(
        [sys.executable, "-m", "vit_jax.train"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert end.returncode == 2
    assert re.fullmatch(r"error: .*required: --config; --help.*\n", end.stderr)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("def get_config(arg=None) return 1", "SyntaxError"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("c = 1", "has no attribute 'get_config'"),
        ("def get_config(arg=None): return None", "TypeError"),
    ],
)
def test_config_file_that_does_not_run_is_refused(refused, tmp_path, text, what):
    path = tmp_path / "broken.py"
    path.write_text(text)
    says(refused(f"--config={path}"), path, what, "get_config(arg=None)", "--debug")


@pytest.mark.slow
def test_warning_is_no_failure_even_where_python_makes_it_an_error(tmp_path):
    old = "import warnings\nwarnings.warn('that is old', DeprecationWarning)\n"
    path = tmp_path / "old.py"
    path.write_text(old + RECIPE)
    end = subprocess.run(
        [sys.executable, "-W", "error", "-m", "vit_jax.summary", f"--config={path}"],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert end.returncode == 0, end.stderr
    assert "DeprecationWarning: that is old" in end.stderr


def test_debug_gives_the_traceback_as_well(start):
    end = start("--config.optim.learning_rte=1", "--debug")
    assert end.returncode == 2
    assert end.stderr.startswith("Traceback (most recent call last):\n")
    assert end.stderr.splitlines()[-1].startswith(
        "error: unknown config key optim.learning_rte"
    )


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        pytest.param(
            ["--config.data.image_size=(8,13)"],
            ["image width 13", "patch 4", "data.image_size", "such as 12"],
            id="image size that the patch does not divide",
        ),
        pytest.param(
            ["--config.model.num_heads=5"],
            ["width 12", "5 heads", "model.num_heads"],
            id="width that the heads do not divide",
        ),
        pytest.param(
            ["--config.data.train_transform=random_crop(8 | flip"],
            ["cannot read 'random_crop(8'", "'inception_crop(224) | flip'"],
            id="transform that cannot be read",
        ),
        pytest.param(
            [
                "--config.optim.weight_decay=0.1",
                "--config.optim.weight_decay_mask=/kernl$",
            ],
            [
                "optim.weight_decay_mask",
                "'/kernl$'",
                "none of the 24 parameters",
                "such as",
            ],
            id="decay mask that matches nothing",
        ),
        pytest.param(
            ["--config.mesh.data=3"],
            ["mesh.data=3 x", "1 devices", "make 3", "-1"],
            id="mesh of more devices than there are",
        ),
    ],
)
def test_run_is_refused_before_it_computes_for_an(refused, tmp_path, words, parts):
    says(refused(f"--workdir={tmp_path / 'run'}", *words), *parts)
    assert not (tmp_path / "run").exists()


# Data sets.


@pytest.fixture
def folder(tmp_path):
    """Returns an image folder of 5 classes, and the words that choose it."""
    rng = np.random.default_rng(0)
    for split, count in {"train": 6, "val": 2}.items():
        for name in "abcde":
            where = tmp_path / "images" / split / name
            where.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (8, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(where / f"{i}.png")
    return tmp_path / "images"


def of_folder(folder, run):
    data = ("--config.data.name=folder", f"--config.data.data_dir={folder}")
    return (*data, f"--workdir={run}")


@pytest.mark.slow
def test_damaged_image_is_named_or_skipped_and_counted(
    start, refused, folder, tmp_path
):
    damaged = folder / "train" / "b" / "2.png"
    damaged.write_bytes(damaged.read_bytes()[:60])
    words = of_folder(folder, tmp_path / "run")
    says(refused(*words), damaged, "--config.data.on_error=skip")

    end = start(*words, "--config.data.on_error=skip")
    assert (end.returncode, end.stderr) == (0, "")
    count = json.loads((tmp_path / "run" / "report.json").read_text())["skipped_images"]
    assert count >= 1
    assert f"skipped damaged images {count} times" in end.stdout


def test_tfds_set_that_nobody_may_fetch_says_how_to_prepare_it(refused, tmp_path):
    words = "--config.data.name=imagenet21k", f"--config.data.data_dir={tmp_path}"
    line = refused(f"--workdir={tmp_path / 'run'}", *words)
    build = "vit_jax.prepare --dataset=folder --from=FOLDER --name=imagenet21k"
    says(line, "data.name='imagenet21k'", f"{build} --data_dir={tmp_path}")


# Workdirs and checkpoints.


@pytest.fixture(scope="module")
def finished(start, place):
    """Returns the workdir of a finished run: checkpoints at 3 and 6."""
    end = start(f"--workdir={place / 'finished'}")
    assert (end.returncode, end.stderr) == (0, "")
    return place / "finished"


@pytest.fixture
def halfway(finished, tmp_path):
    """Copies a run as it was after its first checkpoint, of step 3 of 6."""

    def copy(name):
        shutil.copytree(finished, tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "6")
        (tmp_path / name / "report.json").unlink()
        return tmp_path / name

    return copy


@pytest.fixture
def disk(tmp_path):
    """Mounts a file system; skips where that is not permitted."""
    mounted = []

    def mount(name, options):
        where = tmp_path / name
        where.mkdir(exist_ok=True)
        again = "remount," if where in mounted else ""
        command = ["mount", "-t", "tmpfs", "-o", again + options, "tmpfs", where]
        if sys.platform != "linux" or subprocess.run(command, check=False).returncode:
            pytest.skip("this user may not mount a file system")
        mounted.append(where)
        return where

    yield mount
    for where in set(mounted):
        subprocess.run(["umount", where], check=True)


def sha256_of(run):
    return json.loads((run / "report.json").read_text())["params_sha256"]


def test_workdir_of_another_config_is_refused_with_the_difference(refused, finished):
    line = refused(f"--workdir={finished}", "--config.seed=4")
    says(line, finished, "seed: 3 -> 4", "another --workdir")


def test_workdir_that_is_a_file_is_refused(refused, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        line = refused(f"--workdir={path}")
        says(line, f"--workdir={path}", "is a file", "choose another --workdir")


def test_workdir_that_cannot_be_written_is_refused(refused, request, tmp_path):
    if os.geteuid() == 0:  # Root writes everywhere but to a read-only file system.
        where = request.getfixturevalue("disk")("sealed", "size=99k,ro")
    else:
        where = tmp_path / "sealed"
        where.mkdir(mode=0o555)
    line = refused(f"--workdir={where / 'run'}")
    says(line, f"{where} cannot be written", "choose another --workdir")


@pytest.mark.slow
def test_save_that_fails_midway_leaves_the_checkpoint_before_it(
    start, halfway, finished
):
    run = halfway("run")
    end = start(f"--workdir={run}", limit=("RLIMIT_FSIZE", 200_000))
    *failed, last = end.stderr.splitlines()
    assert end.returncode == 2
    assert len(failed) == 2  # At the end of the training, and once more a moment later.
    for line in failed:
        says(line, "step 6 could not be saved", "File too large", "step 3 is safe", run)
    says(
        last, "training is done and reported, but step 6 could not be saved", "free sp"
    )
    assert sha256_of(run) == sha256_of(finished)  # The report was given.
    assert workdirs.load(run).step == 3
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["3"]

    end = start(f"--workdir={run}")
    assert (end.returncode, end.stderr) == (0, "")
    assert f"resume: step 3 of {run}" in end.stdout
    assert sha256_of(run) == sha256_of(finished)


@pytest.mark.slow
def test_disk_that_is_too_small_leaves_the_checkpoint_before_it(
    start, halfway, finished, disk
):
    run = halfway("run")
    used = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    where = disk("disk", f"size={used + 250_000}")
    shutil.copytree(run, where / "run")
    end = start(f"--workdir={where / 'run'}")
    first, *_, last = end.stderr.splitlines()
    assert end.returncode == 2
    says(
        first,
        "not enough disk",
        "it takes 0.4",
        where,
        "step 3 is safe",
        "checkpoint.max_to_keep",
    )
    says(last, "step 6 could not be saved", where, "free space", "start again")
    assert workdirs.load(where / "run").step == 3

    disk("disk", "size=9m")
    end = start(f"--workdir={where / 'run'}")
    assert (end.returncode, end.stderr) == (0, "")
    assert sha256_of(where / "run") == sha256_of(finished)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["data", "metadata"])
def test_damaged_checkpoint_is_named_and_the_one_before_it_taken(
    start, finished, tmp_path, damage
):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "report.json").unlink()
    spoilt = max(run.glob("checkpoints/6/**/*"), key=lambda path: path.stat().st_size)
    if damage == "metadata":
        spoilt = run / "checkpoints" / "6" / "_CHECKPOINT_METADATA"
    spoil(spoilt, "flip")
    with pytest.raises(UserError, match=rf"6 is damaged .*{spoilt.name}.* of step 3"):
        workdirs.load(run)

    end = start(f"--workdir={run}")
    assert end.returncode == 0, end.stderr
    named, aside = end.stderr.splitlines()
    says(named, run / "checkpoints" / "6", "is damaged", spoilt.name)
    says(aside, "resuming from step 3", run / "checkpoints" / "6.damaged")
    assert f"resume: step 3 of {run}" in end.stdout
    assert sha256_of(run) == sha256_of(finished)


def spoil(path, damage):
    """Does to a file what bad disks and broken copies do."""
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 16
    else:
        del data[-1:]
    path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["state/_METADATA", "state/manifest.ocdbt"])
def test_run_without_an_intact_checkpoint_is_refused_and_left_as_it_is(
    start, halfway, name
):
    run = halfway("run")
    spoil(run / "checkpoints" / "3" / name, "truncate")
    before = sorted((run / "checkpoints").rglob("*"))
    end = start(f"--workdir={run}")
    assert end.returncode == 2
    says(end.stderr, "3", f"{name} has ", " bytes")
    line = end.stderr.splitlines()[-1]
    says(line, "no checkpoint under", run, "intact", "move that folder away")
    assert sorted((run / "checkpoints").rglob("*")) == before


# Memory and numbers.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "part"),
    [
        pytest.param(
            ["--config.data.image_size=(704,1056)", "--config.data.num_examples=2"],
            "now 8",
            id="device",
        ),
        pytest.param(["--config.batch_size=1000000000000"], "lower batch", id="host"),
    ],
)
def test_lack_of_memory_names_what_to_lower_on_the(refused, tmp_path, words, part):
    # The limit of 69 GB is not filled: one array of 0.2 TB or 8 TB is refused.
    limit = ("RLIMIT_AS", 2**36)
    line = refused(f"--workdir={tmp_path}", *words, limit=limit)
    says(
        line,
        "out of memory",
        "batch_size",
        "optim.grad_accum_steps",
        "image_size",
        part,
    )


def test_network_of_more_parameters_than_memory_holds_is_refused(refused, tmp_path):
    words = ("--config.model.mlp_dim=2000000000", "--config.model.width=3000")
    line = refused(f"--workdir={tmp_path / 'run'}", *words)
    says(line, "out of memory before the start: the network has 12,002,", "parameters")
    says(line, "48,0", "GB", "choose a smaller image size or model, or more devices")
    assert not (tmp_path / "run").exists()


DIVERGES = (
    "--config.optim.name=sgd",
    "--config.optim.learning_rate=1e18",
    "--config.checkpoint_every_steps=1",
)


@pytest.mark.slow
def test_number_that_is_not_finite_ends_the_run_before_it_is_saved(refused, tmp_path):
    line = refused(f"--workdir={tmp_path}", *DIVERGES, apart=True)
    says(line, "stopped at step 2", "param_norm=inf", "checkpoint of step 1", "lower")
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["1"]
    last = workdirs.load(tmp_path, use_ema=False)
    assert last.step == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(last.params))


@pytest.mark.slow
def test_debug_nans_names_the_operation_and_its_line(refused, tmp_path):
    words = *DIVERGES, "--config.debug_nans=True"
    line = refused(f"--workdir={tmp_path}", *words, apart=True)
    assert re.search(r"debug_nans: .*\(inf\) encountered in \w+ at .*\.py:\d+ \(", line)
    says(line, "lower optim.learning_rate")


def test_a_bucket_without_its_packages_says_what_to_install(refused):
    if importlib.util.find_spec("gcsfs"):
        pytest.skip("gcsfs is installed")
    line = refused("--config=configs/digits.py", "--workdir=gs://bucket/run")
    assert "pip install -e '.[gcs]' in the clone" in line
