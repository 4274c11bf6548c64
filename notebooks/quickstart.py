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
# # Quickstart
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/vit_jax/blob/main/notebooks/quickstart.ipynb)
#
# Pretrains a small ViT on handwritten digits, fine-tunes it at twice the resolution,
# classifies with it and exports it to timm: about three minutes on 2 CPU cores. Only the
# packages are downloaded.

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

import vit_jax
from vit_jax import weights
from vit_jax.analysis import contact_sheet
from vit_jax.data.sources.open import open_source
from vit_jax.evaluators import prediction
from vit_jax.training import config
from vit_jax.training import loop
from vit_jax.weights import export

os.chdir(pathlib.Path(vit_jax.__file__).parents[1])  # Where configs/ is.

# %% tags=["parameters"]
workdir = "runs/quickstart"
epochs = 150
finetune_epochs = 20

# %% [markdown]
# ## Pretrain
#
# A recipe is a file of plain data under `configs/`; any key can be replaced. `train`
# returns what it writes to `report.json`, and resumes from the last checkpoint if the cell
# is run again after a stop.

# %%
settings = config.load("configs/digits.py", {"epochs": epochs})
report = loop.train(settings, f"{workdir}/pretrain")

# %% [markdown]
# The score on the test digits, of the last parameters (`params`) and of their running
# average (`ema`):

# %%
report["final"]["test"]

# %% [markdown]
# ## Fine-tune at twice the resolution
#
# As in the paper: SGD, a new head, and position embeddings resized to the larger grid.
# The table at the start lists what was loaded and how it was changed.

# %%
larger = config.load(
    "configs/digits_finetune.py",
    {"epochs": finetune_epochs, "init": f"{workdir}/pretrain"},
)
report = loop.train(larger, f"{workdir}/finetune")
report["final"]["test"]

# %% [markdown]
# ## Predict
#
# A run's folder is a model: it holds the parameters, the class names and the preprocessing
# of images.

# %%
classifier = prediction.Classifier(weights.open_pretrained(f"{workdir}/finetune"))
digits = open_source(larger.data, "test")
images = np.stack([classifier.prepare(image) for image in digits.images[:12]])
ranked = [classifier.rank(row, topk=2) for row in np.asarray(classifier.logits(images))]
sheet = contact_sheet.draw(
    images, [[f"{p.name}: {p.probability:.1%}" for p in best] for best in ranked], 6
)
display(sheet, include=["image/png"])

# %% [markdown]
# ## Export it to timm

# %%
found = weights.open_pretrained(f"{workdir}/finetune")
files, notes = export.export(
    found, "timm", pathlib.Path(workdir, "timm"), overwrite=True
)
print(*files, *notes, "", export.usage("timm", found, f"{workdir}/timm"), sep="\n")
