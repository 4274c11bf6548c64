"""Determines the training, validation and test splits of a user's images.

A place is a folder with one folder per split, a folder with one folder per class, a
table of paths and labels (or a folder with one), or the name of a data set. Without a
validation split, a part of each class is held out, and a list of it is written to the
workdir.

With `data.group_key` no group of images, such as the photographs of one patient, is on
both sides of a split, see vit_jax/data/groups.py.

Images may have masks instead of labels: in two folders, see mask_folders.py, in a
column of a table, or by `data.mask_key` of a data set. Or they have numbers, in columns
of a table (target_columns.py) or by `data.target_key`. Their validation part is a split
expression.
"""

import contextlib
import csv
import dataclasses
import io
import os
import pathlib
import re
from collections.abc import Mapping, Sequence

import numpy as np
from etils import epath

from vit_jax.command_line.files import replace_text
from vit_jax.config import fields
from vit_jax.data import catalogue, groups, masks, splits
from vit_jax.data.config import PLACE, DataConfig, names_in
from vit_jax.data.sources import SOURCES, folder, mask_folders, parquet, table
from vit_jax.data.sources.arrays import IN_MEMORY
from vit_jax.data.sources.base import Source, check_known, read_labels
from vit_jax.data.sources.open import open_unchecked
from vit_jax.data.splits import HELD_OUT, TEST, TRAIN, VALIDATION, first_of, held_out
from vit_jax.data.tags import labels_in
from vit_jax.errors import UserError
from vit_jax.tools.finetuning import tags, target_columns
from vit_jax.weights.checkpoint_folders import absolute

# Usual names of columns in tables.
IMAGES = ("image", "path", "image_path", "file", "filename", "file_name", "filepath")
IMAGES += ("img", "img_path", "image_name", "image_id", "id")
LABELS = ("label", "labels", "class", "classes", "class_name", "category", "target")
LABELS += ("species", "tag", "tags", "fine_label", "coarse_label", "y")
MASKS = ("mask", "mask_path", "mask_file", "segmentation_mask", "segmentation")
_PARTS = round(1 / HELD_OUT)
SPLIT_FILE = "split.csv"  # File in the workdir with the split of each image.
_GROUP = "group"  # Column of that file, if images have groups.


@dataclasses.dataclass(frozen=True)
class Layout:
    """The splits of a user's images.

    Attributes:
      data: keys of `config.data`, with the training split as `split`.
      validation: split that chooses the checkpoint.
      test: split that no choice depends on; "" without test images.
      description: arrangement of the images, for the log.
      whole: split that expressions divide into training and validation images.
    """

    data: dict
    validation: str
    test: str
    description: str
    whole: str = ""

    @property
    def config(self) -> DataConfig:
        """Config of the data: one class, those of `data.mask_values`, or no class."""
        return _config(self.data)

    def open(self, split: str) -> Source:
        """Opens a split without checking its labels."""
        return open_unchecked(self.config, split)


def _config(data: Mapping) -> DataConfig:
    classes = len(data.get("mask_values", ())) or 1
    classes = 0 if data.get("target_key") else classes
    return DataConfig(**data | {"num_classes": classes})


def find(place: str, given: Mapping[str, object], workdir: str) -> Layout:
    """Determines the splits of the images of a place.

    Args:
      place: folder, table or name of a data set.
      given: keys of `config.data` set by the user, such as "image_key"; they take
        precedence.
      workdir: folder for the list of the split, if one is written; "" holds out no
        training images.

    Raises:
      UserError: the place has no training images, or columns have unusual names.
    """
    path = pathlib.Path(place).expanduser()
    if path.is_file():
        return _of_table(path, given, workdir)
    if path.is_dir():
        return _of_folder(path, given, workdir)
    return _of_name(place, given, workdir)


