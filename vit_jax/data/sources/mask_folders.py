"""Folders of images and folders of their masks: data.name="masks".

`data.mask_key` is the folder of the masks, such as "masks" or "annotations"; the folder
of the images is `data.image_key` or one of `IMAGE_FOLDERS`. The layout is recognised
from the folders:

  images/**, masks/**               one split, "all", with the parts "train" and "val"
  images/SPLIT/**, masks/SPLIT/**   ADE20K: images/training, annotations/training
  SPLIT/images/**, SPLIT/masks/**
  leftImg8bit/SPLIT/CITY/**, gtFine/SPLIT/CITY/**                  Cityscapes
  JPEGImages, SegmentationClass, ImageSets/Segmentation/SPLIT.txt  PASCAL VOC

An image and its mask have the same path below their folders, except for the file
extension and for one of `SUFFIXES`. "train" and "val" also stand for splits named
"training" and "validation". Names of the classes are the lines of classes.txt, beside
the folder of the masks or in it, or those of the data set. Classes of ADE20K count from
1: set `data.reduce_zero_label`.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import re
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import UInt8

from vit_jax.data import class_names, masks, splits
from vit_jax.data.config import DataConfig
from vit_jax.data.sources import folder
from vit_jax.data.sources.base import SourceType, warn
from vit_jax.data.sources.folder import WHOLE, FolderSource
from vit_jax.errors import NoLabels, UserError

_OF_CITYSCAPES = "leftImg8bit"
IMAGE_FOLDERS = ("images", "image", "imgs", "img", "JPEGImages", _OF_CITYSCAPES)
# Folders of masks that are recognised if `data.mask_key` is not set.
MASK_FOLDERS = ("masks", "mask", "annotations", "labels", "SegmentationClass", "gtFine")
# Suffixes of a mask's name after the image's name; the first that exists is used.
_LABEL_IDS = "_labelIds"
SUFFIXES = (
    *("_gtFine_labelTrainIds", "_gtCoarse_labelTrainIds", "_labelTrainIds"),
    *("_gtFine_labelIds", "_gtCoarse_labelIds", _LABEL_IDS),
    *("_mask", "_masks", "_label", "_labels", "_seg", "_segmentation", "_gt"),
)
# Suffixes of files of Cityscapes that are not masks of classes.
_NO_MASKS = tuple(
    f"{kind}_{what}"
    for kind in ("_gtFine", "_gtCoarse")
    for what in ("color", "instanceIds", "instanceTrainIds")
)
_OF_IMAGES = f"_{_OF_CITYSCAPES}"
# Folders that the archives of ADE20K and PASCAL VOC contain.
_WITHIN = ("ADEChallengeData2016", "VOCdevkit/VOC2012", "VOC2012")
_LISTS = "ImageSets/Segmentation"
_USUAL = (splits.TRAIN, splits.VALIDATION, splits.TEST)
# A folder with such a name, as COCO's "train2017", and the folders beside it are
# splits.
_SPLIT = re.compile(f"({'|'.join(itertools.chain(*_USUAL))})(?![a-z])")

Colors = tuple[tuple[int, int, int], ...]
File = tuple[str, int]  # Path relative to the root, and bytes.
Pair = tuple[File, File]  # An image and its mask.

# http://host.robots.ox.ac.uk/pascal/VOC/voc2012/segexamples
VOC_CLASSES = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car"),
    *("cat", "chair", "cow", "diningtable", "dog", "horse", "motorbike", "person"),
    *("pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
# Train ids from 0 on: name, id and colour (github.com/mcordts/cityscapesScripts,
# labels.py).
CITYSCAPES_CLASSES = (
    ("road", 7, (128, 64, 128)),
    ("sidewalk", 8, (244, 35, 232)),
    ("building", 11, (70, 70, 70)),
    ("wall", 12, (102, 102, 156)),
    ("fence", 13, (190, 153, 153)),
    ("pole", 17, (153, 153, 153)),
    ("traffic light", 19, (250, 170, 30)),
    ("traffic sign", 20, (220, 220, 0)),
    ("vegetation", 21, (107, 142, 35)),
    ("terrain", 22, (152, 251, 152)),
    ("sky", 23, (70, 130, 180)),
    ("person", 24, (220, 20, 60)),
    ("rider", 25, (255, 0, 0)),
    ("car", 26, (0, 0, 142)),
    ("truck", 27, (0, 0, 70)),
    ("bus", 28, (0, 60, 100)),
    ("train", 31, (0, 80, 100)),
    ("motorcycle", 32, (0, 0, 230)),
    ("bicycle", 33, (119, 11, 32)),
)
_NO_TRAIN_ID = 255


@dataclasses.dataclass(frozen=True)
class MaskFolderSource(FolderSource):
    """Image files and their masks."""

    class_colors: Colors = ()


class _Masks(masks.MaskFiles):
    """Masks that replace the ids of Cityscapes by train ids."""

    def read(self, root, path):
        mask = super().read(root, path)
        if pathlib.PurePath(self.files[path][0]).stem.endswith(_LABEL_IDS):
            return train_ids()[masks.decode_mask(mask)]
        return mask


def train_ids() -> UInt8[np.ndarray, "256"]:
    """Returns the train id of each id of Cityscapes; 255 for ids without a train id."""
    table = np.full(256, _NO_TRAIN_ID, np.uint8)
    for train_id, (_, label_id, _) in enumerate(CITYSCAPES_CLASSES):
        table[label_id] = train_id
    return table


def open_masks(data: DataConfig, split: str) -> MaskFolderSource:
    """Lists the images of a split that have a mask, in an order hashed from their paths.

    Raises:
      NoSplit: the split does not exist.
      NoLabels: `data.mask_key` is not set.
      UserError: no layout is recognised, or no image has a mask.
    """
    if not data.mask_key:
        raise NoLabels(
            "data.name='masks' has no labels of images: set data.mask_key to the folder of "
            "the masks; data.name='folder' reads only images"
        )
    root = _root(data)
    places = _places(root, data)
    wanted = {name: _spelt(name, places) for name in splits.names(split)}
    pairs, files, group_of = {}, {}, {} if data.group_key else None
    for name, place in wanted.items():
        if place not in places:
            continue
        listed = _pairs(root, place, *places[place])
        if place == WHOLE != name:  # A part, "train" or "val".
            listed = _part(listed, name)
        pairs |= {image[0]: mask for image, mask in listed}
        files[name] = [(path, None, size) for (path, size), _ in listed]
        if data.group_key:
            group_of |= folder.groups_of(data.group_key, files[name], root)
    known = dict.fromkeys(places, 0) | {name: len(rows) for name, rows in files.items()}
    parts_of = None
    if group_of is not None:
        parts_of = folder.grouping(files, group_of, data.group_key)
    chosen = splits.select(split, known, str(root), parts_of)
    beside = _Masks(pairs), *folder.files_beside(data)
    source = MaskFolderSource.of_splits(str(root), files, (), chosen, beside, group_of)
    names, colors = _classes(root, data)
    return dataclasses.replace(source, class_names=names, class_colors=colors)


def usual_mask_key(data_dir: str | os.PathLike) -> str:
    """Returns the folder of the masks if a folder has one of the layouts, else ""."""
    for key in MASK_FOLDERS:
        data = DataConfig(data_dir=str(data_dir), mask_key=key, num_classes=1)
        with contextlib.suppress(UserError):
            root = _root(data)
            of_masks = [place[1] for place in _places(root, data).values()]
            # In detection data sets these folders have text files.
            there = (where for where in of_masks if (root / where).is_dir())
            if any(folder.images_below(root, where) for where in there):
                return key
    return ""


def split_names(data: DataConfig) -> list[str]:
    """Returns the splits that have masks, as the data set calls them.

    Raises:
      UserError: no layout is recognised.
    """
    root = _root(data)
    places = _places(root, data).items()
    return [name for name, (_, where, _) in places if (root / where).is_dir()]


def _root(data: DataConfig) -> pathlib.Path:
    """Returns the folder of the data set: `data.data_dir`, or one of `_WITHIN` in it."""
    top = pathlib.Path(data.data_dir).expanduser()
    there = folder.visible_folders(top) if data.data_dir and top.is_dir() else []
    for root in (top, *(top / name for name in _WITHIN)):
        if there and (root / data.mask_key).is_dir():
            return root
    if any((top / name / data.mask_key).is_dir() for name in there):
        return top
    raise UserError(
        f"data.data_dir={data.data_dir!r} has no folder {data.mask_key!r} (data.mask_key), "
        f"nor has a split in it; its folders are {', '.join(there) or 'none'}: data.name="
        "'masks' reads masks/ beside images/, with or without SPLIT/ in or around both, "
        "PASCAL VOC, ADE20K and Cityscapes"
    )


def _places(
    root: pathlib.Path, data: DataConfig
) -> dict[str, tuple[str, str, Sequence[str] | None]]:
    """Returns, for each split, the folders of images and masks, and a list of names.

    The list is None if all images of the folder are in the split.
    """
    if not (root / data.mask_key).is_dir():
        folders = {
            name: (f"{name}/{images}", f"{name}/{data.mask_key}", None)
            for name in folder.visible_folders(root)
            if (images := _image_folder(root / name, data))
            and (root / name / data.mask_key).is_dir()
        }
        if not folders:
            raise UserError(_no_images(root, data))
        return folders
    images = _image_folder(root, data)
    if not images:
        raise UserError(_no_images(root, data))
    if lists := sorted((root / _LISTS).glob("*.txt")):
        read = lambda path: [line.split()[:1] for line in path.read_text().splitlines()]
        names = {path.stem: list(itertools.chain(*read(path))) for path in lists}
        return {name: (images, data.mask_key, listed) for name, listed in names.items()}
    below = folder.visible_folders(root / images)
    if any(_SPLIT.match(name.lower()) for name in below):
        inside = lambda name: (f"{images}/{name}", f"{data.mask_key}/{name}", None)
        return {name: inside(name) for name in below}
    return {WHOLE: (images, data.mask_key, None)}


def _image_folder(root: pathlib.Path, data: DataConfig) -> str:
    names = (data.image_key, *IMAGE_FOLDERS)
    return next((name for name in names if (root / name).is_dir()), "")


def _no_images(root: pathlib.Path, data: DataConfig) -> str:
    return (
        f"{root} has a folder {data.mask_key!r} of masks, but no folder of images "
        f"beside it ({', '.join(IMAGE_FOLDERS)}): name it by data.image_key"
    )


def _spelt(name: str, places: Mapping[str, object]) -> str:
    """Returns the data set's name of a split, such as "training" for "train"."""
    if name in places:
        return name
    if list(places) == [WHOLE] and name in folder.PARTS:
        return WHOLE
    usual = next((usual for usual in _USUAL if name in usual), ())
    return splits.first_of(usual, places) or name


