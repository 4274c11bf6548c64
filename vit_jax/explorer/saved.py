"""The page's files, and the page of one image as a single file that needs no server."""

import base64
import gzip
import hashlib
import importlib.resources
import json
import os
import re
from collections.abc import Sequence

import numpy as np

from vit_jax.errors import UserError
from vit_jax.explorer.rows import LEVELS, Rows
from vit_jax.explorer.session import summary
from vit_jax.explorer.subject import Seen, Subject

PAGE = "index.html"
MAX_BYTES = 5_000_000
# Tried in turn until the file is small enough. The last fits a byte into two bits.
STEPS = (LEVELS, 127, 63, 31, 15, 7, 3)

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


def write(
    path: str, subjects: Sequence[Subject], seen: Sequence[Seen], name: str
) -> tuple[int, int]:
    """Writes what models made of an image as one file, for any browser.

    Args:
      path: of the file.
      subjects: the models.
      seen: what each made of the image.
      name: of the image.

    Returns:
      The file's bytes, at most MAX_BYTES unless the coarsest attention has more, and
      the steps in which attention is told apart.

    Raises:
      UserError: the file cannot be written.
    """
    for steps in STEPS:
        content = page(subjects, [_coarser(one, steps) for one in seen], name)
        if len(content) <= MAX_BYTES:
            break
    try:
        with open(path, "wb") as file:
            file.write(content)
    except OSError as error:
        raise UserError(f"--html={path} cannot be written: {error}") from error
    return len(content), steps


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


def _coarser(seen: Seen, steps: int) -> Seen:
    if steps == LEVELS:
        return seen
    return Seen(seen.classes, seen.box, seen.picture, seen.rows.coarser(steps))


def _packed(rows: Rows) -> bytes:
    """Returns all scales, then all levels, compressed.

    Layers come first here, because what lies together then is alike and is compressed
    better.
    """
    parts = (
        np.ascontiguousarray(np.moveaxis(array, 0, 2))
        for array in (rows.scales.astype("<f4", copy=False), rows.levels)
    )
    return gzip.compress(b"".join(part.tobytes() for part in parts), mtime=0)


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
