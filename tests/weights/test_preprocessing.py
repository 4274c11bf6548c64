"""Prepared images equal an independent use of Pillow, timm and Hugging Face."""

import dataclasses
import io
import math
import re

import numpy as np
import pytest
from helpers import photograph
from PIL import Image
from trees import checkpoint, encoder

from vit_jax.data.decode import DamagedImage
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.transforms import parse
from vit_jax.errors import UserError
from vit_jax.weights import preprocess_with
from vit_jax.weights.formats import timm_config
from vit_jax.weights.network_images import prepare_image
from vit_jax.weights.preprocessing import usual_preprocess
from vit_jax.weights.pretrained import IMAGENET, Pretrained


@pytest.fixture(scope="module")
def picture():
    """A 37x53 picture (height x width) with detail at all scales."""
    noise = np.random.default_rng(0).integers(0, 256, (37, 53, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def encoded(picture, format="PNG", **options):
    stream = io.BytesIO()
    picture.save(stream, format, **options)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("image_size", "fraction", "resized", "corner"),
    [
        # 23 / 0.875 = 26.3; 26 * 53 / 37 = 37.2; margins 3 and 14, halved to even.
        ((23, 23), 0.875, (26, 37), (2, 7)),
        # Of 23 and 38.9 the least enlarges; 41 / 0.9 = 45.6: 45 * 53 / 37 = 64.5.
        ((41, 41), 0.9, (45, 64), (2, 12)),
        # Not square: (23, 38) as targets; the width decides: 37 / (53 / 38) = 26.5.
        ((21, 35), 0.9, (27, 38), (3, 2)),
        ((224, 224), 1.0, (224, 320), (0, 48)),
    ],
)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos", "box"])
def test_resized_and_cropped_as_by_hand(
    picture, image_size, fraction, resized, corner, interpolation
):
    preprocess = Preprocess(
        image_size, interpolation=interpolation, crop_fraction=fraction
    )
    filter = Image.Resampling[interpolation.upper()]
    (top, left), (height, width) = corner, image_size
    expected = np.array(picture.resize(resized[::-1], filter))
    expected = expected[top : top + height, left : left + width]
    ours = prepare_image(encoded(picture), preprocess)
    np.testing.assert_array_equal(ours, expected)


def test_a_tall_image_is_cropped_as_a_wide_one(picture):
    preprocess = Preprocess((23, 23), crop_fraction=0.875)
    wide = prepare_image(encoded(picture), preprocess)
    turned = picture.transpose(Image.Transpose.TRANSPOSE)
    tall = prepare_image(encoded(turned), preprocess)
    # Pillow resizes the width first, and rounds in between.
    np.testing.assert_allclose(tall.astype(int), wide.transpose(1, 0, 2), atol=1)


@pytest.mark.parametrize("size", [(23, 23), (21, 35), (35, 21), (26, 26)])
@pytest.mark.parametrize(
    "spec",
    [
        "resize_small(37) | central_crop",
        "resize_small(37, interpolation='bicubic') | central_crop",
        "resize({}) | central_crop",
        "resize",
    ],
)
def test_a_run_evaluates_on_the_pixels_that_travel_with_it(spec, size):
    # Odd and even margins, halves that round up and down, both orientations.
    spec = spec.format(tuple(2 * side for side in size))
    data = {"image_size": size, "eval_transform": spec, "channels": 3}
    preprocess = Preprocess.of_data(data | {"mean": (0.5,), "std": (0.5,)})
    rng = np.random.default_rng(2)
    for shape in ((37, 53), (54, 37), (41, 63), (64, 42), (90, 131)):
        pixels = rng.integers(0, 256, (*shape, 3), dtype=np.uint8)
        expected = pixels
        for op in parse.parse_eval(spec, size):
            expected = op(expected, rng)
        found = prepare_image(pixels, preprocess)
        np.testing.assert_array_equal(found, expected)


def test_squashed_images_keep_nothing_of_their_shape(picture):
    ours = prepare_image(encoded(picture), Preprocess((21, 35), squash=True))
    expected = picture.resize((35, 21), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(ours, np.array(expected))
    # As DeiT's image processor: both sides to 256, then the middle.
    both = Preprocess((14, 14), squash=True, crop_fraction=14 / 16)
    expected = np.array(picture.resize((16, 16), Image.Resampling.BILINEAR))
    ours = prepare_image(encoded(picture), both)
    np.testing.assert_array_equal(ours, expected[1:15, 1:15])
    same = Preprocess((37, 53), interpolation="bicubic", squash=True)
    np.testing.assert_array_equal(prepare_image(encoded(picture), same), picture)


def test_one_channel_and_pixels_instead_of_a_file(picture):
    grey = picture.convert("L")
    preprocess = Preprocess((11, 11))
    ours = prepare_image(encoded(grey), preprocess, channels=1)
    assert ours.shape == (11, 11, 1)
    expected = np.array(grey.resize((15, 11), Image.Resampling.BILINEAR))[:, 2:13]
    np.testing.assert_array_equal(ours[..., 0], expected)
    pixels = prepare_image(np.array(grey)[..., None], preprocess, channels=1)
    np.testing.assert_array_equal(pixels, ours)


@pytest.mark.parametrize("mode", ["L", "P", "CMYK", "RGBA", "LA", "1"])
def test_files_of_every_kind_are_prepared(picture, mode):
    format = "JPEG" if mode == "CMYK" else "PNG"
    ours = prepare_image(encoded(picture.convert(mode), format), Preprocess((11, 13)))
    assert (ours.shape, ours.dtype) == ((11, 13, 3), np.uint8)


def test_files_are_upright_only_where_that_is_asked_for(picture):
    exif = Image.Exif()
    exif[0x0112] = 6  # Turned by a quarter.
    plain, tagged = encoded(picture, "JPEG"), encoded(picture, "JPEG", exif=exif)
    unknown, without = Preprocess((23, 23)), Preprocess((23, 23), exif=False)
    turned = prepare_image(tagged, Preprocess((23, 23), exif=True))
    expected = Image.open(io.BytesIO(tagged)).convert("RGB")
    expected = np.array(expected.resize((32, 23), Image.Resampling.BILINEAR))[:, 4:27]
    assert (turned != expected).any()
    for data, preprocess, pixels in (
        (plain, unknown, expected),
        (tagged, unknown, expected),
        (tagged, unknown.upright(), turned),
        (tagged, without.upright(), expected),
    ):
        np.testing.assert_array_equal(prepare_image(data, preprocess), pixels)


def test_what_cannot_be_prepared_is_damaged():
    with pytest.raises(DamagedImage, match="is empty"):
        prepare_image(b"", Preprocess((3, 5)))
    thread = encoded(Image.new("L", (40_000, 2)))
    with pytest.raises(DamagedImage, match=r"40000x2 pixels.* 4480000x224 .*too many"):
        prepare_image(thread, Preprocess((224, 224)))
    assert prepare_image(thread, Preprocess((4, 4))).shape == (4, 4, 3)


def test_the_fraction_of_two_whole_numbers_gives_both_back():
    for side in (160, 224, 336, 384, 518):
        for edge in range(side, 2 * side):
            preprocess = Preprocess((side, side), crop_fraction=side / edge)
            assert preprocess.resized_size((edge, edge)) == (edge, edge)


def test_the_usual_fractions_round_down_as_timm_does():
    for side in (112, 160, 192, 224, 240, 256, 288, 299, 336, 384, 392, 448, 512, 518):
        for percent in range(800, 1001):
            fraction = percent / 1000
            preprocess = Preprocess((side, side), crop_fraction=fraction)
            short, _ = preprocess.resized_size((side, 2 * side))
            if (side * 1000) % percent:
                assert short == math.floor(side / fraction)
            else:  # timm is one lower where the quotient's last bit is.
                assert short == side * 1000 // percent


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"interpolation": "cubic"}, "interpolation='cubic' is not one of nearest"),
        ({"crop_fraction": 1.15}, r"crop_pct=1\.15 is not a fraction .* --crop_pct"),
        ({"crop_fraction": 0.0}, r"crop_pct=0\.0 is not a fraction"),
        ({"mean": (0.5, 0.5)}, r"mean=0\.5,0\.5 has 2 numbers, .* 3 channels"),
        ({"std": (0.5, 0.0, 0.5)}, r"std=\(0\.5, 0\.0, 0\.5\) is not above 0"),
        ({"std": (math.nan,)}, "std=.* is not finite"),
        ({"fill": (0, 9)}, r"fill=\(0, 9\)"),
    ],
)
def test_a_preprocessing_without_a_meaning_is_refused(fields, message):
    Preprocess((3, 5)).check(3)
    with pytest.raises(UserError, match=message):
        Preprocess((3, 5), **fields).check(3)


