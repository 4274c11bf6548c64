"""Bad input ends at once with one line and exit code 2, whatever the command.

The commands run in one warm process, one after another. tests/test_errors.py has runs that
have begun, tests/test_fuzz.py draws more cases than one thinks of.
"""

import importlib.util
import io
import json
import os
import pathlib
import shlex

import numpy as np
import pytest
import warm
from helpers import full_disk, write_weights
from hosts import write_recipe, xla_flags
from PIL import Image

from vit_jax.command_line import cli, files, signals
from vit_jax.command_line.printing import masked, printable
from vit_jax.config import fields
from vit_jax.data import decode
from vit_jax.training import config as configuration
from vit_jax.training.optim import SgdConfig

ROOT = pathlib.Path(__file__).parents[1]
QUICK = f"--config={ROOT / 'configs' / 'digits.py'}:quick"
URL = "https://me:hunter2@localhost:9/x.npz?a=1&X-Amz-Signature=beef&token=cafe"
SECRETS = ("hunter2", "beef", "cafe")
RECIPES = {
    "exits.py": "import sys\nsys.exit(3)",
    "exits_late.py": "import sys\ndef get_config(arg=None):\n    sys.exit('bye')",
    "syntax.py": "def get_config(arg=None) return 1",
    "imports.py": "import no_such_module",
    "no_function.py": "c = 1",
    "none.py": "def get_config(arg=None): return None",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Returns a folder with recipes, broken and odd files, and weights of 5 classes."""
    folder = tmp_path_factory.mktemp("bad_input")
    write_recipe(folder / "tiny.py")
    for name, text in RECIPES.items():
        (folder / name).write_text(f"{text}\n")
    (folder / "text.txt").write_text("hello")
    (folder / "folder.py").mkdir()
    (folder / "loop.png").symlink_to("loop.png")
    os.mkfifo(folder / "pipe.png")
    (folder / "mixed").mkdir()
    (folder / "mixed" / "loop.png").symlink_to("loop.png")
    grey = np.random.default_rng(0).integers(0, 256, (9, 7), dtype=np.uint8)
    Image.fromarray(grey).save(folder / "mixed" / "sound.png")
    options = {"variant": "Ti/4", "num_classes": 5, "image_size": (8, 12)}
    write_weights(folder / "five.safetensors", "12345", **options)
    names = ["a\x1b[31m", "b\nerror: no", *"cde"]
    write_weights(folder / "escapes.safetensors", names, **options)
    return folder


@pytest.fixture(scope="module")
def process(place):
    """Returns the process that runs the commands."""
    own = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(), "PYTHONPATH": str(ROOT)}
    with warm.Process(place, **own) as process:
        yield process


@pytest.fixture
def refused(process):
    """Runs a command that must be refused, and returns its one line."""

    def run(verb, *words):
        end = process.run(verb, list(map(str, words)), seconds=100)
        assert (end.code, end.err.count("\n")) == (2, 1), end
        assert end.err.startswith("error: ")
        return end.err

    return run


TINY = "train --config=tiny.py --workdir=OUT/run"
DIGITS = "train --config=digits:quick --workdir=OUT/run"
FIVE = "predict --model=five.safetensors"
NO_FILE = "is not a file; give a Python file"
NO_IMAGES = [
    (f"{command}{name}", message)
    for command in (
        *(f"{FIVE} ", "explore --model=five.safetensors --html=OUT/x.html --image="),
        "visualize --model=five.safetensors --out=OUT/out --images ",
    )
    for name, message in (
        ("pipe.png", "pipe.png... is a pipe"),
        ("/dev/zero", "/dev/zero... is a device, not a file"),
        ("loop.png", "loop.png... link"),
    )
]
# A command, and parts of its line with "..." between them; OUT is a folder that stays empty.
CASES = [
    ("train", "required: --config; --help"),
    ("train --config=text.txt", "text.txt: does not end in .py; give a Python file"),
    ("train --config=folder.py", f"--config=folder.py: {NO_FILE}"),
    ("train --config=.", f"--config=.: {NO_FILE}"),
    ("train --config=/dev/null", f"--config=/dev/null: {NO_FILE}"),
    ("train --config=exits.py", "exits.py does not run: SystemExit: 3; it must"),
    ("train --config=exits_late.py", "exits_late.py does not run: SystemExit: bye;"),
    ("train --config=syntax.py", "syntax.py...SyntaxError...get_config(arg=None)"),
    ("train --config=imports.py", "No module named 'no_such_module'...--debug"),
    ("train --config=no_function.py", "has no attribute 'get_config'"),
    ("train --config=none.py", "none.py...TypeError"),
    (f"train --config={'x' * 5_000}.py", "not found"),
    ("train --config=configs/digit.py", "configs/digit.py not found...digits"),
    ("train --config=digits:quik", "config argument 'quik'...it takes schedule, quick"),
    (
        "train --config=digits_finetune",
        "init='?'...digits_finetune...--config.init...paper:B/16-i21k",
    ),
    (f"{TINY} --workdri=w", "unrecognized...--workdri=w...--help"),
    (f"{TINY} --config.total_steps", "--config.total_steps has no value...--help"),
    (
        f"{TINY} --config.optim.learning_rte=1",
        "unknown config key optim.learning_rte...known key is optim.learning_rate",
    ),
    (
        f"{TINY} --config.data.image_size=(8,13)",
        "image width 13...patch size 4...data.image_size...such as 12",
    ),
    (f"{TINY} --config.model.num_heads=5", "width=12...num_heads=5...model.num_heads"),
    (
        f"{TINY} '--config.data.train_transform=random_crop(8 | flip'",
        "cannot read 'random_crop(8'...'random_resized_crop(224) | flip'",
    ),
    (
        f"{TINY} --config.optim.weight_decay=0.1 --config.optim.weight_decay_mask=/kernl$",
        "optim.weight_decay_mask...'/kernl$'...none of the 24 parameters...such as",
    ),
    (f"{TINY} --config.mesh.data=3", "mesh.data=3 x...1 devices...make 3...-1"),
    (
        f"{TINY} --config.data.name=imagenet21k --config.data.data_dir=OUT",
        "data.name='imagenet21k'...vit_jax.prepare...--name=imagenet21k --data_dir=/",
    ),
    (
        f"{TINY} --config.model.mlp_dim=2000000000 --config.model.width=3000",
        "out of memory before the start: the network has 12,002,...48,0...more devices",
    ),
    (
        f"{DIGITS} --config.total_steps=9223372036854775809",
        "total_steps=9223372036854775809 must be below 2**31",
    ),
    (
        f"{DIGITS} --config.total_steps=2147483648",
        "total_steps=2147483648 must be below 2**31",
    ),
    (
        f"{DIGITS} --config.log_every_steps=9223372036854775808",
        "log_every_steps=9223372036854775808 must be below 2**63",
    ),
    (
        f"{DIGITS} --config.data.image_size=(1000000,1000000)",
        "data.image_size=(1000000, 1000000): more than 100,000,000 pixels",
    ),
    (
        f"{DIGITS} --config.data.num_threads=100000",
        "data.num_threads=100000 must be at most 1024",
    ),
    (f"{DIGITS} --config.stall_timeout=1e300", "stall_timeout=1e+300 must be below 2*"),
    (
        f"{DIGITS} --config.data.name=os:system",
        "data.name='os:system'...that module, which raised TypeError",
    ),
    (f"{DIGITS} --config.model.depth=100000", "depth=100000 must be at most 1000"),
    (f"{DIGITS} --config.model.pool=none", "model.pool='none' classifies each token"),
    (f"{DIGITS} --config.model.width=2147483646", "out of memory before the start"),
    (
        "train --config=tiny.py --workdir=text.txt",
        "--workdir=text.txt...is a file...choose another --workdir",
    ),
    ("train --config=tiny.py --workdir=text.txt/below", "is a file...--workdir"),
    *NO_IMAGES,
    ("predict --model=pipe.png mixed/sound.png", "pipe.png: is a pipe (FIFO), not a f"),
    (f"{FIVE} --labels=pipe.png mixed/sound.png", "pipe.png: is a pipe...copy its con"),
    (f"{FIVE} mixed --resolution=1000000", "--resolution: ...100,000,000 pixels"),
    (
        "transfer --model=x --dataset=digits --resolution=1000000",
        "argument --resolution: ...more than 100,000,000 pixels",
    ),
    (
        "summary --variant=B/16 --resolution=1000000",
        "--resolution=1000000: more than 100,000,000 pixels",
    ),
    ("summary --variant=B/99999999999", "model.variant='B/99999999999'...from 1 to 9"),
    ("summary --variant=R50x99999999999", "variant='R50x99999999999'...from 1 to 9"),
    (f"summary --variant=B/{'9' * 5000}", "model.variant='B/9...from 1 to 9"),
    (
        f"show_batch {QUICK} --out=OUT/x.png --rows=100000 --columns=100000",
        "more than 100,000,000: lower --rows and --columns",
    ),
    (f"show_batch {QUICK} --out=OUT/x.png --columns=10000000", "lower --rows and"),
]


@pytest.mark.parametrize(("command", "message"), CASES, ids=range(len(CASES)))
def test_what_cannot_be_is_refused_in_one_line(refused, tmp_path, command, message):
    line = refused(*shlex.split(command.replace("OUT", str(tmp_path))))
    assert [part for part in message.split("...") if part not in line] == [], line
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_without_its_packages_says_what_to_install(refused):
    if importlib.util.find_spec("gcsfs"):
        pytest.skip("gcsfs is installed")
    line = refused("train", "--config=tiny.py", "--workdir=gs://bucket/run")
    assert "pip install -e '.[gcs]' in the clone" in line


def test_debug_gives_the_traceback_as_well(process):
    words = ["--config=tiny.py", "--config.optim.learning_rte=1", "--debug"]
    end = process.run("train", words)
    assert end.code == 2
    assert end.err.startswith("Traceback (most recent call last):\n")
    assert end.err.splitlines()[-1].startswith("error: unknown config key optim.learn")


def test_image_that_leads_to_itself_does_not_keep_others_from_a_prediction(process):
    end = process.run("predict", ["--model=five.safetensors", "mixed"])
    assert end.code == 1, end
    assert "mixed/sound.png" in end.out
    (line,) = [line for line in end.err.splitlines() if "loop.png" in line]
    assert line == "mixed/loop.png: cannot be read (Too many levels of symbolic links)"


def test_length_in_epochs_that_is_too_many_steps_is_refused():
    optim = SgdConfig(learning_rate=0.1)
    config = configuration.TrainConfig(epochs=1e9, batch_size=2, optim=optim)
    with pytest.raises(ValueError, match=r"epochs=1000000000.0: .* below 2\*\*31"):
        config.num_steps(5)


def test_quick_says_that_it_does_not_read_a_data_folder(process, tmp_path):
    words = [QUICK, "--config.data.data_dir=/photos", f"--out={tmp_path / 'x.png'}"]
    end = process.run("show_batch", words)
    assert (end.code, (tmp_path / "x.png").exists()) == (0, True), end
    said = "data.data_dir='/photos' is not read: data.name='synthetic'"
    assert end.err.startswith(said)


@pytest.mark.parametrize(
    ("verb", "words", "shown"),
    [
        ("predict", ["--model=five.safetensors", "no\x1b\nsuch.png"], r"no\x1b\nsuch."),
        ("predict", ["--model=no\x07such", "mixed"], r"no\x07such"),
        ("predict", ["--model=x", "--labels=no\x1bsuch", "mixed"], r"no\x1bsuch"),
        ("predict", ["--model=x", "mixed", "--no\x1bsuch"], r"no\x1bsuch"),
        ("train", [QUICK, "--config.data.split=tr\x1b[2Jain"], r"tr\x1b[2Jain"),
    ],
)
def test_control_characters_of_what_is_given_are_escaped(refused, verb, words, shown):
    line = refused(verb, *words)
    assert shown in line.replace("\\\\", "\\")
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
    shown = {line.split("%  ")[1] for line in lines[1:]}
    assert shown == {r"a\x1b[31m", r"b\nerror: no", *"cde"}
    told = json.loads(process.run("predict", [*words, "--json"]).out)
    assert told["file"] == name  # JSON escapes on its own.
    assert "b\nerror: no" in {each["name"] for each in told["predictions"]}


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
            "https://h/?AWSAccessKeyId=k&api_key=l",
            "https://h/?AWSAccessKeyId=***&api_key=***",
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


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("convert", [f"--model={URL}", "--to=timm", "--out=out"]),
        ("predict", [f"--model={URL}", "mixed", "--debug"]),
        ("train", [QUICK, f"--config.init={URL}"]),
    ],
)
def test_passwords_are_in_no_message(process, verb, words):
    end = process.run(verb, words)
    assert end.code == 2, end
    assert "https://***@localhost:9/x.npz?a=1&X-Amz-Signature=***" in end.err
    assert [s for s in SECRETS if s in end.out + end.err] == []


def test_passwords_are_in_no_config_that_is_written():
    config = configuration.load(QUICK.removeprefix("--config="), {"init": URL})
    text = json.dumps(fields.to_json(config))
    assert [s for s in SECRETS if s in text] == []
    assert config.init.checkpoint == URL  # It is still to be fetched.


def tiff(values):
    stream = io.BytesIO()
    Image.fromarray(np.asarray(values, np.float32)).save(stream, "TIFF")
    return stream.getvalue()


def test_floats_from_0_to_1_are_scaled_and_others_refused():
    values = np.linspace(0, 1, 15).reshape(3, 5)
    pixels = decode.decode(tiff(values), channels=1)
    np.testing.assert_array_equal(pixels[..., 0], np.round(values * 255))
    for value in (-0.1, 1.5, 255, np.nan, np.inf):
        with pytest.raises(decode.DamagedImage, match="float pixels from .* scale"):
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


def test_a_full_disk_is_one_line_that_names_the_file(tmp_path, monkeypatch, capsys):
    path = tmp_path / "result.csv"

    def main(flags):
        with full_disk(10):
            files.replace_text(path, "more than ten bytes")

    monkeypatch.setattr(signals, "catch", lambda *, trains: None)
    monkeypatch.setattr(cli, "parse", lambda parser: None)
    with pytest.raises(SystemExit) as end:
        cli.run(main, cli.Parser("A verb."))
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {path} cannot be written (File")
    assert list(tmp_path.iterdir()) == []
