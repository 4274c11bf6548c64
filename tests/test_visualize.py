"""`python -m vit_jax.visualize`, on small models with random parameters."""

import dataclasses
import gc
import io
import pathlib
import subprocess
import sys
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tqdm
from flax.traverse_util import flatten_dict
from helpers import draw_params, run_command, write_weights
from PIL import Image

from vit_jax import models, visualize
from vit_jax.analysis import attention, embeddings, loaded_model, representations
from vit_jax.analysis.figures import FIGURES, create
from vit_jax.analysis.figures.writing import available_figures, write_figures
from vit_jax.analysis.loaded_model import LoadedModel
from vit_jax.command_line import cli, progress
from vit_jax.data import bands, image_files
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.models import intermediates
from vit_jax.tasks.task import Pictures

ROOT = pathlib.Path(__file__).parents[1]
OPTIONS = {"width": 12, "depth": 2, "num_heads": 3, "mlp_dim": 17}
OPTIONS |= {"variant": "Ti/8", "num_classes": 5, "image_size": (16, 24)}
PREPROCESS = Preprocess((16, 24), (0.4,), (0.25,), crop_fraction=0.9)
NAMES = ("apple", "bear", "cat", "dog", "eel")
SIZES = {
    "a.png": (31, 37),
    "b c.jpg": (29, 41),
    "d.png": (40, 33),
    "deeper/a.png": (22, 27),
    "e.png": (29, 41),
}
FOUR = ("a.png", "b c.jpg", "d.png", "e.png")


