"""Plans a whole run: days, hosts, checkpoints and failures, from the costs of a step.

Properties that the compiled program does not show are assumptions, measured or guessed,
which `compile --plan=name=value,...` changes. The report prints all of them.
"""

import dataclasses
import math
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.tools.planning import goodput
from vit_jax.tools.planning.analysis import Analysis
from vit_jax.tools.planning.goodput import Job
from vit_jax.tools.planning.report import line

HOUR, DAY = 3_600.0, 86_400.0
_RUNS = 100
_FACTORS = 0.25, 0.5, 1.0, 2.0, 4.0  # Simulated intervals, as multiples of Young's.


# Description in the report, by source of an assumption.
_SOURCES = {
    "measured": "measured by us, not on a TPU (docs/benchmarks.md)",
    "published": "published (docs/compile.md)",
    "assumed": "assumed",
    "flag": "set by --plan",
}


def _by(source: str, default: float) -> Any:
    """Declares an assumption with its source, a key of _SOURCES."""
    return dataclasses.field(default=default, metadata={"source": source})


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """Properties that the compiler does not know; docs/compile.md has their sources.

    Attributes:
      mfu: fraction of the chips' peak that the model's products reach.
      dcn: GB per second that a TPU sends to other slices.
      host_days: mean number of days between failures of a host, including its chips.
      notice: seconds until the loss of a host is detected and the other hosts have
        exited.
      replace: seconds until the scheduler has restarted the job.
      start: seconds from the start of the processes to the first step, without
        restoring.
      copy: GB per second that a host copies from its devices, while the steps wait.
      disk_write: GB per second that a host writes to its local disk.
      disk_read: GB per second that a host restores from its local disk.
      store: GB per second that a host writes to or reads from the storage.
      image_bytes: average size of an image file in bytes.
      cpu_images: images per second that one CPU decodes and crops.
      host_cpus: number of CPUs per host.
      price: price per chip and hour.
    """

    mfu: float = _by("assumed", 0.4)
    # 6.4 Tbit/s for 256 chips (Google Cloud, "TPU v5e", November 2026).
    dcn: float = _by("published", 3.125)
    host_days: float = _by("assumed", 365.0)
    notice: float = _by("measured", 40.0)
    replace: float = _by("assumed", 180.0)
    start: float = _by("measured", 20.0)
    copy: float = _by("measured", 1.2)
    disk_write: float = _by("measured", 0.56)
    disk_read: float = _by("measured", 0.57)
    store: float = _by("assumed", 0.5)
    # The training files of ImageNet: 138 GB for 1.28 million images.
    image_bytes: float = _by("published", 110_000.0)
    cpu_images: float = _by("measured", 776.0)
    # ct5lp-hightpu-4t, 4 chips of v5e (from the page above).
    host_cpus: float = _by("published", 112.0)
    price: float = _by("assumed", 0.0)


_MOST = {"mfu": 1.0}
_ZERO_ALLOWED = ("notice", "price", "replace", "start")


