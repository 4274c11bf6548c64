"""What is said where processes of a job were started with different things."""

import pytest

from vit_jax.parallel import agreement


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
        (
            "config",
            {"mesh.data": 1},
            "mesh.data is 2 on process 0 (h0), 1 on process 1",
        ),
        ("config", {"model.head": "gap"}, 'model.head is absent on process 0 (h0), "g'),
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
