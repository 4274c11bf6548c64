"""The notebooks: what is reviewed is what is run, and it runs from top to bottom."""

import importlib.util
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import write_weights
from hosts import xla_flags
from PIL import Image

from vit_jax.distributed import mesh as meshes
from vit_jax.distributed.mesh import MeshConfig

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


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_its_text_has_no_logic_and_the_outputs_of_one_run(name):
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

    text = (FOLDER / f"{name}.py").read_text()
    assert not re.findall(r"^\s*(def|class|while|try|lambda)\b", text, re.MULTILINE)
    # Pictures come from the library as they are to be shown.
    own = r"\b(255|astype|overlay\.(?!\w+_sheet\()|contact_sheet\.(?!draw))\b"
    assert not re.findall(own, text)
    assert f"/blob/main/notebooks/{name}.ipynb)" in text


ADDRESSED = "README.md", "docs/extensions/generated.py", "notebooks/*.py"
ADDRESSED += ("notebooks/*.ipynb",)


def addresses(folder):
    """Returns the owners in the addresses of this project, by file."""
    found = {}
    for path in (path for pattern in ADDRESSED for path in folder.glob(pattern)):
        owners = re.findall(r"github(?:\.com)?/([\w-]+)/vit_jax", path.read_text())
        assert owners, path
        found[path.name] = set(owners)
    return found


def test_the_command_that_replaces_the_owner_does_it_everywhere(tmp_path):
    said = (ROOT / "CONTRIBUTING.md").read_text()
    (command,) = re.findall(r"^sed .*$", said, re.MULTILINE)
    for path in (path for pattern in ADDRESSED for path in ROOT.glob(pattern)):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    assert len(addresses(ROOT)) == 2 + 2 * len(NAMES)
    before, after = (set.union(*addresses(f).values()) for f in (ROOT, tmp_path))
    assert before == {"OWNER"}
    assert after == {"ACCOUNT"}


def run_cell(name, text, names):
    """Runs the one cell of a notebook's code that holds a text, with stand-ins."""
    notebook = jupytext.read(FOLDER / f"{name}.py")
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    (found,) = [source for source in code if text in source]
    exec(found, names)  # noqa: S102


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 16])
def test_three_steps_on_two_meshes_fit_any_number_of_devices(count):
    seen = []

    def train(changes, workdir):
        config = MeshConfig(fsdp=changes["mesh.fsdp"])
        devices = [SimpleNamespace(id=i, process_index=0) for i in range(count)]
        for device in devices:
            device.platform, device.device_kind = "gpu", "fake"
        seen.append(meshes.arrange(config, devices).shape)
        assert changes["batch_size"] % count == 0
        return {"final": {}}

    names = {
        "jax": SimpleNamespace(device_count=lambda: count),
        "math": math,
        "config": SimpleNamespace(load=lambda path, changes: changes),
        "loop": SimpleNamespace(train=train),
        "recipe": "configs/b16_i21k.py",
        "workdir": "runs",
    }
    run_cell("tpu_pretraining", '"mesh.fsdp"', names)
    assert len(set(seen)) == (2 if count % 2 == 0 else 1)


@pytest.mark.parametrize(
    ("on_tpu", "bucket", "trains"),
    [(True, "mine", True), (True, "BUCKET", False), (False, "mine", False)],
)
def test_the_recipe_is_trained_where_there_is_a_tpu_and_its_data(
    on_tpu, bucket, trains
):
    trained, names, place = [], {}, f"gs://{bucket}/tfds"
    run_cell("tpu_pretraining", "compile_recipe = recipe", names)
    assert names["data_dir"] == "gs://BUCKET/tfds"
    names |= {
        "on_tpu": on_tpu,
        "data_dir": place,
        "config": SimpleNamespace(load=lambda path, changes: changes),
        "loop": SimpleNamespace(train=lambda config, workdir: trained.append(config)),
    }
    run_cell("tpu_pretraining", "if on_tpu", names)
    assert trained == ([{"data.data_dir": place}] if trains else [])


