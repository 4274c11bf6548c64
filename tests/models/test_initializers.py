"""First values have the moments that the original codes give networks of the same sizes."""

import json
import math
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from vit_jax import models
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
from vit_jax.models import initializers, text
from vit_jax.tasks import dino_losses
from vit_jax.tasks.simmim import SimMimConfig

# Deviation, largest magnitude and number of values; tests/golden/README.md.
ORIGINALS = json.loads(
    (pathlib.Path(__file__).parents[1] / "golden" / "initial_values.json").read_text()
)
VIT = {"num_classes": 40, "image_size": (32, 32), "width": 96, "num_heads": 3}
VIT |= {"depth": 2, "mlp_dim": 384, "num_register_tokens": 4}
CLIP = VIT | {"width": 128, "num_heads": 2, "mlp_dim": 512}
SWIN = {"num_classes": 40, "image_size": (32, 32), "width": 48, "init": "timm"}
SWIN |= {"stage_depths": (1, 1), "num_heads": (3, 6), "window_size": 4}

ATTENTION = "MultiHeadDotProductAttention_1"
PATHS = {
    "patches": "embedding/kernel",
    "patches_bias": "embedding/bias",
    "class_token": "cls",
    "registers": "register_tokens",
    "positions": "posembed_input/pos_embedding",
    "text_positions": "pos_embedding",
    "head": "head/kernel",
    "head_bias": "head/bias",
    "tokens": "embedding",
    "attention": f"{ATTENTION}/query/kernel",
    "attention_bias": f"{ATTENTION}/value/bias",
    "attention_out": f"{ATTENTION}/out/kernel",
    "attention_out_bias": f"{ATTENTION}/out/bias",
    "mlp": "MlpBlock_3/Dense_0/kernel",
    "mlp_bias": "MlpBlock_3/Dense_0/bias",
    "mlp_out": "MlpBlock_3/Dense_1/kernel",
    "mlp_out_bias": "MlpBlock_3/Dense_1/bias",
    # Swin.
    "attn/bias_table": "stage_0/block_0/attn/bias_table",
    "attn/qkv": "stage_0/block_0/attn/qkv/kernel",
    "attn/qkv_bias": "stage_0/block_0/attn/qkv/bias",
    "attn/q_bias": "stage_0/block_0/attn/q_bias",
    "attn/v_bias": "stage_0/block_0/attn/v_bias",
    "attn/cpb_mlp.0": "stage_0/block_0/attn/bias_in/kernel",
    "attn/cpb_mlp.0_bias": "stage_0/block_0/attn/bias_in/bias",
    "attn/cpb_mlp.2": "stage_0/block_0/attn/bias_out/kernel",
    "attn/proj": "stage_0/block_0/attn/proj/kernel",
    "attn/proj_bias": "stage_0/block_0/attn/proj/bias",
    "mlp/fc1": "stage_0/block_0/mlp/Dense_0/kernel",
    "mlp/fc1_bias": "stage_0/block_0/mlp/Dense_0/bias",
    "mlp/fc2": "stage_0/block_0/mlp/Dense_1/kernel",
    "mlp/fc2_bias": "stage_0/block_0/mlp/Dense_1/bias",
    "merge": "stage_0/merge/kernel",
}
OF_TASKS = ("mask_token", "decoder", "decoder_bias", "decoder_attention")
OF_TASKS += ("decoder_embedding", "decoder_head", "dino_head", "dino_head_bias")
OF_TASKS += ("dino_last",)


def path_of(role):
    block, _, name = role.partition("/") if role[0].isdigit() else ("", "", role)
    return f"encoderblock_{block}/{PATHS[name]}" if block else PATHS[role]


def compute(init, originals):
    """Returns the values of the roles of some originals; XLA compiles no others."""
    wanted = {path_of(r) for o in originals for r in ORIGINALS[o] if r not in OF_TASKS}

    def some():
        flat = flatten_dict(init(jax.random.key(0)), sep="/")
        flat = {k.removeprefix("Transformer/"): v for k, v in flat.items()}
        return {k: v for k, v in flat.items() if k in wanted}

    return {k: np.asarray(v) for k, v in jax.jit(some)().items()}


def first_values(originals, variant, **options):
    return compute(models.create(variant, **options).init, originals)


def first_values_of_text():
    config = text.TextConfig(
        vocab_size=300, width=96, depth=3, num_heads=3, mlp_dim=384, init="clip_text"
    )
    tokens = jnp.zeros((1, 11), jnp.int32)
    module = config.build(11, 64, "float32")

    def draw(key):
        params = module.init(key, tokens)["params"]
        return initializers.scale_branches(params, config)

    return compute(draw, ["clip_text"])


