"""Configs of image processors of transformers, in and out, and what they make of images."""

import dataclasses
import importlib
import json

import numpy as np
import pytest
from helpers import photograph
from PIL import Image
from trees import checkpoint, encoder

import vit_jax
from vit_jax import convert, weights
from vit_jax.command_line import cli
from vit_jax.weights import Preprocess, export, pretrained, rewriting
from vit_jax.weights.formats import hugging_face_processor as processor
from vit_jax.weights.formats.registry import WRITERS
from vit_jax.weights.network_images import prepare_image

IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
# As on the hub, most of them older than the names of their keys today.
NORMALIZED = {"do_normalize": True, "do_resize": True}
CROPPED = {"do_center_crop": True, "crop_size": 224}
SMALL = {"size": {"shortest_edge": 224}}
BICUBIC = {"interpolation": "bicubic"}
# Config, model_type, and the preprocessing at 224 pixels.
ON_THE_HUB = {
    "google/vit-base-patch16-224": (
        *(NORMALIZED | HALF | {"resample": 2, "size": 224}, "vit"),
        {"squash": True},
    ),
    "facebook/deit-tiny-patch16-224": (
        *(NORMALIZED | CROPPED | IMAGENET | {"resample": 3, "size": 256}, "deit"),
        BICUBIC | pretrained.IMAGENET | {"crop_fraction": 0.875, "squash": True},
    ),
    "openai/clip-vit-base-patch32": (
        NORMALIZED
        | CROPPED
        | HALF
        | {
            "feature_extractor_type": "CLIPFeatureExtractor",
            "resample": 3,
            "size": 224,
        },
        *("clip", BICUBIC),
    ),
    "as written by transformers 5": (
        *({"image_processor_type": "BitImageProcessorFast", **HALF}, "dinov2", BICUBIC),
    ),
    "without a class, of DINOv2": (
        *({"size": {"shortest_edge": 256}, "image_mean": None, **HALF}, "dinov2"),
        BICUBIC | {"crop_fraction": 0.875},
    ),
    "ConvNext's": (
        SMALL | {"image_processor_type": "ConvNextImageProcessor", "crop_pct": 0.95},
        *("swin", BICUBIC | {"crop_fraction": 224 / 235}),
    ),
    "not normalised": (
        *({"size": {"height": 224, "width": 224}, "do_normalize": False}, "vit"),
        {"mean": (0.0,) * 3, "std": (1.0,) * 3, "squash": True},
    ),
}


def read(config, image_size=(224, 224), model_type="vit", **options):
    sidecars = {"preprocessor_config.json": config}
    sidecars["config.json"] = {"model_type": model_type}
    return processor.read(sidecars, image_size, **options)


EXACT = {"squash": True, "mean": (0.5,), "std": (0.25,)}


@pytest.mark.parametrize(
    ("preprocess", "expected"),
    [
        (
            Preprocess((20, 20), **EXACT),
            {
                "image_processor_type": "ViTImageProcessor",
                "size": {"height": 20, "width": 20},
                "resample": 2,
                "image_mean": [0.5] * 3,
                "image_std": [0.25] * 3,
                "do_convert_rgb": True,
            },
        ),
        (
            Preprocess((224, 224), interpolation="lanczos", crop_fraction=0.9),
            {
                "image_processor_type": "BitImageProcessor",
                "size": {"shortest_edge": 248},
                "crop_size": {"height": 224, "width": 224},
                "do_center_crop": True,
                "resample": 1,
            },
        ),
        (
            Preprocess((112, 224), crop_fraction=0.875, short_side=True),
            {"size": {"shortest_edge": 128}},
        ),
        (
            Preprocess((224, 112), crop_fraction=0.875, squash=True),
            {"size": {"height": 256, "width": 128}},
        ),
    ],
)
def test_preprocessing_in_their_terms_and_back(preprocess, expected):
    config = processor.write(preprocess, 3)
    assert {key: config[key] for key in expected} == expected
    if preprocess.crop_fraction < 1:
        crop = dict(zip(("height", "width"), preprocess.image_size, strict=True))
        assert config["crop_size"] == crop
    found, notes = read(config, preprocess.image_size)
    assert notes == []
    assert processor.write(found, 3) == config


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_preprocessing_of_the_hub_is_read(name):
    config, model_type, fields = ON_THE_HUB[name]
    expected = Preprocess((224, 224), **fields)
    cropped = not expected.squash or expected.crop_fraction < 1
    expected = dataclasses.replace(expected, crop_down=cropped)
    assert read(config, model_type=model_type) == (expected, [])


