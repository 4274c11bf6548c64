"""The 19 tasks of VTAB-1k: TFDS data set, splits and labels of each.

Splits, classes and training transforms are those of scenic's plainvit baseline
(github.com/google-research/scenic, vtab_plainvit_config.py); labels are those of
github.com/google-research/task_adaptation. The two differ in the training split of
Clevr-Count; here it is train[:800], as for every other task (arXiv:1910.04867).
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import UInt8

from vit_jax.data import decode
from vit_jax.data.config import DataConfig
from vit_jax.data.sources.arrays import ArraySource, small_in_memory
from vit_jax.data.sources.base import SourceType, default_split
from vit_jax.data.sources.tfds import Feature, TfdsSource, find_prepared, open_tfds
from vit_jax.errors import NoSplit, UserError

_VEHICLES = 3  # Kitti's first object types: car, van, truck.
_NO_VEHICLE = 1000.0  # Metres, beyond the last bound: a separate class.
_IMAGE, _LABEL = Feature("image"), Feature("label")


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Groups neighbouring values of a class number into fewer classes."""

    key: str
    values: int
    num_classes: int

    def __call__(self, record: Mapping) -> int:
        return int(record[self.key] // (self.values / self.num_classes))


def clevr_count(record: Mapping) -> int:
    """Returns the number of objects minus 3, the smallest number."""
    return len(record["objects"]["size"]) - 3


def clevr_distance(record: Mapping) -> int:
    """Returns the class of the distance to the closest object."""
    distances = np.reshape(record["objects"]["pixel_coords"], (-1, 3))[:, 2]
    return _interval(float(distances.min()), (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0))


def kitti_distance(record: Mapping) -> int:
    """Returns the class of the distance to the closest vehicle; the last: no vehicle."""
    objects = record["objects"]
    distances = np.reshape(objects["location"], (-1, 3))[:, 2]
    vehicles = distances[np.asarray(objects["type"], int) < _VEHICLES]
    closest = min([*vehicles.tolist(), _NO_VEHICLE])
    return _interval(closest, (-100.0, 8.0, 20.0, 999.0))


def _interval(value: float, bounds: tuple[float, ...]) -> int:
    """Returns the index of the last bound below the value."""
    return int(np.searchsorted(np.float32(bounds), np.float32(value))) - 1


def zero_one_pixels(record: Mapping) -> UInt8[np.ndarray, "H W C"]:
    """Returns an image that is stored with values 0 and 1, scaled to 0 and 255."""
    return decode.decode(record["image"], 1) * np.uint8(255)


@dataclasses.dataclass(frozen=True)
class VtabTask:
    """A task of VTAB-1k.

    Attributes:
      tfds: name and version of the TFDS data set.
      group: "natural", "specialised" or "structured".
      num_classes: number of classes.
      val200: split of the 200 images for choosing hyper-parameters; the 800 images to
        train on are always train[:800].
      test: test split.
      ops: names of the baseline's training transforms: "flip", and "crop" for
        resize(448) | random_crop(384).
      label: function from a record to its class number.
      image: function from a record to its image.
      newer: later version with the same images, if `tfds` cannot be prepared.
    """

    tfds: str
    group: str
    num_classes: int
    val200: str
    test: str
    ops: tuple[str, ...]
    label: Callable[[Mapping], int] = _LABEL
    image: Callable[[Mapping], object] = _IMAGE
    newer: str = ""

    @property
    def splits(self) -> dict[str, str]:
        """Split names of the benchmark -> split expressions of TFDS."""
        return {
            "train800": "train[:800]",
            "val200": self.val200,
            "train800val200": f"train[:800]+{self.val200}",
            "test": self.test,
        }

    def resolve(self, split: str, name: str) -> str:
        """Returns the TFDS expression of a split; raises NoSplit for unknown splits."""
        if split not in self.splits:
            raise NoSplit(
                f"split {split!r}: {name} has only {', '.join(self.splits)}, without "
                "slices"
            )
        return self.splits[split]


_CROP_FLIP, _FLIP, _CROP, _PLAIN = ("crop", "flip"), ("flip",), ("crop",), ()
_VALIDATION = "validation[:200]"
_N, _S, _T = "natural", "specialised", "structured"

# fmt: off
TASKS = {
    "caltech101": VtabTask(
        "caltech101:3.*.*", _N, 102, "train[2754:2954]", "test", _CROP_FLIP),
    "cifar100": VtabTask(
        "cifar100:3.*.*", _N, 100, "train[45000:45200]", "test", _CROP_FLIP),
    "dtd": VtabTask("dtd:3.*.*", _N, 47, _VALIDATION, "test", _CROP_FLIP),
    "flowers102": VtabTask(
        "oxford_flowers102:2.*.*", _N, 102, _VALIDATION, "test", _CROP_FLIP),
    "pets": VtabTask(
        "oxford_iiit_pet:3.*.*", _N, 37, "train[2944:3144]", "test", _CROP_FLIP,
        newer="oxford_iiit_pet:4.*.*"),  # Repairs files, adds boxes.
    "sun397": VtabTask("sun397/tfds:4.*.*", _N, 397, _VALIDATION, "test", _CROP_FLIP),
    "svhn": VtabTask(
        "svhn_cropped:3.*.*", _N, 10, "train[65931:66131]", "test", _CROP_FLIP),
    "camelyon": VtabTask("patch_camelyon:2.*.*", _S, 2, _VALIDATION, "test", _CROP_FLIP),
    "eurosat": VtabTask(
        "eurosat/rgb:2.*.*", _S, 10, "train[16200:16400]", "train[21600:]", _CROP_FLIP),
    "resisc45": VtabTask(
        "resisc45:3.*.*", _S, 45, "train[18900:19100]", "train[25200:]", _CROP_FLIP),
    "retinopathy": VtabTask(
        "diabetic_retinopathy_detection/btgraham-300:3.*.*", _S, 5, _VALIDATION, "test",
        _CROP_FLIP),
    "clevr_count": VtabTask(
        "clevr:3.*.*", _T, 8, "train[63000:63200]", "validation", _FLIP, clevr_count),
    "clevr_distance": VtabTask(
        "clevr:3.*.*", _T, 6, "train[63000:63200]", "validation", _FLIP,
        clevr_distance),
    "dmlab": VtabTask("dmlab:2.0.1", _T, 6, _VALIDATION, "test", _FLIP),
    "dsprites_position": VtabTask(
        "dsprites:2.*.*", _T, 16, "train[589824:590024]", "train[663552:]", _PLAIN,
        Grouped("label_x_position", 32, 16), zero_one_pixels),
    "dsprites_orientation": VtabTask(
        "dsprites:2.*.*", _T, 16, "train[589824:590024]", "train[663552:]", _CROP,
        Grouped("label_orientation", 40, 16), zero_one_pixels),
    "kitti_distance": VtabTask(
        "kitti:3.1.0", _T, 4, _VALIDATION, "test", _FLIP, kitti_distance),
    "norb_azimuth": VtabTask(
        "smallnorb:2.*.*", _T, 18, "test[:200]", "test[50%:]", _CROP,
        Feature("label_azimuth")),
    "norb_elevation": VtabTask(
        "smallnorb:2.*.*", _T, 9, "test[:200]", "test[50%:]", _CROP_FLIP,
        Feature("label_elevation")),
}
# fmt: on


def task(name: str) -> VtabTask:
    """Returns the task of a data.name such as "vtab/clevr_count"; raises UserError."""
    known = name.removeprefix("vtab/")
    if known not in TASKS:
        raise UserError(
            f"data.name={name!r}: VTAB-1k has no such task; it has vtab/ and one of "
            f"{', '.join(TASKS)}"
        )
    return TASKS[known]


def open_task(data: DataConfig, split: str) -> TfdsSource | ArraySource:
    """Opens a split of a task ("train800", "val200", ...) from its prepared TFDS set."""
    chosen, name, prepared = task(data.name), data.name, task(data.name).tfds
    expression = chosen.resolve(split, name)
    if chosen.newer and find_prepared(prepared, data.data_dir) is None:
        prepared = chosen.newer
    columns, title = (chosen.image, chosen.label), f"{name} ({prepared})"
    source = open_tfds(prepared, data.data_dir, expression, *columns, title=title)
    return small_in_memory(source, data)


VTAB = SourceType(
    open=open_task,
    help="A task of VTAB-1k, such as vtab/clevr_count.",
    numbered=False,  # Numbers belong to TFDS's splits, not to those of the benchmark.
    eval_splits=default_split(lambda name: task(name).splits["test"]),
)
