"""Tar shards as WebDataset and img2dataset write them, for tests of what reads them."""

import io
import json
import tarfile

from PIL import Image


def jpeg(value, size=(13, 9)):
    stream = io.BytesIO()
    Image.new("RGB", size, (value % 256, 20, 30)).save(stream, "JPEG")
    return stream.getvalue()


def write_tar(path, members):
    """Writes (name, content) as WebDataset does: without folders, in order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))


def pair(i, text=None, **about):
    """Returns the members of a sample as img2dataset writes it."""
    key, text = f"{i:09d}", f"caption {i}" if text is None else text
    about = {"key": key, "status": "success", "error_message": None} | about
    about = json.dumps(about | {"alt": f"alt {i}", "cut": "a \ud83d"}).encode()
    return {f"{key}.jpg": jpeg(i), f"{key}.json": about, f"{key}.txt": text.encode()}


def shard(path, *samples):
    write_tar(path, [each for sample in samples for each in sample.items()])