def _check_groups(layout: Layout) -> None:
    """Raises UserError if a group is in two of the user's own splits."""
    key, first = layout.data.get("group_key"), {}
    if not key:
        return
    for split in filter(None, (layout.data["split"], layout.validation, layout.test)):
        for group in {*(layout.open(split).record_groups or ())}:
            if first.setdefault(group, split) != split:
                raise UserError(
                    f"data.group_key={key!r}: images of group {group!r} are in the splits "
                    f"{first[group]} and {split}: move them into one of them, or give the "
                    "images without splits, which are then divided by groups"
                )


def labelled_images(place: str) -> Source:
    """Opens the labelled images of a place, those of its training split if it has one.

    Args:
      place: argument of `find`.

    Raises:
      UserError: the place has no images with one class each.
    """
    found = find(place, {}, "")
    check_one_class(found, place)
    return found.open(found.data["split"])


def check_one_class(layout: Layout, place: str) -> None:
    """Raises UserError unless images have one label each; `place` names them."""
    kinds = {"mask_key": "masks", "multi_label": "several labels per image"}
    kinds["target_key"] = "numbers"
    for key, kind in kinds.items():
        if layout.data.get(key):
            raise UserError(
                f"{place} has {kind}: give images with one class each, such as "
                "FOLDER/CLASS/*.jpg"
            )


def _of_folder(path: pathlib.Path, given: Mapping, workdir: str) -> Layout:
    usual = mask_folders.usual_mask_key(path)
    mask_key = given.get("mask_key", usual)
    has_folder = usual or (path / mask_key).is_dir()
    if mask_key and (has_folder or not table.tables_in(path)):
        return _of_masks(path, {**given, "mask_key": mask_key})
    names = folder.split_folders(path)
    others = [name for name in folder.visible_folders(path) if name not in names]
    others = [name for name in others if folder.is_split(path, name, labelled=False)]
    classes = folder.class_folders(path)
    data = {"name": "folder", "data_dir": str(path), **given}
    if train := first_of(TRAIN, names):
        rest = [name for name in names if name != train]
        validation, test = first_of(VALIDATION, rest), first_of(TEST, rest)
        used = ", ".join(filter(None, (train, validation, test)))
        description = f"folders of splits ({used}) with folders of classes"
        layout = Layout(data | {"split": train}, validation, test, description)
        return _with_validation(layout, workdir)
    tables = table.tables_in(path)
    if tables and len({*others} & {*classes}) < 2:
        if first_of(TRAIN, tables):
            return _of_table(path, given, workdir)
        if len(tables) > 1:
            known = ", ".join(each.name for each in tables.values())
            raise UserError(f"{path} has several tables ({known}): give one of them")
        return _of_table(*tables.values(), given, workdir)
    if deeper := folder.inside(path):
        raise UserError(f"{path} has one folder with images; {deeper}")
    if names and not classes:
        raise _none_to_train_on(path, names)
    if others and not classes:  # Folders of splits without folders of classes.
        raise UserError(
            f"{path / others[0]} has images but no folders of classes: give "
            f"{path / others[0]}/CLASS/*.jpg, or a table of paths and labels"
        )
    if not classes:
        raise UserError(
            f"{path} has no images in folders: give PHOTOS/CLASS/*.jpg, or "
            "PHOTOS/train/CLASS/*.jpg and PHOTOS/val/CLASS/*.jpg, or a table of paths "
            "and labels"
        )
    layout = Layout(data | {"split": folder.WHOLE}, "", "", "one folder per class")
    return _with_validation(layout, workdir)


def common_folder(images: str, drawn: str) -> tuple[str, dict[str, str]]:
    """Returns the folder that contains both image and mask folder, and config keys.

    Raises:
      UserError: one of them is not a folder, or they are the same.
    """
    paths = [os.path.abspath(os.path.expanduser(path)) for path in (images, drawn)]
    for path in paths:
        if not os.path.isdir(path):
            raise UserError(
                f"{path} is not a folder: give the folder of the images and the folder of "
                "their masks, which have the same names"
            )
    root = os.path.commonpath(paths)
    keys = (os.path.relpath(path, root) for path in paths)
    folders = dict(zip(("data.image_key", "data.mask_key"), keys, strict=True))
    if "." in folders.values():
        raise UserError(
            f"{images} and {drawn}: one contains the other; give two separate folders"
        )
    return root, folders


