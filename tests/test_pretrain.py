"""`vit_jax.pretrain`: from a folder without labels to a model, with chosen settings."""

import json
import os
import re
import shutil

import image_folder
import numpy as np
import pytest
from helpers import kill_after, run_command, tiny_config, write_weights
from PIL import Image

import vit_jax
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.tools.pretraining import method as methods
from vit_jax.tools.pretraining import scores
from vit_jax.training import loop
from vit_jax.training.config import complete
from vit_jax.weights.pretrained import Pretrained

SHORT = ("--minutes=0", "--config.total_steps=2")
# A network of one block, which compiles soon.
TINY = ("--config.model.depth=1", "--config.model.width=16")
TINY += ("--config.model.num_heads=2", "--config.model.mlp_dim=32")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of photographs, labelled and not, and weights of a small network."""
    root = tmp_path_factory.mktemp("pretrain")
    image_folder.write(root / "labelled")
    rng = np.random.default_rng(3)
    for i in range(9):
        path = root / "photos" / ("a/b" if i % 2 else "c") / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (33, 41, 3), np.uint8)).save(path)
    write_weights(
        root / "weights.safetensors",
        "abcde",
        Preprocess(image_size=(32, 32), crop_fraction=0.875),
        variant="Ti/8",
        num_classes=5,
        image_size=(32, 32),
    )
    return root


@pytest.fixture
def chosen(monkeypatch, tmp_path):
    """Runs the command up to the training; returns the config that it would train."""
    configs = []

    def train(config, *_, **__):
        configs.append(config)
        raise UserError("far enough")

    def choose(*words):
        with pytest.raises(UserError, match="far enough"):
            run_command("pretrain", [*words, f"--workdir={tmp_path / 'run'}"])
        return configs[-1]

    monkeypatch.setattr(loop, "train", train)
    return choose


def test_a_folder_without_labels_becomes_a_model(place, tmp_path, capsys):
    run = tmp_path / "run"
    words = [place / "photos", *SHORT, *TINY]
    assert run_command("pretrain", [*words, f"--workdir={run}"]) == 0
    out = capsys.readouterr().out
    for line in (
        r"--method +mae: the pixels of hidden patches are predicted",
        r"batch_size +batches of 16 \(from the number of images\)",
        r"checkpoint.best_metric +the best checkpoint by val/loss",
    ):
        assert re.search(line, out), line
    assert "after 2 steps: held-out loss" in out and "(start" in out
    config = json.loads((run / "pretrain.json").read_text())
    assert config["data"]["num_classes"] == 0 and config["model"]["variant"] == "Ti/4"
    assert config["evals"].keys() == {"val", "rank"}
    found = scores.read(run, complete(config))
    assert sorted(found.by_step) == [0, 1, 2]
    assert found.by_step[2].keys() == {"val/loss", "rank/rankme"}
    last = out.splitlines()[-1]
    assert "held-out loss" in last and "steps" in last
    model = vit_jax.load_model(run, tell=lambda line: None)
    assert model.features([str(place / "photos/c/0.png")]).shape == (1, 16)
    # Beside the nearest images by random weights.
    with Image.open(run / "neighbours.jpg") as picture:
        assert picture.width > 1_000
    # The same command does nothing more, another one is refused.
    assert run_command("pretrain", [*words, f"--workdir={run}"]) == 0
    assert "resuming with the settings chosen before" in capsys.readouterr().out
    with pytest.raises(UserError, match="another command.*--method"):
        run_command("pretrain", [*words, "--method=dinov2", f"--workdir={run}"])
    for others in ([place / "photos", place / "labelled"], ["digits"]):
        with pytest.raises(UserError, match="another command.*images: .*photos ->"):
            run_command("pretrain", [*others, *words[1:], f"--workdir={run}"])
    given = dict(word.removeprefix("--config.").split("=") for word in TINY)
    result = vit_jax.pretrain(
        place / "photos", run, minutes=0, total_steps=2, tell=str, **given
    )
    assert result.count == 7 and result.report["steps"] == 2


def test_weights_go_on_with_the_loss_that_suits_them(place, chosen, capsys):
    weights = f"--model={place / 'weights.safetensors'}"
    config = chosen(place / "labelled", weights, *SHORT)
    assert config.task.name == "dinov2" and config.init.checkpoint == weights[8:]
    assert config.checkpoint.best_metric == "knn/top1"
    assert config.optim.freeze == ("network/",) and config.optim.freeze_fraction
    assert config.data.train_transform.startswith("multi_crop(32, small_size=16")
    assert config.data.num_classes == 0 and config.evals["knn"].kind == "knn"
    assert "dinov2: crops and masked patches" in capsys.readouterr().out
    labels = os.path.relpath(place / "labelled")
    config = chosen(place / "photos", f"--labels={labels}", weights, *SHORT)
    assert config.evals["knn"].data_dir == str(place / "labelled")
    config = chosen(place / "photos", weights, "--method=mae", *SHORT)
    assert config.task.name == "mae" and config.optim.name == "adamw"
    teacher = f"--teacher={place / 'weights.safetensors'}"
    config = chosen(place / "photos", teacher, "--variant=Ti/4", *SHORT)
    assert config.task.name == "feature_distillation"
    assert config.task.teachers == (teacher[10:],) and not config.init.checkpoint
    size = "--config.data.image_size=(16, 16)"
    for how, crops in {
        "dinov2": "multi_crop(16, small_size=8",
        "mae": "random_",
    }.items():
        config = chosen(place / "photos", weights, f"--method={how}", size, *SHORT)
        assert config.data.train_transform.startswith(crops)
        assert config.data.image_size == (16, 16)
    for removed, best in (("knn", "rank/rankme"), ("val", "knn/top1")):
        words = weights, f"--config.evals.{removed}=None"
        assert chosen(place / "labelled", *words, *SHORT).checkpoint.best_metric == best
    config = chosen(place / "labelled", weights, "--config.evals=None", *SHORT)
    assert not config.evals and not config.checkpoint.best_metric
    assert "the last checkpoint (without evaluations)" in capsys.readouterr().out
    config = chosen(place / "photos", weights, "--lora=3", *SHORT)
    assert config.task.name == "adapters" and config.task.rank == 3
    assert config.task.of.name == "dinov2"


def test_no_name_is_not_the_present_folder(tmp_path):
    with pytest.raises(UserError, match="no photographs"):
        run_command("pretrain", ["", f"--workdir={tmp_path}"])


@pytest.mark.parametrize(
    ("task", "form", "expected"),
    [
        ({"name": "mae"}, "workdir", "mae"),
        ({}, "mae", "mae"),
        ({"name": "adapters", "of": {"name": "mae"}}, "workdir", "mae"),
        ({"name": "dino"}, "workdir", "dinov2"),
        ({}, "dinov2", "dinov2"),
        ({"name": "classification"}, "workdir", "dinov2"),
        ({}, "timm", "dinov2"),
    ],
)
def test_the_method_follows_from_the_weights(task, form, expected):
    weights = Pretrained({}, {}, form, "made", task=task)
    assert methods.suits(weights, ())[0] == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method=simclr"], r"method='simclr' is not a method: .*dinov2, mae"),
        (["--method=distillation"], "method='distillation' .*give a teacher"),
        (["--method=mae", "--teacher=W"], "method='mae' has no teacher"),
        (["--variant=Ti/4", "--model=W"], "variant='Ti/4' with model='W'"),
        (["--lora=2"], "lora=2 .*give a model"),
        (["--config.task.name=dino"], "config.task.name: --method sets it"),
        (["--config.evals.other.k=3"], "evals.other"),
        (["--variant=R50x1", "--method=mae"], r"method='mae'.*'R50x1'.*no patches"),
        (["--variant=R50x1", "--method=dinov2"], r"method='dinov2'.*'R50x1'"),
    ],
)
def test_flags_that_do_not_fit_each_other(place, tmp_path, words, message):
    with pytest.raises(UserError, match=message):
        run_command("pretrain", [place / "photos", *words, f"--workdir={tmp_path}"])


def test_the_best_step_is_compared_with_the_start():
    rows = {0: {"knn/top1": 0.5}, 3: {"knn/top1": 0.625}, 6: {"knn/top1": 0.25}}
    better = scores.Scores(rows, "knn/top1")
    assert (better.start, better.best, better.is_better) == (0.5, (3, 0.625), True)
    line = scores.conclusion(better, 2_000, started=True)
    assert line == "k-NN accuracy 62.50% after 3 steps, 50.00% before"
    rows = {0: {"rank/rankme": 40.0}, 3: {"rank/rankme": 40.3}}
    assert not scores.Scores(rows, "rank/rankme").is_better  # By less than 1 %.
    rows = {0: {"val/loss": 0.5}, 3: {"val/loss": 0.75}}
    worse = scores.Scores(rows, "val/loss")
    assert (worse.best, worse.is_better) == ((3, 0.75), False)
    rows = {0: {"val/loss": 0.5, "rank/rankme": 9.0}, 3: {"val/loss": 0.25}}
    loss = scores.Scores(rows, "val/loss")
    line = "held-out loss 0.25 after 3 steps, 0.5 before"
    assert scores.conclusion(loss, 60, started=True) == line
    rows[3]["rank/rankme"] = 7.5
    line += "; rank of features (RankMe) 7.5, 9 before"
    assert scores.conclusion(loss, 60, started=True) == line
    line = scores.conclusion(worse, 60, started=True)
    assert "no checkpoint is better than the weights" in line and "60 images" in line
    assert "--minutes" in scores.conclusion(worse, 2_000, started=False)
    assert "as they are" not in scores.conclusion(worse, 60, started=False)


@pytest.mark.parametrize(
    "rows",
    [{3: {"val/loss": 0.5}}, {0: {"val/loss": 0.5}}, {0: {}, 3: {"val/loss": 1.0}}],
)
def test_scores_without_a_start_or_an_end_are_not_compared(rows):
    line = scores.conclusion(scores.Scores(rows, "val/loss"), 60, started=True)
    assert "nothing is compared" in line and "'val/loss'" in line


def test_any_metric_may_choose_the_checkpoint(tmp_path):
    config = tiny_config(
        evals={"rank": {"kind": "rank"}},
        eval_every_steps=2,
        ema={"decay": 0.0},
        checkpoint={"best_metric": "rank/mean_cosine"},
    )
    lines = [{"step": i, "rank/params/mean_cosine": 0.5 + i} for i in (0, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = scores.read(tmp_path, config)
    assert found.start == 0.5 and found.best == (2, 2.5)
    assert "rank/mean_cosine" in scores.table(found)[0]


@pytest.mark.slow
def test_a_killed_run_resumes_and_is_a_model_for_every_command(place, tmp_path, capsys):
    weights = f"--model={place / 'weights.safetensors'}"
    run = tmp_path / "run"
    words = [place / "labelled", weights, *SHORT, f"--workdir={run}"]
    words += ["--config.checkpoint_every_steps=1", "--config.checkpoint.max_to_keep=9"]
    assert run_command("pretrain", words) == 0
    out = capsys.readouterr().out
    assert "after 2 steps: k-NN accuracy" in out
    assert f"neighbours: {run / 'neighbours.jpg'}" in out
    with Image.open(run / "neighbours.jpg") as picture:
        assert picture.width > 1_000
    before = json.loads((run / "report.json").read_text())
    kill_after(1, run)
    assert run_command("pretrain", words) == 0
    after = json.loads((run / "report.json").read_text())
    assert after["params_sha256"] == before["params_sha256"]
    tuned = [place / "labelled", f"--model={run}", f"--workdir={tmp_path / 'tuned'}"]
    assert run_command("finetune", [*tuned, *SHORT]) == 0
    # Student, teacher and heads of such a run go on.
    again = [place / "labelled", f"--model={run}", f"--workdir={tmp_path / 'again'}"]
    assert run_command("pretrain", [*again, *SHORT]) == 0
    config = complete(json.loads((tmp_path / "again" / "pretrain.json").read_text()))
    assert (config.task.name, config.optim.freeze) == ("dinov2", ())
    assert "head of the task: loaded" in capsys.readouterr().out
    # The workdir may move.
    shutil.move(run, tmp_path / "moved")
    words[-3] = f"--workdir={tmp_path / 'moved'}"
    # Its checkpoints have all that it needs.
    hidden = (place / "weights.safetensors").rename(place / "hidden.safetensors")
    assert run_command("pretrain", words) == 0
    hidden.rename(place / "weights.safetensors")
    out = capsys.readouterr().out
    assert "resuming with the settings chosen before" in out
    assert "no picture of neighbours is drawn" in out


@pytest.mark.slow
def test_adapters_and_students_of_a_teacher_are_trained(place, tmp_path):
    weights = place / "weights.safetensors"
    run = tmp_path / "adapters"
    words = [place / "photos", f"--model={weights}", "--lora=2", "--method=mae", *SHORT]
    words += ["--config.model.matmul_dtype="]  # The adapter's base is of float32.
    assert run_command("pretrain", [*words, f"--workdir={run}"]) == 0
    merged = vit_jax.load_model(run, tell=lambda line: None)
    image = str(place / "photos/c/0.png")
    loaded = vit_jax.load_model(run / "adapter", tell=lambda line: None)
    np.testing.assert_allclose(
        merged.features([image]), loaded.features([image]), atol=1e-5
    )
    run = tmp_path / "student"
    words = [place / "photos", f"--teacher={weights}", "--variant=Ti/4", *SHORT, *TINY]
    assert run_command("pretrain", [*words, f"--workdir={run}"]) == 0
    student = vit_jax.load_model(run, tell=lambda line: None)
    assert student.features([image]).shape == (1, 16)
    assert (run / "neighbours.jpg").exists()  # Beside those by the teacher.


@pytest.mark.slow
def test_arrays_are_images_with_or_without_labels(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (60, 16, 16, 3), np.uint8)
    labels = np.arange(60) % 3
    pairs = (word.removeprefix("--config.").split("=") for word in TINY)
    keys = {key: int(value) for key, value in pairs}
    keys |= {"minutes": 0, "total_steps": 2, "tell": str}
    result = vit_jax.pretrain(images, tmp_path / "images", **keys)
    assert result.scores.by_step[2].keys() == {"val/loss", "rank/rankme"}
    pairs = {"train": (images, labels), "test": (images[:20], labels[:20])}
    result = vit_jax.pretrain(pairs, tmp_path / "pairs", **keys)
    assert result.count == 48  # A fifth is held out; "test" is not read.
    assert 0 <= result.scores.by_step[2]["knn/top1"] <= 1


@pytest.mark.parametrize(
    ("photos", "message"),
    [
        (np.zeros((60, 16), np.uint8), r"images=uint8 \(60, 16\)"),
        (
            (np.zeros((60, 16, 16), np.uint8), np.zeros(3, int)),
            "60 images, but 3 labels",
        ),
        ({"val": np.zeros((60, 16, 16), np.uint8)}, "no 'train' among val"),
    ],
)
def test_arrays_that_are_not_images_are_refused(tmp_path, photos, message):
    with pytest.raises(UserError, match=message):
        vit_jax.pretrain(photos, tmp_path)
