"""Writes any checkpoint in the format of another library, atomically."""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator

import numpy as np
from flax.traverse_util import flatten_dict

from vit_jax import models
from vit_jax.config.fields import is_custom
from vit_jax.data.transforms import parse
from vit_jax.errors import UserError
from vit_jax.models.resnet import ResNetConfig
from vit_jax.models.vit_config import ViTConfig
from vit_jax.weights import peft  # noqa: F401 (registers its writer)
from vit_jax.weights.formats.registry import WRITERS, Writer
from vit_jax.weights.pretrained import Pretrained


def check(to: str, out: pathlib.Path, *, overwrite: bool = False) -> None:
    """Raises UserError unless `export` can write the format `to` to the path `out`."""
    if to not in WRITERS:
        known = ", ".join(sorted(WRITERS))
        raise UserError(f"--to={to} is not one of {known}: choose one of them")
    suffix = WRITERS[to].suffix
    if suffix and out.suffix != suffix:
        raise UserError(f"--out={out}: --to={to} writes one file: name it *{suffix}")
    try:
        if not out.exists():
            return
    except OSError as error:  # For example, the name is too long.
        raise UserError(f"--out={out} cannot be written: {error}") from error
    if out.is_dir() == bool(suffix):
        kind = "file" if suffix else "folder"
        raise UserError(f"--out={out} exists and is not a {kind}: give another path")
    if not overwrite and (suffix or any(out.iterdir())):
        raise UserError(f"--out={out} exists: give another path, or add --overwrite")


def export(
    pretrained: Pretrained, to: str, out: pathlib.Path, *, overwrite: bool = False
) -> tuple[list[pathlib.Path], list[str]]:
    """Writes a checkpoint in a format; if that fails, no file remains.

    Args:
      pretrained: any checkpoint.
      to: format, a key of WRITERS.
      out: file or folder to write.
      overwrite: whether existing files may be replaced.

    Returns:
      The files, and a line for each thing that was rewritten or left out.

    Raises:
      UserError: parameters are missing or left over, the format does not support the
        network, or the path cannot be written.
    """
    check(to, out, overwrite=overwrite)
    write = _find_write(pretrained, to)
    _check_complete(pretrained)
    notes, names, writer = [], pretrained.class_names, WRITERS[to]
    if names and len(names) != pretrained.num_classes:
        notes.append(
            f"class names: {len(names)} for {pretrained.num_classes} classes, "
            "so left out"
        )
        pretrained = dataclasses.replace(pretrained, class_names=())
    if pretrained.targets:
        params, targets = pretrained.targets.in_units(pretrained.params)
        pretrained = dataclasses.replace(pretrained, params=params, targets=targets)
        if not writer.program:
            notes.append(f"outputs of the classifier: {targets.describe()}")
    how = pretrained.preprocess
    if how and how.transform and not _stores(writer, how.transform):
        plain = how.without_transform()
        notes.append(
            f"preprocessing: transform={how.transform!r} left out; images are "
            f"prepared by {plain.describe()}"
        )
        pretrained = dataclasses.replace(pretrained, preprocess=plain)
    with _staged(out, bool(writer.suffix)) as place:
        notes += write(pretrained, place)
    files = [out / name for name in writer.files] if out.is_dir() else [out]
    return [file for file in files if file.exists()], notes


def _stores(writer: Writer, transform: str) -> bool:
    """Returns whether a format has a place for a line of transforms."""
    # Modules of the user are not imported when files of weights are read.
    is_custom = parse.names_custom(transform)
    return writer.program or (writer.any_network and not is_custom)


def _find_write(
    pretrained: Pretrained, to: str
) -> Callable[[Pretrained, pathlib.Path], list[str]]:
    """Returns the function that writes the network, or raises UserError."""
    variant, writer = pretrained.options["variant"], WRITERS[to]
    if writer.program:
        return writer.write
    if is_custom(variant):
        raise UserError(
            f"--to={to}: {pretrained.source} has model.variant={variant!r}, a network "
            "from your own module, which is not imported when weights are read: "
            "keep its workdir, or write the program with --to=stablehlo"
        )
    kind = models.VARIANTS.find(variant, "model")
    if kind in writer.networks:
        return writer.networks[kind]
    if not writer.any_network and not issubclass(kind, (ViTConfig, ResNetConfig)):
        raise UserError(
            f"--to={to}: the format does not support model.variant={variant!r}: "
            "write it with --to=safetensors"
        )
    return writer.write


def _check_complete(pretrained: Pretrained) -> None:
    """Raises UserError unless the parameters fit the network, and are finite."""
    model = models.create(**pretrained.options)
    given, wanted = (
        {k: v.shape for k, v in flatten_dict(tree, sep="/").items()}
        for tree in (pretrained.params, model.shapes)
    )
    wrong = sorted({name for name, _ in given.items() ^ wanted.items()})
    if wrong:
        has, needs = (shapes.get(wrong[0], "none") for shapes in (given, wanted))
        raise UserError(
            f"{pretrained.source} does not fit its network: {wrong[0]} is {has} in the "
            f"file and {needs} in the network ({len(wrong)} such parameters)"
        )
    for name, value in flatten_dict(pretrained.params, sep="/").items():
        if not np.isfinite(value).all():
            raise UserError(
                f"{pretrained.source}: {name} holds NaN or infinite numbers: training "
                "diverged; give an earlier checkpoint"
            )


@contextlib.contextmanager
def _staged(out: pathlib.Path, is_file: bool) -> Iterator[pathlib.Path]:
    """Yields a path to write to, which is renamed to `out` at the end."""
    staging = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staging = pathlib.Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        place = staging / out.name
        if not is_file:
            place.mkdir()
        yield place
        if is_file or not out.exists():
            os.replace(place, out)
            return
        for name in {name for writer in WRITERS.values() for name in writer.files}:
            (out / name).unlink(missing_ok=True)
        for file in place.iterdir():
            os.replace(file, out / file.name)
    except OSError as error:
        raise UserError(f"--out={out} cannot be written: {error}") from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


def usage(to: str, pretrained: Pretrained, place: str, file: str = "") -> str:
    """Returns Python code that loads a written checkpoint.

    Args:
      to: format, a key of WRITERS.
      pretrained: the checkpoint.
      place: path, or "owner/name" on the hub.
      file: name in a repository on the hub; "" for a local path.
    """
    if write_usage := WRITERS[to].usage:
        return write_usage(pretrained, place, bool(file))
    place = f"hf://{place}/{file}" if file else place
    return (
        "from vit_jax import weights\n"
        f'model = weights.open_pretrained("{place}")  # model.params, model.options'
    )
