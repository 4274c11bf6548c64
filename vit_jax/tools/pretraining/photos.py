"""Determines the training and held-out images of a user's photographs, without labels.

Places are folders of any depth, image files, tables of paths, tar shards, a data set of
TFDS or of the hub, or arrays in memory. A list of image files and their splits is
written to the workdir, so that several folders are one data set and a run resumes on
the same images. Data sets are cut by split expressions.
"""

import collections
import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from etils import epath

from vit_jax.data import splits
from vit_jax.data.config import DataConfig
from vit_jax.data.decode import DamagedImage
from vit_jax.data.sources import folder, key_of, mask_folders, parquet, table, tar
from vit_jax.data.sources.base import Source, composed, read_file, read_record
from vit_jax.data.sources.open import open_unchecked
from vit_jax.data.splits import TEST, TRAIN, VALIDATION, first_of
from vit_jax.errors import UserError
from vit_jax.tools.finetuning import layout
from vit_jax.weights.checkpoint_folders import absolute

CHOSEN_FILE = "pretrain.json"  # File in the workdir with the chosen config.
LIST_FILE = "photos.csv"  # File in the workdir with the split of each image.
UNLABELLED = "unlabelled"  # Split of training images without a class.
UNUSED = "unused"  # Split of held-out images without a class if others have one.
NO_LABELS = "none"  # Value of `labels` for folders that are not classes.
HELD_OUT, LEAST_HELD_OUT, MOST_HELD_OUT = 0.05, 2, 500
# With labels, up to this fraction and number of images are held out: of few images,
# 5 % give no accuracy.
LABELLED_HELD_OUT, FEW = 0.2, 100
LEAST = 4  # Images: two to train on and two held out.
# Number of parts of a data set, each of which ends with held-out records.
_BLOCKS = 20
_WITHOUT_LABELS = (UNLABELLED, "unlabeled", "unsupervised")  # Splits of data sets.
# Folders beside those of masks that hold masks of other kinds.
_MORE_MASKS = ("SegmentationObject", "gtCoarse")
_ENDINGS = 5  # Most file extensions in a line.
_LIST_KEYS = {"name": "table", "label_key": "label", "image_key": "image"}


@dataclasses.dataclass(frozen=True)
class Photos:
    """The splits of a user's photographs.

    Attributes:
      data: keys of `config.data`, without labels and with the training split as
        `split`.
      validation: split of held-out images, which training never reads.
      count: number of training images.
      description: the images and their arrangement, for the log.
      labelled: keys of an evaluation of features, such as k-NN, in `config.evals`: data
        set, `train` and `test`; None without labels. See `find` for overlaps.
    """

    data: dict
    validation: str
    count: int
    description: str
    labelled: dict | None = None

    @property
    def config(self) -> DataConfig:
        """Config of the data."""
        return DataConfig(**self.data)

    def open(self, split: str) -> Source:
        """Opens a split without labels."""
        return open_unchecked(self.config, split)


@dataclasses.dataclass(frozen=True)
class _File:
    """An image file.

    Attributes:
      path: absolute path.
      name: path that does not depend on the location of the folders.
      split: split of the list; "" if images may be held out of it.
      label: name of the class; "" if unknown.
    """

    path: str
    name: str
    size: int
    split: str = ""
    label: str = ""


