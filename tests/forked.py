"""Starts commands as processes forked from one that has imported JAX and vit_jax.

    process = forked.Popen("vit_jax.train", ["--config=..."], env=..., stdout=PIPE)

Each is a process of its own, with its own environment, streams, signals and end, but
without the two seconds of CPU time that imports take. `Popen` is subprocess.Popen in
all else. Tests of how a command starts use subprocess.Popen itself.
"""

import atexit
import gc
import importlib
import inspect
import io
import json
import os
import pathlib
import random
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import warnings

ROOT = pathlib.Path(__file__).parents[1]
# Read when a command runs. All other variables may be read when modules are imported:
# each set of them has its server.
_READ_LATE = (
    *("XLA_FLAGS", "JAX_COORDINATOR_", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    *("VIT_JAX_", "PYTEST_", "PYTHONPATH", "PYTHONUNBUFFERED", "TMPDIR"),
    *("OWN_DISK", "HANGS"),  # Of tests.
)
_IMPORTS = ("vit_jax.command_line.job", "vit_jax.training.loop", "vit_jax.weights")
_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
_MAX_ORDER = 1 << 17  # Bytes.
_servers = {}


class Popen(subprocess.Popen):
    """A process that runs a module as `python -m` does.

    Args:
      module: its name.
      words: arguments on the command line.
      env: all environment variables.
      options: of subprocess.Popen: cwd, stdin, stdout, stderr, text, start_new_session.
    """

    def __init__(self, module, words, *, env, **options):
        self._order = {"module": module, "words": list(map(str, words))}
        self._env = env
        super().__init__([sys.executable, "-m", module], env=env, **options)

    def _execute_child(self, *args):
        names = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]
        given = dict(zip(names, args, strict=True))
        streams = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        streams = [i if fd == -1 else fd for i, fd in enumerate(streams)]
        reader, writer = os.pipe()
        order = self._order | {
            "cwd": os.path.abspath(given["cwd"] or "."),
            "env": dict(self._env),
            "session": given["start_new_session"],
            "ignored": [n for n in _SIGNALS if signal.getsignal(n) == signal.SIG_IGN],
        }
        try:
            self.pid = _server(self._env).start(order, [*streams, writer])
        finally:
            os.close(writer)
            # Ends of pipes, not files that the caller has opened.
            ends = "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"
            self._close_pipe_fds(*map(given.get, ends))
        self._child_created = True
        self._status = reader

    def _try_wait(self, wait_flags):
        if wait_flags == os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        status = os.read(self._status, 20)
        os.close(self._status)
        return self.pid, int(status)

    def _internal_poll(self, _deadstate=None, **_):
        if self.returncode is None and hasattr(self, "_status"):
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)
        return self.returncode


class _Server:
    """The process that others are forked from."""

    def __init__(self, env):
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(other.fileno())],
                cwd=ROOT,
                env=env | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
                pass_fds=[other.fileno()],
            )
        assert self._socket.recv(9) == b"ready"
        atexit.register(self._end)

    def start(self, order, descriptors):
        """Returns the id of a new process."""
        data = json.dumps(order).encode()
        assert len(data) < _MAX_ORDER
        socket.send_fds(self._socket, [data], descriptors)
        return int(self._socket.recv(20))

    def _end(self):
        self._socket.close()
        self._process.wait()


def _server(env):
    """Returns the server for an environment, started when it is first needed."""
    early = {k: v for k, v in env.items() if not k.startswith(_READ_LATE)}
    key = tuple(sorted(early.items()))
    if key not in _servers:
        _servers[key] = _Server(early)
    return _servers[key]


def _serve(connection):
    """Forks until the tests end; returns in each child: its order and descriptors."""
    statuses = {}  # Child to where its status is written.
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    connection.send(b"ready")
    while True:
        ready, _, _ = select.select([connection, reader], [], [])
        if reader in ready:
            os.read(reader, 100)
            _report_ends(statuses)
        if connection in ready:
            data, descriptors, _, _ = socket.recv_fds(connection, _MAX_ORDER, 4)
            if not data:
                os._exit(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # On forking beside JAX's threads.
                pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in (reader, writer, descriptors.pop(), *statuses.values()):
                    os.close(fd)
                return json.loads(data), descriptors
            statuses[pid] = descriptors.pop()
            for fd in descriptors:
                os.close(fd)
            connection.send(str(pid).encode())


def _report_ends(statuses):
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        fd = statuses.pop(pid)
        try:
            os.write(fd, str(status).encode())
        except BrokenPipeError:  # The test has ended without asking.
            pass
        os.close(fd)


def _keep_programs_of_all():
    """Lets every process write its programs for several processes to JAX's cache.

    On CPUs each process has another key for such a program, and JAX lets only the first
    one write: all others compiled the same program again at each start.
    """
    from jax._src import compilation_cache, compiler, distributed

    # As in jax 0.10; where a later one has another, programs are compiled again.
    compile_first = getattr(compiler, "_compile_and_write_cache", None)

    def compile_and_write(backend, computation, devices, *more):
        program = compile_first(backend, computation, devices, *more)
        *_, name, key = more
        me = distributed.global_state.process_id
        # A limit of a test would cut the file off.
        most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        shared = any(device.process_index != me for device in devices)
        if me and shared and most == resource.RLIM_INFINITY:
            compilation_cache.put_executable_and_time(key, name, program, backend, 1)
        return program

    if compile_first:
        compiler._compile_and_write_cache = compile_and_write


def _become(order, descriptors):
    """Makes this child what `python -m` would have started."""
    if order["session"]:
        os.setsid()
    for number, fd in enumerate(descriptors):
        os.dup2(fd, number)
        os.close(fd)
    # Those of the server take pipes for the files that it writes to.
    for number, name in enumerate(("stdout", "stderr"), 1):
        file = io.FileIO(number, "w", closefd=False)
        errors = getattr(sys, name).errors
        stream = io.TextIOWrapper(file, errors=errors, write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    for number in _SIGNALS:
        default = (
            signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
        ignored = number in order["ignored"]
        signal.signal(number, signal.SIG_IGN if ignored else default)
    random.seed()
    tempfile.tempdir = None  # Of the server's environment.
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [path for path in paths if path not in ("", *sys.path)]
    sys.path[:1] = [order["cwd"], *paths]
    sys.argv = [order["module"], *order["words"]]


if __name__ == "__main__":
    from hurry import hurry

    sys.path[0] = str(ROOT)
    for name in _IMPORTS:
        importlib.import_module(name)
    _keep_programs_of_all()
    hurry()
    gc.collect()
    gc.freeze()  # Otherwise collections would copy what is shared.
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        order = _serve(connection)
    _become(*order)
    runpy.run_module(order[0]["module"], run_name="__main__", alter_sys=True)
