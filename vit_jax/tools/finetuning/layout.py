"""Finds how a user's images lie, and which to train, validate and test on.

A place is a folder with one folder a split, a folder with one folder a class, a table of
paths and labels (or a folder with one), or the name of a data set. Where no images are
set aside to validate on, a part of each class is, by a list in the workdir.
"""

import csv
import dataclasses
import io
import os
import pathlib
from collections.abc import Mapping, Sequence

from etils import epath

from vit_jax.config import fields
from vit_jax.data import catalogue, splits
from vit_jax.data.config import DataConfig
from vit_jax.data.sources import folder, parquet, table
from vit_jax.data.sources.arrays import IN_MEMORY
from vit_jax.data.sources.base import SOURCES, Source, read_labels
from vit_jax.data.sources.open import open_unchecked
from vit_jax.data.splits import HELD_OUT, TEST, TRAIN, VALIDATION, first_of, held_out
from vit_jax.errors import UserError
from vit_jax.files import replace_text
from vit_jax.weights.workdir import absolute

# What columns of tables are called.
IMAGES = ("image", "path", "image_path", "file", "filename", "file_name", "filepath")
IMAGES += ("img", "img_path", "image_name", "image_id", "id")
LABELS = ("label", "labels", "class", "classes", "class_name", "category", "target")
LABELS += ("species", "tag", "tags", "fine_label", "coarse_label", "y")
SPLIT_FILE = "split.csv"  # In the workdir.


@dataclasses.dataclass(frozen=True)
class Layout:
    """What there is to train, validate and test on.

    Attributes:
      data: keys of `config.data`, with `split` the training split.
      validation: split that chooses the checkpoint.
      test: split that nothing is chosen by; "" if there is none.
      found: what was found, in words.
    """

    data: dict
    validation: str
    test: str
    found: str

    def config(self, num_classes: int = 1) -> DataConfig:
        """Returns `config.data` with a number of classes; enough to open splits."""
        return DataConfig(**self.data | {"num_classes": num_classes})

    def open(self, split: str) -> Source:
        """Opens a split, whatever its classes."""
        return open_unchecked(self.config(), split)


def find(place: str, stated: Mapping[str, object], workdir: str) -> Layout:
    """Finds how the images of a place lie.

    Args:
      place: folder, table or name of a data set.
      stated: keys of `config.data` that the user set, as "image_key"; they come first.
      workdir: gets the list of the split, if one has to be made.

    Raises:
      UserError: nothing is found, or columns are not told apart.
    """
    path = pathlib.Path(place).expanduser()
    if path.is_file():
        return _of_table(path, stated, workdir)
    if path.is_dir():
        return _of_folder(path, stated, workdir)
    return _of_name(place, stated)


def _of_folder(path: pathlib.Path, stated: Mapping, workdir: str) -> Layout:
    names = folder.split_folders(path)
    train = first_of(TRAIN, names)
    there = [name for name in folder.visible_folders(path) if name not in names]
    there = [n for n in there if folder.is_split(path, n, labelled=False)]
    classes = folder.class_folders(path)
    shallow = [name for name in there if name in classes]
    tables = {each.stem: each for each in sorted(path.iterdir()) if _is_table(each)}
    if not train and len(shallow) < 2 and tables:
        if first_of(TRAIN, tables):
            return _of_table(path, stated, workdir)
        if len(tables) > 1:
            known = ", ".join(each.name for each in tables.values())
            raise UserError(f"{path} has several tables ({known}): give one of them")
        return _of_table(*tables.values(), stated, workdir)
    data = {"name": "folder", "data_dir": str(path), **stated}
    if train:
        others = [name for name in names if name != train]
        validation, test = first_of(VALIDATION, others), first_of(TEST, others)
        spoken = ", ".join(filter(None, (train, validation, test)))
        return _with_validation(
            data | {"split": train},
            validation,
            test,
            f"folders of splits ({spoken}) with folders of classes",
            workdir,
        )
    if deeper := folder.inside(path):
        raise UserError(f"{path} has one folder with images; {deeper}")
    if names and not classes:
        raise UserError(
            f"{path} has the splits {', '.join(names)}, and none to train on: call one "
            f"{TRAIN[0]}"
        )
    if there and not classes:  # Splits, whose labels stand elsewhere.
        raise UserError(
            f"{path / there[0]} has images but no folders of classes: give "
            f"{path / there[0]}/CLASS/*.jpg, or a table of paths and labels"
        )
    if not classes:
        raise UserError(
            f"{path} has no images in folders: give PHOTOS/CLASS/*.jpg, or "
            "PHOTOS/train/CLASS/*.jpg and PHOTOS/val/CLASS/*.jpg, or a table of paths "
            "and labels"
        )
    return _with_validation(
        data | {"split": folder.WHOLE}, "", "", "one folder a class", workdir
    )


