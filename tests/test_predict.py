"""`python -m vit_jax.predict`, on a small model with random parameters."""

import dataclasses
import functools
import io
import json
import os
import pathlib
import re
import subprocess

import hosts
import jax
import numpy as np
import pytest
import warm
from helpers import TINY, random_weights, run_command, tiny_config, write_weights
from PIL import Image

import vit_jax
from vit_jax import models, weights
from vit_jax.data import image_files, imagenet
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.sources.base import _warned
from vit_jax.errors import UserError
from vit_jax.evaluators import prediction
from vit_jax.training import loop
from vit_jax.weights.formats import native, timm
from vit_jax.weights.pretrained import Pretrained

ROOT = pathlib.Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"

NAMES = ("apple", "Bär", "a cat, or two", "dog", "eel")
OPTIONS = TINY | {"variant": "Ti/8", "num_classes": 5, "image_size": (16, 24)}
PREPROCESS = Preprocess(
    (16, 24), (0.4, 0.5, 0.6), (0.2, 0.3, 0.25), "bicubic", crop_fraction=0.9
)


@pytest.fixture(scope="module")
def pretrained():
    """A model of 5 classes whose predictions differ from image to image."""
    found = random_weights(
        models.create(**OPTIONS), "tiny", preprocess=PREPROCESS, class_names=NAMES
    )
    return dataclasses.replace(found, options=OPTIONS)


