#!/usr/bin/env bash
# Trains on a Cloud TPU slice, from your own machine:
#   bash launch/tpu_pod.sh            rents the slice, installs, trains, shows the log
#   bash launch/tpu_pod.sh watch      shows the log of the first host
#   bash launch/tpu_pod.sh stop       saves and ends; `train` goes on
#   bash launch/tpu_pod.sh down       gives the slice back: until then it costs money
# The steps of the first are up, install, train and watch, each also a command. After a
# preempted spot slice: down, and the first again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# ---- The two lines to edit: what to rent and where, and what to train. ---------------
slice=v5litepod-256 zone=us-east5-b image=v2-alpha-tpuv5-lite
train=(--config=configs/b16_i21k.py --config.data.data_dir=gs://BUCKET/tfds --workdir=gs://BUCKET/runs/b16_i21k)
# --------------------------------------------------------------------------------------

name=${NAME:-vit-jax} # Of the slice; another one for a second job.

queue() { gcloud compute tpus queued-resources "$1" "$name" --zone="$zone" "${@:2}"; }

everywhere() { # COMMAND: on all hosts at once, and fails if it fails on one.
  gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1"
}

check() {
  if [[ ${train[*]} == *://BUCKET/* ]]; then
    echo "tpu_pod.sh: BUCKET in train=(...) is a placeholder: write the name of your bucket there" >&2
    exit 2
  fi
  if [[ -n $(git status --porcelain) ]]; then
    echo "tpu_pod.sh: warning: uncommitted changes stay here: the hosts get the commit $(git rev-parse --short HEAD)" >&2
  fi
}

up() {
  # SPOT=1 is cheaper, and may end at any time. A queue, as a large slice is rarely free.
  queue create --node-id="$name" --accelerator-type="$slice" \
    --runtime-version="$image" ${SPOT:+--spot}
  local state=
  until [[ $state == ACTIVE ]]; do
    sleep "${POLL_SECONDS:-30}"
    state=$(queue describe --format='value(state.state)')
    echo "$name: $state"
    if [[ $state == FAILED || $state == SUSPEND* ]]; then
      echo "$name: no slice ($state); 'down', then try again" >&2
      exit 1
    fi
  done
}

install() {
  local work
  work=$(mktemp -d)
  # shellcheck disable=SC2064 # The folder's name as it is now.
  trap "rm -rf '$work'" EXIT
  git archive --format=tar.gz --output="$work/vit_jax.tar.gz" HEAD # What is committed.
  gcloud compute tpus tpu-vm scp "$work/vit_jax.tar.gz" "$name:" --zone="$zone" --worker=all
  # uv brings its own Python: the one of some TPU images is older than 3.11.
  everywhere 'set -e
    rm -rf vit_jax && mkdir vit_jax && tar -xzf vit_jax.tar.gz -C vit_jax && cd vit_jax
    python3 -m pip install -q --user uv
    ~/.local/bin/uv venv -q --python 3.11 .venv
    ~/.local/bin/uv pip install -q --python .venv -r requirements.txt -e ".[tpu,gcs]"'
}

train() {
  # The hosts go on by themselves, whatever becomes of this connection. A host that is
  # restarted waits for the others.
  local command
  command=$(printf '%q ' bash launch/until_done.sh .venv/bin/python -m vit_jax.train "${train[@]}")
  everywhere "cd vit_jax && { nohup $command > train.log 2>&1 < /dev/null & echo \$! > train.pid; }"
}

watch() {
  gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=0 \
    --command='tail -n +1 -F vit_jax/train.log'
}

# shellcheck disable=SC2016 # The hosts expand it.
stop() { everywhere 'kill -TERM "$(cat vit_jax/train.pid)"'; }

down() { queue delete --force --quiet; }

case ${1:-all} in
  all) # Not by "&&", which would keep a failure within them from ending this.
    check
    up
    install
    train
    watch
    ;;
  up | install | train)
    check
    "$1"
    ;;
  watch | stop | down) "$1" ;;
  *)
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac
