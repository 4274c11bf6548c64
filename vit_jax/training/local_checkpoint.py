"""Checkpoints on each host's local disk, between those in the workdir.

Every process writes the parts of the state that its devices hold, without the network
and without waiting for other processes. A start restores the newest step whose parts
all exist on some host. A host with an empty disk, because it was replaced, receives its
parts from hosts that have copies of them. If a part has no copy, the start restores the
checkpoint in the workdir.
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
from collections.abc import Mapping

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from vit_jax.command_line.files import replace_text
from vit_jax.command_line.printing import print_error
from vit_jax.data.sources.base import Source
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.training import resume_check
from vit_jax.training.callbacks import Callback, Run
from vit_jax.training.checkpoint import describe_failure
from vit_jax.training.config import TrainConfig
from vit_jax.training.resume_check import Restored
from vit_jax.training.train_state import TrainState

# Files to keep per process: a kill may happen when only some processes have written a
# step.
_KEPT = 2
_LISTED = 16  # Maximum number of files per host that are considered.

# Process that has written parts -> hosts that have the file.
Held = dict[int, list[int]]


class LocalCheckpointer(Callback):
    """Saves to local disks between two saves in the workdir, and restores from them.

    The name of the folder on each disk is the id of the run in the workdir.

    Args:
      config: complete config.
      workdir: folder of the run.
      source: training split.
      shapes: state with a jax.ShapeDtypeStruct for each array.
      shardings: state with the sharding of each array.

    Raises:
      UserError: the folder names an environment variable that is not set.
    """

    on_every_host = True

    def __init__(
        self,
        config: TrainConfig,
        workdir: str | os.PathLike,
        source: Source,
        shapes: TrainState,
        shardings: TrainState,
    ):
        self._every, self._writing = config.local_checkpoint.every_steps, None
        self._parts = StateParts(shapes, shardings)
        self._source, self._workdir = source, workdir
        self._check = config.data.check
        self._data = resume_check.data_read(config.data, source)
        same = [len(source), list(source.class_names), self._parts.describe()]
        same.append(resume_check.decisive(config))
        self._print = hashlib.sha256(
            json.dumps(same, sort_keys=True).encode()
        ).hexdigest()
        folder = os.path.expanduser(os.path.expandvars(config.local_checkpoint.dir))
        if "$" in folder:
            raise UserError(
                f"local_checkpoint.dir={config.local_checkpoint.dir!r}: the environment "
                f"variable is not set on this host ({socket.gethostname()}): set it, or "
                "write out the folder"
            )
        self._folder = pathlib.Path(folder) / _run_id(workdir)

    def begin(self, run: Run) -> None:
        self._run = run

    def after_step(self, step: int) -> None:
        run = self._run
        if step % self._every or run.checkpoints.begun == step:
            return
        run.metrics()  # Raises if they are not finite.
        with run.logger.pause("checkpoint"):
            self.save(step, run.state, *run.clock.elapsed())

    def end(self, report: Mapping) -> None:
        self.remove()  # The workdir has the last step.

    def save(
        self, step: int, state: TrainState, seconds: float, device_seconds: float = 0.0
    ) -> None:
        """Writes this process's parts in the background, like `Checkpointer.save`."""
        self.wait()
        arrays = self._parts.parts_of(state)
        about = {
            "step": step,
            "seconds": seconds,
            "device_seconds": device_seconds,
            "print": self._print,
            "data": self._data,
            "members": len(arrays) + 1,
        }
        work = {"target": self._write, "args": (step, about, arrays)}
        self._writing = threading.Thread(**work, daemon=True, name="local_checkpoint")
        self._writing.start()

    def wait(self) -> None:
        """Waits for the save in progress."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def remove(self) -> None:
        """Removes this run's files from this host's disk, when the run is done."""
        self.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def restore(self, newer_than: int) -> Restored:
        """Restores the newest complete step on local disks; all processes must call it.

        Args:
          newer_than: only steps after this one are considered.

        Returns:
          Restored state; without a state if no newer step is complete.
        """
        mine = self._list(newer_than)
        listed = np.full((_LISTED, 2), -1)
        for row, pair in enumerate(sorted(mine, reverse=True)[:_LISTED]):
            listed[row] = pair
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
                f"step {step} is on local disks, but without the parts of process "
                f"{', '.join(map(str, missing))}, which no other process has"
            )
        else:
            return Restored(notes=notes)
        about, arrays = {}, {}
        for (saved, _), path in mine.items():
            if saved == step:
                with np.load(path) as file:
                    about = _about(file)
                    arrays |= {name: file[name] for name in file.files}
        if about:
            known = about["data"], self._data, self._source, self._workdir
            notes += resume_check.check_data(*known, check=self._check)
        arrays |= self._exchange(arrays, held[step])
        names = "seconds", "device_seconds"
        times = {name: about.get(name, 0.0) for name in names}
        times = meshes.process_allgather(**times)
        times = [float(times[name].max()) for name in names]
        state = self._parts.assemble(arrays)
        if (step, jax.process_index()) not in mine:
            # Saved again, so that another lost disk can be replaced too.
            self.save(step, state, *times)
        notes.append(f"resume: step {step} from local disks")
        full = {host for listed in held[step].values() for host in listed}
        if empty := [str(host) for host in range(len(hosts)) if host not in full]:
            notes.append(
                f"process {', '.join(empty)} had no checkpoint on its disk: received its "
                "parts from the others"
            )
        return Restored(state, step, *times, notes)

    def _list(self, newer_than: int) -> dict[tuple[int, int], pathlib.Path]:
        """Returns the undamaged files on this disk: (step, writing process) to path."""
        paths = {}
        for path in self._folder.glob("process_*/[0-9]*.npz"):
            step, process = int(path.stem), int(path.parent.name.split("_")[1])
            if step <= newer_than:
                continue
            try:
                with path.open("rb") as opened, np.load(opened) as file:
                    bad, members = file.zip.testzip(), len(file.files)
                    about = _about(file)
                # A flipped bit may shorten the file's table of contents.
                if bad is None and members != about["members"]:
                    bad = f"{members} of {about['members']} arrays"
                if bad is None and step != about["step"]:
                    bad = f"step {about['step']}"
                if bad is not None:
                    raise ValueError(f"{bad} is not what was written")
                if about["print"] == self._print:
                    paths[step, process] = path
            except Exception as error:  # noqa: BLE001 (zipfile and NumPy raise many)
                print_error(f"error: {path} is damaged ({error}): not used")
        return paths

    def _exchange(self, arrays: dict, held: Held) -> dict:
        """Sends parts to the processes that lack them; returns the received parts."""
        received, me = {}, jax.process_index()
        for provider, names in self._parts.transfers(held):
            for name in names:
                part = np.zeros(self._parts.bytes_of(name), np.uint8)
                part = multihost_utils.broadcast_one_to_all(
                    arrays[name] if me == provider else part, is_source=me == provider
                )
                if name in self._parts.of_process(me):
                    received[name] = np.asarray(part)
        return received

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


def _run_id(workdir: str | os.PathLike) -> str:
    """Returns the random id of a run, so that a new run does not use old files."""
    path = epath.Path(workdir) / "run_id"
    if jax.process_index() == 0 and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, secrets.token_hex(8))
    drawn = int(path.read_text(), 16) if jax.process_index() == 0 else 0
    return f"{int(meshes.process_allgather(drawn=np.uint64(drawn))['drawn'][0]):016x}"


def _about(file: np.lib.npyio.NpzFile) -> dict:
    return json.loads(file["about"].tobytes())


class StateParts:
    """The parts of a state that is split over the devices of several processes.

    A part is the shard of one array on one device. Its name is the number of the array,
    followed by the begin and end of the shard along each axis, such as "12:0-8,4-8".

    Args:
      shapes: state with a jax.ShapeDtypeStruct for each array.
      shardings: state with the sharding of each array.
    """

    def __init__(self, shapes: TrainState, shardings: TrainState):
        self._shapes = shapes.replace(
            key=jax.eval_shape(jax.random.key_data, shapes.key)
        )
        self._shardings = shardings
        self._held = {process: {} for process in range(jax.process_count())}
        for number, (leaf, sharding) in enumerate(self._leaves()):
            size = math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for device, index in sharding.devices_indices_map(leaf.shape).items():
                name = _name(number, index, leaf.shape)
                self._held[device.process_index][name] = size

    def _leaves(self) -> list[tuple]:
        trees = jax.tree.leaves(self._shapes), jax.tree.leaves(self._shardings)
        return list(zip(*trees, strict=True))

    def describe(self) -> list:
        """Returns the JSON that must be equal for parts to fit a state."""
        leaves = jax.tree_util.tree_leaves_with_path(self._shapes)
        return [
            [[jax.tree_util.keystr(k), list(x.shape), str(x.dtype)] for k, x in leaves],
            [sorted(names) for names in self._held.values()],
        ]

    def of_process(self, process: int) -> set[str]:
        """Returns the names of the parts that a process holds."""
        return set(self._held[process])

    def bytes_of(self, name: str) -> int:
        """Returns the size of a part in bytes."""
        return next(held[name] for held in self._held.values() if name in held)

    def lacking(self, held: Held) -> list[int]:
        """Returns the processes with parts that are not on any disk."""
        there = set().union(*(self._held[process] for process in held))
        return [p for p, names in self._held.items() if not there.issuperset(names)]

    def transfers(self, held: Held) -> list[tuple[int, list[str]]]:
        """Returns pairs of a sending process and the names of the parts to send.

        The result is the same in every process.
        """
        has = {host: set() for host in self._held}
        for process, hosts in held.items():
            for host in hosts:
                has[host] |= set(self._held[process])
        wanted = set().union(*(set(self._held[host]) - has[host] for host in has))
        plan = collections.defaultdict(list)
        for name in sorted(wanted):
            plan[min(host for host in has if name in has[host])].append(name)
        return sorted(plan.items())

    def parts_of(self, state: TrainState) -> dict[str, np.ndarray]:
        """Copies the parts that this process holds; returns bytes by name."""
        leaves = jax.tree.leaves(state.replace(key=jax.random.key_data(state.key)))
        shards = {
            _name(number, shard.index, leaf.shape): shard.data
            for number, leaf in enumerate(leaves)
            for shard in leaf.addressable_shards
        }
        for data in shards.values():
            data.copy_to_host_async()
        # Copied, because on CPU the next step overwrites the memory of these arrays.
        return {
            name: np.array(jax.device_get(data), order="C").reshape(-1).view(np.uint8)
            for name, data in shards.items()
        }

    def assemble(self, arrays: dict[str, np.ndarray]) -> TrainState:
        """Builds the global state from the parts that this process holds."""

        def array(number, leaf, sharding):
            def part(index):
                data = arrays[_name(number, index, leaf.shape)]
                return data.view(leaf.dtype).reshape(sharding.shard_shape(leaf.shape))

            return jax.make_array_from_callback(leaf.shape, sharding, part)

        leaves = [array(number, *pair) for number, pair in enumerate(self._leaves())]
        state = jax.tree.unflatten(jax.tree.structure(self._shapes), leaves)
        wrap = jax.jit(jax.random.wrap_key_data, out_shardings=self._shardings.key)
        return state.replace(key=wrap(state.key))


def _name(number: int, index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    ends = [s.indices(n)[:2] for s, n in zip(index, shape, strict=False)]
    return f"{number}:" + ",".join(f"{begin}-{end}" for begin, end in ends)
