"""Networks that are not ours are refused by what they have, before anything computes.

Files are made by hand; test_timm_registry.py and test_torch_parity.py make them with the
libraries themselves. The last tables hold what a format has no place for.
"""

import json
import re

import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file
from trees import checkpoint, encoder, network, random_flat, save

from vit_jax import convert, weights
from vit_jax.command_line import cli
from vit_jax.errors import UserError
from vit_jax.weights import Preprocess, export
from vit_jax.weights.formats.registry import WRITERS

BLOCK = "blocks.0"
LAYER = "vit.encoder.layer.0"
BASE, ROPE, CLIP = (f"vit_base_patch16_{name}224" for name in ("", "rope_", "clip_"))


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
def opened(folders, tmp_path):
    """Function that changes the arrays and the config of a folder, and opens it.

    None as the value of an array removes it; a config of None removes the file.
    """

    def open_changed(name, arrays, config=()):
        arrays = {k: v for k, v in (folders[name][0] | arrays).items() if v is not None}
        save_file(arrays, tmp_path / "model.safetensors")
        if config is not None:
            config = json.loads(folders[name][1]) | dict(config)
            (tmp_path / "config.json").write_text(json.dumps(config))
        return weights.open_pretrained(tmp_path)

    return open_changed


def args(**changes):
    """Arguments that timm's config.json has instead of those of the folder."""
    sizes = {"img_size": [12, 12], "patch_size": 4, "embed_dim": 12, "depth": 2}
    return {"model_args": sizes | {"num_heads": 3, "mlp_ratio": 20 / 12} | changes}


# Changes of the arrays of a folder, and the line that refuses it.
REGISTERS = "embeddings.register_tokens"
CHANGED = {
    "timm": [
        ({f"{BLOCK}.attn.rel_pos.mlp.fc1.weight": floats(2)}, r"\(rel_pos\) are not"),
        ({"rope.freqs": floats(2, 2)}, "rope.freqs is not supported"),
        ({f"{BLOCK}.mlp.w12.weight": floats(20, 12)}, r"gated MLPs \(SwiGLU\) of"),
        ({f"{BLOCK}.mlp.fc2.weight": floats(12, 10)}, r"gated MLP \(10 of 20 features"),
        ({f"{BLOCK}.norm1.bias": None}, r"a norm without bias \(RMSNorm\) is not"),
        ({f"{BLOCK}.attn.gate": floats(12)}, "blocks.0.attn.gate is not supported"),
        ({f"{BLOCK}.mlp.fc1.weight": None}, "blocks.0.mlp.fc1.weight is missing"),
        ({f"{BLOCK}.attn.qkv.weight": None}, "blocks.0.attn.qkv.weight is missing"),
        ({"norm.weight": None, "norm.bias": None}, "norm.weight is missing: give the"),
        ({"pos_embed": None}, "pos_embed is missing, and no config.json says"),
        ({"pos_embed": np.ones((1, 10, 12), np.int8)}, "pos_embed holds int8 numbers"),
        ({f"{BLOCK}.norm1.weight": np.ones(12, int)}, "holds int64 numbers: give .*16"),
        ({"patch_embed.proj.weight": floats(12, 3, 16, 8)}, r"\(16, 8\) is not square"),
    ],
    "hf": [
        ({f"{LAYER}.gate": floats(12)}, "encoder.layer.0.gate is not supported"),
        ({f"vit.{REGISTERS}": floats(1, 4, 12)}, f"{REGISTERS} is not supported"),
        *(
            ({f"vit.{name}": None}, f"{name} is missing")
            for name in (
                "embeddings.position_embeddings",
                "embeddings.cls_token",
                "encoder.layer.0.intermediate.dense.weight",
                "encoder.layer.0.attention.attention.query.weight",
            )
        ),
        ({"classifier.bias": None}, "classifier.bias is missing"),
        (
            {f"{LAYER}.attention.attention.query.weight": floats(24, 12)},
            "heads with 24 features in total and a width of 12 are not supported",
        ),
        ({f"{LAYER}.output.dense.bias": np.ones(12, int)}, "bias holds int64 numbers"),
    ],
}
# The same without config.json: a file that does not show its network asks for it.
BARE = {
    "timm": [
        *(
            (
                {name: floats(12)},
                f"{name} belongs to a network that its parameters do not",
            )
            for name in (
                "norm_pre.weight",
                f"{BLOCK}.attn.q_norm.weight",
                f"{BLOCK}.attn.q_bias",
                f"{BLOCK}.mlp.norm.weight",
                f"{BLOCK}.mlp.fc1_g.weight",
                f"{BLOCK}.gamma_1",
                "rope.freqs",
            )
        ),
        ({"cls_token": None}, "without cls_token, it belongs to .*--architecture="),
        (
            {f"{BLOCK}.attn.qkv.bias": None},
            "without blocks.0.attn.qkv.bias, it belongs to",
        ),
        (
            {"norm.weight": None, "norm.bias": None},
            "no final norm, keep its config.json",
        ),
        (
            {"pos_embed": None},
            "pos_embed is missing.*keep its config.json in the same folder",
        ),
    ],
    "hf": [  # BEiT's.
        ({f"{LAYER}.lambda_1": floats(12)}, "keep its config.json in the same folder"),
        (
            {"vit.embeddings.position_embeddings": None},
            "keep its config.json in the same folder",
        ),
    ],
}
# Changes of config.json.
CONFIGS = {
    "timm": [
        # What no parameter tells is told from the architecture.
        *(
            ({"architecture": name}, f"architecture='{name}': .*{what}")
            for name, what in {
                "vit_pe_core_tiny_patch16_384": "rotary position embeddings from 1 on",
                "vit_base_patch16_sapiens2": "key heads that several query heads share",
                "vit_relpos_base_patch16_rpn_224": "post-norm together with relative position",
                "vit_so150m_patch16_reg4_map_256": "register tokens of such a network",
                "vit_of_tomorrow_patch16_224": "architecture of timm is not known",
            }.items()
        ),
        ({"architecture": ROPE, "model_args": {}}, "pos_embed is in the file, but con"),
        (
            {"architecture": CLIP},
            "norm_pre.weight is missing, although config.json says",
        ),
        (args(attn_layer="diff"), "attn_layer='diff' in model_args is not supported"),
        (
            args(num_heads=5),
            r"attn.qkv.weight has shape \(36, 12\), which does not fit",
        ),
        (
            args(act_layer="silu"),
            f"act_layer='silu' in the config.json of {BASE} is not",
        ),
        (
            args(global_pool="avgmax"),
            "global_pool='avgmax' .* not one of 'token', 'avg'",
        ),
        (
            args(global_pool="avg", pool_include_prefix=True),
            "pooling gap with pool_include_prefix=True and a class token is not",
        ),
        (args(num_heads="3"), "has a config.json, a header or"),
        ({"model_args": [3]}, "has a config.json, a header or"),
    ],
    "hf": [
        (
            {"model_type": "dinov2"},
            "model_type='dinov2' in .* is not one of vit, deit, ",
        ),
        (
            {"hidden_act": "silu"},
            "hidden_act='silu' in config.json is not one of gelu, ",
        ),
        (
            {"num_attention_heads": 5},
            r"query.weight has shape \(12, 12\), which does not",
        ),
        ({"id2label": ["a", "b"]}, "has a config.json, a header or"),
        ({"layer_norm_eps": "small"}, "has a config.json, a header or"),
        ({"image_size": "12"}, "has a config.json, a header or"),
    ],
}
UNREADABLE = [
    *((name, *row) for name, rows in CHANGED.items() for row in rows),
    *((name, a, m, None) for name, rows in BARE.items() for a, m in rows),
    *((name, {}, m, c) for name, rows in CONFIGS.items() for c, m in rows),
]


