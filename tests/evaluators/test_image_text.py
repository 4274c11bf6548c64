"""Zero-shot classification and retrieval."""

import hashlib
import json
import re
import shutil
import types

import numpy as np
import pytest
import trees
from helpers import ROOT, commands_of, run_command, tiny_config, train
from PIL import Image

import vit_jax
from configs.eval import zero_shot
from vit_jax.data import imagenet
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.evaluators import image_text
from vit_jax.weights import export

TEXT = {"width": 12, "depth": 1, "num_heads": 3, "mlp_dim": 20}
NAMES = ("ant", "bee", "cat")


def same(of_row, of_column):
    """Returns the pairs of rows and columns of equal numbers."""
    both = np.intersect1d(of_row, of_column)
    return np.stack([both, both])


def test_ranks_are_those_of_sorting():
    rng = np.random.default_rng(0)
    rows, columns = rng.normal(size=(9, 4)), rng.normal(size=(25, 4))
    of_row, of_column = np.arange(9), rng.integers(0, 8, 25)
    pairs = same(of_row, of_column)
    found = image_text.best_ranks(rows, columns, of_row, of_column, pairs)
    wanted = []
    for row, number in zip(rows, of_row, strict=True):
        order = np.argsort(-(columns @ row))
        places = np.flatnonzero(of_column[order] == number)
        wanted += places[:1].tolist()
    assert found.tolist() == wanted and len(wanted) == len(set(of_column.tolist()))


def test_the_mean_text_of_a_class_is_looked_for_among_the_best_five():
    source = types.SimpleNamespace(class_names="abcdefg", known_labels=lambda: None)
    split = types.SimpleNamespace(source=source, title="test")
    splits = types.SimpleNamespace(open=lambda *_, **__: split)
    config = image_text.ZeroShotConfig(prompts=("{}", "a {}"))
    # Texts of a class differ, but not their mean; classes are less and less similar.
    texts = 2.0 * np.eye(7).repeat(2, 0) + np.tile([[0.5], [-0.5]], (7, 7))
    outputs = types.SimpleNamespace(
        labels=np.array([0, 2, 4, 5, 6]),
        text_embeddings=texts,
        image_embeddings=np.tile(np.arange(7.0, 0.0, -1.0), (5, 1)),
    )
    scored = config.open("x", splits).score((outputs,), lambda: False)
    assert scored.metrics == {"top1": 1 / 5, "top5": 3 / 5}


def test_equal_embeddings_are_found_in_their_order():
    rows, numbers = np.ones((5, 3)), np.arange(5)
    found = image_text.best_ranks(rows, rows, numbers, numbers, same(numbers, numbers))
    assert found.tolist() == [0, 1, 2, 3, 4]


def test_recalls_are_those_of_big_vision():
    """By their formulas: the order of distances, and the image of each text."""
    rng = np.random.default_rng(0)
    records = np.repeat(np.arange(7), 3)
    images, texts = rng.normal(size=(7, 4)), rng.normal(size=(21, 4))
    captions = [str(i) for i in rng.integers(0, 9, 21)]
    outputs = types.SimpleNamespace(
        image_embeddings=images, text_embeddings=texts, records=np.arange(7)
    )
    found = image_text.score(outputs, captions, records, (1, 5)).metrics
    distances = -images @ texts.T
    for k in (1, 5):
        of_text = distances.argsort(0)[:k] == records[None]
        assert found[f"text_to_image_recall{k}"] == pytest.approx(of_text.any(0).mean())
        of_image = records[distances.argsort(1)[:, :k]] == np.arange(7)[:, None]
        assert found[f"image_to_text_recall{k}"] == pytest.approx(
            of_image.any(1).mean()
        )
        for way in ("text_to_image", "image_to_text"):
            assert found[f"{way}_recall{k}_of_words"] >= found[f"{way}_recall{k}"]


