"""Averages fine-tuned networks: python -m vit_jax.average RUN RUN ... --by=val --out=FILE

A "model soup" (arXiv:2203.05482): runs from the same weights, with other rates or seeds.
With --by the best runs by that evaluation of the first run's config are averaged, as far
as each makes the average no worse; without it all are. FILE ends in .safetensors and is a
model for every command. Exit codes: 0 done, 2 bad input.
"""

import argparse
import pathlib

from vit_jax.command_line import cli
from vit_jax.command_line.printing import print_error, print_line


def main(flags: argparse.Namespace) -> int:
    """Averages the runs that the flags name; returns the exit code."""
    cli.refuse_overrides(flags, "averaging")
    from vit_jax import weights
    from vit_jax.errors import UserError
    from vit_jax.tools.soups import averaging
    from vit_jax.weights import export

    if len({*flags.runs}) < 2:
        raise UserError("give two runs or more to average, each once")
    out = pathlib.Path(flags.out)
    if out.exists():
        raise UserError(f"--out={out} exists: remove it, or choose another")
    models = [weights.open_pretrained(run) for run in flags.runs]
    soup = averaging.average(models, flags.by, print_error)
    export.export(soup.average, "safetensors", out)
    for name, score in soup.scores.items():
        print_line(f"{score:.2%}  {name}{' *' if name in soup.taken else ''}")
    print_line(f"{out}: average of {len(soup.taken)} of {len(models)} runs")
    return 0


def parser() -> cli.Parser:
    """Returns the flags."""
    parser = cli.Parser(__doc__, local=("out",))
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="workdirs of runs from the same weights")
    add("--by", default="", help="evaluation of the first run that chooses, as val")
    add("--out", required=True, metavar="FILE", help="to write, as soup.safetensors")
    return parser


if __name__ == "__main__":
    cli.run(main, parser())
