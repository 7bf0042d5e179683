"""The invariants of the coordinator's tables, among themselves and with what stands in the partitions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, Final

from sqlalchemy import Connection, Row, Table, bindparam, func, select, union

from txnstore.db.cluster.membership import PRODUCER_ID_BITS
from txnstore.db.schema import (
    finished_transactions,
    group_offsets,
    pending_group_offsets,
    pending_markers,
    producer_states,
    record_batches,
    stores,
    transaction_groups,
    transaction_log,
    transaction_partitions,
    transaction_writer_partitions,
    transaction_writers,
    transactions,
)
from txnstore.model import NO_PRODUCER_ID, ControlType
from txnstore.testing.violations import Invariant, Violation
from txnstore.transactions.protocol import DECIDED, PREVIOUS_STATES, TransactionState

_S = TransactionState
#: A producer id and an epoch.
_Identity = tuple[int, int]
_UNFINISHED: Final = DECIDED | {_S.ONGOING}
_OPEN_IN_PARTITIONS: Final = select(producer_states).where(producer_states.c.transaction_first_offset.is_not(None))
_USED: Final = union(
    select(record_batches.c.producer_id.label("producer_id")),
    select(transactions.c.producer_id),
    select(transactions.c.next_producer_id),
).subquery()
# Of the range that this database gives out; others of its cluster have theirs.
_LARGEST_PRODUCER_ID: Final = select(func.max(_USED.c.producer_id)).where(
    _USED.c.producer_id.between(bindparam("first"), bindparam("last"))
)


@dataclass(frozen=True, slots=True)
class _Tables:
    """The coordinator's tables, and those that must agree with them, in one snapshot."""

    transactions: Mapping[str, Row[Any]]
    journal: Mapping[str, list[Row[Any]]]
    partitions: Mapping[str, set[int]]
    writers: Mapping[str, list[Row[Any]]]
    #: By transactional id and writer.
    writer_partitions: Mapping[tuple[str, int], set[int]]
    groups: Mapping[str, set[str]]
    outbox: Mapping[str, list[Row[Any]]]
    open_in_partitions: list[Row[Any]]
    pending: list[Row[Any]]
    finished: list[Row[Any]]
    committed: list[Row[Any]]
    #: By the identity that wrote the transaction's records: how the journal decided.
    decisions: Mapping[_Identity, ControlType]
    #: Whether they are those of several databases: parts are added before they are written to, and markers stay queued
    #: until all that is known to be written is struck off at once.
    of_several: bool = False


def transaction_violations(connection: Connection) -> list[Violation]:
    """Return what is wrong with the coordinator's tables at any moment."""
    return [*_given_violations(connection), *_violations(_read(connection))]


def violations_of_several(connections: Iterable[Connection]) -> list[Violation]:
    """Return what is wrong with the coordinators' tables of a cluster, taken together, while nobody is at work."""
    found: list[Violation] = []
    tables: list[_Tables] = []
    for connection in connections:
        found.extend(_given_violations(connection))
        tables.append(_read(connection))
    return [*found, *_violations(_together(tables))]


def _violations(tables: _Tables) -> list[Violation]:
    return [
        *_journal_violations(tables),
        *_identity_violations(tables),
        *_decision_violations(tables),
        *_participant_violations(tables),
        *_outbox_violations(tables),
        *_hanging_violations(tables),
    ]


def _together(tables: Iterable[_Tables]) -> _Tables:
    """Return the rows of several databases as if they were of one; no name is in two of them."""
    all_tables = list(tables)
    merged: dict[str, Any] = {}
    for name in _Tables.__dataclass_fields__:
        if name == "of_several":
            continue
        parts = [getattr(each, name) for each in all_tables]
        if isinstance(parts[0], list):
            merged[name] = [row for part in parts for row in part]
            continue
        merged[name] = {key: value for part in parts for key, value in part.items()}
        assert len(merged[name]) == sum(map(len, parts)), f"two databases have the same {name}"
    return _Tables(**merged, of_several=True)


def rest_violations(connection: Connection) -> Iterator[Violation]:
    """Return what is open, or half done, in a store that should be at rest."""
    for row in _all(connection, transactions):
        if _S(row.state) in _UNFINISHED:
            yield Violation(Invariant.NOTHING_OPEN, f"{row.transactional_id!r} is {_S(row.state).kafka_name}")
    for table in (
        pending_markers,
        transaction_partitions,
        transaction_writers,
        transaction_writer_partitions,
        transaction_groups,
        pending_group_offsets,
    ):
        for row in _all(connection, table):
            yield Violation(Invariant.NOTHING_QUEUED, f"{table.name}: {tuple(row)}")
    for row in connection.execute(_OPEN_IN_PARTITIONS):
        yield Violation(
            Invariant.ALL_STABLE,
            f"partition {row.partition_id}: producer {row.producer_id} holds it at {row.transaction_first_offset}",
        )


