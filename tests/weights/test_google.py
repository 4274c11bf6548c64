import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.weights import google


def test_names_become_levels_and_block_names_the_published_ones(tmp_path):
    names = {
        "Transformer/encoderblock_0/LayerNorm_1/scale": "LayerNorm_2",
        "Transformer/encoderblock_0/MlpBlock_0/Dense_0/bias": "MlpBlock_3",
    }
    np.savez(tmp_path / "a.npz", **{name: np.ones(2) for name in names})
    tree = google.load(tmp_path / "a.npz")
    assert set(tree["Transformer"]["encoderblock_0"]) == set(names.values())


def test_published_names_stay(tmp_path):
    name = "Transformer/encoderblock_0/LayerNorm_2/scale"
    np.savez(tmp_path / "a.npz", **{name: np.ones(2)})
    tree = google.load(tmp_path / "a.npz")
    assert set(tree["Transformer"]["encoderblock_0"]) == {"LayerNorm_2"}


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 broken"])
def test_damaged_files_are_named(tmp_path, content):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(UserError, match=r"a.npz is not a readable .npz checkpoint"):
        google.load(tmp_path / "a.npz")


def test_pickled_content_is_not_run(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([{}], dtype=object))
    with pytest.raises(UserError, match="not a readable"):
        google.load(tmp_path / "a.npz")
