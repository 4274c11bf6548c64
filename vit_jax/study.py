"""Runs a scaling study: architectures on nested parts of a data set.

    python -m vit_jax.study --config=configs/study/cifar10.py --workdir=runs/study

Every model of the config is pretrained on every part of the data, scored on the test
split as it is and by few-shot features, and fine-tuned. Results are in study.json and
points.csv; `python -m vit_jax.report runs/study` draws them. Repeat the command to resume
a study; what is done is not repeated. Any key of a config can be set
for all runs: --config.data.data_dir=DIR. Exit codes: 0 done, 2 bad input, 75 preempted.
"""

import argparse

from vit_jax import cli, job


def main(flags: argparse.Namespace) -> int:
    """Runs the study that the flags describe; returns the exit code."""
    from vit_jax.tools.sweeps import scaling

    study = scaling.plan(
        flags.config,
        flags.workdir,
        models=flags.models,
        images=flags.train_sizes,
        overrides=flags.overrides,
    )
    return job.run(study.run, flags.workdir, debug=flags.debug)


def parser() -> cli.Parser:
    """Returns the flags."""
    parser = cli.Parser(__doc__, config="TrainConfig")
    add = parser.add_argument
    add("--config", required=True, help="file under configs/study/, or file:argument")
    add("--workdir", required=True, help="folder of the study")
    add("--models", type=_words, default=(), help="names: vit-s,resnet; default: all")
    add(
        "--train_sizes",
        type=_numbers,
        default=(),
        help="images: 3000,12000; default: all",
    )
    return parser


def _words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(cli.positive(word) for word in text.split(","))


if __name__ == "__main__":
    cli.run(main, parser(), trains=True)
