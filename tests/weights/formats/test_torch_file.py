"""Files of torch.save: read without PyTorch, and without running what they name."""

import argparse
import collections
import dataclasses
import io
import os
import pathlib
import pickle
import zipfile

import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.weights.formats import torch_file

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


@dataclasses.dataclass(frozen=True)
class Name:
    """A function or class that a pickle names, without importing it."""

    module: str
    name: str

    def __call__(self):
        raise AssertionError("pickles only ask whether this can be called")


@dataclasses.dataclass(frozen=True)
class Call:
    """Pickled as a call of a name."""

    function: Name
    arguments: tuple

    def __reduce__(self):
        return self.function, self.arguments


@dataclasses.dataclass(frozen=True)
class Storage:
    """Pickled as a reference to numbers that stand elsewhere."""

    key: str
    kind: str
    data: np.ndarray


class Writer(pickle._Pickler):
    """Writes the pickle of torch.save; the Python class, to write names of our own."""

    def __init__(self, stream, *, legacy=False):
        super().__init__(stream, protocol=2)
        self.legacy = legacy

    def save_name(self, name):
        self.write(pickle.GLOBAL + f"{name.module}\n{name.name}\n".encode())
        self.memoize(name)

    dispatch = pickle._Pickler.dispatch | {Name: save_name}

    def persistent_id(self, value):
        if not isinstance(value, Storage):
            return None
        kind = Name("torch", f"{value.kind}Storage")
        view = (None,) if self.legacy else ()
        return ("storage", kind, value.key, "cpu", len(value.data), *view)


def tensor(storage, shape, strides, offset=0):
    arguments = (storage, offset, shape, strides, False, collections.OrderedDict())
    return Call(Name("torch._utils", "_rebuild_tensor_v2"), arguments)


def pickled(content, **kwargs):
    stream = io.BytesIO()
    Writer(stream, **kwargs).dump(content)
    return stream.getvalue()


def write_zip(path, content, *storages, order=b"little"):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled(content))
        archive.writestr("archive/byteorder", order)
        for storage in storages:
            archive.writestr(f"archive/data/{storage.key}", storage.data.tobytes())
    return path


def write_legacy(path, content, *storages):
    with path.open("wb") as stream:
        for part in (LEGACY_MAGIC, 1001, {"little_endian": True}):
            stream.write(pickled(part))
        stream.write(pickled(content, legacy=True))
        stream.write(pickled([storage.key for storage in storages]))
        for storage in storages:
            stream.write(len(storage.data).to_bytes(8, "little"))
            stream.write(storage.data.tobytes())
    return path


@pytest.fixture(params=[write_zip, write_legacy], ids=["zip", "legacy"])
def write(request):
    return request.param


def floats(key="0"):
    return Storage(key, "Float", ROWS.reshape(-1))


