"""A small image folder for tests of what reads one."""

import io

import numpy as np
from PIL import Image

COUNTS = {"train": (9, 6, 4), "val": (2, 0, 2)}  # Images per class.


def smooth_image():
    """Returns a smooth 37x53 RGB image, so that lossy formats come close."""
    noise = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return np.array(Image.fromarray(noise).resize((53, 37), Image.Resampling.BICUBIC))


def write(root):
    """Writes PNG files of 3 classes: 19 training and 4 validation images."""
    rng, pixels = np.random.default_rng(1), smooth_image()
    for split, counts in COUNTS.items():
        for name, count in zip(("ant", "bee", "cat"), counts, strict=True):
            for i in range(count):
                path = root / split / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                stream = io.BytesIO()
                rolled = np.roll(pixels, rng.integers(50), axis=1)
                Image.fromarray(rolled).save(stream, "PNG")
                path.write_bytes(stream.getvalue())
