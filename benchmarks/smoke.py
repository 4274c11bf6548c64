"""The flag --smoke of every script here: a run of seconds that shows that it still works."""

import argparse
import atexit
import dataclasses
import shlex
import shutil
import sys
import tempfile


def parse(parser: argparse.ArgumentParser, words: str = "") -> argparse.Namespace:
    """Returns the flags of the command line.

    Args:
      parser: of the script; it gets the flag --smoke.
      words: what --smoke stands for, as in a shell; flags beside --smoke override
        these. `{folder}` is a new empty folder, removed at the end.
    """
    parser.add_argument("--smoke", action="store_true", help=f"short for {words!r}")
    given = sys.argv[1:]
    if "--smoke" in given:
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        given = [*shlex.split(words.format(folder=folder)), *given]
    return parser.parse_args(given)


def shrink():
    """Gives the networks of size Ti one block, whose programs compile soon."""
    from vit_jax.models import variants

    variants.SIZES["Ti"] = dataclasses.replace(variants.SIZES["Ti"], depth=1)
