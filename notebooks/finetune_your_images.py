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
# Fine-tunes published weights on your photographs in one call, scores the model on
# photographs that it was not trained on, shows its mistakes, and exports it.
#
# The photographs are in one folder per class (`PHOTOS/<class>/...`), or in such folders for
# each split (`PHOTOS/train/<class>/...`, `PHOTOS/val/<class>/...`), or in a table of paths
# and labels. On Colab they come from a zip that you upload, with these folders at its root,
# or from Google Drive; neither has been tried yet. The outputs below are of a tenth of the
# training images of tf_flowers (CC-BY 2.0), scored on all 736 test images.
#
# Elsewhere, set `photos` to your folder; the two cells for Colab then do nothing.

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
import shutil

import vit_jax
from vit_jax import weights
from vit_jax.weights import export

os.chdir(pathlib.Path(vit_jax.__file__).parents[1])
ON_COLAB = "google.colab" in sys.modules

# %% [markdown]
# What you may want to change.

# %% tags=["parameters"]
photos = "photos"  # The folder; "/content/drive/MyDrive/photos" on Drive.
model = "deit:Ti/16"  # DeiT-Ti of ImageNet, 22 MB; "augreg:B/16" is better and larger.
workdir = "runs/photos"
minutes = 4  # To train and evaluate in; 0 is no limit.
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
# ## Train
#
# The arrangement of the images is detected; size, batch, steps and rate are chosen by a
# rule, and each choice is printed with the key that changes it: pass `batch_size=16` or
# `**{"optim.learning_rate": 0.003}` as further arguments. Run the cell again to resume. The
# command is `python -m vit_jax.finetune photos`.

# %%
result = vit_jax.finetune(photos, workdir, model=model, minutes=minutes)

# %% [markdown]
# The accuracy on photographs that it was not trained on, with its 95 % interval.

# %%
low, high = result.interval
print(f"{result.score:.2%} of {result.split}, from {low:.2%} to {high:.2%}")

# %% [markdown]
# ## Look at single photographs

# %%
tuned = vit_jax.load_model(workdir)
paths = sorted(map(str, pathlib.Path(photos).rglob("*.jpg")))[::150] or sorted(
    map(str, pathlib.Path(photos).rglob("*.png"))
)
for path, classes in zip(paths, tuned.predict(paths, topk=2), strict=True):
    named = (f"{one.name} {one.probability:.0%}" for one in classes)
    print(pathlib.Path(path).parent.name, *named)

# %% [markdown]
# ## Keep the result
#
# As a folder that timm reads; other formats are `"hf"`, `"google"` and `"safetensors"`.

# %%
best = weights.open_pretrained(workdir)
exported, notes = export.export(
    best, "timm", pathlib.Path(workdir, "timm"), overwrite=True
)
print(*exported, *notes, "", export.usage("timm", best, f"{workdir}/timm"), sep="\n")

# %%
if ON_COLAB:
    colab_files.download(shutil.make_archive("photos_timm", "zip", f"{workdir}/timm"))
