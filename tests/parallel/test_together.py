import os
import threading
import time

import jax
import pytest

from vit_jax.parallel import together
from vit_jax.parallel.together import Together


def test_alone_an_exception_goes_its_way_and_no_thread_is_started():
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="by hand"), Together("runs"):
        assert threading.active_count() == before
        raise ZeroDivisionError("by hand")


@pytest.fixture
def first_of_two(monkeypatch):
    """Makes this process the first of two; returns what the service remembers."""
    kept = {}

    def ask(method, key, *words):
        if method == "key_value_set":
            kept[key] = words[0]
        return [(k, v) for k, v in kept.items() if k.startswith(f"{key}/")]

    def ended(code):
        raise SystemExit(code)

    monkeypatch.setattr(together, "_ask", ask)
    monkeypatch.setattr(together, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(together, "_PATIENCE_SECONDS", 3.0)
    monkeypatch.setattr(Together, "_leave_last_words", lambda self: None)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    monkeypatch.setattr(os, "_exit", ended)
    monkeypatch.setenv("VIT_JAX_LOST_SECONDS", "5")
    return kept


def seconds_until_ended(error):
    began = time.monotonic()
    with pytest.raises(SystemExit, match="1"), Together("runs"):
        raise error
    return time.monotonic() - began


def test_the_first_to_fail_does_not_wait_for_those_that_left_in_order(first_of_two):
    first_of_two["vit_jax/beats/1"] = "left"
    assert seconds_until_ended(ZeroDivisionError("by hand")) < 2
    # It did not leave in order itself.
    assert first_of_two["vit_jax/beats/0"] != "left"


def test_the_first_to_fail_waits_for_those_that_have_still_to_read_why(
    first_of_two, monkeypatch
):
    monkeypatch.setattr(together, "_PATIENCE_SECONDS", 0.7)
    first_of_two["vit_jax/beats/1"] = "7"
    assert seconds_until_ended(ZeroDivisionError("by hand")) >= 0.7


@pytest.mark.parametrize(
    "words", ["RESOURCE_EXHAUSTED: 9 bytes", "INTERNAL: cuda: Out of memory"]
)
def test_an_error_of_its_own_is_told_at_once(first_of_two, words, capsys):
    first_of_two["vit_jax/leaving/1"] = ""
    assert seconds_until_ended(jax.errors.JaxRuntimeError(words)) < 3
    assert f"error: JaxRuntimeError: {words}\n" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["INTERNAL: closed", "DEADLINE_EXCEEDED: gone"])
def test_a_collective_that_breaks_may_be_the_end_of_another(words):
    assert together._may_be_anothers(jax.errors.JaxRuntimeError(words))
