"""Files of flax.serialization, and names of the Flax classes of transformers 4."""

import json

import flax.serialization
import jax
import ml_dtypes
import msgpack
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file

from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.weights.formats import files, flax_file

A = np.arange(6, dtype=np.float32).reshape(2, 3)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 8,
}
TEXT = {key: SIZES[key] for key in list(SIZES)[:4]} | {"vocab_size": 50}
BIAS = {"use_relative_position_bias": True, "use_mask_token": True}
# Class and values of its config; the prefix is that of PyTorch and of Flax.
NETWORKS = {
    "ViTModel": ("ViT", {}),
    "ViTForImageClassification": ("ViT", {"num_labels": 3}),
    "CLIPModel": ("CLIP", None),
    "BeitForImageClassification": ("Beit", BIAS | {"num_labels": 3}),
    "Dinov2Model": ("Dinov2", {"mlp_ratio": 3, "use_swiglu_ffn": True}),
    "Dinov2ForImageClassification": ("Dinov2", {"mlp_ratio": 2, "num_labels": 3}),
}


def to_flax(name, value):
    """Renames an array as `rename_key_and_reshape_tensor` of transformers 4.55 does."""
    *path, leaf = name.split(".")
    if leaf == "weight":
        if path[-1] in ("token_embedding", "position_embedding"):
            leaf = "embedding"
        elif value.ndim == 1:
            leaf = "scale"
        else:
            leaf = "kernel"
            value = value.T if value.ndim == 2 else value.transpose(2, 3, 1, 0)
    return "/".join([*path, leaf]), value


@pytest.mark.parity
@pytest.mark.parametrize("kind", NETWORKS)
def test_flax_files_of_transformers_have_the_parameters_of_their_safetensors(
    tmp_path, kind
):
    from import_timm import import_timm

    import_timm()  # transformers imports torchvision, as timm does.
    transformers = pytest.importorskip("transformers", reason="extra parity")
    name, values = NETWORKS[kind]
    values = (
        {"vision_config": SIZES, "text_config": TEXT, "projection_dim": 20}
        if values is None
        else SIZES | values
    )
    config = getattr(transformers, f"{name}Config")(**values)
    getattr(transformers, kind)(config).save_pretrained(tmp_path / "torch")
    arrays = load_file(tmp_path / "torch/model.safetensors")
    rng = np.random.default_rng(0)  # Also where networks begin with zeros or ones.
    arrays = {
        k: np.asarray(a + rng.normal(size=a.shape), np.float32)
        for k, a in arrays.items()
    }
    save_file(arrays, tmp_path / "torch/model.safetensors")
    flat = dict(to_flax(*item) for item in arrays.items())

    def write(folder, content):
        (tmp_path / folder).mkdir()
        for file, value in content.items():
            (tmp_path / folder / file).write_bytes(value)
        config = (tmp_path / "torch/config.json").read_bytes()
        (tmp_path / folder / "config.json").write_bytes(config)

    dump = lambda part: flax.serialization.to_bytes(unflatten_dict(part, sep="/"))
    write("whole", {"flax_model.msgpack": dump(flat)})
    shards = {f"flax_model-0000{i + 1}-of-00002.msgpack": {} for i in range(2)}
    for i, item in enumerate(flat.items()):
        list(shards.values())[i % 2].update([item])
    places = {name: file for file, part in shards.items() for name in part}
    index = json.dumps({"metadata": {}, "weight_map": places}).encode()
    parts = {file: dump(part) for file, part in shards.items()}
    write("shards", parts | {"flax_model.msgpack.index.json": index})
    write("safe", {})
    save_file(
        {k.replace("/", "."): np.ascontiguousarray(a) for k, a in flat.items()},
        tmp_path / "safe/model.safetensors",
        {"format": "flax"},
    )

    wanted = weights.open_pretrained(tmp_path / "torch", with_task=True)
    for folder in ("whole", "shards", "safe"):
        found = weights.open_pretrained(tmp_path / folder, with_task=True)
        assert (found.options, found.format) == (wanted.options, wanted.format)
        for ours, theirs in (
            (found.params, wanted.params),
            (found.task_params, wanted.task_params),
        ):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6),
                ours,
                theirs,
            )
    assert bool(found.task_params) == (kind == "CLIPModel")


