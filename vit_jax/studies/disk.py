"""What a study says when it cannot write."""

import contextlib
import os
from collections.abc import Iterator

from vit_jax.errors import UserError


@contextlib.contextmanager
def writing(path: str | os.PathLike, repeated: str = "no run") -> Iterator[None]:
    """Turns a disk that is full, gone or read-only into one line.

    Args:
      path: what is written within.
      repeated: what the next start must do again.

    Raises:
      UserError: the line.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror or error}): mend that, then "
            f"start again: {repeated} is repeated"
        ) from error
