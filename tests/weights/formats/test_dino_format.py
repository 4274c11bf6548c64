"""Files of DINO and DINOv2, of their own code, timm and transformers, in and out."""

import dataclasses
import functools
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers import begin, slow_but, tiny_config
from safetensors.numpy import load_file, save_file
from trees import assert_same, checkpoint, edit_config, encoder

from vit_jax import models, weights
from vit_jax.config import fields
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.models import intermediates
from vit_jax.tools.explorer.session import ExploredModel
from vit_jax.weights import export, surgery
from vit_jax.weights.formats import dino, files, timm, torch_file
from vit_jax.weights.initial import load_initial

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "golden"
DINO = np.load(GOLDEN / "dino_forward.npz")
DINOV2 = np.load(GOLDEN / "dinov2.io.npz")
SIZES = ("32x32", "48x48", "24x24", "40x28")
PLACES = {
    "facebook": "facebook.safetensors",
    "timm": "timm.safetensors",
    "transformers": "hf",
}
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def at_size(found, size):
    """Network and parameters for a size such as "48x32", and its images."""
    sides = tuple(map(int, size.split("x")))
    preprocess = weights.preprocessing_of(found)
    preprocess = dataclasses.replace(preprocess, image_size=sides)
    return surgery.fit_network(found, preprocess)


def tokens_of(found, size, images):
    """Tokens of the network after the final norm."""
    model, params = at_size(found, size)
    return np.asarray(jax.jit(model.encode)(params, images))


def nhwc(images):
    return jnp.asarray(images.transpose(0, 2, 3, 1))


def opened(place):
    return weights.open_pretrained(place, num_heads=3)


def backbone_of_dino():
    arrays = load_file(GOLDEN / "dino_student.safetensors")
    return {
        name.removeprefix("backbone."): value
        for name, value in arrays.items()
        if name.startswith("backbone.")
    }


@pytest.mark.parametrize("size", ["32x32", "20x20", "12x28", "40x40"])
def test_dino_gives_the_features_of_the_original_at_any_size(size):
    found = opened(GOLDEN / "dino_student.safetensors")
    assert found.format == "dino"
    assert found.options["posemb_resize"] == "bicubic_dino"
    images = nhwc(DINO[f"{size}/image"])
    tokens = tokens_of(found, size, images)
    np.testing.assert_allclose(tokens[:, 0], DINO[f"{size}/cls"], rtol=0, atol=1e-5)


def test_dino_has_the_attention_and_tokens_of_the_original():
    found = opened(GOLDEN / "dino_student.safetensors")
    model, params = at_size(found, "32x32")
    images = nhwc(DINO["32x32/image"])
    layers = list(intermediates.layers(model, params, images))
    expected = DINO["32x32/last_attention"]
    np.testing.assert_allclose(layers[-1].attention, expected, rtol=0, atol=1e-5)
    # The original normalises the tokens of each block.
    norm = params["Transformer"]["encoder_norm"]
    for i, layer in enumerate(layers):
        x = np.asarray(layer.tokens)
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        x = x * norm["scale"] + norm["bias"]
        expected = DINO[f"32x32/intermediate_{i}"]
        np.testing.assert_allclose(x, expected, rtol=0, atol=1e-5)


