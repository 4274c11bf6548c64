"""The splits that evaluations read, and how their images are prepared.

Letters: N records, R of them, K classes.
"""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import jax
import numpy as np
from jaxtyping import Integer

from vit_jax.config.fields import epochs, key
from vit_jax.data import fields, pipeline
from vit_jax.data.config import MATCHERS, SYNTHETIC_CLASSES, DataConfig
from vit_jax.data.decode import DamagedImage
from vit_jax.data.fields.image import Image
from vit_jax.data.sources.base import (
    Derived,
    Source,
    SplitRequest,
    check_label,
    inspected,
    read_labels,
)
from vit_jax.data.sources.open import exclude, open_unchecked, source_type
from vit_jax.data.transforms import parse
from vit_jax.errors import NoLabels, NoSplit, UserError

if TYPE_CHECKING:  # Imported only for types: only evaluations of weights use it.
    from vit_jax.data.preprocess import Preprocess
    from vit_jax.models.targets import Targets

# Keys of `config.data` that an evaluation of another data set may set.
KEYS = (
    *("name", "data_dir", "image_key", "label_key", "caption_key", "mask_key"),
    *("target_key", "eval_transform"),
)
_MANY = 2**31 - 1  # Number of classes if the labels are not the model's classes.
# Default splits; the first that exists is read. Evaluations during training use the
# test split only if there is no other.
TESTS = ("test", "val", "validation")
VALIDATIONS = ("val", "validation", "test")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Keys of every evaluation: when it runs, and on which data set."""

    # Names of metrics that are fractions, shown in percent; "*" matches any text.
    fractions: ClassVar[tuple[str, ...]] = ()

    kind: str = key("", "Kind of evaluation.")
    every: int = key(
        0,
        "Steps between evaluations; if `every` and `every_epochs` are 0, "
        "`eval_every_steps` and `eval_every_epochs` apply. The last step is evaluated "
        "in any case.",
        below=2**32,
    )
    every_epochs: float = epochs("Number of epochs between evaluations; see `every`.")
    name: str = key("", 'Data set to evaluate; "" is `data.name`.')
    data_dir: str = key(
        "",
        'Folder of the data set to evaluate; "" is `data.data_dir`.',
        changes_result=False,
        of_host=True,
    )
    image_key: str = key(
        "",
        'Column or feature of the images, as in `data.image_key`; "" is '
        '`data.image_key`, or "image" for another data set.',
        reason="data sets with other names than the training data",
    )
    label_key: str = key(
        "",
        'Column or feature of the labels, as in `data.label_key`; "" is '
        '`data.label_key`, or "label" for another data set.',
    )
    caption_key: str = key(
        "",
        'Source of the captions, as in `data.caption_key`; "" is `data.caption_key`.',
    )
    mask_key: str = key(
        "",
        'Source of the masks, as in `data.mask_key`; "" is `data.mask_key`, or none '
        "for another data set.",
        reason="data sets with other names than the training data",
    )
    target_key: str = key(
        "",
        'Names of the targets, as in `data.target_key`; "" is `data.target_key`, or none '
        "for another data set.",
        reason="data sets with other names than the training data",
    )
    eval_transform: str = key(
        "",
        'Transforms of the images; "" is `data.eval_transform`, or the preprocessing '
        "of the weights.",
    )

    def open(self, name: str, splits: "EvalSplits") -> object:
        """Returns the `protocol.Evaluator` with its splits open.

        `name` is the name of the evaluation, for messages.
        """
        raise NotImplementedError

    def summarize(self, metrics: dict[str, float]) -> object:
        """Returns the metrics of the evaluation as `evaluate --json` prints them."""
        return metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelClassesConfig(EvalConfig):
    """Keys of evaluations whose labels are classes of the model."""

    match_classes: str = key(
        "names",
        "How the classes of the data are matched with those of the model "
        '(docs/labels.md): by "names", or by their index ("position").',
        reason="data sets that name their classes differently",
        choices=tuple(MATCHERS),
    )


@dataclasses.dataclass(eq=False)
class EvalSplit:
    """An open split of a data set.

    Attributes:
      split: split expression.
      data: `config.data` for the records of `source`.
      ops: host transforms; None for those of `data.eval_transform`.
      classes: the model's indices of the data's classes, if the labels are the model's.
    """

    split: str
    source: Source
    data: DataConfig
    ops: tuple | None
    classes: tuple[int, ...] = ()

    def batches(
        self,
        rows: Integer[np.ndarray, " R"] | None,
        batch_size: int,
        data_shard: int,
        num_data_shards: int,
    ) -> pipeline.Batches:
        """Iterates over all records, or over `rows`; see `pipeline.eval_batches`."""
        return pipeline.eval_batches(
            self.source if rows is None else Subset(self.source, rows),
            self.data,
            batch_size=batch_size,
            data_shard=data_shard,
            num_data_shards=num_data_shards,
            host=self.ops,
        )

    @property
    def fields(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the fields of two records besides image and label."""
        made = fields.of(self.data, self.source, train=False)
        specs = {each.name: each.spec(self.data.image_size) for each in made}
        return {
            name: jax.ShapeDtypeStruct((2, *shape), dtype)
            for name, (shape, dtype) in specs.items()
            if name != "label"
        }

    @property
    def makes_sequences(self) -> bool:
        """Whether images become sequences of patches, see models/patches.py."""
        ops = self.ops
        if ops is None:
            ops = parse.parse_eval(self.data.eval_transform, self.data.image_size)
        return bool(ops and ops[-1].makes_arrays)

    def try_first(self) -> None:
        """Prepares the first record; raises UserError if it contradicts the config."""
        data = dataclasses.replace(self.data, num_workers=0)
        first = dataclasses.replace(self, data=data)
        with first.batches(np.arange(1), 1, 0, 1) as batches:
            next(batches)

    @functools.cached_property
    def labels(self) -> Integer[np.ndarray, " N"]:
        """Class of every record, see `base.read_labels`."""
        return read_labels(self.source)

    @property
    def title(self) -> str:
        """Name of the split in messages."""
        return f"{self.data.name} {self.split}"

    @property
    def dataset(self) -> str:
        """Name of the data set, or of the folder that holds it."""
        if self.data.name != "folder":
            return self.data.name
        path = os.path.expanduser(self.data.data_dir)
        return os.path.basename(os.path.abspath(path))

    @property
    def num_classes(self) -> int:
        """Number of classes: of class names, or of labels up to the largest one."""
        return len(self.source.class_names) or int(self.labels.max()) + 1


