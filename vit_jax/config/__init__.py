"""Typed configs: fields that say all of a key, and the way from a file to a dataclass."""