def _read(connection: Connection) -> _Tables:
    journal = _grouped(connection.execute(select(transaction_log).order_by(transaction_log.c.entry_id)))
    partitions = _grouped(_all(connection, transaction_partitions))
    groups = _grouped(_all(connection, transaction_groups))
    writer_partitions: dict[tuple[str, int], set[int]] = defaultdict(set)
    for row in _all(connection, transaction_writer_partitions):
        writer_partitions[row.transactional_id, row.writer_producer_id].add(row.partition_id)
    return _Tables(
        transactions={row.transactional_id: row for row in _all(connection, transactions)},
        journal=journal,
        partitions={name: {row.partition_id for row in rows} for name, rows in partitions.items()},
        writers=_grouped(_all(connection, transaction_writers)),
        writer_partitions=writer_partitions,
        groups={name: {row.group_id for row in rows} for name, rows in groups.items()},
        outbox=_grouped(_all(connection, pending_markers)),
        open_in_partitions=list(connection.execute(_OPEN_IN_PARTITIONS)),
        pending=_all(connection, pending_group_offsets),
        finished=_all(connection, finished_transactions),
        committed=list(connection.execute(select(group_offsets).where(group_offsets.c.producer_id != NO_PRODUCER_ID))),
        decisions={identity: decision for rows in journal.values() for identity, decision in _decisions(rows)},
    )


def _all(connection: Connection, table: Table) -> list[Row[Any]]:
    return list(connection.execute(select(table)))


def _grouped(rows: Iterable[Row[Any]]) -> dict[str, list[Row[Any]]]:
    by_id: dict[str, list[Row[Any]]] = defaultdict(list)
    for row in rows:
        by_id[row.transactional_id].append(row)
    return dict(by_id)


def _beginnings(entries: Iterable[Row[Any]]) -> Iterator[Row[Any]]:
    """Return the entry with which each transaction of an id began."""
    for is_ongoing, rows in groupby(entries, key=lambda entry: entry.state == _S.ONGOING):
        if is_ongoing:
            yield next(iter(rows))


def _decisions(entries: list[Row[Any]]) -> Iterator[tuple[_Identity, ControlType]]:
    """Return how each transaction of an id was decided, by the identity that it began with."""
    began: _Identity | None = None
    for before, entry in pairwise([None, *entries]):
        if entry is None:
            continue
        state = _S(entry.state)
        if state is _S.ONGOING and (before is None or before.state != _S.ONGOING):
            began = (entry.producer_id, entry.producer_epoch)
        elif state in DECIDED and began is not None:
            yield began, ControlType.COMMIT if state is _S.PREPARE_COMMIT else ControlType.ABORT
            began = None


def _journal_violations(tables: _Tables) -> Iterator[Violation]:
    for name, entries in tables.journal.items():
        for before, after in pairwise(entries):
            if not _may_follow(_S(before.state), _S(after.state)):
                yield Violation(
                    Invariant.MOVES_LEGAL,
                    f"{name!r}: {_S(before.state).kafka_name} -> {_S(after.state).kafka_name}"
                    f" in entries {before.entry_id}, {after.entry_id}",
                )
        row, last = tables.transactions.get(name), entries[-1]
        if row is None:
            is_current = last.state == _S.DEAD
        else:
            of = attrgetter("state", "producer_id", "producer_epoch", "transaction_number", "timeout_ms", "start_ms")
            is_current = of(row) == of(last)
        if not is_current:
            yield Violation(Invariant.JOURNAL_CURRENT, f"{name!r}: the row is {row}, the last entry {last}")


def _may_follow(before: TransactionState, after: TransactionState) -> bool:
    if before is _S.DEAD:
        # The id was forgotten, and used again.
        return after is _S.EMPTY
    return before in PREVIOUS_STATES[after]


