"""The offsets of groups: committed by themselves, or pending until their transaction ends."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Table,
    and_,
    bindparam,
    case,
    delete,
    exists,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.sqlite import Insert
from sqlalchemy.dialects.sqlite import insert as upsert

from txnstore.db.backend import OffsetGroup, WholeTransaction
from txnstore.db.cluster.catalogue import read_store_settings
from txnstore.db.schema import (
    group_members,
    group_offsets,
    groups,
    partitions,
    pending_group_offsets,
)
from txnstore.db.statements import HotStatement
from txnstore.db.store import Store, chunks, server_now_ms
from txnstore.errors import (
    IllegalGeneration,
    InvalidRequest,
    TxnStoreError,
    UnknownTopicOrPartition,
    UnstableOffsetCommit,
)
from txnstore.groups.commit_rules import (
    CommittingMember,
    GroupView,
    check_commit,
    check_group_id,
    check_member_commit,
    check_offsets,
    other_order,
)
from txnstore.groups.rows import ensure_group, lock_group
from txnstore.log.topics import names_of_partitions
from txnstore.model import (
    NO_GENERATION,
    NO_PRODUCER,
    OFFSET_MAX,
    GroupMembership,
    OffsetAndMetadata,
    ProducerIdentity,
    is_storable_text,
)

LEADER_EPOCH_MAX: Final = 2**31 - 1
_as_journal_text: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

# The group's row lock, which puts its commits in order; taken after the heads of partitions, never before. It returns
# columns of that row alone, which PostgreSQL reads again after a wait: a subquery would see the members from before it.
_COUNT: Final = HotStatement(
    update(groups)
    .where(groups.c.group_id == bindparam("of_group_id"))
    .values(commit_number=groups.c.commit_number + 1, last_update_ms=server_now_ms())
    .returning(
        groups.c.generation,
        groups.c.commit_number,
        groups.c.last_update_ms,
    )
)
_GENERATION: Final = HotStatement(select(groups.c.generation).where(groups.c.group_id == bindparam("of_group_id")))
_MEMBERS: Final = HotStatement(
    select(
        group_members.c.member_id,
        group_members.c.group_instance_id,
        group_members.c.generation,
        # What other members own need not be read.
        case((group_members.c.member_id == bindparam("of_member_id"), group_members.c.subscription)),
    ).where(group_members.c.group_id == bindparam("of_group_id"))
)
_OFFSET_COLUMNS: Final = (
    "committed_offset",
    "offset_in_transaction",
    "leader_epoch",
    "offset_metadata",
    "commit_ms",
    "commit_number",
    "producer_id",
    "producer_epoch",
)


def _of_partition(table: Table, columns: Iterable[str], *conditions: ColumnElement[bool]) -> Insert:
    """Return an INSERT of one row if its partition exists; it inserts nothing for a deleted one."""
    values = [bindparam(f"new_{name}", type_=table.c[name].type) for name in columns]
    # In one statement, without a look before: a recreated topic has another partition of the same name.
    source = select(*values).where(partitions.c.partition_id == bindparam("new_partition_id"), *conditions)
    return upsert(table).from_select(list(columns), source)


def _is_same_order(one: ColumnElement[Any], other: ColumnElement[Any]) -> ColumnElement[bool]:
    """Return whether two offsets are of one order of delivery."""
    return or_(and_(one.is_(None), other.is_(None)), and_(one.is_not(None), other.is_not(None)))


def _has_other_order(table: Table) -> ColumnElement[bool]:
    """Return whether the group has an offset of the other order there: one never takes the place of the other."""
    new = bindparam("new_offset_in_transaction", type_=table.c.offset_in_transaction.type)
    return exists().where(
        table.c.group_id == bindparam("new_group_id"),
        table.c.partition_id == bindparam("new_partition_id"),
        ~_is_same_order(table.c.offset_in_transaction, new),
    )


_INSERT_OFFSET: Final = _of_partition(group_offsets, ("group_id", "partition_id", *_OFFSET_COLUMNS))
_COMMIT: Final = HotStatement(
    _INSERT_OFFSET.on_conflict_do_update(
        index_elements=[group_offsets.c.group_id, group_offsets.c.partition_id],
        set_={name: _INSERT_OFFSET.excluded[name] for name in _OFFSET_COLUMNS},
        where=_is_same_order(group_offsets.c.offset_in_transaction, _INSERT_OFFSET.excluded.offset_in_transaction),
    )
)
_RESET: Final = HotStatement(
    _INSERT_OFFSET.on_conflict_do_update(
        index_elements=[group_offsets.c.group_id, group_offsets.c.partition_id],
        set_={name: _INSERT_OFFSET.excluded[name] for name in _OFFSET_COLUMNS},
    )
)
_PENDING_COLUMNS: Final = (
    "producer_epoch",
    "pending_offset",
    "offset_in_transaction",
    "leader_epoch",
    "offset_metadata",
    "commit_ms",
    "commit_number",
)
# It is asked here, so that nothing is left to ask when the transaction ends: what was committed meanwhile is later.
_INSERT_PENDING: Final = _of_partition(
    pending_group_offsets,
    ("group_id", "partition_id", "producer_id", *_PENDING_COLUMNS),
    ~_has_other_order(group_offsets),
    ~_has_other_order(pending_group_offsets),
)
_PEND: Final = HotStatement(
    _INSERT_PENDING.on_conflict_do_update(
        index_elements=[
            pending_group_offsets.c.group_id,
            pending_group_offsets.c.partition_id,
            pending_group_offsets.c.producer_id,
        ],
        set_={name: _INSERT_PENDING.excluded[name] for name in _PENDING_COLUMNS},
    )
)
_THESE_PENDING: Final = (pending_group_offsets.c.group_id == bindparam("of_group_id")) & (
    pending_group_offsets.c.producer_id == bindparam("of_producer_id")
)
# What was pending becomes committed, unless a plain commit came after it: the later commit holds.
_COUNT_IN_SOURCE: Final = upsert(group_offsets).from_select(
    ["group_id", "partition_id", *_OFFSET_COLUMNS],
    select(
        pending_group_offsets.c.group_id,
        pending_group_offsets.c.partition_id,
        pending_group_offsets.c.pending_offset,
        pending_group_offsets.c.offset_in_transaction,
        pending_group_offsets.c.leader_epoch,
        pending_group_offsets.c.offset_metadata,
        # Their retention begins now: the transaction may have been open for longer than that.
        server_now_ms(),
        pending_group_offsets.c.commit_number,
        pending_group_offsets.c.producer_id,
        pending_group_offsets.c.producer_epoch,
    ).where(_THESE_PENDING),
)
_COUNT_IN: Final = HotStatement(
    _COUNT_IN_SOURCE.on_conflict_do_update(
        index_elements=[group_offsets.c.group_id, group_offsets.c.partition_id],
        set_={name: _COUNT_IN_SOURCE.excluded[name] for name in _OFFSET_COLUMNS},
        where=group_offsets.c.commit_number < _COUNT_IN_SOURCE.excluded.commit_number,
    )
)
_DROP_PENDING: Final = HotStatement(delete(pending_group_offsets).where(_THESE_PENDING), may_be_listed=True)
_TAKE_PENDING: Final = HotStatement(
    delete(pending_group_offsets)
    .where(_THESE_PENDING)
    .returning(
        pending_group_offsets.c.partition_id,
        pending_group_offsets.c.pending_offset,
        pending_group_offsets.c.leader_epoch,
        pending_group_offsets.c.offset_metadata,
        pending_group_offsets.c.offset_in_transaction,
    )
)
_IN_PARTITIONS: Final[BindParameter[Any]] = bindparam("partition_ids", expanding=True)
_PARTITIONS: Final = HotStatement(
    select(partitions.c.partition_id).where(partitions.c.partition_id.in_(_IN_PARTITIONS))
)
_READ: Final = HotStatement(
    select(
        group_offsets.c.partition_id,
        group_offsets.c.committed_offset,
        group_offsets.c.leader_epoch,
        group_offsets.c.offset_metadata,
        group_offsets.c.offset_in_transaction,
    )
    .where(group_offsets.c.group_id == bindparam("of_group_id"))
    .where(group_offsets.c.partition_id.in_(_IN_PARTITIONS))
)
_READ_PENDING: Final = HotStatement(
    select(pending_group_offsets.c.partition_id)
    .where(pending_group_offsets.c.group_id == bindparam("of_group_id"))
    .where(pending_group_offsets.c.partition_id.in_(_IN_PARTITIONS))
    .distinct()
)
_READ_PENDING_ORDER: Final = HotStatement(
    select(
        pending_group_offsets.c.partition_id,
        pending_group_offsets.c.pending_offset,
        pending_group_offsets.c.offset_in_transaction,
    )
    .where(pending_group_offsets.c.group_id == bindparam("of_group_id"))
    .where(pending_group_offsets.c.partition_id.in_(_IN_PARTITIONS))
)


@dataclass(frozen=True, slots=True)
class CommittedOffsets:
    """What a group has consumed, in one snapshot."""

    offsets: Mapping[int, OffsetAndMetadata]
    """By partition id; a partition without a committed offset is left out."""

    unstable: frozenset[int]
    """The partitions whose offsets an open transaction may still change."""


def commit_offsets(
    connection: Connection,
    committer: GroupMembership,
    offsets: Mapping[int, OffsetAndMetadata],
    *,
    producer: ProducerIdentity = NO_PRODUCER,
    changes_order: bool = False,
) -> None:
    """Commit offsets by partition id: by themselves, or together with the transaction of `producer` that commits now.

    With `changes_order` they take the place of whatever was committed.

    Raises:
        InvalidGroupId, InvalidRequest, OffsetMetadataTooLarge: the group or an offset is not of the documented form.
        InvalidRequest: the group has committed an offset of the other order of delivery: the caller has to roll back.
        IllegalGeneration, UnknownMember, FencedInstance: see `commit_rules.check_member_commit`.
        UnknownTopicOrPartition: a partition does not exist (any more): the caller has to roll back.
    """
    _check_request(connection, committer, offsets)
    lock = _lock_for_commit(connection, committer, offsets, is_transactional=producer != NO_PRODUCER)
    if offsets:
        rows = _rows(committer.group_id, offsets, lock, producer, "committed_offset")
        _write(connection, _RESET if changes_order else _COMMIT, rows)


def commit_offsets_at_once(
    store: Store,
    committer: GroupMembership,
    offsets: Mapping[int, OffsetAndMetadata],
    *,
    retry_timeout_ms: int | None = None,
) -> bool:
    """Commit offsets by themselves, by one statement that is all of their database transaction.

    False: nothing was changed, because the database has no such statement or something is unusual; `commit_offsets`
    does it or says why not.

    Raises:
        OutcomeUnknown: the connection broke; the offsets may have been committed.
        TxnStoreError: the database is busy or away; nothing was changed.
    """
    if not (store.commits_whole and store.has_commit_function and offsets and are_usual(committer, offsets)):
        return False
    whole = WholeTransaction(
        None,
        NO_PRODUCER.producer_id,
        NO_PRODUCER.epoch,
        earliest_ms=0,
        latest_ms=OFFSET_MAX,
        marker_crc=0,
        partitions=(),
        batches=(),
        group=group_of(committer),
        offsets=numbers_of(offsets),
    )
    # A function of before knows of no such offsets, and leaves them out.
    return store.commit_whole(whole, retry_timeout_ms=retry_timeout_ms) == [len(offsets)]


def add_pending_offsets(
    connection: Connection,
    committer: GroupMembership,
    offsets: Mapping[int, OffsetAndMetadata],
    producer: ProducerIdentity,
) -> None:
    """Let the open transaction of `producer` hold offsets, which take effect when it commits (TxnOffsetCommit).

    Raises:
        InvalidGroupId, InvalidRequest, OffsetMetadataTooLarge: the group or an offset is not of the documented form.
        InvalidRequest: the group has an offset of the other order of delivery: the caller has to roll back.
        IllegalGeneration, UnknownMember, FencedInstance: see `commit_rules.check_member_commit`.
    """
    _check_request(connection, committer, offsets)
    lock = _lock_for_commit(connection, committer, offsets, is_transactional=True)
    if offsets:
        _write(connection, _PEND, _rows(committer.group_id, offsets, lock, producer, "pending_offset"))


def finish_pending_offsets(
    connection: Connection, group_ids: Iterable[str], producer_id: int, *, commit: bool
) -> dict[str, dict[int, OffsetAndMetadata]]:
    """Commit, or drop, the offsets that a transaction holds; doing it again changes nothing.

    Returns those that it has committed, by group and partition id.

    Raises:
        NotCoordinator: the group lives in another database, of which the caller does not know.
    """
    committed: dict[str, dict[int, OffsetAndMetadata]] = {}
    for group_id in sorted(group_ids):
        these = {"of_group_id": group_id, "of_producer_id": producer_id}
        _lock_to_finish(connection, group_id)
        if commit:
            _COUNT_IN.run(connection, these)
            taken = _TAKE_PENDING.rows(connection, these)
            committed[group_id] = {row[0]: OffsetAndMetadata(*row[1:]) for row in taken}
        else:
            _DROP_PENDING.run(connection, these)
    return committed


def drop_pending_offsets(connection: Connection, producer_ids_of: Mapping[str, Iterable[int]]) -> None:
    """Drop the offsets that transactions hold, by group and producer id; doing it again changes nothing.

    Raises:
        NotCoordinator: a group lives in another database, of which the caller does not know.
    """
    for group_id in sorted(producer_ids_of):
        _lock_to_finish(connection, group_id)
        these = [{"of_group_id": group_id, "of_producer_id": number} for number in producer_ids_of[group_id]]
        _DROP_PENDING.run_each(connection, these)


def _lock_to_finish(connection: Connection, group_id: str) -> None:
    if not lock_group(connection, group_id):
        # A store opened while its database was alone would take offsets in another database for finished.  And
        # where row-level security hides the group from this role, it hides the offsets: then this is refused.
        ensure_group(connection, group_id)
        lock_group(connection, group_id)


def read_offsets(connection: Connection, group_id: str, partition_ids: Iterable[int]) -> CommittedOffsets:
    """Return what the group has committed in these partitions, and in which an open transaction holds offsets."""
    offsets: dict[int, OffsetAndMetadata] = {}
    unstable: set[int] = set()
    for some in chunks(list(partition_ids)):
        of = {"of_group_id": group_id, "partition_ids": some}
        offsets.update((row[0], OffsetAndMetadata(*row[1:])) for row in _READ.rows(connection, of))
        unstable.update(_READ_PENDING.values(connection, of))
    return CommittedOffsets(offsets, frozenset(unstable))


def read_stable_offsets(connection: Connection, group_id: str, partition_ids: Iterable[int]) -> CommittedOffsets:
    """Return the same, or refuse while any of it may still change (KIP-447).

    Raises:
        UnstableOffsetCommit: an open transaction holds offsets of one of the partitions; ask again later.
    """
    committed = read_offsets(connection, group_id, partition_ids)
    if committed.unstable:
        raise UnstableOffsetCommit(
            f"an open transaction holds offsets of group {group_id[:80]!r} in {len(committed.unstable)} partitions"
        )
    return committed


def check_committer(connection: Connection, committer: GroupMembership) -> None:
    """Return if the committer could commit offsets in a transaction now; its commit asks again, under the lock.

    Raises:
        InvalidGroupId: the group's id is not of the documented form.
        IllegalGeneration, UnknownMember, FencedInstance: see `commit_rules.check_commit`.
    """
    check_group_id(committer.group_id)
    of = {"of_group_id": committer.group_id}
    generation = _GENERATION.value(connection, of)
    if generation is None:
        check_commit(None, committer, is_transactional=True)
        return
    check_member_commit(
        GroupView(generation, _read_members(connection, committer)), committer, (), is_transactional=True
    )


def check_partitions(connection: Connection, partition_ids: Collection[int]) -> None:
    """Return if these partitions exist.

    Raises:
        UnknownTopicOrPartition: one does not exist (any more).
    """
    for some in chunks(sorted(partition_ids)):
        found = _PARTITIONS.values(connection, {"partition_ids": some})
        for missing in sorted(set(some) - set(found)):
            raise _deleted(missing)


@dataclass(frozen=True, slots=True)
class _LockedGroup:
    commit_number: int
    now_ms: int


def check_form(committer: GroupMembership, offsets: Mapping[int, OffsetAndMetadata]) -> None:
    """Refuse what cannot be an offset of a group, whatever is in the database.

    Raises:
        InvalidGroupId, InvalidRequest: the group or an offset is not of the documented form.
    """
    check_group_id(committer.group_id)
    for offset in offsets.values():
        if (
            isinstance(offset.offset, bool)
            or not isinstance(offset.offset, int)
            or not 0 <= offset.offset <= OFFSET_MAX
        ):
            raise InvalidRequest(f"a committed offset has to be a number from 0 to {OFFSET_MAX}, not {offset.offset!r}")
        within = offset.offset_in_transaction
        if within is not None and (type(within) is not int or not 0 <= within <= OFFSET_MAX):
            raise InvalidRequest(f"an offset in a transaction has to be a number from 0 to {OFFSET_MAX}")
        if type(offset.leader_epoch) is not int or not -1 <= offset.leader_epoch <= LEADER_EPOCH_MAX:
            raise InvalidRequest(f"a leader epoch has to be a number from -1 to {LEADER_EPOCH_MAX}")
        if offset.metadata is not None and not (isinstance(offset.metadata, str) and is_storable_text(offset.metadata)):
            raise InvalidRequest("the metadata of an offset has to be text without NUL or half of a surrogate pair")


def are_usual(committer: GroupMembership, offsets: Mapping[int, OffsetAndMetadata]) -> bool:
    """Return whether offsets come from a member, or from nobody in particular, and without metadata."""
    try:
        check_form(committer, offsets)
    except TxnStoreError:
        return False
    if any(offset.metadata or offset.offset_in_transaction is not None for offset in offsets.values()):
        # The store has a limit for metadata; and the short way is for offset order alone.
        return False
    if committer.member_id:
        return committer.generation > NO_GENERATION
    return committer.generation == NO_GENERATION and committer.group_instance_id is None


def group_of(committer: GroupMembership) -> OffsetGroup:
    """Return what a function of the database is told of a committer."""
    return OffsetGroup(committer.group_id, committer.generation, committer.member_id, committer.group_instance_id)


def numbers_of(offsets: Mapping[int, OffsetAndMetadata]) -> list[tuple[int, int, int, str | None]]:
    """Return what it is told of the offsets."""
    return [
        (partition_id, offset.offset, offset.leader_epoch, offset.metadata)
        for partition_id, offset in sorted(offsets.items())
    ]


def journal_text(sent: Mapping[str, Mapping[int, OffsetAndMetadata]]) -> str | None:
    """Return what the journal tells of the offsets that a transaction commits, by group; None: there are none.

    Each is a partition id and an offset, and in commit order the offset in the transaction there.
    """
    told = {
        group_id: [
            [partition_id, one.offset]
            if one.offset_in_transaction is None
            else [partition_id, one.offset, one.offset_in_transaction]
            for partition_id, one in sorted(offsets.items())
        ]
        for group_id, offsets in sorted(sent.items())
        if offsets
    }
    return _as_journal_text(told) if told else None


def from_journal_text(text: str) -> dict[str, dict[int, OffsetAndMetadata]]:
    """Return the offsets by group and partition id."""
    return {
        group_id: {
            partition_id: OffsetAndMetadata(offset, offset_in_transaction=within[0] if within else None)
            for partition_id, offset, *within in offsets
        }
        for group_id, offsets in json.loads(text).items()
    }


def _check_request(
    connection: Connection, committer: GroupMembership, offsets: Mapping[int, OffsetAndMetadata]
) -> None:
    check_form(committer, offsets)
    if any(offset.metadata for offset in offsets.values()):
        # The setting is only asked for when there is something to measure.
        check_offsets(list(offsets.values()), read_store_settings(connection)["offset.metadata.max.bytes"])


def _lock_for_commit(
    connection: Connection, committer: GroupMembership, partition_ids: Collection[int], *, is_transactional: bool
) -> _LockedGroup:
    """Lock the group, creating it if necessary, count one more commit, and check the committer."""
    of = {"of_group_id": committer.group_id}
    row = _COUNT.row(connection, of)
    if row is None:
        check_commit(None, committer, is_transactional=is_transactional)
        ensure_group(connection, committer.group_id)
        row = _COUNT.row(connection, of)
    # A group's first member moves it to generation 1: before, there are no members to read.
    members = _read_members(connection, committer) if row.generation > 0 else []
    group = GroupView(row.generation, members)
    check = partial(check_member_commit, group, committer, is_transactional=is_transactional)
    try:
        check(partition_ids)
    except IllegalGeneration:
        anew = _owned_anew(connection, members, committer, partition_ids)
        if not anew:
            raise
        check(set(partition_ids) - anew)
    return _LockedGroup(row.commit_number, row.last_update_ms)


def _owned_anew(
    connection: Connection, members: Iterable[CommittingMember], committer: GroupMembership, ids: Collection[int]
) -> set[int]:
    """Return those of the partitions that the member owns by name: their topics were recreated since."""
    subscription = next((member.subscription for member in members if member.member_id == committer.member_id), None)
    if subscription is None:
        return set()
    stored = json.loads(subscription)
    owned: Mapping[str, list[int]] = stored.get("owned", {})
    # As in commit_rules: what it was granted later than in this generation may have been another's in it.
    is_early = committer.generation < stored.get("granted_in", NO_GENERATION)
    granted: Mapping[str, list[int]] = stored.get("granted", {}) if is_early else {}
    names = names_of_partitions(connection, set(ids).difference(stored.get("granted_ids", ())))
    return {
        partition_id
        for partition_id, name in names.items()
        if name.partition in owned.get(name.topic, ()) and name.partition not in granted.get(name.topic, ())
    }


def _read_members(connection: Connection, committer: GroupMembership) -> list[CommittingMember]:
    of = {"of_group_id": committer.group_id, "of_member_id": committer.member_id}
    return [CommittingMember(*member) for member in _MEMBERS.rows(connection, of)]


def _write(connection: Connection, statement: HotStatement, rows: list[dict[str, Any]]) -> None:
    if statement.run_each(connection, rows) != len(rows):
        check_partitions(connection, {row["new_partition_id"] for row in rows})
        _check_order(connection, rows)
        # It was deleted between the two statements, or the driver cannot count.
        raise _deleted(rows[0]["new_partition_id"])


def _check_order(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse offsets of the other order of delivery than what the group has committed, or an open transaction holds."""
    group_id = rows[0]["new_group_id"]
    within = {row["new_partition_id"]: row["new_offset_in_transaction"] for row in rows}
    for some in chunks(list(within)):
        of = {"of_group_id": group_id, "partition_ids": some}
        for row in (*_READ.rows(connection, of), *_READ_PENDING_ORDER.rows(connection, of)):
            if (row.offset_in_transaction is None) != (within[row.partition_id] is None):
                raise other_order(group_id, OffsetAndMetadata(row[1], offset_in_transaction=row.offset_in_transaction))


def _deleted(partition_id: int) -> UnknownTopicOrPartition:
    return UnknownTopicOrPartition(
        f"there is no partition with id {partition_id} to commit an offset for; was its topic deleted?"
    )


def _rows(
    group_id: str,
    offsets: Mapping[int, OffsetAndMetadata],
    lock: _LockedGroup,
    producer: ProducerIdentity,
    offset_column: str,
) -> list[dict[str, Any]]:
    return [
        {
            "new_group_id": group_id,
            "new_partition_id": partition_id,
            f"new_{offset_column}": offset.offset,
            "new_offset_in_transaction": offset.offset_in_transaction,
            "new_leader_epoch": offset.leader_epoch,
            "new_offset_metadata": offset.metadata,
            "new_commit_ms": lock.now_ms,
            "new_commit_number": lock.commit_number,
            "new_producer_id": producer.producer_id,
            "new_producer_epoch": producer.epoch,
        }
        for partition_id, offset in sorted(offsets.items())
    ]
