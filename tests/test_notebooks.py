"""The notebooks: what is reviewed is what is run, and it runs from top to bottom."""

import json
import os
import pathlib
import re

import numpy as np
import pytest
from PIL import Image

jupytext = pytest.importorskip("jupytext", reason="needs jupytext: the extra `test`")

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
SIZE = 300_000  # Bytes, with outputs.


def cells(notebook):
    """Returns kind, text and tags of each cell."""
    return [
        (cell.cell_type, cell.source, cell.metadata.get("tags", []))
        for cell in notebook.cells
    ]


def test_there_is_a_notebook_for_each_purpose():
    wanted = (
        "finetune_your_images",
        "inspect_attention",
        "quickstart",
        "tpu_pretraining",
    )
    assert tuple(NAMES) == wanted


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_its_text_and_has_the_outputs_of_one_run(name):
    path = FOLDER / f"{name}.ipynb"
    notebook = jupytext.read(path)
    assert cells(notebook) == cells(jupytext.read(FOLDER / f"{name}.py"))
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert any(cell.outputs for cell in code)
    for cell in code:
        assert all(output.output_type != "error" for output in cell.outputs)
    assert path.stat().st_size <= SIZE
    outputs = json.dumps([cell.outputs for cell in code])
    assert not re.findall(r"/(?:home|root|tmp|work|opt)/\w+", outputs)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_holds_no_logic_of_its_own(name):
    text = (FOLDER / f"{name}.py").read_text()
    assert not re.findall(r"^\s*(def|class|while|try|lambda)\b", text, re.MULTILINE)
    assert f"/blob/main/notebooks/{name}.ipynb)" in text


def test_all_addresses_of_the_project_are_the_same():
    files = *FOLDER.glob("*.py"), ROOT / "docs/extensions/generated.py"
    text = "".join(path.read_text() for path in files)
    assert len(set(re.findall(r"github(?:\.com)?/([\w-]+/vit_jax)", text))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_from_top_to_bottom(name, tmp_path):
    import nbformat
    from nbclient import NotebookClient

    notebook = jupytext.read(FOLDER / f"{name}.py")
    (place,) = (i for i, cell in enumerate(notebook.cells) if cell.metadata.get("tags"))
    settings = SMALL[name](tmp_path) | {"workdir": str(tmp_path / "runs")}
    text = "\n".join(f"{key} = {value!r}" for key, value in settings.items())
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(text))
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT)}
    client = NotebookClient(
        notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=environment)
    printed = "".join(
        output.get("text", "")
        for cell in notebook.cells
        for output in cell.get("outputs", ())
    )
    assert EXPECTED[name] in printed


def of_quickstart(folder):
    return {"epochs": 6, "finetune_epochs": 1}


def of_finetuning(folder):
    """Makes photographs of noise."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 20), ("val", 2)):
        for label in ("daisy", "roses", "tulips"):
            path = folder / "photos" / split / label
            path.mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 256, (37, 53, 3), np.uint8)
                Image.fromarray(pixels).save(path / f"{i}0.png")
    places = {"photos": str(folder / "photos"), "source": small_model(folder)}
    return places | {"resolution": 32, "steps": 2, "rates": (0.01, 0.03), "seeds": 1}


def of_attention(folder):
    return {"source": small_model(folder)}


def small_model(folder):
    """Trains a stand-in for what the notebooks fetch from the hub."""
    from vit_jax import config
    from vit_jax.training import loop

    settings = config.load(f"{ROOT}/configs/flowers_finetune.py:quick")
    loop.train(settings, folder / "small")
    return str(folder / "small")


def of_pods(folder):
    return {"topology": "v5e:2x2", "compile_recipe": "configs/b16_i21k.py:quick"}


SMALL = {
    "inspect_attention": of_attention,
    "quickstart": of_quickstart,
    "finetune_your_images": of_finetuning,
    "tpu_pretraining": of_pods,
}
# Printed where a notebook has done what it is for.
EXPECTED = {
    "inspect_attention": "]]",  # Of the distances.
    "quickstart": "timm.create_model",
    "finetune_your_images": "timm.create_model",
    # The compiler's report, or that the extra is missing.
    "tpu_pretraining": "tpu",
}
