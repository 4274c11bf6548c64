"""ImageNet-C: error on corrupted images, relative to AlexNet (arXiv:1903.12261).

There are 15 corruptions, and 4 more that do not count in the mean, each at 5
severities; each of these sets has all validation images. Letters: N examples.
"""

import dataclasses
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from jaxtyping import Bool

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.evaluators.forward_passes import Outputs, Wanted
from vit_jax.evaluators.protocol import Evaluator, Pass, Scored, mean
from vit_jax.evaluators.splits import EvalSplit, EvalSplits, ModelClassesConfig

SEVERITIES = (1, 2, 3, 4, 5)
GROUPS = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    "extra": ("speckle_noise", "gaussian_blur", "spatter", "saturate"),
}
# AlexNet's error on each corruption, the mean over the severities, from
# google-research/ augmix 202cf4c (imagenet.py), which took it from the authors' table,
# "Calculating the mCE" in the README of hendrycks/robustness.
ALEXNET = {
    "gaussian_noise": 0.886428,
    "shot_noise": 0.894468,
    "impulse_noise": 0.922640,
    "defocus_blur": 0.819880,
    "glass_blur": 0.826268,
    "motion_blur": 0.785948,
    "zoom_blur": 0.798360,
    "snow": 0.866816,
    "frost": 0.826572,
    "fog": 0.819324,
    "brightness": 0.564592,
    "contrast": 0.853204,
    "elastic_transform": 0.646056,
    "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}
ALEXNET_CLEAN = 0.435  # On the clean images (arXiv:1903.12261, table 1).

_FOLDER = "folder"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorruptionsConfig(ModelClassesConfig):
    """ImageNet-C: the mean corruption error."""

    fractions: ClassVar = (
        *("mce", "relative_mce", "mean_error", "clean_error"),
        *("error/*", "ce/*"),
    )

    kind: str = key("corruptions", "Kind of evaluation.")
    name: str = key(
        _FOLDER,
        '"folder": `data_dir` has CORRUPTION/SEVERITY/CLASS/*.JPEG, or these in the '
        "folders of the authors' archives (noise, blur, weather, digital, extra); or "
        '"imagenet2012_corrupted" of TFDS.',
    )
    eval_transform: str = key(
        "resize",
        "Transforms of the images. These have 224 pixels already, and the authors do "
        'not crop them; "resize" fits them to networks of another size.',
    )
    extra: bool = key(
        False,
        "Whether to also evaluate the 4 corruptions that do not count in the mean.",
    )
    clean: str = key(
        "",
        'Split of `data.name` with the clean images, for relative_mce; "" omits '
        "that metric.",
    )

    def open(self, name, splits):
        sets = {
            (corruption, severity): self._open_set(name, splits, corruption, severity)
            for group, corruptions in GROUPS.items()
            for corruption in corruptions
            for severity in SEVERITIES
            if self.extra or group != "extra"
        }
        first = next(iter(sets.values()))
        for split in sets.values():
            if split.source.class_names != first.source.class_names:
                raise UserError(
                    f"evals.{name}: the class folders of {split.title} are not those of "
                    f"{first.title}: unpack both again"
                )
        # Matched once: all sets have the same classes.
        matched = splits.match(
            name,
            first,
            splits.class_names,
            splits.num_classes,
            by=self.match_classes,
        )
        classes = np.array(matched.classes)
        opened = list(sets.values())
        if self.clean:
            how = ModelClassesConfig(match_classes=self.match_classes)
            opened.append(splits.open(name, how, self.clean, model_classes=True))

        def score_all(outputs: Sequence[Outputs], stop) -> Scored:
            right = {
                of_set: classes[one.labels] == one.predictions.tops[:, 0]
                for of_set, one in zip(sets, outputs, strict=False)
            }
            clean = None
            if self.clean:
                clean = outputs[-1].labels == outputs[-1].predictions.tops[:, 0]
            return score(right, clean)

        wanted = Wanted(predictions=True)
        return Evaluator(tuple(Pass(one, wanted) for one in opened), score_all)

    def _open_set(
        self, name: str, splits: EvalSplits, corruption: str, severity: int
    ) -> EvalSplit:
        how, split = self, "validation"
        if self.name == _FOLDER:
            split = _folder(name, self.data_dir, corruption, severity)
        else:
            how = dataclasses.replace(self, name=f"{self.name}/{corruption}_{severity}")
        return splits.open(name, how, split, model_classes=False)


def _folder(name: str, data_dir: str, corruption: str, severity: int) -> str:
    """Returns the folder of a set in `data_dir`; raises UserError if it is missing."""
    where = os.path.expanduser(data_dir)
    if not data_dir or not os.path.isdir(where):
        raise UserError(
            f"evals.{name}.data_dir={data_dir!r} is not a folder: give the one with the "
            "folders of ImageNet-C, such as gaussian_noise/1"
        )
    (group,) = (group for group, names in GROUPS.items() if corruption in names)
    for place in (f"{corruption}/{severity}", f"{group}/{corruption}/{severity}"):
        if os.path.isdir(os.path.join(where, place)):
            return place
    raise UserError(
        f"evals.{name}.data_dir={data_dir!r}: {corruption}/{severity} is missing: all "
        f"severities of all corruptions count; unpack {group}.tar of ImageNet-C there"
    )


def score(
    right: Mapping[tuple[str, int], Bool[np.ndarray, " N"]],
    clean: Bool[np.ndarray, " N"] | None = None,
) -> Scored:
    """Scores the answers on all sets, as in section 4 of the paper.

    Args:
      right: whether each answer is right, by (corruption, severity).
      clean: whether each answer on the clean images is right; None if unknown.

    Returns:
      mce, the mean over the 15 corruptions of ce/CORRUPTION, which is the error summed
      over the severities divided by AlexNet's; with `clean` relative_mce, computed in
      the same way from the increase of the error over that on clean images, and
      clean_error; mean_error, the mean over the 15 corruptions;
      error/CORRUPTION/SEVERITY, and their mean, error/CORRUPTION; examples.
    """
    by_set = {of_set: 1 - mean(answers) for of_set, answers in right.items()}
    errors = {
        corruption: statistics.fmean(by_set[corruption, s] for s in SEVERITIES)
        for corruption, severity in by_set
        if severity == SEVERITIES[0]
    }
    # A ratio of sums equals a ratio of means: both have the same number of severities.
    ce = {name: errors[name] / of_alexnet for name, of_alexnet in ALEXNET.items()}
    metrics = {"mce": statistics.fmean(ce.values())}
    if clean is not None:
        clean_error = 1 - mean(clean)
        metrics["relative_mce"] = statistics.fmean(
            (errors[name] - clean_error) / (of_alexnet - ALEXNET_CLEAN)
            for name, of_alexnet in ALEXNET.items()
        )
        metrics["clean_error"] = clean_error
    metrics["mean_error"] = statistics.fmean(errors[name] for name in ALEXNET)
    metrics |= {f"ce/{name}": value for name, value in ce.items()}
    metrics |= {f"error/{name}": value for name, value in errors.items()}
    metrics |= {f"error/{name}/{s}": value for (name, s), value in by_set.items()}
    metrics["examples"] = sum(map(len, right.values()))
    return Scored(metrics)
