"""The scripts of launch/, run with stand-ins for the programs of the cluster."""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml

from vit_jax.__main__ import load
from vit_jax.command_line import cli
from vit_jax.distributed import schedulers

ROOT = pathlib.Path(__file__).parents[1]
LAUNCH = ROOT / "launch"
SCRIPTS = ["gpu_node.sh", "slurm.sbatch", "tpu_pod.sh", "xpk.sh", "jobset_gpu.yaml"]

# Notes its words, then does what the test has put beside it.
STAND_IN = """#!/usr/bin/env bash
{python} -I -S -c 'import json, sys; print(json.dumps(sys.argv[1:]))' \\
  "${{0##*/}}" "$@" >> "{folder}/calls"
{then}
"""


@pytest.fixture
def place(tmp_path):
    """A folder of programs that come first on the PATH."""

    def program(name, then="", *, path=None):
        path = path or tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        text = STAND_IN.format(python=sys.executable, folder=tmp_path, then=then)
        path.write_text(text)
        path.chmod(0o755)

    program.folder = tmp_path
    program("sleep")
    return program


def environment(place, **more):
    keep = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    path = f"{place.folder / 'bin'}:{os.environ['PATH']}"
    own = {"PATH": path, "HOME": str(place.folder), "RESTART_SECONDS": "1"}
    return keep | own | more


@pytest.fixture
def clone(place):
    """A repository with the scripts of launch/, edited as a user does; returns its launch/."""
    folder = place.folder / "clone"
    shutil.copytree(LAUNCH, folder / "launch")
    for path in (folder / "launch").glob("*.sh"):
        path.write_text(path.read_text().replace("gs://BUCKET", "gs://mine"))
    (folder / "vit_jax").mkdir()
    (folder / "vit_jax" / "train.py").write_text("committed")
    (folder / ".gitignore").write_text(".venv/\nruns/\n")
    for word in ("runs/one/report.json", ".venv/bin/python"):
        (folder / word).parent.mkdir(parents=True)
        (folder / word).touch()
    git = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@x"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    return folder / "launch"


def run(place, script, *words, launch=LAUNCH, **more):
    return subprocess.run(
        ["bash", str(launch / script), *words],
        cwd=place.folder,
        env=environment(place, **more),
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


def calls(place, name):
    """Returns the words of every call of a program."""
    path = place.folder / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [words for program, *words in map(json.loads, lines) if program == name]


def parsed(words):
    """Reads the words behind `-m vit_jax.train` as the verb does, config included."""
    words = words[words.index("vit_jax.train") + 1 :]
    flags = cli.parse(load("train").parser(), words)
    return flags, cli.load_config(flags)


@pytest.mark.parametrize("name", SCRIPTS)
def test_two_lines_are_marked_to_be_edited(name):
    text = (LAUNCH / name).read_text()
    marks = re.findall(r"---- The (two|first|second) line", text)
    assert marks in (["two"], ["two", "second"], ["first", "second"])
    if not name.endswith(".yaml"):
        assert "set -euo pipefail\n" in text


def test_gpu_node_trains_with_all_gpus_and_again_after_75(place):
    once = place.folder / "once"
    twice = f"[[ -e {once} ]] || {{ touch {once}; exit 75; }}"
    place("python", f"{twice}; env | grep ^JAX_PLAT")
    out = run(place, "gpu_node.sh", PYTHON="python")
    assert (out.returncode, out.stdout) == (0, "JAX_PLATFORMS=cuda,cpu\n")
    assert "restart 1 of at most 20" in out.stderr
    first, second = calls(place, "python")
    assert first == second
    flags, config = parsed(first)
    assert flags.workdir
    assert config.optim.grad_accum_steps == 8


@pytest.mark.parametrize(
    ("code", "starts"),
    [(code, 1) for code in (0, 1, 2, 130, 141)] + [(70, 3), (75, 3), (134, 3)],
)
def test_only_what_may_pass_is_tried_again_and_not_for_ever(place, code, starts):
    place("python", f"exit {code}")
    out = run(place, "until_done.sh", "python", RESTARTS="2")
    assert out.returncode == code
    assert len(calls(place, "python")) == starts


def test_sigterm_reaches_the_run_and_is_not_answered_with_a_restart(place):
    ready = place.folder / "ready"
    waits = f"trap 'kill $!; exit 75' TERM; /bin/sleep 30 & touch {ready}; wait"
    place("python", waits)
    command = ["bash", str(LAUNCH / "until_done.sh"), "python"]
    process = subprocess.Popen(command, env=environment(place), stderr=subprocess.PIPE)
    while not ready.exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 75
    process.communicate()
    assert len(calls(place, "python")) == 1


def test_sigterm_between_two_runs_is_not_answered_with_a_restart(place):
    (place.folder / "bin" / "sleep").unlink()  # A real one.
    place("python", "exit 75")
    command = ["bash", str(LAUNCH / "until_done.sh"), "python"]
    options = {"env": environment(place, RESTART_SECONDS="60"), "text": True}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, **options)
    assert "restart 1" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 75
    assert len(calls(place, "python")) == 1


