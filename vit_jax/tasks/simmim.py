"""SimMIM (arXiv:2111.09886): predicts hidden patches from all tokens by a linear layer.

The hidden parts are square units of pixels, whose size does not depend on the patch
size. A mask token replaces the embeddings of their patches, and the loss is the
absolute error of their pixels, as in microsoft/SimMIM. In a Swin Transformer, which
merges patches, each token of the last stage predicts all pixels that it covers.
"""

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from vit_jax.config.fields import key
from vit_jax.data.config import DataConfig
from vit_jax.data.transforms import device as device_transforms
from vit_jax.errors import UserError
from vit_jax.models import Model, initializers
from vit_jax.models.layers import Dense
from vit_jax.tasks.masking import MaskedImageTask, mean_over, patchify, ranks
from vit_jax.tasks.task import TaskConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimMimConfig(TaskConfig):
    """SimMIM: predicts the pixels of hidden units from all tokens."""

    has_pictures: ClassVar[bool] = True
    needs_all_patches: ClassVar[bool] = True

    name: str = key("simmim", "Task to train.")
    mask_ratio: float = key(
        0.6,
        "Fraction of the units (`task.mask_unit`) that is hidden, rounded up.",
        above=0,
        below=1,
    )
    mask_unit: int = key(
        32,
        "Side in pixels of a unit, a square that is hidden as a whole; a multiple of "
        "the patch size, or in Swin of the patch size of the last stage.",
        at_least=1,
    )

    def build(self, model, data, run, saved=None) -> "SimMim":
        return SimMim(self, model, data)


class SimMim(MaskedImageTask):
    """The SimMIM task; the parameters are "network", "mask_token" and "decoder".

    Raises:
      UserError: units are not multiples of patches, do not divide the image, or are all
        hidden.
    """

    needs_vit: ClassVar[bool] = False

    def __init__(self, config: SimMimConfig, model: Model, data: DataConfig):
        super().__init__("simmim", model, data)
        self.config, unit = config, config.mask_unit
        stride = model.config.encoder_stride
        if unit % stride or any(side % unit for side in data.image_size):
            raise UserError(
                f"task.mask_unit={unit} must be a multiple of the patch "
                f"({stride}) and divide data.image_size={data.image_size}"
            )
        self._units = tuple(side // unit for side in data.image_size)
        num_units = math.prod(self._units)
        self._num_hidden = math.ceil(num_units * config.mask_ratio)
        if self._num_hidden == num_units:
            raise UserError(
                f"task.mask_ratio={config.mask_ratio} hides all {num_units} units of "
                f"{unit} pixels: lower it, or task.mask_unit"
            )
        size = stride**2 * data.channels
        self._initial = initializers.of(model.config)
        kernel = self._initial.decoder.kernel
        dtype = model.options["dtype"]
        self._decoder = Dense(size, dtype=dtype, kernel_init=kernel)

    def draw(self, index, rng):
        key = jax.random.fold_in(rng, 0x756E6974)
        noise = device_transforms.example_uniform(index, key, math.prod(self._units))
        hidden = (ranks(noise) < self._num_hidden).astype(jnp.float32)
        hidden = hidden.reshape(-1, *self._units)
        times = self.config.mask_unit // self.model.config.patch_size
        hidden = hidden.repeat(times, axis=1).repeat(times, axis=2)
        return {"mask": hidden.reshape(len(hidden), -1)}

    def init(self, rng):
        network_key, token_key, decoder_key = jax.random.split(rng, 3)
        network = self.model.init(network_key)
        widths = []  # Width of the patch embeddings, then of the encoder's output.

        def record_width(patches):
            widths.append(patches.shape[-1])
            return patches

        images = jnp.zeros((1, *self.model.image_shape))
        encode = functools.partial(self.model.encode, edit_patches=record_width)
        widths.append(jax.eval_shape(encode, network, images).shape[-1])
        token = self._initial.mask_token(token_key, (1, 1, widths[0]))
        bias = self._initial.decoder.bias(widths[-1])
        dense = self._decoder.clone(bias_init=bias)
        decoder = dense.init(decoder_key, jnp.zeros((1, widths[-1])))["params"]
        return {"network": network, "mask_token": token, "decoder": decoder}, None

    def predict(self, params, batch, *, train=False, key=None):
        mask = batch["mask"]

        def hide(patches):
            token = params["mask_token"].astype(patches.dtype)
            return jnp.where(mask[..., None] > 0, token, patches)

        images = batch["image"].astype(self.model.options["dtype"])
        x = self.model.encode(
            params["network"], images, train=train, key=key, edit_patches=hide
        )
        x = x[:, self.model.num_prefix_tokens :]
        with self.model.config.matmul_precision():
            predicted = self._decoder.apply({"params": params["decoder"]}, x)
        # A unit covers whole tokens, so one patch of each token has the token's mask.
        step = self.model.config.encoder_stride // self.model.config.patch_size
        mask = mask.reshape(-1, *self.model.grid)[:, ::step, ::step]
        return predicted.astype(jnp.float32), mask.reshape(len(mask), -1)

    def metrics(self, extra, batch, predicted, mask):
        """Returns the mean absolute error over the hidden pixels as "loss".

        It is averaged per image; the original divides by the number of hidden pixels of
        the batch plus 1e-5.
        """
        images = batch["image"].astype(jnp.float32)
        targets = patchify(images, self.model.config.encoder_stride)
        return {"loss": mean_over(jnp.abs(predicted - targets).mean(-1), mask)}
