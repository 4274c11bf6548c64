"""The page's files, and the page of one image as a single file without a server."""

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

from vit_jax.command_line.files import replace_bytes
from vit_jax.errors import UserError
from vit_jax.tools.explorer.rows import LEVELS, AttentionRows, WindowRows
from vit_jax.tools.explorer.session import ExploredModel, ModelOutput

PAGE = "index.html"
MAX_BYTES = 5_000_000
# All numbers of steps are tried for each pool until the file is small enough. The
# smallest one fits into two bits.
STEPS = (LEVELS, 127, 63, 31, 15, 7, 3)
POOLS = (1, 2, 3, 4, 6, 8)
MIN_BLOCKS = 4  # Minimum along the shorter side of a grid: fewer would show nothing.

_SAMPLE_MAPS = 12  # Number of maps that are compressed to estimate all sizes.
_ESTIMATE_MARGIN = 1.2  # Factor by which estimates may be too large.
# Levels of gzip: the output of 8 is up to 12 % smaller than that of 6 and takes up to
# six times as long. Level 9 saves another 3 % and takes twice as long as 8.
_QUICK, _SMALL = 6, 8

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_STYLE = re.compile(r'<link rel="stylesheet" href="(.+?)" />')
_SCRIPT = re.compile(r'\s*<script src="(.+?)"></script>')


def assets() -> dict[str, tuple[str, bytes]]:
    """Returns media type and content of the page's files, by name."""
    folder = importlib.resources.files("vit_jax.tools.explorer") / "page"
    return {
        entry.name: (
            f"{_TYPES[os.path.splitext(entry.name)[1]]}; charset=utf-8",
            entry.read_bytes(),
        )
        for entry in folder.iterdir()
    }


class SavedPage(NamedTuple):
    """Size and resolution of a saved page.

    Attributes:
      size: size in bytes.
      steps: level of the largest attention, see `AttentionRows`.
      pool: side of the blocks of patches whose mean is kept; 1 keeps every patch.
    """

    size: int
    steps: int
    pool: int


def write(
    path: str,
    models: Sequence[ExploredModel],
    outputs: Sequence[ModelOutput],
    name: str,
) -> SavedPage:
    """Writes the page with one image as one file, for any browser.

    Args:
      path: path of the file, which is replaced only by a complete one.
      models: the models.
      outputs: output of each model for the image.
      name: name of the image.

    Returns:
      Size and resolution of the page.

    Raises:
      UserError: the file cannot be written, or `build` failed.
    """
    content, page = build(models, outputs, name)
    try:
        replace_bytes(epath.Path(path), content)
    except OSError as error:
        raise UserError(f"--html={path} cannot be written: {error}") from error
    return page


def build(
    models: Sequence[ExploredModel], outputs: Sequence[ModelOutput], name: str
) -> tuple[bytes, SavedPage]:
    """Returns the page with one image as one file.

    Args:
      models, outputs, name: arguments of `write`.

    Returns:
      The file, of at most MAX_BYTES, and its resolution, reduced until the size fits.

    Raises:
      UserError: a model has attention only within windows, or the page is too large
        even at the coarsest resolution.
    """
    if any(isinstance(output.rows, WindowRows) for output in outputs):
        raise UserError(
            "a file has the attention between all patches, which a Swin Transformer does "
            "not compute: use the page without --html, or visualize --figure=windows"
        )
    pairs = zip(models, outputs, strict=True)
    outputs = [_with_relevances(model, output) for model, output in pairs]
    grids = [output.grid for output in outputs]
    for (pool, steps), size in _estimates(grids, models, outputs, name):
        if size > _ESTIMATE_MARGIN * MAX_BYTES:
            continue
        coarse = [
            dataclasses.replace(output, rows=_coarsen(output.rows, grid, pool, steps))
            for output, grid in zip(outputs, grids, strict=True)
        ]
        content = page(models, coarse, name)
        size = len(content)
        if size <= MAX_BYTES:
            pool = max(output.rows.pool for output in coarse)
            return content, SavedPage(size, steps, pool)
    raise UserError(
        f"the page would have {size / 1e6:.1f} MB, more than {MAX_BYTES / 1e6:g}, even "
        "with the coarsest attention: set a smaller --resolution"
        + (", or leave out --compare" if len(outputs) > 1 else "")
    )


