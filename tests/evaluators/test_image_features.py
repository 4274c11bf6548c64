"""Features of files and of the images of a split."""

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import image_files
from vit_jax.data.config import DataConfig
from vit_jax.data.decode import decode
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.folder import open_folder
from vit_jax.data.sources.open import open_unchecked
from vit_jax.errors import UserError
from vit_jax.evaluators import image_features, prediction


@pytest.fixture
def folder(tmp_path):
    """Seven images in two classes, each of its own brightness, one of them damaged."""
    for i in range(7):
        path = tmp_path / "images" / ("ant" if i < 4 else "bee") / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((9, 8, 3), 30 * i, np.uint8)).save(path)
    path.parent.parent.joinpath("ant", "2.png").write_bytes(b"torn")
    return tmp_path / "images"


def compute(images):
    """The largest value of an image and a 1, in batches of two."""

    def prepare(data, name):
        pixels = data
        if isinstance(data, bytes):
            pixels = decode(data)
        return pixels.max(keepdims=True).reshape(1, 1, 1)

    def work(batch, rows):
        return np.stack([batch.reshape(len(batch)), np.ones(len(batch))], 1)

    return prediction.stream(images, prepare, work, batch_size=2)


def test_images_of_a_split_have_numbers_labels_and_names(folder):
    source, told = open_folder(str(folder), "all", "all", labelled=True), []
    found = image_features.of_split(
        source, compute, labelled=True, on_unreadable=lambda *one: told.append(one)
    )
    ids = [int(path[4]) for path in source.paths]  # In the order of the split.
    assert found.numbers.tolist() == [i for i in range(7) if ids[i] != 2]
    whole = [each for each in ids if each != 2]
    assert found.features.tolist() == [[30 * each, 1] for each in whole]
    assert found.features.dtype == np.float32
    assert found.labels.tolist() == [int(each > 3) for each in whole]
    assert found.names == [source.describe(i) for i in found.numbers.tolist()]
    ((name, why),) = told
    assert name.endswith("ant/2.png") and "cannot be decoded" in why
    rows = [ids.index(5), ids.index(1)]
    some = image_features.of_split(source, compute, rows=np.array(rows))
    assert some.features[:, 0].tolist() == [150, 30]
    assert some.numbers.tolist() == rows
    assert some.labels is None
    with pytest.raises(UserError, match=r"ant/2\.png: cannot be decoded"):
        image_features.of_split(source, compute)


def test_files_and_data_sets_in_memory_have_features_too(folder):
    images = image_files.find_some([str(folder / "bee")])
    found = image_features.of_images(images, compute)
    assert found.features[:, 0].tolist() == [120, 150, 180]
    assert found.names == [name for name, _ in images]
    source = open_unchecked(DataConfig(name="digits", num_classes=10), "test")
    found = image_features.of_split(source, compute, rows=range(3), labelled=True)
    expected = [source[i]["image"].max() for i in range(3)]
    np.testing.assert_allclose(found.features[:, 0], expected, rtol=1e-6)
    assert found.labels.tolist() == source.labels[:3].tolist()


def test_a_record_that_cannot_be_read_does_not_end_the_rest_in_silence(folder):
    source = open_folder(str(folder), "all", "all", labelled=False)
    (folder / "ant" / "1.png").unlink()
    told = []
    found = image_features.of_split(
        source, compute, on_unreadable=lambda *one: told.append(one)
    )
    assert sorted(found.features[:, 0].tolist()) == [0, 90, 120, 150, 180]
    assert len(told) == 2

    class Broken(Source):
        def __len__(self):
            return 3

        def describe(self, i):
            return f"record {i}"

        def __getitem__(self, i):
            return {"image": np.zeros((2, 2, 3), np.uint8)} if i else {}["x"]

    with pytest.raises(RuntimeError, match="record 0"):
        image_features.of_split(Broken(), compute)


def test_no_image_at_all_is_an_error():
    with pytest.raises(UserError, match="none of the images"):
        image_features.of_images([("x", b"torn")], compute, lambda *_: None)
