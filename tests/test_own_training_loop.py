"""The page "Your own training loop": its blocks run one after another on a mesh of 8."""

import dataclasses
import pathlib
import re
import types

import jax
import numpy as np
import pytest
from helpers import ROOT, write_weights
from PIL import Image

from vit_jax.data.preprocess import Preprocess
from vit_jax.models import variants

PAGE = (ROOT / "docs" / "own_training_loop.md").read_text()
BLOCK = r"^```(?:\{code-block\} )?python\n(.*?)^```"
BLOCKS = re.findall(BLOCK, PAGE, re.MULTILINE | re.DOTALL)


def run(blocks, page):
    """Runs blocks of the page with the small network in place of DeiT-Ti."""
    for text in blocks:
        text = text.replace('"deit:Ti/16"', '"deit.safetensors"').replace("224", "32")
        exec(compile(text, "docs/own_training_loop.md", "exec"), vars(page))  # noqa: S102
    return page


@pytest.fixture
def page(tmp_path, monkeypatch):
    """An empty module, in a folder with photographs and weights of a small Ti/16."""
    small = {"width": 48, "depth": 6, "num_heads": 2, "mlp_dim": 24}
    size = dataclasses.replace(variants.SIZES["Ti"], **small)
    monkeypatch.setitem(variants.SIZES, "Ti", size)
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    monkeypatch.chdir(tmp_path)
    how = Preprocess(image_size=(32, 32), crop_fraction=0.875)
    sizes = {"variant": "Ti/16", "num_classes": 3, "image_size": (32, 32)}
    path = tmp_path / "deit.safetensors"
    write_weights(path, "abc", how, activation="gelu", **small | sizes)
    draw = np.random.default_rng(0)
    for i in range(10):
        path = pathlib.Path("PHOTOS", "train", ("daisy", "rose")[i % 2], f"{i}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (37, 53, 3), np.uint8)).save(path)
    return types.ModuleType("page")


@pytest.mark.slow
def test_every_block_of_the_page_runs(page, capsys):
    assert len(BLOCKS) == 5
    run(BLOCKS[:4], page)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 ") and np.isfinite(float(lines[0].split()[1]))
    assert pathlib.Path("runs/own").is_dir()
    assert "fsdp" in lines[1] and len(jax.devices()) == 8
    moments = jax.tree.leaves(page.opt_state)
    assert any("fsdp" in str(moment.sharding.spec) for moment in moments)
    assert lines[2:] == ["(2, 32, 32, 3) (2, 2, 2, 48)", "(2, 2)"]
    assert "temperature" in str(jax.tree.structure(page.params))


@pytest.mark.slow
@pytest.mark.parity
def test_the_block_for_pytorch_runs(page, capsys):
    run([BLOCKS[0], BLOCKS[4]], page)
    _, *losses, shape = capsys.readouterr().out.splitlines()
    assert np.isfinite([float(loss) for loss in losses]).all() and len(losses) == 2
    assert shape == "torch.Size([2, 2])"
