"""LoRA: low-rank updates of the projections of a frozen network.

A kernel W (D_in, D_out) becomes W + alpha / rank * A B, with A (D_in, rank) drawn at
random and B (rank, D_out) zero at the beginning; the classifier is trained whole. The
optimiser holds moments of A, B and the classifier only. Checkpoints also hold the
network with the updates merged, so any command can use it.

Source: arXiv:2106.09685, section 4.1. Letters: B images, L classes, R rank.
"""

import dataclasses
import math
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax.config.fields import key
from vit_jax.data.config import DataConfig
from vit_jax.errors import UserError
from vit_jax.models import Model, stacking
from vit_jax.models.layers import CLASSIFIERS
from vit_jax.tasks.classification import (
    Classification,
    ClassificationConfig,
    require_classifier,
)
from vit_jax.tasks.task import Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig(ClassificationConfig):
    """LoRA: images and their labels, with low-rank updates of a frozen network."""

    averages_network: ClassVar[bool] = False

    name: str = key("lora", "Task to train.")
    rank: int = key(8, "Rank of the updates.", at_least=1)
    alpha: float = key(
        16.0,
        "Scale of the updates, which are multiplied by `task.alpha` / `task.rank`.",
    )
    projections: tuple[str, ...] = key(
        ("query", "value"),
        "Layers whose kernels are updated: names of layers, or regular expressions "
        'that match a whole path without "/kernel", such as ".*/MlpBlock_3/Dense_0".',
    )

    def build(self, model, data, run, saved=None) -> "Lora":
        return Lora(self, model, data)


class Lora(Classification):
    """The LoRA task; the parameters are "lora" and "head".

    `extra` holds the merged network, and the original values of the updated kernels.

    Raises:
      UserError: the loss does not suit the labels, the network has no classifier, or a
        projection matches no kernel or is not a regular expression.
    """

    def __init__(self, config: LoraConfig, model: Model, data: DataConfig):
        super().__init__(config, model, data)
        require_classifier(model, config.name)
        kernels = _kernels(jax.eval_shape(_unstacked, model.shapes))
        for name in config.projections:
            try:
                re.compile(name)
            except re.error as error:
                raise UserError(
                    f"task.projections: {name!r} is not a regular expression "
                    f"({error}): give the name of a layer, such as 'query'"
                ) from error
            if not any(_matches(name, path) for path in kernels):
                known = sorted({path.rpartition("/")[2] for path in kernels})
                raise UserError(
                    f"task.projections: {name!r} matches no layer of "
                    f"{model.options['variant']!r}: choose of {', '.join(known)}"
                )

    def init(self, rng: jax.Array) -> tuple[dict, Tree]:
        network_key, lora_key = jax.random.split(rng)
        network = self.model.init(network_key)
        lora, R = {}, self.config.rank
        for number, (path, kernel) in enumerate(self._chosen(network).items()):
            rows, columns = _matrix(path, kernel)
            a = jax.random.normal(jax.random.fold_in(lora_key, number), (rows, R))
            lora[f"{path}/a"] = a / math.sqrt(rows)
            lora[f"{path}/b"] = jnp.zeros((R, columns))
        params = {"lora": unflatten_dict(lora, sep="/"), "head": _heads(network)}
        return params, self._extra(network)

    def backbone(self, params, extra):
        return extra["network"]

    def with_backbone(self, params, extra, network):
        return params | {"head": _heads(network)}, self._extra(network)

    def left_out(self, params, extra, task_params):
        return dict.fromkeys(task_params, "the run's network contains its updates")

    def loss(self, params, extra, batch, rng):
        network = self.merge(params, jax.lax.stop_gradient(extra))
        return super().loss(network, network, batch, rng)

    def update(self, extra, params, stats, step):
        return extra | {"network": self.merge(params, extra) | (stats or {})}

    def merge(self, params: dict, extra: dict) -> dict:
        """Returns the network with the updates added to its kernels.

        Args:
          params, extra: training state.
        """
        flat = _unstacked(extra["network"] | params["head"])
        lora, scale = _flat(params["lora"]), self.config.alpha / self.config.rank
        for path, kernel in _flat(extra["kernels"]).items():
            update = scale * (lora[f"{path}/a"] @ lora[f"{path}/b"])
            flat[f"{path}/kernel"] = kernel + update.reshape(kernel.shape)
        network = unflatten_dict(flat, sep="/")
        return stacking.stack(network) if self.model.config.stacked else network

    def training_flops(self):
        """Returns the operations per image; the backward pass skips kernel gradients.

        The low-rank products are not counted.
        """
        flops = super().training_flops()
        return flops and 2 * flops // 3

    def _extra(self, network: dict) -> dict:
        chosen = self._chosen(network)
        return {"network": network, "kernels": unflatten_dict(chosen, sep="/")}

    def _chosen(self, network: dict) -> dict:
        """Returns the kernels that LoRA updates, by their paths without "/kernel"."""
        kernels, names = _kernels(_unstacked(network)), self.config.projections
        return {
            path: kernel
            for path, kernel in kernels.items()
            if any(_matches(name, path) for name in names)
        }


def _kernels(flat: dict) -> dict:
    """Returns all kernels but the classifiers', by their paths without "/kernel"."""
    return {
        path.removesuffix("/kernel"): kernel
        for path, kernel in flat.items()
        if path.endswith("/kernel") and path.split("/")[0] not in CLASSIFIERS
    }


def _matches(name: str, path: str) -> bool:
    return path.rpartition("/")[2] == name or bool(re.fullmatch(name, path))


def _matrix(path: str, kernel: jax.Array) -> tuple[int, int]:
    """Returns the numbers of inputs and outputs of a kernel."""
    # All axes but the last are inputs in convolutions and in attention's output layer.
    several = path.endswith("/out") or kernel.ndim == 4
    inputs = kernel.ndim - 1 if several else 1
    return math.prod(kernel.shape[:inputs]), math.prod(kernel.shape[inputs:])


def _unstacked(network: dict) -> dict:
    return _flat(stacking.unstack(network))


def _flat(tree: dict) -> dict:
    return flatten_dict(tree, sep="/")


def _heads(network: dict) -> dict:
    """Returns the classifiers by their names in the network."""
    return {name: network[name] for name in CLASSIFIERS if name in network}