def _of_masks(path: pathlib.Path, given: Mapping) -> Layout:
    data = {"name": "masks", "data_dir": str(path), **given}
    names = mask_folders.split_names(_config(data))
    train = folder.WHOLE if folder.WHOLE in names else _numbered(TRAIN, names)
    if not train:
        raise _none_to_train_on(path, names)
    description = f"images, and their masks in {given['mask_key']!r}"
    validation, test = _numbered(VALIDATION, names), _numbered(TEST, names)
    layout = Layout(data | {"split": train}, validation, test, description)
    if test and not _has_classes(layout.open(test), layout.config):
        layout = dataclasses.replace(layout, test="")
    return _with_validation(layout, "")


def _numbered(usual: Sequence[str], names: Sequence[str]) -> str:
    """Returns the first usual name of a split, perhaps with a number like "train2017"."""
    numbered = re.compile(rf"({'|'.join(usual)})\W?\d+")
    matches = (name for name in names if numbered.fullmatch(name.lower()))
    return first_of(usual, names) or next(matches, "")


def _has_classes(source: Source, data: DataConfig) -> bool:
    """Returns whether the first mask has classes; Cityscapes' test masks have none."""
    return bool(
        (
            masks.decode_mask(source[0]["mask"], data.max_megapixels)
            != data.ignore_label
        ).any()
    )


def _none_to_train_on(place: object, names: Sequence[str]) -> UserError:
    return UserError(
        f"{place} has the splits {', '.join(names)}, but no training split: name one "
        f"{TRAIN[0]}"
    )


def _of_table(path: pathlib.Path, given: Mapping, workdir: str) -> Layout:
    tables = table.read_splits(str(path))
    first = tables[first_of(TRAIN, tables) or next(iter(tables))]
    data = {"name": "table", "data_dir": str(path)}
    if not first_of(LABELS, first.columns) and "label_key" not in given:
        flags, of_masks = _flag_columns(first), first_of(MASKS, first.columns)
        if of_masks:
            data["mask_key"] = of_masks
        elif len(flags) > 1:
            data["label_key"] = ",".join(flags)
    data |= given
    if not data.keys() & {"label_key", "mask_key", "target_key", "multi_label"}:
        known = columns(first.columns, str(first.path), data, labelled=False)
        used = (known["image_key"], table.SPLIT, data.get("group_key"))
        others = [name for name in first.columns if name not in used]
        labels = first_of(LABELS, first.columns)
        if target := target_columns.detect(first, labels, others):
            data["target_key"] = target
    labelled = not data.get("mask_key") and not data.get("target_key")
    data = columns(first.columns, str(first.path), data, labelled=labelled) | data
    if data.get("target_key"):
        wanted = list(names_in(data["target_key"]))
        check_known("target_key", wanted, first.columns, first.path)
        what = f"numbers in {', '.join(map(repr, wanted))}"
    elif not labelled:
        wanted, what = [data["mask_key"]], f"masks in {data['mask_key']!r}"
    else:
        wanted = table.label_columns(data["label_key"], first.columns)
        found, about = tags.recognise(first, wanted)
        data = found | data
        several = data.setdefault("multi_label", False)
        if not several and len(wanted) == 1:
            _check_classes(first, *wanted)
        what = f"labels in {data['label_key']!r}"
        if about and not found.keys() & given.keys():
            what += f" ({about})"
    # A table of test images often has no labels.
    names = [k for k, each in tables.items() if {*wanted} <= {*each.columns}]
    sizes = table.split_sizes(str(path))
    if names == [table.WHOLE]:
        names = list(sizes)
    train = first_of(TRAIN, names) or table.WHOLE
    if train not in names:
        raise _none_to_train_on(path, names)
    description = f"a table with paths in {data['image_key']!r} and {what}"
    validation, test = first_of(VALIDATION, names), first_of(TEST, names)
    unused = [k for k in sizes if k not in (train, validation, test)]
    if unused:
        listed = ", ".join(f"{sizes[k]:,} rows of split {k!r}" for k in unused)
        description += f"; {listed} are not used"
    layout = Layout(data | {"split": train}, validation, test, description)
    return _with_validation(layout, workdir)


