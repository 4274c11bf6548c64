import json
import pathlib
import re

import pytest
from helpers import run_command, slow_but

from vit_jax import models, summary
from vit_jax.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]
DIGITS = str(ROOT / "configs" / "digits.py")
I21K = str(ROOT / "configs" / "b16_i21k.py")


def rows(capsys, *words):
    """Returns what the command prints as JSON."""
    run_command("summary", ["--json", *words])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_summary_prints_a_table(capsys):
    words = "--variant=Ti/32,Mixer-S/32 --resolution=96x64 --num_classes=7"
    run_command("summary", [*words.split(), "--images_seen=2000000"])
    note, heading, *lines = capsys.readouterr().out.splitlines()
    assert note == "exaFLOPs: training on 2,000,000 images"
    assert heading.split() == list(summary.HEADING)
    one, other = (line.split() for line in lines)
    assert one[:3] == ["Ti/32", "96x64", "5,931,655"]
    assert other[:3] == ["Mixer-S/32", "96x64", "18,418,743"]
    assert (one[4], other[4]) == ("7", "-")
    assert len({len(line) for line in (heading, *lines)}) == 1


def test_json_has_exact_numbers(capsys):
    (row,) = rows(capsys, "--variant=B/16")
    assert row.pop("activation_bytes") > 150e6
    assert row.pop("exaflops") == pytest.approx(6e-18 * 17_563_828_224 * 2_121_000_000)
    assert row == {
        "variant": "B/16",
        "resolution": [224, 224],
        "num_classes": 1_000,
        "parameters": 86_567_656,
        "macs": 17_563_828_224,
        "tokens": 197,
        "images": 2_121_000_000,
    }


def test_all_variants_are_the_default_and_fit_the_default_resolution():
    found = summary.find(None, None, num_classes=5)
    assert [model.options["variant"] for model, _ in found] == [*models.names()]
    assert all(as_asked for _, as_asked in found)


def test_the_nearest_resolution_is_taken_and_marked(capsys):
    run_command("summary", ["--variant=Ti/33,Ti/32"])
    _, _, first, second, note = capsys.readouterr().out.splitlines()
    assert first.split()[1] == "231x231*"
    assert second.split()[1] == "224x224"
    assert note == "* the nearest resolution that fits the patch"


def test_a_config_states_model_and_images(capsys):
    short = "--config.model.depth=1"
    (row,) = rows(capsys, f"--config={DIGITS}", short, "--config.epochs=3.0")
    assert (row["resolution"], row["num_classes"]) == ([8, 8], 10)
    assert row["images"] == pytest.approx(3 * 1_437, rel=0.05)  # Whole steps.
    (row,) = rows(capsys, f"--config={I21K}", "--images_seen=11", short)
    assert (row["num_classes"], row["images"]) == (21_843, 11)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--variant=Q/16", "'Q/16' is not SIZE/PATCH"),
        ("--variant=B/16,", "'' is not SIZE/PATCH"),
        ("--variant=B/16,H/14 --resolution=384x160", "patch 14 of H/14.*=378x154"),
        ("--resolution=0", "--resolution=0 is not a side or height x width"),
        ("--resolution=224,224", "--resolution=224,224 is not a side"),
        ("--num_classes=-1", "--num_classes=-1 must be at least 0"),
        ("--images_seen=0", "--images_seen=0 must be at least 1"),
        (f"--config={DIGITS} --variant=B/16", r"use --config\.model\.variant"),
        (f"--config={DIGITS} --resolution=8", r"use --config\.data\.image_size"),
        (f"--config={DIGITS} --num_classes=10", r"use --config\.data\.num_classes"),
        ("--config.seed=3", r"--config\.seed=3 needs --config=FILE"),
        (f"--config={I21K} --config.data.data_dir=/nowhere", "or give --images_seen"),
    ],
)
def test_bad_input_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        run_command("summary", words.split())


@pytest.mark.slow
def test_the_readme_has_what_is_printed(capsys):
    text = (ROOT / "README.md").read_text()
    shown = re.search(
        r"\$ python -m vit_jax.summary --variant=(\S+)\n(.*?)```", text, re.DOTALL
    )
    run_command("summary", [f"--variant={shown[1]}"])
    assert capsys.readouterr().out == shown[2]


@pytest.mark.parametrize(
    "variant", slow_but(["Ti/16"], ("Ti/16", "R26+S/32", "Swin-T"))
)
def test_the_model_zoo_has_what_is_printed(variant, capsys):
    kept = (ROOT / "docs" / "model_zoo.jsonl").read_text().splitlines()
    kept = {row["variant"]: row for row in map(json.loads, kept)}
    assert list(kept) == list(models.names())
    assert rows(capsys, f"--variant={variant}") == [kept[variant]]
