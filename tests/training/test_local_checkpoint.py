"""Checkpoints on a host's own disk, in one process; two hosts are in the slow tests."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_config
from jax.sharding import NamedSharding, PartitionSpec

from vit_jax.data.sources.arrays import open_synthetic
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed.mesh import MeshConfig
from vit_jax.errors import UserError
from vit_jax.training.local_checkpoint import LocalCheckpointer, StateParts
from vit_jax.training.train_state import TrainState


def make(step):
    params = {"a": jnp.arange(24.0).reshape(8, 3) * step, "b": jnp.full((5,), step)}
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    return TrainState(
        jnp.int32(step), params, (half,), None, None, jax.random.key(step)
    )


SHAPES = jax.eval_shape(lambda: make(1))


@pytest.fixture
def shardings():
    """Returns where the arrays lie: "a" is split four ways, the rest is everywhere."""
    mesh = meshes.create(MeshConfig(data=2, fsdp=4))

    def place(leaf):
        split = "fsdp" if leaf.shape == (8, 3) else None
        return NamedSharding(mesh, PartitionSpec(*[split][: len(leaf.shape)]))

    return jax.tree.map(place, SHAPES)


@pytest.fixture
def disk(tmp_path, monkeypatch, shardings):
    """Returns a function that opens the host's disk for a run."""
    monkeypatch.setenv("OWN_DISK", str(tmp_path / "disk"))

    def open_disk(workdir="run", every=2, examples=20, split="train", **stated):
        local = {"dir": "$OWN_DISK/x", "every_steps": every}
        config = tiny_config(local_checkpoint=local, **stated)
        source = open_synthetic(split, (8, 12), 3, 5, examples)
        return LocalCheckpointer(config, tmp_path / workdir, source, SHAPES, shardings)

    return open_disk


@pytest.fixture
def save(disk, shardings):
    """Returns a function that saves states, one after the other."""

    def save(*steps):
        near = disk()
        for step in steps:
            state = jax.device_put(make(step), shardings)
            near.save(step, state, 1.5 * step, 9.0 * step)
        near.wait()

    return save


def assert_is(state, step, shardings):
    def same(found, wanted, sharding):
        assert found.dtype == wanted.dtype
        assert found.sharding.is_equivalent_to(sharding, found.ndim)
        if not jnp.issubdtype(found.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(found, wanted)

    jax.tree.map(same, state, make(step), shardings)
    assert state.key == make(step).key


def test_the_newest_of_the_last_two_is_restored_with_its_shardings(
    disk, save, shardings
):
    save(2, 4, 6)
    state, step, *spent, notes = disk().restore(newer_than=0)
    assert (step, spent) == (6, [9.0, 54.0])
    assert_is(state, 6, shardings)
    assert notes == ["resume: step 6 from local disks"]
    # What is in the workdir is taken if it is as new.
    assert disk().restore(newer_than=6)[0] is None


def test_a_damaged_file_is_named_and_the_one_before_it_taken(
    disk, save, shardings, tmp_path, capsys
):
    save(2, 4, 6)
    (path,) = tmp_path.glob("disk/x/*/process_0/6.npz")
    data = bytearray(path.read_bytes())
    data[data.index(np.asarray(make(6).params["b"]).tobytes())] ^= 4
    path.write_bytes(data)
    assert_is(disk().restore(newer_than=0)[0], 4, shardings)
    assert f"error: {path} is damaged" in capsys.readouterr().err
    path.write_bytes(data[:100])
    assert disk().restore(newer_than=0)[1] == 4


def test_a_file_whose_table_of_contents_was_cut_short_is_not_used(
    disk, save, tmp_path, capsys
):
    save(2, 4)
    (path,) = tmp_path.glob("disk/x/*/process_0/4.npz")
    with np.load(path) as file:
        arrays = dict(file)
    arrays.pop(next(name for name in arrays if name != "about"))
    np.savez(path, **arrays)
    assert disk().restore(newer_than=0).step == 2
    said = capsys.readouterr().err
    assert f"{path} is damaged ({len(arrays)} of {len(arrays) + 1} arrays" in said


def test_a_folder_by_a_variable_that_is_not_set_is_refused(disk, monkeypatch):
    monkeypatch.delenv("OWN_DISK")
    with pytest.raises(UserError, match=r"dir='\$OWN_DISK/x': .* not set on this "):
        disk()


def test_an_interval_without_a_folder_is_refused():
    with pytest.raises(UserError, match="every_steps=5 needs local_checkpoint.dir"):
        tiny_config(local_checkpoint={"every_steps": 5})


def test_another_run_other_data_and_no_interval_find_nothing(disk, save):
    save(2)
    assert disk("begun_anew").restore(newer_than=0)[0] is None
    assert disk(examples=21).restore(newer_than=0)[0] is None
    assert disk().restore(newer_than=0)[1] == 2


def test_what_was_trained_on_other_data_of_the_same_size_is_refused(
    disk, save, shardings
):
    save(2)
    with pytest.raises(UserError, match="changed since .* was begun: names of the rec"):
        disk(split="val").restore(newer_than=0)
    found = disk(split="val", data={"check": False}).restore(newer_than=0)
    assert_is(found.state, 2, shardings)
    assert "(data.check=False): names of the records" in found.notes[0]


def test_what_a_run_of_another_config_left_is_not_used(disk, save):
    save(2)
    assert disk(seed=99).restore(newer_than=0)[0] is None
    assert disk(debug_nans=True).restore(newer_than=0)[1] == 2  # It changes no result.


def test_a_finished_run_leaves_nothing(disk, save, tmp_path):
    save(2)
    disk().remove()
    assert not list(tmp_path.glob("disk/x/*"))


def test_a_disk_that_cannot_be_written_is_loud(disk, save, tmp_path, capsys):
    (tmp_path / "disk").write_text("a file, not a folder")
    save(2)
    assert "step 2 could not be saved on this host's disk" in capsys.readouterr().err
    assert disk().restore(newer_than=0)[0] is None


def test_who_sends_what_is_planned_the_same_everywhere(shardings):
    layout = StateParts(SHAPES, shardings)
    a, b, *rest = sorted(layout.of_process(0))
    # Three hosts: 0 and 1 hold "a", 2 holds "b", all hold the rest.
    layout._held = {
        0: dict.fromkeys([a, *rest], 4),
        1: dict.fromkeys([a, *rest], 4),
        2: dict.fromkeys([b, *rest], 4),
    }
    everyone = {0: [0], 1: [1], 2: [2]}
    assert layout.lacking(everyone) == []
    assert layout.transfers(everyone) == []
    assert layout.lacking({0: [0], 1: [1]}) == [2]
    assert layout.lacking({1: [1], 2: [2]}) == []
    assert layout.transfers({1: [1], 2: [2]}) == [(1, sorted([a, *rest]))]
    # Host 2 was replaced, but its old disk is in host 0 now.
    assert layout.transfers({0: [0], 1: [1], 2: [0]}) == [(0, sorted([b, *rest]))]
