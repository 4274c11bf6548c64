"""Scripts of benchmarks/ start; `-m rare` runs each for seconds with --smoke.

Nobody but a developer runs them, and all take ten minutes. Timings are not looked at.
"""

import re

import pytest
import warm
from helpers import ROOT, run_python
from hosts import HURRY

FOLDER = ROOT / "benchmarks"
# By folder and name, as step/step.
SOURCES = {
    path.relative_to(FOLDER).with_suffix("").as_posix(): path.read_text()
    for path in FOLDER.glob("*/*.py")
}
# The contenders input_*.py are processes that input.py starts, as tpu_ahead.py starts
# baseline_vit.py. test_soak.py runs soak.py.
ELSEWHERE = ("compile/baseline_vit", "input/input_", "reliability/soak")
SCRIPTS = [
    name
    for name, text in sorted(SOURCES.items())
    if "__main__" in text and not name.startswith(ELSEWHERE)
]
# Those whose process has devices of its own, or uses PyTorch.
APART = [
    name
    for name in SCRIPTS
    if re.search("XLA_FLAGS|^import torch$", SOURCES[name], re.MULTILINE)
]
# Threads of PyTorch beside other tests do not spin.
OWN = {"XLA_FLAGS": HURRY, "OMP_WAIT_POLICY": "passive"}


def test_every_benchmark_has_a_short_run():
    assert all("smoke.parse(" in SOURCES[name] for name in SCRIPTS)


def test_the_readme_has_a_line_for_every_script():
    listed = re.findall(
        r"^\| `([\w.]+)` \|", (FOLDER / "README.md").read_text(), re.MULTILINE
    )
    runs = {name for name, text in SOURCES.items() if "__main__" in text}
    runs = {name for name in runs if not name.startswith("input/input_")}
    assert sorted(listed) == sorted(name.replace("/", ".") for name in runs)


@pytest.fixture(scope="module")
def process():
    """A process that runs one script after another."""
    with warm.Process(ROOT, fork=True, PYTHONPATH=str(ROOT), **OWN) as process:
        yield process


def run(name, words, process):
    """Runs a script; returns what it printed."""
    if name not in APART:
        return warm.succeed(process, f"benchmarks/{name}.py", words)
    done = run_python("-m", f"benchmarks.{name.replace('/', '.')}", *words, **OWN)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=[pytest.mark.parity] * ("\nimport torch\n" in SOURCES[name])
        )
        for name in SCRIPTS
    ],
)
def test_a_benchmark_starts(name, process):
    assert "--smoke" in run(name, ["--help"], process)


@pytest.mark.rare
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_runs(name, process):
    assert run(name, ["--smoke"], process)
