"""Image folders: data_dir/<split>/<class>/**/image files."""

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer

from vit_jax.data import splits
from vit_jax.errors import UserError

# Which files are images; what they hold is found from their content.
EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp")


@dataclasses.dataclass(frozen=True)
class FolderSource:
    """Image files on disk; paths are relative to `root`."""

    root: str
    paths: list[str]
    labels_of_paths: list[int]
    class_names: tuple[str, ...]
    images = labels = None  # Not in memory.

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> dict:
        image = pathlib.Path(self.describe(i)).read_bytes()
        return {"image": image, "label": self.labels_of_paths[i]}

    def describe(self, i: int) -> str:
        return os.path.join(self.root, self.paths[i])

    def record_id(self, i: int) -> str:
        return self.paths[i]

    def locate(self, record_ids: Sequence[str]) -> Integer[np.ndarray, " M"]:
        wanted = set(record_ids)
        found = [i for i, path in enumerate(self.paths) if path in wanted]
        # Those of other splits are known too, but not listed here.
        for path in sorted(wanted.difference(self.paths)):
            if not os.path.isfile(os.path.join(self.root, path)):
                raise KeyError(path)
        return np.array(found, np.int64)


def open_folder(data_dir: str, split: str, train_split: str) -> FolderSource:
    """Lists the image files of a split.

    Records stand in an order hashed from their paths, not sorted by class, so that
    a slice as train[:90%] holds every class and is the same on every machine.

    Args:
      data_dir: folder that holds one folder a split.
      split: expression over the names of those folders.
      train_split: expression of the training split, whose first folder defines the
        classes: its folders' names, sorted.

    Raises:
      UserError: a folder is missing or empty, or a class is not one of training.
    """
    root = pathlib.Path(data_dir).expanduser()
    if not data_dir or not root.is_dir():
        raise UserError(
            f"data.data_dir={data_dir!r} is not a folder: data.name='folder' reads "
            "data_dir/<split>/<class>/*.jpg"
        )
    train_name = splits.names(train_split)[0]
    classes = _class_folders(root, train_name)
    files = {}
    for name in splits.names(split):
        extra = sorted(set(_class_folders(root, name)) - set(classes))
        if extra:
            raise UserError(
                f"{root / name} has class {extra[0]!r}, which the training split "
                f"{root / train_name} lacks: its classes are {', '.join(classes)}"
            )
        files[name] = _files(root, name, classes)
    sizes = {name: len(found) for name, found in files.items()}
    chosen = [
        files[name][i]
        for name, numbers in splits.select(split, sizes, str(root))
        for i in numbers
    ]
    return FolderSource(
        root=str(root),
        paths=[path for path, _ in chosen],
        labels_of_paths=[label for _, label in chosen],
        class_names=tuple(classes),
    )


def _class_folders(root: pathlib.Path, split: str) -> list[str]:
    there = _visible_folders(root)
    if split not in there:
        raise UserError(
            f"split {split!r}: no folder {root / split}; "
            f"{root} has {', '.join(there) or 'no folders'}"
        )
    classes = _visible_folders(root / split)
    if not classes:
        raise UserError(
            f"{root / split} has no class folders: it must look like "
            f"{root / split}/<class>/*.jpg"
        )
    return classes


def _visible_folders(folder: pathlib.Path) -> list[str]:
    entries = (e for e in os.scandir(folder) if not e.name.startswith("."))
    return sorted(entry.name for entry in entries if entry.is_dir())


def _files(root: pathlib.Path, split: str, classes: list[str]) -> list[tuple[str, int]]:
    """Returns (path relative to root, label) in the order of the paths' hashes."""
    found = []
    for class_name in _visible_folders(root / split):
        paths = _image_paths(root, f"{split}/{class_name}")
        if not paths:
            raise UserError(
                f"class folder {root / split / class_name} has no images "
                f"({', '.join(EXTENSIONS)}): add some or remove the folder"
            )
        found += [(path, classes.index(class_name)) for path in paths]
    return sorted(found, key=lambda item: _digest(item[0]))


def _image_paths(root: pathlib.Path, folder: str) -> list[str]:
    paths = []
    for where, folders, names in os.walk(root / folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [
            pathlib.Path(where, name).relative_to(root).as_posix()
            for name in names
            if not name.startswith(".") and name.lower().endswith(EXTENSIONS)
        ]
    return paths


def _digest(path: str) -> bytes:
    return hashlib.blake2b(path.encode(), digest_size=16).digest()
