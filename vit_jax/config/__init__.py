"""Typed configs: fields with all facts of a key, and the way from a file to a dataclass."""