def test_tensors_are_views_of_storages_with_offsets_and_strides(tmp_path, write):
    storage = floats()
    content = collections.OrderedDict(
        whole=tensor(storage, (3, 4), (4, 1)),
        transposed=tensor(storage, (4, 3), (1, 4)),
        column=tensor(storage, (3,), (4,), offset=2),
        repeated=tensor(storage, (2, 3), (0, 1), offset=1),
        scalar=tensor(storage, (), (), offset=5),
        empty=tensor(storage, (0, 4), (4, 1)),
    )
    found = torch_file.read(write(tmp_path / "a.pth", content, storage))
    expected = {
        "whole": ROWS,
        "transposed": ROWS.T,
        "column": ROWS[:, 2],
        "repeated": np.stack([ROWS[0, 1:]] * 2),
        "scalar": np.float32(5),
        "empty": ROWS[:0],
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape
        np.testing.assert_array_equal(found[name], value)


def test_every_kind_of_number_is_read_and_halves_are_widened(tmp_path, write):
    upper = (ROWS.reshape(-1).view(np.uint32) >> 16).astype(np.uint16)
    kinds = {
        "Double": ROWS.astype(np.float64),
        "Half": ROWS.astype(np.float16),
        "Long": ROWS.astype(np.int64),
        "Byte": ROWS.astype(np.uint8),
        "Bool": ROWS > 4,
        "BFloat16": upper,
    }
    storages = [
        Storage(f"{i}", k, v.reshape(-1)) for i, (k, v) in enumerate(kinds.items())
    ]
    content = {s.kind: tensor(s, (3, 4), (4, 1)) for s in storages}
    found = torch_file.read(write(tmp_path / "a.pth", content, *storages))
    assert found["Half"].dtype == found["BFloat16"].dtype == np.float32
    np.testing.assert_array_equal(found["Half"], ROWS)
    # Whole numbers below 256 fit into bfloat16.
    np.testing.assert_array_equal(found["BFloat16"], ROWS)
    for kind in ("Double", "Long", "Byte", "Bool"):
        assert found[kind].dtype == kinds[kind].dtype
        np.testing.assert_array_equal(found[kind], kinds[kind])


@pytest.mark.parametrize(
    "key",
    ["model", "state_dict", "model_ema", "model_state_dict", "net", "weights"],
)
def test_a_training_checkpoint_gives_its_parameters(tmp_path, write, key):
    storage = floats()
    parameter = Call(
        Name("torch._utils", "_rebuild_parameter"),
        (tensor(storage, (3, 4), (4, 1)), True, collections.OrderedDict()),
    )
    content = {
        "epoch": 299,
        "args": argparse.Namespace(lr=0.1, out=pathlib.PurePosixPath("runs")),
        "callbacks": {Call(Name("some.module", "Callback"), (3,)): {"best": 0.1}},
        "optimizer": {"state": {0: {"exp_avg": parameter}}, "param_groups": [{}]},
        key: {"a.weight": parameter, "step": 3},
    }
    found = torch_file.read(write(tmp_path / "a.pth", content, storage))
    assert found.keys() == {"a.weight"}
    np.testing.assert_array_equal(found["a.weight"], ROWS)


def test_containers_are_opened_until_there_are_tensors(tmp_path):
    storage = floats()
    state = {"a": tensor(storage, (1,), (1,), offset=3)}
    content = {"epoch": 1, "model": {"step": 2, "state_dict": state}}
    found = torch_file.read(write_zip(tmp_path / "a.pth", content, storage))
    np.testing.assert_array_equal(found["a"], [3])
    averaged = {"a": tensor(storage, (1,), (1,), offset=7)}
    content |= {"model_ema": averaged}  # Comes before the others.
    found = torch_file.read(write_zip(tmp_path / "a.pth", content, storage))
    np.testing.assert_array_equal(found["a"], [7])
    path = write_zip(tmp_path / "b.pth", {"generator": state, "critic": state}, storage)
    with pytest.raises(UserError, match="tensors under generator, critic"):
        torch_file.read(path)


def state(offset, *, prefix="", **more):
    """Returns a state dict of one kernel, which tells by its first number which it is."""
    return {f"{prefix}w": tensor(floats(), (2,), (1,), offset), **more}


RAW, AVERAGE = 3, 7
# A checkpoint with averaged weights beside raw ones, and the name of the average.
AVERAGED = [
    ({"model": state(RAW), "ema_model": state(AVERAGE)}, "ema_model"),
    ({"model": state(RAW), "model_ema": state(AVERAGE)}, "model_ema"),
    ({"net": state(RAW), "net_ema": state(AVERAGE, prefix="module.")}, "net_ema"),
    ({"state_dict": state(RAW), "swa_state_dict": state(AVERAGE)}, "swa_state_dict"),
    ({"weights": state(RAW), "averaged_model": state(AVERAGE)}, "averaged_model"),
    ({"state_dict": state(RAW), "ema_params": state(AVERAGE)}, "ema_params"),
    (
        {
            "model_state_dict": state(RAW, prefix="module."),
            "model_ema_state_dict": state(AVERAGE),
        },
        "model_ema_state_dict",
    ),
    (  # torch.optim.swa_utils.AveragedModel.
        {
            "model": state(RAW),
            "swa_model": state(
                AVERAGE, prefix="module.", n_averaged=tensor(floats(), (), (), 5)
            ),
        },
        "swa_model",
    ),
    (  # A module of averages, which holds the raw network too.
        {
            "model": state(RAW),
            "ema": state(RAW, prefix="online_model.")
            | state(AVERAGE, prefix="ema_model."),
        },
        "ema.ema_model",
    ),
    (  # Lightning's callbacks; a class may be the key.
        {
            "state_dict": state(RAW, prefix="model."),
            "callbacks": {
                Name("some.module", "EMACallback"): {"state": state(AVERAGE)},
                "ModelCheckpoint": {"best": 0.1},
            },
        },
        "callbacks.some.module.EMACallback.state",
    ),
    (  # Lightning's WeightAveraging, which moves the raw weights.
        {
            "current_model_state": state(RAW),
            "state_dict": state(AVERAGE),
            "averaging_state": {"n_averaged": tensor(floats(), (), (), 5)},
        },
        "state_dict",
    ),
]


@pytest.mark.parametrize(("content", "name"), AVERAGED, ids=[n for _, n in AVERAGED])
def test_averaged_weights_beside_raw_ones_are_used_and_told(tmp_path, content, name):
    adam = {"state": {0: {"exp_avg": tensor(floats(), (2,), (1,))}}}
    path = write_zip(tmp_path / "a.pth", content | {"optimizer": adam}, floats())
    for use_ema, expected in ((True, AVERAGE), (False, RAW)):
        notes = []
        found = torch_file.read(path, use_ema=use_ema, tell=notes.append)
        (kernel,) = (value for key, value in found.items() if key.endswith("w"))
        np.testing.assert_array_equal(kernel, [expected, expected + 1])
        assert f"{name}: averaged weights" in notes[0] and "--no_ema" in notes[0]
        assert ("used instead of" in notes[0]) == use_ema
        assert "optimizer" in notes[1] and "left out" in notes[1]


def test_an_average_without_buffers_takes_those_of_the_raw_weights(tmp_path):
    mask = {"mask": tensor(floats(), (1,), (1,), offset=1)}
    content = {"model": state(RAW, **mask), "ema": state(AVERAGE)}
    found = torch_file.read(write_zip(tmp_path / "a.pth", content, floats()))
    assert {k: v.tolist() for k, v in found.items()} == {"w": [7, 8], "mask": [1]}


@pytest.mark.parametrize(
    ("beside", "left_out"),
    [
        ({"semantic": state(AVERAGE)}, "semantic"),  # No word of averages.
        ({"ema": {"w": tensor(floats(), (3,), (1,))}}, "ema"),  # Of another shape.
        ({"ema": {"shadow_params": [tensor(floats(), (2,), (1,))]}}, "ema"),
        ({"ema": Call(Name("some.module", "ModelEMA"), (3,))}, "ema"),
        ({"optimizer": {"exp_avg": state(AVERAGE)}}, "optimizer"),
        (
            {"ema": {"b": tensor(floats(), (1,), (1,))}},
            "ema",
        ),  # A third of the weights.
    ],
)
def test_what_is_no_average_of_the_weights_is_told_to_be_left_out(
    tmp_path, beside, left_out
):
    more = {name: tensor(floats(), (1,), (1,)) for name in "ab"}
    content = {"model": state(RAW, **more)} | beside
    notes = []
    path = write_zip(tmp_path / "a.pth", content | {"epoch": 3}, floats())
    found = torch_file.read(path, tell=notes.append)
    assert found["w"].tolist() == [3, 4]
    assert notes == [f"{left_out}: left out, model is read"]


def malicious(marker):
    """What an attacker may write instead of tensors; each would make a file."""
    made = f"touch {marker}", f"open({str(marker)!r}, 'w').close()", str(marker)
    calls = ("os.system", 0), ("posix.system", 0), ("builtins.exec", 1)
    calls += ("pathlib.Path", 2), ("torch.load", 2)
    return {name: Call(Name(*name.split(".")), (made[i],)) for name, i in calls}


@pytest.mark.parametrize("name", malicious(""))
def test_what_is_no_tensor_is_refused_by_name_and_not_run(tmp_path, write, name):
    marker = tmp_path / "synthetic"
    attack = malicious(marker)[name]
    if name in ("os.system", "builtins.exec"):  # The attack works where it is trusted.
        pickle.loads(pickled(attack))
        assert marker.exists()
        marker.unlink()
    storage = floats()
    content = {"model": {"a": tensor(storage, (3, 4), (4, 1)), "b": attack}}
    path = write(tmp_path / "a.pth", content, storage)
    with pytest.raises(UserError, match=rf"a.pth was not read: .* needs {name},"):
        torch_file.read(path)
    assert not marker.exists()


def test_a_file_of_one_bare_malicious_pickle_is_refused(tmp_path):
    path = tmp_path / "a.pth"
    path.write_bytes(pickle.dumps(Evil(tmp_path / "synthetic")))
    with pytest.raises(UserError, match=rf"needs {os.name}.system"):
        torch_file.read(path)
    assert not (tmp_path / "synthetic").exists()


@dataclasses.dataclass(frozen=True)
class Evil:
    marker: pathlib.Path

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "message"),
    [
        ((3, 4), (4, 1), 1, r"a tensor of \(3, 4\) lies outside of its storage"),
        ((3, 4), (4, -1), 3, "outside of its storage"),
        ((2,), (1,), -2, "outside of its storage"),
        ((10**6, 10**6), (0, 0), 0, "would take 4,000,000,000,000 bytes"),
    ],
)
def test_numbers_outside_of_the_file_are_not_reached(
    tmp_path, write, shape, strides, offset, message
):
    storage = floats()
    content = {"a": tensor(storage, shape, strides, offset)}
    with pytest.raises(UserError, match=message):
        torch_file.read(write(tmp_path / "a.pth", content, storage))


