"""What is known of accelerators."""

import pytest

from vit_jax.distributed import chips


@pytest.mark.parametrize("kind", ["cpu", "TPU v9", "NVIDIA H200 MIG 1g.18gb", ""])
def test_what_is_not_known_is_none_rather_than_a_guess(kind):
    assert chips.find(kind) is None


@pytest.mark.parametrize("chip", chips.CHIPS, ids=lambda chip: chip.name)
def test_numbers_of_a_chip_have_the_right_magnitude(chip):
    assert {chips.find(kind) for kind in chip.kinds} == {chip}  # None stands twice.
    assert 1e13 < chip.peak_flops < 1e16
    assert 7e9 < chip.memory_bytes < 1e12
    # No chip reads its memory faster than 60 or slower than 12 times a second.
    assert 12 < chip.memory_bandwidth / chip.memory_bytes < 60
    assert 0 <= chip.link_bandwidth < chip.memory_bandwidth
    # Operations a byte: the ridge of the roofline.
    assert 60 < chip.peak_flops / chip.memory_bandwidth < 600


# Of the makers' pages, each number as it stands there: TFLOP/s, "sparse" where that is
# twice as many; GB/s of memory; GB/s of links in both directions together. And how many
# devices it is.
PUBLISHED = {
    "TPU v2": (46, 700, 2 * 4 * 496 / 8, 2),
    "TPU v3": (123, 900, 2 * 4 * 656 / 8, 2),
    "TPU v4": (275, 1_200, 2 * 6 * 50, 1),
    "TPU v5 lite": (197, 819, 400, 1),
    "TPU v5": (459, 2_765, 1_200, 1),
    "TPU v6 lite": (918, 1_638, 800, 1),
    "TPU7x": (2_307, 7_380, 1_200, 2),
    "Tesla V100-SXM2-16GB": (125, 900, 300, 1),
    "Tesla V100-PCIE-16GB": (112, 900, 0, 1),
    "Tesla T4": (65, 320, 0, 1),
    "NVIDIA A10": (125, 600, 0, 1),
    "NVIDIA A100-SXM4-40GB": (624 / 2, 1_555, 600, 1),
    "NVIDIA A100-SXM4-80GB": (624 / 2, 2_039, 600, 1),
    "NVIDIA A100-PCIE-40GB": (624 / 2, 1_555, 600, 1),
    "NVIDIA A100 80GB PCIe": (624 / 2, 1_935, 600, 1),
    "NVIDIA L4": (242 / 2, 300, 0, 1),
    "NVIDIA L40S": (362, 864, 0, 1),
    "NVIDIA H100 80GB HBM3": (1_979 / 2, 3_350, 900, 1),
    "NVIDIA H100 PCIe": (1_513 / 2, 2_000, 600, 1),
    "NVIDIA H100 NVL": (1_671 / 2, 3_900, 600, 1),
    "NVIDIA H200": (1_979 / 2, 4_800, 900, 1),
    "NVIDIA H200 NVL": (1_671 / 2, 4_800, 900, 1),
    "NVIDIA B200": (36_000 / 8 / 2, 7_700, 1_800, 1),
    "NVIDIA B300": (36_000 / 8 / 2, 7_700, 1_800, 1),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_chip_is_what_its_makers_page_says(kind):
    chip = chips.find(kind)
    peak, memory, links, devices = PUBLISHED[kind]
    assert devices * chip.peak_flops == pytest.approx(peak * 1e12)
    assert devices * chip.memory_bandwidth == pytest.approx(memory * 1e9)
    assert devices * 2 * chip.link_bandwidth == pytest.approx(links * 1e9)


def test_a_device_of_a_tpu_has_its_share_of_the_chips_memory():
    shares = {"TPU v2": 16 / 2, "TPU v3": 32 / 2, "TPU v4": 32, "TPU v5": 95}
    shares |= {"TPU v5 lite": 16, "TPU v6 lite": 32, "TPU7x": 192 / 2}
    found = {kind: chips.find(kind).memory_bytes / 2**30 for kind in shares}
    assert found == shares
