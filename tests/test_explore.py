"""`python -m vit_jax.explore`, on a small model with random parameters."""

import io
import json
import re
import shutil
import signal
import urllib.error
import urllib.request

import hosts
import numpy as np
import pytest
from helpers import run_command, write_weights
from PIL import Image

from vit_jax import explore
from vit_jax.command_line import cli
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.tools.explorer import saved


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model and an image."""
    folder = tmp_path_factory.mktemp("explore")
    write_weights(
        folder / "tiny.safetensors",
        ("apple", "Bär", "cat"),
        Preprocess((16, 24), crop_fraction=0.9),
        variant="Ti/8",
        num_classes=3,
        image_size=(16, 24),
        depth=2,
    )
    rng = np.random.default_rng(1)
    noise = rng.integers(0, 256, (29, 41, 3), dtype=np.uint8)
    (folder / "images").mkdir()
    Image.fromarray(noise).save(folder / "images" / "noise.png")
    return folder


@pytest.fixture
def run(place, capsys):
    """Runs the verb in this process: words -> (stdout, stderr)."""

    def start(*words):
        run_command("explore", [f"--model={place / 'tiny.safetensors'}", *words])
        return capsys.readouterr()

    return start


def test_a_file_holds_everything(run, place, tmp_path):
    path = tmp_path / "noise.html"
    image = place / "images" / "noise.png"
    model = place / "tiny.safetensors"
    out, err = run(f"--html={path}", f"--image={image}", f"--compare={model}")
    text = path.read_text()
    assert out == (
        f"{path}: {path.stat().st_size / 1e6:.2f} MB, attention in 256 steps of each "
        "row's largest\n"
    )
    assert err == ""
    state = json.loads(re.search(r'id="saved">(.+?)</script>', text)[1])
    assert [model["labels"] for model in state["models"]] == [["1", "2"]] * 2
    assert state["seen"]["name"] == "noise.png"
    assert len(state["seen"]["models"][1]["classes"]) == 3
    # Nothing comes from elsewhere, and the place of the model is not shown.
    assert not re.search(r'(?:src|href)="(?!data:)', text)
    assert "default-src 'none'" in text
    assert str(place.parent) not in text


def test_a_file_of_an_image_of_any_size_has_its_grid(run, place, tmp_path):
    path, image = tmp_path / "x.html", tmp_path / "tall.png"
    Image.new("RGB", (16, 60)).save(image)
    run(f"--html={path}", f"--image={image}", "--max_tokens=12")
    state = json.loads(re.search(r'id="saved">(.+?)</script>', path.read_text())[1])
    (found,) = state["seen"]["models"]
    assert found["grid"] == [6, 2] and found["size"] == [48, 16]
    assert found["box"] == [0, 0, 1, 1]
    assert {len(values) for values in state["relevances"][0].values()} == {12}


def test_steps_are_given_up_for_a_small_file(run, place, tmp_path, monkeypatch):
    image = place / "images" / "noise.png"
    words = f"--html={tmp_path / 'x.html'}", f"--image={image}"
    run(*words)
    large = (tmp_path / "x.html").stat().st_size
    monkeypatch.setattr(saved, "MAX_BYTES", large - 100)
    out, err = run(*words)
    assert (tmp_path / "x.html").stat().st_size <= large - 100
    assert int(re.search(r"in (\d+) steps", out)[1]) < 256
    assert err == ""
    before = (tmp_path / "x.html").read_bytes()
    monkeypatch.setattr(saved, "MAX_BYTES", 10_000)
    reason = (
        r"the page would have 0\.\d MB, more than 0\.01, even with the coarsest att"
    )
    with pytest.raises(UserError, match=reason):
        run(*words)
    assert (tmp_path / "x.html").read_bytes() == before


def test_flags_on_images_and_classes_are_those_of_the_first_model(run, place, tmp_path):
    other, labels = tmp_path / "other.safetensors", tmp_path / "labels.txt"
    shutil.copy(place / "tiny.safetensors", other)
    labels.write_text("one\ntwo\nthree\n")
    path, image = tmp_path / "x.html", place / "images" / "noise.png"
    words = f"--html={path}", f"--image={image}", f"--compare={other}"
    run(*words, f"--labels={labels}", "--resolution=24x16", "--crop_pct=squash")
    state = json.loads(re.search(r'id="saved">(.+?)</script>', path.read_text())[1])
    assert [model["size"] for model in state["models"]] == [[24, 16], [16, 24]]
    first, second = state["seen"]["models"]
    assert {found["name"] for found in first["classes"]} == {"one", "two", "three"}
    assert {found["name"] for found in second["classes"]} == {"apple", "Bär", "cat"}
    assert first["box"] == [0, 0, 1, 1]
    assert second["box"] != [0, 0, 1, 1]
    # The model's own names, in another order.
    labels.write_text("cat\nBär\napple\n", encoding="utf-8")
    run(*words, f"--labels={labels}")
    state = json.loads(re.search(r'id="saved">(.+?)</script>', path.read_text())[1])
    first, second = state["seen"]["models"]
    assert first["classes"] == second["classes"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--html=x.html"], "--html=FILE is the page of one --image=IMAGE: give both"),
        (["--image=x.png"], "--html=FILE is the page of one --image=IMAGE: give both"),
        (["--images=absent"], "--images=absent is not a folder"),
        (["--compare=absent"], "absent"),
        (["--html=x.html", "--image=absent.png"], r"=absent\.png cannot be read"),
        (["--html=absent/x.html", "--image={image}"], "--html=absent/x.html cannot be"),
        (["--html=.", "--image={image}"], r"--html=\. is a folder: name a file in it"),
        (["--html=x.html", "--image={text}"], "--image: notes.txt cannot be decoded"),
        (["--config.seed=1"], "--config.seed: exploring takes no config"),
        (["--host=no.such.host.invalid"], r"=no\.such\.host\.invalid --port=8000"),
    ],
)
def test_bad_input_is_one_line(run, place, tmp_path, monkeypatch, words, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("no image")
    image, text = place / "images" / "noise.png", tmp_path / "notes.txt"
    with pytest.raises(UserError, match=reason):
        run(*(word.format(image=image, text=text) for word in words))


def test_ports(capsys):
    for port in ("-1", "65536", "http"):
        with pytest.raises(SystemExit) as end:
            cli.parse(explore.parser(), ["--model=x", f"--port={port}"])
        assert end.value.code == 2
        assert f"'{port}' is not a port from 0 to 65535" in capsys.readouterr().err


def test_a_large_image_is_refused(run, place, tmp_path):
    image = place / "images" / "noise.png"
    words = f"--html={tmp_path / 'x.html'}", f"--image={image}"
    with pytest.raises(UserError, match="--image: noise.png has 41x29 pixels.*0.001"):
        run(*words, "--max_megapixels=0.001")


def test_a_process_serves_until_it_is_interrupted(place):
    # A shell without job control has what it starts in the background ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    model, folder = place / "tiny.safetensors", place / "images"
    words = f"--model={model}", "--port=0", f"--images={folder}"
    (process,) = hosts.start(words, 1, verb="explore")
    signal.signal(signal.SIGINT, before)
    line = process.stdout.readline()
    address = re.match(
        r"((http://127\.0\.0\.1:\d+/)\?token=\w+) shows .*tiny\.safetensors$", line
    )
    assert address, line
    place = address[2]
    # As a browser does: the printed address brings the cookie for all others.
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with pytest.raises(urllib.error.HTTPError, match="403"):
        browser.open(f"{place}api/about").close()
    browser.open(address[1]).close()
    with browser.open(f"{place}api/about") as answer:
        assert json.load(answer)["images"] == ["noise.png"]
    opened = f"{place}api/open?name=noise.png"
    with browser.open(urllib.request.Request(opened, method="POST")) as answer:
        key = json.load(answer)["key"]
    with browser.open(f"{place}api/picture?image={key}&model=0") as answer:
        assert Image.open(io.BytesIO(answer.read())).size == (24, 16)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        browser.open(f"{place}pyproject.toml").close()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "ended\n")
    assert process.returncode == 0
