"""What a run tells of itself: slow steps, stalls, its start."""

import json
import re
import time

import pytest
from helpers import tiny_config

from vit_jax.data.sources.arrays import ArraySource
from vit_jax.training import checkpoint, loop, timers


@pytest.mark.slow
def test_a_run_tells_what_was_slow(tmp_path, monkeypatch, capsys):
    loaded, saved = [], []

    def get(self, i):
        loaded.append(i)
        if len(loaded) == 100:  # Of the batch of step 13.
            time.sleep(6)
        return {"image": self.images[i], "label": int(self.labels[i])}

    save = checkpoint.Checkpointer.save

    def stall(self, step, *args):
        began = time.perf_counter()
        if step == 20:  # Slow is what takes more than three times the save of step 10.
            time.sleep(6 + 5 * saved[0])
        result = save(self, step, *args)
        saved.append(time.perf_counter() - began)
        return result

    monkeypatch.setattr(timers, "_LEAST_SECONDS", 5.0)  # A busy machine has hiccups.
    monkeypatch.setattr(ArraySource, "__getitem__", get)
    monkeypatch.setattr(checkpoint.Checkpointer, "save", stall)
    data = {"train_transform": "central_crop", "prefetch": 1, "num_threads": 1}
    often = {"log_every_steps": 8, "checkpoint_every_steps": 10}
    config = tiny_config(data=data, evals={}, total_steps=24, **often)
    report = loop.train(config, tmp_path)
    out = capsys.readouterr().out
    slow = re.findall(r"^slow step (\d+): (.+) took ([\d.]+) s", out, re.MULTILINE)
    # The threads are a batch ahead.
    assert [phase for _, phase, _ in slow] == ["input", "checkpoint"]
    took = [float(seconds) for *_, seconds in slow]
    assert took == [pytest.approx(6, abs=2), pytest.approx(saved[1], abs=1)]
    assert [int(step) for step, *_ in slow] == [pytest.approx(12, abs=2), 20]

    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    lines = [line for line in lines if "train/loss" in line]
    # A busy machine may make other steps slow; test_timers.py counts them exactly.
    assert all(line["train/slow_steps"] >= 1 for line in lines[1:])
    stalls = [line["train/checkpoint_stall"] for line in lines]
    assert stalls[0] == 0
    assert stalls[1:] == [pytest.approx(seconds, abs=1) for seconds in saved[:2]]
    assert all(line["train/step_seconds"] > 0 for line in lines)
    assert not any("train/mfu" in line for line in lines)  # A CPU's peak is not known.

    phases = ["devices", "data", "trace", "init", "compile", "first step"]
    assert list(report["startup"]) == phases
    line = r"^first step after .*; (\d+) programs compiled or read in [\d.]+ s, "
    assert re.search(line, out, re.MULTILINE)[1] == "2"  # Of the state and the step.
    assert 0 < lines[0]["train/compile_seconds"] < report["compile_seconds"] + 0.01
    assert [f"train/start_{phase}" in lines[0] for phase in phases] == [True] * 6
    assert "train/start_compile" not in lines[1]
