import dataclasses
import pathlib
import random
import re

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file
from trees import assert_same, checkpoint, encoder, random_flat

from vit_jax import convert, models, weights
from vit_jax.errors import UserError
from vit_jax.models import text
from vit_jax.weights import export
from vit_jax.weights.formats import files, registry

MARK = "reversed/"

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"


def recognises(tensors):
    return all(name.startswith(MARK) for name in tensors.flat)


def read(tensors, num_heads=0):
    flat = {name.removeprefix(MARK): value for name, value in tensors.flat.items()}
    options = encoder(num_heads=num_heads).options
    return weights.Pretrained(
        unflatten_dict(flat, sep="/"), options, "reversed", tensors.path
    )


def write(pretrained, path):
    flat = flatten_dict(pretrained.params, sep="/")
    with path.open("wb") as stream:
        np.savez(stream, **{MARK + name: value for name, value in flat.items()})
    return ["names: reversed"]


@pytest.fixture
def own_format(monkeypatch):
    """A format of a user's, registered as an import of its module would."""
    reader, writer = registry.Reader(recognises, read), registry.Writer(write, ".npz")
    monkeypatch.setitem(registry.READERS, "reversed", reader)
    monkeypatch.setitem(registry.WRITERS, "reversed", writer)


def test_a_registered_format_is_read_and_written(own_format, tmp_path):
    model = encoder()
    out = tmp_path / "a.npz"
    made, notes = export.export(checkpoint(model), "reversed", out)
    assert (made, notes) == ([out], ["names: reversed"])
    found = weights.open_pretrained(out, num_heads=3)
    assert (found.format, found.source) == ("reversed", str(out))
    assert_same(found.params, random_flat(model))
    usage = export.usage("reversed", found, str(out))
    assert f'weights.open_pretrained("{out}")' in usage
    with pytest.raises(UserError, match=r"reversed writes one file: name it \*.npz"):
        export.check("reversed", tmp_path / "a.bin")


