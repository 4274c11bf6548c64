"""A network as an ordinary Flax module, for training loops outside this package."""

from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float

from vit_jax.models.model import Model
from vit_jax.models.patches import PatchSequences


class FlaxNetwork(nn.Module):
    """A network of this package as an ordinary Flax module.

    Parameters and images are cast to the dtype of the computation,
    `module.model.config.dtype`. If they have fewer bits, such as bfloat16 images in a
    network of dtype float32, a warning says so once.

    Attributes:
      model: the network as functions of parameters, such as
        `module.model.layer_features(params, images, layers=(5,))`.

    Example:
      >>> import jax, vit_jax
      >>> module, params = vit_jax.create_flax("Ti/16", image_size=32, depth=1)
      >>> images = jax.numpy.zeros((2, 32, 32, 3))
      >>> sorted(module.apply({"params": params}, images))
      ['logits', 'pre_logits']
    """

    model: Model

    def setup(self):
        self.network = self.model.module.clone()
        nn.share_scope(self, self.network)  # Parameters have the network's names.

    def __call__(
        self,
        images: Float[Array, "B Y X C"] | PatchSequences,
        *,
        train: bool = False,
        **more: Any,
    ) -> dict[str, Float[Array, "B _"]] | Float[Array, "B ..."]:
        """Classifies images.

        Args:
          images: normalised images; or sequences of patches, see `Model.apply`.
          train: whether dropout and stochastic depth are active, which need
            `rngs={"dropout": key}`.
          **more: further arguments of the network's own module; `classify=False`
            returns the tokens of the encoder.

        Returns:
          A dict of float32 arrays: "logits" (B, num_classes), unless `num_classes` is
          0, and "pre_logits" (B, width), the features, which a network from a user's
          module may lack.
        """
        if not hasattr(images, "shape"):
            key = self.make_rng("dropout") if train else None
            params = self.variables["params"]
            return self.model.apply(params, images, train=train, key=key)
        self.model.warn_of_fewer_bits(self.variables.get("params", {}), images)
        with self.model.config.matmul_precision():
            return self.network(images, train=train, **more)

    @nn.nowrap
    def init_with_output(self, *args: Any, **kwargs: Any) -> tuple[Any, dict]:
        """Returns outputs, and variables whose parameters are those of `Model.init`."""
        outputs, variables = super().init_with_output(*args, **kwargs)
        return outputs, self.model.initial(variables)
