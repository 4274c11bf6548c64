"""Bars and lines as a terminal gets them; training/test_metric_logger.py has lines without a bar."""

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
from vit_jax.command_line import progress
from vit_jax.training.metric_logger import Progress
bar = Progress(0, 3000, batch_size=512, devices=8, active=True)
for step in range(1, 5):
    time.sleep(0.15)  # tqdm draws ten times a second.
    bar.step_done(step)
    if step % 2 == 0:
        bar.log(step, 6.9078 / step, waited=0.0)
bar.info("a checkpoint")
time.sleep(0.15)
bar.step_done(5)
bar.close()
print("done", flush=True)
for _ in progress.each(range(3), "test", "batches", leave=False):
    time.sleep(0.15)
print("top-1", flush=True)
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


@pytest.mark.parametrize("columns", [80, pytest.param(40, marks=pytest.mark.slow)])
def test_bars_fit_the_terminal_below_the_lines_and_are_removed(columns):
    lines = in_terminal(RUN, columns)
    # A bar is cleared before a line comes, and drawn again behind it.
    place = lines.index(next(x for x in lines if x.startswith("step 4/3000  loss")))
    assert not lines[place - 1].strip(), lines
    assert lines[place + 1].startswith("4/3000 |"), lines
    done = lines.index("done")
    assert not lines[done - 1].strip()  # Removed at the end.
    bars = [line for line in lines if re.match(r"\d+/3000 \|", line)]
    assert len(bars) >= 4
    assert {len(line) for line in bars} <= {columns - 1, columns}
    last = bars[-1]
    assert "loss 1.7270" in last or "loss 1.7269" in last
    assert " left" in last
    assert ("images/s" in last) == (columns >= 80)
    assert not re.search(r"images?/?$|lef?$", last)  # No part is cut.
    # That of an evaluation.
    assert lines[-2:] == ["top-1", ""] and not lines[-3].strip()
    shown = r"test: +67%\|█+\S? +\| 2/3 .* batches/s\]"
    assert columns < 80 or any(re.match(shown, line) for line in lines), lines
