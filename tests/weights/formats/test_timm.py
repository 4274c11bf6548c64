"""timm's names and config.json, in and out; test_torch_parity.py asks timm itself."""

import dataclasses
import functools
import json
import re

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from trees import assert_same, checkpoint, encoder, network, random_flat

from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.weights import Preprocess, export
from vit_jax.weights.formats import files, tables, timm, timm_config
from vit_jax.weights.network_images import prepare_image
from vit_jax.weights.pretrained import IMAGENET

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


def test_layouts_are_pytorchs(tmp_path):
    model = tiny(pool="map")
    flat = random_flat(model)
    arrays, _ = write(tmp_path, model)
    attention = "Transformer/encoderblock_1/MultiHeadDotProductAttention_1"
    pool = "MAPHead_0/MultiHeadDotProductAttention_0"
    # Width 12 is 3 heads of 4: row 12 + 2 * 4 + 3 is the last unit of the last key.
    for name, theirs, ours_name, ours in (
        ("patch_embed.proj.weight", (5, 2, 1, 3), "embedding/kernel", (1, 3, 2, 5)),
        ("blocks.1.attn.qkv.weight", 23, f"{attention}/key/kernel", np.s_[:, 2, 3]),
        ("blocks.1.attn.qkv.bias", 23, f"{attention}/key/bias", (2, 3)),
        ("blocks.1.attn.proj.weight", (5, 7), f"{attention}/out/kernel", (1, 3, 5)),
        ("attn_pool.kv.weight", 12 + 6, f"{pool}/value/kernel", np.s_[:, 1, 2]),
    ):
        np.testing.assert_array_equal(arrays[name][theirs], flat[ours_name][ours])


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
    expected = {
        "input_size": [3, 12, 20],
        "mean": [0.1, 0.2, 0.3],
        "std": [0.4, 0.5, 0.6],
        "interpolation": "bicubic",
        "crop_pct": 0.9,
        "crop_mode": "center",
    }
    assert {key: images[key] for key in expected} == expected
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


def test_architectures_are_those_of_timm():
    for architecture, variant, options in (
        ("vit_tiny_patch16_224", "Ti/16", {"patch": 16}),
        ("vit_large_patch14_224", "L/14", {"patch": 14}),
        ("vit_base_patch16_224", "B/14", {"patch": 14}),
        ("deit_small_distilled_patch16_224", "S/16", {"distillation": True}),
        ("deit_base_distilled_patch16_224", "L/16", {"distillation": True}),
        ("vit_base_r50_s16_224", "R50+L/16", {}),
        ("resnetv2_101x1_bit", "R101x1", {}),
        ("resnetv2_152x2_bit", "R152x4", {}),
    ):
        given = {k: v for k, v in options.items() if k != "patch"}
        made = models.create(variant, num_classes=3, **given).options
        plain = {"stage_depths": (), "stem_width": 0, "patch": 16} | options
        assert timm_config.choose_architecture(plain | made).name == architecture


def test_one_number_stands_for_every_channel(tmp_path):
    preprocess = Preprocess((12, 20), (0.5,), (0.25,), squash=True)
    _, config = write(tmp_path, tiny(), preprocess=preprocess)
    images = config["pretrained_cfg"]
    assert (images["mean"], images["std"]) == ([0.5] * 3, [0.25] * 3)
    assert (images["crop_mode"], images["crop_pct"]) == ("squash", 1.0)


def test_a_border_is_written_if_it_has_the_colour_of_the_mean(tmp_path):
    preprocess = dataclasses.replace(PREPROCESS, fill=(26, 51, 76))
    arrays, config = write(tmp_path, tiny(), preprocess=preprocess)
    assert config["pretrained_cfg"]["crop_mode"] == "border"
    assert read(arrays, config).preprocess == preprocess


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
    deit = {re.sub(r"\.ls(\d)\.gamma", r".gamma_\1", k): v for k, v in arrays.items()}
    assert deit.keys() != arrays.keys()
    found = read(deit, config)
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
        "biases of query, key and value: not in the file, set to zeros",
        "position embeddings of extra tokens: not in the file, set to 0",
    )