# Their networks that are trained get one layer, which compiles sooner.
TRAINS = ("quickstart", "pretrain_without_labels", "tpu_pretraining")
SHALLOW = """
_load = config.load
config.load = lambda recipe, keys: _load(recipe, {"model.depth": 1, **keys})
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_from_top_to_bottom(name, tmp_path):
    assert EXPECTED[name] in run(name, tmp_path, SMALL[name](tmp_path))


@pytest.mark.parametrize("labelled", [False, True])
def test_photographs_without_classes_are_split_and_not_scored(labelled):
    names = {"photos": "photos", "labelled": labelled}
    run_cell("pretrain_without_labels", '"configs/flowers.py"', names)
    splits = ("train", "val") if labelled else ("all[5%:]", "all[:5%]")
    assert (names["train"], names["validation"]) == splits
    assert bool(names["evals"]) == labelled


@pytest.mark.slow
def test_a_notebook_pretrains_on_photographs(tmp_path):
    settings = {"photos": noise(tmp_path), "labelled": True, "minutes": 0}
    settings |= SMALL["pretrain_without_labels"](tmp_path) | {"epochs": 4}
    printed = run("pretrain_without_labels", tmp_path, settings)
    assert "after   loss" in printed
    assert "knn" in printed and "collecting mistakes" in printed


def run(name, tmp_path, settings):
    """Runs a notebook with other settings; returns what it prints."""
    import nbformat
    from nbclient import NotebookClient

    notebook = jupytext.read(FOLDER / f"{name}.py")
    (place,) = (i for i, cell in enumerate(notebook.cells) if cell.metadata.get("tags"))
    settings = settings | {"workdir": str(tmp_path / "runs")}
    text = "\n".join(f"{key} = {value!r}" for key, value in settings.items())
    text += SHALLOW if name in TRAINS else ""
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(text))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": xla_flags()}
    client = NotebookClient(
        notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=environment)
    outputs = [x for cell in notebook.cells for x in cell.get("outputs", ())]
    return "".join(output.get("text", "") for output in outputs)


def noise(folder):
    """Makes photographs of noise; returns their folder."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 20), ("val", 2)):
        for label in ("daisy", "roses", "tulips"):
            path = folder / "photos" / split / label
            path.mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 256, (37, 53, 3), np.uint8)
                Image.fromarray(pixels).save(path / f"{i}0.png")
    return str(folder / "photos")


def small_model(folder):
    """Makes a stand-in for what the notebooks fetch from the hub."""
    size = (64, 64)
    path = folder / "small.safetensors"
    write_weights(path, "abc", variant="Ti/16", num_classes=3, image_size=size)
    return str(path)


# Settings of each, as a function of a folder.
SMALL = {
    "inspect_attention": lambda folder: {"source": small_model(folder)},
    # Of six epochs five are warmup.
    "pretrain_without_labels": lambda _: {"epochs": 6, "finetune_steps": 3, "seeds": 1},
    "quickstart": lambda _: {"epochs": 6, "finetune_epochs": 1},
    "finetune_your_images": lambda folder: {
        "photos": noise(folder),
        "model": small_model(folder),
        "minutes": 0,
    },
    "tpu_pretraining": lambda _: {
        "topology": "v5e:2x2",
        "compile_recipe": "configs/b16_i21k.py:quick",
    },
}
# Printed where a notebook has done what it is for.
EXPECTED = {
    "inspect_attention": "]]",  # Of the distances.
    "pretrain_without_labels": "pretrained test mean",
    "quickstart": "timm.create_model",
    "finetune_your_images": "timm.create_model",
    # The compiler's report where there is the compiler.
    "tpu_pretraining": "Memory per chip"
    if importlib.util.find_spec("libtpu")
    else "libtpu, the compiler for TPUs, is not installed",
}
