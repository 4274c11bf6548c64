"""How well the devices are used, and how full they are."""

import jax

from vit_jax.models import Model, cost
from vit_jax.parallel import chips
from vit_jax.report import compute as accounting


def ideal_seconds(model: Model, device_kind: str) -> float:
    """Returns the seconds in which a device at its peak would train on one image.

    Model FLOPs utilisation is this times the images a second of a device. Counted are 6
    operations to a multiply-accumulate of the forward pass, as in
    `cost.training_exaflops`: what rematerialisation computes again does not count.

    Args:
      model: what is trained.
      device_kind: as JAX says it.

    Returns:
      0 if the peak of the device is not known, as that of a CPU.
    """
    chip = chips.find(device_kind)
    if chip is None:
        return 0.0
    return 6 * cost.macs_per_image(model) / chip.peak_flops


def memory() -> dict[str, float]:
    """Returns how full the fullest device of this process is, in GiB.

    Returns:
      memory_gib: now; memory_peak_gib: at most since the process began. Empty where the
      device does not tell, as a CPU.
    """
    found = [device.memory_stats() or {} for device in jax.local_devices()]
    names = {"memory_gib": "bytes_in_use", "memory_peak_gib": "peak_bytes_in_use"}
    return {
        name: max(stats[key] for stats in found) / 2**30
        for name, key in names.items()
        if all(key in stats for stats in found)
    }


def compute(model: Model, images: int, device_seconds: float) -> dict:
    """Returns the compute of a run, as `report.json` holds it.

    Args:
      model: what is trained.
      images: seen in training, each epoch's counted.
      device_seconds: of all starts, each start's seconds times its devices.
    """
    return accounting.record(
        images=images,
        exaflops=cost.training_exaflops(model, images),
        device_kind=jax.devices()[0].device_kind,
        devices=jax.device_count(),
        device_seconds=device_seconds,
    )
