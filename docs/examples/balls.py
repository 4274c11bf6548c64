"""Draws 300 pictures of a ball, and a table of its diameters, some missing, into balls."""

import csv
import pathlib

import numpy as np
from PIL import Image

rng, (y, x) = np.random.default_rng(0), np.mgrid[:96, :96]
pathlib.Path("balls").mkdir(exist_ok=True)
with open("balls/balls.csv", "w", newline="") as file:
    table = csv.writer(file)
    table.writerow(["path", "diameter"])
    for i in range(300):
        row, column = rng.integers(30, 66, 2)
        diameter = rng.uniform(10, 50)
        image = np.full((96, 96, 3), rng.integers(20, 90, 3))
        image[np.hypot(y - row, x - column) < diameter / 2] = rng.integers(120, 250, 3)
        noisy = image + rng.normal(0, 12, image.shape)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(f"balls/{i}.png")
        table.writerow([f"{i}.png", f"{diameter:.1f}" if i % 20 else ""])
