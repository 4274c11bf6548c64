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
# Where a Vision Transformer looks in a photograph, layer by layer and over all layers,
# which patches are relevant to a class, and what its parameters encode. Without a network,
# set `source` to weights on disk.

# %% [markdown]
# The first cell fetches and installs the repository if `vit_jax` is not installed, as in a
# fresh Colab (OWNER stands for the account where it is published). Restart the runtime if
# Colab asks for it, then continue with the next cell. Not yet run on Colab.

# %%
import glob
import shutil
import sys

# The libraries of NVIDIA's GPUs or of TPUs, where there is one.
extra = ".[tpu]" if glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*") else "."
extra = ".[cuda]" if shutil.which("nvidia-smi") else extra
# !{sys.executable} -c "import vit_jax" 2>/dev/null || (git init -q && git pull -q --depth=1 https://github.com/OWNER/vit_jax main && {sys.executable} -m pip install -q -r requirements.txt -e "{extra}")

# %%
import os
import pathlib

import numpy as np
from IPython.display import display
from PIL import Image

import vit_jax
from vit_jax.analysis import attention, overlay
from vit_jax.analysis.loaded_model import LoadedModel
from vit_jax.evaluators import prediction
from vit_jax.weights import open_weights

os.chdir(pathlib.Path(vit_jax.__file__).parents[1])

# %% tags=["parameters"]
source = "deit:Ti/16"  # DeiT-Ti of ImageNet, 22 MB; or a run's folder, a file, hf://...
photo = "notebooks/chelsea.jpg"  # Chelsea the cat, by Stefan van der Walt, CC0.

# %% [markdown]
# ## The model and the photograph
#
# Size, crop and normalisation of images come with the weights, and so do class names; 1,000
# classes without names are treated as ImageNet's.

# %%
found, preprocess = open_weights(source, {}, use_ema=True, num_heads=0, tell=print)
classifier = prediction.Classifier(found, preprocess=preprocess)
loaded = LoadedModel.from_pretrained(source, found, preprocess)
model, params = loaded.model, loaded.params

pixels = classifier.prepare(np.asarray(Image.open(photo).convert("RGB")))
images = loaded.normalize(pixels[None])
top = classifier.rank(np.asarray(classifier.logits(pixels[None]))[0], topk=3)
display(Image.fromarray(pixels), include=["image/jpeg"])
print(*(f"{p.name}: {p.probability:.1%}" for p in top), sep="\n")

# %% [markdown]
# ## Where [CLS] looks
#
# There is one array per layer, (images, heads, queries, keys). The first token is [CLS], the
# others are the patches, row by row. This is the mean of the heads, scaled in each layer
# from the smallest to the largest value:

# %%
maps = [
    np.asarray(weights) for weights in attention.attention_maps(model, params, images)
]
tokens = np.stack([weights[0, :, 0].mean(0) for weights in maps])
names = [f"layer {i}" for i in range(1, len(maps) + 1)]
sheet = overlay.token_sheet(model, pixels, tokens, names, columns=6)
display(sheet.reduce(2), include=["image/jpeg"])

# %% [markdown]
# The heads of the last layer, one by one:

# %%
heads = maps[-1][0, :, 0]
names = [f"head {i}" for i in range(1, len(heads) + 1)]
sheet = overlay.token_sheet(model, pixels, heads, names, columns=6)
display(sheet.reduce(2), include=["image/jpeg"])

# %% [markdown]
# ## Rollout, and relevance to a class
#
# Attention rollout multiplies the layers; relevance weights attention by its gradient with
# respect to a class, so it differs between classes.

# %%
rolled = attention.rollout(
    attention.attention_maps(model, params, images), discard_ratio=0.5
)
spoke = [
    attention.relevance(model, params, images, np.array([p.label])) for p in top[:2]
]
tokens = np.stack([rolled[0, 0], *(values[0] for values in spoke)])
names = ["rollout", *(f"relevance: {p.name}" for p in top[:2])]
display(
    overlay.token_sheet(model, pixels, tokens, names, columns=3), include=["image/jpeg"]
)

# %% [markdown]
# ## How far each head looks
#
# The mean distance in pixels between a patch and the patches that it attends to, one row
# per layer and one column per head. `python -m vit_jax.visualize` averages over many
# images.

# %%
weights = attention.attention_maps(model, params, images)
distances = attention.mean_attention_distance(
    weights, model.grid, model.config.patch_size, model.num_prefix_tokens
)
print(distances[0].round(1))

# %% [markdown]
# ## What the parameters encode
#
# The principal components of the patch embedding's filters:

# %%
sheet = overlay.filter_sheet(params, num_components=14, columns=7)
display(sheet.reduce(2), include=["image/png"])

# %% [markdown]
# The similarity of one patch's position embedding to those of all others, for the patches
# at two corners and near the middle:

# %%
display(overlay.position_sheet(model, params, columns=3), include=["image/png"])
