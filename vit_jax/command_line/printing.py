"""Prints lines without control characters and passwords, above any progress bar."""

import contextlib
import importlib.metadata
import io
import re
import sys
import unicodedata
from collections.abc import Iterable

_HIDDEN = "***"
# Credentials before the host of a URL: a key, as for hf.co, or user:password. A
# password may hold "/", "?", "#" and "@" unescaped, so it ends at the last "@" that a
# host follows. Digits after the first colon are a port; the path after a port may hold
# "@".
_USER = re.compile(
    r"(?<=://)(?:"
    r"[^\s/?#@:'\"\[]+:(?!\d*(?:[/?#\s'\"]|$))(?:(?!://)[^\s'\"])*(?=@[\w\[])"
    r"|[^\s/?#'\"]+(?=@))"
)
# Values of a URL's query, or of its fragment, that grant access. Presigned
# addresses of S3, Google and Azure carry a signature as X-Amz-Signature,
# X-Goog-Signature and sig.
_QUERY = re.compile(
    r"(?<=[?&;#])((?:[\w-]*(?:token|secret|password|passwd|signature|credential|"
    r"api-?_?key|accesskeyid|authorization)[\w-]*|auth|key|pwd|sig)=)[^\s&;#'\"]+",
    re.IGNORECASE,
)


def masked(text: str) -> str:
    """Returns a text with the passwords and keys of its URLs replaced by `***`."""
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\1{_HIDDEN}", _USER.sub(_HIDDEN, text))


def address(place: str) -> str:
    """Returns a location of weights for display: masked, without a URL's query."""
    shown = masked(place)
    return shown.partition("?")[0] if "://" in shown else shown


def printable(text: object) -> str:
    """Returns a text as one line for a terminal: masked, control characters escaped.

    Names of files, classes and labels may hold any character: a line break would fake a
    second message, and an escape sequence would steer the terminal.
    """
    return "".join(map(_escaped, masked(str(text))))


def _escaped(character: str) -> str:
    # Spaces of other scripts do not count as "printable", but are harmless.
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode("ascii")


def versions(packages: Iterable[str]) -> str:
    """Returns the versions of packages, such as "jax 0.10.2, libtpu 0.0.42".

    Those that are not installed are left out.
    """
    installed = []
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(installed)


def print_line(text: object, file: io.TextIOBase | None = None) -> None:
    """Prints one line, without delay, made `printable`, above any progress bar.

    Args:
      text: the line.
      file: file to print to; standard output if None.
    """
    file = file or sys.stdout
    tqdm = sys.modules.get("tqdm")  # Without it there is no bar.
    above = tqdm.tqdm.external_write_mode(file) if tqdm else contextlib.nullcontext()
    with above:
        print(printable(text), file=file, flush=True)


def print_error(text: object) -> None:
    """Prints one line on standard error, as `print_line` does."""
    print_line(text, sys.stderr)