def find(
    places: Sequence[str],
    given: Mapping[str, object],
    workdir: str,
    labels: str = "",
) -> Photos:
    """Determines the training and held-out images of places.

    Image files: if a place has folders of splits, such as PHOTOS/train and PHOTOS/val,
    those with names of validation and test splits are not trained on, and test images
    are not read at all; every other image of the place is trained on. Otherwise all
    images are. 5 % of the training images, 2 to 500, are held out with a fixed seed as
    `validation`, or up to 500 of the images in folders of validation splits if there
    are such folders. Held-out images are never trained on.

    Folders of classes are PHOTOS/CLASS/*.jpg or PHOTOS/train/CLASS/*.jpg, with two
    classes or more, and no images elsewhere in PHOTOS or PHOTOS/train. With them, at
    least one image of each class is held out, and of fewer than 2,000 images more than
    5 %: 100 images, but not more than a fifth. `labelled` then learns from the training
    images that have a class (the network was trained on them too, without their
    labels), and is scored on the held-out images of `validation`, or on all images in
    folders of validation splits.

    With `labels`, `labelled` learns from the training split of that place and is scored
    on its validation split, as `finetune` divides it. Files of its validation and test
    split are left out of the training and held-out images if the same files are among
    them; files of its training split are trained on. `validation` is then a part of the
    other images. If `labels` equals a place, its folders of classes are used as
    above, or for a data set, its labels: `labelled` learns from the training
    records and is scored on the held-out ones.

    Args:
      places: folders, image files and tables of paths; or one folder of tar shards, or
        one name of a data set, such as `IN_MEMORY` for arrays.
      given: keys of `config.data` set by the user, such as "image_key"; they take
        precedence.
      workdir: folder for the list of images.
      labels: place with labels, see `layout.find`; NO_LABELS if folders are not classes.

    Raises:
      UserError: a place does not exist or has no images, there are fewer than four
        images, or all images are equal.
    """
    given = {key: each for key, each in given.items() if key != "mask_key"}
    there = [os.path.exists(os.path.expanduser(place)) for place in places]
    if not all(places) or not places:
        raise UserError("no photographs: give a folder, a table or a data set")
    if not all(there):
        if len(places) == 1:
            return _of_name(places[0], given, workdir, labels)
        place = places[there.index(False)]
        raise UserError(
            f"{place} does not exist as a file or folder: several places must be folders "
            "of images, image files or tables of paths; give a data set alone"
        )
    # A place may itself be a link.
    paths = [pathlib.Path(place).expanduser().resolve() for place in places]
    if any(map(_is_of_shards, paths)):
        root = _folder_of_shards(paths)
        labelled = labels and os.path.realpath(os.path.expanduser(labels))
        is_same = labelled == os.path.realpath(root)
        return _of_shards(root, given, workdir, str(root) if is_same else labels)
    return _of_files(paths, given, workdir, labels)


def list_file(workdir: str) -> str:
    """Returns the path of the list of images in a workdir."""
    return str(absolute(workdir) / LIST_FILE)


def with_workdir(raw: Mapping, workdir: str) -> dict:
    """Returns a stored config that reads the lists in a workdir that was moved.

    Args:
      raw: config of an earlier start, as nested dicts.
      workdir: present path of the workdir.
    """
    lists = {
        LIST_FILE: list_file(workdir),
        layout.SPLIT_FILE: layout.split_file(workdir),
    }

    def moved(section: Mapping) -> dict:
        path = section.get("data_dir", "")
        above, name = os.path.split(path)
        # A table of the user may have the name of a list.
        is_list = not os.path.exists(path) or CHOSEN_FILE in os.listdir(above or ".")
        if name in lists and is_list:
            return {**section, "data_dir": lists[name]}
        return {**section}

    evals = {name: moved(each) for name, each in raw.get("evals", {}).items()}
    return {**raw, "data": moved(raw["data"]), "evals": evals}


def _of_files(
    paths: Sequence[pathlib.Path], given: Mapping, workdir: str, labels: str
) -> Photos:
    files, notes = [], []
    for number, path in enumerate(paths):
        one, note = _files(path, given, labelled=labels != NO_LABELS)
        notes += [f"{path}: {each}" if len(paths) > 1 else each for each in note]
        if len(paths) > 1:
            one = [
                dataclasses.replace(each, name=f"{number}/{each.name}") for each in one
            ]
        files += one
    if len(paths) > 1:  # Places may contain each other.
        by_path = {os.path.realpath(each.path): each for each in reversed(files)}
        files = list(by_path.values())
    where = " and ".join(map(str, paths[:3])) + ", ..." * (len(paths) > 3)
    labelled = None
    given_paths = {os.path.realpath(path) for path in paths}
    is_same = labels and os.path.realpath(os.path.expanduser(labels)) in given_paths
    has_classes = any(each.label for each in files)
    if labels and labels != NO_LABELS and not (is_same and has_classes):
        labelled, apart = _labels_of(labels, workdir)
        files = [dataclasses.replace(each, label="") for each in files]
        kept = [each for each in files if os.path.realpath(each.path) not in apart]
        if gone := len(files) - len(kept):
            notes.append(f"images left out that {labels} holds out: {gone:,}")
        files = kept
    if len(files) < LEAST:
        raise _too_few(where, len(files), notes)
    if _all_equal(_contents(files)):
        raise UserError(_equal(where, len(files)))
    rows = _divided([files[i] for i in _order(files)])
    counts = collections.Counter(each.split for each in rows)
    count, held = counts[TRAIN[0]] + counts[UNLABELLED], counts[VALIDATION[0]]
    if not count:
        raise UserError(f"{where} has no images outside of its validation split")
    _check_held_out(where, held)
    with_labels = counts[TRAIN[0]] and any(each.label for each in rows)
    path = epath.Path(list_file(workdir))
    layout.write_rows(path, [_row(each, bool(with_labels)) for each in rows])
    data = layout.without_place(given) | {
        "name": "table",
        "data_dir": str(path),
        "split": "+".join(name for name in (TRAIN[0], UNLABELLED) if counts[name]),
        "num_classes": 0,
    }
    validation = VALIDATION[0]
    if with_labels:
        labelled = _LIST_KEYS | {"data_dir": str(path)}
        labelled |= {"train": TRAIN[0], "test": validation}
        classes = len({each.label for each in rows} - {""})
        notes.insert(0, f"folders of {classes:,} classes")
    if held > MOST_HELD_OUT and not _is_drawn(files):
        validation = f"{validation}[:{MOST_HELD_OUT}]"
    notes.append(f"{held:,} held out: {path}")
    description = f"{len(rows):,} images in {where}; {'; '.join(notes)}"
    return Photos(data, validation, count, description, labelled)


