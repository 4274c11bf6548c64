"""Which state a start begins with, of two places that may both hold one."""

import helpers
import jax
import pytest

from vit_jax.data.sources.arrays import open_synthetic
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed.mesh import MeshConfig
from vit_jax.training import loop, train_setup
from vit_jax.training.local_checkpoint import LocalCheckpointer


@pytest.fixture
def places(tmp_path):
    """Returns the config, the program, and functions that open the two places."""
    config = helpers.tiny_config(
        local_checkpoint={"dir": str(tmp_path / "disk"), "every_steps": 1},
        checkpoint={"max_to_keep": 9},
    )
    mesh = meshes.create(MeshConfig(data=1), jax.devices()[:1])
    program = train_setup.build(config, mesh, num_examples=20)
    source = open_synthetic("train", (8, 12), 3, 5, 20)
    workdir = tmp_path / "run"

    where = workdir, source, program.layout.shapes, program.layout.shardings
    near = lambda: LocalCheckpointer(config, *where)
    far = lambda: helpers.open_checkpoints(workdir, config, program, source)
    return config, program, far, near


def damage(folder):
    path = next(folder.glob("state/ocdbt.process_0/d/*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_what_is_near_counts_if_what_is_newer_in_the_workdir_is_damaged(
    places, tmp_path, capsys
):
    config, program, open_far, open_near = places
    begun = loop.restore_or_init(config, program, open_far(), open_near().restore)
    assert (begun.step, begun.notes) == (0, [])
    with open_far() as checkpoints:
        for step in (2, 6):
            state = begun.state.replace(step=begun.state.step + step)
            checkpoints.save(step, state, step * 1.0)
    near = open_near()
    near.save(4, begun.state, 4.0)
    near.wait()

    def begin():
        found = loop.restore_or_init(config, program, open_far(), open_near().restore)
        return found.step, found.seconds

    assert begin() == (6, 6.0)
    damage(tmp_path / "run" / "checkpoints" / "6")
    assert begin() == (4, 4.0)
    assert "checkpoints/6 is damaged" in capsys.readouterr().err
    near.remove()
    assert begin() == (2, 2.0)
