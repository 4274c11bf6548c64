"""Files that would expand to far more than weights are refused before they do."""

import io
import pickle
import re
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import test_torch_file as written

from vit_jax.errors import UserError
from vit_jax.weights.formats import files

ZEROS = bytes(1 << 20)


def deflated(path, *members, size):
    """Writes an archive of members; the last one holds so many MiB of zeros."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members[:-1]:
            archive.writestr(name, content)
        name, start = members[-1]
        with archive.open(name, "w", force_zip64=True) as member:
            member.write(start)
            for _ in range(size):
                member.write(ZEROS)
    return path


def npz(path):
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (33554432,)}\n"
    start = b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little") + header
    return deflated(path, ("a.npy", start), size=128)


def storage(path):
    numbers = written.Storage("0", "Float", np.broadcast_to(np.float32(0), 33554432))
    content = {"a": written.tensor(numbers, (33554432,), (1,))}
    pickled = ("archive/data.pkl", written.pickled(content))
    return deflated(path, pickled, ("archive/data/0", b""), size=128)


def long_pickle(path):
    start = b"\x80\x04\x8e" + (1 << 27).to_bytes(8, "little")  # BINBYTES8
    return deflated(path, ("archive/data.pkl", start), size=128)


def many_views(path):
    """Three hundred tensors, each of the same million numbers."""
    numbers = written.Storage("0", "Float", np.ones(1 << 20, np.float32))
    content = {
        f"{i}": written.tensor(numbers, (1 << 20,), (1,), offset=0) for i in range(300)
    }
    return written.write_zip(path, content, numbers)


def memo(path):
    """Ten bytes that ask for 134 million memo slots."""
    path.write_bytes(b"\x80\x02N" + pickle.LONG_BINPUT + b"\xff\xff\xff\x070N.")
    return path


CASES = {
    "npz": (npz, r"its arrays would take 134,217,\d+ bytes, 1,0\d\d times the file's"),
    "storage": (storage, r"its content would take 134,21\d,\d+ bytes, 1,0\d\d times"),
    "pickle": (long_pickle, r"its content would take 134,21\d,\d+ bytes, 1,0\d\d"),
    "views": (many_views, r"its tensors would take 1,258,291,200 bytes, \d+ times"),
    "memo": (memo, "a pickle in it asks for 134,217,727 memo slots"),
}


@pytest.mark.slow
def test_expansion_is_refused_before_memory_is_taken(tmp_path):
    """One process with little memory to take reads all of them."""
    for name, (make, _) in CASES.items():
        make(tmp_path / name)
    program = """
import resource, sys
from vit_jax.weights.formats import files
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        files.read(path)
        print("was read")
    except ValueError as error:
        print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    command = [sys.executable, "-c", program, *(tmp_path / name for name in CASES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *lines, grown = done.stdout.splitlines()
    for line, (name, (_, message)) in zip(lines, CASES.items(), strict=True):
        assert re.search(rf"{name} is not a readable .*: {message}", line), line
    assert int(grown) < 64 << 10  # KiB; each alone would take 128 MiB or more.


def test_a_long_pickle_is_refused(tmp_path):
    path = tmp_path / "a.pth"
    size = 17 << 20
    path.write_bytes(b"\x80\x03B" + size.to_bytes(4, "little") + bytes(size) + b".")
    with pytest.raises(UserError, match="pickle in it is longer than 16,777,216 bytes"):
        files.read(path)


def test_zeros_and_rounded_weights_that_were_compressed_are_read(tmp_path):
    """A new head, a model of a test, and weights of few bits compress, and are weights."""
    rng = np.random.default_rng(0)
    arrays = {
        "zeros": np.zeros((1 << 20,), np.float32),
        "pruned": np.where(rng.random(1 << 20) < 0.95, 0, rng.random(1 << 20)),
    }
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    found = files.read(tmp_path / "a.npz").flat
    for name, value in arrays.items():
        np.testing.assert_array_equal(found[name], value)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        numbers = written.floats()
        content = {"a": written.tensor(numbers, (3, 4), (4, 1))}
        archive.writestr("archive/data.pkl", written.pickled(content))
        archive.writestr("archive/data/0", numbers.data.tobytes())
    (tmp_path / "a.pth").write_bytes(stream.getvalue())
    np.testing.assert_array_equal(
        files.read(tmp_path / "a.pth").flat["a"], written.ROWS
    )