def _files(
    path: pathlib.Path, given: Mapping, *, labelled: bool
) -> tuple[list[_File], list[str]]:
    """Returns the images of a place, and notes on omitted files."""
    if path.is_file() and path.name.lower().endswith(folder.EXTENSIONS):
        return [_File(str(path), path.name, path.stat().st_size)], []
    if path.is_file():
        return _of_table(path, given)
    images = folder.images_below(path, ".")
    others = folder.other_files(path)
    if not images:
        if table.tables_in(path):
            return _of_table(path, given)
        raise UserError(_no_images(path, others))
    notes = []
    images, masks, where = _without_masks(path, images)
    if masks:
        notes.append(f"masks left out: {masks:,} ({where})")
    if bad := [name for name, size in images if not size or not _is_text(name)]:
        notes.append(
            "files left out that are empty, broken links or not named in UTF-8: "
            f"{len(bad):,}, such as {bad[0]!a}"
        )
    if others:
        listed = ", ".join(filter(None, (k for k, _ in others.most_common(_ENDINGS))))
        notes.append(
            f"other files left out: {others.total():,} ({listed or 'no extension'})"
        )
    left_out = {*bad}
    files = [
        _File(os.path.join(path, name), name, size)
        for name, size in images
        if name not in left_out
    ]
    files, more = _by_folders(files, labelled=labelled)
    return files, notes + more


def _of_table(path: pathlib.Path, given: Mapping) -> tuple[list[_File], list[str]]:
    """Returns the images that a table lists."""
    if path.is_file() and not table.is_table(path):
        raise UserError(
            f"{path} is neither an image nor a table of paths: give a folder of "
            "images (unpack an archive), a CSV, TSV, JSON Lines or Parquet file, or "
            "tar shards"
        )
    tables = table.read_splits(str(path))
    first = tables[first_of(TRAIN, tables) or next(iter(tables))]
    if len(first.columns) == 1:
        given = {"image_key": first.columns[0], **given}
    keys = {"name": "table", "data_dir": str(path), "num_classes": 0}
    keys |= {key: given[key] for key in ("image_dir", "image_suffix") if key in given}
    keys |= layout.columns(first.columns, str(first.path), given, labelled=False)
    names = table.split_names(str(path))
    train = first_of(TRAIN, names)
    validation, test = ("", "")
    if train:
        validation, test = first_of(VALIDATION, names), first_of(TEST, names)
    files, notes = [], []
    for name in names:
        if name == test:
            notes.append(f"split {name!r} left out")
            continue
        source = open_unchecked(DataConfig(**keys, split=name), name)
        split = VALIDATION[0] if name == validation else ""
        files += [
            _File(os.path.abspath(source.describe(i)), each, size, split)
            for i, (each, size) in enumerate(
                zip(source.paths, source.sizes.tolist(), strict=True)
            )
        ]
    return files, notes


