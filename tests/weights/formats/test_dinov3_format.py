"""Files of facebookresearch/dinov3: backbones, their separate norms, teacher and student."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers import random_weights
from safetensors.numpy import save_file
from trees import assert_same

from vit_jax import models, weights
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
from vit_jax.errors import UserError
from vit_jax.tasks import dinov2
from vit_jax.weights import export
from vit_jax.weights.formats import dino, dinov3, torch_file

WIDTH, HEADS, DEPTH, PATCH, REGISTERS = 24, 3, 2, 4, 2
TINY = {"width": 8, "depth": 1, "num_heads": 2, "mlp_dim": 8, "num_classes": 0}
TINY |= {"activation": "gelu"}
NORMS = ("norm", "cls_norm", "local_cls_norm")


def backbone_of(norms=NORMS, gated=False, seed=0):
    """Arrays of a small backbone under their names."""
    rng, D = np.random.default_rng(seed), WIDTH
    shapes = {
        "cls_token": (1, 1, D),
        "storage_tokens": (1, REGISTERS, D),
        "mask_token": (1, D),
        "patch_embed.proj.weight": (D, 3, PATCH, PATCH),
        "patch_embed.proj.bias": (D,),
    }
    layers = {"w1": (20, D), "w2": (20, D), "w3": (D, 20)}
    layers = layers if gated else {"fc1": (20, D), "fc2": (D, 20)}
    layers = {f"mlp.{name}": shape for name, shape in layers.items()}
    layers |= {"attn.qkv": (3 * D, D), "attn.proj": (D, D)}
    for i in range(DEPTH):
        for name, shape in layers.items():
            shapes |= {f"blocks.{i}.{name}.weight": shape}
            shapes |= {f"blocks.{i}.{name}.bias": shape[:1]}
        shapes |= {f"blocks.{i}.ls{n}.gamma": (D,) for n in (1, 2)}
        norms = (*norms, f"blocks.{i}.norm1", f"blocks.{i}.norm2")
    shapes |= {f"{n}.{kind}": (D,) for n in norms for kind in ("weight", "bias")}
    arrays = {k: 0.3 * rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    for name in arrays:
        arrays[name] += name.endswith(("norm.weight", "norm1.weight", "norm2.weight"))
    n = D // HEADS // 4
    arrays[dinov3.PERIODS] = (100.0 ** (np.arange(n) / n)).astype(np.float32)
    return arrays


def masked(arrays):
    """The arrays of a backbone with masks of the biases, 0 for keys."""
    mask = np.ones(3 * WIDTH, np.float32)
    mask[WIDTH : 2 * WIDTH] = 0
    return arrays | {f"blocks.{i}.attn.qkv.bias_mask": mask for i in range(DEPTH)}


def tokens_of(torch, arrays, images, first_norm):
    """Normalised tokens, with one norm for the prefix and "norm" for the patches."""
    w = {name: torch.tensor(value) for name, value in arrays.items()}
    F, (B, _, Y, X) = torch.nn.functional, images.shape
    epsilon = 1e-5 if "blocks.0.attn.qkv.bias_mask" in w else 1e-6
    K, P = WIDTH // HEADS, 1 + REGISTERS

    def linear(x, name):
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x, name):
        of_norm = w[f"{name}.weight"], w[f"{name}.bias"]
        return F.layer_norm(x, (WIDTH,), *of_norm, epsilon)

    rows, columns = Y // PATCH, X // PATCH
    places = [2 * (torch.arange(n) + 0.5) / n - 1 for n in (rows, columns)]
    grid = torch.stack(torch.meshgrid(*places, indexing="ij"), -1).reshape(-1, 2)
    angles = 2 * np.pi * grid[:, :, None] / w[dinov3.PERIODS]
    angles = angles.reshape(len(grid), -1).repeat(1, 2)

    def turn(x):
        x, patches = x[:, :, :P], x[:, :, P:]
        half = torch.cat([-patches[..., K // 2 :], patches[..., : K // 2]], -1)
        patches = patches * angles.cos() + half * angles.sin()
        return torch.cat([x, patches], 2)

    x = F.conv2d(
        images, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], PATCH
    )
    x = x.flatten(2).transpose(1, 2)
    prefix = [w[name].expand(B, -1, -1) for name in ("cls_token", "storage_tokens")]
    x = torch.cat([*prefix, x], 1)
    for i in range(DEPTH):
        block = f"blocks.{i}"
        y = norm(x, f"{block}.norm1")
        bias = w[f"{block}.attn.qkv.bias"] * w.get(f"{block}.attn.qkv.bias_mask", 1)
        qkv = F.linear(y, w[f"{block}.attn.qkv.weight"], bias)
        q, k, v = qkv.reshape(B, -1, 3, HEADS, K).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(turn(q), turn(k), v)
        y = linear(y.transpose(1, 2).flatten(2), f"{block}.attn.proj")
        x = x + y * w[f"{block}.ls1.gamma"]
        y = norm(x, f"{block}.norm2")
        if f"{block}.mlp.w1.weight" in w:
            y = F.silu(linear(y, f"{block}.mlp.w1")) * linear(y, f"{block}.mlp.w2")
            y = linear(y, f"{block}.mlp.w3")
        else:
            y = linear(F.gelu(linear(y, f"{block}.mlp.fc1")), f"{block}.mlp.fc2")
        x = x + y * w[f"{block}.ls2.gamma"]
    return torch.cat([norm(x[:, :P], first_norm), norm(x[:, P:], "norm")], 1).numpy()


def network_of(found, size):
    return models.create(**found.options | {"image_size": size})


@pytest.mark.parametrize("norms", [NORMS, NORMS[::2], NORMS[:1]])
@pytest.mark.parametrize("gated", [False, True])
def test_tokens_are_those_of_the_rule(norms, gated, tmp_path):
    torch = pytest.importorskip("torch")
    arrays = masked(backbone_of(norms, gated))
    save_file(arrays, tmp_path / "a.safetensors")
    found = weights.open_pretrained(tmp_path / "a.safetensors")
    model = network_of(found, (12, 20))
    assert found.format == "dinov3" and model.config.num_heads == HEADS
    assert model.config.cls_norm == ("cls_norm" in norms)
    assert model.config.rope_temperature == 100 and model.config.layer_norm_eps == 1e-5
    dropped = [note for note in found.notes if "only used for pretraining" in note]
    assert len(dropped) == 1 + ("local_cls_norm" in norms)
    images = np.random.default_rng(1).normal(size=(2, 12, 20, 3)).astype(np.float32)
    first = "cls_norm" if "cls_norm" in norms else "norm"
    given = torch.tensor(images.transpose(0, 3, 1, 2))
    expected = tokens_of(torch, arrays, given, first)
    params = jax.tree.map(jnp.asarray, found.params)
    tokens = jax.jit(model.encode)(params, images)
    np.testing.assert_allclose(tokens, expected, atol=2e-5)
    last = jax.jit(lambda p, x: model.layer_features(p, x, (0, -1), tokens="all"))
    np.testing.assert_allclose(last(params, images)[1], expected, atol=2e-5)
    pooled = jax.jit(model.apply)(params, images)["pre_logits"]
    np.testing.assert_allclose(pooled, expected[:, 0], atol=2e-5)


@pytest.mark.parametrize("base", [100, 105, 125, 128, 101.5])
def test_the_base_of_the_periods_is_found(base):
    for n in (2, 16):
        periods = (base ** (np.arange(n) / n)).astype(np.float32)
        flat = {dinov3.PERIODS: periods, "patch_embed.proj.weight": np.zeros(4 * n)}
        assert dinov3.config(flat, "a")["model_args"]["rope_temperature"] == base
    # In bfloat16, as rope_dtype of the training says.
    flat[dinov3.PERIODS] = np.asarray(
        jnp.asarray(100.0 ** (np.arange(16) / 16), jnp.bfloat16), np.float32
    )
    assert dinov3.config(flat, "a")["model_args"]["rope_temperature"] == 100


def test_the_epsilon_is_told_from_the_biases(tmp_path):
    for arrays, epsilon in ((backbone_of(), 1e-6), (masked(backbone_of()), 1e-5)):
        save_file(arrays, tmp_path / "a.safetensors")
        found = weights.open_pretrained(tmp_path / "a.safetensors")
        assert found.options["layer_norm_eps"] == epsilon
        assert any(f"{epsilon:g}" in note for note in found.notes)
        _, notes = export.export(found, "dino", tmp_path / "b.pth", overwrite=True)
        again = weights.open_pretrained(tmp_path / "b.pth")
        assert again.options["layer_norm_eps"] == epsilon
        assert_same(again.params, flatten_dict(found.params, sep="/"))
        assert any(f"mask_k_bias={epsilon == 1e-5}" in note for note in notes)


@pytest.mark.parametrize(("width", "small"), [(1_024, 1), (1_024, 0), (4_096, 1)])
def test_assumed_preprocessing_is_told(width, small):
    flat = {"patch_embed.proj.weight": np.zeros((width, 3, 1, 1))}
    flat |= {f"{dinov3.SMALL_NORM}bias": np.zeros(width)} if small else {}
    _, images = dino.assumed(flat, 1e-5)
    assert "ImageNet's" in images
    assert ("SAT-493M" in images) == (width == 1_024 and bool(small))


def training_of(seed):
    rng = np.random.default_rng(seed)
    arrays = {f"backbone.{k}": v for k, v in backbone_of(seed=seed).items()}
    for head, outputs in (("dino_head", 7), ("ibot_head", 9)):
        sizes = {"mlp.0": (6, WIDTH), "mlp.2": (6, 6), "mlp.4": (4, 6)}
        shapes = {f"{k}.weight": v for k, v in sizes.items()}
        shapes |= {f"{k}.bias": v[:1] for k, v in sizes.items()}
        shapes |= {"last_layer.weight": (outputs, 4)}
        for name, shape in shapes.items():
            arrays[f"{head}.{name}"] = rng.normal(size=shape).astype(np.float32)
    return arrays


@pytest.mark.parametrize("gated", [False, True])
def test_student_teacher_heads_and_norms_come_in_and_go_out(gated, tmp_path):
    parts = {"teacher": training_of(0), "student": training_of(1)}
    for part, arrays in parts.items():
        seed = int(part == "student")
        extra = backbone_of(gated=gated, seed=seed)
        kept = {k: v for k, v in arrays.items() if not k.startswith("backbone.")}
        parts[part] = kept | {f"backbone.{k}": v for k, v in extra.items()}
    torch_file.write(tmp_path / "a.pth", parts)
    found = weights.open_pretrained(tmp_path / "a.pth")
    names = {"head", "patch_head", "mask_token", "small_norm_scale", "small_norm_bias"}
    assert found.task["small_norm"] and not found.task["weight_norm"]
    assert found.task_params.keys() == names | {"network", "teacher"}
    assert found.task_params["teacher"].keys() == names
    export.export(found, "dino", tmp_path / "b.pth")
    written = torch_file.read(tmp_path / "b.pth")
    expected = {f"{p}.{k}": v for p, part in parts.items() for k, v in part.items()}
    assert_same(written, expected)


def test_a_norm_of_small_crops_needs_rotary_positions(tmp_path):
    plain = random_weights(models.create("B/32", **TINY))
    norm = {"small_norm_scale": np.ones(8), "small_norm_bias": np.zeros(8)}
    found = dataclasses.replace(
        plain, task={"name": "dinov2"}, task_params={"teacher": norm}
    )
    _, notes = export.export(found, "dino", tmp_path / "a.pth")
    assert any("norm of small crops: left out" in note for note in notes)
    assert not any(
        "local_cls_norm" in name for name in torch_file.read(tmp_path / "a.pth")
    )


def test_small_crops_of_the_student_have_the_norm_of_the_file(tmp_path):
    torch = pytest.importorskip("torch")
    torch_file.write(tmp_path / "a.pth", {"teacher": training_of(0)})
    found = weights.open_pretrained(tmp_path / "a.pth")
    model, size = network_of(found, (8, 12)), (8, 12)
    crops = "multi_crop(small_size=4, num_small=2)"
    data = DataConfig(image_size=size, num_classes=0, train_transform=crops)
    config = dinov2.Dinov2Config(**found.task)
    task = config.build(model, data, RunLength(10, 1.0))
    teacher = found.task_params["teacher"] | {"network": found.params}
    params = jax.tree.map(jnp.asarray, teacher)
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.normal(size=(2, 2, 8, 12, 3)),
        "small_crops": rng.normal(size=(2, 2, 4, 4, 3)),
    }
    batch = {name: jnp.asarray(x, jnp.float32) for name, x in batch.items()}
    hidden = jnp.zeros((4, 6), bool), jnp.zeros((1, 1), int), jnp.ones(1)
    masked = dinov2.Masked(*hidden)
    answers = jax.jit(lambda *args: task.answers(*args).outputs)(params, batch, masked)
    apply = jax.jit(task.head.apply)
    for name, norm in (("image", "cls_norm"), ("small_crops", "local_cls_norm")):
        given = np.asarray(batch[name]).reshape(4, *batch[name].shape[2:])
        given = torch.tensor(given.transpose(0, 3, 1, 2))
        tokens = tokens_of(torch, backbone_of(seed=0), given, norm)
        outputs = apply({"params": params["head"]}, tokens[:, 0])
        views = slice(2) if name == "image" else slice(2, 4)
        found_outputs = answers[:, views].reshape(4, -1)
        np.testing.assert_allclose(found_outputs, outputs, atol=2e-5)


def test_bad_files_and_networks_are_told_in_one_line(tmp_path):
    arrays = backbone_of() | {dinov3.PERIODS: np.array([3.0, 100.0], np.float32)}
    save_file(arrays, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=r"rope_embed.periods are not the powers"):
        weights.open_pretrained(tmp_path / "a.safetensors")
    save_file(backbone_of(), tmp_path / "b.safetensors")
    found = weights.open_pretrained(tmp_path / "b.safetensors")
    for form, message in (("timm", "--to=dino"), ("hf_dinov3", "cls_norm=True")):
        with pytest.raises(UserError, match=message):
            export.export(found, form, tmp_path / form)
    # Learned positions go nowhere with two norms.
    network = random_weights(models.create("B/32", **TINY, cls_norm=True))
    for form in ("timm", "dino"):
        with pytest.raises(UserError, match="cls_norm=True.* --to=safetensors"):
            export.export(network, form, tmp_path / "c.pth")
    mixer = random_weights(models.create("Mixer-B/32", num_classes=0, width=8, depth=1))
    with pytest.raises(UserError, match="variant='Mixer-B/32'"):
        export.export(mixer, "dino", tmp_path / "a.pth")
    # Files without it go to transformers and back; a mask token may be left out.
    left_out = "cls_norm", "mask_token", dinov3.SMALL_NORM
    arrays = {k: v for k, v in backbone_of().items() if not k.startswith(left_out)}
    save_file(arrays, tmp_path / "c.safetensors")
    found = weights.open_pretrained(tmp_path / "c.safetensors")
    export.export(found, "hf_dinov3", tmp_path / "d")
    again = weights.open_pretrained(tmp_path / "d")
    assert_same(again.params, flatten_dict(found.params, sep="/"))
