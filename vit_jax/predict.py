"""Classifies images: python -m vit_jax.predict --model=CHECKPOINT IMAGE|FOLDER|- ...

CHECKPOINT is a run's workdir, an exported file, a file or folder of timm, Hugging Face or
Google, or hf://owner/name. The preprocessing is stored with the weights; flags override
parts of it. Weights with a text tower (CLIP, SigLIP, LiT) compare images with any
texts: --labels="a photo of a dog, a photo of a cat", or --labels="dog, cat"
--prompts="a photo of a {}". "-" reads standard input: paths, one per line (find photos
-name '*.png' | python -m vit_jax.predict --model=CHECKPOINT -), or the content of one
image (... - < photo.jpg). Weights with a segmentation head (task.name="segmentation")
classify every pixel: each class's fraction of the image is printed. With --out=FOLDER,
each image's mask is written as IMAGE_mask.png, whose pixels are class numbers with a
palette, and drawn over the image as IMAGE_overlay.jpg. Weights of a regression
(task.name="regression") predict numbers with 95 % intervals. With --neighbors=FOLDER, any
weights classify by the nearest images among the labelled ones in FOLDER/CLASS/*.jpg (or
a table of paths and labels, or the name of a data set): each of the --k nearest votes
for its class, and --json names them. Images are rotated by the
orientation tags of cameras, except with --no_exif or for a run that was trained without
them (data.exif). Exit codes: 0 done, 1 some images could not be read
(one line each says why), 2 bad input or no image at all.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence

from vit_jax.command_line import cli
from vit_jax.command_line.printing import print_error, printable
from vit_jax.errors import UserError

EXIT_DAMAGED = 1


def main(flags: argparse.Namespace) -> int:
    """Classifies the images given by the flags; returns the exit code."""
    cli.refuse_overrides(flags, "predicting")
    # Imported after the flags and the images are checked: their errors come at once.
    from vit_jax.data import image_files

    images = image_files.find_some(flags.images)

    from vit_jax.distributed import compilation
    from vit_jax.evaluators import label_maps, numbers

    if uncached := compilation.enable_cache():
        print_error(uncached)
    _check_neighbors(flags)
    if flags.coverage and flags.threshold is not None:
        raise UserError(
            f"--coverage={flags.coverage:g} with --threshold={flags.threshold:g}: both "
            "choose the classes; leave one of them out"
        )
    classifier = None if flags.neighbors else open_classifier(flags)
    others = label_maps.PixelClassifier, numbers.NumberPredictor
    if flags.coverage and isinstance(classifier, others):
        raise UserError(
            f"--coverage={flags.coverage:g} is for classes of whole images, which "
            f"{flags.model} does not predict: leave it out"
        )
    if flags.neighbors:
        column, results = "votes", _votes(flags, images)
    elif isinstance(classifier, label_maps.PixelClassifier):
        column, results = "part", _masks(flags, classifier, images)
    elif isinstance(classifier, numbers.NumberPredictor):
        column, results = "value", _numbers(flags, classifier, images)
    elif flags.out:
        raise UserError(
            f"--out={flags.out} is for masks, and {flags.model} classifies whole images: "
            "leave it out"
        )
    else:
        column, results = "probability", _classes(flags, classifier, images)
    piped = image_files.STDIN in flags.images
    names = () if piped else (printable(name) for name, _ in images)
    width, head, code = max(map(len, ("file", *names))), True, 0
    for name, result in results:
        if isinstance(result, str):
            print_error(f"{name}: {result}")
            code = EXIT_DAMAGED
            continue
        rows, entry = result
        if flags.json:
            line = json.dumps({"file": name, **entry})
        else:
            width = max(width, len(printable(name)))  # A pipe's names come one by one.
            line = _table(name, rows, width, column if head else "")
            head = False
        print(line, flush=True)
    return code


def _classes(flags: argparse.Namespace, classifier, images) -> Iterator[tuple]:
    """Yields each image's name with its table rows and JSON keys, or why it failed."""
    from vit_jax.evaluators import prediction

    for name, best in prediction.predict(
        classifier,
        images,
        batch_size=flags.batch_size,
        topk=flags.topk,
        threshold=flags.threshold,
    ):
        if not isinstance(best, str):
            rows = [(one.probability, one.name) for one in best]
            best = rows, {"predictions": [dataclasses.asdict(one) for one in best]}
        yield name, best


