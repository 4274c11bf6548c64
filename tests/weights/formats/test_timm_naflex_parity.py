"""timm's NaFlexVit, read and written again; needs the extra `parity`."""

import json
import pathlib

import jax
import numpy as np
import patch_sequences
import pytest
from import_timm import import_timm, torch

from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.weights import export

pytestmark = pytest.mark.parity
their_timm = import_timm()
GOLDEN = pathlib.Path(__file__).parents[2] / "golden"

SIDE = 4
SMALL = {"embed_dim": 24, "depth": 2, "num_heads": 3, "patch_size": SIDE}
SMALL |= {"mlp_ratio": 1.7, "num_classes": 5}
TINY = SMALL | {"depth": 1, "pos_embed_grid_size": (4, 4)}
GAP, MAP = "naflexvit_base_patch16_gap", "naflexvit_base_patch16_map"
CLASSIC = SMALL | {"use_naflex": True, "img_size": 4 * SIDE}
TOKEN = {"global_pool": "token", "class_token": True}
NETWORKS = {
    "mean, registers": (GAP, TINY | {"depth": 2}),
    "mean, registers, norm before": (GAP, TINY | {"fc_norm": False, "reg_tokens": 2}),
    "SigLIP 2, no classes": (
        *("naflexvit_so400m_patch16_siglip",),
        SMALL | {"pos_embed_grid_size": (3, 5), "num_classes": 0},
    ),
    "map, class token, registers": (
        MAP,
        TINY | {"class_token": True, "reg_tokens": 2, "pool_include_prefix": True},
    ),
    "token, registers, 4 channels": (
        GAP,
        TINY | TOKEN | {"reg_tokens": 2, "fc_norm": False, "in_chans": 4},
    ),
    "no positions, no biases of queries": (
        *("naflexvit_so150m2_patch16_reg1_gap",),
        TINY | {"pos_embed": "none"},
    ),
    "norms": (
        GAP,
        TINY
        | {"qk_norm": True, "scale_attn_inner_norm": True, "scale_mlp_norm": True}
        | {"pre_norm": True, "init_values": 0.1, "act_layer": "quick_gelu"},
    ),
    "convolution, no final norm": (
        *(GAP, TINY | {"embed_proj_type": "conv", "final_norm": False}),
    ),
    "channels first": (GAP, TINY | {"patchify_channels_last": False}),
    "plain bicubic": (GAP, TINY | {"pos_embed_antialias": False}),
    "corners": (
        GAP,
        TINY
        | {"pos_embed_interp_mode": "bilinear", "pos_embed_antialias": False}
        | {"pos_embed_align_corners": True},
    ),
    "bilinear, not antialiased": (
        GAP,
        TINY | {"pos_embed_interp_mode": "bilinear", "pos_embed_antialias": False},
    ),
    "factorized": (
        GAP,
        TINY | {"pos_embed": "factorized", "pos_embed_grid_size": (3, 5)},
    ),
    "aspect kept": ("naflexvit_base_patch16_par_gap", TINY),
    "aspect kept, factorized": ("naflexvit_base_patch16_parfac_gap", TINY),
    "RADIO v3": ("naflexvit_huge_patch16_radio_v3", TINY),
    "RADIO v4": ("naflexvit_so400m_patch16_radio_v4", TINY | {"num_classes": 0}),
    "ViT": ("vit_tiny_patch16_224", CLASSIC),
    "SigLIP": ("vit_base_patch16_siglip_224", CLASSIC | {"num_classes": 0}),
    "CLIP": ("vit_base_patch16_clip_224", CLASSIC),
    "EVA-02": ("eva02_tiny_patch14_224", CLASSIC),
    "mixed rotary": ("vit_small_patch16_rope_mixed_ape_224", CLASSIC),
    "DINOv3": ("vit_small_patch16_dinov3", CLASSIC),
    "ViT, mean": ("vit_base_patch16_siglip_gap_224", CLASSIC),
}
# What the writer lacks.
REFUSED = {"CLIP": "layer_norm_eps=1e-05", "EVA-02": "activation='swiglu'"}
REFUSED |= {"mixed rotary": "rope='mixed'", "DINOv3": "layer_norm_eps=1e-05"}


