"""Checkpoints with random parameters and images of noise, to be looked into.

And models that compute nothing: what they saw is made.
"""

import dataclasses
import io

import jax
import numpy as np
from PIL import Image

from vit_jax import models
from vit_jax.models import text
from vit_jax.tools.explorer.rows import AttentionRows
from vit_jax.tools.explorer.session import ExploredModel, ModelOutput
from vit_jax.weights.pretrained import Preprocess, Pretrained

NAMES = ("apple", "Bär", "a cat, or <two>", "dog", "eel")


def pretrained(seed, **options):
    """Returns a checkpoint whose attention is far from even."""
    model = models.create(**options)
    leaves, tree = jax.tree.flatten(jax.eval_shape(model.init, jax.random.key(0)))
    rng = np.random.default_rng(seed)
    leaves = [0.5 * rng.standard_normal(leaf.shape, np.float32) for leaf in leaves]
    names = NAMES if options["num_classes"] else ()
    return Pretrained(
        params=jax.tree.unflatten(tree, leaves),
        options=options,
        format="vit_jax",
        source=f"models/tiny{seed}",
        preprocess=Preprocess(options["image_size"], (0.4,), (0.3,), crop_fraction=0.9),
        class_names=names,
    )


def towers(pool="token"):
    """An image network with a text tower, whose projection is CLIP's."""
    found = pretrained(
        7,
        variant="Ti/8",
        num_classes=0,
        pool=pool,
        image_size=(24, 40),
        width=12,
        depth=2,
        num_heads=3,
        mlp_dim=17,
    )
    about = {"vocab_size": 258, "width": 12, "depth": 1, "num_heads": 2, "mlp_dim": 20}
    module = text.TextConfig(**about).build(16, 10, "float32")
    rng = np.random.default_rng(8)

    def draw(tree):
        return jax.tree.map(
            lambda leaf: 0.5 * rng.standard_normal(leaf.shape, np.float32), tree
        )

    params = {
        "text": draw(text.shapes(module)),
        "projection": {"kernel": 0.5 * rng.standard_normal((12, 10), np.float32)},
        "logit_scale": np.ones(1, np.float32),
    }
    return dataclasses.replace(
        found,
        task={"name": "contrastive", "loss": "softmax", "text": about},
        task_params=params,
        tokenizer="bytes",
    )


def swin(image_size=(24, 20), **changes):
    """A Swin Transformer whose windows do not divide its 12x10 and 6x5 patches."""
    sizes = {"width": 8, "stage_depths": (2, 1), "num_heads": (2, 4), "window_size": 4}
    return pretrained(
        6,
        variant="Swin-T",
        num_classes=5,
        image_size=image_size,
        **sizes | {"patch_size": 2} | changes,
    )


def picture(seed, size=(61, 47), form="PNG"):
    """Returns the file of an image of noise; `size` is its width and height."""
    noise = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).save(stream, form)
    return stream.getvalue()


class Made(ExploredModel):
    """A model that is described, and no more."""

    def __init__(self, grid, layers, heads):
        self.name, self.extra = "synthetic", ["CLS"]
        self._described = {
            "name": self.name,
            "variant": "synthetic",
            "grid": grid,
            "labels": [str(i + 1) for i in range(layers)],
            "heads": [heads] * layers,
            "rollout": True,
            "relevance": False,
            "extra": self.extra,
            "size": (8 * grid[0], 8 * grid[1]),
        }

    def describe(self):
        return self._described


def made(grid, layers, heads, seed=0):
    """Returns a model of one extra token and what it saw: attention that is noise."""
    rng, tokens = np.random.default_rng(seed), 1 + grid[0] * grid[1]
    rows = AttentionRows.zeros(tokens, 1, layers, heads + 1)
    rows.scales[:] = rng.random(rows.scales.shape, np.float32)
    # Most attention is small, as that of models.
    likely = np.minimum(255, -20 * np.log(1 - (np.arange(256) + 0.5) / 256))
    for layer in range(layers):
        noise = rng.integers(0, 256, rows.levels[:, layer].shape, np.uint8)
        rows.levels[:, layer] = likely.astype(np.uint8)[noise]
    rows.levels[..., -1] = 255
    shown = io.BytesIO()
    Image.new("RGB", (8 * grid[1], 8 * grid[0])).save(shown, "PNG")
    output = ModelOutput((), (0.0, 0.0, 1.0, 1.0), shown.getvalue(), rows)
    return Made(grid, layers, heads), output
