"""Images of any bands and depth: what is read, what is refused, and a run that learns."""

import io
import json

import cv2
import jax
import numpy as np
import pytest
import tifffile
from helpers import run_command
from PIL import Image

import vit_jax
from vit_jax.data import bands, decode, display, normalization
from vit_jax.data.bands import PixelFormat
from vit_jax.data.config import DataConfig
from vit_jax.data.fields import image as image_field
from vit_jax.data.preprocess import Preprocess, warn_of_dark
from vit_jax.data.sources import arrays
from vit_jax.data.sources.arrays import open_arrays
from vit_jax.data.sources.base import _warned, inspected
from vit_jax.data.transforms import device, host
from vit_jax.errors import UserError
from vit_jax.weights import surgery

RNG = np.random.default_rng(0)
SIXTEEN = RNG.integers(0, 10_000, (8, 6, 13), np.uint16)


def tiff(image, **options):
    file = io.BytesIO()
    tifffile.imwrite(file, image, **options)
    return file.getvalue()


def npy(image):
    file = io.BytesIO()
    np.save(file, image)
    return file.getvalue()


def npz(**images):
    file = io.BytesIO()
    np.savez_compressed(file, **images)
    return file.getvalue()


ALL = PixelFormat(13, "uint16")


@pytest.mark.parametrize(
    "data",
    [
        tiff(SIXTEEN, photometric="minisblack", planarconfig="contig"),
        tiff(np.moveaxis(SIXTEEN, -1, 0), photometric="minisblack"),
        tiff(
            np.moveaxis(SIXTEEN, -1, 0),
            photometric="minisblack",
            planarconfig="separate",
            bigtiff=True,
        ),
        tiff(
            np.tile(SIXTEEN, (2, 3, 1)),
            photometric="minisblack",
            planarconfig="contig",
            tile=(16, 16),
        ),
        npy(SIXTEEN),
        npy(np.moveaxis(SIXTEEN, -1, 0)),
        npy(SIXTEEN.astype(">u2")),
        npz(image=SIXTEEN),
        SIXTEEN,
    ],
    ids=[
        "contig",
        "pages",
        "planar-big",
        "tiled",
        "npy",
        "channels-first",
        "npy-big",
        "npz",
        "array",
    ],
)
def test_all_bands_are_read_at_their_depth(data):
    found = bands.read(data, ALL)
    assert found.dtype == np.uint16
    np.testing.assert_array_equal(found[:8, :6], SIXTEEN)


def test_bands_are_chosen_and_ordered():
    form = PixelFormat(3, "uint16", (3, 2, 1))
    np.testing.assert_array_equal(
        bands.read(npy(SIXTEEN), form), SIXTEEN[..., [3, 2, 1]]
    )
    with pytest.raises(decode.DamagedImage, match=r"13 bands, but data\.bands=\(13,\)"):
        bands.read(npy(SIXTEEN), PixelFormat(1, "uint16", (13,)))


