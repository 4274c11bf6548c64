"""The means of VTAB-1k: of its groups and of all tasks, with intervals over seeds."""

import math
import statistics
from collections.abc import Mapping, Sequence

GROUPS = ("natural", "specialised", "structured")
_CONFIDENCE = 0.95


def summary(found: Mapping[str, dict]) -> dict:
    """Returns the means over tasks, each the mean over seeds with an interval.

    A seed's mean is that of its runs of all tasks; the interval is of these means.

    Args:
      found: task to its group and its runs, in the order of the seeds; one that has no
        runs does not count.

    Returns:
      "groups": of each with a run, "mean", "interval" and how many "tasks" ran; and the
      same of all tasks. Intervals are half widths of 95 %, None with one seed; without
      any run the mean is None too.
    """
    ran = {name: task for name, task in found.items() if "runs" in task}
    groups = {}
    for group in GROUPS:
        members = [task for task in ran.values() if task["group"] == group]
        if members:
            mean, half = interval(_by_seed(members))
            groups[group] = {"mean": mean, "interval": half, "tasks": len(members)}
    mean, half = interval(_by_seed(list(ran.values()))) if ran else (None, None)
    return {"groups": groups, "mean": mean, "interval": half, "tasks_run": len(ran)}


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns the mean and the half width of its 95 % interval, by Student's t."""
    from scipy import special

    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return mean, None
    t = float(special.stdtrit(n - 1, (1 + _CONFIDENCE) / 2))
    return mean, t * statistics.stdev(values) / math.sqrt(n)


def _by_seed(members: Sequence[Mapping]) -> list[float]:
    """Returns the mean over tasks of each seed."""
    scores = [[run["top1"] for run in task["runs"]] for task in members]
    return [statistics.fmean(one) for one in zip(*scores, strict=True)]
