"""`load_flax`, `create_flax` and `load_preprocess`: ordinary modules, dicts and functions."""

import pathlib
import pickle
import sys
import warnings

import flax.linen as nn
import flax.serialization
import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TINY, run_python, write_weights
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

import vit_jax
from vit_jax.data.preprocess import Preprocess
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.errors import UserError
from vit_jax.models.flax_network import FlaxNetwork
from vit_jax.weights.formats import files

SIZES = TINY | {"variant": "Ti/8", "depth": 2, "num_classes": 3, "image_size": (16, 24)}
RNG = np.random.default_rng(0)
PHOTOGRAPHS = [RNG.integers(0, 256, (31 + i, 43, 3), np.uint8) for i in range(5)]
IMAGES = jnp.asarray(RNG.standard_normal((2, 16, 24, 3), np.float32))


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The file of a small network of three classes for images of 16x24 pixels."""
    path = tmp_path_factory.mktemp("flax") / "weights.safetensors"
    how = Preprocess((16, 24), mean=(0.4, 0.5, 0.6), crop_fraction=0.875)
    write_weights(path, "abc", how, **SIZES)
    return str(path)


@pytest.fixture(scope="module")
def network(weights):
    """The module and parameters, with stochastic depth."""
    return vit_jax.load_flax(weights, drop_path_rate=0.5, tell=str)


def test_the_module_computes_what_the_model_does(weights, network):
    module, params = network
    model = vit_jax.load_model(weights, tell=str)
    expected = model.apply(model.params, IMAGES)
    outputs = module.apply({"params": params}, IMAGES)
    assert outputs.keys() == {"logits", "pre_logits"}
    jax.tree.map(np.testing.assert_array_equal, outputs, expected)
    how = {"train": True, "rngs": {"dropout": jax.random.key(0)}}
    drawn = module.apply({"params": params}, IMAGES, **how)["logits"]
    assert abs(drawn - outputs["logits"]).max() > 1e-3
    tokens = module.apply({"params": params}, IMAGES, classify=False)
    assert tokens.shape == (2, 7, 12)
    (features,) = module.model.layer_features(params, IMAGES, layers=(0,))
    assert features.shape == (2, 2, 3, 12)
    with pytest.raises(UserError, match=r"rngs=.*key=KEY"):
        model.apply(model.params, IMAGES, **how)
    larger, params = vit_jax.load_flax(weights, num_classes=7, image_size=32, tell=str)
    images = jnp.zeros((1, 32, 32, 3))
    assert larger.apply({"params": params}, images)["logits"].shape == (1, 7)


def test_what_flax_and_jax_have_works_on_the_module(network, tmp_path):
    module, params = network
    wide = {"width": 240}
    table = module.tabulate(jax.random.key(0), IMAGES, console_kwargs=wide)
    assert "encoderblock_1" in table and "FlaxNetwork" in table

    def logits(params, images):
        return module.apply({"params": params}, images)["logits"]

    expected = logits(params, IMAGES)
    close = {"rtol": 1e-5, "atol": 1e-5}
    again = nn.jit(FlaxNetwork)(module.model).apply({"params": params}, IMAGES)
    np.testing.assert_allclose(again["logits"], expected, **close)
    each = jax.vmap(lambda image: logits(params, image[None])[0])(IMAGES)
    np.testing.assert_allclose(each, expected, **close)

    def total(params, images, function=logits):
        return function(params, images).sum()

    grads = jax.grad(total, argnums=(0, 1))(params, IMAGES)
    assert grads[1].shape == IMAGES.shape and abs(grads[1]).max() > 0
    saved = jax.grad(lambda *args: total(*args, jax.checkpoint(logits)), (0, 1))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **close),
        saved(params, IMAGES),
        grads,
    )
    read = flax.serialization.from_bytes(params, flax.serialization.to_bytes(params))
    jax.tree.map(np.testing.assert_array_equal, read, params)
    ocp.save(tmp_path / "saved", params)
    read = ocp.load(tmp_path / "saved", params)
    jax.tree.map(np.testing.assert_array_equal, read, params)

    class Twice(nn.Module):  # As a part of another module.
        @nn.compact
        def __call__(self, images):
            features = FlaxNetwork(module.model, name="backbone")(images)
            return nn.Dense(2, name="new")(features["pre_logits"])

    variables = jax.eval_shape(Twice().init, jax.random.key(0), IMAGES)
    wanted = jax.tree.map(lambda x: x.shape, params)
    assert jax.tree.map(lambda x: x.shape, variables["params"]["backbone"]) == wanted


def test_initial_parameters_are_those_of_the_model():
    key = jax.random.key(3)
    for more in ({"init": "simmim"}, {"scan": True}):
        keys = {k: v for k, v in SIZES.items() if k != "variant"} | more
        module, params = vit_jax.create_flax("Ti/8", key=key, **keys)
        initial = jax.jit(module.init)(key, IMAGES[:1])["params"]
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), initial, params
        )
    assert "encoderblock" in params["Transformer"]
    outputs = module.apply({"params": params}, IMAGES)
    separate = vit_jax.create_model("Ti/8", **keys | {"scan": False})
    expected = separate.apply(separate.init(key), IMAGES)
    np.testing.assert_allclose(outputs["logits"], expected["logits"], atol=1e-5)


def test_running_means_are_a_collection(monkeypatch):
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[1] / "docs/examples")
    keys = {"width": 5, "depth": 1, "num_classes": 3, "image_size": (16, 24)}
    module, params = vit_jax.create_flax("conv_mixer:ConvMixerConfig", **keys)
    variables = {"batch_stats": params.pop("batch_stats"), "params": params}
    outputs, changed = module.apply(
        variables, IMAGES, train=True, mutable=["batch_stats"]
    )
    assert outputs["logits"].shape == (2, 3)
    shapes = jax.tree.map(jnp.shape, variables["batch_stats"])
    assert jax.tree.map(jnp.shape, changed["batch_stats"]) == shapes
    drawn = jax.eval_shape(module.init, jax.random.key(0), IMAGES)
    assert drawn.keys() == variables.keys()
    sys.modules.pop("conv_mixer")


def test_the_dtype_is_that_of_the_network_or_a_warning_says_so(weights):
    for keys, of in (
        ({}, "bfloat16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "bfloat16"}, "float32"),
        ({"matmul_dtype": "bfloat16"}, "float32"),
    ):
        module, params = vit_jax.load_flax(weights, tell=str, **keys)
        params = jax.tree.map(lambda x: x.astype(of), params)  # noqa: B023
        images = jnp.asarray(IMAGES, of)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = jax.make_jaxpr(module.apply)({"params": params}, images)
            lines = [str(w.message) for w in warned]
            expected = jax.make_jaxpr(module.model.apply)(params, images)
        silent = of == "float32" or keys.get("dtype") == of
        wanted = [] if silent else ["params", "images"]
        assert [line.split()[0] for line in lines] == wanted
        assert all("dtype='bfloat16'" in line for line in lines)
        assert str(found) == str(expected)


def test_parameters_are_put_where_they_are_to_lie(weights, network):
    module, params = network
    mesh = meshes.create(meshes.MeshConfig(data=4, fsdp=2))
    whole = NamedSharding(mesh, PartitionSpec())
    kernel = ("Transformer", "encoderblock_0", "MlpBlock_3", "Dense_0", "kernel")

    def by_rules(shapes):
        axes = module.model.config.model_axes
        return sharding.parameters(shapes, mesh, axes, min_size=100)

    for shardings in (whole, by_rules, by_rules(params)):
        _, placed = vit_jax.load_flax(weights, shardings=shardings, tell=str)
        jax.tree.map(np.testing.assert_array_equal, placed, params)
        leaf = placed
        for name in kernel:
            leaf = leaf[name]
        split = () if shardings is whole else (None, "fsdp")
        assert leaf.sharding.spec == PartitionSpec(*split)
    stacked, found = vit_jax.load_flax(weights, shardings=whole, scan=True, tell=str)
    expected = module.apply({"params": params}, IMAGES)["logits"]
    outputs = jax.jit(stacked.apply)({"params": found}, IMAGES)
    np.testing.assert_allclose(outputs["logits"], expected, atol=1e-5)
    _, drawn = vit_jax.create_flax("Ti/8", image_size=16, depth=1, shardings=mesh)
    assert drawn["head"]["kernel"].sharding.spec == PartitionSpec(None, "fsdp")


def test_a_model_on_a_mesh_predicts_the_same(weights):
    mesh = meshes.create(meshes.MeshConfig(data=8))
    usual = vit_jax.load_model(weights, tell=str)
    spread = vit_jax.load_model(weights, mesh=mesh, tell=str)
    assert len(spread.params["cls"].sharding.device_set) == 8
    np.testing.assert_allclose(spread(PHOTOGRAPHS), usual(PHOTOGRAPHS), atol=1e-5)


def test_images_are_prepared_in_numpy_as_by_the_model(weights):
    preprocess = vit_jax.load_preprocess(weights, tell=str)
    expected = vit_jax.load_model(weights, tell=str).preprocess(PHOTOGRAPHS)
    prepared = preprocess(PHOTOGRAPHS)
    assert isinstance(prepared, np.ndarray) and prepared.dtype == np.float32
    np.testing.assert_allclose(prepared, expected, atol=1e-6)
    np.testing.assert_array_equal(preprocess(PHOTOGRAPHS[3]), prepared[3])
    pixels = preprocess.resize(PHOTOGRAPHS)
    assert pixels.dtype == np.uint8
    np.testing.assert_allclose(
        jax.jit(preprocess.normalize)(pixels), prepared, atol=1e-6
    )
    of_process = pickle.loads(pickle.dumps(preprocess))
    batches = grain.MapDataset.source(PHOTOGRAPHS).map(of_process).batch(5)
    np.testing.assert_array_equal(batches[0], prepared)
    larger = vit_jax.load_preprocess(weights, image_size=(24, 16), tell=str)
    assert larger(PHOTOGRAPHS[0]).shape == (24, 16, 3)
    sequences = vit_jax.load_preprocess(weights, max_tokens=9, tell=str)(PHOTOGRAPHS)
    assert sequences.pixels.shape == (5, 72, 8, 3)
    module, params = vit_jax.load_flax(weights, pool="token", tell=str)
    assert module.apply({"params": params}, sequences)["logits"].shape == (5, 3)


PROGRAM = """
import re, sys
import vit_jax
from vit_jax.distributed import mesh as meshes