def _estimates(grids, models, outputs, name) -> Iterator[tuple[tuple[int, int], float]]:
    """Yields pool and steps, finest first, with an estimate of the page's bytes."""
    # Compressing all attention of a large model takes a minute, and most choices turn
    # out too large.
    rows = [output.rows for output in outputs]
    samples = [each.sample_maps(_SAMPLE_MAPS) for each in rows]
    shares = [
        sample.levels.shape[2] / (each.levels.shape[1] * each.levels.shape[2])
        for sample, each in zip(samples, rows, strict=True)
    ]
    empty = [dataclasses.replace(out, rows=out.rows.sample_maps(0)) for out in outputs]
    rest = len(page(models, empty, name))
    for pool in POOLS:
        if pool > 1 and pool > max(min(grid) // MIN_BLOCKS for grid in grids):
            return
        for steps in STEPS:
            sizes = [
                len(_compress(_coarsen(sample, grid, pool, steps), _QUICK)) / share
                for sample, grid, share in zip(samples, grids, shares, strict=True)
            ]
            yield (pool, steps), rest + 4 / 3 * sum(sizes)  # The size as base64.


def _coarsen(
    rows: AttentionRows, grid: tuple[int, int], pool: int, steps: int
) -> AttentionRows:
    # A small grid may stay unpooled when a large one must be pooled.
    pool = min(pool, max(1, min(grid) // MIN_BLOCKS))
    rows = rows.pool_patches(grid, pool) if pool > 1 else rows
    return rows.requantize(steps) if steps < LEVELS else rows


def page(
    models: Sequence[ExploredModel], outputs: Sequence[ModelOutput], name: str
) -> bytes:
    """Returns the page with an image, its attention, style and scripts in one file."""
    files = {key: content.decode() for key, (_, content) in assets().items()}
    text = files[PAGE]
    style = "\n".join(files[file] for file in _STYLE.findall(text))
    script = "\n".join(files[file] for file in _SCRIPT.findall(text))
    state = {
        "models": [model.describe() for model in models],
        "seen": {
            "key": "",
            "name": name,
            "models": [output.summary() for output in outputs],
        },
        "pictures": [
            f"data:image/png;base64,{_base64(output.picture)}" for output in outputs
        ],
        "relevances": [output.relevances for output in outputs],
    }
    # Escaped, so that no class name can end the element.
    saved = json.dumps(state).replace("<", "\\u003c")
    data = [f'<script type="application/json" id="saved">{saved}</script>']
    for i, output in enumerate(outputs):
        rows = _base64(_compress(output.rows))
        data.append(f'<script type="text/plain" id="rows{i}">{rows}</script>')
    text = _SCRIPT.sub("", _STYLE.sub("", text))
    head = f"{_policy(style, script)}<style>{style}</style>"
    text = text.replace("</head>", f"{head}\n</head>")
    end = "\n".join([*data, f"<script>{script}</script>"])
    return text.replace("</body>", f"{end}\n</body>").encode()


def _with_relevances(model: ExploredModel, output: ModelOutput) -> ModelOutput:
    """Returns an output with the relevance to each class that the page shows."""
    relevances = {c.label: model.relevance(output, c.label) for c in output.classes}
    rounded = {
        label: [float(f"{value:.3g}") for value in values]
        for label, values in relevances.items()
        if values is not None
    }
    return dataclasses.replace(output, relevances=rounded)


def _compress(rows: AttentionRows, level: int = _SMALL) -> bytes:
    """Returns all scales, then all levels, compressed; the first axis is the layer."""
    # Layers come first, because similar values next to each other compress better. They
    # are written one by one, because together they may have hundreds of megabytes.
    packed = io.BytesIO()
    with gzip.GzipFile("", "wb", level, packed, mtime=0) as file:
        for array in (rows.scales.astype("<f4", copy=False), rows.levels):
            for layer in np.moveaxis(array, 1, 0):
                file.write(np.ascontiguousarray(np.moveaxis(layer, 0, 1)))
    return packed.getvalue()


def _policy(style: str, script: str) -> str:
    """Returns the meta element that allows only this style and this script."""
    hashes = (
        _base64(hashlib.sha256(text.encode()).digest()) for text in (style, script)
    )
    style, script = (f"'sha256-{text}'" for text in hashes)
    return (
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"img-src data:; style-src {style}; script-src {script}; base-uri 'none'; "
        "form-action 'none'\" />\n"
    )


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
