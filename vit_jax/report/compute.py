"""What a run has computed, and what that is in the paper's unit.

The paper (arXiv:2010.11929) states compute in two ways: exaFLOPs in its table 6, and
"TPUv3-core-days", the number of cores times the days of pretraining, in its table 2. The
core-days of other devices are no measure of the same thing, so ours are an equivalent:
the exaFLOPs of a run, divided by the exaFLOPs that a core of the paper's own runs did in
a day. Both numbers are published for ViT-L/16 and ViT-H/14, 14 epochs of JFT-300M each:
(1567 + 4262) exaFLOPs in (680 + 2500) core-days, 1.83 exaFLOPs a core-day, 34 % of the
peak of a TPU v3 core. The two runs alone would give 2.30 and 1.70, so that an equivalent
is good to about a quarter.
"""

import functools

from vit_jax.report import published

# Table 2's column of core-days, and the row of table 6 of the same run.
_BOTH = (("L/16 JFT", "ViT-L/16"), ("H/14 JFT", "ViT-H/14"))
_EPOCHS = 14
_DAY = 86_400  # Seconds.


def record(
    *,
    images: int,
    exaflops: float,
    device_kind: str,
    devices: int,
    device_seconds: float,
) -> dict:
    """Returns what a run records of its compute.

    Args:
      images: seen in training, each epoch's counted.
      exaflops: 6 for each multiply-accumulate of the forward pass of each image, as in
        table 6 (models/cost.py), whichever parameters are trained.
      device_kind: as JAX says it.
      devices: at the end of the run.
      device_seconds: of all starts, each start's seconds times its devices. What counts
        is the time in which the devices were taken: compiling, evaluating and saving
        with it, and not what a killed start did after its last checkpoint.

    Returns:
      "images_seen", "exaflops", "device_kind", "devices", "device_days" and
      "tpuv3_core_days".
    """
    return {
        "images_seen": images,
        "exaflops": exaflops,
        "device_kind": device_kind,
        "devices": devices,
        "device_days": device_seconds / _DAY,
        "tpuv3_core_days": exaflops / exaflops_a_core_day(),
    }


@functools.cache
def exaflops_a_core_day() -> float:
    """Returns what a TPU v3 core did in a day of the paper's pretraining."""
    tables = published.tables()
    days = dict(
        zip(tables["table2"]["cols"], tables["table2"]["TPUv3-core-days"], strict=True)
    )
    done = {(row[0], row[1]): row[-1] for row in tables["table6"]["rows"]}
    return sum(done[name, _EPOCHS] for _, name in _BOTH) / sum(
        days[column] for column, _ in _BOTH
    )
