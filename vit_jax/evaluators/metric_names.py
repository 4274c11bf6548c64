"""Names of evaluation metrics, and how they are printed in a line or a table."""

import fnmatch
import re
from collections.abc import Mapping

from vit_jax.evaluators import EVALUATORS
from vit_jax.evaluators.splits import EvalConfig

# Ends of the interval of a metric.
_END = re.compile(r"[^/]+_(low|high)(/.*)?")


def is_accuracy(metric: str) -> bool:
    """Returns whether a metric is a mean accuracy at the first strength."""
    return re.fullmatch(r"(.*/)?\d+shot", metric) is not None


def is_beside(metric: str) -> bool:
    """Returns whether a metric is printed with another one, by `fewer_images`."""
    return metric.endswith("shot_short") or _END.fullmatch(metric) is not None


def fewer_images(metric: str, scores: Mapping[str, float]) -> str:
    """Returns " (3 classes have fewer images)", an interval " (0.5 to 0.7)", or "".

    `metric` is a name in `scores`, such as "25shot", "25shot_l2_1" or
    "few/params/25shot". `scores` may have the number of these classes, "25shot_short",
    or the ends of an interval, "mae_low" and "mae_high" of "mae", or "mae_low/age" of
    "mae/age".
    """
    name, slash, target = metric.partition("/")
    ends = [f"{name}_{end}{slash}{target}" for end in ("low", "high")]
    if all(end in scores for end in ends):
        form = ".2%" if is_fraction(metric) else ".4g"
        low, high = (f"{scores[end]:{form}}" for end in ends)
        return f" ({low} to {high})"
    shots = re.fullmatch(r"(.*?\d+shot)(_l2_[^_]+)?", metric)
    count = scores.get(f"{shots[1]}_short", 0) if shots else 0
    if not count:
        return ""
    return f" ({count} class{'es have' if count > 1 else ' has'} fewer images)"


def lower_is_better(metric: str) -> bool:
    """Returns whether lower values of a metric are better, as for losses and errors."""
    if metric.split("/")[0] in ("ece", "mae", "rmse"):
        return True
    return any(word in metric for word in ("loss", "error"))


def is_fraction(metric: str) -> bool:
    """Returns whether a metric of an evaluator is a fraction, shown in percent."""
    kinds = [*EVALUATORS.values(), EvalConfig]  # This imports all evaluators.
    for kind in kinds:  # Includes the evaluators of a user's modules.
        kinds += kind.__subclasses__()
    patterns = {pattern for kind in kinds for pattern in kind.fractions}
    return any(fnmatch.fnmatchcase(metric, pattern) for pattern in patterns)


def text(metric: str, value: int | float) -> str:  # noqa: PYI041 (beartype knows)
    """Returns a metric as a count, a percentage or a number."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.2%}" if is_fraction(metric) else f"{value:.6g}"
