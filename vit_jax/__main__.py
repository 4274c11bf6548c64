"""Lists the commands, or runs one: python -m vit_jax [COMMAND ...]

The same as `vit_jax` alone, which an install puts on the path. `vit_jax train --help` is
`python -m vit_jax.train --help`.
"""

import ast
import importlib.resources
import os
import runpy
import sys

import vit_jax

# In the order in which one meets them.
COMMANDS = (
    *("train", "evaluate", "transfer", "predict", "explore", "visualize"),
    *("convert", "prepare", "datasets", "show_batch", "dedup"),
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
    elif name in COMMANDS:
        sys.argv = [f"{os.path.basename(sys.argv[0])} {name}", *words[1:]]
        runpy.run_module(f"vit_jax.{name}", run_name="__main__", alter_sys=False)
    else:
        line = f"error: {name!r} is no command: give one of {', '.join(COMMANDS)}"
        print(line, file=sys.stderr)
        sys.exit(2)


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
            "vit_jax COMMAND --help lists its flags; vit_jax --version; in Python:",
            "import vit_jax; help(vit_jax)",
        )
    )


def purpose(command: str) -> str:
    """Returns what a command does, the first words of its module, which is not run."""
    file = importlib.resources.files("vit_jax") / f"{command}.py"
    words = ast.get_docstring(ast.parse(file.read_text("utf-8"))).split("\n\n")[0]
    return " ".join(words.split()).partition(":")[0].rstrip(".")


if __name__ == "__main__":
    main()
