"""Recall and false positives of vit_jax.dedup, and what 14M against 100k images cost.

Run: python -m benchmarks.input.dedup --sets=SPEC,SPEC... [--others=SPEC,SPEC...]
         [--images=500]

Recall: the share of planted copies of a set's images that are flagged against the set.
Flagged: the share of other sets' images that are flagged against it; a set that really
shares pictures with the other has some, so look at the sheet of `vit_jax.dedup`. Then
the time of each stage on one core, the search in an index of 100,000 images (unrelated
hashes, as time does not depend on them), and what follows for 14 million.
"""

import argparse
import io
import time

import faiss
import numpy as np
from PIL import Image

from benchmarks import smoke
from vit_jax.data import decode
from vit_jax.data.sources.open import parse_spec
from vit_jax.tools.near_duplicates import matching

PRETRAIN, AGAINST = 14_000_000, 100_000


def jpeg(pixels, quality=90):
    """Returns an image as the content of a JPEG file."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def resized(pixels, rng):
    factor = rng.uniform(0.5, 0.75)
    size = [max(1, round(side * factor)) for side in pixels.shape[1::-1]]
    picture = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
    return jpeg(np.asarray(picture))


def cropped(part):
    def crop(pixels, rng):
        height, width = (round(side * part) for side in pixels.shape[:2])
        top, left = (
            rng.integers(whole - side + 1)
            for whole, side in zip(pixels.shape[:2], (height, width), strict=True)
        )
        return jpeg(pixels[top : top + height, left : left + width])

    return crop


def grey(pixels, rng):
    return jpeg(np.asarray(Image.fromarray(pixels).convert("L")))


PLANTED = {
    "resized 50-75 %": resized,
    "cropped, area 90 %": cropped(0.9**0.5),
    "cropped, sides 90 %": cropped(0.9),
    "recompressed, 30": lambda pixels, rng: jpeg(pixels, 30),
    "flipped": lambda pixels, rng: jpeg(pixels[:, ::-1]),
    "grey": grey,
}


def flagged(index, known, queries):
    """Returns the pairs (query, indexed) that are near-duplicates."""
    found = set()
    for one in index.candidates(queries):
        other = known[one.indexed]
        other = np.ascontiguousarray(other[:, ::-1]) if one.flipped else other
        two = queries[one.query], other
        part, whole = reversed(two) if one.query_is_larger else two
        if matching.correlation(part, whole, one.window) >= matching.CORRELATION:
            found.add((one.query, one.indexed))
    return found


def indexed(known):
    index = matching.Index()
    index.add(known, np.arange(len(known)))
    return index


def small(source, numbers):
    return np.stack([matching.make_thumbnail(source[int(i)]["image"]) for i in numbers])


def measure(sets, others, images):
    """Prints the share of each planted kind that is found, both ways around."""
    rng = np.random.default_rng(0)
    for text in sets:
        source = parse_spec(text, "test").open()
        numbers = rng.permutation(len(source))
        known = small(source, numbers)
        index = indexed(known)
        some = range(min(images, len(known)))
        print(f"\n{text}: {len(known)} images, {len(some)} copies of each kind")
        print("planted               recall  as test images  candidates alone")
        for name, change in PLANTED.items():
            copies = [
                change(decode.decode(source[int(numbers[i])]["image"]), rng)
                for i in some
            ]
            copies = np.stack([matching.make_thumbnail(copy) for copy in copies])
            same = {(i, i) for i in some}
            there = flagged(index, known, copies) & same
            back = flagged(indexed(copies), copies, known[: len(some)]) & same
            near = {(c.query, c.indexed) for c in index.candidates(copies)} & same
            shares = (f"{100 * len(x) / len(some):6.1f} %" for x in (there, back, near))
            print(f"{name:20}", *shares, sep="  ", flush=True)
        for other in others:
            if other == text:
                continue
            theirs = parse_spec(other, "train").open()
            found = flagged(index, known, small(theirs, range(len(theirs))))
            count = len({query for query, _ in found})
            share = 100 * count / len(theirs)
            print(f"flagged of {other}: {count} of {len(theirs)} ({share:.3f} %)")


def seconds(work, rounds=5):
    times = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return float(np.median(times))


def extrapolate(text):
    """Prints the CPU time and memory of a scan of the paper's size."""
    faiss.omp_set_num_threads(1)
    rng = np.random.default_rng(0)
    source = parse_spec(text, "train").open()
    numbers = range(min(300, len(source)))
    photographs = [jpeg(photograph(source[i]["image"])) for i in numbers]
    pixels = small(source, numbers)
    index = matching.Index()
    codes = len(matching.WINDOWS) * 2 * AGAINST
    hashed = rng.integers(0, 256, (codes, matching.BITS // 8), np.uint8)
    index._parts.add(hashed)
    index._wholes.add(hashed[: 2 * AGAINST])
    del hashed
    index._numbers = np.arange(AGAINST)
    pair = pixels[0], pixels[0]
    one = {
        "decoding 500x375 JPEG": seconds(
            lambda: list(map(matching.make_thumbnail, photographs))
        )
        / len(photographs),
        "hashing and search": seconds(lambda: index.candidates(pixels)) / len(pixels),
    }
    align = seconds(lambda: matching.correlation(*pair, matching.WINDOWS[1]))
    print(f"\n{PRETRAIN:,} images against {AGAINST:,}, one core")
    for name, each in one.items():
        print(f"{name:24} {1e3 * each:6.2f} ms  {each * PRETRAIN / 3600:6.1f} h in all")
    print(f"{'aligning a candidate':24} {1e3 * align:6.2f} ms")
    print(
        f"in all {sum(one.values()) * PRETRAIN / 3600:.1f} h, to be divided by the cores"
    )
    stored = codes * 1.1 * matching.BITS / 8 / 1e6
    print(
        f"memory: hashes {stored:.0f} MB, thumbnails "
        f"{AGAINST * matching.SIDE**2 / 1e6:.0f} MB mapped from disk"
    )


def photograph(data):
    pixels = decode.decode(data)
    return np.asarray(Image.fromarray(pixels).resize((500, 375)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", default="digits#test")
    parser.add_argument("--others", default="")
    parser.add_argument("--images", type=int, default=500)
    flags = smoke.parse(parser, "--images=20")
    sets = flags.sets.split(",")
    measure(sets, list(filter(None, flags.others.split(","))), flags.images)
    extrapolate(sets[0])


if __name__ == "__main__":
    main()
