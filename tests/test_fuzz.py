"""Bad input of all kinds to every command: one line, exit code 2, at once.

152 cases, drawn by a seed: flags and config keys of every type with values that do not
fit, files and folders that are none, and images of all kinds. One warm process runs all
cases. A failure prints the command line of each case that was not met;
tests/test_bad_input.py and the others have the cases that were.
"""

import collections
import io
import os
import pathlib
import random
import re
import shutil
import struct
import zlib

import numpy as np
import pytest
import warm
from helpers import write_weights
from hosts import xla_flags
from PIL import Image

from vit_jax.config import fields
from vit_jax.training.config import TrainConfig

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[1]
SEED = int(os.environ.get("FUZZ_SEED", "16"))  # Others find what these cases miss.
SECONDS = 20  # In which bad input is refused.
LONGEST = 60  # Seconds of a case that turns out to be sound.
MEMORY = 12 << 30  # Bytes; a case that asks for more gets an error, not the machine.

VALUES = [
    *("", " ", "-", "--", "-1", "0", "1", "2", "3.5", "-0.0", "1e-400", "1e308"),
    *("1e400", "nan", "inf", "-inf", "0x10", "1_000", "9" * 19, "9" * 25, "9" * 5_000),
    *("9223372036854775807", "9223372036854775808", "4294967296", "2147483648"),
    *("None", "True", "false", "()", "(1,)", "(0, 0)", "(1, 2, 3)", "(-1, 8)"),
    *("[1, 'a']", "{}", "{'a': 1}", "{'a': {'b': {}}}", "b'x'", "1j", "1+", "[", "'"),
    *("(" * 300, "a", "ü", "名前", "\x1b[31m", "a\nerror: b", "a\tb", "\x7f"),
    *("\u202ea", "\udce9", "x" * 5_000, "../..", "/", ".", "~", "~nobody/x", "$HOME"),
    *("*", "%s%n", "{0}", "(?P<", "*(", "\\", ",", ",,", ";", "|", "a|b", "=", "a=b"),
    *("@", "#", "a#b", ":", "train[", "train[:0%]", "train[9:1]", "train[:200%]"),
    *("even_splits(train, 0)[0]", "http://", "https://me:hunter2@localhost:9/x.npz"),
    *("gs://", "hf://", "hf://a/b@", "file:///etc/passwd", "os:system", "json:loads"),
    *("resize(0)", "resize(-1, 2)", "flip | ", "random_crop(1000000)", "B/0"),
    *("random_resized_crop('a')", "normalize"),
]
FILES = [
    "missing",
    "missing/below",
    "folder",
    "empty",
    "text",
    "garbage",
    "pipe",
    "loop",
    "/dev/zero",
    "/dev/null",
    "cut.safetensors",
    "cut.npz",
    "list.json",
    "wrong.npz",
    "wrong.safetensors",
    "zeros",
    "binary.py",
    "raises.py",
    "exits.py",
    "no_config.py",
    "loops.py",
    "below/text",
    "text/below",
    "socket",
    "bad.pth",
    "sealed",
]
# Lines on stderr beside the one of the error, and of commands that succeed.
NOTES = (
    r".*has no preprocessing; assumed the preprocessing of .*: .*",
    r"data\.data_dir=.* is not read: data\.name=.*",
    r".*does not name its 1,000 classes; assumed ImageNet's classes",
    r".*: a small stand-in for the network, synthetic images and 3 steps show that the recipe runs, .*",
    r"figure skipped: .*",
    r"\S*: (is empty|cannot be|has ).*",  # An image of several.
    r"left out, \d+ damaged:|  .*",
    r".*: \d+/\d+",  # The progress of dedup.
    r"compiled programs are not kept: .*",
    r"written to .*: .*",
)
LEFT = re.compile(r"\.(new|part|tmp|incomplete|lock)$|orbax-checkpoint-tmp")
WRITING = ("train", "visualize")  # What is whole stays when the rest fails.
# Codes that a command may end with.
CODES = collections.defaultdict(lambda: (0, 2)) | {
    "predict": (0, 1, 2),
    "features": (0, 1, 2),
    "visualize": (0, 1, 2),
    "dedup": (0, 1, 2),
    "compile": (0, 2, 3),
}


