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
# # Fine-tune your images
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/vit_jax/blob/main/notebooks/finetune_your_images.ipynb)
#
# Published weights from the hub, taught the classes of your own photographs: which
# learning rate, how good on photographs that it has not seen, and the result as a file to
# keep.
#
# The photographs lie in folders, `PHOTOS/train/<class>/...` and `PHOTOS/val/<class>/...`.
# On Colab they come from a zip that you upload, with `train/` and `val/` at its root, or
# from Google Drive; neither has been tried yet. The outputs below are of tf_flowers
# (CC-BY 2.0): 2,934 photographs to learn from and 736 to be scored on.
#
# **Where this runs without Colab and without a network** (as in the project's own tests),
# `photos` and `source` are set to a folder and a small model that are there already: the
# two cells that ask Colab do nothing, and nothing is fetched.

# %% [markdown]
# The first cell fetches the repository (OWNER stands for the account where it is
# published) and installs it where it is not, as in a fresh Colab; else it does nothing.
# After it, restart the runtime if it
# asks for that, and go on with the next cell. Not yet run on Colab.

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
import shutil

import vit_jax
from vit_jax import weights
from vit_jax.data import inputs
from vit_jax.evaluators import prediction
from vit_jax.tools.sweeps import fine_tuning, recipes, transfer
from vit_jax.weights import export

os.chdir(pathlib.Path(vit_jax.__file__).parents[1])
ON_COLAB = "google.colab" in sys.modules

# %% [markdown]
# What you may want to change. `mode="head"` moves the classifier alone, which is quick and
# enough for a few hundred photographs; `"full"` moves everything.

# %% tags=["parameters"]
photos = "photos"  # The folder; "/content/drive/MyDrive/photos" on Drive.
source = "deit:Ti/16"  # DeiT-Ti of ImageNet, 22 MB; "augreg:B/16" is better and larger.
workdir = "runs/photos"
mode = "head"
resolution = 224  # Pixels.
steps = 40  # Of 32 photographs each.
rates = (0.03, 0.1, 0.3)  # For the classifier; 0.003 to 0.03 where all moves.
seeds = 2  # Final runs.
use_drive = False  # Else a zip is asked for, on Colab.

# %%
if ON_COLAB and use_drive:
    from google.colab import drive

    drive.mount("/content/drive")

# %%
if ON_COLAB and not use_drive:
    from google.colab import files as colab_files

    for name in colab_files.upload():
        shutil.unpack_archive(name, photos)

# %% [markdown]
# ## Choose the rate, then train with it
#
# A tenth of `train` is held out; each rate is tried on the rest and scored on it. The best
# one then trains on all of `train`, once for each seed, and is scored on `val`, which
# nothing can open before. If this is interrupted, the same cell goes on.

# %%
pretrained = weights.open_pretrained(source)
task = fine_tuning.task(
    pretrained,
    recipes.find(photos),
    resolution=(resolution, resolution),
    mode=mode,
    rates=rates,
    overrides={"total_steps": steps, "batch_size": 32},
)
result = transfer.Study(source, task, workdir, seeds).run()

# %%
result["best"], result["mean"], result["std"]

# %% [markdown]
# ## Look at single photographs

# %%
best = weights.open_pretrained(f"{workdir}/runs/seed0")
classifier = prediction.Classifier(best)
found = prediction.predict(classifier, inputs.find([f"{photos}/val"]), topk=2)
for name, classes in list(found)[::25]:
    print(
        pathlib.Path(name).parent.name,
        *(f"{p.name} {p.probability:.0%}" for p in classes),
    )

# %% [markdown]
# ## Keep the result
#
# As a folder that timm reads; `"hf"`, `"google"` and `"safetensors"` are the other formats.

# %%
exported, notes = export.export(
    best, "timm", pathlib.Path(workdir, "timm"), overwrite=True
)
print(*exported, *notes, "", export.usage("timm", best, f"{workdir}/timm"), sep="\n")

# %%
if ON_COLAB:
    colab_files.download(shutil.make_archive("photos_timm", "zip", f"{workdir}/timm"))
