"""Any published checkpoint, opened or fitted to a model."""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence

import jax
from flax.traverse_util import flatten_dict

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models import stacking
from vit_jax.weights import surgery, workdir
from vit_jax.weights.formats import files, registry, torch_file
from vit_jax.weights.hub import download
from vit_jax.weights.pretrained import Pretrained
from vit_jax.weights.settle import Row

# Options that change what the same parameters compute.
_FLAVOURS = (
    "head",
    "class_token",
    "distillation",
    "pooled_norm",
    "posemb",
    "posemb_at",
    "gelu",
    "epsilon",
    "zero_pool",
)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Parameters that fit a model, and how they came to.

    Attributes:
      params: nested dict of arrays, as from `Model.init`.
      rows: what was loaded, resized, replaced, missing, left over or differs.
      pretrained: the checkpoint itself.
    """

    params: dict
    rows: tuple[Row, ...]
    pretrained: Pretrained

    def table(self) -> list[str]:
        """Returns a line for the checkpoint, one for each note, one for each row."""
        found = self.pretrained
        cells = [
            (f"{row.what}: {row.action}", *map(_shape, (row.before, row.after)))
            for row in self.rows
        ]
        if any(before or after for _, before, after in cells):
            cells.insert(0, ("", "checkpoint", "model"))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = (
            "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
            for line in cells
        )
        return [
            f"{found.format} checkpoint of {found.options['variant']}: {found.source}",
            *found.notes,
            *lines,
        ]


def open_pretrained(
    place: str | os.PathLike, *, average: bool = True, heads: int = 0
) -> Pretrained:
    """Reads a checkpoint of any known format.

    Args:
      place: a workdir, a file or folder with weights, or any source that `hub.download` takes:
        "hf://owner/name", "timm/...", "gs://...", "https://...", "augreg:B/16".
      average: take a workdir's averaged parameters if it has them.
      heads: attention heads, for the files that do not tell (timm's without config).

    Returns:
      The checkpoint in our terms.

    Raises:
      UserError: nothing there, not readable, or of no known format.
    """
    name = os.fspath(place)
    path = download.download(name)
    if workdir.has_checkpoint(path):
        found = workdir.pretrained(path, average=average)
        return dataclasses.replace(found, source=name)
    if "://" in os.fspath(path):  # A folder in a bucket, which only runs write.
        raise UserError(
            f"{name} has no finished checkpoint: give the workdir of a finished run, or "
            "one file with weights"
        )
    tensors = files.read(path)
    try:
        found = registry.find_reader(tensors).read(tensors, heads)
        for key, value in flatten_dict(found.params, sep="/").items():
            if value.ndim:  # Counters, as of steps, are no weights.
                torch_file.check_floating(key, value, name)
        models.create(**found.options)
    except UserError:
        raise
    except Exception as error:  # As a number where its config.json should have a list.
        what = f"{error} is missing" if isinstance(error, KeyError) else repr(error)
        raise UserError(
            f"{name} has a config.json, a header or arrays of another form than its "
            f"format has: {what}"
        ) from error
    return dataclasses.replace(found, source=name)


def load(
    place: str | os.PathLike,
    model: models.Model,
    *,
    head: str = "keep",
    head_bias: float = 0.0,
    init_allow: Sequence[str] = (),
    posemb_resize: str = "linear",
    average: bool = True,
    init: Callable[[], dict] | None = None,
) -> Loaded:
    """Reads a checkpoint of any known format and fits it to a model.

    Args:
      place, average: see `open_pretrained`.
      model: the parameters are for.
      head, head_bias, init_allow, posemb_resize: see `surgery.fit`.
      init: gives the initial values of what may be missing; `model.init` with key 0
        if None.

    Returns:
      The parameters, and a table of what was done.

    Raises:
      UserError: nothing to load there, or it does not fit the model.
    """
    init = init or functools.partial(model.init, jax.random.key(0))

    def initial():
        return stacking.unstack(init())  # As every checkpoint is.

    found = open_pretrained(place, average=average, heads=model.options.get("heads", 0))
    source = models.create(**found.options)
    try:
        params, rows = surgery.fit(
            found.params,
            jax.eval_shape(initial),
            grid=model.grid,
            old_grid=source.grid,
            head=head,
            head_bias=head_bias,
            init_allow=init_allow,
            posemb_resize=posemb_resize,
            init=initial,
        )
    except UserError as error:
        theirs, ours = (
            options["variant"] for options in (source.options, model.options)
        )
        if theirs == ours:
            raise
        raise UserError(
            f"{error}; the checkpoint is a {theirs} and the model a {ours}"
        ) from error
    rows += [
        Row("differs", f"{key} {old} in the checkpoint, {new} in the model")
        for key, old, new in _differences(source.options, model.options)
    ]
    if model.stacked:
        params = stacking.stack(params)
    return Loaded(params, tuple(rows), found)


def _differences(old: dict, new: dict) -> list[tuple]:
    return [
        (key, old[key], new[key])
        for key in _FLAVOURS
        if key in old and key in new and old[key] != new[key]
    ]


def _shape(shape: tuple[int, ...] | None) -> str:
    return "x".join(map(str, shape)) if shape else ""
