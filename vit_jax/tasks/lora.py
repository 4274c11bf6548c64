"""LoRA: classification by low-rank updates of a frozen network (low_rank.py).

The classifier is trained whole. The optimiser holds moments of the factors and the
classifier only. Checkpoints also hold the network with the updates merged, so any
command can use it. Tasks without labels get such updates by `adapters`.

Source: arXiv:2106.09685, section 4.1. Letters: B images, L classes.
"""

import dataclasses

import jax

from vit_jax.config.fields import key
from vit_jax.data.config import DataConfig
from vit_jax.models import Model
from vit_jax.models.layers import CLASSIFIERS
from vit_jax.tasks.classification import (
    Classification,
    ClassificationConfig,
    require_classifier,
)
from vit_jax.tasks.low_rank import LowRankConfig, LowRankUpdates
from vit_jax.tasks.task import Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig(LowRankConfig, ClassificationConfig):
    """LoRA: images and their labels, with low-rank updates of a frozen network."""

    name: str = key("lora", "Task to train.")

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
        self._updates = LowRankUpdates(config, model)

    def init(self, rng: jax.Array) -> tuple[dict, Tree]:
        network_key, lora_key = jax.random.split(rng)
        network = self.model.init(network_key)
        lora = self._updates.init(lora_key, network)
        return {"lora": lora, "head": _heads(network)}, self._extra(network)

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
        network = extra["network"] | params["head"]
        return self._updates.merge(params["lora"], network, extra["kernels"])

    def training_flops(self):
        """Returns the operations per image; the backward pass skips kernel gradients.

        The low-rank products are not counted.
        """
        flops = super().training_flops()
        return flops and 2 * flops // 3

    def _extra(self, network: dict) -> dict:
        return {"network": network, "kernels": self._updates.kernels(network)}


def _heads(network: dict) -> dict:
    """Returns the classifiers by their names in the network."""
    return {name: network[name] for name in CLASSIFIERS if name in network}
