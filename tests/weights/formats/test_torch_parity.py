"""timm and transformers load what we write, strictly, and give the same answers.

Needs the extra `parity`.
"""

import pathlib

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from helpers import slow_but
from import_timm import import_timm
from PIL import Image
from safetensors.numpy import load_file
from trees import counted_by_kind, encoder, random_flat

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.weights import Preprocess, Pretrained, open_pretrained, surgery
from vit_jax.weights.formats import files, timm
from vit_jax.weights.formats.registry import READERS, WRITERS
from vit_jax.weights.network_images import prepare_image

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch", reason="PyTorch is not installed: extra parity")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: extra parity"
)


their_timm = import_timm()
SHARED = pathlib.Path(__file__).resolve().parents[4] / "shared"
SIZE = (24, 40)
WHOLE = Preprocess(SIZE, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bicubic", squash=True)


def made(model, seed=0):
    """A checkpoint with random parameters, of the scale that trained ones have.

    Kernels under weight standardisation have unit scale, so that the different
    constants beside their deviation (ours and Google's 1e-5, timm's 1e-8 beside the
    variance) do not matter; and branches are weaker than what they are added to, or
    fifty layers would amplify rounding.
    """
    flat = random_flat(model, seed)
    for name, value in flat.items():
        if name.endswith("scale"):
            value *= 0.3
            value += 0.3 if "/gn3/" in name else 1
        elif name.endswith("kernel") and value.ndim == 4 and "embedding" not in name:
            value *= 3
    channels, num_classes = model.options["channels"], model.options["num_classes"]
    statistics = WHOLE.mean[:channels], WHOLE.std[:channels]
    return Pretrained(
        params=unflatten_dict(flat, sep="/"),
        options=model.options,
        format="vit_jax",
        source="test",
        preprocess=Preprocess(model.image_shape[:2], *statistics, squash=True),
        class_names=tuple(f"class {i}" for i in range(num_classes)),
    )


def images_for(model):
    rng = np.random.default_rng(1)
    return rng.normal(size=(2, *model.image_shape)).astype(np.float32)


_APPLY = {}  # Compiled, by the options: what is read back has those that were written.


def ours(pretrained, images):
    model = models.create(**pretrained.options)
    apply = _APPLY.setdefault(repr(model.options), jax.jit(model.apply))
    outputs = apply(pretrained.params, images)
    return np.asarray(
        outputs["logits" if pretrained.options["num_classes"] else "pre_logits"]
    )


def theirs(network, images):
    with torch.no_grad():
        return network.eval()(torch.from_numpy(images.transpose(0, 3, 1, 2).copy()))


def tiny(variant="Ti/8", **options):
    return lambda: encoder(variant, **{"image_size": SIZE} | options)


def bit(variant, **options):
    return lambda: models.create(
        variant,
        **{"num_classes": 7, "image_size": (40, 56), "zero_pool": True} | options,
    )


TIMM = {
    "token": tiny(),
    "exact GELU, 1e-5": tiny(activation="gelu", layer_norm_eps=1e-5),
    "1e-12": tiny(layer_norm_eps=1e-12),
    "grey": tiny(channels=1),
    "gap": tiny(pool="gap"),
    "gap, pooled norm": tiny(pool="gap", fc_norm=True),
    "gap, pooled norm, class token": tiny(pool="gap", fc_norm=True, class_token=True),
    "gap, class token": tiny(pool="gap", class_token=True),
    "map": tiny(pool="map"),
    "map, class token": tiny(pool="map", class_token=True),
    "map, pooled norm": tiny(pool="map", fc_norm=True),
    "every token": tiny(pool="none"),
    "every token, no classes": tiny(pool="none", num_classes=0),
    "distilled": tiny(distillation=True),
    "distilled, pooled norm": tiny(distillation=True, fc_norm=True),
    "no classes": tiny(num_classes=0),
    "pooled norm of a token": tiny(fc_norm=True),
    "sincos2d": tiny(posemb="sincos2d"),
    "learned2d": tiny(posemb="learned2d"),
    "no positions": tiny(posemb="none"),
    "registers": tiny(num_register_tokens=2, layer_scale_init=0.1),
    "gated": tiny(activation="swiglu", pool="gap"),
    "gated, registers": tiny(activation="swiglu", num_register_tokens=1),
    "R+Ti/16": tiny("R+Ti/16", image_size=(32, 64)),
    "R26+S/32": tiny("R26+S/32", image_size=(64, 96), pool="gap"),
}
SLOW = {
    "R50+B/16": tiny("R50+B/16", image_size=(48, 64), channels=1),
    "R50x1": bit("R50x1"),
    "R101x1, narrow, no classes": bit(
        "R101x1", stem_width=32, channels=1, num_classes=0
    ),
}


@pytest.mark.parametrize("name", slow_but(TIMM, TIMM | SLOW))
def test_timm_loads_what_we_write_and_agrees(tmp_path, name):
    pretrained = made((TIMM | SLOW)[name]())
    timm.write(pretrained, tmp_path)
    # create_model drops the strictness where it thinks that classes differ.
    network = their_timm.create_model(f"local-dir:{tmp_path}", pretrained=False)
    arrays = load_file(tmp_path / "model.safetensors")
    tensors = {k: torch.from_numpy(v) for k, v in arrays.items()}
    network.load_state_dict(tensors, strict=True)
    loaded = their_timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    for key, value in loaded.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), arrays[key], err_msg=key)

    images = images_for(models.create(**pretrained.options))
    expected = ours(pretrained, images)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(theirs(loaded, images), expected, rtol=0, atol=1e-4)

    found = open_pretrained(tmp_path)
    np.testing.assert_allclose(ours(found, images), expected, rtol=0, atol=1e-5)


