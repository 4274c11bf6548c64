"""Image folders: data_dir/<split>/<class>/**/image files.

A folder without splits, data_dir/<class>/**, is one split named "all", which has the
parts "train" and "val": "val" is a fifth of each class, drawn with a fixed seed; with
`data.group_key` the two parts have no group in common, see groups.py. If
labels are not read (`data.num_classes` is 0), folders are not classes: a split is every
image below its folder, data_dir/<split>/**. Files and folders whose names begin with
".", and folders named __pycache__ or __MACOSX, are ignored. Links that lead out of
data_dir are followed, since data sets are often composed of links. A link back into
data_dir would count images twice, possibly with two labels, and is an error.
"""

import collections
import dataclasses
import functools
import hashlib
import os
import pathlib
import stat
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Integer

from vit_jax.config.fields import Registry
from vit_jax.data import groups, splits
from vit_jax.data.config import DataConfig
from vit_jax.data.fingerprint import Entries
from vit_jax.data.sources.base import (
    Beside,
    Source,
    SourceType,
    SplitRequest,
    composed,
    read_file,
    warn,
    warn_of_twins,
)
from vit_jax.errors import NoLabels, NoSplit, UserError

# Names of image files; the format is detected from the content.
EXTENSIONS = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp"),
    *(".tif", ".tiff", ".ppm", ".pgm", ".avif", ".heic", ".heif", ".npy", ".npz"),
)
# Key of `config.data` -> class that reads parts of records from files beside the
# images.
BESIDE = Registry(
    {
        "caption_key": "vit_jax.data.captions:CaptionFiles",
        "target_key": "vit_jax.data.fields.target:TargetFiles",
    }
)
WHOLE = "all"  # The only split of a folder without splits.
PARTS = (splits.TRAIN[0], splits.VALIDATION[0])  # Parts of the split "all".
_USUAL = (*splits.TRAIN, *splits.VALIDATION, *splits.TEST)
_LEFT_BY_PROGRAMS = ("__pycache__", "__MACOSX")


@dataclasses.dataclass(frozen=True)
class FolderSource(Source):
    """Image files on disk.

    Attributes:
      root: folder of the data set.
      paths: paths of the images relative to `root`.
      labels_of_paths: label of each image, or its labels; None if labels are not read.
      class_names: names in label order.
      sizes: bytes of each image file.
      beside: parts of records that are read from other files.
      record_groups: group of each image, see `Source`.
    """

    root: str
    paths: list[str]
    labels_of_paths: list[int] | list[list[int]] | None
    class_names: tuple[str, ...]
    sizes: Integer[np.ndarray, " N"]
    beside: Sequence[Beside] = ()
    record_groups: Sequence[str] | None = None
    images = labels = None  # Not in memory.

    @classmethod
    def of_splits(
        cls,
        root: str,
        files: Mapping[str, list[tuple]],
        classes: Sequence[str],
        chosen: Sequence[tuple[str, Sequence[int]]],
        beside: Sequence[Beside] = (),
        group_of: Mapping[str, str] | None = None,
    ) -> "FolderSource":
        """Returns the source of the files that `splits.select` chose.

        Args:
          root: folder of the data set.
          files: split -> (path, label, bytes) of each of its files.
          classes: names of the classes; if empty, labels are not read.
          chosen: output of `splits.select`.
          beside: parts of records that are read from other files.
          group_of: group of each file; None without groups.
        """
        rows = [files[name][i] for name, numbers in chosen for i in numbers]
        paths = [path for path, _, _ in rows]
        return cls(
            root,
            paths,
            [label for _, label, _ in rows] if classes else None,
            tuple(classes),
            np.array([size for _, _, size in rows], np.int64),
            beside,
            None if group_of is None else [group_of[path] for path in paths],
        )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> dict:
        record = {"image": read_file(self.describe(i))}
        if self.labels_of_paths is not None:
            record["label"] = self.labels_of_paths[i]
        for each in self.beside:
            record[each.name] = each.read(self.root, self.paths[i])
        return record

    def describe(self, i: int) -> str:
        return os.path.join(self.root, self.paths[i])

    def record_id(self, i: int) -> str:
        return self.paths[i]

    def known_labels(self) -> np.ndarray | list[list[int]] | None:
        labels = self.labels_of_paths
        if labels is None or isinstance(labels[0], list):  # Several labels per image.
            return labels
        return np.array(labels, np.int64)

    def known_targets(self) -> np.ndarray | None:
        for each in self.beside:
            if each.name == "targets":
                return np.array([each.read(self.root, path) for path in self.paths])
        return None

    def entries(self) -> Entries:
        labels = self.known_labels()
        if isinstance(labels, list):
            sums = (zlib.crc32(repr(each).encode()) for each in labels)
            labels = np.fromiter(sums, np.int64)
        more = {each.part: each.entries(self.root, self.paths) for each in self.beside}
        return Entries("image files", self.paths, labels, self.sizes, more)

    def locate(self, record_ids: Sequence[str]) -> Integer[np.ndarray, " M"]:
        wanted = set(record_ids)
        # Records of other splits are not listed here, but their files exist.
        for path in sorted(wanted.difference(self.paths)):
            if not os.path.isfile(os.path.join(self.root, path)):
                raise KeyError(path)
        numbers = [i for i, path in enumerate(self.paths) if path in wanted]
        return np.array(numbers, np.int64)


