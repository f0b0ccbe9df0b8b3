"""CRC32, zlib's: of every block that is written, and again of every block that is read.

zlib-ng computes it with vector instructions, several times as fast as zlib, and releases the GIL while it does. If
it is not installed, zlib gives the same numbers.
"""

from __future__ import annotations

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
