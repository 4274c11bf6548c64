import subprocess
import sys
import time

import pytest

from vit_jax import processes
from vit_jax.training import timers as module
from vit_jax.training.timers import StartupTimer


def test_each_phase_gets_the_time_since_the_one_before(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    startup = StartupTimer(earlier=2.5)
    for phase, seconds in [("import", 1.0), ("data", 0.25), ("compile", 4.0)]:
        now[0] += seconds
        startup.end_phase(phase)
    assert startup.seconds == {"import": 3.5, "data": 0.25, "compile": 4.0}
    assert startup.total == pytest.approx(7.75)
    assert startup.summary() == (
        "first step after 7.8 s: import 3.5, data 0.2, compile 4.0"
    )


def test_a_phase_is_announced_with_the_seconds_before_it(monkeypatch):
    now, lines = [0.0], []
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    startup = StartupTimer(2.0, lines.append)
    now[0] += 1.25
    startup.end_phase("import")
    startup.announce("opening cifar10")
    assert lines == ["   3.2 s  opening cifar10"]


def test_phases_become_metrics_once():
    startup = StartupTimer()
    startup.end_phase("data")
    assert list(startup.new_metrics()) == ["start_data"]
    assert startup.new_metrics() == {}


def test_the_age_is_that_of_the_process():
    code = (
        "import time; time.sleep(0.3); from vit_jax import processes;"
        "print(processes.age())"
    )
    began = time.perf_counter()
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert 0.3 < float(out.stdout) < time.perf_counter() - began + 0.02
    assert processes.age() > 0
