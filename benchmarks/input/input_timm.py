"""The contender of `input.py` that is PyTorch's DataLoader with timm's transforms."""

import sys

import input_serve
import numpy as np
import torch
from PIL import Image

from benchmarks import timm_import

timm_import.import_timm()
from timm.data import ImageDataset, create_transform

SIZE = 224


def batches(folder, batch, workers):
    """Iterates over shuffled batches for ever, in uint8."""
    transform = create_transform(
        SIZE,
        is_training=True,
        scale=(0.05, 1.0),
        interpolation="bilinear",
        color_jitter=0,
        use_prefetcher=True,  # Leaves scaling to the device, as ours does.
    )
    loader = torch.utils.data.DataLoader(
        ImageDataset(f"{folder}/train", transform=transform),
        batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    while True:
        yield from loader


def crops(pairs):
    """Returns crops of files as torchvision's `resized_crop` of a Pillow image."""
    images = []
    for path, (top, left, height, width) in pairs:
        part = Image.open(path).crop((left, top, left + width, top + height))
        images.append(np.array(part.resize((SIZE, SIZE), Image.Resampling.BILINEAR)))
    return np.stack(images)


def main():
    """Serves batches of JPEG files."""
    torch.set_num_threads(1)
    folder, batch, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    input_serve.serve(batches(folder, batch, workers), crops)


if __name__ == "__main__":
    main()
