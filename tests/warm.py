"""A process that runs verbs one after another: their imports are paid for once.

    with warm.Process(cwd) as process:
        end = process.run("predict", ["--model=x.safetensors", "photo.jpg"])

A case that takes too long is interrupted, or its process is killed and begun anew.
`run_all` runs whole command lines.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import resource
import runpy
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback

_STREAMS = {"in": "r", "out": "w", "err": "w"}
GRACE = 15  # Seconds until a process that does not heed the interruption is killed.


@dataclasses.dataclass(frozen=True)
class End:
    """How a verb ended: exit code (None: it had to be stopped), and what it printed."""

    code: int | None
    out: str
    err: str
    seconds: float


class Process:
    """Runs verbs in a folder, as `python -m vit_jax.VERB` would.

    Args:
      cwd: folder that they are run in.
      memory: bytes that the process may have; more is refused. None is no limit.
      fork: whether `python -m` of a verb, which a script starts, is forked with its
        imports done (forked.py).
      environment: variables besides those of this process.
    """

    def __init__(self, cwd, memory=None, *, fork=False, **environment):
        self._cwd, self._environment, self._process = cwd, environment, None
        self._flags = str(memory or ""), "fork" if fork else ""

    def __enter__(self):
        self._streams = tempfile.TemporaryDirectory()
        return self

    def __exit__(self, *_):
        if self._process:
            self._process.kill()
            self._process.communicate()
            self._process = None
        self._streams.cleanup()

    def run(self, verb, words, stdin="", seconds=20):
        """Runs a verb, or the script of a path, with words and a text for its stdin."""
        if not self._process:
            self._process = subprocess.Popen(
                [sys.executable, __file__, self._streams.name, *self._flags],
                cwd=self._cwd,
                env=os.environ | self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._process.stdout.readline()  # That it is ready.
        began = time.monotonic()
        order = {"verb": verb, "words": words, "stdin": stdin, "seconds": seconds}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            answered = selector.select(seconds + GRACE)
        line = self._process.stdout.readline() if answered else ""
        if line:
            code = json.loads(line)
        else:  # It hangs outside of Python, or ended itself, as os._exit does.
            if not answered:
                self._process.kill()
            self._process.communicate()
            code = self._process.returncode if answered else None
            self._process = None
        took = time.monotonic() - began
        return End(code, *map(self._read, ("out", "err")), took)

    def _read(self, name):
        data = (pathlib.Path(self._streams.name) / name).read_bytes()
        return data.decode(errors="backslashreplace")


def run_all(commands, cwd, **environment):
    """Runs "python -m MODULE WORDS" or "python FILE WORDS", as lists; all must succeed."""
    with Process(cwd, **environment) as process:
        for python, *words in commands:
            assert python == "python", python
            name, *words = words[words[0] == "-m" :]
            succeed(process, name.removeprefix("vit_jax."), words)


def succeed(process, name, words):
    """Runs a verb or a script, which must succeed; returns what it printed."""
    end = process.run(name, words, seconds=900)
    assert end.code == 0, f"{name} {words}: {end}"
    return end.out


class _Hangs(BaseException):
    """The time is up."""


def _interrupt(signum, frame):
    raise _Hangs


def _serve(folder, memory, fork):
    from hurry import hurry  # It imports JAX.

    if fork:
        _fork_verbs()
    answers = os.fdopen(os.dup(1), "w")
    orders = os.fdopen(os.dup(0), "r")
    hurry()
    sys.path.insert(0, "")  # As `python -m` has it.
    signal.signal(signal.SIGALRM, _interrupt)
    if memory:
        resource.setrlimit(resource.RLIMIT_DATA, (int(memory), int(memory)))
    print("ready", file=answers, flush=True)
    for line in orders:
        print(json.dumps(_run(folder, **json.loads(line))), file=answers, flush=True)


def _fork_verbs():
    """Has subprocess.Popen fork `python -m` of a verb from a process with JAX imported."""
    import forked

    start = subprocess.Popen

    class Popen(start):
        def __new__(cls, args, *more, **options):
            # `compile` chooses compilers before JAX is imported.
            verb = args[2] if [*args[:2]] == [sys.executable, "-m"] else ""
            if not verb.startswith("vit_jax.") or verb == "vit_jax.compile":
                return start(args, *more, **options)
            options["env"] = dict(options.get("env") or os.environ)
            return forked.Popen(verb, args[3:], **options)

    subprocess.Popen = Popen


def _run(folder, verb, words, stdin, seconds):
    """Runs a verb in this process, its three streams in files; returns its code."""
    with contextlib.ExitStack() as stack:
        (folder / "in").write_text(stdin)
        for number, (name, mode) in enumerate(_STREAMS.items()):
            file = stack.enter_context((folder / name).open(mode))
            os.dup2(file.fileno(), number)
        signal.alarm(seconds)
        code = _main(verb, words)
        signal.alarm(0)
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _main(verb, words):
    sys.argv = [verb, *words]
    try:
        if verb.endswith(".py"):
            runpy.run_path(verb, run_name="__main__")
        else:
            runpy.run_module(f"vit_jax.{verb}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):  # As Python does: print it, and end with 1.
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except _Hangs:
        traceback.print_exc()
        return None
    except BaseException:  # noqa: BLE001 (what it prints is what is tested)
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _serve(pathlib.Path(sys.argv[1]), *sys.argv[2:])
