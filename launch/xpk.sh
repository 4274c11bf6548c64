#!/usr/bin/env bash
# Trains on TPU slices of a GKE cluster with xpk: bash launch/xpk.sh
# Needs xpk (pip install xpk), docker, and a cluster made by `xpk cluster create`. With
# slices=2 or more they train together (Multislice).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# ---- The two lines to edit: the machines, and what to train. -------------------------
cluster=my-cluster zone=us-east5-b tpu=v5litepod-256 slices=1
train=(--config=configs/b16_i21k.py --config.data.data_dir=gs://BUCKET/tfds --workdir=gs://BUCKET/runs/b16_i21k)
# --------------------------------------------------------------------------------------

workload=${NAME:-vit-jax-$(date +%m%d-%H%M)}
if [[ ${train[*]} == *://BUCKET/* ]]; then
  echo "xpk.sh: BUCKET in train=(...) is a placeholder: write the name of your bucket there" >&2
  exit 2
fi
# The image is a bare Python with this folder in it, without what only this machine needs.
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
tar -cf - --exclude=./.git --exclude=./.venv --exclude=./runs . | tar -xf - -C "$tree"
# An installation that fails is started again with the job. `exec`: SIGTERM reaches the
# process that xpk has started, and that must be Python.
command="pip install -q -r requirements.txt -e '.[tpu,gcs]' || exit 75; exec python -m vit_jax.train"
command+=$(printf ' %q' "${train[@]}")

# xpk restarts all hosts after a signal (128 and more) by itself; 70 (the watchdog) and
# 75 (saved, or a host was lost) must be said. Other codes end the job. Two minutes are for the checkpoint after SIGTERM.
xpk workload create --cluster="$cluster" --zone="$zone" --workload="$workload" \
  --tpu-type="$tpu" --num-slices="$slices" \
  --base-docker-image=python:3.11 --script-dir="$tree" \
  --max-restarts="${RESTARTS:-20}" --restart-on-exit-codes=70,75 \
  --termination-grace-period-seconds=120 --command="$command"
