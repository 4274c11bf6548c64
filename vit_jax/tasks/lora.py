"""LoRA: a frozen network whose projections get trained changes of low rank.

A kernel W of D_in by D_out becomes W + alpha / rank * A B, with A of D_in by rank drawn and
B of rank by D_out zero at the beginning; the classifier is trained whole. The optimiser
holds moments of A, B and the classifier alone. A workdir hands on the network with the
changes merged, a network like any other.

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
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
from vit_jax.errors import UserError
from vit_jax.models import Model, cost, stacking
from vit_jax.models.layers import CLASSIFIERS
from vit_jax.tasks.classification import (
    Classification,
    ClassificationConfig,
    require_classifier,
)
from vit_jax.tasks.task import Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig(ClassificationConfig):
    """Images and their labels, by changes of low rank to a frozen network."""

    averages_network: ClassVar[bool] = False

    name: str = key("lora", "What is learnt.")
    rank: int = key(8, "Rank of the changes.", at_least=1)
    alpha: float = key(16.0, "Their scale is alpha / rank.")
    projections: tuple[str, ...] = key(
        ("query", "value"),
        "Which kernels change: names of their places, or regular expressions that match "
        'their whole path without "/kernel", such as ".*/MlpBlock_3/Dense_0".',
    )

    def build(
        self,
        model: Model,
        data: DataConfig,
        run: RunLength,
        saved: dict | None = None,
    ) -> "Lora":
        return Lora(self, model, data)


class Lora(Classification):
    """See `task.Task`; the parameters are "lora" and "head".

    Beside them are the merged network, and the kernels that change as they were.

    Args:
      config: `config.task`.
      model: with a classifier.
      data: `config.data`.

    Raises:
      UserError: the loss does not fit the labels, or there is no classifier, no kernel of
        that name, or a name is no regular expression.
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
                    f"task.projections: {name!r} is no regular expression ({error}): "
                    "state a kernel's name, such as 'query'"
                ) from error
            if not any(_matches(name, path) for path in kernels):
                known = sorted({path.rpartition("/")[2] for path in kernels})
                raise UserError(
                    f"task.projections: {name!r} is no kernel of "
                    f"{model.options['variant']!r}; their names are {', '.join(known)}"
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

    def loss(self, params, extra, batch, rng):
        network = self.merge(params, jax.lax.stop_gradient(extra))
        return super().loss(network, network, batch, rng)

    def update(self, extra, params, stats, step):
        return extra | {"network": self.merge(params, extra) | (stats or {})}

    def merge(self, params: dict, extra: dict) -> dict:
        """Returns the network with the changes in its kernels.

        Args:
          params, extra: of the state.
        """
        flat = _unstacked(extra["network"] | params["head"])
        lora, scale = _flat(params["lora"]), self.config.alpha / self.config.rank
        for path, kernel in _flat(extra["kernels"]).items():
            change = scale * (lora[f"{path}/a"] @ lora[f"{path}/b"])
            flat[f"{path}/kernel"] = kernel + change.reshape(kernel.shape)
        network = unflatten_dict(flat, sep="/")
        return stacking.stack(network) if self.model.stacked else network

    def training_flops(self):
        """See `Task`; of the network the gradients of its activations alone are taken.

        The products of low rank are not counted.
        """
        forward = cost.forward_flops(self.model)
        return forward and 2 * forward

    def _extra(self, network: dict) -> dict:
        chosen = self._chosen(network)
        return {"network": network, "kernels": unflatten_dict(chosen, sep="/")}

    def _chosen(self, network: dict) -> dict:
        """Returns the kernels that change, see `_kernels`."""
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
    # What joins the heads takes all of them; a convolution all but its last axis.
    joins = path.endswith("/out") or kernel.ndim == 4
    taken = kernel.ndim - 1 if joins else 1
    return math.prod(kernel.shape[:taken]), math.prod(kernel.shape[taken:])


def _unstacked(network: dict) -> dict:
    return _flat(stacking.unstack(network))


def _flat(tree: dict) -> dict:
    return flatten_dict(tree, sep="/")


def _heads(network: dict) -> dict:
    """Returns the classifiers, at their places in the network."""
    return {name: network[name] for name in CLASSIFIERS if name in network}
