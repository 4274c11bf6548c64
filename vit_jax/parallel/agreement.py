"""Whether all processes of a job were started with the same.

Each process would otherwise compile a program of its own, and they would wait for each
other in collectives that never meet. What they were started with is compared through
JAX's coordination service, which needs no collective.
"""

import itertools
import json
import time
from collections.abc import Mapping

from vit_jax.errors import UserError
from vit_jax.parallel import board, together

_LOOK_SECONDS = 0.05
_KEYS, _PROCESSES = 4, 6  # That one line names.
_REMEDIES = {
    "config": "start all processes with the same config",
    "code": "install the same code and packages on all hosts",
    "devices": "start every process with as many devices, of the same kind",
    "data": "give all hosts the same data",
    "weights": "give all hosts the same weights, opened with the same flags",
    "preprocess": "give all hosts the same flags on images",
    "workdir": "give all hosts the same --workdir, on storage that they share",
}
_rounds = itertools.count()  # Of comparisons; the same in all processes.


def check(**kinds: Mapping[str, object]) -> None:
    """Ends the run on all hosts where processes of the job differ.

    All processes call it in the same order and wait for each other here; the watcher of
    `Together` ends the wait if one of them fails or is lost.

    Args:
      **kinds: "config", "code", "devices", "data", "weights", "preprocess" or
        "workdir" to what must be the same: key to a value for JSON.

    Raises:
      UserError: with the kind, the keys, and which process has which value.
    """
    everyone = together.count()
    if everyone == 1:
        return
    folder, me = f"vit_jax/agreement/{next(_rounds)}", together.index()
    board.write(f"{folder}/values/{me}", json.dumps(kinds))
    if me == 0:
        while len(found := board.read(f"{folder}/values")) < everyone:
            time.sleep(_LOOK_SECONDS)
        values = [json.loads(found[str(process)]) for process in range(everyone)]
        board.write(f"{folder}/verdict/0", difference(values, together.who))
    while not (verdict := board.read(f"{folder}/verdict")):
        time.sleep(_LOOK_SECONDS)
    if verdict["0"]:
        raise UserError(verdict["0"])


def difference(values: list[dict[str, dict]], who=str) -> str:
    """Says in what processes differ.

    Args:
      values: of each process: kind to key to value.
      who: number of a process to its name.

    Returns:
      One line; "" if they do not differ.
    """
    for kind in values[0]:
        found = [value[kind] for value in values]
        keys = sorted({key for one in found for key in one})
        differing = [key for key in keys if len(_held(found, key)) > 1]
        if not differing:
            continue
        parts = [f"{key} is {_shown(_held(found, key), who)}" for key in differing]
        more = f"; and {len(parts) - _KEYS} more keys" if len(parts) > _KEYS else ""
        return (
            f"the hosts differ in {kind}: {'; '.join(parts[:_KEYS])}{more}: "
            f"{_REMEDIES[kind]}"
        )
    return ""


def _held(found: list[dict], key: str) -> dict[str, list[int]]:
    """Returns the processes that hold each value of a key."""
    held = {}
    for process, one in enumerate(found):
        text = json.dumps(one[key]) if key in one else "absent"
        held.setdefault(text, []).append(process)
    return held


def _shown(held: dict[str, list[int]], who) -> str:
    texts = []
    for text, processes in held.items():
        names = ", ".join(who(process) for process in processes[:_PROCESSES])
        if len(processes) > _PROCESSES:
            names += f" and {len(processes) - _PROCESSES} others"
        text = text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
        texts.append(f"{text} on {names}")
    return ", ".join(texts)
