"""Every architecture of timm is read as timm computes it, or refused by what it has.

Needs the extra `parity`.
"""

import json
import re

import jax
import numpy as np
import pytest
from import_timm import import_timm, torch

from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.weights.formats import files, timm

pytestmark = pytest.mark.parity
their_timm = import_timm()
save_config_for_hf = their_timm.models._hub.save_config_for_hf

SMALL = {"img_size": 64, "embed_dim": 64, "num_heads": 2, "depth": 2}
ROPE = r"rotary position embeddings( \(rope\))? are not supported"
GATED = r"gated MLPs? \(.*\) (is|are) not supported"

# Architecture, what is changed, and the refusal; none where the logits are equal.
NETWORKS = {
    "plain": ("vit_base_patch16_224", {}, None),
    "no biases of queries": ("vit_base_patch16_224_miil", {}, None),
    "gap, no class token": ("vit_medium_patch16_gap_240", {}, None),
    "gap, class token": ("eva_large_patch14_196", {"img_size": 56}, None),
    "map": ("vit_base_patch16_siglip_224", {}, None),
    "map, tanh": ("vit_base_patch32_siglip_256", {}, None),
    "LayerScale": ("vit_base_patch14_dinov2", {"img_size": 56}, None),
    "LayerScale, many": ("vit_small_patch16_36x1_224", {}, None),
    "no position of the class token": ("deit3_small_patch16_224", {}, None),
    "dist token": ("deit_tiny_distilled_patch16_224", {}, None),
    "no positions": ("vit_tiny_patch16_224", {"pos_embed": "none"}, None),
    "fc_norm of a token": ("vit_tiny_patch16_224", {"fc_norm": True}, None),
    "every token": ("vit_tiny_patch16_224", {"global_pool": ""}, None),
    "not square": ("flexivit_small", {"img_size": (32, 64)}, None),
    "no classes": ("test_vit", {"num_classes": 0}, None),
    "root alone": ("vit_tiny_r_s16_p8_224", {}, None),
    "R26": ("vit_small_r26_s32_224", {}, None),
    "rope": ("vit_small_patch16_rope_224", {}, ROPE),
    "rope, positions": ("vit_small_patch16_rope_ape_224", {}, ROPE),
    "rope, learned": ("vit_small_patch16_rope_mixed_ape_224", {}, ROPE),
    "rope, registers": ("vit_small_patch16_dinov3", {}, ROPE),
    "rope, SwiGLU": ("eva02_tiny_patch14_224", {"img_size": 56}, GATED),
    "post-norm": ("vit_base_patch16_rpn_224", {}, r"post-norm \(.*\) is not supported"),
    "registers": ("vit_base_patch16_reg4_gap_256", {}, None),
    "registers, DINOv2": ("vit_small_patch14_reg4_dinov2", {"img_size": 56}, None),
    "registers, map": (
        "vit_so150m_patch16_reg4_map_256",
        {},
        "register tokens of such a network are not supported",
    ),
    "register": ("test_vit2", {}, None),
    "pre-norm": (
        "vit_base_patch16_clip_224",
        {},
        r"pre-norm \(norm_pre\) is not supported",
    ),
    "SwiGLU": (
        "vit_giant_patch14_dinov2",
        {"img_size": 56, "embed_dim": 48},
        None,
    ),
    "SwiGLU, registers": (
        "vit_giant_patch14_reg4_dinov2",
        {"img_size": 56, "embed_dim": 48},
        None,
    ),
    "relative positions": (
        "vit_relpos_small_patch16_224",
        {},
        "relative position biases .* are not supported",
    ),
    "parallel": (
        "vit_small_patch16_18x2_224",
        {},
        r"parallel branches \(attns, ffns\) are not supported",
    ),
    "norms in a branch": (
        "beit3_base_patch16_224",
        {},
        "norms in a branch .* are not supported",
    ),
    "RMSNorm": ("test_vit4", {}, r"a norm without bias \(RMSNorm\) is not supported"),
    "no final norm": (
        "vit_intern300m_patch14_448",
        {"img_size": 56},
        "without a final norm is not supported",
    ),
    "another stem": (
        "vit_small_resnet26d_224",
        {},
        r"BatchNorm \(running_mean\) is not supported",
    ),
    "q_norm": (
        "vit_tiny_patch16_224",
        {"qk_norm": True},
        "norms of queries and keys .* are not supported",
    ),
    "oblong patches": (
        "vit_tiny_patch16_224",
        {"patch_size": (16, 8)},
        r"patch \(16, 8\) is not square",
    ),
    "avgmax": (
        "vit_tiny_patch16_224",
        {"global_pool": "avgmax"},
        "global_pool='avgmax' in config.json is not one of",
    ),
    "SiLU": (
        "vit_tiny_patch16_224",
        {"act_layer": "silu"},
        "act_layer='silu' in the config.json of vit_tiny_patch16_224 is not one of",
    ),
}
SLOW = {
    "R50, 16": ("vit_base_r50_s16_224", {}, None),
    "R50, 32": ("vit_large_r50_s32_224", {}, None),
}


