"""Bad input ends at once with one line and exit code 2, whatever the command.

The commands run in one warm process, one after another; tests/test_errors.py starts
each anew. tests/test_fuzz.py draws more cases than one thinks of.
"""

import io
import json
import os
import pathlib
import re

import jax
import numpy as np
import pytest
import warm
from hosts import xla_flags
from PIL import Image

from vit_jax import cli, models, signals
from vit_jax.config import fields
from vit_jax.data import decode
from vit_jax.printing import masked, printable
from vit_jax.training import config as configuration
from vit_jax.training.optim import SgdConfig
from vit_jax.weights import Pretrained, export

ROOT = pathlib.Path(__file__).parents[1]
QUICK = f"--config={ROOT / 'configs' / 'digits.py'}:quick"
URL = "https://me:hunter2@localhost:9/x.npz?a=1&X-Amz-Signature=beef&token=cafe"
SECRETS = ("hunter2", "beef", "cafe")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Returns a folder with broken and odd files, and weights of 5 classes."""
    folder = tmp_path_factory.mktemp("bad_input")
    (folder / "text.txt").write_text("hello")
    (folder / "folder.py").mkdir()
    (folder / "exits.py").write_text("import sys\nsys.exit(3)\n")
    late = "import sys\n\n\ndef get_config(arg=None):\n    sys.exit('bye')\n"
    (folder / "exits_late.py").write_text(late)
    (folder / "loop.png").symlink_to("loop.png")
    os.mkfifo(folder / "pipe.png")
    (folder / "mixed").mkdir()
    (folder / "mixed" / "loop.png").symlink_to("loop.png")
    grey = np.random.default_rng(0).integers(0, 256, (9, 7), dtype=np.uint8)
    Image.fromarray(grey).save(folder / "mixed" / "sound.png")
    weights(folder / "five.safetensors", "12345")
    weights(folder / "escapes.safetensors", ["a\x1b[31m", "b\nerror: no", *"cde"])
    return folder


def weights(path, names):
    """Writes a network for 8x12 pixels as a file of this project."""
    model = models.create(
        "Ti/4",
        num_classes=5,
        image_size=(8, 12),
        width=12,
        depth=1,
        num_heads=3,
        mlp_dim=20,
    )
    params = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, np.float32),
        jax.eval_shape(model.init, jax.random.key(0)),
    )
    found = Pretrained(
        params, model.options, "vit_jax", "test", class_names=tuple(names)
    )
    export.export(found, "safetensors", path, overwrite=False)


@pytest.fixture(scope="module")
def process(place):
    """Returns the process that runs the commands."""
    own = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(), "PYTHONPATH": str(ROOT)}
    with warm.Process(place, **own) as process:
        yield process


@pytest.fixture
def refused(process):
    """Runs a command that must be refused, and returns its one line."""

    def run(verb, *words, **options):
        end = process.run(verb, list(map(str, words)), **options)
        assert (end.code, end.err.count("\n")) == (2, 1), end
        assert end.err.startswith("error: ")
        return end.err

    return run


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("text.txt", "--config=text.txt: does not end in .py; give a Python file"),
        ("folder.py", "--config=folder.py: is not a file; give a Python file"),
        (".", "--config=.: is not a file; give a Python file"),
        ("/dev/null", "--config=/dev/null: is not a file; give a Python file"),
        ("exits.py", "config file exits.py does not run: SystemExit: 3; it must"),
        ("exits_late.py", "config file exits_late.py does not run: SystemExit: bye;"),
        ("x" * 5_000 + ".py", "not found"),
    ],
)
def test_config_that_is_no_python_file_or_exits_is_refused(refused, name, match):
    assert match in refused("train", f"--config={name}", "--workdir=run")


@pytest.mark.parametrize("verb", ["predict", "explore", "visualize"])
@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("pipe.png", "pipe.png.* is a pipe"),
        ("/dev/zero", "/dev/zero.* is a device, not a file"),
        ("loop.png", "loop.png.*(is a broken link|symbolic links)"),
    ],
)
def test_image_that_is_no_file_is_refused(refused, verb, name, match, tmp_path):
    words = {
        "predict": [name],
        "explore": [f"--html={tmp_path / 'x.html'}", f"--image={name}"],
        "visualize": [f"--out={tmp_path / 'out'}", "--images", name],
    }[verb]
    line = refused(verb, "--model=five.safetensors", *words)
    assert re.search(match, line), line
    assert list(tmp_path.iterdir()) == []


def test_image_that_leads_to_itself_does_not_keep_others_from_a_prediction(process):
    end = process.run("predict", ["--model=five.safetensors", "mixed"])
    assert end.code == 1, end
    assert "mixed/sound.png" in end.out
    lines = [line for line in end.err.splitlines() if "loop.png" in line]
    assert lines == [
        "mixed/loop.png: cannot be read (Too many levels of symbolic links)"
    ]


@pytest.mark.parametrize("flag", ["--model", "--labels"])
def test_weights_and_labels_that_are_a_pipe_are_refused(refused, flag):
    words = {"--model": "five.safetensors"} | {flag: "pipe.png"}
    words = [f"{name}={value}" for name, value in words.items()]
    line = refused("predict", *words, "mixed/sound.png")
    assert "pipe.png: is a pipe (FIFO), not a file; copy its content" in line


@pytest.mark.parametrize(
    ("verb", "words", "match"),
    [
        ("predict", ["--model=five.safetensors", "mixed"], "argument --resolution: "),
        ("transfer", ["--model=x", "--dataset=digits"], "argument --resolution: "),
        ("summary", ["--variant=B/16"], "--resolution=1000000: more than 100,000,000"),
    ],
)
def test_resolution_of_a_million_is_refused(refused, verb, words, match):
    line = refused(verb, *words, "--resolution=1000000")
    assert match in line
    assert "more than 100,000,000 pixels" in line


@pytest.mark.parametrize(
    "variant", ["B/99999999999", "R50x99999999999", "B/" + "9" * 5000]
)
def test_variant_of_an_impossible_size_is_refused(refused, variant):
    line = refused("summary", f"--variant={variant}")
    assert f"model.variant='{variant}'" in line
    assert "from 1 to 9" in line


@pytest.mark.parametrize(
    ("word", "match"),
    [
        ("total_steps=9223372036854775809", "must be below 2**31"),
        ("total_steps=2147483648", "must be below 2**31"),
        ("log_every_steps=9223372036854775808", "must be below 2**63"),
        ("data.image_size=(1000000,1000000)", "more than 100,000,000 pixels"),
        ("data.num_threads=100000", "must be at most 1024"),
        ("stall_timeout=1e300", "must be below 2**31"),
        ("data.name=os:system", "runs the code of that module, which raised TypeError"),
        ("model.depth=100000", "model.depth=100000 must be at most 1000"),
        ("model.pool=none", "model.pool='none' classifies each token"),
        ("model.width=2147483646", "out of memory before the start: the network has"),
    ],
)
def test_value_that_no_run_can_have_is_refused_before_the_workdir(
    refused, word, match, tmp_path
):
    line = refused("train", QUICK, f"--config.{word}", f"--workdir={tmp_path / 'run'}")
    assert word.split("=")[0].split(".")[-1] in line or "out of memory" in line
    assert match in line
    assert list(tmp_path.iterdir()) == []


def test_length_in_epochs_that_is_too_many_steps_is_refused():
    optim = SgdConfig(learning_rate=0.1)
    config = configuration.TrainConfig(epochs=1e9, batch_size=2, optim=optim)
    with pytest.raises(ValueError, match=r"epochs=1000000000.0: .* fewer than 2\*\*31"):
        config.num_steps(5)


def test_sheet_larger_than_fits_is_refused(refused, tmp_path):
    for words in (["--rows=100000", "--columns=100000"], ["--columns=10000000"]):
        line = refused("show_batch", QUICK, f"--out={tmp_path / 'x.png'}", *words)
        assert "more than 100,000,000: lower --rows and --columns" in line
    assert list(tmp_path.iterdir()) == []


def test_quick_says_that_it_does_not_read_a_data_folder(process, tmp_path):
    words = [QUICK, "--config.data.data_dir=/photos", f"--out={tmp_path / 'x.png'}"]
    end = process.run("show_batch", words)
    assert (end.code, (tmp_path / "x.png").exists()) == (0, True), end
    assert end.err.startswith(
        "data.data_dir='/photos' is not read: data.name='synthetic'"
    )


# What is printed.


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--model=five.safetensors", "no\x1b[31m\nsuch.png"], r"no\x1b[31m\nsuch.png"),
        (["--model=no\x07such", "mixed"], r"no\x07such"),
        (["--model=five.safetensors", "--labels=no\x1bsuch", "mixed"], r"no\x1bsuch"),
        (["--model=x", "mixed", "--no\x1bsuch"], r"no\x1bsuch"),
    ],
)
def test_control_characters_of_what_is_given_are_escaped(refused, words, shown):
    line = refused("predict", *words)
    assert shown in line.replace("\\\\", "\\")
    assert line[:-1].isprintable()


def test_control_characters_of_a_config_are_escaped(refused):
    line = refused("train", QUICK, "--config.data.split=tr\x1b[2Jain", "--workdir=run")
    assert r"tr\x1b[2Jain" in line
    assert line[:-1].isprintable()


def test_control_characters_of_files_and_classes_are_escaped(process, place):
    name = "mixed/a\x1b]0;b\n.png"
    (place / name).write_bytes((place / "mixed" / "sound.png").read_bytes())
    words = ["--model=escapes.safetensors", name]
    end = process.run("predict", words)
    assert end.code == 0, end
    lines = end.out.splitlines()
    assert all(line.isprintable() for line in lines), end.out
    assert len(lines) == 6
    assert lines[1].startswith(r"mixed/a\x1b]0;b\n.png  ")
    assert [line.split("%  ")[1] for line in lines[1:3]] == [
        r"a\x1b[31m",
        r"b\nerror: no",
    ]
    told = json.loads(process.run("predict", [*words, "--json"]).out)
    assert told["file"] == name  # JSON escapes on its own.
    assert told["predictions"][1]["name"] == "b\nerror: no"


def test_printable_keeps_text_of_any_script():
    for text in ("tulpe", "Gänseblümchen", "チューリップ", "a\u3000b", "x\\n"):
        assert printable(text) == text
    assert printable("a\u202eb\u2028c\udce9") == r"a\u202eb\u2028c\udce9"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (URL, "https://***@localhost:9/x.npz?a=1&X-Amz-Signature=***&token=***"),
        ("see (gs://key@b/x): no", "see (gs://***@b/x): no"),
        ("hf://timm/vit@main/x", "hf://timm/vit@main/x"),
        ("https://h/a?b=1#sha256=ab12", "https://h/a?b=1#sha256=ab12"),
        (
            "https://h/a?AWSAccessKeyId=k&api_key=l",
            "https://h/a?AWSAccessKeyId=***&api_key=***",
        ),
        ("user:pass@host", "user:pass@host"),
        ("at https://me:a/b?c#d@h:9/x, no", "at https://***@h:9/x, no"),
        ("'https://me:a@b@[::1]:9/x' a@b", "'https://***@[::1]:9/x' a@b"),
        ("https://a:b@h/x,http://c:d@h/y", "https://***@h/x,http://***@h/y"),
        ("http://h:80/@me/x@1", "http://h:80/@me/x@1"),
        ("http://[::1]:80/x@1", "http://[::1]:80/x@1"),
        ("https://h/@me/x@1.js?m=a@b", "https://h/@me/x@1.js?m=a@b"),
    ],
)
def test_passwords_of_urls_are_masked(text, shown):
    assert masked(text) == shown


@pytest.mark.parametrize("verb", ["convert", "predict", "train"])
def test_passwords_are_in_no_message(process, verb, tmp_path):
    words = {
        "convert": [f"--model={URL}", "--to=timm", f"--out={tmp_path / 'out'}"],
        "predict": [f"--model={URL}", "mixed", "--debug"],
        "train": [QUICK, f"--config.init={URL}", f"--workdir={tmp_path / 'run'}"],
    }[verb]
    end = process.run(verb, words)
    assert end.code == 2, end
    assert "https://***@localhost:9/x.npz?a=1&X-Amz-Signature=***" in end.err
    assert [s for s in SECRETS if s in end.out + end.err] == []


def test_passwords_are_in_no_config_that_is_written():
    config = configuration.load(QUICK.removeprefix("--config="), {"init": URL})
    text = json.dumps(fields.to_json(config))
    assert [s for s in SECRETS if s in text] == []
    assert config.init.checkpoint == URL  # It is still to be fetched.


# Images.


def tiff(values):
    stream = io.BytesIO()
    Image.fromarray(np.asarray(values, np.float32)).save(stream, "TIFF")
    return stream.getvalue()


def test_floats_from_0_to_1_are_scaled():
    values = np.linspace(0, 1, 15).reshape(3, 5)
    pixels = decode.decode(tiff(values), channels=1)
    np.testing.assert_array_equal(pixels[..., 0], np.round(values * 255))


@pytest.mark.parametrize("value", [-0.1, 1.5, 255, np.nan, np.inf])
def test_other_floats_are_refused(value):
    with pytest.raises(
        decode.DamagedImage, match=r"has float pixels from .* scale them"
    ):
        decode.decode(tiff([[0.5, value]]))


def test_full_memory_while_flags_are_read_is_an_error(monkeypatch, capsys):
    def full(*args):
        raise MemoryError("no 3 GB")

    monkeypatch.setattr(signals, "catch", lambda *, trains: None)
    monkeypatch.setattr(cli, "parse", full)
    with pytest.raises(SystemExit) as end:
        cli.run(lambda flags: 0, cli.Parser("A verb."))
    assert end.value.code == 2
    assert "error: out of memory (no 3 GB): ask for less" in capsys.readouterr().err