def open_folder(
    data_dir: str,
    split: str,
    train_split: str,
    only: Sequence[str] = (),
    *,
    labelled: bool = True,
    group_key: str = "",
) -> FolderSource:
    """Lists the image files of a split.

    Records are in the order of hashes of their paths instead of sorted by class, so
    that a slice such as train[:90%] has every class and is the same on every machine.

    Args:
      data_dir: folder with one folder per split, or with the folders of the classes.
      split: expression over the names of these folders, or over "all", "train" and
        "val" for a folder without splits.
      train_split: expression of the training split; the folders in its first folder are
        the classes, sorted.
      only: classes to read, in the order of their numbers; if empty, all.
      labelled: whether folders are classes; if not, every image below a split is a
        record.
      group_key: `data.group_key`, a rule on file names; "" without groups.

    Raises:
      NoSplit, NoLabels: the split's folder, or a class folder in it, is missing.
      UserError: a folder is empty or cannot be listed, a class is not one of training,
        or a link leads back into data_dir.
    """
    root = pathlib.Path(data_dir).expanduser()
    if not data_dir or not root.is_dir():
        raise UserError(
            f"data.data_dir={data_dir!r} is not a folder: data.name='folder' reads "
            "data_dir/<split>/<class>/*.jpg"
        )
    first = splits.names(train_split)[0]
    parts = [] if only else _parts(root, (first, *splits.names(split)), labelled)
    folder_of = lambda name: WHOLE if name in parts else name
    classes = list(only)
    if labelled and not only:
        folders = _class_folders(root, folder_of(first))
        classes = sorted({*map(composed, folders)})
        warn_of_twins("classes", classes)
    whole = _folder(root, folder_of(first)) == root
    if split == train_split and not only and not whole:
        _name_other_folders(root, labelled)
    files, group_of = {}, {} if group_key else None
    for name in splits.names(split):
        at, labels = folder_of(name), None
        if labelled:
            labels = _labels(root, at, train_split, classes, only)
        files[name] = _files(root, at, labels)
        if group_key:
            group_of |= groups.of_files(group_key, files[name], root)
        if name in parts:
            files[name] = _part(root, name, files[name], group_of, group_key)
    sizes = {name: len(rows) for name, rows in files.items()}
    parts_of = (
        None if group_of is None else groups.of_splits(files, group_of, group_key)
    )
    chosen = splits.select(split, sizes, str(root), parts_of)
    return FolderSource.of_splits(str(root), files, classes, chosen, group_of=group_of)


def _labels(
    root: pathlib.Path,
    split: str,
    train_split: str,
    classes: Sequence[str],
    only: Sequence[str],
) -> dict[str, int]:
    """Returns the label of each class folder of a split."""
    folder = _folder(root, split)
    folders = {name: composed(name) for name in _class_folders(root, split)}
    names = set(folders.values())
    extra = sorted(names.difference(classes))
    if extra and not only:
        raise UserError(
            f"{folder} has class {extra[0]!r}, which the training split "
            f"{train_split!r} lacks: its classes are {', '.join(classes)}"
        )
    if missing := sorted(set(only).difference(names)):
        raise UserError(f"{folder} lacks class {missing[0]!r}")
    numbers = {name: label for label, name in enumerate(classes)}
    return {each: numbers[n] for each, n in folders.items() if n in numbers}


def splits_of(data_dir: str | os.PathLike) -> list[str]:
    """Returns the splits of a folder that have class folders.

    They are folders, or the parts "train" and "val" if the folders are classes.

    Raises:
      UserError: the splits are one level below, or a folder cannot be listed.
    """
    names = split_folders(data_dir)
    if splits.first_of(_USUAL, names):
        return names
    if deeper := inside(data_dir, classes=False):
        raise UserError(f"{data_dir} has no folders of splits; {deeper}")
    return [name for name in PARTS if has_split(data_dir, name)] or names


