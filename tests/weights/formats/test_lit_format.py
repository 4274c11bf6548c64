"""LiT's files: towers and probabilities as vision_transformer computes them."""

import dataclasses
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import models, weights
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.models import text
from vit_jax.tasks import similarities
from vit_jax.weights.text_tower import text_tower

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"


@pytest.mark.parametrize("case", ["image_head", "no_image_head"])
def test_towers_are_those_of_vision_transformer(case):
    wanted = np.load(GOLDEN / "lit.io.npz")
    pretrained = weights.open_pretrained(GOLDEN / f"lit_{case}.npz")
    assert pretrained.format == "lit" and pretrained.options["num_classes"] == 0
    assert (text.PROJECTION in pretrained.task_params) == (case == "image_head")
    assert pretrained.preprocess == Preprocess(
        pretrained.options["image_size"], interpolation="bilinear_plain", squash=True
    )
    tower = text_tower(pretrained)
    model = models.create(**pretrained.options)
    features = model.apply(pretrained.params, jnp.asarray(wanted["image"]))
    images = tower.embed_images(features["pre_logits"])
    texts = tower.embed_tokens(wanted["tokens"])
    for found, name in ((images, "image"), (texts, "text")):
        np.testing.assert_allclose(found, wanted[f"{case}/{name}_embedding"], atol=1e-5)
    logits = tower.logits(images, texts)
    powers = np.exp(logits - logits.max(1, keepdims=True))
    probabilities = powers / powers.sum(1, keepdims=True)
    np.testing.assert_allclose(
        probabilities, wanted[f"{case}/probabilities"], atol=1e-5
    )
    loss, _ = similarities.softmax(
        jnp.asarray(images),
        jnp.asarray(texts[:4]),
        *text.scale_and_bias(tower.params),
    )
    np.testing.assert_allclose(loss, wanted[f"{case}/contrastive"], atol=1e-5)


def test_a_tokenizer_of_more_tokens_than_the_tower_knows():
    pretrained = weights.open_pretrained(GOLDEN / "lit_image_head.npz")
    with pytest.raises(UserError, match="does not record its tokenizer: give it"):
        text_tower(pretrained).embed(["a"])
    pretrained = dataclasses.replace(pretrained, tokenizer="bytes")
    with pytest.raises(UserError, match="has 258 tokens, but the text tower"):
        text_tower(pretrained).embed(["a"])
