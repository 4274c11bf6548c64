"""Refuses compressed files that would take far more memory than weights need."""

# Trained float32 weights deflate to 93 % of their size, rounded to bfloat16 to 47 %, to
# 4 bits to 14 %, and 99 % pruned to 1.6 %. Only constants go beyond (zeros to 0.1 %).
RATIO = 64
# Below this an expansion harms no-one: zeros of a small test model stay readable.
HARMLESS = 16 << 20


def check(expanded: int, size: int, what: str) -> None:
    """Raises ValueError if a file grows beyond what weights do.

    Args:
      expanded: bytes that reading would take.
      size: of the file, in bytes.
      what: is read, for the message.
    """
    if expanded > max(HARMLESS, RATIO * size):
        raise ValueError(
            f"{what} would take {expanded:,} bytes, {expanded // max(1, size):,} times the "
            "file's size, and weights do not: save them again uncompressed"
        )
