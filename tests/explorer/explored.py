"""Checkpoints with random parameters and images of noise, to be looked into."""

import io

import jax
import numpy as np
from PIL import Image

from vit_jax import models
from vit_jax.weights.pretrained import Preprocess, Pretrained

NAMES = ("apple", "Bär", "a cat, or <two>", "dog", "eel")


def pretrained(seed, **options):
    """Returns a checkpoint whose attention is far from even."""
    model = models.create(**options)
    leaves, tree = jax.tree.flatten(jax.eval_shape(model.init, jax.random.key(0)))
    rng = np.random.default_rng(seed)
    leaves = [0.5 * rng.standard_normal(leaf.shape, np.float32) for leaf in leaves]
    names = NAMES if options["classes"] else ()
    return Pretrained(
        params=jax.tree.unflatten(tree, leaves),
        options=options,
        format="vit_jax",
        source=f"models/tiny{seed}",
        preprocess=Preprocess(options["image_size"], (0.4,), (0.3,), crop_fraction=0.9),
        class_names=names,
    )


def picture(seed, size=(61, 47), form="PNG"):
    """Returns the file of an image of noise; `size` is its width and height."""
    noise = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).save(stream, form)
    return stream.getvalue()
