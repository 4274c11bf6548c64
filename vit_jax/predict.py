"""Classifies images: python -m vit_jax.predict --model=CHECKPOINT IMAGE|FOLDER|- ...

CHECKPOINT is a run's workdir, an exported file, a file or folder of timm, Hugging Face or
Google, or hf://owner/name. Images are prepared as the weights say; flags replace single parts of that. "-" reads paths from standard input, one a line (find
photos -name '*.png' | python -m vit_jax.predict --model=CHECKPOINT -), or one image's
content (... - < photo.jpg). Orientation tags of cameras are ignored, as in training. Exit
codes: 0 done, 1 some images could not be read (one line each says why), 2 bad input or no
image at all.
"""

import argparse

from vit_jax import cli

EXIT_DAMAGED = 1


def main(flags: argparse.Namespace) -> int:
    """Classifies what the flags name; returns the exit code."""
    cli.refuse_overrides(flags, "predicting")
    # After the flags, so that their errors come at once; JAX after the images.
    from vit_jax.data import inputs

    images = inputs.find_some(flags.images)

    from vit_jax.distributed import compilation
    from vit_jax.evaluators import prediction

    if uncached := compilation.enable_cache():
        cli.tell(uncached)
    results = prediction.predict(
        open_classifier(flags), images, batch_size=flags.batch_size, topk=flags.topk
    )
    piped = inputs.STDIN in flags.images
    table = prediction.PredictionTable(() if piped else (name for name, _ in images))
    code = 0
    for name, result in results:
        if isinstance(result, str):
            cli.tell(f"{name}: {result}")
            code = EXIT_DAMAGED
            continue
        show = prediction.to_json if flags.json else table.rows
        print(show(name, result), flush=True)
    return code


def open_classifier(flags: argparse.Namespace):
    """Opens the checkpoint, with the flags in place of what travelled with it."""
    from vit_jax.evaluators import prediction

    found, preprocess, names = cli.open_weights(flags)
    return prediction.Classifier(found, preprocess=preprocess, class_names=names)


def parser() -> cli.Parser:
    """Returns the flags."""
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("images", nargs="+", metavar="IMAGE", help="file, folder, or - for a pipe")
    add("--topk", type=cli.positive, default=5, help="classes per image; default: 5")
    add("--json", action="store_true", help="JSON Lines, not a table")
    add(
        "--batch_size", type=cli.positive, default=32, help="images at once; default 32"
    )
    add("--labels", default="", help="file of class names, one a line")
    cli.add_weights_flags(parser)
    return parser


if __name__ == "__main__":
    cli.run(main, parser())
