"""Bounds on the time of a step, by cases computed by hand."""

import pytest

from vit_jax.distributed.chips import Chip
from vit_jax.tools.planning import analysis

CHIP = Chip(
    "round numbers",
    ("none",),
    peak_flops=100e12,
    memory_bytes=16e9,
    memory_bandwidth=500e9,
    link_bandwidth=50e9,
)


@pytest.mark.parametrize(
    ("flops", "moved", "hidden", "shown", "floor", "bound"),
    [
        (2e12, 1e9, 0.0, 0.0, 0.02, "compute"),  # 20 ms of products, 2 of memory.
        (1e11, 2e9, 0.0, 0.0, 0.004, "memory"),  # 1 ms and 4.
        (2e12, 1e9, 5e8, 0.0, 0.02, "compute"),  # 10 ms hide behind the 20 ...
        (2e12, 1e9, 0.0, 5e8, 0.03, "compute"),  # ... and come on top if they do not.
        (2e12, 1e9, 2e9, 5e8, 0.05, "links"),  # 40 ms hide nothing any more, 10 on top.
    ],
)
def test_the_floor_is_the_slowest_part_and_what_nothing_hides(
    flops, moved, hidden, shown, floor, bound
):
    found = analysis.estimate_roofline(CHIP, flops, moved, hidden, shown)
    assert found.floor == pytest.approx(floor)
    assert found.bound == bound


def test_a_chip_without_links_computes_alone():
    alone = Chip("alone", ("none",), 100e12, 16e9, 500e9)
    assert analysis.estimate_roofline(
        alone, 2e12, 1e9, 0.0, 0.0
    ).floor == pytest.approx(0.02)