class EvalSplits:
    """Opens the splits that evaluations read, each once.

    Args:
      data: `config.data` of the run; its classes are the model's.
      preprocess: preprocessing of images without `eval_transform`; if None,
        `data.eval_transform`.
      class_names: names of the model's outputs in order; empty if unknown.
      order: default splits; the first that exists is read.

    Attributes:
      preprocess: preprocessing, see the arguments.
      targets: what the outputs of the model mean if they are numbers; None for classes.
      notes: lines for the user.
    """

    targets: "Targets | None" = None

    def __init__(
        self,
        data: DataConfig,
        preprocess: "Preprocess | None" = None,
        class_names: Sequence[str] = (),
        order: Sequence[str] = TESTS,
    ):
        self._data, self.preprocess, self._order = data, preprocess, order
        self._opened: dict[tuple, EvalSplit] = {}
        self._matched: dict[tuple, EvalSplit] = {}
        self.class_names, self.num_classes = tuple(class_names), data.num_classes
        self.multi_label, self.target_key = data.multi_label, data.target_key
        self.notes: list[str] = []

    def open(
        self,
        name: str,
        config: EvalConfig,
        split: str,
        *,
        model_classes: bool,
        labelled: bool = True,
    ) -> EvalSplit:
        """Opens a split.

        Args:
          name: name of the evaluation, for messages.
          config: keys of the evaluation; those in KEYS are read.
          split: split expression; "" for the first of `order` that exists.
          model_classes: whether the labels must be the model's classes.
          labelled: whether to read labels even if the run does not read any; if False,
            they are read only if another evaluation of the split reads them.

        Raises:
          UserError: the set or the split does not exist, or has other classes or no
            labels; or `class_names.match` fails.
        """
        data = self._data_of(config, labelled=labelled)
        of_split = (*(getattr(data, k) for k in KEYS), split)
        key = (*of_split, data.has_labels)
        if (*of_split, True) in self._opened:  # A pass with labels serves both.
            key = (*of_split, True)
        if key not in self._opened:
            self._opened[key] = self._open(name, config, data, split, model_classes)
        opened = self._opened[key]
        if not model_classes:
            return opened
        self._check(name, opened)
        how = {}
        if isinstance(config, ModelClassesConfig):
            how["by"] = config.match_classes
            key = f"--config.evals.{name}.match_classes=position"
            how["hint"] = f", or compare them class by class: {key}"
        matched = self.match(name, opened, self.class_names, self.num_classes, **how)
        # When records are read, labels are checked against this number.
        matched.data = dataclasses.replace(matched.data, num_classes=self.num_classes)
        return matched

    def _open(
        self,
        name: str,
        config: EvalConfig,
        data: DataConfig,
        split: str,
        model_classes: bool,
    ) -> EvalSplit:
        """Opens a split, or the first of the default splits that exists."""
        # Whether this is the data set that the run trains on.
        trained = self._order != TESTS and not (config.name or config.data_dir)
        request = SplitRequest(name, split, self._order, model_classes, trained)
        splits, data = source_type(data.name).eval_splits(data, request)
        try:
            opened, source = _open_first(data, splits)
            if data.has_labels and not model_classes:
                _check_labelled(source)
        except NoLabels as error:
            raise UserError(
                f"evals.{name} needs labels: {error}; or name a labelled data set in "
                f"evals.{name}.name and evals.{name}.data_dir; or score numbers by "
                "kind='regression' or 'ridge'"
            ) from error
        if data.exclude and split == data.split:
            source = exclude(source, data.exclude)
        if data.has_labels:
            data = dataclasses.replace(data, num_classes=_MANY)
        Image(data).inspect(source, inspected(source))
        ops = None if config.eval_transform else self._host_ops(source)
        return EvalSplit(opened, source, data, ops)

    def match(
        self,
        name: str,
        split: EvalSplit,
        known: Sequence[str],
        num_classes: int,
        *,
        by: str = "names",
        hint: str = "",
    ) -> EvalSplit:
        """Returns a split whose labels are indices of other classes.

        Args:
          name: name of the evaluation, for messages.
          split: result of `open`.
          known: names of the other classes, in order; may be empty.
          num_classes: number of the other classes.
          by: one of MATCHERS.
          hint: argument of `class_names.match`, which matches the names.
        """
        key = split, tuple(known), by
        if key not in self._matched:
            names, where = split.source.class_names, f"evals.{name}: {split.title}"
            indices = np.arange(num_classes)
            # Equal names need no matching.
            if tuple(names) != tuple(known) or len(names) not in (0, num_classes):
                how = {"where": where, "hint": hint}
                matched = MATCHERS[by](names, known, num_classes, **how)
                indices = matched.indices
                if matched.line:
                    self.notes.append(f"{where}: {matched.line}")
            if not np.array_equal(indices, np.arange(num_classes)):
                shown = dict(zip(indices.tolist(), names, strict=True))
                known = known or [
                    shown.get(k, f"class {k}") for k in range(num_classes)
                ]
                source = Relabeled(split.source, tuple(known), indices)
                split = dataclasses.replace(split, source=source)
            split.classes = tuple(indices.tolist())
            self._matched[key] = split
        return self._matched[key]

    def train_split(self, config: EvalConfig) -> str:
        """Returns the split to learn from by default."""
        return "train" if config.name else self._data.split

    def _data_of(self, config: EvalConfig, *, labelled: bool) -> DataConfig:
        """Returns `config.data` changed by the keys of an evaluation."""
        changes = {key: getattr(config, key) for key in KEYS if getattr(config, key)}
        if config.name:
            split = getattr(config, "train", "") or "train"
            of_set = {"image_key": "image", "label_key": "label", "split": split}
            of_set |= {"image_dir": "", "image_suffix": "", "mask_key": ""}
            of_set["target_key"] = ""
            of_set["group_key"] = ""
            changes = of_set | {"exclude": "", "num_examples": 0} | changes
        # Evaluations may read labels that the run does not read.
        if labelled and not self._data.has_labels:
            changes |= {"num_classes": SYNTHETIC_CLASSES, "mask_key": ""}
        elif self._data.mask_key and changes.get("mask_key") == "":
            changes["num_classes"] = 0
        data = dataclasses.replace(self._data, **changes)
        if labelled or not data.has_labels:
            return data
        unlabelled = {"num_classes": 0, "multi_label": False, "class_balance": ""}
        return dataclasses.replace(data, **unlabelled)

    def _check(self, name: str, opened: EvalSplit) -> None:
        num_classes, labels = self._data.num_classes, opened.source.labels
        classes = (len(opened.source.class_names) or num_classes) if num_classes else 0
        labels = labels if labels is not None else np.zeros(1, int)
        worst = int(labels.max()) if labels.min() >= 0 else int(labels.min())
        if not 0 <= worst < classes:
            raise UserError(
                f"evals.{name}: {opened.data.name} has a label {worst}, but the model has "
                f"{num_classes} classes: fine-tune it on these, or use an evaluation of "
                "its features, such as kind='fewshot'"
            )

    def _host_ops(self, source: Source) -> tuple | None:
        how, images = self.preprocess, source.images
        if how is None:
            return None
        if images is not None and how.keeps(images.shape[1:3]):
            return ()  # With no transforms, a batch is a single gather.
        return how.transforms


