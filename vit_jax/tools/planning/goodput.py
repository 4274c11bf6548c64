"""Goodput: the fraction of a run's time that is useful work, despite failing hosts.

After every interval the job stalls while the state is copied from the devices. It then
works while the checkpoint is written, after which the checkpoint can be restored. A
failure restarts the job from the newest such checkpoint. Failures are a Poisson process
and also happen during restarts. All times are in seconds.

Source: Young, "A first order approximation to the optimum checkpoint interval", CACM
17(9), 1974.
"""

import dataclasses
import math

import numpy as np
from jaxtyping import Float

MOST_FAILURES = 2_000  # Runs with more failures are taken to make no progress.


@dataclasses.dataclass(frozen=True)
class Job:
    """A run, its checkpoints and its failures; all times are in seconds.

    Attributes:
      work: time of all steps.
      stall: time for which a checkpoint stops the steps.
      write: time from the start of a checkpoint until it can be restored; at least
        `stall`.
      restart: time from a failure to the next step.
      mean_time: mean time between failures of any host.
    """

    work: float
    stall: float
    write: float
    restart: float
    mean_time: float


def young(job: Job) -> float:
    """Returns Young's interval between checkpoints: sqrt(2 * stall * mean_time)."""
    return math.sqrt(2 * job.stall * job.mean_time)


def simulate(
    job: Job, interval: float, runs: int = 200, seed: int = 0
) -> Float[np.ndarray, " runs"]:
    """Returns the fraction of time that is useful work, for runs with random failures.

    Args:
      job: the run.
      interval: work between checkpoints, in seconds; the end of the run is saved too.
      runs: number of simulated runs.
      seed: seed of the failures.
    """
    rng = np.random.default_rng(seed)
    return np.array([job.work / _duration(job, interval, rng) for _ in range(runs)])


def _duration(job: Job, interval: float, rng: np.random.Generator) -> float:
    """Returns the duration of one simulated run; inf without progress."""
    period, behind = interval + job.stall, max(0.0, job.write - job.stall)
    left, passed, starting = job.work, 0.0, 0.0
    for _ in range(MOST_FAILURES):
        up = rng.exponential(job.mean_time) - starting
        if up < 0:  # The job failed before its first step.
            passed += up + starting
            continue
        saves = math.ceil(left / interval - 1e-9)  # The last one is at the end.
        needed = left + saves * job.stall + behind
        if up >= needed:
            return passed + starting + needed
        counting = min(max(0, math.floor((up - behind) / period)), saves - 1)
        left -= counting * interval
        passed += starting + up
        starting = job.restart
    return math.inf
