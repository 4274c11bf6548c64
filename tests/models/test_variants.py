"""Every variant of the registry by its exact number of parameters."""

import jax
import pytest

from vit_jax import models
from vit_jax.models import variants

# 1000 classes, 224 pixels, class token, no representation layer. Published for the
# same: B, L and H (vision_transformer's and timm's tables), R50x1, R101x1, R152x2 and
# R152x4 (BiT's), the hybrids (timm's).
COUNTS = {
    "Ti/8": 5_719_720,
    "Ti/14": 5_694_376,
    "Ti/16": 5_717_416,
    "Ti/32": 6_131_560,
    "S/8": 22_055_272,
    "S/14": 22_004_584,
    "S/16": 22_050_664,
    "S/32": 22_878_952,
    "B/8": 86_576_872,
    "B/14": 86_475_496,
    "B/16": 86_567_656,
    "B/32": 88_224_232,
    "L/8": 304_338_920,
    "L/14": 304_203_752,
    "L/16": 304_326_632,
    "L/32": 306_535_400,
    "So400m/8": 413_749_720,
    "So400m/14": 413_597_656,
    "So400m/16": 413_735_896,
    "So400m/32": 416_220_760,
    "H/8": 632_214_760,
    "H/14": 632_045_800,
    "H/16": 632_199_400,
    "H/32": 634_960_360,
    "g/8": 1_012_797_288,
    "g/14": 1_012_611_432,
    "g/16": 1_012_780_392,
    "g/32": 1_015_817_448,
    "G/8": 1_844_660_328,
    "G/14": 1_844_440_680,
    "G/16": 1_844_640_360,
    "G/32": 1_848_229_608,
    "R50+B/32": 110_945_832,
    "R50+B/16": 98_659_112,
    "R50+L/32": 328_994_856,
    "R50+L/16": 316_483_624,
    "R26+S/32": 36_431_912,
    "R26+B/32": 101_383_976,
    "R+Ti/16": 6_337_704,
    "R50x1": 25_549_352,
    "R50x2": 97_988_712,
    "R101x1": 44_541_480,
    "R152x1": 60_185_128,
    "R152x2": 236_335_208,
    "R152x4": 936_533_224,
    "R200x3": 568_633_000,
}


def count(model):
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return sum(x.size for x in jax.tree.leaves(shapes))


# One of each size and stem: the others differ as the counts by hand say.
@pytest.mark.parametrize(
    "variant",
    ["Ti/8", "S/32", "B/16", "L/16", "So400m/14", "H/14", "g/14", "G/14"]
    + ["R50+B/16", "R26+S/32", "R+Ti/16", "R50x1", "R50x2", "R101x1"],
)
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
    [
        ("S/14", {}, 22_056_192, 0),
        ("L/14", {}, 304_367_616, 4),
        ("g/14", {"width": 1536, "num_heads": 24, **GATED}, 1_136_479_232, 4),
    ],
)
def test_networks_of_dinov2_have_their_number_of_parameters(
    variant, options, expected, registers
):
    model = models.create(
        variant, **DINOV2, **options, num_register_tokens=registers, scan=True
    )
    assert count(model) == expected + registers * model.options["width"]


def test_every_variant_has_a_count_and_every_count_a_variant():
    assert set(COUNTS) == set(variants.NAMES)
    sizes = {name.split("/")[0] for name in variants.NAMES if "+" not in name}
    assert set(variants.SIZES) <= sizes
    assert {name.split("x")[0] for name in sizes} - variants.SIZES.keys() == set(
        variants.RESNETS
    )


def encoder(size, patches, patch, channels):
    """Parameters of an encoder with a class token and 1000 classes, by hand."""
    D, F = size.width, size.mlp_dim
    block = 4 * (D * D + D) + 2 * D * F + D + F + 2 * 2 * D
    embedding = patch**2 * channels * D + D
    return embedding + (patches + 2) * D + size.depth * block + 2 * D + 1000 * (D + 1)


def resnet(blocks, width, pre_activation):
    """Convolutions and norms of a ResNet without its head, by hand."""
    total, channels = 7 * 7 * 3 * width, width
    total += 0 if pre_activation else 2 * width
    for stage, units in enumerate(blocks):
        mid, out = width * 2**stage, 4 * width * 2**stage
        for unit in range(units):
            total += channels * mid + 9 * mid * mid + mid * out
            norms = channels + 2 * mid if pre_activation else 2 * mid + out
            if unit == 0:
                total += channels * out
                norms += 0 if pre_activation else out
            total += 2 * norms
            channels = out
    return total + (2 * channels if pre_activation else 0)


@pytest.mark.parametrize("variant", variants.NAMES)
def test_the_counts_are_what_the_layers_add_up_to(variant):
    parsed = variants.parse(variant)
    if parsed.size is None:
        blocks, width = parsed.resnet.stage_depths, parsed.resnet.stem_width
        features = 4 * width * 2 ** (len(blocks) - 1)
        expected = resnet(blocks, width, True) + 1000 * (features + 1)
    elif parsed.resnet is None:
        patches = (224 // parsed.patch_size) ** 2
        expected = encoder(parsed.size, patches, parsed.patch_size, 3)
    else:
        blocks, width = parsed.resnet.stage_depths, parsed.resnet.stem_width
        stride = 4 * 2 ** max(0, len(blocks) - 1)
        channels = 4 * width * 2 ** (len(blocks) - 1) if blocks else width
        patches = (224 // stride // parsed.patch_size) ** 2
        expected = resnet(blocks, width, False)
        expected += encoder(parsed.size, patches, parsed.patch_size, channels)
    assert COUNTS[variant] == expected


def test_the_papers_spelling_of_a_hybrid_is_understood():
    assert variants.parse("R50x1+L/16") == variants.parse("R50+L/16")
