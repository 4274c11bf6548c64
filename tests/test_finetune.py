"""`vit_jax.finetune` on small sets: from a folder or a table to a model."""

import base64
import csv
import io
import itertools
import json
import re
import shutil

import image_folder
import mask_folder
import numpy as np
import pytest
from helpers import run_command, write_weights
from PIL import Image

import vit_jax
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.tools.finetuning import run as finetuning
from vit_jax.training import loop


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with photographs, and the weights of a small network."""
    root = tmp_path_factory.mktemp("finetune")
    image_folder.write(root / "photos")
    write_weights(
        root / "weights.safetensors",
        "abcde",
        Preprocess(image_size=(32, 32), crop_fraction=0.875),
        variant="Ti/8",
        num_classes=5,
        image_size=(32, 32),
    )
    yield root


def command(place, *words, photos="photos", weights=None):
    model = (weights or place) / "weights.safetensors"
    words = [str(place / photos), *words, f"--model={model}"]
    return run_command("finetune", words)


@pytest.fixture
def chosen(monkeypatch):
    """Runs the command up to the training; returns the config that it would train."""
    configs = []

    def train(config, *_, **__):
        configs.append(config)
        raise UserError("far enough")

    def choose(*args, **options):
        with pytest.raises(UserError, match="far enough"):
            command(*args, **options)
        return configs[-1]

    monkeypatch.setattr(loop, "train", train)
    return choose


def test_a_folder_becomes_a_model(place, capsys):
    run = place / "run"
    assert command(place, f"--workdir={run}", "--minutes=1", "--calibrate") == 0
    out = capsys.readouterr().out
    assert "measuring the speed with 12 steps of 16 images" in out
    for line in (
        r"data.image_size         images of 32 pixels (the size of the weights (32))",
        r"batch_size              batches of 16 (from the number of images)",
        r"checkpoint.best_metric  the last checkpoint (4 images to validate on",
    ):
        assert line in out
    assert "on 4 images of val\n" in out  # They chose nothing.
    config = json.loads((run / "finetune.json").read_text())
    assert config["data"]["class_balance"] == ""
    report = json.loads((run / "report.json").read_text())
    score = report["final"]["val"]["ema"]["top1"]
    assert f"accuracy {score:.2%} (95 % interval" in out
    model = vit_jax.load_model(str(run), tell=lambda line: None)
    assert model.class_names == ("ant", "bee", "cat")
    page = (run / "report.html").read_text()
    assert f"mistakes:  {run / 'report.html'}" in out
    assert "<h1>photos: 3 classes</h1>" in page
    for section in ("Learning curves", "Classes", "Confusion matrix", "Calibration"):
        assert f"<h2>{section}</h2>" in page
    assert page.count("<figure><div") == 3  # Loss, accuracy and confusion.
    assert "look mislabelled" in page
    for text in (
        f"vit_jax {vit_jax.__version__}",
        f"--workdir={run} --model={place / 'weights.safetensors'} --minutes=1",
        f"python -m vit_jax.predict --model={run} IMAGES",
        "total_<wbr>steps</th><td",
    ):
        assert text in page
    assert re.search(r"[0-4] of the validation images show the same picture", page)
    thumbnails = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', page)
    assert len(thumbnails) >= 4
    for data in thumbnails:
        picture = Image.open(io.BytesIO(base64.b64decode(data)))
        assert picture.size == (106, 74)  # Twice those of the file.
    assert 'scope="row">ant</th><td>9</td><td>2</td>' in page
    # The probabilities are calibrated, and four images are too few for most sets.
    decisions = json.loads((run / "calibration.json").read_text())
    assert (
        f"calibration: temperature {decisions['temperature']:.3g}, from 4 images" in out
    )
    assert not decisions["fitted"]["chose_checkpoint"]
    assert len(decisions["scores"]) == 4
    photo = place / "photos/val/ant/0.png"
    logits = model(photo)[0] / decisions["temperature"]
    best = model.predict(photo, topk=1)[0]
    assert best.probability == pytest.approx(
        np.exp(logits.max()) / np.exp(logits).sum(), rel=1e-4
    )
    assert 1 <= len(model.predict(photo, coverage=0.8)) <= 3
    with pytest.raises(UserError, match="coverage=0.9: 4 images were calibrated on"):
        model.predict(photo, coverage=0.9)
    # Another command is refused.
    with pytest.raises(UserError, match="another command.*--minutes"):
        command(place, f"--workdir={run}", "--minutes=2")


@pytest.fixture(scope="module")
def uneven(place):
    photos = place / "uneven"
    for name, count in (("few", 4), ("many", 20)):
        (photos / name).mkdir(parents=True)
        for i in range(count):
            pixels = np.full((32, 32), 40 if name == "few" else 200, np.uint8)
            pixels[i % 32] = 0
            Image.fromarray(pixels).save(photos / name / f"{i}.png")


@pytest.mark.usefixtures("uneven")
def test_weights_of_the_classes_take_the_place_of_balanced_draws(
    place, tmp_path, capsys, chosen
):
    words = [f"--workdir={tmp_path}", "--minutes=0", "--config.total_steps=2"]
    words += ["--config.task.class_weights=inverse"]
    config = chosen(place, *words, photos="uneven")
    assert "classes drawn as they are (the largest class has" in capsys.readouterr().out
    assert (config.task.class_weights, config.data.class_balance) == ("inverse", "")
    assert config.checkpoint.best_metric == "val/balanced_accuracy"
    (tmp_path / "finetune.json").write_text("{")
    with pytest.raises(UserError, match=r"finetune.json is damaged .*remove it and"):
        command(place, *words, photos="uneven")


@pytest.mark.usefixtures("uneven")
def test_classes_without_splits_that_are_uneven(place, tmp_path, capsys):
    words = [f"--workdir={tmp_path}", "--minutes=0", "--config.total_steps=2"]
    words += ["--config.eval_every_steps=2"]
    words += ["--config.task.name=lora", "--config.optim.name=adam"]
    with pytest.raises(UserError, match="is chosen for sgd only; set --config.optim"):
        command(place, *words, photos="uneven")
    words += ["--config.optim.learning_rate=0.002"]
    assert command(place, *words, photos="uneven") == 0
    out = capsys.readouterr().out
    assert "measuring" not in out
    assert "5 of 24 images, the same part of each class, held out" in out
    assert "classes drawn sqrt (the largest class has 5.3 times as many images" in out
    config = json.loads((tmp_path / "finetune.json").read_text())
    assert config["data"]["train_transform"] == "random_resized_crop(area=(0.6, 1.0))"
    assert "adam, rate 0.002 (set)" in out
    assert config["task"]["name"] == "lora"
    assert "no average of the parameters (task.name=lora does not average" in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert config["ema"]["decay"] == 0.0 and "ema" not in report["final"]["val"]
    labels = sorted(row["label"] for row in _validated(tmp_path))
    assert labels == ["few"] + ["many"] * 4
    # A network that calls all images one class has 80 % of these five right.
    scores = report["final"]["val"]["params"]
    balanced, worst = scores["balanced_accuracy"], scores["worst_class_recall"]
    assert scores["majority_baseline"] == 0.8
    score = f"alanced accuracy {balanced:.2%}, recall of the worst class {worst:.2%}"
    assert f"\nb{score}, accuracy {scores['top1']:.2%} (95 % interval" in out
    assert "; always many: 80.00%)" in out
    line = f"step 2/2  balanced accuracy: val/params {balanced:.2%} (worst class {worst:.2%})"
    assert (
        f"{line}  top-1: val/params {scores['top1']:.2%} (majority class 80.00%)" in out
    )
    page = (tmp_path / "report.html").read_text()
    assert f'<p class="score">B{score}, accuracy' in page
    assert re.search(r">few</th><td>3</td><td>1</td>", page)
    assert "balanced accuracy in %" in page  # Of the curve.
    assert scores["top1"] == 1 or re.search(r"\nworst:     recall of (few|many) ", out)


def test_few_images_are_said_and_the_same_command_only_evaluates(
    place, tmp_path, capsys
):
    words = [f"--workdir={tmp_path / 'one'}", "--minutes=0", "--config.total_steps=4"]
    words += ["--config.eval_every_steps=1"]
    words += ["--config.checkpoint.best_metric=val/top1"]
    assert command(place, *words) == 0
    out = capsys.readouterr().out
    assert (
        "for the best of 4 evaluations; always" in out and "on 4 images of val" in out
    )
    assert "3 of 3 classes had fewer than 10 scored images (bee 0, ant 2, cat 2)" in out
    config = json.loads((tmp_path / "one" / "finetune.json").read_text())
    assert config["early_stopping_evals"] == 0
    # A key that changes no result does not make another run of it: it only evaluates.
    score = re.search(r"accuracy [\d.]+%", out)[0]
    assert command(place, *words, "--config.log_every_steps=2") == 0
    again = capsys.readouterr().out
    assert "resuming with the settings chosen before" in again and score in again
    with pytest.raises(UserError, match="config.seed"):
        command(place, *words, "--config.seed=2")
    with pytest.raises(UserError, match="folds=2: there is a validation split"):
        command(place, f"--workdir={tmp_path / 'two'}", "--folds=2", *words[1:])


def test_groups_are_given_as_a_rule_a_column_or_values(place, tmp_path, chosen):
    words = ["--minutes=0", f"--workdir={tmp_path / 'a'}", r"--group=([a-z]+|\d)"]
    config = chosen(place, *words, photos="photos/train")
    rows = list(csv.DictReader((tmp_path / "a" / "split.csv").read_text().splitlines()))
    sides = {(row["group"], row["split"]) for row in rows}
    assert len(sides) == len({group for group, _ in sides}) > 5
    assert config.data.group_key == "group"  # A column of the list.
    record = json.loads((tmp_path / "a" / "finetune.json").read_text())
    assert record["data"]["data_dir"] == str(tmp_path / "a" / "split.csv")
    images = np.zeros((40, 8, 8), np.uint8)
    arrays = images, np.arange(40) % 2
    given = {"model": place / "weights.safetensors", "minutes": 0, "tell": str}
    for group, problem in (
        ("site", "group='site': photos are arrays"),
        (["a"] * 39, "group has 39 values: give one for each of the 40"),
        (["a"] * 40, "all 40 images are in one group, 'a'"),
        ([f"{i % 9}" for i in range(40)], "far enough"),
    ):
        with pytest.raises(UserError, match=problem):
            vit_jax.finetune(arrays, tmp_path / "b", group=group, **given)
    record = json.loads((tmp_path / "b" / "finetune.json").read_text())
    assert record["evals"]["val"] == "grouped_splits(train, 5)[4]"
    for words, problem in (
        (["--group=site"], "data.group_key='site': .* has no columns"),
        (["--group=(x)"], r"data.group_key='\(x\)' gives none of the 19 images"),
        (["--group=(.*)", "--folds=30"], "folds=30: 9 groups cannot be divided"),
    ):
        with pytest.raises(UserError, match=problem):
            command(place, f"--workdir={tmp_path}/c", *words, photos="photos/train")


@pytest.mark.slow
def test_folds_score_all_images(place, tmp_path, capsys):
    words = [f"--workdir={tmp_path / 'folds'}", "--minutes=0"]
    words += ["--config.total_steps=2"]
    (place / "tested").mkdir()  # Test images are not those of the folds.
    for name, split in (("train", "train"), ("test", "val")):
        (place / "tested" / name).symlink_to(place / "photos" / split)
    assert command(place, *words, "--folds=2", photos="tested") == 0
    out = capsys.readouterr().out
    assert (
        "on 19 images, each scored by the one of 2 runs that was not trained on it"
        in out
    )
    runs = (tmp_path / "folds", tmp_path / "folds" / "folds" / "1")
    validated = [{row["image"] for row in _validated(run)} for run in runs]
    assert not validated[0] & validated[1]
    assert len(validated[0] | validated[1]) == 19
    with pytest.raises(UserError, match="another command.*--folds"):
        command(place, *words, photos="tested")


def _validated(run):
    with (run / "split.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["split"] == "val"]


@pytest.mark.slow
def test_a_table_of_several_labels_and_a_rectangle_is_covered_and_cropped(
    place, tmp_path
):
    table = tmp_path / "several.csv"
    paths = sorted((place / "photos").rglob("*.png"))
    lines = ["file,tags,split"]
    for i, path in enumerate(paths):
        tags = ("red|round", "red", "", "round")[i % 4]
        split = "val" if i % 4 > 1 else "train"
        written = path.relative_to(place / "photos").with_suffix("")
        lines.append(f"{written},{tags},{split}")
    table.write_text("\n".join(lines))
    given = {"model": place / "weights.safetensors", "minutes": 0, "tell": str}
    keys = {"total_steps": 2, "data.image_size": (24, 40)}
    keys |= {"data.image_dir": str(place / "photos"), "data.image_suffix": ".png"}
    result = vit_jax.finetune(table, tmp_path / "run", **given, **keys)
    assert (result.metric, result.interval) == ("map", None)
    assert 0 < result.score <= 1
    assert "mean average precision" in finetuning.summary(result)[0]
    page = (tmp_path / "run" / "report.html").read_text()
    assert re.search(r"\d of the validation images show the same picture", page)
    folder = place / "photos"
    given = f"--image_key=file --out=twins.txt --image_dir={folder} --image_suffix=.png"
    assert given in page
    assert ">round</th>" in page and "Confused classes" not in page
    model = vit_jax.load_model(str(tmp_path / "run"), tell=lambda line: None)
    assert model.class_names == ("red", "round")
    config = json.loads((tmp_path / "run" / "finetune.json").read_text())
    line = "resize_small((27, 45), interpolation='bilinear') | central_crop"
    assert config["data"]["eval_transform"] == line
    how = model.preprocessing
    assert (how.image_size, how.short_side, how.squash) == ((24, 40), False, False)
    assert how.crop_fraction == 24 / 27


def test_what_is_chosen_is_what_is_trained_and_keys_come_first(place, tmp_path, chosen):
    words = ["--minutes=0", "--config.batch_size=8", "--config.data.image_size=(16,16)"]
    words += ["--config.optim.learning_rate=0.5", "--config.ema.decay=0"]
    config = chosen(place, f"--workdir={tmp_path / 'a'}", *words)
    assert (config.batch_size, config.data.image_size) == (8, (16, 16))
    assert (config.optim.learning_rate, config.ema.decay) == (0.5, 0)
    assert config.total_steps == 300 * 16 / 8  # As many images as in 300 steps of 16.
    # No step was taken there: another command may take its place.
    words[1] = "--config.batch_size=5"
    assert chosen(place, f"--workdir={tmp_path / 'a'}", *words).batch_size == 5
    config = chosen(place, f"--workdir={tmp_path / 'b'}", "--config.epochs=2")
    assert (config.epochs, config.total_steps) == (2, 0)
    for key, more in itertools.product(
        ("init=a", "data.split=train", "evals.val=x"), ([], ["--find_rate"])
    ):
        words = [f"--workdir={tmp_path / 'c'}", f"--config.{key}", *more]
        with pytest.raises(UserError, match=f"{key.split('=')[0]}: .* sets it here"):
            command(place, *words)
    assert not (tmp_path / "c").exists()


def test_a_start_that_failed_leaves_its_workdir_to_another_command(
    place, tmp_path, monkeypatch
):
    keys = {"model": place / "weights.safetensors", "minutes": 0, "tell": str}
    keys |= {"total_steps": 1, "model.num_register_tokens": 2}
    with pytest.raises(
        UserError, match=r"register_tokens is missing; .*allow_mismatch"
    ):
        vit_jax.finetune(place / "photos", tmp_path, **keys)
    keys |= {"seed": 3, "init.allow_mismatch": ("register_tokens",)}
    configs = []
    monkeypatch.setattr(loop, "train", lambda config, *_, **__: configs.append(config))
    with pytest.raises(TypeError):  # There is no report.
        vit_jax.finetune(place / "photos", tmp_path, **keys)
    assert (configs[0].seed, configs[0].model.num_register_tokens) == (3, 2)


def test_a_task_learns_from_what_the_images_have(place, tmp_path):
    mask_folder.write(tmp_path / "set", 6)
    for photos, weights, name, annotation in (
        ("set", place, "classification", "masks"),
        ("photos", None, "segmentation", "labels"),
        ("photos", None, "mae", "labels"),
    ):
        words = [f"--workdir={tmp_path / 'w'}", f"--config.task.name={name}"]
        with pytest.raises(UserError, match=f"task.name='{name}' .*{annotation}"):
            root = tmp_path if weights else place
            command(root, *words, photos=photos, weights=weights)
    words = [f"--workdir={tmp_path / 'w'}", "--calibrate"]
    with pytest.raises(UserError, match="--calibrate: these images have masks"):
        command(tmp_path, *words, photos="set", weights=place)


@pytest.mark.slow
def test_two_folders_of_images_and_masks(place, tmp_path, capsys):
    mask_folder.write(tmp_path, 10, "photos", "drawn")
    (tmp_path / "classes.txt").write_text("\n".join(mask_folder.NAMES))
    run, masks = tmp_path / "run", str(tmp_path / "drawn")
    words = [masks, f"--workdir={run}", "--minutes=0", "--config.total_steps=2"]
    words += ["--config.task.head=linear", "--config.optim.learning_rate=0.1"]
    # The page resizes as the evaluations do, whose filter is not the usual one.
    words += ["--config.data.eval_transform=resize_small(32, 'box') | central_crop(32)"]
    assert command(tmp_path, *words, weights=place) == 0
    out = capsys.readouterr().out
    for line in (
        "8 images of 3 classes (2 to validate on)",
        "3 classes of pixels (from their names; 2.5% of the pixels are 255",
        "data.image_size         images of 32 pixels",
        "optim.layer_decay       each layer's learning rate is 0.75 times",
        "the best checkpoint by val/miou",
        "(without an interval; always the most frequent class: ",
        "%) on 2 images of val, which also chose",
        f"masks:     python -m vit_jax.predict --model={run} --out=MASKS IMAGES",
    ):
        assert line in out
    report = json.loads((run / "report.json").read_text())
    scores = report["final"]["val"]["ema"]
    assert f"mean IoU {scores['miou']:.2%}, pixel accuracy" in out
    worst = min(mask_folder.NAMES, key=lambda name: scores[f"iou/{name}"])
    assert f"worst:     {worst} {scores[f'iou/{worst}']:.1%}" in out
    page = (run / "report.html").read_text()
    assert page.count('src="data:image/jpeg') == 2 * 3
    for name in mask_folder.NAMES:
        assert re.search(rf">{name}<.*?>{scores[f'iou/{name}']:.1%}<", page, re.DOTALL)
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    # The same command only evaluates; other masks are another command.
    assert command(tmp_path, *words, weights=place) == 0
    assert "resuming with the settings chosen before" in capsys.readouterr().out
    mask_folder.write(tmp_path, 10, "photos", "others")
    with pytest.raises(UserError, match="another command.*mask_key"):
        command(tmp_path, str(tmp_path / "others"), *words[1:], weights=place)


def test_images_that_keep_their_aspect_have_as_many_patches(place, tmp_path, chosen):
    config = chosen(place, "--aspect=keep", "--minutes=0", f"--workdir={tmp_path}")
    tokens = config.data.image_size[0] * config.data.image_size[1] // 8**2
    for line in (config.data.train_transform, config.data.eval_transform):
        assert line.startswith(f"naflex({tokens}, patch=8")
    with pytest.raises(UserError, match="aspect='wide'"):
        command(place, f"--workdir={tmp_path}", "--aspect=wide")


@pytest.mark.slow
def test_images_of_any_aspect_become_a_model(place, tmp_path):
    words = [f"--workdir={tmp_path}", "--minutes=0", "--config.total_steps=2"]
    assert command(place, *words, "--aspect=keep") == 0
    model = vit_jax.load_model(tmp_path, tell=lambda line: None)
    assert (model.preprocessing.max_tokens, model.preprocessing.patch) == (16, 8)
    assert 'src="data:image/jpeg' in (tmp_path / "report.html").read_text()
    with pytest.raises(UserError, match="another command.*--aspect"):
        command(place, *words)


@pytest.mark.slow
def test_shapes_on_noise_are_learnt_to_the_pixel(place, tmp_path):
    root, run, lines = tmp_path / "set", tmp_path / "run", []
    mask_folder.write(root, 50, "photos", "drawn")
    keys = {"epochs": 50, "task.width": 16, "optim.learning_rate": 0.005}
    result = vit_jax.finetune(
        root / "photos",
        run,
        masks=root / "drawn",
        model=place / "weights.safetensors",
        minutes=0,
        tell=lines.append,
        **keys,
    )
    assert "40 images of 3 classes (10 to validate on)" in "\n".join(lines)
    assert (result.metric, result.interval) == ("miou", None)
    assert result.score > 0.8 and result.scores["iou/1"] > 0.7
    worst = f"class 1 {result.scores['iou/1']:.1%}"
    assert any(worst in line for line in finetuning.summary(result))
    model = vit_jax.load_model(str(run), tell=lambda line: None)
    image, mask = mask_folder.pair(np.random.default_rng(99))
    assert (model.segment(image) == mask).mean() > 0.9


def test_a_frozen_network_has_no_layer_decay(place, tmp_path, capsys, chosen):
    mask_folder.write(tmp_path / "set", 6)
    words = [
        f"--workdir={tmp_path / 'run'}",
        "--minutes=0",
        "--config.task.frozen=True",
    ]
    config = chosen(tmp_path, *words, photos="set", weights=place)
    assert (config.task.frozen, config.optim.layer_decay, config.ema.decay) == (
        True,
        0,
        0,
    )
    out = capsys.readouterr().out
    assert (
        "only the head is trained" in out and "one learning rate for all layers" in out
    )


@pytest.mark.slow
def test_folds_of_masks(place, tmp_path, capsys):
    mask_folder.write(tmp_path / "set", 6)
    words = [f"--workdir={tmp_path / 'run'}", "--minutes=0", "--config.total_steps=2"]
    words += ["--config.task.width=8", "--folds=2"]
    assert command(tmp_path, *words, photos="set", weights=place) == 0
    out = capsys.readouterr().out
    assert (
        "on 6 images, each scored by the one of 2 runs that was not trained on it"
        in out
    )


@pytest.mark.slow
def test_the_same_photographs_train_the_same_model_wherever_they_lie(place, tmp_path):
    photos = tmp_path / "photos"
    shutil.copytree(place / "photos" / "train", photos)
    # One damaged image ends nothing.
    (photos / "ant" / "8.png").write_bytes(b"no image")

    def sha_of(photos, run):
        given = {"model": place / "weights.safetensors", "minutes": 0, "tell": str}
        result = vit_jax.finetune(str(photos), str(run), total_steps=2, **given)
        return result.report["params_sha256"]

    sha = sha_of(photos, tmp_path / "run")
    moved = tmp_path / "elsewhere" / "Pictures"
    moved.parent.mkdir()
    photos.rename(moved)
    (tmp_path / "run").rename(tmp_path / "renamed")
    assert sha_of(moved, tmp_path / "deeper" / "and" / "run") == sha
    # The run that has moved too resumes: the images are what they were.
    assert sha_of(moved, tmp_path / "renamed") == sha
    (moved / "ant" / "0.png").write_bytes((moved / "bee" / "0.png").read_bytes())
    moved.rename(photos.with_name("others"))
    with pytest.raises(UserError, match="with another command.*others"):
        sha_of(photos.with_name("others"), tmp_path / "renamed")


@pytest.mark.slow
def test_photographs_weights_learn_images_of_bands(place, capsys):
    rng = np.random.default_rng(0)
    for split, count in {"train": 12, "val": 4}.items():
        for name, level in {"dry": 2_500, "wet": 5_500}.items():
            folder = place / "bands" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                image = rng.normal(level, 300, (20, 20, 5)).clip(0).astype(np.uint16)
                np.save(folder / f"{i}.npy", image)
    run = place / "of_bands"
    keys = {"channels": 5, "pixels": "uint16", "mean": "estimate", "std": "estimate"}
    words = [f"--config.data.{key}={value}" for key, value in keys.items()]
    words += ["--minutes=0", "--config.total_steps=6", f"--workdir={run}"]
    assert command(place, *words, photos="bands") == 0
    model = vit_jax.load_model(str(run), tell=lambda line: None)
    assert model.model.image_shape[-1] == 5 and len(model.preprocessing.mean) == 5
    assert f"mistakes:  {run / 'report.html'}" in capsys.readouterr().out