def _without_masks(
    path: pathlib.Path, images: Sequence[tuple[str, int]]
) -> tuple[list[tuple[str, int]], int, str]:
    """Returns the images that are not masks, the number of masks and their place."""
    key = mask_folders.usual_mask_key(path)
    of_masks = {key, *_MORE_MASKS} if key else set()
    stems = {os.path.splitext(name)[0] for name, _ in images}

    def is_mask(name: str) -> bool:
        if of_masks and not of_masks.isdisjoint(name.split("/")[:-1]):
            return True
        stem = os.path.splitext(name)[0]
        return stem.endswith(mask_folders.SUFFIXES) and any(
            stem.endswith(suffix) and stem.removesuffix(suffix) in stems
            for suffix in mask_folders.SUFFIXES
        )

    kept = [each for each in images if not is_mask(each[0])]
    where = f"the folder {key!r}" if key else "names such as *_mask.png"
    return kept, len(images) - len(kept), where


def _by_folders(
    files: Sequence[_File], *, labelled: bool
) -> tuple[list[_File], list[str]]:
    """Returns files with their splits and classes by the names of their folders."""
    parts = [tuple(each.name.split("/")) for each in files]
    # A folder around everything is not a class.
    while len({each[0] for each in parts}) == 1 and min(map(len, parts)) > 1:
        parts = [each[1:] for each in parts]
    tops = {each[0] for each in parts if len(each) > 1}
    train, notes = first_of(TRAIN, tops), []
    validation, test = first_of(VALIDATION, tops), first_of(TEST, tops)
    # Without folders in it or splits beside it, "train" may be a class of vehicles.
    deep = any(each[0] == train and len(each) > 2 for each in parts)
    if not train or not (validation or test or deep):
        classes = _classes(parts) if labelled else []
        return _with_classes(files, classes), notes
    rows = list(zip(files, parts, strict=True))
    inside = lambda top: [row for row in rows if row[1][0] == top and len(row[1]) > 1]
    trained, held = inside(train), inside(validation)
    names = _classes([each[1:] for _, each in trained]) if labelled else []
    trained = _with_classes([each for each, _ in trained], names)
    # Images of other classes, or of none, cannot be scored.
    known = {*names}
    class_of = lambda of: composed(of[1]) if len(of) == 3 else ""
    classes = [class_of(of) if class_of(of) in known else "" for _, of in held]
    if not any(classes):
        trained = [
            dataclasses.replace(each, label="") if held else each for each in trained
        ]
    held = [
        dataclasses.replace(each, label=label, split=VALIDATION[0])
        for (each, _), label in zip(held, classes, strict=True)
    ]
    # Of several validation splits, the first one is used.
    usual = {*VALIDATION, *TEST}
    unread = sorted(each for each in tops - {validation} if each.lower() in usual)
    splits_of = (train, validation, *unread)
    others = [each for each, of in rows if len(of) == 1 or of[0] not in splits_of]
    for each in unread:
        notes.append(f"images of {each!r} left out: {len(inside(each)):,}")
    return [*trained, *others, *held], notes


def _classes(parts: Sequence[Sequence[str]]) -> list[str]:
    """Returns the class of each path CLASS/FILE; [] if folders are not classes.

    They are if there are two or more with two or more images each on average, and no
    image is outside of them or deeper.
    """
    if any(len(each) != 2 for each in parts):
        return []
    names = [composed(each[0]) for each in parts]
    count = len({*names})
    return names if 2 <= count <= len(names) / 2 else []


def _with_classes(files: Iterable[_File], classes: Sequence[str]) -> list[_File]:
    if not classes:
        return list(files)
    pairs = zip(files, classes, strict=True)
    return [dataclasses.replace(each, label=label) for each, label in pairs]


def _divided(files: Sequence[_File]) -> list[_File]:
    """Returns files with the split of each; holds out a part if none is yet."""
    apart = np.array([bool(each.split) for each in files])
    if not apart.any():
        labelled = np.array([bool(each.label) for each in files])
        pool = np.flatnonzero(labelled) if labelled.any() else np.arange(len(files))
        groups = [files[i].label for i in pool]
        share = _held_out_count(len(pool), labelled=labelled.any()) / len(pool)
        apart[pool[splits.held_out(groups, share)]] = True
    some = any(each.label for each in files)
    names = {True: (TRAIN[0], VALIDATION[0]), False: (UNLABELLED, UNUSED)}
    return [
        dataclasses.replace(each, split=names[bool(each.label) or not some][int(held)])
        for each, held in zip(files, apart, strict=True)
    ]


