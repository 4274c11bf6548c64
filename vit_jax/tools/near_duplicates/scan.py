"""Scans a data set for near-duplicates of others; writes a list, pairs and a picture."""

import concurrent.futures
import csv
import dataclasses
import fcntl
import io
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from PIL import Image, ImageDraw

from vit_jax.data import decode
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.open import Spec
from vit_jax.errors import UserError
from vit_jax.tools.near_duplicates import matching

CHUNK = 2048  # Records per chunk, about two seconds of one core.
METHOD = (
    f"pHash-128, distance <= {matching.DISTANCE}, then correlation of aligned detail"
)
_VERSION = 1  # Of the folder's format and the method; scans resume only if equal.

# Called with the data set, records done before this start, done now, and in all.
Progress = Callable[[str, int, int, int], None]
PAIRS_COLUMNS = ("pretrain", "against", "record", "distance", "correlation")

_SIDE, _TEXT, _ACROSS = 160, 44, 4  # Pixels of a picture and its text; pairs per row.


@dataclasses.dataclass(frozen=True)
class Pair:
    """A pair of near-duplicate records.

    Attributes:
      pretrain: record id in the pretraining set.
      against: spec of the other data set.
      record: record id in the other data set.
      distance: Hamming distance of the hashes.
      correlation: correlation of the fine structure.
      numbers: index of the pretraining record, of the other set and of its record.
    """

    pretrain: str
    against: str
    record: str
    distance: int
    correlation: float
    numbers: tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Found:
    """Result of a scan.

    Attributes:
      pairs: near-duplicates, in the order of the pretraining set.
      damaged: (spec and record id, reason) of images that could not be read.
      flat: number of images without content, which are not compared.
      sizes: spec -> number of records.
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
    progress: Progress = lambda *_: None,
) -> Found:
    """Finds near-duplicates of the records of `against` among those of `pretrain`.

    The folder holds `run.json` (what is compared), `against/` (thumbnails of the smaller
    sets, memory-mapped) and `pretrain/` (results), with a file per chunk of records, so
    that an interrupted scan resumes. Memory per record of `against`: 0.35 KB of hashes,
    and 4 KB of memory-mapped thumbnails.

    Args:
      pretrain: large set.
      against: small sets.
      folder: folder of this scan; created or resumed.
      correlation: minimum correlation of a pair.
      threads: number of decoding threads; one per core if None.
      progress: function called after every chunk.

    Raises:
      UserError: a data set cannot be opened, or the folder is of another scan.
    """
    source = pretrain.open()
    others = [spec.open() for spec in against]
    sizes = {str(s): len(x) for s, x in zip((pretrain, *against), (source, *others))}
    run = {
        "version": _VERSION,
        "chunk": CHUNK,
        "correlation": correlation,
        "sizes": sizes,
        "pretrain": str(pretrain),
        "against": list(map(str, against)),
        "image_key": [spec.image_key for spec in (pretrain, *against)],
    }
    threads = threads or os.cpu_count() or 1
    with (
        _lock_folder(folder, run),
        concurrent.futures.ThreadPoolExecutor(threads) as pool,
    ):
        index, thumbnails, results = _index(against, others, folder, pool, progress)
        work, searched = folder / "pretrain", (pretrain.name, pretrain.data_dir)
        for records, missing, pixels in _chunks(pretrain, source, work, pool, progress):
            full = [k for k, t in enumerate(pixels) if not matching.is_flat(t)]
            numbers = [records[k] for k in full]
            pairs = []
            for i, (number, j), distance, fit in _pairs(
                pixels[full], numbers, index, thumbnails, correlation, pool
            ):
                spec = against[number]
                name, other = source.record_id(i), others[number].record_id(j)
                same_set = (spec.name, spec.data_dir) == searched
                if not (same_set and other == name):  # A record and itself.
                    row = [name, str(spec), other, distance, fit, [i, number, j]]
                    pairs.append(row)
            result = _result(source, records, missing, pixels) | {"pairs": pairs}
            path = work / f"{records[0]:012}.json"
            _write_atomically(path, json.dumps(result).encode())
        results += [(pretrain, r) for r in _results(work)]
    rows = [row for _, result in results for row in result.get("pairs", ())]
    return Found(
        pairs=[Pair(*row[:5], tuple(row[5])) for row in rows],
        damaged=[
            (f"{s} {name}", why) for s, r in results for name, why in r["damaged"]
        ],
        flat=sum(result["flat"] for _, result in results),
        sizes=sizes,
    )


def _index(against, others, folder, pool, progress):
    """Indexes the small sets; returns the index, all thumbnails and all results."""
    index, thumbnails, results = matching.Index(), [], []
    for number, (spec, source) in enumerate(zip(against, others, strict=True)):
        work = folder / "against" / str(number)
        results += [(spec, r) for r in _shrink(spec, source, work, pool, progress)]
        thumbnails.append([np.load(p, "r") for p in sorted(work.glob("*.npy"))])
        for i, pixels in enumerate(thumbnails[-1]):
            full = [k for k, t in enumerate(pixels) if not matching.is_flat(t)]
            # Set and record in one number.
            rows = np.array(full, np.int64) + i * CHUNK + (number << 40)
            index.add(pixels[full], rows)
    return index, thumbnails, results


def _shrink(spec, source, work, pool, progress) -> list[dict]:
    """Writes the thumbnails of a set and returns the results of its chunks."""
    for records, missing, pixels in _chunks(spec, source, work, pool, progress):
        stem = work / f"{records[0]:012}"
        np.save(f"{stem}.tmp.npy", pixels)
        os.replace(f"{stem}.tmp.npy", f"{stem}.npy")
        result = _result(source, records, missing, pixels)
        _write_atomically(stem.with_suffix(".json"), json.dumps(result).encode())
    return list(_results(work))


def _chunks(spec, source, work, pool, progress) -> Iterator[tuple]:
    """Yields records, errors of damaged images and thumbnails of unfinished chunks.

    The next chunk is decoded while the caller works on this one. Thumbnails of damaged
    images are 0.
    """
    work.mkdir(parents=True, exist_ok=True)
    for leftover in work.glob("*.tmp*"):
        leftover.unlink()
    starts = range(0, len(source), CHUNK)
    todo = [s for s in starts if not (work / f"{s:012}.json").exists()]
    before = len(source) - sum(min(CHUNK, len(source) - s) for s in todo)
    now = 0
    progress(str(spec), before, now, len(source))
    ahead = []
    for start in [*todo, None]:
        if start is not None:
            records = range(start, min(start + CHUNK, len(source)))
            futures = [pool.submit(_thumbnail, source, i) for i in records]
            ahead.append((records, futures))
        if len(ahead) == 2 or (start is None and ahead):
            records, futures = ahead.pop(0)
            results = [future.result() for future in futures]
            missing = {i: r for i, r in zip(records, results) if isinstance(r, str)}
            blank = np.zeros((matching.SIDE,) * 2, np.uint8)
            thumbnails = [blank if isinstance(r, str) else r for r in results]
            yield list(records), missing, np.stack(thumbnails)
            now += len(records)
            progress(str(spec), before, now, len(source))


def _thumbnail(source: Source, i: int) -> np.ndarray | str:
    """Returns the thumbnail of a record, or why it cannot be read."""
    try:
        return matching.make_thumbnail(source[i]["image"])
    except decode.DamagedImage as error:
        return str(error)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"


def _pairs(pixels, records, index, thumbnails, minimum, pool) -> Iterator[tuple]:
    """Yields (record, (set, other), distance, correlation) of near-duplicates."""

    def place(candidate: matching.Candidate) -> tuple[int, int]:
        return candidate.indexed >> 40, candidate.indexed & (1 << 40) - 1

    def fit(candidate: matching.Candidate) -> float:
        number, other = place(candidate)
        indexed = thumbnails[number][other // CHUNK][other % CHUNK]
        if candidate.flipped:
            indexed = np.ascontiguousarray(indexed[:, ::-1])
        two = (pixels[candidate.query], np.asarray(indexed))
        part, whole = reversed(two) if candidate.query_is_larger else two
        return matching.correlation(part, whole, candidate.window)

    candidates = index.candidates(pixels)
    for each, value in zip(candidates, pool.map(fit, candidates), strict=True):
        if value >= minimum:
            yield records[each.query], place(each), each.distance, round(value, 4)


def _result(source, records, missing, pixels) -> dict:
    flat = sum(map(matching.is_flat, pixels)) - len(missing)
    damaged = [[source.record_id(i), reason] for i, reason in missing.items()]
    return {"records": len(records), "damaged": damaged, "flat": flat}


def _results(work: pathlib.Path) -> Iterator[dict]:
    return (json.loads(path.read_bytes()) for path in sorted(work.glob("*.json")))


def _lock_folder(folder: pathlib.Path, run: dict):
    """Creates or reopens a scan's folder; returns its lock as an open file."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path = folder / "run.json"
        old = json.loads(path.read_bytes()) if path.exists() else run
        for key, value in run.items():
            if old.get(key) != value:
                raise UserError(
                    f"{folder} holds a scan with {key}={old.get(key)}, now it is "
                    f"{value}: repeat that command, remove the folder to begin anew, "
                    "or choose another --out"
                )
        _write_atomically(path, json.dumps(run, indent=1).encode())
    except BlockingIOError as error:
        lock.close()
        raise UserError(
            f"{folder} is in use by another process: wait for it, or choose another "
            "--out"
        ) from error
    except BaseException:
        lock.close()
        raise
    return lock


