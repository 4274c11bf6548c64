"""Scans a data set for near-duplicates of others; writes a list, pairs and a picture."""

import concurrent.futures
import csv
import dataclasses
import functools
import io
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from vit_jax.command_line.files import (
    lock_folder,
    replace_bytes,
    replace_image,
    replace_text,
)
from vit_jax.data import bands, decode
from vit_jax.data.config import MAX_MEGAPIXELS
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.open import Spec
from vit_jax.errors import UserError
from vit_jax.tools.near_duplicates import matching

CHUNK = 2048  # Records per chunk, about two seconds of one core.
METHOD = (
    f"pHash-128, distance <= {matching.DISTANCE}, then correlation of aligned detail"
)
_VERSION = 1  # Version of folder format and method; scans resume only if it is equal.

# Called with the data set; records done before this start, done now, and in total.
Progress = Callable[[str, int, int, int], None]
PAIRS_COLUMNS = ("pretrain", "against", "record", "distance", "correlation")

_SIDE, _TEXT, _ACROSS = 160, 44, 4  # Pixels of a picture and its text; pairs per row.


@dataclasses.dataclass(frozen=True)
class Pair:
    """A pair of near-duplicate records: their ids, and how close they are.

    `numbers` has the indices of the pretraining record, of the other set and of its
    record.
    """

    pretrain: str
    against: str
    record: str
    distance: int
    correlation: float
    numbers: tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Found:
    """Result of a scan, with pairs in the order of the pretraining set.

    Attributes:
      damaged: records that could not be read: (spec and record id, reason).
      flat: number of images without content, which are not compared.
      sizes: number of records by spec.
    """

    pairs: list[Pair]
    damaged: list[tuple[str, str]]
    flat: int
    sizes: dict[str, int]


def scan(
    pretrain: Spec,
    against: Sequence[Spec],
    folder: pathlib.Path,
    *,
    correlation: float = matching.CORRELATION,
    threads: int | None = None,
    max_megapixels: float = MAX_MEGAPIXELS,
    progress: Progress = lambda *_: None,
) -> Found:
    """Finds near-duplicates of the records of `against` among those of `pretrain`.

    The folder holds `run.json` (what is compared), `against/` (memory-mapped thumbnails
    of the smaller sets) and `pretrain/` (results), with one file per chunk of records,
    so that an interrupted scan can resume. Memory per record of `against`: 0.35 KB of
    hashes, and 4 KB of memory-mapped thumbnails.

    Args:
      pretrain: the large data set.
      against: the small data sets.
      folder: folder of this scan; created or resumed.
      correlation: minimum correlation of a pair.
      threads: number of decoding threads; one per core if None.
      max_megapixels: size of the largest image to read, see `data.max_megapixels`.
      progress: function called after every chunk.

    Raises:
      UserError: a data set cannot be opened, or the folder belongs to another scan.
    """
    specs = (pretrain, *against)
    large, *small = (_Set(spec, spec.open(), max_megapixels) for spec in specs)
    run = {
        "version": _VERSION,
        "chunk": CHUNK,
        "correlation": correlation,
        "sizes": {str(each.spec): len(each.source) for each in (large, *small)},
        "pretrain": str(pretrain),
        "against": list(map(str, against)),
        "image_key": [spec.image_key for spec in specs],
        "image_dir": [spec.image_dir for spec in specs],
        "image_suffix": [spec.image_suffix for spec in specs],
        "max_megapixels": max_megapixels,
    }
    pool = concurrent.futures.ThreadPoolExecutor(threads or os.cpu_count() or 1)
    folder.mkdir(parents=True, exist_ok=True)
    busy = (
        f"{folder} is in use by another process: wait for it, or choose another --out"
    )
    with lock_folder(folder, busy), pool:
        _compare_run(folder, run)
        index = _Index(correlation, pool)
        for number, each in enumerate(small):
            index.add(each, folder / "against" / str(number), progress)
        work = folder / "pretrain"
        for path, start, result, pixels in _chunks(large, work, pool, progress):
            pairs = index.find(large, start, pixels)
            replace_bytes(path, json.dumps(result | {"pairs": pairs}).encode())
        results = [*index.results, *((pretrain, each) for each in _results(work))]
    rows = [row for _, result in results for row in result.get("pairs", ())]
    damaged = [(f"{s} {name}", why) for s, r in results for name, why in r["damaged"]]
    flat = sum(result["flat"] for _, result in results)
    pairs = [Pair(*row[:5], tuple(row[5])) for row in rows]
    return Found(pairs, damaged, flat, run["sizes"])


