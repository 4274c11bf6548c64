"""Data sets. Each file registers its own in `SOURCES` of base.py; open.py opens them."""

from vit_jax.data.sources import arrays, custom, folder, parquet, table, tfds, vtab

__all__ = ["arrays", "custom", "folder", "parquet", "table", "tfds", "vtab"]