def _held_out_count(images: int, *, labelled: bool) -> int:
    """Returns the number of images to hold out."""
    count = round(HELD_OUT * images)
    if labelled:
        count = max(count, min(FEW, round(LABELLED_HELD_OUT * images)))
    return min(max(count, LEAST_HELD_OUT), MOST_HELD_OUT)


def _is_drawn(files: Sequence[_File]) -> bool:
    return not any(each.split for each in files)


def _order(files: Sequence[_File]) -> list[int]:
    """Returns the numbers of files in the order of hashes of their names."""
    named = [(each.name, i) for i, each in enumerate(files)]
    return [i for _, i in folder.in_order(named)]


def _row(file: _File, with_labels: bool) -> dict[str, str]:
    label = {"label": file.label} if with_labels else {}
    return {"image": file.path, **label, table.SPLIT: file.split}


def _labels_of(labels: str, workdir: str) -> tuple[dict, set[str]]:
    """Returns keys of an evaluation on labelled images, and files not to train on."""
    source_layout = layout.find(labels, {}, workdir)
    layout.check_one_class(source_layout, f"labels={labels}")
    labelled = _of_evaluation(source_layout.data)
    labelled |= {"train": source_layout.data["split"], "test": source_layout.validation}
    apart = set()
    for split in filter(None, (source_layout.validation, source_layout.test)):
        source = source_layout.open(split)
        if isinstance(source, folder.FolderSource):
            apart |= {os.path.realpath(source.describe(i)) for i in range(len(source))}
    return labelled, apart


def _of_evaluation(data: Mapping) -> dict:
    """Returns the keys of `config.data` that an evaluation has, too."""
    keys = ("name", "data_dir", "image_key", "label_key")
    return {key: data[key] for key in keys if key in data}


def _is_of_shards(path: pathlib.Path) -> bool:
    """Returns whether a place is a tar file, or a folder with some and without images."""
    if path.is_file():
        return path.name.endswith(tar.ENDINGS)
    folders = [path, *(path / name for name in folder.visible_folders(path))]
    return any(map(_has_shards, folders)) and not folder.images_below(path, ".")


def _has_shards(path: pathlib.Path) -> bool:
    try:
        with os.scandir(path) as entries:
            return any(entry.name.endswith(tar.ENDINGS) for entry in entries)
    except OSError:  # Listing its images raises the same error.
        return False


def _folder_of_shards(paths: Sequence[pathlib.Path]) -> pathlib.Path:
    """Returns the place of tar shards: a path, or the folder whose shards are all given."""
    if len(paths) == 1:
        return paths[0]
    above = paths[0].parent
    files = tar.tar_files(above.iterdir())
    if {*paths} != {*files}:
        raise UserError(
            f"{paths[0]} is given with other places: tar shards are given as one folder, "
            "which has all of them and no others"
        )
    return above


def _of_shards(root: pathlib.Path, given: Mapping, workdir: str, labels: str) -> Photos:
    """Returns the splits of tar shards; `labels` may be the same place."""
    names = list(tar.find(root, str(root)))
    train = first_of(TRAIN, names) or names[0]
    data = {**given, "name": "tar", "data_dir": str(root), "num_classes": 0}
    source = open_unchecked(DataConfig(**data, split=train), train)
    return _of_records(str(root), data, source, train, workdir, labels)


def _of_name(place: str, given: Mapping, workdir: str, labels: str) -> Photos:
    """Returns the splits of a data set; `labels` may be its name."""
    name = layout.set_name(place)
    data, names = {"name": name, **given, "num_classes": 0}, [TRAIN[0]]
    if parquet.is_hub(name):
        names, keys = layout.hub_columns(name, given, labelled=False)
        data = keys | data
    train = first_of(TRAIN, names) or names[0]
    try:
        source = open_unchecked(DataConfig(**data, split=train), train)
    except UserError as error:
        raise UserError(
            f"{place} does not exist as a folder or table, or cannot be read as a data "
            f"set: {error}"
        ) from error
    return _of_records(place, data, source, train, workdir, labels)