def loaded(name="tiny", **options):
    """Returns a model of random parameters, the same for the same options."""
    model = models.create(**OPTIONS | options)
    params = jax.tree.map(np.array, draw_params(model))
    return LoadedModel(name, model, params, PREPROCESS, NAMES)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two models, five images and a damaged one."""
    folder = tmp_path_factory.mktemp("visualize")
    for name, depth in (("tiny", 2), ("other", 3)):
        path = folder / f"{name}.safetensors"
        write_weights(path, NAMES, PREPROCESS, **OPTIONS | {"depth": depth})
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

    def start(*words):
        words = [f"--out={tmp_path}", f"--model={place / 'tiny.safetensors'}", *words]
        code = visualize.main(cli.parse(visualize.parser(), words))
        end = capsys.readouterr()
        return code, end.out, end.err

    return start


def draw(loaded, images, names, out, **options):
    """Writes figures with their default options; returns the names of the files."""
    options = {"on_unreadable": lambda *_: 0} | options
    return [*write_figures(loaded, images, create(names, {}), out, **options)]


@pytest.mark.slow
def test_all_figures_of_a_folder(place, run, tmp_path):
    images = place / "images"
    code, out, err = run("--images", str(images), "--batch_size=3", "--shown=2")
    assert code == 1
    assert err.startswith(f"{images / 'torn.png'}: cannot be decoded")
    # The network has no task of pretraining, and no windows.
    names = {*FIGURES} - {"reconstruction", "windows"}
    single = {name for name in names if FIGURES[name].reads == "images"}
    stems = [
        *(names - single),
        *(f"{n}/{stem}" for n in single for stem in ("a", "b_c")),
    ]
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
    with np.load(tmp_path / "cka.npz") as data:
        assert data["images"] == 5  # Although CKA takes no batch of two.
    with np.load(tmp_path / "pca" / "a.npz") as data:
        assert data["components"].shape == (2, 3, 3)
        assert data["image"].shape == (16, 24, 3)


@pytest.fixture
def four(place):
    """The words for four images."""
    return "--images", *(str(place / "images" / name) for name in FOUR)


@pytest.fixture
def data(tmp_path):
    """Reads the arrays of a figure."""

    def read(stem):
        with np.load(tmp_path / f"{stem}.npz") as arrays:
            return dict(arrays)

    return read


def prepared(ours, place):
    """Returns the four images as a model gets them."""
    files = [place / "images" / name for name in FOUR]
    return np.stack(
        [ours.prepare(bands.read(path.read_bytes(), ours.form)) for path in files]
    )


def layers_of(ours, place):
    """Returns attention and tokens of each layer for the four images."""
    images = ours.normalize(prepared(ours, place))
    return list(intermediates.layers(ours.model, ours.params, images))


def gram_matrices(layers):
    return [representations.gram_matrix(np.asarray(layer.tokens)) for layer in layers]


@pytest.mark.slow
def test_the_data_of_images_are_the_arrays_of_the_analyses(place, four, run, data):
    words = "--figure=attention,rollout,relevance", "--batch_size=3"
    more = "--combine=max", "--discard=0.2", "--classes=3,1"
    code, _, err = run(*four, *words, *more)
    assert (code, err) == (0, "")
    ours = loaded()
    pixels = prepared(ours, place)
    images = ours.normalize(pixels)
    maps = list(attention.attention_maps(ours.model, ours.params, images))
    rolled = attention.rollout(maps, "max", 0.2)
    logits = ours.model.apply(ours.params, images)["logits"]
    relevant = [
        attention.relevance(ours.model, ours.params, images, jnp.full(4, label))
        for label in (3, 1)
    ]
    for i, stem in enumerate(("a", "b_c", "d", "e")):
        found = data(f"attention/{stem}")
        wanted = np.stack([layer[i, :, 0] for layer in maps])
        np.testing.assert_allclose(found["attention"], wanted, atol=1e-5)
        np.testing.assert_array_equal(found["image"], pixels[i])
        np.testing.assert_array_equal(found["grid"], [2, 3])
        found = data(f"rollout/{stem}")
        np.testing.assert_allclose(found["rollout"], rolled[i, 0], atol=1e-5)
        size = SIZES[FOUR[i]]
        assert found["overlay"].shape == (*size, 3)
        found = data(f"relevance/{stem}")
        np.testing.assert_array_equal(found["classes"], [3, 1])
        np.testing.assert_allclose(found["logits"], logits[i], rtol=1e-3, atol=1e-3)
        wanted = np.stack([of_class[i] for of_class in relevant])
        np.testing.assert_allclose(found["relevance"], wanted, rtol=1e-2, atol=1e-4)


@pytest.mark.slow
def test_the_data_of_all_images_and_of_weights_are_the_arrays_of_the_analyses(
    place, four, run, data
):
    words = "--figure=filters,posemb,distance,norms,cka", "--batch_size=3"
    assert run(*four, *words)[::2] == (0, "")
    ours = loaded()
    layers = layers_of(ours, place)
    maps = [layer.attention for layer in layers]
    far = attention.mean_attention_distance(maps, (2, 3), 8, 1).mean(0)
    np.testing.assert_allclose(data("distance")["pixels"], far, rtol=1e-4)

    lengths = [np.linalg.norm(layer.tokens, axis=-1) for layer in layers]
    known = representations.NormHistogram()
    known.update([of_layer[:, 1:] for of_layer in lengths])
    found = data("norms")
    np.testing.assert_allclose(found["quantiles"], known.quantiles(), rtol=1e-3)
    np.testing.assert_array_equal(found["fractions"], representations.QUANTILES)
    longest = [of_layer[:, 1:].max() for of_layer in lengths]
    np.testing.assert_allclose(found["longest"], longest, rtol=1e-4)
    front = [[of_layer[:, 0].mean()] for of_layer in lengths]
    np.testing.assert_allclose(found["front_tokens"], front, rtol=1e-4)
    np.testing.assert_allclose(found["beyond_3_medians"], known.outlier_fraction())

    grams = gram_matrices(layers)
    alike = representations.MinibatchCKA()
    alike.update(grams, grams)
    np.testing.assert_allclose(data("cka")["cka"], alike.compute(), atol=1e-3)
    assert {int(data(name)["images"]) for name in ("distance", "norms", "cka")} == {4}

    kernels = ours.params["embedding"]["kernel"]
    components, share = embeddings.principal_components(kernels)
    found = data("filters")
    np.testing.assert_array_equal(found["kernels"], kernels)
    np.testing.assert_allclose(found["components"], components, atol=1e-6)
    np.testing.assert_allclose(found["explained"], share, atol=1e-6)
    alike = embeddings.position_similarity(ours.model, ours.params)
    np.testing.assert_allclose(data("posemb")["similarity"], alike, atol=1e-6)


@pytest.mark.slow
def test_two_models_are_compared_layer_by_layer(place, four, run, data):
    words = *four, "--figure=cka", "--batch_size=3"
    assert run(*words, f"--compare={place / 'other'}.safetensors")[0] == 0
    pair = loaded(), loaded("other", depth=3)
    alike = representations.MinibatchCKA()
    alike.update(*(gram_matrices(layers_of(each, place)) for each in pair))
    assert data("cka")["cka"].shape == (2, 3)
    np.testing.assert_allclose(data("cka")["cka"], alike.compute(), atol=1e-3)
    assert run(*words, f"--compare={place / 'tiny'}.safetensors")[0] == 0
    np.testing.assert_allclose(np.diag(data("cka")["cka"]), 1, rtol=1e-4)


def test_where_images_are_too_few_for_cka(place, four, run, tmp_path, capsys):
    torn = str(place / "images" / "torn.png")
    words = *four[:4], torn, "--batch_size=2"
    code, out, err = run(*words, "--shown=1")
    assert code == 1
    line = err.splitlines()[-1]
    assert line.startswith("figure skipped: images=3: too few for --figure=cka")
    assert f"{tmp_path / 'norms.png'}\n" in out and "cka" not in out
    assert not (tmp_path / "cka.png").exists()
    with pytest.raises(UserError, match="images=3: too few for --figure=cka"):
        run(*words, "--figure=filters,norms,cka")
    # What was written before is named.
    stems = "filters", "norms"
    assert capsys.readouterr().out.split() == [f"{tmp_path / s}.png" for s in stems]


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        (["--figure=norms", "--batch_size=2"], [2, 4, 5]),
        (["--figure=attention", "--shown=3", "--batch_size=2"], [1, 2, 3]),
    ],
)
def test_the_bar_goes_to_its_end(place, run, words, counts, monkeypatch):
    seen = []

    class Bar(tqdm.tqdm):
        def __init__(self, **options):
            super().__init__(**options | {"disable": False, "file": io.StringIO()})

        def update(self, n=1):
            super().update(n)
            seen.append((self.n, self.total))

    monkeypatch.setattr(progress, "tqdm", Bar)
    run("--images", str(place / "images"), *words)
    assert list(dict.fromkeys(count for count, _ in seen if count)) == counts
    assert seen[-1] == (counts[-1], counts[-1])


def test_a_patch_may_be_the_query(place, run, data):
    image = place / "images" / "a.png"
    words = "--images", str(image), "--figure=attention,rollout", "--discard=0"
    assert run(*words, "--query=1,2")[0] == 0
    ours = loaded()
    images = ours.normalize(
        ours.prepare(bands.read(image.read_bytes(), ours.form))[None]
    )
    maps = list(attention.attention_maps(ours.model, ours.params, images))
    token = 1 + 1 * 3 + 2  # Behind the class token, the third of the second row.
    wanted = np.stack([layer[0, :, token] for layer in maps])
    np.testing.assert_allclose(data("attention/a")["attention"], wanted, atol=1e-5)
    wanted = attention.rollout(maps)[0, token]
    np.testing.assert_allclose(data("rollout/a")["rollout"], wanted, atol=1e-5)


def test_weights_alone_give_the_figures_of_weights(run, tmp_path):
    code, out, err = run()
    assert (code, err) == (0, "")
    assert out.split() == [f"{tmp_path}/filters.png", f"{tmp_path}/posemb.png"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--figure=filter"], "--figure=filter is not one of filters, posemb, distanc"),
        (["--figure=cka"], "--figure=cka: needs images"),
        (["--images", "absent.png"], "no image: 'absent.png' does not exist"),
        (["--query=a"], "'a' is not ROW,COLUMN, such as 3,10"),
        (["--classes=1,b"], "'1,b' is not numbers from 0 on"),
        (["--layers=-1"], "'-1' is not numbers from 0 on"),
        (["--config.seed=3"], "--config.seed: looking into a model takes no config"),
        (["--compare=absent"], "--compare=absent: models are compared on images; set "),
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


def test_bad_choices_are_refused_before_anything_is_written(place, run, tmp_path):
    image = "--images", str(place / "images" / "a.png")
    (tmp_path / "two.txt").write_text("apple\nbear\n")
    compared = "--compare=absent"
    for words, message in (
        (["--combine=sum"], "head_fusion='sum': unknown; choose mean or max"),
        (["--discard=1"], "discard_ratio=1.0: out of range"),
        (["--classes=5"], "--classes=5: tiny has 5 classes; choose from 0 to 4"),
        (["--layers=0,2"], "--layers=2: tiny has 2 layers; choose from 0 to 1"),
        (["--layer=2"], "layer=2: out of range"),
        (["--topk=0"], "--topk=0: choose a number from 1 on"),
        (["--query=2,0"], "--query=2,0: no such patch among 2x3; choose a row from 0"),
        ([f"--labels={tmp_path}/two.txt"], "there are 2 class names, but .* 5 classes"),
        ([compared, "--figure=norms,filters"], "--figure=norms,filters leaves out"),
        ([compared], "images=1: too few for --figure=cka"),
    ):
        with pytest.raises(UserError, match=message):
            run(*image, *words)
    assert [path.name for path in tmp_path.iterdir()] == ["two.txt"]
    with pytest.raises(UserError, match="--images: none of the images could be read"):
        run("--images", str(place / "images" / "torn.png"), "--figure=norms")
    (tmp_path / "filters.png").mkdir()
    with pytest.raises(UserError, match=r"filters\.png cannot be written \(.*is a dir"):
        run("--figure=filters")


@pytest.mark.parametrize(
    ("part", "figure", "message"),
    [
        ("embedding/kernel", "filters", "the first kernel is not finite: the chec"),
        (
            "Transformer/posembed_input/pos_embedding",
            "posemb",
            "the position embedding is not finite",
        ),
        (
            "Transformer/encoderblock_1/MlpBlock_3/Dense_0/bias",
            "norms",
            "tiny's output for a is not finite",
        ),
        ("head/bias", "relevance", "tiny's output for a is not finite"),
    ],
)
def test_a_model_that_diverged_is_refused(place, tmp_path, part, figure, message):
    ours = loaded()
    flatten_dict(ours.params, sep="/")[part].flat[-1] = np.nan
    images = [("a", str(place / "images" / "a.png"))]
    with pytest.raises(UserError, match=message):
        draw(ours, images, [figure], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_help_lists_every_figure_with_its_flags_and_imports_no_jax():
    code = "import sys; from vit_jax import visualize; visualize.parser().print_help()"
    code += "; sys.exit('jax' in sys.modules)"
    words = [sys.executable, "-c", code]
    end = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert end.returncode == 0, end.stderr
    for name in FIGURES:
        assert f"\n    {name} " in end.stdout
        assert FIGURES[name].help.split(",")[0] in " ".join(end.stdout.split())
        for field in dataclasses.fields(FIGURES[name]):
            assert f"--{field.name} " in end.stdout


@pytest.mark.parametrize(
    ("variant", "options", "available"),
    [
        ("R50x1", {"stage_depths": (1,)}, "filters,pca"),
        (
            "Ti/8",
            {"posemb": "none", "num_classes": 0},
            "filters,distance,norms,cka,attention,rollout,pca",
        ),
        (
            "Swin-T",
            {"patch_size": 4, "width": 8, "stage_depths": (1,), "num_heads": (2,)},
            "filters,windows,pca",
        ),
    ],
)
def test_figures_that_a_network_has_not_are_refused(
    variant, options, available, tmp_path
):
    model = models.create(
        variant, **{"num_classes": 5, "image_size": (32, 32)} | options
    )
    ours = LoadedModel("x", model, draw_params(model), PREPROCESS)
    assert available_figures(ours, 9) == tuple(available.split(","))
    assert available_figures(ours, 0) == ("filters",)
    missing = sorted({*FIGURES} - {*available.split(",")})
    for name in missing:
        with pytest.raises(UserError, match=f"--figure={name}: x: .* some of filters,"):
            draw(ours, [], [name], tmp_path)


def test_filters_are_skipped_of_a_network_without_a_convolution(
    run, tmp_path, monkeypatch
):
    ours = loaded()
    ours.params["patches"] = ours.params.pop("embedding")
    monkeypatch.setattr(visualize, "load_model", lambda *_: ours)
    code, out, err = run()
    assert (code, out) == (0, f"{tmp_path / 'posemb.png'}\n")
    assert err.startswith("figure skipped: filters: no convolution named 'embedding'")


@pytest.fixture
def watched(monkeypatch):
    """Notes of each block that is run how many arrays of attention are there before."""
    alive, run = [], intermediates.run_block

    def counted(module, params, tokens, given):
        B, N, _ = tokens.shape
        shapes = [array.shape for array in jax.live_arrays()]
        alive.append((B, shapes.count((B, module.config.num_heads, N, N))))
        return run(module, params, tokens, given)

    monkeypatch.setattr(intermediates, "run_block", counted)
    gc.collect()  # Of earlier tests.
    return alive


@pytest.mark.slow
def test_one_layer_of_attention_is_alive_while_figures_are_fed(
    place, tmp_path, watched
):
    ours = loaded()
    files = [(name, str(place / "images" / name)) for name in FOUR]
    figures = "norms", "distance", "cka", "attention", "rollout"
    draw(ours, files, figures, tmp_path, batch_size=3, max_shown=1)
    # Two parts of one batch, the second filled up.
    assert watched == [(3, 0)] * 2 * 2


@pytest.mark.slow
def test_large_images_in_bounded_memory(tmp_path, capsys, watched, monkeypatch):
    # 257 tokens and 3 heads: one image is all that 1 MiB holds, as 256 MiB hold one of
    # 512 pixels.
    monkeypatch.setattr(loaded_model, "_MAX_ATTENTION_BYTES", 1 << 20)
    sizes = {"image_size": (128, 128), "depth": 2, "width": 12, "num_heads": 3}
    how = dataclasses.replace(PREPROCESS, image_size=(128, 128))
    write_weights(tmp_path / "large.safetensors", NAMES, how, **OPTIONS | sizes)
    rng = np.random.default_rng(2)
    for i in range(4):
        noise = rng.integers(0, 256, (270, 300 + i, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{i}.png")
    words = [
        f"--model={tmp_path / 'large'}.safetensors",
        f"--out={tmp_path / 'out'}",
        *("--images", *(str(tmp_path / f"{i}.png") for i in range(4))),
        *("--shown=1", "--topk=1"),
    ]
    assert visualize.main(cli.parse(visualize.parser(), words)) == 0
    assert set(watched) == {(1, 0)}
    assert len(watched) == 4 * 2 + 2  # And for relevance.
    with np.load(tmp_path / "out" / "cka.npz") as arrays:
        assert arrays["images"] == 4
    with np.load(tmp_path / "out" / "rollout" / "0.npz") as arrays:
        assert arrays["rollout"].shape == (257,)
        assert arrays["overlay"].shape == (270, 300, 3)
    with Image.open(tmp_path / "out" / "rollout" / "0.png") as picture:
        assert picture.width >= 2 * 300
    assert "cka.png" in capsys.readouterr().out


def test_figures_name_no_password_of_a_url():
    name = visualize._name("https://me:hun/ter2@localhost:9/x.npz?X-Amz-Signature=a1")
    assert name == "https://***@localhost:9/x.npz"


def test_the_task_and_the_windows_of_a_swin_transformer_are_drawn(tmp_path, place):
    sizes = {"patch_size": 2, "width": 8, "stage_depths": (2, 1), "num_heads": (2, 4)}
    sizes |= {"window_size": 4, "image_size": (16, 24)}
    swin = models.create("Swin-T", num_classes=0, **sizes)
    ours = LoadedModel(
        "s",
        swin,
        draw_params(swin),
        PREPROCESS,
        pictures=lambda params, images: Pictures(*4 * (images,)),
    )
    images = image_files.find([str(place / "images")])
    files = draw(ours, images, ["reconstruction"], tmp_path, batch_size=2)
    assert files[0] == "reconstruction.png" and len(files) == 3
    with np.load(tmp_path / "reconstruction.npz") as data:
        assert data["original"].shape == (5, 16, 24, 3)
    images = image_files.find([str(place / "images")])
    files = draw(ours, images, ["windows"], tmp_path, max_shown=2)
    assert sum(name.endswith(".png") for name in files) == 2
    with np.load(tmp_path / "windows" / "a.npz") as data:
        assert data["stage_1"].shape == data["stage_1_shifted"].shape == (8, 12)
        assert data["stage_2"].shape == (4, 6)
        # Of a grid that windows divide, all attention is given to patches.
        np.testing.assert_allclose(data["stage_1"].mean(), 1, rtol=1e-5)
        blocks = data["stage_1"].reshape(2, 4, 3, 4).mean((1, 3))
        np.testing.assert_allclose(blocks, 1, rtol=1e-5)


@pytest.mark.slow
def test_images_of_bands_are_drawn(tmp_path):
    how = dataclasses.replace(PREPROCESS, pixels="uint16")
    path = tmp_path / "bands.safetensors"
    write_weights(path, NAMES, how, **OPTIONS | {"channels": 5})
    rng = np.random.default_rng(0)
    for i in range(4):
        image = rng.integers(0, 1 << 16, (30, 40, 5), dtype=np.uint16)
        np.save(tmp_path / f"{i}.npy", image)
    names = sorted(map(str, tmp_path.glob("*.npy")))
    words = [f"--model={path}", "--images", *names, f"--out={tmp_path / 'out'}"]
    words.append("--figure=attention,rollout,relevance,pca,filters,cka")
    assert not run_command("visualize", [*words, "--shown=1"])
    for name in ("attention/0", "rollout/0", "relevance/0", "pca/0", "filters", "cka"):
        with Image.open(tmp_path / "out" / f"{name}.png") as picture:
            assert np.ptp(np.array(picture)) > 100