def call_of(dtype):
    """Returns the pickle of a tensor of PyTorch of numbers that are not read."""
    arguments = (0, (2,), (1,))
    if dtype in ("float8_e4m3fn", "uint16"):
        storage = Storage("1", "Untyped", np.zeros(4, np.uint8))
        more = False, collections.OrderedDict(), Name("torch", dtype)
        return storage, Call(
            Name("torch._utils", "_rebuild_tensor_v3"), (storage, *arguments, *more)
        )
    kind = {"complex64": "ComplexFloat", "qint8": "QInt8"}[dtype]
    storage = Storage("1", kind, np.zeros(4, np.int64))
    function = "_rebuild_qtensor" if dtype == "qint8" else "_rebuild_tensor_v2"
    more = (("scale", 0.1), False, collections.OrderedDict())
    return storage, Call(Name("torch._utils", function), (storage, *arguments, *more))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint16", "complex64", "qint8"])
def test_numbers_that_are_not_read_are_named(tmp_path, dtype):
    storage, value = call_of(dtype)
    content = {"a": tensor(floats(), (2,), (1,)), "b": value}
    path = write_zip(tmp_path / "a.pth", content, floats(), storage)
    with pytest.raises(UserError, match=f"a.pth: b holds {dtype} numbers: give"):
        torch_file.read(path)
    # Beside the weights, as of an optimiser, they do no harm.
    content = {"model": {"a": content["a"]}, "optimizer": {"b": value}}
    path = write_zip(tmp_path / "a.pth", content, floats(), storage)
    assert torch_file.read(path)["a"].tolist() == [0, 1]


