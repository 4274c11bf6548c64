"""Low-rank updates of kernels of a frozen network (LoRA, arXiv:2106.09685).

A kernel W (D_in, D_out) becomes W + alpha / rank * A B, with A (D_in, rank) drawn at
random and B (rank, D_out) zero at the beginning. The tasks `lora` and `adapters` train
the factors A and B. Letters: R rank.
"""

import dataclasses
import math
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.models import Model, stacking
from vit_jax.models.layers import CLASSIFIERS
from vit_jax.tasks.task import TaskConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankConfig(TaskConfig):
    """Keys of tasks that train low-rank updates."""

    averages_network: ClassVar[bool] = False

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


class LowRankUpdates:
    """The low-rank updates of one network.

    Factors are a nested dict with "a" (D_in, R) and "b" (R, D_out) at the path of each
    kernel without "/kernel"; the blocks of the network are separate in it, also if the
    network has stacked blocks.

    Args:
      config: rank, scale and choice of the kernels.
      model: the network.

    Raises:
      UserError: a projection matches no kernel or is not a regular expression.
    """

    def __init__(self, config: LowRankConfig, model: Model):
        self._config, self._stacked = config, model.config.stacked
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

    def init(self, rng: jax.Array, network: dict) -> dict:
        """Draws factors whose product is 0 for the kernels of a network."""
        factors, R = {}, self._config.rank
        for number, (path, kernel) in enumerate(self._chosen(network).items()):
            rows, columns = _matrix(path, kernel)
            a = jax.random.normal(jax.random.fold_in(rng, number), (rows, R))
            factors[f"{path}/a"] = a / math.sqrt(rows)
            factors[f"{path}/b"] = jnp.zeros((R, columns))
        return unflatten_dict(factors, sep="/")

    def kernels(self, network: dict) -> dict:
        """Returns the kernels that are updated, by their paths without "/kernel"."""
        return unflatten_dict(self._chosen(network), sep="/")

    def merge(self, factors: dict, network: dict, kernels: dict) -> dict:
        """Returns a network with updates added to its kernels.

        Args:
          factors: factors of the updates, see `init`.
          network: the network; its kernels that are updated are not read.
          kernels: frozen values of these, see `kernels`.
        """
        flat, factors = _unstacked(network), _flat(factors)
        scale = self._config.alpha / self._config.rank
        for path, kernel in _flat(kernels).items():
            # TPUs would round operands to bfloat16, unlike what reads an adapter.
            update = scale * jnp.matmul(
                factors[f"{path}/a"], factors[f"{path}/b"], precision="highest"
            )
            flat[f"{path}/kernel"] = kernel + update.reshape(kernel.shape)
        merged = unflatten_dict(flat, sep="/")
        return stacking.stack(merged) if self._stacked else merged

    def _chosen(self, network: dict) -> dict:
        kernels, names = _kernels(_unstacked(network)), self._config.projections
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
