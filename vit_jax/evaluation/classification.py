"""Classification scores of a split, each example counted exactly once."""

from collections.abc import Callable, Iterable

import flax
import jax
import jax.numpy as jnp
from clu import metrics
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.data import device_ops
from vit_jax.errors import UserError
from vit_jax.models import Model
from vit_jax.parallel import compiler, sharding
from vit_jax.parallel import mesh as meshes


@flax.struct.dataclass
class Scores(metrics.Collection):
    """Masked means over the examples seen so far."""

    top1: metrics.Average.from_output("top1")
    loss: metrics.Average.from_output("loss")


EvalStep = Callable[[dict, dict], Scores]


def build(
    model: Model, config: ConfigDict, mesh: Mesh, shardings: dict | None = None
) -> EvalStep:
    """Builds the jitted evaluation step: (params, batch) -> scores.

    Args:
      model: network.
      config: complete config.
      mesh: of all devices.
      shardings: of the parameters; whole copies everywhere if None.

    Returns:
      Function that scores a batch (image uint8 (B, Y, X, C), label (B,), mask (B,)).
      The loss is the softmax cross-entropy, whatever the training loss.
    """

    def eval_step(params, batch):
        images = device_ops.normalize(
            batch["image"], config.data.mean, config.data.std
        ).astype(config.model.dtype)
        with sharding.activations(mesh):
            logits = model.apply(params, images)["logits"]
        label = batch["label"]
        chosen = jnp.take_along_axis(
            jax.nn.log_softmax(logits), label[:, None], axis=-1
        )
        return Scores.single_from_model_output(
            top1=(logits.argmax(-1) == label).astype(jnp.float32),
            loss=-chosen[:, 0],
            mask=batch["mask"],
        )

    everywhere = meshes.replicated(mesh)
    return jax.jit(
        eval_step,
        in_shardings=(shardings or everywhere, meshes.batched(mesh)),
        out_shardings=everywhere,
        compiler_options=compiler.options(mesh.devices.flat[0].platform),
    )


def evaluate(
    step: EvalStep,
    params: dict[str, dict],
    batches: Iterable[dict],
    mesh: Mesh,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, dict[str, float]] | None:
    """Scores several sets of parameters in one pass over the images.

    Args:
      step: from `build`.
      params: name of a set ("raw", "ema") to parameters.
      batches: what this process loads; every process has the same number.
      mesh: of all devices.
      stop: asked before every batch; True abandons the evaluation.

    Returns:
      Name of a set to {"top1": fraction, "loss": nats, "examples": count}, or None
      when it was abandoned.

    Raises:
      UserError: there is no example.
    """
    scores, waiting = {}, {}
    for batch in batches:
        if stop():
            return None
        on_device = meshes.to_devices(
            {name: batch[name] for name in ("image", "label", "mask")}, mesh
        )
        working = {name: step(params[name], on_device) for name in params}
        # The scores of a batch are fetched while the device is at the next.
        scores, waiting = _add(scores, waiting), working
    scores = _add(scores, waiting)
    if not scores:
        raise UserError("the evaluation split has no example: check config.evals")
    return {name: _result(score) for name, score in scores.items()}


def _add(scores: dict[str, Scores], more: dict[str, Scores]) -> dict[str, Scores]:
    more = jax.device_get(more)
    return {
        name: scores[name].merge(part) if name in scores else part
        for name, part in more.items()
    } or scores


def _result(scores: Scores) -> dict[str, float]:
    return {
        "top1": float(scores.top1.total / scores.top1.count),
        "loss": float(scores.loss.total / scores.loss.count),
        "examples": int(scores.top1.count),
    }
