"""Averages fine-tuned networks: python -m vit_jax.average RUN RUN ... --by=val --out=FILE

This makes a "model soup" (arXiv:2203.05482) of runs that start from the same weights
with different learning rates or seeds. With --by, which names an evaluation in the
first run's config, runs are added from the best to the worst, and one is kept if the
average does not get worse; without --by all runs are averaged. FILE ends in
.safetensors and can be used as the model of every command. Exit codes: 0 done, 2 bad
input.
"""

import argparse
import pathlib

from vit_jax.command_line import cli
from vit_jax.command_line.printing import print_error, print_line


def main(flags: argparse.Namespace) -> int:
    """Averages the runs given by the flags; returns the exit code."""
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
    add("--by", default="", help="evaluation that chooses, in the first run")
    add("--out", required=True, metavar="FILE", help="file to write: soup.safetensors")
    return parser


if __name__ == "__main__":
    cli.run(main, parser())