def test_without_a_config_nothing_is_known():
    assert processor.read({}, (224, 224)) == (None, [])


def test_the_nested_config_of_transformers_5_comes_first():
    old, new = ({"size": {"height": s, "width": s}} for s in (48, 32))
    sidecars = {
        "preprocessor_config.json": old,
        "processor_config.json": {"image_processor": new, "processor_class": "X"},
    }
    assert processor.read(sidecars, (32, 32))[0].image_size == (32, 32)


@pytest.mark.parametrize(
    ("rescaling", "white"),
    [
        ({"do_rescale": False}, 255.0),
        ({"rescale_factor": 1 / 127.5}, 2.0),
        ({"rescale_factor": 1 / 255}, 1.0),
    ],
)
def test_pixels_on_another_scale_have_statistics_on_it(rescaling, white):
    found, notes = read({**IMAGENET, **rescaling})
    assert found.mean == pytest.approx([x / white for x in IMAGENET["image_mean"]])
    assert found.std == pytest.approx([x / white for x in IMAGENET["image_std"]])
    assert notes == []


def test_preprocessing_that_is_not_known_is_told():
    config = {"size": 32, "resample": 6, "image_processor_type": "OddImageProcessor"}
    found, notes = read(config, (32, 32))
    assert found.interpolation == "bicubic"
    assert [note.split(":")[0] for note in notes] == ["OddImageProcessor", "resample=6"]
    for config, word in (
        ({"do_resize": False}, "do_resize=False"),
        ({"size": {"shortest_edge": 32}}, "do_center_crop=False"),
        ({"size": 48}, "48x48"),
    ):
        found, (note,) = read(config, (32, 32))
        assert found.image_size == (32, 32) and word in note


def test_the_size_of_the_processor_counts_where_the_network_takes_all():
    config = {
        "size": {"shortest_edge": 256},
        "image_processor_type": "BitImageProcessor",
    }
    found, notes = read(config, (518, 518), patch=14, any_size=True)
    assert (found.image_size, found.crop_fraction, notes) == ((224, 224), 0.875, [])
    found, notes = read(config, (518, 518), patch=14)
    assert found.image_size == (518, 518) and "518x518" in notes[0]


def test_what_fills_no_patch_is_cut_off_at_the_end():
    image = np.random.default_rng(0).integers(0, 256, (31, 47, 3), dtype=np.uint8)
    squashed, notes = read({"size": 31, "resample": 3}, (28, 28), patch=14)
    assert notes == [] and squashed.cut == (3, 3)
    expected = np.array(Image.fromarray(image).resize((31, 31), Image.BICUBIC))
    found = prepare_image(image, squashed)
    np.testing.assert_array_equal(found, expected[:28, :28])
    cropped, _ = read({"size": 31, "crop_size": 31}, (28, 28), "clip", patch=14)
    # A margin of 16, and then the first 28 of 31.
    np.testing.assert_array_equal(prepare_image(image, cropped), image[:28, 8:36])
    assert processor.write(squashed, 3)["size"] == {"height": 31, "width": 31}
    assert processor.write(cropped, 3)["crop_size"] == {"height": 31, "width": 31}


