#!/usr/bin/env bash
# Trains on all GPUs of this machine: bash launch/gpu_node.sh
# One process drives all of them, so nothing has to be started twice.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# ---- The two lines to edit: which GPUs, and what to train. ---------------------------
gpus=all # Or numbers, as gpus=0,1,2,3
train=(--config=configs/b16_i1k.py --config.data.data_dir=/data/tfds --config.optim.grad_accum_steps=8 --workdir=runs/b16_i1k)
# --------------------------------------------------------------------------------------

if [[ $gpus != all ]]; then
  export CUDA_VISIBLE_DEVICES=$gpus
fi
# Without this a missing driver means training on the CPU, slowly and without a word.
export JAX_PLATFORMS=cuda,cpu
# Nothing else runs here: JAX takes 3/4 of the memory where it is not told.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}

exec bash launch/until_done.sh "${PYTHON:-.venv/bin/python}" -m vit_jax.train "${train[@]}"
