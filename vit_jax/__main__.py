"""Lists the commands, or runs one: python -m vit_jax [COMMAND ...]

`python -m vit_jax --completion=bash` prints what bash has to read to complete commands and
flags (or zsh, tcsh; extra `completion`). The same as `vit_jax` alone, which an install puts on the path. `vit_jax train --help` is
`python -m vit_jax.train --help`.
"""

import argparse
import ast
import difflib
import importlib
import importlib.resources
import os
import runpy
import sys
from typing import NoReturn

import vit_jax

# In the order in which one meets them.
SHELLS = ("bash", "zsh", "tcsh")
COMMANDS = (
    *("train", "finetune", "evaluate", "transfer", "predict", "explore", "visualize"),
    *("convert", "average", "prepare", "datasets", "show_batch", "dedup"),
    *("summary", "compile", "study", "report"),
)


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
        runpy.run_module(f"vit_jax.{name}", run_name="__main__", alter_sys=False)
    else:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}? The commands are" if near else "give one of"
        _end(f"{name!r} is no command: {hint} {', '.join(COMMANDS)}")


def usage() -> str:
    """Returns the commands, with what each does."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:{width}}{purpose(name)}" for name in COMMANDS]
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
    below = parser.add_subparsers()
    for name in COMMANDS:
        own = importlib.import_module(f"vit_jax.{name}").parser()
        below.add_parser(name, parents=[own], add_help=False, help=purpose(name))
    return shtab.complete(parser, shell)


def _end(reason: str) -> NoReturn:
    print(f"error: {reason}", file=sys.stderr)
    sys.exit(2)


def purpose(command: str) -> str:
    """Returns what a command does, the first words of its module, which is not run."""
    file = importlib.resources.files("vit_jax") / f"{command}.py"
    words = ast.get_docstring(ast.parse(file.read_text("utf-8"))).split("\n\n")[0]
    return " ".join(words.split()).partition(":")[0].rstrip(".")


if __name__ == "__main__":
    main()
