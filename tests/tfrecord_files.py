"""Inputs of the tests of prepare: TFRecord files, written from their description."""

import struct

_TABLE = []
for byte in range(256):
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    _TABLE.append(byte)


def crc32c(data):
    """CRC-32C a byte at a time (RFC 3720, appendix B.4, has values to test it by)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def framed(record):
    """One record of a TFRecord file."""

    def masked(data):
        crc = crc32c(data)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)

    length = struct.pack("<Q", len(record))
    return length + masked(length) + record + masked(record)
