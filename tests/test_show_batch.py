import jax
import numpy as np
import pytest
from helpers import one_device
from PIL import Image

from vit_jax import cli, show_batch
from vit_jax.data.sources.open import open_source
from vit_jax.errors import UserError
from vit_jax.training import config

RECIPE = """
from ml_collections import ConfigDict

def get_config(arg=None):
    c = ConfigDict()
    c.seed, c.total_steps, c.batch_size = 3, 6, 10
    c.data = dict(name="digits", num_classes=10, image_size=(8, 8), channels=1)
    c.data.train_transform = "affine(shift=0.1, rotate=10) | mixup(0.5)"
    c.data.mean, c.data.std = (0.3,), (0.2,)
    c.optim = dict(learning_rate=0.01)
    c.model = dict(variant="Ti/4", width=12, depth=1, num_heads=3, mlp_dim=20)
    return c
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(RECIPE)
    return path


def run(recipe, *words):
    return show_batch.main(
        cli.parse(show_batch.parser(), [f"--config={recipe}", *words])
    )


@pytest.mark.slow
def test_the_sheet_shows_what_the_training_step_sees(recipe, tmp_path, monkeypatch):
    from vit_jax.tasks.classification import Classification
    from vit_jax.training import loop

    seen, prepare = [], Classification.prepare

    def keep(self, batch, rng):
        out = prepare(self, batch, rng)
        jax.debug.callback(seen.append, out)
        return out

    loaded = config.load(str(recipe), {"total_steps": 1, "mesh.data": 1})
    source = open_source(loaded.data, "train")
    images, labels, _ = show_batch.see(source, loaded, 99)  # A whole batch.
    monkeypatch.setattr(Classification, "prepare", keep)
    with one_device():
        loop.train(loaded, tmp_path / "run")
    (batch,) = seen
    model_images, model_labels = batch["image"], batch["label"]
    pixels = (np.asarray(model_images) * 0.2 + 0.3) * 255
    np.testing.assert_allclose(images, pixels, atol=0.51)
    np.testing.assert_allclose(labels, model_labels, atol=1e-6)
    assert images.shape == (10, 8, 8, 1)
    assert images.max() > 150
    assert (labels > 0.01).sum(axis=1).max() == 2  # Mixed.


def test_the_sheet_has_the_rows_and_columns_asked_for(recipe, tmp_path, capsys):
    out = tmp_path / "sheet.png"
    run(
        recipe, f"--out={out}", "--rows=2", "--columns=3", "--config.data.num_workers=2"
    )
    with Image.open(out) as sheet:
        assert sheet.format == "PNG"
        assert sheet.width == 3 * (128 + 8) + 8
    assert f"{out}: 6 images of digits" in capsys.readouterr().out


def test_a_config_without_its_weights_is_shown(recipe, tmp_path):
    recipe.write_text(RECIPE.replace("return c", "c.init = '?'\n    return c"))
    run(recipe, f"--out={tmp_path / 'sheet.png'}", "--rows=1", "--columns=1")


def test_a_place_that_cannot_be_written_is_a_user_error(recipe, tmp_path):
    with pytest.raises(UserError, match=r"--out=.*sheet\.jpg does not end in \.png"):
        run(recipe, f"--out={tmp_path / 'sheet.jpg'}")
    with pytest.raises(UserError, match=r"there is no folder .*absent; make it first"):
        run(recipe, f"--out={tmp_path / 'absent' / 'sheet.png'}")
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(UserError, match=r"taken\.png cannot be written \(Is a dir"):
        run(recipe, f"--out={tmp_path / 'taken.png'}")
