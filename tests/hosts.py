"""Starts commands as processes of this machine, as hosts of a cluster would.

What is left of them is killed when the test ends (conftest.py).
"""

import importlib.metadata
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading

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
_started = []

# Not with Adam, which blows up the rounding of gradients that are 0 but for it (the bias of
# the keys, which the softmax cancels).
RECIPE = """
from ml_collections import ConfigDict

def get_config(arg=None):
    c = ConfigDict()
    c.seed, c.total_steps, c.batch_size = 3, 8, 12
    c.data = dict(name="synthetic", num_classes=5, num_examples=37, image_size=(8, 12))
    c.model = dict(variant="Ti/4", width=12, depth=1, num_heads=3, mlp_dim=20)
    c.optim = dict(name="sgd", learning_rate=0.1)
    c.log_every_steps = 1
    return c
"""


def write_recipe(path, *lines):
    """Writes the recipe of a small run, whose config `c` lines of Python change."""
    lines = "".join(f"    {line}\n" for line in lines)
    path.write_text(RECIPE.replace("    return c", f"{lines}    return c"))
    return path


def xla_flags(devices=1):
    """Returns XLA_FLAGS of a process that has so many devices."""
    return f"{HURRY} --xla_force_host_platform_device_count={devices}"


def free_port():
    """Returns a port that nobody listens at."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def start(words, hosts=1, environment=None, *, verb="train", fork=True, **options):
    """Starts a verb once for each host, with pipes for what it prints.

    Args:
      words: of the command line, or a function of the number of a host that returns them.
      hosts: number of them.
      environment: function of the number of a host: variables it has besides. By default
        those by which JAX knows the hosts.
      verb: its name.
      fork: whether processes are forked with JAX imported, see forked.py.
      options: of subprocess.Popen that differ; `cwd` may be a function too.
    """
    start_one = forked.Popen if fork else _popen
    environment = environment or variables(hosts)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(_CLUSTERS)}
    clean |= {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", "XLA_FLAGS": xla_flags()}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options = pipes | {"cwd": ROOT, "start_new_session": True} | options
    for host in range(hosts):
        own = words(host) if callable(words) else words
        cwd = options["cwd"]
        more = {"cwd": cwd(host) if callable(cwd) else cwd}
        more["env"] = clean | environment(host)
        _started.append(start_one(f"vit_jax.{verb}", own, **options | more))
    return _started[-hosts:]


def variables(hosts, **more):
    """Returns the variables by which JAX knows the hosts, as a function of the host."""
    address = f"localhost:{free_port()}"
    more = {"VIT_JAX_LOST_SECONDS": "10"} | more  # An error of one waits for this.

    def environment(host):
        known = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(hosts),
            "JAX_PROCESS_ID": str(host),
        }
        return (known if hosts > 1 else {}) | more

    return environment


def wait_for(process, pattern, seconds=300):
    """Reads up to a line that matches, and returns it; kills what takes too long."""
    killer = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
    killer.start()
    try:
        for line in process.stdout:
            if re.search(pattern, line):
                return line
    finally:
        killer.cancel()
    said = process.stderr.read() if process.stderr else ""
    raise AssertionError(f"ended without {pattern!r}: {said}")


def ends(processes, *codes, seconds=150):
    """Waits for all to end with these exit codes, or one for all; returns their stderr."""
    outs = [process.communicate(timeout=seconds) for process in processes]
    codes = codes if len(codes) > 1 else codes * len(outs)
    assert [process.returncode for process in processes] == [*codes], outs
    return [error for _, error in outs]


def kill(processes):
    """Kills what is left of them."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        if not process.stdout.closed:  # Not killed before.
            process.communicate()
        elif process.stderr:
            process.stderr.close()
        process.wait()


def kill_started():
    """Kills what is left of all that this module has started."""
    kill(_started)
    _started.clear()


def _popen(module, words, **options):
    return subprocess.Popen([sys.executable, "-m", module, *map(str, words)], **options)


def alone(verb, *words, fork=True, **environment):
    """Starts a verb as one process, with one pipe for all that it prints."""
    options = {"verb": verb, "fork": fork, "stderr": subprocess.STDOUT}
    return start(words, 1, lambda _: environment, **options)[0]


def finish(process):
    """Waits for the end of a process, which must be a good one; returns its words."""
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    return out


def sha256_of(workdir):
    """Returns the hash of the parameters that a run has reported."""
    return json.loads((workdir / "report.json").read_text())["params_sha256"]
