"""The 1,000 classes of ImageNet (ILSVRC 2012), in label order.

Labels number the synsets of WordNet in alphabetical order; so do ReaL's (arXiv:2006.07159).
The names are the first words of each synset, two of them told apart.
"""

import functools
import importlib.resources

NUM_CLASSES = 1_000


@functools.cache
def _rows() -> tuple[tuple[str, str], ...]:
    path = importlib.resources.files("vit_jax.data") / "imagenet_classes.tsv"
    return tuple(
        tuple(line.split("\t")) for line in path.read_text("utf-8").splitlines()
    )


def synsets() -> tuple[str, ...]:
    """Returns the WordNet number of each class, as "n01440764"."""
    return tuple(synset for synset, _ in _rows())


def class_names() -> tuple[str, ...]:
    """Returns the name of each class, as "tench"."""
    return tuple(name for _, name in _rows())
