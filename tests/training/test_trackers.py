"""Trackers, each against what it keeps on a local disk."""

import json
import sys

import pytest

import vit_jax
from vit_jax.errors import UserError
from vit_jax.training import config as configuration
from vit_jax.training.trackers import TRACKERS

CONFIG = "configs/digits.py:quick"


class Broken(vit_jax.Callback):
    """Ends the run of a test in its middle."""

    def log(self, step, metrics):
        if step == 2:
            raise KeyError("power is gone")


def train_in_two_starts(workdir, **keys):
    keys |= {"log_every_steps": 1, "checkpoint_every_steps": 1}
    with pytest.raises(KeyError, match="power is gone"):
        vit_jax.train(CONFIG, workdir, callbacks=[Broken()], **keys)
    return vit_jax.train(CONFIG, workdir, **keys)


def lines_of(workdir):
    return [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_wandb_gets_one_run_of_all_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    datastore = pytest.importorskip("wandb.sdk.internal.datastore")
    from wandb.proto import wandb_internal_pb2

    workdir = tmp_path / "run"
    report = train_in_two_starts(
        workdir,
        tracker={"name": "wandb", "mode": "offline", "project": "mine"},
    )
    history, runs, summary = [], set(), {}
    for path in sorted((workdir / "wandb").glob("offline-run-*/run-*.wandb")):
        store = datastore.DataStore()
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                items = record.history.item
                history.append(
                    {x.key or x.nested_key[0]: json.loads(x.value_json) for x in items}
                )
            if record.HasField("run"):
                runs.add((record.run.run_id, record.run.project))
                config = {x.key: x.value_json for x in record.run.config.update}
            for x in record.summary.update:
                summary[x.key or "/".join(x.nested_key)] = json.loads(x.value_json)
    ((identity, project),) = runs
    assert project == "mine"
    assert json.loads((workdir / "tracker.json").read_text()) == {"wandb": identity}
    assert json.loads(config["batch_size"]) == 8
    losses = {x["step"]: x["train/loss"] for x in history if "train/loss" in x}
    kept = {x["step"]: x["train/loss"] for x in lines_of(workdir) if "train/loss" in x}
    assert set(losses) == {1, 2, 3}
    assert losses == pytest.approx(kept)
    assert summary["test/ema/top1"] == report["final"]["test"]["ema"]["top1"]
    assert summary["params_sha256"] == report["params_sha256"]


def test_mlflow_gets_one_run_of_all_starts(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri, workdir = f"file:{tmp_path}/store", tmp_path / "run"
    report = train_in_two_starts(
        workdir, tracker={"name": "mlflow", "uri": uri, "experiment": "mine"}
    )
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("mine")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run"
    assert run.data.params["batch_size"] == "8"
    assert run.data.metrics["test/ema/top1"] == report["final"]["test"]["ema"]["top1"]
    logged = client.get_metric_history(run.info.run_id, "train/loss")
    kept = {x["step"]: x["train/loss"] for x in lines_of(workdir) if "train/loss" in x}
    assert {x.step: x.value for x in logged} == pytest.approx(kept)
    (artifact,) = client.list_artifacts(run.info.run_id)
    assert artifact.path == "report.json"


def test_a_lost_mlflow_gets_the_rest_when_it_is_back(tmp_path, monkeypatch, capsys):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri, workdir = f"file:{tmp_path}/store", tmp_path / "run"
    store, away = tmp_path / "store", tmp_path / "away"

    class Gone(vit_jax.Callback):
        def log(self, step, metrics):
            if step == 1:
                store.rename(away)
                store.write_text("no folder")
            if step == 2:
                store.unlink()
                away.rename(store)

    vit_jax.train(
        CONFIG,
        workdir,
        callbacks=[Gone()],
        log_every_steps=1,
        tracker={"name": "mlflow", "uri": uri},
    )
    assert "error: MLflow: " in capsys.readouterr().err
    (kept,) = store.glob("*/*/metrics/train/loss")
    assert [line.split()[2] for line in kept.read_text().splitlines()] == [
        "1",
        "2",
        "3",
    ]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_without_its_package_the_line_says_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"pip install -e '.\[{name}\]'"):
        TRACKERS[name]().callback()


def test_what_mlflow_cannot_open_gets_one_line():
    pytest.importorskip("mlflow")
    config = configuration.load(
        CONFIG, {"tracker": {"name": "mlflow", "uri": "no://x"}}
    )
    with pytest.raises(UserError, match="tracker.uri='no://x': .*unsupported URI"):
        config.tracker.callback()


def test_the_table_has_a_column_for_each_metric(tmp_path):
    import csv

    workdir = tmp_path / "run"
    train_in_two_starts(workdir)
    with (workdir / "metrics.csv").open() as file:
        rows = [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]
    wanted = [{k: str(v) for k, v in line.items()} for line in lines_of(workdir)]
    assert rows == wanted
