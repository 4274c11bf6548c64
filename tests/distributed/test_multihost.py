"""Processes of a job that join, agree, fail, are lost or abort, each with a stand-in."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import jax
import pytest
from helpers import run_python

from vit_jax.distributed import agreement, ending, multihost
from vit_jax.distributed.ending import LEFT
from vit_jax.distributed.multihost import FailureBroadcast, Heartbeats
from vit_jax.distributed.schedulers import JobProcess
from vit_jax.errors import LostHost, UserError

# The abort comes from another thread than Python's, as JAX's does.
PROGRAM = """
import ctypes, faulthandler, os, threading, time
from vit_jax.distributed import ending

faulthandler.enable()
ending.set_abort_handler(lambda: (3, "not this"))
ending.set_abort_handler(lambda: {answer})
abort = ctypes.CDLL(None).abort
threading.Thread(target=abort).start()
time.sleep(20)
"""


def test_alone_an_exception_goes_its_way_and_no_thread_is_started():
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="by hand"), FailureBroadcast("runs"):
        assert threading.active_count() == before
        raise ZeroDivisionError("by hand")


class Service:
    """What JAX's coordination service remembers, and a second process that beats."""

    def __init__(self):
        self.kept, self.beating = {"vit_jax/hosts/1": "far, pid 7"}, True

    def ask(self, method, key, *words):
        if method == "key_value_set":
            if key.startswith("vit_jax/failure/") and key in self.kept:
                return None  # A second failure is refused.
            self.kept[key] = words[0]
        if self.beating:
            self.kept["vit_jax/beats/1"] = str(time.monotonic())
        return [(k, v) for k, v in self.kept.items() if k.startswith(key)]


@pytest.fixture
def service(monkeypatch):
    """Makes this process the first of two."""
    made = Service()

    def ended(code):
        raise SystemExit(code)

    state = SimpleNamespace(process_id=0, num_processes=2, coordinator_address="h:1")
    for module in (agreement, multihost):
        monkeypatch.setattr(module, "service", SimpleNamespace(global_state=state))
    monkeypatch.setattr(agreement, "call_service", made.ask)
    for module in (ending, multihost):
        monkeypatch.setattr(module, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(agreement, "_POLL_SECONDS", 0.0005)
    monkeypatch.setattr(ending, "_PATIENCE_SECONDS", 3.0)
    monkeypatch.setattr(ending, "set_abort_handler", lambda handler: None)
    monkeypatch.setattr(multihost.crash_reporter, "set_message", lambda message: None)
    monkeypatch.setattr(multihost, "lost_seconds", lambda: 1)
    monkeypatch.setattr(os, "_exit", ended)
    return made


def seconds_until_ended(error, code=1):
    began = time.monotonic()
    with pytest.raises(SystemExit, match=str(code)), FailureBroadcast("runs"):
        time.sleep(0.05)  # The watcher has begun.
        raise error
    return time.monotonic() - began


def test_the_first_to_fail_does_not_wait_for_those_that_left_in_order(service):
    service.beating = False
    service.kept["vit_jax/beats/1"] = "left"
    assert seconds_until_ended(ZeroDivisionError("by hand")) < 2
    # It did not leave in order itself.
    assert service.kept["vit_jax/beats/0"] != "left"


def test_the_first_to_fail_waits_for_those_that_have_still_to_read_why(
    service, monkeypatch
):
    monkeypatch.setattr(ending, "_PATIENCE_SECONDS", 0.7)
    assert seconds_until_ended(ZeroDivisionError("by hand")) >= 0.7


def test_an_error_is_its_own_where_the_others_are_alive(service, capsys):
    service.kept["vit_jax/leaving/1"] = ""
    words = "RESOURCE_EXHAUSTED: 9 bytes"
    assert seconds_until_ended(jax.errors.JaxRuntimeError(words)) < 3
    assert f"error: JaxRuntimeError: {words}\n" in capsys.readouterr().err


# The stand-in of os._exit ends the watcher by an exception.
@pytest.mark.filterwarnings("ignore:Exception in thread")
@pytest.mark.parametrize(
    "error",
    [
        ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer [::1]:9"),
        jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out"),
        RuntimeError("Orbax: the barrier failed"),
        OSError("stale file handle"),
        UserError("step 7 could not be saved (Connection reset by peer)"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_exception_after_a_host_was_lost_names_that_host(service, error, capfd):
    service.beating = False
    service.kept["vit_jax/beats/1"] = "7"
    seconds_until_ended(error, code=75)
    lines = capfd.readouterr().err.splitlines()
    assert "error: process 1 of 2 (far, pid 7) died or was lost: no sig" in lines[-1]
    assert not any("Traceback" in line for line in lines)


def test_the_first_process_is_done_when_the_others_are(service):
    service.beating, kept = False, service.kept
    kept["vit_jax/beats/1"] = "7"
    began = time.monotonic()
    threading.Timer(0.3, lambda: kept.update({"vit_jax/beats/1": "left"})).start()
    with FailureBroadcast("runs"):
        time.sleep(0.05)
    assert time.monotonic() - began >= 0.3
    assert kept["vit_jax/beats/0"] == "left"


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        ("(75, 'process 0 is lost')", 75, "error: process 0 is lost\n"),
        ("None", -signal.SIGABRT, "Fatal Python error: Aborted"),
        ("1 / 0", -signal.SIGABRT, "Fatal Python error: Aborted"),
    ],
)
def test_an_abort_gets_the_exit_code_that_it_means(answer, code, said):
    process = run_python("-c", PROGRAM.format(answer=answer))
    assert process.returncode == code, process.stderr
    assert process.stderr.startswith(said)


def silent_at(times_and_beats, processes=3, limit=10):
    now = 0
    beats = Heartbeats(processes, limit, clock=lambda: now)
    found = []
    for now, seen in times_and_beats:
        found.append(beats.silent(seen))
    return found


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        # A beat that changes keeps a process, and one that does not loses it.
        (
            [
                (9, {0: "1", 1: "1", 2: "1"}),
                (15, {0: "2", 1: "2", 2: "1"}),
                (19, {0: "3", 1: "3", 2: "1"}),
                (20, {0: "4", 1: "4", 2: "1"}),
            ],
            [None, None, None, 2],
        ),
        # One that never began is lost after the limit.
        ([(10, {0: "1", 2: "1"}), (11, {0: "1", 2: "1"})], [None, 1]),
        # One that left in order is not.
        (
            [(5, {0: "1", 1: LEFT, 2: "1"}), (16, {0: "2", 1: LEFT, 2: "2"})],
            [None, None],
        ),
        # After a pause of this process the others count as alive.
        (
            [(5, {0: "1", 1: "1", 2: "1"}), (500, {0: "2", 1: "9", 2: "9"})],
            [None, None],
        ),
    ],
)
def test_a_process_is_lost_whose_beat_stands_still(looks, expected):
    assert silent_at(looks) == expected