def _check_classes(of: table.Table, column: str) -> None:
    """Raises UserError for numbers that are measurements rather than classes."""
    names = [table.text_of(row.get(column)) for row in of.rows]
    names, numbers = list(filter(None, names)), []
    for name in {*names}:
        with contextlib.suppress(ValueError):  # Others are names of classes.
            numbers.append(float(name.replace(",", ".")))
    numbers.sort()
    count = len(numbers)
    in_order = numbers in ([*range(count)], [*range(1, count + 1)])
    if 2 * count > len(names) and not in_order:
        raise UserError(
            f"{of.path} has {count:,} different numbers in the {len(names):,} labels of "
            f"column {column!r}, too many for classes: give the column of classes with "
            "--config.data.label_key, write ranges as classes, such as '20 to 29', or "
            f"predict the numbers with --target={column}"
        )


def set_name(place: str) -> str:
    """Returns `data.name` of a data set, such as hf://datasets/owner/name on the hub.

    Raises:
      UserError: the place looks like a path, which does not exist.
    """
    name = place
    has_owner = place.count("/") == 1 and not place.startswith((".", "/", "~"))
    if has_owner and place.split("/")[0] not in SOURCES and ":" not in place:
        name = f"hf://datasets/{place}"
    if not parquet.is_hub(name) and ("/" in name or name.startswith((".", "~"))):
        raise UserError(
            f"{place} does not exist as a folder or table: give a folder of "
            "images, a CSV, TSV, JSON Lines or Parquet file, or the name of a data set"
        )
    return name


def hub_columns(
    name: str, given: Mapping, *, labelled: bool = True
) -> tuple[list[str], dict[str, object]]:
    """Returns the splits of a data set of the hub, and keys about its columns.

    These are `image_key`, `label_key` and, for several labels per image, `multi_label`.

    Args:
      name: `data.name`.
      given: keys of `config.data` set by the user.
      labelled: whether to look for the column of labels.

    Raises:
      UserError: the set cannot be downloaded, or its columns have unusual names.
    """
    files = parquet.files_of_splits(parquet.download(name), name)
    first = files[first_of(TRAIN, files) or next(iter(files))]
    known = parquet.column_names(first[0])
    keys: dict = columns(known, name, given, labelled=labelled)
    if labelled and keys["label_key"] in known:
        found, _ = tags.of_cells(parquet.label_cells(first, keys["label_key"]))
        keys |= found if found["multi_label"] else {}
    return list(files), keys


def _of_name(place: str, given: Mapping, workdir: str) -> Layout:
    name, data = set_name(place), dict(given)
    if parquet.is_hub(name):
        labelled = not (given.get("mask_key") or given.get("target_key"))
        names, keys = hub_columns(name, given, labelled=labelled)
        data = keys | data
    else:
        entry = catalogue.ENTRIES.get(name)
        try:
            opened = open_unchecked(_config({"name": name, **data}), "train")
        except UserError as error:
            raise UserError(
                f"{place} does not exist as a folder or table, nor as a data set: {error}"
            ) from error
        numbering = getattr(opened, "numbering", None)
        names = list(numbering.sizes) if numbering else ["train"]
        if entry and "test" in entry.splits:
            names = [n for n in names if n in ("train", entry.splits["test"])]
    if not (train := first_of(TRAIN, names)):
        listed = ", ".join(names)
        raise UserError(f"{place} has the splits {listed}, but no training split")
    validation, test = first_of(VALIDATION, names), first_of(TEST, names)
    description = f"a data set with the splits {', '.join(names)}"
    if data.get("multi_label"):
        description += f", and several labels per image in {data['label_key']!r}"
    data = {"name": name, **data, "split": train}
    if not workdir:
        return Layout(data, validation, test, description)
    # Such sources are often sorted by class: a part at the end would lack classes.
    by_parts = parquet.is_hub(name) or name == IN_MEMORY or data.get("group_key")
    if not validation and by_parts:
        return _set_aside(Layout(data, "", test, description))
    if not validation:
        kept = round(100 * (1 - HELD_OUT))
        validation, data["split"] = f"{train}[{kept}%:]", f"{train}[:{kept}%]"
        description += f"; the last {100 - kept} % of its training images are held out"
    return Layout(data, validation, test, description)