@pytest.mark.parametrize("row", UNREADABLE, ids=lambda row: f"{row[0]}: {row[2]}")
def test_what_a_network_has_and_ours_lacks_is_named(opened, row):
    library, arrays, message, *config = row
    with pytest.raises(UserError, match=message) as error:
        opened(library, arrays, *config)
    assert not re.search("damaged|KeyError|init.allow_mismatch|\n", str(error.value))


@pytest.mark.parametrize(
    "stated", [{"model_type": "convnext"}, {"architecture": "swinv2_cr_tiny_224"}]
)
def test_a_network_that_no_reader_knows_is_named(tmp_path, stated):
    arrays = {"stages.0.layers.0.dwconv.weight": floats(4, 1, 7, 7)}
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(stated))
    ((key, value),) = stated.items()
    with pytest.raises(UserError, match=f"{key}={value!r} in config.json") as error:
        weights.open_pretrained(tmp_path)
    assert "none of the known formats" not in str(error.value)


def pooler(rows):
    dense = "vit.pooler.dense"
    return {f"{dense}.weight": floats(rows, 12), f"{dense}.bias": floats(rows)}


def test_a_pooler_that_is_not_ours_is_refused_unless_a_classifier_stands_beside_it(
    opened,
):
    bare = {"classifier.weight": None, "classifier.bias": None}
    gelu = {"pooler_act": "gelu"}
    with pytest.raises(UserError, match="pooler_act='gelu' in config.json is not supp"):
        opened("hf", bare | pooler(12), gelu)
    with pytest.raises(UserError, match="a pooler with 8 features"):
        opened("hf", bare | pooler(8))
    assert not opened("hf", pooler(12), gelu).options["representation_layer"]


