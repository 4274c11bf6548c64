"""Streams one data set past others; what is done is kept, so that a scan can go on.

A scan's folder holds `run.json` (what is compared), `against/` (thumbnails of the
smaller sets, mapped from disk into memory) and `pretrain/` (results), a file for each
chunk of records. A file appears under its name only when it is whole.
"""

import concurrent.futures
import dataclasses
import fcntl
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from vit_jax.data import decode, sources
from vit_jax.data.near_duplicates import alignment, search, thumbnails
from vit_jax.data.near_duplicates.whole_files import write_whole
from vit_jax.data.spec import Spec
from vit_jax.errors import UserError

CHUNK = 2048  # Records; about two seconds of one core.
METHOD = f"pHash-128, distance <= {search.DISTANCE}, then correlation of aligned detail"
_VERSION = 1  # Of the folder and the method; another one cannot go on from it.

# Is told what is scanned, records done before this start, done now, and of how many.
Tell = Callable[[str, int, int, int], None]


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two records that show the same.

    Attributes:
      pretrain: record id.
      against: spec of the other record's data set.
      record: the other's id.
      distance: bits that differ in their hashes.
      correlation: of their details.
      numbers: of the record; of the other's set; and of the other.
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
      pairs: by record of the pretraining set.
      damaged: (spec and record id, why) of images that could not be read.
      flat: number of images without content, which are like nothing.
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
    correlation: float = alignment.CORRELATION,
    threads: int | None = None,
    tell: Tell = lambda *_: None,
) -> Found:
    """Finds near-duplicates of the records of `against` among those of `pretrain`.

    Memory is that of `against`: 0.35 KB of hashes a record, and 4 KB that the system
    may leave on disk.

    Args:
      pretrain: large set.
      against: small sets.
      folder: of this scan; made, or gone on with.
      correlation: least of a pair.
      threads: that decode; one a core if None.
      tell: is called after every chunk.

    Raises:
      UserError: a data set cannot be opened, or the folder is of another scan.
    """
    many = pretrain.open()
    few = [spec.open() for spec in against]
    sizes = {str(s): len(x) for s, x in zip((pretrain, *against), (many, *few))}
    run = {
        "version": _VERSION,
        "chunk": CHUNK,
        "correlation": correlation,
        "sizes": sizes,
    }
    run |= {"pretrain": str(pretrain), "against": list(map(str, against))}
    threads = threads or os.cpu_count() or 1
    with _held(folder, run), concurrent.futures.ThreadPoolExecutor(threads) as pool:
        index, small, done = search.Index(), [], []
        for number, (spec, source) in enumerate(zip(against, few, strict=True)):
            work = folder / "against" / str(number)
            done += [(spec, r) for r in _shrink(spec, source, work, pool, tell)]
            small.append([np.load(p, "r") for p in sorted(work.glob("*.npy"))])
            for i, pixels in enumerate(small[-1]):
                full = [k for k, t in enumerate(pixels) if not thumbnails.is_flat(t)]
                # Numbered by set and record in one.
                rows = np.array(full, np.int64) + i * CHUNK + (number << 40)
                index.add(pixels[full], rows)

        def compare(pixels, records):
            return list(_pairs(pixels, records, index, small, correlation, pool))

        def named(row):
            i, (number, other), distance, fit = row
            spec = against[number]
            record, its = many.record_id(i), few[number].record_id(other)
            same_set = (spec.name, spec.data_dir) == (pretrain.name, pretrain.data_dir)
            if same_set and record == its:  # A record is no duplicate of itself.
                return None
            return [record, str(spec), its, distance, fit, [i, number, other]]

        work = folder / "pretrain"
        for records, missing, pixels in _chunks(pretrain, many, work, pool, tell):
            good = [k for k, t in enumerate(pixels) if not thumbnails.is_flat(t)]
            rows = compare(pixels[good], [records[k] for k in good])
            pairs = [pair for pair in map(named, rows) if pair is not None]
            result = _result(many, records, missing, pixels) | {"pairs": pairs}
            write_whole(work / f"{records[0]:012}.json", json.dumps(result).encode())
        done += [(pretrain, r) for r in _results(work)]
    return _sum(done, sizes)


