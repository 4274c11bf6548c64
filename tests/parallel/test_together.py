import os
import threading
import time
from types import SimpleNamespace

import jax
import pytest

from vit_jax.errors import UserError
from vit_jax.parallel import together
from vit_jax.parallel.together import Together


def test_alone_an_exception_goes_its_way_and_no_thread_is_started():
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="by hand"), Together("runs"):
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
        return [(k, v) for k, v in self.kept.items() if k.startswith(f"{key}/")]


@pytest.fixture
def service(monkeypatch):
    """Makes this process the first of two."""
    made = Service()

    def ended(code):
        raise SystemExit(code)

    state = SimpleNamespace(process_id=0, num_processes=2, coordinator_address="h:1")
    monkeypatch.setattr(together, "service", SimpleNamespace(global_state=state))
    monkeypatch.setattr(together, "_ask", made.ask)
    monkeypatch.setattr(together, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(together, "_PATIENCE_SECONDS", 3.0)
    monkeypatch.setattr(together.aborts, "explain", lambda why: None)
    monkeypatch.setattr(together.last_words, "leave", lambda words: None)
    monkeypatch.setattr(together.distributed, "start", lambda: 2)
    monkeypatch.setattr(together.distributed, "lost_seconds", lambda: 1)
    monkeypatch.setattr(os, "_exit", ended)
    return made


def seconds_until_ended(error, code=1):
    began = time.monotonic()
    with pytest.raises(SystemExit, match=str(code)), Together("runs"):
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
    monkeypatch.setattr(together, "_PATIENCE_SECONDS", 0.7)
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
    assert (
        "error: process 1 of 2 (far, pid 7) died or was lost: no sign of" in lines[-1]
    )
    assert not any("Traceback" in line for line in lines)


def test_the_first_process_is_done_when_the_others_are(service):
    service.beating, kept = False, service.kept
    kept["vit_jax/beats/1"] = "7"
    began = time.monotonic()
    threading.Timer(0.3, lambda: kept.update({"vit_jax/beats/1": "left"})).start()
    with Together("runs"):
        time.sleep(0.05)
    assert time.monotonic() - began >= 0.3
    assert kept["vit_jax/beats/0"] == "left"
