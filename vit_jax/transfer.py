"""Fine-tunes a checkpoint on a data set, as the paper does (its table 4).

    python -m vit_jax.transfer --model=CHECKPOINT --dataset=cifar10 --resolution=384

CHECKPOINT is a run or weights, as for vit_jax.predict. The data set is one of the
paper's (cifar10, cifar100, oxford_iiit_pet, oxford_flowers102, imagenet2012), digits, a
folder with train/<class>/ and test/<class>/, any name that data.name takes, or VTAB-1k:
vtab, vtab/TASK or vtab/GROUP, or several of these, separated by commas. A part of train
is held out to choose the learning rate; the best one is then used on all of train with
three seeds, each of which is scored once on test. Until then the test split cannot be
opened.

Repeat the command to resume; finished runs are kept. Results are in transfer.json
(vtab.json), trials.csv, and for tensorboard --logdir=DIR/tensorboard; --json ends with
one line, the content of that JSON file. Any key of the config can be set for all runs:
--config.total_steps=500. Exit codes: 0 done, 2 bad input (VTAB-1k: or a task failed;
the others are run all the same, and a task without data does not count as failed), 75
preempted.
"""

import argparse
import json

from vit_jax.command_line import cli, files, job
from vit_jax.command_line.printing import masked


def main(flags: argparse.Namespace) -> int:
    """Runs the study given by the flags; returns the exit code."""
    workdir = flags.workdir or default_workdir(flags)
    return job.run(lambda: _run_and_print(flags, workdir), workdir, debug=flags.debug)


def _run_and_print(flags: argparse.Namespace, workdir: str) -> None:
    import jax

    report = run(flags, workdir)
    if flags.json and jax.process_index() == 0:
        print(json.dumps(report), flush=True)


def run(flags: argparse.Namespace, workdir: str) -> dict:
    """Runs the study in a workdir; returns its report."""
    from vit_jax import weights
    from vit_jax.tools.sweeps import fine_tuning, recipes, transfer, vtab

    names = []
    if flags.dataset.split("/")[0].split(",")[0] == "vtab":
        names = vtab.tasks(flags.dataset)
    pretrained = weights.open_pretrained(
        flags.model,
        num_heads=flags.num_heads,
        architecture=flags.architecture,
        image_size=flags.resolution,
    )

    def study(dataset, folder, shared=None):
        task = fine_tuning.task(
            pretrained,
            recipes.find(dataset, flags.data_dir, flags.test),
            resolution=flags.resolution,
            mode=flags.mode,
            layer_decay=flags.layer_decay,
            rates=flags.learning_rates,
            overrides=flags.overrides,
        )
        return transfer.run(model, task, folder, flags.seeds, shared)

    model = masked(flags.model)
    if not names:
        return study(flags.dataset, workdir)
    about = {
        "model": model,
        "variant": pretrained.options["variant"],
        "mode": flags.mode,
        "layer_decay": flags.layer_decay,
        "seeds": flags.seeds,
        "resolution": list(flags.resolution or fine_tuning.usual_size(pretrained)),
    }
    return vtab.run(
        names,
        lambda name, folder, shared: study(f"vtab/{name}", folder, shared),
        workdir,
        about,
        flags.data_dir,
    )


def default_workdir(flags: argparse.Namespace) -> str:
    """Returns a folder under runs/ that depends only on the flags."""
    return files.default_workdir("transfer", flags.model, flags.dataset, flags.data_dir)


def parser() -> cli.Parser:
    """Returns the flags."""
    parser = cli.Parser(__doc__, config="TrainConfig")
    add = parser.add_argument
    add("--model", required=True, help="weights: run, file, folder or name")
    cli.add_step_flag(parser)
    add("--dataset", required=True, help="name, folder, vtab or vtab/TASK")
    add("--data_dir", default="", help="folder of prepared data sets; default: TFDS's")
    add("--test", default="", help="name of the test split; default: the usual one")
    add("--resolution", type=cli.size, help="pixels, or HEIGHTxWIDTH; default: 384")
    add("--workdir", default="", help="default: a folder in runs/transfer/")
    add(
        "--mode",
        choices=("full", "head", "head_then_all"),
        default="full",
        help="which parameters are trained",
    )
    add(
        "--layer_decay",
        type=float,
        default=0.0,
        help="learning rate of a layer over that of the next; 0: off",
    )
    add(
        "--learning_rates",
        type=_rates,
        default=(),
        help="rates to try, such as 0.003,0.01; default: the recipe's",
    )
    add("--json", action="store_true", help="end with the results as one line of JSON")
    add(
        "--seeds", type=cli.positive, default=3, help="number of final runs; default: 3"
    )
    cli.add_network_flags(parser)
    return parser


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(word) for word in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not numbers above 0 with commas between them"
        )
    return rates


if __name__ == "__main__":
    cli.run(main, parser(), trains=True)