def _part(pairs: list[Pair], name: str) -> list[Pair]:
    """Returns the part "train" or "val" of a set without splits."""
    held_out = splits.held_out([""] * len(pairs))
    kept = held_out if name in splits.VALIDATION else ~held_out
    return [pairs[i] for i in np.flatnonzero(kept)]


def _pairs(
    root: pathlib.Path,
    split: str,
    images: str,
    of_masks: str,
    listed: Sequence[str] | None,
) -> list[Pair]:
    """Returns the images of a split and their masks; warns of images without a mask."""
    pictures = _by_stem(root, images)
    by_stem = _by_stem(root, of_masks) if (root / of_masks).is_dir() else {}
    for name in listed or ():
        if name not in pictures:
            raise UserError(
                f"{root / _LISTS / split}.txt lists {name!r}, and {root / images} has no "
                "image of that name: remove the line"
            )
    if listed is not None:
        pictures = {name: pictures[name] for name in listed}
    pairs = _match(pictures, by_stem)
    if not pairs:
        raise UserError(
            f"none of the {len(pictures):,} images of split {split!r} in {root / images} has "
            f"a mask of its name in {root / of_masks}; names may differ by the ending and by "
            f"{', '.join(SUFFIXES)}"
        )
    alone = [file for file in pictures.values() if file not in pairs]
    known = {stem.removesuffix(_OF_IMAGES) for stem in pictures} | pictures.keys()
    others = {file for stem, file in by_stem.items() if not known & set(_stems(stem))}
    # With a list, the other masks belong to other splits.
    _warn_of_others(f"{root} {split}", alone, sorted(others) if listed is None else [])
    return [(file, pairs[file]) for file in folder.in_order(list(pairs))]