def create(name, args):
    torch.manual_seed(5)
    network = their_timm.create_model(name, **args)
    assert type(network).__name__ == "NaFlexVit"
    with torch.no_grad():
        for value in network.parameters():
            value.add_(torch.randn_like(value) * 0.2)
    return network.eval()


def run(network, sequences):
    """Returns logits, or features without classes."""
    shape, side = patch_sequences.valid().shape, sequences.patch_size
    pixels = sequences.pixels.reshape(*shape, side, side, -1)
    if not network.embeds.channels_last:
        pixels = np.moveaxis(pixels, -1, 2)
    pixels = np.ascontiguousarray(pixels.reshape(*shape, -1))
    images = {
        "patches": torch.from_numpy(pixels),
        "patch_coord": torch.from_numpy(patch_sequences.places()),
        "patch_valid": torch.from_numpy(patch_sequences.valid()),
    }
    with torch.no_grad():
        return network(images).numpy()


@pytest.mark.parametrize("case", NETWORKS)
def test_a_network_is_the_same_at_five_aspect_ratios_and_when_written_again(
    tmp_path, case
):
    name, args = NETWORKS[case]
    network = create(name, args)
    their_timm.models.save_for_hf(network, tmp_path / "theirs", safe_serialization=True)
    found = weights.open_pretrained(tmp_path / "theirs")
    model = models.create(**found.options)
    sequences = patch_sequences.draw(SIDE, found.options["channels"])
    if "embed_proj_type" not in args:  # Which takes images alone.
        theirs = run(network, sequences)
        ours = jax.jit(model.apply)(found.params, sequences)
        ours = ours["logits" if found.options["num_classes"] else "pre_logits"]
        limit = 1e-5 * np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=limit)
    images = np.random.default_rng(1).normal(size=(2, *model.image_shape))
    images = images.astype(np.float32)
    moved = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        whole = network(moved).numpy()
    ours = jax.jit(model.apply)(found.params, images)
    ours = ours["logits" if found.options["num_classes"] else "pre_logits"]
    np.testing.assert_allclose(ours, whole, rtol=0, atol=1e-5 * np.abs(whole).max())

    if case in REFUSED:
        with pytest.raises(UserError, match=REFUSED[case]):
            export.export(found, "timm_naflex", tmp_path / "ours")
        return
    export.export(found, "timm_naflex", tmp_path / "ours")
    again = their_timm.create_model(f"local-dir:{tmp_path}/ours", pretrained=True)
    assert type(again).__name__ == "NaFlexVit"
    fresh = their_timm.create_model(f"local-dir:{tmp_path}/ours", pretrained=False)
    fresh.load_state_dict(again.state_dict(), strict=True)
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["pretrained_cfg"]["input_size"][1:] == list(
        found.preprocess.image_size
    )
    if "embed_proj_type" not in args:
        same = run(again.eval(), sequences)
        np.testing.assert_allclose(same, theirs, rtol=0, atol=limit)
    twice = weights.open_pretrained(tmp_path / "ours")
    known = models.create(**twice.options).options
    same = {"layer_scale_init": 0}
    if "factorized" in case:  # Written as learned ones.
        same["posemb"] = ""
    assert known | same == model.options | same
    assert twice.preprocess == found.preprocess


def test_the_image_tower_of_siglip2_is_one_of_timm(tmp_path):
    found = weights.open_pretrained(GOLDEN / "siglip2_hf")
    _, notes = export.export(found, "timm_naflex", tmp_path / "a")
    assert any("max_tokens=18" in note for note in notes)
    network = their_timm.create_model(f"local-dir:{tmp_path}/a", pretrained=True)
    sequences = patch_sequences.draw(2)
    model = models.create(**found.options)
    ours = jax.jit(model.apply)(found.params, sequences)["pre_logits"]
    np.testing.assert_allclose(run(network.eval(), sequences), ours, atol=1e-5)
