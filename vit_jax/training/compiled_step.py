"""Files of compiled training steps: `vit_jax.compile --out`, `vit_jax.train --compiled`.

A file is one line of JSON, with the devices, versions and config of the step, and the
executable as JAX serialises it. A step is used only if the lowered program, the devices
and the versions of the libraries are equal, so the result is the same as from compiling
it.
"""

import hashlib
import json
import os
import pickle

import jax
from etils import epath
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from vit_jax.command_line import files
from vit_jax.command_line.printing import versions
from vit_jax.config import fields
from vit_jax.distributed import chips
from vit_jax.errors import UserError
from vit_jax.training.config import TrainConfig
from vit_jax.training.step import Step
from vit_jax.training.train_setup import TrainSetup

_FORMAT = "vit_jax compiled step, version 1"
# Packages whose version may change the compiled program.
_PACKAGES = {
    "cpu": ("jax", "jaxlib"),
    "gpu": ("jax", "jaxlib", *chips.CUDA_PACKAGES),
    "tpu": ("jax", "jaxlib", "libtpu"),
}


def save(
    path: str | os.PathLike,
    config: TrainConfig,
    mesh: Mesh,
    lowered: jax.stages.Lowered,
    compiled: jax.stages.Compiled,
) -> int:
    """Writes a compiled step to a file, and returns the file's size in bytes.

    Raises:
      UserError: the file cannot be written.
    """
    # Objects that cuDNN's attention keeps for the partitioner cannot be pickled; they
    # are no longer needed, because the partitioner has run.
    compiled._executable._unloaded_executable.keepalive = None
    executable, _, _ = serialize_executable.serialize(compiled)
    header = {"format": _FORMAT, **_describe(mesh, lowered)}
    line = json.dumps(header | {"config": fields.to_json(config)})
    content = line.encode() + b"\n" + executable
    try:
        files.replace_bytes(epath.Path(path), content)
    except OSError as error:
        raise UserError(f"--out={path}: cannot be written: {error}") from error
    return len(content)


def load(path: str | os.PathLike, config: TrainConfig, setup: TrainSetup) -> Step:
    """Loads the compiled step of a run from a file of `save`.

    JAX's serialised executables are pickles: load only files from people you trust. The
    step of the run is lowered to compare the programs.

    Returns:
      Compiled step, a function like `setup.train_step`.

    Raises:
      UserError: the file cannot be read, or its step was compiled for other devices,
        other versions of libraries or another program.
    """
    flag = f"--compiled={path}"
    try:
        line, _, executable = epath.Path(path).read_bytes().partition(b"\n")
        header = json.loads(line)
        if header["format"] != _FORMAT:
            raise ValueError(header["format"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{flag}: not a file of `vit_jax.compile --out` ({error}): write it again"
        ) from error
    lowered = setup.train_step.lower(setup.layout.shapes, setup.layout.batch)
    here = _describe(setup.mesh, lowered)
    for name in ("devices", "versions"):
        if header[name] != here[name]:
            raise UserError(
                f"{flag}: compiled for {header[name]}, but this machine has {here[name]}: "
                "compile it again with the --topology and packages of this machine"
            )
    if header["program"] != here["program"]:
        changed = fields.differences(header["config"], fields.to_json(config))
        raise UserError(
            f"{flag}: contains another program than this run needs ("
            f"{'; '.join(changed) or 'another number of --examples, or other code'}): "
            "compile it again"
        )
    devices = list(setup.mesh.devices.flat)
    try:
        return serialize_executable.deserialize_and_load(
            executable,
            lowered.in_tree,
            lowered.out_tree,
            backend=devices[0].client,
            execution_devices=devices,
        )
    except (jax.errors.JaxRuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise UserError(f"{flag}: damaged ({error}): compile it again") from error


def _describe(mesh: Mesh, lowered: jax.stages.Lowered) -> dict:
    """Returns the properties that must be equal for an executable to be used."""
    device = mesh.devices.flat[0]
    return {
        "devices": f"{mesh.size} x {device.device_kind}",
        "versions": versions(_PACKAGES[device.platform]),
        "program": hashlib.sha256(lowered.as_text().encode()).hexdigest(),
    }
