"""Weights that read images of any size: predict, evaluate, features, the Python interface."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers import ROOT, TINY, run_command, tiny_config, train, write_weights
from PIL import Image

import vit_jax
from vit_jax import models
from vit_jax.analysis.attention import attention_maps, patch_distances
from vit_jax.analysis.embeddings import position_similarity
from vit_jax.data.transforms import naflex
from vit_jax.errors import UserError
from vit_jax.models.flexivit import resize_patch_kernel
from vit_jax.models.patches import PatchSequences
from vit_jax.weights import Preprocess
from vit_jax.weights import open_pretrained as weights_of
from vit_jax.weights.formats import native
from vit_jax.weights.text_tower import text_tower

SIZES = [(8, 32), (40, 12), (16, 16)]  # Whole patches of 4 pixels.
OPTIONS = TINY | {"variant": "Ti/4", "num_classes": 2, "image_size": (16, 16)}
OPTIONS |= {"pool": "gap", "posemb_resize": "bilinear", "rope": "axial"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a network, and photographs of two classes in many shapes."""
    folder, rng = tmp_path_factory.mktemp("sizes"), np.random.default_rng(0)
    write_weights(folder / "tiny.safetensors", ("bee", "cat"), **OPTIONS)
    for i, size in enumerate(SIZES * 2):
        path = folder / "photos" / "val" / ("bee", "cat")[i // len(SIZES)] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(path)
    return folder


@pytest.fixture(scope="module")
def files(place):
    return sorted((place / "photos").rglob("*.png"))


@pytest.fixture(scope="module")
def opened(place):
    """The network for at most 32 patches, and for images of one size."""
    path, quiet = place / "tiny.safetensors", {"tell": lambda line: None}
    return vit_jax.load_model(path, max_tokens=32, **quiet), vit_jax.load_model(
        path, **quiet
    )


def resized(file, most=32, side=4):
    """Returns a photograph of the most patches that fit, normalised, in a batch of one."""
    picture = Image.open(file)
    rows, columns = naflex.fitting_grid(picture.height, picture.width, most)
    picture = picture.resize((side * columns, side * rows), Image.Resampling.BILINEAR)
    return ((np.asarray(picture)[None] / 255 - 0.5) / 0.5).astype(np.float32)


@pytest.fixture(scope="module")
def of_one_size(opened, files):
    """What a network of its size gives for each photograph: a dict for each."""
    _, fixed = opened
    found = []
    for i in range(len(SIZES)):  # Photographs i and i + 3 have one size.
        images = np.concatenate([resized(file) for file in files[i :: len(SIZES)]])
        own = fixed.model.at_size(images.shape[1:3])
        params = own.resize(fixed.params, fixed.model)

        @jax.jit
        def compute(params, images, own=own):
            (last,) = own.layer_features(params, images, (0,))
            maps = list(attention_maps(own, params, images))
            return own.apply(params, images)["logits"], last, jnp.stack(maps, 1)

        names = ("logits", "last", "maps")
        rows = zip(*jax.device_get(compute(params, images)), strict=True)
        similar = position_similarity(own, params)
        more = {"grid": own.grid, "similar": similar}
        found.append([dict(zip(names, row, strict=True)) | more for row in rows])
    return [found[i % len(SIZES)][i // len(SIZES)] for i in range(len(files))]


@pytest.fixture(scope="module")
def expected(of_one_size):
    """Logits of each photograph by a network of its size."""
    return np.stack([each["logits"] for each in of_one_size])


def test_python_gives_what_a_network_of_each_size_gives(opened, files, expected):
    model, _ = opened
    np.testing.assert_allclose(model(files), expected, atol=1e-5)
    best = model.predict(files, topk=1)
    assert [one[0].label for one in best] == expected.argmax(-1).tolist()


def test_predict_and_evaluate_keep_the_aspect(place, files, expected, capsys):
    weights = f"--model={place / 'tiny.safetensors'}"
    words = [*files, weights, "--max_tokens=32", "--json", "--batch_size=3"]
    assert not run_command("predict", words)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    labels = [line["predictions"][0]["label"] for line in lines]
    assert labels == expected.argmax(-1).tolist()
    recipe = f"configs/eval/classification.py:data={place / 'photos'}"
    words = [f"--config={ROOT / recipe}", weights, "--max_tokens=32", "--json"]
    assert not run_command("evaluate", words)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    true = [("bee", "cat").index(file.parent.name) for file in files]
    assert report["test"]["top1"] == pytest.approx((expected.argmax(-1) == true).mean())


def test_features_of_tokens_have_the_grid_of_their_image(opened, files, of_one_size):
    model, _ = opened
    found = model.features(files, tokens="patches", batch_size=3)
    (last,) = model.features(files, layers=(0,), tokens="patches")
    pooled = model.features(files, layers=(0,))[0]
    for i, one in enumerate(of_one_size):
        assert found[i].shape == (*one["grid"], 12)
        np.testing.assert_allclose(last[i], found[i], atol=1e-5)
        np.testing.assert_allclose(last[i], one["last"], atol=1e-5)
        np.testing.assert_allclose(pooled[i], one["last"].mean((0, 1)), atol=1e-5)


def test_positions_are_resized_once(place, opened, files, tmp_path):
    weights = weights_of(place / "tiny.safetensors")
    other = Preprocess((24, 24), max_tokens=32)
    native.write(
        dataclasses.replace(weights, preprocess=other), tmp_path / "w.safetensors"
    )
    found = vit_jax.load_model(tmp_path / "w.safetensors", tell=lambda line: None)
    np.testing.assert_allclose(found(files), opened[0](files), atol=1e-5)


@pytest.fixture
def siglip2(tmp_path):
    """The golden Siglip2, for 18 patches of 2 pixels, and a tokenizer of few words."""
    pytest.importorskip("tokenizers")
    folder = shutil.copytree(ROOT / "tests/golden/siglip2_hf", tmp_path / "siglip2")
    # Words between which some photographs differ.
    vocabulary = {"<unk>": 0, "<pad>": 1, "bee": 2, "cat": 16}
    vocabulary |= {"a": 4, "photo": 5, "of": 6}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    whole = {"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}
    whole |= dict.fromkeys(("normalizer", "post_processor", "decoder"))
    whole |= {"added_tokens": [], "truncation": None, "padding": None}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    about = {"tokenizer_class": "Siglip2Tokenizer", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


@functools.cache
def _outputs(network):
    return jax.jit(network.apply)


def test_siglip2_compares_images_of_any_size_with_texts(place, files, siglip2, capsys):
    found = weights_of(siglip2, with_task=True)
    network, tower = models.create(**found.options), text_tower(found)
    features = []
    for file in files:
        images = resized(file, 18, 2)
        own = network.at_size(images.shape[1:3])
        params = own.resize(found.params, network)
        # One program for each size.
        features.append(_outputs(own)(params, images)["pre_logits"][0])
    embedded, names = tower.embed_images(np.stack(features)), ["bee", "cat"]
    logits = tower.logits(embedded, tower.classes(names, ["a photo of a {}"]))
    expected = logits.argmax(-1).tolist()
    assert 0 < sum(expected) < len(files)
    model = vit_jax.load_model(siglip2, tell=lambda line: None)
    best = model.zero_shot(files, names, prompts=["a photo of a {}"], topk=1)
    assert [one[0].label for one in best] == expected
    close = model.similarity(files, names)
    np.testing.assert_allclose(close, embedded @ tower.embed(names).T, atol=1e-5)

    words = [f"--model={siglip2}", "--labels=bee, cat", "--prompts=a photo of a {}"]
    assert not run_command("predict", [*files, *words, "--json"])
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line["predictions"][0]["label"] for line in lines] == expected
    recipe = f"configs/eval/zero_shot.py:data={place / 'photos'}"
    words = [f"--config={ROOT / recipe}", f"--model={siglip2}", "--json"]
    prompts = "--config.evals.test.prompts=('a photo of a {}',)"
    assert not run_command("evaluate", [*words, prompts])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    true = [names.index(file.parent.name) for file in files]
    assert report["test"] == pytest.approx((logits.argmax(-1) == true).mean())


@pytest.mark.slow
def test_figures_have_the_grid_of_their_image(
    place, opened, files, of_one_size, tmp_path
):
    any_size, _ = opened
    of_files = any_size.attention(files)
    names = "posemb,attention,distance,rollout,relevance,pca"
    words = ["--images", *files, f"--model={place / 'tiny.safetensors'}"]
    words += ["--max_tokens=32", f"--out={tmp_path}", f"--figure={names}"]
    assert not run_command("visualize", [*words, "--shown=2", "--query=0,0"])
    found, distances = {}, []
    for name in names.split(","):
        for path in sorted((tmp_path / name).glob("*.npz")):
            with np.load(path) as arrays:
                found[name, path.stem] = dict(arrays)
    for file, attention, one in zip(files, of_files, of_one_size, strict=True):
        maps, grid = one["maps"], one["grid"]
        np.testing.assert_allclose(attention, maps, atol=1e-5)
        apart = patch_distances(grid, 4)
        distances.append((maps * apart).sum(-1).mean(-1))
        if ("pca", file.stem) not in found:
            continue
        parts = {name: found[name, file.stem] for name in names.split(",")[3:]}
        assert parts["rollout"]["overlay"].shape == np.array(Image.open(file)).shape
        assert parts["relevance"]["relevance"].shape == (2, np.prod(grid))
        assert parts["pca"]["components"].shape == (*grid, 3)
        drawn, places = found["attention", file.stem], found["posemb", file.stem]
        assert drawn["grid"].tolist() == [*grid]
        np.testing.assert_allclose(drawn["attention"], maps[:, :, 0], atol=1e-5)
        np.testing.assert_allclose(places["similarity"], one["similar"], atol=1e-5)
    assert len(found) == 2 * 5
    with np.load(tmp_path / "distance.npz") as arrays:
        np.testing.assert_allclose(arrays["pixels"], np.mean(distances, 0), rtol=1e-4)


def test_attention_of_patches_of_another_size(place, files):
    path, quiet = place / "tiny.safetensors", {"tell": lambda line: None}
    model = vit_jax.load_model(path, max_tokens=9, patch=8, **quiet)
    for file in files[:2]:
        (maps,) = model.attention(file)
        rows, columns = model.preprocess(file).grids[0, 0].tolist()
        assert maps.shape[2:] == (rows * columns,) * 2
        np.testing.assert_allclose(maps.sum(-1), 1, atol=1e-5)


def test_figures_without_images_have_the_grid_of_the_network(place, tmp_path):
    words = [f"--model={place / 'tiny.safetensors'}", "--max_tokens=32"]
    words += [f"--out={tmp_path}", "--figure=posemb"]
    assert not run_command("visualize", words)
    with np.load(tmp_path / "posemb.npz") as arrays:
        assert arrays["similarity"].shape == (4, 4, 4, 4)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--figure=cka"], r"cka.*max_tokens=32.*--max_tokens=0"),
        (["--compare={model}"], r"--compare=.*max_tokens=32.*--max_tokens=0"),
        (["--figure=rollout", "--query=20,20"], r"--query=20,20.*at most 32"),
        (["--figure=rollout", "--query=5,1"], r"--query=5,1.*3x10.*row from 0 to 2"),
        (["--resolution=8"], r"image_size=\(8, 8\).*max_tokens"),
    ],
)
def test_figures_of_one_size_are_refused(place, files, tmp_path, words, reason):
    model = place / "tiny.safetensors"
    words = [word.format(model=model) for word in words]
    words += ["--images", *files, f"--model={model}", "--max_tokens=32"]
    with pytest.raises(UserError, match=reason):
        run_command("visualize", [*words, f"--out={tmp_path}"])


def test_what_needs_images_of_one_size_is_refused(place):
    with pytest.raises(UserError, match=r"image_size.*max_tokens"):
        vit_jax.load_model(place / "tiny.safetensors", max_tokens=9, image_size=24)
    with pytest.raises(UserError, match=r"patch=5.*24x24"):
        vit_jax.load_model(place / "tiny.safetensors", patch=5, image_size=24)


def test_features_are_written_as_a_table(place, opened, files, tmp_path):
    out = tmp_path / "features.parquet"
    words = [place / "photos", f"--model={place / 'tiny.safetensors'}", f"--out={out}"]
    assert not run_command("features", [*words, "--max_tokens=32"])
    found = np.stack(pq.read_table(out)["feature"].to_pylist())
    np.testing.assert_allclose(found, opened[0].features(files), atol=1e-5)


def test_patches_of_another_size_are_those_that_training_sees(
    place, opened, files, capsys
):
    weights, told = place / "tiny.safetensors", []
    model = vit_jax.load_model(weights, patch=2, tell=told.append)
    assert "4 pixels resized to 2" in told[0] and len(told) == 1
    assert "by bilinear_plain, as in big_vision (in timm patch_resize=bic" in told[0]
    assert model.model.grid == (8, 8)
    images = np.asarray(model.preprocess(files))
    strips = [naflex.cut(image, 2) for image in images]
    grids = np.full((len(files), 1, 2), 8)
    _, fixed = opened
    given = PatchSequences(jnp.asarray(strips), jnp.asarray(grids))
    expected = jax.jit(fixed.model.apply)(fixed.params, given)["logits"]
    np.testing.assert_allclose(model(files), expected, atol=1e-5)

    assert not run_command(
        "predict", [*files, f"--model={weights}", "--patch=2", "--json"]
    )
    out, err = capsys.readouterr()
    found = [json.loads(line)["predictions"][0]["label"] for line in out.splitlines()]
    assert found == np.argmax(expected, axis=-1).tolist()
    assert "4 pixels resized to 2" in err
    kept = vit_jax.load_model(weights, patch=2, max_tokens=64, tell=told.append)
    assert kept.preprocess(files[:1]).grids.tolist() == [[[4, 16]]]
    square = files.index(next(file for file in files if file.name == "2.png"))
    how = {"patch": 2, "patch_resize": "bicubic", "tell": told.append}
    of_timm = vit_jax.load_model(weights, **how)
    assert "by bicubic, as in timm" in told[-1]
    kernels = [each.params["embedding"]["kernel"] for each in (fixed, of_timm)]
    kernel = resize_patch_kernel(np.asarray(kernels[0]), 2, "bicubic")
    np.testing.assert_allclose(kernels[1], kernel, atol=1e-6)
    sequences = vit_jax.load_model(weights, max_tokens=64, **how)
    assert sequences.model.config.patch_resize == "bicubic"
    with pytest.raises(UserError, match="patch_resize='cubic' is not one of bil"):
        vit_jax.load_model(weights, **how | {"patch_resize": "cubic"})
    np.testing.assert_allclose(kept(files)[square], expected[square], atol=1e-5)


@pytest.mark.slow
def test_a_run_says_how_its_images_are_prepared(place, files, tmp_path):
    data = {"name": "folder", "data_dir": str(place / "photos"), "split": "val"}
    data |= {"num_classes": 2, "num_examples": 0, "image_size": (16, 16)}
    data |= {"train_transform": "naflex(16, patch=4)"}
    data |= {"eval_transform": "naflex(32, patch=4, interpolation='bicubic')"}
    config = tiny_config(data=data, model={"pool": "gap"}, evals={})
    train(config, tmp_path)
    model = vit_jax.load_model(tmp_path, tell=lambda line: None)
    how = model.preprocessing
    assert (how.max_tokens, how.patch, how.interpolation) == (32, 4, "bicubic")
    assert model(files).shape == (6, 2)
    words = ["--figure=rollout", f"--model={tmp_path}", "--images", files[0]]
    assert not run_command("visualize", [*words, f"--out={tmp_path / 'figures'}"])
    with np.load(tmp_path / "figures" / "rollout" / "0.npz") as drawn:
        assert drawn["grid"].tolist() == [*naflex.fitting_grid(8, 32, 32)]
    other = vit_jax.load_model(tmp_path, patch=8, tell=lambda line: None)
    how = other.preprocessing
    assert (how.max_tokens, how.patch) == (8, 8)  # Images are as large as before.
    assert other(files).shape == (6, 2)


def test_networks_of_one_size_are_refused(tmp_path):
    write_weights(tmp_path / "w.safetensors", **OPTIONS | {"variant": "C+Ti/4"})
    for given in ({"max_tokens": 9}, {"patch": 8}):
        with pytest.raises(UserError, match=rf"{next(iter(given))}.*C\+Ti/4"):
            vit_jax.load_model(tmp_path / "w.safetensors", **given)
