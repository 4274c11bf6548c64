"""Shows what the model will see: python -m vit_jax.show_batch --config=configs/digits.py

Writes a PNG with the first images of a run as they reach the model: cropped, augmented
and mixed as `data.train_transform` says, and the normalisation undone. Below each its
class, or the shares of several after mixup. Where the run's batch is larger than the
sheet, the first image is mixed with the last of the sheet instead of the last of the
batch. Exit codes: 0 done, 2 bad input (one line says what).
"""

import argparse
import dataclasses
import os
import pathlib

from vit_jax import cli, files
from vit_jax.errors import UserError


def main(flags: argparse.Namespace) -> None:
    """Writes the sheet that the flags describe and says where."""
    from vit_jax.training import config as configuration

    # Without what a run needs beside: weights to start from, for example.
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

    count = min(flags.rows * flags.columns, config.batch_size)
    contact_sheet.check(count, flags.columns, config.data.image_size)
    source = open_source(config.data, config.data.split)
    images, labels = see(source, config, count)
    captions = contact_sheet.captions(labels, source.class_names)
    sheet = contact_sheet.draw(images, captions, flags.columns)
    try:
        sheet.save(out)
    except OSError as error:
        raise UserError(f"--out={out} cannot be written ({error.strerror})") from error
    cli.say(
        f"{out}: {len(images)} images of {config.data.name}, {sheet.width}x"
        f"{sheet.height} pixels; data.train_transform={config.data.train_transform!r}"
    )


def see(source, config, count: int) -> tuple:
    """Prepares the first images of a run as the training step does.

    Args:
      source: training split.
      config: complete config.
      count: of images, at most.

    Returns:
      Images (B, Y, X, C), uint8, and labels (B, classes), B at most a batch of the run.
    """
    import jax
    import numpy as np

    from vit_jax.config.lengths import RunLength
    from vit_jax.data import pipeline
    from vit_jax.training import train_state

    # Processes would not pay for one batch.
    data = dataclasses.replace(config.data, num_workers=0)
    examples = len(source)
    run = RunLength(config.num_steps(examples), examples / config.batch_size)
    task = config.task.build(config.build_model(), data, run)
    with pipeline.train_batches(
        source,
        data,
        batch_size=min(count, config.batch_size),
        seed=config.seed,
        start=0,
        stop=1,
    ) as batches:
        (batch,) = batches
    key, _ = jax.random.split(train_state.run_key(config.seed))  # As the step does.
    prepared = jax.jit(task.prepare)(batch, key)
    images, labels = prepared["image"], prepared["label"]
    mean, std = (np.asarray(values, np.float32) for values in (data.mean, data.std))
    pixels = (np.asarray(images) * std + mean) * 255
    return pixels.round().clip(0, 255).astype(np.uint8), np.asarray(labels)


def parser() -> cli.Parser:
    """Returns the flags."""
    parser = cli.Parser(__doc__, config="TrainConfig")
    add = parser.add_argument
    add("--config", required=True, help="file, or file:argument")
    add("--out", default="", help="PNG file; default: batch_NAME.png")
    add("--rows", type=cli.positive, default=4, help="default 4")
    add("--columns", type=cli.positive, default=8, help="default 8")
    return parser


if __name__ == "__main__":
    # Little is computed: leave the accelerators to others.
    os.environ["JAX_PLATFORMS"] = "cpu"
    cli.run(main, parser())
