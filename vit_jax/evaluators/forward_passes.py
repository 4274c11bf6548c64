"""Forward passes over a split for all evaluators.

Each example counts exactly once, on any mesh and any number of hosts. Letters: N
examples, B batch, D features, K classes, T best classes that are kept.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.command_line import progress
from vit_jax.data.config import DataConfig
from vit_jax.data.transforms import device as device_transforms
from vit_jax.distributed import compilation, sharding
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.models import Model, patches

if TYPE_CHECKING:  # Imported only for types: most tasks have no texts.
    from vit_jax.models.targets import Targets
    from vit_jax.models.text_tower import TextTower

TOP = 5  # Number of best classes kept per example.

# Arrays of a batch that are not in `Outputs.fields`; "skipped" stays on the host.
_BATCH = ("image", "grids", "label", "index", "mask", "skipped")

Weights = dict | tuple  # Parameters of a network, or a state, see `TrainedTask`.
Array = Any  # A NumPy array, or a JAX tracer inside a compiled function.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """The outputs that a pass computes, by their names in `Outputs`.

    Attributes:
      losses: whether predictions include losses, which need one label per image.
      restricted: classes that restricted predictions choose from; () for none.
      layers: layers whose pooled features are computed.
    """

    features: bool = False
    layers: tuple[int, ...] = ()
    logits: bool = False
    predictions: bool = False
    losses: bool = False
    restricted: tuple[int, ...] = ()
    task: bool = False

    def __or__(self, other: "Wanted") -> "Wanted":
        if self.restricted and other.restricted not in ((), self.restricted):
            raise ValueError("evaluators of one split restrict to different classes")
        names = {field.name for field in dataclasses.fields(self)} - {"layers"}
        either = {name: getattr(self, name) or getattr(other, name) for name in names}
        layers = tuple(sorted({*self.layers, *other.layers}))
        return Wanted(layers=layers, **either)


@flax.struct.dataclass
class Predictions:
    """The predictions of a classifier.

    `tops` are the best classes, best first, int32 (N, T), `confidence` the softmax
    probability of the first, (N,), and `losses` the softmax cross-entropies in nats,
    (N,), or None.
    """

    tops: Array
    confidence: Array
    losses: Array = None


@flax.struct.dataclass
class Outputs:
    """The outputs of a pass, the same on every host, in the order of the records.

    Attributes:
      records: indices of the examples in their source, (N,), without damaged ones.
      labels: (N,), or (N, K) with `data.multi_label`; None if labels are not read.
      features: input of the classifier, float32 (N, D).
      layers: pooled features, float32 (N, D), by layer number.
      logits: float32 (N, K).
      predictions: predictions among all classes.
      restricted: predictions among the restricted classes.
      task: metrics of the training task, (N,) each, by name.
      fields: other fields of the records that evaluations have (data/fields), such as
        "targets" (N, T), by name; None without such fields.
      image_embeddings: embeddings in the shared space, float32, of length 1.
      text_embeddings: embeddings in the shared space, float32, of length 1.
    """

    records: Array
    labels: Array = None
    features: Array = None
    layers: Array = None
    logits: Array = None
    predictions: Array = None
    restricted: Array = None
    task: Array = None
    fields: Array = None
    image_embeddings: Array = None
    text_embeddings: Array = None


Step = Callable[[Weights, dict], tuple[Outputs, jax.Array]]


class TrainedTask(NamedTuple):
    """The task of a run, for evaluations.

    A state holds the parameters of a run and the other arrays that the task needs.

    Attributes:
      backbone, held_out_metrics, pictures, segment: methods of `tasks.task.Task`.
      targets: attribute of `tasks.task.Task`.
      shapes: jax.ShapeDtypeStruct of each array of a state.
      shardings: shardings of a state.
      image_shape: (height, width, channels) of the task's images.
      tower: text tower of the task.
    """

    backbone: Callable
    held_out_metrics: Callable
    pictures: Callable
    segment: Callable | None
    shapes: tuple
    shardings: tuple
    image_shape: tuple[int, int, int]
    tower: "TextTower | None" = None
    targets: "Targets | None" = None

    def metric_names(self, fields: dict[str, jax.ShapeDtypeStruct]) -> tuple[str, ...]:
        """Returns the names of the task's metrics on images that it is not trained on.

        Args:
          fields: shapes of `Outputs.fields` for two images.
        """
        batch = {
            **fields,
            "image": jax.ShapeDtypeStruct((2, *self.image_shape), jnp.float32),
            "index": jax.ShapeDtypeStruct((2,), jnp.uint32),
        }
        key = jax.eval_shape(jax.random.key, 0)
        return tuple(jax.eval_shape(self.held_out_metrics, *self.shapes, batch, key))


def make_eval_step(
    model: Model,
    data: DataConfig,
    mesh: Mesh,
    wanted: Wanted,
    shardings: dict | None = None,
    trained: TrainedTask | None = None,
) -> Step:
    """Builds the jitted evaluation step: (params, batch) -> (outputs, mask).

    A batch has image uint8 (B, Y, X, C), index (B,), mask (B,), label (B,) if labels are
    read, and other fields. Every device gets all rows of the result. `shardings` are those of
    the parameters, which are replicated if None. With a `trained` task, its state takes
    the place of the parameters.
    """
    shardings = trained.shardings if trained else shardings
    others = np.setdiff1d(np.arange(model.options["num_classes"]), wanted.restricted)

    def eval_step(params, batch):
        images = device_transforms.normalize(batch["image"], data.mean, data.std)
        images = patches.of_batch(batch, images)
        values = {"records": batch["index"], "labels": batch.get("label")}
        fields = {key: value for key, value in batch.items() if key not in _BATCH}
        values["fields"] = fields or None
        labels = values["labels"] if wanted.losses else None
        if trained is not None:
            state, params = params, trained.backbone(*params)
        if wanted.task:
            batch_of_task = {**fields, "image": images, "index": batch["index"]}
            key = jax.random.key(0)  # The same random draws in each evaluation.
            with sharding.activations(mesh):
                values["task"] = trained.held_out_metrics(*state, batch_of_task, key)
        if wanted.features or wanted.logits or wanted.predictions:
            with sharding.activations(mesh):
                outputs = model.apply(params, images.astype(model.options["dtype"]))
        if wanted.layers:
            with sharding.activations(mesh):
                layers = model.layer_features(
                    params,
                    images.astype(model.options["dtype"]),
                    wanted.layers,
                    tokens="pooled",
                )
            values["layers"] = dict(zip(wanted.layers, layers, strict=True))
        if wanted.features:
            values["features"] = outputs["pre_logits"].astype(jnp.float32)
        if wanted.logits or wanted.predictions:
            logits = outputs["logits"].astype(jnp.float32)
        if wanted.logits:
            values["logits"] = logits
        if wanted.predictions:
            values["predictions"] = predict(logits, logits.shape[-1], labels)
        if wanted.restricted:
            logits = logits.at[:, others].set(-jnp.inf)
            values["restricted"] = predict(logits, len(wanted.restricted), labels)
        return Outputs(**values), batch["mask"]

    replicated = meshes.replicated(mesh)
    return jax.jit(
        eval_step,
        in_shardings=(shardings or replicated, meshes.batched(mesh)),
        out_shardings=replicated,
        compiler_options=compilation.options(
            mesh.devices.flat[0].platform, bfloat16=model.config.rounds_products
        ),
    )


def predict(logits: Array, num_classes: int, labels: Array | None) -> Predictions:
    """Returns the predictions of logits, (N, K), with losses if there are labels.

    At most `num_classes` classes are kept for each example.
    """
    log_probs = jax.nn.log_softmax(logits)
    best, tops = jax.lax.top_k(log_probs, min(TOP, num_classes))
    predictions = Predictions(tops.astype(jnp.int32), jnp.exp(best[:, 0]))
    if labels is None:
        return predictions
    log_probs = jnp.take_along_axis(log_probs, labels[:, None], axis=-1)
    return predictions.replace(losses=-log_probs[:, 0])


def make_picture_step(trained: TrainedTask, data: DataConfig, mesh: Mesh) -> Step:
    """Builds the jitted picture step: (state, batch) -> pictures of the task.

    A batch has image uint8 (B, Y, X, C) and index (B,). The result is a NamedTuple of
    images (B, Y, X, C), 0..255, or None. Every device gets all of them.
    """
    mean, std = (
        np.asarray(v, np.float32).reshape(1, 1, 1, -1) for v in (data.mean, data.std)
    )

    def picture_step(state, batch):
        images = device_transforms.normalize(batch["image"], data.mean, data.std)
        batch = {"image": images, "index": batch["index"]}
        with sharding.activations(mesh):
            pictures = trained.pictures(*state, batch, jax.random.key(0))
        return jax.tree.map(
            lambda x: (255 * (x * std + mean)).round().clip(0, 255).astype(jnp.uint8),
            pictures,
        )

    replicated = meshes.replicated(mesh)
    return jax.jit(
        picture_step,
        in_shardings=(trained.shardings, meshes.batched(mesh)),
        out_shardings=replicated,
    )


def collect_outputs(
    step: Step,
    params: dict[str, Weights],
    batches: Iterable[dict],
    mesh: Mesh,
    stop: Callable[[], bool] = lambda: False,
    title: str = "images",
) -> dict[str, Outputs] | None:
    """Runs several sets of parameters on the images in one pass.

    The outputs of all examples must fit in a host's memory, once per set of parameters.

    Args:
      step: result of `make_eval_step`.
      params: sets of parameters by name ("params", "ema").
      batches: batches of this process, from `pipeline.eval_batches`; every process has
        the same number of them.
      mesh: mesh of all devices.
      stop: function that is called before every batch; returning True stops the pass.
      title: title of the progress bar.

    Returns:
      Outputs by the name of the set of parameters; None if stopped.

    Raises:
      UserError: the split has no examples.
    """
    tables = {name: _Table(len(batches)) for name in params}
    pending = {}
    for batch in progress.each(batches, title, "batches", leave=False):
        if stop():
            return None
        arrays = {name: array for name, array in batch.items() if name != "skipped"}
        on_device = meshes.to_devices(arrays, mesh)
        running = {name: step(params[name], on_device) for name in params}
        # Outputs of a batch are fetched while the device computes the next one.
        _add(tables, pending)
        pending = running
    _add(tables, pending)
    if not all(table.count for table in tables.values()):
        raise UserError("the evaluation split has no examples: check config.evals")
    return {name: table.outputs() for name, table in tables.items()}


def _add(tables: dict, pending: dict) -> None:
    for name, (rows, mask) in jax.device_get(pending).items():
        tables[name].add(rows, mask)


class _Table:
    """Outputs of all batches, each in one array that is allocated once."""

    def __init__(self, batches: int):
        self._batches, self.count = batches, 0
        self._columns: Outputs | None = None

    def add(self, rows: Outputs, mask: np.ndarray) -> None:
        counted = np.flatnonzero(mask)
        if self._columns is None:
            self._columns = jax.tree.map(
                lambda x: np.empty((self._batches * len(x), *x.shape[1:]), x.dtype),
                rows,
            )
        stop = self.count + len(counted)
        columns, rows = jax.tree.leaves(self._columns), jax.tree.leaves(rows)
        for column, values in zip(columns, rows, strict=True):
            column[self.count : stop] = values[counted]
        self.count = stop

    def outputs(self) -> Outputs:
        outputs = jax.tree.map(lambda x: x[: self.count], self._columns)
        return outputs.replace(records=outputs.records.astype(np.int64))


def check_finite(
    outputs: Mapping[str, Outputs], title: str, *, classifier: bool
) -> None:
    """Checks that features, and predictions of a `classifier`, are finite.

    Raises:
      UserError: a value is not finite; the message has the split's `title`.
    """
    for result in outputs.values():
        columns = [("features", result.features)]
        for layer, values in (result.layers or {}).items():
            columns.append((f"features of layer {layer}", values))
        if classifier and result.predictions is not None:
            columns.append(("outputs", result.predictions.confidence))
            columns.append(("outputs", result.predictions.losses))
        for what, values in columns:
            if values is None:
                continue
            with np.errstate(invalid="ignore"):  # Infinities of both signs add to NaN.
                total = values.sum(dtype=np.float64)
            if np.isfinite(total):  # The sum is a test that needs no copy.
                continue
            bad = (~np.isfinite(values)).reshape(len(values), -1).any(1).sum()
            raise UserError(
                f"the {what} are not finite for {bad} of {len(values)} images of "
                f"{title}: the checkpoint is damaged, or diverged in training"
            )
