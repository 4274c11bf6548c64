"""OpenCLIP's files, read and written, against the library; needs the extra `parity`."""

import dataclasses
import functools
import json
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import photograph
from import_timm import import_timm, skip_values_on_meta, torch
from PIL import Image
from safetensors.numpy import save_file

from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.models import text
from vit_jax.weights.formats import open_clip as reader
from vit_jax.weights.formats import timm_networks
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.registry import WRITERS
from vit_jax.weights.network_images import prepare_image
from vit_jax.weights.text_tower import text_tower

pytestmark = pytest.mark.parity
their_timm = import_timm()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    open_clip = pytest.importorskip(
        "open_clip", reason="open_clip_torch is not installed: extra parity"
    )

CLIP = {
    "embed_dim": 20,
    "vision_cfg": {
        "image_size": 32,
        "layers": 2,
        "width": 64,
        "head_width": 16,
        "patch_size": 8,
    },
    "text_cfg": {
        "context_length": 9,
        "vocab_size": 300,
        "width": 24,
        "heads": 3,
        "layers": 2,
    },
}
SIGLIP = {
    "embed_dim": 768,
    "init_logit_bias": -10,
    "custom_text": True,
    "vision_cfg": {
        "timm_model_name": "vit_base_patch16_siglip_224",
        "timm_model_pretrained": False,
        "timm_pool": "map",
        "timm_proj": "none",
    },
    "text_cfg": CLIP["text_cfg"]
    | {
        "no_causal_mask": True,
        "proj_bias": True,
        "pool_type": "last",
        "norm_kwargs": {"eps": 1e-6},
        "act_kwargs": {"approximate": "tanh"},
    },
}
EVA = {
    "embed_dim": 20,
    "custom_text": True,
    "vision_cfg": {
        "timm_model_name": "eva02_base_patch16_clip_224",
        "timm_pool": "token",
        "timm_proj": None,
    },
    "text_cfg": CLIP["text_cfg"],
}
CASES = {
    "CLIP": CLIP,
    "CLIP, QuickGELU": CLIP | {"quick_gelu": True},
    "SigLIP in CLIP's image tower": CLIP
    | {"init_logit_bias": -10, "text_cfg": SIGLIP["text_cfg"]},
    "SigLIP": SIGLIP,
    "EVA": EVA,
}


def create(config):
    known = {k: v for k, v in config.items() if k != "custom_text"}
    custom = config.get("custom_text", False)
    cls = open_clip.CustomTextCLIP if custom else open_clip.CLIP
    torch.manual_seed(5)
    noise = 0.02 if config is EVA else 0.1  # Gated MLPs multiply rounding errors.
    network = cls(**known)
    with torch.no_grad():
        for name, value in network.named_parameters():
            if name.startswith("logit"):
                value.fill_(1.3)
            else:
                value.add_(torch.randn_like(value) * noise)
    return network.eval()


def save(network, config, folder, images=None):
    arrays = {k: v.numpy() for k, v in network.state_dict().items()}
    save_file(arrays, folder / "open_clip_model.safetensors")
    images = images or {"mean": [0.1, 0.2, 0.3]}
    about = {"model_cfg": config, "preprocess_cfg": images}
    (folder / "open_clip_config.json").write_text(json.dumps(about))


def run(network, images, tokens):
    with torch.no_grad():
        pixels = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
        image = network.encode_image(pixels, normalize=True)
        text = network.encode_text(torch.from_numpy(tokens), normalize=True)
        logits = network.logit_scale.exp() * image @ text.T
        if network.logit_bias is not None:
            logits = logits + network.logit_bias
    return image.numpy(), text.numpy(), logits.numpy()


@pytest.fixture
def inputs():
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 298, (4, 9))
    tokens[:, 0], tokens[0, 5:], tokens[1:, 8] = 298, 0, 299
    tokens[0, 5] = 299
    return rng.normal(size=(2, 224, 224, 3)).astype(np.float32), tokens


@pytest.fixture
def any_depth(monkeypatch):
    """Has names of timm's networks state no depth, so that arrays may have fewer blocks."""
    facts = timm_networks.find
    short = lambda name: dataclasses.replace(facts(name), depth=None)
    monkeypatch.setattr(timm_networks, "find", short)


