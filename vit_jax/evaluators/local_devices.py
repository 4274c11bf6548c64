"""Runs functions on the devices of this process, which share every batch of images.

Letters: B images, Y by X pixels, C channels.
"""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import UInt8

from vit_jax.distributed import compilation, sharding
from vit_jax.distributed import mesh as meshes
from vit_jax.models import Model, Params, patches
from vit_jax.models.patches import PatchSequences


class LocalDevices:
    """Runs functions on images, with one copy of the parameters per device.

    Args:
      model: network that the functions compute.
      mesh: mesh of devices of this process that the parameters lie on; None for a copy
        on each.
    """

    def __init__(self, model: Model, mesh: Mesh | None = None):
        self._options = compilation.options(bfloat16=model.config.rounds_products)
        self._split = mesh is not None
        self._mesh = mesh or meshes.create(meshes.MeshConfig(), jax.local_devices())
        self._params = self._placed = None
        self._programs = {}

    def run(
        self,
        name: Hashable,
        function: Callable[[Params, jax.Array], Any],
        params: Params,
        pixels: UInt8[np.ndarray, "B Y X C"] | PatchSequences,
        rows: int,
    ) -> Any:
        """Returns the outputs of a function as NumPy arrays.

        Args:
          name: name of the function, which is compiled once per name.
          function: function of parameters and images that returns a tree of arrays
            whose first axis is the images.
          params: parameters; copied to the devices when they change.
          pixels: images.
          rows: batch size that the function is compiled for, at least B.
        """
        if name not in self._programs:
            self._programs[name] = self._compile(function)
        if params is not self._params:
            self.release()
            self._params = self._placed = params
            if not self._split:
                replicated = meshes.replicated(self._mesh)
                self._placed = jax.device_put(_to_process(params), replicated)
        count, devices = patches.rows_of(pixels), self._mesh.devices.size
        pixels = patches.pad_batch(pixels, -(-rows // devices) * devices)
        pixels = jax.device_put(pixels, meshes.batched(self._mesh))
        outputs = jax.device_get(self._programs[name](self._placed, pixels))
        return jax.tree.map(lambda x: x[:count], outputs)

    def release(self) -> None:
        """Frees the copies of the parameters; compiled programs are kept."""
        self._params = self._placed = None

    def _compile(self, function):
        def call(params, pixels):
            with sharding.activations(self._mesh):
                return function(params, pixels)

        return jax.jit(call, compiler_options=self._options)


def _to_process(params: Params) -> Params:
    """Returns whole arrays in this process; called by all processes that share them."""
    shared = [x for x in jax.tree.leaves(params) if not _held(x)]
    if not shared:
        return params
    replicated = meshes.replicated(shared[0].sharding.mesh)
    gather = jax.jit(lambda tree: tree, out_shardings=replicated)
    return jax.tree.map(lambda x: x.addressable_data(0), gather(params))


def _held(x: Any) -> bool:
    return not isinstance(x, jax.Array) or x.is_fully_addressable
