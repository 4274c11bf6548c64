"""What is asked of single images, and what their files are called."""

import dataclasses
import pathlib
import re

import numpy as np

from vit_jax.analysis.subject import Subject
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Choice:
    """What of each image is drawn.

    Attributes:
      query: row and column of the patch that asks; None is what the classifier looks
        at: the class token, or all patches alike where there is none.
      combine: how rollout makes one of the heads, "mean" or "max".
      discard: fraction of attention that rollout leaves out.
      classes: whose relevance is drawn; the most probable ones if empty.
      topk: as many of them.
      layers: whose attention is drawn, from 0; some of all if empty.
    """

    query: tuple[int, int] | None = None
    combine: str = "mean"
    discard: float = 0.0
    classes: tuple[int, ...] = ()
    topk: int = 2
    layers: tuple[int, ...] = ()


class Names:
    """Stems of files for images, each its own.

    Two images of one name in different folders get a number.
    """

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def stem(self, image: str) -> str:
        """Returns the stem of an image, the same whenever it is asked for."""
        if image not in self._known:
            plain = re.sub(r"[^\w.-]+", "_", pathlib.Path(image).stem).strip("._-")
            stem, number = plain or "image", 1
            while stem.lower() in {known.lower() for known in self._known.values()}:
                number += 1
                stem = f"{plain or 'image'}_{number}"
            self._known[image] = stem
        return self._known[image]


class Query:
    """Which tokens ask, as weights of sum 1.

    Attributes:
      name: for titles.
      weights: a token.
      centre: of the patch that asks, across and down, as fractions of the image; None
        if it is no patch.

    Raises:
      UserError: there is no such patch.
    """

    def __init__(self, subject: Subject, place: tuple[int, int] | None):
        model, (Y, X) = subject.model, subject.model.grid
        self.weights = np.zeros(model.extra + Y * X, np.float32)
        self.centre = None
        if place is not None:
            row, column = place
            if not (0 <= row < Y and 0 <= column < X):
                raise UserError(
                    f"--query={row},{column} is not a patch: rows are 0 to {Y - 1}, "
                    f"columns 0 to {X - 1}"
                )
            self.name = f"patch ({row}, {column})"
            self.weights[model.extra + row * X + column] = 1
            self.centre = (column + 0.5) / X, (row + 0.5) / Y
        elif model.options.get("head") == "token":
            self.name, self.weights[0] = "class token", 1
        else:
            self.name = "all patches"
            self.weights[model.extra :] = 1 / (Y * X)