def test_the_most_patches_of_siglip2_are_read_and_written_back():
    config = {"image_processor_type": "Siglip2ImageProcessor", "max_num_patches": 90}
    found, notes = read(config, (32, 32), "siglip2_vision_model", patch=16)
    assert (found, notes) == (Preprocess((32, 32), squash=True, max_tokens=90), [])
    other, notes = read(IMAGENET, (28, 28), "siglip2", patch=14)
    assert (other.max_tokens, other.mean) == (256, tuple(IMAGENET["image_mean"]))
    assert len(notes) == 1 and "patch_size=16" in notes[0]

    written = processor.write(found, 3, 16)
    expected = config | {"patch_size": 16, "resample": 2, "image_mean": [0.5] * 3}
    assert {key: written[key] for key in expected} == expected
    assert "size" not in written
    assert read(written, (32, 32), "siglip2", patch=16) == (found, [])


def test_images_that_get_another_shape_in_the_library_are_told():
    flexible, fixed = Preprocess((28, 28), max_tokens=90), Preprocess((28, 28))
    assert processor.note_tokens(flexible, 14) == processor.note_tokens(fixed, 0) == []
    assert processor.write(fixed, 3, 14)["max_num_patches"] == 4
    assert "4 patches" in processor.note_tokens(fixed, 14)[0]
    assert processor.write(flexible, 3)["image_processor_type"] == "BitImageProcessor"
    assert "max_tokens=90" in processor.note_tokens(flexible, 0)[0]


PROCESSORS = [
    ("ViT", {}),
    ("ViT", {"size": 384, "resample": 3}),
    ("ViT", {"do_rescale": False}),
    ("ViT", {"size": {"shortest_edge": 226}, "do_center_crop": True, "crop_size": 224}),
    ("DeiT", {}),
    ("DeiT", {"size": 438, "crop_size": 384}),
    ("Beit", {}),
    ("Beit", {"size": 256, "do_center_crop": True}),
    ("CLIP", {}),
    ("CLIP", {"size": 336, "crop_size": 336}),
    ("Siglip", {}),
    ("Bit", {"size": {"shortest_edge": 256}}),
    ("Bit", {"size": {"shortest_edge": 592}, "crop_size": 518}),
    ("Bit", {"size": 256, "crop_size": {"height": 224, "width": 288}}),
    ("ConvNext", {}),
    ("ConvNext", {"size": 224, "crop_pct": 0.95}),
]


def import_processor(name):
    import_timm = pytest.importorskip("import_timm")
    import_timm.import_timm()  # transformers imports torchvision, as timm does.
    pytest.importorskip("transformers", reason="needs the extra parity")
    module = f"transformers.models.{name.lower()}.image_processing_pil_{name.lower()}"
    return getattr(importlib.import_module(module), f"{name}ImageProcessorPil")


@pytest.mark.parity
@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize(("name", "options"), PROCESSORS, ids=str)
def test_images_are_those_of_transformers(name, options, bare):
    theirs = import_processor(name)(**options)
    config = {"image_processor_type": f"{name}ImageProcessor", **options}
    if not bare:  # All keys, as its own files have them.
        config = json.loads(theirs.to_json_string())
    found, _ = read(config, any_size=True)
    for height, width in ((171, 260), (500, 333), (613, 820)):
        image = photograph(height, width)
        expected = theirs(Image.fromarray(image), return_tensors="np")
        expected = expected["pixel_values"][0].transpose(1, 2, 0)
        ours = (prepare_image(image, found) / 255 - found.mean) / found.std
        levels = 255 * np.abs(ours - expected) * found.std
        assert levels.max() < 0.1


