"""Fields of a record: the arrays of a batch besides the image.

A new field needs a file here and a line in FIELDS, or is a class of the user's code
that `data.fields` names.
"""

import collections
import inspect
from collections.abc import Iterator, Mapping, Sequence

from vit_jax.config.fields import import_custom
from vit_jax.data.config import DataConfig
from vit_jax.data.fields.base import Field
from vit_jax.data.fields.image import Image
from vit_jax.data.sources.base import Source
from vit_jax.data.transforms.base import Transform
from vit_jax.errors import UserError

# Name of the array in a batch -> attribute of `config.data` that enables it, and class.
FIELDS = {
    "label": ("has_labels", "vit_jax.data.fields.label:Label"),
    "label_map": ("mask_key", "vit_jax.data.fields.mask:LabelMap"),
    "text": ("tokenizer", "vit_jax.data.fields.caption:Caption"),
    "targets": ("target_key", "vit_jax.data.fields.target:Target"),
}
# Further arrays of batches; "mask" is True for rows of an evaluation that are images.
_OTHERS = ("index", "skipped", "mask")
RESERVED = (*FIELDS, *_OTHERS)


def of(data: DataConfig, source: Source, *, train: bool = True) -> tuple[Field, ...]:
    """Returns the fields of a split; for evaluations, only those with `in_eval`.

    Raises:
      UserError: a name in `data.fields` is not a field, or the split lacks what a field
        needs.
    """
    made = (kind.of(data, source) for kind in _kinds(data) if train or kind.in_eval)
    return tuple(field for field in made if field is not None)


def check(spec: Mapping[str, object], data: DataConfig) -> None:
    """Raises UserError if the config does not enable a field of a `batch_spec`."""
    for name, (asked_by, text) in FIELDS.items():
        if name in spec and not getattr(data, asked_by):
            raise UserError(import_custom(text, "data.fields").missing(data))


def check_ops(ops: Sequence[Transform], data: DataConfig) -> None:
    """Raises UserError if a transform of the training line does not suit a field."""
    for kind in (Image, *_kinds(data)):
        kind.check(ops, data)


def parts(data: DataConfig) -> list[str]:
    """Returns the parts of a fingerprint (`Entries`) that cover the fields."""
    return [part for kind in _kinds(data) if (part := kind.part(data))]


def checksums(data: DataConfig) -> dict[str, int]:
    """Returns checksums of files that fields need, by their key of `data`."""
    sums = (kind.checksums(data) for kind in _kinds(data))
    return dict(collections.ChainMap(*sums))


def names(data: DataConfig) -> tuple[str, ...]:
    """Returns the names in `RESERVED`, and those of the user's fields."""
    custom = (_custom(text).name for text in data.fields)
    return (*RESERVED, *custom)


def _kinds(data: DataConfig) -> Iterator[type[Field]]:
    for asked_by, text in FIELDS.values():
        if getattr(data, asked_by):
            yield import_custom(text, "data.fields")
    yield from map(_custom, data.fields)


def _custom(text: str) -> type[Field]:
    """Imports a field from the user's module."""
    kind = import_custom(text, "data.fields")
    if not inspect.isclass(kind) or not issubclass(kind, Field):
        raise UserError(
            f"data.fields={text!r} is {kind!r}: name a subclass of "
            "vit_jax.data.fields.base.Field"
        )
    if kind.name in (*RESERVED, "image"):
        raise UserError(
            f"data.fields={text!r} is called {kind.name!r}, like an array of every "
            "batch: choose another name"
        )
    return kind