def _of_table(path: pathlib.Path, stated: Mapping, workdir: str) -> Layout:
    tables = table.read_splits(str(path))
    first = tables[first_of(TRAIN, tables) or next(iter(tables))]
    data = {"name": "table", "data_dir": str(path)}
    flags = _columns_of_flags(first)
    if len(flags) > 1 and not first_of(LABELS, first.columns):
        data["label_key"] = ",".join(flags)
    data |= columns(first.columns, str(first.path), data | dict(stated))
    labels = table.label_columns(data["label_key"], first.columns)
    if "multi_label" not in stated and len(labels) > 1:
        ones = ([table.flag(row.get(k)) for k in labels].count(1) for row in first.rows)
        data["multi_label"] = any(count != 1 for count in ones)
    elif "multi_label" not in stated:
        values = [row.get(data["label_key"]) for row in first.rows]
        data["multi_label"] = any(map(_is_several, values))
    data |= stated
    # Test images are often listed without their labels.
    names = [k for k, each in tables.items() if {*labels} <= {*each.columns}]
    if names == [table.WHOLE]:
        names = table.split_names(str(path))
    train = first_of(TRAIN, names) or table.WHOLE
    if train not in names:
        raise UserError(
            f"{path} has the splits {', '.join(names)}, and none to train on: call one "
            f"{TRAIN[0]}"
        )
    several = " (several a row)" if data["multi_label"] else ""
    return _with_validation(
        data | {"split": train},
        first_of(VALIDATION, names),
        first_of(TEST, names),
        f"a table with paths in {data['image_key']!r} and labels in "
        f"{data['label_key']!r}{several}",
        workdir,
    )


def _of_name(place: str, stated: Mapping) -> Layout:
    name, data = place, dict(stated)
    owned = place.count("/") == 1 and not place.startswith((".", "/", "~"))
    if owned and place.split("/")[0] not in SOURCES and ":" not in place:
        name = f"hf://datasets/{place}"
    if not parquet.is_hub(name) and ("/" in name or name.startswith((".", "~"))):
        raise UserError(
            f"{place} is neither a folder nor a table that is there: give a folder of "
            "images, a CSV, TSV, JSON Lines or Parquet file, or the name of a data set"
        )
    if parquet.is_hub(name):
        files = parquet.files_of_splits(parquet.download(name), name)
        names = list(files)
        first = files[first_of(TRAIN, names) or names[0]][0]
        data = columns(parquet.column_names(first), name, stated) | data
    else:
        entry = catalogue.ENTRIES.get(name)
        try:
            opened = open_unchecked(
                DataConfig(name=name, num_classes=1, **data), "train"
            )
        except UserError as error:
            raise UserError(
                f"{place} is no folder or table that is there, and no data set: {error}"
            ) from error
        numbering = getattr(opened, "numbering", None)
        names = list(numbering.sizes) if numbering else ["train"]
        if entry and "test" in entry.splits:
            names = [n for n in names if n in ("train", entry.splits["test"])]
    train = first_of(TRAIN, names)
    if not train:
        raise UserError(
            f"{place} has the splits {', '.join(names)}, and none to train on"
        )
    validation, test = first_of(VALIDATION, names), first_of(TEST, names)
    found = f"a data set with the splits {', '.join(names)}"
    # Many of these are sorted by class.
    if not validation and (parquet.is_hub(name) or name == IN_MEMORY):
        count = round(1 / HELD_OUT)
        parts = [f"interleaved_splits({train}, {count})[{i}]" for i in range(count)]
        validation, train = parts[-1], "+".join(parts[:-1])
        found += f", of whose training images each {count}th validates"
    elif not validation:
        kept = round(100 * (1 - HELD_OUT))
        validation, train = f"{train}[{kept}%:]", f"{train}[:{kept}%]"
        found += f", of whose training images the last {100 - kept} % validate"
    return Layout({"name": name, **data, "split": train}, validation, test, found)


