"""Fields of a record: what a batch has of it besides the image.

Adding one is a file here and its line in FIELDS, or a class of your own in `data.fields`.
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

# Name of the array in a batch -> attribute of `config.data` that asks for it, and class.
FIELDS = {
    "label": ("has_labels", "vit_jax.data.fields.label:Label"),
    "label_map": ("mask_key", "vit_jax.data.fields.mask:LabelMap"),
    "text": ("tokenizer", "vit_jax.data.fields.caption:Caption"),
}
# Arrays that batches have besides; "mask" says which rows of an evaluation are images.
_OTHERS = ("index", "skipped", "mask")
RESERVED = (*FIELDS, *_OTHERS)


def of(data: DataConfig, source: Source, *, train: bool = True) -> tuple[Field, ...]:
    """Returns the fields of a split; evaluations have those with `in_eval` alone.

    Raises:
      UserError: `data.fields` names what is no field, or one cannot be made of the split.
    """
    made = (kind.of(data, source) for kind in _kinds(data) if train or kind.in_eval)
    return tuple(field for field in made if field is not None)


def check(spec: Mapping[str, object], data: DataConfig) -> None:
    """Raises UserError if the config asks for no field that a task's `batch_spec` has."""
    for name, (asked_by, text) in FIELDS.items():
        if name in spec and not getattr(data, asked_by):
            raise UserError(import_custom(text, "data.fields").missing(data))


def check_ops(ops: Sequence[Transform], data: DataConfig) -> None:
    """Raises UserError if a transform of the training line does not suit a field."""
    for kind in (Image, *_kinds(data)):
        kind.check(ops, data)


def parts(data: DataConfig) -> list[str]:
    """Returns the parts of a fingerprint (`Entries`) that fields are read from."""
    return [part for kind in _kinds(data) if (part := kind.part(data))]


def checksums(data: DataConfig) -> dict[str, int]:
    """Returns the checksums of files that fields are read with, by their key of `data`."""
    found = (kind.checksums(data) for kind in _kinds(data))
    return dict(collections.ChainMap(*found))


def names(data: DataConfig) -> tuple[str, ...]:
    """Returns the names of the arrays of `RESERVED`, and of the fields of the user's."""
    own = (_own(text).name for text in data.fields)
    return (*RESERVED, *own)


def _kinds(data: DataConfig) -> Iterator[type[Field]]:
    for asked_by, text in FIELDS.values():
        if getattr(data, asked_by):
            yield import_custom(text, "data.fields")
    yield from map(_own, data.fields)


def _own(text: str) -> type[Field]:
    """Imports a field of the user's."""
    kind = import_custom(text, "data.fields")
    if not inspect.isclass(kind) or not issubclass(kind, Field):
        raise UserError(
            f"data.fields={text!r} is {kind!r}: name a subclass of "
            "vit_jax.data.fields.base.Field"
        )
    if kind.name in (*RESERVED, "image"):
        raise UserError(
            f"data.fields={text!r} is called {kind.name!r}, as an array that batches have: "
            "choose another name"
        )
    return kind