VIT, DEIT = "ViTForImageClassification", "DeiTForImageClassificationWithTeacher"
HUGGING_FACE = {
    "token": (tiny(), VIT),
    "1e-12": (tiny(activation="gelu", layer_norm_eps=1e-12), VIT),
    "grey": (tiny(channels=1), VIT),
    "square": (tiny(image_size=(24, 24)), VIT),
    "no positions": (tiny(posemb="none"), VIT),
    "sincos2d": (tiny(posemb="sincos2d"), VIT),
    "distilled": (tiny(distillation=True), DEIT),
    "no classes": (tiny(num_classes=0), "ViTModel"),
    "pooler": (tiny(num_classes=0, representation_layer=True), "ViTModel"),
    "distilled, no classes": (tiny(num_classes=0, distillation=True), "DeiTModel"),
}


def load_strictly(auto, folder, **kwargs):
    network, info = auto.from_pretrained(folder, output_loading_info=True, **kwargs)
    assert {name: found for name, found in info.items() if found} == {}
    return network


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_transformers_load_what_we_write_and_agree(tmp_path, name):
    build, architecture = HUGGING_FACE[name]
    pretrained = made(build())
    WRITERS["hf"].write(pretrained, tmp_path)
    images = images_for(models.create(**pretrained.options))
    if pretrained.options["num_classes"]:
        auto = transformers.AutoModelForImageClassification
        network = load_strictly(auto, tmp_path)
        outputs = theirs(network, images).logits
        assert network.config.id2label[3] == "class 3"
    else:
        pooled = pretrained.options["representation_layer"]
        network = load_strictly(
            transformers.AutoModel, tmp_path, add_pooling_layer=pooled
        )
        outputs = theirs(network, images)
        outputs = outputs.pooler_output if pooled else outputs.last_hidden_state[:, 0]
    assert type(network).__name__ == architecture
    expected = ours(pretrained, images)
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=1e-4)

    # What the library saves itself, under whichever names, is read to the bit.
    network.save_pretrained(tmp_path / "again")
    first, again = map(open_pretrained, (tmp_path, tmp_path / "again"))
    jax.tree.map(np.testing.assert_array_equal, first.params, again.params)
    shown = {k: v.numpy() for k, v in network.state_dict().items()}
    in_memory = files.Tensors(shown, {}, files.read(tmp_path).sidecars, "memory")
    found = READERS["Hugging Face"].read(in_memory, 0)
    jax.tree.map(np.testing.assert_array_equal, found.params, first.params)


@pytest.mark.parametrize(
    ("kind", "changes", "refusal"),
    [
        (
            "ViT",
            {"hidden_act": "gelu_10"},
            "hidden_act='gelu_10' in config.json is not",
        ),
        ("ViT", {"pooler_act": "gelu"}, "pooler_act='gelu' in config.json is not"),
        ("DeiT", {"pooler_act": "relu"}, "pooler_act='relu' in config.json is not"),
        ("ViT", {"pooler_output_size": 8}, "a pooler with 8 features"),
        ("ViT", {"patch_size": (8, 4)}, r"patch \(8, 4\) is not square"),
    ],
)
def test_models_of_transformers_that_ours_are_not_are_refused(
    tmp_path, kind, changes, refusal
):
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
    sizes |= {"intermediate_size": 20, "image_size": 24, "patch_size": 8}
    config = getattr(transformers, f"{kind}Config")(**sizes | changes)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=refusal):
        open_pretrained(tmp_path)


