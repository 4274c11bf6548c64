"""Sends texts between the processes of a job, and checks that they agree.

Processes write to the key-value store of JAX's coordination service, which needs no
collective. Processes whose config, code or data differ would compile different
programs, and wait for each other in collectives that never meet.
"""

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Mapping

import jax

from vit_jax.distributed.internals import distributed as service
from vit_jax.errors import UserError

NAMES = "vit_jax/hosts"  # Folder of the store with the host of each process.
_AGREEMENT = "vit_jax/agreement"
_POLL_SECONDS = 0.05
_MAX_KEYS, _MAX_PROCESSES = 4, 6  # In one message about a difference.
_REMEDIES = {
    "config": "start all processes with the same config",
    "code": "install the same code and packages on all hosts",
    "devices": "start every process with the same number and kind of devices",
    "data": "give all hosts the same data",
    "weights": "give all hosts the same weights, opened with the same flags",
    "preprocess": "give all hosts the same flags on images",
    "workdir": "give all hosts the same --workdir, on storage that they share",
}
_comparisons = itertools.count()  # All processes count the same calls.


def check_agreement(**kinds: Mapping[str, object]) -> None:
    """Checks that all processes of the job were started with the same values.

    All processes call it in the same order and wait for each other here, unless
    `FailureBroadcast` ends them because one of them fails or is lost.

    Args:
      **kinds: values that must be the same, as dicts of JSON values, by kind: "config",
        "code", "devices", "data", "weights", "preprocess" or "workdir".

    Raises:
      UserError: processes differ; the message has the kind, the keys and the values.
    """
    if process_count() == 1:
        return
    folder = f"{_AGREEMENT}/{next(_comparisons)}"
    key_value_set(f"{folder}/values/{process_index()}", json.dumps(kinds))
    if process_index() == 0:
        while len(texts := key_value_dir_get(f"{folder}/values")) < process_count():
            time.sleep(_POLL_SECONDS)
        values = [json.loads(texts[str(i)]) for i in range(process_count())]
        key_value_set(f"{folder}/verdict/0", difference(values, process_name))
    while not (verdict := key_value_dir_get(f"{folder}/verdict")):
        time.sleep(_POLL_SECONDS)
    if verdict["0"]:
        raise UserError(verdict["0"])


def difference(values: list[dict[str, dict]], name: Callable[[int], str] = str) -> str:
    """Describes in one line how the values of processes differ; "" if they do not.

    Args:
      values: for each process, kind to key to value.
      name: function from the index of a process to its name.
    """
    for kind in values[0]:
        texts = []
        for key in sorted({key for value in values for key in value[kind]}):
            holders = {}  # Value to the processes that have it.
            for process, value in enumerate(values):
                text = json.dumps(value[kind][key]) if key in value[kind] else "absent"
                holders.setdefault(text, []).append(process)
            if len(holders) > 1:
                held = [_held(text, some, name) for text, some in holders.items()]
                texts.append(f"{key} is {', '.join(held)}")
        if texts:
            if (more := len(texts) - _MAX_KEYS) > 0:
                texts[_MAX_KEYS:] = [f"and {more} more keys"]
            return f"the hosts differ in {kind}: {'; '.join(texts)}: {_REMEDIES[kind]}"
    return ""


def _held(text: str, some: list[int], name: Callable[[int], str]) -> str:
    names = ", ".join(name(process) for process in some[:_MAX_PROCESSES])
    if (more := len(some) - _MAX_PROCESSES) > 0:
        names += f" and {more} others"
    text = text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
    return f"{text} on {names}"


def process_index() -> int:
    """Returns the index of this process in its job."""
    # Not `jax.process_index()`, which looks for the devices of all processes first.
    return service.global_state.process_id


def process_count() -> int:
    """Returns the number of processes of the job."""
    return service.global_state.num_processes


def process_name(process: int) -> str:
    """Returns the index, host and process id of a process of the job."""
    name = key_value_dir_get(NAMES).get(str(process), "host unknown")
    return f"process {process} of {process_count()} ({name})"


def key_value_set(key: str, text: str, *, overwrite: bool = False) -> None:
    """Writes a text to the key-value store; replaces a key only if `overwrite`."""
    call_service("key_value_set", key, text, overwrite)


def key_value_dir_get(folder: str) -> dict[str, str]:
    """Returns the texts of a folder by the last part of their keys.

    The result is empty if the service does not answer.
    """
    return read(folder) or {}


def read(folder: str) -> dict[str, str] | None:
    """Returns the texts of a folder by the last part of their keys.

    The result is None if the service does not answer.
    """
    items = call_service("key_value_dir_get", f"{folder}/")
    return items if items is None else {k.rpartition("/")[2]: v for k, v in items}


def call_service(method: str, *args: str | int):
    """Calls the coordination service; returns None if it refuses or is gone."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        return getattr(service.global_state.client, method)(*args)
    return None
