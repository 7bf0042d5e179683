"""The rules of committing, pure: who may commit offsets for a group, Kafka's checks and those while it rebalances."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from txnstore.errors import (
    FencedInstance,
    IllegalGeneration,
    InvalidGroupId,
    InvalidRequest,
    OffsetMetadataTooLarge,
    UnknownMember,
)
from txnstore.model import (
    NAME_BYTES_MAX,
    NO_GENERATION,
    GroupMembership,
    OffsetAndMetadata,
    is_storable_text,
)

#: Longer names fit no index of PostgreSQL, and no screen.
GROUP_ID_LENGTH_MAX = 1000


@dataclass(frozen=True, slots=True)
class CommittingMember:
    """A member's row, as far as a commit needs it."""

    member_id: str
    group_instance_id: str | None
    generation: int = NO_GENERATION
    """The generation that the member has confirmed."""

    subscription: str | None = None
    """The row's JSON, which tells what the member owns; only of the member that commits."""


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group at the moment of a commit."""

    generation: int
    members: Sequence[CommittingMember] = ()


def check_group_id(group_id: object) -> None:
    """Refuse what cannot be a group's id.

    Raises:
        InvalidGroupId: it is not text, is empty or too long, or has characters that no database stores.
    """
    if not isinstance(group_id, str) or not group_id:
        raise InvalidGroupId("a group's id has to be text and not empty")
    if len(group_id) > GROUP_ID_LENGTH_MAX:
        raise InvalidGroupId(f"a group's id can have at most {GROUP_ID_LENGTH_MAX} characters, not {len(group_id)}")
    if not is_storable_text(group_id):
        raise InvalidGroupId("a group's id holds a NUL or half of a surrogate pair, which no database stores")
    if (size := len(group_id.encode())) > NAME_BYTES_MAX:
        raise InvalidGroupId(f"a group's id can have at most {NAME_BYTES_MAX} bytes of UTF-8, not {size}")


def check_commit(group: GroupView | None, committer: GroupMembership, *, is_transactional: bool) -> None:
    """Return if `committer` may commit offsets of the group; None is a group that nobody has used.

    A commit without generation and member comes from a simple consumer, which manages its partitions itself.

    Raises:
        IllegalGeneration: the generation is not the group's.
        UnknownMember: the group has members, and the committer is not among them.
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


def other_order(group_id: str, committed: OffsetAndMetadata) -> InvalidRequest:
    """Return the error for an offset of the other order of delivery than the one that a group has committed."""
    own, other = ("offset", "commit") if committed.offset_in_transaction is None else ("commit", "offset")
    return InvalidRequest(
        f"group {group_id[:80]!r} has committed offset {committed.offset} of the partition in {own} order, which means"
        f" nothing in {other} order: let it read with txnstore.delivery.order={own}, use another group.id, or reset it"
        f" (txnstore groups reset-offsets ... --order {other})"
    )


@lru_cache(64)
def _owned_ids(subscription: str, generation: int) -> frozenset[int]:
    # The same text at each commit until the group rebalances, and its row is locked meanwhile.
    stored = json.loads(subscription)
    granted = stored.get("granted_ids", []) if generation >= stored.get("granted_in", NO_GENERATION) else []
    return frozenset((*stored["owned_ids"], *granted))


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
    if not committer.member_id and committer.generation != NO_GENERATION:
        raise UnknownMember(
            f"the consumer left group {committer.group_id!r} in generation {committer.generation}; it may now commit"
            " only partitions that it assigned itself, outside transactions"
        )
    if all(member.member_id != committer.member_id for member in group.members):
        raise UnknownMember(f"group {committer.group_id!r} does not know the member {committer.member_id[:80]!r}")


def check_member_commit(
    group: GroupView,
    committer: GroupMembership,
    partition_ids: Collection[int],
    *,
    is_transactional: bool,
) -> None:
    """Return if `committer` may commit offsets of these partitions of the group.

    A member may be behind the group: it commits in any generation from the one that it has confirmed, because no other
    member gets what it owns before it has given it back.  What it was granted since it last reported it commits only in
    the generation of that answer or a later one: in an earlier one, which it may still be in, others had that, and may
    have committed further (Kafka's KIP-1251 counts the same by partition).

    Raises:
        IllegalGeneration: the generation is not one of these, or the member does not own one of the partitions; a
            member that `commits_unowned` need not own them in the group's own generation.
        UnknownMember, FencedInstance: see `check_commit`.
    """
    own = next((member for member in group.members if member.member_id == committer.member_id), None)
    accepted = group
    if own is not None and max(own.generation, 0) <= committer.generation <= group.generation:
        accepted = GroupView(committer.generation, group.members)
    check_commit(accepted, committer, is_transactional=is_transactional)
    if own is None or own.subscription is None:
        return
    owned = _owned_ids(own.subscription, committer.generation)
    if owned.issuperset(partition_ids):
        return
    if committer.commits_unowned:
        # Kafka's own rule, which knows no owners: only in the group's present generation, as another member may have
        # got the partition with it (GroupCoordinator, validateOffsetCommit).
        check_commit(group, committer, is_transactional=is_transactional)
    else:
        raise IllegalGeneration(
            f"the member does not own {len(set(partition_ids) - owned)} of the {len(partition_ids)} partitions that it"
            " commits offsets of, or not since this generation: the group has assigned them to others, or has never"
            " assigned them to it"
        )