def has_split(data_dir: str | os.PathLike, name: str, *, labelled: bool = True) -> bool:
    """Returns whether a folder has a split: a folder (`is_split`) or a part of "all"."""
    part = _parts(pathlib.Path(data_dir), (name,), labelled)
    return bool(part) or is_split(data_dir, name, labelled=labelled)


def first_split(data_dir: str, order: Sequence[str], *, labelled: bool = True) -> str:
    """Returns the first split of `order` that a folder has, or ""."""
    root = os.path.expanduser(data_dir)
    names = (name for name in order if has_split(root, name, labelled=labelled))
    return next(names, "")


def class_folders(data_dir: str | os.PathLike) -> list[str]:
    """Returns the folders with images of a folder without splits, sorted.

    The result is empty if a folder with class folders has the name of a split, or if
    all folders have such names: then folders are not labels.
    """
    if splits.first_of(_USUAL, split_folders(data_dir)):
        return []
    names = _with_images(data_dir)
    return [] if all(splits.first_of(_USUAL, [name]) for name in names) else names


def inside(data_dir: str | os.PathLike, *, classes: bool = True) -> str:
    """Returns a hint if the splits are in a folder one level below, else "".

    With `classes`, the hint is also returned for a folder that has class folders.
    """
    names = class_folders(data_dir)
    if len(names) != 1:
        return ""
    below = pathlib.Path(data_dir, names[0])
    names = _with_images(below)
    usual = [name for name in names if splits.first_of(_USUAL, [name])]
    if usual:
        return f"{below} has the splits {', '.join(usual)}: give that folder"
    if classes and len(names) > 1:
        return f"{below} has the folders {', '.join(names[:5])}: give that folder"
    return ""


def _with_images(folder: str | os.PathLike) -> list[str]:
    names = visible_folders(folder)
    return [name for name in names if is_split(folder, name, labelled=False)]


def _parts(root: pathlib.Path, names: Sequence[str], labelled: bool) -> list[str]:
    """Returns the names that are parts of a folder of class folders."""
    wanted = [n for n in names if n in PARTS and not (root / n).is_dir()]
    if not wanted or not root.is_dir():
        return []
    # Without labels, images may be outside of class folders.
    loose = not labelled and any(map(_is_image, _entries(root)))
    classes = class_folders(root)
    # If all folders have folders with images, they may be splits with other names.
    splits_too = classes == split_folders(root) or (root / WHOLE).is_dir()
    return wanted if len(classes) > 1 and not loose and not splits_too else []


def _part(
    root: pathlib.Path,
    name: str,
    files: list[tuple],
    group_of: Mapping[str, str] | None,
    group_key: str,
) -> list[tuple]:
    """Returns the files of the part "train" or "val" of a folder."""
    number = {name: str(k) for k, name in enumerate(visible_folders(root))}
    classes = [number[path.split("/")[0]] for path, _, _ in files]
    if group_of is None:
        held_out = splits.held_out(classes)
    else:
        names = [group_of[path] for path, _, _ in files]
        held_out = groups.held_out(names, classes, f"data.group_key={group_key!r}")
    kept = held_out if name == splits.VALIDATION[0] else ~held_out
    return [files[i] for i in np.flatnonzero(kept)]


def split_folders(data_dir: str | os.PathLike) -> list[str]:
    """Returns the names of the folders that are splits, sorted; see `is_split`."""
    return [name for name in visible_folders(data_dir) if is_split(data_dir, name)]


def is_split(data_dir: str | os.PathLike, name: str, *, labelled: bool = True) -> bool:
    """Returns whether a folder in data_dir has a class folder with images.

    If not `labelled`, it only needs images. A folder that cannot be listed counts as a
    split: opening it raises the error.
    """
    folder = os.path.join(data_dir, name)
    has_data = _any_folder_with_images if labelled else _has_images
    try:
        return os.path.isdir(folder) and has_data(_entries(folder))
    except UserError:
        return True


def _any_folder_with_images(entries: list[os.DirEntry]) -> bool:
    # Links are not followed here, since they may form a circle; opening checks that.
    return any(
        is_folder(entry) and (entry.is_symlink() or _has_images(_entries(entry.path)))
        for entry in entries
    )


def _has_images(entries: list[os.DirEntry]) -> bool:
    return any(map(_is_image, entries)) or _any_folder_with_images(entries)


def _is_image(entry: os.DirEntry) -> bool:
    return entry.name.lower().endswith(EXTENSIONS) and not is_folder(entry)


