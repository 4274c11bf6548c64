"""Predictions for a person, as a table, and for a program, as lines of JSON."""

import dataclasses
import json
from collections.abc import Iterable

from vit_jax.printing import printable


class Table:
    """Lays predictions out in columns: file, probability, class.

    Args:
      names: of the files as far as they are known; later ones widen the column.
    """

    def __init__(self, names: Iterable[str] = ()):
        self._width = max(map(len, ("file", *map(printable, names))))
        self._headed = False

    def rows(self, name: str, predictions: Iterable) -> str:
        """Returns the lines of one image, the first time below a heading.

        Args:
          name: of its file.
          predictions: with `name` and `probability`, best first.
        """
        name = printable(name)
        self._width = max(self._width, len(name))
        lines = []
        if not self._headed:
            lines.append(f"{'file':<{self._width}}  {'probability':>11}  class")
            self._headed = True
        for i, one in enumerate(predictions):
            first = "" if i else name
            percent = f"{100 * one.probability:.2f} %"
            lines.append(
                f"{first:<{self._width}}  {percent:>11}  {printable(one.name)}"
            )
        return "\n".join(lines)


def to_json(name: str, predictions: Iterable) -> str:
    """Returns one image as a JSON object in one line.

    Args:
      name: of its file.
      predictions: instances of a dataclass, best first.
    """
    entries = [dataclasses.asdict(one) for one in predictions]
    return json.dumps({"file": name, "predictions": entries})
