"""Shows training images: python -m vit_jax.show_batch --config=configs/digits.py

Writes a PNG with the first images of a run as they reach the model: cropped, augmented
and mixed by `data.train_transform`, with the normalisation undone. Below each image is
its class, or the weights of several classes after mixup, unless the task learns without
labels. Masks are drawn over their images in colours, with each class's fraction of the
pixels below. All crops of an image are shown if there are several. If the run's batch
is larger than the sheet, the first image is mixed with the last one of the sheet
instead of the last one of the batch. Exit codes: 0 done, 2 bad input (one line says
what).
"""

import argparse
import dataclasses
import os
import pathlib

from vit_jax.command_line import cli, files
from vit_jax.command_line.printing import print_line
from vit_jax.errors import UserError


def main(flags: argparse.Namespace) -> None:
    """Writes the sheet given by the flags and prints its path."""
    from vit_jax.training import config as configuration

    # Loads the config only, not what a run needs besides, such as initial weights.
    config = configuration.load(flags.config, flags.overrides)
    cli.tell_unread(config)
    out = pathlib.Path(flags.out or f"batch_{config.name}.png")
    if out.suffix.lower() != ".png":
        raise UserError(f"--out={flags.out} does not end in .png: name a PNG file")
    if not out.parent.is_dir():
        raise UserError(f"--out={out}: there is no folder {out.parent}; make it first")

    files.check("--out", out)

    from vit_jax.analysis import contact_sheet
    from vit_jax.data.sources.open import open_source

    room = flags.rows * flags.columns
    count = min(room, config.batch_size)
    contact_sheet.check(count, flags.columns, config.data.image_size)
    source = open_source(config.data, config.data.split)
    images, labels, views = see(source, config, count)
    classes = [[]] * len(images)
    if labels is not None:
        classes = contact_sheet.captions(labels, source.class_names)
    captions = [
        classes[i] + ([view] if len(views) > 1 else [])
        for i in range(len(images) // len(views))
        for view in views
    ]
    images, captions = images[:room], captions[:room]
    contact_sheet.check(len(images), flags.columns, images.shape[1:3])
    sheet = contact_sheet.draw(images, captions, flags.columns)
    with files.writing_out(out):
        files.replace_image(out, sheet, "PNG")
    print_line(
        f"{out}: {len(images)} images of {config.data.name}, {sheet.width}x"
        f"{sheet.height} pixels; data.train_transform={config.data.train_transform!r}"
    )


def see(source, config, count: int) -> tuple:
    """Prepares the first images of a run in the same way as the training step.

    Args:
      source: data source of the training split.
      config: complete config.
      count: maximum number of images.

    Returns:
      Images (B * V, Y, X, C), uint8, with the V views of each example next to each
      other, smaller ones with a white border, and masks drawn over them; labels (B,
      classes), which for masks are fractions of the pixels, or None for a task without
      labels; and the names of the views. B is at most the batch size of the run.
    """
    import jax
    import numpy as np

    from vit_jax.config.lengths import RunLength
    from vit_jax.data import display, masks, normalization, pipeline
    from vit_jax.data.fields.image import Image
    from vit_jax.data.sources.base import inspected
    from vit_jax.data.transforms import parse
    from vit_jax.training import train_state

    # Starting worker processes does not pay off for one batch.
    data = normalization.resolve(config.data, source, config.seed)
    data = dataclasses.replace(data, num_workers=0)
    examples = len(source)
    run = RunLength(config.num_steps(examples), examples / config.batch_size)
    task = config.task.build(config.build_model(), data, run)
    parse.check_batch(task.batch_spec(config.batch_size), data)
    Image(data).inspect(source, inspected(source))
    packs = data.transforms.packs
    with pipeline.train_batches(
        source,
        data,
        batch_size=max(1, min(count, config.batch_size) // packs) * packs,
        seed=config.seed,
        start=0,
        stop=1,
    ) as batches:
        (batch,) = batches
    key, _ = jax.random.split(train_state.run_key(config.seed))  # As the step does.
    prepared = jax.jit(task.prepare)(batch, key)
    views, names = _views(prepared, data)
    sides = np.max([pixels.shape[2:4] for pixels in views], axis=0).tolist()
    images = np.concatenate([_pad(pixels, *sides) for pixels in views], axis=1)
    images = images.reshape(-1, *images.shape[2:])
    images = np.stack([display.to_display(image) for image in images])
    labels = prepared.get("label")
    if "label_map" in prepared:
        colors = masks.palette(data.num_classes, source.class_colors)
        images, labels = _with_masks(images, prepared["label_map"], colors)
    labels = None if labels is None else np.asarray(labels)
    return images, labels, names


def _views(prepared: dict, data) -> tuple[list, list[str]]:
    """Returns the views of a batch, each (B, V, Y, X, C) uint8, and their names."""
    import numpy as np

    from vit_jax.models import patches
    from vit_jax.models.patches import PatchSequences

    mean, std = (np.asarray(values, np.float32) for values in (data.mean, data.std))
    views, names = [], []
    for name, images in prepared.items():
        several = isinstance(images, PatchSequences)
        if not several and images.ndim < 4:
            continue
        each = patches.to_images(images) if several else np.asarray(images)
        each = [((one * std + mean) * 255).round().clip(0, 255) for one in each]
        if several:
            sides = np.max([one.shape[:2] for one in each], axis=0).tolist()
            each = [_pad(one[None, None], *sides)[0] for one in each]
        pixels = np.stack(each).astype(np.uint8)
        pixels = pixels.reshape(len(pixels), -1, *pixels.shape[-3:])
        views.append(pixels)
        names += [f"{name} {number + 1}" for number in range(pixels.shape[1])]
    return views, names


def _with_masks(images, maps, colors):
    """Returns images with masks drawn over them, and the fractions of the classes."""
    import numpy as np

    from vit_jax.evaluators import label_maps

    maps = np.asarray(maps)
    pairs = zip(images, maps, strict=True)
    images = np.stack([label_maps.overlay(*pair, colors) for pair in pairs])
    return images, np.stack([label_maps.shares(one, len(colors)) for one in maps])


def _pad(images, height: int, width: int):
    """Adds a white border: (B, V, y, x, C) to (B, V, height, width, C)."""
    import numpy as np

    room = height - images.shape[2], width - images.shape[3]
    border = [(n // 2, n - n // 2) for n in room]
    return np.pad(images, [(0, 0)] * 2 + border + [(0, 0)], constant_values=255)


def parser() -> cli.Parser:
    """Returns the flags."""
    parser = cli.Parser(__doc__, config="TrainConfig", local=("out",))
    add = parser.add_argument
    add("--config", required=True, help="recipe or file, :argument")
    add("--out", default="", help="PNG file; default: batch_NAME.png")
    add("--rows", type=cli.positive, default=4, help="rows; default: 4")
    add("--columns", type=cli.positive, default=8, help="columns; default: 8")
    return parser


if __name__ == "__main__":
    # The CPU is enough: leave the accelerators to other processes.
    os.environ["JAX_PLATFORMS"] = "cpu"
    cli.run(main, parser())
