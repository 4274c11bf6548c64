import csv
import json
import statistics

import pytest
import watched
from helpers import events
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from vit_jax.errors import UserError
from vit_jax.tools.sweeps import fine_tuning, recipes, transfer
from vit_jax.training import loop

RATES = (0.02, 0.3, 1e30)  # The last diverges.
OVERRIDES = {"batch_size": 8, "total_steps": 3, "log_every_steps": 2}


@pytest.fixture(scope="module")
def run(checkpoint, pretrained):
    """Runs a transfer in a workdir."""

    def start(workdir, rates=RATES, seeds=2, data_dir="", **options):
        recipe = recipes.find("watched:open_source", data_dir)
        options["overrides"] = OVERRIDES | options.get("overrides", {})
        task = fine_tuning.task(
            pretrained, recipe, resolution=(8, 12), rates=rates, **options
        )
        watched.events.clear()
        return transfer.run(checkpoint, task, workdir, seeds)

    return start


@pytest.fixture(scope="module")
def done(run, tmp_path_factory):
    """Returns the workdir of a transfer, its report, and what it read, in that order."""
    workdir = tmp_path_factory.mktemp("studies") / "watched"
    report = run(workdir)
    return workdir, report, list(watched.events)


@pytest.mark.slow
def test_a_transfer_reports_its_trials_its_choice_and_its_runs(done, checkpoint):
    workdir, report, _ = done
    assert json.loads((workdir / "transfer.json").read_text()) == report
    expected = {
        "kind": "transfer",
        "model": checkpoint,
        "variant": "Ti/4",
        "dataset": "watched:open_source",
        "resolution": [8, 12],
        "mode": "full",
        "layer_decay": 0.0,
        "overrides": OVERRIDES,
        "steps": 3,
    }
    assert {key: report[key] for key in expected} == expected
    assert [trial["learning_rate"] for trial in report["trials"]] == list(RATES)
    *scored, diverged = report["trials"]
    assert all(0 <= trial["score"] <= 1 and trial["seconds"] > 0 for trial in scored)
    assert diverged["score"] is None
    assert "training stopped at step" in diverged["diverged"]
    best = max(scored, key=lambda trial: trial["score"])
    chosen = {key: best[key] for key in ("learning_rate", "score")}
    assert report["best"] == chosen
    tops = [run["top1"] for run in report["runs"]]
    assert [run["seed"] for run in report["runs"]] == [0, 1]
    assert report["mean"] == pytest.approx(sum(tops) / 2)
    assert report["std"] == pytest.approx(statistics.stdev(tops))
    for run in (*report["runs"], *scored):
        assert run["compute"]["images_seen"] == 3 * 8
    for run in report["runs"]:
        assert run["learning_rate"] == report["best"]["learning_rate"]
    # The trials are rows of a table too.
    lines = (workdir / "trials.jsonl").read_text().splitlines()
    assert list(map(json.loads, lines)) == report["trials"]
    with (workdir / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["learning_rate"]) for row in rows] == list(RATES)
    assert float(rows[0]["score"]) == report["trials"][0]["score"]
    assert rows[-1]["score"] == ""


def test_the_test_split_is_neither_opened_nor_read_before_the_choice(done):
    _, report, events = done
    first = next(i for i, (_, name) in enumerate(events) if name.startswith("test"))
    before = [name for kind, name in events[:first] if kind == "read"]
    scored = [trial for trial in report["trials"] if trial["score"] is not None]
    # The trials are scored by then, each on the whole of the held-out part, whose first
    # image each trial prepares before its first step too. When it is opened, up to eight
    # images are looked at: whether they are all but black.
    held_out = [f"train/{i}" for i in range(36, 40)]
    times = [before.count(name) - 1 for name in held_out]
    assert times == [len(scored) + len(report["trials"]), *[len(scored)] * 3]
    # ... and each final run reads every test image once, and the first before that.
    after = [name for kind, name in events[first:] if kind == "read"]
    of_test = sorted(name for name in after if name.startswith("test/"))
    read = 2 * ["test/0", *(f"test/{i}" for i in range(13))]
    assert of_test == sorted(read + [f"test/{i}" for i in range(8)])
    # All runs share what was opened, until the choice is made.
    opened = [name for kind, name in events if kind == "open"]
    assert sorted(opened[:2]) == ["train[90%:]", "train[:90%]"]
    assert opened[2:] == ["train", "test"]


