"""Renders the templates in the tools' folders: HTML pages and Markdown."""

import functools
import itertools
import re
from collections.abc import Iterator, Sequence

import jinja2

from vit_jax.analysis.charts import Chart, Matrix
from vit_jax.tools.report.blocks import Block


def render(template: str, **values: object) -> str:
    """Renders a template, such as "report/page.html"; HTML is escaped.

    Bytes in file names that are not UTF-8 become question marks.
    """
    text = _environment().get_template(template).render(values)
    return text.encode("utf-8", "replace").decode()


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vit_jax.tools", ""),
        autoescape=lambda name: not name.endswith(".md"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"markdown": _markdown, "picture_groups": _picture_groups}
    return environment


def _markdown(text: str) -> str:
    """Escapes the characters that Markdown reads as formatting."""
    return re.sub(r"[\\*_<`|]", r"\\\g<0>", text).replace("\n", " ") or " "


def _picture_groups(blocks: Sequence[Block]) -> Iterator[tuple[bool, Iterator[Block]]]:
    """Groups neighbouring blocks by whether they are pictures, which share rows."""
    return itertools.groupby(blocks, lambda block: isinstance(block, Chart | Matrix))