def _given_violations(connection: Connection) -> Iterator[Violation]:
    given = connection.execute(select(stores.c.next_producer_id)).scalar_one()
    first = given >> PRODUCER_ID_BITS << PRODUCER_ID_BITS
    largest = connection.execute(
        _LARGEST_PRODUCER_ID, {"first": first, "last": first + (1 << PRODUCER_ID_BITS) - 1}
    ).scalar_one()
    if largest is not None and largest >= given:
        yield Violation(Invariant.PRODUCER_IDS_GIVEN, f"producer id {largest} is used, {given} is the next to give out")


def _identity_violations(tables: _Tables) -> Iterator[Violation]:
    newest: dict[int, int] = {}
    beginnings = (entry for entries in tables.journal.values() for entry in _beginnings(entries))
    for entry in sorted(beginnings, key=attrgetter("entry_id")):
        if entry.producer_epoch <= newest.get(entry.producer_id, -1):
            yield Violation(
                Invariant.IDENTITIES_UNIQUE,
                f"{entry.transactional_id!r} began a transaction as {entry.producer_id}:{entry.producer_epoch}"
                f" after epoch {newest[entry.producer_id]}",
            )
        newest[entry.producer_id] = entry.producer_epoch
    owners: dict[int, str] = {}
    for name, row in tables.transactions.items():
        for producer_id in {row.producer_id, row.next_producer_id} - {NO_PRODUCER_ID}:
            if producer_id in owners:
                yield Violation(
                    Invariant.PRODUCER_IDS_GIVEN, f"{name!r} and {owners[producer_id]!r} have producer id {producer_id}"
                )
            owners[producer_id] = name


def _decision_violations(tables: _Tables) -> Iterator[Violation]:
    outcomes: dict[_Identity, int] = {}
    for row in tables.finished:
        identity = (row.producer_id, row.producer_epoch)
        if outcomes.setdefault(identity, row.outcome) != row.outcome:
            yield Violation(
                Invariant.ALL_OR_NOTHING,
                f"the transaction of {_text(identity)} ended differently in partition {row.partition_id}",
            )
        decided = tables.decisions.get(identity)
        if decided is not None and decided != row.outcome:
            yield Violation(
                Invariant.DECISION_STANDS,
                f"the transaction of {_text(identity)} was decided to {decided.name}, but did not end so in partition"
                f" {row.partition_id}",
            )
    begun = {
        (entry.producer_id, entry.producer_epoch)
        for entries in tables.journal.values()
        for entry in _beginnings(entries)
    }
    for row in tables.finished:
        identity = (row.producer_id, row.producer_epoch)
        if identity in begun and identity not in tables.decisions:
            yield Violation(
                Invariant.DECISION_STANDS,
                f"the transaction of {_text(identity)} is not decided, but has ended in partition {row.partition_id}",
            )
    for row in tables.committed:
        identity = (row.producer_id, row.producer_epoch)
        if identity in begun and tables.decisions.get(identity) is not ControlType.COMMIT:
            yield Violation(
                Invariant.DECISION_STANDS,
                f"group {row.group_id!r} has offsets of {_text(identity)}, whose transaction did not commit",
            )


def _participant_violations(tables: _Tables) -> Iterator[Violation]:
    held: dict[int, set[int]] = defaultdict(set)
    for row in tables.open_in_partitions:
        held[row.producer_id].add(row.partition_id)
    pending: dict[int, set[str]] = defaultdict(set)
    for row in tables.pending:
        pending[row.producer_id].add(row.group_id)
    for name, row in tables.transactions.items():
        state = _S(row.state)
        partitions, groups = tables.partitions.get(name, set()), tables.groups.get(name, set())
        if state not in _UNFINISHED and (partitions or groups):
            yield Violation(
                Invariant.PARTICIPANTS_KNOWN, f"{name!r} is {state.kafka_name} and has {partitions or groups}"
            )
        # Partitions of a decided transaction stay on the list when they have their marker.
        is_exact = state is _S.ONGOING and not tables.of_several
        is_right = partitions == held[row.producer_id] if is_exact else partitions >= held[row.producer_id]
        if state in _UNFINISHED and not is_right:
            yield Violation(
                Invariant.PARTICIPANTS_KNOWN,
                f"{name!r} has the partitions {partitions}; {held[row.producer_id]} hold records of it",
            )
        if state in _UNFINISHED and not groups >= pending[row.producer_id]:
            yield Violation(
                Invariant.PARTICIPANTS_KNOWN,
                f"{name!r} has the groups {groups}; {pending[row.producer_id]} hold offsets of it",
            )
        yield from _writer_violations(tables, row, held)
    known = {*tables.partitions, *tables.groups, *tables.writers, *(name for name, _ in tables.writer_partitions)}
    for name in known - tables.transactions.keys():
        yield Violation(Invariant.PARTICIPANTS_KNOWN, f"{name!r} has participants and no row")