def test_a_distilled_network_of_timm_without_classes_has_its_tokens(tmp_path):
    network = their_timm.create_model(
        "deit_tiny_distilled_patch16_224", num_classes=0, img_size=32, depth=2
    ).eval()
    for name, value in network.named_parameters():
        if "token" in name:
            torch.nn.init.normal_(value)
    their_timm.models.save_for_hf(network, tmp_path, safe_serialization=True)
    found = open_pretrained(tmp_path)
    model = models.create(**found.options)
    images = images_for(model)
    with torch.no_grad():
        pixels = torch.from_numpy(np.transpose(images, (0, 3, 1, 2)).copy())
        tokens = network.forward_features(pixels).numpy()
    features = jax.jit(model.apply)(found.params, images)["pre_logits"]
    np.testing.assert_allclose(features, tokens[:, 0], rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def deit():
    """DeiT-Ti with the names and the preprocessing of its authors."""
    path = SHARED / "parity" / "deit_tiny_timm.safetensors"
    if not path.exists():
        pytest.skip("../shared/parity/deit_tiny_timm.safetensors is not here")
    found = timm.read(files.read(path))
    lines = (SHARED / "data" / "imagenet_classes.txt").read_text().splitlines()
    return Pretrained(
        params=found.params,
        options=found.options,
        format="timm",
        source=str(path),
        preprocess=Preprocess(
            (224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bicubic", 0.875
        ),
        class_names=tuple(line.split("\t")[1] for line in lines),
    )


def photographs():
    """Paths of some of the sample photographs."""
    return sorted((SHARED / "data" / "imagenet_samples").iterdir())[::41]


@pytest.fixture(scope="module")
def our_logits(deit):
    """Logits of the photographs."""
    mean, std = (np.float32(v) for v in (deit.preprocess.mean, deit.preprocess.std))
    pixels = [
        prepare_image(path.read_bytes(), deit.preprocess) for path in photographs()
    ]
    images = (np.stack(pixels) / np.float32(255) - mean) / std
    return ours(deit, images)


def test_timm_has_the_same_logits_of_photographs(deit, our_logits, tmp_path):
    timm.write(deit, tmp_path)
    network = their_timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    config = their_timm.data.resolve_model_data_config(network)
    transform = their_timm.data.create_transform(**config, is_training=False)
    pictures = [Image.open(path).convert("RGB") for path in photographs()]
    tensors = [transform(picture) for picture in pictures]
    with torch.no_grad():
        logits = network(torch.stack(tensors)).numpy()
    np.testing.assert_allclose(our_logits, logits, atol=1e-4)
    assert network.pretrained_cfg["label_names"][logits[0].argmax()] == "tench"


@pytest.mark.parametrize("backend", ["pil", "torchvision"])
def test_transformers_name_the_same_photographs(deit, our_logits, tmp_path, backend):
    WRITERS["hf"].write(deit, tmp_path)
    network = load_strictly(transformers.AutoModelForImageClassification, tmp_path)
    processor = transformers.AutoImageProcessor.from_pretrained(
        tmp_path, backend=backend
    )
    pictures = [Image.open(path) for path in photographs()]  # Some of them are grey.
    with torch.no_grad():
        inputs = processor(images=pictures, return_tensors="pt")
        guesses = network.eval()(**inputs).logits.argmax(-1).numpy()
    # Of an odd margin they crop the other half pixel away: of 250 photographs one, a near
    # tie, is named otherwise, with Pillow as with torchvision. It is not among these.
    np.testing.assert_array_equal(our_logits.argmax(-1), guesses)
    assert network.config.id2label[int(guesses[0])] == "tench"


def test_big_visions_flexivit_is_read_as_timm_reads_it(tmp_path):
    # Their files hold a kernel of 32 pixels and positions for a grid of 7, and no position
    # of the class token.
    flat = random_flat(encoder("Ti/32", num_classes=7, image_size=(224, 224)))
    positions = flat.pop("Transformer/posembed_input/pos_embedding")
    flat["pos_embedding"] = positions[:, 1:]
    path = tmp_path / "flexivit.npz"
    np.savez(path, **{f"params/{counted_by_kind(k)}": v for k, v in flat.items()})
    network = their_timm.models.vision_transformer.VisionTransformer(
        img_size=80,
        patch_size=8,
        num_classes=7,
        embed_dim=12,
        depth=2,
        num_heads=3,
        mlp_ratio=20 / 12,
        no_embed_class=True,
        act_layer=lambda: torch.nn.GELU("tanh"),
    )
    network.load_pretrained(str(path))
    images = np.random.default_rng(0).normal(size=(2, 80, 80, 3)).astype(np.float32)
    how = Preprocess((80, 80), patch=8)
    model, params = surgery.fit_network(open_pretrained(path), how)
    logits = jax.jit(model.apply)(params, images)["logits"]
    np.testing.assert_allclose(logits, theirs(network, images), atol=1e-3)
