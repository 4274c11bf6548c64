"""Networks of checkpoints, and forward passes over a split for all evaluators.

Each example counts exactly once, on any mesh and any number of hosts. Letters: N
examples, B rows of a batch, D features, K classes, T the best classes that are kept.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax import progress, weights
from vit_jax.data import imagenet
from vit_jax.data.config import DataConfig
from vit_jax.data.transforms import device as transforms
from vit_jax.distributed import compilation, sharding
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.models import Model
from vit_jax.models.text_tower import TextTower
from vit_jax.weights.pretrained import (
    Preprocess,
    Pretrained,
    describe_preprocess,
    usual_preprocess,
)

TOP = 5  # Classes that are kept per example, best first.
# Names of the outputs of a pass; see `Outputs`.
FEATURES, TOPS, LOSS, RESTRICTED = "features", "tops", "loss", "restricted/"
LOGITS = "logits"
CONFIDENCE = "confidence"  # Comes with TOPS.
# Of images and of texts in the space that they share, float32, of length 1.
EMBEDDINGS, TEXTS = "embeddings", "texts"
TASK = "task"  # Metrics of the task in training, as "task/loss".

_BATCH = ("image", "label", "index", "mask")  # The label only if the split has one.

Weights = dict | tuple  # Parameters of a network, or a state, see `TrainedTask`.
Step = Callable[[Weights, dict], dict]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The outputs of a pass, the same on every host, in the order of the records.

    Attributes:
      records: indices of the examples in their source, (N,), without damaged ones that
        were skipped.
      labels: (N,), or (N, K) of `data.multi_label`; empty if the split is read without.
      values: name to an array of N rows: FEATURES, float32 (N, D), the input of the
        classifier; TOPS, int32 (N, T), the best classes, with "confidence", (N,), the
        softmax probability of the first; LOSS, (N,), the softmax cross-entropy in nats;
        for RESTRICTED each of these once more, as "restricted/tops", with all but the
        allowed classes left out; for TASK each metric, (N,), as "task/loss"; LOGITS,
        float32 (N, K).
    """

    records: np.ndarray
    labels: np.ndarray
    values: dict[str, np.ndarray]


