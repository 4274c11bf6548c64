"""Runs of a task that reads no labels, on plain images and on several views of them."""

import sys

import jax
import numpy as np
import pytest
from helpers import run_command, tiny_config
from PIL import Image

from vit_jax import show_batch
from vit_jax.data import pipeline
from vit_jax.data.fingerprint import fingerprint
from vit_jax.data.sources.open import open_source
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed.mesh import MeshConfig
from vit_jax.errors import UserError
from vit_jax.training import loop, train_setup

MODULES = {
    "no_labels": """
import numpy as np


class Source:
    class_names = ()
    images = None

    def __len__(self):
        return 20

    @property
    def labels(self):
        raise RuntimeError("labels are read")

    def __getitem__(self, i):
        return Item(image=np.full((11, 13, 3), 12 * i, np.uint8))

    def describe(self, i):
        return f"record {i}"

    def record_id(self, i):
        return f"train/{i}"


class InMemory(Source):
    images = np.arange(20, dtype=np.uint8)[:, None, None, None] + np.zeros(
        (20, 8, 12, 3), np.uint8
    )


class Item(dict):
    def __missing__(self, key):
        raise RuntimeError(f"{key} is read")


class InBytes(Source):
    labels = None

    def __getitem__(self, i):
        return {"image": np.zeros((11, 13, 3), np.uint8)}


def open_source(data, split):
    return Source()


def open_in_bytes(data, split):
    return InBytes()


def open_in_memory(data, split):
    return InMemory()
""",
    "quarters": '''
import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Quarters:
    """The whole image and its four quarters."""

    runs_on = "host"
    wrong: str = ""

    def __call__(self, image, rng):
        h, w = image.shape[0] // 2, image.shape[1] // 2
        parts = [image[:h, :w], image[:h, w:], image[h:, :w], image[h:, w:]]
        if self.wrong == "shape":
            parts = parts[:3]
        if self.wrong == "dtype":
            parts = np.float32(parts)
        if self.wrong == "image":
            return image
        return {"image": image, "parts": np.stack(parts)}

    def output_shapes(self, channels):
        if self.wrong == "name":
            return {"image": (8, 12, channels), "label": (2,)}
        return {"image": (8, 12, channels), "parts": [4, 4, 6, channels]}
''',
}
MAE = {"name": "mae", "decoder_width": 8, "decoder_depth": 1, "decoder_num_heads": 2}
KNN = {"kind": "knn", "train": "train", "test": "val", "k": 3}


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)


def config(line="resize", evals=None, data=None, **keys):
    common = {"num_classes": 0, "train_transform": line, "eval_transform": "resize"}
    data = common | (data or {})
    return tiny_config(data=data, evals=evals or {}, **{"task": MAE} | keys)


def batches(found, stop=2):
    source = open_source(found.data, "train")
    with pipeline.train_batches(
        source, found.data, batch_size=8, seed=3, start=0, stop=stop
    ) as made:
        return list(made)


@pytest.mark.parametrize(
    ("name", "line"),
    [("open_source", "resize"), ("open_in_memory", "resize"), ("open_in_memory", "")],
)
def test_labels_that_raise_are_not_read(name, line):
    found = config(line, data={"name": f"no_labels:{name}", "num_examples": 20})
    for batch in batches(found):
        assert batch.keys() == {"image", "index", "skipped"}
        assert batch["image"].shape == (8, 8, 12, 3)
    fingerprint(open_source(found.data, "train"))


def write_images(root, *names):
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 256, (15, 19, 3), np.uint8)
        Image.fromarray(pixels).save(root / name)


def test_records_are_left_out_of_a_source_without_labels(tmp_path):
    (tmp_path / "ids").write_text("train/3\ntrain/7\n")
    data = {"name": "no_labels:open_in_memory", "num_examples": 0}
    found = config("", data=data | {"exclude": str(tmp_path / "ids")})
    source = open_source(found.data, "train")
    assert source[3].keys() == {"image"}
    values = [int(source[i]["image"][0, 0, 0]) for i in range(len(source))]
    assert values == [i for i in range(20) if i not in (3, 7)]


TRAIN = tuple(f"train/{i}.png" for i in range(9))


@pytest.mark.slow
def test_a_folder_without_classes_is_learnt_from_and_evaluated(tmp_path):
    images = tmp_path / "images"
    write_images(images, "train/x/a.png", "train/x/y/b.png", *TRAIN)
    write_images(images, "val/e.png", "val/z/f.png", "val/z/g.png")
    write_images(tmp_path / "pets", "train/ant/a.png", "train/bee/b.png")
    write_images(tmp_path / "pets", "val/ant/a.png", "val/bee/b.png")
    data = {"name": "folder", "data_dir": str(images), "num_examples": 11}
    pets = KNN | {"name": "folder", "data_dir": str(tmp_path / "pets")}
    evals = {"knn": pets, "task": {"kind": "task"}}
    task = {"name": "masked_patch"}
    report = loop.train(config(evals=evals, data=data, task=task), tmp_path / "run")
    assert np.isfinite(report["final"]["task"]["params"]["loss"])
    assert report["final"]["knn"]["params"]["top1"] in (0, 0.5, 1)
    with pytest.raises(UserError, match=r"evals.val: .* but the model has 0 classes"):
        loop.train(config(evals={"val": "val"}), tmp_path / "other")


