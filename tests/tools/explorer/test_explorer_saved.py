"""The page of one image as one file: as fine as its size allows, or refused."""

import json
import re

import explored
import pytest

from vit_jax.errors import UserError
from vit_jax.tools.explorer import saved


@pytest.fixture
def made():
    """Two models of more and of fewer patches, and what they saw."""
    pairs = [explored.made((13, 12), 2, 1, seed=1), explored.made((3, 5), 2, 3, seed=2)]
    return tuple(map(list, zip(*pairs, strict=True)))


def kept(path):
    """Returns how a file says that it keeps attention."""
    state = json.loads(re.search(r'id="saved">(.+?)</script>', path.read_text())[1])
    return [(model["steps"], model["pool"]) for model in state["seen"]["models"]]


def test_a_file_is_never_larger_than_it_may_be(made, tmp_path, monkeypatch):
    path, ways = tmp_path / "x.html", []
    monkeypatch.setattr(saved, "_SAMPLE_MAPS", 3)
    limit = 10**7
    reason = "even with the coarsest attention: set a smaller --resolution, or leave out --com"
    with pytest.raises(UserError, match=reason):
        while True:
            monkeypatch.setattr(saved, "MAX_BYTES", limit)
            size, steps, pool = saved.write(str(path), *made, "x")
            assert path.stat().st_size == size <= limit
            # 3x5 patches are few enough.
            assert kept(path) == [(steps, pool), (steps, 1)]
            ways.append((pool, -steps))
            limit = size - 1
    assert ways == sorted(set(ways))  # Ever coarser, steps first.
    assert ways[0] == (1, -255)
    assert ways[-1] == (3, -3)
    assert {pool for pool, _ in ways} == {1, 2, 3}
    assert [each.name for each in tmp_path.iterdir()] == ["x.html"]


def test_a_disk_that_is_full_leaves_the_old_file(made, tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    path = tmp_path / "x.html"
    path.write_text("old")
    monkeypatch.setattr(saved, "replace_bytes", full)
    with pytest.raises(UserError, match="cannot be written: .*No space left"):
        saved.write(str(path), *made, "x")
    assert path.read_text() == "old"
