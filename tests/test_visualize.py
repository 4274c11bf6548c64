"""`python -m vit_jax.visualize`, on small models with random parameters."""

import gc
import pathlib
import subprocess
import sys
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from vit_jax import cli, models, visualize
from vit_jax.analysis import attention, rollout, subject
from vit_jax.analysis.figures import (
    canvas,
    choices,
    make,
    names,
    of_images,
    of_weights,
    sheets,
)
from vit_jax.analysis.subject import Subject
from vit_jax.errors import UserError
from vit_jax.weights.formats import own
from vit_jax.weights.pretrained import Preprocess, Pretrained

ROOT = pathlib.Path(__file__).parents[1]
OPTIONS = {
    "variant": "Ti/8",
    "classes": 5,
    "image_size": (16, 24),
    "width": 12,
    "depth": 2,
    "heads": 3,
    "mlp_dim": 17,
}
SIZES = {
    "a.png": (31, 37),
    "b c.jpg": (29, 41),
    "d.png": (40, 33),
    "deeper/a.png": (22, 27),
    "e.png": (29, 41),
}
PREPROCESS = Preprocess((16, 24), (0.4,), (0.25,), crop_fraction=0.9)


def written(folder, name="tiny", **options):
    """Writes a model of random parameters; returns it as it was."""
    options = OPTIONS | options
    model = models.create(**options)
    leaves, tree = jax.tree.flatten(jax.eval_shape(model.init, jax.random.key(0)))
    rng = np.random.default_rng(len(name))
    leaves = [rng.standard_normal(leaf.shape, np.float32) for leaf in leaves]
    pretrained = Pretrained(
        params=jax.tree.unflatten(tree, leaves),
        options=options,
        format="vit_jax",
        source=name,
        preprocess=PREPROCESS,
        class_names=("apple", "bear", "cat", "dog", "eel"),
    )
    own.write(pretrained, folder / f"{name}.safetensors")
    return Subject(name, model, pretrained.params, PREPROCESS, pretrained.class_names)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two models, five images and a damaged one."""
    folder = tmp_path_factory.mktemp("visualize")
    written(folder)
    written(folder, "other", depth=3)
    (folder / "images" / "deeper").mkdir(parents=True)
    rng = np.random.default_rng(2)
    for name, size in SIZES.items():
        noise = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / "images" / name)
    (folder / "images" / "torn.png").write_bytes(b"\x89PNG\r\n")
    return folder


@pytest.fixture
def run(place, tmp_path, capsys):
    """Runs the verb in this process: words -> exit code, stdout, stderr."""

    def start(*words, model="tiny"):
        words = [f"--out={tmp_path}", f"--model={place / model}.safetensors", *words]
        code = visualize.main(cli.parse(visualize.parser(), words))
        end = capsys.readouterr()
        return code, end.out, end.err

    return start


SINGLE = ("a", "b_c")  # Of those that are shown.


def test_all_figures_of_a_folder(place, run, tmp_path):
    images = place / "images"
    code, out, err = run("--images", str(images), "--batch_size=5", "--shown=2")
    assert code == 1
    assert err.startswith(f"{images / 'torn.png'}: cannot be decoded")
    stems = [*names.OF_WEIGHTS, *names.OF_SETS]
    stems += [f"{kind}/{stem}" for kind in names.OF_IMAGES for stem in SINGLE]
    files = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert files == {f"{s}.{form}" for s in stems for form in ("png", "svg", "npz")}
    assert set(out.split()) == {f"{tmp_path / stem}.png" for stem in stems}
    for stem in stems:
        with Image.open(tmp_path / f"{stem}.png") as picture:
            assert min(picture.size) > 200
        text = (tmp_path / f"{stem}.svg").read_text()
        ElementTree.fromstring(text)
        assert text.count("prefers-color-scheme:dark") == 1
    with np.load(tmp_path / "distance.npz") as data:
        assert data["pixels"].shape == (2, 3)
        assert data["images"] == 5


@pytest.mark.slow
def test_the_data_are_the_arrays_of_the_analyses(place, run, tmp_path):
    image = place / "images" / "b c.jpg"
    words = "--images", str(image), "--figure=attention,rollout,distance,relevance"
    code, _, err = run(*words, "--combine=max", "--discard=0.2", "--classes=3,1")
    assert (code, err) == (0, "")
    ours = written(tmp_path)
    pixels = ours.prepare(image.read_bytes())[None]
    images = ours.images(pixels)
    maps = list(attention.maps(ours.model, ours.params, images))

    def data(stem):
        with np.load(tmp_path / f"{stem}.npz") as arrays:
            return dict(arrays)

    found = data("attention/b_c")
    wanted = np.stack([layer[0, :, 0] for layer in maps])
    np.testing.assert_allclose(found["attention"], wanted, atol=1e-5)
    np.testing.assert_array_equal(found["image"], pixels[0])
    wanted = rollout.rollout(maps, "max", 0.2)[0, 0]
    np.testing.assert_allclose(data("rollout/b_c")["rollout"], wanted, atol=1e-5)
    assert data("rollout/b_c")["overlay"].shape == (29, 41, 3)
    far = attention.distance(maps, (2, 3), 8, 1)
    np.testing.assert_allclose(data("distance")["pixels"], far, rtol=1e-4)
    found = data("relevance/b_c")
    np.testing.assert_array_equal(found["classes"], [3, 1])
    wanted = ours.model.apply(ours.params, images)["logits"][0]
    np.testing.assert_allclose(found["logits"], wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_two_models_are_compared_layer_by_layer(place, run, tmp_path):
    words = "--images", *(str(place / "images" / f"{n}.png") for n in "ade")
    words += (str(place / "images" / "b c.jpg"), "--figure=cka")
    other = f"--other={place / 'other'}.safetensors"
    assert run(*words, other)[0] == 0
    with np.load(tmp_path / "cka.npz") as data:
        assert data["cka"].shape == (2, 3)
    same = f"--other={place / 'tiny'}.safetensors"
    assert run(*words, same)[0] == 0
    with np.load(tmp_path / "cka.npz") as data:
        np.testing.assert_allclose(np.diag(data["cka"]), 1, rtol=1e-4)
    with pytest.raises(UserError, match="3 images are too few for the figure cka"):
        run(*words[:4], "--figure=cka")


def test_a_patch_may_be_the_query(place, run, tmp_path):
    words = "--images", str(place / "images" / "a.png"), "--figure=attention,rollout"
    assert run(*words, "--query=1,2")[0] == 0
    with np.load(tmp_path / "attention" / "a.npz") as data:
        assert data["attention"].shape == (2, 3, 7)
        np.testing.assert_allclose(data["attention"].sum(-1), 1, rtol=1e-5)
    with pytest.raises(UserError, match="--query=2,0 is not a patch: rows are 0 to 1"):
        run(*words, "--query=2,0")


def test_weights_alone_give_the_figures_of_weights(run, tmp_path):
    code, out, err = run()
    assert (code, err) == (0, "")
    assert out.split() == [f"{tmp_path}/filters.png", f"{tmp_path}/posemb.png"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--figure=filter"],
            "--figure=filter is not one of filters, posemb, distance",
        ),
        (["--figure=cka"], "--figure=cka is made from images: set --images"),
        (["--images", "absent.png"], "no image: 'absent.png' does not exist"),
        (["--query=a"], "'a' is not ROW,COLUMN, as 3,10"),
        (["--classes=1,b"], "'1,b' is not labels from 0 on"),
        (["--topk=0"], "'0' is not a whole number from 1 on"),
        (["--config.seed=3"], "--config.seed: looking into a model takes no config"),
    ],
)
def test_bad_flags_end_with_one_line_before_a_model_is_opened(words, message, capsys):
    parser, words = visualize.parser(), ["--model=absent", "--out=x", *words]
    try:
        visualize.main(cli.parse(parser, words))
    except SystemExit as end:
        assert end.code == 2
        line = capsys.readouterr().err
    except UserError as error:
        line = str(error)
    assert message in line


def test_bad_choices_are_refused(place, run):
    image = "--images", str(place / "images" / "a.png")
    for words, message in (
        (["--figure=rollout", "--combine=min"], "heads='min' is not one of mean, max"),
        (["--figure=rollout", "--discard=1"], "discard=1.0 is not a fraction"),
        (["--figure=relevance", "--classes=5"], "class 5 is not one of the 5"),
        (["--figure=posemb", "--layer=2"], "layer=2 is not one of the 2"),
    ):
        with pytest.raises(UserError, match=message):
            run(*image, *words)
    with pytest.raises(UserError, match="none of the images could be read"):
        run("--images", str(place / "images" / "torn.png"), "--figure=norms")


def test_a_folder_that_cannot_be_written_is_told(run, tmp_path):
    (tmp_path / "filters.png").mkdir()
    with pytest.raises(UserError, match=r"filters\.png cannot be written \(Is a dir"):
        run("--figure=filters")


def test_as_a_process(place, tmp_path):
    words = [sys.executable, "-m", "vit_jax.visualize", "--figure=rolout"]
    words += [f"--model={place / 'tiny'}.safetensors", f"--out={tmp_path}"]
    end = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (end.returncode, end.stdout) == (2, "")
    assert end.stderr.startswith("error: --figure=rolout is not one of")
    assert end.stderr.count("\n") == 1


def test_resnets_and_networks_without_positions_have_fewer_figures(place):
    resnet = models.create("R50x1", classes=5, image_size=(32, 32), blocks=(1,))
    ours = Subject("r", resnet, {}, PREPROCESS)
    assert make.possible(ours, 9) == ("filters",)
    plain = models.create(**OPTIONS | {"posemb": "none", "head": "none"})
    ours = Subject("p", plain, {}, PREPROCESS)
    assert make.possible(ours, 3) == (
        *("filters", "distance", "norms", "attention", "rollout"),
    )
    assert make.possible(ours, 0) == ("filters",)


@pytest.mark.slow
def test_one_layer_of_attention_is_alive_while_figures_are_fed(tmp_path, monkeypatch):
    ours = written(tmp_path, depth=5)
    peaks = []
    see = of_images.Rollout.see

    gc.collect()  # Of earlier tests.

    def watched(self, layer):
        shape = layer.attention.shape
        peaks.append(sum(array.shape == shape for array in jax.live_arrays()))
        see(self, layer)

    monkeypatch.setattr(of_images.Rollout, "see", watched)
    pixels = np.random.default_rng(1).integers(0, 256, (4, 29, 41, 3), dtype=np.uint8)
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
    files = [(f"{i}", str(tmp_path / f"{i}.png")) for i in range(4)]
    order = make.Order(("norms", "distance", "rollout"), batch_size=2, shown=1)
    list(make.make(ours, files, order, tmp_path, tell=print))
    assert peaks == [1] * 5  # The second batch is beyond what is shown.


def test_each_model_gets_the_images_it_takes(place):
    images = [(name, str(place / "images" / name)) for name in ("a.png", "b c.jpg")]
    subjects = [
        Subject("s", models.create(**OPTIONS | more), {}, PREPROCESS)
        for more in ({}, {"channels": 1})
    ]
    batch, last = subject.read(images + images[:1], subjects, 2, print)
    assert (batch.names, last.names) == (["a.png", "b c.jpg"], ["a.png"])
    assert [pixels.shape for pixels in batch.pixels] == [
        (2, 16, 24, 3),
        (2, 16, 24, 1),
    ]
    assert [o.shape for o in batch.originals] == [(31, 37, 3), (29, 41, 3)]
    # Grey is what the eye weighs of the colours, not one of them.
    grey = batch.pixels[0] @ [0.299, 0.587, 0.114]
    np.testing.assert_allclose(batch.pixels[1][..., 0], grey, atol=4)  # Of roundings.


def test_the_batch_is_what_memory_allows():
    def size(**options):
        model = models.create(**options)
        return Subject("s", model, {}, PREPROCESS).batch_size()

    assert size(variant="S/16", classes=5) == 32
    large = size(variant="B/16", classes=5, image_size=(512, 512))
    assert large * 12 * 1025**2 * 4 <= 256 << 20 < (large + 1) * 12 * 1025**2 * 4


def test_grids_stand_where_their_patches_are():
    alike = jnp.arange(36.0).reshape(2, 3, 2, 3)
    mosaic = of_weights.mosaic(np.array(alike))
    assert mosaic.shape == (2 * 3 - 1, 3 * 4 - 1)
    np.testing.assert_array_equal(mosaic[3:5, 4:7], alike[1, 1])
    assert np.isnan(mosaic[2]).all() and np.isnan(mosaic[:, 3]).all()


def test_images_of_one_name_have_files_of_their_own():
    found = choices.Names()
    stems = [found.stem(path) for path in ("x/a.png", "y/A.jpg", "a b?.gif", "-")]
    assert stems == ["a", "A_2", "a_b", "image"]
    assert found.stem("y/A.jpg") == "A_2"


def test_dark_screens_change_paper_and_ink_alone():
    drawn = sheets.sheet([np.eye(3)], 1, title="t", captions=["c"], rows=["r"])
    light = canvas.draw.svg(drawn)
    dark = canvas.for_dark(light)
    rules = dark.replace("</style>", "", 1)
    assert "@media screen and (prefers-color-scheme:dark)" in rules
    assert '[style*="fill: #1b1b1b"]{fill:#e9e7e2!important}' in rules
    assert "fill: #1b1b1b" in light and "#000000" not in light
