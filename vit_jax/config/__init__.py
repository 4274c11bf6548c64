"""Typed configs: dataclasses whose fields describe their keys, and their loading."""
