"""This file is the bytes in which Kafka's consumers tell their group what they want and have: for `list_groups()`.

ConsumerProtocolSubscription and ConsumerProtocolAssignment, version 0: big-endian; text with its length before it in
16 bits, arrays with theirs in 32; at the end the user data, of which there is none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Final

_VERSION: Final = struct.pack(">h", 0)
_NO_USER_DATA: Final = struct.pack(">i", -1)


def subscription_bytes(topics: Iterable[str]) -> bytes:
    """Return what a member says that it subscribed to."""
    names = [_text(topic) for topic in topics]
    return b"".join([_VERSION, struct.pack(">i", len(names)), *names, _NO_USER_DATA])


def assignment_bytes(partitions: Mapping[str, Iterable[int]]) -> bytes:
    """Return what a member is told that it has, by topic."""
    parts = [_VERSION, struct.pack(">i", len(partitions))]
    for topic, numbers in partitions.items():
        listed = list(numbers)
        parts += [_text(topic), struct.pack(f">i{len(listed)}i", len(listed), *listed)]
    return b"".join([*parts, _NO_USER_DATA])


def _text(name: str) -> bytes:
    encoded = name.encode()
    return struct.pack(">h", len(encoded)) + encoded