def assert_moments(x, deviation, largest, count, role):
    """Compares deviation, mean, and the bounds of what is bounded."""
    if not deviation:
        assert not x.any(), role
        return
    error = deviation * 4 * math.sqrt(1 / (2 * count) + 1 / (2 * x.size))
    assert abs(x.std() - deviation) < error, (role, x.std(), deviation)
    assert abs(x.mean()) < 5 * deviation / math.sqrt(x.size), role
    if largest < 2 * deviation:  # A uniform or a cut distribution.
        assert abs(abs(x).max() / largest - 1) < 0.06, (role, abs(x).max(), largest)
    elif x.size > 300:
        assert abs(x).max() > 2.3 * deviation, role


def assert_as_theirs(params, original):
    """Compares the roles of an original with a network."""
    compared = 0
    for role, (deviation, largest, count) in ORIGINALS[original].items():
        if role in OF_TASKS:
            continue
        compared += 1
        assert_moments(params[path_of(role)], deviation, largest, count, role)
    assert compared > 6


@pytest.mark.parametrize(
    ("init", "originals"),
    [
        ("timm", ("deit", "dino", "vit5", "dinov3")),
        pytest.param("dinov2", ("dinov2",), marks=pytest.mark.slow),
        ("mae", ("mae",)),
        # Two blocks, of which the second has half the first.
        pytest.param("simmim", ("simmim",), marks=pytest.mark.slow),
    ],
)
def test_a_network_begins_as_the_original(init, originals):
    params = first_values(originals, "B/8", init=init, **VIT)
    for original in originals:
        assert_as_theirs(params, original)


@pytest.mark.slow
def test_a_clip_begins_as_the_original():
    params = first_values(["clip"], "B/8", init="clip", **CLIP)
    assert_as_theirs(params, "clip")
    assert_as_theirs(first_values_of_text(), "clip_text")


@pytest.mark.parametrize(
    "original", ["swin", pytest.param("swin_v2", marks=pytest.mark.slow)]
)
def test_a_swin_begins_as_the_original(original):
    variant = "SwinV2-T/w8" if original == "swin_v2" else "Swin-T"
    assert_as_theirs(first_values([original], variant, **SWIN), original)


def test_a_text_tower_of_big_vision_begins_as_flax_has_its_layers():
    row, key = initializers.TABLE["big_vision"], jax.random.key(3)
    table = nn.Embed(300, 96).init(key, jnp.zeros(1, jnp.int32))["params"]["embedding"]
    head = nn.Dense(64).init(key, jnp.zeros((1, 96)))["params"]["kernel"]
    for init, wanted in ((row.text_tokens, table), (row.text_head, head)):
        found = init(key, wanted.shape)
        assert float(found.std()) == pytest.approx(float(wanted.std()), rel=0.03)
        assert abs(found).max() == pytest.approx(abs(wanted).max(), rel=0.25)
    positions = row.text_positions(key, (1, 11, 96))
    assert float(positions.std()) == pytest.approx(96**-0.5, rel=0.1)


def test_what_simmim_adds_begins_as_the_original():
    data = DataConfig(image_size=(32, 32), num_classes=0)
    swin = {"stage_depths": (1,), "num_heads": (3,), "init": "timm", "num_classes": 0}
    for original, model in (
        ("simmim", models.create("B/8", **VIT | {"num_classes": 0, "init": "simmim"})),
        ("simmim_swin", models.create("Swin-T", **SWIN | swin)),
    ):
        task = SimMimConfig(mask_unit=8).build(model, data, RunLength(4, 1.0))

        def added(key, task=task):
            params, _ = task.init(key)
            decoder = params["decoder"]
            token = {"mask_token": params["mask_token"]}
            return {
                "decoder": decoder["kernel"],
                "decoder_bias": decoder["bias"],
                **token,
            }

        found = jax.jit(added)(jax.random.key(0))
        for role, x in found.items():
            assert_moments(np.asarray(x), *ORIGINALS[original][role], role)


def test_heads_of_dino_begin_as_the_originals():
    for original, weight_norm in (("dino", True), ("dinov3", False)):
        head = dino_losses.Head(128, 64, 200, weight_norm=weight_norm)
        init = jax.jit(lambda key, head=head: head.init(key, jnp.zeros((1, 96))))
        params = init(jax.random.key(0))["params"]
        found = {"dino_last": params["last_layer"]}
        found["dino_head"] = params["Dense_0"]["kernel"]
        for role in found.keys() & ORIGINALS[original].keys():
            assert_moments(np.asarray(found[role]), *ORIGINALS[original][role], role)


def test_attention_of_s_begins_nearly_uniform_but_in_googles_networks():
    """Logits of normalised tokens have these deviations at S, of 384 features."""
    x = jax.random.normal(jax.random.key(1), (50, 384))
    for init, wanted in (("google", 1.0), ("mae", 0.5), ("timm", 0.1536)):
        kernel = initializers.TABLE[init].attention
        q, k = (x @ kernel(jax.random.key(i), (384, 384)) for i in (2, 3))
        logits = jnp.einsum("nhk,mhk->hnm", *(y.reshape(50, 6, 64) for y in (q, k))) / 8
        assert float(logits.std()) == pytest.approx(wanted, rel=0.1)