@pytest.mark.parametrize("case", CASES)
def test_towers_are_those_of_open_clip_and_when_written_again(
    tmp_path, case, inputs, any_depth, monkeypatch
):
    # A config of OpenCLIP cannot state a depth of timm's networks.
    few = functools.partial(their_timm.create_model, depth=2)
    monkeypatch.setattr(their_timm, "create_model", few)
    network = create(CASES[case])
    save(network, CASES[case], tmp_path)
    pretrained = weights.open_pretrained(tmp_path)
    images, tokens = inputs
    trunk = case in ("SigLIP", "EVA")
    images = images if trunk else images[:, :32, :32]
    image, text, logits = run(network, images, tokens)
    tower = text_tower(pretrained)
    model = models.create(**pretrained.options)
    features = jax.jit(model.apply)(pretrained.params, jnp.asarray(images))[
        "pre_logits"
    ]
    ours = tower.embed_images(features)
    words = tower.embed_tokens(tokens.astype(np.int32))
    np.testing.assert_allclose(ours, image, atol=4e-6)
    np.testing.assert_allclose(words, text, atol=2e-6)
    np.testing.assert_allclose(tower.logits(ours, words), logits, atol=1e-5)
    assert tower.sigmoid == ("SigLIP" in case)
    assert pretrained.preprocess.mean == (0.1, 0.2, 0.3)
    if trunk:
        with pytest.raises(UserError, match="CLIP of OpenCLIP"):
            WRITERS["open_clip"].write(pretrained, tmp_path)
        return
    (tmp_path / "again").mkdir()
    WRITERS["open_clip"].write(pretrained, tmp_path / "again")
    written = open_clip.create_model(f"local-dir:{tmp_path / 'again'}").eval()
    for mine, theirs in zip(run(written, images, tokens), (image, text, logits)):
        np.testing.assert_array_equal(mine, theirs)


def test_openai_s_own_file_has_quick_gelu(tmp_path):
    network = create(CLIP)
    arrays = {k: v.numpy() for k, v in network.state_dict().items()}
    whole = arrays | {"input_resolution": np.array(32), "vocab_size": np.array(300)}
    save_file(whole, tmp_path / "openai.safetensors")
    found = weights.open_pretrained(tmp_path / "openai.safetensors")
    assert found.options["activation"] == "quick_gelu"
    assert any("OpenAI's, QuickGELU" in note for note in found.notes)
    save_file(arrays, tmp_path / "openai.safetensors")
    found = weights.open_pretrained(tmp_path / "openai.safetensors")
    assert found.options["activation"] == "gelu"


def test_towers_that_are_not_there_are_refused(tmp_path):
    config = CLIP | {"vision_cfg": CLIP["vision_cfg"] | {"ls_init_value": 0.1}}
    save(create(config), config, tmp_path)
    with pytest.raises(UserError, match=r"vision_cfg.ls_init_value=0.1"):
        weights.open_pretrained(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"size": 40},
        {"size": (40, 24), "interpolation": "random", "mean": 0.4, "std": 0.2},
        {"size": 40, "resize_mode": "squash", "interpolation": "bilinear"},
        {"size": 40, "resize_mode": "longest", "fill_color": 200},
        {"size": (24, 40), "resize_mode": "longest"},
        {"size": 43},  # Three pixels fill no patch.
        {"size": 43, "resize_mode": "squash"},
    ],
    ids=str,
)
def test_a_photograph_is_prepared_as_by_open_clip(tmp_path, config):
    from open_clip.transform import PreprocessCfg, image_transform_v2

    size = config["size"]
    network = CLIP | {"vision_cfg": CLIP["vision_cfg"] | {"image_size": size}}
    save(create(network), network, tmp_path, config)
    if size in (40, 43):
        pretrained = weights.open_pretrained(tmp_path)
        WRITERS["open_clip"].write(pretrained, tmp_path)
        assert weights.open_pretrained(tmp_path).preprocess == pretrained.preprocess
        written = json.loads((tmp_path / "open_clip_config.json").read_text())
        assert written["model_cfg"]["vision_cfg"]["image_size"] == [size, size]
    found = weights.open_pretrained(tmp_path)
    how, (height, width) = found.preprocess, found.options["image_size"]
    assert height % 8 == width % 8 == 0
    theirs = image_transform_v2(PreprocessCfg(**config), is_train=False)
    for sides in ((90, 141), (141, 90), (30, 31), (9, 141)):
        image = photograph(*sides)
        expected = theirs(Image.fromarray(image)).numpy().transpose(1, 2, 0)
        ours = (prepare_image(image, how) / 255 - how.mean) / how.std
        np.testing.assert_allclose(ours, expected[:height, :width], atol=1e-5)