@pytest.fixture(scope="module")
def place(tmp_path_factory, pretrained):
    """A folder with the model and ten images of many kinds, two of them damaged."""
    folder = tmp_path_factory.mktemp("predict")
    native.write(pretrained, folder / "tiny.safetensors")
    images = folder / "images"
    (images / "deeper" / ".hidden").mkdir(parents=True)
    rng = np.random.default_rng(2)

    def picture(mode="RGB"):
        noise = rng.integers(0, 256, (29, 41, 3), dtype=np.uint8)
        return Image.fromarray(noise).convert(mode)

    picture().save(images / "b.JPG")
    picture("CMYK").save(images / "cmyk.jpeg")
    picture("L").save(images / "grey.png")
    picture("P").save(images / "palette.gif")
    picture().save(images / "deeper" / "scan.tiff")
    picture("RGBA").save(images / "deeper" / "clear.webp")
    picture().save(images / "deeper" / ".hidden" / "no.png")
    deep = rng.integers(0, 1 << 16, (29, 41), dtype=np.uint16)
    Image.fromarray(deep).save(images / "a sixteen.png")
    picture().save(images / "torn.png")
    whole = (images / "torn.png").read_bytes()
    (images / "torn.png").write_bytes(whole[: len(whole) // 2])
    (images / "empty.bmp").write_bytes(b"")
    (images / "notes.txt").write_text("no image")
    return folder


# In the order of a listing of the folder.
GOOD = (
    "a sixteen.png",
    "b.JPG",
    "cmyk.jpeg",
    "deeper/clear.webp",
    "deeper/scan.tiff",
    "grey.png",
    "palette.gif",
)
DAMAGED = {
    "empty.bmp": "is empty (0 bytes)",
    "torn.png": "cannot be decoded (its PNG chunk b'IDAT' is damaged)",
}


@pytest.fixture
def start(place):
    """Starts the command as a process."""

    def start(*words, **options):
        words = [f"--model={place / 'tiny.safetensors'}", *words]
        (process,) = hosts.start(words, 1, verb="predict", **options)
        return process

    return start


@pytest.fixture
def run(place, capsys):
    """Runs the verb in this process: words -> (exit code, stdout, stderr)."""

    def start(*words):
        words = [str(word) for word in words]
        if not any(word.startswith("--model=") for word in words):
            words.append(f"--model={place / 'tiny.safetensors'}")
        code = run_command("predict", words)
        end = capsys.readouterr()
        return code, end.out, end.err

    return start


def probabilities(out):
    """Returns file -> label -> probability of lines of JSON."""
    lines = [json.loads(line) for line in out.splitlines()]
    return {
        line["file"]: {p["label"]: p["probability"] for p in line["predictions"]}
        for line in lines
    }


def expected(pretrained, path):
    """Works one image's probabilities out, without the code under test."""
    with Image.open(path) as file:
        image = file.copy()
    if image.mode == "I;16":
        image = Image.fromarray((np.array(image) >> 8).astype(np.uint8))
    elif image.mode in ("RGBA", "P"):
        image = Image.alpha_composite(
            Image.new("RGBA", image.size, "white"), image.convert("RGBA")
        )
    # 17 and 26 pixels at least: 29 / 17 is the more, so 41 / (41 / 26) and 18.4.
    image = image.convert("RGB").resize((26, 18), Image.Resampling.BICUBIC)
    pixels = np.asarray(image, np.float64)[1:17, 1:25] / 255
    pixels = (pixels - PREPROCESS.mean) / PREPROCESS.std
    return np.asarray(jax.nn.softmax(applied(pretrained, pixels)))


def applied(pretrained, pixels):
    """Returns the logits of one image of normalised pixels."""
    apply = _forward(tuple(pretrained.options.items()))
    return apply(pretrained.params, pixels[None].astype(np.float32))[0]


@functools.cache
def _forward(options):
    model = models.create(**dict(options))
    return jax.jit(lambda params, image: model.apply(params, image)["logits"])


def test_a_folder_as_a_process_reports_what_is_damaged(place, start, pretrained):
    images = place / "images"
    process = start(images, images / "absent.png", "--topk=2")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 1, err
    assert err.splitlines() == [
        *(f"{images / name}: {why}" for name, why in DAMAGED.items()),
        f"{images / 'absent.png'}: cannot be read (No such file or directory)",
    ]
    heading, *lines = out.splitlines()
    assert heading.split() == ["file", "probability", "class"]
    # One below the other, however long the paths are.
    column = heading.index("class")
    assert {line[column - 4 : column] for line in lines} == {" %  "}
    rows = [re.split(r"  +", line) for line in lines]
    assert [row[0] for row in rows[::2]] == [f"{images / name}" for name in GOOD]
    assert {row[0] for row in rows[1::2]} == {""}
    for name, *best in zip(GOOD, rows[::2], rows[1::2], strict=True):
        chances = expected(pretrained, images / name)
        for row, label in zip(best, np.argsort(-chances), strict=False):
            assert row[2] == NAMES[label]
            percent = pytest.approx(100 * chances[label], abs=0.006)
            assert float(row[1].removesuffix(" %")) == percent


def test_a_pipe_is_answered_line_by_line_and_may_close(place, start):
    one, other = place / "images" / "b.JPG", place / "images" / "grey.png"
    words = "-", "--json", "--batch_size=1", "--topk=1"
    process = start(*words, stdin=subprocess.PIPE)
    for path in (one, other, one):  # Each before the next is known.
        process.stdin.write(f"{path}\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        assert answer["file"] == str(path)
        assert list(answer["predictions"][0]) == ["label", "name", "probability"]
    # As `| head` leaves it, while there is more to come.
    process.stdout.close()
    process.stdin.write(f"{one}\n" * 10)
    process.stdin.flush()
    assert (process.wait(60), process.stderr.read()) == (141, "")
    process.stdin.close()


@pytest.fixture(scope="module")
def without_jax():
    """Returns a process in which JAX cannot start."""
    with warm.Process(ROOT, JAX_PLATFORMS="none of these") as process:
        yield process


@pytest.mark.parametrize(
    ("words", "stdin", "message"),
    [
        (["absent.png"], "", "no image: 'absent.png' does not exist"),
        (["configs"], "", "no image in configs: their names end in .jpg .jpeg"),
        (["-"], "", "no image in -: their names"),
        (["-"], "x.png\n\ny.png", "no image: 'x.png' does not exist"),
        (["x", "--topk=0"], "", "--topk: '0' is not a whole number from 1 on"),
        (["x", "--mean=a,b"], "", "--mean: 'a,b' is not a list of numbers"),
        (["x", "--crop_pct=0.9,1"], "", "'0.9,1' is neither a number nor squash"),
        (["x", "--resolution=ax2"], "", "'a' is not a whole number from 1 on"),
        ([], "", "required: IMAGE"),
    ],
)
def test_bad_input_ends_with_one_line_before_jax_starts(
    without_jax, words, stdin, message
):
    end = without_jax.run("predict", ["--model=absent", *words], stdin)
    assert (end.code, end.out) == (2, "")
    assert end.err.startswith("error: ")
    assert end.err.count("\n") == 1
    assert message in end.err
    endings = re.findall(r" (\.\w+)", end.err)
    assert len(endings) == len(set(endings))  # None is listed twice.


def test_the_batch_size_does_not_matter(place, run, pretrained, batch_size=3):
    images = place / "images"
    code, out, _ = run(images, "--json", f"--batch_size={batch_size}", "--topk=9")
    found = probabilities(out)
    assert code == 1
    assert list(found) == [f"{images / name}" for name in GOOD]
    for path, chances in found.items():
        assert list(chances.values()) == sorted(chances.values(), reverse=True)
        wanted = expected(pretrained, path)
        assert len(chances) == len(wanted)  # There are not nine classes.
        np.testing.assert_allclose(
            [chances[label] for label in range(5)], wanted, rtol=1e-4, atol=1e-6
        )


def test_one_program_is_compiled_for_all_batches(place, pretrained):
    classifier = prediction.Classifier(pretrained)
    images = [(name, str(place / "images" / name)) for name in (*GOOD, *DAMAGED)]
    results = list(prediction.predict(classifier, images * 3, batch_size=4))
    assert [name for name, _ in results] == [*GOOD, *DAMAGED] * 3
    assert classifier._logits._cache_size() == 1


def test_flags_replace_what_travelled(place, run, pretrained):
    path = place / "images" / "b.JPG"

    def chances(*words):
        _, out, err = run(path, "--json", *words)
        assert err == ""
        return probabilities(out)[str(path)]

    usual = chances()
    same = chances("--mean=0.4,0.5,0.6", "--crop_pct=0.9", "--interpolation=bicubic")
    assert same == usual
    flags = (
        "--mean=0.4 --std=0.2 --crop_pct=1 --crop_pct=squash --interpolation=nearest"
    )
    for other in (*flags.split(), "--resolution=24x32"):
        assert chances(other) != usual
    squashed = Image.open(path).resize((24, 16), Image.Resampling.BICUBIC)
    classifier = prediction.Classifier(pretrained)
    (wanted,) = np.asarray(classifier.logits(np.array(squashed)[None]))
    wanted = classifier.rank(wanted, 5)
    found = chances("--crop_pct=squash")
    assert list(found) == [one.label for one in wanted]
    np.testing.assert_allclose(
        list(found.values()), [one.probability for one in wanted], rtol=1e-5
    )


@pytest.mark.slow
def test_tokens_are_merged(place, run, tmp_path):
    path = place / "images" / "b.JPG"
    file = tmp_path / "deep.safetensors"
    write_weights(file, NAMES, PREPROCESS, **OPTIONS | {"depth": 2})
    merged = vit_jax.load_model(file, token_merging=2, tell=lambda line: None)
    found = []
    for count in (0, 2):
        words = f"--model={file}", f"--token_merging={count}"
        _, out, _ = run(path, "--json", *words)
        chances = probabilities(out)[str(path)]
        found.append([chances[label] for label in range(5)])
    (logits,) = merged([path])
    np.testing.assert_allclose(found[1], jax.nn.softmax(logits), rtol=1e-4)
    assert np.abs(np.subtract(*found)).max() > 1e-4


def test_the_limit_of_large_images_is_a_flag_and_an_argument(place, run):
    path, what = place / "images" / "b.JPG", "max_megapixels=0.001 "  # 29x41 pixels.
    code, out, err = run(path, "--max_megapixels=0.001")
    assert (code, out) == (1, "")
    assert err.startswith(f"{path}: has 41x29 pixels") and what in err
    assert run(path, "--max_megapixels=0.002")[0] == 0
    model = vit_jax.load_model(place / "tiny.safetensors", max_megapixels=0.001)
    with pytest.raises(UserError, match=what):
        model.predict(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model=absent"], "^'absent' does not exist"),
        (["--interpolation=cubic"], "interpolation='cubic' is not one of nearest"),
        (["--crop_pct=1.5"], r"crop_pct=1\.5 is not a fraction"),
        (["--mean=0.1,0.2"], r"mean=0\.1,0\.2 has 2 numbers, but .* 3 channels"),
        (["--resolution=20"], "image height 20 is not a multiple of the patch size 8"),
        (["--labels=absent.txt"], "--labels=absent.txt cannot be read"),
        (["--config.seed=3"], "--config.seed: predicting takes no config"),
    ],
)
def test_flags_that_do_not_fit_are_refused(place, run, words, message):
    with pytest.raises(UserError, match=message):
        run(place / "images" / "b.JPG", *words)


def test_labels_are_read_with_and_without_synsets(place, run, tmp_path):
    file, path = tmp_path / "labels.txt", place / "images" / "b.JPG"
    for lines in (
        "n00000001\tein Hai\nn00000002 two\nn00000003 three\nn00000004 4\nn00000005 e\n",
        "ein Hai\ntwo\nthree\n4\ne\n\n",
    ):
        file.write_text(lines, encoding="utf-8")
        _, out, _ = run(path, f"--labels={file}")
        names = [line.split(" %  ")[1] for line in out.splitlines()[1:]]
        assert sorted(names) == ["4", "e", "ein Hai", "three", "two"]
    for lines, message in (
        ("one\ntwo\n", "there are 2 class names, but .* has 5 classes"),
        ("one\n\nthree\n", "has no name in line 2: give one name per line"),
        ("", "has no name in line 1"),
    ):
        file.write_text(lines)
        with pytest.raises(UserError, match=message):
            run(path, f"--labels={file}")


def test_labels_are_the_names_of_the_model_in_any_order(place, run, tmp_path):
    file, path = tmp_path / "labels.txt", place / "images" / "b.JPG"
    _, usual, _ = run(path)
    file.write_text("\n".join(sorted(NAMES, key=len)), encoding="utf-8")
    assert run(path, f"--labels={file}")[1] == usual
    file.write_text("\n".join([*NAMES[1:], "fly"]), encoding="utf-8")
    with pytest.raises(UserError, match="lack 1 of 5: 'fly' "):
        run(path, f"--labels={file}")


def replaced(pretrained, **fields):
    return Pretrained(**{**vars(pretrained), **fields})


def test_missing_preprocessing_and_names_are_assumed_and_numbered(
    place, run, pretrained, tmp_path
):
    plain = replaced(pretrained, preprocess=None, class_names=())
    native.write(plain, tmp_path / "plain.safetensors")
    words = place / "images" / "b.JPG", f"--model={tmp_path}/plain.safetensors"
    _, out, err = run(*words)
    assert re.fullmatch(
        r"plain\.safetensors: has no preprocessing; assumed the preprocessing of Hugging Face's ViTs: "
        r"16x24, bilinear, whole image, mean 0\.5, std 0\.5\n",
        err,
    )
    assert re.findall(r"  (class \d)\n", out)
    stated = "--mean=0.5", "--std=0.5", "--interpolation=bilinear", "--crop_pct=squash"
    assert run(*words, *stated) == (0, out, "")


def test_a_guess_about_the_weights_is_printed(place, run, pretrained, tmp_path):
    place_of = {"pos_embedding": np.ones((1, 10, 12), np.float32)}
    encoder = pretrained.params["Transformer"] | {"posembed_input": place_of}
    square = replaced(
        pretrained,
        params=pretrained.params | {"Transformer": encoder},
        options=OPTIONS | {"image_size": (24, 24)},
    )
    timm.write(square, tmp_path)
    (tmp_path / "config.json").unlink()
    words = place / "images" / "b.JPG", f"--model={tmp_path}"
    guess = "config.json: not timm's"
    assert guess in run(*words, "--num_heads=3")[2]
    words += "--num_heads=3", "--architecture=vit_tiny_patch16_24"
    with pytest.raises(
        UserError, match="architecture='vit_tiny_patch16_24' has embed_dim"
    ):
        run(*words)


def test_a_model_of_one_channel_sees_grey(place, run, pretrained, tmp_path):
    kernel = pretrained.params["embedding"]["kernel"]
    embedding = {**pretrained.params["embedding"], "kernel": kernel[:, :, :1]}
    grey = replaced(
        pretrained,
        params={**pretrained.params, "embedding": embedding},
        options=OPTIONS | {"channels": 1},
        preprocess=Preprocess((16, 24), squash=True),
    )
    native.write(grey, tmp_path / "grey.safetensors")
    path = place / "images" / "b.JPG"
    words = path, f"--model={tmp_path}/grey.safetensors", "--json"
    found = probabilities(run(*words)[1])[str(path)]
    image = Image.open(path).convert("L").resize((24, 16), Image.Resampling.BILINEAR)
    wanted = jax.nn.softmax(applied(grey, np.asarray(image)[..., None] / 127.5 - 1))
    np.testing.assert_allclose(
        [found[label] for label in range(5)], wanted, rtol=0.05, atol=0.01
    )
    with pytest.raises(UserError, match=r"mean=0\.1,0\.2,0\.3 has 3 numbers, .* 1 ch"):
        run(*words, "--mean=0.1,0.2,0.3")


def test_models_without_a_classifier_or_with_broken_weights_are_refused(
    place, pretrained
):
    headless = replaced(pretrained, options=OPTIONS | {"num_classes": 0})
    with pytest.raises(UserError, match=r"tiny has no classifier \(num_classes=0\)"):
        prediction.Classifier(headless)
    tokens = replaced(pretrained, options=OPTIONS | {"pool": "none"})
    with pytest.raises(UserError, match=r"tiny classifies every token .*\(pool=none\)"):
        prediction.Classifier(tokens)
    lacking = {k: v for k, v in pretrained.params.items() if k != "embedding"}
    message = "does not fit the model: embedding/bias is missing; embedding/kernel is"
    with pytest.raises(UserError, match=message):
        prediction.Classifier(replaced(pretrained, params=lacking))
    broken = {**pretrained.params, "cls": np.full((1, 1, 12), np.nan, np.float32)}
    classifier = prediction.Classifier(replaced(pretrained, params=broken))
    images = [("b", str(place / "images" / "b.JPG"))]
    with pytest.raises(UserError, match="output for b is not finite"):
        list(prediction.predict(classifier, images))


@pytest.mark.parametrize("verb", ["predict", "features", "explore"])
def test_12_bits_in_16_are_said_to_be_dark(place, tmp_path, caplog, verb):
    _warned.clear()
    path = tmp_path / "dark.png"
    values = np.random.default_rng(0).integers(0, 4_096, (17, 26), dtype=np.uint16)
    Image.fromarray(values).save(path)
    words = [f"--model={place / 'tiny.safetensors'}"]
    words += {
        "predict": [path],
        "features": [path, f"--out={tmp_path / 'out.parquet'}"],
        "explore": [f"--image={path}", f"--html={tmp_path / 'out.html'}"],
    }[verb]
    assert not run_command(verb, words)
    assert f"{path.name} has no value above 4," in caplog.text


@pytest.mark.slow
def test_a_sigmoid_run_gives_every_class_a_probability(place, run, tmp_path, capsys):
    recipe = tiny_config(
        total_steps=2,
        data={"num_classes": 3},
        model={"head_bias_init": -2.0},
        task={"loss": "sigmoid"},
        optim={"learning_rate": 0.1},
        ema={"decay": 0.9},
        evals={},
    )
    loop.train(recipe, tmp_path / "run")
    capsys.readouterr()
    path = place / "images" / "b.JPG"
    words = path, f"--model={tmp_path}/run", "--json"
    average, raw = (
        probabilities(run(*words, *more)[1])[str(path)] for more in ((), ("--no_ema",))
    )
    assert average != raw

    found = weights.open_pretrained(tmp_path / "run")
    image = Image.open(path).resize((12, 8), Image.Resampling.BILINEAR)
    logits = applied(found, np.asarray(image) / 127.5 - 1)
    np.testing.assert_allclose(
        [average[label] for label in range(3)], jax.nn.sigmoid(logits), rtol=1e-4
    )


def test_stdin_holds_paths_or_one_image(tmp_path):
    def found(data):
        read, write = os.pipe()
        os.write(write, data)
        os.close(write)
        with os.fdopen(read):
            return list(image_files.find(["-"], stdin=read))

    (tmp_path / "a.png").touch()
    (tmp_path / "b.jpg").touch()
    names = "x.png", " y\udcff.jpg"
    assert found(b"x.png\r\n\n y\xff.jpg") == [(name, name) for name in names]
    listed = [(f"{tmp_path}/{name}",) * 2 for name in ("a.png", "b.jpg")]
    assert found(os.fsencode(tmp_path)) == listed
    # A path of no image, though it begins like one.
    assert found(b"BMW.jpg\nGIF89a.gif")[0] == ("BMW.jpg", "BMW.jpg")
    for format in ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF"):
        stream = io.BytesIO()
        Image.new("RGB", (17, 13)).save(stream, format)
        assert found(stream.getvalue()) == [("-", stream.getvalue())]


def test_a_loop_of_links_is_followed_once(tmp_path):
    for name in ("photos/a.png", "photos/deeper/b.png", "other/c.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    photos = tmp_path / "photos"
    (photos / "deeper" / "back").symlink_to("..")
    (photos / "out").symlink_to(tmp_path / "other")
    (tmp_path / "other" / "back").symlink_to(photos)
    names = [
        os.path.relpath(name, photos) for name, _ in image_files.find([str(photos)])
    ]
    assert names == ["a.png", "deeper/b.png", "out/c.png"]


def test_the_reader_keeps_no_more_than_its_limit_ahead():
    seen = []

    def count():
        for i in range(1_000):
            seen.append(i)
            yield i

    results = image_files.ahead(count(), lambda i: -i, threads=2, limit=3)
    assert [next(results) for _ in range(4)] == [0, -1, -2, -3]
    results.close()
    assert len(seen) < 20

    def fails():
        yield 1
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(image_files.ahead(fails(), lambda i: i, threads=1, limit=2))


DEIT = SHARED / "parity" / "deit_tiny_timm.safetensors"


@pytest.mark.skipif(not DEIT.is_file(), reason="needs ../shared")
@pytest.mark.slow
def test_deit_names_the_sample_photographs(run):
    samples = SHARED / "data" / "imagenet_samples"
    names = dict(zip(imagenet.synsets(), imagenet.class_names(), strict=True))
    code, out, err = run(samples, f"--model={DEIT}", "--json", "--topk=1")
    assert code == 0
    assert err.startswith("deit_tiny_timm.safetensors: config.json: not timm's")
    assert (
        "assumed the preprocessing of timm's DeiT: 224x224, bicubic, crop 0.9, mean 0.485"
        in err
    )
    (line,) = err.splitlines()
    assert line.endswith("does not name its 1,000 classes; assumed ImageNet's classes")
    right = {}
    for line in out.splitlines():
        line = json.loads(line)
        wnid = pathlib.Path(line["file"]).name.split("_")[0]
        right[wnid] = line["predictions"][0]["name"] == names[wnid]
    assert len(right) == 500
    assert sum(right.values()) == 384  # As many as in timm 1.0.31 with its own config.
    for wnid in ("n01440764", "n02123597", "n02129604"):  # Tench, Siamese cat, tiger.
        assert right[wnid]