def parse(text: str) -> Assumptions:
    """Parses assumptions: "mfu=0.5,price=1.2".

    Raises:
      UserError: a name is unknown, or a value is not a positive number.
    """
    known = {field.name for field in dataclasses.fields(Assumptions)}
    values = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in known:
            raise UserError(
                f"--plan: {name!r} is not one of {', '.join(sorted(known))}: correct it"
            )
        try:
            values[name] = float(value)
        except ValueError:
            values[name] = -1.0
        least = 0.0 if name in _ZERO_ALLOWED else 1e-9
        most = _MOST.get(name, sys.float_info.max)
        if not least <= values[name] <= most:
            bound = f" of at most {most:g}" if name in _MOST else ""
            raise UserError(
                f"--plan: {item!r} is not a positive number{bound}: set one"
            )
    return Assumptions(**values)


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Checkpoints in one kind of storage, and the cost of failures with them.

    Attributes:
      place: "local" for the hosts' disks, or "storage".
      key: config key of the interval in steps.
      host_bytes: bytes that a host writes: to its local disk all that its devices hold,
        to the storage an equal share.
      job: the run, for `goodput.simulate`.
      shares: fraction of time that is useful work, one value per simulated run, by
        interval between checkpoints in steps.
      young: Young's interval, in steps.
      stated: interval in the config, in steps; 0 if unset.
    """

    place: str
    key: str
    host_bytes: float
    job: Job
    shares: dict[int, np.ndarray]
    young: int
    stated: int

    @property
    def best(self) -> int:
        """Interval with the highest mean fraction of useful work, in steps."""
        return max(self.shares, key=lambda every: self.shares[every].mean())

    @property
    def goodput(self) -> float:
        """Mean fraction of time that is useful work, at the best interval."""
        return float(self.shares[self.best].mean())


@dataclasses.dataclass(frozen=True)
class Plan:
    """The requirements of a run.

    Attributes:
      chips: number of chips.
      hosts: number of hosts.
      steps: number of training steps.
      images: images per step.
      step_seconds: time of a step: the maximum of the lower bound, the time of the
        products at `mfu`, and the time of the bytes between slices at `dcn`.
      bound: the largest of these three: "floor", "mfu" or "dcn".
      sent_bytes: bytes that a chip sends per step, over links within its slice or host,
        and over the network between slices or hosts.
      state_bytes: size of a checkpoint.
      checkpoints: checkpoints on the hosts' disks and on the storage.
    """

    chips: int
    hosts: int
    steps: int
    images: int
    step_seconds: float
    bound: str
    sent_bytes: tuple[float, float]
    state_bytes: int
    checkpoints: tuple[Checkpoints, Checkpoints]

    @property
    def images_per_second(self) -> float:
        return self.images / self.step_seconds

    @property
    def days_of_steps(self) -> float:
        return self.steps * self.step_seconds / DAY

    @property
    def days(self) -> float:
        """Total number of days, with the cheaper kind of checkpoints."""
        return self.days_of_steps / max(each.goodput for each in self.checkpoints)

    @property
    def chip_hours(self) -> float:
        return self.days * 24 * self.chips

    def input_hosts(self, assumed: Assumptions) -> int:
        """Returns the number of hosts whose CPUs can decode and crop the images."""
        cpus = self.images_per_second / assumed.cpu_images
        return math.ceil(cpus / assumed.host_cpus)


def make(
    analysis: Analysis,
    chips: int,
    hosts: int,
    steps: int,
    intervals: tuple[int, int],
    peak: float,
    assumed: Assumptions,
) -> Plan:
    """Returns the plan of a run.

    Args:
      analysis: analysis of a step that fits, on a known chip.
      chips: number of chips.
      hosts: number of hosts.
      steps: number of training steps.
      intervals: steps between checkpoints on the hosts' disks and on the storage; 0 if
        the config sets no interval.
      peak: operations per second of a chip.
      assumed: properties that the compiler does not know.

    Raises:
      UserError: hosts fail so often that the run makes no progress.
    """
    rows = analysis.collectives
    links = sum(one["sent"] for one in rows if not one["slices"])
    slices = sum(one["sent"] for one in rows if one["slices"])
    network = sum(one["network"] for one in rows)  # For GPUs, the floor includes it.
    times = {
        "floor": analysis.roofline.floor,
        "mfu": analysis.model_flops / (peak * assumed.mfu),
        "dcn": slices / (assumed.dcn * 1e9),
    }
    bound = max(times, key=times.get)
    seconds = times[bound]
    return Plan(
        chips=chips,
        hosts=hosts,
        steps=steps,
        images=analysis.settings["batch_size"],
        step_seconds=seconds,
        bound=bound,
        sent_bytes=(links, slices + network),
        state_bytes=analysis.state_bytes,
        checkpoints=_simulated(analysis, hosts, steps, seconds, intervals, assumed),
    )


def _simulated(
    analysis: Analysis,
    hosts: int,
    steps: int,
    seconds: float,
    intervals: tuple[int, int],
    assumed: Assumptions,
) -> tuple[Checkpoints, ...]:
    """Returns the checkpoints of a run with a given time per step, see `make`."""
    down = assumed.notice + assumed.replace + assumed.start
    held = analysis.host_state_bytes  # Every host restores what its devices hold.
    stall = held / (assumed.copy * 1e9)
    shared = analysis.state_bytes / hosts
    disks = "local", "local_checkpoint.every_steps", held
    storage = "storage", "checkpoint_every_steps", shared
    checkpoints = []
    for (place, key, size), write, read, every in (
        (disks, assumed.disk_write, assumed.disk_read, intervals[0]),
        (storage, assumed.store, assumed.store, intervals[1]),
    ):
        job = Job(
            work=steps * seconds,
            stall=stall,
            write=stall + size / (write * 1e9),
            restart=down + held / (read * 1e9),
            mean_time=assumed.host_days * DAY / hosts,
        )
        young = max(1, round(goodput.young(job) / seconds))
        tried = {min(steps, max(1, round(young * factor))) for factor in _FACTORS}
        tried |= {every} if every else set()
        shares = {n: goodput.simulate(job, n * seconds, _RUNS) for n in sorted(tried)}
        if not any(share.any() for share in shares.values()):
            raise UserError(
                f"--plan: with host_days={assumed.host_days:g} one of {hosts:,} hosts "
                f"fails every {job.mean_time:.3g} s, and the run does not end within "
                f"{goodput.MOST_FAILURES:,} failures: set a larger host_days"
            )
        checkpoints.append(
            Checkpoints(place, key, float(size), job, shares, young, every)
        )
    return tuple(checkpoints)


def to_json(plan: Plan, assumed: Assumptions, examples: int = 0) -> dict:
    """Returns the plan as plain numbers, with the mean fraction for each interval.

    Args:
      plan, assumed, examples: arguments of `text`.
    """
    row = dataclasses.asdict(plan)
    for shown, each in zip(row["checkpoints"], plan.checkpoints, strict=True):
        shares = {n: float(share.mean()) for n, share in each.shares.items()}
        shown |= {"shares": shares, "best": each.best, "goodput": each.goodput}
    row |= {
        "images_per_second": plan.images_per_second,
        "input_hosts": plan.input_hosts(assumed),
        "days": plan.days,
        "chip_hours": plan.chip_hours,
    }
    more = {"examples": examples} if examples else {}
    return row | {"assumed": dataclasses.asdict(assumed) | more}


def text(plan: Plan, assumed: Assumptions, examples: int = 0) -> Iterable[str]:
    """Yields the lines of the report about a plan.

    Args:
      plan: result of `make`.
      assumed: assumptions of the plan.
      examples: number of training examples if it is assumed; 0 if it is known.
    """
    yield "The run"
    yield line("steps", f"{plan.steps:,}", f"of {plan.images:,} images")
    yield line(
        "ms per step",
        f"{plan.step_seconds * 1e3:.1f}",
        f"{plan.images_per_second:,.0f} images/s; by {plan.bound}",
    )
    yield line("days of steps", f"{plan.days_of_steps:.2f}", "")
    yield line("MB sent/chip, links", f"{plan.sent_bytes[0] / 1e6:,.1f}", "per step")
    yield line("MB sent/chip, network", f"{plan.sent_bytes[1] / 1e6:,.1f}", "per step")
    yield ""
    yield from _input(plan, assumed)
    for each in plan.checkpoints:
        yield ""
        yield from _checkpoints(plan, each)
    best = max(plan.checkpoints, key=lambda each: each.goodput)
    yield ""
    yield "In total"
    yield line("days", f"{plan.days:.2f}", f"--config.{best.key}={best.best}")
    cost = f"{plan.chip_hours * assumed.price:,.0f} at {assumed.price:g} each"
    cost *= bool(assumed.price)
    yield line("chip-hours", f"{plan.chip_hours:,.0f}", cost)
    yield from _sources(assumed, examples)


def _input(plan, assumed):
    rate = plan.images_per_second
    yield f"Input of {plan.hosts:,} hosts"
    yield line("images/s per host", f"{rate / plan.hosts:,.0f}", "")
    cpus = rate / plan.hosts / assumed.cpu_images
    yield line("CPUs per host", f"{cpus:.1f}", "always decoding and cropping")
    yield line(
        "hosts needed",
        f"{plan.input_hosts(assumed):,}",
        f"with {assumed.host_cpus:g} CPUs each",
    )
    read = rate * assumed.image_bytes / 1e9
    yield line("GB/s read, all hosts", f"{read:.2f}", "")


def _checkpoints(plan, checkpoints):
    places = {"local": "the hosts' disks", "storage": "the storage"}
    job = checkpoints.job
    yield f"Checkpoints on {places[checkpoints.place]}, and failures"
    yield line("GB per checkpoint", f"{plan.state_bytes / 1e9:.2f}", "")
    yield line("GB written per host", f"{checkpoints.host_bytes / 1e9:.2f}", "")
    yield line("seconds of stall", f"{job.stall:.1f}", "the steps wait for the copy")
    yield line("seconds until restorable", f"{job.write:.1f}", "")
    yield line("seconds per restart", f"{job.restart:.0f}", "including restoring")
    yield line("hours between failures", f"{job.mean_time / HOUR:.1f}", "of any host")
    yield line("failures", f"{job.work / job.mean_time:.1f}", "in the days of steps")
    yield f"  fraction of time that is useful work, {_RUNS} simulated runs each:"
    yield "  {:>10} {:>9} {:>8} {:>8} {:>8}".format(
        "steps", "seconds", "mean", "5 %", "95 %"
    )
    for every, shares in checkpoints.shares.items():
        low, high = np.quantile(shares, (0.05, 0.95))
        notes = ["Young's"] * (every == checkpoints.young)
        notes += ["the config's"] * (every == checkpoints.stated)
        yield (
            f"  {every:>10,} {every * plan.step_seconds:>9,.0f} {shares.mean():>8.2%} "
            f"{low:>8.2%} {high:>8.2%}  {', '.join(notes)}"
        ).rstrip()


def _sources(assumed, examples):
    """Yields the assumptions, one line per source."""
    by_source = {source: [] for source in _SOURCES}
    if examples:
        by_source["assumed"].append(f"--examples={examples}")
    for field in dataclasses.fields(assumed):
        value = getattr(assumed, field.name)
        source = "flag" if value != field.default else field.metadata["source"]
        by_source[source].append(f"{field.name}={value:g}")
    for source, items in by_source.items():
        if items:
            yield f"  {_SOURCES[source]}: {', '.join(items)}"