def test_without_a_config_the_arrays_tell_what_they_can(tmp_path):
    model = encoder(image_size=(16, 16), width=128, num_heads=2)
    arrays, _ = write(tmp_path, model)
    found = read(arrays)
    assert found.options["num_heads"] == 2
    assert found.notes == (
        "config.json: not timm's, assumed a plain network, exact GELU, epsilon 1e-6",
        "heads: number unknown, assumed 2, with 64 features each",
    )
    assert found.options["image_size"] == (16, 16)
    assert (found.options["activation"], found.options["layer_norm_eps"]) == (
        "gelu",
        1e-6,
    )
    assert (found.preprocess, found.class_names) == (None, ())
    stated = read(arrays, num_heads=4)
    assert stated.options["num_heads"] == 4
    assert stated.notes[1:] == (
        "heads: number unknown, assumed 4 as requested, not the usual 2",
    )


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
    arrays, _ = write(tmp_path, network("R50x1", stem_width=32, zero_pool=True))
    tensors = files.Tensors(arrays, {}, {}, "file")
    with pytest.raises(UserError, match="config.json .*--resolution="):
        timm.read(tensors)
    stated = timm.read(dataclasses.replace(tensors, image_size=(48, 32)))
    assert stated.options["image_size"] == (48, 32)


def test_the_named_architecture_stands_for_a_config_and_its_preprocessing(tmp_path):
    (tmp_path / "bare").mkdir()
    bare = tmp_path / "bare" / "model.safetensors"
    arrays, _ = write(
        tmp_path, encoder("Ti/16", width=192, depth=12, image_size=(32, 32))
    )
    save_file(arrays, bare)
    for name, mean in (("deit_tiny_patch16_224", 0.485), ("vit_tiny_patch16_224", 0.5)):
        named = weights.open_pretrained(bare, architecture=name)
        assert weights.preprocessing_of(named).mean[0] == mean
    model = encoder("Ti/16", width=64, depth=6, num_heads=2, image_size=(32, 32))
    arrays, _ = write(tmp_path, model)
    save_file(arrays, bare)
    with pytest.raises(UserError, match="--num_heads"):
        weights.open_pretrained(bare)
    found = weights.open_pretrained(bare, architecture="test_vit")
    assert models.create(**found.options).options["num_heads"] == 2
    assert_same(found.params, random_flat(model))
    for name, path, problem in (
        ("vit_of_tomorrow", bare, "architecture of timm is not known"),
        ("test_vit", tmp_path, "config.json"),
    ):
        with pytest.raises(UserError, match=f"architecture='{name}': .*{problem}"):
            weights.open_pretrained(path, architecture=name)
    export.export(found, "google", tmp_path / "google.npz")
    with pytest.raises(UserError, match="architecture='test_vit': .* google"):
        weights.open_pretrained(tmp_path / "google.npz", architecture="test_vit")


@pytest.mark.parametrize(
    ("name", "args", "problem"),
    [
        # Its 16 heads divide a width of 192 too.
        ("vit_huge_patch14_224", {}, "embed_dim=1280, depth=32, .* has 192, 2, 16"),
        ("vit_tiny_patch16_224", {}, "depth=12, but file has 2"),
        (
            *("vit_medium_patch16_reg4_gap_256", {"embed_dim": 192, "depth": 2}),
            "reg_tokens=4, but file has 0",
        ),
        (
            *("eva02_tiny_patch14_224", {"depth": 2}),
            'patch_size=14, but .* "model_args": {"patch_size": 16}',
        ),
        ("vit_tiny_patch16_224", {"depth": 2}, None),
        ("flexivit_small", {"depth": 2, "embed_dim": 192}, None),
    ],
)
def test_a_name_of_other_sizes_is_refused_unless_arguments_say_them(
    tmp_path, name, args, problem
):
    arrays, _ = write(tmp_path, encoder("Ti/16", width=192, image_size=(32, 32)))
    config = {"architecture": name, "model_args": args}
    if problem is None:
        assert read(arrays, config).options["image_size"] == (32, 32)
        return
    with pytest.raises(UserError, match=f"^architecture='{name}' has .*{problem}"):
        read(arrays, config)


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


