"""The data sets of the paper: name, size, splits, and how to get them.

`python -m vit_jax.datasets` prints them. The roles of splits follow the paper
(arXiv:2010.11929, table 4: shares held out for the sweep of the learning rate) and, for
ImageNet-21k, github.com/google-research/big_vision; image counts are those of the TFDS
catalogue.
"""

import dataclasses
from collections.abc import Mapping

from vit_jax.data.imagenet import OBJECTNET_CLASSES
from vit_jax.data.sources import vtab
from vit_jax.data.sources.tfds import prepare_command

_LICENCE = "register at image-net.org, put {files} into a folder MANUAL, then: "
_VAL = "ILSVRC2012_img_val.tar"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A data set.

    Attributes:
      name: value of `data.name`.
      tfds: name and version in TFDS; "" if it is read from elsewhere.
      num_classes, images: numbers of classes and of training images; 0 if the user's
        data decide.
      splits: role -> split expression for `data.split` and `config.evals`.
      keys: other keys of `config.data` that the data set needs.
      steps: manual steps before, or instead of, `vit_jax.prepare`.
      newer: newer TFDS version that also works.
    """

    name: str
    tfds: str
    num_classes: int
    images: int
    splits: Mapping[str, str]
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    steps: str = ""
    newer: str = ""

    def how(self, data_dir: str) -> str:
        """Returns the steps that put the data set into a folder."""
        if not self.tfds:
            return self.steps
        command = prepare_command(self.newer or self.tfds, data_dir)
        if "MANUAL" in self.steps:
            command += " --manual_dir=MANUAL"
        return f"{self.steps}{command}"


def _sweep(percent: int, test: str) -> dict[str, str]:
    """Returns the splits if the last records are held out for the sweep."""
    return {
        "train": "train",
        "dev train": f"train[:{100 - percent}%]",
        "dev": f"train[{100 - percent}%:]",
        "test": test,
    }


_PAPER = (
    Entry(
        "imagenet2012",
        "imagenet2012",
        1_000,
        1_281_167,
        # The paper calls the 1 % of train "minival".
        _sweep(1, "validation"),
        steps=_LICENCE.replace("{files}", f"ILSVRC2012_img_train.tar and {_VAL}"),
    ),
    Entry(
        "imagenet_v2/matched-frequency",
        "imagenet_v2/matched-frequency",
        1_000,
        10_000,
        {"test": "test"},
    ),
    Entry(
        # Each record also has "real_label", the set of right labels, empty for 3,163.
        "imagenet2012_real",
        "imagenet2012_real",
        1_000,
        50_000,
        {"test": "validation"},
        keys={"label_key": "original_label"},
        steps=_LICENCE.replace("{files}", _VAL),
    ),
    Entry(
        "objectnet",
        "",
        len(OBJECTNET_CLASSES),
        0,
        {"test": "images"},
        steps=(
            "accept the licence at objectnet.dev (no training on it), unpack "
            "objectnet-1.0, crop the red frame off, and set data.data_dir to the folder "
            "that holds images/"
        ),
    ),
    Entry(
        "imagenet21k",
        "imagenet21k",
        21_843,
        14_145_922,  # Of 14,197,122 in all.
        {
            "train": "full[51200:]",
            "validation": "full[25600:51200]",
            "test": "full[:25600]",
        },
    ),
    Entry("cifar10", "cifar10:3.*.*", 10, 50_000, _sweep(2, "test")),
    Entry("cifar100", "cifar100:3.*.*", 100, 50_000, _sweep(2, "test")),
    Entry("oxford_iiit_pet", "oxford_iiit_pet", 37, 3_680, _sweep(10, "test")),
    Entry("oxford_flowers102", "oxford_flowers102", 102, 1_020, _sweep(10, "test")),
    Entry(
        # A template: JFT-300M is internal to Google.
        "jft300m",
        "",
        0,
        0,
        {"train": "train", "validation": "validation"},
        steps=(
            "not public. To train on your data: prepare them in TFDS's format, make a "
            "folder of train/<class>/ images, or write a source "
            "(--config.data.name=my_module:open_source); set data.num_classes; see "
            "configs/jft.py"
        ),
    ),
)

# Manual steps before TFDS can prepare the set.
_VTAB_STEPS = {
    "resisc45": "unpack NWPU-RESISC45.rar in a folder MANUAL, then: ",
    "retinopathy": (
        "download diabetic-retinopathy-detection from kaggle.com and unpack it in "
        "a folder MANUAL, then: "
    ),
}


def _of_task(name: str, task: vtab.VtabTask) -> Entry:
    return Entry(
        f"vtab/{name}",
        task.tfds,
        task.num_classes,
        1_000,
        task.splits,
        steps=_VTAB_STEPS.get(name, ""),
        newer=task.newer,
    )


ENTRIES = {
    entry.name: entry
    for entry in (*_PAPER, *(_of_task(*item) for item in vtab.TASKS.items()))
}