def test_attention_without_biases_is_read_as_zeros(opened):
    biases = {
        f"vit.encoder.layer.{i}.attention.attention.{part}.bias": None
        for i in range(2)
        for part in ("query", "key", "value")
    }
    found = opened("hf", biases, {"qkv_bias": False})
    assert found.notes == (
        "biases of key, query, value: not in the file, set to zeros",
    )
    attention = found.params["Transformer"]["encoderblock_1"]
    for part in ("query", "key", "value"):
        bias = attention["MultiHeadDotProductAttention_1"][part]["bias"]
        np.testing.assert_array_equal(bias, np.zeros((3, 4), np.float32))


@pytest.mark.parametrize(
    ("library", "array", "name", "problem"),
    [
        ("timm", "decoder.weight", "decoder.weight", "left over"),
        ("timm", "mask_token", "mask_token", "left over"),
        ("timm", "norm.bias", "Transformer/encoder_norm/bias", "missing"),
        ("hf", "decoder.weight", "decoder.weight", "left over"),
        ("hf", "vit.layernorm.bias", "Transformer/encoder_norm/bias", "missing"),
    ],
)
def test_what_is_left_over_or_missing_is_refused_unless_allowed(
    opened, tmp_path, library, array, name, problem
):
    opened(library, {array: floats(1, 1, 12) if problem == "left over" else None})
    model = encoder(activation="gelu")
    with pytest.raises(UserError, match=f"{name} is {problem}"):
        weights.load(tmp_path, model)
    loaded = weights.load(tmp_path, model, allow_mismatch=[f"^{name}$"])
    assert any(name == row.what and problem in row.action for row in loaded.rows)
    assert flatten_dict(loaded.params, sep="/").keys() == random_flat(model).keys()


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
    message = r"norms after the convolutions \(ResNet V1, .*\) are not supported"
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
        UserError, match="teacher/scale is left over; .*allow_mismatch$"
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


