"""Recipes for fine-tuning on data sets: learning rates, steps, splits, transforms.

Source: arXiv:2010.11929, table 4. For VTAB-1k it has the steps and one learning rate;
the warmup, the transforms of each task and the dtype of the momentum are those of
github.com/google-research/scenic (vtab_plainvit_config.py). The paper mentions no other
augmentation: images are resized and cropped in scenic's ratio of 448 to 384, and
mirrored.
"""

import dataclasses
import os

from vit_jax.data import catalogue
from vit_jax.data.sources import folder, vtab
from vit_jax.errors import UserError
from vit_jax.evaluators import splits

_RATES = (0.001, 0.003, 0.01, 0.03)
# Steps, and peak learning rates to try on the held-out part.
TABLE_4 = {
    "imagenet2012": (20_000, (0.003, 0.01, 0.03, 0.06)),
    "cifar100": (10_000, _RATES),
    "cifar10": (10_000, _RATES),
    "oxford_iiit_pet": (500, _RATES),
    "oxford_flowers102": (500, _RATES),
}
# Sets that are not in the paper are treated like its sets of a similar size, with the
# limits of small, medium and large in BiT (arXiv:1912.11370).
_OTHER_STEPS = ((20_000, 500), (500_000, 10_000), (float("inf"), 20_000))
_OTHER_HELD_OUT = 10  # Percent, as for the paper's small sets.
_VTAB_RATES, _VTAB_STEPS, _VTAB_WARMUP = (0.01,), 2_500, 200
_CROP = 448 / 384  # Ratio of the resized to the cropped size.


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Fine-tuning settings of a data set.

    Attributes:
      dataset: value of `data.name`.
      data_dir: value of `data.data_dir`.
      num_classes: number of classes; 0 to read it from the training split.
      train: split for the final runs.
      part: split to train on while the learning rate is chosen.
      held_out: split that chooses the learning rate.
      test: split whose score is reported.
      rates: peak learning rates to choose from.
      steps: number of steps per run; 0 to use `steps_for` with the size of `train`.
      warmup: steps of linear warmup.
      mu_dtype: dtype of the momentum.
      crop: whether to train on random crops of images resized to 448/384 of the size.
      flip: whether to mirror half of the training images.
      source: source of the numbers, for the log.
    """

    dataset: str
    data_dir: str
    num_classes: int = 0
    train: str = "train"
    part: str = f"train[:{100 - _OTHER_HELD_OUT}%]"
    held_out: str = f"train[{100 - _OTHER_HELD_OUT}%:]"
    test: str = "test"
    rates: tuple[float, ...] = _RATES
    steps: int = 0
    warmup: int = 0
    mu_dtype: str = "float32"
    crop: bool = True
    flip: bool = True
    source: str = "arXiv:2010.11929, table 4"

    @property
    def title(self) -> str:
        """Name of the data set; for a folder, the name of the folder."""
        if self.dataset != "folder":
            return self.dataset
        return os.path.basename(os.path.abspath(os.path.expanduser(self.data_dir)))

    def transforms(
        self, image_size: tuple[int, int], interpolation: str
    ) -> dict[str, str]:
        """Returns `data.train_transform` and `data.eval_transform`.

        Args:
          image_size: height and width in pixels.
          interpolation: filter of the resizes, as in the weights' preprocessing.
        """
        size = tuple(round(side * _CROP) for side in image_size)
        how = f"interpolation={interpolation!r}"
        ops = [f"resize({how})"]
        if self.crop:
            ops = [f"resize({size}, {how})", "random_crop"]
        return {
            "train_transform": " | ".join(ops + ["flip"] * self.flip),
            "eval_transform": f"resize({how})",
        }

    def average(self, image_size: tuple[int, int]) -> float:
        """Returns `ema.decay`, which table 2 uses on ImageNet above 384 pixels."""
        large = max(image_size) > 384
        return 0.9999 if self.dataset == "imagenet2012" and large else 0.0


def find(dataset: str, data_dir: str = "", test: str = "") -> Recipe:
    """Returns the recipe of a data set.

    Args:
      dataset: one of `TABLE_4`, "digits", "vtab/TASK", a folder, or any `data.name`.
      data_dir: folder of prepared data sets; ignored for a folder of images.
      test: split to report on; the usual one if empty.

    Raises:
      UserError: the VTAB-1k task is unknown, or a folder lacks train or test images.
    """
    if dataset.startswith("vtab/"):
        return _of_task(dataset, data_dir, test)
    if dataset in TABLE_4:
        entry, (steps, rates) = catalogue.ENTRIES[dataset], TABLE_4[dataset]
        return Recipe(
            dataset,
            data_dir,
            entry.num_classes,
            part=entry.splits["dev train"],
            held_out=entry.splits["dev"],
            test=test or entry.splits["test"],
            rates=rates,
            steps=steps,
        )
    if dataset != "digits" and os.path.isdir(os.path.expanduser(dataset)):
        dataset, data_dir = "folder", dataset
        test = test or _test_folder(data_dir)
    return Recipe(
        dataset,
        data_dir,
        test=test or "test",
        flip=dataset != "digits",
        source=f"not in the paper: like its sets of this size, {_OTHER_HELD_OUT} % of "
        "train held out",
    )


def steps_for(examples: int) -> int:
    """Returns the steps for a number of training images that the paper does not have."""
    return next(steps for below, steps in _OTHER_STEPS if examples < below)


def _of_task(dataset: str, data_dir: str, test: str) -> Recipe:
    task = vtab.task(dataset)
    if test not in ("", "test"):
        raise UserError(
            f"--test={test}: {dataset} is tested only on its split 'test': leave "
            "--test out"
        )
    return Recipe(
        dataset,
        data_dir,
        task.num_classes,
        train="train800val200",
        part="train800",
        held_out="val200",
        rates=_VTAB_RATES,
        steps=_VTAB_STEPS,
        warmup=_VTAB_WARMUP,
        mu_dtype="bfloat16",
        crop="crop" in task.ops,
        flip="flip" in task.ops,
    )


def _test_folder(data_dir: str) -> str:
    train = folder.first_split(data_dir, ("train",))
    test = folder.first_split(data_dir, splits.TESTS)
    if not train or not test:
        data_dir = os.path.normpath(data_dir)
        remedy = folder.inside(os.path.expanduser(data_dir)) or (
            f"put training images into {data_dir}/train/<class>/ and test images "
            f"into {data_dir}/test/<class>/"
        )
        raise UserError(
            f"--dataset={data_dir} has {train or test or 'neither'} of the folders "
            f"train and test (or val, validation): {remedy}"
        )
    return test
