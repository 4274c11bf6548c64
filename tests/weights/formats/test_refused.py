"""Networks that are not ours are refused by what they have, before anything computes.

Files are made by hand; test_timm_registry.py and test_torch_parity.py make them with the
libraries themselves.
"""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from trees import checkpoint, encoder, random_flat, save

from vit_jax import cli, convert, weights
from vit_jax.errors import UserError
from vit_jax.weights.formats.registry import WRITERS

BLOCK = "blocks.0"
LAYER = "vit.encoder.layer.0"
ARCHITECTURES = {
    "vit_pe_core_tiny_patch16_384": "rotary position embeddings from 1 on are not",
    "vit_base_patch16_sapiens2": "key heads that several query heads share are not",
    "vit_relpos_base_patch16_rpn_224": "post-norm beside relative position biases is",
    "vit_so150m_patch16_reg4_map_256": "register tokens of such a network are not",
    "vit_of_tomorrow_patch16_224": "not an architecture of timm that is known to",
}


def floats(*shape):
    return np.random.default_rng(7).normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Arrays and config of timm's and Hugging Face's format; width 12, 2 blocks."""
    made = {}
    for name in ("timm", "hf"):
        folder = tmp_path_factory.mktemp(name)
        WRITERS[name].write(checkpoint(encoder(activation="gelu")), folder)
        config = (folder / "config.json").read_text()
        made[name] = load_file(folder / "model.safetensors"), config
    return made


@pytest.fixture
def refusal(folders, tmp_path):
    """Function that changes a folder and returns the line that refuses to open it."""

    def open_changed(name, change):
        arrays, config = dict(folders[name][0]), json.loads(folders[name][1])
        change(arrays, config)
        save_file(arrays, tmp_path / "model.safetensors")
        if config:
            (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError) as error:
            weights.open_pretrained(tmp_path)
        line = str(error.value)
        for word in ("damaged", "KeyError", "init.allow_mismatch", "\n"):
            assert word not in line
        return line

    return open_changed


def adds(name, *shape):
    return lambda arrays, config: arrays.update({name: floats(*shape)})


def removes(*names):
    def remove(arrays, config):
        for name in names:
            del arrays[name]

    return remove


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_no_parameter_tells_is_told_from_the_architecture(refusal, architecture):
    line = refusal("timm", lambda a, c: c.update(architecture=architecture))
    assert line.startswith(f"architecture={architecture!r}: ")
    assert re.search(ARCHITECTURES[architecture], line)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            adds(f"{BLOCK}.attn.rel_pos.mlp.fc1.weight", 2),
            "biases of such a network (rel_pos) are not supported",
        ),
        (adds("rope.freqs", 2, 2), "rope.freqs is not supported"),
        (adds(f"{BLOCK}.mlp.w12.weight", 20, 12), "gated MLPs (SwiGLU) of such a file"),
        *(
            (
                lambda a, c, name=name: (a.update({name: floats(12)}), c.clear()),
                f"{name} is of a network that its parameters do not determine: keep",
            )
            for name in (
                "norm_pre.weight",
                f"{BLOCK}.attn.q_norm.weight",
                f"{BLOCK}.attn.q_bias",
                f"{BLOCK}.mlp.norm.weight",
                f"{BLOCK}.mlp.fc1_g.weight",
                "rope.freqs",
            )
        ),
        (
            lambda a, c: (
                c.update(architecture="vit_base_patch16_rope_224"),
                c.pop("model_args"),
            ),
            "pos_embed is in the file, and config.json says that the network has no",
        ),
        (
            lambda a, c: c.update(architecture="vit_base_patch16_clip_224"),
            "norm_pre.weight is missing, which config.json says",
        ),
        (
            adds(f"{BLOCK}.mlp.fc2.weight", 12, 10),
            "a gated MLP (10 of 20 features) is not supported",
        ),
        (
            removes(f"{BLOCK}.norm1.bias"),
            "a norm without bias (RMSNorm) is not supported",
        ),
        (
            removes("norm.weight", "norm.bias"),
            "norm.weight is missing: give the whole file",
        ),
        (adds("patch_embed.proj.weight", 12, 3, 16, 8), "patch (16, 8) is not square"),
        (adds(f"{BLOCK}.attn.gate", 12), "blocks.0.attn.gate is not supported"),
        (removes(f"{BLOCK}.mlp.fc1.weight"), "blocks.0.mlp.fc1.weight is missing"),
        (removes(f"{BLOCK}.attn.qkv.weight"), "blocks.0.attn.qkv.weight is missing"),
        (removes("pos_embed"), "pos_embed is missing, and no config.json says"),
        (
            lambda a, c: (a.pop("pos_embed"), c.clear()),
            "pos_embed is missing, and no config.json says",
        ),
        (
            lambda a, c: c["model_args"].update(attn_layer="diff"),
            "attn_layer='diff' in model_args is not supported",
        ),
        (
            lambda a, c: a.update({f"{BLOCK}.norm1.weight": np.ones(12, np.int32)}),
            "blocks.0.norm1.weight holds int32 numbers, as quantised weights do",
        ),
        (
            lambda a, c: a.update({"pos_embed": np.ones((1, 10, 12), np.int8)}),
            "pos_embed holds int8 numbers",
        ),
    ],
)
def test_what_timms_network_has_and_ours_lacks_is_named(refusal, change, message):
    assert message in refusal("timm", change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda a, c: c.update(model_type="dinov2"),
            "model_type='dinov2' in config.json is not one of vit, deit, vit_msn",
        ),
        (
            lambda a, c: c.update(hidden_act="silu"),
            "hidden_act='silu' in config.json is not one of gelu, ",
        ),
        (adds(f"{LAYER}.gate", 12), "encoder.layer.0.gate is not supported"),
        (
            adds("vit.embeddings.register_tokens", 1, 4, 12),
            "embeddings.register_tokens is not supported",
        ),
        (
            removes("vit.embeddings.position_embeddings"),
            "embeddings.position_embeddings is missing",
        ),
        (removes("vit.embeddings.cls_token"), "embeddings.cls_token is missing"),
        (
            removes(f"{LAYER}.intermediate.dense.weight"),
            "encoder.layer.0.intermediate.dense.weight is missing",
        ),
        (
            removes(f"{LAYER}.attention.attention.query.weight"),
            "encoder.layer.0.attention.attention.query.weight is missing",
        ),
        (removes("classifier.bias"), "classifier.bias is missing"),
        (
            adds(f"{LAYER}.attention.attention.query.weight", 24, 12),
            "heads of 24 features in all beside a width of 12 are not supported",
        ),
        (
            lambda a, c: a.update({f"{LAYER}.output.dense.bias": np.ones(12, int)}),
            "encoder.layer.0.output.dense.bias holds int64 numbers",
        ),
    ],
)
def test_what_transformers_network_has_and_ours_lacks_is_named(
    refusal, change, message
):
    assert message in refusal("hf", change)


def rope(arrays, config):
    removes("pos_embed")(arrays, config)
    config.clear()


def two_lambdas(arrays, config):
    adds(f"{LAYER}.lambda_1", 12)(arrays, config)
    config.clear()


def no_positions(arrays, config):
    removes("vit.embeddings.position_embeddings")(arrays, config)
    config.clear()


@pytest.mark.parametrize(
    ("library", "change"),
    [("timm", rope), ("hf", two_lambdas), ("hf", no_positions)],
    ids=["rotary or BEiT of timm", "BEiT", "BEiT without positions"],
)
def test_bare_files_of_other_networks_ask_for_their_config(refusal, library, change):
    assert "keep its config.json beside it" in refusal(library, change)


@pytest.mark.parametrize("library", ["timm", "hf"])
@pytest.mark.parametrize(
    "stated", [{"model_type": "convnext"}, {"architecture": "swinv2_cr_tiny_224"}]
)
def test_a_network_that_no_reader_knows_is_named(refusal, library, stated):
    def change(arrays, config):
        arrays.clear()
        arrays["stages.0.layers.0.dwconv.weight"] = floats(4, 1, 7, 7)
        config.clear()
        config.update(stated)

    ((key, value),) = stated.items()
    line = refusal(library, change)
    assert f"{key}={value!r} in config.json" in line
    assert "none of the known formats" not in line


@pytest.mark.parametrize(
    ("config", "rows", "message"),
    [
        (
            {"pooler_act": "gelu"},
            12,
            "pooler_act='gelu' in config.json is not supported",
        ),
        ({}, 8, "a pooler of 8 features (pooler_output_size) is not supported"),
    ],
)
def test_a_pooler_that_is_not_ours_is_refused(refusal, config, rows, message):
    def change(arrays, stated):
        for leaf in ("weight", "bias"):
            del arrays[f"classifier.{leaf}"]
        arrays["vit.pooler.dense.weight"] = floats(rows, 12)
        arrays["vit.pooler.dense.bias"] = floats(rows)
        stated.update(config)

    assert message in refusal("hf", change)


def test_another_poolers_activation_does_not_matter_beside_a_classifier(
    folders, tmp_path
):
    arrays, config = folders["hf"]
    save_file(
        arrays | {"vit.pooler.dense.weight": floats(12, 12)},
        tmp_path / "model.safetensors",
    )
    config = json.loads(config) | {"pooler_act": "gelu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not weights.open_pretrained(tmp_path).options["representation_layer"]


def test_attention_without_biases_is_read_as_zeros(folders, tmp_path):
    arrays, config = folders["hf"]
    kept = {
        name: value
        for name, value in arrays.items()
        if not name.endswith(("query.bias", "key.bias", "value.bias"))
    }
    save_file(kept, tmp_path / "model.safetensors")
    config = json.loads(config) | {"qkv_bias": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = weights.open_pretrained(tmp_path)
    assert found.notes == ("biases of key, query, value: none in the file, so zeros",)
    attention = found.params["Transformer"]["encoderblock_1"]
    for part in ("query", "key", "value"):
        bias = attention["MultiHeadDotProductAttention_1"][part]["bias"]
        np.testing.assert_array_equal(bias, np.zeros((3, 4), np.float32))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "embedding/kernel",
            np.ones((16, 8, 3, 12), np.float32),
            r"patch \(16, 8\) is not square",
        ),
        ("head/kernel", np.ones((12, 7), np.int8), "head/kernel holds int8 numbers"),
        (
            "Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel",
            None,
            "encoderblock_0/MlpBlock_3/Dense_0/kernel is missing",
        ),
    ],
)
def test_npz_files_of_other_networks_are_refused(tmp_path, name, value, message):
    flat = random_flat(encoder())
    if value is None:
        del flat[name]
    else:
        flat[name] = value
    with pytest.raises(UserError, match=message):
        weights.open_pretrained(save(tmp_path / "a.npz", flat))


def test_the_first_version_of_big_visions_resnets_is_refused(tmp_path):
    flat = {
        "params/conv_root/kernel": floats(7, 7, 3, 64),
        "params/gn_root/scale": floats(64),
        "params/block1/unit1/conv1/kernel": floats(1, 1, 64, 64),
        "params/block1/unit1/gn_proj/scale": floats(256),
    }
    message = r"norms behind the convolutions \(ResNet V1, .*\) are not supported"
    with pytest.raises(UserError, match=message):
        weights.open_pretrained(save(tmp_path / "a.npz", flat))


def test_a_part_of_the_network_that_is_left_over_is_not_offered_to_be_ignored(tmp_path):
    model = encoder()
    flat = random_flat(model)
    flat["Transformer/norm_pre/scale"] = np.ones(12, np.float32)
    with pytest.raises(UserError, match="norm_pre/scale is left over$"):
        weights.load(save(tmp_path / "a.npz", flat), model)
    del flat["Transformer/norm_pre/scale"]
    flat["teacher/scale"] = np.ones(12, np.float32)
    with pytest.raises(
        UserError, match="teacher/scale is left over; .* config.init.allow_mismatch$"
    ):
        weights.load(save(tmp_path / "a.npz", flat), model)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_converting_refuses_what_is_not_finite(tmp_path, value):
    flat = random_flat(encoder())
    flat["head/kernel"][3, 2] = value
    source = save(tmp_path / "a.npz", flat)
    words = ["--model", str(source), "--to=timm", "--out", str(tmp_path / "out")]
    with pytest.raises(UserError, match="a.npz: head/kernel holds NaN or infinite"):
        convert.main(cli.parse(convert.parser(), words))
    assert list(tmp_path.iterdir()) == [source]
