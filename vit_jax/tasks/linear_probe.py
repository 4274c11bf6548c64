"""Linear probe: a linear classifier of the features of a frozen network.

As in MAE (arXiv:2111.06377, appendix A.1), features pass a BatchNorm without scale and
shift, with an epsilon of 1e-6, then a linear layer. Only the linear layer is trained.
Checkpoints hold the network with both folded into its classifier, so any command can
use it. Letters: B images, D features, L classes.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.config.fields import key
from vit_jax.data.config import DataConfig
from vit_jax.errors import UserError
from vit_jax.models import Model
from vit_jax.tasks.classification import (
    Classification,
    ClassificationConfig,
    require_classifier,
    top1,
)
from vit_jax.tasks.task import Batch, Tree, check_features

# As torch.nn.BatchNorm1d(D, affine=False, eps=1e-6).
_MOMENTUM, _EPSILON = 0.1, 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearProbeConfig(ClassificationConfig):
    """Linear probe: images and their labels, on features of a frozen network."""

    averages_network: ClassVar[bool] = False

    name: str = key("linear_probe", "Task to train.")

    def build(self, model, data, run, saved=None) -> "LinearProbe":
        return LinearProbe(self, model, data)


class LinearProbe(Classification):
    """The task of a linear probe; the parameters are "head", `extra` holds the network.

    The BatchNorm uses the mean and variance of a microbatch over all devices.

    Raises:
      UserError: the loss does not suit the labels, or the network returns no features,
        or does not have exactly one classifier.
    """

    def __init__(self, config: LinearProbeConfig, model: Model, data: DataConfig):
        super().__init__(config, model, data)
        require_classifier(model, config.name)
        check_features(model, config.name)
        if model.options.get("distillation"):
            raise UserError(
                "model.distillation=True with task.name='linear_probe', which trains one "
                "classifier, not two: set it to False"
            )

    @property
    def coupled(self):
        return ("BatchNorm",)

    def init(self, rng: jax.Array) -> tuple[dict, Tree]:
        network_key, head_key = jax.random.split(rng)
        network = self.model.init(network_key)
        D, L = network["head"]["kernel"].shape
        kernel = nn.initializers.normal(0.01)(head_key, (D, L))
        head = {"kernel": kernel, "bias": jnp.zeros(L)}
        extra = {"network": network, "mean": jnp.zeros(D), "variance": jnp.ones(D)}
        return {"head": head}, _folded(extra, head)

    def backbone(self, params, extra):
        return extra["network"]

    def with_backbone(self, params, extra, network):
        # The probe replaces the classifier of the pretrained network.
        return params, _folded(extra | {"network": network}, params["head"])

    def left_out(self, params, extra, task_params):
        return dict.fromkeys(task_params, "a probe begins anew")

    def loss(self, params, extra, batch, rng):
        images = batch["image"].astype(self.model.options["dtype"])
        outputs = self.model.apply(jax.lax.stop_gradient(extra["network"]), images)
        return self.probe_loss(params, outputs["pre_logits"], batch)

    def probe_loss(
        self,
        params: dict,
        features: Float[Array, "B D"],
        batch: Batch,
    ) -> tuple[Float[Array, ""], tuple[dict, dict]]:
        """Returns the loss, metrics and statistics for the given features.

        Args:
          params: trained parameters, see `init`.
          features: features of the frozen network.
          batch: output of `prepare`, or a microbatch of it; its images are not read.
        """
        mean, variance = features.mean(0), features.var(0)
        normal = (features - mean[None]) / jnp.sqrt(variance + _EPSILON)[None]
        head = params["head"]
        logits = normal @ head["kernel"] + head["bias"][None]
        loss = self.base_loss(logits, batch)
        # As in PyTorch, the running variance is unbiased and the batch's is not.
        count = len(features)
        stats = {"mean": mean, "variance": variance * (count / max(1, count - 1))}
        return loss, ({"loss": loss, "top1": top1(logits, batch["label"])}, stats)

    def update(self, extra, params, stats, step):
        means = {k: (1 - _MOMENTUM) * extra[k] + _MOMENTUM * stats[k] for k in stats}
        return _folded(extra | means, params["head"])

    def training_flops(self):
        """Returns the operations per image; the network has no backward pass."""
        flops = super().training_flops()
        shapes, _ = jax.eval_shape(self.init, jax.random.key(0))
        # Training takes three products with the head; a forward pass has one of them.
        return flops and flops // 3 + 4 * shapes["head"]["kernel"].size


def _folded(extra: dict, head: dict) -> dict:
    """Returns `extra` with BatchNorm and head folded into the network's classifier."""
    factor = jax.lax.rsqrt(extra["variance"] + _EPSILON)
    kernel = head["kernel"] * factor[:, None]
    bias = head["bias"] - extra["mean"] @ kernel
    network = {**extra["network"], "head": {"kernel": kernel, "bias": bias}}
    return {**extra, "network": network}
