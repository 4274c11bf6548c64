"""Whole runs of a tiny model, in this process, on eight fake devices."""

import json
import logging
import os
import shutil
import signal
import time

import jax
import numpy as np
import pytest
from helpers import events, kill_after, tiny_config, train
from PIL import Image

from vit_jax.config import fields
from vit_jax.errors import Preempted, UserError
from vit_jax.training import config as configuration
from vit_jax.training import loop, resume_check
from vit_jax.training.callbacks import Callback
from vit_jax.weights import checkpoint_folders
from vit_jax.weights import workdir as workdirs


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A finished run: its config, workdir and report."""
    workdir = tmp_path_factory.mktemp("runs") / "base"
    config = tiny_config(data={"train_transform": "random_crop | flip | mixup(0.3)"})
    return config, workdir, train(config, workdir)


def lines(workdir):
    return [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_report_holds_what_was_asked_and_the_compute_of_all_starts(base, tmp_path):
    config, workdir, report = base
    assert report == json.loads((workdir / "report.json").read_text())
    wanted = {"config": "tiny", "steps": 6, "devices": 8, "variant": "Ti/4", "init": ""}
    wanted |= {"dataset": "synthetic", "examples": 20}
    assert {name: report[name] for name in wanted} == wanted
    assert report["wall_seconds"] > 0
    assert report["images_per_second"] > 0
    assert len(report["params_sha256"]) == 64
    for kind in ("params", "ema"):
        scores = report["final"]["val"][kind]
        assert 0 <= scores["top1"] <= 1
        assert scores["examples"] == 20
    found = report["compute"]
    assert found["images_seen"] == 6 * 8
    # Patches of 4 are embedded (6 x 48 x 12); a block of qkv, output and MLP and the
    # attention of 7 tokens; the head.
    macs = 6 * 48 * 12 + 7 * (4 * 12 * 12 + 2 * 12 * 20) + 2 * 7 * 7 * 12 + 12 * 5
    assert found["exaflops"] == pytest.approx(6e-18 * macs * 48)
    assert (found["devices"], found["device_kind"]) == (8, report["device_kind"])
    days = 8 * report["wall_seconds"] / 86_400
    assert found["device_days"] == pytest.approx(days, rel=0.2)
    # A start that goes on from step 3 adds its seconds to those of the first.
    copy = shutil.copytree(workdir, tmp_path / "copy")
    kill_after(3, copy)
    about = copy / "checkpoints" / "3" / "_CHECKPOINT_METADATA"
    before = json.loads(about.read_text())["custom_metadata"]
    assert before["device_seconds"] == pytest.approx(8 * before["seconds"], rel=0.01)
    again = train(config, copy)
    assert again["params_sha256"] == report["params_sha256"]
    assert again["compute"]["images_seen"] == found["images_seen"]
    assert again["compute"]["device_days"] * 86_400 > before["device_seconds"]


def test_metrics_are_logged_at_their_cadence(base):
    _, workdir, report = base
    train = [x for x in lines(workdir) if "train/loss" in x]
    assert [x["step"] for x in train] == [2, 4, 6]
    for name in ("loss", "top1", "grad_norm", "param_norm", "learning_rate"):
        assert all(np.isfinite(x[f"train/{name}"]) for x in train)
    assert checkpoint_folders.steps(workdir) == [3, 6]  # As often as stated.
    last = lines(workdir)[-1]
    assert last["val/ema/top1"] == report["final"]["val"]["ema"]["top1"]


def test_tensorboard_shows_scalars_config_and_images(base):
    _, workdir, _ = base
    seen = {}
    for event in events(workdir / "tensorboard"):
        for value in event.summary.value:
            seen.setdefault(value.tag, []).append((event.step, value))
    assert [step for step, _ in seen["train/loss"]] == [2, 4, 6]
    assert [step for step, _ in seen["val/params/top1"]] == [6]
    (config,) = [v for tag, v in seen.items() if tag.startswith("config")]
    assert b'"batch_size": 8' in config[0][1].tensor.string_val[0]
    assert any(
        value.image.encoded_image_string[1:4] == b"PNG"
        for tag, values in seen.items()
        if tag.startswith("train/images")
        for _, value in values
    )


def test_finished_run_only_evaluates_and_keeps_its_report(base, capsys):
    config, workdir, report = base
    before = lines(workdir)
    again = train(config, workdir)
    assert "this run is finished (6 steps): evaluating only" in capsys.readouterr().out
    assert again == report
    assert lines(workdir) == before


def test_a_callback_of_ones_own_comes_after_the_loop_and_begins_first(base, tmp_path):
    """Also where a start evaluates what the one before it saved and did not score."""
    config, workdir, _ = base
    config = fields.replace(config, {"eval_every_steps": 3})
    copy = shutil.copytree(workdir, tmp_path / "copy")
    kill_after(3, copy)  # Its step 3 is saved and has no scores.
    events = []

    class Seen(Callback):
        def begin(self, run):
            self.run = run
            events.append(("begin", run.step))

        def evaluate(self, step, scores):
            events.append(("evaluate", step))

        def after_step(self, step):
            saved = self.run.checkpoints.begun == step
            events.append(("after_step", step, saved))

    train(config, copy, callbacks=[Seen()])
    after = [("after_step", 4, False), ("after_step", 5, False)]
    last = [("evaluate", 6), ("after_step", 6, True)]
    assert events == [("begin", 3), ("evaluate", 3), *after, *last]


def test_a_callback_hears_of_the_step_at_which_a_signal_ends_the_run(tmp_path):
    steps = []

    class Counting(Callback):
        def after_step(self, step):
            steps.append(step)
            if steps == [1, 2, 3, 4]:
                os.kill(os.getpid(), signal.SIGTERM)

    config = tiny_config(evals={})
    with pytest.raises(Preempted, match="SIGTERM: step 4 of 6 is saved"):
        train(config, tmp_path / "run", callbacks=[Counting()])
    train(config, tmp_path / "run", callbacks=[Counting()])
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_the_seed_alone_and_no_loader_worker_decides_the_parameters(base, tmp_path):
    config, _, report = base
    keys = {"data.num_workers": 2, "data.num_threads": 1}
    again = train(fields.replace(config, keys), tmp_path / "again")
    assert again["params_sha256"] == report["params_sha256"]
    other = train(fields.replace(config, {"seed": 4}), tmp_path / "other")
    assert other["params_sha256"] != report["params_sha256"]


def test_the_second_step_compiles_nothing(tmp_path, caplog):
    often = {"eval_every_steps": 2, "checkpoint_every_steps": 2}
    config = tiny_config(log_every_steps=1, **often)
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        loop.train(config, tmp_path)
    text = [r.getMessage() for r in caplog.records]
    names = [t.split()[1] for t in text if t.startswith("Compiling ")]
    # The step is compiled while the state is made, by a lambda.
    made, *after = names[names.index("jit(train_step)") + 1 :]
    assert made == "jit(<lambda>)"
    assert set(after) <= {"jit(eval_step)"}
    assert names.count("jit(eval_step)") == 1


@pytest.mark.slow
def test_frozen_body_stays_while_the_head_trains(tmp_path):
    config = tiny_config(optim={"freeze": ("^(?!head/)",), "weight_decay": 0.1})
    train(config, tmp_path)
    trained = workdirs.load(tmp_path, use_ema=False).params
    config = tiny_config(optim={"freeze": (".",)})
    train(config, tmp_path / "still")
    still = workdirs.load(tmp_path / "still", use_ema=False).params
    assert (trained["head"]["kernel"] != still["head"]["kernel"]).any()
    for tree in (trained, still):
        del tree["head"]
    jax.tree.map(np.testing.assert_array_equal, trained, still)


@pytest.mark.slow
def test_fine_tuning_starts_from_the_average_at_another_resolution(
    base, tmp_path, capsys
):
    _, workdir, _ = base
    config = tiny_config(
        init=str(workdir),
        data={"image_size": (16, 20), "num_classes": 3},
        optim={"name": "sgd", "learning_rate": 0.01},
    )
    report = train(config, tmp_path)
    out = capsys.readouterr().out
    assert f"start: averaged parameters of step 6 from {workdir}" in out
    assert "position embeddings: resized from (2, 3) to (4, 5)" in out
    assert "head: replaced by a linear layer of zeros" in out
    assert np.isfinite(report["final"]["val"]["params"]["loss"])


def test_an_average_of_the_initial_network_is_said_at_the_start_and_the_end(
    tmp_path, capsys
):
    config = tiny_config(ema={"decay": 0.9, "warmup": False}, evals={}, total_steps=6)
    train(config, tmp_path)
    out = capsys.readouterr().out
    (line,) = {line for line in out.splitlines() if "ema.warmup" in line}
    assert "ema.decay=0.9 with ema.warmup=False: after 6 steps" in line
    assert "weight of 53%" in line
    first, last = out.index(line), out.rindex(line)
    assert first < out.index("first step after") < last
    assert (
        configuration.EmaConfig(decay=0.9999, warmup=False)
        .note(100)
        .count("weight of 99%")
    )
    assert not configuration.EmaConfig(decay=0.9999, warmup=False).note(30_000)
    assert not configuration.EmaConfig().note(3)


def test_a_changed_data_set_is_refused_on_resume(base):
    config, workdir, _ = base
    changed = fields.replace(config, {"data.num_examples": 21})
    with pytest.raises(UserError, match="another config .*data.num_examples: 20 -> 21"):
        train(changed, workdir)


def test_a_finished_run_takes_further_evaluations(base, tmp_path):
    config, workdir, report = base
    copy = tmp_path / "copy"
    shutil.copytree(workdir, copy)
    raw = fields.to_dict(config)
    raw["evals"]["more"] = "other"
    more = configuration.complete(raw)
    final = train(more, copy)["final"]
    assert final["val"] == report["final"]["val"]
    assert set(final) == {"val", "more"}
    assert "more/params/top1" in lines(copy)[-1]


def test_a_run_that_lost_its_report_does_not_make_up_a_speed(base, tmp_path):
    config, workdir, report = base
    copy = tmp_path / "copy"
    shutil.copytree(workdir, copy)
    (copy / "report.json").unlink()
    again = train(config, copy)
    assert again["images_per_second"] is None
    assert again["final"] == report["final"]
    assert again["params_sha256"] == report["params_sha256"]


@pytest.mark.parametrize(
    ("key", "transform"),
    [("eval_transform", "central_crop(9)"), ("train_transform", "random_crop(99)")],
)
def test_what_cannot_be_prepared_ends_a_run_before_its_first_step(
    tmp_path, capsys, key, transform
):
    config = tiny_config(total_steps=200, data={key: transform})
    with pytest.raises(UserError, match=f"data.{key}"):
        train(config, tmp_path)
    assert "compile" not in capsys.readouterr().out


def test_the_loop_stops_transfers_that_nobody_meant(tmp_path):
    class Careless(Callback):
        def after_step(self, step):
            jax.numpy.sin(np.ones(3))  # Moves a host array to the device.

    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        train(tiny_config(), tmp_path, callbacks=[Careless()])


@pytest.mark.slow
def test_a_slow_source_shows_as_waiting_for_input(tmp_path, monkeypatch, capsys):
    from vit_jax.data.sources.arrays import ArraySource

    def slow(self, i):
        time.sleep(0.02)
        return {"image": self.images[i], "label": int(self.labels[i])}

    monkeypatch.setattr(ArraySource, "__getitem__", slow)
    quick = {"train_transform": "", "prefetch": 1, "num_threads": 1}
    loads = quick | {"train_transform": "central_crop"}  # So that nothing is gathered.
    for name, keys in (("quick", quick), ("slow", loads)):
        config = tiny_config(data=keys, evals={}, log_every_steps=6, total_steps=6)
        train(config, tmp_path / name)
        out = capsys.readouterr().out
        (line,) = [x for x in lines(tmp_path / name) if "train/loss" in x]
        starved = name == "slow"
        assert (line["train/input_wait"] > 0.5) == starved
        assert ("input is the bottleneck: the device waited" in out) == starved
        waited = line["train/input_wait"]
        # Less is not worth a place in the line.
        assert (f"input wait {waited:.0%}" in out) == (waited >= 0.01)


def test_a_run_with_a_key_that_has_gone_names_that_key_alone(base, monkeypatch):
    config, workdir, _ = base
    stored = fields.to_json(config)
    stored["optim"]["gone"], stored["log_every_steps"] = 3, 7
    read = lambda workdir: {"config": stored, "task": {}}
    monkeypatch.setattr(resume_check.folders, "read_metadata", read)
    with pytest.raises(UserError, match=r"another config \(optim.gone: 3 -> absent\):"):
        resume_check.check_workdir(workdir, config)


def _write_png(path, value):
    Image.new("RGB", (12, 8), (value, 0, 255 - value)).save(path)


def test_a_run_on_a_folder_keeps_its_classes_and_refuses_it_once_changed(
    tmp_path, capsys
):
    pictures = tmp_path / "pictures"
    for name in "ab":
        (pictures / "train" / name).mkdir(parents=True)
        for i in range(4):
            _write_png(pictures / "train" / name / f"{i}.png", value=20 * i)
    data = {"name": "folder", "data_dir": str(pictures)}
    data |= {"num_classes": 2, "num_examples": 0}
    config = tiny_config(data=data, total_steps=1, evals={})
    report = train(config, tmp_path / "run")
    stored = workdirs.load(tmp_path / "run")
    assert stored.class_names == ("a", "b") == tuple(report["class_names"])
    assert stored.config["data"]["image_size"] == [8, 12]
    _write_png(pictures / "train" / "a" / "new.png", value=9)
    match = "8 records are now 9; names of the image files .* differ; restore the data"
    with pytest.raises(UserError, match=match):
        train(config, tmp_path / "run")
    (pictures / "train" / "a" / "new.png").unlink()
    with (pictures / "train" / "b" / "0.png").open("ab") as file:
        file.write(b"more")
    with pytest.raises(UserError, match="sizes or contents of the image files differ"):
        train(config, tmp_path / "run")
    config = fields.replace(config, {"data.check": False})
    train(config, tmp_path / "run")
    said = "(data.check=False): sizes or contents of the image"
    assert said in capsys.readouterr().out
