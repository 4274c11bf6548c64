"""Checkpoints with random parameters, images of noise, and a server of them."""

import contextlib
import dataclasses
import io
import threading

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from vit_jax import models
from vit_jax.data.preprocess import Preprocess
from vit_jax.models import segmenter, text
from vit_jax.tools.explorer import images, server, session
from vit_jax.tools.explorer.rows import AttentionRows
from vit_jax.tools.explorer.session import ExploredModel, ModelOutput
from vit_jax.weights.preprocessing import with_patch
from vit_jax.weights.pretrained import Pretrained

NAMES = ("apple", "Bär", "a cat, or <two>", "dog", "eel")


def draw(rng, shapes):
    """Draws arrays of the given shapes."""
    noise = lambda leaf: 0.5 * rng.standard_normal(leaf.shape, np.float32)
    return jax.tree.map(noise, shapes)


def pretrained(seed, variant="Ti/8", **options):
    """Returns a checkpoint whose attention is far from even."""
    sizes = {"image_size": (24, 40), "width": 12, "num_heads": 3, "mlp_dim": 17}
    sizes = sizes if variant == "Ti/8" else {}
    options = {"variant": variant, "num_classes": 5} | sizes | options
    model = models.create(**options)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return Pretrained(
        params=draw(np.random.default_rng(seed), shapes),
        options=options,
        format="vit_jax",
        source=f"models/tiny{seed}",
        preprocess=Preprocess(options["image_size"], (0.4,), (0.3,), crop_fraction=0.9),
        class_names=NAMES if options["num_classes"] else (),
    )


def opened(checkpoint, *, max_tokens=0, **changes):
    """Opens a checkpoint with its own preprocessing, perhaps for images of any size."""
    how = with_patch(
        dataclasses.replace(checkpoint.preprocess, max_tokens=max_tokens),
        checkpoint.options,
    )
    return ExploredModel(checkpoint, preprocess=how, **changes)


def towers():
    """An image network with a text tower, whose projection is CLIP's."""
    found = pretrained(7, num_classes=0, depth=2)
    about = {"vocab_size": 258, "width": 12, "depth": 1, "num_heads": 2, "mlp_dim": 20}
    module = text.TextConfig(**about).build(16, 10, "float32")
    rng = np.random.default_rng(8)
    params = {
        "text": draw(rng, text.shapes(module)),
        "projection": {"kernel": 0.5 * rng.standard_normal((12, 10), np.float32)},
        "logit_scale": np.ones(1, np.float32),
    }
    return dataclasses.replace(
        found,
        task={"name": "contrastive", "loss": "softmax", "text": about},
        task_params=params,
        tokenizer="bytes",
    )


def with_masks(**options):
    """A network with a head for masks of three classes."""
    found = pretrained(9, num_classes=0, depth=2, **options)
    model = models.create(**found.options)
    task = {"name": "segmentation", "head": "linear", "layers": (-1,), "width": 8}
    built = segmenter.build(model, task["head"], task["layers"], task["width"], 3)
    params, means = draw(
        np.random.default_rng(10), jax.eval_shape(built.init, jax.random.key(0))
    )
    means["BatchNorm_0"]["var"] = means["BatchNorm_0"]["var"] ** 2 + 1
    return dataclasses.replace(
        found,
        class_names=("sky", "sea", "<land>"),
        task=task,
        task_params={segmenter.PARAMS: params, segmenter.MEANS: means},
    )


def swin(image_size=(24, 20), **changes):
    """A Swin Transformer whose windows do not divide its 12x10 and 6x5 patches."""
    sizes = {"width": 8, "stage_depths": (2, 1), "num_heads": (2, 4), "window_size": 4}
    sizes |= {"patch_size": 2, "image_size": image_size}
    return pretrained(6, "Swin-T", **sizes | changes)


def picture(seed, form="PNG", size=(47, 61)):
    """Returns the file of an image of noise, of a height and width."""
    noise = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).save(stream, form)
    return stream.getvalue()


def network_input(output):
    """Returns the normalised image that a model has seen."""
    pixels = np.asarray(Image.open(io.BytesIO(output.picture)))[None]
    pixels = pixels if pixels.ndim == 4 else pixels[..., None]
    return jnp.asarray((pixels / 255 - 0.4) / 0.3, jnp.float32)


@contextlib.contextmanager
def served(explored_models, folder=None):
    """Serves models, and perhaps a folder, on a free port."""
    folder = folder and images.Folder(str(folder))
    held = session.Session(explored_models, folder)
    with server.Server(held, "127.0.0.1", 0) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.05,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


class Made(ExploredModel):
    """A model that computes nothing."""

    def __init__(self, description):
        self.name, self._description = description["name"], description

    def describe(self):
        return self._description


def made(grid, layers, heads, seed=0):
    """Returns a model of one extra token and what it saw: attention that is noise."""
    rng, tokens = np.random.default_rng(seed), 1 + grid[0] * grid[1]
    rows = AttentionRows.zeros(tokens, 1, layers, heads + 1)
    rows.scales[:] = rng.random(rows.scales.shape, np.float32)
    # Most attention is small, as that of models.
    likely = np.minimum(255, -20 * np.log(1 - (np.arange(256) + 0.5) / 256))
    noise = rng.integers(0, 256, rows.levels.shape, np.uint8)
    rows.levels[:] = likely.astype(np.uint8)[noise]
    rows.levels[..., -1] = 255
    shown = io.BytesIO()
    Image.new("RGB", (8 * grid[1], 8 * grid[0])).save(shown, "PNG")
    pixels = np.zeros((8 * grid[0], 8 * grid[1], 3), np.uint8)
    output = ModelOutput((), (0.0, 0.0, 1.0, 1.0), shown.getvalue(), pixels, grid, rows)
    description = {
        "name": "synthetic",
        "variant": "synthetic",
        "grid": grid,
        "labels": [str(i + 1) for i in range(layers)],
        "heads": [heads] * layers,
        "rollout": True,
        "relevance": False,
        "colors": [],
        "extra": ["CLS"],
        "size": (8 * grid[0], 8 * grid[1]),
    }
    return Made(description), output
