"""The numbers of the paper (arXiv:2010.11929v2) that reports stand beside."""

import functools
import importlib.resources
import json


@functools.cache
def tables() -> dict:
    """Returns the paper's tables 2, 5, 6 and 9, as published.json beside this has them.

    Percentages are top-1 on the test split. Table 2 has (mean, standard deviation) of
    three runs; a number may be missing (None), or be words.
    """
    here = importlib.resources.files("vit_jax.report")
    return json.loads((here / "published.json").read_text(encoding="utf-8"))
