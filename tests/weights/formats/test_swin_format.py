"""Swin Transformers as files of Microsoft, timm and transformers, read and written."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.weights import export, pretrained, surgery
from vit_jax.weights.formats import torch_file

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
FILES = {version: GOLDEN / f"swin_{version}.safetensors" for version in ("v1", "v2")}
CASES = dict(np.load(GOLDEN / "swin.io.npz"))


def logits_of(found, images, **options):
    model = models.create(**found.options | options)
    return jax.jit(model.apply)(found.params, jnp.asarray(images))["logits"]


def assert_same_weights(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found.params, wanted.params)


def test_microsofts_file_says_size_and_windows():
    for version, variant in (("v1", "Swin-T"), ("v2", "SwinV2-T")):
        found = weights.open_pretrained(FILES[version])
        assert found.format == "microsoft"
        assert found.notes == ()
        told = found.options
        assert (told["variant"], told["window_size"]) == (variant, 4)
        assert (told["image_size"], told["patch_size"]) == ((32, 32), 2)
        assert (told["num_heads"], told["window_padding"]) == ((2, 4), "microsoft")
        assert found.preprocess.image_size == (32, 32)


def test_coordinates_say_the_windows_of_pretraining(tmp_path):
    flat = load_file(FILES["v2"])
    case = "swin_v2_pretrained_window/"
    grown = {k.removeprefix(case): v for k, v in CASES.items() if k.startswith(case)}
    grown = {k: v for k, v in grown.items() if k.endswith("coords_table")}
    assert len(grown) == 4
    save_file(flat | grown, tmp_path / "grown.safetensors")
    found = weights.open_pretrained(tmp_path / "grown.safetensors")
    assert found.options["pretrained_window_sizes"] == (8, 4)
    wanted = CASES[f"{case}32x32/microsoft_logits"]
    ours = logits_of(found, CASES["32x32/image"])
    np.testing.assert_allclose(ours, wanted, atol=1e-5)


def test_what_simmim_pretrained_is_the_network_without_its_decoder(tmp_path):
    flat = {
        f"encoder.{k}": v for k, v in load_file(FILES["v1"]).items() if "head" not in k
    }
    flat["encoder.mask_token"] = np.zeros((1, 1, 16), np.float32)
    flat["decoder.0.weight"] = np.zeros((48, 32, 1, 1), np.float32)
    torch_file.write(tmp_path / "simmim.pth", {"model": flat})
    found = weights.open_pretrained(tmp_path / "simmim.pth")
    assert found.options["num_classes"] == 0
    assert [note.split(":")[0] for note in found.notes] == ["decoder", "mask token"]
    whole = weights.open_pretrained(FILES["v1"])
    jax.tree.map(
        np.testing.assert_array_equal,
        found.params,
        {k: v for k, v in whole.params.items() if k != "head"},
    )


@pytest.mark.parametrize("version", FILES)
@pytest.mark.parametrize("to", ["microsoft", "timm", "hf", "safetensors"])
def test_each_format_holds_the_weights(tmp_path, version, to):
    found = weights.open_pretrained(FILES[version])
    out = (
        tmp_path
        / f"out{'.pth' if to == 'microsoft' else '.safetensors' if to == 'safetensors' else ''}"
    )
    _, notes = export.export(found, to, out)
    again = weights.open_pretrained(out)
    assert_same_weights(again, found)
    kept = ("variant", "width", "stage_depths", "num_heads", "num_classes", "mlp_ratio")
    assert {k: again.options[k] for k in kept} == {k: found.options[k] for k in kept}
    library = {"timm": "timm", "hf": "transformers"}.get(to, "microsoft")
    assert again.options["window_padding"] == library
    told = [
        note for note in notes if note.startswith("window_padding: microsoft became")
    ]
    assert len(told) == (library != "microsoft")
    if to != "microsoft":  # Whose file says neither.
        assert again.options["window_size"] == 4
        assert again.options["image_size"] == (32, 32)
        preprocess = pretrained.Preprocess((16, 48), (0.5,), (0.5,))
        model, params = surgery.fit_network(again, preprocess)
        logits = jax.eval_shape(model.apply, params, jnp.zeros((1, 16, 48, 3)))
        assert logits["logits"].shape == (1, found.options["num_classes"])


def test_windows_of_a_bare_file_of_timm_are_asked_for(tmp_path):
    export.export(weights.open_pretrained(FILES["v2"]), "timm", tmp_path / "timm")
    bare = tmp_path / "bare.safetensors"
    shutil.move(tmp_path / "timm" / "model.safetensors", bare)
    with pytest.raises(UserError, match="windows .*--architecture="):
        weights.open_pretrained(bare)
    name = "swinv2_tiny_window16_256"
    found = weights.open_pretrained(bare, architecture=name)
    assert found.options["window_size"] == 16
    assert found.options["image_size"] == (256, 256)


def test_windows_are_as_timms_name_or_arguments_say(tmp_path):
    export.export(weights.open_pretrained(FILES["v2"]), "timm", tmp_path / "timm")
    path = tmp_path / "timm" / "config.json"
    config = json.loads(path.read_text())
    del config["model_args"]["window_size"]
    del config["model_args"]["pretrained_window_sizes"]
    for name, window, grown in (
        ("swinv2_tiny_window16_256", 16, (0,)),
        ("swinv2_base_window12to24_192to384", 24, (12, 12, 12, 6)),
    ):
        path.write_text(json.dumps(config | {"architecture": f"{name}.ms_in1k"}))
        if len(grown) > 1:  # They are of four stages.
            with pytest.raises(UserError, match="must be one for each of the 2 stages"):
                weights.open_pretrained(tmp_path / "timm")
            continue
        told = weights.open_pretrained(tmp_path / "timm").options
        assert (told["window_size"], told["pretrained_window_sizes"]) == (window, grown)


def test_what_ours_have_not_is_refused(tmp_path):
    flat = load_file(FILES["v1"])
    absolute = flat | {"absolute_pos_embed": np.zeros((1, 256, 16), np.float32)}
    save_file(absolute, tmp_path / "absolute.safetensors")
    with pytest.raises(UserError, match="absolute_pos_embed is not supported"):
        weights.open_pretrained(tmp_path / "absolute.safetensors")
    for name in (
        "layers.1.blocks.0.attn.relative_position_bias_table",
        "layers.0.blocks.0.mlp.fc1.weight",
        "layers.0.blocks.1.norm1.weight",
    ):
        part = {k: v for k, v in flat.items() if k != name}
        save_file(part, tmp_path / "part.safetensors")
        with pytest.raises(UserError, match=f"{name} is missing: give the whole file"):
            weights.open_pretrained(tmp_path / "part.safetensors")
    for config, message in (
        ({"architecture": "swin_s3_tiny_224"}, "not an architecture of timm that is"),
        (
            {
                "architecture": "swin_tiny_patch4_window7_224",
                "model_args": {"always_partition": True},
            },
            "always_partition=True in model_args is not supported",
        ),
    ):
        folder = tmp_path / config["architecture"]
        folder.mkdir()
        shutil.copy(FILES["v1"], folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=message):
            weights.open_pretrained(folder)
    export.export(weights.open_pretrained(FILES["v1"]), "hf", tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"use_absolute_embeddings": True}))
    with pytest.raises(UserError, match="use_absolute_embeddings=True in config.json"):
        weights.open_pretrained(tmp_path / "hf")
    path.write_text(json.dumps(config | {"model_type": "donut-swin"}))
    with pytest.raises(UserError, match="model_type='donut-swin' in config.json"):
        weights.open_pretrained(tmp_path / "hf")
    path.unlink()
    with pytest.raises(UserError, match="no config.json, which has to be of swin or"):
        weights.open_pretrained(tmp_path / "hf")


def test_what_a_library_cannot_state_is_not_written(tmp_path):
    found = weights.open_pretrained(FILES["v1"])
    found.options["layer_norm_eps"] = 1e-6
    for to, library in (("timm", "timm"), ("microsoft", "microsoft")):
        with pytest.raises(
            UserError, match=f"layer_norm_eps=1e-06: Swin .* of {library}"
        ):
            export.export(found, to, tmp_path / f"{to}.pth")
    export.export(found, "hf", tmp_path / "hf")
    assert weights.open_pretrained(tmp_path / "hf").options["layer_norm_eps"] == 1e-6
    vit = weights.open_pretrained(GOLDEN / "google_vit_token.npz")
    with pytest.raises(UserError, match="Microsoft's files are of Swin Transformers"):
        export.export(vit, "microsoft", tmp_path / "vit.pth")


@pytest.mark.parity
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("swin_tiny_patch4_window7_224", {"img_size": 64, "window_size": 4}),
        ("swin_small_patch4_window7_224", {"img_size": (48, 64), "window_size": 3}),
        ("swinv2_tiny_window8_256", {"img_size": 64, "window_size": 4}),
        (
            "swinv2_base_window12to16_192to256",
            {"img_size": 64, "window_size": 4, "pretrained_window_sizes": (6, 6, 3, 3)},
        ),
    ],
)
def test_timm_reads_and_writes_the_same_network(tmp_path, name, args):
    from import_timm import import_timm, torch

    timm = import_timm()
    small = {"embed_dim": 12, "depths": (1, 2, 2, 2), "num_heads": (1, 2, 3, 4)}
    args = small | args
    torch.manual_seed(3)
    network = timm.create_model(name, num_classes=7, **args).eval()
    for value in network.parameters():
        torch.nn.init.normal_(value, std=0.3)
    theirs = tmp_path / "theirs"
    timm.models.save_for_hf(network, theirs, safe_serialization=True, model_args=args)
    found = weights.open_pretrained(theirs)
    export.export(found, "timm", tmp_path / "ours")
    again = timm.create_model(f"local-dir:{tmp_path}/ours", pretrained=True).eval()
    size = found.options["image_size"]
    images = np.random.default_rng(1).normal(size=(2, *size, 3)).astype(np.float32)
    ours = logits_of(found, images)
    with torch.no_grad():
        moved = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
        for logits in (network(moved).numpy(), again(moved).numpy()):
            limit = 1e-4 * np.abs(logits).max()
            np.testing.assert_allclose(ours, logits, rtol=0, atol=limit)


@pytest.mark.parity
@pytest.mark.parametrize("version", FILES)
@pytest.mark.parametrize("num_classes", [0, 5])
def test_transformers_reads_what_is_written(tmp_path, version, num_classes):
    from import_timm import import_timm, torch

    import_timm()  # Beside a torchvision that transformers imports, too.
    transformers = pytest.importorskip("transformers", reason="extra parity")
    found = weights.open_pretrained(FILES[version])
    if not num_classes:
        found.options["num_classes"] = 0
        params = {k: v for k, v in found.params.items() if k != "head"}
        found = dataclasses.replace(found, params=params)
    export.export(found, "hf", tmp_path / "hf")
    kind = "AutoModelForImageClassification" if num_classes else "AutoModel"
    network = getattr(transformers, kind).from_pretrained(tmp_path / "hf").eval()
    images = CASES["32x32/image"]
    model = models.create(**found.options)
    ours = jax.jit(model.apply)(found.params, jnp.asarray(images))
    with torch.no_grad():
        theirs = network(torch.from_numpy(images.transpose(0, 3, 1, 2).copy()))
    if num_classes:
        np.testing.assert_allclose(ours["logits"], theirs.logits, atol=1e-5)
    else:
        np.testing.assert_allclose(ours["pre_logits"], theirs.pooler_output, atol=1e-5)