SLURM = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "77", "PYTHON": "python"}


@pytest.mark.parametrize(
    ("code", "count", "queued"),
    [(code, 0, 0) for code in (0, 2, 130, 141)]
    + [(70, 0, 1), (75, 0, 1), (134, 0, 1), (137, 3, 1), (75, 20, 0)],
)
def test_slurm_queues_the_job_again_where_that_helps(place, code, count, queued):
    place("srun", f"exit {code}")
    place("scontrol")
    out = run(place, "slurm.sbatch", SLURM_RESTART_COUNT=str(count), **SLURM)
    assert out.returncode == code
    assert calls(place, "scontrol") == [["requeue", "77"]] * queued
    ((*options, python, module, name, config, data, workdir),) = calls(place, "srun")
    assert options == ["--kill-on-bad-exit=0", "--wait=120"]
    assert (python, module) == ("python", "-m")
    parsed([name, config, data, workdir])


@pytest.mark.parametrize("cpus", ["", "64"])
def test_srun_is_given_the_cores_of_the_job(place, cpus):
    place("srun", "echo ${SRUN_CPUS_PER_TASK-none}")
    more = {"SLURM_CPUS_PER_TASK": cpus} if cpus else {}
    assert run(place, "slurm.sbatch", **SLURM, **more).stdout == f"{cpus or 'none'}\n"


def test_slurm_does_not_queue_a_job_that_was_cancelled(place):
    place("srun", "kill -TERM $PPID; exit 75")
    place("scontrol")
    assert run(place, "slurm.sbatch", **SLURM).returncode == 75
    assert calls(place, "scontrol") == []


def test_xpk_gets_the_command_and_the_codes_to_restart_at(place, clone):
    # Notes what it would put into the image.
    place("xpk", 'for w; do case $w in --script-dir=*) ls -A "${w#*=}"; esac; done')
    (clone.parent / "new.py").touch()
    out = run(place, "xpk.sh", launch=clone)
    assert out.returncode == 0, out.stderr
    assert out.stdout.split() == [".gitignore", "launch", "new.py", "vit_jax"]
    (words,) = calls(place, "xpk")
    assert words[:2] == ["workload", "create"]
    flags = dict(word.removeprefix("--").split("=", 1) for word in words[2:])
    assert flags["restart-on-exit-codes"] == "70,75"
    assert not pathlib.Path(flags["script-dir"]).exists()
    install, command = flags["command"].split("; exec ")
    assert install.startswith("pip install -q -r requirements.txt -e '.[tpu,gcs]'")
    assert command.startswith("python -m vit_jax.train --config=")
    parsed(shlex.split(command))


