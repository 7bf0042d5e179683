"""The bytes in which consumers tell others about their membership: for transactions (KIP-447) and for `list_groups()`.

The layout of the group metadata is the one that confluent-kafka's users pickle and send to other processes: a magic
word, the generation as a little-endian 32-bit number, then group, member and instance as text that ends with NUL; a
byte before the instance tells whether it is missing.  A byte that confluent-kafka does not have follows if the member
commits what it does not own.

Subscriptions and assignments are Kafka's ConsumerProtocolSubscription and ConsumerProtocolAssignment, version 0:
big-endian; text after its length in 16 bits, arrays after theirs in 32; user data at the end, which is always missing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Final

from txnstore.model import GroupMembership, is_storable_text

MAGIC: Final = b"CGMDv2:"
_GENERATION: Final = struct.Struct("<i")
_HAS_INSTANCE: Final = b"\x00"
_HAS_NO_INSTANCE: Final = b"\x01"
_COMMITS_UNOWNED: Final = b"\x01"
_INSTANCES: Final = {_HAS_INSTANCE: True, _HAS_NO_INSTANCE: False}


def format_group_metadata(membership: GroupMembership) -> bytes:
    """Return the membership as bytes that `parse_group_metadata` reads, in this process or another.

    Raises:
        ValueError: a name in it holds a NUL or half of a surrogate pair.
    """
    names = (membership.group_id, membership.member_id, membership.group_instance_id or "")
    if not all(map(is_storable_text, names)):
        raise ValueError("the id of a group or member holds a NUL or half of a surrogate pair")
    parts = [
        MAGIC,
        _GENERATION.pack(membership.generation),
        _ended_text(membership.group_id),
        _ended_text(membership.member_id),
    ]
    if membership.group_instance_id is None:
        parts.append(_HAS_NO_INSTANCE)
    else:
        parts += [_HAS_INSTANCE, _ended_text(membership.group_instance_id)]
    if membership.commits_unowned:
        parts.append(_COMMITS_UNOWNED)
    return b"".join(parts)


def parse_group_metadata(metadata: bytes) -> GroupMembership:
    """Return the membership that the bytes encode.

    Raises:
        ValueError: they are not what `Consumer.consumer_group_metadata()` returns.
    """
    if not metadata.startswith(MAGIC):
        raise ValueError("this is not consumer group metadata: use what Consumer.consumer_group_metadata() returned")
    try:
        (generation,) = _GENERATION.unpack_from(metadata, len(MAGIC))
        group_id, rest = _cut(metadata[len(MAGIC) + _GENERATION.size :])
        member_id, rest = _cut(rest)
        has_instance, rest = _INSTANCES[rest[:1]], rest[1:]
        instance_id = None
        if has_instance:
            instance_id, rest = _cut(rest)
    except (struct.error, KeyError, ValueError):
        # The bytes are left out of the text: they may be anything.
        raise ValueError("the consumer group metadata is damaged or cut short") from None
    commits_unowned = rest == _COMMITS_UNOWNED
    if (rest and not commits_unowned) or not group_id:
        raise ValueError("the consumer group metadata is damaged: it names no group, or holds more than one")
    return GroupMembership(group_id, generation, member_id, instance_id, commits_unowned)


def _ended_text(name: str) -> bytes:
    return name.encode() + b"\x00"


def _cut(data: bytes) -> tuple[str, bytes]:
    """Return the text up to the next NUL, and what follows it."""
    name, rest = data.split(b"\x00", 1)
    return name.decode(), rest


_VERSION: Final = struct.pack(">h", 0)
_NO_USER_DATA: Final = struct.pack(">i", -1)


def subscription_bytes(topics: Iterable[str]) -> bytes:
    """Return what a member reports as its subscription."""
    names = [_counted_text(topic) for topic in topics]
    return b"".join([_VERSION, struct.pack(">i", len(names)), *names, _NO_USER_DATA])


def assignment_bytes(partitions: Mapping[str, Iterable[int]]) -> bytes:
    """Return what a member is told of its assignment, by topic."""
    parts = [_VERSION, struct.pack(">i", len(partitions))]
    for topic, numbers in partitions.items():
        listed = list(numbers)
        parts += [_counted_text(topic), struct.pack(f">i{len(listed)}i", len(listed), *listed)]
    return b"".join([*parts, _NO_USER_DATA])


def _counted_text(name: str) -> bytes:
    encoded = name.encode()
    return struct.pack(">h", len(encoded)) + encoded