def test_expanded_and_negated_views_are_their_values(tmp_path):
    hooks, views = collections.OrderedDict(), {"neg": True}
    arguments = (floats(), 3, (2,), (1,), False, hooks, views)
    content = {
        "expanded": tensor(floats(), (5, 12), (0, 1)),
        "negated": Call(Name("torch._utils", "_rebuild_tensor_v2"), arguments),
    }
    found = torch_file.read(write_zip(tmp_path / "a.pth", content, floats()))
    np.testing.assert_array_equal(found["expanded"], [ROWS.reshape(-1)] * 5)
    assert found["negated"].tolist() == [-3, -4]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "it holds a list, not a state dict"),
        ({"epoch": 3}, "it has no tensors, only epoch"),
        ({}, "it has no tensors, only nothing"),
    ],
)
def test_what_is_no_state_dict_is_told(tmp_path, write, content, message):
    path = write(tmp_path / "a.pth", content)
    with pytest.raises(UserError, match=f"a.pth is not a readable PyTorch.*{message}"):
        torch_file.read(path)


def test_damaged_files_end_in_one_line(tmp_path, write):
    storage = floats()
    content = {"a": tensor(storage, (3, 4), (4, 1))}
    path = write(tmp_path / "a.pth", content, storage)
    whole = path.read_bytes()
    for end in (0, 1, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(UserError, match=r"is not a readable PyTorch file: \w"):
            torch_file.read(path)


def test_other_archives_and_byte_orders_are_told(tmp_path):
    storage = floats()
    content = {"a": tensor(storage, (3, 4), (4, 1))}
    path = write_zip(tmp_path / "a.pth", content, storage, order=b"big")
    with pytest.raises(UserError, match="byte order is b'big'"):
        torch_file.read(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "nothing")
    with pytest.raises(UserError, match=r"a zip archive without a data.pkl"):
        torch_file.read(path)


@pytest.mark.parity
@pytest.mark.parametrize("zipped", [True, False])
def test_what_pytorch_saved_is_what_it_reads_itself(tmp_path, zipped):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    base = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    state = collections.OrderedDict(
        weight=torch.nn.Parameter(base),
        permuted=base.permute(2, 0, 1),
        slice=base[1:, ::2, 3],
        negated=torch._neg_view(base[1]),
        expanded=base[0, 0].expand(300, 5),
        half=base.half(),
        bfloat=base.bfloat16(),
        count=torch.tensor(7),
        flags=base > 30,
    )
    path = tmp_path / "a.pth"
    content = {"model": state, "epoch": 3, "args": argparse.Namespace(lr=1e-3)}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    found = torch_file.read(path)
    assert found.keys() == state.keys()
    for name, value in state.items():
        wide = value.float() if value.dtype.itemsize == 2 else value
        expected = wide.detach().resolve_neg().numpy()
        np.testing.assert_array_equal(found[name], expected)