@pytest.mark.parametrize(("pip", "code"), [(0, 2), (1, 75), (2, 75)])
def test_what_xpk_starts_is_tried_again_where_pip_failed(place, clone, pip, code):
    place("xpk")
    assert run(place, "xpk.sh", launch=clone).returncode == 0
    (words,) = calls(place, "xpk")
    (command,) = [word for word in words if word.startswith("--command=")]
    place("pip", f"exit {pip}")
    place("python", "exit 2")
    command = ["bash", "-c", command.partition("=")[2]]
    process = subprocess.run(command, env=environment(place), check=False)
    assert process.returncode == code


def test_a_job_of_slurm_asks_for_gpus_cores_and_memory():
    lines = re.findall(r"#SBATCH.*", (LAUNCH / "slurm.sbatch").read_text())
    asked = dict(re.findall(r"--([\w-]+)=(\S+)", " ".join(lines)))
    assert (asked["gpus-per-node"], asked["cpus-per-task"]) == ("8", "64")
    assert asked["mem"] == "0"  # All of the node's.


@pytest.fixture
def jobset():
    """The JobSet, its replicated job, and the container of that."""
    whole = yaml.safe_load((LAUNCH / "jobset_gpu.yaml").read_text())
    (hosts,) = whole["spec"]["replicatedJobs"]
    (container,) = hosts["template"]["spec"]["template"]["spec"]["containers"]
    return whole, hosts, container


def test_the_jobset_starts_pods_that_find_each_other(jobset, monkeypatch):
    whole, hosts, container = jobset
    job = hosts["template"]["spec"]
    (script,) = container["args"]
    (line,) = re.findall(r"python (-m vit_jax\.train .*) &\n", script)
    parsed(shlex.split(line))

    for name in schedulers.JAX_NAMES:
        monkeypatch.delenv(name, raising=False)
    # What JobSet labels the pod of its job 1 with.
    prefix = "metadata.labels['jobset.sigs.k8s.io/"
    labels = {"replicatedjob-replicas": str(hosts["replicas"]), "job-index": "1"}
    for variable in container["env"]:
        value = variable.get("value")
        if value is None:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            value = labels[path.removeprefix(prefix).removesuffix("']")]
        monkeypatch.setenv(variable["name"], value)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    found = schedulers.find_job()
    assert (found.count, found.process) == (hosts["replicas"], 1)
    assert (job["parallelism"], job["completions"]) == (1, 1)
    asked = container["resources"]["requests"]
    assert asked == container["resources"]["limits"]
    assert {"nvidia.com/gpu", "cpu", "memory"} == asked.keys()
    (mount,) = container["volumeMounts"]
    (volume,) = job["template"]["spec"]["volumes"]
    assert (mount["mountPath"], mount["name"]) == ("/dev/shm", volume["name"])
    assert volume["emptyDir"]["medium"] == "Memory"
    (final,) = job["podFailurePolicy"]["rules"]
    assert final["action"] == "FailJob"
    assert final["onExitCodes"]["values"] == [1, 2, 130, 141]
    # JobSet names pods <jobset>-<job>-<replica>-<index>.<jobset>.
    name = whole["metadata"]["name"]
    assert found.address == f"{name}-{hosts['name']}-0-0.{name}:8476"


@pytest.mark.parametrize("code", [0, 2, 75])
def test_the_script_of_the_jobset_ends_as_the_run_does(place, jobset, code):
    _, _, container = jobset
    place("python", f"exit {code}")
    command = [*container["command"], *container["args"]]
    process = subprocess.run(command, env=environment(place), check=False)
    assert process.returncode == code


# What gcloud does on the hosts happens in this folder instead.
GCLOUD = """
case "$*" in
*" describe "*)
  [[ -e $HOME/asked ]] && echo ACTIVE || echo WAITING_FOR_RESOURCES
  touch "$HOME/asked"
  ;;
*" scp "*) cp "$5" "$HOME/" ;;
*" ssh "*)
  last=${*: -1}
  cd && bash -c "${last#--command=}"
  ;;
esac
"""


