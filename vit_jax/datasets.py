"""Lists the data sets of the paper: python -m vit_jax.datasets [NAME ...]

One line each: whether it is prepared in --data_dir (its version; "tfrecord" is prepared
but must be converted; "-" is not a TFDS set), the number of training images and of
classes, and how to get it. With NAMEs, the splits and other config keys follow. Data
sets outside this list can be used too: any TFDS set, image folders, Parquet files and
your own sources, see `SOURCES` in vit_jax/data/sources/__init__.py. Exit codes: 0 done,
2 bad input (one line says what).
"""

import argparse
import json

from vit_jax.command_line import cli
from vit_jax.command_line.printing import print_line
from vit_jax.errors import UserError

HEADING = ("name", "here", "images", "classes", "how to get it")


def main(flags: argparse.Namespace) -> int:
    """Prints the data sets given by the flags; returns the exit code."""
    cli.refuse_overrides(flags, "listing data sets")
    from vit_jax.data import catalogue
    from vit_jax.data.sources import SOURCES

    for name in flags.names:
        if name not in catalogue.ENTRIES:
            raise UserError(
                f"{name!r} is not a data set of the paper: "
                f"{', '.join(catalogue.ENTRIES)}; data.name also takes "
                f"{', '.join(sorted(SOURCES))} and any set of TFDS"
            )
    names = flags.names or catalogue.ENTRIES
    rows = [_row(catalogue.ENTRIES[name], flags.data_dir) for name in names]
    if flags.json:
        for row in rows:
            print(json.dumps(row))
    else:
        _show(rows, detailed=bool(flags.names))
    return 0


def _row(entry, data_dir):
    """Returns the known facts about a data set as plain values."""
    import tensorflow_datasets as tfds

    where = data_dir or str(tfds.core.constants.DATA_DIR)
    return {
        "name": entry.name,
        "tfds": entry.tfds,
        "classes": entry.num_classes,
        "images": entry.images,
        "splits": dict(entry.splits),
        "keys": dict(entry.keys),
        "prepared": _prepared(entry, data_dir),
        "how": entry.how(where),
    }


def _prepared(entry, data_dir):
    """Returns version, format, size and folder of a set; None if it is not prepared."""
    from vit_jax.data.sources import tfds as tfds_source

    builder = None
    for name in filter(None, (entry.tfds, entry.newer)):
        builder = builder or tfds_source.find_prepared(name, data_dir)
    if builder is None:
        return None
    readable = tfds_source.is_readable(builder)
    return {
        "version": str(builder.info.version),
        "format": "array_record" if readable else builder.info.file_format.value,
        "images": {k: info.num_examples for k, info in builder.info.splits.items()},
        "bytes": int(builder.info.dataset_size),
        "data_dir": str(builder.data_dir),
    }


def _show(rows, *, detailed):
    """Prints a table; with details, splits and keys below each line."""
    table = [HEADING] + [_cells(row) for row in rows]
    widths = [max(len(cells[i]) for cells in table) for i in range(4)]
    for i, (name, here, images, classes, how) in enumerate(table):
        line = (
            f"{name:<{widths[0]}}  {here:<{widths[1]}}  {images:>{widths[2]}}  "
            f"{classes:>{widths[3]}}  {how}"
        )
        print_line(line)
        if i and detailed:
            _show_details(rows[i - 1])


def _cells(row):
    prepared = row["prepared"]
    here = "no" if row["tfds"] else "-"
    if prepared:
        readable = prepared["format"] == "array_record"
        here = prepared["version"] if readable else prepared["format"]
    images, classes = (f"{row[k]:,}" if row[k] else "-" for k in ("images", "classes"))
    return row["name"], here, images, classes, row["how"]


def _show_details(row):
    for role, split in row["splits"].items():
        # VTAB's splits are chosen by their role, which the source resolves.
        print(f"  {role}: {split}", flush=True)
    for key, value in row["keys"].items():
        print_line(f"  needs --config.data.{key}={value}")
    prepared = row["prepared"]
    if prepared:
        counts = ", ".join(f"{k} {n:,}" for k, n in prepared["images"].items())
        size = f"{prepared['bytes'] / 2**30:.2f} GiB"
        print_line(f"  in {prepared['data_dir']}: {counts}; {size}")


def parser() -> cli.Parser:
    """Returns the flags."""
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="data sets; default: all")
    add("--data_dir", default="", help="folder of prepared data sets; default: TFDS's")
    add("--json", action="store_true", help="print one JSON object per line")
    return parser


if __name__ == "__main__":
    cli.run(main, parser())
