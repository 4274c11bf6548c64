"""The least time that a step can take, from what it computes and moves."""

import dataclasses

from vit_jax.parallel.chips import Chip

ASSUMPTIONS = (
    "every product at the chip's bfloat16 peak, nothing else computed",
    "memory at its full bandwidth, all of the time",
    "all links of a chip carry its share at once, between slices as well",
    "a transfer takes no time to begin",
    "asynchronous collectives hide behind computation entirely, others not at all",
)


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Lower bounds, in seconds a step.

    Attributes:
      compute: of the products.
      memory: of the bytes read and written.
      overlapped: of what asynchronous collectives send.
      exposed: of what the others send.
      floor: of the step. Computation, memory and asynchronous collectives run beside
        each other, and the slowest counts; what other collectives take comes on top.
      bound: which of them is the slowest: "compute", "memory" or "links".
    """

    compute: float
    memory: float
    overlapped: float
    exposed: float

    @property
    def floor(self) -> float:
        return max(self.compute, self.memory, self.overlapped) + self.exposed

    @property
    def bound(self) -> str:
        links = self.overlapped + self.exposed
        times = {"compute": self.compute, "memory": self.memory, "links": links}
        return max(times, key=times.get)


def estimate(
    chip: Chip, flops: float, moved: float, sent_async: float, sent_sync: float
) -> Roofline:
    """Returns the lower bounds of a step.

    Args:
      chip: one device.
      flops: operations that it computes, 2 to a multiply-accumulate.
      moved: bytes that it reads and writes in its memory.
      sent_async: bytes that it sends in asynchronous collectives ...
      sent_sync: ... and in others.
    """

    def over_links(sent):
        # Without links it goes another way, of which nothing is known: still a floor.
        return sent / chip.link_bandwidth if chip.link_bandwidth else 0.0

    return Roofline(
        compute=flops / chip.peak_flops,
        memory=moved / chip.memory_bandwidth,
        overlapped=over_links(sent_async),
        exposed=over_links(sent_sync),
    )
