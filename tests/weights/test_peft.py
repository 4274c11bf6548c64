"""Low-rank updates of a run as an adapter of PEFT, and read again with their base."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file
from trees import checkpoint, encoder

from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.weights import Preprocess, Pretrained, export

D, R, ALPHA = 12, 2, 3.0
BLOCK = "Transformer/encoderblock_{}/"
ATTENTION = BLOCK + "MultiHeadDotProductAttention_1/"
SIZES = {ATTENTION + part: (D, D) for part in ("query", "value", "out")}
SIZES[BLOCK + "MlpBlock_3/Dense_0"] = (D, 20)
# Names of modules in transformers 5.
VIT = {"query": "attention.q_proj", "value": "attention.v_proj"}
VIT |= {"out": "attention.o_proj", "Dense_0": "mlp.fc1"}
DINOV3 = VIT | {"Dense_0": "mlp.up_proj"}
CLIP = {name: f"self_{module}" for name, module in VIT.items()}
CLIP |= {"out": "self_attn.out_proj", "Dense_0": "mlp.fc1"}
CLIP |= {part: f"self_attn.{part[0]}_proj" for part in ("query", "value")}
ROTARY = {"rope": "centered", "posemb": "none", "layer_scale_init": 0.1}
# A network: its options, the format of its base, where its blocks are, names there.
NETWORKS = {
    "vit": ({}, "hf", "layers", VIT),
    "dinov2": (
        {"mlp_dim": 24, "layer_scale_init": 0.1},
        "hf_dinov2",
        "encoder.layer",
        VIT,
    ),
    "dinov3": (ROTARY, "hf_dinov3", "model.layer", DINOV3),
    "ijepa": ({"pool": "gap"}, "hf_ijepa", "layers", VIT),
    "clip": ({"pre_norm": True}, "hf_clip", "encoder.layers", CLIP),
}


def made(blocks=(0, 1), patches=True, num_classes=0, **options):
    """Returns a base, and the factors of updates of some of its kernels."""
    model = encoder(**{"num_classes": num_classes, "activation": "gelu"} | options)
    base, sizes = checkpoint(model), {}
    for i in blocks:
        sizes |= {path.format(i): size for path, size in SIZES.items()}
    sizes |= {"embedding": (4 * 4 * 3, D)} if patches else {}
    rng, factors = np.random.default_rng(1), {}
    for path, (rows, columns) in sizes.items():
        columns = model.options["mlp_dim"] if path.endswith("Dense_0") else columns
        factors[f"{path}/a"] = rng.normal(size=(rows, R)).astype(np.float32)
        factors[f"{path}/b"] = rng.normal(size=(R, columns)).astype(np.float32)
    return base, factors


def run_of(base, factors, start, task="adapters", **changes):
    """Returns the weights of a run that added updates to a base."""
    flat = flatten_dict(base.params, sep="/")
    for path in {name.rpartition("/")[0] for name in factors}:
        change = factors[f"{path}/a"].astype(float) @ factors[f"{path}/b"]
        kernel = flat[f"{path}/kernel"]
        change = ALPHA / R * change.reshape(kernel.shape)
        flat[f"{path}/kernel"] = (kernel + change).astype(np.float32)
    return Pretrained(
        unflatten_dict(flat | changes, sep="/"),
        base.options,
        "workdir",
        "runs/made",
        Preprocess(base.options["image_size"], (0.1,) * 3, (0.4,) * 3, squash=True),
        task={"name": task, "rank": R, "alpha": ALPHA},
        task_params={"lora": unflatten_dict(factors, sep="/")},
        start=str(start),
    )


def written(run, folder):
    """Writes an adapter; returns its arrays, its config and the notes."""
    _, notes = export.export(run, "peft", folder)
    arrays = load_file(folder / "adapter_model.safetensors")
    return arrays, json.loads((folder / "adapter_config.json").read_text()), notes


def assert_equal(found, expected):
    found, expected = (flatten_dict(x, sep="/") for x in (found, expected))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("to", ["safetensors", "timm", "hf"])
def test_a_base_of_any_format_and_the_adapter_are_the_runs_network(to, tmp_path):
    base, factors = made()
    start = tmp_path / ("base.safetensors" if to == "safetensors" else "base")
    export.export(base, to, start)
    run = run_of(base, factors, start)
    _, config, notes = written(run, tmp_path / "adapter")
    assert notes == ["with its base, equal to the network of the run"]
    found = weights.open_pretrained(tmp_path / "adapter")
    assert_equal(found.params, run.params)
    assert found.preprocess == run.preprocess
    assert config["base_model_name_or_path"] == str(start)
    assert (config["r"], config["lora_alpha"], config["bias"]) == (R, ALPHA, "none")
    # Formats that join queries, keys and values are written once for transformers.
    usage = export.usage("peft", run, "adapter")
    assert ("vit_jax.convert --model=" in usage) == (to != "hf")
    compile(usage, "usage", "exec")


@pytest.mark.parametrize("name", NETWORKS)
def test_names_are_those_of_modules_in_transformers(name, tmp_path):
    options, to, blocks, names = NETWORKS[name]
    base, factors = made(patches=name == "vit", **options)
    export.export(base, to, tmp_path / "base")
    base = weights.open_pretrained(tmp_path / "base")  # As runs start from it.
    run = run_of(base, factors, tmp_path / "base")
    arrays, config, notes = written(run, tmp_path / "adapter")
    assert notes[-1] == "with its base, equal to the network of the run"
    layers = {f"{blocks}.{i}.{module}" for i in range(2) for module in names.values()}
    targets = {module.rpartition(".")[2] for module in names.values()}
    if name == "vit":
        layers.add("embeddings.patch_embeddings.projection")
        targets.add("projection")
    assert set(config["target_modules"]) == targets
    wanted = {f"base_model.model.{x}.lora_{ab}.weight" for x in layers for ab in "AB"}
    assert arrays.keys() == wanted
    first = f"base_model.model.{blocks}.0.{names['Dense_0']}.lora_"
    np.testing.assert_array_equal(
        arrays[f"{first}A.weight"], factors[BLOCK.format(0) + "MlpBlock_3/Dense_0/a"].T
    )
    hidden = base.options["mlp_dim"]
    assert arrays[f"{first}B.weight"].shape == (hidden, R)


def test_some_blocks_are_named_one_by_one(tmp_path):
    base, factors = made(blocks=(1,), patches=False)
    export.export(base, "hf", tmp_path / "base")
    run = run_of(base, factors, tmp_path / "base")
    _, config, _ = written(run, tmp_path / "adapter")
    assert config["target_modules"] == sorted(f"layers.1.{x}" for x in VIT.values())
    assert_equal(weights.open_pretrained(tmp_path / "adapter").params, run.params)


@pytest.mark.parametrize("distilled", [False, True])
def test_a_classifier_is_saved_whole(tmp_path, distilled):
    before, _ = made(num_classes=9, patches=False, distillation=distilled)
    export.export(before, "hf", tmp_path / "base")
    base, factors = made(num_classes=5, patches=False, distillation=distilled)
    run = run_of(base, factors, tmp_path / "base", task="lora")
    arrays, config, _ = written(run, tmp_path / "adapter")
    kind, heads, heads_here = "vit", ["classifier"], ["head"]
    if distilled:
        kind, heads = "deit", ["cls_classifier", "distillation_classifier"]
        heads_here = ["head", "head_dist"]
    assert sorted(config["modules_to_save"]) == heads
    for head in heads:
        assert arrays[f"base_model.model.{head}.weight"].shape == (5, D)
    assert f"base_model.model.{kind}.layers.0.attention.q_proj.lora_A.weight" in arrays
    # The base of the run is another network than its start, but for the classifier.
    found = weights.open_pretrained(tmp_path / "adapter").params
    for name in heads_here:
        assert_equal(found[name], run.params[name])
    assert "num_labels=5" in export.usage("peft", run, "adapter")


def test_what_an_adapter_cannot_hold_is_said(tmp_path):
    base, factors = made(patches=False)
    larger = checkpoint(encoder(num_classes=0, activation="gelu", image_size=(20, 20)))
    encoders = larger.params["Transformer"], base.params["Transformer"]
    whole = {
        name: each["posembed_input"] for name, each in zip("ab", encoders, strict=True)
    }
    merged = base.params | {"Transformer": encoders[1] | {"posembed_input": whole["a"]}}
    start = dataclasses.replace(larger, params=merged)
    export.export(start, "hf", tmp_path / "base")
    *_, notes = written(run_of(base, factors, tmp_path / "base"), tmp_path / "adapter")
    assert "pos_embedding" in notes[-1] and "--to=hf --resolution=12 " in notes[-1]
    # Without its base nothing is compared.
    run = run_of(base, factors, tmp_path / "gone")
    *_, notes = written(run, tmp_path / "other")
    assert notes[-1].startswith("not compared with the run's network: ")


def refused(run, message, folder):
    with pytest.raises(UserError, match=message) as error:
        export.export(run, "peft", folder / "adapter")
    assert "\n" not in str(error.value)
    assert not (folder / "adapter").exists()


def test_a_run_without_updates_or_base_is_refused(tmp_path):
    run = run_of(*made(patches=False), tmp_path / "base")
    without = dataclasses.replace(run, task_params={})
    refused(without, "runs/made has no low-rank updates", tmp_path)
    alone = dataclasses.replace(run, start="")
    refused(alone, "runs/made started from random parameters", tmp_path)
    other, _ = made(patches=False, pool="gap", class_token=True)
    other = dataclasses.replace(run, params=other.params, options=other.options)
    refused(other, "no network of transformers with adapters is equal to it", tmp_path)


def test_a_base_that_has_changed_is_refused(tmp_path):
    base, factors = made(patches=False)
    params = {k: x + 1 for k, x in flatten_dict(base.params, sep="/").items()}
    other = dataclasses.replace(base, params=unflatten_dict(params, sep="/"))
    export.export(other, "hf", tmp_path / "base")
    run = run_of(base, factors, tmp_path / "base")
    refused(run, "checkpoint=.*/base' with the updates is not the network", tmp_path)


def test_a_layer_that_transformers_joins_with_another_is_refused(tmp_path):
    swiglu = {"activation": "swiglu", "mlp_dim": 32, "layer_scale_init": 0.1}
    run = run_of(*made(patches=False, **swiglu), tmp_path / "base")
    refused(run, "MlpBlock_3/Dense_0 is a part of .*weights_in.weight", tmp_path)


@pytest.mark.parity
@pytest.mark.parametrize("name", NETWORKS)
def test_the_products_are_added_to_modules_of_transformers(name, tmp_path):
    """Adds the products as PEFT documents it, which is not installed everywhere."""
    torch = pytest.importorskip(
        "torch", reason="PyTorch is not installed: extra parity"
    )
    from import_timm import import_timm  # It imports PyTorch.

    import_timm()  # For torchvision, which transformers imports.
    transformers = pytest.importorskip("transformers", reason="extra parity")
    options, to, *_ = NETWORKS[name]
    base, factors = made(**options)
    export.export(base, to, tmp_path / "base")
    base = weights.open_pretrained(tmp_path / "base")
    run = run_of(base, factors, tmp_path / "base")
    arrays, config, _ = written(run, tmp_path / "adapter")
    network = transformers.AutoModel.from_pretrained(tmp_path / "base").eval()
    modules = dict(network.named_modules())
    layers = {key.removesuffix(".lora_A.weight") for key in arrays if "lora_A" in key}
    layers = {layer.removeprefix("base_model.model."): layer for layer in layers}
    ends = tuple(f".{target}" for target in config["target_modules"])
    assert layers.keys() == {x for x in modules if f".{x}".endswith(ends)}
    scale = config["lora_alpha"] / config["r"]
    for layer, key in layers.items():
        down, up = (
            arrays[f"{key}.lora_{x}.weight"].reshape(shape)
            for x, shape in (("A", (R, -1)), ("B", (-1, R)))
        )
        weight = modules[layer].weight
        weight.data += torch.tensor(scale * up @ down).reshape(weight.shape)
    model = models.create(**run.options)
    images = np.random.default_rng(2).normal(size=(3, *model.image_shape))
    images = images.astype(np.float32)
    expected = model.apply(run.params, jnp.asarray(images))["pre_logits"]
    with torch.no_grad():
        found = network(pixel_values=torch.tensor(images.transpose(0, 3, 1, 2)))
    tokens = found.last_hidden_state
    shown = tokens.mean(1) if name == "ijepa" else tokens[:, 0]
    shown = found.pooler_output if name == "clip" else shown
    np.testing.assert_allclose(shown, expected, atol=1e-4)


def test_passwords_of_addresses_are_not_written(tmp_path):
    base, factors = made()
    run = run_of(base, factors, "https://user:secret@127.0.0.1:9/base.safetensors")
    _, config, _ = written(run, tmp_path / "adapter")
    assert config["base_model_name_or_path"].startswith("https://")
    texts = json.dumps(config), export.usage("peft", run, "adapter")
    assert not any("secret" in text for text in texts)
