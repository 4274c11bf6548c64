"""Tables of weight formats, which recognise a file's format and write files.

Each format is a module of this package that registers itself when it is imported, so
that loading and exporting do not depend on any particular format.
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
      recognises: function that returns whether a file is in this format, judging by its
        names or metadata.
      read: function that converts the tensors of a file. Its second argument is the
        number of attention heads to assume if the file does not record it; 0 if
        unknown.
      refines: names of formats that recognise this format's files too, but are not used
        for them.
    """

    recognises: Callable[[Tensors], bool]
    read: Callable[[Tensors, int], Pretrained]
    refines: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Writer:
    """A format that can be written.

    Attributes:
      write: function that writes a checkpoint to a path, and returns a line for each
        thing that was rewritten or left out. The path is a new file, or an existing
        empty folder.
      suffix: suffix of the file; "" for formats that are folders.
      usage: function that returns Python code that loads the written checkpoint. Args:
        the checkpoint, its path or "owner/name" on the hub, and whether it is on the
        hub. None for formats that `open_pretrained` of this project loads.
      library: name on the hub of the library that loads the format; "" without one.
      any_network: whether every network is supported, not only Vision Transformers,
        hybrids and BiT ResNets.
      program: whether files include the network's computation, so that networks from a
        user's module are supported too.
      networks: functions by config class of a network that write such networks in place
        of `write`; added by the modules of such formats.
      files: names of the files that a folder in this format can have.
      with_task: whether files include parameters of a task outside the network.
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


READERS: dict[str, Reader] = {}  # Readers by their name in messages.
WRITERS: dict[str, Writer] = {}  # Writers by the value of the flag --to.


def find_reader(tensors: Tensors) -> tuple[Reader, Tensors]:
    """Returns the reader of a file's format, and the tensors without wrappers.

    Raises:
      UserError: the file is in none of the registered formats, or in several.
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
                f"project has its {len(names)} arrays, such as {shown}; give weights in "
                f"one of {formats}"
            )
    raise UserError(
        f"{tensors.path} is in none of the known formats ({formats}): its {len(names)} "
        f"arrays have names such as {shown}"
    )


def claiming(tensors: Tensors) -> list[str]:
    """Returns the names of all formats that a file is in; 0 or 1 in valid registries."""
    names = {name for name, reader in READERS.items() if reader.recognises(tensors)}
    refined = {name for reader in map(READERS.get, names) for name in reader.refines}
    return sorted(names - refined)


def _split(
    flat: dict[str, np.ndarray], prefix: str
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Splits arrays into those with a prefix, which is removed, and the others."""
    others = {name: a for name, a in flat.items() if not name.startswith(prefix)}
    return tables.below(flat, prefix), others


def _unwrap(tensors: Tensors) -> Tensors | None:
    """Removes the prefix of all arrays, or of a known wrapper; None without one."""
    whole, use_ema = tensors.flat, tensors.use_ema
    first = {name.partition(".")[0] + "." for name in whole if "." in name}
    if len(first) == 1 and all("." in name for name in whole):
        prefix = first.pop()
    else:
        # A network with any other prefix is recognised if an average of it is stored
        # too.
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
