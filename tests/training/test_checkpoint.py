"""Saving, failing to save, and what is taken for a checkpoint, without a training run."""

import gc
import json
import logging
import shutil

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from helpers import tiny_config
from orbax.checkpoint import v1 as ocp

from vit_jax.data.sources.arrays import open_synthetic
from vit_jax.errors import UserError
from vit_jax.training import checkpoint
from vit_jax.training.checkpoint import Checkpointer
from vit_jax.training.layout import DiskLayout
from vit_jax.training.train_state import TrainState
from vit_jax.weights import checkpoint_folders
from vit_jax.weights import workdir as workdirs

METADATA = {"task": {}, "network": {"path": "params", "options": {}}}


@pytest.fixture
def checkpointer(tmp_path):
    """Returns a function that opens the checkpoints of one workdir."""
    source = open_synthetic("train", (8, 12), 3, 5, 20)

    def open_checkpoints(**keep):
        return Checkpointer(
            tmp_path, tiny_config(checkpoint=keep), source, METADATA, disk()
        )

    return open_checkpoints


def state_of(step):
    params = {"a": jnp.arange(7.0) * step, "b": {"c": jnp.full((5, 3), step + 0.5)}}
    return TrainState(jnp.int32(step), params, (), None, None, jax.random.key(step))


def disk():
    shapes = jax.eval_shape(lambda: state_of(1))
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return DiskLayout(shapes, jax.tree.map(lambda _: place, shapes))


def restored(checkpoints):
    checkpoints.verify()
    while (found := checkpoints.restore()).state is None:
        checkpoints.verify()
    return found._replace(notes=[*checkpoints.put_damaged_aside(), *found.notes])


def assert_is(state, step):
    assert int(state.step) == step
    jax.tree.map(np.testing.assert_array_equal, state.params, state_of(step).params)
    assert state.key == state_of(step).key


def test_what_was_saved_is_restored(checkpointer):
    with checkpointer() as checkpoints:
        checkpoints.save(3, state_of(3), 12.5, 37.5)
    found = restored(checkpointer())
    assert_is(found.state, 3)
    assert (found.step, found.seconds, found.device_seconds) == (3, 12.5, 37.5)
    assert len(found.notes) == 1


def test_the_last_ones_and_multiples_are_kept(checkpointer, tmp_path):
    with checkpointer(max_to_keep=2, keep_period=4) as checkpoints:
        for step in range(1, 8):
            checkpoints.save(step, state_of(step), 0.0)
    assert checkpoint_folders.steps(tmp_path) == [4, 6, 7]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3


class Unreachable:
    """Stands for Orbax: a bucket that fails so many times, at once or later."""

    def __init__(self, failures, later):
        self.failures, self.later, self.save = failures, later, ocp.save_async

    def save_async(self, *args, **options):
        self.failures -= 1
        if self.failures < 0:
            return self.save(*args, **options)
        if not self.later:
            self.result()
        return self

    def result(self):
        raise ConnectionError("503 Service Unavailable\nfor url: https://storage")


