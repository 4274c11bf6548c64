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
# # Pretraining on TPUs
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/vit_jax/blob/main/notebooks/tpu_pretraining.ipynb)
#
# From one machine to a pod slice, cheapest step first: the recipe, the mesh, the program
# compiled ahead of time for a slice, and the commands that rent one.
#
# **This runs on any machine.** With a TPU (`on_tpu`) and the data in `data_dir`, the recipe
# is trained; elsewhere three steps of a tiny model on synthetic data take its place. Nothing
# is rented unless you set `rent = True`.

# %% [markdown]
# The first cell fetches and installs the repository if `vit_jax` is not installed, as in a
# fresh Colab (OWNER stands for the account where it is published). Restart the runtime if
# Colab asks for it, then continue with the next cell. Not yet run on Colab or a TPU.

# %%
import glob
import shutil
import sys

# The libraries of NVIDIA's GPUs or of TPUs, where there is one.
extra = ".[tpu]" if glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*") else "."
extra = ".[cuda]" if shutil.which("nvidia-smi") else extra
# !{sys.executable} -c "import vit_jax" 2>/dev/null || (git init -q && git pull -q --depth=1 https://github.com/OWNER/vit_jax main && {sys.executable} -m pip install -q -r requirements.txt -e "{extra}")

# %%
import math
import os
import pathlib
import subprocess

# Eight parts of the CPU show meshes, and stand in where there is no accelerator.
flags = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"

import jax

import vit_jax
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed.mesh import MeshConfig
from vit_jax.training import config, loop

os.chdir(pathlib.Path(vit_jax.__file__).parents[1])

# %% tags=["parameters"]
recipe = "configs/b16_i21k.py"
topology = "v5e:16x16"  # 256 chips; "v4:4x4x4", "v6e:8x8" ...
compile_recipe = recipe
data_dir = "gs://BUCKET/tfds"  # Where the data set is: replace BUCKET; and ...
workdir = "runs/tpu"  # ... the run will be; gs://BUCKET/runs/... for several hosts.
rent = False  # Renting costs money.

# %% [markdown]
# ## The devices

# %%
on_tpu = jax.default_backend() == "tpu"
print(f"{jax.device_count()} devices of kind {jax.devices()[0].device_kind}")

# %% [markdown]
# ## The mesh
#
# `data` holds copies of the parameters, `fsdp` splits them and gathers each layer when it is
# needed, `model` splits heads and MLPs. One of the sizes may be -1, all remaining devices. A
# batch is split over `data` x `fsdp`. With eight virtual devices of the CPU:

# %%
for sizes in ({"data": -1}, {"fsdp": 4}, {"data": 1, "fsdp": -1, "model": 2}):
    mesh = meshes.create(MeshConfig(**sizes), jax.devices("cpu"))
    print(sizes, "->", dict(mesh.shape))

# %% [markdown]
# ## Three steps
#
# The same run on two meshes ends at the same loss, to about 1e-5 in float32: the mesh
# changes memory and speed, not the result. (With one device there is only one mesh.)

# %%
count = jax.device_count()
for name, fsdp in (("data", 1), ("fsdp", math.gcd(count, 4))):
    changes = {"mesh.fsdp": fsdp, "batch_size": count}
    settings = config.load(f"{recipe}:quick", changes)
    print(name, loop.train(settings, f"{workdir}/quick_{name}")["final"])

# %% [markdown]
# ## The program, ahead of time
#
# The real training step, compiled for a slice: does it fit, what does it compute and send,
# and how fast can a step be at best? This needs the extra `tpu` (any Linux machine).

# %%
words = [f"--config={compile_recipe}", f"--topology={topology}"]
words += ["--config.model.scan=True"]  # Compiles in a minute or two.
done = subprocess.run(
    [sys.executable, "-m", "vit_jax.compile", *words],
    check=False,
    capture_output=True,
    text=True,
)
print(done.stdout or done.stderr)

# %% [markdown]
# ## Train
#
# On a TPU this trains the recipe in this process, which is enough for one host. Elsewhere,
# and until `data_dir` names your bucket, it does nothing.

# %%
if on_tpu and "BUCKET" not in data_dir:
    settings = config.load(recipe, {"data.data_dir": data_dir})
    report = loop.train(settings, workdir)

# %% [markdown]
# ## A pod slice
#
# Several hosts run the same command. `launch/tpu_pod.sh` rents the slice, installs, starts
# the command on all hosts and shows the log of the first until you interrupt the cell; the
# run continues. Edit its two marked lines first:

# %%
print(*pathlib.Path("launch/tpu_pod.sh").read_text().splitlines()[:14], sep="\n")

# %%
if rent:
    subprocess.run(["bash", "launch/tpu_pod.sh"], check=True)

# %% [markdown]
# `bash launch/tpu_pod.sh stop` saves and ends, `train` resumes from the last checkpoint, and
# `watch` shows the log again. `down` gives the slice back: until then it costs money. The
# documentation has the rest: "Pretrain" and "Several hosts".
