"""Starts training as several processes of this machine, as hosts of a cluster would."""

import importlib.metadata
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import forked

ROOT = pathlib.Path(__file__).parent.parent
# Lets XLA's CPU compiler hurry: the time of small programs is mostly its own. One module
# of LLVM for a program, and fusions written without MLIR, take it a third less.
HURRY = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)
if importlib.metadata.version("jaxlib").startswith("0.10."):  # Later ones abort at it.
    HURRY += " --xla_cpu_use_fusion_emitters=false"
# What may be set where the tests run, and would be taken for a cluster.
_CLUSTERS = ("SLURM_", "OMPI_", "TPU_", "MEGASCALE_", "JOB_COMPLETION", "VIT_JAX_")


def xla_flags(devices=1):
    """Returns XLA_FLAGS of a process that has so many devices."""
    return f"{HURRY} --xla_force_host_platform_device_count={devices}"


def free_port():
    """Returns a port that nobody listens at."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def start(words, hosts, environment, *, verb="train", fork=True, **options):
    """Starts a verb once for each host, with pipes for what it prints.

    Args:
      words: of the command line.
      hosts: number of them.
      environment: function of the number of a host: variables it has besides.
      verb: its name.
      fork: whether processes are forked with JAX imported, see forked.py.
      options: of subprocess.Popen that differ.
    """
    start_one = forked.Popen if fork else _popen
    clean = {k: v for k, v in os.environ.items() if not k.startswith(_CLUSTERS)}
    clean |= {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", "XLA_FLAGS": xla_flags()}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options = pipes | {"cwd": ROOT, "start_new_session": True} | options
    return [
        start_one(f"vit_jax.{verb}", words, env=clean | environment(host), **options)
        for host in range(hosts)
    ]


def variables(hosts, **more):
    """Returns the variables by which JAX knows the hosts, as a function of the host."""
    address = f"localhost:{free_port()}"

    def environment(host):
        known = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(hosts),
            "JAX_PROCESS_ID": str(host),
        }
        return (known if hosts > 1 else {}) | more

    return environment


def wait_for(process, pattern):
    """Reads the output up to a line that matches; returns that line."""
    for line in process.stdout:
        if re.search(pattern, line):
            return line
    said = process.stderr.read() if process.stderr else ""
    raise AssertionError(f"ended without {pattern!r}: {said}")


def ends(processes, seconds=150):
    """Waits for all to end; returns exit codes, and what each said on stderr."""
    errors = [process.communicate(timeout=seconds)[1] for process in processes]
    return [process.returncode for process in processes], errors


def kill(processes):
    """Kills what is left of them."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        if not process.stdout.closed:  # Not killed before.
            process.communicate()


def _popen(module, words, **options):
    return subprocess.Popen([sys.executable, "-m", module, *map(str, words)], **options)


def alone(verb, *words, fork=True, **environment):
    """Starts a verb as one process, with one pipe for all that it prints."""
    own = {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", "XLA_FLAGS": xla_flags()}
    start_one = forked.Popen if fork else _popen
    return start_one(
        f"vit_jax.{verb}",
        words,
        cwd=ROOT,
        env=os.environ | own | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    """Waits for the end of a process, which must be a good one; returns its words."""
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    return out
