"""Bars and lines as a terminal and a pipe get them."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

RUN = """
import time
from vit_jax.training.metric_logger import Progress
progress = Progress(0, 3000, batch_size=512, devices=8, active=True)
for step in range(1, 5):
    time.sleep(0.15)  # tqdm draws ten times a second.
    progress.step_done(step)
    if step % 2 == 0:
        progress.log(step, 6.9078 / step, waited=0.0)
progress.info("a checkpoint")
time.sleep(0.15)
progress.step_done(5)
progress.close()
print("done", flush=True)
"""


def in_terminal(code, columns):
    """Returns the lines that a terminal shows in turn, those overwritten too."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=follower, stdout=follower, stderr=follower
    ) as process:
        os.close(follower)
        text = b""
        try:
            while part := os.read(leader, 65536):
                text += part
        except OSError:  # The terminal's other side is closed.
            pass
    os.close(leader)
    assert process.returncode == 0, text
    return re.split(r"[\r\n]+", text.decode())


@pytest.fixture(scope="module", params=[40, 80])
def shown(request):
    return request.param, in_terminal(RUN, request.param)


def test_lines_stay_above_the_bar(shown):
    _, lines = shown
    # A bar is cleared before a line comes, and drawn again behind it.
    place = next(
        i for i, line in enumerate(lines) if line.startswith("step 4/3000  loss")
    )
    assert not lines[place - 1].strip(), lines
    assert lines[place + 1].startswith("4/3000 |"), lines
    assert lines[-2:] == ["done", ""]
    assert not lines[-3].strip()  # Removed at the end.


def test_the_bar_fits_the_terminal(shown):
    columns, lines = shown
    bars = [line for line in lines if re.match(r"\d+/3000 \|", line)]
    assert len(bars) >= 4
    assert {len(line) for line in bars} <= {columns - 1, columns}
    last = bars[-1]
    assert "loss 1.7270" in last or "loss 1.7269" in last
    assert " left" in last
    assert ("images/s" in last) == (columns >= 80)
    assert not re.search(r"images?/?$|lef?$", last)  # No part is cut.


def test_a_pipe_gets_lines_alone():
    done = subprocess.run(
        [sys.executable, "-c", RUN], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    steps = [line.partition("  ")[0] for line in done.stdout.splitlines()]
    assert steps == ["step 2/3000", "step 4/3000", "a checkpoint", "done"]


def test_an_evaluation_shows_a_bar_and_removes_it():
    code = (
        "import time; from vit_jax import progress\n"
        "for _ in progress.each(range(3), 'test', 'batches', leave=False):\n"
        "    time.sleep(0.15)\n"
        "print('top-1', flush=True)"
    )
    lines = in_terminal(code, 80)
    assert any(
        re.match(r"test: +67%\|█+\S? +\| 2/3 .* batches/s\]", x) for x in lines
    ), lines
    assert lines[-2] == "top-1"
