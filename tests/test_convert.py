"""`python -m vit_jax.convert`, on small models; uploads are caught."""

import dataclasses
import json
import pathlib
import re
from unittest import mock

import httpx2
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers import TINY, random_weights, run_command, tiny_config
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError

from vit_jax import convert, models, weights
from vit_jax.errors import UserError
from vit_jax.training import loop
from vit_jax.weights import Preprocess, export
from vit_jax.weights.formats import native
from vit_jax.weights.hub import push

OPTIONS = TINY | {"variant": "Ti/4", "num_classes": 5, "image_size": (12, 12)}
HF_FILES = ["config.json", "model.safetensors", "preprocessor_config.json"]
NAMES = ("apple", "Bär", "a cat, or two", "dog", "eel")
PREPROCESS = Preprocess(
    (12, 12), (0.4, 0.5, 0.6), (0.2, 0.3, 0.25), "bicubic", crop_fraction=0.75
)


def filled(model):
    """A checkpoint of a model, with random parameters."""
    return random_weights(model, "test", preprocess=PREPROCESS, class_names=NAMES)


def made(**options):
    return filled(models.create(**OPTIONS | options))


@pytest.fixture
def source(tmp_path):
    """Path of an exported file."""
    native.write(made(), tmp_path / "source.safetensors")
    return tmp_path / "source.safetensors"


def run(*words):
    return run_command("convert", words)


def same_params(a, b):
    a, b = (flatten_dict(tree, sep="/") for tree in (a, b))
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize(
    ("to", "name", "files", "usage"),
    [
        ("timm", "a", ["config.json", "model.safetensors"], "timm.create_model("),
        ("hf", "b", HF_FILES, "AutoModelForImageClassification.from_pretrained("),
        ("google", "c.npz", ["c.npz"], "weights.open_pretrained("),
        ("safetensors", "d.safetensors", ["d.safetensors"], "open_pretrained("),
    ],
)
def test_every_format_and_back(tmp_path, source, capsys, to, name, files, usage):
    out = tmp_path / "new" / name
    assert run("--model", source, "--to", to, "--out", out) is None
    printed = capsys.readouterr().out
    assert f"read {source}: vit_jax weights of Ti/4\nwrote {out}\n" in printed
    assert usage in printed
    found = sorted(p.name for p in (out.iterdir() if out.is_dir() else [out]))
    assert found == files
    assert [p.name for p in out.parent.iterdir()] == [name]  # No temporary folder.

    original, again = made(), weights.open_pretrained(out)
    assert same_params(again.params, original.params)
    if to != "google":
        # The image processors of transformers round the margin of a crop down.
        expected = dataclasses.replace(original.preprocess, crop_down=to == "hf")
        assert again.preprocess == expected
        assert again.class_names == original.class_names


@pytest.mark.slow
def test_a_workdir_gives_its_average_or_its_last_parameters(tmp_path, capsys):
    workdir = tmp_path / "run"
    data = {"num_examples": 16, "image_size": (12, 12)}
    loop.train(tiny_config(data=data, ema={"decay": 0.9}, total_steps=2), workdir)
    for name, flags in (("averaged parameters", ()), ("parameters", ("--no_ema",))):
        run("--model", workdir, "--to=timm", "--out", tmp_path / name, *flags)
        assert f"  {name} of step 2\n" in capsys.readouterr().out
        expected = weights.open_pretrained(workdir, use_ema=not flags)
        found = weights.open_pretrained(tmp_path / name)
        assert same_params(found.params, expected.params)
        assert found.options["image_size"] == (12, 12)
    scores = convert.read_scores(str(workdir))
    assert scores.keys() == {"val/params/top1", "val/ema/top1"}
    assert all(name.endswith("/top1") for name in scores)


def test_flags_replace_what_the_source_says(tmp_path, capsys):
    source = tmp_path / "source.npz"
    flat = flatten_dict(made().params, sep="/")
    np.savez(source, **flat)
    (tmp_path / "names.txt").write_text("v\nw\nx\ny\nz\n")
    run(
        "--model", source, "--to=hf", "--out", tmp_path / "out",
        "--labels", tmp_path / "names.txt", "--mean=0.1,0.2,0.3", "--std=0.5",
        "--crop_pct=0.5", "--interpolation=lanczos",
    )  # fmt: skip
    found = weights.open_pretrained(tmp_path / "out")
    assert found.class_names == tuple("vwxyz")
    assert found.preprocess == Preprocess(
        (12, 12), (0.1, 0.2, 0.3), (0.5,) * 3, "lanczos", 0.5, crop_down=True
    )


