"""Scaling studies: their configs, what is run, what is left, and going on after a kill."""

import csv
import itertools
import json
import pathlib
import time

import hosts
import pytest

from vit_jax import models
from vit_jax.config import fields, loading
from vit_jax.data import splits
from vit_jax.data.catalogue import ENTRIES
from vit_jax.errors import UserError
from vit_jax.models import cost
from vit_jax.tools.report import pages, results
from vit_jax.tools.sweeps import scaling
from vit_jax.training import config as configuration
from vit_jax.training import loop

ROOT = pathlib.Path(__file__).parents[3]
STUDIES = sorted(
    path for path in (ROOT / "configs/study").glob("[!_]*.py") if path.stem != "common"
)
DIGITS = str(ROOT / "configs/study/digits.py")
WORDS = [f"--config={DIGITS}:quick", "--models=vit", "--train_sizes=300"]
# Images of train.
SIZES = {"cifar10": 50_000, "digits": 1_442}


def combinations(path):
    """Yields every choice of the arguments of a study's config, as text."""
    known = loading.arguments(str(path))
    values = [v if isinstance(v, tuple) else (False, True) for v in known.values()]
    for chosen in itertools.product(*values):
        pairs = zip(known, chosen, strict=True)
        yield ",".join(f"{name}={value}" for name, value in pairs)


def records(split, name):
    sizes = {"train": SIZES[name], "test": 10_000}
    return {
        f"{part}/{i}"
        for part, numbers in splits.select(split, sizes, name)
        for i in numbers
    }


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_run_of_a_study_is_a_complete_config(path):
    assert len(STUDIES) == 2
    texts = list(combinations(path))
    assert len(texts) == len(set(texts)) > 11
    names = set()
    for text in texts:
        config = configuration.load(f"{path}:{text}")
        names.add(config.name)
        assert set(config.evals) == (
            {"test"} if "part=finetune" in text else {"test", "fewshot"}
        )
        assert config.eval_every_steps == 0  # Test is scored once, at the end.
    assert len(names) >= len(texts) / 2


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_parts_are_nested_and_apart_from_what_is_fine_tuned_on(path):
    study = scaling.plan(str(path), "work")
    by_size = {}
    for point in study.points:
        data, own = point.pretrain.data, point.finetune.data
        part, tuned = records(data.split, data.name), records(own.split, own.name)
        assert len(part) == data.num_examples == point.images
        assert len(tuned) == own.num_examples
        assert not part & tuned
        assert point.pretrain.evals["fewshot"].train == own.split
        assert by_size.setdefault(point.images, part) == part
    ordered = [by_size[size] for size in sorted(by_size)]
    assert len(ordered) > 1
    for small, large in itertools.pairwise(ordered):
        assert small < large
    if name := ENTRIES.get(study.points[0].pretrain.data.name):
        assert name.images == SIZES["cifar10"]


@pytest.mark.parametrize("budget", ["cpu", pytest.param("gpu", marks=pytest.mark.slow)])
def test_hybrid_and_resnet_compute_as_much_as_the_middle_vit(budget):
    path = ROOT / "configs/study/cifar10.py"
    macs = {}
    for name in loading.arguments(str(path))["model"]:
        config = configuration.load(f"{path}:model={name},budget={budget}")
        model = models.create(
            **fields.to_dict(config.model),
            num_classes=10,
            image_size=config.data.image_size,
        )
        macs[name] = cost.macs_per_image(model)
    assert macs["vit-xs"] < macs["vit-s"] < macs["vit-m"]
    for name in ("hybrid", "resnet"):
        assert macs[name] == pytest.approx(macs["vit-s"], rel=0.12)


