"""How images pass through a network that is looked into."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import models
from vit_jax.analysis import attention, relevance, rollout, subject
from vit_jax.analysis.figures import make, of_images
from vit_jax.analysis.subject import Subject
from vit_jax.errors import UserError
from vit_jax.weights.pretrained import Preprocess, Pretrained

OPTIONS = {
    "variant": "Ti/8",
    "classes": 5,
    "image_size": (16, 24),
    "width": 12,
    "depth": 3,
    "heads": 2,
    "mlp_dim": 17,
}
PREPROCESS = Preprocess((16, 24), (0.4,), (0.25,))
NAMES = [f"{i}.png" for i in range(5)]


@pytest.fixture(scope="module")
def ours():
    model = models.create(**OPTIONS)
    leaves, tree = jax.tree.flatten(jax.eval_shape(model.init, jax.random.key(0)))
    rng = np.random.default_rng(1)
    leaves = [jnp.array(rng.standard_normal(leaf.shape, np.float32)) for leaf in leaves]
    return Subject("tiny", model, jax.tree.unflatten(tree, leaves), PREPROCESS)


@pytest.fixture(scope="module")
def pixels():
    shape = 5, 16, 24, 3
    return np.random.default_rng(2).integers(0, 256, shape, dtype=np.uint8)


def test_some_at_once_are_seen_as_all_together(ours, pixels):
    whole = list(ours.model.inside(ours.params, ours.images(pixels)))
    parts = [range(2), range(2, 4), range(4, 5)]
    steps = ours.look(pixels, NAMES, 2)
    for i, (layer, images) in enumerate(steps):
        wanted = whole[i // 3]
        assert images == parts[i % 3]
        assert len(layer.tokens) == 2  # The last one is filled up.
        for found, all_of_it in zip(layer, wanted, strict=True):
            np.testing.assert_allclose(
                found[: len(images)],
                all_of_it[images.start : images.stop],
                rtol=1e-3,
                atol=1e-4,
            )
    assert i == 8


def test_attention_of_some_images_and_one_layer_is_alive(ours, pixels):
    gc.collect()  # Of earlier tests.
    for layer, _ in ours.look(pixels, NAMES, 2):
        shapes = [array.shape for array in jax.live_arrays()]
        assert shapes.count(layer.attention.shape) == 1
        del layer


def test_an_output_that_is_not_finite_names_the_image(ours, pixels):
    params = jax.tree.map(lambda leaf: leaf, ours.params)
    # Only an image with something bright comes to a number beyond all others.
    params["embedding"] = params["embedding"] | {
        "kernel": jnp.full_like(params["embedding"]["kernel"], 3e37),
        "bias": jnp.zeros(12),
    }
    lost = Subject("lost", ours.model, params, Preprocess((16, 24), (0.0,), (1.0,)))
    dark = np.zeros_like(pixels)
    dark[3] = 255
    with pytest.raises(UserError, match=r"lost's output for 3\.png is not finite: the"):
        list(lost.look(dark, NAMES, 2))


def test_a_resnet_has_nothing_to_look_at(pixels):
    resnet = models.create("R50x1", classes=5, image_size=(16, 24), blocks=(1,))
    ours = Subject("r", resnet, {}, PREPROCESS)
    with pytest.raises(UserError, match="a ResNet has no attention"):
        next(ours.look(pixels, NAMES, 2))


def test_names_have_to_be_as_many_as_classes():
    model = models.create(**OPTIONS)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    checkpoint = Pretrained(
        params=params, options=OPTIONS, format="vit_jax", source="tiny"
    )
    for names in (("apple", "bear"), tuple("abcdef")):
        with pytest.raises(UserError, match=f"there are {len(names)} class names, but"):
            subject.make("tiny", checkpoint, PREPROCESS, names)
    assert subject.make("tiny", checkpoint, PREPROCESS).class_name(1) == "class 1"
    named = subject.make("tiny", checkpoint, PREPROCESS, tuple("abcde"))
    assert named.class_name(1) == "b"


@pytest.mark.parametrize(
    ("variant", "side", "order", "sizes"),
    [
        ("S/16", 224, make.Order(("cka",)), (32, 32)),
        ("B/16", 512, make.Order(("cka",)), (5, 5)),
        ("L/16", 512, make.Order(("norms", "cka")), (3, 6)),
        ("B/8", 512, make.Order(("cka",)), (1, 4)),
        ("B/8", 512, make.Order(("norms",)), (1, 1)),
        ("S/16", 224, make.Order(("cka",), batch_size=3), (3, 6)),
        ("S/16", 224, make.Order(("norms", "rollout"), shown=2), (32, 32)),
        ("S/16", 224, make.Order(("rollout",), shown=2), (2, 2)),
    ],
)
def test_no_more_are_in_the_network_than_memory_holds(variant, side, order, sizes):
    model = models.create(variant, classes=5, image_size=(side, side))
    ours = Subject("s", model, {}, PREPROCESS)
    assert make.sizes(ours, order) == sizes
    if not order.batch_size:
        one = 4 * model.options["heads"] * (1 + model.grid[0] ** 2) ** 2
        assert sizes[0] == 1 or sizes[0] * one <= 256 << 20
        assert ours.batch_size(4) == max(1, min(32, (64 << 20) // one))


def precisions(jaxpr):
    """Yields the precision of each product, those of functions within too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.params["precision"]
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                yield from precisions(value.jaxpr)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda a, b: attention.reach(a, b, 1), [(2, 3, 7, 7), (6, 6)]),
        (rollout.step, [(2, 7, 7), (2, 3, 7, 7)]),
        (relevance._down, [(2, 7), (2, 3, 7, 7), (2, 3, 7, 7)]),
        (of_images._asked, [(2, 3, 7, 7), (7,)]),
    ],
    ids=["distance", "rollout", "relevance", "query"],
)
def test_products_are_as_exact_on_accelerators(function, shapes):
    # There their operands would have 8 or 11 bits otherwise.
    jaxpr = jax.make_jaxpr(function)(*map(jnp.ones, shapes)).jaxpr
    highest = jax.lax.Precision.HIGHEST
    assert list(precisions(jaxpr)) == [(highest, highest)]