def _writer_violations(tables: _Tables, row: Row[Any], held: Mapping[int, set[int]]) -> Iterator[Violation]:
    """Return what is wrong with the further writers of a transaction, which `held` these partitions open."""
    name, state = row.transactional_id, _S(row.state)
    writers = {writer.writer_producer_id: writer for writer in tables.writers.get(name, [])}
    listed = {writer_id for owner, writer_id in tables.writer_partitions if owner == name}
    if (writers or listed) and state not in _UNFINISHED:
        yield Violation(Invariant.PARTICIPANTS_KNOWN, f"{name!r} is {state.kafka_name} and has writers")
    if not listed <= writers.keys():
        yield Violation(Invariant.PARTICIPANTS_KNOWN, f"{name!r} lists partitions of {listed}, which have not joined")
    for writer_id, writer in writers.items():
        if writer.producer_epoch != row.begin_epoch:
            yield Violation(
                Invariant.PARTICIPANTS_KNOWN,
                f"{name!r}: writer {writer_id} has epoch {writer.producer_epoch}, the transaction {row.begin_epoch}",
            )
        partitions, open_ = tables.writer_partitions.get((name, writer_id), set()), held.get(writer_id, set())
        is_exact = state is _S.ONGOING and not tables.of_several
        is_right = partitions == open_ if is_exact else partitions >= open_
        if not is_right:
            yield Violation(
                Invariant.PARTICIPANTS_KNOWN,
                f"{name!r}: writer {writer_id} has the partitions {partitions}; {open_} hold records of it",
            )


def _outbox_violations(tables: _Tables) -> Iterator[Violation]:
    for name in tables.transactions.keys() | tables.outbox.keys():
        row = tables.transactions.get(name)
        expected: set[tuple[int, int, int, int]] = set()
        if row is not None and _S(row.state) in DECIDED:
            outcome = ControlType.COMMIT if row.state == _S.PREPARE_COMMIT else ControlType.ABORT
            expected = {
                (open_.partition_id, row.producer_id, row.producer_epoch, int(outcome))
                for open_ in tables.open_in_partitions
                if open_.producer_id == row.producer_id
            }
            writers = {writer.writer_producer_id for writer in tables.writers.get(name, [])}
            # A commit does not count every writer; which ones is what the outbox alone knows.
            outcomes = {
                queued.producer_id: queued.outcome
                for queued in tables.outbox.get(name, [])
                if outcome is ControlType.COMMIT
            }
            expected |= {
                (
                    open_.partition_id,
                    open_.producer_id,
                    row.producer_epoch,
                    outcomes.get(open_.producer_id, int(ControlType.ABORT)),
                )
                for open_ in tables.open_in_partitions
                if open_.producer_id in writers
            }
        found = {
            (queued.partition_id, queued.producer_id, queued.producer_epoch, queued.outcome)
            for queued in tables.outbox.get(name, [])
        }
        is_right = found >= expected if tables.of_several else found == expected
        if not is_right:
            yield Violation(Invariant.OUTBOX_RIGHT, f"{name!r}: {found} is queued where {expected} is needed")


def _hanging_violations(tables: _Tables) -> Iterator[Violation]:
    unfinished = {
        (row.producer_id, row.begin_epoch) for row in tables.transactions.values() if _S(row.state) in _UNFINISHED
    }
    unfinished |= {
        (writer.writer_producer_id, tables.transactions[name].begin_epoch)
        for name, writers in tables.writers.items()
        for writer in writers
        if name in tables.transactions and _S(tables.transactions[name].state) in _UNFINISHED
    }
    for row in tables.open_in_partitions:
        if (row.producer_id, row.producer_epoch) not in unfinished:
            yield Violation(
                Invariant.NOTHING_HANGS,
                f"partition {row.partition_id}: producer {row.producer_id}:{row.producer_epoch} has no transaction",
            )
    for row in tables.pending:
        if (row.producer_id, row.producer_epoch) not in unfinished:
            yield Violation(
                Invariant.NOTHING_HANGS,
                f"group {row.group_id!r}: offsets of {row.producer_id}:{row.producer_epoch}, which has no transaction",
            )


def _text(identity: _Identity) -> str:
    return f"{identity[0]}:{identity[1]}"
