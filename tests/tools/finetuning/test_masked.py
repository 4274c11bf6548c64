"""What fine-tuning on masks finds in them and chooses."""

import dataclasses

import jax
import mask_folder
import numpy as np
import pytest
from PIL import Image

from vit_jax import models
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.tools.finetuning import layout, rule
from vit_jax.tools.finetuning.kind import Given, Seen
from vit_jax.tools.finetuning.masked import Masks
from vit_jax.weights.pretrained import Pretrained


def look(root, **stated):
    return Masks().look(layout.find(str(root), stated, str(root / "run")), str(root))


def write_masks(root, *values, count=5):
    """Writes images whose masks have some values."""
    for i in range(count):
        mask = np.resize(np.array(values, np.uint16), (6, 9))
        mask = mask.astype(np.uint8) if max(values) < 256 else mask
        for folder, pixels in (
            ("images", np.zeros((6, 9, 3), np.uint8)),
            ("masks", mask),
        ):
            (root / folder).mkdir(exist_ok=True)
            Image.fromarray(pixels).save(root / folder / f"{i}.png")


@pytest.mark.parametrize(
    ("values", "names", "classes", "reduced"),
    [
        ((0, 1, 2), (), 3, False),
        ((0, 1, 255), (), 2, False),
        ((0, 255), ("dark", "light"), 2, None),
        ((7, 255), (), 2, None),  # As black and white: the numbers are listed.
        ((1, 2, 3, 255), (), 3, True),  # As Oxford-IIIT Pet.
        ((0, 1, 2), ("a", "b", "c", "d"), 4, False),
        ((1, 2), ("a", "b", "c"), 3, False),
        ((0, 1, 2), ("a", "b"), 2, True),  # As ADE20K: 0 has no name.
        ((0, 300), (), 301, False),
    ],
)
def test_classes_are_found(tmp_path, values, names, classes, reduced):
    write_masks(tmp_path, *values)
    if names:
        (tmp_path / "classes.txt").write_text("\n".join(names))
    seen = look(tmp_path)
    if reduced is None:
        assert seen.data == {"num_classes": 2, "mask_values": values}
        assert "data.mask_values" in seen.choices
        return
    assert seen.data == {"num_classes": classes, "reduce_zero_label": reduced}
    assert ("data.reduce_zero_label" in seen.choices) == reduced
    _, why = seen.choices["data.num_classes"]
    assert ("names" in why) == bool(names)
    assert ("255" in why) == (255 in values)


def test_ade20k_has_names_for_all_but_0(tmp_path):
    for part, first in (("training", 0), ("validation", 6)):
        folders = f"images/{part}", f"annotations/{part}"
        mask_folder.write(tmp_path, 6, *folders, first, border=False)
    rows = ["Idx\tName", "1\twall, side", "2\tsky"]
    (tmp_path / "objectInfo150.txt").write_text("\n".join(rows))
    found = layout.find(str(tmp_path), {}, str(tmp_path / "run"))
    seen = Masks().look(found, str(tmp_path))
    assert (found.data["split"], found.validation) == ("training", "validation")
    assert seen.data == {"num_classes": 2, "reduce_zero_label": True}


def test_what_is_set_is_not_found(tmp_path):
    write_masks(tmp_path, 1, 2, 7)
    seen = look(tmp_path, reduce_zero_label=False, ignore_label=7)
    assert seen.data == {"num_classes": 3}
    seen = look(tmp_path, mask_values=(7, 1, 2))
    assert seen.data == {"num_classes": 3, "mask_values": (7, 1, 2)}
    (tmp_path / "two").mkdir()
    write_masks(tmp_path / "two", 1, 7)
    with pytest.raises(UserError, match="one class, 1"):
        look(tmp_path / "two", ignore_label=7)


@pytest.mark.parametrize(
    ("values", "names", "message"),
    [
        ((0,), (), "one class, 0"),
        ((0, 1, 2, 3), ("a", "b"), "names 2 classes, but its masks have 3"),
    ],
)
def test_masks_without_classes_to_learn_are_refused(tmp_path, values, names, message):
    write_masks(tmp_path, *values)
    if names:
        (tmp_path / "classes.txt").write_text("\n".join(names))
    with pytest.raises(UserError, match=message):
        look(tmp_path)


def test_a_mask_of_colours_is_named(tmp_path):
    mask_folder.write(tmp_path, 4)
    image = Image.open(tmp_path / "images" / "2.png").convert("RGB")
    image.save(tmp_path / "masks" / "2.png")
    with pytest.raises(UserError, match=r"images/2\.png.*colours"):
        look(tmp_path)


def given(variant, side, **options):
    options |= {"variant": variant, "num_classes": 0, "image_size": (side, side)}
    model = models.create(**options)
    params = jax.eval_shape(model.init, jax.random.key(0))
    pretrained = Pretrained(params, model.options, "vit_jax", "made")
    images = rule.Images(40, 60.0, False, 1.0)
    splits = layout.Layout({}, "val", "", "")
    seen = Seen(images, {"num_classes": 3}, {})
    how = Preprocess((side, side), crop_fraction=0.875)
    return Given(Masks(), splits, seen, 10, pretrained, how)


TINY = {"width": 8, "num_heads": 2, "mlp_dim": 12}


@pytest.mark.parametrize(
    ("variant", "options", "layers", "decays"),
    [
        ("Ti/2", TINY | {"depth": 5}, (-4, -3, -2, -1), True),
        ("Ti/2", TINY | {"depth": 3}, (-3, -2, -1), True),
        (
            "Swin-T",
            {
                "width": 8,
                "stage_depths": (1, 1),
                "num_heads": (2, 4),
                "window_size": 2,
                "patch_size": 2,
            },
            (-2, -1),
            True,
        ),
        (
            "R50x1",
            {"stage_depths": (1, 1, 1, 1), "stem_width": 32},
            (-4, -3, -2, -1),
            False,
        ),
    ],
)
def test_head_and_rates_fit_the_network(variant, options, layers, decays):
    found = Masks().sections(given(variant, 32, **options), 32, 16)
    assert found["task"]["layers"] == layers
    several_scales = variant in ("Swin-T", "R50x1")
    assert found["task"]["head"] == ("pyramid" if several_scales else "linear")
    assert ("layer_decay" in found["optim"]) == decays
    assert (
        found["optim"]["name"] == Masks.optimizer and "momentum" not in found["optim"]
    )
    assert found["best_metric"] == "val/miou"


def test_grey_images_keep_their_sides_and_colours():
    def chosen(grey=False, **options):
        found = given("Ti/2", 32, **TINY, depth=1, **options)
        images = dataclasses.replace(found.images, grey=grey)
        found = dataclasses.replace(found, seen=Seen(images, {"num_classes": 3}, {}))
        return Masks().transforms(found, (32, 32))

    assert "flip | color_jitter" in chosen()["train_transform"]
    assert chosen(channels=5)["train_transform"].endswith("| flip")
    assert "|" not in chosen(grey=True)["train_transform"]
    # The whole short side is seen, as in evaluations.
    assert chosen()["eval_transform"] == (
        "resize_small(32, interpolation='bilinear') | central_crop"
    )


def test_an_evaluation_costs_windows_and_pixels():
    images = rule.Images(40, 300.0, False, 1.0)
    slow, fast = (
        Masks().cost(Seen(images, {"num_classes": n}, {}), 50) for n in (2, 9)
    )
    assert 2 < slow < fast < 10