@pytest.mark.parametrize("value", ["4", "-1", "1.5", ""])
def test_too_short_a_silence_is_refused(monkeypatch, value):
    monkeypatch.setenv("VIT_JAX_LOST_SECONDS", value)
    message = rf"VIT_JAX_LOST_SECONDS='{value}': .* from 5 on"
    with pytest.raises(UserError, match=message):
        multihost.lost_seconds()


def test_a_process_alone_joins_nobody(monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *a: pytest.fail("joined"))
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    multihost.start()


@pytest.fixture
def clean(monkeypatch):
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_grpc_proxy", "")
    monkeypatch.delenv("no_grpc_proxy")
    yield monkeypatch
    jax.config.update("jax_check_proxy_envs", True)


def test_a_web_proxy_is_not_asked_for_process_0(clean):
    clean.setenv("https_proxy", "http://proxy:3128")
    clean.setenv("no_proxy", "intern,10.0.0.1")
    multihost._bypass_proxies("host0:1234")
    assert os.environ["no_grpc_proxy"] == "intern,10.0.0.1,host0"


def test_an_address_nobody_listens_at_is_tried_until_the_limit():
    job = JobProcess("SLURM", "localhost:9", 3, 2)
    message = r"process 2 of 3 \(.*\) cannot reach process 0 at localhost:9 \(.*for 1 s"
    with pytest.raises(LostHost, match=message):
        multihost._wait_for_service(job, 1)


def who(process):
    return f"process {process} (h{process})"


SAME = {
    "config": {"mesh.data": 2, "name": "a"},
    "code": {"vit_jax": "f00", "jax": "0.10.2"},
    "devices": {"count": 4, "kind": "cpu"},
    "data": {"records": 37, "cells": "abc"},
    "weights": {"sha256": "e3b0"},
    "preprocess": {"squash": False},
    "workdir": {"latest checkpoint": None},
}


def changed(kind, **values):
    return SAME | {kind: SAME[kind] | values}


def test_processes_that_are_the_same_are_not_refused():
    assert agreement.difference([SAME, SAME, SAME], who) == ""


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        ("config", {"mesh.data": 1}, "mesh.data is 2 on process 0 (h0), 1 on process"),
        ("config", {"model.pool": "gap"}, 'model.pool is absent on process 0 (h0), "g'),
        ("code", {"vit_jax": "ba5"}, 'vit_jax is "f00" on process 0 (h0), "ba5" on pr'),
        ("devices", {"count": 3}, "count is 4 on process 0 (h0), 3 on process 1 (h1)"),
        ("data", {"cells": "abd"}, 'cells is "abc" on process 0 (h0), "abd" on pro'),
        ("weights", {"sha256": "77"}, 'sha256 is "e3b0" on process 0 (h0), "77" on '),
        ("preprocess", {"squash": True}, "squash is false on process 0 (h0), true on"),
        ("workdir", {"latest checkpoint": 4}, "latest checkpoint is null on process 0"),
    ],
)
def test_the_kind_the_key_and_the_processes_are_named(kind, values, said):
    line = agreement.difference([SAME, changed(kind, **values)], who)
    assert line.startswith(f"the hosts differ in {kind}: {said}")
    assert line.count("process 1 (h1)") == 1
    assert line.partition("(h1): ")[2].split()[0] in ("start", "install", "give")


def test_of_many_processes_and_keys_some_are_named():
    other = changed("config", **{f"key{i}": "x" * 200 for i in range(6)})
    line = agreement.difference([SAME] * 20 + [other], who)
    assert "process 5 (h5) and 14 others" in line
    assert "; and 2 more keys: " in line
    assert len(line) < 2000
