"""What a whole run needs, from the costs of its step and what is assumed of the place.

Days of work, exchanged bytes, hosts' work on the input, checkpoints, and how much of the
time is work when hosts fail. What is not counted in the program is an assumption, which
`compile --plan=name=value,...` changes; all of them are printed.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from vit_jax.errors import UserError
from vit_jax.tools.planning import goodput
from vit_jax.tools.planning.analysis import Analysis
from vit_jax.tools.planning.goodput import Job
from vit_jax.tools.planning.report import line

HOUR, DAY = 3_600.0, 86_400.0
_RUNS = 100
_AROUND = 0.25, 0.5, 1.0, 2.0, 4.0  # Times Young's interval.


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """What the compiler cannot know.

    Attributes:
      mfu: share of the chips' peak that the model's products reach.
      host_days: mean days between failures of a host, its chips included.
      restart: seconds from a failure to the next step.
      stall: seconds for which a checkpoint holds the steps up.
      store: GB that a host writes to the storage in a second.
      image_bytes: of an image file, on average.
      cpu_images: images that one CPU decodes and crops in a second.
      price: of a chip for an hour.
    """

    mfu: float = 0.4
    host_days: float = 365.0
    restart: float = 300.0
    stall: float = 2.0
    store: float = 0.5
    image_bytes: float = 110_000.0  # ImageNet's training files, 138 GB of 1.28 million.
    cpu_images: float = 776.0  # docs/benchmarks.md, "Input", antialiased.
    price: float = 0.0


def parse(text: str) -> Assumptions:
    """Reads "mfu=0.5,price=1.2".

    Raises:
      UserError: no assumption has the name, or the value is no positive number.
    """
    known = {field.name for field in dataclasses.fields(Assumptions)}
    found = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in known:
            raise UserError(
                f"--plan: {name!r} is no assumption; they are {', '.join(sorted(known))}"
            )
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
        least = 0.0 if name in ("price", "restart") else 1e-9
        if not least <= found[name] < float("inf"):
            raise UserError(f"--plan: {item!r} is not a positive number: state one")
    return Assumptions(**found)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run needs.

    Attributes:
      chips, hosts: number of them.
      steps: of the run.
      images: in a step.
      step_seconds: the longer of the floor and what `mfu` makes of the products.
      sent_bytes: that a chip sends in a step, within its slice and over slices.
      state_bytes: of a checkpoint.
      job: for `goodput`.
      shares: interval between checkpoints, in steps, to the share of the time that is
        work, of each simulated run.
      young: Young's interval, in steps.
      stated: the config's own interval, in steps; 0 if it states none.
    """

    chips: int
    hosts: int
    steps: int
    images: int
    step_seconds: float
    sent_bytes: tuple[float, float]
    state_bytes: int
    job: Job
    shares: dict[int, np.ndarray]
    young: int
    stated: int


def make(
    found: Analysis,
    chips: int,
    hosts: int,
    steps: int,
    stated: int,
    peak: float,
    assumed: Assumptions,
) -> Plan:
    """Returns the plan of a run.

    Args:
      found: of its step, with a program.
      chips: all of them.
      hosts: all of them.
      steps: of the run.
      stated: interval between checkpoints, in steps; 0 if the config states none.
      peak: operations of a chip in a second.
      assumed: of the place.
    """
    seconds = max(found.roofline.floor, found.model_flops / (peak * assumed.mfu))
    write = found.state_bytes / (hosts * assumed.store * 1e9)
    job = Job(
        work=steps * seconds,
        stall=assumed.stall,
        write=max(write, assumed.stall),
        restart=assumed.restart,
        mean_time=assumed.host_days * DAY / hosts,
    )
    young = max(1, round(goodput.young(job) / seconds))
    intervals = {min(steps, max(1, round(young * factor))) for factor in _AROUND}
    intervals |= {stated} if stated else set()
    shares = {
        every: goodput.simulate(job, every * seconds, _RUNS)
        for every in sorted(intervals)
    }
    sent = [0.0, 0.0]
    for one in found.collectives:
        sent[bool(one["slices"])] += one["sent"]
    return Plan(
        chips=chips,
        hosts=hosts,
        steps=steps,
        images=found.settings["batch_size"],
        step_seconds=seconds,
        sent_bytes=(sent[0], sent[1]),
        state_bytes=found.state_bytes,
        job=job,
        shares=shares,
        young=young,
        stated=stated,
    )


def to_json(plan: Plan, assumed: Assumptions) -> dict:
    """Returns the plan as plain numbers, with the means of the shares."""
    shares = {every: float(found.mean()) for every, found in plan.shares.items()}
    row = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    row |= {"shares": shares, "job": dataclasses.asdict(plan.job)}
    return row | {"assumed": dataclasses.asdict(assumed)}


def text(plan: Plan, assumed: Assumptions) -> Iterable[str]:
    """Yields the lines of the report."""
    seconds, job = plan.step_seconds, plan.job
    rate = plan.images / seconds
    yield "The run"
    yield line("steps", f"{plan.steps:,}", f"of {plan.images:,} images")
    yield line(
        "a step, ms", f"{seconds * 1e3:.1f}", f"{rate:,.0f} images/s; floor, or mfu"
    )
    yield line("days of steps", f"{job.work / DAY:.2f}", "")
    yield line("MB a chip sends, slice", f"{plan.sent_bytes[0] / 1e6:,.1f}", "a step")
    yield line("MB a chip sends, slices", f"{plan.sent_bytes[1] / 1e6:,.1f}", "a step")
    yield ""
    yield f"Input of {plan.hosts:,} hosts"
    yield line("images/s a host", f"{rate / plan.hosts:,.0f}", "")
    cpus = rate / plan.hosts / assumed.cpu_images
    yield line("CPUs a host", f"{cpus:.1f}", "that decode and crop, all of the time")
    read = rate * assumed.image_bytes / 1e9
    yield line("GB/s read, all hosts", f"{read:.2f}", "")
    yield ""
    yield "Checkpoints and failures"
    yield line("GB of a checkpoint", f"{plan.state_bytes / 1e9:.2f}", "")
    yield line("seconds until it counts", f"{job.write:.1f}", "by all hosts")
    yield line("hours between failures", f"{job.mean_time / HOUR:.1f}", "of any host")
    yield line("failures", f"{job.work / job.mean_time:.1f}", "in that many days")
    yield f"  share of the time that is work, {_RUNS} simulated runs of each:"
    yield "  {:>10} {:>9} {:>8} {:>8} {:>8}".format(
        "steps", "seconds", "mean", "5 %", "95 %"
    )
    for every, found in plan.shares.items():
        low, high = np.quantile(found, (0.05, 0.95))
        notes = ["Young's"] * (every == plan.young)
        notes += ["the config's"] * (every == plan.stated)
        yield (
            f"  {every:>10,} {every * seconds:>9,.0f} {found.mean():>8.2%} {low:>8.2%} "
            f"{high:>8.2%}  {', '.join(notes)}"
        ).rstrip()
    best = max(plan.shares, key=lambda every: plan.shares[every].mean())
    days = job.work / DAY / plan.shares[best].mean()
    yield line("days in all", f"{days:.2f}", f"--config.checkpoint_every_steps={best}")
    hours = days * 24 * plan.chips
    cost = f"{hours * assumed.price:,.0f} at {assumed.price:g} each" * bool(
        assumed.price
    )
    yield line("chip-hours", f"{hours:,.0f}", cost)
    named = dataclasses.asdict(assumed)
    yield "  assumed: " + ", ".join(
        f"{name}={value:g}" for name, value in named.items()
    )
