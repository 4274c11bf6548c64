"""Writes features of photographs, for search and clustering.

    python -m vit_jax.features PHOTOS --model=CHECKPOINT --out=features.parquet

PHOTOS are files, folders and "-", as for vit_jax.predict; CHECKPOINT is a run's
workdir, an exported file, a file or folder of timm, Hugging Face or Google, or
hf://owner/name. The Parquet file has one row per photograph: `name`, its path; `label`,
the folder that it is in, if all are in folders of classes; `feature`, the vector that
the classifier and k-NN use; and with --layers also `layer_2` and so on, the class token
after that layer, or the mean of the patches. The file appears when it is complete. Exit
codes: 0 done, 1 some images could not be read (one line each says why), 2 bad input or
no image at all.
"""

import argparse
import os

from vit_jax.command_line import cli
from vit_jax.command_line.printing import print_error, print_line
from vit_jax.errors import UserError

EXIT_DAMAGED = 1


def main(flags: argparse.Namespace) -> int:
    """Writes the features given by the flags; returns the exit code."""
    cli.refuse_overrides(flags, "writing features")
    if not flags.out.endswith(".parquet") or os.path.isdir(flags.out):
        raise UserError(
            f"--out={flags.out}: features are written to one Parquet file; name a file "
            "that ends in .parquet"
        )
    # Imported after the flags and the images are checked: their errors come at once.
    from vit_jax.data import image_files

    images = image_files.find_some(flags.images)

    from vit_jax.command_line import progress
    from vit_jax.distributed import compilation
    from vit_jax.evaluators import feature_table

    if uncached := compilation.enable_cache():
        print_error(uncached)
    pretrained, preprocess, _ = cli.open_weights(flags)
    extractor = feature_table.Extractor(pretrained, preprocess.upright(), flags.layers)
    labels = feature_table.labels_of(flags.images, images)
    total = len(images) if isinstance(images, list) else None
    count = damaged = 0
    with (
        feature_table.writing(flags.out, extractor.widths, labels) as add,
        progress.bar(total, "images", "images") as bar,
    ):
        for name, result in extractor.vectors(images, flags.batch_size):
            bar.update()
            if isinstance(result, str):
                print_error(f"{name}: {result}")
                damaged += 1
                continue
            add(name, result)
            count += 1
        if not count:
            raise UserError("none of the images could be read: give others")
    columns = ", ".join(f"{name} ({width})" for name, width in extractor.widths.items())
    print_line(f"{flags.out}: {count:,} photographs, {columns}")
    return EXIT_DAMAGED if damaged else 0


def parser() -> cli.Parser:
    """Returns the flags."""
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("images", nargs="+", metavar="PHOTOS", help="file, folder, or - for a pipe")
    add("--out", required=True, help="Parquet file to write")
    cli.add_layers_flag(parser, "add the pooled features of these layers")
    cli.add_patch_flags(parser)
    cli.add_max_megapixels_flag(parser)
    add("--batch_size", type=cli.positive, default=32, help="batch size; default: 32")
    cli.add_weights_flags(parser)
    return parser


if __name__ == "__main__":
    cli.run(main, parser())