def _shrink(spec, source, work, pool, tell) -> list[dict]:
    """Writes the thumbnails of a set, and returns what else is known of its chunks."""
    for records, missing, pixels in _chunks(spec, source, work, pool, tell):
        stem = work / f"{records[0]:012}"
        np.save(f"{stem}.tmp.npy", pixels)
        os.replace(f"{stem}.tmp.npy", f"{stem}.npy")
        result = _result(source, records, missing, pixels)
        write_whole(stem.with_suffix(".json"), json.dumps(result).encode())
    return list(_results(work))


def _chunks(spec, source, work, pool, tell) -> Iterator[tuple]:
    """Yields records, reasons of the damaged and thumbnails of chunks yet to do.

    The next chunk is decoded while the caller works on this one. Damaged images are 0.
    """
    work.mkdir(parents=True, exist_ok=True)
    for leftover in work.glob("*.tmp*"):
        leftover.unlink()
    starts = range(0, len(source), CHUNK)
    todo = [s for s in starts if not (work / f"{s:012}.json").exists()]
    before = len(source) - sum(min(CHUNK, len(source) - s) for s in todo)
    now = 0
    tell(str(spec), before, now, len(source))
    ahead = []
    for start in [*todo, None]:
        if start is not None:
            records = range(start, min(start + CHUNK, len(source)))
            ahead.append((records, [pool.submit(_small, source, i) for i in records]))
        if len(ahead) == 2 or (start is None and ahead):
            records, futures = ahead.pop(0)
            results = [future.result() for future in futures]
            missing = {i: r for i, r in zip(records, results) if isinstance(r, str)}
            blank = np.zeros((thumbnails.SIDE,) * 2, np.uint8)
            small = [blank if isinstance(r, str) else r for r in results]
            yield list(records), missing, np.stack(small)
            now += len(records)
            tell(str(spec), before, now, len(source))


def _small(source: sources.Source, i: int) -> np.ndarray | str:
    try:
        return thumbnails.make(source[i]["image"])
    except decode.DamagedImage as error:
        return str(error)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"


def _pairs(pixels, records, index, small, least, pool) -> Iterator[tuple]:
    """Yields (record, (set, other), distance, correlation) of pairs that fit."""

    def fit(one: search.Candidate) -> float:
        number, other = one.indexed >> 40, one.indexed & (1 << 40) - 1
        theirs = small[number][other // CHUNK][other % CHUNK]
        theirs = np.ascontiguousarray(theirs[:, ::-1]) if one.flipped else theirs
        two = (pixels[one.query], np.asarray(theirs))
        part, whole = reversed(two) if one.query_is_larger else two
        return alignment.correlation(part, whole, one.window)

    found = index.candidates(pixels)
    for one, value in zip(found, pool.map(fit, found), strict=True):
        if value >= least:
            where = one.indexed >> 40, one.indexed & (1 << 40) - 1
            yield records[one.query], where, one.distance, round(value, 4)


def _result(source, records, missing, pixels) -> dict:
    flat = sum(map(thumbnails.is_flat, pixels)) - len(missing)
    damaged = [[source.record_id(i), reason] for i, reason in missing.items()]
    return {"records": len(records), "damaged": damaged, "flat": flat}


def _results(work: pathlib.Path) -> Iterator[dict]:
    return (json.loads(path.read_bytes()) for path in sorted(work.glob("*.json")))


def _sum(done: list[tuple[Spec, dict]], sizes: dict[str, int]) -> Found:
    rows = [row for _, result in done for row in result.get("pairs", ())]
    return Found(
        pairs=[Pair(*row[:5], tuple(row[5])) for row in rows],
        damaged=[(f"{s} {name}", why) for s, r in done for name, why in r["damaged"]],
        flat=sum(result["flat"] for _, result in done),
        sizes=sizes,
    )


def _held(folder: pathlib.Path, run: dict):
    """Makes or takes up a scan's folder; nobody else may until the result is closed."""
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
        write_whole(path, json.dumps(run, indent=1).encode())
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
