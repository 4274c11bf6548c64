"""Names of kinds of data sets; their modules are imported when needed (open.py)."""

import re

from vit_jax.config.fields import CUSTOM, Registry

_HERE = "vit_jax.data.sources"

# Kinds of data sets: name for messages -> `base.SourceType`.
SOURCES = Registry(
    {
        "digits": f"{_HERE}.arrays:DIGITS",
        "synthetic": f"{_HERE}.arrays:SYNTHETIC",
        "in_memory": f"{_HERE}.arrays:ARRAYS",
        "folder": f"{_HERE}.folder:FOLDER",
        "objectnet": f"{_HERE}.objectnet:OBJECTNET",
        "masks": f"{_HERE}.mask_folders:MASKS",
        "table": f"{_HERE}.table:TABLE",
        "tar": f"{_HERE}.tar:TAR",
        "parquet": f"{_HERE}.parquet:PARQUET",
        "hf://datasets/owner/name": f"{_HERE}.parquet:HUB",
        "vtab/...": f"{_HERE}.vtab:VTAB",
        "my_module:open_source": f"{_HERE}.custom:CUSTOM",
    }
)
# Regular expressions of `data.name` for kinds that it does not equal.
_PATTERNS = {
    "hf://datasets/owner/name": "hf://datasets/.*",
    "vtab/...": "vtab/.*",
    "my_module:open_source": CUSTOM,
}


def key_of(name: str) -> str:
    """Returns the key in SOURCES of a `data.name`; "" for a TFDS data set."""
    keys = (key for key in SOURCES if re.fullmatch(_PATTERNS.get(key, key), name))
    return next(keys, "")
