"""Trackers, each against what it keeps on a local disk."""

import csv
import dataclasses
import importlib.metadata
import importlib.util
import inspect
import json
import sys

import numpy as np
import pytest
from helpers import train

import vit_jax
from vit_jax.errors import UserError
from vit_jax.training import config as configuration
from vit_jax.training.trackers import TRACKERS
from vit_jax.training.trackers.tracker import MetricWriter, TrackerConfig

CONFIG = "configs/digits.py:quick"


class Broken(vit_jax.Callback):
    """Ends the run of a test in its middle."""

    def log(self, step, metrics):
        if step == 2:
            raise KeyError("power is gone")


def train_in_two_starts(workdir, **keys):
    keys |= {"log_every_steps": 1, "checkpoint_every_steps": 1}
    config = configuration.load(CONFIG, keys)
    with pytest.raises(KeyError, match="power is gone"):
        train(config, workdir, callbacks=[Broken()])
    return train(config, workdir)


def lines_of(workdir):
    return [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_wandb_gets_one_run_of_all_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    datastore = pytest.importorskip("wandb.sdk.internal.datastore")
    from wandb.proto import wandb_internal_pb2

    workdir = tmp_path / "run"
    tracker = {"name": "wandb", "mode": "offline", "project": "mine"}
    report = train_in_two_starts(workdir, tracker=tracker)
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
    # The table beside it has a column for each metric.
    with (workdir / "metrics.csv").open() as file:
        rows = [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]
    wanted = [{k: str(v) for k, v in line.items()} for line in lines_of(workdir)]
    assert rows == wanted


@pytest.mark.slow  # Its import takes seconds.
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


@pytest.mark.slow
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

    keys = {"log_every_steps": 1, "tracker": {"name": "mlflow", "uri": uri}}
    train(configuration.load(CONFIG, keys), workdir, callbacks=[Gone()])
    assert "error: MLflow: " in capsys.readouterr().err
    (kept,) = store.glob("*/*/metrics/train/loss")
    steps = [line.split()[2] for line in kept.read_text().splitlines()]
    assert steps == ["1", "2", "3"]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_without_its_package_the_line_says_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"pip install -e '.\[{name}\]'"):
        TRACKERS[name]().callback()


@pytest.mark.slow
def test_what_mlflow_cannot_open_gets_one_line():
    pytest.importorskip("mlflow")
    tracker = {"name": "mlflow", "uri": "no://x"}
    config = configuration.load(CONFIG, {"tracker": tracker})
    with pytest.raises(UserError, match="tracker.uri='no://x': .*unsupported URI"):
        config.tracker.callback()


@pytest.fixture(scope="module")
def clu_writer():
    """The abstract class of clu; importing its package would import TensorFlow."""
    path = importlib.metadata.distribution("clu").locate_file(
        "clu/metric_writers/interface.py"
    )
    spec = importlib.util.spec_from_file_location("clu_interface", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MetricWriter


def test_our_writers_have_the_methods_of_clus(clu_writer):
    for name in clu_writer.__abstractmethods__:
        theirs = inspect.signature(getattr(clu_writer, name)).parameters
        ours = inspect.signature(getattr(MetricWriter, name)).parameters
        one, other = (
            [(x.name, x.kind, x.default) for x in parameters.values()]
            for parameters in (ours, theirs)
        )
        assert one == other


@pytest.mark.slow
def test_a_writer_of_clu_goes_in_unchanged(clu_writer, tmp_path, monkeypatch):
    calls = []

    def noting(name):
        return lambda self, *args, **keys: calls.append((name, *args))

    names = clu_writer.__abstractmethods__
    writer = type("Mine", (clu_writer,), {name: noting(name) for name in names})

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Tracker(TrackerConfig):
        def writers(self, workdir):
            assert workdir == str(tmp_path / "run")
            return [writer()]

    monkeypatch.setitem(sys.modules, "my_trackers", sys.modules[__name__])
    monkeypatch.setattr(sys.modules[__name__], "Tracker", Tracker, raising=False)
    keys = {"log_every_steps": 1, "tracker": "my_trackers:Tracker"}
    train(configuration.load(CONFIG, keys), tmp_path / "run")
    of = {name: [args for other, *args in calls if other == name] for name, *_ in calls}
    written = [{"step": step, **scalars} for step, scalars in of["write_scalars"]]
    assert written == lines_of(tmp_path / "run")
    assert {"train/loss", "test/ema/top1"} <= set().union(*written)
    images = {name: x for _, found in of["write_images"] for name, x in found.items()}
    assert {"train/images", "test/ema/confusion"} <= set(images)
    for shown in images.values():
        assert shown.dtype == np.uint8
        assert shown.ndim == 4
        assert shown.shape[-1] in (1, 3)
    texts = {name for _, x in of["write_texts"] for name in x}
    assert texts == {"config", "parameters"}
    ((hparams,),) = of["write_hparams"]
    assert hparams["batch_size"] == 8
    assert hparams["model.variant"]
    assert of["flush"]
    assert calls[-1] == ("close",)
