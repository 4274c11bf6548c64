"""The table of weight formats: which file is in which, and how each is written.

Each format is one module of this package. It registers itself when the package imports
it, so that loading and exporting know no format by name.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from vit_jax.errors import UserError
from vit_jax.models import NetworkConfig
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.pretrained import Pretrained


@dataclasses.dataclass(frozen=True)
class Reader:
    """A format that can be read.

    Attributes:
      recognises: returns whether a file is in this format, by its names or metadata.
      read: converts the tensors of a file. Its second argument is the number of
        attention heads if the file does not say it; 0 if that is unknown.
    """

    recognises: Callable[[Tensors], bool]
    read: Callable[[Tensors, int], Pretrained]


@dataclasses.dataclass(frozen=True)
class Writer:
    """A format that can be written.

    Attributes:
      write: writes a checkpoint to a path, and returns a line for each thing that was
        rewritten or left out. The path is a new file, or an existing empty folder.
      suffix: of the one file that is written; "" if it is a folder.
      usage: returns Python lines that load what was written. Args: the checkpoint, the
        path or the "owner/name" on the hub, and whether it is on the hub. None if
        `open_pretrained` of this project loads it.
      library: name by which the hub knows the library that loads it; "" if none.
      any_network: whether it holds every network, not only Vision Transformers, hybrids
        and BiT ResNets.
      networks: of further networks that it holds, by the dataclass of their config, what
        writes them in the place of `write`. The modules of their formats put it there.
      files: names of the files that a folder of it can hold.
      with_task: whether it has a place for what a task has beside the network, which is
        then read too.
    """

    write: Callable[[Pretrained, Path], list[str]]
    suffix: str = ""
    usage: Callable[[Pretrained, str, bool], str] | None = None
    library: str = ""
    any_network: bool = False
    networks: dict[type[NetworkConfig], Callable[[Pretrained, Path], list[str]]] = (
        dataclasses.field(default_factory=dict)
    )
    with_task: bool = False
    files: tuple[str, ...] = (
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    )


READERS: dict[str, Reader] = {}  # By the name in messages.
WRITERS: dict[str, Writer] = {}  # By the value of the flag --to.


def find_reader(tensors: Tensors) -> Reader:
    """Returns the format that a file is in.

    Args:
      tensors: of the file.

    Raises:
      UserError: the file is in none of the registered formats.
    """
    # The last registered is asked first: exported files of this project have the names
    # of google's, and a module of a user's may refine a format of ours.
    for reader in reversed(READERS.values()):
        if reader.recognises(tensors):
            return reader
    names = sorted(tensors.flat)
    shown = ", ".join(names[:: max(1, len(names) // 3)][:3])
    raise UserError(
        f"{tensors.path} is in none of the known formats ({', '.join(READERS)}): its "
        f"{len(names)} arrays have names such as {shown}"
    )
