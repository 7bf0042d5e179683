"""This file is what the clients say of their version: txnstore's own, and that of the librdkafka they behave like."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"

#: As text and as librdkafka's number: programs ask before they use a feature.
_LIBRDKAFKA_VERSION: Final = ("2.16.0", 0x021000FF)


def version() -> str:
    """Return the version of txnstore."""
    return VERSION


def libversion() -> tuple[str, int]:
    """Return the version of librdkafka whose behaviour the clients have, as text and as librdkafka's number."""
    return _LIBRDKAFKA_VERSION
