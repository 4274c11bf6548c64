import io
import json

import numpy as np
import pytest
from PIL import Image
from tfds_sets import builder_class

from vit_jax.data import folder, objectnet, tfds_source
from vit_jax.errors import UserError
from vit_jax.evaluation import label_sets
from vit_jax.evaluation.passes import Outputs

SETS = [[3], [], [7, 9], [1, 2, 3], [], [999]]


def outputs(tops, labels=None, records=None, **values):
    tops = np.asarray(tops, np.int32)
    labels = np.zeros(len(tops), np.int32) if labels is None else np.asarray(labels)
    records = np.arange(len(tops)) if records is None else np.asarray(records)
    return Outputs(records, labels, {"tops": tops} | values)


def test_real_counts_what_is_in_the_set_and_skips_empty_sets():
    tops = [
        [3, 0, 4, 5, 6],
        [3, 0, 4, 5, 6],  # Empty: not scored.
        [8, 6, 5, 4, 9],
        [5, 0, 4, 6, 7],
        [0, 1, 2, 3, 4],
        [999, 0, 1, 2, 3],
    ]
    sets = list(map(frozenset, SETS))
    found = label_sets.score_real(outputs(tops), sets).metrics
    assert found == {"top1": 2 / 4, "top5": 3 / 4, "examples": 4}
    # Record 0 was damaged: sets go with records, not with rows.
    found = label_sets.score_real(outputs(tops[1:], records=range(1, 6)), sets).metrics
    assert found == {"top1": 1 / 3, "top5": 2 / 3, "examples": 3}
    with pytest.raises(UserError, match="no image of this split has a label in ReaL"):
        label_sets.score_real(outputs(tops[:2], records=[1, 4]), sets)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A set with the features of TFDS's imagenet2012_real, of six large images."""
    tfds = pytest.importorskip("tensorflow_datasets")
    features = {
        "image": tfds.features.Image(shape=(None, None, 3), encoding_format="jpeg"),
        "original_label": tfds.features.ClassLabel(num_classes=1000),
        "real_label": tfds.features.Sequence(
            tfds.features.ClassLabel(num_classes=1000)
        ),
        "file_name": tfds.features.Text(),
    }

    def examples():
        for i, labels in enumerate(SETS):
            stream = io.BytesIO()
            Image.new("RGB", (70, 80), (40 * i, 0, 0)).save(stream, "JPEG")
            stream.seek(0)
            yield {
                "image": stream,
                "original_label": i,
                "real_label": labels,
                "file_name": f"ILSVRC2012_val_{i + 1:08}.JPEG",
            }

    code, where = (tmp_path_factory.mktemp(name) for name in ("code", "tfds"))
    builder = builder_class(
        "imagenet2012_real", "1.0.0", features, {"validation": examples}, code
    )
    builder(data_dir=where, file_format="array_record").download_and_prepare()
    return str(where)


def test_labels_are_read_from_the_set_or_from_the_authors_file(prepared, tmp_path):
    source = tfds_source.open_tfds(
        "imagenet2012_real", prepared, "validation", "image", "original_label"
    )
    order = [record["label"] for record in source]  # TFDS shuffles them.
    assert sorted(order) == list(range(6))
    expected = [frozenset(SETS[i]) for i in order]
    assert label_sets.read_real(source, "", "title") == expected
    file = tmp_path / "real.json"
    file.write_text(json.dumps([*SETS, [5]]))
    assert label_sets.read_real(source, str(file), "title") == expected
    part = tfds_source.open_tfds(
        "imagenet2012_real", prepared, "validation[2:4]", "image", "original_label"
    )
    assert label_sets.read_real(part, "", "title") == expected[2:4]


def files(*names):
    """A folder's records; the files need not be there."""
    labels = [0] * len(names)
    return folder.FolderSource("root", list(names), labels, ("n01440764",))


def test_a_folder_tells_its_images_by_their_names(tmp_path):
    file = tmp_path / "real.json"
    file.write_text(json.dumps(SETS))
    name = "val/n01440764/ILSVRC2012_val_0000000{}.JPEG"
    source = files(name.format(4), name.format(1))
    found = label_sets.read_real(source, str(file), "folder val")
    assert found == [frozenset(SETS[3]), frozenset(SETS[0])]


@pytest.mark.parametrize(
    ("names", "text", "message"),
    [
        (["a.JPEG"], None, "'a.JPEG' does not name an image of ImageNet's validation"),
        (["ILSVRC2012_val_00000007.JPEG"], None, "00000007.JPEG' does not name"),
        (["ILSVRC2012_val_00000000.JPEG"], None, "00000000.JPEG' does not name"),
        (["x"], "{}", "is not a list of lists of class numbers"),
        (["x"], '[["a"]]', "is not a list of lists of class numbers"),
        (["x"], "[3]", "is not a list of lists of class numbers"),
        (["x"], "no", "cannot be read"),
    ],
)
def test_what_cannot_be_told_is_refused(tmp_path, names, text, message):
    file = tmp_path / "real.json"
    file.write_text(json.dumps(SETS) if text is None else text)
    with pytest.raises(UserError, match=message):
        label_sets.read_real(files(*names), str(file), "folder val")


def test_a_set_without_labels_needs_the_file():
    with pytest.raises(UserError, match="no feature 'real_label' .* set labels="):
        label_sets.read_real(files("a"), "", "folder val")


def test_objectnet_takes_any_of_the_objects_imagenet_classes():
    place = {name: i for i, name in enumerate(objectnet.CLASSES)}
    labels = [place["bicycle"], place["backpack"], place["chair"], place["tie"]]
    tops = [
        [671, 0, 1, 2, 3],  # The second of the two.
        [1, 0, 414, 2, 3],
        [1, 0, 2, 3, 4],
        [0, 906, 2, 3, 4],
    ]
    restricted = np.array([671, 414, 765, 412], np.int32)
    found = label_sets.score_objectnet(outputs(tops, labels, restricted=restricted))
    assert found.metrics == {
        "top1": 1 / 4,
        "top5": 3 / 4,
        "top1_overlap": 3 / 4,
        "examples": 4,
    }


def test_the_overlap_has_each_imagenet_class_once():
    assert len(objectnet.CLASSES) == 113
    assert len(label_sets.OVERLAP) == len(set(label_sets.OVERLAP)) == 125
    assert {414, 444, 671} <= set(label_sets.OVERLAP) <= set(range(1000))
