"""Keeps a training step as StableHLO, which other tools and later releases read."""

import pathlib

import jax.export
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.training import program as programs


def write(config: ConfigDict, mesh: Mesh, examples: int, path: pathlib.Path) -> int:
    """Exports a config's training step for the platform of its mesh.

    The file is a portable artifact of StableHLO: bytecode that its releases read for
    five years. Its function takes the arrays of the state and of the batch in the order
    of `jax.tree.leaves`, and knows how each lies on the mesh.

    Args:
      config: complete config.
      mesh: of a topology's devices.
      examples: size of the training split.
      path: of the file; its folder must be there.

    Returns:
      Its size in bytes.

    Raises:
      UserError: the file cannot be written.
    """
    program = programs.build(config, mesh, examples)
    platform = mesh.devices.flat[0].platform
    exported = jax.export.export(program.step, platforms=[platform])(
        program.shapes, program.batch_shapes
    )
    try:
        return path.write_bytes(exported.mlir_module_serialized)
    except OSError as error:
        raise UserError(f"--export={path} cannot be written: {error}") from error
