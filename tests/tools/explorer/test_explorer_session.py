"""The form in which attention is kept and sent, and where it comes from."""

import dataclasses
import io

import explored
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from vit_jax import models
from vit_jax.analysis import attention
from vit_jax.data import masks
from vit_jax.data.transforms import naflex
from vit_jax.errors import UserError
from vit_jax.evaluators import prediction
from vit_jax.models import intermediates
from vit_jax.models import segmenter as heads
from vit_jax.tools.explorer import saved
from vit_jax.tools.explorer.images import Refused
from vit_jax.tools.explorer.rows import AttentionRows
from vit_jax.tools.explorer.session import Session
from vit_jax.weights import segmenter, surgery
from vit_jax.weights.calibration import Calibration
from vit_jax.weights.text_tower import text_tower


def read(data, layers, maps, extra, patches, steps=255):
    """Reads a row without the code under test: attention to all tokens."""
    count = layers * maps * (extra + 1)
    scales = np.frombuffer(data, "<f4", count).reshape(layers, maps, extra + 1)
    levels = np.frombuffer(data, np.uint8, offset=4 * count)
    levels = levels.reshape(layers, maps, patches)
    values = levels * (scales[..., -1:] / np.float32(steps))
    return np.concatenate([scales[..., :-1], values], -1)


def uneven(seed, layers, maps, tokens, extra):
    """Returns attention of rows of sum 1, some entries far larger, and its rows."""
    rng = np.random.default_rng(seed)
    values = np.exp(3 * rng.standard_normal((layers, maps, tokens, tokens)))
    values = (values / values.sum(-1, keepdims=True)).astype(np.float32)
    values[0, 0, 4] = 0
    rows = AttentionRows.zeros(tokens, extra, layers, maps)
    for layer, of_layer in enumerate(values):
        rows.set_layer(layer, of_layer)
    return values, rows


@pytest.mark.parametrize("steps", [255, 15])
def test_rows_are_read_back_to_half_a_step(steps):
    maps, rows = uneven(0, layers=3, maps=5, tokens=11, extra=2)
    if steps != 255:
        rows = rows.requantize(steps)
    for query in (0, 4, 10):
        found = read(rows.to_bytes(query), 3, 5, 2, 9, steps)
        expected = maps[:, :, query]
        np.testing.assert_array_equal(found[..., :2], expected[..., :2])
        peak = expected[..., 2:].max(-1, keepdims=True)
        # Half a step of the one, and of the 255 that it was made of.
        error = 0.5 / steps + 0.5 / 255 * (steps != 255) + 1e-5
        assert (abs(found - expected)[..., 2:] <= error * peak).all()


