"""Every script of benchmarks/ runs for seconds with --smoke; timings are not looked at."""

import os
import pathlib
import subprocess
import sys

import pytest
from hosts import HURRY

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = {path.stem: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
# The contenders input_*.py are processes that input.py starts, as tpu_ahead.py starts
# baseline_vit.py. test_soak.py runs soak.py.
ELSEWHERE = ("baseline_vit", "input_", "soak")
SCRIPTS = [
    pytest.param(name, marks=[pytest.mark.parity] * ("\nimport torch\n" in text))
    for name, text in sorted(SOURCES.items())
    if "__main__" in text and not name.startswith(ELSEWHERE)
]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_benchmark_runs(name):
    assert "smoke.parse(" in SOURCES[name]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / f"{name}.py", "--smoke"],
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": HURRY}
        | {"OMP_WAIT_POLICY": "passive"},  # PyTorch beside other tests.
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
