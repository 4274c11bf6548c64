"""Features of any layer are those of timm's `forward_intermediates`.

Needs the extra `parity`.
"""

import re

import jax
import numpy as np
import pytest
from import_timm import import_timm, torch

from vit_jax import models, weights

pytestmark = pytest.mark.parity
their_timm = import_timm()

VIT = {"embed_dim": 48, "depth": 4, "num_heads": 3}
SWIN = {"img_size": (56, 84), "depths": (1, 2, 1, 1), "embed_dim": 24}
SWIN |= {"num_heads": (1, 2, 4, 8), "window_size": 7}
# timm's architecture and changes of it; the size that features are compared at.
NETWORKS = {
    "class token": ("vit_tiny_patch16_224", VIT | {"img_size": (48, 80)}, None),
    "registers": ("vit_small_patch14_reg4_dinov2", VIT | {"img_size": 56}, None),
    "another size": (
        "vit_tiny_patch16_224",
        VIT | {"img_size": 64, "dynamic_img_size": True},
        (48, 80),
    ),
    "distilled": ("deit_tiny_distilled_patch16_224", VIT | {"img_size": 64}, None),
    "fc_norm": ("vit_tiny_patch16_224", VIT | {"global_pool": "avg"}, None),
    "rope": ("vit_small_patch16_rope_224", VIT | {"img_size": (64, 32)}, None),
    "mixed rope": ("vit_small_patch16_rope_mixed_224", VIT | {"img_size": 64}, None),
    "rope, SwiGLU": ("eva02_tiny_patch14_224", VIT | {"img_size": 56}, None),
    "hybrid": ("vit_tiny_r_s16_p8_224", VIT | {"img_size": 64}, None),
    "Swin": ("swin_tiny_patch4_window7_224", SWIN, None),
    "Swin V2": ("swinv2_tiny_window8_256", SWIN | {"window_size": 8}, None),
    "ResNet": (
        "resnetv2_50x1_bit",
        {"layers": (1, 2, 1, 1), "width_factor": 1},
        (48, 80),
    ),
    "Mixer": (
        "mixer_s32_224",
        {"img_size": (64, 96), "mlp_ratio": (0.05, 0.3)},
        None,
    ),
}


def create(architecture, **changes):
    torch.manual_seed(3)
    make, changes = their_timm.create_model, {"num_classes": 7} | changes
    if "layers" in changes:  # timm's functions of these names state their own.
        make = their_timm.models.resnetv2._create_resnetv2_bit
    network = make(architecture, **changes)
    for name, value in network.named_parameters():
        # As trained, so that no branch and no token vanishes beside the others.
        if re.search(r"token|pos_embed|bias|norm.*weight", name):
            torch.nn.init.normal_(value, std=0.3, mean="weight" in name)
        if "resnet" in architecture and value.ndim == 4:
            value.data *= 30  # So that constants beside the variance do not matter.
    return network.eval()


@pytest.mark.parametrize("name", NETWORKS)
def test_every_layer_is_timms_before_and_behind_the_final_norm(name, tmp_path):
    architecture, changes, size = NETWORKS[name]
    network = create(architecture, **changes)
    their_timm.models.save_for_hf(network, tmp_path, safe_serialization=True)
    found = weights.open_pretrained(tmp_path)
    source = models.create(**found.options)
    model = source.at_size(size or source.image_shape[:2])
    params = model.resize(weights.load(tmp_path, source).params, source)
    images = np.random.default_rng(1).normal(size=(2, *model.image_shape))
    images = images.astype(np.float32)
    layers = range(-model.num_layers, 0)
    prefix = model.num_prefix_tokens

    @jax.jit
    def take(params, images):
        # A trace gives both kinds of tokens; test_layer_features.py takes them apart.
        how = {"tokens": "all" if prefix else "patches"}
        return [
            model.layer_features(params, images, layers, norm=norm, **how)
            for norm in (False, True)
        ]

    found = take(params, images)
    for norm in (True, False):
        with torch.no_grad():
            wanted = network.forward_intermediates(
                torch.from_numpy(images.transpose(0, 3, 1, 2).copy()),
                norm=norm,
                intermediates_only=True,
                **{"return_prefix_tokens": True} if prefix else {},
            )
        assert len(wanted) == model.num_layers
        if prefix:
            for ours, (_, theirs) in zip(found[norm], wanted, strict=True):
                ours = ours[:, :prefix]
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
            wanted = [theirs for theirs, _ in wanted]
        # Rounding alone: timm's own features are 2e-6 of the largest from those in float64,
        # and after the 50 convolutions of the ResNet 9e-6.
        tolerance = 5e-5 if name == "ResNet" else 1e-5
        for ours, theirs in zip(found[norm], wanted, strict=True):
            theirs = theirs.permute(0, 2, 3, 1).numpy()
            ours = ours[:, prefix:].reshape(theirs.shape) if prefix else ours
            # Of the largest feature: those of a ResNet or a Mixer with random parameters
            # are large.
            scale = np.abs(theirs).max()
            np.testing.assert_allclose(
                ours / scale, theirs / scale, rtol=0, atol=tolerance
            )
