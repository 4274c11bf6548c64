"""Predicts the class of every pixel of images, each as one sequence of patches.

An image is resized, with its aspect ratio kept, to the largest number of patches that
fit, and classified at once (models/patches.py); sliding_window.py cuts windows instead.
Letters: H by W pixels of an image, C channels, B sequences, N patches of a sequence, L
classes.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from jaxtyping import Float, Num

from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.evaluators.sliding_window import LabelMap, Sliding, T, largest
from vit_jax.models import patches
from vit_jax.models.patches import PatchSequences
from vit_jax.weights.network_images import prepare_pixels


@dataclasses.dataclass(frozen=True)
class WholeImages:
    """How images become sequences of patches: by a `preprocess` with `max_tokens`."""

    preprocess: Preprocess

    @classmethod
    def of(cls, preprocess: Preprocess, windows: Sliding) -> "WholeImages":
        """Returns the division into sequences that replaces that into windows.

        Raises:
          UserError: the windows have settings that are not the defaults and would be
            ignored.
        """
        for name in ("resize", "overlap"):
            if (value := getattr(windows, name)) != getattr(Sliding, name):
                raise UserError(
                    f"{name}={value!r} is for windows, which are not used with max_tokens="
                    f"{preprocess.max_tokens}: leave one of them out"
                )
        return cls(preprocess)

    def label_maps(
        self,
        images: Iterable[tuple[T, Num[np.ndarray, "H W C"] | None]],
        logits_of: Callable[[PatchSequences], Float[np.ndarray, "B N 1 L"]],
        batch_size: int,
    ) -> Iterator[tuple[T, LabelMap | None]]:
        """Yields the class of each pixel of each image, see `Sliding.label_maps`.

        Args:
          images: pairs of any object and an image, see `Sliding.label_maps`.
          logits_of: function of sequences that returns the logits of their patches.
          batch_size: number of images per batch.
        """
        images = iter(images)
        while some := list(itertools.islice(images, batch_size)):
            cut = [
                prepare_pixels(image, self.preprocess)
                for _, image in some
                if image is not None
            ]
            outputs = iter(
                zip(cut, logits_of(patches.stack(cut)), strict=True) if cut else ()
            )
            for beside, image in some:
                yield (
                    beside,
                    None if image is None else _label_map(*next(outputs), image),
                )


def _label_map(sequence, logits, image) -> LabelMap:
    """Returns the classes at the size of the image, without the padding of its sequence."""
    ((rows, columns),) = sequence.grids
    return largest(logits[: rows * columns].reshape(rows, columns, -1), image.shape[:2])