def write_list(path: pathlib.Path, result: Found, correlation: float) -> list[str]:
    """Writes the ids of the near-duplicates, for `data.exclude`, with comments.

    Args:
      path: path of the text file.
      result: result of `scan`.
      correlation: minimum correlation of a pair, for the comments.

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
    _write_atomically(path, "".join(f"{line}\n" for line in lines).encode())
    return ids


def write_pairs(path: pathlib.Path, pairs: Sequence[Pair]) -> None:
    """Writes pairs as a CSV file with PAIRS_COLUMNS."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(PAIRS_COLUMNS)
    writer.writerows([getattr(pair, name) for name in PAIRS_COLUMNS] for pair in pairs)
    _write_atomically(path, text.getvalue().encode())


def write_sheet(
    path: pathlib.Path,
    pairs: Sequence[Pair],
    pretrain: Spec,
    against: Sequence[Spec],
    most: int = 60,
) -> int:
    """Draws pairs side by side, the least correlated first, for a check by eye.

    Args:
      path: path of a PNG file.
      pairs: all pairs.
      pretrain: large set, on the left of each pair.
      against: small sets.
      most: maximum number of pairs.

    Returns:
      Number of pairs drawn.
    """
    chosen = sorted(pairs, key=lambda pair: pair.correlation)[:most]
    source, others = pretrain.open(), [spec.open() for spec in against]
    wide, high = 2 * _SIDE + 10, _SIDE + _TEXT
    rows = max(1, -(-len(chosen) // _ACROSS))
    sheet = Image.new("RGB", (_ACROSS * wide, rows * high), "white")
    pen = ImageDraw.Draw(sheet)
    for place, pair in enumerate(chosen):
        down, across = divmod(place, _ACROSS)
        x, y = across * wide, down * high
        i, number, other = pair.numbers
        for k, record in enumerate((source[i], others[number][other])):
            picture = Image.fromarray(decode.decode(record["image"]))
            size = (_SIDE - 2, _SIDE)
            picture = picture.resize(size, Image.Resampling.BICUBIC)
            sheet.paste(picture, (x + k * _SIDE, y))
        text = f"{pair.correlation:.3f}, {pair.distance} bits"
        for line, words in enumerate((text, pair.pretrain, pair.record)):
            # The font has Latin letters only.
            words = words.encode("latin-1", "replace").decode("latin-1")
            pen.text((x, y + _SIDE + 14 * line), words[-50:], fill="black")
    stream = io.BytesIO()
    sheet.save(stream, "PNG")
    _write_atomically(path, stream.getvalue())
    return len(chosen)


def _write_atomically(path: pathlib.Path, data: bytes) -> None:
    """Writes a file atomically; creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.tmp")
    new.write_bytes(data)
    os.replace(new, path)