class _Set(NamedTuple):
    spec: Spec
    source: Source
    max_megapixels: float


class _Index:
    """The small sets: their thumbnails, and an index of the hashes."""

    def __init__(self, correlation: float, pool: concurrent.futures.Executor):
        self.results: list[tuple[Spec, dict]] = []  # For the chunks of all sets.
        self._minimum, self._pool = correlation, pool
        self._sets: list[_Set] = []
        self._thumbnails: list[list[np.ndarray]] = []  # Chunks by set.
        self._hashes = matching.Index()

    def add(self, small: _Set, work: pathlib.Path, progress: Progress) -> None:
        """Adds a set, whose thumbnails and results are read from or written to `work`."""
        for path, _, result, pixels in _chunks(small, work, self._pool, progress):
            stream = io.BytesIO()
            np.save(stream, pixels)
            replace_bytes(path.with_suffix(".npy"), stream.getvalue())
            replace_bytes(path, json.dumps(result).encode())
        self.results += [(small.spec, each) for each in _results(work)]
        chunks = [np.load(path, "r") for path in sorted(work.glob("*.npy"))]
        for i, pixels in enumerate(chunks):
            full = _not_flat(pixels)
            # One number for both set and record.
            numbers = np.array(full, np.int64) + i * CHUNK + (len(self._sets) << 40)
            self._hashes.add(pixels[full], numbers)
        self._sets.append(small)
        self._thumbnails.append(chunks)

    def find(self, large: _Set, start: int, pixels: np.ndarray) -> list[list]:
        """Returns the fields of the pairs in a chunk that starts at a record."""
        full, pairs = _not_flat(pixels), []
        candidates = self._hashes.candidates(pixels[full])
        fit = functools.partial(self._correlation, pixels[full])
        values = self._pool.map(fit, candidates)
        for each, value in zip(candidates, values, strict=True):
            i, (number, j) = start + full[each.query], _place(each)
            spec, source, _ = self._sets[number]
            name, other = large.source.record_id(i), source.record_id(j)
            itself = large.spec.name, large.spec.data_dir, name
            if value >= self._minimum and (spec.name, spec.data_dir, other) != itself:
                numbers = [i, number, j]
                row = [name, str(spec), other, each.distance, round(value, 4), numbers]
                pairs.append(row)
        return pairs

    def _correlation(self, pixels: np.ndarray, candidate: matching.Candidate) -> float:
        number, other = _place(candidate)
        indexed = np.asarray(self._thumbnails[number][other // CHUNK][other % CHUNK])
        if candidate.flipped:
            indexed = np.ascontiguousarray(indexed[:, ::-1])
        part, whole = pixels[candidate.query], indexed
        if candidate.query_is_larger:
            part, whole = whole, part
        return matching.correlation(part, whole, candidate.window)


def _place(candidate: matching.Candidate) -> tuple[int, int]:
    """Returns the index of the set and of its record."""
    return candidate.indexed >> 40, candidate.indexed & (1 << 40) - 1


def _not_flat(pixels: np.ndarray) -> list[int]:
    return [i for i, each in enumerate(pixels) if not matching.is_flat(each)]


def _chunks(
    data: _Set,
    work: pathlib.Path,
    pool: concurrent.futures.Executor,
    progress: Progress,
) -> Iterator[tuple[pathlib.Path, int, dict, np.ndarray]]:
    """Yields file, first record, result and thumbnails of each unfinished chunk.

    The next chunk is decoded while the caller processes this one. Thumbnails of damaged
    images are 0.
    """
    work.mkdir(parents=True, exist_ok=True)
    (spec, source, limit), now = data, 0
    todo = {
        path: range(start, min(start + CHUNK, len(source)))
        for start in range(0, len(source), CHUNK)
        if not (path := work / f"{start:012}.json").exists()
    }
    before = len(source) - sum(map(len, todo.values()))
    progress(str(spec), before, now, len(source))
    shrink = functools.partial(_thumbnail, source, limit)
    submitted = ((path, todo[path], pool.map(shrink, todo[path])) for path in todo)
    ahead = next(submitted, None)
    while ahead:
        (path, records, thumbnails), ahead = ahead, next(submitted, None)
        pixels, damaged = [], []
        for i, each in zip(records, thumbnails, strict=True):
            if isinstance(each, str):
                damaged.append([source.record_id(i), each])
                each = np.zeros((matching.SIDE,) * 2, np.uint8)
            pixels.append(each)
        flat = sum(map(matching.is_flat, pixels)) - len(damaged)
        result = {"records": len(records), "damaged": damaged, "flat": flat}
        yield path, records[0], result, np.stack(pixels)
        now += len(records)
        progress(str(spec), before, now, len(source))


def _thumbnail(source: Source, max_megapixels: float, i: int) -> np.ndarray | str:
    """Returns the thumbnail of a record, or the reason why it cannot be read."""
    try:
        return matching.make_thumbnail(source[i]["image"], max_megapixels)
    except decode.DamagedImage as error:
        return str(error)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"


def _results(work: pathlib.Path) -> Iterator[dict]:
    return (json.loads(path.read_bytes()) for path in sorted(work.glob("*.json")))


def _compare_run(folder: pathlib.Path, run: dict) -> None:
    """Records what is compared; raises UserError for the folder of another scan."""
    path = folder / "run.json"
    old = json.loads(path.read_bytes()) if path.exists() else run
    for key, value in run.items():
        if old.get(key) != value:
            raise UserError(
                f"{folder} holds a scan with {key}={old.get(key)}, now it is {value}: "
                "repeat that command, remove the folder to start again, or choose another "
                "--out"
            )
    replace_text(path, json.dumps(run, indent=1))


def write_list(path: pathlib.Path, result: Found, correlation: float) -> list[str]:
    """Writes the ids of the near-duplicates, with comments, for `data.exclude`.

    `correlation` is the minimum correlation of a pair, which the comments mention.

    Returns:
      The ids.
    """
    ids = list(dict.fromkeys(pair.pretrain for pair in result.pairs))
    pretrain, *against = (f"{spec} ({n} records)" for spec, n in result.sizes.items())
    counts = (
        f"# {len(ids)} records in {len(result.pairs)} pairs; not compared: "
        f"{len(result.damaged)} damaged, {result.flat} flat"
    )
    lines = [
        "# Near-duplicates, for --config.data.exclude: python -m vit_jax.dedup",
        f"# pretrain: {pretrain}",
        *(f"# against: {one}" for one in against),
        f"# method: {METHOD} >= {correlation:g}",
        counts,
        *ids,
    ]
    _write(path, "".join(f"{line}\n" for line in lines))
    return ids


def write_pairs(path: pathlib.Path, pairs: Sequence[Pair]) -> None:
    """Writes pairs as a CSV file with PAIRS_COLUMNS."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(PAIRS_COLUMNS)
    writer.writerows([getattr(pair, name) for name in PAIRS_COLUMNS] for pair in pairs)
    _write(path, text.getvalue())


def write_sheet(
    path: pathlib.Path,
    pairs: Sequence[Pair],
    pretrain: Spec,
    against: Sequence[Spec],
    most: int = 60,
) -> None:
    """Draws up to `most` pairs as a PNG, the least correlated first.

    The large set is on the left of each pair.
    """
    chosen = sorted(pairs, key=lambda pair: pair.correlation)[:most]
    source, others = pretrain.open(), [spec.open() for spec in against]
    wide, high = 2 * _SIDE + 10, _SIDE + _TEXT
    rows = max(1, -(-len(chosen) // _ACROSS))
    sheet = Image.new("RGB", (_ACROSS * wide, rows * high), "white")
    pen = ImageDraw.Draw(sheet)
    for place, pair in enumerate(chosen):
        x, y = place % _ACROSS * wide, place // _ACROSS * high
        i, number, other = pair.numbers
        for k, record in enumerate((source[i], others[number][other])):
            picture = Image.fromarray(bands.picture(record["image"]))
            picture = picture.resize((_SIDE - 2, _SIDE), Image.Resampling.BICUBIC)
            sheet.paste(picture, (x + k * _SIDE, y))
        text = f"{pair.correlation:.3f}, {pair.distance} bits"
        for line, words in enumerate((text, pair.pretrain, pair.record)):
            # The font has only Latin letters.
            words = words.encode("latin-1", "replace").decode("latin-1")
            pen.text((x, y + _SIDE + 14 * line), words[-50:], fill="black")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_image(path, sheet, "PNG")


def _write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text)