def assumed(source, format="timm", size=(32, 48), **options):
    return usual_preprocess(
        Pretrained({}, {"image_size": size} | options, format, source)
    )


def test_what_is_assumed_follows_the_format_and_the_name():
    size = (32, 48)
    whole = "Hugging Face's ViTs", Preprocess(size, squash=True)
    assert assumed("deit", "hugging_face") == whole
    plain = Preprocess(size, interpolation="bicubic", crop_fraction=0.9)
    assert assumed("deit/run/vit.pth") == ("timm's ViTs", plain)
    family, deit = assumed("vit.pth", distillation=True)
    assert family == "timm's DeiT"
    assert deit.describe() == (
        "32x48, bicubic, crop 0.9, mean 0.485,0.456,0.406, std 0.229,0.224,0.225"
    )
    for source in ("DeiT_tiny.safetensors", "hf://timm/deit_x/model.safetensors"):
        assert assumed(source) == ("timm's DeiT", deit)
    assert assumed("deit:Ti/16", size=(384, 384)).preprocess.crop_fraction == 1
    assert Preprocess(size, squash=True).describe() == (
        "32x48, bilinear, whole image, mean 0.5,0.5,0.5, std 0.5,0.5,0.5"
    )


@pytest.mark.parametrize("channels", [1, 4])
def test_statistics_of_three_channels_are_one_number_for_images_of_others(channels):
    found = checkpoint(encoder(image_size=(32, 48), channels=channels))
    unsaid = dataclasses.replace(found, format="timm", source="deit.pth")
    stated = Preprocess((32, 48), **IMAGENET)
    for each, notes in (
        (unsaid, 0),
        (dataclasses.replace(found, preprocess=stated), 2),
    ):
        told = []
        how = preprocess_with(each, {}, told.append)
        np.testing.assert_allclose(how.mean + how.std, (0.449, 0.226), atol=1e-9)
        how.check(channels)
        assert len(told) == notes
    how = preprocess_with(unsaid, {"mean": (0.1, 0.2, 0.3)})
    with pytest.raises(UserError, match=f"takes {channels} channels?: set --mean to 1"):
        how.check(channels)


