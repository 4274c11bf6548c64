"""The kinds of evaluation that `config.evals` can name: what each reads and scores."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from vit_jax.config.fields import key
from vit_jax.data import objectnet
from vit_jax.errors import UserError
from vit_jax.evaluation import classification, fewshot, knn, label_sets, probe
from vit_jax.evaluation.classification import Scored
from vit_jax.evaluation.passes import FEATURES, LOSS, RESTRICTED, TOPS, Outputs
from vit_jax.evaluation.readings import EvalConfig, Reading, Readings

Stop = Callable[[], bool]
SKIPPED = "skipped"  # How many damaged images an evaluation has left out.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassificationConfig(EvalConfig):
    """Classification of a split."""

    kind: str = key("classification", "What is evaluated.")
    split: str = key("", 'To classify; "" is the split that the data set is tested on.')

    def open(self, name, readings, classes):
        return Classification(name, self, readings, classes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RealConfig(EvalConfig):
    """ImageNet's validation images with the labels of ReaL."""

    kind: str = key("real", "What is evaluated.")
    name: str = key("imagenet2012_real", "Another data set than `data.name`.")
    label_key: str = key("original_label", "Its labels.")
    split: str = key("validation", "To classify.")
    labels: str = key("", "The authors' real.json, for sets that do not hold them.")

    def open(self, name, readings, classes):
        return Real(name, self, readings, classes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectNetConfig(EvalConfig):
    """The classes of ObjectNet that overlap ImageNet's."""

    kind: str = key("objectnet", "What is evaluated.")
    name: str = key("objectnet", "Another data set than `data.name`.")
    split: str = key("images", "To classify.")

    def open(self, name, readings, classes):
        return ObjectNet(name, self, readings, classes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeaturesConfig(EvalConfig):
    """Learnt on features of one split, scored on another."""

    train: str = key("", '"" is `data.split`, or "train" of another data set.')
    test: str = key("", '"" is the split that the data set is tested on.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewShotConfig(FeaturesConfig):
    """Least squares on a few examples a class."""

    kind: str = key("fewshot", "What is evaluated.")
    shots: tuple[int, ...] = key(
        (1, 5, 10, 25), "Examples a class.", at_least=1, below=2**32, distinct=True
    )
    seeds: int = key(
        20,
        "Draws of them, over which mean and deviation are taken.",
        at_least=1,
        below=2**32,
    )
    l2: tuple[float, ...] = key(
        (1024.0,),
        "Strengths of the regularisation; the first is reported.",
        above=0,
        distinct=True,
    )

    def open(self, name, readings, classes):
        return FewShot(name, self, readings, classes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeighboursConfig(FeaturesConfig):
    """Votes of the nearest neighbours."""

    kind: str = key("knn", "What is evaluated.")
    k: int = key(20, "Neighbours that vote.", at_least=1, below=2**32)
    temperature: float = key(
        0.07, "A neighbour's vote is exp(cosine / temperature).", above=0
    )

    def open(self, name, readings, classes):
        return Neighbours(name, self, readings, classes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeConfig(FeaturesConfig):
    """Logistic regression."""

    kind: str = key("probe", "What is evaluated.")
    l2: tuple[float, ...] = key(
        (10.0, 1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5),
        "Strengths, of which the held-out part of train chooses.",
        above=0,
        distinct=True,
    )
    held_out: float = key(
        0.1,
        "Size of that part, as a fraction of train; if it has fewer than 500 images, "
        "5-fold cross-validation chooses.",
        above=0,
        below=1,
    )
    seed: int = key(0, "Of its draw.", below=2**32)
    iterations: int = key(1_000, "Of L-BFGS, at most.", at_least=1, below=2**32)

    def open(self, name, readings, classes):
        return LinearProbe(name, self, readings, classes)


CONFIGS = {
    "classification": ClassificationConfig,
    "real": RealConfig,
    "objectnet": ObjectNetConfig,
    "fewshot": FewShotConfig,
    "knn": NeighboursConfig,
    "probe": ProbeConfig,
}


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
    """One of `config.evals`, opened.

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

    def __init__(self, name: str, spec: EvalConfig, readings: Readings, classes: int):
        self._reading = readings.open(name, spec, spec.split, of_model=True)
        self.splits, self._classes = (self._reading,), classes

    def needs(self) -> dict[str, Need]:
        return {"test": Need(self._reading, frozenset((TOPS, LOSS)))}

    def score(self, outputs: dict[str, Outputs], stop: Stop) -> Scored | None:
        return classification.score(outputs["test"], self._classes)


class Real:
    """ImageNet's validation split with the labels of ReaL."""

    def __init__(self, name: str, spec: EvalConfig, readings: Readings, classes: int):
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

    def __init__(self, name: str, spec: EvalConfig, readings: Readings, classes: int):
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

    def __init__(self, name: str, spec: EvalConfig, readings: Readings, classes: int):
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


# What passes need to know for RESTRICTED.
ALLOWED = label_sets.OVERLAP


def _positions(records: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns where records stand in a pass; damaged ones are left out."""
    there = np.searchsorted(records, rows)
    there = np.minimum(there, len(records) - 1)
    return there[records[there] == rows]


def _check_imagenet(name: str, spec: EvalConfig, classes: int) -> None:
    if classes != label_sets.CLASSES:
        raise UserError(
            f"evals.{name}: kind={spec.kind!r} is for classifiers of ImageNet's 1,000 "
            f"classes, but the model has {classes}: take it out"
        )
