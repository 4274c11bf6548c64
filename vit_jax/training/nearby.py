"""Checkpoints on each host's own disk, between those that are kept for good.

Every process writes the parts of the state that its devices hold, which takes no network
and needs no other process. A start looks which step the hosts can put together. A host
whose disk is empty, because it was replaced, is given its parts by hosts whose devices
hold the same ones. Where nobody does, the start goes back to the checkpoint in the workdir.
"""

import collections
import hashlib
import json
import os
import pathlib
import secrets
import shutil
import socket
import threading
import zipfile
import zlib

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from vit_jax.data.fingerprint import fingerprint
from vit_jax.data.sources import Source
from vit_jax.errors import UserError
from vit_jax.parallel import distributed
from vit_jax.report.writer import replace_text
from vit_jax.training import parts, resuming, same_run, saving
from vit_jax.training.config import TrainConfig
from vit_jax.training.state import TrainState

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


class Nearby:
    """Saves to and restores from the hosts' own disks; nothing if `every` is 0.

    Args:
      config: complete config, of which `local` says `every` how many steps, and in
        what `folder`, which may have environment variables in it.
      workdir: of the run; holds the name under which its files lie on the disks.
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
        self._every, self._writing = config.local.every, None
        if not self._every:
            return
        self._layout = parts.Layout(shapes, shardings)
        self._source, self._workdir = source, workdir
        self._check, self._data = config.data.check, fingerprint(source)
        told = [len(source), list(source.class_names), self._layout.describe()]
        told.append(same_run.decisive(config))
        self._print = hashlib.sha256(json.dumps(told).encode()).hexdigest()
        folder = os.path.expanduser(os.path.expandvars(config.local.folder))
        if "$" in folder:
            raise UserError(
                f"local.folder={config.local.folder!r}: this host "
                f"({socket.gethostname()}) has no such environment variable: set it, or "
                "state the folder itself"
            )
        self._folder = pathlib.Path(folder) / _name_of(workdir)

    def due(self, step: int) -> bool:
        """Tells whether a step is to be saved."""
        return bool(self._every) and step % self._every == 0

    def save(
        self, step: int, state: TrainState, seconds: float, device_seconds: float = 0.0
    ) -> None:
        """Writes this process's parts in the background; a failure is said aloud.

        Args:
          step: optimiser steps taken.
          state: to save; it is copied before this returns.
          seconds: trained so far.
          device_seconds: the same, each start's times its devices.
        """
        self.wait()
        about = {"step": step, "seconds": seconds, "device_seconds": device_seconds}
        about |= {"print": self._print, "data": self._data}
        arrays = self._layout.parts_of(state)
        about["members"] = len(arrays) + 1  # With this.
        self._writing = threading.Thread(
            target=self._write, args=(step, about, arrays), daemon=True, name="nearby"
        )
        self._writing.start()

    def wait(self) -> None:
        """Waits for the save in progress."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def forget(self) -> None:
        """Removes what lies on this host's disk, when the run is done."""
        self.wait()
        if self._every:
            shutil.rmtree(self._folder, ignore_errors=True)

    def restore(self, newer_than: int) -> resuming.Restored:
        """Puts the newest step together that the hosts hold; all processes call it.

        Args:
          newer_than: step of the checkpoint in the workdir, 0 for none.

        Returns:
          What was put together; without a state if there is no newer step.
        """
        if not self._every:
            return resuming.Restored(None, 0, 0.0, 0.0, [])
        mine = self._find(newer_than)
        listed = np.full((_LISTED, 2), -1)
        for row, found in enumerate(sorted(mine, reverse=True)[:_LISTED]):
            listed[row] = found
        hosts = distributed.gather(listed=listed)["listed"]
        held = collections.defaultdict(lambda: collections.defaultdict(list))
        for host, pairs in enumerate(hosts):
            for step, process in pairs[pairs[:, 0] >= 0]:
                held[int(step)][int(process)].append(host)
        notes = []
        for step in sorted(held, reverse=True):
            missing = self._layout.lacking(held[step])
            if not missing:
                break
            notes.append(
                f"step {step} is on hosts' own disks, but not the parts of process "
                f"{', '.join(map(str, missing))}, which no other process holds"
            )
        else:
            return resuming.Restored(None, 0, 0.0, 0.0, notes)
        files = {p: _load(mine[step, p]) for s, p in mine if s == step}
        about = next((about for about, _ in files.values()), {})
        if "data" in about:
            here = {"data": self._data}
            notes += resuming.check_data(
                about, here, self._source, self._workdir, check=self._check
            )
        own = {k: v for _, arrays in files.values() for k, v in arrays.items()}
        given = self._give(own, held[step])
        names = "seconds", "device_seconds"
        told = distributed.gather(**{name: about.get(name, 0.0) for name in names})
        spent = [float(told[name].max()) for name in names]
        state = self._layout.assemble(own | given)
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
        return resuming.Restored(state, step, *spent, notes)

    def _find(self, newer_than: int) -> dict[tuple[int, int], pathlib.Path]:
        """Returns the undamaged files on this disk: (step, writing process) to path."""
        found = {}
        for path in self._folder.glob("process_*/*.npz"):
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
                if bad is not None:
                    raise zipfile.BadZipFile(f"{bad} is not what was written")
                if about["print"] == self._print:
                    found[step, process] = path
            except _DAMAGE as error:
                resuming.say(f"error: {path} is damaged ({error}): not used")
        return found

    def _give(self, own: dict, held: dict[int, list[int]]) -> dict:
        """Sends parts to the processes that lack them; returns those for this one."""
        got, me = {}, jax.process_index()
        for provider, names in self._layout.transfers(held):
            sizes = [self._layout.bytes_of(name) for name in names]
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
            wanted = self._layout.of_process(me)
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
            resuming.say(
                f"error: step {step} could not be saved on this host's disk, {folder} "
                f"({saving.reason(error)}); training goes on"
            )


def _name_of(workdir: str | os.PathLike) -> str:
    """Returns the run's name, drawn when it began: a new run finds no old files."""
    path = epath.Path(workdir) / "run_id"
    if jax.process_index() == 0 and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, secrets.token_hex(8))
    drawn = int(path.read_text(), 16) if jax.process_index() == 0 else 0
    return f"{int(distributed.gather(drawn=np.uint64(drawn))['drawn'][0]):016x}"


def _load(path: pathlib.Path) -> tuple[dict, dict[str, np.ndarray]]:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files if name != "about"}
    return _about(path), arrays


def _about(path: pathlib.Path) -> dict:
    with np.load(path) as file:
        return json.loads(file["about"].tobytes())
