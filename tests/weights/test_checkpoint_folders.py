"""Damage of a checkpoint's files is found and named, whatever file and bit it is."""

import json

import pytest
from etils import epath

from vit_jax.weights import checkpoint_folders


@pytest.fixture
def folder(tmp_path):
    """Returns a made-up checkpoint with its checksums."""
    for name, data in {
        "_CHECKPOINT_METADATA": b'{"custom_metadata": {}}',
        "empty": b"",
        "state/manifest.ocdbt": bytes(range(117)),
        "state/ocdbt.process_0/d/abc": bytes(90),
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    folder = epath.Path(tmp_path)
    checkpoint_folders.write_checksums(
        folder, checkpoint_folders.compute_checksums(folder)
    )
    return folder


def test_an_intact_checkpoint_has_no_damage_in_any_share(folder):
    assert checkpoint_folders.find_damage(folder) == []
    shares = [
        checkpoint_folders.compute_checksums(folder, part, 3) for part in range(3)
    ]
    assert {
        k: v for share in shares for k, v in share.items()
    } == checkpoint_folders.compute_checksums(folder)
    assert len(checkpoint_folders.compute_checksums(folder)) == 4


def test_every_flipped_bit_of_every_file_is_found(folder, tmp_path):
    for path in [p for p in tmp_path.rglob("*") if p.is_file()]:
        data = path.read_bytes()
        for bit in range(0, 8 * len(data), 13):
            spoilt = bytearray(data)
            spoilt[bit // 8] ^= 1 << bit % 8
            path.write_bytes(spoilt)
            (line,) = checkpoint_folders.find_damage(folder)
            assert path.name in line
        path.write_bytes(data)
    assert checkpoint_folders.find_damage(folder) == []


@pytest.mark.parametrize(
    ("name", "size", "says"),
    [
        ("state/manifest.ocdbt", 116, "state/manifest.ocdbt has 116 of 117 bytes"),
        ("state/ocdbt.process_0/d/abc", 0, "d/abc has 0 of 90 bytes"),
        ("empty", 3, "empty has 3 of 0 bytes"),
        ("checksums.json", 50, "checksums.json is damaged"),
    ],
)
def test_a_file_of_another_length_is_named(folder, tmp_path, name, size, says):
    with (tmp_path / name).open("r+b") as file:
        file.truncate(size)
    (line,) = checkpoint_folders.find_damage(folder)
    assert says in line


def test_a_missing_file_is_named_by_the_host_whose_share_it_is(folder, tmp_path):
    (tmp_path / "empty").unlink()
    found = [checkpoint_folders.find_damage(folder, part, 2) for part in range(2)]
    assert sorted(found) == [[], ["empty is missing"]]


def test_a_look_at_the_small_files_leaves_the_data_unread(folder, tmp_path):
    (tmp_path / "state" / "ocdbt.process_0" / "d" / "abc").write_bytes(b"")
    assert checkpoint_folders.find_damage(folder, data=False) == []
    (tmp_path / "_CHECKPOINT_METADATA").write_bytes(b"")
    assert len(checkpoint_folders.find_damage(folder, data=False)) == 1
    assert len(checkpoint_folders.find_damage(folder)) == 2


def test_checksums_that_were_changed_to_fit_are_refused(folder, tmp_path):
    stored = json.loads((tmp_path / "checksums.json").read_text())
    del stored["files"]["empty"]
    (tmp_path / "checksums.json").write_text(json.dumps(stored))
    assert checkpoint_folders.find_damage(folder) == ["checksums.json is damaged"]


def test_a_checkpoint_without_checksums_is_not_called_damaged(folder, tmp_path):
    (tmp_path / "checksums.json").unlink()
    assert not checkpoint_folders.has_checksums(folder)
    assert checkpoint_folders.find_damage(folder) == []
