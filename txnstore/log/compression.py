"""The compression codecs of record batches: their numbers, their names, and the functions behind them.

Each codec writes the frame that other tools know by its name (and Arrow by the same one): gzip members, raw snappy
blocks, LZ4 frames, Zstandard frames.  gzip comes with Python; the rest with the extra `compression`.
"""

from __future__ import annotations

import enum
import importlib
import zlib
from typing import Any, Final

from txnstore.errors import UnsupportedCompression

#: What tells zlib to read and write gzip members (zlib's manual, inflateInit2).
_GZIP_WINDOW_BITS: Final = zlib.MAX_WBITS | 16


class Codec(enum.IntEnum):
    """How the key and value columns of a batch are compressed; Kafka's numbers."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4

    @property
    def label(self) -> str:
        """The codec's name as `compression.type` spells it: "none", "gzip", "snappy", "lz4" or "zstd"."""
        return self.name.lower()

    @classmethod
    def named(cls, label: str) -> Codec:
        """Return the codec that `compression.type` calls `label`.

        Raises:
            UnsupportedCompression: there is no codec of this name.
        """
        for codec in cls:
            if codec.label == label:
                return codec
        known = ", ".join(codec.label for codec in cls)
        raise UnsupportedCompression(f"there is no compression codec {label!r}; the codecs are {known}")


def codec_for_topic(setting: str, producers: Codec) -> Codec:
    """Return how a batch for a topic is compressed: `setting` is the topic's compression.type.

    "producer" leaves it to the producer, "uncompressed" stands for no compression; the rest are codecs.
    """
    if setting == "producer":
        return producers
    return Codec.NONE if setting == "uncompressed" else Codec[setting.upper()]


class DecompressionFailed(Exception):
    """The data is not what the codec wrote, or not of the size that was said."""


def require_codec(codec: Codec) -> None:
    """Make sure that `codec` can be used here, before anything depends on it.

    Raises:
        UnsupportedCompression: the package that implements it is not installed.
    """
    if codec not in (Codec.NONE, Codec.GZIP):
        _cramjam(codec)


def compress(codec: Codec, data: bytes) -> bytes:
    """Return `data` as `codec` writes it.

    Raises:
        UnsupportedCompression: the package that implements the codec is not installed.
    """
    if codec is Codec.NONE:
        return data
    if codec is Codec.GZIP:
        # No clock in the header: the same records always give the same bytes.
        return zlib.compress(data, wbits=_GZIP_WINDOW_BITS)
    module = _cramjam(codec)
    return bytes(module.compress_raw(data) if codec is Codec.SNAPPY else module.compress(data))


def decompress(codec: Codec, data: bytes, size_bytes: int) -> bytes:
    """Return what `compress` was given, which was `size_bytes` long.

    Never allocates more than `size_bytes` for the result, whatever `data` would swell to.

    Raises:
        DecompressionFailed: the data is damaged or its true size is not `size_bytes`.
        UnsupportedCompression: the package that implements the codec is not installed.
    """
    if codec is Codec.NONE:
        plain = data
    elif codec is Codec.GZIP:
        plain = _gunzip(data, size_bytes)
    else:
        plain = _decompress_into(codec, data, size_bytes)
    if len(plain) != size_bytes:
        raise DecompressionFailed(f"{len(plain)} bytes where {size_bytes} were expected")
    return plain


def _gunzip(data: bytes, size_bytes: int) -> bytes:
    decompressor = zlib.decompressobj(wbits=_GZIP_WINDOW_BITS)
    try:
        # One byte of room more than is due shows a stream that is too long, and lets an empty one be read at all:
        # zlib takes 0 for "no limit".
        plain = decompressor.decompress(data, size_bytes + 1)
    except zlib.error as error:
        raise DecompressionFailed(str(error)) from None
    if not decompressor.eof or decompressor.unused_data:
        raise DecompressionFailed("the gzip stream is cut short, too long, or followed by something else")
    return plain


def _decompress_into(codec: Codec, data: bytes, size_bytes: int) -> bytes:
    module = _cramjam(codec)
    decompress_into = module.decompress_raw_into if codec is Codec.SNAPPY else module.decompress_into
    buffer = bytearray(size_bytes)
    try:
        written = decompress_into(data, buffer)
    except _cramjam_error() as error:
        raise DecompressionFailed(str(error)) from None
    return bytes(buffer) if written == size_bytes else bytes(buffer[:written])


def _cramjam(codec: Codec) -> Any:
    """Return cramjam's module for `codec`; imported here so that only those who compress need it."""
    try:
        return importlib.import_module("cramjam").__dict__[codec.label]
    except ImportError:
        raise UnsupportedCompression(
            f"compression {codec.label!r} needs another package: pip install txnstore[compression]"
        ) from None


def _cramjam_error() -> type[Exception]:
    error: type[Exception] = importlib.import_module("cramjam").DecompressionError
    return error
