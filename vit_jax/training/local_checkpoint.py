"""Checkpoints on each host's own disk, between those that are kept for good.

Every process writes the parts of the state that its devices hold, which takes no network
and needs no other process. A start looks which step the hosts can put together. A host
whose disk is empty, because it was replaced, is given its parts by hosts whose devices
hold the same ones. Where nobody does, the start goes back to the checkpoint in the
workdir.
"""

import collections
import hashlib
import json
import math
import os
import pathlib
import secrets
import shutil
import socket
import threading
import zipfile
import zlib
from collections.abc import Iterable

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from vit_jax.data.sources.base import Source
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.files import replace_text
from vit_jax.printing import print_error
from vit_jax.training import resume_check
from vit_jax.training.checkpoint import describe_failure
from vit_jax.training.config import TrainConfig
from vit_jax.training.resume_check import Restored
from vit_jax.training.train_state import TrainState

_KEPT = 2  # Of each process: a kill may come when only some have written a step.
_LISTED = 16  # Files of a host that are looked at.
_PIECE = 64 << 20  # Bytes sent at once.
_DAMAGE = (  # What zipfile raises when single bits of a file are flipped.
    OSError,
    ValueError,
    LookupError,
    EOFError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)


Held = dict[int, list[int]]  # Process whose parts they are, to hosts that have them.