def png(width, height, depth=8, colour=2, data=b""):
    """Returns a PNG file of whatever its header says."""

    def chunk(kind, content):
        sums = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + sums

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(data))
        + chunk(b"IEND", b"")
    )


def saved(array, form, mode=None, **options):
    stream, picture = io.BytesIO(), Image.fromarray(array)
    picture = picture.convert("RGB").convert(mode) if mode else picture
    picture.save(stream, form, **options)
    return stream.getvalue()


def images():
    """Returns images of all kinds as files, few of them sound, by name."""
    draw = np.random.default_rng(SEED)
    rgb = draw.integers(0, 256, (23, 31, 3), dtype=np.uint8)
    grey, other = rgb[..., 0], Image.fromarray(255 - rgb)
    floats = grey.astype(np.float32) / 255
    return {
        "0.png": b"",
        "1x1.png": saved(rgb[:1, :1], "PNG"),
        "huge.png": png(2**31 - 1, 2**31 - 1),
        "cut.png": saved(rgb, "PNG")[:-40],
        "cut.jpg": saved(rgb, "JPEG")[:200],
        "cmyk.jpg": saved(np.dstack([rgb, grey]), "JPEG", mode="CMYK"),
        "16.png": saved(grey.astype(np.uint16) * 257, "PNG"),
        "animated.gif": saved(rgb, "GIF", save_all=True, append_images=[other]),
        "float.tif": saved(floats, "TIFF"),
        "hdr.tif": saved(floats * 1_000, "TIFF"),
        "nan.tif": saved(floats * np.nan, "TIFF"),
        "bomb.png": png(60_000, 60_000, data=bytes(10**7)),
        "jpeg.png": saved(rgb, "JPEG"),
        "text.png": b"this is no image\n",
        "thin.png": saved(draw.integers(0, 256, (1, 5_000, 3), dtype=np.uint8), "PNG"),
        "alpha.png": saved(np.dstack([rgb, grey]), "PNG"),
        "palette.gif": saved(grey, "GIF"),
        "bits.png": saved(grey > 127, "PNG"),
        "cut.tif": saved(rgb, "TIFF")[:100],
        "zeros.jpg": bytes(1_000),
        "sound.png": saved(rgb, "PNG"),
    }


IMAGES = images()


