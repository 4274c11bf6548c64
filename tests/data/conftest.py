"""Configs and images for the tests of the data package."""

import image_folder
import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from vit_jax.training import config


@pytest.fixture
def data_config():
    """Makes `config.data` from the keys that a test is about."""

    def make(**data):
        data = {"name": "synthetic", "num_classes": 3, "image_size": (13, 17), **data}
        raw = {"batch_size": 8, "optim": {"learning_rate": 0.1}, "data": data}
        return config.complete(raw).data

    return make


@pytest.fixture
def photograph():
    """A smooth 37x53 RGB image, so that lossy formats come close."""
    return image_folder.smooth_image()


@pytest.fixture
def folder(tmp_path):
    """An image folder of 3 classes, 19 training and 4 validation images."""
    image_folder.write(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def natural():
    """Two photographs that come with scikit-learn, 167x223 and 150x211 RGB."""
    sizes = (223, 167), (211, 150)
    return [
        np.array(Image.fromarray(image).resize(size, Image.Resampling.BOX))
        for image, size in zip(load_sample_images().images, sizes, strict=True)
    ]