def _match(
    pictures: Mapping[str, File], mask_files: Mapping[str, File]
) -> dict[File, File]:
    """Returns the masks of images, for images that have one."""
    by_image = {}
    for suffix in ("", *SUFFIXES):
        for stem, file in mask_files.items():
            if stem.endswith(suffix):
                by_image.setdefault(stem.removesuffix(suffix), file)
    pairs = {
        file: mask_files.get(stem) or by_image.get(stem.removesuffix(_OF_IMAGES))
        for stem, file in pictures.items()
    }
    return {file: mask for file, mask in pairs.items() if mask}


def _stems(stem: str) -> list[str]:
    """Returns the names of images that a file in the folder of masks may belong to."""
    ends = ("", *SUFFIXES, *_NO_MASKS)
    return [stem.removesuffix(end) for end in ends if stem.endswith(end)]


def _warn_of_others(where: str, pictures: list[File], others: list[File]) -> None:
    parts = [
        f"{len(files):,} {what}, such as {files[0][0]}"
        for files, what in (
            (pictures, "images have no mask"),
            (others, "masks have no image"),
        )
        if files
    ]
    if parts:
        warn(f"{where}: {', and '.join(parts)}: they are left out")


def _by_stem(root: pathlib.Path, where: str) -> dict[str, File]:
    """Returns the files below a folder by their paths in it without file extension.

    Raises:
      UserError: two paths differ only in the extension.
    """
    files = {}
    for path, size in sorted(folder.images_below(root, where)):
        stem = os.path.splitext(os.path.relpath(path, where))[0]
        if stem in files:
            raise UserError(
                f"{root / path} and {root / files[stem][0]} differ only in the "
                "extension: images and masks are matched by names without it; remove one"
            )
        files[stem] = path, size
    return files