def test_what_is_assumed_about_images_is_printed(tmp_path, source, capsys):
    run("--model", source, "--to=timm", "--out", tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    del config["pretrained_cfg"]
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    run("--model", tmp_path / "a", "--to=hf", "--out", tmp_path / "b")
    assert re.search(
        r"preprocessing: not in the weights, assumed as for timm's ViTs: 12x12, "
        r"bicubic, crop 0.9, mean 0.5,?.*, std 0.5",
        capsys.readouterr().out,
    )


def test_names_that_do_not_fit_the_classes_are_left_out(tmp_path):
    pretrained = made(num_classes=4)
    _, notes = export.export(pretrained, "hf", tmp_path / "out")
    assert notes[0] == "class names: 5 for 4 classes, so left out"
    labels = json.loads((tmp_path / "out" / "config.json").read_text())["id2label"]
    assert labels == {str(i): f"LABEL_{i}" for i in range(4)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("google x", "--out=x: --to=google writes one file: name .*npz"),
        ("safetensors x.npz", r"--out=x.npz: .* name it \*.safetensors"),
        ("timm {source}", "exists and is not a folder: give another"),
        ("safetensors {source}", "exists: give .* or add --overwrite"),
        ("timm {parent}", "exists: give another path, or add --overwrite"),
        ("hf {source}/x", "--out=.*/x cannot be written: .*exists"),
        (f"hf {'x' * 999}", "--out=x* cannot be written: .* too long"),
        ("hf x --push=a", "--push='a' has no owner: write owner/name"),
        ("hf x --push=a/b/c", "--push='a/b/c' is not a valid name on the hub"),
        ("hf x --labels={names}", "has 2 names, but .* have 5 classes"),
        ("hf x --std=0", "above 0: set --std"),
        ("hf x --config.seed=3", "--config.seed: converting takes no"),
        ("hf x --num_heads=4", "num_heads=4: .* num_heads=3;"),
        ("hf x --architecture=test_vit", "architecture='test_vit': .* format vit_jax"),
        ("hf x --private", "--private .* --push"),
        ("hf x --license=mit", "--license .* --push"),
    ],
)
def test_bad_flags_are_refused_and_leave_nothing(
    tmp_path, monkeypatch, source, words, message
):
    monkeypatch.chdir(tmp_path)
    names = tmp_path / "names.txt"
    names.write_text("a\nb\n")
    before = sorted(tmp_path.rglob("*"))
    words = words.format(source=source, parent=tmp_path, names=names)
    to, out, *more = words.split()
    with pytest.raises(UserError, match=message):
        run("--model", source, f"--to={to}", f"--out={out}", *more)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_network_that_a_format_lacks_leaves_nothing(tmp_path):
    for to, out, options, message in (
        ("google", "a.npz", {"image_size": (12, 20)}, "a grid of 3x5: a reader of"),
        ("google", "a.npz", {"pool": "none"}, "pool='none': Google's code does not"),
        ("google", "a.npz", {"distillation": True}, "distillation=True: Google's"),
        ("hf", "a", {"pool": "gap"}, "pool='gap': ViTModel of"),
        ("timm", "a", {"representation_layer": True}, "_layer=True: timm has no"),
    ):
        with pytest.raises(UserError, match=message):
            export.export(made(**options), to, tmp_path / out)
        assert not list(tmp_path.iterdir())


def test_a_note_says_how_google_readers_prepare_images(tmp_path):
    _, notes = export.export(made(), "google", tmp_path / "a.npz")
    assert notes[1] == (
        "images: readers of the format assume 12x12, bilinear_plain, whole image, mean "
        "0.5,0.5,0.5, std 0.5,0.5,0.5; predictions differ unless they are given "
        "12x12, bicubic, crop 0.75, mean 0.4,0.5,0.6, std 0.2,0.3,0.25"
    )
    how = Preprocess((12, 12), interpolation="bilinear_plain", squash=True)
    usual = dataclasses.replace(made(), preprocess=how)
    _, notes = export.export(usual, "google", tmp_path / "b.npz")
    assert not any(note.startswith("images") for note in notes)