def create(architecture, **changes):
    network = their_timm.create_model(architecture, **{"num_classes": 7} | changes)
    torch.manual_seed(3)
    for name, value in network.named_parameters():
        # As trained, so that no branch and no token vanishes beside the others.
        if re.search(r"gamma|token|latent|pos_embed|bias|head\.weight", name):
            torch.nn.init.normal_(value, std=0.5)
    return network.eval()


@pytest.mark.parametrize(
    "case", [*NETWORKS, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_logits_are_equal_or_what_differs_is_named(tmp_path, case):
    architecture, changes, refusal = (NETWORKS | SLOW)[case]
    network = create(architecture, **SMALL | changes)
    their_timm.models.save_for_hf(network, tmp_path, safe_serialization=True)
    if refusal:
        with pytest.raises(UserError, match=refusal) as error:
            weights.open_pretrained(tmp_path)
        assert not re.search("damaged|KeyError|init.allow_mismatch", str(error.value))
        return
    found = weights.open_pretrained(tmp_path)
    model = models.create(**found.options)
    rng = np.random.default_rng(1)
    images = rng.normal(size=(2, *model.image_shape)).astype(np.float32)
    with torch.no_grad():
        theirs = network(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).numpy()
    outputs = jax.jit(model.apply)(found.params, images)
    ours = outputs["logits" if found.options["num_classes"] else "pre_logits"]
    size = np.abs(theirs).max()
    assert size > 0.1
    # What the note on stems says of kernels that are not of unit scale.
    limit = 1e-4 if found.options.get("stage_depths", ()) == () else 2e-4
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=limit * size)


FAMILIES = "vision_transformer deit vision_transformer_hybrid eva beit cait"


@pytest.mark.slow
def test_every_vision_transformer_is_read_by_its_facts_or_refused(tmp_path):
    read = []
    for name in their_timm.list_models():
        family = their_timm.model_entrypoint(name).__module__.split(".")[-1]
        if family not in FAMILIES.split() and not re.match("vit_|deit|resnetv2", name):
            continue
        whole = (
            family == "resnetv2" or "sapiens2" in name
        )  # A list with a number per block.
        small = {} if whole else {"depth": 1}
        network = their_timm.create_model(name, device="meta", **small)
        config = tmp_path / "config.json"
        save_config_for_hf(network, config)
        flat = {
            key: np.broadcast_to(np.float32(0), value.shape)
            for key, value in network.state_dict().items()
        }
        sidecars = {"config.json": json.loads(config.read_text())}
        if not timm.recognises(files.Tensors(flat, {}, {}, name)):
            assert family == "resnetv2"  # With stems of several layers.
            continue
        try:
            found = timm.read(files.Tensors(flat, {}, sidecars, name))
        except UserError as error:
            assert re.search("(is|are) not supported|is missing", str(error)), name
            continue
        read.append(name)
        if family == "resnetv2":
            assert name.endswith("_bit")
            continue
        block, options = network.blocks[0], models.create(**found.options).options
        kinds = [type(part).__name__ for part in (block, block.attn, block.mlp)]
        gated = options["activation"] == "swiglu"
        mlp = "GluMlp" if gated else "Mlp"
        assert kinds == ["Block", "Attention", mlp], name
        facts = block.attn.num_heads, block.norm1.eps, network.global_pool
        pools = {"token": "token", "gap": "avg", "map": "map", "none": ""}
        ours = options["num_heads"], options["layer_norm_eps"], pools[options["pool"]]
        assert ours == facts, name
        tanh = "Tanh" in type(block.mlp.act).__name__
        plain = "gelu_tanh" if tanh else "gelu"
        assert options["activation"] == ("swiglu" if gated else plain), name
    assert len(read) == 118