def make_files(place):
    """Writes files that are not what a flag wants, and those that are."""
    draw = np.random.default_rng(SEED)
    (place / "folder").mkdir()
    (place / "below").mkdir()
    (place / "below" / "text").write_text("a\n")
    (place / "sealed").mkdir(mode=0)
    config = "def get_config(arg=None):\n    "
    np.savez(place / "wrong.npz", a=np.zeros(3))
    whole = (place / "sound.safetensors").read_bytes()
    files = {
        "empty": b"",
        "text": b"hello\nworld\n",
        "garbage": draw.bytes(5_000),
        "zeros": bytes(5_000),
        "list.json": b"[1, 2, {",
        "cut.safetensors": whole[: len(whole) // 2],
        "wrong.safetensors": struct.pack("<Q", 2) + b"{}",
        "cut.npz": (place / "wrong.npz").read_bytes()[:-50],
        "bad.pth": b"\x80\x02}q\x00.",
        "binary.py": draw.bytes(300),
        "raises.py": f"{config}raise KeyError('\\x1b[2J')\n".encode(),
        "exits.py": b"import sys\nsys.exit(7)\n",
        "no_config.py": b"x = 1\n",
        "loops.py": f"{config}return get_config(arg)\n".encode(),
    }
    for name, data in files.items():
        (place / name).write_bytes(data)
    os.mkfifo(place / "pipe")
    os.mknod(place / "socket", 0o140600)  # S_IFSOCK
    (place / "loop").symlink_to("loop")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Returns a file with weights of 5 classes."""
    path = tmp_path_factory.mktemp("weights") / "sound.safetensors"
    write_weights(path, variant="Ti/4", num_classes=5, image_size=(8, 12))
    return path


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """Yields the process that runs all commands, and its folder."""
    folder = tmp_path_factory.mktemp("fuzz")
    place = folder / "place"
    place.mkdir()
    own = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(),
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        # Nothing is fetched: whatever name it is.
        "HF_HUB_OFFLINE": "1",
        **dict.fromkeys(("http_proxy", "https_proxy"), "http://localhost:9"),
    }
    with warm.Process(place, memory=MEMORY, **own) as started:
        yield started, place


@pytest.fixture
def place(process, weights):
    """Returns the folder that a command is run in, its files as at first."""
    _, place = process
    for path in place.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    (place / "images").mkdir()
    for name, data in IMAGES.items():
        (place / "images" / name).write_bytes(data)
    sound = IMAGES["sound.png"]
    shutil.copy(weights, place)
    make_files(place)
    for split, count in (("train", 4), ("test", 2)):
        for name in "abcde":
            where = place / "data" / split / name
            where.mkdir(parents=True)
            for i in range(count):
                (where / f"{i}.png").write_bytes(sound)
    (place / "sound.png").write_bytes(sound)
    (place / "names").write_text("one\ntwo\nthree\nfour\nfive\n")
    return place


CONFIGS = ROOT / "configs"
TRAIN = f"--config={CONFIGS}/digits.py:quick"
SOUND = "--model=sound.safetensors"
WEIGHTS = "--labels:file --resolution --mean --std --interpolation --crop_pct"
WEIGHTS += " --num_heads --architecture"
DRAWN = "--figure --query --layers --discard --classes "
# Of each command: how many cases, a sound command line (OUT is a path that is not there),
# and its flags with what each takes: a file, an image, or by default a value. ":image" is
# a word without a flag, KEY:key a key of the config.
COMMANDS = {
    "train": (30, f"{TRAIN} --workdir=OUT", "--config:file --workdir:file KEY:key"),
    "evaluate": (
        12,
        f"{SOUND} --config={CONFIGS}/eval/classification.py:data=data --out=OUT",
        f"--model:file --config:file --out:file KEY:key {WEIGHTS}",
    ),
    "predict": (
        24,
        f"{SOUND} sound.png",
        f"--model:file :image --topk --batch_size {WEIGHTS}",
    ),
    "features": (
        8,
        f"{SOUND} sound.png --out=OUT.parquet",
        f"--model:file :image --out:file --layers --batch_size {WEIGHTS}",
    ),
    "convert": (
        11,
        f"{SOUND} --to=timm --out=OUT",
        f"--model:file --to --out:file {WEIGHTS}",
    ),
    "prepare": (
        8,
        "--dataset=folder --from=data --data_dir=OUT",
        "--from:file --data_dir:file --name --splits --processes --shard_mb "
        + "--on_error --imports --caption",
    ),
    "datasets": (3, "", ":value --data_dir:file"),
    "summary": (
        8,
        "--variant=Ti/16",
        "--variant --resolution --classes --images --config:file",
    ),
    "show_batch": (
        10,
        f"{TRAIN} --out=OUT.png",
        "--config:file --out:file --rows --columns KEY:key",
    ),
    "dedup": (
        6,
        "--pretrain=folder@data#train --against=folder@data#test --out=OUT",
        "--pretrain --against --out:file --correlation --threads",
    ),
    "compile": (
        4,
        f"{TRAIN} --topology=v5e:2x2",
        "--config:file --topology --slices KEY:key",
    ),
    "transfer": (
        8,
        f"{SOUND} --dataset=data --workdir=text",  # Nothing is trained: that is a file.
        "--model:file --dataset --learning_rates --layer_decay --resolution "
        + "--seeds --test KEY:key",
    ),
    "study": (
        4,
        f"--config={CONFIGS}/study/positions.py --workdir=text",
        "--config:file --only --seeds KEY:key",
    ),
    "visualize": (
        14,
        f"{SOUND} --images=sound.png --out=OUT",
        "--model:file --images:image --out:file --compare:file " + DRAWN + WEIGHTS,
    ),
    "explore": (
        6,
        f"{SOUND} --html=OUT --image=sound.png",
        "--model:file --html:file --image:image --images:file --port --compare:file",
    ),
    "report": (4, "folder --out=OUT", ":file --out:file"),
}
assert sum(count for count, _, _ in COMMANDS.values()) == 160


def keys():
    """Returns every config key, with and without those of a choice."""
    names = set(fields.fields(TrainConfig))
    for section, _, cls in fields.sections(TrainConfig):
        if "NAME" not in section:
            names |= {f"{section}.{key}" for key in fields.fields(cls)}
    return sorted({*names, "evals.val", "evals.a.b", "x", ""})


def cases(verb):
    """Yields command lines, the same for a seed: each is a sound one with a fault or two."""
    count, sound, flags = COMMANDS[verb]
    kinds = {
        name: kind or "value"
        for name, _, kind in (f.partition(":") for f in flags.split())
    }
    draw = random.Random(f"{SEED} {verb}")
    names = [*kinds]
    for i in range(count):
        chosen = {names[i % len(names)]} | set(draw.sample(names, draw.random() < 0.15))
        if "KEY" in kinds and draw.random() < 0.4:
            chosen = {"KEY"}
        words = {}
        for word in sound.split():
            name, equals, value = word.partition("=")
            words[name if equals else ""] = value if equals else name
        for name in sorted(chosen):
            if name == "KEY":
                words[f"--config.{draw.choice(keys())}"] = draw.choice(VALUES)
            else:
                words[name] = value_for(kinds[name], draw)
        yield [f"{name}={value}" if name else value for name, value in words.items()]


def value_for(kind, draw):
    if kind == "image" and draw.random() < 0.75:
        return f"images/{draw.choice([*IMAGES])}"
    if kind in ("file", "image") and draw.random() < 0.8:
        return draw.choice(FILES)
    return draw.choice(VALUES)


def faults(verb, end, before, after):
    """Returns what is wrong with the end of a command."""
    text = end.out + end.err
    lines = end.err.split("\n")[:-1]
    errors = [line for line in lines if line.startswith("error: ")]
    found = {
        f"it took {end.seconds:.0f} s": end.code == 2 and end.seconds > SECONDS,
        f"exit code {end.code}": end.code not in CODES[verb],
        "a traceback": "Traceback (most recent call last)" in text,
        f"{len(errors)} lines of errors": (end.code == 2) != (len(errors) == 1),
        "other lines on stderr": end.code in (0, 2)
        and any(line not in errors and not noted(line) for line in lines),
        "control characters": not all(map(str.isprintable, text.split("\n"))),
        "a password": "hunter2" in text,
        f"left behind {after - before}": end.code == 2
        and any(verb not in WRITING or LEFT.search(path) for path in after - before),
    }
    return [fault for fault, there in found.items() if there]


def noted(line):
    return any(re.fullmatch(note, line) for note in NOTES)


def listing(place):
    return {
        os.path.join(folder, name)
        for folder, _, names in os.walk(place)
        for name in names
    }


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_case_ends_with_one_line_or_succeeds(verb, process, place):
    wrong = []
    for number, words in enumerate(cases(verb)):
        outs = [place / "OUT", place / "OUT.png"]
        before = listing(place)
        end = process[0].run(verb, words, seconds=LONGEST)
        bad = faults(verb, end, before, listing(place))
        if bad:
            wrong.append(f"{verb} {number}: {words}\n  {bad}\n  {end}"[:3_000])
        for out in outs:
            if out.is_dir():
                shutil.rmtree(out)
            else:
                out.unlink(missing_ok=True)
    assert wrong == [], "\n\n".join(wrong)
