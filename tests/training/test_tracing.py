import glob
import os

import jax
import jax.numpy as jnp
import pytest

from vit_jax.errors import UserError
from vit_jax.training.timers import Trace, check_profile_steps

# Of jaxlib 0.12.0.1's reader of traces; its C++ ends the process where a warning raises.
pytestmark = pytest.mark.filterwarnings(
    "ignore:builtin type event_stats has no __module__:DeprecationWarning"
)


def take(trace, steps, workdir):
    function = jax.jit(lambda x: jnp.sin(x @ x))
    lines = []
    with trace:
        for step in steps:
            with trace.around(step):
                out = function(jnp.full((64, 64), float(step)))
            lines.append(trace.after(step, out))
    return lines, glob.glob(f"{workdir}/**/*.xplane.pb", recursive=True)


def events(path):
    """Returns the names of all events and the numbers of the marked steps."""
    names, steps = set(), set()
    for plane in jax.profiler.ProfileData.from_file(path).planes:
        for line in plane.lines:
            for event in line.events:
                names.add(event.name)
                if event.name == "train":
                    steps.add(dict(event.stats)["step_num"])
    return names, steps


def test_the_steps_that_were_asked_for_are_in_the_trace(tmp_path):
    trace = Trace((3, 5), tmp_path, start=0, active=True)
    lines, (path,) = take(trace, range(1, 10), tmp_path)
    assert [bool(line) for line in lines] == [step == 5 for step in range(1, 10)]
    folder = tmp_path / "tensorboard"
    assert lines[4] == f"trace of steps 3 to 5 under {folder}: xprof --logdir={folder}"
    # Where the profile plugin of TensorBoard looks.
    assert os.path.dirname(path) == str(folder / "plugins/profile/steps_3_to_5")
    names, steps = events(path)
    assert steps == {3, 4, 5}
    # What the device did; its name depends on XLA's flags.
    assert any(name.startswith(("sin", "wrapped_sin")) for name in names), names


def test_a_run_that_breaks_off_leaves_the_trace_so_far(tmp_path):
    trace = Trace((2, 8), tmp_path, start=0, active=True)
    _, (path,) = take(trace, range(1, 4), tmp_path)
    assert events(path)[1] == {2, 3}


@pytest.mark.parametrize(
    ("steps", "start", "active", "note"),
    [
        ((), 0, True, ""),
        ((0, 0), 0, True, ""),
        ((2, 3), 0, False, ""),
        (
            (2, 3),
            2,
            True,
            "profile_steps=(2, 3): this start begins after step 2: no trace",
        ),
    ],
)
def test_no_trace(tmp_path, steps, start, active, note):
    trace = Trace(steps, tmp_path, start, active=active)
    assert trace.note == note
    lines, paths = take(trace, range(start + 1, 10), tmp_path)
    assert not any(lines)
    assert not paths


def test_steps_behind_the_end_are_refused():
    message = r"profile_steps=\(8, 10\) .* the run of 9 .* from 1 to 9"
    with pytest.raises(UserError, match=message):
        check_profile_steps((8, 10), total=9)
    for steps in ((), (0, 0), (8, 9)):
        check_profile_steps(steps, total=9)
