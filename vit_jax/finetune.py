"""Fine-tunes weights on your images: python -m vit_jax.finetune PHOTOS --workdir=DIR

PHOTOS is a folder (PHOTOS/CLASS/*.jpg, or PHOTOS/train/CLASS/*.jpg and PHOTOS/val/...),
a table of paths and labels (CSV, TSV, JSON Lines, Parquet), or the name of a data set,
such as owner/name on the Hugging Face hub. Without validation images, a part of each
class is held out. With masks, as PHOTOS MASKS or in one folder with images/ and masks/,
the class of every pixel is learnt. With --target=COLUMN, or a table whose only column
has numbers, these are predicted. Image size, batch size, steps and learning rate are
chosen automatically; each is printed with the key that changes it:
--config.optim.learning_rate=0.003. Repeat the command to resume.
Exit codes: 0 done, 2 bad input, 75 preempted.
"""

import argparse
from collections.abc import Callable

from vit_jax.command_line import cli, files, job
from vit_jax.command_line.printing import print_line


def main(flags: argparse.Namespace) -> int:
    """Fine-tunes as given by the flags; returns the exit code."""
    workdir = flags.workdir or files.default_workdir(
        "finetune", flags.model, flags.photos, flags.masks, flags.target
    )
    return job.run(lambda: run(flags, workdir), workdir, debug=flags.debug)


def run(flags: argparse.Namespace, workdir: str) -> None:
    """Fine-tunes in a workdir, and prints the score and what comes next."""
    from vit_jax.tools.finetuning import run as finetuning

    if flags.find_rate:
        finetuning.find_rate(
            flags.photos,
            workdir,
            masks=flags.masks,
            target=flags.target,
            group=flags.group,
            model=flags.model,
            aspect=flags.aspect,
            overrides=flags.overrides,
            say=print_line,
        )
        return
    result = finetuning.finetune(
        flags.photos,
        workdir,
        masks=flags.masks,
        target=flags.target,
        group=flags.group,
        model=flags.model,
        aspect=flags.aspect,
        minutes=finetuning.MINUTES if flags.minutes is None else flags.minutes,
        folds=flags.folds,
        calibrate=flags.calibrate,
        overrides=flags.overrides,
        say=print_line,
    )
    for line in finetuning.summary(result):
        print_line(line)


def parser() -> cli.Parser:
    """Returns the flags."""
    keys = {"init": "--model", "init.checkpoint": "--model"}
    parser = cli.Parser(__doc__, config="TrainConfig", keys=keys)
    add = parser.add_argument
    add("photos", metavar="PHOTOS", help="folder, table or name of a data set")
    add(
        "masks",
        metavar="MASKS",
        nargs="?",
        default="",
        help="folder of masks with the images' names: learn the class of every pixel",
    )
    add(
        "--target",
        default="",
        metavar="NAMES",
        help="predict numbers: their columns in a table, such as age or age,weight",
    )
    add(
        "--model",
        default="",
        help="weights; default: deit:Ti/16 on a CPU, augreg:S/16 elsewhere",
    )
    cli.add_step_flag(parser)
    add(
        "--aspect",
        default="crop",
        help="crop: square images; keep: images of any aspect ratio, with as many "
        "patches as a square has (NaFlex); default: crop",
    )
    add(
        "--minutes",
        type=cli.minutes,
        help="time limit in minutes, by the measured speed; 0: no limit; default: 15",
    )
    _add_validation_flags(add)
    add(
        "--find_rate",
        action="store_true",
        help="only suggest a learning rate, from a range test of 100 steps",
    )
    add("--workdir", default="", help="default: a folder in runs/finetune/")
    return parser


def _add_validation_flags(add: Callable) -> None:
    """Adds the flags about the images that are held out."""
    add(
        "--folds",
        type=cli.positive,
        default=0,
        help="for few images: number of runs, each validated on another part; the "
        "first is the model; default: one run",
    )
    add(
        "--group",
        default="",
        metavar="COLUMN|RULE",
        help="images that stay together in splits and folds, such as photographs of one "
        r"patient: a column of the table, or a rule on file names, '(.*)_\d+', whose "
        "parentheses hold the group",
    )
    add(
        "--calibrate",
        action="store_true",
        help="fit the probabilities to the validation images, and sets of classes for "
        "predict --coverage",
    )


if __name__ == "__main__":
    cli.run(main, parser(), trains=True)
