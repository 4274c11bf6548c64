import csv
import json
import statistics
import struct

import pytest
import watched
from tensorboardX.proto import event_pb2
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from vit_jax.errors import UserError
from vit_jax.tools.sweeps import fine_tuning, recipes, transfer
from vit_jax.training import loop

RATES = (0.02, 0.3, 1e30)  # The last diverges.
OVERRIDES = {"batch_size": 8, "total_steps": 3, "log_every_steps": 2}


def study(
    checkpoint, pretrained, workdir, rates=RATES, seeds=2, data_dir="", **options
):
    recipe = recipes.find("watched:open_source", data_dir)
    options["overrides"] = OVERRIDES | options.get("overrides", {})
    task = fine_tuning.task(
        pretrained, recipe, resolution=(8, 12), rates=rates, **options
    )
    return transfer.Study(checkpoint, task, workdir, seeds)


@pytest.fixture(scope="module")
def done(checkpoint, pretrained, tmp_path_factory):
    """Returns the workdir of a study, its report, and what it read, in that order."""
    workdir = tmp_path_factory.mktemp("studies") / "watched"
    watched.events.clear()
    found = study(checkpoint, pretrained, workdir)
    watched.events.clear()
    report = found.run()
    return workdir, report, list(watched.events)


def test_a_study_reports_its_trials_its_choice_and_its_runs(done, checkpoint):
    workdir, report, _ = done
    assert json.loads((workdir / "transfer.json").read_text()) == report
    stated = ("kind", "model", "variant", "dataset", "resolution", "steps")
    assert [report[key] for key in stated] == [
        "transfer",
        checkpoint,
        "Ti/4",
        "watched:open_source",
        [8, 12],
        3,
    ]
    assert [trial["learning_rate"] for trial in report["trials"]] == list(RATES)
    *scored, diverged = report["trials"]
    assert all(0 <= trial["score"] <= 1 and trial["seconds"] > 0 for trial in scored)
    assert diverged["score"] is None
    assert "training stopped at step" in diverged["diverged"]
    assert report["best"] == transfer.choose(report["trials"])
    tops = [run["top1"] for run in report["runs"]]
    assert [run["seed"] for run in report["runs"]] == [0, 1]
    assert report["mean"] == pytest.approx(sum(tops) / 2)
    assert report["std"] == pytest.approx(statistics.stdev(tops))
    told = report["mode"], report["layer_decay"], report["overrides"]
    assert told == ("full", 0.0, OVERRIDES)
    for run in (*report["runs"], *scored):
        assert run["compute"]["images_seen"] == 3 * 8
    for run in report["runs"]:
        assert run["learning_rate"] == report["best"]["learning_rate"]


def test_the_test_split_is_neither_opened_nor_read_before_the_choice(done):
    _, report, events = done
    first = next(i for i, (_, name) in enumerate(events) if name.startswith("test"))
    before = [name for kind, name in events[:first] if kind == "read"]
    scored = [trial for trial in report["trials"] if trial["score"] is not None]
    # The trials are scored by then, each on the whole of the held-out part, whose first
    # image each trial prepares before its first step too ...
    held_out = [f"train/{i}" for i in range(36, 40)]
    times = [before.count(name) for name in held_out]
    assert times == [len(scored) + len(report["trials"]), *[len(scored)] * 3]
    # ... and each final run reads every test image once, and the first before that.
    after = [name for kind, name in events[first:] if kind == "read"]
    of_test = [name for name in after if name.startswith("test/")]
    assert sorted(of_test) == sorted(2 * ["test/0", *(f"test/{i}" for i in range(13))])
    # All runs share what was opened, until the choice is made.
    opened = [name for kind, name in events if kind == "open"]
    assert sorted(opened[:2]) == ["train[90%:]", "train[:90%]"]
    assert opened[2:] == ["train", "test"]


def test_a_run_that_looks_at_test_too_early_is_refused(
    checkpoint, pretrained, tmp_path, monkeypatch
):
    found = study(checkpoint, pretrained, tmp_path / "peeping")
    peeping = found.task.final(0.02, 0)
    monkeypatch.setattr(fine_tuning.TransferTask, "trial", lambda task, rate: peeping)
    watched.events.clear()
    with pytest.raises(
        UserError, match="split 'test' of watched:open_source is sealed"
    ):
        found.run()
    assert ("open", "test") not in watched.events


def test_what_is_done_is_not_done_again(
    done, checkpoint, pretrained, monkeypatch, capsys
):
    workdir, report, _ = done
    monkeypatch.setattr(loop, "train", None)
    (workdir / "transfer.json").unlink()
    again = study(checkpoint, pretrained, workdir).run()
    assert again == report == json.loads((workdir / "transfer.json").read_text())
    assert "they share" not in capsys.readouterr().out  # Not in this process.


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
def test_another_command_in_the_same_workdir_is_refused(
    done, checkpoint, pretrained, options, message
):
    workdir, _, _ = done
    with pytest.raises(UserError, match=f"study by another command .*{message}"):
        study(checkpoint, pretrained, workdir, **options).run()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"optim.warmup_steps": 9}, "the warmup takes 9 steps but the run only 3"),
        ({"optim.freeze": ("haed",)}, "'haed' matches none of the"),
        ({"batch_size": 9}, "batch_size=9"),
    ],
)
def test_what_no_run_could_do_is_refused_before_anything_is_written(
    checkpoint, pretrained, tmp_path, overrides, message
):
    found = study(checkpoint, pretrained, tmp_path / "study", overrides=overrides)
    with pytest.raises(UserError, match=message):
        found.run()
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


