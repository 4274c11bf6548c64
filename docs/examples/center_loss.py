"""Center loss (Wen et al., ECCV 2016): features are drawn to the mean of their class.

The centres are no parameters: they follow the features by a moving average. They are the
task's state, so they are in checkpoints, and a resumed run continues with them.
"""

import dataclasses

import jax
import jax.numpy as jnp

from vit_jax.config.fields import key
from vit_jax.tasks.classification import Classification, ClassificationConfig, top1


@dataclasses.dataclass(frozen=True, kw_only=True)
class CenterLossConfig(ClassificationConfig):
    """Classification, and the squared distance of features to their class's centre."""

    weight: float = key(0.01, "Weight of half the squared distance.")
    decay: float = key(0.9, "Decay of the centres per step.", below=1)

    def build(self, model, data, run, saved=None):
        return CenterLoss(self, model, data)


class CenterLoss(Classification):
    def init(self, rng):
        params, _ = super().init(rng)
        width, num_classes = params["head"]["kernel"].shape
        return params, {"centers": jnp.zeros((num_classes, width))}

    def loss(self, params, extra, batch, rng):
        images = batch["image"].astype(self.model.options["dtype"])
        outputs = self.model.apply(params, images, train=True, key=rng)
        labels, features = batch["label"], outputs["pre_logits"]
        base = self.base_loss(outputs["logits"], batch)
        distance = jnp.square(features - labels @ extra["centers"]).sum(-1).mean() / 2
        loss = base + self.config.weight * distance
        metrics = {
            "loss": loss,
            "distance": distance,
            "top1": top1(outputs["logits"], labels),
        }
        features = jax.lax.stop_gradient(features)
        stats = {"share": labels.mean(0), "sum": labels.T @ features / len(labels)}
        return loss, (metrics, stats)

    def update(self, extra, params, stats, step):
        share = stats["share"][:, None]  # Of each class in the batch; 0 if absent.
        mean = stats["sum"] / jnp.maximum(share, 1e-6)
        moved = extra["centers"] + (1 - self.config.decay) * (mean - extra["centers"])
        return {"centers": jnp.where(share > 0, moved, extra["centers"])}