def _with_validation(layout: Layout, workdir: str) -> Layout:
    """Holds out a part of the training images if there is no validation split."""
    _check_groups(layout)
    if layout.validation:
        return layout
    if layout.config.mask_key or layout.config.target_key:
        return _set_aside(layout)
    if not workdir:
        return layout
    path, data = epath.Path(split_file(workdir)), layout.data
    source = layout.open(data["split"])
    labels = source.known_labels()
    labels = read_labels(source) if labels is None else labels
    key, of_groups = f"data.group_key={data.get('group_key')!r}", ""
    if source.record_groups is None:
        apart = held_out([str(label) for label in labels])
    else:
        apart = groups.held_out(source.record_groups, labels, key)
        known = np.array(source.record_groups)
        of_groups = f"{len({*known[apart]}):,} of {len({*known}):,} groups"
    if of_groups and not apart.any():
        raise UserError(
            f"{key}: each class is in one group only, so that none can be held out for "
            "validation: give other groups, or leave it out"
        )
    if not apart.any():
        raise UserError(
            f"{data['data_dir']} has one image of each class: give two or more of a "
            "class, so that one can be held out for validation"
        )
    names = [VALIDATION[0] if each else TRAIN[0] for each in apart]
    separator = tags.unused_separator(source.class_names)
    rows = [_row(source, i, name, separator) for i, name in enumerate(names)]
    if layout.test:
        tests = layout.open(layout.test)
        rows += [_row(tests, i, TEST[0], separator) for i in range(len(tests))]
    write_rows(path, rows)
    several = {"multi_label": True} if data.get("multi_label") else {}
    if several:
        several["label_separator"] = separator
    data = without_place(data) | several
    data |= {"name": "table", "data_dir": str(path), "split": TRAIN[0]}
    if of_groups:
        data["group_key"] = _GROUP
    return Layout(
        data,
        VALIDATION[0],
        TEST[0] if layout.test else "",
        f"{layout.description}; {apart.sum():,} of {len(source):,} images, "
        f"{of_groups or 'the same part of each class'}, held out for validation: {path}",
    )


def _set_aside(layout: Layout) -> Layout:
    """Holds out a fifth of the training images, or one image if there are under five."""
    whole, place = (
        layout.data["split"],
        layout.data.get("data_dir", layout.data["name"]),
    )
    source = layout.open(whole)
    count = min(_PARTS, len(source))
    part = "the training images"
    if source.record_groups is not None:
        known = len({*source.record_groups})
        count, part = min(count, known), f"the {known:,} groups of training images"
    if len(source) < 2:
        raise UserError(
            f"{place} has one training image: give two or more, so that one can be "
            "held out for validation"
        )
    description = f"{layout.description}; a part of {part} is held out"
    layout = dataclasses.replace(layout, description=description, whole=whole)
    return _parted(layout, max(1, count - 1), max(2, count))


def _parted(layout: Layout, fold: int, count: int) -> Layout:
    """Holds out one of `count` parts of `whole`: every `count`-th image, or groups."""
    kind = "grouped" if layout.data.get("group_key") else "interleaved"
    parts = [f"{kind}_splits({layout.whole}, {count})[{i}]" for i in range(count)]
    validation = parts.pop(fold)
    data = layout.data | {"split": "+".join(parts)}
    return dataclasses.replace(layout, data=data, validation=validation)


