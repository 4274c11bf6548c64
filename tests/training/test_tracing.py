import glob
import os
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest
from helpers import kill_after, tiny_config, train

from vit_jax.errors import UserError
from vit_jax.training.actions import Tracing
from vit_jax.training.callbacks import Callback, Run
from vit_jax.training.train_setup import TrainSetup

# Of jaxlib 0.12.0.1's reader of traces; its C++ ends the process where a warning raises.
pytestmark = pytest.mark.filterwarnings(
    "ignore:builtin type event_stats has no __module__:DeprecationWarning"
)


class MatMul(Callback):
    """Gives the device something whose name the trace shows."""

    def begin(self, run):
        self.function = jax.jit(lambda x: jnp.sin(x @ x))
        self.x = self.function(jnp.ones((64, 64)))

    def after_step(self, step):
        self.x = self.function(self.x)


def config_of(steps):
    return tiny_config(profile_steps=steps, evals={}, total_steps=9)


def traces(workdir):
    return glob.glob(f"{workdir}/**/*.xplane.pb", recursive=True)


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


@pytest.mark.slow
def test_the_steps_that_were_asked_for_are_in_the_trace(tmp_path, capsys):
    train(config_of((3, 5)), tmp_path, callbacks=[MatMul()])
    (path,) = traces(tmp_path)
    folder = tmp_path / "tensorboard"
    line = f"trace of steps 3 to 5 under {folder}: xprof --logdir={folder}"
    assert capsys.readouterr().out.count(line) == 1
    # Where the profile plugin of TensorBoard looks.
    assert os.path.dirname(path) == str(folder / "plugins/profile/steps_3_to_5")
    names, steps = events(path)
    assert steps == {3, 4, 5}
    # What the device did; its name depends on XLA's flags.
    assert any(name.startswith(("sin", "wrapped_sin")) for name in names), names


@pytest.mark.slow
def test_a_run_that_breaks_off_leaves_the_trace_so_far(tmp_path):
    class Breaking(Callback):
        def after_step(self, step):
            if step == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config_of((2, 8)), tmp_path, callbacks=[Breaking()])
    (path,) = traces(tmp_path)
    assert events(path)[1] == {2, 3}


@pytest.mark.slow
def test_steps_of_an_earlier_start_are_not_traced(tmp_path, capsys):
    train(config_of((0, 0)), tmp_path)
    kill_after(6, tmp_path)
    train(config_of((2, 8)), tmp_path)
    said = capsys.readouterr().out
    assert "profile_steps=(2, 8): no trace" in said and "after step 6" in said
    assert not traces(tmp_path)


def test_only_the_first_process_records(tmp_path, monkeypatch):
    config = tiny_config(profile_steps=(1, 1))
    tracing = Tracing(config, Mock(TrainSetup, total_steps=2))
    tracing.begin(Mock(Run, workdir=tmp_path, start=0))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with tracing:
        assert not tracing._recording


def test_a_trace_of_steps_that_are_not_taken_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"profile_steps=\(8, 10\).* 1 to 9"):
        train(config_of((8, 10)), tmp_path)