@pytest.mark.parametrize("later", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_unreachable_bucket_is_loud_each_time_and_the_next_save_succeeds(
    checkpointer, monkeypatch, capsys, tmp_path, later
):
    checkpoints = checkpointer()
    checkpoints.save(1, state_of(1), 0.0)
    assert checkpoints.wait() is None
    bucket = Unreachable(2, later)
    monkeypatch.setattr(checkpoint.ocp, "save_async", bucket.save_async)
    for step in (2, 3):
        checkpoints.save(step, state_of(step), 0.0)
        assert "503 Service Unavailable" in checkpoints.wait()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    for step, line in enumerate(lines, 2):
        assert line.startswith(f"error: the checkpoint of step {step} could not be sav")
        assert "(503 Service Unavailable for url: https://storage)" in line
        assert f"the checkpoint of step 1 is safe in {tmp_path}" in line
        assert "training continues" in line
    assert checkpoints.failures == 2
    with pytest.raises(UserError, match="SIGTERM, but step 3 could not be saved"):
        checkpoints.demand(3, "SIGTERM")
    checkpoints.save(3, state_of(3), 0.0)  # The same step, once more.
    checkpoints.demand(3, "SIGTERM")
    assert checkpoint_folders.steps(tmp_path) == [1, 3]
    assert_is(restored(checkpointer()).state, 3)


def test_what_a_kill_left_is_no_checkpoint_and_is_removed(checkpointer, tmp_path):
    with checkpointer() as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step), 0.0)
    (tmp_path / "checkpoints" / "2" / "checksums.json").unlink()
    (tmp_path / "checkpoints" / "2.unfinished").write_text("")
    (tmp_path / "checkpoints" / "3.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "checkpoints" / "0").mkdir()  # Killed while it was removed.
    (tmp_path / "checkpoints" / "0.unfinished").write_text("")
    assert checkpoint_folders.steps(tmp_path) == [1]
    assert_is(restored(checkpointer()).state, 1)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["1"]


def test_a_save_that_is_cut_off_before_its_checksums_is_known_as_ours(
    checkpointer, tmp_path, monkeypatch
):
    def cut_off(*_):
        raise KeyboardInterrupt

    checkpoints = checkpointer()
    checkpoints.save(1, state_of(1), 0.0)
    checkpoints.demand(1, "the test")
    folder = tmp_path / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["1"]
    monkeypatch.setattr(checkpoint.folders, "compute_checksums", cut_off)
    checkpoints.save(2, state_of(2), 0.0)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.wait()
    monkeypatch.undo()
    assert (folder / "2" / "state").is_dir()
    assert checkpointer().latest == 1
    assert [path.name for path in folder.iterdir()] == ["1"]


def test_what_is_not_known_as_ours_is_told_and_stays(checkpointer, tmp_path, capsys):
    with checkpointer(max_to_keep=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step), 0.0)
    folder = tmp_path / "checkpoints"
    (folder / "2").rename(folder / "3")
    (folder / "3" / "checksums.json").unlink()  # As where a copy lost it.
    (folder / "2024").mkdir()
    (folder / "2024" / "thesis.txt").write_text("kept nowhere else")
    (folder / "notes.txt").write_text("mine")
    (folder / "old.removed").mkdir()
    capsys.readouterr()
    checkpoints = checkpointer(max_to_keep=1)
    unverified, foreign = capsys.readouterr().err.splitlines()
    assert unverified == (
        f"warning: {folder} contains folders without checksums.json (2024, 3): not used "
        "and not changed; remove them if a killed start left them"
    )
    assert foreign == (
        f"warning: {folder} contains files that are not checkpoints (notes.txt, "
        "old.removed): not changed"
    )
    assert checkpoints.latest is None
    with checkpoints:
        for step in (3, 4):  # The first where one without checksums lies.
            checkpoints.save(step, state_of(step), 0.0)
    names = ["2024", "3.unverified", "4", "notes.txt", "old.removed"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert (folder / "2024" / "thesis.txt").read_text() == "kept nowhere else"
    capsys.readouterr()
    assert checkpointer().latest == 4
    assert "3.unverified" not in capsys.readouterr().err


def test_another_set_of_data_is_refused_unless_that_is_allowed(checkpointer, tmp_path):
    with checkpointer() as checkpoints:
        checkpoints.save(1, state_of(1), 0.0)
    other = open_synthetic("val", (8, 12), 3, 5, 20)
    match = (
        "changed since .* was begun: names of the records or their order differ; rest"
    )
    with pytest.raises(UserError, match=match):
        restored(Checkpointer(tmp_path, tiny_config(), other, METADATA, disk()))
    allowed = tiny_config(data={"check": False})
    with Checkpointer(tmp_path, allowed, other, METADATA, disk()) as checkpoints:
        found = restored(checkpoints)
        assert_is(found.state, 1)
        assert "changed since" in found.notes[1]
        assert "(data.check=False): names of the records" in found.notes[1]
        checkpoints.save(2, state_of(2), 0.0)
    # From then on these are the data of the run.
    assert_is(
        restored(Checkpointer(tmp_path, tiny_config(), other, METADATA, disk())).state,
        2,
    )


def test_an_error_of_the_devices_does_not_make_a_checkpoint_a_damaged_one(tmp_path):
    source = open_synthetic("train", (8, 12), 3, 5, 20)

    def fail(state):
        raise jax.errors.JaxRuntimeError("INTERNAL: transfer to the device failed")

    how = tmp_path, tiny_config(), source, METADATA
    with Checkpointer(*how, disk()) as checkpoints:
        checkpoints.save(1, state_of(1), 0.0)
    with pytest.raises(jax.errors.JaxRuntimeError, match="transfer to the device"):
        restored(Checkpointer(*how, disk()._replace(from_disk=fail)))
    assert_is(restored(Checkpointer(*how, disk())).state, 1)


def test_a_damaged_one_is_put_aside_and_may_be_saved_again(
    checkpointer, tmp_path, capsys
):
    with checkpointer() as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step), 0.0)
    path = next((tmp_path / "checkpoints" / "2").glob("state/ocdbt.process_0/d/*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"2 is damaged .*{path.name}.* of step 1"):
        workdirs.load(tmp_path)

    checkpoints = checkpointer()
    found = restored(checkpoints)
    assert_is(found.state, 1)
    assert found.notes[0] == "the checkpoint of step 2 is damaged"
    said = capsys.readouterr().err
    assert f"{path.name} has changed since it was written (sha256)" in said
    assert "kept as " in said
    with checkpoints:
        checkpoints.save(2, state_of(2), 0.0)
    assert checkpoint_folders.steps(tmp_path) == [1, 2]
    assert (tmp_path / "checkpoints" / "2.damaged").is_dir()
    assert workdirs.load(tmp_path, use_ema=False).step == 2


def two_steps(checkpointer, tmp_path):
    """Saves steps 8 and 12; returns their folders."""
    with checkpointer() as checkpoints:
        for step in (8, 12):
            checkpoints.save(step, state_of(step), 0.0)
    return tmp_path / "checkpoints" / "8", tmp_path / "checkpoints" / "12"


def assert_goes_on_from_8(checkpointer, tmp_path, capfd, why):
    with pytest.raises(UserError, match=f"12 is damaged .*{why}.* of step 8"):
        workdirs.load(tmp_path)
    capfd.readouterr()
    found = restored(checkpointer())
    assert_is(found.state, 8)
    said = capfd.readouterr().err
    assert why in said
    assert "Traceback" not in said
    assert (tmp_path / "checkpoints" / "12.damaged").is_dir()


def test_a_file_of_another_checkpoint_is_damage(checkpointer, tmp_path, capfd):
    old, new = two_steps(checkpointer, tmp_path)
    swapped = 0
    for path in old.rglob("manifest.ocdbt"):  # It ends in a CRC-32C of itself.
        other = new / path.relative_to(old)
        ours, theirs = path.read_bytes(), other.read_bytes()
        if len(ours) == len(theirs) and ours != theirs:
            assert google_crc32c.value(ours) == google_crc32c.value(theirs)
            other.write_bytes(ours)
            swapped += 1
    assert swapped
    assert_goes_on_from_8(
        checkpointer, tmp_path, capfd, "has changed since it was written"
    )


def sign_again(folder):
    """Writes the checksums of what is there."""
    folder = epath.Path(folder)
    checkpoint_folders.write_checksums(
        folder, checkpoint_folders.compute_checksums(folder)
    )


SLOW = [
    pytest.param(x, marks=pytest.mark.slow) for x in ("manifest.ocdbt", "_METADATA")
]


@pytest.mark.parametrize("what", ["d", *SLOW])
def test_what_cannot_be_restored_is_damage(checkpointer, tmp_path, capfd, caplog, what):
    _, new = two_steps(checkpointer, tmp_path)
    for path in map(epath.Path, new.rglob(what)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.write_bytes(b"else")
    sign_again(new)
    assert_goes_on_from_8(checkpointer, tmp_path, capfd, "cannot be re")
    gc.collect()  # What else failed is told then.
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_checkpoint_under_the_name_of_another_step_is_damage(
    checkpointer, tmp_path, capfd
):
    old, new = two_steps(checkpointer, tmp_path)
    shutil.rmtree(new)
    shutil.copytree(old, new)
    assert_goes_on_from_8(checkpointer, tmp_path, capfd, "of step 8")


def test_nothing_is_renamed_where_nothing_can_be_restored(checkpointer, tmp_path):
    for folder in two_steps(checkpointer, tmp_path):
        for path in folder.rglob("manifest.ocdbt"):
            path.write_bytes(b"else")
        sign_again(folder)
    match = "step 12, 8; .*12 cannot be restored: .*8 cannot be"
    with pytest.raises(UserError, match=match):
        restored(checkpointer())
    assert checkpoint_folders.steps(tmp_path) == [8, 12]


def test_a_folder_that_is_no_number_as_it_is_written_is_no_step(
    checkpointer, tmp_path, capsys
):
    old, new = two_steps(checkpointer, tmp_path)
    new.rename(old.parent / "012")
    assert checkpoint_folders.steps(tmp_path) == [8]
    assert_is(restored(checkpointer()).state, 8)
    assert "not checkpoints (012)" in capsys.readouterr().err


def test_checksums_of_earlier_versions_are_read(checkpointer, tmp_path):
    _, new = two_steps(checkpointer, tmp_path)
    files = {
        name: [size, f"{google_crc32c.value((new / name).read_bytes()):08x}"]
        for name, (size, _) in checkpoint_folders.compute_checksums(
            epath.Path(new)
        ).items()
    }
    crc = google_crc32c.value(json.dumps(files, sort_keys=True).encode())
    text = json.dumps({"files": files, "crc32c": f"{crc:08x}"})
    (new / checkpoint_folders.CHECKSUMS_FILE).write_text(text)
    assert checkpoint_folders.find_damage(epath.Path(new)) == []
    assert_is(restored(checkpointer()).state, 12)
    path = next(new.glob("state/ocdbt.process_0/d/*"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert "(crc32c)" in checkpoint_folders.find_damage(epath.Path(new))[0]


def test_one_without_checksums_is_not_removed_with_the_old_ones(checkpointer, tmp_path):
    ocp.save(tmp_path / "checkpoints" / "4", {"step": state_of(4).step})
    with checkpointer(max_to_keep=1) as checkpoints:
        for step in (5, 6):
            checkpoints.save(step, state_of(step), 0.0)
    assert checkpoint_folders.steps(tmp_path) == [4, 6]
