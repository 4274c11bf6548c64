"""Tables of weight formats: recognises which format a file is in, and how to write it.

Each format is one module of this package, which registers itself when it is imported, so
loading and exporting know no format by name.
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import NetworkConfig
from vit_jax.weights.formats import averaged, tables
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.pretrained import Pretrained


@dataclasses.dataclass(frozen=True)
class Reader:
    """A format that can be read.

    Attributes:
      recognises: returns whether a file is in this format, by its names or metadata.
      read: converts the tensors of a file. Its second argument is the number of
        attention heads to assume if the file does not have it; 0 if unknown.
      refines: names of formats that recognise files of this one too; this one reads them.
    """

    recognises: Callable[[Tensors], bool]
    read: Callable[[Tensors, int], Pretrained]
    refines: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Writer:
    """A format that can be written.

    Attributes:
      write: writes a checkpoint to a path, and returns a line for each thing that was
        rewritten or left out. The path is a new file, or an existing empty folder.
      suffix: suffix of the file; "" for formats that are folders.
      usage: returns Python lines that load the written checkpoint. Args: the checkpoint,
        its path or "owner/name" on the hub, and whether it is on the hub. None for
        formats that `open_pretrained` of this project loads.
      library: the hub's name of the library that loads the format; "" without one.
      any_network: whether every network is supported, not only Vision Transformers,
        hybrids and BiT ResNets.
      program: whether files include the network's computation, so that networks of a
        user's module are supported too.
      networks: config class of a further network to the function that writes it instead
        of `write`; added by the modules of such formats.
      files: names of the files that a folder in this format can have.
      with_task: whether files include parameters that a task has beside the network.
    """

    write: Callable[[Pretrained, Path], list[str]]
    suffix: str = ""
    usage: Callable[[Pretrained, str, bool], str] | None = None
    library: str = ""
    any_network: bool = False
    program: bool = False
    networks: dict[type[NetworkConfig], Callable[[Pretrained, Path], list[str]]] = (
        dataclasses.field(default_factory=dict)
    )
    with_task: bool = False
    files: tuple[str, ...] = (
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    )


READERS: dict[str, Reader] = {}  # Name in messages to reader.
WRITERS: dict[str, Writer] = {}  # Value of the flag --to to writer.


def find_reader(tensors: Tensors) -> tuple[Reader, Tensors]:
    """Returns the reader of a file's format, and the tensors without wrappers.

    Raises:
      UserError: the file is in none of the registered formats, or in more than one.
    """
    inner = tensors
    while inner is not None:
        claims = claiming(inner)
        if len(claims) > 1:
            raise UserError(
                f"{tensors.path} is in the formats {' and '.join(claims)}: name one in "
                "`refines` of the other's Reader"
            )
        if claims:
            return READERS[claims[0]], inner
        inner = _unwrap(inner)
    names, formats = sorted(tensors.flat), ", ".join(sorted(READERS, key=str.casefold))
    shown = ", ".join(names[:: max(1, len(names) // 3)][:3])
    config = tensors.config
    for key in ("architecture", "model_type"):
        if key in config:
            raise UserError(
                f"{tensors.path}: {key}={config[key]!r} in config.json: no model of this "
                f"project has its {len(names)} arrays, such as {shown}; give weights of "
                f"one of {formats}"
            )
    raise UserError(
        f"{tensors.path} is in none of the known formats ({formats}): its {len(names)} "
        f"arrays have names such as {shown}"
    )


def claiming(tensors: Tensors) -> list[str]:
    """Returns the names of the formats that a file is in; in valid registries 0 or 1."""
    names = {name for name, reader in READERS.items() if reader.recognises(tensors)}
    refined = {name for reader in map(READERS.get, names) for name in reader.refines}
    return sorted(names - refined)


def _split(
    flat: dict[str, np.ndarray], prefix: str
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns the arrays under a prefix, without it, and the others."""
    others = {name: a for name, a in flat.items() if not name.startswith(prefix)}
    return tables.below(flat, prefix), others


def _unwrap(tensors: Tensors) -> Tensors | None:
    """Removes the prefix of all arrays, or of a known wrapper; None without one."""
    whole, use_ema = tensors.flat, tensors.use_ema
    first = {name.partition(".")[0] + "." for name in whole if "." in name}
    if len(first) == 1 and all("." in name for name in whole):
        prefix = first.pop()
    else:
        # A network of any other name is known by the average beside it.
        known = [p for p in averaged.WRAPPERS if p in first]
        known += [p for p in sorted(first) if averaged.find(*_split(whole, p))[1]]
        prefix = known[0] if known else None
    if prefix is None:
        return None
    flat, others = _split(whole, prefix)
    of, average = averaged.find(flat, others)
    notes = [averaged.note(of, f"{prefix}*", use_ema=use_ema)] if average else []
    # Names of a whole part, such as a second network, are not listed.
    outside = {name for name in others if not name.startswith(f"{of}.")}
    outside = sorted({re.sub(r"\..*\..*", ".*", name) for name in outside})
    if outside:
        notes.append(f"outside of {prefix}*: {', '.join(outside)}, left out")
    flat |= average if use_ema else {}
    return dataclasses.replace(tensors, flat=flat, notes=(*tensors.notes, *notes))