@pytest.mark.parametrize("side", [2, 3])
def test_blocks_have_the_mean_of_their_patches(side):
    grid, extra = (5, 7), 2
    _, rows = uneven(1, layers=2, maps=3, tokens=37, extra=extra)
    down, across = (-(-count // side) for count in grid)
    pooled = rows.pool_patches(grid, side)
    assert pooled.requantize(7).pool == pooled.pool == side
    assert pooled.levels.shape == (37, 2, 3, down * across)
    for query in (0, 4, 36):
        fine = read(rows.to_bytes(query), 2, 3, extra, 35)
        found = read(pooled.to_bytes(query), 2, 3, extra, down * across)
        # Scales have 8 bits from the first that is not 0.
        np.testing.assert_allclose(found[..., :2], fine[..., :2], rtol=2**-8)
        patches = fine[..., 2:].reshape(2, 3, *grid)
        expected = np.stack(
            [
                patches[:, :, y : y + side, x : x + side].mean((2, 3))
                for y in range(0, grid[0], side)
                for x in range(0, grid[1], side)
            ],
            axis=-1,
        )
        peak = expected.max(-1, keepdims=True)
        error = abs(found[..., 2:] - expected)
        assert (error <= (0.51 / 255 + 2**-8) * peak).all()


@pytest.mark.parametrize("number", [0, 1])
def test_a_model_keeps_the_attention_of_the_analysis(
    number, explored_models, first, second, photograph
):
    pretrained = (first, second)[number]
    layers, heads, extra, patches = ((4, 3, 1, 15), (2, 2, 0, 8))[number]
    found = explored_models[number].run(photograph, "photograph")
    assert bool(found.classes) == (number == 0)
    network, params = surgery.fit_network(pretrained, pretrained.preprocess)
    images = explored.network_input(found)
    maps = list(attention.attention_maps(network, params, images))
    assert len(maps) == layers
    flows = [attention.rollout(maps[: layer + 1])[0] for layer in range(layers)]
    for query in range(extra + patches):
        row = read(found.rows.to_bytes(query), layers, heads + 1, extra, patches)
        for layer in range(layers):
            expected = [*maps[layer][0, :, query], flows[layer][query]]
            np.testing.assert_allclose(row[layer], expected, atol=1 / 255)
            peak = np.max(np.array(expected)[:, extra:], axis=-1, keepdims=True)
            assert (abs(row[layer] - expected) <= 0.51 / 255 * peak + 1e-6).all()


@pytest.mark.slow
def test_images_of_any_size_have_their_own_grid(first, photograph):
    size = (24, 80)
    model = explored.opened(first, max_tokens=20)
    served = Session([model])
    grid, data = naflex.fitting_grid(*size, 20), explored.picture(5, size=size)
    keys = [served.run(one, "x")["key"] for one in (data, photograph)]
    found = served.output(keys[0], 0)
    sides = tuple(8 * count for count in grid)
    about = {"grid": grid, "size": sides, "box": (0, 0, 1, 1)}
    assert about.items() <= found.summary().items()
    assert Image.open(io.BytesIO(found.picture)).size == sides[::-1]
    network = models.create(**first.options)
    own, patches = network.at_size(sides), int(np.prod(grid))
    params = own.resize(first.params, network)
    images = explored.network_input(found)
    maps = list(attention.attention_maps(own, params, images))
    for query in range(1 + patches):
        row = read(found.rows.to_bytes(query), 4, 4, 1, patches)
        for layer in range(4):
            expected = maps[layer][0, :, query]
            np.testing.assert_allclose(row[layer, :3], expected, atol=1 / 255)
    logits = own.apply(params, images)["logits"][0]
    assert [one.label for one in found.classes] == np.argsort(-logits).tolist()
    label = np.array([found.classes[0].label])
    expected = attention.relevance(own, params, images, label)[0, 1:]
    np.testing.assert_allclose(
        served.relevance(keys[0], 0, int(label[0])), expected, rtol=1e-3, atol=1e-6
    )
    features = [
        model.features(served.output(key, 0)).reshape(-1, 12).astype(np.float64)
        for key in keys
    ]
    a, b = (one / np.linalg.norm(one, axis=1, keepdims=True) for one in features)
    np.testing.assert_allclose(
        served.similarity(keys[0], 0, keys[1], 4), a @ b[4], atol=1e-5
    )
    colours = Image.open(io.BytesIO(served.components(keys[0], 0)))
    assert colours.size == grid[::-1]


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_the_classes_are_those_of_predict(first, photograph, loss):
    scale = Calibration(temperature=2.0, sigmoid=loss == "sigmoid")
    given = dataclasses.replace(first, loss=loss, calibration=scale)
    names = "one", "two", "three", "four", "five"
    opened = explored.opened(given, class_names=names)
    found = opened.run(photograph, "photograph").classes
    classifier = prediction.Classifier(given, class_names=names)
    [(_, expected)] = prediction.predict(
        classifier, [("photograph", photograph)], batch_size=1
    )
    assert [one.label for one in found] == [one.label for one in expected]
    assert [one.name for one in found] == [one.name for one in expected]
    probabilities = [one.probability for one in expected]
    np.testing.assert_allclose(
        [one.probability for one in found], probabilities, atol=1e-5
    )
    # Far from each other, or the order would be a matter of chance.
    assert abs(np.diff(probabilities)).min() > 1e-4


def test_the_attention_of_one_layer_is_there_at_a_time(
    explored_models, photograph, monkeypatch
):
    def count():
        return sum(array.shape == (1, 3, 16, 16) for array in jax.live_arrays())

    inside, before, counts = intermediates.layers, count(), []

    def watched(model, params, images):
        def layer(found):
            counts.append(count() - before)
            return found

        return map(layer, inside(model, params, images))

    monkeypatch.setattr(intermediates, "layers", watched)
    explored_models[0].run(photograph, "photograph")
    assert counts == [1, 1, 1, 1]


def test_a_description(explored_models):
    assert explored_models[0].describe() == {
        "name": "models/tiny1",
        "variant": "Ti/8",
        "grid": (3, 5),
        "size": (24, 40),
        "labels": ["1", "2", "3", "4"],
        "heads": [3, 3, 3, 3],
        "rollout": True,
        "relevance": True,
        "texts": False,
        "features": True,
        "colors": [],
        "extra": ["CLS"],
    }
    assert explored_models[1].describe()["extra"] == []


def test_the_distillation_token_is_named():
    given = explored.pretrained(3, depth=1, distillation=True)
    assert explored.opened(given).describe()["extra"] == ["CLS", "DIST"]


def test_what_cannot_be_explored_is_refused(first, second, photograph):
    sizes = {"stage_depths": (1,), "stem_width": 32, "image_size": (32, 32)}
    with pytest.raises(UserError, match="a ResNet has no attention"):
        explored.opened(explored.pretrained(4, "R50x1", **sizes))
    with pytest.raises(UserError, match="there are 2 class names, but .* 5 classes"):
        explored.opened(first, class_names=("a", "b"))
    given = dataclasses.replace(second, params=jax.tree.map(np.copy, second.params))
    given.params["embedding"]["kernel"][0] = np.nan
    with pytest.raises(UserError, match="tiny2's output for photograph is not finite"):
        explored.opened(given).run(photograph, "photograph")


def test_the_name_tells_no_password(second):
    source = "https://me:hun/ter2@localhost:9/a/b/x.npz?X-Amz-Signature=a1"
    found = explored.opened(dataclasses.replace(second, source=source))
    assert found.name == found.describe()["name"] == "b/x.npz"


def test_parameters_are_fitted_where_jax_has_no_cpu(second, monkeypatch):
    devices = jax.devices()

    def no_cpu(backend=None):
        if backend == "cpu":  # As with JAX_PLATFORMS=cuda.
            raise RuntimeError("Unknown backend cpu")
        return devices

    monkeypatch.setattr(jax, "devices", no_cpu)
    _, params = surgery.fit_network(second, second.preprocess)
    assert jax.tree.structure(params) == jax.tree.structure(second.params)


@pytest.fixture(scope="module")
def windowed(photograph):
    """A Swin Transformer, its checkpoint, and what it saw."""
    given = explored.swin(window_padding="timm")
    found = explored.opened(given)
    return found, given, found.run(photograph, "photograph")


@pytest.mark.slow
def test_attention_in_windows_is_that_of_the_network(windowed):
    found, given, output = windowed
    about = found.describe()
    assert about["grid"] == (12, 10)
    assert about["labels"] == ["1.1", "1.2", "2.1"]
    assert about["heads"] == [2, 2, 4]
    assert not about["rollout"] and not about["relevance"] and about["extra"] == []
    assert len(output.classes) == 5 and output.rows.num_queries == 120
    images = explored.network_input(output)
    model, params = surgery.fit_network(given, given.preprocess)
    blocks = model.config.window_attention(model.module, params, images)[1]
    for query in (0, 57, 119):
        data = output.rows.to_bytes(query)
        values = read(data, layers=3, maps=4, extra=0, patches=120)
        assert not values[:2, 2:].any()  # Heads that the first stage has not.
        row, column = divmod(query, 10)
        for layer, block in enumerate(blocks):
            mine = (row >> block.stage) * block.grid[1] + (column >> block.stage)
            window, place = np.argwhere(np.asarray(block.patches) == mine)[0]
            for patch in (0, 44, 75, 119):
                y, x = divmod(patch, 10)
                other = (y >> block.stage) * block.grid[1] + (x >> block.stage)
                where = np.argwhere(np.asarray(block.patches)[window] == other)
                wanted = 0.0
                if len(where):
                    wanted = block.weights[0, window, :, place, where[0, 0]]
                got = values[layer, : block.weights.shape[2], patch]
                np.testing.assert_allclose(got, wanted, atol=0.51 / 255)


def test_windows_of_a_grid_that_they_divide_have_all_attention(photograph):
    given = explored.swin(image_size=(16, 16))
    found = explored.opened(given)
    data = found.run(photograph, "photograph").rows.to_bytes(9)
    sums = read(data, layers=3, maps=4, extra=0, patches=64).sum(-1)
    # Each patch of the second stage is shown at four of the first.
    np.testing.assert_allclose(sums[:2, :2], 1, atol=0.01)
    np.testing.assert_allclose(sums[2], 4, atol=0.04)


def test_relevance_is_that_of_the_analysis(explored_models, first, photograph):
    found, other = explored_models
    output = found.run(photograph, "photograph")
    images = explored.network_input(output)
    model, params = surgery.fit_network(first, first.preprocess)
    wanted = attention.relevance(model, params, images, jnp.array([3]))[0, 1:]
    np.testing.assert_allclose(found.relevance(output, 3), wanted, rtol=1e-5)
    assert found.relevance(output, 5) is None
    assert other.relevance(other.run(photograph, "photograph"), 0) is None


def test_a_page_of_attention_in_windows_is_not_saved(windowed, tmp_path):
    found, _, output = windowed
    with pytest.raises(UserError, match="use the page without --html, or visualize"):
        saved.write(str(tmp_path / "page.html"), [found], [output], "photograph")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_relevance_to_a_text_is_that_of_the_similarity(photograph):
    pretrained = explored.towers()
    model = explored.opened(pretrained)
    output = model.run(photograph, "x")
    words = "a photo of a dog"
    found = model.relevance(output, words)

    # The gradient of the cosine by hand, as the kernel of a classifier of one class.
    network, params = surgery.fit_network(pretrained, pretrained.preprocess)
    images = explored.network_input(output)
    features = np.asarray(jax.jit(network.apply)(params, images)["pre_logits"])[0]
    kernel = pretrained.task_params["projection"]["kernel"]
    (goal,) = text_tower(pretrained).embed([words])
    embedded = features @ kernel
    length = np.linalg.norm(embedded)
    unit = embedded / length
    slope = kernel @ (goal - unit * (unit @ goal)) / length
    classifier = models.create(**{**network.options, "num_classes": 1})
    head = {"kernel": jnp.asarray(slope[:, None]), "bias": jnp.zeros(1)}
    label = jnp.zeros(1, jnp.int32)
    wanted = attention.relevance(classifier, {**params, "head": head}, images, label)
    np.testing.assert_allclose(found, np.asarray(wanted)[0, 1:], rtol=1e-3, atol=1e-6)
    assert found.max() > 0
    other = model.relevance(output, "x")
    assert np.abs(other / other.sum() - found / found.sum()).max() > 1e-3


def test_patches_are_compared_within_and_between_images(explored_models, photograph):
    session = Session(explored_models)
    one = session.run(photograph, "one")["key"]
    two = session.run(explored.picture(5), "two")["key"]
    for number, model in enumerate(explored_models):
        features = [model.features(session.output(key, number)) for key in (one, two)]
        rows, columns = model.describe()["grid"]
        flat = [x.reshape(rows * columns, -1) for x in features]
        flat = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in flat]
        within = session.similarity(one, number, one, 3)
        np.testing.assert_allclose(within, flat[0] @ flat[0][3], atol=1e-5)
        np.testing.assert_allclose(within[3], 1, atol=1e-5)
        between = session.similarity(two, number, one, 3)
        np.testing.assert_allclose(between, flat[1] @ flat[0][3], atol=1e-5)
        picture = np.array(Image.open(io.BytesIO(session.components(one, number))))
        assert picture.shape == (rows, columns, 3)
    with pytest.raises(Refused, match="Patch 15 does not exist"):
        session.similarity(one, 0, one, 15)
    with pytest.raises(Refused, match="Model 0 cannot show relevance to texts"):
        session.relevance(one, 0, "a dog")


def test_merged_patches_have_the_same_features(windowed):
    model, _, output = windowed
    features = model.features(output)
    assert features.shape[:2] == (12, 10)
    np.testing.assert_array_equal(features[0, 0], features[1, 1])


def test_bands_to_show_are_chosen():
    checkpoint = explored.pretrained(3, channels=5, depth=1)
    pixels = np.random.default_rng(0).integers(0, 256, (30, 50, 5), np.uint8)
    stream = io.BytesIO()
    np.save(stream, pixels)
    shown = {}
    for bands in ((), (0, 1, 2), (4, 0, 3), (2,)):
        model = explored.opened(checkpoint, shown_bands=bands)
        picture = model.run(stream.getvalue(), "bands.npy").picture
        shown[bands] = np.array(Image.open(io.BytesIO(picture)))
    np.testing.assert_array_equal(shown[()], shown[0, 1, 2])
    np.testing.assert_array_equal(shown[4, 0, 3][..., 1], shown[()][..., 0])
    assert shown[2,].ndim == 2
    with pytest.raises(UserError, match="--show_bands=1,2,5"):
        explored.opened(checkpoint, shown_bands=(1, 2, 5))


@pytest.mark.parametrize("max_tokens", [0, pytest.param(20, marks=pytest.mark.slow)])
def test_a_head_for_masks_shows_the_class_of_each_pixel(max_tokens, photograph):
    given = explored.with_masks()
    model = explored.opened(given, max_tokens=max_tokens)
    found = model.run(photograph, "photograph")
    assert found.grid == ((4, 5) if max_tokens else (3, 5))
    how = dataclasses.replace(given.preprocess, image_size=found.pixels.shape[:2])
    network, params = surgery.fit_network(given, how)
    segment = segmenter.segmenter_of(given, network)
    logits = segment(params, explored.network_input(found))
    size = found.pixels.shape[:2]
    expected = np.asarray(heads.resize(logits, size).argmax(-1))[0]
    colors = masks.palette(3)
    assert model.describe()["colors"] == ["#000000", "#800000", "#008000"]
    picture = np.asarray(Image.open(io.BytesIO(found.mask)))
    assert (picture == colors[expected]).all(-1).mean() > 0.99  # But for rounding.
    parts = np.bincount(expected.ravel(), minlength=3) / expected.size
    for one in found.classes:
        assert one.name == given.class_names[one.label]
        assert one.probability == pytest.approx(parts[one.label], abs=0.01)
    assert model.relevance(found, 0) is None
