"""`python -m vit_jax.evaluate`, on a small model with random parameters."""

import csv
import dataclasses
import json
import pathlib
import shutil

import hosts
import jax
import numpy as np
import pytest
from helpers import (
    TINY,
    random_weights,
    run_command,
    tiny_config,
    write_weights,
)
from PIL import Image

from vit_jax import models
from vit_jax.data import imagenet
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.evaluators import checkpoint, result_tables
from vit_jax.training import config as configuration
from vit_jax.training import loop
from vit_jax.weights import open_pretrained
from vit_jax.weights.formats import native

ROOT = pathlib.Path(__file__).parents[1]
NAMES = ("ant", "bee", "cat")
OPTIONS = TINY | {"variant": "Ti/8", "num_classes": 3, "image_size": (16, 24)}
PREPROCESS = Preprocess(
    (16, 24), (0.4, 0.5, 0.6), (0.2, 0.3, 0.25), "bicubic", crop_fraction=0.9
)
SIZES = {"train": 41, "val": 23}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the model, and with photographs of three kinds in two splits."""
    folder = tmp_path_factory.mktemp("evaluate")
    model, rng = models.create(**OPTIONS), np.random.default_rng(1)
    pretrained = random_weights(model, seed=2, preprocess=PREPROCESS, class_names=NAMES)
    pretrained.params["head"]["bias"] *= 0
    native.write(pretrained, folder / "tiny.safetensors")
    for split, count in SIZES.items():
        for i in range(count):
            name = NAMES[i % 3]
            where = folder / "photos" / split / name
            where.mkdir(parents=True, exist_ok=True)
            noise = rng.integers(0, 90, (29, 41 + i, 3), dtype=np.uint8)
            noise[:, :, i % 3] += rng.integers(0, 160, dtype=np.uint8)
            Image.fromarray(noise).save(where / f"{i}.png")
    return folder


def words(place, recipe, *more, data="photos", model="tiny.safetensors"):
    data = place / data if data == "photos" else data
    return [
        f"--model={place / model}",
        f"--config={ROOT}/configs/eval/{recipe}.py:data={data}",
        *more,
    ]


@pytest.fixture
def run(place, capsys):
    """Runs the verb in this process: recipe and words -> stdout, stderr."""

    def start(recipe, *more, **keys):
        run_command("evaluate", words(place, recipe, *more, **keys))
        return capsys.readouterr()

    return start


def test_few_shot_and_neighbours_end_with_a_line_of_json(run):
    out, _ = run("fewshot", "--json", "--config.evals.fewshot.shots=(1, 5, 25)")
    found = json.loads(out.splitlines()[-1])
    assert list(found) == ["fewshot", "knn"]
    assert list(found["fewshot"]) == ["1", "5", "25"]
    for shots, values in found["fewshot"].items():
        assert 0.2 < values["mean"] <= 1, shots
        # No class has 25: each draw is all there is.
        assert (values["std"] < 1e-9) == (shots == "25")
    assert found["fewshot"]["25"]["short"] == 3
    assert "short" not in found["fewshot"]["5"]
    assert found["fewshot"]["5"]["mean"] > 0.5
    assert 0.3 < found["knn"] <= 1
    out, _ = run("knn", "--json")
    assert json.loads(out.splitlines()[-1]) == {"knn": found["knn"]}


def test_classification_writes_numbers_and_a_picture(run, place, tmp_path, capsys):
    out, err = run("classification", f"--out={tmp_path}/deep/out")
    report = json.loads((tmp_path / "deep/out/evaluate.json").read_text())
    assert report["kind"] == "evaluate"
    assert (report["variant"], report["config"]) == ("Ti/8", "classification")
    assert report["preprocess"] == json.loads(json.dumps(vars(PREPROCESS)))
    photos = {"dataset": "photos", "data_dir": str(place / "photos")}
    assert report["evals"] == {
        "test": {"kind": "classification", "splits": ["val"], "match_classes": "names"}
        | photos
    }
    metrics = report["results"]["test"]["weights"]
    assert metrics["examples"] == 23
    assert f"{metrics['top1']:.2%}" in out
    assert "least accurate" in out
    assert "test_confusion.png" in err
    with Image.open(tmp_path / "deep/out/test_confusion.png") as picture:
        assert picture.format == "PNG"
    numbers = (tmp_path / "deep/out/test_confusion.csv").read_text()
    rows = list(csv.reader(numbers.splitlines()))
    assert [row[0] for row in rows] == ["class", *NAMES]
    assert sum(int(n) for row in rows[1:] for n in row[3:]) == 23
    hits = sum(int(rows[i + 1][3 + i]) for i in range(3))
    assert 0 < hits < 23
    assert hits / 23 == pytest.approx(metrics["top1"])
    # As `predict` says it of each image.
    words = ["--json", "--topk=1", f"--model={place / 'tiny.safetensors'}"]
    run_command("predict", [*words, place / "photos" / "val"])
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    right = [x["predictions"][0]["name"] == x["file"].split("/")[-2] for x in lines]
    assert metrics["top1"] == pytest.approx(np.mean(right))


@pytest.mark.slow
def test_tokens_are_merged(run, two, tmp_path):
    reports = []
    for count in (0, 2):
        run("fewshot", f"--token_merging={count}", f"--out={tmp_path}", **two)
        reports.append(json.loads((tmp_path / "evaluate.json").read_text()))
    assert [report["token_merging"] for report in reports] == [0, 2]


def test_what_was_evaluated_is_written(run, tmp_path):
    more = [f"--out={tmp_path}", "--config.evals.fewshot.shots=(1, 2)"]
    run("fewshot", *more, data="digits,train=train[:80],seeds=2,l2=64")
    report = json.loads((tmp_path / "evaluate.json").read_text())
    digits = {"dataset": "digits", "splits": ["train[:80]", "test"]}
    few = {"kind": "fewshot", "shots": [1, 2], "seeds": 2, "l2": [64.0]} | digits
    knn = {"kind": "knn", "k": 20, "temperature": 0.07} | digits
    assert report["evals"] == {"fewshot": few, "knn": knn}


@pytest.fixture
def changed(place, tmp_path):
    """Writes the model with other class names or parameters; returns where."""

    def write(change=lambda params: None, **fields):
        found = open_pretrained(place / "tiny.safetensors")
        params = jax.tree.map(np.array, found.params)
        change(params)
        path = tmp_path / "changed.safetensors"
        native.write(dataclasses.replace(found, params=params, **fields), path)
        return path

    return write


def test_classes_in_another_order_are_matched_by_name(run, changed, tmp_path):
    usual, _ = run("classification", "--json")

    def turn(params):
        params["head"] = {k: np.roll(v, 1, -1) for k, v in params["head"].items()}

    path = changed(turn, class_names=("Cat", "ant", "bee"))
    out, err = run("classification", "--json", f"--out={tmp_path}/out", model=path)
    found, expected = (json.loads(x)["test"] for x in (out, usual))
    assert found == pytest.approx(expected, rel=1e-5)
    assert "folder val: the model's 3 classes, matched by names" in err
    numbers = (tmp_path / "out/test_confusion.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in numbers] == ["class", "Cat", "ant", "bee"]
    assert [int(row.split(",")[1]) for row in numbers[1:]] == [7, 8, 8]


def test_a_name_that_the_model_lacks_is_an_error(run, changed, capsys):
    usual, told = run("classification", "--json")
    assert "class" not in told
    path = changed(class_names=("ant", "beetle", "dog"))
    by = "--config.evals.test.match_classes=position"
    with pytest.raises(UserError, match=f"lack 2 .*'beetle'.*'cat' .*{by}"):
        run("classification", "--json", model=path)
    assert not capsys.readouterr().out
    out, err = run("classification", "--json", by, model=path)
    assert json.loads(out) == json.loads(usual)
    assert "class k is taken as the model's class k, in the order ant, bee, cat" in err


def renamed(place, root, names):
    """Copies the test images into folders of other names; returns the folder."""
    for old, new in zip(NAMES, names, strict=True):
        shutil.copytree(place / "photos/val" / old, root / new)
    return root


def spread(params, kept, num_classes, best=None):
    """Gives a classifier more classes, of which those of `kept` are the ones it has."""
    for key, value in params["head"].items():
        more = np.zeros((*value.shape[:-1], num_classes), np.float32)
        more[..., kept] = value
        if best is not None:
            more[..., best] = 1e3 * (key == "bias")
        params["head"][key] = more


def test_folders_of_numbers_are_numbers_of_classes(run, place, changed, tmp_path):
    usual, _ = run("classification", "--json")
    path = changed(
        lambda params: spread(params, [0, 2, 10], 11),
        options=OPTIONS | {"num_classes": 11},
        class_names=tuple("abcdefghijk"),
    )
    # In text order 10 stands before 2.
    photos = renamed(place, tmp_path / "numbers", ("0", "2", "10"))
    out, err = run("classification", "--json", model=path, data=photos)
    found, expected = (json.loads(x)["test"] for x in (out, usual))
    assert found.pop("classes") == 3
    assert found == pytest.approx(expected, rel=1e-5)
    assert "3 of the model's 11 classes, matched by class numbers" in err


def test_wordnet_folders_are_classes_of_imagenet(run, place, changed, tmp_path):
    usual, _ = run("classification", "--json")
    kept = [0, 3, 9]
    path = changed(
        lambda params: spread(params, kept, 1000, best=500),
        options=OPTIONS | {"num_classes": 1000},
        class_names=(),
    )
    synsets = [imagenet.synsets()[k] for k in kept]
    photos = renamed(place, tmp_path / "wordnet", synsets)
    more = ["--json", f"--out={tmp_path}/out"]
    out, err = run("classification", *more, model=path, data=photos)
    found, expected = (json.loads(x)["test"] for x in (out, usual))
    assert found.pop("classes") == 3
    assert found == pytest.approx(expected, rel=1e-4)
    assert "3 of the model's 1,000 classes, matched by WordNet ids" in err
    assert "only_present_classes=True" in err
    table = (tmp_path / "out/test_confusion.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in table] == ["class", *synsets]
    # Any of the 1,000 may be answered by a flag or a key.
    flag = "--only_present_classes=false"
    for word in (flag, "--config.evals.test.only_present_classes=False"):
        out, err = run("classification", "--json", word, model=path, data=photos)
        every = json.loads(out)["test"]
        assert every["top1"] == 0
        assert "classes" not in every
        assert "only_present_classes=False" in err


def test_only_labels_that_occur_may_be_answered(run, place, tmp_path):
    photos = tmp_path / "photos"
    shutil.copytree(place / "photos", photos)
    shutil.rmtree(photos / "val/bee")
    usual = json.loads(run("classification", "--json", data=photos).out)["test"]
    flag = "--only_present_classes"
    fewer = json.loads(run("classification", "--json", flag, data=photos).out)["test"]
    assert "classes" not in usual
    assert fewer["classes"] == 2
    assert fewer["top1"] > usual["top1"]
    assert fewer["examples"] == usual["examples"] == 15
    with pytest.raises(UserError, match="--only_present_classes: .* leave the flag o"):
        run("fewshot", flag)


@pytest.mark.slow
def test_a_run_matches_the_classes_of_another_set(place, tmp_path):
    # Cat comes first.
    other = renamed(place, tmp_path / "other", ("ant", "bee", "Cat"))

    def scores(images):
        folder = {"kind": "classification", "name": "folder", "split": "all"}
        same = folder | {"data_dir": str(place / "photos/val")}
        model = {k: OPTIONS[k] for k in ("variant", "width", "depth", "num_heads")}
        data = {"name": "folder", "data_dir": str(place / "photos"), "num_classes": 3}
        data |= {"image_size": OPTIONS["image_size"], "num_examples": 0}
        config = tiny_config(
            total_steps=1,
            data=data | {"train_transform": "resize", "eval_transform": "resize"},
            model=model | {"mlp_dim": OPTIONS["mlp_dim"]},
            evals={"same": same, "other": folder | {"data_dir": str(images)}},
        )
        report = loop.train(config, tmp_path / f"run_{images.name}")
        return [report["final"][name]["params"] for name in ("same", "other")]

    expected, found = scores(other)
    assert found == pytest.approx(expected, rel=1e-5)
    (other / "Cat").rename(other / "zebra")
    with pytest.raises(UserError, match="evals.other: .* lack 1 of 3: 'zebra'"):
        scores(other.rename(tmp_path / "third"))


def test_features_of_train_and_test_have_the_same_classes(run, place, tmp_path):
    more = "--json", "--config.evals.fewshot.seeds=1"
    usual = json.loads(run("fewshot", *more).out)["knn"]
    # Neither folder is called train: each says what its own classes are.
    shutil.copytree(place / "photos/train", tmp_path / "one")
    renamed(place, tmp_path / "two", ("ant", "Bee", "cat"))
    data = f"{tmp_path},train=one,test=two"
    assert json.loads(run("fewshot", *more, data=data).out)["knn"] == usual
    (tmp_path / "two/ant").rename(tmp_path / "two/zebra")
    with pytest.raises(UserError, match="zebra"):
        run("fewshot", *more, data=data)


@pytest.mark.parametrize(
    ("recipe", "where", "message"),
    [
        ("classification", "head", "the outputs are not finite for 23 of 23 images of"),
        ("probe", "embedding", "the features are not finite for 41 of 41 images of"),
        ("fewshot", "embedding", "the features are not finite for .* folder train"),
    ],
)
def test_numbers_that_are_not_finite_get_no_score(
    run, changed, capsys, recipe, where, message
):
    def spoil(params):
        params[where]["bias"][1] = np.nan

    more = ["--json"] if recipe != "fewshot" else []
    with pytest.raises(UserError, match=message):
        run(recipe, *more, model=changed(spoil))
    assert not capsys.readouterr().out


def test_images_left_out_are_counted_beside_the_scores(run, place, tmp_path):
    photos = tmp_path / "photos"
    shutil.copytree(place / "photos", photos)
    (photos / "val/bee/1.png").write_bytes(b"no image")
    more = ["--json", "--config.data.on_error=skip"]
    out, _ = run("fewshot", *more, data=f"{photos},seeds=2")
    assert json.loads(out)["skipped"] == {"fewshot": 1, "knn": 1}
    assert "skipped" not in json.loads(run("classification", "--json").out)


def test_a_folder_of_class_folders_is_split_as_given(run, place, tmp_path):
    alone = place / "photos/train"
    run("classification", f"--out={tmp_path}", data=alone)
    report = json.loads((tmp_path / "evaluate.json").read_text())
    assert report["evals"]["test"]["splits"] == ["all"]
    assert report["results"]["test"]["weights"]["examples"] == 41
    # What is learnt is tested on the part that training would set aside.
    run("fewshot", f"--out={tmp_path}", data=f"{alone},seeds=2")
    report = json.loads((tmp_path / "evaluate.json").read_text())
    assert report["evals"]["knn"]["splits"] == ["train", "val"]
    cut = f"{alone},train=all[:50%],test=even_splits(all, 2)[1],seeds=2"
    run("fewshot", f"--out={tmp_path}", data=cut)
    report = json.loads((tmp_path / "evaluate.json").read_text())
    splits = ["all[:50%]", "even_splits(all, 2)[1]"]
    assert report["evals"]["knn"]["splits"] == splits


def test_a_table_is_split_as_given(run, place, tmp_path):
    rows = {
        split: [f"{path},{path.parent.name}" for path in sorted(root.rglob("*.png"))]
        for split in SIZES
        if (root := place / "photos" / split)
    }

    def report(recipe, argument, header, lines):
        (tmp_path / "photos.csv").write_text("\n".join([header, *lines, ""]))
        data = f"{tmp_path}/photos.csv{argument}"
        run(recipe, f"--out={tmp_path}", data=data)
        return json.loads((tmp_path / "evaluate.json").read_text())

    whole = report("classification", "", "image,label", rows["val"])
    assert whole["evals"]["test"]["splits"] == ["all"]
    assert whole["results"]["test"]["weights"]["examples"] == 23
    lines = [f"{row},{split}" for split, found in rows.items() for row in found]
    for there in (lines, lines[SIZES["train"] :]):  # Both splits, and one alone.
        split = report("classification", "", "image,label,split", there)
        assert split["evals"]["test"]["splits"] == ["val"]
        # Their order is hashed from paths within the folder that a table has in common.
        found, expected = (r["results"]["test"]["weights"] for r in (split, whole))
        assert found == pytest.approx(expected, rel=1e-6)
    cut = ",train=all[:50%],test=all[50%:],seeds=2"
    found = report("fewshot", cut, "image,label", rows["train"])
    assert found["evals"]["knn"]["splits"] == ["all[:50%]", "all[50%:]"]


@pytest.mark.slow
def test_a_probe_and_flags_for_the_images(run):
    usual = json.loads(run("probe", "--json").out)["probe"]
    assert set(usual) == {"top1", "l2", "held_out_top1"}
    assert usual["top1"] > 0.6
    tops = run("classification", "--json").out
    assert run("classification", "--json", "--crop_pct=0.9").out == tops
    for other in ("--crop_pct=squash", "--resolution=24x32", "--mean=0.1,0.2,0.3"):
        assert run("classification", "--json", other).out != tops


@pytest.mark.parametrize(
    ("recipe", "more", "data", "message"),
    [
        ("classification", [], "digits", "evals.test: .* 3 classes lack 7 of 10: '3'"),
        ("fewshot", [], "absent", "data.name='absent': no such prepared TFDS data set"),
        ("fewshot", ["--resolution=20"], "photos", "height 20 is not a multiple of"),
        ("imagenet", [], "", "config argument 'data' is unknown"),
        ("fewshot", ["--config.seed=3"], "photos", "key seed is not read"),
        ("fewshot", ["--config.evals.knn.test=dev"], "photos", "dev"),
    ],
)
def test_what_does_not_fit_is_one_line(run, recipe, more, data, message):
    with pytest.raises(UserError, match=message):
        run(recipe, *more, data=data)


@pytest.mark.parametrize("out", ["file", "file/out"])
def test_a_folder_that_cannot_be_written_is_refused_first(
    run, tmp_path, monkeypatch, out
):
    monkeypatch.delattr(checkpoint, "evaluate")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"--out=.*{out} cannot be written"):
        run("classification", f"--out={tmp_path}/{out}")


def test_a_disk_that_fails_at_the_end_costs_no_result(
    run, tmp_path, monkeypatch, capsys
):
    def full(table):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(result_tables, "draw_confusion", full)
    with pytest.raises(UserError, match="--out=.* cannot be written .No space left"):
        run("classification", "--json", f"--out={tmp_path}")
    assert json.loads(capsys.readouterr().out)["test"]["examples"] == 23


def start(place, count, devices, *more, own_words=((), ())):
    """Starts the verb as so many processes with so many devices each."""
    known = hosts.variables(count, XLA_FLAGS=hosts.xla_flags(devices))
    line = lambda host: [*words(place, *more), *own_words[host]]
    return hosts.start(line, count, known, verb="evaluate")


def finish(processes):
    ends = [process.communicate(timeout=200) for process in processes]
    assert [p.returncode for p in processes] == [0] * len(processes), ends
    return [out for out, _ in ends]


@pytest.mark.slow
def test_two_hosts_give_what_one_gives(place):
    more = ["--json", "--config.batch_size=6", "--config.evals.probe.kind=probe"]
    more += ["--config.evals.test.kind=classification", "--config.evals.test.split=val"]
    (alone,) = finish(start(place, 1, 1, "fewshot", *more))
    first, second = finish(start(place, 2, 3, "fewshot", *more))
    assert "{" not in second
    one, two = (json.loads(out.splitlines()[-1]) for out in (alone, first))
    for name in ("test", "probe"):
        assert two.pop(name) == pytest.approx(one[name], rel=1e-5)
    assert one.pop("test")["examples"] == 23
    assert one.pop("probe").keys() >= {"top1"}
    assert one == two
    assert one["fewshot"]["1"]["std"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["weights", "data", "preprocess"])
def test_hosts_with_other_weights_or_data_are_refused(place, tmp_path, kind):
    word, key = "--crop_pct=squash", "squash"
    if kind == "weights":
        found = open_pretrained(str(place / "tiny.safetensors"))
        found.params["head"]["bias"] = found.params["head"]["bias"] + 1
        native.write(found, tmp_path / "other.safetensors")
        word, key = f"--model={tmp_path / 'other.safetensors'}", "sha256"
    elif kind == "data":
        shutil.copytree(place / "photos", tmp_path / "photos")
        (image, *_) = (tmp_path / "photos/val/ant").iterdir()
        image.rename(image.with_name("another.png"))
        word, key = f"--config.data.data_dir={tmp_path / 'photos'}", "names_sha256"
    processes = start(place, 2, 1, "classification", own_words=((), (word,)))
    for error in hosts.ends(processes, 2):
        line = error.splitlines()[-1]
        assert f"the hosts differ in {kind}: " in line and f"{key} is " in line
        assert "Traceback" not in error


@pytest.mark.slow
def test_a_host_with_bad_input_ends_both_with_its_line(place):
    processes = start(place, 2, 1, "fewshot", "--config.evals.knn.test=dev")
    assert all("dev" in error for error in hosts.ends(processes, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "ops",
    [
        "resize_small(28)",
        "resize((20, 30))",
        "resize_small((18, 27))",
        "resize_small(12) | pad",
    ],
)
def test_a_run_and_its_evaluation_afterwards_give_the_same_loss(
    place, tmp_path, capsys, ops
):
    # Of photographs of 29 rows and 41 to 81 columns, whose margins are even and odd.
    names = "variant", "width", "depth", "num_heads", "mlp_dim"
    model = {name: OPTIONS[name] for name in names}
    data = {"name": "folder", "data_dir": str(place / "photos"), "num_classes": 3}
    data |= {
        "image_size": OPTIONS["image_size"],
        "train_transform": "random_resized_crop",
        "eval_transform": f"{ops} | central_crop",
    }
    sizes = {"total_steps": 2, "batch_size": 8, "optim": {"learning_rate": 1e-2}}
    more = {"ema": {"decay": 0.5}, "evals": {"val": "val"}, "data": data}
    loop.train(configuration.complete(sizes | more | {"model": model}), tmp_path)
    trained = json.loads((tmp_path / "report.json").read_text())["final"]["val"]
    capsys.readouterr()
    for raw, kind in ((["--no_ema"], "params"), ([], "ema")):
        arguments = words(place, "classification", "--json", *raw, model=tmp_path)
        run_command("evaluate", arguments)
        found = json.loads(capsys.readouterr().out.splitlines()[-1])["test"]
        assert found["loss"] == pytest.approx(trained[kind]["loss"], rel=1e-5)
        assert found["top1"] == trained[kind]["top1"]
    run_command("evaluate", [f"--model={tmp_path}", "--json"])  # Its own evaluations.
    again = json.loads(capsys.readouterr().out.splitlines()[-1])["val"]
    assert again["loss"] == pytest.approx(trained["ema"]["loss"], rel=1e-5)
    with pytest.raises(UserError, match="no evaluations"):
        run_command("evaluate", [f"--model={tmp_path}", "--config.evals.val=None"])


@pytest.fixture(scope="module")
def two(place):
    """Weights of two layers."""
    options = OPTIONS | {"depth": 2}
    write_weights(place / "two.safetensors", NAMES, PREPROCESS, **options)
    return {"model": "two.safetensors"}


@pytest.mark.slow
def test_evaluations_of_features_are_repeated_by_layer(run, two, tmp_path):
    _, err = run("layers", "--layers", f"--out={tmp_path}", **two)
    report = json.loads((tmp_path / "evaluate.json").read_text())
    names = [f"{kind}_layer{i}" for kind in ("knn", "probe") for i in range(2)]
    assert [*report["results"]] == names
    assert report["evals"]["knn_layer1"]["layers"] == [1]
    picture = np.load(tmp_path / "layers.npz")
    assert picture["layers"].tolist() == [0, 1]
    top1 = [report["results"][name]["weights"]["top1"] for name in names[:2]]
    np.testing.assert_allclose(picture["knn top1"], np.multiply(100, top1))
    assert {*picture.files} == {"layers", "knn top1", "probe top1"}
    assert "layers.png" in err and (tmp_path / "layers.svg").stat().st_size
    # What the classifier sees is the last layer here.
    (line,) = run("layers", "--json", **two)[0].splitlines()
    found = json.loads(line)
    assert found["knn"] == pytest.approx(top1[1])
    words = "--json", "--tta=flip", "--config.evals.knn.layers=(0, -1)"
    (line,) = run("layers", *words, **two)[0].splitlines()
    assert 0 < json.loads(line)["knn"] <= 1


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        ("layers", ["--layers=2"], "layers=2: Ti/8 has 2 layers"),
        ("classification", ["--layers"], "--layers: .* no evaluation of features"),
        ("layers", ["--config.evals.knn.layers=(0, 7)"], "layers=7: Ti/8"),
        ("layers", ["--layers", "--token_merging=1"], "token_merging=1: merged"),
    ],
)
def test_layers_that_do_not_fit_are_refused(run, two, recipe, words, message):
    with pytest.raises(UserError, match=message):
        run(recipe, *words, **two)