class TrainedTask(NamedTuple):
    """The task of a run, as evaluations see it.

    A state is what the task knows of the run's: its parameters and what is beside them.

    Attributes:
      backbone, held_out_metrics, pictures: methods of `tasks.task.Task`.
      shapes: of a state, with a jax.ShapeDtypeStruct for each array.
      shardings: of a state.
      image_shape: (height, width, channels) of its images.
      tower: see `tasks.task.Task`.
    """

    backbone: Callable
    held_out_metrics: Callable
    pictures: Callable
    shapes: tuple
    shardings: tuple
    image_shape: tuple[int, int, int]
    tower: TextTower | None = None

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of its metrics of images that it is not trained on."""
        batch = {
            "image": jax.ShapeDtypeStruct((2, *self.image_shape), jnp.float32),
            "index": jax.ShapeDtypeStruct((2,), jnp.uint32),
        }
        key = jax.eval_shape(jax.random.key, 0)
        found = jax.eval_shape(self.held_out_metrics, *self.shapes, batch, key)
        return tuple(found)


def open_weights(
    checkpoint: str,
    given: Mapping[str, object],
    *,
    use_ema: bool,
    num_heads: int,
    architecture: str = "",
    with_task: bool = False,
    tell: Callable[[str], None],
) -> tuple[Pretrained, Preprocess]:
    """Opens weights, and returns the preprocessing of their images.

    Args:
      checkpoint, use_ema, num_heads, architecture, with_task: as in `weights.open_pretrained`.
      given: fields of `Preprocess` that replace those of the checkpoint.
      tell: called with one line about all that was guessed, if anything was.

    Returns:
      The checkpoint and the preprocessing.

    Raises:
      UserError: there is no checkpoint, or it cannot be read.
    """
    found = weights.open_pretrained(
        checkpoint,
        use_ema=use_ema,
        num_heads=num_heads,
        architecture=architecture,
        with_task=with_task,
        image_size=given.get("image_size"),
    )
    guesses = list(found.notes)  # Such as a guessed number of heads.
    preprocess = dataclasses.replace(preprocessing_of(found), **given)
    stated = {"mean", "std", "interpolation", "crop_fraction"} <= given.keys()
    if not found.preprocess and not stated:
        guesses.append(
            "does not tell how its images are prepared; assumed as of "
            f"{usual_preprocess(found).family}: {describe_preprocess(preprocess)}"
        )
    found = name_classes(found, guesses.append)
    if guesses:
        # Of a file its name alone; "deit:Ti/16" is no path.
        place = pathlib.Path(checkpoint)
        name = place.name if place.exists() else checkpoint
        tell(f"{name}: {'; '.join(guesses)}")
    return found, preprocess


def name_classes(pretrained: Pretrained, tell: Callable[[str], None]) -> Pretrained:
    """Returns a checkpoint with the names of ImageNet's classes if it has 1,000 unnamed.

    Args:
      pretrained: the checkpoint.
      tell: called with a line if they are taken for ImageNet's.
    """
    published = pretrained.format not in ("workdir", "vit_jax")
    count = pretrained.options["num_classes"]
    if pretrained.class_names or not published or count != imagenet.NUM_CLASSES:
        return pretrained
    tell("does not name its 1,000 classes; taken for ImageNet's")
    return dataclasses.replace(pretrained, class_names=imagenet.class_names())


def preprocessing_of(pretrained: Pretrained) -> Preprocess:
    """Returns the preprocessing in a checkpoint, or the usual one of its format.

    Its size is that of the network, unless what comes with the weights states another.
    """
    found = pretrained.preprocess or usual_preprocess(pretrained).preprocess
    # Equal numbers for three channels hold for one as well.
    mean, std = (v[:1] if len(set(v)) == 1 else v for v in (found.mean, found.std))
    return dataclasses.replace(found, mean=mean, std=std)


def make_eval_step(
    model: Model,
    data: DataConfig,
    mesh: Mesh,
    shardings: dict | None = None,
    names: Iterable[str] = (TOPS, LOSS),
    allowed: Sequence[int] = (),
    trained: TrainedTask | None = None,
) -> Step:
    """Builds the jitted evaluation step: (params, batch) -> outputs by name.

    Args:
      model: network.
      data: `config.data`: mean and std are read.
      mesh: of all devices.
      shardings: of the parameters; replicated if None.
      names: of the outputs, see `Outputs`.
      allowed: classes among which RESTRICTED outputs choose.
      trained: task of a run, whose states then stand in place of parameters.

    Returns:
      Function of parameters and of a batch (image uint8 (B, Y, X, C), index (B,),
      mask (B,), and label (B,) unless the split is read without). Every device gets
      all rows of the result.
    """
    shardings = trained.shardings if trained else shardings
    names = frozenset(names)
    others = np.setdiff1d(np.arange(model.options["num_classes"]), allowed)

    def eval_step(params, batch):
        images = transforms.normalize(batch["image"], data.mean, data.std)
        found = {name: batch[name] for name in _BATCH[1:] if name in batch}
        if trained is not None:
            state, params = params, trained.backbone(*params)
        if TASK in names:
            batch_of_task = {"image": images, "index": batch["index"]}
            with sharding.activations(mesh):
                metrics = trained.held_out_metrics(*state, batch_of_task, _key())
            found |= {f"{TASK}/{name}": value for name, value in metrics.items()}
        if names == {TASK}:
            return found
        images = images.astype(model.options["dtype"])
        with sharding.activations(mesh):
            outputs = model.apply(params, images)
        if FEATURES in names:
            found[FEATURES] = outputs["pre_logits"].astype(jnp.float32)
        if names <= {FEATURES, TASK}:
            return found
        logits = outputs["logits"].astype(jnp.float32)
        if LOGITS in names:
            found[LOGITS] = logits
        views = {"": logits}
        if RESTRICTED in names:
            views[RESTRICTED] = logits.at[:, others].set(-jnp.inf)
        for view, chosen in views.items():
            log_probs = jax.nn.log_softmax(chosen)
            classes = len(allowed) if view else logits.shape[-1]
            if TOPS in names:
                best, tops = jax.lax.top_k(log_probs, min(TOP, classes))
                found[view + TOPS] = tops.astype(jnp.int32)
                found[view + CONFIDENCE] = jnp.exp(best[:, 0])
            if LOSS in names:
                label = batch["label"][:, None]
                losses = -jnp.take_along_axis(log_probs, label, axis=-1)
                found[view + LOSS] = losses[:, 0]
        return found

    replicated = meshes.replicated(mesh)
    return jax.jit(
        eval_step,
        in_shardings=(shardings or replicated, meshes.batched(mesh)),
        out_shardings=replicated,
        compiler_options=compilation.options(mesh.devices.flat[0].platform),
    )


def make_picture_step(trained: TrainedTask, data: DataConfig, mesh: Mesh) -> Step:
    """Builds the jitted function of a state and a batch to the task's pictures.

    Args:
      trained: task of a run.
      data: `config.data`: mean and std are read.
      mesh: of all devices.

    Returns:
      Function of a state and of a batch (image uint8 (B, Y, X, C), index (B,)) to a
      NamedTuple of images (B, Y, X, C), 0..255, or None. Every device gets all of them.
    """
    mean, std = (
        np.asarray(v, np.float32).reshape(1, 1, 1, -1) for v in (data.mean, data.std)
    )

    def picture_step(state, batch):
        images = transforms.normalize(batch["image"], data.mean, data.std)
        batch = {"image": images, "index": batch["index"]}
        with sharding.activations(mesh):
            found = trained.pictures(*state, batch, _key())
        return jax.tree.map(
            lambda x: (255 * (x * std + mean)).round().clip(0, 255).astype(jnp.uint8),
            found,
        )

    replicated = meshes.replicated(mesh)
    return jax.jit(
        picture_step,
        in_shardings=(trained.shardings, meshes.batched(mesh)),
        out_shardings=replicated,
    )


def _key() -> jax.Array:
    """Returns the key of what tasks draw in evaluations: the same each time."""
    return jax.random.key(0)


def collect_outputs(
    step: Step,
    params: dict[str, Weights],
    batches: Iterable[dict],
    mesh: Mesh,
    stop: Callable[[], bool] = lambda: False,
    title: str = "images",
) -> dict[str, Outputs] | None:
    """Runs several sets of parameters on the images in one pass.

    Memory of a host: the outputs of all examples, once per set of parameters.

    Args:
      step: from `make_eval_step`.
      params: name of a set ("params", "ema") to parameters.
      batches: of this process, from `pipeline.eval_batches`; every process has the same
        number.
      mesh: of all devices.
      stop: called before every batch; True stops the pass.
      title: of the bar.

    Returns:
      Name of a set to its outputs; None if stopped.

    Raises:
      UserError: there is no example.
    """
    tables = {name: _Table(len(batches)) for name in params}
    pending = {}
    for batch in progress.each(batches, title, "batches", leave=False):
        if stop():
            return None
        arrays = {name: batch[name] for name in _BATCH if name in batch}
        on_device = meshes.to_devices(arrays, mesh)
        running = {name: step(params[name], on_device) for name in params}
        # The outputs of a batch are fetched while the device runs the next.
        _add(tables, pending)
        pending = running
    _add(tables, pending)
    results = {name: table.outputs() for name, table in tables.items()}
    if not all(len(outputs.records) for outputs in results.values()):
        raise UserError("the evaluation split has no example: check config.evals")
    return results


def check_finite(outputs: dict[str, Outputs], names: Iterable[str], title: str) -> None:
    """Checks that outputs are finite.

    Args:
      outputs: from `collect_outputs`.
      names: of the outputs to check.
      title: of the split.

    Raises:
      UserError: a value is not finite.
    """
    for found in outputs.values():
        for name in found.values.keys() & set(names):
            values = found.values[name]
            with np.errstate(invalid="ignore"):  # Infinities of both signs.
                total = values.sum(dtype=np.float64)
            if np.isfinite(total):  # The sum shows all, without a copy.
                continue
            bad = (~np.isfinite(values)).reshape(len(values), -1).any(1).sum()
            what = "features" if name == FEATURES else "outputs"
            raise UserError(
                f"the {what} are not finite for {bad} of {len(values)} images of "
                f"{title}: the checkpoint is damaged, or diverged in training"
            )


def _add(tables: dict, pending: dict) -> None:
    for name, rows in jax.device_get(pending).items():
        tables[name].add(rows)


class _Table:
    """Rows of all batches, each output in one array that is allocated at once."""

    def __init__(self, batches: int):
        self._batches, self._count = batches, 0
        self._columns: dict[str, np.ndarray] = {}

    def add(self, rows: dict[str, np.ndarray]) -> None:
        counted = np.flatnonzero(rows["mask"])
        if not self._columns:
            self._columns = {
                name: np.empty((self._batches * len(x), *x.shape[1:]), x.dtype)
                for name, x in rows.items()
            }
        stop = self._count + len(counted)
        for name, column in self._columns.items():
            column[self._count : stop] = rows[name][counted]
        self._count = stop

    def outputs(self) -> Outputs:
        columns = {name: x[: self._count] for name, x in self._columns.items()}
        columns.pop("mask", None)
        records = columns.pop("index", np.zeros(0, np.uint32))
        labels = columns.pop("label", np.zeros(0, np.int32))
        return Outputs(records.astype(np.int64), labels, columns)