def test_ranks_in_blocks(monkeypatch):
    rng = np.random.default_rng(0)
    rows, columns = rng.normal(size=(50, 4)), rng.normal(size=(30, 4))
    numbers = np.arange(50) % 30, np.arange(30)
    arguments = rows, columns, *numbers, same(*numbers)
    whole = image_text.best_ranks(*arguments)
    monkeypatch.setattr(image_text, "_BLOCK", 100)
    np.testing.assert_array_equal(image_text.best_ranks(*arguments), whole)
    assert image_text.best_ranks(*arguments, stop=lambda: True) is None


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of three kinds of pictures with captions, and a run that learnt them."""
    folder = tmp_path_factory.mktemp("pairs")
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for i in range(12 if split == "val" else 60):
            kind = i % 3
            pixels = rng.integers(0, 60, (8, 12, 3)) + 180 * np.eye(3)[kind]
            path = folder / split / NAMES[kind] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(path)
            path.with_suffix(".txt").write_text(f"one {NAMES[kind]}\na {NAMES[kind]}")
    data = {"name": "folder", "data_dir": str(folder), "split": "train"}
    data |= {"num_examples": 60, "num_classes": 0, "caption_key": "txt"}
    data |= {"tokenizer": "bytes", "num_tokens": 9, "train_transform": "resize"}
    data |= {"eval_transform": "resize"}
    labelled = {"name": "folder", "data_dir": str(folder), "split": "val"}
    evals = {
        "pairs": {"kind": "retrieval", "k": (1, 12)},
        "names": {"kind": "zero_shot", "prompts": ("a {}",)} | labelled,
    }
    config = tiny_config(
        data=data,
        evals=evals,
        task={"name": "contrastive", "text": TEXT, "loss": "softmax"},
        total_steps=100,
        batch_size=16,
        optim={"name": "adam", "learning_rate": 3e-3},
        checkpoint_every_steps=1_000,
        log_every_steps=50,
    )
    report = train(config, folder / "run")
    return folder, report["final"], evals


@pytest.mark.slow
def test_a_run_tells_classes_by_their_names(place):
    _, final, _ = place
    assert final["names"]["params"]["top1"] == 1.0
    # Each caption is that of four pictures: by its words any of them is right.
    found = final["pairs"]["params"]
    for way in ("text_to_image", "image_to_text"):
        assert found[f"{way}_recall1_of_words"] == 1.0 > found[f"{way}_recall1"]
        assert found[f"{way}_recall12"] == 1.0
    assert len(found) == 8


def evaluate(folder, evals, model=None, *, use_ema=True, **data):
    data |= {"name": "folder", "data_dir": str(folder)}
    config = {"batch_size": 8, "data": data, "evals": evals}
    found = vit_jax.evaluate(
        model or folder / "run", config, use_ema=use_ema, tell=lambda _: None
    )
    return {name: scores["weights"] for name, scores in found.items()}


@pytest.mark.slow
def test_weights_are_evaluated_as_the_run_was(place):
    folder, final, evals = place
    for use_ema, name in ((False, "params"), (True, "ema")):
        found = evaluate(folder, evals, use_ema=use_ema, caption_key="txt")
        for key in evals:
            if name in final[key]:
                assert found[key] == pytest.approx(final[key][name], abs=1e-6)


@pytest.mark.slow
def test_recipes_of_evaluations_give_the_scores_of_the_run(place, capsys):
    folder, final, _ = place
    for name, of_run, key in (
        ("zero_shot", "names", "prompts=('a {}',)"),
        ("retrieval", "pairs", "k=(1, 12)"),
    ):
        ((_, _, config),) = commands_of(ROOT / "configs" / "eval" / f"{name}.py")
        config = re.sub(r"data=\w+", f"data={folder}", config)
        words = [f"--model={folder / 'run'}", config, f"--config.evals.test.{key}"]
        assert not run_command("evaluate", [*words, "--json"])
        scores = json.loads(capsys.readouterr().out.splitlines()[-1])["test"]
        expected = final[of_run]["ema"]
        if name == "zero_shot":
            expected = expected["top1"]
        assert scores == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_other_names_of_classes(place):
    folder, _, _ = place

    def score(classes, prompts=("{}",)):
        spec = {"kind": "zero_shot", "prompts": prompts, "classes": classes}
        return evaluate(folder, {"x": spec})["x"]["top1"]

    names = tuple(f"one {name}" for name in NAMES)
    assert score(names) == 1.0
    with pytest.raises(UserError, match="has label 2, but 1 classes are named"):
        score(("one ant",))
    with pytest.raises(UserError, match="prompt 'a thing' has no {}"):
        score(names, ("a thing",))


@pytest.mark.slow
def test_wordnet_ids_of_imagenet_are_put_into_words(place, tmp_path):
    folder, _, _ = place
    ids = {"ant": "n02219486", "bee": "n02206856"}
    for name, wordnet_id in ids.items():
        shutil.copytree(folder / "val" / name, tmp_path / "val" / wordnet_id)

    def score(**keys):
        spec = {"kind": "zero_shot", "prompts": ("a {}",), "data_dir": str(tmp_path)}
        return evaluate(folder, {"x": spec | {"split": "val"} | keys})["x"]["top1"]

    assert score() == 1.0
    with pytest.raises(UserError, match="'n02206856' is a WordNet id"):
        score(classes=tuple(sorted(ids.values())))
    (tmp_path / "val/n02219486").rename(tmp_path / "val/n12345678")
    with pytest.raises(UserError, match="'n12345678' is a WordNet id that is not of"):
        score()


def test_names_of_imagenet_are_those_of_clip_or_the_first_words_of_synsets():
    names = "n01494475", "n02085620-Chihuahua", "n12345678_some_dog", "tench"
    found = imagenet.in_words(names)
    assert found == ("hammerhead shark", "Chihuahua", "some dog", "tench")
    assert imagenet.in_words(names[:1], imagenet.WORDNET) == ("hammerhead",)
    assert len({*imagenet.in_words(imagenet.synsets())}) == 998


def test_eighty_prompts_are_those_of_clip():
    """By a checksum of the sorted list in the notebook of openai/CLIP d05afc4."""
    assert len({*zero_shot.EIGHTY}) == 80 and {*zero_shot.SEVEN} < {*zero_shot.EIGHTY}
    text = "\n".join(sorted(zero_shot.EIGHTY))
    assert (
        hashlib.sha256(text.encode()).hexdigest().startswith("a8a4822f2921936e2ef07cf2")
    )
    config = zero_shot.get_config("data=digits,prompts=80")
    assert config.evals.test.prompts == zero_shot.EIGHTY


def test_texts_are_canonical_as_big_visions():
    # Of its own test, and a name with commas.
    for text in ("test___test", "test\ntest", " Test  test."):
        assert image_text.canonical(text, ",") == "test test"
    assert (
        image_text.canonical("An {} {} close-up, {of} it!", "{}")
        == "an {} {} closeup of it"
    )
    assert image_text.canonical("Crane, bird", ",") == "crane, bird"


@pytest.mark.slow
def test_weights_without_a_text_tower_are_refused(place, tmp_path):
    folder, _, evals = place
    plain = trees.checkpoint(trees.encoder(), preprocess=Preprocess((12, 12)))
    file = tmp_path / "plain.safetensors"
    export.export(plain, "safetensors", file)
    with pytest.raises(UserError, match="evals.names compares images with texts"):
        evaluate(folder, {"names": evals["names"]}, file)
    with pytest.raises(UserError, match="evals.pairs needs captions: set"):
        evaluate(folder, evals)


@pytest.mark.slow
def test_images_are_compared_with_texts_in_python(place):
    folder, _, _ = place
    model = vit_jax.load_model(folder / "run", tell=lambda _: None)
    paths = [str(folder / "val" / name / f"{i}.png") for i, name in enumerate(NAMES)]
    found = model.zero_shot(paths, [f"a {name}" for name in NAMES], topk=2)
    assert [best[0].name for best in found] == [f"a {name}" for name in NAMES]
    assert all(len(best) == 2 for best in found)
    one = model.zero_shot(paths[0], NAMES, prompts=("a {}", "one {}"))
    assert one[0].name == "ant" and sum(p.probability for p in one) == pytest.approx(1)
    similar = model.similarity(paths, ["a bee", "one cat"])
    assert similar.shape == (3, 2) and np.abs(similar).max() <= 1 + 1e-6
    assert similar[1, 0] > similar[0, 0] and similar[2, 1] > similar[0, 1]
    with pytest.raises(UserError, match="use zero_shot if they have a text tower"):
        model.predict(paths)
    with pytest.raises(UserError, match="at least one text to compare images with"):
        model.zero_shot(paths, [])


@pytest.mark.slow
def test_predict_takes_texts_as_labels(place, tmp_path, capsys):
    folder, _, _ = place
    photo = str(folder / "val" / "bee" / "1.png")

    def run(*flags):
        capsys.readouterr()
        words = [f"--model={folder / 'run'}", "--json", *flags, photo]
        assert run_command("predict", words) == 0
        return json.loads(capsys.readouterr().out)["predictions"]

    assert run("--labels=a cat, a bee, a ant")[0]["name"] == "a bee"
    (tmp_path / "names.txt").write_text("ant\nbee\ncat")
    (tmp_path / "prompts.txt").write_text("a {}\none {}")
    found = run(
        f"--labels={tmp_path / 'names.txt'}", f"--prompts={tmp_path / 'prompts.txt'}"
    )
    assert found[0]["name"] == "bee" and found[0]["label"] == 1
    for flags, match in (
        ((), "has a text tower and no classes"),
        (("--labels=a,,b",), "--labels='a,,b' has an empty text"),
        (("--labels=nowhere.txt",), "nowhere.txt"),
        (("--labels=ant, bee", "--prompts=a thing"), "prompt .a thing. has no {}"),
    ):
        with pytest.raises(UserError, match=match):
            run(*flags)
