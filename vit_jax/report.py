"""Compares runs with the paper: python -m vit_jax.report RUN... --out=report/

RUN is the workdir of a training run, or a folder written by evaluate, transfer, VTAB-1k
or a scaling study. For the runs in such a folder, the compute is shown, and the losses
if their files still exist. The report is index.html (one file, for a browser or print),
report.md, and plots/ with each plot as PNG and SVG and its numbers as CSV. Exit codes:
0
done; 2 bad input (one line says what). Needs the extra `plots`.
"""

import argparse

from vit_jax.command_line import cli
from vit_jax.command_line.printing import print_line


def main(flags: argparse.Namespace) -> None:
    """Writes the report given by the flags."""
    from vit_jax.tools.report import pages

    cli.refuse_overrides(flags, "reporting")
    files = pages.write_report(flags.runs, flags.out)
    plots = sum(name.endswith(".png") for name in files)
    print_line(
        f"{flags.out.rstrip('/')}/index.html and report.md, with {plots} plots in "
        f"{pages.PLOTS}/"
    )


def parser() -> cli.Parser:
    """Returns the flags."""
    flags = cli.Parser(__doc__)
    flags.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    flags.add_argument("--out", default="report", help="folder of the report")
    return flags


if __name__ == "__main__":
    cli.run(main, parser())
