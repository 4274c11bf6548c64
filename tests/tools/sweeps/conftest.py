"""A checkpoint to transfer: a tiny ViT after two steps on made images."""

import pytest
from helpers import tiny_config, train

from vit_jax import weights


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Returns the workdir."""
    workdir = tmp_path_factory.mktemp("pretrained") / "tiny"
    data = {"num_classes": 3, "num_examples": 16, "image_size": (8, 8)}
    model = {"representation_layer": True, "dropout": 0.1}
    train(tiny_config(total_steps=2, data=data, model=model, evals={}), workdir)
    return str(workdir)


@pytest.fixture(scope="session")
def pretrained(checkpoint):
    return weights.open_pretrained(checkpoint)