def test_features_of_images_without_labels_are_not_evaluated(tmp_path):
    write_images(tmp_path / "images", *TRAIN, "val/c.png")
    data = {"name": "folder", "data_dir": str(tmp_path / "images"), "num_examples": 0}
    found = config(evals={"near": KNN}, data=data)
    message = (
        r"evals\.near needs labels: .*images/train has no class folders: it must look "
        r"like .*; or name a labelled data set in evals\.near\.name and evals\.near\.data"
    )
    with pytest.raises(UserError, match=message):
        loop.train(found, tmp_path / "run")
    found = config(
        evals={"near": KNN}, data={"name": "no_labels:open_in_bytes", "num_examples": 0}
    )
    message = r"evals\.near needs labels: data\.name=.* gives record 0 no .label.: add"
    with pytest.raises(UserError, match=message):
        loop.train(found, tmp_path / "run")


def test_a_set_of_images_without_a_split_to_test_on_says_how_to_state_it(tmp_path):
    write_images(tmp_path / "images", *TRAIN)
    data = {"name": "folder", "data_dir": str(tmp_path / "images"), "num_examples": 0}
    found = config(evals={"task": {"kind": "task"}}, data=data)
    message = (
        r"evals\.task: .* has no folder 'val' or 'validation' or 'test' with images: "
        r"add it, or set split=, such as all$"
    )
    with pytest.raises(UserError, match=message):
        loop.train(found, tmp_path / "run")


def test_a_task_that_learns_from_labels_refuses_to_have_none(tmp_path):
    found = config(task={"name": "classification"})
    message = r"data.num_classes=0: .* set --config.data.num_classes to"
    with pytest.raises(UserError, match=message):
        loop.train(found, tmp_path / "run")
    with pytest.raises(UserError, match=message):
        show_batch.see(open_source(found.data, "train"), found, 2)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_custom_transform_may_return_several_arrays(workers):
    found = config("resize | quarters:Quarters", data={"num_workers": workers})
    plain = batches(config("resize"))
    for batch, alone in zip(batches(found), plain, strict=True):
        assert batch.keys() == {"image", "parts", "index", "skipped"}
        assert batch["parts"].shape == (8, 4, 4, 6, 3)
        np.testing.assert_array_equal(batch["image"], alone["image"])
        np.testing.assert_array_equal(batch["parts"][:, 3], alone["image"][:, 4:, 6:])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("quarters:Quarters('shape')", r"parts of 3x4x6x3 .* says image of 8x12x3, pa"),
        ("quarters:Quarters('dtype')", r"returned .*float32.*, not a dict of uint8"),
        ("quarters:Quarters('image')", r"returned .*, not a dict of uint8 arrays"),
        (
            "quarters:Quarters('name')",
            "no array label, label_map, text, targets, index",
        ),
        ("quarters:Quarters | resize", "quarters returns several arrays, .* the last"),
        ("multi_crop | randaugment", "multicrop returns several arrays, .* the last"),
    ],
)
def test_what_is_wrong_with_several_arrays_is_named(line, message):
    with pytest.raises(UserError, match=message):
        batches(config(line))


def test_a_task_of_one_image_refuses_several_views():
    found = config(
        "multi_crop", data={"num_classes": 5}, task={"name": "classification"}
    )
    mesh = meshes.create(MeshConfig(data=1), jax.devices()[:1])
    message = (
        r"makes image of 2x8x12x3, small_crops of 8x96x96x3, but this task takes 8"
    )
    with pytest.raises(UserError, match=message):
        train_setup.build(found, mesh, 20)


RECIPE = """
from ml_collections import ConfigDict

def get_config(arg=None):
    c = ConfigDict()
    c.seed, c.total_steps, c.batch_size = 3, 6, 4
    c.data = dict(name="synthetic", num_classes=0, num_examples=9, image_size=(16, 12))
    c.data.train_transform = "multi_crop(small_size=8, num_small=3)"
    c.task = dict(name="dino", num_outputs=8, hidden_dim=8, bottleneck_dim=4)
    c.optim = dict(learning_rate=0.01)
    c.model = dict(variant="Ti/4", width=12, depth=1, num_heads=3, mlp_dim=20)
    return c
"""


def test_show_batch_shows_every_view(tmp_path):
    (tmp_path / "recipe.py").write_text(RECIPE)
    out = tmp_path / "sheet.png"
    words = [f"--config={tmp_path / 'recipe.py'}", f"--out={out}"]
    run_command("show_batch", [*words, "--columns=5", "--rows=2"])
    with Image.open(out) as sheet:
        pixels = np.asarray(sheet).astype(int)
    # Ten cells: two examples with five views each, which all show something.
    cell = pixels.shape[1] // 5
    for row in range(2):
        for column in range(5):
            top, left = row * (pixels.shape[0] // 2) + 50, column * cell + 40
            assert pixels[top : top + 30, left : left + 30].std() > 5
