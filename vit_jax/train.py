"""Trains a model: python -m vit_jax.train --config=configs/digits.py --workdir=DIR

Any key of vit_jax/schema.py can be set: --config.optim.rate=0.01. A workdir that holds
a checkpoint is resumed. Exit codes: 0 done; 2 bad input, or the last state could not be
saved (one line says what); 70 nothing moved for `stall_timeout` seconds; 75 preempted
(SIGTERM): saved, the same command goes on.
"""

import argparse
import sys
import time
from pathlib import Path

from vit_jax import cli
from vit_jax.errors import Preempted, UserError

EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again.


def main(flags: argparse.Namespace) -> int:
    """Runs the training that the flags describe; returns the exit code."""
    config = cli.load_config(flags)

    # After the config, so that its errors come at once.
    import jax

    from vit_jax.parallel import distributed, together
    from vit_jax.report.startup import Startup, process_age
    from vit_jax.training import ahead, loop, saving

    startup = Startup(process_age())
    startup.done("import")

    if distributed.start() > 1 and not flags.workdir:
        raise UserError("several processes need the same --workdir: state it")
    workdir = flags.workdir or new_workdir(config.name)
    code = 0
    with together.Together(workdir, debug=flags.debug):
        try:
            loop.train(config, workdir, startup)
        except Preempted as preempted:
            print(preempted, file=sys.stderr, flush=True)
            code = EXIT_PREEMPTED
        except UserError as error:
            if jax.process_count() > 1 or not ahead.under_way():
                raise
            cli.show(error, debug=flags.debug)
            together.leave(cli.EXIT_USER_ERROR)
        # All leave in the same way: process 0 waits for those who do not wait.
        hasty = saving.left_threads() or ahead.under_way()
        hasty = bool(distributed.gather(hasty=hasty)["hasty"].any())
    if hasty:
        together.leave(code)
    return code


def new_workdir(name: str) -> str:
    """Names a folder under runs/ that does not exist yet."""
    stem = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = [stem, *(f"{stem}-{i}" for i in range(2, 100))]
    return next(name for name in names if not Path(name).exists())


def parser() -> cli.Parser:
    """Returns the flags."""
    flags = cli.Parser(__doc__)
    flags.add_argument("--config", required=True, help="file, or file:argument")
    flags.add_argument("--workdir", default="", help="default: a new one under runs/")
    return flags


if __name__ == "__main__":
    cli.run(main, parser())