def _classes(root: pathlib.Path, data: DataConfig) -> tuple[tuple[str, ...], Colors]:
    """Returns names and colours of the classes; () if they are unknown."""
    names, colors = (), ()
    if (root / _LISTS).is_dir():
        # Data sets with other classes use this layout too.
        first = int(data.reduce_zero_label)
        if data.num_classes == len(VOC_CLASSES) - first:
            names = VOC_CLASSES[first:]
            colors = masks.palette(len(VOC_CLASSES))[first:].tolist()
    cityscapes = _image_folder(root, data) == _OF_CITYSCAPES
    if cityscapes and data.num_classes == len(CITYSCAPES_CLASSES):
        names, _, colors = zip(*CITYSCAPES_CLASSES, strict=True)
    if (path := root / "objectInfo150.txt").is_file():
        _, *lines = class_names.read(path, str(path))
        # The last column has synonyms, such as "building, edifice".
        names = [line.split("\t")[-1].split(",")[0] for line in lines]
    for path in (root / data.mask_key / "classes.txt", root / "classes.txt"):
        if path.is_file():
            names = class_names.read(path, str(path))
    return tuple(map(str.strip, names)), tuple(map(tuple, colors))


MASKS = SourceType(
    open=open_masks,
    help="Folders of images and of masks below `data.data_dir`; ADE20K, Cityscapes, VOC.",
    numbered=False,
    has_masks=True,
)
