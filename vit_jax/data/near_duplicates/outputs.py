"""What a scan leaves: the list for `config.data.exclude`, the pairs, and a picture."""

import csv
import io
import pathlib
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from vit_jax.data import decode
from vit_jax.data.near_duplicates.scan import METHOD, Found, Pair
from vit_jax.data.near_duplicates.whole_files import write_whole
from vit_jax.data.spec import Spec

COLUMNS = ("pretrain", "against", "record", "distance", "correlation")

_SIDE, _TEXT, _ACROSS = 160, 44, 4  # Pixels of a picture and its text; pairs a row.


def write_list(path: pathlib.Path, found: Found, correlation: float) -> list[str]:
    """Writes the ids of the records to leave out, below comments that say why.

    Args:
      path: of the text file.
      found: the scan's result.
      correlation: least of a pair.

    Returns:
      The ids.
    """
    ids = list(dict.fromkeys(pair.pretrain for pair in found.pairs))
    pretrain, *against = (f"{spec} ({n} records)" for spec, n in found.sizes.items())
    counts = (
        f"# {len(ids)} records in {len(found.pairs)} pairs; not compared: "
        f"{len(found.damaged)} damaged, {found.flat} flat"
    )
    lines = [
        "# Near-duplicates, for --config.data.exclude: python -m vit_jax.dedup",
        f"# pretrain: {pretrain}",
        *(f"# against: {one}" for one in against),
        f"# method: {METHOD} >= {correlation:g}",
        counts,
        *ids,
    ]
    write_whole(path, "".join(f"{line}\n" for line in lines).encode())
    return ids


def write_pairs(path: pathlib.Path, pairs: Sequence[Pair]) -> None:
    """Writes pairs as a CSV file with COLUMNS."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([getattr(pair, name) for name in COLUMNS] for pair in pairs)
    write_whole(path, text.getvalue().encode())


def write_sheet(
    path: pathlib.Path,
    pairs: Sequence[Pair],
    pretrain: Spec,
    against: Sequence[Spec],
    most: int = 60,
) -> int:
    """Draws pairs side by side, the most doubtful first, for a person to judge.

    Args:
      path: of a PNG file.
      pairs: to choose from.
      pretrain: the large set, left in each pair.
      against: the small sets.
      most: pairs that are drawn.

    Returns:
      How many were drawn.
    """
    chosen = sorted(pairs, key=lambda pair: pair.correlation)[:most]
    many, few = pretrain.open(), [spec.open() for spec in against]
    wide, high = 2 * _SIDE + 10, _SIDE + _TEXT
    rows = max(1, -(-len(chosen) // _ACROSS))
    sheet = Image.new("RGB", (_ACROSS * wide, rows * high), "white")
    pen = ImageDraw.Draw(sheet)
    for place, pair in enumerate(chosen):
        down, across = divmod(place, _ACROSS)
        x, y = across * wide, down * high
        i, number, other = pair.numbers
        for k, record in enumerate((many[i], few[number][other])):
            sheet.paste(_picture(record["image"]), (x + k * _SIDE, y))
        text = f"{pair.correlation:.3f}, {pair.distance} bits"
        for line, words in enumerate((text, pair.pretrain, pair.record)):
            # The font has Latin letters only.
            words = words.encode("latin-1", "replace").decode("latin-1")
            pen.text((x, y + _SIDE + 14 * line), words[-50:], fill="black")
    write_whole(path, _png(sheet))
    return len(chosen)


def _picture(data: bytes | np.ndarray) -> Image.Image:
    picture = Image.fromarray(decode.decode(data))
    return picture.resize((_SIDE - 2, _SIDE), Image.Resampling.BICUBIC)


def _png(picture: Image.Image) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()