class LocalCheckpointer:
    """Saves to and restores from the hosts' own disks; nothing if `every` is 0.

    Args:
      config: complete config, of which `local` says `every` how many steps, and in
        what `folder`, which may have environment variables in it.
      workdir: folder with the name under which the run's files lie on the disks.
      source: training split, which must not change.
      shapes: state with a jax.ShapeDtypeStruct for each array.
      shardings: state with the sharding of each.

    Raises:
      UserError: the folder names an environment variable that is not set.
    """

    def __init__(
        self,
        config: TrainConfig,
        workdir: str | os.PathLike,
        source: Source,
        shapes: TrainState,
        shardings: TrainState,
    ):
        self._every, self._writing = config.local_checkpoint.every_steps, None
        if not self._every:
            return
        self._parts = StateParts(shapes, shardings)
        self._source, self._workdir = source, workdir
        self._check = config.data.check
        self._data = resume_check.data_read(config.data, source)
        told = [len(source), list(source.class_names), self._parts.describe()]
        told.append(resume_check.decisive(config))
        self._print = hashlib.sha256(json.dumps(told).encode()).hexdigest()
        folder = os.path.expanduser(os.path.expandvars(config.local_checkpoint.dir))
        if "$" in folder:
            raise UserError(
                f"local_checkpoint.dir={config.local_checkpoint.dir!r}: this host "
                f"({socket.gethostname()}) has no such environment variable: set it, or "
                "state the folder itself"
            )
        self._folder = pathlib.Path(folder) / _name_of(workdir)

    def is_due(self, step: int) -> bool:
        """Returns whether to save after a step."""
        return bool(self._every) and step % self._every == 0

    def save(
        self, step: int, state: TrainState, seconds: float, device_seconds: float = 0.0
    ) -> None:
        """Writes this process's parts in the background; a failure is said aloud.

        Args:
          step, state, seconds, device_seconds: arguments of `Checkpointer.save`.
        """
        self.wait()
        about = {"step": step, "seconds": seconds, "device_seconds": device_seconds}
        about |= {"print": self._print, "data": self._data}
        arrays = self._parts.parts_of(state)
        about["members"] = len(arrays) + 1  # With this.
        self._writing = threading.Thread(
            target=self._write,
            args=(step, about, arrays),
            daemon=True,
            name="local_checkpoint",
        )
        self._writing.start()

    def wait(self) -> None:
        """Waits for the save in progress."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def remove(self) -> None:
        """Removes this run's files from this host's disk, when the run is done."""
        self.wait()
        if self._every:
            shutil.rmtree(self._folder, ignore_errors=True)

    def restore(self, newer_than: int) -> Restored:
        """Restores the newest step that the hosts hold together; all processes call it.

        Args:
          newer_than: step of the checkpoint in the workdir, 0 for none.

        Returns:
          What was put together; without a state if there is no newer step.
        """
        if not self._every:
            return Restored(None, 0, 0.0, 0.0, [])
        mine = self._find(newer_than)
        listed = np.full((_LISTED, 2), -1)
        for row, found in enumerate(sorted(mine, reverse=True)[:_LISTED]):
            listed[row] = found
        hosts = meshes.process_allgather(listed=listed)["listed"]
        held = collections.defaultdict(lambda: collections.defaultdict(list))
        for host, pairs in enumerate(hosts):
            for step, process in pairs[pairs[:, 0] >= 0]:
                held[int(step)][int(process)].append(host)
        notes = []
        for step in sorted(held, reverse=True):
            missing = self._parts.lacking(held[step])
            if not missing:
                break
            notes.append(
                f"step {step} is on hosts' own disks, but not the parts of process "
                f"{', '.join(map(str, missing))}, which no other process holds"
            )
        else:
            return Restored(None, 0, 0.0, 0.0, notes)
        files = {p: _load(mine[step, p]) for s, p in mine if s == step}
        about = next((about for about, _ in files.values()), {})
        if about:
            notes += resume_check.check_data(
                about["data"],
                self._data,
                self._source,
                self._workdir,
                check=self._check,
            )
        own = {k: v for _, arrays in files.values() for k, v in arrays.items()}
        given = self._give(own, held[step])
        names = "seconds", "device_seconds"
        told = meshes.process_allgather(
            **{name: about.get(name, 0.0) for name in names}
        )
        spent = [float(told[name].max()) for name in names]
        state = self._parts.assemble(own | given)
        if (step, jax.process_index()) not in mine:
            self.save(step, state, *spent)  # So that the next loss is no loss either.
        empty = [
            h for h in range(len(hosts)) if not any(h in x for x in held[step].values())
        ]
        notes.append(f"resume: step {step} of the hosts' own disks")
        if empty:
            notes.append(
                f"process {', '.join(map(str, empty))} had nothing on its disk: given "
                "its parts by the others"
            )
        return Restored(state, step, *spent, notes)

    def _find(self, newer_than: int) -> dict[tuple[int, int], pathlib.Path]:
        """Returns the undamaged files on this disk: (step, writing process) to path."""
        found = {}
        for path in self._folder.glob("process_*/[0-9]*.npz"):
            step, process = int(path.stem), int(path.parent.name.split("_")[1])
            if step <= newer_than:
                continue
            try:
                with zipfile.ZipFile(path) as file:
                    bad, members = file.testzip(), len(file.namelist())
                about = _about(path)
                # A flipped bit may cut the file's table of contents short.
                if bad is None and members != about["members"]:
                    bad = f"{members} of {about['members']} arrays"
                if bad is None and step != about["step"]:
                    bad = f"step {about['step']}"
                if bad is not None:
                    raise zipfile.BadZipFile(f"{bad} is not what was written")
                if about["print"] == self._print:
                    found[step, process] = path
            except _DAMAGE as error:
                print_error(f"error: {path} is damaged ({error}): not used")
        return found

    def _give(self, own: dict, held: dict[int, list[int]]) -> dict:
        """Sends parts to the processes that lack them; returns those for this one."""
        got, me = {}, jax.process_index()
        for provider, names in self._parts.transfers(held):
            sizes = [self._parts.bytes_of(name) for name in names]
            data = np.zeros(sum(sizes), np.uint8)
            if me == provider:
                data = np.concatenate([own[name] for name in names])
            pieces = []
            for begin in range(0, len(data), _PIECE):
                piece = data[begin : begin + _PIECE]
                pieces.append(
                    multihost_utils.broadcast_one_to_all(
                        piece, is_source=me == provider
                    )
                )
            whole = np.concatenate(pieces)
            cut = np.split(whole, np.cumsum(sizes)[:-1])
            wanted = self._parts.of_process(me)
            got |= {n: x for n, x in zip(names, cut, strict=True) if n in wanted}
        return got

    def _write(self, step: int, about: dict, arrays: dict) -> None:
        folder = self._folder / f"process_{jax.process_index()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            new = folder / f".{step}.new"
            with new.open("wb") as file:
                text = np.frombuffer(json.dumps(about).encode(), np.uint8)
                np.savez(file, about=text, **arrays)
            new.replace(folder / f"{step}.npz")
            saved = sorted(folder.glob("*.npz"), key=lambda path: int(path.stem))
            for path in (*saved[:-_KEPT], *set(folder.glob(".*.new"))):
                path.unlink()
        except OSError as error:
            print_error(
                f"error: step {step} could not be saved on this host's disk, {folder} "
                f"({describe_failure(error)}); training continues"
            )


def _name_of(workdir: str | os.PathLike) -> str:
    """Returns the run's name, drawn when it began: a new run finds no old files."""
    path = epath.Path(workdir) / "run_id"
    if jax.process_index() == 0 and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, secrets.token_hex(8))
    drawn = int(path.read_text(), 16) if jax.process_index() == 0 else 0
    return f"{int(meshes.process_allgather(drawn=np.uint64(drawn))['drawn'][0]):016x}"