@functools.cache
def _name_other_folders(root: pathlib.Path, labelled: bool) -> None:
    """Warns once per process of folders beside the splits that are not splits."""
    for name in visible_folders(root):
        if not is_split(root, name, labelled=labelled):
            lacking = "class folder with images" if labelled else "images"
            warn(f"{root}: folder {name!r} has no {lacking}; it is skipped")


def _folder(root: pathlib.Path, split: str) -> pathlib.Path:
    """Returns the folder of a split."""
    whole = split == WHOLE and not (root / WHOLE).is_dir()
    return root if whole else root / split


def _check_split(root: pathlib.Path, split: str, whole: str) -> None:
    """Raises NoSplit if a split has no folder; `whole` describes the split "all"."""
    folder, names = _folder(root, split), visible_folders(root)
    deeper = "/" in split and folder.is_dir()  # Such as "fog/3" in ImageNet-C.
    if folder != root and split not in names and not deeper:
        remedy = f"{whole} one split named {WHOLE!r}: write --config.data.split={WHOLE}[:90%]"
        raise NoSplit(
            f"split {split!r}: no folder {folder}; {root} has "
            f"{', '.join(names) or 'no folders'}; {inside(root) or remedy}"
        )


def _class_folders(root: pathlib.Path, split: str) -> list[str]:
    _check_split(root, split, "if those are classes, they are")
    folder = _folder(root, split)
    classes = visible_folders(folder)
    if not classes:
        raise NoLabels(
            f"{folder} has no class folders: it must look like {folder}/<class>/*.jpg"
        )
    return classes


def visible_folders(folder: str | os.PathLike) -> list[str]:
    """Returns the names of the folders in a folder, sorted, without ignored ones."""
    return sorted(entry.name for entry in _entries(folder) if is_folder(entry))


