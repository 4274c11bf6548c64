"""SIGTERM for all hosts of a job, as schedulers send it, and more than once."""

import re
import signal
import time

import hosts
import pytest

CONFIG = """
from ml_collections import ConfigDict

def get_config(arg=None):
    c = ConfigDict()
    c.seed, c.total_steps, c.batch_size = 3, 4000, 12
    c.data = dict(name="synthetic", num_classes=5, num_examples=20_000, image_size=(8, 12))
    c.model = dict(variant="Ti/4", width=12, depth=1, num_heads=3, mlp_dim=20)
    c.optim = dict(name="sgd", learning_rate=0.1)
    c.evals = dict(val="val")
    c.log_every_steps = 20; c.eval_every_steps = 100; c.checkpoint_every_steps = 4000
    return c
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def job(tmp_path):
    (tmp_path / "long.py").write_text(CONFIG)
    started = []

    def start():
        words = (f"--config={tmp_path / 'long.py'}", f"--workdir={tmp_path / 'run'}")
        started.extend(hosts.start(words, 2, hosts.variables(2)))
        return started[-2:]

    yield start
    hosts.kill(started)


def asked_to_end(processes):
    for process in processes:
        process.send_signal(signal.SIGTERM)


def last_lines(processes):
    outs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [75, 75], outs
    # A thread of JAX's may write of the signal after the run has ended.
    ours = [re.findall("^SIGTERM: .*", error, re.MULTILINE) for _, error in outs]
    return [lines[-1] for lines in ours], outs[0][0]


def test_all_hosts_end_an_evaluation_together_and_make_up_for_it(job, tmp_path):
    processes = job()
    hosts.wait_for(processes[0], "step 100/4000  loss")
    asked_to_end(processes)
    time.sleep(0.3)
    asked_to_end(processes)  # Impatient schedulers do.
    lines, out = last_lines(processes)
    assert lines[0] == lines[1]
    assert lines[0].startswith(f"SIGTERM: step 100 of 4000 is saved in {tmp_path}")
    assert "top-1" not in out
    again = job()
    hosts.wait_for(again[0], "resume: step 100 of")
    hosts.wait_for(again[0], "step 100/4000  top-1")
    # In a step, this time.
    hosts.wait_for(again[0], "step 120/4000  loss")
    asked_to_end(again)
    lines, _ = last_lines(again)
    assert lines[0] == lines[1]
    assert 120 <= int(re.match(r"SIGTERM: step (\d+) of", lines[0])[1]) < 200


def test_all_hosts_end_where_sigterm_comes_before_the_first_step(job):
    processes = job()
    hosts.wait_for(processes[0], "4,000 steps of 12 on")
    asked_to_end(processes)
    lines, out = last_lines(processes)
    assert lines[0] == lines[1]
    # Compilation is not interrupted; no more than the steps on their way follow.
    assert re.match(
        r"SIGTERM: (nothing to save yet|step \d+ of 4000 is saved) in", lines[0]
    )
    assert "step 100/" not in out