def _check_labelled(source: Source) -> None:
    """Raises NoLabels if the first label is not a class, such as -1 in test splits."""
    try:
        label = source[0]["label"]
    except (DamagedImage, OSError):  # `data.on_error` decides what happens.
        return
    if np.ndim(label):
        raise NoLabels(f"{source.describe(0)} has several labels, not one class")
    if label < 0:
        raise NoLabels(f"{source.describe(0)} has label {label}")


def _open_first(data: DataConfig, splits: Sequence[str]) -> tuple[str, Source]:
    """Opens the first split that exists; if none does, raises NoSplit for the first."""
    first = None
    for split in splits:
        try:
            return split, open_unchecked(data, split)
        except NoSplit as error:
            first = first or error
    raise first


@dataclasses.dataclass(frozen=True)
class Subset(Derived):
    """The records of a source at the indices `rows`, in this order."""

    source: Source
    rows: Integer[np.ndarray, " R"]

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.source.class_names

    @functools.cached_property
    def images(self) -> np.ndarray | None:
        return None if self.source.images is None else self.source.images[self.rows]

    @functools.cached_property
    def labels(self) -> np.ndarray | None:
        return None if self.source.labels is None else self.source.labels[self.rows]

    def known_labels(self) -> np.ndarray | list[list[int]] | None:
        labels = self.source.known_labels()
        if isinstance(labels, list):
            return [labels[row] for row in self.rows]
        return None if labels is None else labels[self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def _inner(self, i: int) -> int:
        return int(self.rows[i])


@dataclasses.dataclass(frozen=True)
class Relabeled(Derived):
    """All records of a source, with `indices`, the new index of each class.

    `class_names` are in the order of the new indices.
    """

    source: Source
    class_names: tuple[str, ...]
    indices: Integer[np.ndarray, " K"]

    @property
    def images(self) -> np.ndarray | None:
        return self.source.images

    @functools.cached_property
    def labels(self) -> np.ndarray | None:
        labels = self.source.labels
        return None if labels is None else self.indices[labels].astype(labels.dtype)

    def known_labels(self) -> np.ndarray | None:
        labels = self.source.known_labels()
        if labels is None or isinstance(labels, list) or not len(labels):
            return None
        # Reading a record with another label raises an error that names it.
        known = labels.min() >= 0 and labels.max() < len(self.indices)
        return self.indices[labels] if known else None

    def __getitem__(self, i: int) -> dict:
        record = self.source[i]
        label = np.asarray(record["label"], int)  # Several with `data.multi_label`.
        for one in label.ravel().tolist():
            check_label(one, len(self.indices), self.source.describe(i))
        return record | {"label": self.indices[label].tolist()}