def _of_records(
    place: str, data: Mapping, source: Source, train: str, workdir: str, labels: str
) -> Photos:
    """Returns the splits of an open source, whose training split is `train`."""
    numbering = source.split_numbering()
    sizes = numbering.sizes if numbering else {train: len(source)}
    trained = [train]
    trained += [s for s in sizes if s.lower() in _WITHOUT_LABELS and s not in trained]
    total, is_labelled = sum(sizes[name] for name in trained), labels == place
    validation = first_of(VALIDATION, [name for name in sizes if name not in trained])
    if total + sizes.get(validation, 0) < LEAST:
        raise _too_few(place, total, [])
    if _all_equal(_images(source)):
        raise UserError(_equal(place, len(source)))
    notes = [f"a data set with the splits {', '.join(sizes)}"]
    if validation:
        test, held = validation, min(sizes[validation], MOST_HELD_OUT)
        _check_held_out(place, held)
        kept, count = "+".join(trained), total
        if sizes[validation] > MOST_HELD_OUT:
            validation += f"[:{MOST_HELD_OUT}]"
    else:
        # Records of TFDS are shuffled; those of other sets are often sorted by class.
        blocks = 1 if not key_of(data["name"]) else _BLOCKS
        # Only splits with labels can score them.
        pool = [train] if is_labelled else trained
        cut = functools.partial(_cut, blocks=blocks, labelled=is_labelled)
        parts = [cut(name, sizes[name]) for name in pool]
        rest = [name for name in trained if name not in pool]
        kept = "+".join([*(part for part, _, _ in parts), *rest])
        validation = test = "+".join(part for _, part, _ in parts)
        held = sum(number for _, _, number in parts)
        count = total - held
    labelled = None
    if is_labelled:
        labelled = _of_evaluation(data)
        learnt = "+".join(part for part, _, _ in parts) if parts else train
        labelled |= {"train": learnt, "test": test}
    elif labels and labels != NO_LABELS:
        labelled, _ = _labels_of(labels, workdir)
    notes.append(f"{held:,} images held out")
    description = f"{count + held:,} images in {place}; {'; '.join(notes)}"
    return Photos({**data, "split": kept}, validation, count, description, labelled)


def _cut(name: str, size: int, *, blocks: int, labelled: bool) -> tuple[str, str, int]:
    """Returns expressions of the kept and the held-out records, and their number.

    A split is divided into equal blocks, and the end of each is held out.
    """
    count = min(_held_out_count(size, labelled=labelled), size // 2)
    blocks = min(blocks, count)
    kept, held = [], []
    for i in range(blocks):
        start, stop = i * size // blocks, (i + 1) * size // blocks
        middle = stop - ((i + 1) * count // blocks - i * count // blocks)
        kept.append(f"{name}[{start}:{middle}]")
        held.append(f"{name}[{middle}:{stop}]")
    return "+".join(kept), "+".join(held), count


def _is_text(name: str) -> bool:
    """Returns whether a file name can be written in UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _contents(files: Sequence[_File]) -> Iterable[object]:
    """Yields contents of files; only two if their sizes already differ."""
    others = [each for each in files if each.size != files[0].size]
    for each in [files[0], others[0]] if others else files:
        try:
            yield read_file(each.path)
        except OSError as error:  # Left to `data.on_error`.
            yield error


def _images(source: Source) -> Iterable[object]:
    for i in range(len(source)):
        try:
            yield read_record(source, i)["image"]
        except DamagedImage as error:  # Left to `data.on_error`.
            yield error


def _all_equal(images: Iterable[object]) -> bool:
    """Returns whether all images are equal; stops at the first that differs."""
    images = iter(images)
    first = next(images)
    same = np.array_equal if isinstance(first, np.ndarray) else lambda a, b: a == b
    return all(same(first, each) for each in images)


def _equal(where: object, count: int) -> str:
    return (
        f"{where} has {count:,} images that are all equal: give different photographs"
    )


def _check_held_out(where: object, count: int) -> None:
    if count < LEAST_HELD_OUT:
        raise UserError(
            f"{where} has one image in its validation split, but features of held-out "
            f"images are compared: give {LEAST_HELD_OUT} or more there, or leave out the "
            "split"
        )


def _too_few(where: object, count: int, notes: Sequence[str]) -> UserError:
    left_out = f" ({'; '.join(notes)})" if notes else ""
    images = "one image" if count == 1 else f"{count} images"
    return UserError(
        f"{where} has {images}{left_out}: give {LEAST} or more; two of them are held out"
    )


def _no_images(path: pathlib.Path, others: Mapping[str, int]) -> str:
    has = ", ".join(f"{n:,} {key or 'without extension'}" for key, n in others.items())
    return (
        f"{path} has no images at any depth{f', only files {has}' if has else ''}: give a "
        f"folder with files {', '.join(folder.EXTENSIONS[:5])} and so on, a table of "
        "paths, or tar shards"
    )
