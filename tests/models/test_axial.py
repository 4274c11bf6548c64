"""Axial-ViT against full attention, and as any other network."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import draw_params, tiny_config
from jax.sharding import PartitionSpec
from trees import specs

from vit_jax import models, weights
from vit_jax.config import fields
from vit_jax.errors import UserError
from vit_jax.models import cost
from vit_jax.models.encoder import Block
from vit_jax.models.encoder_config import EncoderConfig
from vit_jax.models.variants import SIZES
from vit_jax.training import config as configuration
from vit_jax.training import loop

TINY = {"width": 16, "depth": 2, "num_heads": 2, "mlp_dim": 24}


def by_hand(params, images, patch, full):
    """Runs blocks one after another; those named `full` see all patches, others one."""
    kernel = params["embedding"]["kernel"]
    x = jax.lax.conv_general_dilated(
        images,
        kernel,
        (patch, patch),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    bias = params["embedding"]["bias"].reshape(1, 1, -1)
    x = x.reshape(len(x), -1, TINY["width"]) + bias
    x = x + params["posembed_input"]["pos_embedding"]
    block = Block(EncoderConfig(**TINY, attention_impl="einsum"))
    for i in range(TINY["depth"]):
        for kind in ("row", "column"):
            tokens = x if kind == full else x.reshape(-1, 1, x.shape[-1])
            found = block.apply({"params": params[f"{kind}_block_{i}"]}, tokens)
            x = found.reshape(x.shape)
    mean = x.mean(-1, keepdims=True)
    x = (x - mean) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
    norm = {k: v.reshape(1, 1, -1) for k, v in params["encoder_norm"].items()}
    return (x * norm["scale"] + norm["bias"]).mean(1)


@pytest.mark.parametrize(
    ("size", "full"),
    [((4, 24), "row"), pytest.param((24, 4), "column", marks=pytest.mark.slow)],
)
def test_on_one_line_it_is_full_attention(size, full):
    model = models.create("Axial-B/4", num_classes=0, image_size=size, **TINY)
    params = draw_params(model)
    images = jax.random.normal(jax.random.key(1), (2, *size, 3))
    found = jax.jit(model.apply)(params, images)["pre_logits"]
    expected = jax.jit(lambda params: by_hand(params, images, 4, full))(params)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_patches_attend_along_rows_and_columns_alone():
    model = models.create(
        "Axial-B/4", num_classes=0, image_size=(12, 16), **TINY | {"depth": 1}
    )
    params = draw_params(model)

    @jax.jit
    def last(images):
        kept = model.module.apply(
            {"params": params},
            images,
            capture_intermediates=True,
            mutable=["intermediates"],
        )[1]["intermediates"]
        return kept["row_block_0"]["__call__"][0], kept["column_block_0"]["__call__"][0]

    images = jax.random.normal(jax.random.key(1), (1, 12, 16, 3))
    changed = images.at[0, 4:8, 8:12].add(1)  # Row 1, column 2.
    rows, columns = (np.abs(a - b).max(-1) for a, b in zip(last(images), last(changed)))
    assert (rows.reshape(3, 4).max(1) > 1e-3).tolist() == [False, True, False]
    # Then all columns know of that row.
    assert rows.shape == (3, 4)
    assert columns.shape == (4, 3)
    assert (columns > 1e-4).all()


@pytest.mark.slow
def test_it_has_twice_the_blocks_of_a_vit():
    patch, size = 16, SIZES["B"]
    axial = models.create("Axial-B/16", num_classes=1_000)
    vit = models.create("B/16", num_classes=1_000, pool="gap")
    D, F = size.width, size.mlp_dim
    block = 4 * D * (D + 1) + 2 * D * F + D + F + 4 * D
    assert cost.parameters(axial) == cost.parameters(vit) + size.depth * block
    # Products of attention are of lines, not of all patches.
    N = (224 // patch) ** 2
    lines = 2 * size.depth * N * (block - 9 * D - F + 2 * (224 // patch) * D)
    macs = 3 * patch**2 * D * N + 1_000 * D + lines
    assert cost.macs_per_image(axial) == pytest.approx(macs, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variant": "Axial-X/16"}, "'Axial-X/16' is not Axial-SIZE/PATCH"),
        ({"num_heads": 3}, "model.width=16 is not a multiple of model.num_heads=3"),
        ({"image_size": (20, 16)}, "height 20 is not a multiple of the patch size 8"),
        ({"depth": 500}, "model.depth=500 must be below 500"),
    ],
)
def test_what_is_none_is_refused(changes, message):
    stated = {"variant": "Axial-S/8", "num_classes": 3, "image_size": (16, 16), **TINY}
    with pytest.raises(UserError, match=message):
        models.create(**stated | changes)


@pytest.mark.slow
def test_a_run_is_a_model_for_another_size_of_image(tmp_path):
    config = fields.to_dict(tiny_config(total_steps=1, data={"image_size": (16, 16)}))
    model = {"variant": "Axial-S/4", "dropout": 0.1, **TINY, "depth": 1}
    report = loop.train(configuration.complete(config | {"model": model}), tmp_path)
    assert "top1" in report["final"]["val"]["params"]
    larger = models.create(**model, num_classes=3, image_size=(24, 24))
    loaded = weights.load(tmp_path, larger, head="new").params
    assert jax.tree.map(jnp.shape, loaded) == jax.tree.map(jnp.shape, larger.shapes)


def test_heads_and_hidden_units_are_split_over_the_axis_model():
    model = models.create("Axial-S/4", num_classes=4, image_size=(16, 16), **TINY)
    found = specs(model)
    attention = "row_block_1/MultiHeadDotProductAttention_1"
    assert found[f"{attention}/query/kernel"] == PartitionSpec(None, "model", None)
    assert found[f"{attention}/out/kernel"][0] == "model"
    mlp = "column_block_0/MlpBlock_3"
    assert found[f"{mlp}/Dense_0/kernel"] == PartitionSpec(None, "model")
