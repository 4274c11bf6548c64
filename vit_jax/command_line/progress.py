"""Progress bars, on terminals only, that look the same in all commands."""

from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

_MIN_BAR = 4  # Columns that the bar itself keeps.


def bar(total: int | None, title: str, unit: str, **options: Any) -> tqdm:
    """Returns a progress bar on standard error, shown only if that is a terminal.

    `printing.print_line` prints lines above it.

    Args:
      total: number of units; None if unknown.
      title: text before the bar.
      unit: name of the units in the plural, such as "images"; "B" counts bytes in
        powers of 1,000.
      **options: options of tqdm, such as `initial`.
    """
    scaled = unit == "B"
    return tqdm(
        total=total,
        desc=title,
        unit="B" if scaled else f" {unit}",
        unit_scale=scaled,
        dynamic_ncols=True,
        **{"disable": None} | options,
    )


def each(items: Iterable, title: str, unit: str, **options: Any) -> Iterable:
    """Iterates over a collection and shows a `bar` of its items."""
    return bar(len(items), title, unit, iterable=items, **options)


class StepBar:
    """Progress bar of a run: steps taken, steps in total, and texts that still fit.

    Args:
      start: steps taken before this start.
      total: steps of the run.
      active: whether to show the bar if standard error is a terminal.
    """

    def __init__(self, start: int, total: int, *, active: bool):
        self._parts: tuple[str, ...] = ()
        self._bar = bar(
            total,
            "",
            "steps",
            initial=start,
            disable=None if active else True,
            leave=False,
            bar_format="{n_fmt}/{total_fmt} |{bar}| {desc}",
        )

    def show(self, step: int, *parts: str) -> None:
        """Updates the bar.

        Args:
          step: steps taken.
          *parts: texts after the bar, the most important first; without any, the texts
            of the last call stay. Texts that do not fit the terminal are left out.
        """
        if self._bar.disable:
            return
        self._parts = parts or self._parts
        columns = self._bar.format_dict["ncols"] or 80
        room = columns - len(f"{self._bar.total}/{self._bar.total} || ") - _MIN_BAR
        fitting = []
        for part in self._parts:
            if len("  ".join([*fitting, part])) > room:
                break
            fitting.append(part)
        self._bar.set_description_str("  ".join(fitting), refresh=False)
        self._bar.update(step - self._bar.n)

    def close(self) -> None:
        """Removes the bar."""
        self._bar.close()