def memory(name):
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(name + r":\\s+(\\d+)", file.read())[1])

small, large = sys.argv[1:]
mesh = meshes.create(meshes.MeshConfig(data=1, fsdp=2))
for load in (
    lambda place: vit_jax.load_flax(place, tell=str),
    lambda place: vit_jax.load_flax(place, shardings=mesh, tell=str),
    lambda place: vit_jax.load_model(place, tell=str),
):
    load(small)
    before = memory("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # Resets the peak.
    loaded = load(large)
    print(memory("VmHWM") - before)
    del loaded
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_needs_the_memory_of_the_file_once(tmp_path):
    paths = [tmp_path / "small.safetensors", tmp_path / "large.safetensors"]
    for path, width in zip(paths, (192, 768), strict=True):
        write_weights(path, "abc", **SIZES | {"width": width, "mlp_dim": 4 * width})
    size = path.stat().st_size
    assert size > 50e6
    flags = "--xla_force_host_platform_device_count=2"
    done = run_python("-c", PROGRAM, *paths, XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert int(line) < 1.5 * size, (line, size)  # Of two copies it would be 2.


def test_arrays_of_a_file_are_read_when_they_are_used(weights, network):
    tensors = files.read(weights)
    array = tensors.flat["head/kernel"]
    assert not array.flags.writeable
    copy = files.in_memory(array.T)
    files.release(array)
    np.testing.assert_array_equal(copy.T, array)
    assert copy.flags.c_contiguous and copy.flags.writeable
    np.testing.assert_array_equal(network[1]["head"]["kernel"], array)