def _load(path: pathlib.Path) -> tuple[dict, dict[str, np.ndarray]]:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files if name != "about"}
    return _about(path), arrays


def _about(path: pathlib.Path) -> dict:
    with np.load(path) as file:
        return json.loads(file["about"].tobytes())


class StateParts:
    """The parts of a state that is spread over the devices of several processes.

    A part is what one device holds of one array; its name is the number of the array
    and where the part begins and ends, as "12:0-8,4-8".

    Args:
      shapes: state with a jax.ShapeDtypeStruct for each array.
      shardings: state with the sharding of each.
    """

    def __init__(self, shapes: TrainState, shardings: TrainState):
        self._key = shapes.key.dtype
        self._shapes = shapes.replace(
            key=jax.eval_shape(jax.random.key_data, shapes.key)
        )
        self._shardings = shardings
        self._held = {process: {} for process in range(jax.process_count())}
        leaves = zip(
            jax.tree.leaves(self._shapes), jax.tree.leaves(shardings), strict=True
        )
        for number, (leaf, sharding) in enumerate(leaves):
            for device, index in sharding.devices_indices_map(leaf.shape).items():
                name = _name(number, index, leaf.shape)
                size = math.prod(
                    len(range(*s.indices(n))) for s, n in _zip(index, leaf)
                )
                self._held[device.process_index][name] = size * leaf.dtype.itemsize

    def describe(self) -> list:
        """Returns what must be the same for parts to fit, for JSON."""
        leaves = jax.tree_util.tree_leaves_with_path(self._shapes)
        return [
            [[jax.tree_util.keystr(k), list(x.shape), str(x.dtype)] for k, x in leaves],
            [sorted(names) for names in self._held.values()],
        ]

    def of_process(self, process: int) -> set[str]:
        """Returns the names of the parts that a process holds."""
        return set(self._held[process])

    def bytes_of(self, name: str) -> int:
        """Returns the size of a part."""
        return next(held[name] for held in self._held.values() if name in held)

    def lacking(self, held: Held) -> list[int]:
        """Returns the processes whose parts nobody has."""
        there = set().union(*(self._held[process] for process in held))
        return [p for p, names in self._held.items() if not there.issuperset(names)]

    def transfers(self, held: Held) -> list[tuple[int, list[str]]]:
        """Returns sending process and names, the same in every process, of parts to send."""
        has = {host: set() for host in self._held}
        for process, hosts in held.items():
            for host in hosts:
                has[host] |= set(self._held[process])
        wanted = set().union(*(set(self._held[host]) - has[host] for host in has))
        plan = {}
        for name in sorted(wanted):
            provider = min(host for host in has if name in has[host])
            plan.setdefault(provider, []).append(name)
        return sorted(plan.items())

    def parts_of(self, state: TrainState) -> dict[str, np.ndarray]:
        """Copies the parts that this process holds: name to bytes."""
        leaves = jax.tree.leaves(state.replace(key=jax.random.key_data(state.key)))
        shards = {
            _name(number, shard.index, leaf.shape): shard.data
            for number, leaf in enumerate(leaves)
            for shard in leaf.addressable_shards
        }
        for data in shards.values():
            data.copy_to_host_async()
        # Copied: on CPU this is the device's memory, which the next step takes over.
        return {name: _bytes(jax.device_get(x)).copy() for name, x in shards.items()}

    def assemble(self, arrays: dict[str, np.ndarray]) -> TrainState:
        """Builds the state of all processes from the parts that this one holds."""
        leaves, tree = jax.tree.flatten(self._shapes)
        made = [
            jax.make_array_from_callback(
                leaf.shape,
                sharding,
                lambda index, number=number, leaf=leaf: _array(
                    arrays[_name(number, index, leaf.shape)], index, leaf
                ),
            )
            for number, (leaf, sharding) in enumerate(
                zip(leaves, jax.tree.leaves(self._shardings), strict=True)
            )
        ]
        state = jax.tree.unflatten(tree, made)
        wrap = jax.jit(jax.random.wrap_key_data, out_shardings=self._shardings.key)
        return state.replace(key=wrap(state.key))


def _name(number: int, index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    ends = [s.indices(n)[:2] for s, n in zip(index, shape, strict=False)]
    return f"{number}:" + ",".join(f"{begin}-{end}" for begin, end in ends)


def _array(data: np.ndarray, index: tuple[slice, ...], leaf) -> np.ndarray:
    shape = [len(range(*s.indices(n))) for s, n in _zip(index, leaf)]
    return data.view(leaf.dtype).reshape(shape)


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _zip(index: tuple[slice, ...], leaf) -> Iterable[tuple[slice, int]]:
    return zip(index, leaf.shape, strict=True)