def test_parameters_of_this_project_in_a_flax_file_are_read(tmp_path):
    model = models.create(
        "Ti/8",
        width=32,
        depth=1,
        num_heads=2,
        mlp_dim=48,
        image_size=(16, 16),
        num_classes=3,
    )
    params = jax.tree.map(np.asarray, model.init(jax.random.key(0)))
    (tmp_path / "a.msgpack").write_bytes(flax.serialization.to_bytes(params))
    found = weights.open_pretrained(tmp_path / "a.msgpack")
    assert found.format == "google"
    wanted, found = (flatten_dict(p, sep="/") for p in (params, found.params))
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_numbers_of_all_types_and_split_arrays_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 8)
    brain = np.array([0.1, 3.0], ml_dtypes.bfloat16)
    tree = {"a": {"b": A, "c": brain}, "step": 3, "none": None, "scale": np.float32(2)}
    (tmp_path / "a.msgpack").write_bytes(flax.serialization.msgpack_serialize(tree))
    flat = files.read(tmp_path).flat
    assert flat.keys() == {"a/b", "a/c", "step", "scale"}
    np.testing.assert_array_equal(flat["a/b"], A)
    np.testing.assert_array_equal(flat["a/c"], brain.astype(np.float32))
    assert (flat["step"], flat["scale"]) == (3, 2)


def array(shape, dtype, content, code=1):
    return {"a": msgpack.ExtType(code, msgpack.packb((shape, dtype, content)))}


def nested(depth):
    return b"\x81\xa1a" * depth + b"\1"


def shared(count):
    """A map whose entries are few bytes each, and many Python objects."""
    level = msgpack.packb({f"{i:x}": {} for i in range(4096)})
    head = b"\xde" + count.to_bytes(2, "big")
    return head + b"".join(msgpack.packb(f"{i:x}") + level for i in range(count))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (flax.serialization.to_bytes({"a": A})[:-3], "Unpack failed: incomplete input"),
        (flax.serialization.to_bytes({"a": A}) + b"\1", "extra data"),
        (
            msgpack.packb(array((2, 3), "float32", bytes(20))),
            r"a of shape \[2, 3\] has 5",
        ),
        (
            msgpack.packb(array((2, -3), "float32", bytes(24))),
            r"a of shape \[2, -3\] has 6",
        ),
        (msgpack.packb(array((0, 1 << 40), "int8", b"")), r"a of shape \[0, 10995"),
        (msgpack.packb(array((1 << 40, 1 << 40), "int8", b"a")), "a of shape"),
        (msgpack.packb(array((1.0,), "int8", b"a")), r"a of shape \[1.0\]"),
        (msgpack.packb(array((1,) * 9, "int8", b"a")), "exceeds max_array_len"),
        (msgpack.packb(array((1,), "object", bytes(8))), "a holds object numbers"),
        (msgpack.packb(array((1,), "V8", bytes(8))), "a holds V8 numbers"),
        (
            msgpack.packb(array((1,), "float32", bytes(4), code=2)),
            "a is of type ExtType, not",
        ),
        (msgpack.packb({"a": "text"}), "a is of type str, not an array"),
        (msgpack.packb({"a": [1.0, 2.0]}), "a is of type list, not an array"),
        (msgpack.packb({"a": {b"b": 1}}), "a has the key b'b', not a name"),
        (msgpack.packb({"a" * 300: 1}), "exceeds max_str_len"),
        (msgpack.packb({"a": {"__msgpack_chunked_array__": True}}), "shape"),
        (b"\xdf\xff\xff\xff\xff\xa1a", "exceeds max_map_len"),
        (b"\x81\xa1a\xc9\xff\xff\xff\xff\1", "exceeds max_ext_len|incomplete"),
        (nested(33), "nested 32 levels deep"),
        (nested(1500), "is not a readable .msgpack checkpoint: "),
        (shared(60), "more than 200,000 entries"),
    ],
)
def test_damaged_and_malicious_files_end_in_one_line(tmp_path, content, message):
    path = tmp_path / "flax_model.msgpack"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        files.read(path)
    line = str(error.value)
    assert line.startswith(f"{path} is not a readable .msgpack checkpoint: ")
    assert "\n" not in line


def test_kernels_of_unknown_layers_and_doubled_names_are_refused(tmp_path):
    patches = "vit/embeddings/patch_embeddings/projection/kernel"
    kernel = np.ones((8, 8, 3, 32), np.float32)
    for more, message in (
        ({"vit/layer/kernel": np.ones((2, 3, 5))}, r"layer.kernel has shape \(2, 3, 5"),
        ({"a/scale": A, "a/embedding": A}, "several arrays of one name"),
    ):
        tree = unflatten_dict({patches: kernel} | more, sep="/")
        (tmp_path / "a.msgpack").write_bytes(flax.serialization.to_bytes(tree))
        with pytest.raises(UserError, match=message):
            files.read(tmp_path / "a.msgpack")
    assert flax_file.torch_names({"a/kernel": A}).keys() == {"a/kernel"}
