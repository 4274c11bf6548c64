"""Progress bars: on terminals alone, of one look in all commands."""

from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

_MIN_BAR = 4  # Columns that the bar itself keeps.


def bar(total: int | None, title: str, unit: str, **options: Any) -> tqdm:
    """Returns a bar on standard error; nothing is shown where that is no terminal.

    `printing.print_line` prints above it.

    Args:
      total: units of the whole; None if unknown.
      title: stands before the bar.
      unit: in the plural, as "images"; "B" counts bytes in powers of 1,000.
      **options: of tqdm, as `initial`.
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
    """Iterates over items that have a length, with a bar of them, see `bar`."""
    return bar(len(items), title, unit, iterable=items, **options)


class StepBar:
    """The bar of a run: steps taken of all, then whatever fits the terminal.

    Args:
      start: steps taken before.
      total: steps of the run.
      active: whether to show it; standard error has to be a terminal in any case.
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
        """Moves the bar.

        Args:
          step: steps taken.
          *parts: texts behind the bar, the most important first; empty repeats those of
            the last call. Texts that the terminal has no room for are left out.
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