@pytest.mark.parity
def test_what_is_assumed_is_what_timm_says():
    from import_timm import import_timm

    timm = import_timm()
    names = [
        name
        for name in timm.list_pretrained()
        if re.match(r"(deit|vit_\w+_(patch|[sr]\d))", name)
        and re.search(r"\.(fb_|augreg|orig|sam)", name)
        and "mae" not in name
    ]
    assert len(names) > 60
    for name in names:
        cfg = timm.get_pretrained_cfg(name)
        found = assumed(f"{name}.pth", size=cfg.input_size[1:]).preprocess
        told = found.mean, found.std, found.interpolation, found.crop_fraction
        wanted = cfg.mean, cfg.std, cfg.interpolation, cfg.crop_pct
        assert told == wanted, name


TIMM = [
    {},
    {"crop_pct": 0.9, "interpolation": "bilinear", "mean": [0.5] * 3, "std": [0.2] * 3},
    {"crop_pct": 224 / 232},
    {"crop_pct": 0.95, "crop_mode": "squash", "interpolation": "hamming"},
    {"crop_pct": 0.9, "crop_mode": "border"},
    {"crop_mode": "border", "crop_pct": 1.0, "interpolation": "lanczos"},
    {"crop_mode": "border", "mean": [0.4], "std": [0.2]},
    {"crop_mode": "border", "input_size": [3, 96, 161]},
    {"crop_mode": "squash", "input_size": [3, 96, 161], "interpolation": "box"},
    {"input_size": [3, 161, 96], "crop_pct": 0.81},
    {"input_size": [3, 23, 23], "crop_pct": 0.95, "interpolation": "lanczos"},
    {"input_size": [3, 21, 35], "crop_pct": 0.9, "interpolation": "nearest"},
    {"test_input_size": [3, 288, 288], "test_crop_pct": 1.0, "crop_pct": 0.9},
]


@pytest.mark.parity
@pytest.mark.parametrize("images", TIMM, ids=str)
def test_a_config_of_timm_prepares_a_photograph_as_timm(images):
    from import_timm import import_timm

    import_timm()
    from timm.data import create_transform, resolve_data_config

    config = {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": images}
    found = timm_config.read(config)
    assert found.notes == ()
    images = images or {"tag": "empty"}  # timm takes no empty one.
    theirs = create_transform(**resolve_data_config({}, pretrained_cfg=images))
    for sides in ((300, 451), (451, 300), (300, 301), (150, 150), (9, 451)):
        image = photograph(*sides)
        expected = theirs(Image.fromarray(image)).numpy().transpose(1, 2, 0)
        preprocess = found.preprocess
        ours = prepare_image(image, preprocess) / 255
        ours = (ours - preprocess.mean) / preprocess.std
        levels = 255 * np.abs(ours - expected) * preprocess.std
        assert ours.shape == expected.shape and levels.max() < 0.01


@pytest.mark.parametrize(
    "preprocess",
    [
        Preprocess((20, 30), crop_fraction=0.8),
        Preprocess((30, 20), crop_fraction=1.0),
        Preprocess((30, 20), squash=True, crop_fraction=0.9),
        Preprocess((24, 24)),
    ],
)
def test_the_box_is_what_is_kept(preprocess):
    # Red grows from top to bottom, green from left to right.
    height, width = 83, 131
    y, x = (np.arange(side) + 0.5 for side in (height, width))
    red, green = np.meshgrid(255 * y / height, 255 * x / width, indexing="ij")
    image = np.stack([red, green, red], -1).round().astype(np.uint8)
    kept = prepare_image(image, preprocess)
    top, left, bottom, right = preprocess.crop_box((height, width))
    rows, columns = preprocess.image_size
    for i, (start, end) in ((0, (top, bottom)), (1, (left, right))):
        middles = kept[rows // 2, :, 1] if i else kept[:, columns // 2, 0]
        places = start + (np.arange(len(middles)) + 0.5) / len(middles) * (end - start)
        np.testing.assert_allclose(middles / 255, places, atol=0.02)
