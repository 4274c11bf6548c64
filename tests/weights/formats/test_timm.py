"""timm's names and config.json, in and out; test_torch_parity.py asks timm itself."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file
from trees import assert_same, checkpoint, encoder, random_flat

from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.weights import Preprocess, Pretrained, export
from vit_jax.weights.formats import files, tables, timm, timm_config
from vit_jax.weights.pretrained import IMAGENET, prepare_image

SHARED = pathlib.Path(__file__).resolve().parents[4] / "shared"
PREPROCESS = Preprocess((12, 20), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bicubic", 0.9)
NAMES = tuple("abcdefg")
tiny = functools.partial(encoder, image_size=(12, 20))


def made(model, **kwargs):
    """A checkpoint with random parameters."""
    fields = {"preprocess": PREPROCESS, "class_names": NAMES} | kwargs
    return checkpoint(model, **fields)


def write(folder, model, **kwargs):
    """Writes a checkpoint; returns its arrays and its config."""
    timm.write(made(model, **kwargs), folder)
    config = json.loads((folder / "config.json").read_text())
    return load_file(folder / "model.safetensors"), config


def read(arrays, config=None, num_heads=0):
    sidecars = {"config.json": config} if config else {}
    return timm.read(files.Tensors(dict(arrays), {}, sidecars, "file"), num_heads)


MODELS = {
    "token": lambda: tiny(),
    "grey": lambda: tiny(channels=1),
    "distilled": lambda: tiny(distillation=True),
    "gap": lambda: tiny(pool="gap"),
    "gap, pooled norm": lambda: tiny(pool="gap", fc_norm=True, class_token=True),
    "map": lambda: tiny(pool="map", class_token=True),
    "every token": lambda: tiny(pool="none"),
    "tanh, 1e-5": lambda: tiny(activation="gelu", layer_norm_eps=1e-5),
    "no positions": lambda: tiny(posemb="none"),
    "registers": lambda: tiny(num_register_tokens=2, layer_scale_init=0.1),
    "gated": lambda: tiny(activation="swiglu", pool="gap"),
    "gated, registers": lambda: tiny(
        activation="swiglu", num_register_tokens=1, posemb="none"
    ),
    "no classes": lambda: tiny(num_classes=0),
    "hybrid": lambda: encoder("R26+S/32", image_size=(64, 96)),
    "root": lambda: encoder("R+Ti/16", image_size=(32, 96)),
    "BiT": lambda: models.create(
        "R50x1", num_classes=7, image_size=(12, 20), stem_width=32, zero_pool=True
    ),
    "BiT x2": lambda: models.create(
        "R152x2", num_classes=0, image_size=(12, 20), stem_width=32, zero_pool=True
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "BiT x2" else ())
        for name in MODELS
    ],
)
def test_what_is_written_is_read_back_to_the_bit(tmp_path, name):
    model = MODELS[name]()
    options = model.options
    pretrained = made(model, class_names=NAMES[: options["num_classes"]])
    assert timm.write(pretrained, tmp_path) == (
        [] if name not in ("hybrid", "root") else [HYBRID_NOTE]
    )
    tensors = files.read(tmp_path)
    assert timm.recognises(tensors)
    found = timm.read(tensors)
    assert_same(found.params, random_flat(model))
    again = models.create(**found.options).options
    # Sizes have more than one name.
    same = options.keys() - {"variant"}
    assert {k: again[k] for k in same} == {k: options[k] for k in same}
    channels = options["channels"]
    assert found.preprocess.mean == PREPROCESS.mean[: 3 if channels == 3 else None]
    assert found.class_names == pretrained.class_names
    assert found.format == "timm"
    notes = [note.split(":")[0] for note in found.notes]
    assert notes == (["stem"] if name in ("hybrid", "root") else [])


HYBRID_NOTE = (
    "stem: timm's epsilons (1e-5 in GroupNorm, 1e-8 beside a kernel's variance) stand "
    "for 1e-6 and 1e-5 beside its deviation: logits differ by about 1e-4 of their size"
)


def test_theirs_to_ours_and_back_changes_no_bit(tmp_path):
    (tmp_path / "b").mkdir()
    arrays, config = write(tmp_path, tiny(pool="map"))
    timm.write(read(arrays, config), tmp_path / "b")
    again = load_file(tmp_path / "b" / "model.safetensors")
    assert again.keys() == arrays.keys()
    for key, value in arrays.items():
        np.testing.assert_array_equal(again[key], value)
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == config


def test_layouts_are_pytorchs(tmp_path):
    model = tiny(pool="map")
    flat = random_flat(model)
    arrays, _ = write(tmp_path, model)
    np.testing.assert_array_equal(
        arrays["patch_embed.proj.weight"][5, 2, 1, 3],
        flat["embedding/kernel"][1, 3, 2, 5],
    )
    attention = "Transformer/encoderblock_1/MultiHeadDotProductAttention_1"
    # Width 12 is 3 heads of 4: row 12 + 2 * 4 + 3 is the last unit of the last key.
    np.testing.assert_array_equal(
        arrays["blocks.1.attn.qkv.weight"][23], flat[f"{attention}/key/kernel"][:, 2, 3]
    )
    np.testing.assert_array_equal(
        arrays["blocks.1.attn.qkv.bias"][23], flat[f"{attention}/key/bias"][2, 3]
    )
    np.testing.assert_array_equal(
        arrays["blocks.1.attn.proj.weight"][5, 7],
        flat[f"{attention}/out/kernel"][1, 3, 5],
    )
    pool = "MAPHead_0/MultiHeadDotProductAttention_0"
    np.testing.assert_array_equal(
        arrays["attn_pool.kv.weight"][12 + 6], flat[f"{pool}/value/kernel"][:, 1, 2]
    )


def test_the_config_says_what_timm_needs(tmp_path):
    model = tiny(pool="gap", activation="gelu_tanh")
    _, config = write(tmp_path, model)
    assert config["architecture"] == "vit_base_patch16_224"
    assert config["model_args"] == {
        "img_size": [12, 20],
        "patch_size": 4,
        "in_chans": 3,
        "embed_dim": 12,
        "depth": 2,
        "num_heads": 3,
        "mlp_ratio": pytest.approx(20 / 12),
        "qkv_bias": True,
        "global_pool": "avg",
        "class_token": False,
        "fc_norm": False,
        "pos_embed": "learn",
        "act_layer": "gelu_tanh",
    }
    assert int(12 * config["model_args"]["mlp_ratio"]) == 20
    images = config["pretrained_cfg"]
    assert images["input_size"] == [3, 12, 20]
    assert (images["mean"], images["std"]) == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    assert (images["interpolation"], images["crop_pct"]) == ("bicubic", 0.9)
    assert images["crop_mode"] == "center"
    assert config["label_names"] == list(NAMES)
    assert config["num_classes"] == images["num_classes"] == 7


def test_images_are_prepared_at_the_size_that_the_network_is_for(tmp_path):
    arrays, config = write(tmp_path, tiny())
    config["pretrained_cfg"]["input_size"] = [3, 224, 224]
    found = read(arrays, config)
    assert found.preprocess.image_size == found.options["image_size"] == (12, 20)


def test_what_fills_no_patch_is_dropped_after_preparing_the_whole(tmp_path):
    (tmp_path / "b").mkdir()
    arrays, config = write(tmp_path, tiny())  # Patches of 4.
    config["model_args"]["img_size"] = [14, 23]
    config["pretrained_cfg"]["input_size"] = [3, 14, 23]
    found = read(arrays, config)
    assert found.options["image_size"] == (12, 20)
    image = np.random.default_rng(0).integers(0, 256, (31, 47, 3), dtype=np.uint8)
    whole = dataclasses.replace(PREPROCESS, image_size=(14, 23))
    np.testing.assert_array_equal(
        prepare_image(image, found.preprocess),
        prepare_image(image, whole)[:12, :20],
    )
    timm.write(found, tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == config


@pytest.mark.parametrize(
    ("variant", "options", "architecture"),
    [
        ("Ti/16", {}, "vit_tiny_patch16_224"),
        ("L/14", {}, "vit_large_patch14_224"),
        ("B/14", {}, "vit_base_patch16_224"),
        ("S/16", {"distillation": True}, "deit_small_distilled_patch16_224"),
        ("L/16", {"distillation": True}, "deit_base_distilled_patch16_224"),
        ("R50+L/16", {}, "vit_base_r50_s16_224"),
        ("R101x1", {}, "resnetv2_101x1_bit"),
        ("R152x4", {}, "resnetv2_152x2_bit"),
    ],
)
def test_architectures_are_those_of_timm(variant, options, architecture):
    made = models.create(variant, num_classes=3, **options).options
    numbers = (
        {"stage_depths": (), "stem_width": 0, "patch": int(variant.split("/")[-1])}
        if ("/" in variant)
        else {}
    )
    assert timm_config.choose_architecture(numbers | made).name == architecture


def test_one_number_stands_for_every_channel(tmp_path):
    preprocess = Preprocess((12, 20), (0.5,), (0.25,), squash=True)
    _, config = write(tmp_path, tiny(), preprocess=preprocess)
    images = config["pretrained_cfg"]
    assert (images["mean"], images["std"]) == ([0.5] * 3, [0.25] * 3)
    assert (images["crop_mode"], images["crop_pct"]) == ("squash", 1.0)


def test_a_border_is_written_if_it_has_the_colour_of_the_mean(tmp_path):
    model = tiny()
    preprocess = dataclasses.replace(PREPROCESS, fill=(26, 51, 76))
    arrays, config = write(tmp_path, model, preprocess=preprocess)
    assert config["pretrained_cfg"]["crop_mode"] == "border"
    assert read(arrays, config).preprocess == preprocess
    with pytest.raises(UserError, match=r"fill=\(0, 0, 0\)"):
        write(
            tmp_path, model, preprocess=dataclasses.replace(preprocess, fill=(0,) * 3)
        )


def test_crop_fractions_give_the_same_pixels_in_timm(tmp_path):
    # 224 / (224 / 232) is a little less than 232, and timm rounds down.
    preprocess = Preprocess((224, 224), crop_fraction=224 / 232)
    model = encoder("Ti/16", image_size=(224, 224))
    _, config = write(tmp_path, model, preprocess=preprocess)
    assert int(224 / config["pretrained_cfg"]["crop_pct"]) == 232


def test_layer_scale_is_read_under_its_names_in_timm_and_deit(tmp_path):
    model = tiny(layer_scale_init=0.5)
    arrays, config = write(tmp_path, model)
    assert config["model_args"]["init_values"] == 0.5
    for i in range(2):
        for name in ("1", "2"):
            arrays[f"blocks.{i}.gamma_{name}"] = arrays.pop(
                f"blocks.{i}.ls{name}.gamma"
            )
    found = read(arrays, config)
    assert_same(found.params, random_flat(model))
    assert (found.options["layer_scale_init"], found.notes) == (0.5, ())


def test_positions_of_register_tokens_are_added_to_the_tokens(tmp_path):
    model = tiny(num_register_tokens=3)
    arrays, config = write(tmp_path, model)
    assert arrays["pos_embed"].shape == (1, 1 + 3 + 15, 12)
    np.testing.assert_array_equal(arrays["pos_embed"][:, 1:4], 0)
    assert_same(read(arrays, config).params, random_flat(model))
    arrays["pos_embed"][:, 1:4] = 2
    found = read(arrays, config)
    expected = random_flat(model)
    expected["register_tokens"] = expected["register_tokens"] + 2
    assert_same(found.params, expected)
    assert found.notes == ("positions of register tokens: added to the tokens",)


def test_what_a_file_leaves_out_is_zero(tmp_path):
    model = tiny(distillation=True)
    arrays, config = write(tmp_path, model)
    arrays["pos_embed"] = arrays["pos_embed"][:, 2:]  # timm's no_embed_class.
    arrays = {k: v for k, v in arrays.items() if not k.endswith("qkv.bias")}
    expected = random_flat(model)
    expected["Transformer/posembed_input/pos_embedding"][:, :2] = 0
    for name in expected:
        if name.endswith(("query/bias", "key/bias", "value/bias")):
            expected[name][:] = 0
    found = read(arrays, config)
    assert_same(found.params, expected)
    assert found.notes == (
        "biases of query, key and value: none in the file, so zeros",
        "position embeddings of extra tokens: none in the file, so 0",
    )


def test_the_config_knows_the_heads_better_than_a_guess(tmp_path):
    arrays, config = write(tmp_path, tiny())
    found = read(arrays, config, num_heads=4)
    assert models.create(**found.options).options["num_heads"] == 3


def test_without_a_config_the_arrays_tell_what_they_can(tmp_path):
    model = encoder(image_size=(16, 16), width=128, num_heads=2)
    arrays, _ = write(tmp_path, model)
    found = read(arrays)
    assert found.options["num_heads"] == 2
    assert found.notes == (
        "config.json: none of timm, so a plain network, exact GELU, epsilon 1e-6",
        "heads: nothing says how many, so 2, one for 64 features",
    )
    assert found.options["image_size"] == (16, 16)
    assert (found.options["activation"], found.options["layer_norm_eps"]) == (
        "gelu",
        1e-6,
    )
    assert (found.preprocess, found.class_names) == (None, ())
    stated = read(arrays, num_heads=4)
    assert models.create(**stated.options).options["num_heads"] == 4
    assert stated.notes[1:] == (
        "heads: nothing says how many, so 4 as asked for, not the usual 2",
    )


RARE = {
    "no class token": lambda a: a.pop("cls_token"),
    "no biases of queries": lambda a: [
        a.pop(f"blocks.{i}.attn.qkv.bias") for i in (0, 1)
    ],
    "LayerScale as Eva names it": lambda a: a.update(
        {"blocks.0.gamma_1": np.ones(128, np.float32)}
    ),
    "no positions": lambda a: a.pop("pos_embed"),
    "no final norm": lambda a: [a.pop(f"norm.{name}") for name in ("weight", "bias")],
}


@pytest.mark.parametrize("rare", RARE)
def test_a_bare_file_that_does_not_show_its_network_asks_for_the_name(tmp_path, rare):
    model = encoder(image_size=(16, 16), width=128, num_heads=2)
    arrays, _ = write(tmp_path, model)
    RARE[rare](arrays)
    with pytest.raises(UserError, match="--architecture="):
        read(arrays, num_heads=2)


@pytest.mark.parametrize("grid", [(4, 4), (14, 14)])
def test_of_pooling_networks_those_of_196_patches_are_asked_for(tmp_path, grid):
    size = tuple(4 * side for side in grid)
    model = encoder(image_size=size, pool="gap", fc_norm=True)
    arrays, _ = write(tmp_path, model)
    if grid == (14, 14):
        with pytest.raises(UserError, match="--architecture="):
            read(arrays, num_heads=3)
    else:
        assert_same(read(arrays, num_heads=3).params, random_flat(model))


def test_heads_that_are_not_of_64_features_are_asked_for(tmp_path):
    arrays, _ = write(tmp_path, encoder(image_size=(16, 16)))
    with pytest.raises(UserError, match="--num_heads, .*--architecture="):
        read(arrays)
    found = read(arrays, num_heads=3)
    assert models.create(**found.options).options["num_heads"] == 3


def test_the_image_size_of_a_bare_resnet_is_asked_for(tmp_path):
    arrays, _ = write(tmp_path, MODELS["BiT"]())
    tensors = files.Tensors(arrays, {}, {}, "file")
    with pytest.raises(UserError, match="config.json .*--resolution="):
        timm.read(tensors)
    stated = timm.read(dataclasses.replace(tensors, image_size=(48, 32)))
    assert stated.options["image_size"] == (48, 32)


def test_the_named_architecture_stands_for_a_config(tmp_path):
    model = encoder(image_size=(16, 16), width=64, num_heads=2)
    arrays, _ = write(tmp_path, model)
    (tmp_path / "bare").mkdir()
    bare = tmp_path / "bare" / "model.safetensors"
    save_file(arrays, bare)
    with pytest.raises(UserError, match="--num_heads"):
        weights.open_pretrained(bare)
    found = weights.open_pretrained(bare, architecture="test_vit")
    assert models.create(**found.options).options["num_heads"] == 2
    assert_same(found.params, random_flat(model))
    for name, path, problem in (
        ("vit_of_tomorrow", bare, "not an architecture of timm"),
        ("test_vit", tmp_path, "config.json"),
    ):
        with pytest.raises(UserError, match=f"architecture='{name}': .*{problem}"):
            weights.open_pretrained(path, architecture=name)
    export.export(found, "google", tmp_path / "google.npz")
    with pytest.raises(UserError, match="architecture='test_vit': .* google"):
        weights.open_pretrained(tmp_path / "google.npz", architecture="test_vit")


@pytest.mark.parametrize(
    ("name", "mean"),
    [("deit_tiny_patch16_224", IMAGENET["mean"]), ("vit_tiny_patch16_224", (0.5,))],
)
def test_the_named_architecture_decides_the_preprocessing(tmp_path, name, mean):
    arrays, _ = write(tmp_path, encoder(image_size=(16, 16), width=48, num_heads=3))
    (tmp_path / "bare").mkdir()
    bare = tmp_path / "bare" / "model.safetensors"
    save_file(arrays, bare)
    found = weights.open_pretrained(bare, num_heads=3, architecture=name)
    assert weights.preprocessing_of(found).mean == mean


def test_the_name_states_the_size_where_no_positions_do():
    for name, side, pool in (
        ("beit_base_patch16_384.in22k_ft_in22k_in1k", 384, None),
        ("vit_so400m_patch14_siglip_224", 224, None),
        ("swinv2_base_window12to16_192to256", 256, None),
        ("vit_small_patch16_dinov3", 256, "avg"),
        ("vit_small_patch16_lingbot", 512, None),
    ):
        facts = timm_config.read({"architecture": name})
        assert (facts.image_size, facts.pool) == ((side, side), pool), name
    assert timm_config.read({"architecture": "resnetv2_50x1_bit"}).image_size is None


def test_known_sizes_tell_their_heads():
    assert tables.choose_num_heads(0, 0, 1280, 32) == (16, [])
    assert tables.choose_num_heads(0, 12, 768, 12) == (12, [])
    assert tables.choose_num_heads(0, 0, 768, 3)[0] == 12
    assert tables.choose_num_heads(7, 5, 768, 12) == (7, [])


def test_without_a_config_a_grid_must_be_square(tmp_path):
    arrays, _ = write(tmp_path, encoder(image_size=(12, 28)))
    with pytest.raises(
        UserError, match="embeddings of 21 patches, which are no square"
    ):
        read(arrays, num_heads=3)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architecture": "vit_so400m_patch14_siglip_224"}, (16, "gelu", 1e-6)),
        ({"architecture": "vit_giantopt_patch16_siglip_256"}, (16, "gelu_tanh", 1e-6)),
        ({"architecture": "vit_large_patch16_siglip_512"}, (0, "gelu_tanh", 1e-6)),
        ({"architecture": "vit_large_patch16_siglip_384"}, (0, "gelu", 1e-6)),
        (
            {
                "architecture": "vit_base_patch16_clip_224",
                "model_args": {"pre_norm": False},
            },
            (0, "gelu", 1e-5),
        ),
        ({"architecture": "deit3_huge_patch14_224"}, (16, "gelu", 1e-6)),
        (
            {
                "architecture": "vit_base_patch16_224",
                "model_args": {"num_heads": 3, "act_layer": "gelu_tanh"},
            },
            (3, "gelu_tanh", 1e-6),
        ),
        ({"model_type": "vit"}, (0, "gelu", 1e-6)),  # Another library's config.
        ({"architecture": "deit3_huge_patch14_224.fb_in22k"}, (16, "gelu", 1e-6)),
        (
            {
                "architecture": "vit_base_patch16_224",
                "model_args": {
                    "pretrained": True,
                    "checkpoint_path": "a.pth",
                    "cache_dir": "b",
                    "scriptable": True,
                    "out_indices": [1, 2],
                    "norm_layer": "layernorm",
                },
            },
            (0, "gelu", 1e-6),
        ),
    ],
)
def test_flavours_follow_the_architecture(config, expected):
    facts = timm_config.read(config)
    assert (facts.num_heads, facts.activation, facts.layer_norm_eps) == expected


def test_a_config_as_the_hub_has_them_is_read():
    facts = timm_config.read(
        {
            "architecture": "vit_tiny_patch16_384",
            "num_classes": 2,
            "num_features": 192,
            "global_pool": "token",
            "label_names": ["n01", "n02"],
            "label_descriptions": {"n01": "a tench", "n02": "a crane"},
            "pretrained_cfg": {
                "tag": "augreg_in21k_ft_in1k",
                "custom_load": True,
                "input_size": [3, 384, 384],
                "fixed_input_size": True,
                "interpolation": "random",
                "crop_pct": 1.0,
                "crop_mode": "corner",
                "mean": [0.5, 0.5, 0.5],
                "std": [0.5, 0.5, 0.5],
                "first_conv": "patch_embed.proj",
                "classifier": "head",
            },
        }
    )
    assert facts.preprocess == Preprocess((384, 384), interpolation="bicubic")
    assert facts.class_names == ("a tench", "a crane")
    assert facts.notes == (
        "crop_mode corner: not known, so center",
        "interpolation random: not known, so bicubic",
    )


def test_null_in_a_config_is_timms_default():
    images = {"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.5] * 3}
    unset = dict.fromkeys(("crop_pct", "interpolation", "crop_mode"))
    config = {"architecture": "vit_base_patch16_224"}
    facts = timm_config.read(config | {"pretrained_cfg": images | unset})
    assert facts == timm_config.read(config | {"pretrained_cfg": images})
    assert facts.preprocess.crop_fraction == 0.875
    nothing = dict.fromkeys(images) | unset
    size = (224, 224)
    plain = Preprocess(size, interpolation="bicubic", crop_fraction=0.875, **IMAGENET)
    assert timm_config.read(config | {"pretrained_cfg": nothing}).preprocess == plain
    assert timm_config.read(config).preprocess is None


@pytest.mark.parametrize(
    "name", ["vit_base_patch16_clip_224", "resnetv2_50x1_bit.goog_in21k"]
)
def test_a_norm_that_the_architecture_does_not_have_is_refused(name):
    args = {"norm_layer": "layernorm", "pre_norm": False}
    with pytest.raises(UserError, match="norm_layer='layernorm' in model_args is not"):
        timm_config.read({"architecture": name, "model_args": args})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda a, c: c["model_args"].update(num_heads=5),
            r"blocks.0.attn.qkv.weight has shape \(36, 12\), which does not fit",
        ),
        (
            lambda a, c: c["model_args"].update(act_layer="silu"),
            "act_layer='silu' in the config.json of vit_base_patch16_224 is not",
        ),
        (
            lambda a, c: c["model_args"].update(global_pool="avgmax"),
            "global_pool='avgmax' in config.json is not one of 'token', 'avg'",
        ),
        (
            lambda a, c: c["model_args"].update(
                global_pool="avg", pool_include_prefix=True
            ),
            "pooling gap with pool_include_prefix=True and a class token is not",
        ),
    ],
)
def test_configs_of_other_networks_are_refused(tmp_path, change, message):
    arrays, config = write(tmp_path, tiny())
    change(arrays, config)
    with pytest.raises(UserError, match=message):
        read(arrays, config)


@pytest.mark.parametrize(
    ("change", "name", "problem"),
    [
        (
            lambda a: a.update({"decoder.weight": np.zeros((4, 12), np.float32)}),
            "decoder.weight",
            "left over",
        ),
        (
            lambda a: a.update({"mask_token": np.ones((1, 1, 12), "f")}),
            "mask_token",
            "left over",
        ),
        (
            lambda a: a.pop("blocks.1.mlp.fc1.bias"),
            "Transformer/encoderblock_1/MlpBlock_3/Dense_0/bias",
            "missing",
        ),
    ],
)
def test_what_is_left_over_or_missing_is_refused_unless_allowed(
    tmp_path, change, name, problem
):
    model = tiny()
    arrays, _ = write(tmp_path, model)
    change(arrays)
    save_file(arrays, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"{name} is {problem}"):
        weights.load(tmp_path, model)
    loaded = weights.load(tmp_path, model, allow_mismatch=[f"^{name}$"])
    assert any(name == row.what and problem in row.action for row in loaded.rows)
    expected = jax.eval_shape(model.init, jax.random.key(0))
    assert jax.tree.structure(loaded.params) == jax.tree.structure(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"representation_layer": True},
            "representation_layer=True: timm has no tanh .*--to=google",
        ),
        (
            {"posemb": "relative", "posemb_placement": "shared"},
            "posemb=relative at posemb_placement=shared exists in neither timm nor",
        ),
        (
            {"posemb_placement": "every"},
            "posemb=learned at posemb_placement=every exists in neither",
        ),
        (
            {"layer_norm_eps": 1e-4},
            "layer_norm_eps=0.0001: timm's config.json has",
        ),
        (
            {"layer_norm_eps": 1e-5, "distillation": True},
            "layer_norm_eps=1e-05: timm's config.json has",
        ),
        (
            {
                "variant": "R50+B/32",
                "stage_depths": (1, 1, 1, 1),
                "image_size": (32, 64),
            },
            r"timm has no hybrid with stage_depths=\(1, 1, 1, 1\), stem_width=64",
        ),
        (
            {"variant": "R26+S/32", "stem_width": 32, "image_size": (32, 64)},
            r"timm has no hybrid with .* stem_width=32",
        ),
    ],
)
def test_what_timm_cannot_express_is_refused(tmp_path, options, message):
    model = encoder(**{"image_size": (12, 20)} | options)
    with pytest.raises(UserError, match=message):
        timm.write(made(model), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_crop_after_the_short_side_is_refused_where_it_is_not_square(tmp_path):
    images = Preprocess((12, 20), crop_fraction=0.75, short_side=True)
    given = dataclasses.replace(made(tiny()), preprocess=images)
    with pytest.raises(
        UserError, match="a centre crop of 12x20 .*--to=hf or --to=safe"
    ):
        timm.write(given, tmp_path)


def test_a_resnet_of_other_depth_is_refused(tmp_path):
    model = models.create("R200x3", num_classes=2, stem_width=32)
    empty = Pretrained({}, model.options, "vit_jax", "test")
    with pytest.raises(
        UserError, match=r"no BiT ResNet with stage_depths=\(3, 24, 36, 3\)"
    ):
        timm.write(empty, tmp_path)


def test_parameters_must_be_those_of_the_options(tmp_path):
    pretrained = made(tiny())
    del pretrained.params["cls"]
    with pytest.raises(UserError, match="the model lacks cls, which its options ask"):
        timm.write(pretrained, tmp_path)
    pretrained.params.update(cls=np.zeros(3), fc_norm={"bias": np.zeros(3)})
    with pytest.raises(
        UserError, match="the model has fc_norm/bias, which its options"
    ):
        timm.write(pretrained, tmp_path)


@pytest.mark.parametrize("kind", ["sincos2d", "learned2d"])
def test_position_embeddings_of_a_grid_are_written_out(tmp_path, kind):
    model = tiny(posemb=kind, distillation=True)
    notes = timm.write(made(model), tmp_path)
    assert notes == [f"position embeddings: {kind} written out as values"]
    found = timm.read(files.read(tmp_path))
    assert (
        logits_of(found, seed=3).tobytes() == logits_of(made(model), seed=3).tobytes()
    )


@pytest.mark.parametrize("distillation", [False, True])
def test_a_norm_after_the_choice_of_a_token_moves_before_it(tmp_path, distillation):
    model = tiny(fc_norm=True, distillation=distillation)
    notes = timm.write(made(model), tmp_path)
    assert notes == ["final LayerNorm: moved before the choice of the token"]
    found = timm.read(files.read(tmp_path))
    np.testing.assert_allclose(
        logits_of(found, seed=3), logits_of(made(model), seed=3), atol=1e-6
    )


def logits_of(pretrained, seed):
    model = models.create(**pretrained.options)
    images = jax.random.normal(jax.random.key(seed), (2, *model.image_shape))
    return np.asarray(model.apply(pretrained.params, images)["logits"])


def test_deviations_are_told(tmp_path):
    model = tiny(layer_norm_eps=1e-12, num_classes=0, distillation=True)
    assert timm.write(made(model, preprocess=None, loss="sigmoid"), tmp_path) == [
        "layer_norm_eps: 1e-12 became 1e-6, the least that timm has",
        "features: timm returns the mean of both tokens, vit_jax the first",
        "preprocessing: nothing says how, so timm's defaults hold",
        "loss: the config does not say that it was sigmoid, not softmax",
    ]


@pytest.mark.parametrize("left", [(), ("head",), ("head_dist",)])
def test_a_distilled_network_without_both_classifiers_is_an_encoder(tmp_path, left):
    whole = tiny(distillation=True)
    arrays, config = write(tmp_path, whole)
    both = {name: name.rpartition(".")[0] for name in arrays if "head" in name}
    arrays = {k: v for k, v in arrays.items() if k not in both or both[k] in left}
    found = read(arrays, config)
    assert found.options["num_classes"] == 0 and found.options["distillation"]
    notes = [note.split(":")[0] for note in found.notes]
    assert ("features" in notes) and ("classifier" in notes) == bool(left)
    images = jax.random.normal(jax.random.key(3), (2, *whole.image_shape))
    params = read(*write(tmp_path, whole)).params
    ours = models.create(**found.options).apply(found.params, images)["pre_logits"]
    np.testing.assert_array_equal(ours, whole.apply(params, images)["pre_logits"])


def test_the_tanh_layer_of_old_files_is_kept(tmp_path):
    arrays, config = write(tmp_path, tiny())
    rng = np.random.default_rng(5)
    arrays["pre_logits.fc.weight"] = rng.normal(size=(12, 12)).astype(np.float32)
    arrays["pre_logits.fc.bias"] = rng.normal(size=12).astype(np.float32)
    found = read(arrays, config)
    assert found.options["representation_layer"]
    np.testing.assert_array_equal(
        found.params["pre_logits"]["kernel"], arrays["pre_logits.fc.weight"].T
    )


def test_other_files_are_not_recognised():
    for name in (
        "Transformer/encoder_norm/scale",
        "vit.embeddings.cls_token",
        "layers.0.blocks.0.attn.qkv.weight",  # Swin.
    ):
        assert not timm.recognises(files.Tensors({name: np.ones(1)}, {}, {}, "x"))


def deit():
    path = SHARED / "parity" / "deit_tiny_timm.safetensors"
    if not path.exists():
        pytest.skip("../shared/parity/deit_tiny_timm.safetensors is not here")
    found = timm.read(files.read(path))
    return found, models.create(**found.options)


MEAN, STD = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])


def test_logits_of_deit_are_timms():
    found, model = deit()
    outputs = np.load(SHARED / "parity" / "deit_tiny.io.npz")
    images = (outputs["images_uint8"] / np.float32(255) - MEAN) / STD
    logits = model.apply(found.params, jnp.asarray(images))["logits"]
    np.testing.assert_allclose(logits, outputs["logits"], atol=1e-4)


@pytest.mark.slow
def test_deit_classifies_the_sample_photographs_as_well_as_under_timm():
    found, model = deit()
    lines = (SHARED / "data" / "imagenet_classes.txt").read_text().splitlines()
    labels = {line.split()[0]: i for i, line in enumerate(lines)}
    paths = sorted((SHARED / "data" / "imagenet_samples").glob("*.*"))[::5]
    assert len(paths) == 100

    def prepare(path):
        image = Image.open(path).convert("RGB")
        scale = 256 / min(image.size)
        size = [int(side * scale) for side in image.size]
        image = image.resize(size, Image.Resampling.BICUBIC)
        left, top = (round((side - 224) / 2) for side in size)
        pixels = np.float32(image.crop((left, top, left + 224, top + 224)))
        return (pixels / 255 - MEAN) / STD

    apply = jax.jit(lambda x: model.apply(found.params, x)["logits"])
    right = 0
    for start in range(0, 100, 50):
        batch = paths[start : start + 50]
        guesses = apply(np.stack([prepare(p) for p in batch])).argmax(-1)
        right += sum(
            labels[p.name.split("_")[0].split(".")[0]] == int(guess)
            for p, guess in zip(batch, guesses, strict=True)
        )
    assert right / 100 == pytest.approx(0.778, abs=0.05)  # Of all 500, 0.778.