def _numbers(flags: argparse.Namespace, predictor, images) -> Iterator[tuple]:
    """Yields the predicted numbers of images, the same as `_classes`."""
    results = predictor.predict(images, batch_size=flags.batch_size)
    for name, predicted in results:
        if isinstance(predicted, str):
            yield name, predicted
            continue
        rows = [(one.text, one.target) for one in predicted]
        entry = {"predictions": [dataclasses.asdict(one) for one in predicted]}
        yield name, (rows, entry)


def _check_neighbors(flags: argparse.Namespace) -> None:
    """Raises UserError for flags that do not go together."""
    if not flags.neighbors:
        if flags.k:
            raise UserError(
                f"--k={flags.k} is the number of neighbours: set --neighbors"
            )
        return
    for name in ("tta", "labels", "prompts", "tokenizer", "out", "coverage"):
        if value := getattr(flags, name):
            raise UserError(
                f"--{name}={value} is not used with --neighbors, where labelled images "
                "vote: leave one of them out"
            )


def _votes(flags: argparse.Namespace, images) -> Iterator[tuple]:
    """Lets labelled images vote; yields the same as `_classes`."""
    from vit_jax.command_line import progress
    from vit_jax.evaluators import feature_table, image_features, neighbours
    from vit_jax.tools.finetuning import layout

    source = layout.labelled_images(flags.neighbors)
    pretrained, preprocess, _ = cli.open_weights(flags)
    extractor = feature_table.Extractor(pretrained, preprocess.upright())
    compute = functools.partial(extractor.features, batch_size=flags.batch_size)
    unreadable = []
    with progress.bar(len(source), flags.neighbors, "images") as bar:

        def counted(images):
            for result in compute(images):
                bar.update()
                yield result

        labelled = image_features.of_split(
            source,
            counted,
            labelled=True,
            on_unreadable=lambda *one: unreadable.append(one),
        )
    yield from unreadable
    classifier = neighbours.NeighbourClassifier(
        labelled, source.class_names, flags.k or neighbours.K
    )
    for name, result in compute(images):
        if not isinstance(result, str):
            (best,) = classifier.rank(result[None], flags.topk, flags.threshold)
            rows = [(one.probability, one.name) for one in best]
            result = rows, {"predictions": [dataclasses.asdict(one) for one in best]}
        yield name, result


def _masks(flags: argparse.Namespace, classifier, images) -> Iterator[tuple]:
    """Writes masks to --out; yields the same as `_classes`."""
    from vit_jax.evaluators import label_maps

    names = classifier.class_names
    writer = label_maps.Writer(flags.out, len(names)) if flags.out else None
    for name, result in label_maps.predict(
        classifier, images, batch_size=flags.batch_size, resize=flags.resize
    ):
        if isinstance(result, str):
            yield name, result
            continue
        image, label_map = result
        parts = label_maps.shares(label_map, len(names))
        rows = sorted(zip(parts, names, strict=True), reverse=True)
        rows = [(part, each) for part, each in rows if part]
        entry = {"parts": {each: part for part, each in rows}}
        if writer:
            entry["files"] = writer.write(name, image, label_map)
        yield name, (rows[: flags.topk], entry)