def is_folder(entry: os.DirEntry) -> bool:
    """Returns whether an entry is a folder or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # A link to itself.
        return False


def is_ignored(entry: os.DirEntry) -> bool:
    """Returns whether an entry is hidden, or a folder that programs leave behind."""
    by_program = entry.name in _LEFT_BY_PROGRAMS and is_folder(entry)
    return by_program or entry.name.startswith(".")


def _entries(folder: str | os.PathLike) -> list[os.DirEntry]:
    try:
        return [entry for entry in os.scandir(folder) if not is_ignored(entry)]
    except OSError as error:
        raise UserError(
            f"{folder} cannot be listed ({error.strerror}): give read permission or "
            "remove it"
        ) from error


def _files(
    root: pathlib.Path, split: str, classes: Mapping[str, int] | None
) -> list[tuple[str, int | None, int]]:
    """Returns (path relative to root, label, bytes) in the order of their hashes.

    `classes` are the labels of the class folders; None if labels are not read.
    """
    if classes is None:
        _check_split(root, split, "all images below it are")
    folder, inside = _folder(root, split), os.path.realpath(root)
    above = () if folder == root else _followed(folder, inside, ())
    files = []
    for name, label in ({"": None} if classes is None else classes).items():
        here = folder / name
        through = _followed(here, inside, above) if name else above
        images = _images(root, os.path.relpath(here, root), inside, through)
        if not images:
            what, remedy = "class folder ", "remove the folder"
            if classes is None:
                what, remedy = "", "name another split"
            raise UserError(
                f"{what}{here} has no images ({', '.join(EXTENSIONS)}): add some, or {remedy}"
            )
        files += [(path, label, size) for path, size in images]
    return in_order(files)


def in_order(files: list[tuple]) -> list[tuple]:
    """Sorts tuples by the hash of their first member, a path."""

    def digest(file: tuple) -> bytes:
        return hashlib.blake2b(file[0].encode(), digest_size=16).digest()

    return sorted(files, key=digest)


def images_below(root: pathlib.Path, folder: str) -> list[tuple[str, int]]:
    """Returns the images below a folder of `root`: path relative to it, and bytes.

    Raises:
      UserError: a folder cannot be listed, or a link leads back into `root`.
    """
    inside = os.path.realpath(root)
    through = _followed(root / folder, inside, ())
    return _images(root, folder, inside, through)


def other_files(folder: str | os.PathLike) -> collections.Counter[str]:
    """Returns the number of files below a folder that are not images, by extension.

    `images_below` must have checked the folder: its links do not form a circle.
    """
    counts = collections.Counter()
    for entry in _entries(folder):
        if is_folder(entry):
            counts += other_files(entry.path)
        elif not entry.name.lower().endswith(EXTENSIONS):
            counts[os.path.splitext(entry.name)[1].lower()] += 1
    return counts


def _images(
    root: pathlib.Path, folder: str, inside: str, above: tuple[str, ...]
) -> list[tuple[str, int]]:
    """Returns the images below a folder of `root`: path relative to it, and bytes.

    Args:
      root: folder of the data set.
      folder: folder relative to `root`.
      inside: real path of `root`.
      above: targets of the links on the way to `folder`.
    """
    images = []
    for entry in _entries(os.path.join(root, folder)):
        path = os.path.join(folder, entry.name)
        if is_folder(entry):
            through = _followed(entry.path, inside, above)
            images += _images(root, path, inside, through)
        elif entry.name.lower().endswith(EXTENSIONS):
            if entry.is_symlink():
                _followed(entry.path, inside, ())
            images.append((pathlib.PurePath(path).as_posix(), _bytes_of(entry)))
    return images


def _bytes_of(entry: os.DirEntry) -> int:
    try:
        about = entry.stat()
    except OSError:  # A broken link, which counts as a damaged record when it is read.
        return 0
    if not stat.S_ISREG(about.st_mode):
        raise UserError(f"{entry.path} is a pipe or a device, not a file: remove it")
    return about.st_size


def _followed(
    path: str | os.PathLike, inside: str, above: tuple[str, ...]
) -> tuple[str, ...]:
    """Returns `above`, with the target if a path is a link; refuses circles."""
    if not os.path.islink(path):
        return above
    target = os.path.realpath(path)
    if os.path.commonpath([inside, target]) == inside:
        raise UserError(
            f"{path} is a link back into the data set, to {target}: its images would "
            "count twice; remove the link"
        )
    if any(os.path.commonpath([target, other]) == target for other in (inside, *above)):
        raise UserError(f"{path} is a link to {target}, in a circle: remove the link")
    return *above, target


def _folder_of_config(data: DataConfig, split: str) -> FolderSource:
    labelled = data.has_labels
    how = {"labelled": labelled, "group_key": data.group_key}
    source = open_folder(data.data_dir, split, data.split, **how)
    return dataclasses.replace(source, beside=files_beside(data))


def files_beside(data: DataConfig) -> tuple[Beside, ...]:
    """Returns the parts of records that a config reads from files beside the images."""
    values = {key: getattr(data, key) for key in BESIDE}
    return tuple(BESIDE[key](value) for key, value in values.items() if value)


def _eval_splits(
    data: DataConfig, request: SplitRequest
) -> tuple[Sequence[str], DataConfig]:
    """Returns the requested splits that exist, and `data` with an existing `split`."""
    root, labelled = os.path.expanduser(data.data_dir), data.has_labels
    has = functools.partial(has_split, root, labelled=labelled)
    # Class folders without splits are read as a whole if the run does not train on
    # them.
    whole = request.model_classes and not (request.given or request.trained)

    def exists(split):
        first = splits.names(split)[0]
        is_folder = first == WHOLE or os.path.isdir(os.path.join(root, first))
        return is_folder or (not whole and has(first))

    if request.given:
        existing = list(filter(exists, request.splits))
    else:
        if whole:
            has = functools.partial(is_split, root, labelled=labelled)
        existing = list(filter(has, request.splits))[:1]
    if not existing and whole and not exists(data.split) and not inside(root):
        existing = [WHOLE]
        if class_folders(root):
            warn(
                f"evals.{request.name}: {data.data_dir} has no folders of splits: all "
                "images are read; split=val is the part that training leaves out"
            )
    if not existing and os.path.isdir(root):
        how = f"split=, such as {WHOLE}"
        if labelled and not request.model_classes:
            how = f"train= and test=, such as {WHOLE}[:50%] and {WHOLE}[50%:]"
        if labelled:
            how += " if its folders are the classes"
        lacking = " or ".join(map(repr, request.splits))
        if not request.given:
            lacking += f" {'of class folders ' if labelled else ''}with images"
        remedy = inside(root) or f"add it, or set {how}"
        raise NoSplit(
            f"evals.{request.name}: {os.path.normpath(data.data_dir)} has no folder {lacking}: "
            f"{remedy}"
        )
    existing = existing or list(request.splits)
    if not exists(data.split):  # Its class folders define the classes.
        data = dataclasses.replace(data, split=existing[0])
    return existing, data


FOLDER = SourceType(
    open=_folder_of_config,
    help="Image files, `data.data_dir`/SPLIT/CLASS/**; without labels SPLIT/**.",
    numbered=False,
    eval_splits=_eval_splits,
)
