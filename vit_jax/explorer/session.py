"""What the explorer holds while it runs: models, a folder, the last images."""

import collections
import hashlib
import threading
from collections.abc import Sequence

from vit_jax.explorer.images import MAX_BYTES, MAX_PIXELS, Folder, Refused, check
from vit_jax.explorer.subject import Seen, Subject

BUDGET = 1 << 30  # Bytes of attention that are kept, besides that of the last image.


class Session:
    """One or two models, and the images that they have seen.

    Its methods may be called by several threads at once.

    Args:
      subjects: the models.
      folder: of images to choose from, if any.
      budget: bytes of attention that are kept.
    """

    def __init__(
        self,
        subjects: Sequence[Subject],
        folder: Folder | None = None,
        budget: int = BUDGET,
    ):
        self.folder = folder
        self._subjects, self._budget = tuple(subjects), budget
        self._seen: collections.OrderedDict[str, tuple[Seen, ...]]
        self._seen = collections.OrderedDict()
        self._computing, self._keeping = threading.Lock(), threading.Lock()

    def about(self) -> dict:
        """Returns what the page is to show, as for JSON."""
        names, more = self.folder.names() if self.folder else ([], False)
        return {
            "models": [subject.describe() for subject in self._subjects],
            "limits": {"bytes": MAX_BYTES, "pixels": MAX_PIXELS},
            "images": names,
            "more": more,
        }

    def see(self, data: bytes, name: str) -> dict:
        """Looks at an image with all models, once.

        Args:
          data: content of an image file.
          name: of the image, for messages.

        Returns:
          The key by which `seen` finds it, and what it is taken for, as for JSON.

        Raises:
          Refused: it is too large or cannot be read.
        """
        check(data, name)
        key = hashlib.sha256(data).hexdigest()[:32]
        with self._computing:  # Side by side they would only be slower.
            found = self._find(key)
            if found is None:
                found = tuple(s.see(data, name) for s in self._subjects)
                self._keep(key, found)
        return {"key": key, "name": name, "models": [summary(seen) for seen in found]}

    def seen(self, key: str, model: int) -> Seen:
        """Returns what a model made of an image.

        Raises:
          Refused: it is not kept any more, or there is no such model.
        """
        found = self._find(key)
        if found is None:
            raise Refused(
                410, "This image is no longer kept by the server: open it again."
            )
        if not 0 <= model < len(found):
            raise Refused(404, f"There is no model {model}.")
        return found[model]

    def _find(self, key: str) -> tuple[Seen, ...] | None:
        with self._keeping:
            if key in self._seen:
                self._seen.move_to_end(key)
            return self._seen.get(key)

    def _keep(self, key: str, found: tuple[Seen, ...]) -> None:
        with self._keeping:
            self._seen[key] = found
            while len(self._seen) > 1 and self._bytes() > self._budget:
                self._seen.popitem(last=False)

    def _bytes(self) -> int:
        return sum(seen.rows.nbytes for found in self._seen.values() for seen in found)


def summary(seen: Seen) -> dict:
    """Returns what fits into JSON of what a model made of an image."""
    return {
        "classes": [
            {"name": found.name, "probability": found.probability}
            for found in seen.classes
        ],
        "box": seen.box,
        "steps": seen.rows.steps,
        "pool": seen.rows.pool,
    }
