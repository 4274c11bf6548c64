"""Draws 50 pictures of a red square and a blue disc, and their masks, into discs."""

import pathlib

import numpy as np
from PIL import Image

rng, (y, x) = np.random.default_rng(0), np.mgrid[:96, :128]
for i in range(50):
    row, column, size = rng.integers(20, 76), rng.integers(20, 108), rng.integers(9, 20)
    mask = np.zeros((96, 128), np.uint8)
    mask[(abs(y - row) < size) & (abs(x - column) < size)] = 1
    mask[(y - 90) ** 2 + (x - column / 2) ** 2 < 900] = 2
    image = np.array([(20, 60, 30), (200, 40, 40), (60, 90, 220)])[mask]
    image = (image + rng.integers(0, 30, image.shape)).astype(np.uint8)
    for folder, pixels in (("images", image), ("masks", mask)):
        path = pathlib.Path(
            "discs", folder, "val" if i % 5 == 0 else "train", f"{i}.png"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
pathlib.Path("discs", "classes.txt").write_text("ground\nsquare\ndisc\n")
