import json
import zipfile

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from vit_jax.errors import UserError
from vit_jax.weights.formats import files

A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(5, np.float32)


def same(tensors, expected):
    assert tensors.flat.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(tensors.flat[name], value)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".bin", ""])
def test_kind_is_told_by_content_not_by_name(tmp_path, suffix):
    np.savez(tmp_path / "a.npz", a=A)
    (tmp_path / "a.npz").rename(tmp_path / f"zipped{suffix}")
    save_file({"a": A}, tmp_path / f"safe{suffix}", {"synthetic": "here"})
    same(files.read(tmp_path / f"zipped{suffix}"), {"a": A})
    safe = files.read(tmp_path / f"safe{suffix}")
    same(safe, {"a": A})
    assert safe.metadata == {"synthetic": "here"}


@pytest.mark.parametrize("length", [640, 896, 1152, 1408])
def test_a_header_whose_length_begins_as_a_pickle_is_read(tmp_path, length):
    path = tmp_path / "model"
    header = json.dumps(
        {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    )
    header = header.ljust(length).encode()
    path.write_bytes(length.to_bytes(8, "little") + header + A.tobytes())
    assert path.read_bytes()[:1] == b"\x80"
    same(files.read(path), {"a": A})


@pytest.mark.parametrize("container", ["zip", "pickle"])
def test_torch_files_go_to_their_reader(tmp_path, monkeypatch, container):
    path = tmp_path / "model.npz"
    if container == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("model/data.pkl", b"")
    else:
        path.write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")
    monkeypatch.setattr(files.torch_file, "read", lambda given, **how: {str(given): A})
    same(files.read(path), {str(path): A})


def test_half_precision_becomes_float32_and_the_rest_stays(tmp_path):
    values = np.array([0.1, -3e-5, 4096.0])
    arrays = {
        "half": values.astype(np.float16),
        "brain": values.astype(ml_dtypes.bfloat16),
        "double": values,
        "count": np.array([3, 4]),
    }
    # numpy writes bfloat16 as bytes without a meaning.
    np.savez(tmp_path / "a.npz", **arrays)
    save_file(arrays, tmp_path / "a.safetensors")
    for name in ("a.npz", "a.safetensors"):
        flat = files.read(tmp_path / name).flat
        for half in ("half", "brain"):
            assert flat[half].dtype == np.float32
            np.testing.assert_array_equal(flat[half], arrays[half].astype(np.float32))
        assert flat["double"].dtype == np.float64
        assert flat["count"].dtype == np.int64


def test_folder_of_shards_is_one_dict(tmp_path):
    save_file({"a": A}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": B}, tmp_path / "model-00002-of-00002.safetensors")
    places = {
        f"{n}": f"model-0000{i}-of-00002.safetensors" for i, n in ((1, "a"), (2, "b"))
    }
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    same(files.read(tmp_path), {"a": A, "b": B})

    index.write_text(json.dumps({"weight_map": places | {"c": places["a"]}}))
    with pytest.raises(UserError, match=r"lacks 1 arrays that its index names, .* c:"):
        files.read(tmp_path)
    (tmp_path / places["b"]).unlink()
    with pytest.raises(UserError, match="lacks 1 of the 2 files .* model-00002-of"):
        files.read(tmp_path)


@pytest.mark.parametrize(
    "weight_map", [{"a": "../outside.safetensors"}, ["a"], {"a": 3}, None]
)
def test_index_may_only_name_files_beside_it(tmp_path, weight_map):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match="index.json has no weight_map from names"):
        files.read(tmp_path)


def test_folder_prefers_safetensors_to_the_same_model_in_pytorch(tmp_path):
    save_file({"a": A}, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not looked at")
    same(files.read(tmp_path), {"a": A})


def test_folder_with_any_single_file_will_do_but_not_with_two(tmp_path):
    np.savez(tmp_path / "odd_name.npz", a=A)
    (tmp_path / "notes.txt").write_text("no weights")
    same(files.read(tmp_path), {"a": A})
    save_file({"a": A}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="holds odd_name.npz, other.safetensors: give"):
        files.read(tmp_path)


def test_json_beside_the_weights_counts_if_it_describes_a_model(tmp_path):
    save_file({"a": A}, tmp_path / "model.safetensors")
    config = {"architectures": ["ViTModel"], "hidden_size": 12}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text('{"colour": "blue"}')
    for place in (tmp_path, tmp_path / "model.safetensors"):
        assert files.read(place).sidecars == {"config.json": config}
    (tmp_path / "config.json").write_text('{"learning_rate": 0.1}')
    assert files.read(tmp_path).sidecars == {}
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json is not readable JSON"):
        files.read(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "neither a readable .npz checkpoint, .* it is empty"),
        (b"no archive", "it begins with b'no archi'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer: run"),
        (b"<!DOCTYPE html>", "it is a web page: download the file itself"),
        (
            b"PK\x03\x04 broken",
            "is not a readable .npz checkpoint: the archive is trunc",
        ),
        (b"\x10\0\0\0\0\0\0\0{broken}", "is not a readable .safetensors checkpoint"),
        (b"\x08\0\0\0\0\0\0\0{}      ", "holds no arrays"),
    ],
)
def test_damaged_files_are_named(tmp_path, content, message):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.npz .*{message}|a\.npz {message}"):
        files.read(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            b"{'descr': '<f4', 'fortran_order': False, 'shape': (100000000000000,)}\n",
            "is not a readable .npz checkpoint: Unable to allocate",
        ),
        (b"{'descr': ((((", "is not a readable .npz checkpoint: "),
    ],
)
def test_damaged_headers_of_arrays_are_named(tmp_path, header, message):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        start = b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little")
        archive.writestr("a.npy", start + header)
    with pytest.raises(UserError, match=rf"a\.npz .*{message}"):
        files.read(tmp_path / "a.npz")


def test_one_array_of_several_names_has_all_of_them(tmp_path):
    # As safetensors.torch.save_model writes modules that share parameters.
    save_file({"a": A}, tmp_path / "a.safetensors", {"b": "a", "format": "pt"})
    same(files.read(tmp_path / "a.safetensors"), {"a": A, "b": A})


def test_numbers_that_numpy_lacks_are_refused(tmp_path):
    header = b'{"a":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]}}'
    content = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="a holds F8_E4M3 numbers: give .*float32"):
        files.read(tmp_path / "a.safetensors")


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_file_that_is_cut_off_is_named(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    if kind == "npz":
        np.savez(path, a=np.ones(999))
    else:
        save_file({"a": np.ones(999)}, path)
    path.write_bytes(path.read_bytes()[:-700])
    with pytest.raises(UserError, match=rf"a\.{kind} is not a readable \.{kind} check"):
        files.read(path)


def test_other_archives_are_not_taken_for_weights(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("weights/model.safetensors", b"")
    with pytest.raises(UserError, match=r"an archive of weights/model.safetensors"):
        files.read(tmp_path / "a.zip")


def test_pickled_content_is_not_run(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([{}], dtype=object))
    with pytest.raises(UserError, match="not a readable"):
        files.read(tmp_path / "a.npz")


def test_empty_folder_says_what_to_give(tmp_path):
    with pytest.raises(UserError, match="holds no weights .*: give the workdir of a"):
        files.read(tmp_path)
