"""The kinds of evaluation that `config.evals` can name: what each reads and scores."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from ml_collections import ConfigDict

from vit_jax.data import objectnet
from vit_jax.errors import UserError
from vit_jax.evaluation import classification, fewshot, knn, label_sets, probe
from vit_jax.evaluation.classification import Scored
from vit_jax.evaluation.passes import FEATURES, LOSS, RESTRICTED, TOPS, Outputs
from vit_jax.evaluation.readings import Reading, Readings

Stop = Callable[[], bool]


class Need(NamedTuple):
    """What an evaluation wants of a pass over a split.

    Attributes:
      reading: the split.
      wants: names of outputs, see `passes.Outputs`.
      rows: the records it looks at; all if None.
    """

    reading: Reading
    wants: frozenset[str]
    rows: np.ndarray | None = None


class Evaluation(Protocol):
    """One of `config.evals`; made with its name, its spec, `Readings` and K.

    Attributes:
      splits: what it reads.
    """

    splits: tuple[Reading, ...]

    def needs(self) -> dict[str, Need]:
        """Returns what it wants of which pass, by a name of its own."""

    def score(self, outputs: dict[str, Outputs], stop: Stop) -> Scored | None:
        """Scores what the passes gave; None if `stop` said so meanwhile."""


class Classification:
    """Top-1, top-5, loss, calibration and accuracy a class."""

    def __init__(self, name: str, spec: ConfigDict, readings: Readings, classes: int):
        self._reading = readings.open(name, spec, spec.split, of_model=True)
        self.splits, self._classes = (self._reading,), classes

    def needs(self) -> dict[str, Need]:
        return {"test": Need(self._reading, frozenset((TOPS, LOSS)))}

    def score(self, outputs: dict[str, Outputs], stop: Stop) -> Scored | None:
        return classification.score(outputs["test"], self._classes)


class Real:
    """ImageNet's validation split with the labels of ReaL."""

    def __init__(self, name: str, spec: ConfigDict, readings: Readings, classes: int):
        _check_imagenet(name, spec, classes)
        self._reading = readings.open(name, spec, spec.split, of_model=True)
        self.splits = (self._reading,)
        self._path, self._sets = spec.labels, None

    def needs(self) -> dict[str, Need]:
        return {"test": Need(self._reading, frozenset((TOPS,)))}

    def score(self, outputs: dict[str, Outputs], stop: Stop) -> Scored | None:
        if self._sets is None:
            reading = self._reading
            self._sets = label_sets.read_real(reading.source, self._path, reading.title)
        return label_sets.score_real(outputs["test"], self._sets)


class ObjectNet:
    """The classes of ObjectNet that overlap ImageNet's."""

    def __init__(self, name: str, spec: ConfigDict, readings: Readings, classes: int):
        _check_imagenet(name, spec, classes)
        self._reading = readings.open(name, spec, spec.split, of_model=False)
        self.splits = (self._reading,)
        if self._reading.source.class_names != tuple(objectnet.CLASSES):
            raise UserError(
                f"evals.{name}: {self._reading.title} does not have ObjectNet's "
                f"{len(objectnet.CLASSES)} overlapping classes: take name='objectnet'"
            )

    def needs(self) -> dict[str, Need]:
        return {"test": Need(self._reading, frozenset((TOPS, RESTRICTED)))}

    def score(self, outputs: dict[str, Outputs], stop: Stop) -> Scored | None:
        return label_sets.score_objectnet(outputs["test"])


class _OfFeatures:
    """What learns from the features of one split and is scored on another."""

    def __init__(self, name: str, spec: ConfigDict, readings: Readings, classes: int):
        self._name, self._spec = name, spec
        train = spec.train or readings.train_split(spec)
        self._train = readings.open(name, spec, train, of_model=False)
        self._test = readings.open(name, spec, spec.test, of_model=False)
        self.splits = (self._train, self._test)

    def needs(self) -> dict[str, Need]:
        return {
            "train": Need(self._train, frozenset((FEATURES,)), self._rows()),
            "test": Need(self._test, frozenset((FEATURES,))),
        }

    def _rows(self) -> np.ndarray | None:
        return None

    def _pairs(self, outputs: dict[str, Outputs]) -> tuple:
        """Returns features and labels of both splits, and the number of classes."""
        train, test = (
            (outputs[part].values[FEATURES], outputs[part].labels)
            for part in ("train", "test")
        )
        classes, worst = self._train.classes, int(test[1].max())
        if worst >= classes:
            raise UserError(
                f"evals.{self._name}: {self._test.title} has label {worst}, but "
                f"{self._train.title} has {classes} classes: take another train split"
            )
        return train, test, classes