def test_preprocessing_that_open_clip_lacks_is_noted(tmp_path):
    save(create(CLIP), CLIP, tmp_path)
    found = weights.open_pretrained(tmp_path)
    odd = {"interpolation": "lanczos", "crop_fraction": 0.9, "fill": (1, 2, 3)}
    odd = dataclasses.replace(
        found, preprocess=dataclasses.replace(found.preprocess, **odd)
    )
    notes = WRITERS["open_clip"].write(odd, tmp_path)
    lost = [note for note in notes if note.startswith("preprocessing")]
    names = [re.search(r"(\w+)=", note)[1] for note in lost]
    assert names == ["interpolation", "crop_fraction", "fill"]
    plain = dataclasses.replace(found.preprocess, interpolation="bilinear_plain")
    plain = dataclasses.replace(found, preprocess=plain)
    note, *others = WRITERS["open_clip"].write(plain, tmp_path)
    assert "interpolation='bilinear_plain'" in note
    assert "preprocessing:" not in str(others)
    assert weights.open_pretrained(tmp_path).preprocess.interpolation == "bilinear"
    open_clip.create_model_and_transforms(f"local-dir:{tmp_path}")
    assert "preprocessing:" not in str(WRITERS["open_clip"].write(found, tmp_path))


# Image towers of OpenCLIP's configs that no model here computes, and why.
OTHERS = {
    r"RN\d+.*": "ModifiedResNet",
    r"MobileCLIP2?-S\d": "fastvit_mci",
    r"MobileCLIP2?-B": "vit_base_mci_224: BatchNorm",
    r"PE-Core-.*": "vit_pe_core_",
    r"ViTamin-.*": "vitamin_",
    r"convnext_.*": "convnext_",
    r"swin_.*": "swin_base_patch4_window7_224",
    r"vit_relpos_.*": "vit_relpos_medium_patch16_cls_224",
    r".*-CLIPA.*": "no_ln_pre=True",
    r"ViT-M-16-alt": "ls_init_value=0.0001",
    r"ViT-SO400M-16-SigLIP-i18n-256": "proj_type='none'",
    r"coca_roberta.*|(xlm-)?roberta-.*|mt5-.*|nllb-.*": "hf_model_name=",
    r"coca_.*": "embed_cls=True",
}


def shapes_of(config):
    """Returns arrays of zeros without memory, of the first two blocks of a network."""
    config = json.loads(json.dumps(config))
    for key in [key for key in config["text_cfg"] if key.startswith("hf_model")]:
        del config["text_cfg"][key]  # It would be downloaded.
    config.pop("multimodal_cfg", None)
    custom = config.pop("custom_text", False)
    for tower in (config["vision_cfg"], config["text_cfg"]):
        if isinstance(tower.get("layers"), int):
            tower["layers"] = min(2, tower["layers"])
    with torch.device("meta"):
        cls = open_clip.CustomTextCLIP if custom else open_clip.CLIP
        arrays = cls(**config).state_dict()
    later = re.compile(r".*blocks\.([2-9]|\d\d+)\.")
    return {
        name: np.broadcast_to(np.float32(0), tuple(value.shape))
        for name, value in arrays.items()
        if "stages" in name or not later.match(name)
    }


def test_every_config_of_open_clip_is_read_or_refused_by_name(any_depth, monkeypatch):
    skip_values_on_meta(monkeypatch)
    wrong, seen = {}, set()
    for name in open_clip.list_models():
        so400m = name == "ViT-SO400M-14-SigLIP-384"
        plain = re.sub(r"-(\d{3}|quickgelu)$", "", name)
        if plain in seen and not so400m:  # The same at another size of images.
            continue
        seen.add(plain)
        config = open_clip.get_model_config(name)
        about = {"open_clip_config.json": {"model_cfg": config}}
        tensors = Tensors(shapes_of(config), {}, about, "a file")
        words = next((w for n, w in OTHERS.items() if re.fullmatch(n, name)), None)
        if words:
            with pytest.raises(UserError) as error:
                reader.read(tensors)
            if words not in str(error.value):
                wrong[name] = str(error.value)
            continue
        found = reader.read(tensors)
        model = models.create(**found.options)
        expected = jax.eval_shape(model.init, jax.random.key(0))
        if jax.tree.map(np.shape, found.params) != jax.tree.map(np.shape, expected):
            wrong[name] = "other parameters"
        # What fills no patch of 14 pixels is dropped after preparing all 384.
        if found.preprocess.cut != ((6, 6) if so400m else (0, 0)):
            wrong[name] = f"cut={found.preprocess.cut}"
        features = jnp.zeros((1, model.options["width"]))
        projection = {k: v for k, v in found.task_params.items() if k == "projection"}
        embeddings = jax.eval_shape(text.embed_images, projection, features)
        if embeddings.shape[1] != config["embed_dim"]:
            wrong[name] = f"embeddings {embeddings.shape}"
    assert not wrong
