"""Writes scikit-learn's digits as tar shards with captions and classes, into SHARDS."""

import io
import pathlib
import tarfile

from PIL import Image
from sklearn.datasets import load_digits

digits, shards = load_digits(), pathlib.Path("SHARDS")
names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
for split, start, stop in (
    ("train", 0, 720),
    ("train", 720, 1440),
    ("val", 1440, 1797),
):
    path = shards / split / f"{start:05d}.tar"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for i in range(start, stop):
            image, label = io.BytesIO(), digits.target[i]
            Image.fromarray((15 * digits.images[i]).astype("uint8")).save(image, "PNG")
            text = f"the digit {names[label]}"
            members = {
                "png": image.getvalue(),
                "txt": text.encode(),
                "cls": b"%d" % label,
            }
            for ending, content in members.items():
                member = tarfile.TarInfo(f"{i:09d}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
(shards / "classnames.txt").write_text("\n".join(names))
