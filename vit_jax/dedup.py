"""Finds near-duplicates: python -m vit_jax.dedup --pretrain=SPEC --against=SPEC --out=F

Lists the records of a pretraining set that show the same picture as a record of the
test sets, even if it was resized, recompressed, mirrored, turned grey or cropped by
10 %. arXiv:2010.11929, section 4.1, removes such records. SPEC is NAME[@DIR][#SPLIT]:

  python -m vit_jax.dedup --pretrain=imagenet21k#full \\
      --against=cifar10#test,folder@/data/flowers#val --out=duplicates.txt
  python -m vit_jax.train ... --config.data.exclude=duplicates.txt

F.pairs.csv, beside the list, has the pairs. Repeat the command to resume a scan, whose
state is in F.scan. Needs the extra `dedup`. Exit codes: 0 done, 1 done, but some images
could not be read (one line each says why), 2 bad input.
"""

import argparse
import contextlib
import dataclasses
import pathlib
import shutil
import time

from vit_jax.command_line import cli
from vit_jax.command_line.printing import print_error, print_line
from vit_jax.errors import UserError

EXIT_DAMAGED = 1

_DEFAULT_SPLITS = "train", "test"
_LOG_SECONDS = 30  # Between two lines, where the output is not a terminal.


def main(flags: argparse.Namespace) -> int:
    """Scans the data sets given by the flags; returns the exit code."""
    cli.refuse_overrides(flags, "de-duplicating")
    out = pathlib.Path(flags.out).expanduser()
    pairs = out.with_name(f"{out.name}.pairs.csv")
    # The list is written last: without it the scan resumes.
    if out.exists():
        raise UserError(f"{out} exists: remove it, or choose another --out")

    from vit_jax.data.config import MAX_MEGAPIXELS
    from vit_jax.data.sources.open import parse_spec, parse_specs
    from vit_jax.tools.near_duplicates import scan

    pretrain = parse_spec(flags.pretrain, _DEFAULT_SPLITS[0])
    against = parse_specs(flags.against, _DEFAULT_SPLITS[1])
    keys = ("image_key", "image_dir", "image_suffix")
    given = {key: getattr(flags, key) for key in keys}
    pretrain, *against = (
        dataclasses.replace(one, **given) for one in (pretrain, *against)
    )
    for one in against:
        if one == pretrain or against.count(one) > 1:
            raise UserError(f"--against={one} is named twice: name each split once")

    folder = out.with_name(f"{out.name}.scan")
    with contextlib.closing(_Bar()) as bar:
        result = scan.scan(
            pretrain,
            against,
            folder,
            correlation=flags.correlation,
            threads=flags.threads,
            max_megapixels=flags.max_megapixels or MAX_MEGAPIXELS,
            progress=bar.show,
        )
    if flags.sheet:
        scan.write_sheet(pathlib.Path(flags.sheet), result.pairs, pretrain, against)
    scan.write_pairs(pairs, result.pairs)
    ids = scan.write_list(out, result, flags.correlation)
    shutil.rmtree(folder)

    for name, reason in result.damaged:
        print_error(f"{name}: {reason}")
    print_line(
        f"{out}: {len(ids)} of {result.sizes[str(pretrain)]} records of {pretrain} "
        f"are near-duplicates, in {len(result.pairs)} pairs ({pairs.name}); "
        f"not compared: {len(result.damaged)} damaged, {result.flat} flat"
    )
    return EXIT_DAMAGED if result.damaged else 0


class _Bar:
    """Shows progress: a bar on a terminal, occasional lines in a log."""

    def __init__(self):
        self._bar, self._name, self._logged = None, None, 0.0

    def close(self) -> None:
        """Ends the line of the bar."""
        if self._bar is not None:
            self._bar.close()

    def show(self, name: str, before: int, now: int, total: int) -> None:
        """Shows that `before + now` of `total` records are done."""
        from vit_jax.command_line.progress import bar

        if name != self._name:
            self.close()
            self._name, self._logged = name, time.monotonic()
            self._bar = bar(total, name, "images", initial=before)
        self._bar.update(before + now - self._bar.n)
        late = time.monotonic() - self._logged > _LOG_SECONDS
        if self._bar.disable and (now == 0 or before + now == total or late):
            print_error(f"{name}: {before + now}/{total}")
            self._logged = time.monotonic()


def parser() -> cli.Parser:
    """Returns the flags."""
    parser = cli.Parser(__doc__, local=("out", "sheet"))
    add = parser.add_argument
    add("--pretrain", required=True, metavar="SPEC", help="data set to clean")
    add(
        "--against",
        required=True,
        metavar="SPEC[,SPEC...]",
        help="test sets to compare with",
    )
    add("--image_key", default="image", help="column of the images; default: image")
    add("--image_dir", default="", help="folder that paths in tables are relative to")
    add("--image_suffix", default="", help="suffix added to paths in tables: .jpg")
    add("--out", required=True, metavar="FILE", help="file for the list of record ids")
    add("--sheet", metavar="PNG", help="PNG file with the 60 least certain pairs")
    add(
        "--correlation",
        type=_fraction,
        default=0.9,
        help="minimum correlation of a duplicate pair; default: 0.9",
    )
    add("--threads", type=cli.positive, help="decoding threads; default: one per core")
    cli.add_max_megapixels_flag(parser)
    return parser


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0 and up to 1")
    return value


if __name__ == "__main__":
    cli.run(main, parser())
