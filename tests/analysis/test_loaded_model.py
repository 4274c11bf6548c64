"""Models loaded for analysis, and the batches of images that pass through them."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from vit_jax import models
from vit_jax.analysis.loaded_model import LoadedModel, read_batches
from vit_jax.data import decode
from vit_jax.errors import UserError
from vit_jax.weights.pretrained import Preprocess, Pretrained

OPTIONS = {
    "variant": "Ti/8",
    "num_classes": 5,
    "image_size": (16, 24),
    "width": 12,
    "depth": 3,
    "num_heads": 2,
    "mlp_dim": 17,
}
PREPROCESS = Preprocess((16, 24), (0.4,), (0.25,))
CROPPED = Preprocess((16, 24), (0.4,), (0.25,), crop_fraction=0.9)
NAMES = [f"{i}.png" for i in range(5)]
NUM_FILES = 11


@pytest.fixture(scope="module")
def loaded():
    model = models.create(**OPTIONS)
    leaves, tree = jax.tree.flatten(jax.eval_shape(model.init, jax.random.key(0)))
    rng = np.random.default_rng(1)
    leaves = [jnp.array(rng.standard_normal(leaf.shape, np.float32)) for leaf in leaves]
    return LoadedModel("tiny", model, jax.tree.unflatten(tree, leaves), PREPROCESS)


@pytest.fixture(scope="module")
def pixels():
    shape = 5, 16, 24, 3
    return np.random.default_rng(2).integers(0, 256, shape, dtype=np.uint8)


def test_chunks_give_the_layers_of_the_whole_batch(loaded, pixels):
    whole = list(loaded.model.intermediates(loaded.params, loaded.normalize(pixels)))
    parts = [range(2), range(2, 4), range(4, 5)]
    steps = loaded.iter_layers(pixels, NAMES, 2)
    for i, (layer, images) in enumerate(steps):
        wanted = whole[i // 3]
        assert images == parts[i % 3]
        assert len(layer.tokens) == 2  # The last chunk is padded.
        for found, expected in zip(layer, wanted, strict=True):
            np.testing.assert_allclose(
                found[: len(images)],
                expected[images.start : images.stop],
                rtol=1e-3,
                atol=1e-4,
            )
    assert i == 8


def test_attention_of_one_chunk_and_one_layer_is_alive(loaded, pixels):
    gc.collect()  # Of earlier tests.
    for layer, _ in loaded.iter_layers(pixels, NAMES, 2):
        shapes = [array.shape for array in jax.live_arrays()]
        assert shapes.count(layer.attention.shape) == 1
        del layer


def test_an_output_that_is_not_finite_names_the_image(loaded, pixels):
    params = jax.tree.map(lambda leaf: leaf, loaded.params)
    # Only a bright image overflows.
    params["embedding"] = params["embedding"] | {
        "kernel": jnp.full_like(params["embedding"]["kernel"], 3e37),
        "bias": jnp.zeros(12),
    }
    lost = LoadedModel(
        "lost", loaded.model, params, Preprocess((16, 24), (0.0,), (1.0,))
    )
    dark = np.zeros_like(pixels)
    dark[3] = 255
    with pytest.raises(UserError, match=r"lost's output for 3\.png is not finite: the"):
        list(lost.iter_layers(dark, NAMES, 2))


def test_a_resnet_has_no_attention(pixels):
    resnet = models.create(
        "R50x1", num_classes=5, image_size=(16, 24), stage_depths=(1,)
    )
    loaded = LoadedModel("r", resnet, {}, PREPROCESS)
    with pytest.raises(UserError, match="a ResNet has no attention"):
        next(loaded.iter_layers(pixels, NAMES, 2))


def test_class_names_must_be_as_many_as_classes():
    model = models.create(**OPTIONS)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    checkpoint = Pretrained(
        params=params, options=OPTIONS, format="vit_jax", source="tiny"
    )
    for names in (("apple", "bear"), tuple("abcdef")):
        with pytest.raises(UserError, match=f"there are {len(names)} class names, but"):
            LoadedModel.from_pretrained("tiny", checkpoint, PREPROCESS, names)
    assert (
        LoadedModel.from_pretrained("tiny", checkpoint, PREPROCESS).class_name(1)
        == "class 1"
    )
    named = LoadedModel.from_pretrained("tiny", checkpoint, PREPROCESS, tuple("abcde"))
    assert named.class_name(1) == "b"


def tiny(**options):
    options = {"image_size": (16, 24), "width": 12, "num_heads": 3} | options
    return LoadedModel(
        "s", models.create("Ti/8", num_classes=5, **options), {}, CROPPED
    )


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Names and paths of images, of which number 1 is damaged."""
    folder, rng = tmp_path_factory.mktemp("batches"), np.random.default_rng(1)
    for i in range(NUM_FILES):
        noise = rng.integers(0, 256, (30 + i, 41, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{i:02}.png")
    (folder / "01.png").write_bytes(b"\x89PNG\r\n")
    return [(f"{i}", str(folder / f"{i:02}.png")) for i in range(NUM_FILES)]


def test_each_model_gets_images_of_its_channels(images):
    loaded = tiny(), tiny(channels=1)
    told = []
    first, last = read_batches(
        images[:4], loaded, 2, lambda *why: told.append(why), num_originals=9
    )
    assert (first.names, last.names) == (["0", "2"], ["3"])
    assert [name for name, _ in told] == ["1"]
    assert [pixels.shape for pixels in first.pixels] == [
        (2, 16, 24, 3),
        (2, 16, 24, 1),
    ]
    assert [o.shape for o in first.originals] == [(30, 41, 3), (32, 41, 3)]
    # Grey is the luminance.
    grey = first.pixels[0] @ [0.299, 0.587, 0.114]
    np.testing.assert_allclose(first.pixels[1][..., 0], grey, atol=4)  # Rounding.
    part = first.first(1)
    assert (part.names, len(part.originals)) == (["0"], 1)
    np.testing.assert_array_equal(part.pixels[1], first.pixels[1][:1])


@pytest.fixture
def decoded(monkeypatch):
    """References to the pixels of all files that are decoded."""
    decoded, whole = [], decode.decode

    def watched(data, channels=3, **how):
        pixels = whole(data, channels, **how)
        if isinstance(data, bytes):
            decoded.append(weakref.ref(pixels))
        return pixels

    monkeypatch.setattr(decode, "decode", watched)
    return decoded


def test_a_grey_model_s_images_are_decoded_once_too(images, decoded):
    list(read_batches(images, [tiny(channels=1)], 4, lambda *_: None))
    assert len(decoded) == NUM_FILES - 1


@pytest.mark.parametrize("originals", [0, 3])
def test_an_image_is_decoded_once_and_originals_are_kept_of_the_first(
    images, decoded, originals
):
    found = list(
        read_batches(
            images, [tiny(), tiny()], 4, lambda *_: None, num_originals=originals
        )
    )
    assert len(decoded) == NUM_FILES - 1
    assert sum(pixels() is not None for pixels in decoded) == originals
    assert [len(batch.originals) for batch in found] == [originals, 0, 0]
    # They are of the first readable images.
    heights = [original.shape[0] for original in found[0].originals]
    assert heights == [30, 32, 33][:originals]


@pytest.mark.parametrize(
    ("count", "size", "minimum", "sizes"),
    [
        (9, 4, 0, [4, 4, 1]),
        (8, 4, 0, [4, 4]),
        (9, 4, 4, [4, 5]),
        (7, 4, 4, [7]),
        (8, 4, 4, [4, 4]),
        (10, 3, 2, [3, 3, 4]),
        (3, 6, 4, [3]),
    ],
)
def test_no_batch_is_too_small_and_no_image_is_lost(
    images, count, size, minimum, sizes
):
    some = [*images[:1], *images[2:]][:count]
    found = list(read_batches(some, [tiny()], size, print, min_batch_size=minimum))
    assert [len(batch.names) for batch in found] == sizes
    names = [name for batch in found for name in batch.names]
    assert names == [name for name, _ in some]
