"""Classifies images: python -m vit_jax.predict --model=CHECKPOINT IMAGE|FOLDER|- ...

CHECKPOINT is a run's workdir, an exported file, a file or folder of timm, Hugging Face or
Google, or hf://owner/name. Images are prepared as the weights say; flags replace single
parts of that. Weights with a text tower (CLIP, SigLIP, LiT) compare images with any texts:
--labels="a photo of a dog, a photo of a cat", or --labels="dog, cat" --prompts="a photo of
a {}". "-" reads paths from standard input, one a line (find
photos -name '*.png' | python -m vit_jax.predict --model=CHECKPOINT -), or one image's
content (... - < photo.jpg). Images are turned as the orientation tags of cameras say, unless a
run was trained without (data.exif), or with --no_exif. Exit codes: 0 done, 1 some images could not be read (one line
each says why), 2 bad input or no image at all.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence

from vit_jax import cli
from vit_jax.printing import printable

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
        open_classifier(flags),
        images,
        batch_size=flags.batch_size,
        topk=flags.topk,
        threshold=flags.threshold,
    )
    piped = inputs.STDIN in flags.images
    names = () if piped else (printable(name) for name, _ in images)
    width, head, code = max(map(len, ("file", *names))), True, 0
    for name, result in results:
        if isinstance(result, str):
            cli.tell(f"{name}: {result}")
            code = EXIT_DAMAGED
            continue
        if flags.json:
            entries = [dataclasses.asdict(one) for one in result]
            line = json.dumps({"file": name, "predictions": entries})
        else:
            width = max(width, len(printable(name)))  # Of a pipe they become known.
            line = _table(name, result, width, head=head)
            head = False
        print(line, flush=True)
    return code


def _table(name: str, predictions: Sequence, width: int, *, head: bool) -> str:
    """Returns the lines of one image: file, probability, class."""
    rows = [
        ("", f"{100 * x.probability:.2f} %", printable(x.name)) for x in predictions
    ]
    rows = rows or [("", "", "none")]  # None is above the threshold.
    rows[0] = printable(name), *rows[0][1:]
    if head:
        rows.insert(0, ("file", "probability", "class"))
    return "\n".join(f"{file:<{width}}  {p:>11}  {label}" for file, p, label in rows)


def open_classifier(flags: argparse.Namespace):
    """Opens the checkpoint, with the flags in place of what travelled with it."""
    from vit_jax.errors import UserError
    from vit_jax.evaluators import prediction
    from vit_jax.weights.pretrained import upright
    from vit_jax.weights.text_tower import text_tower

    pretrained, preprocess, names = cli.open_weights(flags, texts=True)
    preprocess = upright(preprocess)
    if pretrained.options["num_classes"] or "text" not in pretrained.task_params:
        if flags.prompts or flags.tokenizer:
            raise UserError(
                f"--prompts and --tokenizer are for weights with a text tower, which "
                f"{flags.model} lacks: leave them out"
            )
        return prediction.Classifier(
            pretrained, preprocess=preprocess, class_names=names, views=flags.tta
        )
    if not names:
        raise UserError(
            f"{flags.model} has a text tower and no classes: give texts to "
            'compare images with, as --labels="a photo of a dog, a photo of a cat"'
        )
    prompts = ("{}",)
    if flags.prompts:
        prompts = cli.read_texts(flags.prompts, "--prompts")
    pretrained = dataclasses.replace(
        pretrained, tokenizer=flags.tokenizer or pretrained.tokenizer
    )
    return prediction.Classifier(
        pretrained,
        preprocess=preprocess,
        class_names=names,
        tower=text_tower(pretrained),
        prompts=prompts,
        views=flags.tta,
    )


def parser() -> cli.Parser:
    """Returns the flags."""
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("images", nargs="+", metavar="IMAGE", help="file, folder, or - for a pipe")
    add("--topk", type=cli.positive, default=5, help="classes per image; default: 5")
    add(
        "--threshold",
        type=cli.fraction,
        help="list all classes at least as probable; default: 0.5 if trained on several "
        "labels an image, else the --topk best",
    )
    cli.add_tta_flag(parser)
    add("--json", action="store_true", help="JSON Lines, not a table")
    add(
        "--batch_size", type=cli.positive, default=32, help="images at once; default 32"
    )
    add(
        "--labels",
        default="",
        help="file of class names, one a line; with a text tower also texts themselves",
    )
    add("--prompts", default="", help="texts with {} for a label, or a file of them")
    add(
        "--tokenizer", default="", help="folder or hf://owner/name, if not the weights'"
    )
    cli.add_weights_flags(parser)
    return parser


if __name__ == "__main__":
    cli.run(main, parser())
