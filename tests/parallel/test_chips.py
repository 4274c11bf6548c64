"""What is known of accelerators."""

import pytest

from vit_jax.parallel import chips


def test_no_device_kind_stands_twice():
    kinds = [kind for chip in chips.CHIPS for kind in chip.kinds]
    assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v2", "TPU v2 core"),
        ("TPU v3", "TPU v3 core"),
        ("TPU v4", "TPU v4"),
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("TPU v6 lite", "TPU v6e"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2 16 GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM4 40 GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM5"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA B200", "B200"),
    ],
)
def test_a_chip_is_found_by_what_jax_calls_it(kind, name):
    assert chips.find(kind).name == name


@pytest.mark.parametrize("kind", ["cpu", "TPU v9", "NVIDIA H200 MIG 1g.18gb", ""])
def test_what_is_not_known_is_none_rather_than_a_guess(kind):
    assert chips.find(kind) is None


@pytest.mark.parametrize("chip", chips.CHIPS, ids=lambda chip: chip.name)
def test_numbers_of_a_chip_have_the_right_magnitude(chip):
    assert 1e13 < chip.peak_flops < 1e16
    assert 7e9 < chip.memory_bytes < 1e12
    # No chip reads its memory faster than 60 or slower than 12 times a second.
    assert 12 < chip.memory_bandwidth / chip.memory_bytes < 60
    assert 0 <= chip.link_bandwidth < chip.memory_bandwidth
    # Operations a byte: the ridge of the roofline.
    assert 60 < chip.peak_flops / chip.memory_bandwidth < 600


def test_two_cores_of_a_v3_are_one_chip_of_the_makers_page():
    core = chips.find("TPU v3")
    assert 2 * core.peak_flops == 123e12
    assert 2 * core.memory_bytes == 32 * 2**30