@pytest.mark.parametrize(
    ("to", "out"),
    [("timm", "a"), ("hf", "a"), ("google", "a.npz"), ("safetensors", "a.safetensors")],
)
def test_incomplete_weights_leave_nothing(tmp_path, to, out):
    ones = lambda *shape: np.ones(shape, np.float32)
    for name, value, message in (
        ("head", {"kernel": ones(12, 5)}, r"head/bias is none.*\(5,\)"),
        ("cls", ones(1, 2, 12), r"cls is \(1, 2, 12\) in the file and \(1, 1, 12\) in"),
        ("more", ones(3), r"more is \(3,\) in the file and none in the network"),
    ):
        found = made()
        found.params[name] = value
        message = f"test does not fit its network: .*{message}"
        with pytest.raises(UserError, match=message):
            export.export(found, to, tmp_path / out)
        assert not list(tmp_path.iterdir())


def test_google_has_one_gelu_and_a_note_names_the_other(tmp_path):
    _, notes = export.export(made(activation="gelu"), "google", tmp_path / "a.npz")
    assert any(
        note.startswith("activation: gelu replaced by gelu_tanh") for note in notes
    )
    _, notes = export.export(made(activation="gelu_tanh"), "google", tmp_path / "b.npz")
    assert not any("gelu" in note for note in notes)


