"""Peak FLOPs, memory and bandwidth of accelerators, as their makers state them.

All numbers are per JAX device. On TPU v2, v3 and 7x that is one of a chip's two cores; on
v4 and v5p both cores act as one device ("megacore"). None of them is reached in
practice: measured numbers are divided by them.

Looked up in November 2026, unless stated otherwise:
- Google Cloud, "TPU v3", "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x (Ironwood)"
  (docs.cloud.google.com/tpu/docs/v3 and so on): operations, memory and its bandwidth,
  and from v5e on the interconnect, which they give in both directions together (400,
  1,200, 800 and 1,200 GB/s a chip).
- All of v2, and the links of v3: Jouppi et al., "A domain-specific supercomputer for
  training deep neural networks", CACM 63(7), 2020, table 3. They were found where XLA's
  own cost model of all-reduces cites it, not in the paper. "TPU v4" (below) has 70 GB/s
  for a link of v3 and not 82; the larger one stands here, because a floor is made of it.
- Links of v4, 6 of 50 GB/s: Jouppi et al., "TPU v4", ISCA 2023 (arXiv:2304.01433),
  table 4, as others quote it.
- NVIDIA's data sheets of V100, T4, A10, A100, L4, L40S, H100 and H200, and of Blackwell
  (HGX B200, HGX B300), as others quote them: NVIDIA's own pages could not be read.
  Operations are stated "with sparsity" from A100 on; here is half of that. NVLink is
  stated in both directions together; half of it here.
- Not confirmed: the memory's bandwidth and the NVLink of GH200.
"""

import dataclasses

GB, TB, GIB = 1e9, 1e12, 2.0**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of JAX device.

    Attributes:
      name: name for messages.
      kinds: values of `device.device_kind`.
      peak_flops: dense bfloat16 operations per second, 2 per multiply-accumulate; of
        float16 where there is no bfloat16 (V100, T4).
      memory_bytes: size of its own memory (HBM or GDDR).
      memory_bandwidth: bytes per second, read and written together.
      link_bandwidth: bytes per second that it can send to other devices, over all of
        its links at once (ICI or NVLink, also of a bridge between cards); 0 if none.
      cores: number of a TPU's cores that are one device.
    """

    name: str
    kinds: tuple[str, ...]
    peak_flops: float
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float = 0.0
    cores: int = 1


CHIPS = (
    # 4 links of 496 and 656 Gbit/s a chip, which has two devices.
    Chip("TPU v2 core", ("TPU v2",), 23e12, 8 * GIB, 350 * GB, 124 * GB),
    Chip("TPU v3 core", ("TPU v3",), 61.5e12, 16 * GIB, 450 * GB, 164 * GB),
    Chip("TPU v4", ("TPU v4",), 275e12, 32 * GIB, 1_200 * GB, 300 * GB, cores=2),
    Chip(
        "TPU v5e",
        ("TPU v5 lite", "TPU v5e"),
        197e12,
        16 * GIB,
        819 * GB,
        200 * GB,
    ),
    Chip(
        "TPU v5p",
        ("TPU v5", "TPU v5p"),
        459e12,
        95 * GIB,
        2_765 * GB,
        600 * GB,
        cores=2,
    ),
    Chip(
        "TPU v6e",
        ("TPU v6 lite", "TPU v6e"),
        918e12,
        32 * GIB,
        1_638 * GB,
        400 * GB,
    ),
    Chip("TPU 7x core", ("TPU7x",), 1_153.5e12, 96 * GIB, 3_690 * GB, 300 * GB),
    Chip(
        "V100 SXM2 16 GB",
        ("Tesla V100-SXM2-16GB",),
        125e12,
        16 * GB,
        900 * GB,
        150 * GB,
    ),
    Chip(
        "V100 SXM2 32 GB",
        ("Tesla V100-SXM2-32GB",),
        125e12,
        32 * GB,
        900 * GB,
        150 * GB,
    ),
    Chip("V100 PCIe 16 GB", ("Tesla V100-PCIE-16GB",), 112e12, 16 * GB, 900 * GB),
    Chip("T4", ("Tesla T4",), 65e12, 16 * GB, 320 * GB),
    Chip("A10", ("NVIDIA A10",), 125e12, 24 * GB, 600 * GB),
    Chip(
        "A100 SXM4 40 GB",
        ("NVIDIA A100-SXM4-40GB",),
        312e12,
        40 * GB,
        1_555 * GB,
        300 * GB,
    ),
    Chip(
        "A100 SXM4 80 GB",
        ("NVIDIA A100-SXM4-80GB",),
        312e12,
        80 * GB,
        2_039 * GB,
        300 * GB,
    ),
    Chip(
        "A100 PCIe 40 GB",
        ("NVIDIA A100-PCIE-40GB",),
        312e12,
        40 * GB,
        1_555 * GB,
        300 * GB,
    ),
    Chip(
        "A100 PCIe 80 GB",
        ("NVIDIA A100 80GB PCIe",),
        312e12,
        80 * GB,
        1_935 * GB,
        300 * GB,
    ),
    Chip("L4", ("NVIDIA L4",), 121e12, 24 * GB, 300 * GB),
    Chip("L40S", ("NVIDIA L40S",), 362e12, 48 * GB, 864 * GB),
    Chip(
        "H100 SXM5", ("NVIDIA H100 80GB HBM3",), 989.5e12, 80 * GB, 3.35 * TB, 450 * GB
    ),
    Chip("H100 PCIe", ("NVIDIA H100 PCIe",), 756.5e12, 80 * GB, 2 * TB, 300 * GB),
    Chip("H100 NVL", ("NVIDIA H100 NVL",), 835.5e12, 94 * GB, 3.9 * TB, 300 * GB),
    Chip("GH200", ("NVIDIA GH200 480GB",), 989.5e12, 96 * GB, 4 * TB, 450 * GB),
    Chip("H200 SXM", ("NVIDIA H200",), 989.5e12, 141 * GB, 4.8 * TB, 450 * GB),
    Chip("H200 NVL", ("NVIDIA H200 NVL",), 835.5e12, 141 * GB, 4.8 * TB, 450 * GB),
    Chip("B200", ("NVIDIA B200",), 2_250e12, 180 * GB, 7.7 * TB, 900 * GB),
    Chip(
        "B300",
        ("NVIDIA B300", "NVIDIA B300 SXM6 AC"),
        2_250e12,
        270 * GB,
        7.7 * TB,
        900 * GB,
    ),
)

_BY_KIND = {kind: chip for chip in CHIPS for kind in chip.kinds}


def find(device_kind: str) -> Chip | None:
    """Returns the chip of JAX's device kind, such as "TPU v5 lite"; None for MIG."""
    return _BY_KIND.get(device_kind)
