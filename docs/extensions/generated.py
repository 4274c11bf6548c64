"""Puts what is generated into pages, and makes docstrings into what Sphinx reads."""

import json
import os
import pathlib
import re
import shutil
import tomllib
from unittest import mock

import config_reference
import docstrings

from vit_jax.__main__ import COMMANDS, load
from vit_jax.training.config import TrainConfig
from vit_jax.weights.hub import mirrors

_HERE = pathlib.Path(__file__).parents[1]
_ROOT = _HERE.parent
# Where the project is published; CONTRIBUTING.md says how OWNER is replaced.
REPOSITORY = "https://github.com/OWNER/vit_jax"


def setup(app) -> dict:
    """Called by Sphinx."""
    app.connect("builder-inited", _copy_notebooks)
    app.connect("source-read", _fill)
    app.connect("autodoc-process-docstring", _convert)
    app.connect("missing-reference", _name_array, priority=400)  # Intersphinx has 500.
    return {"parallel_read_safe": True}


def commands(text: str) -> str:
    """Returns a list of the commands on the site, and of what runs each.

    Args:
      text: of commands.toml.
    """
    lines = []
    for entry in tomllib.loads(text)["command"]:
        if "test" in entry:
            how = f"`{entry['test']}`"
            how += f", with {entry['with']}" if "with" in entry else ""
        elif "reason" in entry:
            how = f"not run: {entry['reason']}"
        else:
            how = "`tests/test_docs.py`"
            how += f", with `{entry['more']}` added" if entry.get("more") else ""
        lines += [f"- `{entry['line']}`\\", f"  {how}"]  # Too wide for a table.
    return "\n".join(lines)


def flags() -> str:
    """Returns what --help of each command shows, without the keys of configs."""
    parts = []
    for name, line in COMMANDS.items():
        parser = load(name).parser()
        parser.prog = f"vit_jax {name}"
        with mock.patch.dict(os.environ, COLUMNS="88"):
            text = parser.format_help()
        parts.append(f"## {name}\n\n{line}.\n\n```text\n{text.strip()}\n```")
    return "\n\n".join(parts)


def gallery(text: str) -> str:
    """Returns the pictures of gallery/ that a page does not show by itself.

    Args:
      text: of the page.
    """
    paths = (path.relative_to(_HERE) for path in _HERE.glob("gallery/**/*.png"))
    others = sorted(path for path in paths if f"({path.as_posix()})" not in text)
    titles = [path.stem.replace("_", " ") for path in others]
    return "## More figures\n\n" + "\n\n".join(
        f"### {title[:1].upper()}{title[1:]}\n\n![{title}]({path.as_posix()})"
        for title, path in zip(titles, others, strict=True)
    )


def zoo(text: str) -> str:
    """Returns a table of all networks, and the names of weights for them.

    Args:
      text: what `python -m vit_jax.summary --json` prints.
    """
    rows = [json.loads(line) for line in text.splitlines()]
    variants = {row["variant"] for row in rows}
    named: dict[str, list[str]] = {}
    for family in mirrors.families():
        for name in mirrors.names(family):
            variant = name.partition(":")[2]
            while variant not in variants and "-" in variant:
                variant = variant.rpartition("-")[0]
            named.setdefault(variant, []).append(f"`{name}`")
    lines = ["| network | pixels | parameters, M | GMACs | published weights |"]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        variant, (height, width) = row["variant"], row["resolution"]
        lines.append(
            f"| `{variant}` | {height}x{width} | {row['parameters'] / 1e6:.1f} | "
            f"{row['macs'] / 1e9:.1f} | {', '.join(named.get(variant, []))} |"
        )
    return "\n".join(lines)


def _copy_notebooks(app) -> None:
    # Sphinx reads pages below its own folder alone; git ignores the copies.
    for path in _ROOT.glob("notebooks/*.ipynb"):
        (_HERE / "notebooks").mkdir(exist_ok=True)
        shutil.copy(path, _HERE / "notebooks")


def _fill(app, docname: str, source: list[str]) -> None:
    made = {
        "configuration": lambda: config_reference.markdown(TrainConfig),
        "commands": lambda: commands((_HERE / "commands.toml").read_text()),
        "command_line": flags,
        "gallery": lambda: gallery(source[0]),
        "model_zoo": lambda: zoo((_HERE / "model_zoo.jsonl").read_text()),
    }
    if docname in made:
        source[0] = f"{source[0]}\n\n{made[docname]()}\n"
    if not docname.startswith("benchmarks/"):  # Their ".." is docs/.
        source[0] = links(source[0])


def links(text: str) -> str:
    """Leads links that leave docs/ to where the project is published.

    Notebooks are pages of the site.

    Args:
      text: of a page.
    """

    def outside(match: re.Match) -> str:
        kind = "tree" if (_ROOT / match[1]).is_dir() else "blob"
        return f"]({REPOSITORY}/{kind}/main/{match[1]})"

    text = re.sub(r"\]\(\.\./(notebooks/\w+\.ipynb)\)", r"](\1)", text)
    return re.sub(r"\]\(\.\./([^)]+)\)", outside, text)


def _name_array(app, env, node, shown) -> None:
    # The inventory of JAX has arrays under their public name alone.
    if node["reftarget"].endswith("_jax.Array"):
        node["reftarget"] = "jax.Array"


def _convert(app, what, name, obj, options, lines: list[str]) -> None:
    lines[:] = docstrings.to_rst(lines)
