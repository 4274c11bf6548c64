"""Pretrains on your images without labels: python -m vit_jax.pretrain PHOTOS

PHOTOS is a folder of images at any depth, a table of paths (CSV, TSV, JSON Lines,
Parquet), tar shards, or the name of a data set, such as owner/name on the Hugging Face
hub; several may be given. No label is read. With --model=WEIGHTS published weights are
adapted to the images; with --teacher=WEIGHTS a small network learns the features of
others; without both a network is trained from random weights. Method, image size,
batch size, steps and learning rate are chosen automatically; each is printed with the
flag or key that changes it. If the images are in folders of classes, or with
--labels=FOLDER, k-NN on them is shown before, during and after. Repeat the command to
resume. Exit codes: 0 done, 2 bad input, 75 preempted.
"""

import argparse

from vit_jax.command_line import cli, files, job
from vit_jax.command_line.printing import print_line


def main(flags: argparse.Namespace) -> int:
    """Pretrains as given by the flags; returns the exit code."""
    teachers = ",".join(flags.teacher)
    workdir = flags.workdir or files.default_workdir(
        "pretrain", flags.method, flags.model, teachers, *flags.photos
    )
    return job.run(lambda: run(flags, workdir), workdir, debug=flags.debug)


def run(flags: argparse.Namespace, workdir: str) -> None:
    """Pretrains in a workdir, and prints the scores and what comes next."""
    from vit_jax.tools.pretraining import run as pretraining

    result = pretraining.pretrain(
        flags.photos,
        workdir,
        model=flags.model,
        method=flags.method,
        teachers=flags.teacher,
        variant=flags.variant,
        labels=flags.labels,
        lora=flags.lora,
        minutes=pretraining.MINUTES if flags.minutes is None else flags.minutes,
        overrides=flags.overrides,
        say=print_line,
    )
    for line in pretraining.summary(result):
        print_line(line)


def parser() -> cli.Parser:
    """Returns the flags."""
    keys = {"init": "--model", "init.checkpoint": "--model", "task.name": "--method"}
    parser = cli.Parser(__doc__, config="TrainConfig", keys=keys)
    add = parser.add_argument
    add(
        "photos",
        metavar="PHOTOS",
        nargs="+",
        help="folders, tables, tar shards or names of data sets",
    )
    add("--model", default="", help="weights to adapt; default: random weights")
    cli.add_step_flag(parser)
    add(
        "--method",
        default="",
        help="dinov2, mae or distillation; default: by the weights",
    )
    add(
        "--teacher",
        action="append",
        default=[],
        help="weights whose features are learnt; may be given several times",
    )
    add(
        "--variant",
        default="",
        help="network without --model, such as Ti/16; default: by the images",
    )
    add(
        "--labels",
        default="",
        help="folder with one folder per class, scored by k-NN; never trained on",
    )
    add(
        "--lora",
        type=cli.positive,
        default=0,
        help="rank of low-rank updates; trains only these; default: all parameters",
    )
    add(
        "--minutes",
        type=cli.minutes,
        help="time limit in minutes, by the measured speed; 0: no limit; default: 30",
    )
    add("--workdir", default="", help="default: a folder in runs/pretrain/")
    return parser


if __name__ == "__main__":
    cli.run(main, parser(), trains=True)