# What is read from transformers is the same to the bit; see the next test.
@pytest.mark.parametrize(
    ("place", "size"), [*(("facebook", size) for size in SIZES), ("timm", "40x28")]
)
@pytest.mark.parametrize(
    "network", slow_but(["swiglu_reg4"], ["mlp_reg0", "mlp_reg4", "swiglu_reg4"])
)
def test_dinov2_gives_the_tokens_of_the_original_at_any_size(network, place, size):
    found = opened(GOLDEN / f"dinov2_{network}" / PLACES[place])
    registers = int(network[-1])
    assert found.options.get("num_register_tokens", 0) == registers
    tokens = tokens_of(found, size, nhwc(DINOV2[f"{size}/image"]))
    parts = np.split(tokens, [1, 1 + registers], axis=1)
    expected = DINOV2[f"{network}/{size}/cls"]
    np.testing.assert_allclose(parts[0][:, 0], expected, rtol=0, atol=1e-5)
    expected = DINOV2[f"{network}/{size}/patches"]
    np.testing.assert_allclose(parts[2], expected, rtol=0, atol=1e-5)
    if registers:
        expected = DINOV2[f"{network}/{size}/registers"]
        np.testing.assert_allclose(parts[1], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("network", ["mlp_reg0", "mlp_reg4", "swiglu_reg4"])
def test_dinov2_of_all_libraries_is_one_network(network):
    folder = GOLDEN / f"dinov2_{network}"
    facebook, theirs, of_timm = (
        opened(folder / PLACES[name]) for name in ("facebook", "transformers", "timm")
    )
    assert facebook.format == theirs.format == of_timm.format == "dinov2"
    assert_same(theirs.params, flatten_dict(facebook.params, sep="/"))
    assert models.create(**theirs.options) == models.create(**facebook.options)
    assert models.create(**facebook.options).options["activation"] == (
        "swiglu" if "swiglu" in network else "gelu"
    )
    for found in (facebook, theirs):
        assert "mask token: dropped, only used for pretraining" in found.notes
        size = found.options["image_size"]
        assert found.preprocess == Preprocess(size, *IMAGENET, "bicubic", 224 / 256)
    # timm adds the position of the class token to it where there are registers.
    same = of_timm.params["Transformer"]["encoderblock_1"]
    assert_same(
        facebook.params["Transformer"]["encoderblock_1"], flatten_dict(same, sep="/")
    )


def test_the_mask_token_replaces_patches_as_in_the_original():
    arrays = load_file(GOLDEN / "dinov2_mlp_reg4" / "facebook.safetensors")
    found = opened(GOLDEN / "dinov2_mlp_reg4" / "facebook.safetensors")
    model, params = at_size(found, "32x32")
    mask, token = DINOV2["masks"][..., None], arrays["mask_token"][None]
    hide = lambda patches: jnp.where(mask, token, patches)
    encode = jax.jit(functools.partial(model.encode, edit_patches=hide))
    tokens = encode(params, nhwc(DINOV2["32x32/image"]))
    expected = DINOV2["mlp_reg4/masked/patches"]
    np.testing.assert_allclose(tokens[:, 5:], expected, rtol=0, atol=1e-5)


def tensors(arrays, **sidecars):
    return files.Tensors(dict(arrays), {}, sidecars, "file")


def test_a_backbone_alone_is_taken_for_one_of_dino_and_a_line_says_so(tmp_path):
    save_file(backbone_of_dino(), tmp_path / "a.safetensors")
    found = opened(tmp_path / "a.safetensors")
    assert (found.format, found.options["num_classes"]) == ("dino", 0)
    assert any("assumed to be a backbone of DINO" in note for note in found.notes)
    assert found.preprocess.crop_fraction == 224 / 256
    whole = opened(GOLDEN / "dino_student.safetensors")
    assert_same(found.params, flatten_dict(whole.params, sep="/"))
    assert whole.task["name"] == "dino" and not found.task
    # A head of another form.
    arrays = load_file(GOLDEN / "dino_student.safetensors")
    del arrays["head.mlp.2.bias"]
    save_file(arrays, tmp_path / "b.safetensors")
    found = opened(tmp_path / "b.safetensors")
    assert any(note.startswith("head: left out; these are") for note in found.notes)
    assert not found.task_params


@pytest.mark.parametrize("name", ["head.weight", "fc_norm.weight", "dist_token"])
def test_other_networks_of_such_names_are_none_of_dino(name):
    arrays = backbone_of_dino() | {name: np.zeros((3, 24), np.float32)}
    assert not dino.recognises(tensors(arrays))
    assert dino.recognises(tensors(backbone_of_dino()))
    kernel = {"patch_embed.proj.weight": np.zeros((24, 3, 32, 32), np.float32)}
    assert not dino.recognises(tensors(backbone_of_dino() | kernel))
    config = {"architecture": "vit_tiny_patch16_224"}
    assert not dino.recognises(tensors(backbone_of_dino(), **{"config.json": config}))


@pytest.mark.parametrize("wrapped", [False, True])
def test_of_a_training_checkpoint_the_teacher_is_taken(tmp_path, wrapped):
    teacher = load_file(GOLDEN / "dino_student.safetensors")
    if wrapped:
        teacher = {f"module.{name}": value for name, value in teacher.items()}
    student = {f"module.{k}": 0 * v for k, v in teacher.items()}
    torch_file.write(tmp_path / "a.pth", {"student": student, "teacher": teacher})
    found = opened(tmp_path / "a.pth")
    expected = opened(GOLDEN / "dino_student.safetensors")
    assert_same(found.params, flatten_dict(expected.params, sep="/"))
    assert found.notes[0] == "teacher: its backbone is read, not the student's"


def training_of(kind, seed=0):
    """Arrays of a training's network under the names of facebookresearch."""
    rng = np.random.default_rng(seed)
    if kind == "dino":
        return {
            name: value + seed * np.float32(0.1) * (not name.endswith("weight_g"))
            for name, value in load_file(GOLDEN / "dino_student.safetensors").items()
        }
    place = GOLDEN / "dinov2_swiglu_reg4" / "facebook.safetensors"
    arrays = {f"backbone.{k}": v + seed for k, v in load_file(place).items()}
    for head, outputs in (("dino_head", 7), ("ibot_head", 9)):
        shapes = {"mlp.0": (6, 24), "mlp.2": (6, 6), "mlp.4": (4, 6)}
        shapes = {f"{k}.weight": v for k, v in shapes.items()} | {
            f"{k}.bias": v[:1] for k, v in shapes.items()
        }
        shapes["last_layer.weight_v"] = outputs, 4
        shapes["last_layer.weight_g"] = outputs, 1
        for name, shape in shapes.items():
            value = rng.normal(size=shape).astype(np.float32)
            arrays[f"{head}.{name}"] = value
    return arrays


@pytest.mark.parametrize("kind", ["dino", "dinov2"])
@pytest.mark.parametrize("nested", [False, True])
def test_student_teacher_and_heads_come_in_and_go_out(tmp_path, kind, nested):
    teacher, student = training_of(kind), training_of(kind, seed=1)
    K = len(teacher[f"{'dino_' * (kind == 'dinov2')}head.last_layer.weight_v"])
    center = np.arange(K, dtype=np.float32)[None]
    parts = {"teacher": teacher, "student": student, "dino_loss": {"center": center}}
    content = parts
    if nested:  # As the checkpoints of dinov2's FSDP.
        content = {
            "model": {
                f"{p}.{k}": v for p, part in parts.items() for k, v in part.items()
            }
        }
    torch_file.write(tmp_path / "a.pth", content)
    found = opened(tmp_path / "a.pth")
    heads = {"dino": {"head"}, "dinov2": {"head", "patch_head", "mask_token"}}[kind]
    assert found.task_params.keys() == heads | {"network", "teacher", "center"}
    assert found.task_params["teacher"].keys() == heads
    assert found.task["name"] == kind and found.task["num_outputs"] == K
    assert found.task["free_gain"] == (kind == "dinov2")
    kernel = "Transformer/encoderblock_1/MlpBlock_3/Dense_1/kernel"
    theirs = "backbone.blocks.1.mlp." + ("fc2" if kind == "dino" else "w3") + ".weight"
    for params, arrays in (
        (found.params, teacher),
        (found.task_params["network"], student),
    ):
        value = flatten_dict(params, sep="/")[kernel]
        np.testing.assert_array_equal(value, arrays[theirs].T)
    out = tmp_path / "b.pth"
    export.export(found, "dino", out)
    written = torch_file.read(out)
    expected = {
        f"{part}.{k}": v for part, arrays in parts.items() for k, v in arrays.items()
    }
    assert_same(written, expected)


@pytest.mark.parametrize(
    "kind", ["dino", pytest.param("dinov2", marks=pytest.mark.slow)]
)
def test_a_run_goes_on_with_student_and_teacher_of_facebook(tmp_path, kind):
    teacher, student = training_of(kind), training_of(kind, seed=1)
    torch_file.write(tmp_path / "a.pth", {"teacher": teacher, "student": student})
    found = opened(tmp_path / "a.pth")
    names = ("variant", "width", "depth", "num_heads", "mlp_dim", "activation")
    names += ("num_register_tokens", "layer_scale_init", "posemb_resize")
    options = models.create(**found.options).options
    sizes = {name: options[name] for name in names}
    config = tiny_config(
        model=sizes,
        data={
            "image_size": found.options["image_size"],
            "num_classes": 0,
            "train_transform": "multi_crop(small_size=16, num_small=1)",
        },
        task=found.task,
        init={"checkpoint": str(tmp_path / "a.pth")},
        ema={"decay": 0},
        evals={},
    )
    _, state, _ = begin(config, tmp_path / "run")
    names = found.task_params["teacher"].keys()
    student = {name: found.task_params[name] for name in {*names, "network"}}
    teacher = found.task_params["teacher"] | {"network": found.params}
    for ours, theirs in ((state.params, student), (state.extra["teacher"], teacher)):
        assert ours.keys() == theirs.keys()
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_blocks_in_chunks_are_those_one_by_one(tmp_path):
    arrays = load_file(GOLDEN / "dinov2_mlp_reg4" / "facebook.safetensors")
    chunks = {
        re.sub(r"^blocks\.(\d)", r"blocks.\1.\1", k): v for k, v in arrays.items()
    }
    teacher = {f"backbone.{name}": value for name, value in chunks.items()}
    torch_file.write(tmp_path / "a.pth", {"teacher": teacher})
    expected = opened(GOLDEN / "dinov2_mlp_reg4" / "facebook.safetensors")
    found = opened(tmp_path / "a.pth")
    assert_same(found.params, flatten_dict(expected.params, sep="/"))
    assert (found.format, found.options) == ("dinov2", expected.options)


@pytest.mark.parametrize(
    ("name", "tag", "method"),
    [
        ("vit_small_patch16_224.dino", None, "bicubic_dino"),
        ("vit_small_patch16_224_dino", None, "bicubic_dino"),
        ("vit_base_patch8_224", "dino", "bicubic_dino"),
        ("vit_small_patch14_dinov2.lvd142m", None, "bicubic_dino"),
        ("vit_small_patch14_reg4_dinov2.lvd142m", None, "bicubic"),
        ("vit_small_patch16_224.augreg_in21k", None, "bicubic"),
    ],
)
def test_timm_tells_by_the_name_how_positions_are_resized(name, tag, method):
    arrays = backbone_of_dino()
    width, _, side, _ = arrays["patch_embed.proj.weight"].shape
    args = {"num_heads": 3, "embed_dim": width, "patch_size": side, "reg_tokens": 0}
    args["depth"] = len({key.split(".")[1] for key in arrays if "blocks" in key})
    config = {"architecture": name, "model_args": args, "pretrained_cfg": {"tag": tag}}
    found = timm.read(tensors(arrays, **{"config.json": config}))
    assert found.options["posemb_resize"] == method


@pytest.mark.parametrize(
    ("kind", "change", "method"),
    [
        ("vit", {}, "bicubic_dino"),
        ("vit", {"num_classes": 3}, "bicubic"),
        ("vit", {"representation_layer": True}, "bicubic"),
        ("vit_msn", {}, "bicubic"),
    ],
)
def test_a_vit_of_transformers_without_pooler_is_of_dino(
    tmp_path, kind, change, method
):
    options = {"num_classes": 0, "activation": "gelu"} | change
    export.export(checkpoint(encoder(**options), class_names=()), "hf", tmp_path / "a")
    # Only this project writes how positions are resized.
    edit_config(tmp_path / "a", model_type=kind, posemb_resize=None)
    assert opened(tmp_path / "a").options["posemb_resize"] == method


@pytest.mark.parametrize("network", ["mlp_reg0", "mlp_reg4"])
@pytest.mark.parametrize("place", ["facebook", "transformers"])
def test_linear_classifiers_see_the_class_token_and_the_mean(tmp_path, network, place):
    rng = np.random.default_rng(5)
    weight, bias = (rng.normal(size=n).astype(np.float32) for n in ((3, 48), 3))
    source = GOLDEN / f"dinov2_{network}" / PLACES[place]
    # As torch.hub's dinov2_vits14_lc(layers=1), and Dinov2ForImageClassification.
    if place == "facebook":
        arrays = {f"backbone.{name}": v for name, v in load_file(source).items()}
        arrays |= {"linear_head.weight": weight, "linear_head.bias": bias}
        torch_file.write(tmp_path / "a.pth", {"model": arrays})
        found = opened(tmp_path / "a.pth")
        assert not any("left out; these" in note for note in found.notes)
    else:
        shutil.copytree(source, tmp_path / "a")
        file = tmp_path / "a" / "model.safetensors"
        prefix = "dinov2_with_registers" if "reg4" in network else "dinov2"
        arrays = {f"{prefix}.{name}": v for name, v in load_file(file).items()}
        save_file(arrays | {"classifier.weight": weight, "classifier.bias": bias}, file)
        found = opened(tmp_path / "a")
    export.export(found, "hf_dinov2", tmp_path / "again")
    again = opened(tmp_path / "again")
    assert (again.options["pool"], again.options["num_classes"]) == ("token_gap", 3)
    assert_same(again.params, flatten_dict(found.params, sep="/"))
    model, params = at_size(found, "32x32")
    cls, patches = (DINOV2[f"{network}/32x32/{part}"] for part in ("cls", "patches"))
    features = np.concatenate([cls, patches.mean(1)], axis=1)
    outputs = jax.jit(model.apply)(params, nhwc(DINOV2["32x32/image"]))
    np.testing.assert_allclose(outputs["pre_logits"], features, rtol=0, atol=1e-5)
    expected = features @ weight.T + bias
    np.testing.assert_allclose(outputs["logits"], expected, rtol=0, atol=1e-4)


def test_a_linear_classifier_of_four_blocks_is_left_out_by_name(tmp_path):
    source = GOLDEN / "dinov2_mlp_reg0" / "facebook.safetensors"
    arrays = {f"backbone.{name}": value for name, value in load_file(source).items()}
    arrays["linear_head.weight"] = np.ones((3, 5 * 24), np.float32)
    arrays["linear_head.bias"] = np.ones(3, np.float32)
    torch_file.write(tmp_path / "a.pth", {"model": arrays})
    found = opened(tmp_path / "a.pth")
    assert any(note.startswith("linear_head: left out") for note in found.notes)
    assert not found.options["num_classes"] and "head" not in found.params


@pytest.mark.parametrize("to", ["timm", "hf_dinov2", "hf", "safetensors"])
@pytest.mark.parametrize("network", ["mlp_reg0", "mlp_reg4", "swiglu_reg4", "dino"])
def test_a_backbone_is_written_and_read_to_the_bit(tmp_path, network, to):
    if to == ("hf_dinov2" if network == "dino" else "hf"):
        pytest.skip("the format has no such network")
    file = f"dinov2_{network}/facebook.safetensors"
    found = opened(GOLDEN / file.replace("dinov2_dino/facebook", "dino_student"))
    out = tmp_path / ("a.safetensors" if to == "safetensors" else "a")
    _, notes = export.export(found, to, out)
    told = [note for note in notes if "other image sizes" in note]
    assert len(told) == (network in ("mlp_reg0", "dino") and to != "safetensors")
    again = opened(out)
    assert_same(again.params, flatten_dict(found.params, sep="/"))
    assert models.create(**again.options) == models.create(**found.options)
    if to in ("timm", "safetensors"):  # The others state whole pixels.
        assert again.preprocess == found.preprocess
    assert weights.preprocessing_of(again).mean == IMAGENET[0]


@pytest.mark.parametrize("to", ["hf", "google"])
def test_layer_scale_is_multiplied_in_where_a_format_has_none(tmp_path, to):
    found = opened(GOLDEN / "dinov2_mlp_reg0" / "facebook.safetensors")
    out = tmp_path / ("a.npz" if to == "google" else "a")
    _, notes = export.export(found, to, out)
    assert "LayerScale: multiplied into the layers before it" in notes
    again = weights.open_pretrained(out)
    options = again.options | {"activation": "gelu", "posemb_resize": "bicubic_dino"}
    again = dataclasses.replace(again, options=options)
    tokens = tokens_of(again, "32x32", nhwc(DINOV2["32x32/image"]))
    expected = DINOV2["mlp_reg0/32x32/cls"]
    np.testing.assert_allclose(tokens[:, 0], expected, rtol=0, atol=1e-5)


def fine_tuned(**options):
    """Config of a run that begins with DINOv2, for images of another size."""
    path = GOLDEN / "dinov2_swiglu_reg4" / "facebook.safetensors"
    found = opened(path)
    model = models.create(**found.options).options
    names = ("width", "depth", "num_heads", "mlp_dim", "activation", "posemb_resize")
    stated = {name: model[name] for name in (*names, "num_register_tokens")}
    return tiny_config(
        data={"image_size": (40, 28), "num_classes": 5},
        model={"variant": "B/4", "layer_scale_init": 1.0, **stated, **options},
        init={"checkpoint": str(path)},
    )


def begun(config):
    model = models.create(
        **fields.to_dict(config.model), num_classes=5, image_size=(40, 28), channels=3
    )
    init = functools.partial(model.init, jax.random.key(0))
    params, _, lines = load_initial(
        config.init,
        config.data,
        model,
        init,
        head_bias_init=0.0,
        task=config.task.name,
    )
    return model, params, lines


def test_fine_tuning_begins_with_the_features_of_dinov2_at_another_size():
    model, params, lines = begun(fine_tuned())
    assert any("resized from (8, 8) to (10, 7), bicubic" in line for line in lines)
    images = nhwc(DINOV2["40x28/image"])

    @jax.jit
    def loss(params):
        outputs = model.apply(params, images, train=True, key=jax.random.key(0))
        return -jax.nn.log_softmax(outputs["logits"])[:, 2].sum(), outputs["pre_logits"]

    slopes, features = jax.grad(loss, has_aux=True)(params)
    expected = DINOV2["swiglu_reg4/40x28/cls"]
    np.testing.assert_allclose(features, expected, rtol=0, atol=1e-5)
    assert np.abs(slopes["head"]["kernel"]).max() > 0


def test_a_model_that_lacks_a_part_is_told_its_key():
    for options, message in (
        (
            {"num_register_tokens": 0},
            "register_tokens is left .*model.num_register_tokens=4",
        ),
        ({"activation": "gelu"}, "gate/bias is left .* has model.activation='swiglu'"),
    ):
        with pytest.raises(UserError, match=message):
            begun(fine_tuned(**options))


def test_the_explorer_names_registers_and_shows_the_patches_alone(encode):
    found = opened(GOLDEN / "dinov2_mlp_reg4" / "facebook.safetensors")
    preprocess = dataclasses.replace(found.preprocess, image_size=(24, 36))
    explored = ExploredModel(found, preprocess=preprocess)
    assert explored.describe()["extra"] == ["CLS", "REG1", "REG2", "REG3", "REG4"]
    assert explored.describe()["grid"] == (6, 9)
    picture = np.random.default_rng(0).integers(0, 255, (30, 50, 3), np.uint8)
    rows = explored.run(encode(picture, "PNG"), "a picture").rows
    assert rows.scales.shape == (5 + 54, 2, 4, 5 + 1)
    assert rows.levels.shape == (5 + 54, 2, 4, 54)
