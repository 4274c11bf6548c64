"""Small models with random numbers everywhere, as checkpoints have them."""

import json

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax import models
from vit_jax.distributed import sharding
from vit_jax.weights import Pretrained

SIZE = {"width": 12, "depth": 2, "num_heads": 3, "mlp_dim": 20}


def encoder(variant="Ti/4", num_classes=7, image_size=(12, 12), **options):
    return models.create(
        variant, num_classes=num_classes, image_size=image_size, **SIZE | options
    )


def network(variant="Ti/4", **options):
    """Returns an encoder or, by the variant's name, a ResNet."""
    create = encoder if "/" in variant else models.create
    return create(variant, **{"num_classes": 7, "image_size": (12, 20)} | options)


def checkpoint(model, **fields):
    """Returns a checkpoint with random parameters."""
    return Pretrained(
        params=unflatten_dict(random_flat(model), sep="/"),
        options=model.options,
        format="vit_jax",
        source="test",
        **fields,
    )


_SHAPES = {}  # Of the models so far: tracing one takes a tenth of a second.


def random_flat(model, seed=0):
    """Returns names joined by "/" to random arrays of a model's shapes."""
    key = repr(model.options)
    if key not in _SHAPES:
        tree = jax.eval_shape(model.init, jax.random.key(0))
        _SHAPES[key] = flatten_dict(tree, sep="/")
    shapes = _SHAPES[key]
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=shape.shape, scale=0.3).astype(np.float32)
        for name, shape in sorted(shapes.items())
    }


def specs(model):
    """Returns how parameters are split over two devices of the axis `model`, by name."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    axes = ("data", "fsdp", "model")
    mesh = jax.make_mesh((1, 1, 2), axes, devices=jax.devices()[:2])
    found = sharding.parameters(shapes, mesh, model.config.model_axes)
    return {name: place.spec for name, place in flatten_dict(found, sep="/").items()}


def assert_same(params, flat):
    """Checks that a nested dict holds exactly these arrays, to the bit."""
    found = flatten_dict(params, sep="/")
    assert found.keys() == flat.keys()
    for name, value in flat.items():
        assert found[name].dtype == value.dtype, name
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def counted_by_kind(name):
    """Names as Linen gives them: LayerNorm_1 for LayerNorm_2 and so on."""
    for published, linen_name in (
        ("LayerNorm_2", "LayerNorm_1"),
        ("MultiHeadDotProductAttention_1", "MultiHeadDotProductAttention_0"),
        ("MlpBlock_3", "MlpBlock_0"),
    ):
        name = name.replace(f"/{published}/", f"/{linen_name}/")
    return name


def save(path, flat, rename=lambda name: name):
    np.savez(path, **{rename(name): value for name, value in flat.items()})
    return path


def edit_config(folder, **changes):
    """Changes keys of a folder's config.json; None removes a key."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
