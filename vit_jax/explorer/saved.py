"""The page's files, and the page of one image as a single file that needs no server."""

import base64
import dataclasses
import gzip
import hashlib
import importlib.resources
import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from vit_jax.errors import UserError
from vit_jax.explorer.rows import LEVELS, Rows
from vit_jax.explorer.session import summary
from vit_jax.explorer.subject import Seen, Subject
from vit_jax.report.writer import replace_bytes

PAGE = "index.html"
MAX_BYTES = 5_000_000
# Tried in turn until the file is small enough: of each pool all steps. The last of the
# steps fit a byte into two bits.
STEPS = (LEVELS, 127, 63, 31, 15, 7, 3)
POOLS = (1, 2, 3, 4, 6, 8)
LEAST_BLOCKS = 4  # Of the shorter side of a grid: fewer would show nothing.

_SAMPLE = 12  # Maps of a model that are compressed to estimate the size of all.
_DOUBT = 1.2  # Estimates may be so many times too large.
# Levels of gzip: 8 gives up to 12 % less than 6 in up to six times as long, 9 another
# 3 % in twice as long as 8.
_QUICK, _SMALL = 6, 8

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_STYLE = re.compile(r'<link rel="stylesheet" href="(.+?)" />')
_SCRIPT = re.compile(r'\s*<script src="(.+?)"></script>')


def assets() -> dict[str, tuple[str, bytes]]:
    """Returns the page's files: name to media type and content."""
    folder = importlib.resources.files("vit_jax.explorer") / "page"
    return {
        entry.name: (
            f"{_TYPES[os.path.splitext(entry.name)[1]]}; charset=utf-8",
            entry.read_bytes(),
        )
        for entry in folder.iterdir()
    }


class Written(NamedTuple):
    """What became of a file.

    Attributes:
      size: in bytes.
      steps: in which attention is told apart.
      pool: side of the blocks of patches whose mean is kept; 1 is each patch by itself.
    """

    size: int
    steps: int
    pool: int


def write(
    path: str, subjects: Sequence[Subject], seen: Sequence[Seen], name: str
) -> Written:
    """Writes what models made of an image as one file, for any browser.

    Args:
      path: of the file, which is written whole or not at all.
      subjects: the models.
      seen: what each made of the image.
      name: of the image.

    Returns:
      Its size, at most MAX_BYTES, and how coarse its attention had to become.

    Raises:
      UserError: the file cannot be written, or the coarsest attention is too large.
    """
    grids = [subject.describe()["grid"] for subject in subjects]
    for choice, size in _estimates(grids, subjects, seen, name):
        if size > _DOUBT * MAX_BYTES:
            continue
        coarse = [
            dataclasses.replace(one, rows=_coarse(one.rows, grid, *choice))
            for one, grid in zip(seen, grids, strict=True)
        ]
        content = page(subjects, coarse, name)
        size = len(content)
        if size <= MAX_BYTES:
            _replace(path, content)
            return Written(size, choice[1], max(one.rows.pool for one in coarse))
    raise UserError(
        f"--html={path} would have {size / 1e6:.1f} MB, more than "
        f"{MAX_BYTES / 1e6:g}, however coarse its attention: set a smaller --resolution"
        + (", or leave out --compare" if len(seen) > 1 else "")
    )


def _estimates(grids, subjects, seen, name) -> Iterator[tuple[tuple[int, int], float]]:
    """Yields pools and steps, finest first, and about how large the page is."""
    # To compress all of a large model takes a minute, and most would be in vain.
    parts = [one.rows.some(_SAMPLE) for one in seen]
    shares = [
        part.levels.shape[2] / (one.rows.levels.shape[1] * one.rows.levels.shape[2])
        for part, one in zip(parts, seen, strict=True)
    ]
    empty = [dataclasses.replace(one, rows=one.rows.some(0)) for one in seen]
    rest = len(page(subjects, empty, name))
    for pool in POOLS:
        if pool > 1 and pool > max(min(grid) // LEAST_BLOCKS for grid in grids):
            return
        for steps in STEPS:
            sizes = [
                len(_packed(_coarse(part, grid, pool, steps), _QUICK)) / share
                for part, grid, share in zip(parts, grids, shares, strict=True)
            ]
            yield (pool, steps), rest + 4 / 3 * sum(sizes)  # Letters for bytes.


def _coarse(rows: Rows, grid: tuple[int, int], pool: int, steps: int) -> Rows:
    # Beside a model of many patches one of few may stay as it is.
    pool = min(pool, max(1, min(grid) // LEAST_BLOCKS))
    rows = rows.pooled(grid, pool) if pool > 1 else rows
    return rows.coarser(steps) if steps < LEVELS else rows


def _replace(path: str, content: bytes) -> None:
    try:
        replace_bytes(epath.Path(path), content)
    except OSError as error:
        raise UserError(f"--html={path} cannot be written: {error}") from error


def page(subjects: Sequence[Subject], seen: Sequence[Seen], name: str) -> bytes:
    """Returns the page with an image, its attention and all that it needs inside."""
    files = {key: content.decode() for key, (_, content) in assets().items()}
    text = files[PAGE]
    style = "\n".join(files[file] for file in _STYLE.findall(text))
    script = "\n".join(files[file] for file in _SCRIPT.findall(text))
    state = {
        "models": [subject.describe() for subject in subjects],
        "seen": {"key": "", "name": name, "models": [summary(one) for one in seen]},
        "pictures": [f"data:image/png;base64,{_text(one.picture)}" for one in seen],
    }
    data = [f'<script type="application/json" id="saved">{_escaped(state)}</script>']
    data += [
        f'<script type="text/plain" id="rows{i}">{_text(_packed(one.rows))}</script>'
        for i, one in enumerate(seen)
    ]
    text = _STYLE.sub("", text)
    text = _SCRIPT.sub("", text)
    head = f"{_policy(style, script)}<style>{style}</style>"
    text = text.replace("</head>", f"{head}\n</head>")
    end = "\n".join([*data, f"<script>{script}</script>"])
    return text.replace("</body>", f"{end}\n</body>").encode()


def _packed(rows: Rows, level: int = _SMALL) -> bytes:
    """Returns all scales, then all levels, compressed.

    Layers come first here, because what lies together then is alike and is compressed
    better. They go one by one: together they may have hundreds of megabytes.
    """
    packed = io.BytesIO()
    with gzip.GzipFile("", "wb", level, packed, mtime=0) as file:
        for array in (rows.scales.astype("<f4", copy=False), rows.levels):
            for layer in np.moveaxis(array, 1, 0):
                file.write(np.ascontiguousarray(np.moveaxis(layer, 0, 1)))
    return packed.getvalue()


def _policy(style: str, script: str) -> str:
    """Returns the element by which nothing but this style and script has any effect."""
    hashes = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (style, script)
    )
    style, script = (f"'sha256-{text}'" for text in hashes)
    return (
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"img-src data:; style-src {style}; script-src {script}; base-uri 'none'; "
        "form-action 'none'\" />\n"
    )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _escaped(state: dict) -> str:
    # So that no name of a class can end the element.
    return json.dumps(state).replace("<", "\\u003c")
