"""`python -m vit_jax.features`, on a small network and images of noise."""

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers import run_command, write_weights
from PIL import Image

import vit_jax
from vit_jax.errors import UserError
from vit_jax.evaluators import feature_table

SIZES = {"width": 12, "depth": 3, "num_heads": 3, "mlp_dim": 20}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a network, and photographs of two classes in two splits."""
    folder, rng = tmp_path_factory.mktemp("features"), np.random.default_rng(0)
    options = SIZES | {"variant": "Ti/8", "num_classes": 2, "image_size": (16, 24)}
    write_weights(folder / "tiny.safetensors", ("bee", "cat"), **options)
    write_weights(
        folder / "deep.safetensors", ("bee", "cat"), **options | {"depth": 11}
    )
    for i in range(7):
        path = folder / "photos" / ("train", "val")[i % 2] / ("bee", "cat")[i // 4]
        path.mkdir(parents=True, exist_ok=True)
        noise = rng.integers(0, 256, (29, 41, 3), dtype=np.uint8)
        Image.fromarray(noise).save(path / f"{i}.png")
    return folder


@pytest.fixture
def run(place, tmp_path, capsys):
    """Runs the command: words -> exit code, the table or None, stderr."""

    def start(*words, photos="photos", model="tiny"):
        out = tmp_path / "deep" / "features.parquet"
        model = f"--model={place / model}.safetensors"
        code = run_command("features", [place / photos, model, f"--out={out}", *words])
        return code or 0, pq.read_table(out), capsys.readouterr().err

    return start


def stacked(column):
    return np.stack(column.to_pylist())


def test_rows_are_photographs_with_their_classes_and_vectors(run, place, monkeypatch):
    monkeypatch.setattr(feature_table, "_GROUP", 3)
    code, table, _ = run("--layers=-1,0", "--batch_size=2")
    assert code == 0
    assert table.column_names == ["name", "label", "feature", "layer_0", "layer_2"]
    names = table["name"].to_pylist()
    assert names == sorted(map(str, (place / "photos").rglob("*.png")))
    assert table["label"].to_pylist() == [name.split("/")[-2] for name in names]
    assert str(table.schema.field("feature").type).startswith("fixed_size_list")
    model = vit_jax.load_model(place / "tiny.safetensors", tell=lambda line: None)
    found = stacked(table["feature"])
    np.testing.assert_allclose(found, model.features(names), atol=1e-5)
    layers = model.features(names, layers=(0, 2))
    np.testing.assert_allclose(stacked(table["layer_0"]), layers[0], atol=1e-5)
    np.testing.assert_allclose(stacked(table["layer_2"]), layers[1], atol=1e-5)
    np.testing.assert_allclose(found, layers[1], atol=1e-5)
    # By their numbers, where the order of names is another.
    _, everything, _ = run("--layers", photos="photos/train/bee", model="deep")
    assert everything.column_names[2:] == [f"layer_{i}" for i in range(11)]


def test_what_cannot_be_read_is_named_and_the_others_are_written(run, place):
    folder = place / "mixed"
    folder.mkdir()
    (folder / "empty.png").write_bytes(b"")
    sound = next((place / "photos").rglob("*.png")).read_bytes()
    (folder / "sound.png").write_bytes(sound)
    code, table, err = run(photos="mixed")
    assert code == 1
    assert table.column_names == ["name", "feature"]
    assert table["name"].to_pylist() == [str(folder / "sound.png")]
    (line,) = (line for line in err.splitlines() if "empty.png" in line)
    assert line.endswith("is empty (0 bytes)")


def test_an_error_leaves_the_file_of_before(run, place, tmp_path, monkeypatch):
    _, before, _ = run()
    (place / "broken").mkdir()
    (place / "broken" / "a.png").write_bytes(b"")
    with pytest.raises(UserError, match="none of the images"):
        run(photos="broken")
    get = jax.device_get
    nan = lambda tree: jax.tree.map(lambda x: x * np.nan, get(tree))
    monkeypatch.setattr(jax, "device_get", nan)
    with pytest.raises(UserError, match=r"0\.png is not finite"):
        run()
    (left,) = (tmp_path / "deep").iterdir()
    assert pq.read_table(left).equals(before)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out=a.csv"], "--out=a.csv"),
        (["--layers=3"], "layers=3: Ti/8 has 3 layers"),
        (["--config.seed=1"], "--config.seed"),
    ],
)
def test_bad_input_is_one_line(run, words, message):
    with pytest.raises(UserError, match=message):
        run(*words)


def test_classes_are_folders_below_the_given_ones(tmp_path):
    def labels(*paths, words=("",)):
        named = [(path, str(tmp_path / path)) for path in paths]
        return feature_table.labels_of([str(tmp_path / word) for word in words], named)

    assert labels("bee/1.png", "cat/deeper/2.png") == {
        "bee/1.png": "bee",
        "cat/deeper/2.png": "cat",
    }
    assert labels("train/bee/1.png", "test/3.png") == {
        "train/bee/1.png": "bee",
        "test/3.png": "test",
    }
    assert labels("bee/1.png", "2.png") is None
    (tmp_path / "bee").mkdir()
    assert labels("bee/1.png", words=["bee"]) is None
    assert feature_table.labels_of(["-"], iter([("-", b"")])) is None