@pytest.mark.parity
@pytest.mark.parametrize(
    ("fields", "noted"),
    [
        ({"squash": True}, False),
        ({"squash": True, "crop_fraction": 0.9}, False),  # 24 pixels of 248.
        ({"squash": True, "crop_fraction": 224 / 227}, True),
        ({"interpolation": "bicubic", "crop_fraction": 0.9}, True),
        ({"crop_fraction": 0.875, "crop_down": True}, False),
    ],
)
def test_the_written_processor_gives_our_pixels_or_a_note(fields, noted, tmp_path):
    how = Preprocess((224, 224), **fields)
    config = processor.write(how, 3)
    name = config["image_processor_type"].removesuffix("ImageProcessor")
    theirs = import_processor(name)(**config)
    notes = rewriting.note_crop(how, "transformers", down=True)
    assert bool(notes) == noted
    shifted = dataclasses.replace(how, crop_down=True) if noted else how
    moved = 0
    for height, width in ((171, 260), (250, 331), (613, 820), (227, 227)):
        image = photograph(height, width)
        expected = theirs(Image.fromarray(image), return_tensors="np")
        expected = expected["pixel_values"][0].transpose(1, 2, 0)
        ours = (prepare_image(image, shifted) / 255 - how.mean) / how.std
        assert (255 * np.abs(ours - expected) * how.std).max() <= 1
        moved += np.any(prepare_image(image, how) != prepare_image(image, shifted))
    assert bool(moved) == noted


def test_crops_that_timm_rounds_otherwise_are_told(tmp_path):
    made = checkpoint(encoder(), preprocess=Preprocess((12, 12), crop_down=True))
    assert any(
        "timm rounds half" in note for note in WRITERS["timm"].write(made, tmp_path)
    )


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 31,
    "patch_size": 14,
}
EDGE = {"size": {"height": 31, "width": 31}}
CUT = {"size": 31, "crop_size": 31}
# Network, class of its processor, and what that says.
NETWORKS = {
    "ViT": ("ViTModel", "ViTConfig", "ViT", EDGE),
    "CLIP": ("CLIPVisionModel", "CLIPVisionConfig", "CLIP", CUT),
    # As on the hub: positions of larger images than the processor makes.
    "DINOv2 with registers, smaller": (
        *("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig"),
        *("Bit", {"size": 32, "crop_size": 28, "of": {"image_size": 56}}),
    ),
}


@pytest.mark.parametrize("to", ["hf_dinov2", "timm", "safetensors"])
def test_converting_keeps_positions_for_more_than_the_processor_makes(tmp_path, to):
    options = {"activation": "gelu", "layer_scale_init": 0.1, "mlp_dim": 24}
    model = encoder(num_classes=0, image_size=(24, 24), **options)
    made = checkpoint(model, preprocess=Preprocess((16, 16), crop_fraction=0.5))
    export.export(made, "hf_dinov2", tmp_path / "a")
    words = f"--model={tmp_path}/a", f"--to={to}", f"--out={tmp_path}/b"
    suffix = ".safetensors" if to == "safetensors" else ""
    convert.main(cli.parse(convert.parser(), [*words[:2], words[2] + suffix]))
    found = weights.open_pretrained(f"{tmp_path}/b{suffix}", num_heads=3)
    assert tuple(found.options["image_size"]) == (24, 24)
    assert found.preprocess.crop_fraction == 0.5
    size = (24, 24) if to == "timm" else (16, 16)
    assert tuple(found.preprocess.image_size) == size


@pytest.mark.parity
@pytest.mark.parametrize("name", NETWORKS)
def test_a_photograph_has_the_features_of_transformers(name, tmp_path):
    network, config, kind, options = NETWORKS[name]
    make = import_processor(kind)
    import torch
    import transformers

    sizes = SIZES | options.get("of", {})
    options = {k: v for k, v in options.items() if k != "of"}
    more = {"mlp_ratio": 2} if kind == "Bit" else {}
    torch.manual_seed(3)
    theirs = getattr(transformers, network)(
        getattr(transformers, config)(**sizes, **more)
    )
    with torch.no_grad():
        for value in theirs.parameters():
            value.add_(0.1 * torch.randn_like(value))
    theirs.eval().save_pretrained(tmp_path)
    images = make(**options)
    images.save_pretrained(tmp_path)
    image = photograph(70, 93)
    pixels = images(Image.fromarray(image), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        expected = theirs(pixels).pooler_output.numpy()
    found = vit_jax.load_model(tmp_path, tell=lambda line: None)
    np.testing.assert_allclose(found.features(image), expected, atol=2e-4)