def test_known_sizes_tell_their_heads_and_a_config_comes_first():
    assert tables.choose_num_heads(0, 0, 1280, 32) == (16, [])
    assert tables.choose_num_heads(0, 12, 768, 12) == (12, [])
    assert tables.choose_num_heads(0, 0, 768, 3)[0] == 12
    assert tables.choose_num_heads(7, 5, 768, 12) == (7, [])


def test_without_a_config_a_grid_must_be_square(tmp_path):
    arrays, _ = write(tmp_path, encoder(image_size=(12, 28)))
    with pytest.raises(UserError, match="of 21 patches, which are not a square"):
        read(arrays, num_heads=3)


NO_EFFECT = {"pretrained": True, "checkpoint_path": "a.pth", "cache_dir": "b"}
NO_EFFECT |= {"scriptable": True, "out_indices": [1, 2], "norm_layer": "layernorm"}


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("vit_so400m_patch14_siglip_224", {}, (16, "gelu", 1e-6)),
        ("vit_giantopt_patch16_siglip_256", {}, (16, "gelu_tanh", 1e-6)),
        ("vit_large_patch16_siglip_512", {}, (0, "gelu_tanh", 1e-6)),
        ("vit_large_patch16_siglip_384", {}, (0, "gelu", 1e-6)),
        ("vit_base_patch16_clip_224", {"pre_norm": False}, (0, "gelu", 1e-5)),
        ("deit3_huge_patch14_224.fb_in22k", {}, (16, "gelu", 1e-6)),
        (
            *("vit_base_patch16_224", {"num_heads": 3, "act_layer": "gelu_tanh"}),
            (3, "gelu_tanh", 1e-6),
        ),
        ("vit_base_patch16_224", NO_EFFECT, (0, "gelu", 1e-6)),
        (None, {}, (0, "gelu", 1e-6)),  # Another library's config.
    ],
)
def test_flavours_follow_the_architecture(name, args, expected):
    config = {"architecture": name, "model_args": args} if name else {}
    facts = timm_config.read(config | {"model_type": "vit"})
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
        "crop_mode corner: unknown, assumed center",
        "interpolation random: unknown, assumed bicubic",
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


def test_parameters_must_be_those_of_the_options(tmp_path):
    pretrained = made(tiny())
    del pretrained.params["cls"]
    with pytest.raises(
        UserError, match="the model lacks cls, which its options require"
    ):
        timm.write(pretrained, tmp_path)
    pretrained.params.update(cls=np.zeros(3), fc_norm={"bias": np.zeros(3)})
    with pytest.raises(UserError, match="has fc_norm/bias, which does not"):
        timm.write(pretrained, tmp_path)


@pytest.mark.parametrize("kind", ["sincos2d", "learned2d", "factorized"])
def test_position_embeddings_of_a_grid_are_written_out(tmp_path, kind):
    model = tiny(posemb=kind, distillation=True)
    notes = timm.write(made(model), tmp_path)
    assert notes == [f"position embeddings: {kind} written as values"]
    found = timm.read(files.read(tmp_path))
    assert (
        logits_of(found, seed=3).tobytes() == logits_of(made(model), seed=3).tobytes()
    )


@pytest.mark.parametrize("distillation", [False, True])
def test_a_norm_after_the_choice_of_a_token_moves_before_it(tmp_path, distillation):
    model = tiny(fc_norm=True, distillation=distillation)
    notes = timm.write(made(model), tmp_path)
    assert notes == ["final LayerNorm: moved before the selection of the token"]
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
        "layer_norm_eps: 1e-12 replaced by 1e-6, the smallest in timm",
        "features: timm returns the mean of both tokens, vit_jax the first one",
        "preprocessing: unknown, so timm's defaults apply",
        "loss: config.json does not record that it was sigmoid, not softmax",
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