def _table(name: str, rows: Sequence, width: int, column: str) -> str:
    """Returns the lines of one image: file; probability or fraction; class."""
    lines = [
        ("", part if isinstance(part, str) else f"{100 * part:.2f} %", printable(each))
        for part, each in rows
    ]
    lines = lines or [("", "", "none")]  # No class is above the threshold.
    lines[0] = printable(name), *lines[0][1:]
    if column:
        what = "target" if rows and isinstance(rows[0][0], str) else "class"
        lines.insert(0, ("file", column, what))
    return "\n".join(f"{file:<{width}}  {p:>11}  {label}" for file, p, label in lines)


def open_classifier(flags: argparse.Namespace):
    """Opens the checkpoint; flags override the values stored with it."""
    from vit_jax.evaluators import label_maps, numbers, prediction
    from vit_jax.weights import segmenter
    from vit_jax.weights.text_tower import text_tower

    pretrained, preprocess, names = cli.open_weights(flags, texts=True)
    preprocess = preprocess.upright()
    if segmenter.has_segmenter(pretrained):
        return label_maps.PixelClassifier(pretrained, preprocess, names)
    if pretrained.targets:
        of_classes = ("labels", "prompts", "tokenizer", "threshold", "out")
        numbers.check_flags(**{name: getattr(flags, name) for name in of_classes})
        return numbers.NumberPredictor(
            pretrained, preprocess=preprocess, views=flags.tta
        )
    if pretrained.options["num_classes"] or "text" not in pretrained.task_params:
        if flags.prompts or flags.tokenizer:
            raise UserError(
                f"--prompts and --tokenizer are for weights with a text tower, which "
                f"{flags.model} lacks: leave them out"
            )
        return prediction.Classifier(
            pretrained,
            preprocess=preprocess,
            class_names=names,
            views=flags.tta,
            coverage=flags.coverage,
        )
    if not names:
        raise UserError(
            f"{flags.model} has a text tower and no classes: give texts to "
            'compare images with, such as --labels="a photo of a dog, a photo of a cat"'
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
        coverage=flags.coverage,
    )


def parser() -> cli.Parser:
    """Returns the flags."""
    parser = cli.Parser(__doc__, local=("out",))
    add = parser.add_argument
    add("images", nargs="+", metavar="IMAGE", help="file, folder, or - for a pipe")
    add("--topk", type=cli.positive, default=5, help="classes per image; default: 5")
    add(
        "--threshold",
        type=cli.fraction,
        help="list all classes with at least this probability; default for models with "
        "several labels per image: the thresholds stored with them, or 0.5; else --topk "
        "decides",
    )
    add(
        "--coverage",
        type=cli.coverage,
        help="list as many classes as are needed to include the right one with this "
        "probability, for calibrated models: 0.9",
    )
    cli.add_tta_flag(parser)
    cli.add_token_merging_flag(parser)
    cli.add_patch_flags(parser)
    cli.add_max_megapixels_flag(parser)
    add("--json", action="store_true", help="print JSON Lines, not a table")
    add("--batch_size", type=cli.positive, default=32, help="batch size; default: 32")
    add(
        "--labels",
        default="",
        help="file of class names, one per line; with a text tower, also the texts",
    )
    add("--prompts", default="", help="texts with {} for a label, or a file of them")
    add("--tokenizer", default="", help="folder or hf://owner/name; default: stored")
    add(
        "--neighbors",
        default="",
        metavar="FOLDER",
        help="classify by the nearest of these labelled images: FOLDER/CLASS/*.jpg, a "
        "table, or a data set",
    )
    add(
        "--k",
        type=cli.positive,
        help="number of nearest images that vote with --neighbors; default: 20",
    )
    add("--out", default="", help="folder for masks and overlays")
    add(
        "--resize",
        choices=("cover", "none", "whole"),
        default="cover",
        help="with masks, resize an image until it covers a window of the network "
        "(default), not at all, or to one window; not with --max_tokens",
    )
    cli.add_weights_flags(parser)
    return parser


if __name__ == "__main__":
    cli.run(main, parser())
