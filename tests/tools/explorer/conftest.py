"""Small models with random parameters, a folder of images, and a server of them."""

import explored
import pytest


@pytest.fixture(scope="session")
def first():
    """A model with a class token and 3x5 patches."""
    return explored.pretrained(1, depth=4)


@pytest.fixture(scope="session")
def second():
    """A model of another kind: no extra token, no classes, grey, 4x2 patches."""
    sizes = {"image_size": (32, 16), "width": 8, "depth": 2, "num_heads": 2}
    return explored.pretrained(2, num_classes=0, pool="gap", channels=1, **sizes)


@pytest.fixture(scope="session")
def explored_models(first, second):
    """Both models, opened."""
    return [explored.opened(first), explored.opened(second)]


@pytest.fixture(scope="session")
def photograph():
    """The file of an image."""
    return explored.picture(0)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with images, and things in and around it that are none of its images."""
    root = tmp_path_factory.mktemp("around")
    inside = root / "images"
    (inside / "deeper").mkdir(parents=True)
    (inside / "one.png").write_bytes(explored.picture(1))
    (inside / "deeper" / "zwei & drei.jpg").write_bytes(explored.picture(2, "JPEG"))
    (inside / "torn.png").write_bytes(explored.picture(3)[:500])
    (inside / "notes.txt").write_text("no image")
    (root / "secret.png").write_bytes(explored.picture(4))
    (root / "images_too").mkdir()
    (root / "images_too" / "secret.png").write_bytes(explored.picture(4))
    (inside / "out.png").symlink_to(root / "secret.png")
    (inside / "elsewhere").symlink_to(root / "images_too")
    (inside / "again.png").symlink_to(inside / "one.png")
    (inside / "round.png").symlink_to(inside / "round.png")
    return inside


@pytest.fixture(scope="session")
def served(explored_models, folder):
    """A server of both models and the folder, on a free port."""
    with explored.served(explored_models, folder) as running:
        yield running
