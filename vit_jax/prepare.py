"""Prepares data sets as ArrayRecord: python -m vit_jax.prepare --dataset=... [flags]

  --dataset=cifar10 --data_dir=OUT
      TFDS downloads and writes the set; needs pip install -e '.[prepare]' in the clone.
  --dataset=imagenet2012 --from=TFDS_FOLDER --data_dir=OUT
      converts a TFRecord preparation without TensorFlow, with the same records in the
      same order. --from is a TFDS data_dir or the folder with dataset_info.json.
  --dataset=folder --from=DIR --data_dir=OUT [--name=flowers:1.0.0]
      turns DIR/<split>/<class>/**/ image files into a set with the features image
      (the file's bytes unchanged), label and path.
  --dataset=webdataset --from=DIR --data_dir=OUT [--caption=txt|json:FIELD]
      does the same for tar shards of WebDataset, img2dataset or timm, DIR/*.tar or
      DIR/<split>/*.tar, with the features image, path, text (from KEY.txt or a field of
      KEY.json) and label (from KEY.cls).
  --dataset=NAME --data_dir=OUT --verify
      reads a set that this command made and compares counts and checksums with its
      manifest.json.

A set is written to OUT/<name>/<version>.incomplete and renamed once it is complete and
verified. Repeat the command to resume: finished shards and finished sets are kept as
they are.
Train with --config.data.name=NAME --config.data.data_dir=OUT. Exit codes: 0 done, 2 bad
input, full disk or damaged data (one line says what), 75 SIGTERM or SIGHUP, 130 interrupted.
"""

import argparse
import pathlib
import sys

from vit_jax.command_line import cli, signals
from vit_jax.command_line.printing import print_error, print_line
from vit_jax.errors import EXIT_INTERRUPTED, EXIT_TRY_AGAIN, Stopped, UserError

_SHOWN = 20  # Number of skipped records to print; all are in the manifest.


def main(flags: argparse.Namespace) -> int:
    """Prepares, converts or verifies a data set; returns the exit code."""
    cli.refuse_overrides(flags, "preparing")
    from vit_jax.tools.preparing import build, images, request, tar_shards  # noqa: F401 (for KINDS)

    made = flags.dataset in request.KINDS
    _check(flags, made)
    data_dir = pathlib.Path(flags.data_dir).expanduser()
    signals.raise_stopped()
    try:
        if flags.verify:
            folder, content = _verify(flags, data_dir)
        elif made:
            folder, content = _make(flags, data_dir)
        elif flags.source:
            folder, content = _convert(flags, data_dir)
        else:
            folder, content = _build(flags, data_dir)
    except KeyboardInterrupt as end:
        stopped = isinstance(end, Stopped)
        print_error(
            f"{end if stopped else 'interrupted'}: repeat the command to resume"
        )
        return EXIT_TRY_AGAIN if stopped else EXIT_INTERRUPTED
    except build.Exists as there:
        _report(there.target, there.content, "nothing to do: the set exists:")
        print_line(
            f"remove {there.target} to prepare it anew, if its input has changed"
        )
        return 0
    _report(folder, content, "verified" if flags.verify else "wrote")
    return 0


def _check(flags, made):
    """Raises UserError for bad flags and bad combinations of them.

    `made` is whether the set is made from files, not prepared or converted.
    """
    if "://" in flags.data_dir:
        raise UserError(
            f"--data_dir={flags.data_dir}: data sets are prepared on a local disk; "
            "prepare there and copy the finished folder"
        )
    if flags.verify and (flags.source or made):
        raise UserError(
            "--verify checks a prepared set: give its name as --dataset=NAME, and no "
            "--from"
        )
    if made and not flags.source:
        raise UserError(
            f"--dataset={flags.dataset} needs --from=DIR, the folder of its files"
        )
    for name, fits in {
        "name": made,
        "on_error": made,
        "unchecked": made,
        "max_megapixels": made,
        "caption": flags.dataset == "webdataset",
        "splits": bool(flags.source),
        "processes": bool(flags.source),
        "imports": not flags.source and not flags.verify,
        "manual_dir": not flags.source and not flags.verify,
    }.items():
        if getattr(flags, name) and not fits:
            raise UserError(f"--{name} does not apply here; --help shows where it does")


def _verify(flags, data_dir):
    from vit_jax.command_line.progress import bar
    from vit_jax.tools.preparing import metadata

    name = metadata.DatasetName.parse(flags.dataset)
    exact = name.folder(data_dir)
    # Without a version or configuration, TFDS decides which one is meant.
    folder = exact if name.version else metadata.find_prepared(data_dir, name)
    total = sum(
        split["records"] for split in metadata.load_manifest(folder)["splits"].values()
    )
    with bar(total, "verify", "records") as shown:
        return folder, metadata.verify(folder, shown.update)