def test_a_plan_goes_through_all_models_of_a_size_before_the_next():
    study = scaling.plan(f"{DIGITS}:quick", "work", overrides={"seed": 5})
    assert [point.name for point in study.points] == [
        *("vit-300", "hybrid-300", "resnet-300"),
        *("vit-1200", "hybrid-1200", "resnet-1200"),
    ]
    assert [p.family for p in study.points[:3]] == ["vit", "hybrid", "resnet"]
    for point in study.points:
        assert point.finetune.init.checkpoint == f"work/{point.name}/pretrain"
        assert point.pretrain.seed == point.finetune.seed == 5
        assert point.pretrain.total_steps == 4
    few = scaling.plan(DIGITS, "w", models=("resnet",), images=(1_200,))
    assert [point.name for point in few.points] == ["resnet-1200"]
    twice = {"models": ("vit", "resnet", "vit"), "images": (300, 300)}
    few = scaling.plan(DIGITS, "w", **twice)
    assert [point.name for point in few.points] == ["vit-300", "resnet-300"]


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("configs/digits.py", {}, "has no argument 'model' with a list of values"),
        (
            f"{DIGITS}:model=vit",
            {},
            "goes through all of 'model'; choose with --models",
        ),
        (
            DIGITS,
            {"models": ("vlt",)},
            "--models=vlt: the study has vit, hybrid, resnet",
        ),
        (DIGITS, {"images": (7,)}, "--train_sizes=7: the study has 300, 1200"),
        (
            DIGITS,
            {"overrides": {"data.split": "train"}},
            "--config.data.split: the study",
        ),
        (DIGITS, {"overrides": {"evals.x": "test"}}, "--config.evals.x: the study's"),
        (DIGITS, {"overrides": {"optim.rat": 1}}, "unknown config key optim.rat"),
        ("configs/study/none.py", {}, "configs/study/none.py not found; .*cifar10.py"),
    ],
)
def test_what_is_no_study_is_one_line(spec, options, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=message):
        scaling.plan(spec, "work", **options)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished study of one model by the command; its folder and report."""
    workdir = tmp_path_factory.mktemp("study")
    hosts.finish(hosts.alone("study", *WORDS, f"--workdir={workdir}"))
    study = scaling.plan(f"{DIGITS}:quick", workdir, models=("vit",), images=(300,))
    return study, workdir, json.loads((workdir / "study.json").read_text())


@pytest.mark.slow
def test_a_study_leaves_what_reports_read(done):
    _, workdir, report = done
    (point,) = report["points"]
    assert (point["model"], point["family"], point["images"]) == ("vit", "vit", 300)
    told = {
        part: json.loads((workdir / "vit-300" / part / "report.json").read_text())
        for part in ("pretrain", "finetune")
    }
    final = told["pretrain"]["final"]
    assert point["upstream"] == final["test"]["params"]["top1"]
    assert point["fewshot"] == {"5": final["fewshot"]["params"]["5shot"]}
    assert point["finetuned"] == told["finetune"]["final"]["test"]["params"]["top1"]
    assert point["exaflops"] == told["pretrain"]["compute"]["exaflops"] > 0
    assert point["images_seen"] == 4 * 64
    assert point["compute"] == {part: told[part]["compute"] for part in told}
    with (workdir / "points.csv").open() as file:
        (row,) = csv.DictReader(file)
    used = told["finetune"]["compute"]
    assert float(row["compute.finetune.device_days"]) == used["device_days"] > 0
    assert told["finetune"]["init"].endswith("vit-300/pretrain")
    # The pretraining stays, for other uses; what was fine-tuned goes.
    assert (workdir / "vit-300" / "pretrain" / "checkpoints" / "4").is_dir()
    assert not (workdir / "vit-300" / "finetune" / "checkpoints").exists()


@pytest.mark.slow
def test_a_finished_study_trains_nothing_again(done, monkeypatch):
    study, _, report = done

    def train(*_, **__):
        raise AssertionError("trained again")

    monkeypatch.setattr(loop, "train", train)
    assert study.run() == report


def test_what_diverges_is_a_row_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    used = {"images_seen": 256, "exaflops": 0.5, "device_days": 0.25}
    scored = {"test": {"params": {"top1": 0.5}}, "fewshot": {"params": {"5shot": 0.25}}}

    def train(config, folder, shared, keep):
        begun.append(folder.removeprefix(f"{tmp_path}/"))
        if begun[-1] in ("vit-300/finetune", "hybrid-300/pretrain"):
            return {"diverged": "the loss is NaN"}
        return {"compute": used, "final": scored}

    begun = []
    monkeypatch.setattr(scaling.runs, "train", train)
    study = scaling.plan(f"{DIGITS}:quick", str(tmp_path), images=(300,))
    report = study.run()
    assert begun == [
        *("vit-300/pretrain", "vit-300/finetune", "hybrid-300/pretrain"),
        *("resnet-300/pretrain", "resnet-300/finetune"),
    ]
    assert json.loads((tmp_path / "study.json").read_text()) == report
    vit, hybrid, resnet = report["points"]
    assert vit["diverged"] == {"finetune": "the loss is NaN"}
    assert (vit["upstream"], vit["finetuned"]) == (0.5, None)
    assert hybrid["diverged"] == {"pretrain": "the loss is NaN"}
    assert (hybrid["upstream"], hybrid["exaflops"]) == (None, None)
    assert "diverged" not in resnet
    assert resnet["finetuned"] == 0.5
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        "diverged: vit-300, finetune (the loss is NaN); hybrid-300, "
    )


@pytest.mark.slow
def test_a_workdir_is_of_one_study(done):
    _, workdir, _ = done
    other = scaling.plan(
        f"{DIGITS}:quick",
        workdir,
        models=("vit",),
        images=(300,),
        overrides={"optim.learning_rate": 0.5},
    )
    with pytest.raises(UserError, match="holds a study by another command"):
        other.run()


@pytest.mark.slow
def test_a_report_of_a_real_study_and_its_runs(done, tmp_path):
    _, workdir, report = done
    folders = [workdir, *(workdir / "vit-300").iterdir()]
    files = pages.write_report(folders, tmp_path)
    assert any(name.endswith("_upstream_by_images.svg") for name in files)
    assert "plots/loss_by_images.png" in files
    parts = pages.sections(results.read_runs(folders))
    (compute,) = (part for part in parts if part.title == "Compute")
    (row,) = (row for row in compute.blocks[0].rows if row[0] == "pretrain")
    assert row[1:5] == ("Ti/2", "digits", "4", "256")
    assert float(row[5]) == pytest.approx(report["points"][0]["exaflops"], rel=0.01)
    (all_,) = (part for part in parts if part.title == "All accuracies")
    (tuned,) = (row for row in all_.blocks[0].rows if row[0] == "finetune")
    assert (tuned[1], tuned[4]) == ("digits", "digits")


@pytest.mark.slow
def test_a_killed_study_goes_on_to_the_same_result(done, tmp_path):
    def lasting(workdir):
        report = json.loads((workdir / "study.json").read_text())
        for point in report["points"]:
            for used in point["compute"].values():
                assert used.pop("device_days") > 0  # Another one each time.
        return report

    _, whole, _ = done
    killed = tmp_path / "killed"
    # Once within its first run, once within its second.
    for beginning in ("vit-300/pretrain", "vit-300/finetune"):
        process = hosts.alone("study", *WORDS, f"--workdir={killed}")
        with process.stdout:
            until = time.monotonic() + 240
            while not (killed / beginning / "metrics.jsonl").exists():
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.02)
            process.kill()
        process.wait()
    before = (killed / "vit-300" / "pretrain" / "report.json").read_bytes()
    hosts.finish(hosts.alone("study", *WORDS, f"--workdir={killed}"))
    assert lasting(killed) == lasting(whole)
    assert (killed / "vit-300" / "pretrain" / "report.json").read_bytes() == before
