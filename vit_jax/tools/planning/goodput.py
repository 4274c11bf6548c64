"""How much of a run's time is work, where hosts fail and checkpoints take time.

A job works; after every interval it is held up while the state leaves the devices, and
the checkpoint counts once it is written, while the job works on. At a failure it goes
back to the newest checkpoint that counts, after a restart. Failures are a Poisson
process, restarts included. All times are in seconds.

Source: Young, "A first order approximation to the optimum checkpoint interval", CACM
17(9), 1974.
"""

import dataclasses
import math

import numpy as np
from jaxtyping import Float

MOST_FAILURES = 2_000  # Of a run; one with more is taken to make no progress.


@dataclasses.dataclass(frozen=True)
class Job:
    """A run and what interrupts it.

    Attributes:
      work: time of its steps alone.
      stall: time for which a checkpoint holds the steps up.
      write: from the beginning of a checkpoint until it counts; at least `stall`.
      restart: from a failure to the next step.
      mean_time: between failures of any of its hosts.
    """

    work: float
    stall: float
    write: float
    restart: float
    mean_time: float


def young(job: Job) -> float:
    """Returns Young's interval between checkpoints, the square root of 2 stall mean_time."""
    return math.sqrt(2 * job.stall * job.mean_time)


def simulate(
    job: Job, interval: float, runs: int = 200, seed: int = 0
) -> Float[np.ndarray, " runs"]:
    """Returns the share of time that is work, of runs with failures drawn at random.

    Args:
      job: what runs.
      interval: work between checkpoints; the end of the run is saved too.
      runs: how many.
      seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    return np.array([job.work / _whole(job, interval, rng) for _ in range(runs)])


def _whole(job: Job, interval: float, rng: np.random.Generator) -> float:
    """Returns the time from the start to the end of one run, inf without progress."""
    period, behind = interval + job.stall, max(0.0, job.write - job.stall)
    left, passed, starting = job.work, 0.0, 0.0
    for _ in range(MOST_FAILURES):
        up = rng.exponential(job.mean_time) - starting
        if up < 0:  # It failed before its first step.
            passed += up + starting
            continue
        saves = math.ceil(left / interval - 1e-9)  # The last at the end.
        needed = left + saves * job.stall + behind
        if up >= needed:
            return passed + starting + needed
        counting = min(max(0, math.floor((up - behind) / period)), saves - 1)
        left -= counting * interval
        passed += starting + up
        starting = job.restart
    return math.inf
