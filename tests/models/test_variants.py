"""Variants of the registry by their exact number of parameters."""

import jax
import pytest
from helpers import slow_but

from vit_jax import models
from vit_jax.models import variants

# One of each size and stem. 1000 classes, 224 pixels, class token, no representation
# layer. Published for the same: B, L and H (vision_transformer's and timm's tables), R50x1
# and R101x1 (BiT's), the hybrids (timm's).
COUNTS = {
    "Ti/8": 5_719_720,
    "S/32": 22_878_952,
    "B/16": 86_567_656,
    "L/16": 304_326_632,
    "So400m/14": 413_597_656,
    "H/14": 632_045_800,
    "g/14": 1_012_611_432,
    "G/14": 1_844_440_680,
    "R50+B/16": 98_659_112,
    "R26+S/32": 36_431_912,
    "R+Ti/16": 6_337_704,
    "R50x1": 25_549_352,
    "R50x2": 97_988_712,
    "R101x1": 44_541_480,
}
FAST = ("Ti/8", "B/16", "R26+S/32", "R50x2")


def count(model):
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return sum(x.size for x in jax.tree.leaves(shapes))


@pytest.mark.parametrize("variant", slow_but(FAST, COUNTS))
def test_variant_has_its_number_of_parameters(variant):
    # A scan of the blocks has as many as the blocks, and is traced once.
    options = {} if variants.parse(variant).size is None else {"scan": True}
    assert count(models.create(variant, num_classes=1000, **options)) == COUNTS[variant]


# As timm's networks of these names have; facebookresearch/dinov2 says 21, 86, 300 and
# 1,100 M.
DINOV2 = {"num_classes": 0, "image_size": (518, 518), "layer_scale_init": 1e-5}
GATED = {"activation": "swiglu", "mlp_dim": 4096}


@pytest.mark.parametrize(
    ("variant", "options", "expected", "registers"),
    slow_but(
        [("S/14", {}, 22_056_192, 0)],
        [
            ("S/14", {}, 22_056_192, 0),
            ("L/14", {}, 304_367_616, 4),
            ("g/14", {"width": 1536, "num_heads": 24, **GATED}, 1_136_479_232, 4),
        ],
    ),
)
def test_networks_of_dinov2_have_their_number_of_parameters(
    variant, options, expected, registers
):
    model = models.create(
        variant, **DINOV2, **options, num_register_tokens=registers, scan=True
    )
    assert count(model) == expected + registers * model.options["width"]


def test_the_papers_spelling_of_a_hybrid_is_understood():
    assert variants.parse("R50x1+L/16") == variants.parse("R50+L/16")
