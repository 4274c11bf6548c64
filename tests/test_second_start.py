"""A command that is given twice: what the first compiled, the second finds."""

import json
import re

import cv2
import numpy as np
import pytest
from helpers import run_python
from hosts import xla_flags


def start(cache, *words, verb="train", said=""):
    env = {"JAX_COMPILATION_CACHE_DIR": "", "XDG_CACHE_HOME": str(cache)}
    env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags()}
    # Keeps the small too.
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    done = run_python("-m", f"vit_jax.{verb}", *words, **env)
    assert done.returncode == 0, done.stderr
    assert done.stderr == said  # XLA has nothing to say of programs that it finds.
    return done.stdout


def entries(cache):
    return sorted(path.name for path in cache.glob("vit_jax/compiled/*-cache"))


@pytest.mark.slow
def test_the_second_start_compiles_nothing_and_computes_the_same(tmp_path):
    cache, reports, kept, numbers = tmp_path / "cache", [], [], []
    for name in ("first", "second"):
        workdir = tmp_path / name
        words = "--config=configs/digits.py:quick", "--config.model.depth=1"
        out = start(cache, *words, f"--workdir={workdir}")
        kept.append(entries(cache))
        reports.append(json.loads((workdir / "report.json").read_text()))
        (line,) = [x for x in out.splitlines() if x.startswith("first step after ")]
        counts = re.search(r"(\d+) programs .* s, (\d+) of them from", line)
        assert counts[2] == ("0" if name == "first" else counts[1]), line
        numbers.append(int(counts[1]))
    assert any(name.startswith("jit_train_step") for name in kept[0])
    assert kept[0] == kept[1]
    assert numbers[0] == numbers[1]
    first, second = reports
    assert first["params_sha256"] == second["params_sha256"]
    assert second["startup"]["import"] > 0.5

    image = tmp_path / "image.png"
    cv2.imwrite(str(image), np.arange(64, dtype=np.uint8).reshape(8, 8) * 3)
    words = f"--model={tmp_path}/first", "--json", str(image)
    said = "first: averaged parameters of step 3\n"
    once = start(cache, *words, verb="predict", said=said)
    more = entries(cache)
    assert set(more) > set(kept[1])
    assert start(cache, *words, verb="predict", said=said) == once
    assert entries(cache) == more