def test_an_unknown_file_is_told_every_format(own_format, tmp_path):
    np.savez(tmp_path / "a.npz", some=np.ones(2))
    names = sorted(registry.READERS, key=str.casefold)
    assert "vit_jax" in names and "reversed" in names
    message = (
        f"known formats ({', '.join(names)}): its 1 arrays have names such as some"
    )
    with pytest.raises(UserError, match=re.escape(message)):
        weights.open_pretrained(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("prefix", "beside"),
    [
        ("_orig_mod.module.", ()),
        ("module._orig_mod.", ()),
        ("student.0.", ()),
        ("model.net._orig_mod.", ("criterion.weight", "accuracy.count")),
    ],
)
def test_wrappers_are_left_until_there_are_none(tmp_path, prefix, beside):
    model = encoder(activation="gelu")
    export.export(checkpoint(model), "timm", tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    arrays = {prefix + name: value for name, value in load_file(path).items()}
    save_file(arrays | {name: np.ones(2, np.float32) for name in beside}, path)
    found = weights.open_pretrained(tmp_path / "a")
    assert_same(found.params, random_flat(model))
    left_out = [note for note in found.notes if "left out" in note]
    assert len(left_out) == bool(beside)
    assert all(name in left_out[0] for name in beside)


@pytest.mark.parametrize(
    ("raw", "average"),
    [
        ("model.", "model_ema.module."),
        ("net.", "swa."),
        ("online_model.", "ema_model."),
        ("backbone.", "averaged_backbone."),
    ],
)
def test_averaged_arrays_of_one_file_are_used_and_told(tmp_path, raw, average):
    model = encoder(activation="gelu")
    export.export(checkpoint(model), "timm", tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    arrays = load_file(path)
    both = {raw + name: np.zeros_like(value) for name, value in arrays.items()}
    save_file(both | {average + name: value for name, value in arrays.items()}, path)
    found = weights.open_pretrained(tmp_path / "a")
    assert_same(found.params, random_flat(model))
    name = average.removesuffix("module.")[:-1]
    assert f"{name}: averaged weights, used instead of {raw}*" in found.notes[0]
    found = weights.open_pretrained(tmp_path / "a", use_ema=False)
    assert not found.params["cls"].any()
    assert f"{name}: averaged weights, left out" in found.notes[0]


# Programs are for other runtimes, and an adapter is not a network (test_peft.py).
WEIGHTS = [
    x for x in registry.WRITERS if x != "peft" and not registry.WRITERS[x].program
]


# What reads each golden file, and what each writer writes.
READ_BY = {
    "bigvision_vit_tok.npz": "big_vision",
    "dino_student.safetensors": "DINO",
    **{
        f"dinov2_{form}/{file}": name
        for form in ("mlp_reg0", "mlp_reg4", "swiglu_reg4")
        for file, name in {
            "facebook.safetensors": "DINO",
            "hf": "Hugging Face DINOv2",
            "timm.safetensors": "DINO",
        }.items()
    },
    "google_vit_gap.npz": "google",
    "google_vit_token.npz": "google",
    "google_vit_token_rep.npz": "google",
    "lit_image_head.npz": "LiT and SigLIP of Google",
    "lit_no_image_head.npz": "LiT and SigLIP of Google",
    "mae_facebook.safetensors": "MAE",
    "mae_hf": "MAE",
    "mixer.npz": "google Mixer",
    "naflexvit_timm": "timm NaFlexVit",
    "mixer_timm.safetensors": "timm Mixer",
    "siglip2_hf": "Hugging Face CLIP and SigLIP",
    "simmim_swin.safetensors": "Swin",
    "swin_v1.safetensors": "Swin",
    "swin_v2.safetensors": "Swin",
}
READS_WHAT_IS_WRITTEN = {
    "dino": "DINO",
    "google": "google",
    "hf": "Hugging Face",
    "hf_beit": "Hugging Face BEiT",
    "hf_clip": "Hugging Face CLIP and SigLIP",
    "hf_dinov2": "Hugging Face DINOv2",
    "hf_dinov3": "Hugging Face DINOv3",
    "hf_ijepa": "Hugging Face I-JEPA",
    "hf_mae": "MAE",
    "hf_siglip2": "Hugging Face CLIP and SigLIP",
    "mae": "DINO",  # Without fixed positions it is a backbone as of DINO.
    "microsoft": "Swin",
    "open_clip": "OpenCLIP",
    "safetensors": "vit_jax",
    "timm": "timm",
    "timm_naflex": "timm NaFlexVit",
}


def claims_in_any_order(monkeypatch, tensors):
    """Returns the formats that claim a file, which no order of registration changes."""
    known, order = dict(registry.READERS), [*registry.READERS]
    claims = registry.claiming(tensors)
    for seed in range(3):
        random.Random(seed).shuffle(order)
        shuffled = {name: known[name] for name in order}
        monkeypatch.setattr(registry, "READERS", shuffled)
        assert registry.claiming(tensors) == claims
        assert registry.find_reader(tensors)[0] is known[claims[0]]
    return claims


def assert_layers(found):
    """Checks that layer decay and freezing know every parameter of what was read."""
    config = models.create(**found.options).config
    for path in flatten_dict(found.params, sep="/"):
        assert 0 <= config.layer_of(path) <= config.num_blocks + 1, path


@pytest.mark.parametrize("name", READ_BY)
def test_one_format_claims_a_golden_file_whose_parameters_have_layers(
    monkeypatch, name
):
    tensors = files.read(GOLDEN / name)
    assert claims_in_any_order(monkeypatch, tensors) == [READ_BY[name]]
    assert_layers(registry.READERS[READ_BY[name]].read(tensors, 4))


@pytest.mark.parametrize("to", sorted(WEIGHTS))
def test_one_format_claims_what_a_writer_writes(monkeypatch, tmp_path, to):
    given = written_as(to)
    outs = [tmp_path / f"{name}{registry.WRITERS[to].suffix}" for name in "ab"]
    export.export(given, to, outs[0])
    tensors = files.read(outs[0])
    expected = READS_WHAT_IS_WRITTEN[to]
    assert claims_in_any_order(monkeypatch, tensors) == [expected]
    found = registry.READERS[expected].read(tensors, 3)
    assert found.source == str(outs[0])
    assert_layers(found)
    # The memory order of arrays changes no file.
    transposed = jax.tree.map(np.asfortranarray, (given.params, given.task_params))
    again = dataclasses.replace(given, params=transposed[0], task_params=transposed[1])
    export.export(again, to, outs[1])
    assert_same(files.read(outs[1]).flat, tensors.flat)


@pytest.mark.parametrize(
    ("golden", "to", "expected"),
    [
        ("mixer.npz", "google", "google Mixer"),
        ("mixer.npz", "safetensors", "vit_jax"),
        ("swin_v2.safetensors", "hf", "Hugging Face Swin"),
        ("swin_v2.safetensors", "timm", "Swin"),
        ("swin_v2.safetensors", "safetensors", "vit_jax"),
    ],
)
def test_one_format_claims_another_network(monkeypatch, tmp_path, golden, to, expected):
    out = tmp_path / f"a{registry.WRITERS[to].suffix}"
    export.export(weights.open_pretrained(GOLDEN / golden), to, out)
    assert claims_in_any_order(monkeypatch, files.read(out)) == [expected]


def test_a_file_that_two_formats_claim_is_refused(own_format, monkeypatch, tmp_path):
    path = tmp_path / "a.npz"
    export.export(checkpoint(encoder()), "reversed", path)
    other = registry.Reader(recognises, read)
    monkeypatch.setitem(registry.READERS, "other", other)
    with pytest.raises(UserError, match=r"a.npz .* other and reversed: .*`refines`"):
        weights.open_pretrained(path)
    refined = dataclasses.replace(other, refines=("reversed",))
    monkeypatch.setitem(registry.READERS, "other", refined)
    assert claims_in_any_order(monkeypatch, files.read(path)) == ["other"]


def written_as(to):
    """Returns a checkpoint that a writer takes."""
    bare = to.removeprefix("hf_") in ("mae", "dino", "dinov2", "dinov3")
    plain = {"num_classes": 0, "activation": "gelu", "mlp_dim": 24} if bare else {}
    plain |= {
        "hf_clip": {"pre_norm": True, "num_classes": 0},
        "hf_dinov3": {"rope": "centered", "posemb": "none"},
        "hf_beit": {"relative_bias": "every"},
        "hf_ijepa": {"pool": "gap"},
        "hf_siglip2": {"pool": "map", "num_classes": 0, "posemb_resize": "bilinear"},
        "timm_naflex": {"posemb_resize": "bicubic"},
        "open_clip": {"pre_norm": True, "num_classes": 0, "activation": "gelu"},
    }.get(to, {})
    given = checkpoint(encoder(**plain))
    if to == "microsoft":
        given = weights.open_pretrained(GOLDEN / "swin_v1.safetensors")
    return with_text_tower(given) if to == "open_clip" else given


def with_text_tower(pretrained):
    """Returns a checkpoint with a small text tower and CLIP's projection."""
    about = {"vocab_size": 9, "width": 8, "depth": 1, "num_heads": 2, "causal": True}
    about |= {"mlp_dim": 10, "pool": "eos", "eos_id": 8, "projection": "plain"}
    about["activation"] = "gelu"
    module = text.TextConfig(**about).build(5, 6, "float32")
    tower = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), text.shapes(module))
    width = pretrained.params["Transformer"]["encoder_norm"]["bias"].size
    kernel = np.arange(6 * width, dtype=np.float32).reshape(width, 6)
    params = {"text": tower, "projection": {"kernel": kernel}}
    params["logit_scale"] = np.ones(1, np.float32)
    task = {"name": "contrastive", "text": about}
    return dataclasses.replace(pretrained, task=task, task_params=params)


def test_the_flag_has_every_writer():
    with pytest.raises(
        UserError, match="--to=torch is not one of dino, google, hf"
    ) as error:
        export.check("torch", pathlib.Path("a"))
    for name in registry.WRITERS:
        assert name in str(error.value)
        assert f"\n  {name} " in convert.__doc__
