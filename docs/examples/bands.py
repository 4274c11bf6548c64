"""Draws 250 images of 13 bands into bands: band 7 tells two classes apart."""

import pathlib

import numpy as np

rng = np.random.default_rng(0)
for split, count in {"train": 100, "val": 25}.items():
    for name, level in {"dry": 2_500, "wet": 5_500}.items():
        folder = pathlib.Path("bands", split, name)
        folder.mkdir(parents=True)
        for i in range(count):
            image = rng.normal(4_000, 1_000, (20, 20, 13))
            image[..., 7] += level - 4_000
            np.save(folder / f"{i}.npy", image.clip(0).astype(np.uint16))
