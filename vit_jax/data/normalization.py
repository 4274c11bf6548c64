"""Estimates mean and standard deviation of training images, for data.mean="estimate"."""

import dataclasses

import numpy as np

from vit_jax.data import decode
from vit_jax.data.config import ESTIMATE, DataConfig
from vit_jax.data.fields.image import Image
from vit_jax.data.sources.base import Source, name_of
from vit_jax.errors import UserError

_MOST = 1_000  # Images.
_STREAM = 0x6D656E  # Keeps the draw apart from others of the same seed.


def resolve(data: DataConfig, source: Source, seed: int) -> DataConfig:
    """Returns the config with "estimate" replaced by numbers.

    Up to 1,000 images of the split, drawn with the seed, are read without transforms.

    Args:
      data: `config.data`.
      source: training split.
      seed: seed of the run.

    Raises:
      UserError: no image can be read, or a channel has the same value everywhere.
    """
    wanted = [name for name in ("mean", "std") if getattr(data, name) == ESTIMATE]
    if not wanted:
        return data
    drawn = np.random.default_rng([seed, _STREAM]).permutation(len(source))[:_MOST]
    image, parts, why = Image(data), [], ""
    for i in np.sort(drawn).tolist():
        try:
            pixels = image.read(source[i], None)
        except (decode.DamagedImage, OSError) as error:
            reason = error
            if isinstance(error, OSError):
                reason = f"cannot be read ({error.strerror or error})"
            why = why or f"{name_of(source, i)} {reason}"
            continue  # In training, `data.on_error` decides about it.
        levels = pixels.reshape(-1, data.channels).astype(np.float64)
        levels /= image.white
        parts.append((len(levels), levels.sum(0), np.square(levels).sum(0)))
    if not parts:
        raise UserError(
            f"data.{wanted[0]}={ESTIMATE!r}: no image of {data.split!r} can be read: {why}"
        )
    count, total, squares = (sum(part) for part in zip(*parts, strict=True))
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    flat = np.flatnonzero(std <= 1e-9 + 1e-7 * np.abs(mean))  # Rounding.
    if flat.size:
        channel = int(flat[0])
        raise UserError(
            f"data.std={ESTIMATE!r}: channel {channel} is {mean[channel]:g} everywhere: "
            "leave it out with data.bands, or give data.std"
        )
    estimates = {"mean": mean, "std": std}
    # Six digits, which a config file can show and JSON keeps.
    numbers = {n: tuple(float(f"{x:.6g}") for x in estimates[n]) for n in wanted}
    return dataclasses.replace(data, **numbers)
