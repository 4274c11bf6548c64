"""Bounds on the time of a step, by cases computed by hand."""

import dataclasses

import pytest

from vit_jax.distributed.chips import Chip
from vit_jax.tools.planning import analysis, costs

CHIP = Chip(
    "round numbers",
    ("none",),
    peak_flops=100e12,
    memory_bytes=16e9,
    memory_bandwidth=500e9,
    link_bandwidth=50e9,
)


def sending(size, overlapped):
    """Returns a collective in which a device sends `size` bytes."""
    kind = "collective-permute"
    return costs.Collective(kind, "f32", overlapped, 8, int(size), 1)


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
    collectives = [sending(hidden, True), sending(shown, False)]
    found = analysis.estimate_roofline(CHIP, flops, moved, collectives)
    assert found.floor == pytest.approx(floor)
    assert found.bound == bound


def test_a_chip_without_links_computes_alone():
    alone = Chip("alone", ("none",), 100e12, 16e9, 500e9)
    found = analysis.estimate_roofline(alone, 2e12, 1e9, [sending(1e9, False)])
    assert found.floor == pytest.approx(0.02)


def test_links_and_network_send_at_the_same_time():
    chip = dataclasses.replace(CHIP, network_bandwidth=10e9)
    # 4 of 2 hosts: 2 GB within a host take 40 ms, a half of that to the other one 100.
    one = costs.Collective("all-reduce", "f32", True, 4, int(2e9), 1, hosts=2)
    found = analysis.estimate_roofline(chip, 2e12, 1e9, [one])
    assert (one.sent, one.network) == (2e9, 1e9)
    assert (found.overlapped, found.bound) == (pytest.approx(0.1), "links")
    # Of 2 slices: all goes over the network, at the speed of the links if it is unknown.
    one = dataclasses.replace(one, devices=2, hosts=1, slices=True)
    found = analysis.estimate_roofline(chip, 2e12, 1e9, [one])
    assert found.overlapped == pytest.approx(0.2)
    found = analysis.estimate_roofline(CHIP, 2e12, 1e9, [one])
    assert found.overlapped == pytest.approx(0.04)