def test_a_disk_that_fails_leaves_nothing_and_keeps_what_was_there(
    tmp_path, monkeypatch
):
    out = tmp_path / "out"
    export.export(made(), "timm", out)
    before = {path: path.read_bytes() for path in out.iterdir()}

    def fail(arrays, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", fail)
    with pytest.raises(UserError, match="cannot be written: .*No space left"):
        export.export(made(), "timm", out, overwrite=True)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_overwriting_replaces_our_files_and_no_others(tmp_path):
    out = tmp_path / "out"
    export.export(made(), "hf", out)
    (out / "notes.txt").write_text("mine")
    export.export(made(), "timm", out, overwrite=True)
    names = sorted(p.name for p in out.iterdir())
    assert names == ["config.json", "model.safetensors", "notes.txt"]
    assert weights.open_pretrained(out).format == "timm"


@pytest.mark.parametrize(
    ("options", "notes"),
    [
        ({"pool": "map"}, []),
        ({"pool": "gap", "representation_layer": True}, []),
        (
            {"layer_norm_eps": 1e-12},
            ["layer_norm_eps: 1e-12 replaced by 1e-6, Google's"],
        ),
        (
            {"posemb": "sincos2d"},
            ["position embeddings: sincos2d written as values"],
        ),
        ({"variant": "R26+S/32", "image_size": (64, 64)}, []),
    ],
)
def test_googles_format_takes_what_its_code_has(tmp_path, options, notes):
    pretrained = dataclasses.replace(made(**options), preprocess=None)
    _, found = export.export(pretrained, "google", tmp_path / "a.npz")
    assert found[1:] == notes
    again = weights.open_pretrained(tmp_path / "a.npz")
    if "posemb" not in options:
        assert same_params(again.params, pretrained.params)


def test_a_resnet_has_the_shapes_of_big_vision(tmp_path):
    model = models.create("R50x1", num_classes=3, stage_depths=(1, 1), stem_width=32)
    pretrained = filled(model)
    export.export(pretrained, "google", tmp_path / "a.npz")
    flat = np.load(tmp_path / "a.npz")
    assert flat["block2/unit01/gn1/scale"].shape == (1, 1, 1, 128)
    assert flat["norm-pre-head/bias"].shape == (1, 1, 1, 256)
    assert same_params(
        weights.open_pretrained(tmp_path / "a.npz").params, pretrained.params
    )


@pytest.fixture
def hub(monkeypatch):
    """Stands for the hub; `fail` has a method of it answer with a status."""
    for name in ("create_repo", "create_commit"):
        method = mock.create_autospec(getattr(HfApi, name))
        monkeypatch.setattr(HfApi, name, method)
    HfApi.create_commit.return_value.commit_url = "https://hub/ann/small/commit/c0"
    return HfApi


def refusal(status):
    response = httpx2.Response(status, request=httpx2.Request("POST", "https://hub"))
    return HfHubHTTPError("You may not.", response=response)


def committed(hub):
    """Returns file name to content of the one commit, and its message."""
    call = hub.create_commit.call_args
    data = {op.path_in_repo: op.path_or_fileobj for op in call.args[2]}
    files = {
        name: content
        if isinstance(content, bytes)
        else pathlib.Path(content).read_bytes()
        for name, content in data.items()
    }
    return files, call.kwargs["commit_message"]


def test_pushing_uploads_the_files_and_a_card(tmp_path, source, hub, capsys):
    run(
        "--model", source, "--to=timm", "--out", tmp_path / "out",
        "--push=ann/small", "--private", "--license=apache-2.0",
    )  # fmt: skip
    said = "pushed to ann/small: https://hub/ann/small/commit/c0\n"
    assert capsys.readouterr().out.endswith(said)
    assert hub.create_repo.call_args.args[1] == "ann/small"
    assert hub.create_repo.call_args.kwargs == {"private": True, "exist_ok": True}
    files, message = committed(hub)
    assert message == "Add weights, converted by vit_jax"
    card = files.pop("README.md").decode()
    assert files == {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    for line in (
        "pipeline_tag: image-classification",
        "library_name: timm",
        "license: apache-2.0",
        "# small",
        "| Classes | 5 |",
        "| Input | 12x12 pixels, 3 channels |",
        'model = timm.create_model("hf-hub:ann/small", pretrained=True)',
    ):
        assert f"{line}\n" in card
    for part in (
        "resized until it just covers 16x16, and the central 12x12 are cropped",
        "Mean 0.4, 0.5, 0.6; standard deviation 0.2, 0.3, 0.25.",
        "5, in this order: apple, Bär, a cat, or two, dog, eel",
    ):
        assert part in card


def test_one_file_is_pushed_as_well(tmp_path, source, hub):
    out = tmp_path / "small.npz"
    run("--model", source, "--to=google", "--out", out, "--push=ann/small")
    files, _ = committed(hub)
    assert files.keys() == {"README.md", "small.npz"}
    assert files["small.npz"] == out.read_bytes()
    card = files["README.md"].decode()
    assert 'weights.open_pretrained("hf://ann/small/small.npz")' in card
    assert "library_name" not in card
    assert "| License | unknown |" in card
    assert hub.create_repo.call_args.kwargs["private"] is None


@pytest.mark.parametrize(
    ("method", "status", "message"),
    [
        ("create_repo", 401, "ann/small was not uploaded: .*; log in with `hf auth"),
        ("create_repo", 403, "the token may not write to ann/small: set HF_TOKEN"),
        ("create_commit", 403, "the token may not write to"),
        ("create_commit", 404, "no such repository"),
        (
            "create_commit",
            400,
            "ann/small was not uploaded: .*; try again; the converted",
        ),
    ],
)
def test_an_upload_that_is_refused_keeps_the_files(
    tmp_path, source, hub, method, status, message
):
    error = refusal(status)
    if status == 400:  # As where a large file fails.
        error = RuntimeError("Error while uploading")
        error.__cause__ = refusal(status)
    getattr(hub, method).side_effect = error
    out = tmp_path / "out"
    with pytest.raises(UserError, match=message):
        run("--model", source, "--to=timm", "--out", out, "--push=ann/small")
    assert weights.open_pretrained(out).format == "timm"


def test_a_hub_that_does_not_answer_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("a")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(UserError, match="ann/small was not uploaded: .*try again"):
        push.upload([tmp_path / "a"], "ann/small", "card")


@pytest.fixture(scope="module")
def mae(tmp_path_factory):
    """A run of MAE, with averages."""
    folder = tmp_path_factory.mktemp("mae") / "run"
    sizes = {"decoder_width": 12, "decoder_depth": 1, "decoder_num_heads": 3}
    config = tiny_config(
        task={"name": "mae", **sizes},
        model={"posemb": "sincos2d_mae", "activation": "gelu"},
        data={"num_classes": 0, "image_size": (16, 16)},
        ema={"decay": 0.5},
        total_steps=2,
        evals={},
    )
    loop.train(config, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("to", "name"), [("mae", "a.pth"), ("hf_mae", "a")])
def test_a_run_of_mae_is_written_with_its_decoder(mae, tmp_path, capsys, to, name):
    out = tmp_path / name
    run("--model", mae, "--to", to, "--out", out)
    assert "load it in Python:" in capsys.readouterr().out
    found = weights.open_pretrained(out, num_heads=3)
    for use_ema in (True, False):
        trained = weights.open_pretrained(mae, use_ema=use_ema, with_task=True)
        for tree in ("params", "task_params"):
            same = same_params(getattr(found, tree), getattr(trained, tree))
            assert same == use_ema
    assert found.task["decoder_depth"] == 1
    # The network alone is what is read, unless one asks for more.
    assert not weights.open_pretrained(mae).task_params
