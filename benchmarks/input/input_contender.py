"""Processes that make batches when asked, and what they use; Linux alone."""

import os
import pathlib
import subprocess
import time

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
TICK = 1 / os.sysconf("SC_CLK_TCK")


class Contender:
    """A process that makes batches when asked."""

    def __init__(self, python, script, *args):
        self.process = subprocess.Popen(
            [python, str(HERE / script), *map(str, args)],
            # The script's own folder is on its path, the clone's is not.
            env=os.environ
            | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer("ready")

    def ask(self, line):
        """Sends a request and waits until it is done."""
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        self._answer("done")

    def _answer(self, expected):
        if (line := self.process.stdout.readline().strip()) != expected:
            raise SystemExit(f"{self.process.args}: {line!r}, not {expected!r}")

    def measure(self, batches):
        """Returns CPU seconds and wall seconds of so many batches."""
        before, start = self.settle()[0], time.monotonic()
        self.ask(batches)
        cpu, end = self.settle()
        return cpu - before, end - start

    def settle(self):
        """Waits until the processes rest; returns their CPU seconds, and since when."""
        history = [(self.cpu(), time.monotonic())]
        while True:
            time.sleep(0.02)
            history.append((self.cpu(), time.monotonic()))
            cpu, now = history[-1]
            still = [when for used, when in history if cpu - used <= 2 * TICK]
            if now - still[0] > 0.3:  # Threads may look round now and then.
                return cpu, still[0]

    def cpu(self):
        """Returns the CPU seconds of the process, its threads and children so far."""
        fields = [read_stat(pid) for pid in self.tree()]
        return TICK * sum(int(f[11]) + int(f[12]) for f in fields)

    def peak(self):
        """Returns the most memory that one of the processes ever held, in MB."""
        peaks = []
        for pid in self.tree():
            status = pathlib.Path(f"/proc/{pid}/status").read_text()
            peaks.append(int(status.partition("VmHWM:")[2].split()[0]) / 1000)
        return max(peaks)

    def tree(self):
        """Returns the ids of the process and all below it."""
        parents = {}
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                parents[int(path.name)] = int(read_stat(path.name)[1])
            except OSError:  # Gone in the meantime.
                continue
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def close(self):
        """Hangs up, and waits until the process has ended its own."""
        self.process.stdin.close()
        self.process.wait(60)


def read_stat(pid):
    """Returns the fields of /proc/PID/stat after the name, the state first."""
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