@pytest.mark.parametrize(
    ("image", "form", "match"),
    [
        (SIXTEEN, PixelFormat(4, "uint16"), r"13 bands, but data\.channels=4: .*=13"),
        (SIXTEEN, PixelFormat(13), r"uint16, but data\.pixels='uint8': .*=uint16"),
        (
            SIXTEEN.astype(np.int16),
            ALL,
            r"int16, but data\.pixels='uint16': .*=float32",
        ),
        (np.full((4, 4, 2), np.nan), PixelFormat(2, "float32"), "NaN"),
        (np.zeros((2, 3, 4, 5), np.uint8), ALL, r"\(2, 3, 4, 5\)"),
        (np.zeros((0, 5, 3), np.uint8), PixelFormat(), r"\(0, 5, 3\)"),
        (np.ones((4, 5, 3), complex), PixelFormat(3, "float32"), "of complex128"),
        (np.full((4, 5), "a"), PixelFormat(3, "float32"), "of <U1, not of real numb"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_key(image, form, match):
    with pytest.raises(decode.DamagedImage, match=match):
        bands.read(npy(image), form)
    bands.doubt(npy(image))  # What is damaged is reported elsewhere.


def test_damaged_files_and_several_arrays_are_refused():
    with pytest.raises(decode.DamagedImage, match="2 arrays \\(a, b\\)"):
        bands.read(npz(a=SIXTEEN, b=SIXTEEN), ALL)
    whole = tiff(SIXTEEN, photometric="minisblack", planarconfig="contig")
    for data in (npy(SIXTEEN)[:200], whole[:100], npy(np.array({}, object))):
        with pytest.raises(decode.DamagedImage, match="decoded"):
            bands.read(data, ALL)


def test_less_depth_is_made_more():
    eight = RNG.integers(0, 256, (5, 4, 2), np.uint8)
    sixteen = bands.read(npy(eight), PixelFormat(2, "uint16"))
    np.testing.assert_array_equal(sixteen, eight * np.uint16(257))
    for image, white in ((eight, 255), (sixteen, 65_535)):
        floats = bands.read(npy(image), PixelFormat(2, "float32"))
        np.testing.assert_allclose(floats / 255, image / white, rtol=1e-6)
    kelvin = RNG.normal(280, 10, (5, 4, 1))
    floats = bands.read(npy(kelvin), PixelFormat(1, "float32"))
    np.testing.assert_allclose(floats / 255, kelvin, rtol=1e-6)


def test_sixteen_bits_of_a_png_are_kept():
    colours = RNG.integers(0, 65_536, (5, 4, 3), np.uint16)
    data = cv2.imencode(".png", colours[..., ::-1])[1].tobytes()
    np.testing.assert_array_equal(bands.read(data, PixelFormat(3, "uint16")), colours)
    # As ever without the key, and grey is repeated.
    np.testing.assert_array_equal(bands.read(data, PixelFormat()), colours >> 8)
    grey = cv2.imencode(".png", colours[..., 0])[1].tobytes()
    found = bands.read(grey, PixelFormat(3, "uint16"))
    np.testing.assert_array_equal(found, np.repeat(colours[..., :1], 3, -1))


def test_white_of_every_depth_is_one_before_the_mean():
    config = {"channels": 3, "mean": (0.25, 0.5, 0.75), "std": (0.5, 0.25, 2.0)}
    expected = [(1 - mean) / std for mean, std in zip(config["mean"], config["std"])]
    for pixels, white in (("uint8", 255), ("uint16", 65_535), ("float32", 255)):
        values = np.full((1, 2, 3, 3), white, pixels)
        found = device.normalize(values, config["mean"], config["std"])
        np.testing.assert_allclose(found[0, 0, 0], expected, rtol=1e-5)
        half = device.normalize(values // 2, (0,), (1,))
        assert float(half.max()) == pytest.approx(white // 2 / white, rel=1e-5)
    sixteen = image_field.Image(DataConfig(pixels="uint16", num_classes=2))
    assert sixteen.white == 65_535


def test_a_fourth_band_is_opacity_only_if_the_file_says_so():
    four = RNG.integers(1, 255, (5, 4, 4), np.uint8)
    options = {"photometric": "rgb", "planarconfig": "contig"}
    plain = tiff(four, **options, extrasamples=["unspecified"])
    with pytest.raises(decode.DamagedImage, match=r"4 bands.*data\.channels"):
        bands.read(plain, PixelFormat())
    np.testing.assert_array_equal(bands.read(plain, PixelFormat(4)), four)
    marked = tiff(four, **options, extrasamples=["unassalpha"])
    white = Image.new("RGBA", (4, 5), "white")
    expected = Image.alpha_composite(white, Image.fromarray(four)).convert("RGB")
    np.testing.assert_array_equal(bands.read(marked, PixelFormat()), expected)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (RNG.integers(0, 4_096, (5, 4), np.uint16), "4,095 of 65,535, as 12 bits"),
        (RNG.integers(0, 12, (5, 4), np.uint8), "of 255: all but black"),
        (np.zeros((5, 4), np.uint8), "is black"),
        (RNG.integers(0, 65_536, (5, 4), np.uint16), ""),
        (np.full((5, 4), 10_000, np.uint16), "10,000 of 65,535, as 14 bits"),
        (np.full((5, 4), 17_000, np.uint16), ""),
        (np.full((5, 4), 30, np.uint8), ""),
    ],
)
def test_images_that_are_all_but_black_are_noticed(image, words):
    image[0, 0] = max(image.max(), 4_095 if "12 bits" in words else 0)
    found = bands.doubt(cv2.imencode(".png", image)[1].tobytes())
    assert words in found
    assert bool(found) == bool(words)


def test_mean_and_deviation_are_estimated_by_the_seed():
    images = RNG.integers(0, 60_000, (20, 5, 4, 6), np.uint16)
    labels = np.zeros(20, int)
    source = open_arrays({"train": (images, labels)}, "train", "mine")
    data = DataConfig(channels=6, pixels="uint16", mean="estimate", std="estimate")
    found = normalization.resolve(data, source, seed=0)
    levels = images / 65_535
    np.testing.assert_allclose(found.mean, levels.mean((0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(found.std, levels.std((0, 1, 2)), rtol=1e-5)
    assert normalization.resolve(found, source, seed=0) is found
    images[..., 3] = 7
    source = open_arrays({"train": (images, labels)}, "train", "mine")
    with pytest.raises(UserError, match="data.std='estimate': channel 3"):
        normalization.resolve(data, source, seed=0)


def test_an_estimate_says_why_no_image_can_be_read():
    images = np.zeros((3, 5, 4, 6), np.uint16)
    source = open_arrays({"train": (images, np.zeros(3, int))}, "train", "mine")
    data = DataConfig(channels=13, pixels="uint16", mean="estimate")
    with pytest.raises(UserError, match="'estimate': no .*record 0.* has 6 bands"):
        normalization.resolve(data, source, seed=0)
    assert arrays.depth_of(images.astype(">u2") + 300) == "uint16"


def test_a_picture_of_bands_is_grey_or_of_the_first_three():
    assert display.to_display(SIXTEEN).shape == (8, 6, 3)
    assert display.to_display(SIXTEEN[..., :2]).shape == (8, 6, 1)
    shown = display.to_display(SIXTEEN)
    assert (shown.dtype, shown.min(), shown.max()) == (np.uint8, 0, 255)


@pytest.mark.slow
def test_a_run_on_class_folders_of_bands_learns_and_predicts(tmp_path, capsys):
    rng = np.random.default_rng(1)
    for split, count in (("train", 16), ("val", 8)):
        for name, level in (("dry", 2_000), ("wet", 6_000)):
            folder = tmp_path / "set" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                image = rng.normal(4_000, 800, (12, 12, 5))
                image[..., 3] += level - 4_000  # One band tells the classes apart.
                image = image.clip(0, 65_535).astype(np.uint16)
                path = folder / f"{i}.{'npy' if i % 2 else 'tif'}"
                path.write_bytes(
                    npy(image) if i % 2 else tiff(image, photometric="minisblack")
                )
    recipe = tmp_path / "recipe.py"
    keys = {
        "name": "bands",
        "epochs": 15,
        "batch_size": 16,
        "data": {
            "name": "folder",
            "data_dir": str(tmp_path / "set"),
            "split": "train",
            "num_classes": 2,
            "image_size": (8, 8),
            "channels": 4,
            "bands": (0, 1, 3, 4),
            "pixels": "uint16",
            "mean": "estimate",
            "std": "estimate",
            "train_transform": "random_resized_crop(area=(0.5, 1.0)) | flip",
            "eval_transform": "resize",
        },
        "model": {
            "variant": "Ti/4",
            "width": 16,
            "depth": 1,
            "num_heads": 2,
            "mlp_dim": 32,
        },
        "optim": {"name": "adam", "learning_rate": 0.003},
        "evals": {"val": "val"},
    }
    recipe.write_text(
        "from ml_collections import ConfigDict\n"
        f"def get_config(arg=None): return ConfigDict({keys})\n"
    )
    run = tmp_path / "run"
    assert not run_command("train", [f"--config={recipe}", f"--workdir={run}"])
    report = json.loads((run / "report.json").read_text())
    assert report["final"]["val"]["params"]["top1"] == 1.0
    capsys.readouterr()
    wet = tmp_path / "set/val/wet"
    sheet = tmp_path / "sheet.png"
    assert not run_command("show_batch", [f"--config={recipe}", f"--out={sheet}"])
    assert sheet.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert not run_command("predict", [f"--model={run}", str(wet), "--topk=1"])
    assert capsys.readouterr().out.count("wet") >= 16  # Names of files, and classes.
    words = [f"--config={recipe}", f"--workdir={tmp_path / 'other'}"]
    words += ["--config.data.train_transform=random_resized_crop | color_jitter"]
    with pytest.raises(UserError, match=r"color_jitter .* data\.channels=4"):
        run_command("train", words)


@pytest.mark.parametrize(
    ("most", "mean", "warns"),
    [
        (4_000, 0.5, True),
        (10_000, 0.5, True),  # Reflectances in ten thousandths.
        (10_000, 0.1, False),
        (64_000, 0.5, False),
    ],
)
def test_a_run_says_that_its_images_are_dark(caplog, most, mean, warns):
    _warned.clear()
    images = RNG.integers(most // 2, most, (20, 5, 4, 1), np.uint16)
    source = open_arrays({"train": (images, np.zeros(20, int))}, "train", "made")
    data = DataConfig(channels=1, pixels="uint16", mean=(mean,))
    image_field.Image(data).inspect(source, inspected(source))
    assert ("8 of 8 images" in caplog.text) == warns == bool(caplog.text)


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_a_network_of_8_bits_says_that_12_bits_in_16_are_dark(caplog, encode, format):
    dark = RNG.integers(0, 4_096, (5, 4), np.uint16)
    photograph = (dark // 300).astype(np.uint8)  # White is known of 8 bits.
    for image, depth, warns in (
        (dark, "uint8", True),
        (dark, "uint16", False),
        (dark * 16, "uint8", False),
        (photograph, "uint8", False),
    ):
        _warned.clear()
        caplog.clear()
        warn_of_dark(encode(image, format), PixelFormat(3, depth), "a scan")
        assert ("of 65,535, as 12 bits in 16" in caplog.text) == warns
        assert bool(caplog.text) == warns


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
@pytest.mark.parametrize("channels", [1, 5, 70])
def test_transforms_of_the_loader_are_the_same_at_any_depth(dtype, channels):
    eight = RNG.integers(0, 256, (40, 30, channels), np.uint8)
    image = eight.astype(dtype) * dtype(257 if dtype == np.uint16 else 1)
    scale = 257 if dtype == np.uint16 else 1
    for resize in (host.resize_all, host.resize_fast):
        expected = np.concatenate(
            [resize(eight[..., i : i + 1], (11, 13)) for i in range(channels)], -1
        )
        found = resize(image, (11, 13))
        assert (found.shape, found.dtype) == ((11, 13, channels), dtype)
        np.testing.assert_allclose(found / scale, expected, atol=1.5)
    how = Preprocess((12, 12), crop_fraction=0.8, interpolation="bicubic")
    expected = np.concatenate(
        [how.prepare(eight[..., i : i + 1]) for i in range(channels)], -1
    )
    np.testing.assert_allclose(how.prepare(image) / scale, expected, atol=5)


@pytest.mark.slow
def test_arrays_of_bands_train_from_weights_of_colours(tmp_path):
    images = RNG.integers(0, 65_536, (16, 8, 8, 6), np.uint16)
    labels = np.arange(16) % 2
    model = {"variant": "Ti/4", "width": 16, "depth": 1, "num_heads": 2, "mlp_dim": 32}
    keys = {
        "total_steps": 2,
        "batch_size": 8,
        "data": {"image_size": (8, 8)},
        "model": model,
        "optim": {"learning_rate": 1e-12},
        "evals": {},
    }
    colours = RNG.integers(0, 256, (16, 8, 8, 3), np.uint8)
    vit_jax.train(keys, tmp_path / "rgb", data=(colours, labels))
    kernel = vit_jax.load_model(tmp_path / "rgb").params["embedding"]["kernel"]
    expected = {
        "repeat": np.tile(kernel / 2, (1, 1, 2, 1)),
        "mean": np.repeat(kernel.mean(2, keepdims=True) / 2, 6, 2),
        "first": np.pad(kernel, ((0, 0), (0, 0), (0, 3), (0, 0))),
    }
    for how, values in expected.items():
        found = surgery.convert_input_channels(np.asarray(kernel), 6, how)
        np.testing.assert_allclose(found, values, rtol=1e-5, atol=1e-8)
    for how in ("mean", "new"):
        start = {"checkpoint": str(tmp_path / "rgb"), "channels": how}
        run = tmp_path / how
        vit_jax.train(keys | {"init": start}, run, data=(images, labels))
        model = vit_jax.load_model(run)
        found = np.asarray(model.params["embedding"]["kernel"])
        if how in expected:
            np.testing.assert_allclose(found, expected[how], rtol=1e-5, atol=1e-8)
        else:
            assert 0.1 < found.std() / kernel.std() < 1.5
        assert model.preprocessing.pixels == "uint16"
        assert model.predict(images[0])
        assert len(model.predict(list(images[:3]))) == 3
    words = [f"--model={run}", "--to=stablehlo", f"--out={tmp_path / 'program'}"]
    assert not run_command("convert", words)
    program = jax.export.deserialize(
        (tmp_path / "program/model.stablehlo").read_bytes()
    )
    logits = program.call(images[:3])["logits"]
    outputs = model.apply(model.params, model.preprocess(list(images[:3])))
    np.testing.assert_allclose(logits, outputs["logits"], rtol=1e-4, atol=1e-6)


@pytest.mark.parity
@pytest.mark.parametrize("channels", [1, 4, 13])
def test_weights_of_timm_for_other_channels_give_its_logits(tmp_path, channels):
    from import_timm import import_timm

    timm = import_timm()
    import torch
    from safetensors.torch import save_file

    args = {"in_chans": channels, "img_size": 32, "depth": 2, "num_classes": 3}
    network = timm.create_model("vit_tiny_patch16_224", **args).eval()
    save_file(network.state_dict(), tmp_path / "model.safetensors")
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 3}
    images = {"input_size": [channels, 32, 32], "crop_pct": 1.0}
    config |= {"model_args": args, "pretrained_cfg": images}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = vit_jax.load_model(tmp_path, mean=(0.5,), std=(0.25,))
    image = RNG.integers(0, 256, (32, 32, channels), np.uint8)
    pixels = (image / 255 - 0.5) / 0.25
    with torch.inference_mode():
        given = torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1)[None]
        expected = network(given).numpy()
    found = model.apply(model.params, model.preprocess([image]))["logits"]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_step_without_data_needs_numbers():
    keys = {"data.mean": "estimate"}
    with pytest.raises(UserError, match="data.mean='estimate' needs"):
        vit_jax.train_setup("configs/digits.py", num_examples=1_442, **keys)


def test_bands_of_a_small_set_are_chosen_once():
    class Records:
        def __len__(self):
            return 2

        def __getitem__(self, i):
            return {"image": SIXTEEN, "label": 0}

    data = DataConfig(channels=3, bands=(3, 2, 1), pixels="uint16", num_classes=1)
    records = Records()
    assert arrays.small_in_memory(records, data) is records


def test_floats_of_bands_in_memory_are_read_as_those_of_files(tmp_path):
    labels = np.arange(24) % 2
    images = RNG.normal(300, 50, (24, 8, 8, 5)).astype(np.float32)
    images[labels == 1, ..., 2] += 200
    source = arrays.open_arrays({"train": (images, labels)}, "train", "made")
    form = PixelFormat(5, "float32")
    found = bands.read(source[3]["image"], form)
    np.testing.assert_array_equal(found, bands.read(npy(images[3]), form))
    keys = {
        "epochs": 40,
        "batch_size": 8,
        "data": {"image_size": (8, 8), "mean": "estimate", "std": "estimate"},
        "model": {"variant": "Ti/4", "width": 16, "depth": 1, "num_heads": 2},
        "optim": {"name": "adam", "learning_rate": 0.003},
    }
    split = {"train": (images, labels), "val": (images, labels)}
    done = vit_jax.train(keys, tmp_path / "run", data=split)
    assert done["final"]["val"]["params"]["top1"] > 0.9
    model = vit_jax.load_model(tmp_path / "run", tell=lambda line: None)
    assert model.preprocessing.pixels == "float32"
    assert model.predict(images[0])[0].label == 0
    for wrong in (images[..., :3], np.where(images > 400, np.nan, images)):
        with pytest.raises(UserError, match="images=float32"):
            arrays.open_arrays({"train": (wrong, labels)}, "train", "made")
