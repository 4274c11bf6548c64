"""Commands on the workdir of a network of the user's module."""

import dataclasses
import json
import pathlib
import sys

import jax
import numpy as np
import pytest
from helpers import draw_params, run_command, tiny_config
from hosts import write_recipe
from PIL import Image

from vit_jax import models, summary
from vit_jax import weights as weight_files
from vit_jax.config import fields
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.tools.sweeps import fine_tuning
from vit_jax.training import config as configuration
from vit_jax.training import loop
from vit_jax.weights import export, surgery
from vit_jax.weights.formats import native
from vit_jax.weights.pretrained import Pretrained

EXAMPLES = pathlib.Path(__file__).parents[1] / "docs/examples"
VARIANT = "conv_net:ConvNetConfig"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run of the network of the docs."""
    folder = tmp_path_factory.mktemp("runs") / "conv"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        config = fields.to_dict(tiny_config(total_steps=4, evals={}))
        config["model"] = {"variant": VARIANT, "width": 16, "depth": 1}
        loop.train(configuration.complete(config), folder)
    return folder


def run(name, *words):
    return run_command(name, words)


@pytest.fixture
def found(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.fixture
def image(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    return tmp_path / "a.png"


def test_predict_reads_a_workdir(found, workdir, image, capsys):
    assert run("predict", f"--model={workdir}", image) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["file", "probability", "class"]
    assert len(rows) == 5


def test_a_module_that_is_not_found_is_one_line_with_the_remedy(
    workdir, image, monkeypatch
):
    monkeypatch.delitem(sys.modules, "conv_net", raising=False)
    message = f"model.variant='{VARIANT}': no module 'conv_net': .*PYTHONPATH"
    with pytest.raises(UserError, match=message):
        run("predict", f"--model={workdir}", image)


def test_files_of_weights_name_no_module(found, workdir, tmp_path):
    pretrained = weight_files.open_pretrained(workdir)
    for to in (name for name, writer in export.WRITERS.items() if not writer.program):
        out = tmp_path / f"{to}{export.WRITERS[to].suffix}"
        message = f"--to={to}: .* has model.variant='{VARIANT}', a network from"
        with pytest.raises(UserError, match=message):
            run("convert", f"--model={workdir}", f"--to={to}", f"--out={out}")
        assert not out.exists()
    path = tmp_path / "forged.safetensors"
    native.write(pretrained, path)  # As a stranger may have made it.
    sys.modules.pop("conv_net", None)
    with pytest.raises(
        UserError,
        match="which is not imported when files of weights are read: give the workdir",
    ):
        weight_files.open_pretrained(path)
    assert "conv_net" not in sys.modules


def test_other_image_sizes_fit_and_summary_counts(found, workdir, capsys):
    pretrained = weight_files.open_pretrained(workdir)
    options = pretrained.options
    assert (options["variant"], options["width"], options["depth"]) == (VARIANT, 16, 1)
    assert fine_tuning.usual_size(pretrained) == (384, 384)
    preprocess = weight_files.preprocessing_of(pretrained)
    larger = dataclasses.replace(preprocess, image_size=(16, 20))
    model, _ = surgery.fit_network(pretrained, larger)
    assert model.image_shape == (16, 20, 3)
    summary._show(summary.find(VARIANT, None, 5), 10, False)
    row = capsys.readouterr().out.splitlines()[2].split()
    assert row[:2] == [VARIANT, "224x224"]
    with pytest.raises(UserError, match="225 is not a multiple of the patch 4 of conv"):
        summary.find(VARIANT, "225", 5)


def test_what_looks_inside_refuses_in_one_line(found, workdir, image, tmp_path):
    words = f"--model={workdir}", f"--images={image}", f"--out={tmp_path / 'figures'}"
    with pytest.raises(UserError, match="conv: no attention to draw"):
        run("visualize", *words, "--figure=attention")
    with pytest.raises(UserError, match="=posemb: conv: no position embeddings"):
        run("visualize", *words, "--figure=posemb")
    assert run("visualize", *words) == 0  # The filters of its first convolution.
    assert (tmp_path / "figures" / "filters.png").exists()


CONFIG = """
from ml_collections import ConfigDict

def get_config(arg=None):
    c = ConfigDict()
    c.batch_size = 8
    c.data = dict(name="synthetic", num_examples=20)
    c.evals = dict(val="val", knn=dict(kind="knn", k=3, train="train", test="val"))
    return c
"""


def test_evaluate_scores_a_workdir_on_classes_and_features(
    found, workdir, tmp_path, capsys
):
    (tmp_path / "scored.py").write_text(CONFIG)
    config = f"--config={tmp_path / 'scored.py'}"
    run("evaluate", f"--model={workdir}", config, "--json")
    told = json.loads(capsys.readouterr().out)
    assert told.keys() >= {"val", "knn"}


def test_a_batch_is_shown_for_an_outside_network(found, tmp_path):
    recipe = write_recipe(tmp_path / "run.py", f"c.model = dict(variant={VARIANT!r})")
    out = tmp_path / "batch.png"
    run("show_batch", f"--config={recipe}", f"--out={out}")
    assert out.exists()


PATCHES = """
import dataclasses
import flax.linen as nn
from vit_jax.models import NetworkConfig
from vit_jax.models.layers import classify

class Positions(nn.Module):
    @nn.compact
    def __call__(self, x):
        shape = (1, *x.shape[1:])
        return x + self.param("pos_embedding", nn.initializers.normal(), shape)

class Patches(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, images, *, train=False):
        x = nn.Conv(6, (4, 4), (4, 4), name="embedding")(images)
        x = Positions(name="place")(x.reshape(len(x), -1, 6))
        return classify(x.mean(1), self.num_classes, 0.0)

@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchesConfig(NetworkConfig):
    patch_size = 4

    def build(self, num_classes, image_shape):
        return Patches(num_classes)
"""


def test_position_embeddings_of_an_outside_network_are_resized(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "patches.py").write_text(PATCHES)
    variant = "patches:PatchesConfig"
    model = models.create(variant, num_classes=3, image_size=(8, 12))
    params = jax.device_get(draw_params(model))
    pretrained = Pretrained(params, model.options, "workdir", "patches")
    larger = Preprocess(image_size=(16, 12))
    other, fitted = surgery.fit_network(pretrained, larger)
    old, new = (p["place"]["pos_embedding"] for p in (params, fitted))
    assert (old.shape, new.shape, other.grid) == ((1, 6, 6), (1, 12, 6), (4, 3))
    # Corners stay where they are.
    np.testing.assert_allclose(new[0, [0, 2, 9, 11]], old[0, [0, 2, 3, 5]], atol=1e-6)
