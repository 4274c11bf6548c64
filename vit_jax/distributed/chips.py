"""Peak FLOPs, memory and bandwidth of accelerators, from their makers.

All numbers are per JAX device. On TPU v2, v3 and 7x that is one of a chip's two cores;
on v4 and v5p both cores act as one device ("megacore"). None of these peaks is reached
in practice: utilisation is a measured number divided by one of them.

Looked up in November 2026:
- Google Cloud, "TPU v3", "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x
  (Ironwood)" (docs.cloud.google.com/tpu/docs/v3 and so on): operations, memory and its
  bandwidth, and from v5e on the interconnect, which they give in both directions
  together (400, 1,200, 800 and 1,200 GB/s per chip).
- All of v2, and the links of v3: Jouppi et al., "A domain-specific supercomputer for
  training deep neural networks", CACM 63(7), 2020, table 3: 4 links of 496 and 656
  Gbit/s per chip. These were read in XLA's cost model of all-reduces, which cites the
  table, not in the paper. "TPU v4" (below) has 70 GB/s for a link of v3 instead of 82;
  the larger number is used here, because lower bounds of times are computed from it.
- Links of v4, 6 of 50 GB/s: Jouppi et al., "TPU v4", ISCA 2023 (arXiv:2304.01433),
  table 4, as others quote it.
- NVIDIA's data sheets of V100, T4, A10, A100, L4, L40S, H100 and H200, and of Blackwell
  (HGX B200, HGX B300), as others quote them: NVIDIA's pages could not be read. From
  A100 on they give operations "with sparsity", and NVLink in both directions together;
  the numbers here are half of each.
- Network between TPU slices: "TPU v6e" has 6.4 Tbit/s for 256 chips of v5e and 25.6 for
  256 of v6e.
- Network: one adapter per GPU, with 200 Gbit/s in hosts of 8 A100 (HDR) and 400 Gbit/s
  in hosts of 8 H100 and H200 (NDR) and B200 (ConnectX-7, by MLPerf's system
  descriptions).
- Not confirmed: the memory's bandwidth and the NVLink of GH200.
"""

import dataclasses

GB, GIB = 1e9, 2.0**30
# Packages that affect programs for NVIDIA GPUs, besides jax; those of one CUDA version
# are installed.
CUDA_PACKAGES = (
    *("jax-cuda12-plugin", "nvidia-cudnn-cu12"),
    *("jax-cuda13-plugin", "nvidia-cudnn-cu13"),
)


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of JAX device.

    Attributes:
      name: name for messages.
      kinds: values of `device.device_kind`.
      peak_flops: dense bfloat16 operations per second, 2 per multiply-accumulate;
        float16 operations if the chip has no bfloat16 (V100, T4).
      memory_bytes: size of its memory (HBM or GDDR).
      memory_bandwidth: bytes per second, read and written together.
      link_bandwidth: bytes per second that it can send to other devices, over all of
        its links at once (ICI or NVLink, also of a bridge between cards); 0 if none.
      network_bandwidth: bytes per second that it can send to other hosts, or as a TPU,
        whose links reach other hosts, to other slices; 0 if unknown.
      cores: number of TPU cores that act as one device.
    """

    name: str
    kinds: tuple[str, ...]
    peak_flops: float
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float = 0.0
    network_bandwidth: float = 0.0
    cores: int = 1


# Links and network in GB/s; a further column is `cores`, if it is not 1.
# name            | kinds                            | TFLOP/s | memory |  GB/s | links | network
_TABLE = """
TPU v2 core     | TPU v2                           |      23 |  8 GiB |   350 |   124 |       0
TPU v3 core     | TPU v3                           |    61.5 | 16 GiB |   450 |   164 |       0
TPU v4          | TPU v4                           |     275 | 32 GiB | 1,200 |   300 |       0 | 2
TPU v5e         | TPU v5 lite, TPU v5e             |     197 | 16 GiB |   819 |   200 |   3.125
TPU v5p         | TPU v5, TPU v5p                  |     459 | 95 GiB | 2,765 |   600 |       0 | 2
TPU v6e         | TPU v6 lite, TPU v6e             |     918 | 32 GiB | 1,638 |   400 |    12.5
TPU 7x core     | TPU7x                            | 1,153.5 | 96 GiB | 3,690 |   300 |       0
V100 SXM2 16 GB | Tesla V100-SXM2-16GB             |     125 |  16 GB |   900 |   150 |       0
V100 SXM2 32 GB | Tesla V100-SXM2-32GB             |     125 |  32 GB |   900 |   150 |       0
V100 PCIe 16 GB | Tesla V100-PCIE-16GB             |     112 |  16 GB |   900 |     0 |       0
T4              | Tesla T4                         |      65 |  16 GB |   320 |     0 |       0
A10             | NVIDIA A10                       |     125 |  24 GB |   600 |     0 |       0
A100 SXM4 40 GB | NVIDIA A100-SXM4-40GB            |     312 |  40 GB | 1,555 |   300 |      25
A100 SXM4 80 GB | NVIDIA A100-SXM4-80GB            |     312 |  80 GB | 2,039 |   300 |      25
A100 PCIe 40 GB | NVIDIA A100-PCIE-40GB            |     312 |  40 GB | 1,555 |   300 |       0
A100 PCIe 80 GB | NVIDIA A100 80GB PCIe            |     312 |  80 GB | 1,935 |   300 |       0
L4              | NVIDIA L4                        |     121 |  24 GB |   300 |     0 |       0
L40S            | NVIDIA L40S                      |     362 |  48 GB |   864 |     0 |       0
H100 SXM5       | NVIDIA H100 80GB HBM3            |   989.5 |  80 GB | 3,350 |   450 |      50
H100 PCIe       | NVIDIA H100 PCIe                 |   756.5 |  80 GB | 2,000 |   300 |       0
H100 NVL        | NVIDIA H100 NVL                  |   835.5 |  94 GB | 3,900 |   300 |       0
GH200           | NVIDIA GH200 480GB               |   989.5 |  96 GB | 4,000 |   450 |       0
H200 SXM        | NVIDIA H200                      |   989.5 | 141 GB | 4,800 |   450 |      50
H200 NVL        | NVIDIA H200 NVL                  |   835.5 | 141 GB | 4,800 |   450 |       0
B200            | NVIDIA B200                      |   2,250 | 180 GB | 7,700 |   900 |      50
B300            | NVIDIA B300, NVIDIA B300 SXM6 AC |   2,250 | 270 GB | 7,700 |   900 |       0
"""


def _chip(line: str) -> Chip:
    name, kinds, *numbers = (word.strip() for word in line.split("|"))
    numbers = (n.replace(",", "") for n in numbers)
    flops, memory, bandwidth, links, network, *cores = numbers
    size, unit = memory.split()
    return Chip(
        name,
        tuple(kinds.split(", ")),
        float(flops) * 1e12,
        float(size) * {"GB": GB, "GiB": GIB}[unit],
        float(bandwidth) * GB,
        float(links) * GB,
        float(network) * GB,
        *map(int, cores),
    )


CHIPS = tuple(map(_chip, _TABLE.strip().splitlines()))
_BY_KIND = {kind: chip for chip in CHIPS for kind in chip.kinds}


def find(device_kind: str) -> Chip | None:
    """Returns the chip of JAX's device kind, such as "TPU v5 lite"; None for MIG."""
    return _BY_KIND.get(device_kind)
