"""This file is who may commit offsets for a group, pure: Kafka's checks of a plain and of a transactional commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from txnstore.errors import FencedInstance, IllegalGeneration, InvalidGroupId, OffsetMetadataTooLarge, UnknownMember
from txnstore.model import NO_GENERATION, GroupMembership, OffsetAndMetadata

#: Longer names fit no index of PostgreSQL, and no screen.
GROUP_ID_LENGTH_MAX = 1000


@dataclass(frozen=True, slots=True)
class Member:
    """A member as the group knows it."""

    member_id: str
    group_instance_id: str | None


@dataclass(frozen=True, slots=True)
class GroupView:
    """What a group is at the moment of a commit."""

    generation: int
    members: Sequence[Member] = ()


def check_group_id(group_id: object) -> None:
    """Refuse what is no name of a group.

    Raises:
        InvalidGroupId: it is not text, is empty or too long, or has characters that no database keeps.
    """
    if not isinstance(group_id, str) or not group_id:
        raise InvalidGroupId("a group's id is text and not empty")
    if len(group_id) > GROUP_ID_LENGTH_MAX:
        raise InvalidGroupId(f"a group's id has at most {GROUP_ID_LENGTH_MAX} characters, not {len(group_id)}")
    if not is_storable_text(group_id):
        raise InvalidGroupId("a group's id holds a NUL or half of a surrogate pair, which no database stores")


def is_storable_text(text: str) -> bool:
    """Return whether both databases keep the text as it is."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def check_commit(group: GroupView | None, committer: GroupMembership, *, is_transactional: bool) -> None:
    """Return if `committer` may commit offsets of the group; None is a group that nobody has used.

    A commit without generation and member is a simple consumer's, which manages its partitions itself.

    Raises:
        IllegalGeneration: the generation is not the group's.
        UnknownMember: the group has members, and the committer is none of them.
        FencedInstance: another member has the committer's group.instance.id now (KIP-345).
    """
    if group is None:
        if committer.generation >= 0:
            raise IllegalGeneration(
                f"group {committer.group_id!r} does not exist, so it has no generation {committer.generation}"
            )
        return
    if committer.generation < 0 and not group.members:
        return
    is_simple = (
        not committer.member_id and committer.group_instance_id is None and committer.generation == NO_GENERATION
    )
    if is_simple and is_transactional:
        # Producers from before KIP-447 send no membership with a transaction's offsets.
        return
    _check_member(group, committer)
    if committer.generation != group.generation:
        raise IllegalGeneration(
            f"group {committer.group_id!r} is in generation {group.generation}, not {committer.generation}"
        )


def check_offsets(offsets: Sequence[OffsetAndMetadata], metadata_bytes_max: int) -> None:
    """Refuse metadata that is too long.

    Raises:
        OffsetMetadataTooLarge: it has more bytes of UTF-8 than offset.metadata.max.bytes.
    """
    for offset in offsets:
        size = len((offset.metadata or "").encode())
        if size > metadata_bytes_max:
            raise OffsetMetadataTooLarge(
                f"the metadata of an offset has {size} bytes; offset.metadata.max.bytes is {metadata_bytes_max}"
            )


def _check_member(group: GroupView, committer: GroupMembership) -> None:
    if committer.group_instance_id is not None:
        static = next(
            (member for member in group.members if member.group_instance_id == committer.group_instance_id), None
        )
        if static is None:
            raise UnknownMember(f"group {committer.group_id!r} has no member with this group.instance.id")
        if static.member_id != committer.member_id:
            raise FencedInstance
        return
    if all(member.member_id != committer.member_id for member in group.members):
        raise UnknownMember(f"group {committer.group_id!r} does not know the member {committer.member_id[:80]!r}")
