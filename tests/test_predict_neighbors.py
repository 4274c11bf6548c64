"""`predict --neighbors`: the nearest labelled images vote, with and without a classifier."""

import dataclasses
import json

import numpy as np
import pytest
from helpers import TINY, random_weights, run_command
from PIL import Image

import vit_jax
from vit_jax import models
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.tools.finetuning import layout
from vit_jax.weights.formats import native

OPTIONS = TINY | {"variant": "Ti/8", "num_classes": 0, "image_size": (16, 24)}
CLASSES = ("ant", "bee", "cat")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Weights without a classifier, labelled images and two others."""
    folder, rng = tmp_path_factory.mktemp("neighbors"), np.random.default_rng(0)
    found = random_weights(
        models.create(**OPTIONS), "tiny", preprocess=Preprocess((16, 24), squash=True)
    )
    native.write(
        dataclasses.replace(found, options=OPTIONS), folder / "tiny.safetensors"
    )
    for number, name in enumerate(CLASSES):
        (folder / "labelled" / name).mkdir(parents=True)
        for i in range(3):
            _save(rng, 70 * number, folder / "labelled" / name / f"{i}.png")
    (folder / "images").mkdir()
    for i in range(2):
        _save(rng, 70 * i, folder / "images" / f"{i}.png")
    return folder


def _save(rng, brightness, path):
    pixels = brightness + rng.integers(0, 100, (18, 27, 3))
    Image.fromarray(pixels.astype(np.uint8)).save(path)


@pytest.fixture(scope="module")
def model(place):
    return vit_jax.load_model(place / "tiny.safetensors", tell=lambda line: None)


def direct(model, place, image, k):
    """Returns the shares of the votes and the names of the voters, one image at a time."""
    paths = [
        str(place / "labelled" / name / f"{i}.png")
        for name in CLASSES
        for i in range(3)
    ]
    known = np.stack([model.features(path) for path in paths])[:, 0].astype(np.float64)
    (one,) = model.features(image).astype(np.float64)
    similar = known @ one / (np.linalg.norm(known, axis=1) * np.linalg.norm(one))
    nearest = np.argsort(-similar)[:k]
    weights = np.exp(similar[nearest] / 0.07)
    shares = {}
    for i, weight in zip(nearest, weights, strict=True):
        share, names = shares.get(CLASSES[i // 3], (0.0, ()))
        shares[CLASSES[i // 3]] = share + weight / weights.sum(), (*names, paths[i])
    return shares


def run(place, capsys, *words):
    common = [f"--model={place / 'tiny.safetensors'}", str(place / "images")]
    code = run_command("predict", [*common, *words])
    end = capsys.readouterr()
    return code, end.out, end.err


def test_the_nearest_labelled_images_vote_and_are_named(place, model, capsys):
    labelled = f"--neighbors={place / 'labelled'}"
    code, out, _ = run(place, capsys, labelled, "--k=4", "--json")
    assert code == 0
    for line in map(json.loads, out.splitlines()):
        expected = direct(model, place, line["file"], 4)
        found = {x["name"]: x["probability"] for x in line["predictions"]}
        assert found == pytest.approx({k: v[0] for k, v in expected.items()}, rel=1e-4)
        assert list(found.values()) == sorted(found.values(), reverse=True)
        for one in line["predictions"]:
            assert tuple(one["images"]) == expected[one["name"]][1]
            assert CLASSES[one["label"]] == one["name"]
    code, out, _ = run(place, capsys, labelled, "--topk=1")
    head, *rows = map(str.split, out.splitlines())
    assert head == ["file", "votes", "class"]
    for file, share, _, name in rows:
        expected = direct(model, place, file, 20)  # All nine.
        assert name == max(expected, key=lambda one: expected[one][0])
        assert float(share) == pytest.approx(100 * expected[name][0], abs=0.006)


def test_python_gives_the_same(place, model):
    images = [str(place / "images" / f"{i}.png") for i in range(2)]
    found = model.predict(images, neighbors=place / "labelled", k=4)
    for image, best in zip(images, found, strict=True):
        expected = direct(model, place, image, 4)
        assert {x.name: x.images for x in best} == {
            k: v[1] for k, v in expected.items()
        }
        assert sum(x.probability for x in best) == pytest.approx(1)
    one = model.predict(images[0], neighbors=str(place / "labelled"), topk=1, k=99)
    assert [x.name for x in one] == ["ant"]
    sure = model.predict(images, neighbors=place / "labelled", threshold=0.2)
    assert all(x.probability >= 0.2 for best in sure for x in best)
    with pytest.raises(UserError, match="no classifier .*neighbors=FOLDER"):
        model.predict(images)


def test_tables_and_data_sets_have_labelled_images_too(place, model):
    rows = [f"{name}/{i}.png,{name}" for name in CLASSES for i in range(2)]
    table = place / "labelled" / "some.csv"
    table.write_text("\n".join(["image,label", *rows]))
    try:
        found = model.predict(place / "images" / "0.png", neighbors=table, k=1)
    finally:
        table.unlink()
    assert found[0].name == "ant"
    assert found[0].images[0].endswith(".png")
    source = layout.labelled_images("digits")
    assert len(source) > 1_000  # All of its training images.
    assert not (place / "split.csv").exists()


def test_images_of_one_class_each_are_enough(place):
    source = layout.labelled_images(str(place / "labelled"))
    assert len(source) == 9
    assert source.class_names == CLASSES


def test_damaged_labelled_images_are_named_and_left_out(place, model, capsys, tmp_path):
    for name in CLASSES[:2]:
        (tmp_path / name).mkdir()
        path = place / "labelled" / name / "0.png"
        (tmp_path / name / "0.png").write_bytes(path.read_bytes())
    (tmp_path / "ant" / "torn.png").write_bytes(path.read_bytes()[:200])
    code, out, err = run(place, capsys, f"--neighbors={tmp_path}", "--json")
    assert code == 1
    assert "ant/torn.png: cannot be decoded" in err
    assert len(out.splitlines()) == 2
    assert "torn" not in out
    with pytest.raises(UserError, match=r"ant/torn\.png: cannot be decoded"):
        model.predict(place / "images" / "0.png", neighbors=tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--k=3"], "--k=3 is the number of neighbours: set --neighbors"),
        (
            ["--neighbors=x", "--labels=a,b"],
            "--labels=a,b is not used with --neighbors",
        ),
        (["--neighbors=x", "--out=y"], "--out=y is not used with --neighbors"),
        (["--neighbors=./x"], r"\./x does not exist as a folder or table"),
        (["--neighbors=PLACE/images"], "images has no images in folders: give"),
    ],
)
def test_bad_input_is_told_in_one_line(place, capsys, words, message):
    words = [word.replace("PLACE", str(place)) for word in words]
    with pytest.raises(UserError, match=message):
        run(place, capsys, *words)
