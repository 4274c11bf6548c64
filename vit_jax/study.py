"""Runs a study: one recipe over values of its arguments, tuned and repeated with seeds.

    python -m vit_jax.study --config=configs/study/positions.py --workdir=runs/positions

configs/study/ has the paper's ablations and its scaling study, each with `:size=cpu`,
`gpu` or `paper`. Each point is trained with every combination of the tuned keys; the
best combination on validation images is trained again with further seeds, and
fine-tuned if the study asks for it. Results are in study.json and points.csv;
`python -m vit_jax.report WORKDIR` compares them with the paper's. Repeat the command to
resume a study; finished runs are kept.
Any key that the study does not vary can be set for all runs: --config.data.data_dir=DIR.
Exit codes: 0 done, 2 bad input, 75 preempted, 130 interrupted.
"""

import argparse

from vit_jax.command_line import cli, job


def main(flags: argparse.Namespace) -> int:
    """Runs the study given by the flags; returns the exit code."""
    from vit_jax.tools.sweeps import study

    only: dict[str, tuple[str, ...]] = {}
    for axis, values in flags.only:
        only[axis] = (*only.get(axis, ()), *values)
    plan = study.plan(
        flags.config,
        flags.workdir,
        only=only,
        seeds=flags.seeds,
        overrides=flags.overrides,
    )
    return job.run(plan.run, flags.workdir, debug=flags.debug)


def parser() -> cli.Parser:
    """Returns the flags."""
    parser = cli.Parser(__doc__, config="TrainConfig")
    add = parser.add_argument
    add(
        "--config",
        required=True,
        help="file with get_study, such as those of configs/study/, or file:argument",
    )
    add("--workdir", required=True, help="folder of the study")
    add(
        "--only",
        type=_axis,
        action="append",
        default=[],
        metavar="AXIS=VALUE,...",
        help="values of an axis to run; default: all",
    )
    add(
        "--seeds",
        type=cli.positive,
        default=0,
        help="runs per point in the results; default: the study's",
    )
    return parser


def _axis(text: str) -> tuple[str, tuple[str, ...]]:
    axis, equals, values = text.partition("=")
    words = tuple(filter(None, values.split(",")))
    if not equals or not words:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not AXIS=VALUE or AXIS=VALUE,VALUE"
        )
    return axis, words


if __name__ == "__main__":
    cli.run(main, parser(), trains=True)