def test_a_run_that_looks_at_test_too_early_is_refused(run, tmp_path, monkeypatch):
    task = fine_tuning.TransferTask
    monkeypatch.setattr(task, "trial", lambda self, rate: self.final(rate, 0))
    with pytest.raises(
        UserError, match="split 'test' of watched:open_source is locked"
    ):
        run(tmp_path / "peeping")
    assert ("open", "test") not in watched.events


def test_what_is_done_is_not_done_again(done, run, monkeypatch):
    workdir, report, _ = done
    monkeypatch.setattr(loop, "train", None)
    (workdir / "transfer.json").unlink()
    assert run(workdir) == report == json.loads((workdir / "transfer.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rates": (0.02, 0.5)},
            r"--learning_rates: \(0.02, 0.3, 1e\+30\) -> \(0.02, 0.5\)",
        ),
        ({"seeds": 3}, "--seeds: 2 -> 3"),
        ({"overrides": {"total_steps": 4}}, "config.total_steps: 3 -> 4"),
        ({"mode": "head"}, "config.optim.freeze: "),
        ({"data_dir": "/v2"}, "--data_dir:  -> /v2.*if the same data was moved, set"),
    ],
)
def test_another_command_in_the_same_workdir_is_refused(done, run, options, message):
    with pytest.raises(UserError, match=f"study with another command .*{message}"):
        run(done[0], **options)


@pytest.mark.slow
def test_a_command_whose_runs_took_no_step_may_be_mended(run, tmp_path, monkeypatch):
    def fail(*args, **more):
        raise UserError("the disk is full")

    monkeypatch.setattr(loop, "train", fail)
    for overrides in ({}, {"batch_size": 4}):
        with pytest.raises(UserError, match="the disk is full"):
            run(tmp_path / "study", rates=(0.02, 0.1), overrides=overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"optim.freeze": ("haed",)}, "'haed' matches none of the"),
        ({"batch_size": 9, "mesh.data": 8}, "batch_size=9"),
    ],
)
def test_what_no_run_could_do_is_refused_before_anything_is_written(
    run, tmp_path, overrides, message
):
    with pytest.raises(UserError, match=message):
        run(tmp_path / "study", overrides=overrides)
    assert not (tmp_path / "study").exists()


def test_trials_leave_their_numbers_and_runs_their_checkpoints(done):
    workdir, _, _ = done
    for rate in ("0.02", "0.3", "1e+30"):
        folder = workdir / "trials" / f"rate{rate}"
        assert (folder / "metrics.jsonl").exists()
        assert not (folder / "checkpoints").exists()
    for seed in range(2):
        kept = (workdir / "runs" / f"seed{seed}" / "checkpoints").iterdir()
        assert [path.name for path in kept] == ["3"]


def test_tensorboard_shows_settings_and_scores_of_all_runs_in_one_view(done):
    workdir, report, _ = done
    sessions = {}
    for path in (workdir / "tensorboard").glob("*/*"):
        settings, scores = {}, {}
        for event in events(path):
            for value in event.summary.value:
                content = HParamsPluginData.FromString(
                    value.metadata.plugin_data.content
                )
                if value.tag == "_hparams_/session_start_info":
                    found = content.session_start_info.hparams
                    settings = {
                        k: v.string_value or v.number_value for k, v in found.items()
                    }
                elif value.tag == "_hparams_/experiment":
                    named = {m.name.tag for m in content.experiment.metric_infos}
                elif value.tag == "top1":
                    scores["top1"] = value.simple_value
        sessions[path.name] = settings, scores
        assert named == set(scores)
    rate, top1 = report["best"]["learning_rate"], report["runs"][1]["top1"]
    assert sessions["seed1"] == (
        {"learning_rate": rate, "seed": 1, "part": "test"},
        {"top1": pytest.approx(top1)},
    )
    trial = {"learning_rate": 0.02, "seed": 0, "part": "held_out"}
    assert sessions["rate0.02"][0] == trial
    assert len(sessions) == 5


@pytest.mark.slow
def test_one_rate_leaves_nothing_to_choose(run, tmp_path, capsys):
    report = run(tmp_path / "one", (0.02,), seeds=1)
    assert (report["trials"], report["std"]) == ([], None)
    assert report["best"] == {"learning_rate": 0.02}
    assert ("open", "train[90%:]") not in watched.events
    assert "learning_rate=0.02 is the only one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ((1e30, 2e30), r"every rate diverged \(1e\+30, 2e\+30\): set lower ones"),
        ((1e30,), r"the final run with seed 0 at rate 1e\+30 diverged \(.*set lower"),
    ],
)
def test_rates_that_all_diverge_are_refused(run, tmp_path, rates, message):
    with pytest.raises(UserError, match=message):
        run(tmp_path / "high", rates, seeds=1)
