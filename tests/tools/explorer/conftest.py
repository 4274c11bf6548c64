"""Small models with random parameters, a folder of images, and a server of them."""

import threading

import pytest
from explored import picture, pretrained

from vit_jax.tools.explorer import images, server, session


@pytest.fixture(scope="session")
def first():
    """A model with a class token and 3x5 patches."""
    return pretrained(
        1,
        variant="Ti/8",
        num_classes=5,
        image_size=(24, 40),
        width=12,
        depth=4,
        num_heads=3,
        mlp_dim=17,
    )


@pytest.fixture(scope="session")
def second():
    """A model of another kind: no extra token, no classes, grey, 4x2 patches."""
    return pretrained(
        2,
        variant="Ti/8",
        num_classes=0,
        pool="gap",
        image_size=(32, 16),
        channels=1,
        width=8,
        depth=2,
        num_heads=2,
        mlp_dim=11,
    )


@pytest.fixture(scope="session")
def explored_models(first, second):
    """Both models, opened and compiled."""
    opened = [
        session.ExploredModel(each, preprocess=each.preprocess)
        for each in (first, second)
    ]
    for each in opened:
        each.warm_up()
    return opened


@pytest.fixture(scope="session")
def photograph():
    """The file of an image."""
    return picture(0)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with images, and things in and around it that are none of its images."""
    root = tmp_path_factory.mktemp("around")
    inside = root / "images"
    (inside / "deeper").mkdir(parents=True)
    (inside / "one.png").write_bytes(picture(1))
    (inside / "deeper" / "zwei & drei.jpg").write_bytes(picture(2, form="JPEG"))
    (inside / "torn.png").write_bytes(picture(3)[:500])
    (inside / "notes.txt").write_text("no image")
    (root / "secret.png").write_bytes(picture(4))
    (root / "images_too").mkdir()
    (root / "images_too" / "secret.png").write_bytes(picture(4))
    (inside / "out.png").symlink_to(root / "secret.png")
    (inside / "elsewhere").symlink_to(root / "images_too")
    (inside / "again.png").symlink_to(inside / "one.png")
    (inside / "round.png").symlink_to(inside / "round.png")
    return inside


@pytest.fixture(scope="session")
def served(explored_models, folder):
    """A server of both models and the folder, on a free port."""
    held = session.Session(explored_models, images.Folder(str(folder)))
    with server.Server(held, "127.0.0.1", 0) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.05,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()