def test_a_tpu_slice_is_rented_set_up_and_trained_on(place, clone):
    home = place.folder
    place("gcloud", GCLOUD)
    place("python3")
    place("tail")
    python = home / "host" / "python"
    place("python", f"touch {home}/trained", path=python)
    uv = home / ".local" / "bin" / "uv"
    place("uv", f"mkdir -p .venv/bin && cp {python} .venv/bin/python", path=uv)
    (clone.parent / "vit_jax" / "train.py").write_text("edited")
    out = run(place, "tpu_pod.sh", launch=clone, SPOT="1")
    assert out.returncode == 0, out.stderr
    assert "warning: uncommitted changes" in out.stderr
    assert "ACTIVE" in out.stdout
    create = next(words for words in calls(place, "gcloud") if "create" in words)
    assert create[:4] == ["compute", "tpus", "queued-resources", "create"]
    assert {"--node-id=vit-jax", "--spot", "--zone=us-east5-b"} <= set(create)
    # The hosts have the commit, and run it by themselves.
    assert (home / "vit_jax" / "vit_jax" / "train.py").read_text() == "committed"
    limit = time.monotonic() + 20
    while not (home / "trained").exists():
        assert time.monotonic() < limit, (home / "vit_jax" / "train.log").read_text()
        time.sleep(0.05)
    assert (home / "vit_jax" / "train.pid").read_text().strip().isdecimal()
    (words,) = calls(place, "python")
    parsed(words)


def test_a_tpu_slice_that_is_not_to_be_had_ends_the_script(place, clone):
    place("gcloud", '[[ " $* " != *" describe "* ]] || echo FAILED')
    out = run(place, "tpu_pod.sh", launch=clone)
    assert out.returncode == 1
    assert "warning" not in out.stderr
    assert "no slice (FAILED)" in out.stderr
    assert not any("ssh" in words for words in calls(place, "gcloud"))


@pytest.mark.parametrize(
    ("failing", "never"), [("create", "describe"), (" scp ", " ssh ")]
)
def test_what_fails_on_the_way_to_a_slice_ends_the_script(place, clone, failing, never):
    place("gcloud", f'[[ " $* " != *"{failing}"* ]] || exit 4\necho ACTIVE')
    assert run(place, "tpu_pod.sh", launch=clone).returncode == 4
    said = [f" {' '.join(words)} " for words in calls(place, "gcloud")]
    assert any(failing in words for words in said)
    assert not any(never in words for words in said)


@pytest.mark.parametrize("words", ["tpu_pod.sh", "tpu_pod.sh train", "xpk.sh"])
def test_a_bucket_that_is_not_filled_in_ends_the_script_before_it_rents(place, words):
    place("gcloud", "echo ACTIVE")
    place("xpk")
    out = run(place, *words.split())
    assert (out.returncode, out.stdout) == (2, "")
    assert "BUCKET in train=(...) is a placeholder" in out.stderr
    assert not calls(place, "gcloud") + calls(place, "xpk")


def test_stop_and_down_of_a_tpu_slice(place):
    place("gcloud")
    assert run(place, "tpu_pod.sh", "stop").returncode == 0
    assert run(place, "tpu_pod.sh", "down", NAME="other").returncode == 0
    stop, down = calls(place, "gcloud")
    assert stop[-1] == '--command=kill -TERM "$(cat vit_jax/train.pid)"'
    assert down[3:5] == ["delete", "other"]


def test_a_word_that_tpu_pod_does_not_know_shows_what_it_does(place):
    out = run(place, "tpu_pod.sh", "begin")
    assert out.returncode == 2
    assert "bash launch/tpu_pod.sh watch" in out.stderr


def test_every_command_of_the_guide_has_flags_that_exist():
    text = (ROOT / "docs" / "launch.md").read_text()
    lines = re.findall(r"python (-m vit_jax\.train --config=.*)", text)
    assert lines
    for line in lines:
        parsed(shlex.split(line))
