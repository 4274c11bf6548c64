"""The devices of this process, which share every batch of images.

Letters: B images, Y by X pixels, C channels.
"""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from jaxtyping import UInt8

from vit_jax.distributed import compilation, sharding
from vit_jax.distributed import mesh as meshes
from vit_jax.models import Params


class LocalDevices:
    """Runs functions of a network's parameters and images, with one copy of them per device."""

    def __init__(self):
        self._mesh = meshes.create(meshes.MeshConfig(), jax.local_devices())
        self._params = self._placed = None
        self._programs = {}

    def run(
        self,
        name: Hashable,
        function: Callable[[Params, jax.Array], Any],
        params: Params,
        pixels: UInt8[np.ndarray, "B Y X C"],
        rows: int,
    ) -> Any:
        """Returns the outputs of a function as NumPy arrays.

        Args:
          name: of the function, which is compiled once for each name.
          function: function of parameters and images to a tree of arrays with an axis of
            images first.
          params: parameters; they are copied to the devices when others are given.
          pixels: images.
          rows: images that the program is compiled for, B or more.
        """
        if name not in self._programs:
            self._programs[name] = self._compile(function)
        if params is not self._params:
            replicated = meshes.replicated(self._mesh)
            self._params, self._placed = params, jax.device_put(params, replicated)
        count, devices = len(pixels), self._mesh.devices.size
        padding = -(-rows // devices) * devices - count
        pixels = np.pad(pixels, ((0, padding), (0, 0), (0, 0), (0, 0)))
        pixels = jax.device_put(pixels, meshes.batched(self._mesh))
        outputs = jax.device_get(self._programs[name](self._placed, pixels))
        return jax.tree.map(lambda x: x[:count], outputs)

    def _compile(self, function):
        def call(params, pixels):
            with sharding.activations(self._mesh):
                return function(params, pixels)

        return jax.jit(call, compiler_options=compilation.options())
