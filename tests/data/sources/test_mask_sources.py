"""Masks beside images: in folders of every layout, in TFDS, in Parquet files and tables."""

import csv
import io
import json
import pathlib
import shutil

import numpy as np
import pytest
from PIL import Image
from tfds_sets import builder_class, png

from vit_jax.data import masks, pipeline
from vit_jax.data.fingerprint import differences, fingerprint
from vit_jax.data.sources import mask_folders
from vit_jax.data.sources.mask_folders import CITYSCAPES_CLASSES, VOC_CLASSES
from vit_jax.data.sources.open import open_source
from vit_jax.errors import NoSplit, UserError

ROOT = pathlib.Path(__file__).parents[3]
H, W = 7, 11
CLASSES = 4


def numbers(seed, low=0, high=CLASSES):
    return np.random.default_rng(seed).integers(low, high, (H, W)).astype(np.uint8)


def write(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_pair(image, mask, seed, **bounds):
    """Writes an image whose first pixel is `seed`, and its mask."""
    write(image, np.full((H, W, 3), seed, np.uint8))
    write(mask, numbers(seed, **bounds))


def seeds(source):
    """Returns the seed of each record, after a look at its mask."""
    found = []
    for i in range(len(source)):
        record = source[i]
        seed = int(np.array(Image.open(io.BytesIO(record["image"])))[0, 0, 0])
        mask = masks.decode_mask(record["mask"])
        np.testing.assert_array_equal(mask, numbers(seed), err_msg=source.describe(i))
        found.append(seed)
    return found


@pytest.fixture
def make(data_config, tmp_path):
    keys = {"name": "masks", "mask_key": "masks", "num_classes": CLASSES}
    keys |= {"data_dir": str(tmp_path), "train_transform": "resize"}
    return lambda **more: data_config(**{**keys, **more})


def test_folders_without_splits_have_the_parts_train_and_val(make, tmp_path):
    for i in range(10):
        write_pair(tmp_path / f"images/{i}.png", tmp_path / f"masks/{i}.png", i)
    whole, train, val = (open_source(make(split=s), s) for s in ("all", "train", "val"))
    assert sorted(seeds(whole)) == list(range(10))
    assert (len(train), len(val)) == (8, 2)
    assert sorted(seeds(train) + seeds(val)) == list(range(10))
    assert sorted(seeds(open_source(make(), "train[:50%]"))) == sorted(seeds(train)[:4])
    assert val.record_id(0) in {f"images/{i}.png" for i in range(10)}
    assert train.class_names == ()
    with pytest.raises(NoSplit, match="test"):
        open_source(make(), "test")


LAYOUTS = {
    "splits inside": ("img/{split}/{i}.png", "labels/{split}/{i}.png"),
    "splits outside": ("{split}/images/{i}.png", "{split}/masks/{i}.png"),
    "suffix": ("images/{split}/a/{i}.png", "masks/{split}/a/{i}_mask.png"),
    "other ending": ("image/{split}/{i}.png", "mask/{split}/{i}.tif"),
    "own name": ("photos/{split}/{i}.png", "truth/{split}/{i}.png"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_folders_with_splits(make, tmp_path, layout):
    image, mask = LAYOUTS[layout]
    for split, numbers_ in {"train": range(5), "validation": range(5, 8)}.items():
        for i in numbers_:
            places = (tmp_path / p.format(split=split, i=i) for p in (image, mask))
            write_pair(*places, i)
    parts = [part for part in mask.split("/") if part != "{split}"]
    keys = {"mask_key": parts[0]}
    if layout == "own name":
        with pytest.raises(UserError, match="data.image_key"):
            open_source(make(**keys), "train")
        keys["image_key"] = "photos"
    assert sorted(seeds(open_source(make(**keys), "train"))) == list(range(5))
    assert sorted(seeds(open_source(make(**keys), "val"))) == [5, 6, 7]
    both = open_source(make(**keys), "train[:2]+validation")
    assert len(both) == 5
    assert sorted(seeds(both))[-3:] == [5, 6, 7]


def test_splits_with_a_year_and_folders_that_are_no_splits(make, tmp_path):
    for i, name in enumerate(["train2017", "val2017"]):
        where = f"{{}}/{name}/{i}.png"
        write_pair(tmp_path / where.format("images"), tmp_path / where.format("gt"), i)
    assert seeds(open_source(make(mask_key="gt"), "val2017")) == [1]
    with pytest.raises(NoSplit, match="train2017, val2017"):
        open_source(make(mask_key="gt"), "train")
    for i, name in enumerate(["trainspotting", "valley"]):
        where = f"film/{{}}/{name}/{i}.png"
        write_pair(tmp_path / where.format("images"), tmp_path / where.format("gt"), i)
    data = make(mask_key="gt", data_dir=str(tmp_path / "film"))
    assert sorted(seeds(open_source(data, "all"))) == [0, 1]


def voc(root, lists):
    for i in range(9):
        image, mask = root / f"JPEGImages/{i}.png", root / f"SegmentationClass/{i}.png"
        write_pair(image, mask, i)
    for split, names in lists.items():
        path = root / f"ImageSets/Segmentation/{split}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{name}\n" for name in names))


def test_pascal_voc(make, tmp_path, caplog):
    voc(tmp_path / "VOCdevkit/VOC2012", {"train": [0, 3, 4], "val": [5]})
    data = make(mask_key="SegmentationClass", num_classes=21)
    source = open_source(data, "train")
    assert sorted(seeds(source)) == [0, 3, 4]
    assert seeds(open_source(data, "val")) == [5]
    assert source.class_names == VOC_CLASSES
    assert source.class_colors[:4] == (
        *((0, 0, 0), (128, 0, 0), (0, 128, 0), (128, 128, 0)),
    )
    assert source.class_colors[20] == (0, 64, 128)
    assert not caplog.messages
    reduced = make(mask_key="SegmentationClass", num_classes=20, reduce_zero_label=True)
    assert open_source(reduced, "val").class_names == VOC_CLASSES[1:]
    assert open_source(make(mask_key="SegmentationClass"), "val").class_names == ()
    path = tmp_path / "VOCdevkit/VOC2012/ImageSets/Segmentation/val.txt"
    path.write_text("5\n77\n")
    with pytest.raises(UserError, match=r"val.txt.*'77'"):
        open_source(data, "val")


def test_ade20k(make, tmp_path):
    root = tmp_path / "ADEChallengeData2016"
    for split, seed in {"training": 3, "validation": 8}.items():
        name = f"{split}/ADE_{seed:08}.png"
        write_pair(root / "images" / name, root / "annotations" / name, seed)
    lines = ["Idx\tRatio\tTrain\tVal\tName", "1\t.1\t1\t2\twall"]
    lines += [f"{i}\t.1\t1\t2\tthing {i}, synonym" for i in range(2, 5)]
    (root / "objectInfo150.txt").write_text("\n".join(lines) + "\n")
    data = make(mask_key="annotations", reduce_zero_label=True)
    source = open_source(data, "train")
    assert seeds(source) == [3]
    assert seeds(open_source(data, "val")) == seeds(open_source(data, "validation"))
    assert source.class_names == ("wall", "thing 2", "thing 3", "thing 4")
    _, label_map = masks.read_pair(source, data, 0)
    np.testing.assert_array_equal(label_map, numbers(3).astype(int) - 1)


@pytest.mark.parametrize("kind", ["labelTrainIds", "labelIds"])
def test_cityscapes(make, tmp_path, kind, caplog):
    ids = numbers(0, 0, 34)
    where = "{}/train/ulm/ulm_000000_000019_{}.png"
    image = tmp_path / where.format("leftImg8bit", "leftImg8bit")
    write(image, np.zeros((H, W, 3), np.uint8))
    gt = lambda name: tmp_path / where.format("gtFine", f"gtFine_{name}")
    write(gt("color"), np.zeros((H, W, 3), np.uint8))
    write(gt("instanceIds"), numbers(1).astype(np.uint16))
    expected = np.full((H, W), 255)
    for train_id, (_, label_id, _) in enumerate(CITYSCAPES_CLASSES):
        expected[ids == label_id] = train_id
    if kind == "labelTrainIds":
        write(gt(kind), expected.astype(np.uint8))
    write(gt("labelIds"), ids)
    data = make(mask_key="gtFine", num_classes=19)
    source = open_source(data, "train")
    assert len(source) == 1
    label_map = masks.read_pair(source, data, 0)[1]
    np.testing.assert_array_equal(label_map, np.where(expected == 255, -1, expected))
    assert source.class_names[13] == "car"
    assert source.class_colors[13] == (0, 0, 142)
    assert not caplog.messages


def test_train_ids_of_cityscapes_are_the_official_ones():
    table = mask_folders.train_ids()
    assert [int(table[i]) for i in (7, 8, 11, 23, 26, 33)] == [0, 1, 2, 10, 13, 18]
    assert {int(table[i]) for i in (0, 4, 9, 10, 14, 18, 29, 30)} == {255}
    assert sorted(table[table != 255].tolist()) == list(range(19))


def test_what_lacks_its_other_half_is_counted_and_named(make, tmp_path, caplog):
    for i in range(4):
        write_pair(tmp_path / f"images/{i}.png", tmp_path / f"masks/{i}.png", i)
    (tmp_path / "masks/1.png").unlink()
    (tmp_path / "images/2.png").unlink()
    assert sorted(seeds(open_source(make(split="all"), "all"))) == [0, 3]
    (line,) = caplog.messages
    assert "1 images have no mask, such as images/1.png" in line
    assert "1 masks have no image, such as masks/2.png" in line
    shutil.rmtree(tmp_path / "masks")
    write(tmp_path / "masks/other.png", numbers(0))
    with pytest.raises(UserError, match=r"none of the 3 images.*masks.*_mask"):
        open_source(make(split="all"), "all")


def test_a_folder_of_no_known_layout_says_what_is_read(make, tmp_path):
    write(tmp_path / "pictures/1.png", numbers(0))
    with pytest.raises(UserError, match=r"'masks'.*pictures.*images/.*Cityscapes"):
        open_source(make(), "train")
    with pytest.raises(UserError, match="data.mask_key.*folder"):
        open_source(make(mask_key=""), "train")
    with pytest.raises(UserError, match=r"no/such.*none"):
        open_source(make(data_dir="no/such"), "train")


@pytest.mark.parametrize("twice", ["images/1.jpg", "masks/1.npy"])
def test_two_files_of_one_stem_are_refused(make, tmp_path, twice):
    write_pair(tmp_path / "images/1.png", tmp_path / "masks/1.png", 1)
    (tmp_path / twice).write_bytes(b"other")
    with pytest.raises(
        UserError, match=f"1.png and .*{twice} differ only in the extension"
    ):
        open_source(make(split="all"), "all")


def test_classes_come_from_a_file(make, tmp_path):
    write_pair(tmp_path / "images/1.png", tmp_path / "masks/1.png", 1)
    (tmp_path / "classes.txt").write_text("sky\n road \ncafe\u0301\ncar\n\n", "utf-8")
    source = open_source(make(split="all"), "all")
    assert source.class_names == ("sky", "road", "caf\u00e9", "car")
    with pytest.raises(UserError, match="num_classes=4"):
        open_source(make(split="all", num_classes=7), "all")
    for content, match in (
        (b"sky\n\nroad\n", r"classes.txt has no name in line 2"),
        ("sky\nCafé".encode("latin-1"), "classes.txt cannot be read.*UTF-8"),
    ):
        (tmp_path / "classes.txt").write_bytes(content)
        with pytest.raises(UserError, match=match):
            open_source(make(split="all"), "all")


def test_a_changed_mask_is_noticed(make, tmp_path):
    for i in range(3):
        write_pair(tmp_path / f"images/{i}.png", tmp_path / f"masks/{i}.png", i)
    data = make(split="all")
    stored = json.loads(json.dumps(fingerprint(open_source(data, "all"))))
    assert differences(stored, open_source(data, "all")) == []
    write(tmp_path / "masks/1.png", numbers(77, 0, 2))
    (line,) = differences(stored, open_source(data, "all"))
    assert line.startswith("masks of the image files")


@pytest.mark.parametrize("name", ["digits", "folder"])
def test_sets_without_masks_are_refused_by_name(make, name):
    with pytest.raises(UserError, match=f"mask_key='masks'.*'{name}'.*parquet"):
        open_source(make(name=name), "train")


def test_synthetic_masks_show_in_the_images_and_differ(make):
    data = make(name="synthetic", image_size=(19, 23), num_classes=5)
    source = open_source(data, "train[3:9]")
    assert len(source) == 6
    assert len(source.class_names) == 5
    shades = {}
    for i in range(6):
        image, label_map = masks.read_pair(source, data, i)
        assert image.shape == (19, 23, 3)
        for number in range(5):
            shades.setdefault(number, []).append(image[label_map == number].mean(0))
    spread = [np.std(shade, axis=0).max() for shade in shades.values()]
    means = np.array([np.mean(shade, axis=0) for shade in shades.values()])
    apart = abs(means[:, None] - means[None]).max(-1) + 1e9 * np.eye(5)
    assert apart.min() > 5 * max(spread)
    train, val = (open_source(data, split)[0]["mask"] for split in ("train", "val"))
    assert (train != val).any()


def batch_of(data, split="train"):
    source = open_source(data, split)
    arguments = {"batch_size": 3, "seed": 0, "start": 0, "stop": 1}
    with pipeline.train_batches(source, data, **arguments) as batches:
        return source, next(batches)


def encoded(pixels):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["struct", "bytes", "rows"])
def test_a_column_of_parquet(make, tmp_path, kind):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    cell = {
        "struct": lambda i: {"bytes": encoded(numbers(i)), "path": None},
        "bytes": lambda i: encoded(numbers(i)),
        "rows": lambda i: numbers(i).tolist(),
    }[kind]
    rows = [
        {"image": encoded(np.full((H, W, 3), i, np.uint8)), "annotation": cell(i)}
        for i in range(5)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    data = make(name="parquet", mask_key="annotation", image_size=(H, W))
    source, batch = batch_of(data)
    assert sorted(seeds(source)) == list(range(5))
    assert source.class_names == ()
    assert "label" not in batch
    for image, label_map in zip(batch["image"], batch["label_map"], strict=True):
        np.testing.assert_array_equal(label_map, numbers(int(image[0, 0, 0])))
    with pytest.raises(UserError, match=r"mask_key='masks'.*annotation"):
        open_source(make(name="parquet"), "train")
    stored = fingerprint(source)
    rows[2]["annotation"] = None
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    assert differences(stored, open_source(data, "train"))


def test_a_column_of_paths_in_a_table(make, tmp_path):
    rows = []
    for i in range(4):
        image, mask = f"photos/{i}.png", f"truth/{i}_classes.png"
        write_pair(tmp_path / image, tmp_path / mask, i)
        rows.append({"image": f"{i}.png", "mask": mask, "label": "cat"})

    def write_table(rows):
        with (tmp_path / "train.csv").open("w", newline="") as file:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows(rows)

    write_table(rows)
    data = make(name="table", mask_key="mask", image_dir="photos", image_size=(H, W))
    source, batch = batch_of(data)
    assert sorted(seeds(source)) == list(range(4))
    assert source.class_names == ()
    assert "label" not in batch
    stored = fingerprint(source)
    write_table([*rows[:3], rows[3] | {"mask": rows[2]["mask"]}])
    (line,) = differences(stored, open_source(data, "train"))
    assert line.startswith("masks")
    write_table([*rows, rows[0] | {"mask": rows[2]["mask"]}])
    with pytest.raises(UserError, match="row 5.*another"):
        open_source(data, "train")
    write_table([*rows[:2], rows[2] | {"mask": "truth/none.png"}])
    with pytest.raises(UserError, match="row 3.*truth/none.png.*'mask'"):
        open_source(data, "train")
    with pytest.raises(UserError, match=r"mask_key='masks'.*mask"):
        open_source(make(name="table"), "train")


def test_a_feature_of_tfds(make, tmp_path_factory, tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")
    shape = (H, W)
    features = {
        "image": tfds.features.Image(shape=(*shape, 3), encoding_format="png"),
        "segmentation_mask": tfds.features.Image(
            shape=(*shape, 1), use_colormap=True, encoding_format="png"
        ),
        "tensor": tfds.features.Tensor(shape=(*shape, 1), dtype=np.uint8),
    }

    def examples():
        for i in range(6):
            mask = numbers(i)
            yield {
                "image": png(np.full((*shape, 3), i, np.uint8)),
                "segmentation_mask": png(mask),
                "tensor": mask[..., None],
            }

    code = tmp_path_factory.mktemp("code")
    builder = builder_class("masked_set", "1.0.0", features, {"train": examples}, code)
    builder(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    for key in ("segmentation_mask", "tensor"):
        data = make(name="masked_set", mask_key=key, image_size=shape)
        source, batch = batch_of(data)
        assert sorted(seeds(source)) == list(range(6))
        for image, label_map in zip(batch["image"], batch["label_map"], strict=True):
            np.testing.assert_array_equal(label_map, numbers(int(image[0, 0, 0])))
    with pytest.raises(UserError, match=r"mask_key='masks'.*segmentation_mask"):
        open_source(make(name="masked_set"), "train")