class FewShot(_OfFeatures):
    """Linear few-shot evaluation, see fewshot.py.

    Metrics: for S shots "Sshot", the mean accuracy over the seeds with the first of the
    strengths, "Sshot_std", its sample deviation, the same with each further strength as
    "Sshot_l2_X", and, where classes lack examples, "Sshot_short", how many do.
    """

    def _supports(self, shots: int) -> list[np.ndarray]:
        labels, classes = self._train.labels, self._train.classes
        seeds = range(self._spec.seeds)
        return [fewshot.draw(labels, shots, seed, classes) for seed in seeds]

    def _rows(self) -> np.ndarray:
        return np.unique(np.concatenate(self._supports(max(self._spec.shots))))

    def score(self, outputs: dict[str, Outputs], stop: Stop) -> Scored | None:
        spec, (train, test, classes) = self._spec, self._pairs(outputs)
        counts = np.bincount(self._train.labels, minlength=classes)
        metrics = {}
        for shots in spec.shots:
            found = []
            for rows in self._supports(shots):
                if stop():
                    return None
                there = _positions(outputs["train"].records, rows)
                support = tuple(x[there] for x in train)
                found.append(fewshot.accuracies(support, test, classes, spec.l2))
            for l2, values in zip(spec.l2, np.transpose(found), strict=True):
                more = "" if l2 == spec.l2[0] else f"_l2_{l2:g}"
                metrics[f"{shots}shot{more}"] = float(values.mean())
                deviation = values.std(ddof=1) if len(values) > 1 else 0.0
                metrics[f"{shots}shot{more}_std"] = float(deviation)
            if short := int((counts < shots).sum()):
                metrics[f"{shots}shot_short"] = short
        return Scored(metrics)


class Neighbours(_OfFeatures):
    """Weighted k-nearest neighbours, see knn.py."""

    def score(self, outputs: dict[str, Outputs], stop: Stop) -> Scored | None:
        train, (features, labels), classes = self._pairs(outputs)
        found = knn.predict(
            *train,
            features,
            classes,
            k=self._spec.k,
            temperature=self._spec.temperature,
            stop=stop,
        )
        if found is None:
            return None
        return Scored({"top1": float((found == labels).mean())})


class LinearProbe(_OfFeatures):
    """Logistic regression on all of the training split, see probe.py."""

    def score(self, outputs: dict[str, Outputs], stop: Stop) -> Scored | None:
        train, (features, labels), classes = self._pairs(outputs)
        choice = probe.choose(
            *train,
            classes,
            l2=self._spec.l2,
            held_out=self._spec.held_out,
            seed=self._spec.seed,
            iterations=self._spec.iterations,
            stop=stop,
        )
        if choice is None:
            return None
        metrics = {"top1": float((choice.probe.predict(features) == labels).mean())}
        metrics |= {"l2": choice.l2}
        if not np.isnan(choice.top1):
            metrics["held_out_top1"] = choice.top1
        return Scored(metrics)


KINDS: dict[str, type[Evaluation]] = {
    "classification": Classification,
    "real": Real,
    "objectnet": ObjectNet,
    "fewshot": FewShot,
    "knn": Neighbours,
    "probe": LinearProbe,
}

# What passes need to know for RESTRICTED.
ALLOWED = label_sets.OVERLAP


def _positions(records: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns where records stand in a pass; damaged ones are left out."""
    there = np.searchsorted(records, rows)
    there = np.minimum(there, len(records) - 1)
    return there[records[there] == rows]


def _check_imagenet(name: str, spec: ConfigDict, classes: int) -> None:
    if classes != label_sets.CLASSES:
        raise UserError(
            f"evals.{name}: kind={spec.kind!r} is for classifiers of ImageNet's 1,000 "
            f"classes, but the model has {classes}: take it out"
        )