# What a format has no place for: options of a network, and the line that refuses it.
HYBRID = {"variant": "R26+S/32", "image_size": (32, 64)}
RECTANGLE = {"image_size": (8, 32)}  # As many patches as a square of 4x4.
SHARED_BIAS = {"posemb": "relative", "posemb_placement": "every"}
UNWRITABLE = {
    "timm": [
        (
            {"representation_layer": True},
            "representation_layer=True: timm .*--to=google",
        ),
        (
            {"posemb": "relative", "posemb_placement": "shared"},
            "=shared is supported by neither",
        ),
        (
            {"posemb_placement": "every"},
            "posemb=learned at posemb_placement=every is supported by",
        ),
        ({"layer_norm_eps": 1e-4}, "layer_norm_eps=0.0001: timm's config.json has"),
        (
            {"layer_norm_eps": 1e-5, "distillation": True},
            "layer_norm_eps=1e-05: timm's con",
        ),
        (
            HYBRID | {"stage_depths": (1, 1)},
            r"no hybrid with stage_depths=\(1, 1\), stem_",
        ),
        (HYBRID | {"stem_width": 32}, "timm has no hybrid with .* stem_width=32"),
        (
            {"activation": "swiglu", "layer_norm_eps": 1e-5},
            "activation='swiglu': timm has g",
        ),
        (
            {"num_register_tokens": 2, "distillation": True},
            "timm has no networks with both a distillation token",
        ),
        ({"pool": "token_gap"}, "pool='token_gap': timm's classifiers read"),
        (
            {"variant": "R50x1", "stage_depths": (3, 24), "stem_width": 32},
            r"timm has no BiT ResNet with stage_depths=\(3, 24\)",
        ),
    ],
    "hf": [
        ({"pool": "gap", "num_classes": 7}, "pool='gap': ViTModel .*--to=timm"),
        ({"pool": "map", "num_classes": 7}, "pool='map': ViTModel .*--to=timm"),
        ({"pool": "token_gap"}, "pool='token_gap': ViTModel of transformers"),
        (
            {"representation_layer": True, "num_classes": 7},
            "representation_layer=True: .*--to=google",
        ),
        (HYBRID, "stem_width=64: ViTModel .*--to=timm, --to=google"),
        (
            SHARED_BIAS,
            "posemb_placement=every is supported by neither timm nor Hugging",
        ),
        ({"num_register_tokens": 2}, "num_register_tokens=2: ViTModel of transformers"),
        ({"activation": "swiglu"}, "activation='swiglu': ViTModel of"),
        (
            {"variant": "R50x1", "stage_depths": (1,), "stem_width": 32},
            "variant='R50x1': ViTModel of transformers does not",
        ),
    ],
    "google": [
        ({"num_register_tokens": 2}, "num_register_tokens=2: Google's code"),
        ({"activation": "swiglu"}, "activation='swiglu': Google's code does not"),
        ({"pool": "token_gap"}, "pool='token_gap': Google's code does not"),
        (RECTANGLE, "a grid of 2x8: a reader of Google's npz assumes a square"),
    ],
    "dino": [(RECTANGLE, "a grid of 2x8: the code of facebookresearch assumes")],
    "hf_clip": [
        (RECTANGLE | {"pre_norm": True}, "a grid of 2x8: CLIPVisionModel of tran"),
        (RECTANGLE | {"pool": "map"}, "a grid of 2x8: SiglipVisionModel of trans"),
    ],
    "hf_beit": [
        (RECTANGLE, "a grid of 2x8: BeitModel of transformers assumes"),
        (
            RECTANGLE | {"posemb": "none", "relative_bias": "every"},
            "a grid of 2x8: Beit",
        ),
    ],
    "hf_dinov2": [
        (RECTANGLE | {"mlp_dim": 48}, "a grid of 2x8: Dinov2Model of transformers"),
        ({"num_classes": 3}, "pool='token': Dinov2Model of transformers"),
        ({"mlp_dim": 25}, "mlp_dim=25: Dinov2Model .* has 48"),
        ({"pool": "gap"}, "pool='gap': Dinov2Model of transformers does not"),
    ],
    "mae": [
        ({"activation": "gelu_tanh"}, "activation='gelu_tanh': facebookresearch"),
        ({"pool": "map"}, "pool='map': facebookresearch/mae does not"),
        ({"pool": "gap"}, "class_token=False: facebookresearch/mae does not"),
        ({"pool": "token_gap"}, "pool='token_gap'"),
        (
            {"distillation": True},
            "distillation=True: facebookresearch/mae .* with --to=",
        ),
        ({"num_register_tokens": 2}, "num_register_tokens=2: .* write it"),
        ({"layer_norm_eps": 1e-5}, "layer_norm_eps=1e-05: facebookresearch/mae"),
        ({"image_size": (12, 20)}, "image_size=12x20: .* needs square images"),
    ],
    "hf_mae": [
        ({"num_classes": 3}, "num_classes=3: ViTMAE of transformers .* with --to=timm"),
        (SHARED_BIAS, "is supported by nei"),
    ],
    "microsoft": [({}, "Microsoft's files are for Swin Transformers")],
}


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [(to, *row) for to, rows in UNWRITABLE.items() for row in rows],
)
def test_what_a_format_has_no_place_for_is_refused(tmp_path, to, options, message):
    plain = {} if "R50x1" in options.values() else {"activation": "gelu"}
    model = network(**{"num_classes": 0, "image_size": (12, 12)} | plain | options)
    out = tmp_path / f"a{WRITERS[to].suffix}"
    with pytest.raises(UserError, match=message) as error:
        export.export(checkpoint(model), to, out)
    assert "\n" not in str(error.value) and not out.exists()


SHORT_SIDE = {"crop_fraction": 0.75, "short_side": True}
UNWRITABLE_IMAGES = [
    ("timm", (12, 20), {"fill": (0, 0, 0)}, r"fill=\(0, 0, 0\): timm's border"),
    ("timm", (12, 20), SHORT_SIDE, "a centre crop of 12x20 .*--to=hf or --to=safe"),
    ("hf", (12, 20), {}, "a centre crop of 12x20: .*--to=timm"),
    ("hf", (12, 12), {"interpolation": "box"}, "interpolation='box': Hugging"),
    ("hf", (12, 12), {"fill": (9, 9, 9)}, r"fill=\(9, 9, 9\): .*--to=timm"),
]


@pytest.mark.parametrize(("to", "size", "images", "message"), UNWRITABLE_IMAGES)
def test_preprocessing_that_a_format_lacks_is_refused(
    tmp_path, to, size, images, message
):
    given = checkpoint(encoder(image_size=size), preprocess=Preprocess(size, **images))
    with pytest.raises(UserError, match=message):
        export.export(given, to, tmp_path / "a")


@pytest.mark.parametrize("filter", ["area", "bilinear_plain"])
@pytest.mark.parametrize("to", ["timm", "hf"])
def test_a_filter_of_googles_that_a_format_lacks_is_another_and_noted(
    tmp_path, to, filter
):
    how = Preprocess((12, 12), interpolation=filter, squash=True)
    given = checkpoint(encoder(image_size=(12, 12), activation="gelu"), preprocess=how)
    _, notes = export.export(given, to, tmp_path / "a")
    (note,) = [note for note in notes if "interpolation" in note]
    assert f"interpolation={filter!r}" in note and "'bilinear'" in note
    found = weights.open_pretrained(tmp_path / "a").preprocess
    assert found.interpolation == "bilinear"
