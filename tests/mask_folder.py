"""Made images with exact masks: coloured shapes on noise, for tests of what reads them."""

import numpy as np
from PIL import Image

NAMES = ("ground", "square", "disc")
SIZE = (40, 56)  # Height and width.


def pair(rng):
    """Returns an image with a red square and a blue disc, and its mask."""
    y, x = np.mgrid[: SIZE[0], : SIZE[1]]
    mask = np.zeros(SIZE, np.uint8)
    row, column = rng.integers(12, 28), rng.integers(12, 44)
    mask[np.maximum(abs(y - row), abs(x - column)) < 9] = 1
    row, column = rng.integers(12, 28), rng.integers(12, 44)
    mask[(y - row) ** 2 + (x - column) ** 2 < 81] = 2
    colors = np.array([(40, 60, 50), (190, 50, 60), (50, 70, 200)])
    image = colors[mask] + rng.integers(0, 40, (*SIZE, 3))
    return image.astype(np.uint8), mask


def write(root, count, images="images", masks="masks", first=0, border=True):
    """Writes PNG files; a border of 255 counts for no class."""
    rng = np.random.default_rng(first)
    for i in range(first, first + count):
        image, mask = pair(rng)
        if border:
            mask[0] = 255
        for folder, pixels in ((images, image), (masks, mask)):
            path = root / folder / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
