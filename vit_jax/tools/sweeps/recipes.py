"""How each data set is fine-tuned on: rates, steps, splits, transforms.

Source: arXiv:2010.11929, table 4. Of VTAB-1k it gives the steps and the one rate; the
warmup and each task's transforms are those of github.com/google-research/scenic
(vtab_plainvit_config.py). The paper names no augmentation otherwise: images are resized
and cropped at the ratio of 448 to 384, as there, and mirrored.
"""

import dataclasses
import os

from vit_jax.data import catalogue
from vit_jax.data.sources import vtab
from vit_jax.data.sources.folder import inside
from vit_jax.errors import UserError
from vit_jax.evaluators import splits

# Peak rates to try on the held-out part, and steps.
SWEEP = {
    "imagenet2012": (0.003, 0.01, 0.03, 0.06),
    "cifar100": (0.001, 0.003, 0.01, 0.03),
    "cifar10": (0.001, 0.003, 0.01, 0.03),
    "oxford_iiit_pet": (0.001, 0.003, 0.01, 0.03),
    "oxford_flowers102": (0.001, 0.003, 0.01, 0.03),
}
STEPS = {
    "imagenet2012": 20_000,
    "cifar100": 10_000,
    "cifar10": 10_000,
    "oxford_iiit_pet": 500,
    "oxford_flowers102": 500,
}
# For sets that are not in the paper: as its sets of such a size. BiT
# (arXiv:1912.11370) draws the lines between small, medium and large here.
_OTHER_RATES = (0.001, 0.003, 0.01, 0.03)
_OTHER_STEPS = ((20_000, 500), (500_000, 10_000), (float("inf"), 20_000))
_OTHER_HELD_OUT = 10  # Percent, as of the paper's small sets.
_VTAB_RATES, _VTAB_STEPS, _VTAB_WARMUP = (0.01,), 2_500, 200
_CROP = 448 / 384  # Size resized to, by the size cropped.


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a data set says of its fine-tuning.

    Attributes:
      dataset: as data.name.
      data_dir: as data.data_dir.
      num_classes: number of classes; 0 if the training split is to tell.
      train: split for the final runs.
      part: split to train on while the rate is chosen.
      held_out: split that chooses it.
      test: split that is reported.
      rates: peak rates to choose from.
      steps: of every run; 0 if the size of `train` is to tell, see `steps_for`.
      warmup: steps of linear warmup.
      crop: train on random crops of a somewhat larger size.
      flip: mirror half of the training images.
      source: where the numbers come from, for people.
    """

    dataset: str
    data_dir: str
    num_classes: int
    train: str
    part: str
    held_out: str
    test: str
    rates: tuple[float, ...]
    steps: int
    warmup: int = 0
    crop: bool = True
    flip: bool = True
    source: str = "arXiv:2010.11929, table 4"

    @property
    def title(self) -> str:
        """The name of the set, of a folder its own."""
        if self.dataset != "folder":
            return self.dataset
        return os.path.basename(os.path.abspath(os.path.expanduser(self.data_dir)))

    def ops(self, image_size: tuple[int, int]) -> str:
        """Returns `data.train_transform` for images of a height and width in pixels."""
        size = tuple(round(side * _CROP) for side in image_size)
        ops = [f"resize({size})", "random_crop"] if self.crop else ["resize"]
        return " | ".join(ops + ["flip"] * self.flip)

    def average(self, image_size: tuple[int, int]) -> float:
        """Returns `ema.decay`: table 2 averages on ImageNet above 384 pixels."""
        large = max(image_size) > 384
        return 0.9999 if self.dataset == "imagenet2012" and large else 0.0


def find(dataset: str, data_dir: str = "", test: str = "") -> Recipe:
    """Returns the recipe of a data set.

    Args:
      dataset: one of `SWEEP`, "digits", "vtab/TASK", a folder, or any data.name.
      data_dir: where it lies; of no meaning for a folder.
      test: split to report on, where it is not the usual one.

    Raises:
      UserError: no such task, or no split to test on is to be found.
    """
    if dataset.startswith("vtab/"):
        return _of_task(dataset, data_dir, test)
    if dataset in SWEEP:
        entry = catalogue.ENTRIES[dataset]
        return Recipe(
            dataset,
            data_dir,
            entry.num_classes,
            entry.splits["train"],
            entry.splits["dev train"],
            entry.splits["dev"],
            test or entry.splits["test"],
            SWEEP[dataset],
            STEPS[dataset],
        )
    if dataset != "digits" and os.path.isdir(os.path.expanduser(dataset)):
        dataset, data_dir = "folder", dataset
        test = test or _test_folder(data_dir)
    kept = 100 - _OTHER_HELD_OUT
    return Recipe(
        dataset,
        data_dir,
        0,
        "train",
        f"train[:{kept}%]",
        f"train[{kept}%:]",
        test or "test",
        _OTHER_RATES,
        0,
        flip=dataset != "digits",
        source=f"not in the paper: as its sets of this size, {_OTHER_HELD_OUT} % of "
        "train held out",
    )


def steps_for(examples: int) -> int:
    """Returns the steps for a set that is not in the paper.

    Args:
      examples: size of its training split.
    """
    return next(steps for below, steps in _OTHER_STEPS if examples < below)


def _of_task(dataset: str, data_dir: str, test: str) -> Recipe:
    task = vtab.task(dataset)
    if test not in ("", "test"):
        raise UserError(
            f"--test={test}: {dataset} is tested on its split 'test' alone: leave "
            "--test out"
        )
    return Recipe(
        dataset,
        data_dir,
        task.num_classes,
        "train800val200",
        "train800",
        "val200",
        "test",
        _VTAB_RATES,
        _VTAB_STEPS,
        warmup=_VTAB_WARMUP,
        crop="crop" in task.ops,
        flip="flip" in task.ops,
    )


def _test_folder(data_dir: str) -> str:
    train = splits.first_in_folder(data_dir, ("train",))
    test = splits.first_in_folder(data_dir)
    if not train or not test:
        data_dir = os.path.normpath(data_dir)
        remedy = inside(os.path.expanduser(data_dir)) or (
            f"put the images to train on into {data_dir}/train/<class>/ and those to "
            f"test on into {data_dir}/test/<class>/"
        )
        raise UserError(
            f"--dataset={data_dir} has {train or test or 'neither'} of the folders "
            f"train and test (or val, validation): {remedy}"
        )
    return test
