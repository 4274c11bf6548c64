"""A network as an ordinary Flax module, for training loops outside this package."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.models.model import Model
from vit_jax.models.patches import PatchSequences

_SEQUENCES = PatchSequences(None, None)  # Stands for images of any size.


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
        config, module = self.model.config, self.model.module
        # Parameters have the names of the network's.
        self.of_one_size = module.clone()
        nn.share_scope(self, self.of_one_size)
        if not config.no_sequences:
            self.of_any_size = config.reader(module, _SEQUENCES)
            nn.share_scope(self, self.of_any_size)

    def __call__(
        self,
        images: Float[Array | np.ndarray, "B Y X C"] | PatchSequences,
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

        Raises:
          UserError: the network does not support sequences of patches.
        """
        self.model.warn_of_fewer_bits(self.variables.get("params", {}), images)
        network, config = self.of_one_size, self.model.config
        images = jax.tree.map(jnp.asarray, images)
        if isinstance(images, PatchSequences):
            if config.no_sequences:
                config.reader(self.model.module, images)  # Raises UserError.
            network = self.of_any_size
        with config.matmul_precision():
            return network(images, train=train, **more)

    @nn.nowrap
    def init_with_output(self, *args: Any, **kwargs: Any) -> tuple[Any, dict]:
        """Returns outputs, and variables whose parameters are those of `Model.init`."""
        outputs, variables = super().init_with_output(*args, **kwargs)
        return outputs, self.model.initial(variables)
