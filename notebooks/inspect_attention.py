# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Inspect attention
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/vit_jax/blob/main/notebooks/inspect_attention.ipynb)
#
# What a Vision Transformer looks at in a photograph, layer by layer; what it adds up to;
# which patches spoke for a class; and what its parameters know of the image grid before
# they have seen one.
#
# **Where there is no network** (as in the project's own tests) `source` is set to a small
# model that is there already; nothing is fetched then.

# %% [markdown]
# The first cell fetches the repository and installs it where it is not, as in a fresh
# Colab; else it does nothing. On a GPU take `-e ".[cuda]"`, on a TPU `-e ".[tpu]"`.

# %%
import sys

# !{sys.executable} -c "import vit_jax" 2>/dev/null || (git init -q && git pull -q --depth=1 https://github.com/OWNER/vit_jax main && {sys.executable} -m pip install -q -r requirements.txt -e .)

# %%
import os
import pathlib

import numpy as np
from IPython.display import display
from PIL import Image

import vit_jax
from vit_jax.analysis import attention, filters, overlay, positions, relevance, rollout
from vit_jax.data import device_ops
from vit_jax.evaluation import network, prediction
from vit_jax.report import contact_sheet

os.chdir(pathlib.Path(vit_jax.__file__).parents[1])

# %% tags=["parameters"]
source = "deit:Ti/16"  # DeiT-Ti of ImageNet, 22 MB; or a run's folder, a file, hf://...
photo = "notebooks/chelsea.jpg"  # Chelsea the cat, by Stefan van der Walt, CC0.

# %% [markdown]
# ## The model and the photograph
#
# Images are prepared as it is stored with the weights. DeiT's file has no class names:
# 281, 282 and 285 are kinds of cats.

# %%
found, preprocess = network.open_weights(source, {}, average=True, heads=0, tell=print)
classifier = prediction.Classifier(found, preprocess=preprocess)
model, params = network.fit(found, preprocess)

pixels = classifier.prepare(np.asarray(Image.open(photo).convert("RGB")))
images = device_ops.normalize(pixels[None], preprocess.mean, preprocess.std)
top = classifier.rank(np.asarray(classifier.logits(pixels[None]))[0], topk=3)
display(Image.fromarray(pixels), include=["image/jpeg"])
print(*(f"{p.name}: {p.probability:.1%}" for p in top), sep="\n")

# %% [markdown]
# ## Where [CLS] looks
#
# One array a layer, of images, heads, asking tokens and tokens looked at. The first token
# is [CLS], the others are the patches, row by row. Here is the mean of the heads:

# %%
maps = [np.asarray(weights[0]) for weights in attention.maps(model, params, images)]
size = pixels.shape[:2]
seen = [
    overlay.upsample(weights.mean(0)[0, model.extra :], model.grid, size)
    for weights in maps
]
sheet = contact_sheet.draw(
    np.stack([overlay.blend(pixels, overlay.scaled(values)) for values in seen]),
    [[f"layer {i}"] for i in range(1, len(maps) + 1)],
    columns=6,
)
display(sheet.reduce(2), include=["image/jpeg"])

# %% [markdown]
# The heads of the last layer, one by one:

# %%
seen = [overlay.upsample(head[0, model.extra :], model.grid, size) for head in maps[-1]]
sheet = contact_sheet.draw(
    np.stack([overlay.blend(pixels, overlay.scaled(values)) for values in seen]),
    [[f"head {i}"] for i in range(1, len(seen) + 1)],
    columns=6,
)
display(sheet.reduce(2), include=["image/jpeg"])

# %% [markdown]
# ## What it adds up to, and what spoke for a class
#
# Attention rollout multiplies the layers; relevance weights attention by its gradient with
# respect to a class, so that it differs from class to class.

# %%
rolled = rollout.rollout(attention.maps(model, params, images), discard=0.5)
spoke = [
    relevance.relevance(model, params, images, np.array([p.label])) for p in top[:2]
]
rows = [np.asarray(rolled)[0, 0], *(np.asarray(values)[0] for values in spoke)]
seen = [overlay.upsample(row[model.extra :], model.grid, size) for row in rows]
sheet = contact_sheet.draw(
    np.stack([overlay.blend(pixels, overlay.scaled(values)) for values in seen]),
    [["rollout"], *([f"relevance: {p.name}"] for p in top[:2])],
    columns=3,
)
display(sheet, include=["image/jpeg"])

# %% [markdown]
# ## How far each head looks
#
# The mean distance in pixels between a patch and what it looks at, a row a layer, a column
# a head. Over many images the numbers are steadier: `python -m vit_jax.visualize`.

# %%
weights = attention.maps(model, params, images)
print(attention.distance(weights, model.grid, model.patch, model.extra).round(1))

# %% [markdown]
# ## What the parameters know
#
# The principal components of the patch embedding's filters:

# %%
components, share = filters.components(filters.kernels(params), count=14)
tiles = np.round(255 * filters.tiles(components)).astype(np.uint8)
sheet = contact_sheet.draw(tiles, [[f"{part:.0%}"] for part in share], columns=7)
display(sheet.reduce(2), include=["image/png"])

# %% [markdown]
# How alike the position embedding of one patch is to those of all others, for the patches
# at two corners and near the middle:

# %%
alike = positions.similarity(model, params)
middle = tuple(side // 2 for side in model.grid)
places = [(0, 0), middle, (model.grid[0] - 1, model.grid[1] - 1)]
tiles = np.stack([overlay.scaled(alike[place]) for place in places])
sheet = contact_sheet.draw(
    np.round(255 * tiles[..., None]).astype(np.uint8),
    [[f"row {row}, column {column}"] for row, column in places],
    columns=3,
)
display(sheet, include=["image/png"])
