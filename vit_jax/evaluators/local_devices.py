"""Programs that split a batch of images over the devices of this process.

Letters: B images, Y by X pixels, C channels.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import UInt8

from vit_jax.distributed import compilation, sharding
from vit_jax.distributed import mesh as meshes
from vit_jax.models import Params


class Program:
    """A jitted function of parameters and images, whose batches all devices share.

    Args:
      function: function of parameters and images to a tree of arrays with an axis of
        images first.
    """

    def __init__(self, function: Callable[[Params, jax.Array], Any]):
        self._mesh = meshes.create(meshes.MeshConfig(), jax.local_devices())
        self._params = self._placed = None

        def run(params, pixels):
            with sharding.activations(self._mesh):
                return function(params, pixels)

        self._run = jax.jit(run, compiler_options=compilation.options())

    def __call__(
        self, params: Params, pixels: UInt8[np.ndarray, "B Y X C"], rows: int
    ) -> Any:
        """Returns the outputs of the images as NumPy arrays.

        Args:
          params: parameters; they are copied to the devices once.
          pixels: images.
          rows: images that the program is compiled for, B or more.
        """
        if params is not self._params:
            replicated = meshes.replicated(self._mesh)
            self._params, self._placed = params, jax.device_put(params, replicated)
        count, devices = len(pixels), self._mesh.devices.size
        padding = -(-rows // devices) * devices - count
        pixels = np.pad(pixels, ((0, padding), (0, 0), (0, 0), (0, 0)))
        pixels = jax.device_put(pixels, meshes.batched(self._mesh))
        outputs = jax.device_get(self._run(self._placed, pixels))
        return jax.tree.map(lambda x: x[:count], outputs)