def _with_validation(
    data: dict, validation: str, test: str, found: str, workdir: str
) -> Layout:
    """Sets a part of the training images aside, unless there are others to validate on."""
    layout = Layout(data, validation, test, found)
    if validation:
        return layout
    place = epath.Path(split_file(workdir))
    source = layout.open(data["split"])
    groups = _groups(source)
    apart = held_out(groups)
    if not apart.any():
        raise UserError(
            f"{data['data_dir']} has one image of each class: give two or more of a "
            "class, so that one can be set aside to validate on"
        )
    rows = [
        (*_row(source, i), VALIDATION[0] if apart[i] else TRAIN[0])
        for i in range(len(source))
    ]
    if test:
        tests = layout.open(test)
        rows += [(*_row(tests, i), TEST[0]) for i in range(len(tests))]
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(("image", "label", table.SPLIT))
    lines.writerows(rows)
    place.parent.mkdir(parents=True, exist_ok=True)
    replace_text(place, text.getvalue())
    several = {"multi_label": True} if data.get("multi_label") else {}
    kept = set(fields.fields(DataConfig)) & data.keys()
    kept -= {"name", "data_dir", "split", "image_key", "label_key", "multi_label"}
    kept -= {"image_dir", "image_suffix"}
    data = {key: data[key] for key in kept} | several
    data |= {"name": "table", "data_dir": str(place), "split": TRAIN[0]}
    return Layout(
        data,
        VALIDATION[0],
        TEST[0] if test else "",
        f"{found}; {apart.sum():,} of {len(source):,} images, the same part of each "
        f"class, set aside to validate on: {place}",
    )


def take_fold(layout: Layout, fold: int, count: int) -> None:
    """Rewrites the list of the split in a workdir: one fold validates.

    Args:
      layout: of images of which a part was set aside.
      fold: that validates, counted from 0.
      count: number of folds.

    Raises:
      UserError: the images have others to validate on, or there are too few.
    """
    place = epath.Path(layout.data.get("data_dir", ""))
    if place.name != SPLIT_FILE:
        raise UserError(
            f"folds={count}: there are images to validate on, and folds are parts of the "
            "training images: leave it out"
        )
    rows = list(csv.DictReader(io.StringIO(place.read_text())))
    ours = [row for row in rows if row[table.SPLIT] != TEST[0]]
    folds = splits.folds([row["label"] for row in ours], count)
    if len({*folds.tolist()} - {-1}) < count:
        raise UserError(f"folds={count}: {len(ours)} images are too few: lower it")
    for row, its in zip(ours, folds, strict=True):
        row[table.SPLIT] = VALIDATION[0] if its == fold else TRAIN[0]
    text = io.StringIO()
    lines = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    lines.writeheader()
    lines.writerows(rows)
    replace_text(place, text.getvalue())


def split_file(workdir: str) -> str:
    """Returns the path of the list of the split in a workdir."""
    return str(absolute(workdir) / SPLIT_FILE)


def columns(known: Sequence[str], place: str, stated: Mapping) -> dict[str, str]:
    """Returns `image_key` and `label_key` by the usual names of columns.

    Args:
      known: columns that there are.
      place: for the message.
      stated: keys that the user set.

    Raises:
      UserError: one has no usual name.
    """
    found = {}
    for key, usual in (("image_key", IMAGES), ("label_key", LABELS)):
        found[key] = stated.get(key) or first_of(usual, known)
        if not found[key]:
            raise UserError(
                f"{place} has the columns {', '.join(known)}: say which holds the "
                f"{'images' if key == 'image_key' else 'labels'} by --config.data.{key}"
            )
    return found


def _groups(source: Source) -> list[str]:
    labels = source.known_labels()
    labels = read_labels(source) if labels is None else labels
    return [str(label) for label in labels]


def _row(source: folder.FolderSource, i: int) -> tuple[str, str]:
    label = source.labels_of_paths[i]
    numbers = label if isinstance(label, list) else [label]
    names = "|".join(source.class_names[number] for number in numbers)
    return os.path.abspath(source.describe(i)), names


def _is_table(path: pathlib.Path) -> bool:
    return path.is_file() and path.suffix.lower() in table.EXTENSIONS


def _columns_of_flags(of: table.Table) -> list[str]:
    """Returns the columns that hold 1 and 0, -1 or nothing alone, as those of classes."""
    found = {
        column: {table.flag(row.get(column)) for row in of.rows}
        for column in of.columns
    }
    return [name for name, seen in found.items() if 1 in seen and None not in seen]


def _is_several(value: object) -> bool:
    """Returns whether a cell holds a list of labels, or texts with "|" or ";" between.

    A comma alone may belong to the name of a class.
    """
    return isinstance(value, list) or (
        isinstance(value, str) and bool({*"|;"} & {*value})
    )
