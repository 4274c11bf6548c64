"""A checkpoint to transfer: a tiny ViT after two steps on made images."""

import pytest

from vit_jax import weights
from vit_jax.training import config as configuration
from vit_jax.training import loop

TINY = {
    "name": "tiny",
    "total_steps": 2,
    "batch_size": 8,
    "data": {
        "name": "synthetic",
        "num_classes": 3,
        "num_examples": 16,
        "image_size": (8, 8),
    },
    "model": {
        "variant": "Ti/4",
        "width": 12,
        "depth": 1,
        "num_heads": 3,
        "mlp_dim": 20,
    },
    "optim": {"learning_rate": 0.01},
}
TINY["model"] |= {"representation_layer": True, "dropout": 0.1}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Returns the workdir."""
    workdir = tmp_path_factory.mktemp("pretrained") / "tiny"
    loop.train(configuration.complete(TINY), workdir)
    return str(workdir)


@pytest.fixture(scope="session")
def pretrained(checkpoint):
    return weights.open_pretrained(checkpoint)
