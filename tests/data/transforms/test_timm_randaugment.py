"""timm's RandAugment: its operations to the bit, and how they are drawn."""

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from vit_jax.data.transforms import timm_randaugment
from vit_jax.data.transforms.timm_randaugment import NAMES, TimmRandAugment, operate

# Of `_RAND_INCREASING_TRANSFORMS` in timm, in the order of `NAMES`.
OF_TIMM = (
    *("AutoContrast", "Equalize", "Invert", "Rotate", "PosterizeIncreasing"),
    *("SolarizeIncreasing", "SolarizeAdd", "ColorIncreasing", "ContrastIncreasing"),
    *("BrightnessIncreasing", "SharpnessIncreasing", "ShearX", "ShearY"),
    *("TranslateXRel", "TranslateYRel"),
)
FILL = (124, 116, 104)


@pytest.mark.parity
@pytest.mark.parametrize(("name", "theirs"), [*zip(NAMES, OF_TIMM, strict=True)])
def test_operations_are_timms(name, theirs, natural, monkeypatch):
    from import_timm import import_timm

    import_timm()
    from timm.data import auto_augment

    monkeypatch.setattr(auto_augment.random, "gauss", lambda mean, std: mean + std)
    for picture in map(Image.fromarray, natural):
        for magnitude in (0.0, 3.2, 8.5, 9.5):
            hparams = {"img_mean": FILL, "interpolation": Image.Resampling.BICUBIC}
            hparams |= {"magnitude_std": 0.5}
            for negative in (False, True):
                # It is also compared with the probability, 1: nothing is left out.
                sign = 0.9 if negative else 0.1
                monkeypatch.setattr(auto_augment.random, "random", lambda s=sign: s)
                op = auto_augment.AugmentOp(theirs, 1.0, magnitude, hparams)
                found = operate(name, picture, (magnitude + 0.5) / 10, negative)
                if name == "posterize" and magnitude == 9.5:  # Pillow 13 refuses it.
                    assert not np.any(found)
                    continue
                np.testing.assert_array_equal(found, op(picture))


@pytest.mark.parity
def test_the_operations_of_the_published_line_are_these():
    from import_timm import import_timm

    import_timm()
    from timm.data.auto_augment import rand_augment_transform

    made = rand_augment_transform("rand-m9-mstd0.5-inc1", {})
    assert [op.name for op in made.ops] == list(OF_TIMM)
    ours = TimmRandAugment()
    assert made.num_layers == ours.layers
    for op in made.ops:
        drawn = ours.magnitude, ours.std, ours.probability
        assert (op.magnitude, op.magnitude_std, op.prob) == drawn


def test_operations_and_strengths_are_drawn_as_the_line_says(monkeypatch):
    drawn = []

    def record(name, picture, level, negative, resample, fill):
        drawn.append((name, level, negative, fill))
        return picture

    monkeypatch.setattr(timm_randaugment, "operate", record)
    generator = np.random.Generator(np.random.Philox(0))
    op, image = TimmRandAugment(magnitude=5.0, layers=3), np.zeros((4, 6, 3), np.uint8)
    for _ in range(2000):
        assert op(image, generator).shape == image.shape
    names, levels, signs, fills = zip(*drawn, strict=True)
    assert len(drawn) == pytest.approx(3000, abs=150)
    assert stats.chisquare(np.unique(names, return_counts=True)[1]).pvalue > 0.001
    assert set(names) == set(NAMES) and set(fills) == {FILL}
    assert stats.kstest(levels, "norm", (0.5, 0.05)).pvalue > 0.001
    assert np.mean(signs) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 1, 3), (5, 7, 1), (9, 4, 3)])
def test_any_shape_is_kept_and_the_image_left_alone(name, shape, monkeypatch):
    monkeypatch.setattr(timm_randaugment, "NAMES", (name,))
    image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    before, generator = image.copy(), np.random.Generator(np.random.Philox(1))
    op = TimmRandAugment(probability=1.0)
    assert op(image, generator).shape == shape
    np.testing.assert_array_equal(image, before)
