"""Which images an evaluation reads, and how they are prepared."""

import dataclasses
import functools
import os
from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer

from vit_jax.config.fields import epochs, key
from vit_jax.data import pipeline, sources
from vit_jax.data.config import DataConfig
from vit_jax.data.excluding import without
from vit_jax.errors import UserError
from vit_jax.evaluation import class_names, opening
from vit_jax.evaluation.views import Part, Reordered, Travelled
from vit_jax.weights.pretrained import Preprocess, resized_size

# Of `config.data`, what an evaluation of another data set states itself.
KEYS = ("name", "data_dir", "image_key", "label_key", "eval_ops")
_MANY = 2**31 - 1  # Classes, where the labels are not the model's.


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What every evaluation may state: when it runs, and on which data set."""

    kind: str = key("", "What is evaluated.")
    every: int = key(
        0,
        "Interval in steps; 0 in both units: that of every.evaluate. The last step is "
        "evaluated in any case.",
        below=2**32,
    )
    every_epochs: float = epochs("The same in epochs.")
    name: str = key("", "Another data set than `data.name`.")
    data_dir: str = key("", 'Where that lies; "": `data.data_dir`.', of_host=True)
    image_key: str = key(
        "", 'Its images; "": as `data.image_key`, or "image" of another set.'
    )
    label_key: str = key(
        "", 'Its labels; "": as `data.label_key`, or "label" of another set.'
    )
    eval_ops: str = key(
        "", "In place of `data.eval_ops`, or of what travels with weights."
    )

    def open(self, name: str, readings: "Readings", classes: int) -> object:
        """Opens what the evaluation reads.

        Args:
          name: of the evaluation.
          readings: of the data.
          classes: of the model.

        Returns:
          A `kinds.Evaluation`.
        """
        raise NotImplementedError


@dataclasses.dataclass(eq=False)
class Reading:
    """A split of a data set, opened.

    Attributes:
      split: its expression.
      source: its records.
      data: `config.data` for them.
      ops: host operations; those of `data.eval_ops` if None.
    """

    split: str
    source: sources.Source
    data: DataConfig
    ops: tuple | None

    def batches(
        self,
        rows: Integer[np.ndarray, " R"] | None,
        batch_size: int,
        process_index: int,
        process_count: int,
    ) -> pipeline.Batches:
        """Iterates over all records, or over some; see `pipeline.eval_batches`."""
        return pipeline.eval_batches(
            self.source if rows is None else Part(self.source, rows),
            self.data,
            batch_size=batch_size,
            process_index=process_index,
            process_count=process_count,
            host=self.ops,
        )

    @functools.cached_property
    def labels(self) -> Integer[np.ndarray, " N"]:
        """The class of every record; none is decoded, but some sets are read for it."""
        source = self.source
        if source.labels is not None:
            return np.asarray(source.labels, np.int64)
        if hasattr(source, "labels_of_paths"):
            return np.asarray(source.labels_of_paths, np.int64)
        if not hasattr(source, "read"):
            return np.array([source[i]["label"] for i in range(len(source))], np.int64)
        found = np.empty(len(source), np.int64)
        for start in range(0, len(source), 1000):
            numbers = range(start, min(start + 1000, len(source)))
            found[start : numbers.stop] = [r["label"] for r in source.read(numbers)]
        return found

    @property
    def title(self) -> str:
        """Names it in messages."""
        return f"{self.data.name} {self.split}"

    @property
    def dataset(self) -> str:
        """The name of its set, of a folder its own."""
        if self.data.name != "folder":
            return self.data.name
        path = os.path.expanduser(self.data.data_dir)
        return os.path.basename(os.path.abspath(path))

    @property
    def classes(self) -> int:
        """How many classes there are: names, or labels up to the largest."""
        return len(self.source.class_names) or int(self.labels.max()) + 1


class Readings:
    """Opens what evaluations read, each split once.

    Args:
      data: `config.data` of the run; its classes are the model's.
      preprocess: how images are prepared, where `eval_ops` is not stated; by
        `data.eval_ops` if None.
      names: of the model's classes, in the order of its outputs; empty if unknown.
      order: of the splits to look for where none is stated.

    Attributes:
      notes: a line for each thing that a user may want to know.
    """

    def __init__(
        self,
        data: DataConfig,
        preprocess: Preprocess | None = None,
        names: Sequence[str] = (),
        order: Sequence[str] = opening.TESTS,
    ):
        self._order = order
        self._data, self._preprocess, self._names = data, preprocess, tuple(names)
        self._opened: dict[tuple, Reading] = {}
        self.notes: list[str] = []

    def open(
        self, name: str, spec: EvalConfig, split: str, *, of_model: bool
    ) -> Reading:
        """Opens a split.

        Args:
          name: of the evaluation, for messages.
          spec: of the evaluation; KEYS are read.
          split: its expression; "" is the first of `order` that is there.
          of_model: whether the labels must be classes of the model.

        Raises:
          UserError: the set or the split does not exist, or has other classes.
        """
        data = self._of(spec)
        key = (*(getattr(data, k) for k in KEYS), split)
        if key not in self._opened:
            source, opened, data = opening.open_first(
                name, data, split, self._order, of_model=of_model
            )
            if data.exclude and split == data.split:
                source = without(source, data.exclude)
            data = dataclasses.replace(data, classes=_MANY)
            host = self._host_ops(source, data, stated=bool(spec.eval_ops))
            self._opened[key] = Reading(opened, source, data, host)
        found = self._opened[key]
        if of_model:
            self._check(name, found)
            # Read as records are.
            found.data = dataclasses.replace(found.data, classes=self._data.classes)
            if spec.kind == "classification" and self._names:
                found = self._by_name(name, key, found)
        return found

    def train_split(self, spec: EvalConfig) -> str:
        """Returns the split to learn from, where none is stated."""
        return "train" if spec.name else self._data.split

    def _of(self, spec: EvalConfig) -> DataConfig:
        """Returns `config.data` as an evaluation changes it."""
        stated = {key: getattr(spec, key) for key in KEYS if getattr(spec, key)}
        if spec.name:
            split = getattr(spec, "train", "") or "train"
            of_set = {"image_key": "image", "label_key": "label", "split": split}
            stated = of_set | {"exclude": "", "examples": 0} | stated
        return dataclasses.replace(self._data, **stated)

    def _check(self, name: str, found: Reading) -> None:
        source, classes = found.source, self._data.classes
        known = len(source.class_names)
        labels = source.labels if source.labels is not None else np.zeros(1, int)
        worst = int(labels.max()) if labels.min() >= 0 else int(labels.min())
        if (known and known != classes) or not 0 <= worst < classes:
            what = f"{known} classes" if known else f"a label {worst}"
            raise UserError(
                f"evals.{name}: {found.data.name} has {what}, but the model tells "
                f"{classes} classes apart: fine-tune it on these, or take an "
                "evaluation of its features, as kind='fewshot'"
            )

    def _by_name(self, name: str, key: tuple, found: Reading) -> Reading:
        """Returns a split with the model's number for each class."""
        names = found.source.class_names
        order = class_names.numbers(names, self._names)
        if order is None:
            note = class_names.difference(names, self._names)
            if note:
                self.notes.append(f"evals.{name}: {found.title}: {note}")
            return found
        key = (*key, "reordered")
        if key not in self._opened:
            self.notes.append(
                f"evals.{name}: {found.title} numbers the model's classes in another "
                "order: they are matched by their names"
            )
            source = Reordered(found.source, self._names, order)
            self._opened[key] = dataclasses.replace(found, source=source)
        return self._opened[key]

    def _host_ops(
        self, source: sources.Source, data: DataConfig, *, stated: bool
    ) -> tuple | None:
        if self._preprocess is None or stated:
            return None
        if source.images is not None:
            size = source.images.shape[1:3]
            same = size == self._preprocess.image_size
            if same and resized_size(size, self._preprocess) == size:
                return ()  # So that a batch is one gather.
        return (Travelled(self._preprocess, data.channels),)
