"""Files of compiled training steps: `vit_jax.compile --out`, `vit_jax.train --compiled`.

A file is one line of JSON, which says what the step was compiled for, and the executable
as JAX serialises it. A step is used only where the lowered program, the devices and the
versions of the libraries are equal, so that it computes what compiling would have given.
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
# Packages of which another version may compile or load another program.
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
    # What cuDNN's attention kept for the partitioner, which has run, cannot be pickled.
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

    JAX's serialised executables are pickles: load only files from people you trust.

    Returns:
      Function like `setup.train_step`, which is lowered for comparison.

    Raises:
      UserError: the file cannot be read, or its step is of other devices, versions of
        libraries, or another program.
    """
    flag = f"--compiled={path}"
    try:
        line, _, executable = epath.Path(path).read_bytes().partition(b"\n")
        header = json.loads(line)
        if header["format"] != _FORMAT:
            raise ValueError(header["format"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{flag}: not a file of `vit_jax.compile --out` ({error}): write it anew"
        ) from error
    lowered = setup.train_step.lower(setup.layout.shapes, setup.layout.batch)
    here = _describe(setup.mesh, lowered)
    for name in ("devices", "versions"):
        if header[name] != here[name]:
            raise UserError(
                f"{flag}: compiled for {header[name]}, and this machine has {here[name]}: "
                "compile it again with the --topology and packages of this machine"
            )
    if header["program"] != here["program"]:
        changed = fields.differences(header["config"], fields.to_json(config))
        raise UserError(
            f"{flag}: the step of another program ("
            f"{'; '.join(changed) or 'of another number of --examples, or other code'}): "
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
    """Returns what must be equal for an executable to be used."""
    device = mesh.devices.flat[0]
    return {
        "devices": f"{mesh.size} x {device.device_kind}",
        "versions": versions(_PACKAGES[device.platform]),
        "program": hashlib.sha256(lowered.as_text().encode()).hexdigest(),
    }
