"""Lists the commands, or runs one: python -m vit_jax [COMMAND ...]

`vit_jax train --help` is `python -m vit_jax.train --help`. `--completion=bash` (or zsh,
tcsh; extra `completion`) prints the script that completes commands and flags in a shell.
"""

import argparse
import difflib
import importlib.util
import os
import runpy
import sys
import types
from typing import NoReturn

import vit_jax

SHELLS = ("bash", "zsh", "tcsh")
# Each command, which is also the name of its module, and its line in --help.
COMMANDS = {
    "train": "Trains a model",
    "finetune": "Fine-tunes weights on your images",
    "pretrain": "Pretrains on your images without labels",
    "evaluate": "Evaluates weights",
    "transfer": "Fine-tunes a checkpoint on a data set as the paper does (table 4)",
    "predict": "Classifies images",
    "features": "Writes features of photographs, for search and clustering",
    "explore": "Shows where a model looks, in the browser",
    "visualize": "Draws what a model has learned and where it looks",
    "convert": "Converts weights",
    "average": "Averages fine-tuned networks",
    "prepare": "Prepares data sets as ArrayRecord",
    "datasets": "Lists the data sets of the paper",
    "show_batch": "Shows the images that a model trains on",
    "dedup": "Finds near-duplicates between data sets",
    "summary": "Shows parameters and operations of models",
    "compile": "Compiles a training step for TPUs or GPUs that are not here",
    "study": "Trains a recipe over values of its arguments",
    "report": "Compares runs with the paper",
}


def main() -> None:
    """Runs the command that the command line names."""
    words = sys.argv[1:]
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        print(usage())
    elif name == "--version":
        print(f"vit_jax {vit_jax.__version__}")
    elif name.startswith("--completion"):
        print(completion(name.partition("=")[2]))
    elif name in COMMANDS:
        sys.argv = [f"{os.path.basename(sys.argv[0])} {name}", *words[1:]]
        runpy.run_module(f"vit_jax.{name}", run_name="__main__")
    else:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}? The commands are" if near else "give one of"
        _end(f"{name!r} is not a command: {hint} {', '.join(COMMANDS)}")


def load(name: str) -> types.ModuleType:
    """Returns a command's module without importing it.

    Importing would replace a function of the same name, such as `vit_jax.train`.
    """
    spec = importlib.util.find_spec(f"vit_jax.{name}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def usage() -> str:
    """Returns the list of commands."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:{width}}{line}" for name, line in COMMANDS.items()]
    return "\n".join(
        (
            "usage: vit_jax COMMAND [flags]    or: python -m vit_jax.COMMAND [flags]",
            "",
            *lines,
            "",
            "vit_jax COMMAND --help lists its flags; --version; --completion=bash; in Python:",
            "import vit_jax; help(vit_jax)",
        )
    )


def completion(shell: str) -> str:
    """Returns the script that completes commands and flags in a shell.

    Args:
      shell: one of SHELLS.
    """
    if shell not in SHELLS:
        _end(f"--completion={shell}: give one of {', '.join(SHELLS)}")
    try:
        import shtab
    except ModuleNotFoundError:
        _end("--completion needs shtab: pip install -e '.[completion]'")
    parser = argparse.ArgumentParser("vit_jax")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers()
    for name, line in COMMANDS.items():
        flags = load(name).parser()
        commands.add_parser(name, parents=[flags], add_help=False, help=line)
    return shtab.complete(parser, shell)


def _end(reason: str) -> NoReturn:
    print(f"error: {reason}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
