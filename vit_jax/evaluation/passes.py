"""One pass of a network over a split: what evaluations need of every example.

Each example counts exactly once, on any mesh and any number of hosts. Letters: N
examples, B rows of a batch, D features, K classes, T the best classes that are kept.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.data import device_ops
from vit_jax.data.config import DataConfig
from vit_jax.errors import UserError
from vit_jax.models import Model
from vit_jax.parallel import compiler, sharding
from vit_jax.parallel import mesh as meshes

TOP = 5  # Classes an example that are kept, best first.
# What a pass can give; see `Outputs`.
FEATURES, TOPS, LOSS, RESTRICTED = "features", "tops", "loss", "restricted"
CONFIDENCE = "confidence"  # Comes with TOPS.

_BATCH = ("image", "label", "index", "mask")

Step = Callable[[dict, dict], dict]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What a pass gave, the same on every host, in the order of the records.

    Attributes:
      records: numbers of the examples in their source, (N,); one that is damaged and
        skipped is missing.
      labels: (N,).
      values: name to an array of N rows: FEATURES, float32 (N, D), what stands before
        the classifier; TOPS, int32 (N, T), the best classes, with "confidence", (N,),
        the softmax probability of the first; LOSS, (N,), the softmax cross-entropy in
        nats; RESTRICTED, (N,), the best class among those allowed.
    """

    records: np.ndarray
    labels: np.ndarray
    values: dict[str, np.ndarray]


def build(
    model: Model,
    data: DataConfig,
    mesh: Mesh,
    shardings: dict | None = None,
    wants: Iterable[str] = (TOPS, LOSS),
    allowed: Sequence[int] = (),
) -> Step:
    """Builds the jitted evaluation step: (params, batch) -> values and rows' names.

    Args:
      model: network.
      data: `config.data`: mean and std are read.
      mesh: of all devices.
      shardings: of the parameters; whole copies everywhere if None.
      wants: names of what is asked for, see `Outputs`.
      allowed: the classes among which RESTRICTED chooses.

    Returns:
      Function of parameters and of a batch (image uint8 (B, Y, X, C), label (B,),
      index (B,), mask (B,)). Every device gets all rows of the result.
    """
    wants = frozenset(wants)
    allowed = np.asarray(allowed, np.int32)

    def eval_step(params, batch):
        images = device_ops.normalize(batch["image"], data.mean, data.std).astype(
            model.options["dtype"]
        )
        with sharding.activations(mesh):
            outputs = model.apply(params, images)
        found = {name: batch[name] for name in _BATCH[1:]}
        if FEATURES in wants:
            found[FEATURES] = outputs["pre_logits"].astype(jnp.float32)
        if wants == {FEATURES}:
            return found
        logits = outputs["logits"].astype(jnp.float32)
        chances = jax.nn.log_softmax(logits)
        if TOPS in wants:
            best, tops = jax.lax.top_k(chances, min(TOP, logits.shape[-1]))
            found |= {TOPS: tops.astype(jnp.int32), CONFIDENCE: jnp.exp(best[:, 0])}
        if LOSS in wants:
            label = batch["label"][:, None]
            found[LOSS] = -jnp.take_along_axis(chances, label, axis=-1)[:, 0]
        if RESTRICTED in wants:
            found[RESTRICTED] = jnp.asarray(allowed)[logits[:, allowed].argmax(-1)]
        return found

    everywhere = meshes.replicated(mesh)
    return jax.jit(
        eval_step,
        in_shardings=(shardings or everywhere, meshes.batched(mesh)),
        out_shardings=everywhere,
        compiler_options=compiler.options(mesh.devices.flat[0].platform),
    )


def collect(
    step: Step,
    params: dict[str, dict],
    batches: Iterable[dict],
    mesh: Mesh,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Outputs] | None:
    """Takes several sets of parameters over the images in one pass.

    Memory of a host: what is wanted of all examples, once a set of parameters.

    Args:
      step: from `build`.
      params: name of a set ("raw", "ema") to parameters.
      batches: what this process loads, from `pipeline.eval_batches`; every process has
        the same number.
      mesh: of all devices.
      stop: asked before every batch; True abandons the pass.

    Returns:
      Name of a set to its outputs, or None when it was abandoned.

    Raises:
      UserError: there is no example.
    """
    tables = {name: _Table(len(batches)) for name in params}
    waiting = {}
    for batch in batches:
        if stop():
            return None
        on_device = meshes.to_devices({name: batch[name] for name in _BATCH}, mesh)
        working = {name: step(params[name], on_device) for name in params}
        # A batch's results are fetched while the device is at the next.
        _add(tables, waiting)
        waiting = working
    _add(tables, waiting)
    results = {name: table.outputs() for name, table in tables.items()}
    if not all(len(outputs.labels) for outputs in results.values()):
        raise UserError("the evaluation split has no example: check config.evals")
    return results


def check_finite(outputs: dict[str, Outputs], names: Iterable[str], title: str) -> None:
    """Refuses numbers of which no score would mean anything.

    Args:
      outputs: from `collect`.
      names: of the values to look at.
      title: of the split.

    Raises:
      UserError: a value is not finite.
    """
    for found in outputs.values():
        for name in found.values.keys() & set(names):
            values = found.values[name]
            with np.errstate(invalid="ignore"):  # Of infinities of both signs.
                total = values.sum(dtype=np.float64)
            if np.isfinite(total):  # The sum shows all, without a copy.
                continue
            bad = (~np.isfinite(values)).reshape(len(values), -1).any(1).sum()
            what = "features" if name == FEATURES else "outputs"
            raise UserError(
                f"the {what} are not finite for {bad} of {len(values)} images of "
                f"{title}: the checkpoint is damaged, or diverged in training"
            )


def _add(tables: dict, waiting: dict) -> None:
    for name, rows in jax.device_get(waiting).items():
        tables[name].add(rows)


class _Table:
    """Rows of all batches, each value in one array from the start."""

    def __init__(self, batches: int):
        self._batches, self._count = batches, 0
        self._columns: dict[str, np.ndarray] = {}

    def add(self, rows: dict[str, np.ndarray]) -> None:
        there = np.flatnonzero(rows["mask"])
        if not self._columns:
            self._columns = {
                name: np.empty((self._batches * len(x), *x.shape[1:]), x.dtype)
                for name, x in rows.items()
            }
        stop = self._count + len(there)
        for name, column in self._columns.items():
            column[self._count : stop] = rows[name][there]
        self._count = stop

    def outputs(self) -> Outputs:
        columns = {name: x[: self._count] for name, x in self._columns.items()}
        columns.pop("mask", None)
        records = columns.pop("index", np.zeros(0, np.uint32))
        labels = columns.pop("label", np.zeros(0, np.int32))
        return Outputs(records.astype(np.int64), labels, columns)
