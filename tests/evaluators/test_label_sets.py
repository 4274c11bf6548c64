import dataclasses
import io
import json
import pathlib

import jax
import numpy as np
import pytest
from PIL import Image
from tfds_sets import builder_class

from vit_jax import models
from vit_jax.data.imagenet import OBJECTNET_CLASSES, synsets
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.sources import folder
from vit_jax.data.sources import tfds as tfds_source
from vit_jax.errors import UserError
from vit_jax.evaluators import checkpoint, label_sets
from vit_jax.evaluators.forward_passes import Outputs, Predictions
from vit_jax.training import config as configuration
from vit_jax.weights.network_images import prepare_image
from vit_jax.weights.pretrained import Pretrained

ROOT = pathlib.Path(__file__).parents[2]
SETS = [[3], [], [7, 9], [1, 2, 3], [], [999]]
OPTIONS = {
    "variant": "Ti/4",
    "width": 12,
    "depth": 1,
    "num_heads": 3,
    "mlp_dim": 17,
    "num_classes": 1000,
    "image_size": (8, 12),
}
SEED = 54  # With which some images of all three sets are right.


def outputs(tops, labels=None, records=None, restricted=None):
    tops = np.asarray(tops, np.int32)
    labels = np.zeros(len(tops), np.int32) if labels is None else np.asarray(labels)
    records = np.arange(len(tops)) if records is None else np.asarray(records)
    tops, restricted = (Predictions(x, None) for x in (tops, restricted))
    return Outputs(records, labels, predictions=tops, restricted=restricted)


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
    sizes = np.zeros(len(names), np.int64)
    return folder.FolderSource("root", list(names), labels, ("n01440764",), sizes)


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
    with pytest.raises(UserError, match="no feature 'real_label' .* set labels="):
        label_sets.read_real(files("a"), "", "folder val")


def test_objectnet_takes_any_of_the_objects_imagenet_classes():
    place = {name: i for i, name in enumerate(OBJECTNET_CLASSES)}
    labels = [place["bicycle"], place["backpack"], place["chair"], place["tie"]]
    tops = [
        [671, 0, 1, 2, 3],  # The second of the two.
        [1, 0, 414, 2, 3],
        [1, 0, 2, 3, 4],
        [0, 906, 2, 3, 4],
    ]
    best = np.array([[671], [414], [765], [412]], np.int32)
    expected = {"top1": 1 / 4, "top5": 3 / 4, "top1_overlap": 3 / 4, "examples": 4}
    values = outputs(tops, labels, restricted=best)
    assert label_sets.score_objectnet(values).metrics == expected
    # A model that has ImageNet's classes in the opposite order.
    values = outputs(999 - np.array(tops), labels, restricted=999 - best)
    assert label_sets.score_objectnet(values, np.arange(1000)[::-1]).metrics == expected


@pytest.fixture
def photos(tmp_path):
    """A photograph of each of ObjectNet's 113 classes."""
    rng = np.random.default_rng(3)
    for name in OBJECTNET_CLASSES:
        place = tmp_path / "images" / name
        place.mkdir(parents=True)
        pixels = rng.integers(0, 256, (9, 11, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / "1.png")
    return str(tmp_path)


def test_labels_share_a_pass_over_the_same_images(prepared, photos, passed):
    where = f"data_dir={prepared},objectnet={photos},v2=False"
    config = configuration.load_evaluation(f"{ROOT}/configs/eval/imagenet.py:{where}")
    model = models.create(**OPTIONS)
    leaves, tree = jax.tree.flatten(jax.eval_shape(model.init, jax.random.key(0)))
    rng = np.random.default_rng(SEED)
    leaves = [rng.standard_normal(leaf.shape, np.float32) for leaf in leaves]
    params = jax.tree.unflatten(tree, leaves)
    # So that more of the images are right.
    some = {n for numbers in list(OBJECTNET_CLASSES.values())[::5] for n in numbers}
    params["head"]["bias"][[*range(10), *some]] += 8
    preprocess = Preprocess((8, 12), squash=True)
    pretrained = Pretrained(params, OPTIONS, "vit_jax", "tiny", preprocess)
    found = checkpoint.evaluate(pretrained, preprocess, config)
    # Once for both kinds of labels of the six.
    assert sorted(passed) == [6, 113]

    def answers(source):
        """Returns the outputs of the network for all images of a source."""
        images = [
            prepare_image(source[i]["image"], preprocess) for i in range(len(source))
        ]
        images = np.stack(images).astype(np.float32) / 127.5 - 1
        logits = np.asarray(jax.jit(model.apply)(params, images)["logits"])
        known = np.array(label_sets.OVERLAP)
        best = known[logits[:, known].argmax(1)][:, None]
        labels = [source[i]["label"] for i in range(len(source))]
        return outputs(np.argsort(-logits, 1)[:, :5], labels, restricted=best)

    source = tfds_source.open_tfds(
        "imagenet2012_real", prepared, "validation", "image", "original_label"
    )
    imagenet, real, other = (
        found.scores[name]["weights"] for name in ("imagenet", "real", "objectnet")
    )
    wanted = answers(source)
    right = wanted.predictions.tops == wanted.labels[:, None]
    assert imagenet["examples"] == 6
    assert imagenet["top1"] == pytest.approx(right[:, 0].mean())
    assert imagenet["top5"] == pytest.approx(right.any(1).mean())
    sets = [frozenset(SETS[label]) for label in wanted.labels]
    assert real == pytest.approx(label_sets.score_real(wanted, sets).metrics)
    source = folder.open_folder(photos, "images", "images", tuple(OBJECTNET_CLASSES))
    wanted = label_sets.score_objectnet(answers(source)).metrics
    assert other == pytest.approx(wanted)
    assert (real["examples"], other["examples"]) == (4, 113)
    assert 0 < imagenet["top5"] != real["top5"] > 0
    # A model that numbers the same classes otherwise has the same scores.
    turned = rng.permutation(1000)
    params["head"] = {key: v[..., turned] for key, v in params["head"].items()}
    names = tuple(synsets()[k] for k in turned)
    changed = dataclasses.replace(pretrained, params=params, class_names=names)
    again = checkpoint.evaluate(changed, preprocess, config).scores
    for name, metrics in found.scores.items():
        assert again[name]["weights"] == pytest.approx(metrics["weights"], rel=1e-5)
    names = tuple(f"kind {k}" for k in rng.permutation(1000))
    changed = dataclasses.replace(pretrained, class_names=names[:-1] + ("x",))
    with pytest.raises(UserError, match="has 1,000 with other names"):
        checkpoint.evaluate(changed, preprocess, config)
    assert 0 < other["top1"] < other["top1_overlap"]
    assert other["top1"] < other["top5"]
