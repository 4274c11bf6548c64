import jax
import mask_folder
import numpy as np
import pytest
from helpers import full_disk, run_command
from hosts import write_recipe
from PIL import Image

from vit_jax import show_batch
from vit_jax.data.sources.open import open_source
from vit_jax.errors import UserError
from vit_jax.training import config

LINES = (
    "c.total_steps, c.batch_size = 6, 10",
    'c.data = dict(name="digits", num_classes=10, image_size=(8, 8), channels=1)',
    'c.data.train_transform = "affine(shift=0.1, rotate=10) | mixup(0.5)"',
    "c.data.mean, c.data.std = (0.3,), (0.2,)",
)


@pytest.fixture
def recipe(tmp_path):
    return write_recipe(tmp_path / "tiny.py", *LINES)


def run(recipe, *words):
    return run_command("show_batch", [f"--config={recipe}", *words])


@pytest.mark.slow
def test_the_sheet_shows_what_the_training_step_sees(recipe, tmp_path, monkeypatch):
    from vit_jax.tasks.classification import Classification
    from vit_jax.training import loop

    seen, prepare = [], Classification.prepare

    def keep(self, batch, rng):
        out = prepare(self, batch, rng)
        jax.debug.callback(seen.append, out)
        return out

    loaded = config.load(str(recipe), {"total_steps": 1})
    source = open_source(loaded.data, "train")
    images, labels, _ = show_batch.see(source, loaded, 99)  # A whole batch.
    monkeypatch.setattr(Classification, "prepare", keep)
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
    words = "--rows=2", "--columns=3", "--config.data.num_workers=2"
    run(recipe, f"--out={out}", *words)
    with Image.open(out) as sheet:
        assert sheet.format == "PNG"
        assert sheet.width == 3 * (128 + 8) + 8
    assert f"{out}: 6 images of digits" in capsys.readouterr().out
    whole = out.read_bytes()
    with full_disk(len(whole) // 2), pytest.raises(UserError, match="--out=.*too larg"):
        run(recipe, f"--out={out}", *words)
    assert out.read_bytes() == whole


def test_a_config_without_its_weights_is_shown(recipe, tmp_path):
    write_recipe(recipe, *LINES, "c.init = '?'")
    run(recipe, f"--out={tmp_path / 'sheet.png'}", "--rows=1", "--columns=1")


def test_a_place_that_cannot_be_written_is_a_user_error(recipe, tmp_path):
    with pytest.raises(UserError, match=r"--out=.*sheet\.jpg does not end in \.png"):
        run(recipe, f"--out={tmp_path / 'sheet.jpg'}")
    with pytest.raises(UserError, match=r"there is no folder .*absent; make it first"):
        run(recipe, f"--out={tmp_path / 'absent' / 'sheet.png'}")
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(UserError, match=r"taken\.png cannot be written \(Is a dir"):
        run(recipe, f"--out={tmp_path / 'taken.png'}")


def test_masks_lie_over_their_images(tmp_path):
    mask_folder.write(tmp_path / "set", 10)
    lines = (
        "c.total_steps, c.batch_size = 6, 4",
        f"c.data = dict(name='masks', data_dir={str(tmp_path / 'set')!r})",
        "c.data.update(mask_key='masks', num_classes=3, image_size=(40, 56))",
        "c.data.train_transform = 'resize'",
        "c.task = dict(name='segmentation')",
        "c.model.variant = 'Ti/8'",
    )
    recipe = write_recipe(tmp_path / "masks.py", *lines)
    loaded = config.load(str(recipe), {})
    source = open_source(loaded.data, "train")
    images, shares, names = show_batch.see(source, loaded, 4)
    assert (images.shape, names) == ((4, 40, 56, 3), ["image 1"])
    np.testing.assert_allclose(shares.sum(1), 1)
    # The ground is left as it is, the square red, the disc green.
    red, green = (
        (images[..., k] - np.delete(images.astype(int), k, -1).max(-1)).max((1, 2))
        for k in (0, 1)
    )
    assert (red > 100).all() and (green > 30).all()
    # The first row has no class, the second is ground.
    assert images[:, 0].mean() == pytest.approx(images[:, 1].mean(), rel=0.1)
    out = tmp_path / "sheet.png"
    run(recipe, f"--out={out}")
    assert out.exists()


@pytest.mark.parametrize(
    "transform", ["naflex(12, patch=2)", "naflex(24, patch=2, pack=2)"]
)
def test_images_of_any_size_are_shown_whole(transform, tmp_path):
    recipe = write_recipe(
        tmp_path / "sizes.py",
        *LINES,
        f'c.data.train_transform = "{transform}"',
        'c.model = dict(variant="Ti/2", width=12, depth=1, num_heads=2, mlp_dim=8, pool="gap")',
    )
    loaded = config.load(str(recipe), {})
    source = open_source(loaded.data, "train")
    images, labels, _ = show_batch.see(source, loaded, 4)
    assert len(images) == len(labels) == 4
    for image, label in zip(images, labels, strict=True):
        # Digits are square: three rows and columns of patches of 2 pixels.
        assert image.shape == (6, 6, 1) and image.max() > 150
        assert label.sum() == 1
