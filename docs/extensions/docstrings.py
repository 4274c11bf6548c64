"""Turns this project's docstrings into reStructuredText, which Sphinx's autodoc reads.

They are text with `code`, an indented list under each of "Args:", "Attributes:" and
"Raises:", an indented paragraph under "Returns:" and the like, and an interpreter's session
under "Example:".
"""

import re

_TITLES = {
    "Args": "Arguments",
    "Attributes": "Attributes",
    "Example": "Example",
    "Raises": "Raises",
    "Returns": "Returns",
    "Yields": "Yields",
}
_LISTS = ("Args", "Attributes", "Raises")
_CODE = re.compile(r"(`[^`]+`)")


def to_rst(lines: list[str]) -> list[str]:
    """Converts a docstring.

    Args:
      lines: without the indentation that all of them share.
    """
    done, section = [], ""
    for line in lines:
        if (title := line.removesuffix(":")) in _TITLES and title != line:
            section = title
            done += ["", f":{_TITLES[section]}:"] + [""] * (section == "Example")
        elif section and line and not line.startswith(" "):
            section = ""
            done += ["", _marked(line)]
        elif section:
            done.append(_inside(line, section))
        else:
            done.append(_marked(line))
    return [*done, ""]


def _inside(line: str, section: str) -> str:
    """Returns a line of a section, whose indentation is two spaces."""
    text = line[2:]
    if section == "Example":
        return f"  {text}".rstrip()
    if section not in _LISTS:
        return f"  {_marked(text)}".rstrip()
    entry = re.match(r"([^\s:][^:]*): ?(.*)", text)
    if not entry:
        return f"    {_marked(text.strip())}".rstrip()
    return f"  - ``{entry[1]}``: {_marked(entry[2])}"


def _marked(text: str) -> str:
    """Doubles the marks of code; what else could be taken for markup is escaped."""
    pieces = _CODE.split(text)
    return "".join(
        f"`{piece}`"
        if _CODE.fullmatch(piece)
        else re.sub(r"([*|`\\_])", r"\\\1", piece)
        for piece in pieces
    )
