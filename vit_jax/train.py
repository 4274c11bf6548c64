"""Trains a model: python -m vit_jax.train --config=configs/digits.py --workdir=DIR

Any key of the config can be set: --config.optim.learning_rate=0.01. A workdir that
holds a checkpoint is resumed. Exit codes: 0 done; 2 bad input, or the last state could
not be saved (one line says what); 70 no progress for `stall_timeout` seconds; 75
preempted (SIGTERM, SIGHUP, or a loader process was killed): the state is saved, repeat
the command to resume; 130 Ctrl-C: the state is saved, a second Ctrl-C exits at once.
"""

import argparse

from vit_jax.command_line import cli, job, processes
from vit_jax.command_line.files import new_workdir
from vit_jax.command_line.printing import print_line
from vit_jax.errors import UserError


def main(flags: argparse.Namespace) -> int:
    """Runs the training given by the flags; returns the exit code."""
    if flags.largest_batch and flags.compiled:
        raise UserError(
            f"--largest_batch and --compiled={flags.compiled}: a compiled step has one "
            "batch size; leave one of them out"
        )
    config = cli.load_config(flags)

    # Imported after the config is checked, so that its errors come at once.
    import jax

    from vit_jax.training import loop
    from vit_jax.training.timers import StartupTimer

    startup = StartupTimer(processes.age(), print_line)
    startup.end_phase("import")

    def train():
        if jax.process_count() > 1 and not flags.workdir:
            raise UserError("several processes need the same --workdir: set it")
        if "quick" in flags.config.partition(":")[2] and not jax.process_index():
            print_line(
                f"{flags.config}: a small stand-in for the network, synthetic images "
                "and 3 steps show that the recipe runs, not the accuracy it reaches"
            )
        workdir, setup = flags.workdir or new_workdir(config.name), None
        known = config
        if flags.largest_batch:
            from vit_jax.tools.planning import batch_search

            tell = (lambda line: None) if jax.process_index() else print_line
            known = batch_search.of_run(config, workdir, tell)
        if flags.compiled:
            from vit_jax.training import compiled_step

            known = loop.resolved(known)
            setup = loop.build_setup(known, workdir, startup)
            step = compiled_step.load(flags.compiled, known, setup)
            setup = setup._replace(compiled=step)
        loop.train(known, workdir, startup, setup)

    return job.run(train, flags.workdir, debug=flags.debug)


def parser() -> cli.Parser:
    """Returns the flags."""
    flags = cli.Parser(__doc__, config="TrainConfig", recipes=r"\w+")
    flags.add_argument("--config", required=True, help="recipe or file, :argument")
    flags.add_argument("--workdir", default="", help="default: a new folder in runs/")
    text = "file written by `vit_jax.compile --out`: its step is not compiled again"
    flags.add_argument("--compiled", default="", help=text)
    text = "train with the largest batch that fits the devices, not with the config's"
    flags.add_argument("--largest_batch", action="store_true", help=text)
    return flags


if __name__ == "__main__":
    cli.run(main, parser(), trains=True)