def take_fold(layout: Layout, fold: int, count: int) -> Layout:
    """Returns the layout for one fold; updates the list of the split in a workdir.

    Args:
      fold: number of the fold that validates, from 0.
      count: number of folds.

    Raises:
      UserError: the images have a validation split, or there are too few images.
    """
    if layout.whole:
        images = len(layout.open(layout.whole))
        _check_folds(count, images, images)
        return _parted(layout, fold, count)
    path = epath.Path(layout.data.get("data_dir", ""))
    if path.name != SPLIT_FILE:
        raise UserError(
            f"folds={count}: there is a validation split, but folds are parts of the "
            "training images: leave it out"
        )
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    trained = [row for row in rows if row[table.SPLIT] != TEST[0]]
    labels = [row["label"] for row in trained]
    if _GROUP in rows[0]:
        several = layout.data.get("multi_label")
        if several:
            labels = [labels_in(x, layout.data["label_separator"]) for x in labels]
        names = [row[_GROUP] for row in trained]
        folds = groups.folds(names, labels, count, f"folds={count}")
    else:
        folds = splits.folds(labels, count)
    _check_folds(count, len({*folds.tolist()} - {-1}), len(trained))
    for row, number in zip(trained, folds, strict=True):
        row[table.SPLIT] = VALIDATION[0] if number == fold else TRAIN[0]
    write_rows(path, rows)
    return layout


def _check_folds(count: int, filled: int, images: int) -> None:
    if filled < count:
        raise UserError(f"folds={count}: {images} images are too few: lower it")


def without_place(data: Mapping) -> dict:
    """Returns keys of `config.data` without those of the place and of its labels."""
    dropped = (*PLACE, "name", "split", "label_key", "multi_label")
    dropped += ("label_separator", "group_key")
    kept = (set(fields.fields(DataConfig)) & data.keys()) - {*dropped}
    return {key: data[key] for key in kept}


def write_rows(path: epath.Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Writes a CSV file; its columns are the keys of the first row."""
    text = io.StringIO()
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    lines.writeheader()
    lines.writerows(rows)
    replace_text(path, text.getvalue())


def split_file(workdir: str) -> str:
    """Returns the path of the list of the split in a workdir."""
    return str(absolute(workdir) / SPLIT_FILE)


def columns(
    known: Sequence[str], place: str, given: Mapping, *, labelled: bool = True
) -> dict[str, str]:
    """Returns `image_key`, and `label_key` if labelled, from usual names of columns.

    Args:
      known: names of the columns.
      place: table or data set, for messages.
      given: keys of `config.data` set by the user; they take precedence.
      labelled: whether to look for the column of labels.

    Raises:
      UserError: no column has a usual name.
    """
    keys = {}
    wanted = [("image_key", IMAGES), ("label_key", LABELS)]
    for key, usual in wanted[: 1 + labelled]:
        keys[key] = given.get(key) or first_of(usual, known)
        if not keys[key]:
            raise UserError(
                f"{place} has the columns {', '.join(known)}: give the one with the "
                f"{'images' if key == 'image_key' else 'labels'} as --config.data.{key}"
            )
    return keys


def _row(
    source: folder.FolderSource, i: int, split: str, separator: str
) -> dict[str, str]:
    label = source.labels_of_paths[i]
    numbers = label if isinstance(label, list) else [label]
    names = separator.join(source.class_names[number] for number in numbers)
    path = os.path.abspath(source.describe(i))
    row = {"image": path, "label": names, table.SPLIT: split}
    if source.record_groups is not None:
        row[_GROUP] = source.record_groups[i]
    return row


def _flag_columns(of: table.Table) -> list[str]:
    """Returns the columns with only 1 and 0, -1 or nothing, one column per class."""
    flags = {
        name: {table.flag(row.get(name)) for row in of.rows} for name in of.columns
    }
    return [name for name, seen in flags.items() if 1 in seen and None not in seen]
