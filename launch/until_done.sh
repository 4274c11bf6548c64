#!/usr/bin/env bash
# Runs a command again for as long as it ends for a reason that passes:
#   bash launch/until_done.sh python -m vit_jax.train --config=... --workdir=...
# 70 is the watchdog; 75 SIGTERM, saved, or another host that was lost; 128 and more a
# signal, such as the kernel's when memory is short, or JAX's abort (134). Each time it
# resumes from the last checkpoint.
# Everything else is final: 0 is done, 2 is a mistake that a restart would repeat, 130 is
# Ctrl-C, and 141 says that nobody reads the output.
set -euo pipefail

restarts=${RESTARTS:-20} # Bounds what a crash that comes again and again can cost.
stopped=
child=
# A SIGTERM is for the command, which saves; and it means that nobody wants a restart.
trap 'stopped=1; [[ -z $child ]] || kill -TERM "$child" 2>/dev/null || true' TERM INT

for ((run = 0; ; run++)); do
  "$@" &
  child=$!
  [[ -z $stopped ]] || kill -TERM "$child" # It came just before there was a child.
  wait "$child" || true # A trapped signal ends it early.
  while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done
  code=0
  wait "$child" || code=$? # The code of a process that has ended stays.
  child=
  if [[ -n $stopped ]]; then exit "$code"; fi
  if ((code != 70 && code != 75 && code < 128 || code == 130 || code == 141)); then
    exit "$code"
  fi
  if ((run >= restarts)); then
    echo "until_done.sh: ended with $code again, after $restarts restarts (RESTARTS): stopping" >&2
    exit "$code"
  fi
  echo "until_done.sh: ended with $code; restart $((run + 1)) of at most $restarts" >&2
  # The other hosts end too, and free the port. A signal is heeded within a second.
  for ((second = 0; second < ${RESTART_SECONDS:-10}; second++)); do
    sleep 1
    if [[ -n $stopped ]]; then exit "$code"; fi
  done
done