def _make(flags, data_dir):
    from vit_jax.data.config import MAX_MEGAPIXELS
    from vit_jax.tools.preparing import build, request

    root = _source(flags)
    if root in (data_dir.resolve(), *data_dir.resolve().parents):
        raise UserError(
            f"--data_dir={flags.data_dir} is inside --from={root}, and would be read "
            "as one of its splits: choose another"
        )
    asked = request.Request(
        kind=flags.dataset,
        source=root,
        name=request.new_name(flags.name, root),
        splits=tuple(flags.splits),
        shard_bytes=flags.shard_mb * 10**6,
        on_error=flags.on_error or "raise",
        decode=not flags.unchecked,
        caption=flags.caption,
        max_megapixels=flags.max_megapixels or MAX_MEGAPIXELS,
    )
    target = asked.name.folder(data_dir)
    # Check before listing the input, which may take minutes.
    build.refuse_existing(target, asked.plan())
    job = request.KINDS[flags.dataset](asked)
    return target, build.build(job, target, flags.processes or 1)


def _source(flags):
    source = pathlib.Path(flags.source).expanduser().resolve()
    if not source.is_dir():
        raise UserError(f"--from={flags.source} is not a folder")
    return source


def _convert(flags, data_dir):
    from vit_jax.tools.preparing import build, metadata, tfrecord

    source = _source(flags)
    source = metadata.find(source, metadata.DatasetName.parse(flags.dataset))
    name = metadata.read_info(source).name
    target = name.folder(data_dir)
    if target.exists() and target.resolve() == source.resolve():
        raise UserError(
            f"--data_dir={flags.data_dir} is the folder of {source}: choose another, "
            "so that the TFRecord files stay as they are"
        )
    shard_bytes = flags.shard_mb * 10**6
    plan = {"kind": "tfrecord", "source": str(source), "shard_bytes": shard_bytes}
    plan |= {"splits": flags.splits} if flags.splits else {}
    build.refuse_existing(target, plan)
    job = tfrecord.open_conversion(source, flags.splits, shard_bytes)
    content = build.build(job, target, flags.processes or 1)
    metadata.copy_default_config(source, data_dir, name)
    return target, content


def _build(flags, data_dir):
    from vit_jax.tools.preparing import metadata, tfds_builder

    return tfds_builder.build_with_tfds(
        metadata.DatasetName.parse(flags.dataset),
        data_dir.absolute(),
        imports=flags.imports,
        manual_dir=flags.manual_dir,
        shard_bytes=flags.shard_mb * 10**6,
    )


def _report(folder, content, action):
    print_line(f"{action} {folder}")
    for name, split in content["splits"].items():
        size = sum(shard["file_bytes"] for shard in split["shards"])
        print_line(
            f"  {name}: {split['records']:,} records in {len(split['shards'])} "
            f"shards, {size / 1e6:,.1f} MB"
        )
    skipped = content["skipped"]
    if skipped and action == "wrote":
        counts = content["skipped_counts"].items()
        print_error(f"skipped: {', '.join(f'{kind} {n:,}' for kind, n in counts)}")
        for note in skipped[:_SHOWN]:
            print_error(f"  {note['record']} {note['reason']}")
        if len(skipped) > _SHOWN:
            print_error(f"  ... all are in {folder}/manifest.json")
    sys.stdout.flush()


def _names(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def parser() -> cli.Parser:
    """Returns the flags."""
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    names = "TFDS name[/config][:version], folder or webdataset"
    add("--dataset", required=True, help=names)
    add("--data_dir", required=True, metavar="OUT", help="folder of prepared data sets")
    add("--from", dest="source", default="", metavar="PATH", help="input to convert")
    add("--splits", type=_names, default=[], help="splits: train,test; default: all")
    add("--name", default="", help="name[:version] of a set made from files")
    add("--verify", action="store_true", help="check a prepared set")
    add("--processes", type=cli.positive, help="processes that write; default: 1")
    add(
        "--shard_mb",
        type=cli.positive,
        default=256,
        help="size of a shard in MB; default: 256",
    )
    unusable = "damaged or incomplete records; default: raise"
    add("--on_error", choices=("raise", "skip"), help=unusable)
    captions = "file ending, or json:FIELD; default: txt if there are such files"
    add("--caption", default="", help=captions)
    add("--unchecked", action="store_true", help="do not test images by decoding them")
    cli.add_max_megapixels_flag(parser)
    add("--manual_dir", default="", help="folder of files that TFDS cannot download")
    add("--imports", type=_names, default=[], help="modules with your builders")
    return parser


if __name__ == "__main__":
    cli.run(main, parser())
