import argparse
import json
import pathlib
import re
import subprocess
import sys

import pytest

from vit_jax import models, summary
from vit_jax.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]
DIGITS = str(ROOT / "configs" / "digits.py")
I21K = str(ROOT / "configs" / "b16_i21k.py")


def rows(capsys, **flags):
    """Returns what the verb prints as JSON."""
    summary.main(arguments(json=True, **flags))
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def arguments(overrides=(), **flags):
    names = ("variant", "resolution", "num_classes", "images_seen", "config")
    defaults = dict.fromkeys(names) | {"json": False}
    return argparse.Namespace(overrides=dict(overrides), **defaults | flags)


def test_summary_prints_a_table():
    words = (
        "--variant=Ti/32,R50x1 --resolution=96x64 --num_classes=7 --images_seen=2000000"
    )
    run = subprocess.run(
        [sys.executable, "-m", "vit_jax.summary", *words.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    note, heading, *lines = run.stdout.splitlines()
    assert note == "exaFLOPs: training on 2,000,000 images"
    assert heading.split() == list(summary.HEADING)
    assert [line.split()[:3] for line in lines] == [
        ["Ti/32", "96x64", "5,931,655"],
        ["R50x1", "96x64", "23,514,695"],
    ]
    assert [line.split()[4] for line in lines] == ["7", "-"]
    assert len({len(line) for line in (heading, *lines)}) == 1


def test_json_has_exact_numbers(capsys):
    (row,) = rows(capsys, variant="B/16")
    assert row.pop("activation_bytes") > 200e6
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
    summary.main(arguments(variant="Ti/33,Ti/32"))
    _, _, first, second, note = capsys.readouterr().out.splitlines()
    assert first.split()[1] == "231x231*"
    assert second.split()[1] == "224x224"
    assert note == "* the nearest resolution that fits the patch"


def test_a_config_states_model_and_images(capsys):
    (row,) = rows(capsys, config=DIGITS, overrides={"model.depth": 1, "epochs": 3.0})
    assert (row["resolution"], row["num_classes"]) == ([8, 8], 10)
    assert row["images"] == pytest.approx(3 * 1_437, rel=0.05)  # Whole steps.
    (row,) = rows(capsys, config=I21K, images_seen=11, overrides={"model.depth": 1})
    assert (row["num_classes"], row["images"]) == (21_843, 11)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"variant": "Q/16"}, "'Q/16' is not SIZE/PATCH"),
        ({"variant": "B/16,"}, "'' is not SIZE/PATCH"),
        (
            {"variant": "B/16,H/14", "resolution": "384x160"},
            "384x160 is not a multiple of the patch 14 of H/14.*=378x154",
        ),
        ({"resolution": "0"}, "--resolution=0 is not a side or height x width"),
        ({"resolution": "224,224"}, "--resolution=224,224 is not a side"),
        ({"num_classes": -1}, "--num_classes=-1 must be at least 0"),
        ({"images_seen": 0}, "--images_seen=0 must be at least 1"),
        ({"config": DIGITS, "variant": "B/16"}, r"use --config\.model\.variant"),
        ({"config": DIGITS, "resolution": "8"}, r"use --config\.data\.image_size"),
        ({"config": DIGITS, "num_classes": 10}, r"use --config\.data\.num_classes"),
        ({"overrides": {"seed": 3}}, r"--config\.seed=3 needs --config=FILE"),
        (
            {"config": I21K, "overrides": {"data.data_dir": "/nowhere"}},
            "imagenet21k.*; or state --images_seen",
        ),
    ],
)
def test_bad_input_is_refused(flags, message):
    with pytest.raises(UserError, match=message):
        summary.main(arguments(**flags))


def test_bad_input_ends_with_one_line_and_exit_code_2():
    run = subprocess.run(
        [sys.executable, "-m", "vit_jax.summary", "--variant=Q/16"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("error: ") and run.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_readme_has_what_is_printed(capsys):
    text = (ROOT / "README.md").read_text()
    shown = re.search(
        r"\$ python -m vit_jax.summary --variant=(\S+)\n(.*?)```", text, re.DOTALL
    )
    summary.main(arguments(variant=shown[1]))
    assert capsys.readouterr().out == shown[2]


@pytest.mark.parametrize(
    "variant",
    [
        "Ti/16",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("R26+S/32", "Swin-T")),
    ],
)
def test_the_model_zoo_has_what_is_printed(variant, capsys):
    kept = (ROOT / "docs" / "model_zoo.jsonl").read_text().splitlines()
    kept = {row["variant"]: row for row in map(json.loads, kept)}
    assert list(kept) == list(models.names())
    summary.main(arguments(variant=variant, json=True))
    assert json.loads(capsys.readouterr().out) == kept[variant]