def test_trials_are_rows_of_one_table(done):
    workdir, report, _ = done
    lines = (workdir / "trials.jsonl").read_text().splitlines()
    assert list(map(json.loads, lines)) == report["trials"]
    with (workdir / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["learning_rate"]) for row in rows] == list(RATES)
    assert float(rows[0]["score"]) == report["trials"][0]["score"]
    assert rows[-1]["score"] == ""


def test_tensorboard_shows_settings_and_scores_of_all_runs_in_one_view(done):
    workdir, report, _ = done
    sessions = {}
    for path in (workdir / "tensorboard").rglob("events*"):
        settings, scores = {}, {}
        for event in events_of(path):
            for value in event.summary.value:
                content = HParamsPluginData.FromString(
                    value.metadata.plugin_data.content
                )
                if value.tag == "_hparams_/session_start_info":
                    found = content.session_start_info.hparams
                    settings = {k: _value(v) for k, v in found.items()}
                elif value.tag == "_hparams_/experiment":
                    named = {m.name.tag for m in content.experiment.metric_infos}
                elif value.tag == "top1":
                    scores["top1"] = value.simple_value
        sessions[path.parent.name] = settings, scores
        assert named == set(scores)
    assert sessions["seed1"][0] == {
        "learning_rate": report["best"]["learning_rate"],
        "seed": 1,
        "part": "test",
    }
    assert sessions["seed1"][1]["top1"] == pytest.approx(report["runs"][1]["top1"])
    assert sessions["rate0.02"][0] == {
        "learning_rate": 0.02,
        "seed": 0,
        "part": "held_out",
    }
    assert len(sessions) == 5


def _value(proto):
    return proto.string_value or proto.number_value


def events_of(path):
    """Reads a record file: length, its checksum, event, checksum."""
    data = path.read_bytes()
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        yield event_pb2.Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]


def trials(**scores):
    return [{"learning_rate": float(k[1:]), "score": v} for k, v in scores.items()]


def test_the_best_rate_is_the_highest_score_and_of_equals_the_lowest():
    best = transfer.choose(trials(r1=0.5, r2=0.75, r3=0.75, r4=0.25))
    assert best == {"learning_rate": 2.0, "score": 0.75, "edge": False, "tied": [3.0]}


@pytest.mark.parametrize("scores", [{"r1": 0.5, "r2": 0.1}, {"r1": 0.1, "r2": 0.5}])
def test_a_winner_at_the_edge_is_marked(scores):
    assert transfer.choose(trials(**scores))["edge"]


def test_a_rate_that_diverged_cannot_win_but_bounds_the_sweep():
    best = transfer.choose(trials(r1=0.1, r2=0.5, r3=None))
    assert (best["learning_rate"], best["edge"]) == (2.0, False)
    with pytest.raises(UserError, match=r"every rate diverged \(1, 2\): set lower"):
        transfer.choose(trials(r1=None, r2=None))


def test_doubts_about_the_choice_are_said(checkpoint, pretrained, tmp_path):
    task = study(checkpoint, pretrained, tmp_path, rates=(1.0, 2.0, 3.0)).task
    told = lambda found: transfer.on_choice(transfer.choose(found), found, task)
    assert "warning" not in told(trials(r1=0.1, r2=0.5, r3=0.4))
    line = told(trials(r1=0.5, r2=0.5, r3=0.4))
    assert "2 score the same, and the lowest is taken" in line
    assert "warning: it is at the edge of the sweep, a better one may lie below" in line
    assert "may lie above" in told(trials(r1=0.1, r2=0.2, r3=0.4))


def test_one_rate_leaves_nothing_to_choose(checkpoint, pretrained, tmp_path):
    watched.events.clear()
    report = study(checkpoint, pretrained, tmp_path / "one", (0.02,), seeds=1).run()
    assert report["trials"] == []
    assert report["best"] == {"learning_rate": 0.02}
    assert report["std"] is None
    assert ("open", "train[90%:]") not in watched.events


def test_the_first_trial_is_told_apart_from_those_that_share():
    rows = [{"seconds": s, "start_seconds": s / 2} for s in (30.0, 10.0, 12.0)]
    line = transfer.sharing([*rows, {"learning_rate": 1, "score": None}])
    assert "15.0 s to its first step, each after it 5.5" in line
    assert "30.0 s in all, each after it 11.0" in line
    assert transfer.sharing(rows[:1]) == transfer.sharing([]) == ""
