"""The rules of what is open or half done: it belongs to a transaction, and each transaction knows what it has.

All of it is read at once: it grows with what is open, not with what the store holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Row, Table, bindparam, func, literal, select

from txnstore.db.cluster.membership import coordinator_of_producer
from txnstore.db.schema import (
    offset_producers,
    pending_group_offsets,
    pending_markers,
    producer_states,
    transaction_groups,
    transaction_partitions,
    transaction_writer_partitions,
    transaction_writers,
    transactions,
)
from txnstore.db.statements import HotStatement
from txnstore.db.store import ROWS_AT_ONCE, chunks
from txnstore.model import ControlType
from txnstore.transactions.protocol import DECIDED, EPOCH_MAX, TransactionState
from txnstore.verification.invariants import Invariant, Place, Violation
from txnstore.verification.journal import Identity, identity_of, outcome_of, text_of
from txnstore.verification.reading import Holding, Snapshot

_S = TransactionState
_UNFINISHED: Final = DECIDED | {_S.ONGOING}
#: Of a transaction that is over, nothing is left in these.
_OF_UNFINISHED: Final = (
    pending_markers,
    transaction_partitions,
    transaction_writers,
    transaction_writer_partitions,
    transaction_groups,
    pending_group_offsets,
)
_HOLDING: Final = Holding(*_OF_UNFINISHED)
_ROWS_OF: Final = {table: HotStatement(select(table)) for table in _OF_UNFINISHED}
_OPEN: Final = HotStatement(
    select(transactions).where(transactions.c.state.in_([literal(int(state)) for state in sorted(_UNFINISHED)]))
)
_BY_ID: Final = HotStatement(
    select(transactions).where(transactions.c.transactional_id.in_(bindparam("ids", expanding=True)))
)
# For the partial index; SQLite takes it for a comparison.
_OPEN_IN_PARTITIONS: Final = HotStatement(
    select(
        producer_states.c.partition_id,
        producer_states.c.producer_id,
        producer_states.c.producer_epoch,
        producer_states.c.transaction_first_offset,
    ).where(producer_states.c.transaction_first_offset.is_not(None))
)
# Of its own transactions a database notes no producers.
_UNFENCED: Final = HotStatement(
    select(
        pending_group_offsets.c.group_id,
        pending_group_offsets.c.partition_id,
        pending_group_offsets.c.producer_id,
        pending_group_offsets.c.producer_epoch,
        offset_producers.c.producer_epoch.label("noted_epoch"),
    )
    .outerjoin(offset_producers, offset_producers.c.producer_id == pending_group_offsets.c.producer_id)
    .where(func.coalesce(offset_producers.c.producer_epoch, EPOCH_MAX + 1) > pending_group_offsets.c.producer_epoch)
)


@dataclass(frozen=True, slots=True)
class _Open:
    """What is open or half done, and the rows of the transactional ids that have part in it."""

    transactions: Mapping[str, Row[Any]]
    partitions: Mapping[str, list[Row[Any]]]
    writers: Mapping[str, list[Row[Any]]]
    writer_partitions: Mapping[str, list[Row[Any]]]
    groups: Mapping[str, list[Row[Any]]]
    markers: Mapping[str, list[Row[Any]]]
    in_partitions: Mapping[int, list[Row[Any]]]
    """By producer."""

    pending: Mapping[int, list[Row[Any]]]
    """Offsets of groups, by producer."""

    of_several: bool


def open_violations(snapshot: Snapshot) -> Iterator[Violation]:
    """Return what is wrong with the participants of transactions, queued markers, and what has no transaction."""
    what = _read(snapshot)
    yield from _participant_violations(what)
    yield from _marker_violations(what)
    yield from _hanging_violations(what)


def rest_violations(snapshot: Snapshot) -> Iterator[Violation]:
    """Return what is open, or half done, in a store that should be at rest."""
    for row in snapshot.rows(_OPEN):
        place = Place(transactional_id=row.transactional_id)
        yield Violation(Invariant.NOTHING_OPEN, place, f"it is {_S(row.state).kafka_name}")
    for table, rows in _unfinished_rows(snapshot).items():
        for row in rows:
            yield Violation(Invariant.NOTHING_QUEUED, Place(), f"{table.name}: {tuple(row)}")
    for row in snapshot.rows(_OPEN_IN_PARTITIONS):
        place = Place(row.partition_id, row.transaction_first_offset)
        yield Violation(Invariant.ALL_STABLE, place, f"producer {row.producer_id} holds it")


def _read(snapshot: Snapshot) -> _Open:
    unfinished = _unfinished_rows(snapshot)
    of_ids = [_by_id(unfinished[table]) for table in _OF_UNFINISHED[:5]]
    markers, added, writers, writer_partitions, groups = of_ids
    rows = {row.transactional_id: row for row in snapshot.rows(_OPEN)}
    others = sorted({name for found in of_ids for name in found} - rows.keys())
    for some in chunks(others, ROWS_AT_ONCE):
        rows |= {row.transactional_id: row for row in snapshot.rows(_BY_ID, {"ids": some})}
    return _Open(
        transactions=rows,
        partitions=added,
        writers=writers,
        writer_partitions=writer_partitions,
        groups=groups,
        markers=markers,
        in_partitions=_by_producer(snapshot.rows(_OPEN_IN_PARTITIONS)),
        pending=_by_producer(unfinished[pending_group_offsets]),
        of_several=snapshot.of_several,
    )


def _unfinished_rows(snapshot: Snapshot) -> Mapping[Table, list[Any]]:
    """Return the rows of the tables in which nothing is left of a transaction that is over."""
    found: Mapping[Table, list[Any]] = {table: [] for table in _OF_UNFINISHED}
    for connection in snapshot.connections:
        for table in _HOLDING.tables(connection):
            found[table].extend(_ROWS_OF[table].rows(connection))
    return found


def _by_id(rows: Iterable[Any]) -> dict[str, list[Any]]:
    grouped: dict[str, list[Any]] = {}
    for row in rows:
        grouped.setdefault(row.transactional_id, []).append(row)
    return grouped


def _by_producer(rows: Iterable[Any]) -> dict[int, list[Any]]:
    grouped: dict[int, list[Any]] = {}
    for row in rows:
        grouped.setdefault(row.producer_id, []).append(row)
    return grouped


def _partition_ids(rows: Iterable[Row[Any]]) -> set[int]:
    return {row.partition_id for row in rows}


def _participant_violations(what: _Open) -> Iterator[Violation]:
    for name, row in what.transactions.items():
        for seen in _wrong_participants(what, name, row):
            of_row = f"transaction {row.transaction_number} {seen}"
            yield Violation(Invariant.PARTICIPANTS_KNOWN, Place(transactional_id=name), of_row)
    known = {*what.partitions, *what.groups, *what.writers, *what.writer_partitions}
    for name in sorted(known - what.transactions.keys()):
        yield Violation(Invariant.PARTICIPANTS_KNOWN, Place(transactional_id=name), "it has participants and no row")


def _wrong_participants(what: _Open, name: str, row: Row[Any]) -> Iterator[str]:
    state, writers = _S(row.state), what.writers.get(name, [])
    groups = {group.group_id for group in what.groups.get(name, [])}
    #: By the producer that wrote to them.
    added = {row.producer_id: _partition_ids(what.partitions.get(name, []))}
    by_writers: dict[int, set[int]] = defaultdict(set)
    for entry in what.writer_partitions.get(name, []):
        by_writers[entry.writer_producer_id].add(entry.partition_id)
    if state not in _UNFINISHED:
        if added[row.producer_id] or groups or writers or by_writers:
            yield f"is {state.kafka_name} and has {added}, {groups}, {list(map(tuple, writers))}, {dict(by_writers)}"
        return
    with_offsets = {pending.group_id for pending in what.pending.get(row.producer_id, [])}
    if not groups >= with_offsets:
        yield f"has the groups {groups}; {with_offsets} hold offsets of it"
    for writer in writers:
        added[writer.writer_producer_id] = by_writers.get(writer.writer_producer_id, set())
        if writer.producer_epoch != row.begin_epoch:
            yield f"has {tuple(writer)}, whose epoch is not {row.begin_epoch}"
    if not by_writers.keys() <= added.keys() - {row.producer_id}:
        yield f"lists partitions of {dict(by_writers)}, which have not all joined"
    for producer_id, partition_ids in added.items():
        held = _partition_ids(what.in_partitions.get(producer_id, []))
        # Partitions of a decided transaction stay on the list when they have their marker.
        is_exact = state is _S.ONGOING and not what.of_several
        if not (partition_ids == held if is_exact else partition_ids >= held):
            yield f"has the partitions {partition_ids} of producer {producer_id}; {held} hold records of it"


def _marker_violations(what: _Open) -> Iterator[Violation]:
    for name in sorted(what.transactions.keys() | what.markers.keys()):
        row, queue = what.transactions.get(name), what.markers.get(name, [])
        expected: set[tuple[int, int, int, int]] = set()
        if row is not None and _S(row.state) in DECIDED:
            outcome = outcome_of(_S(row.state))
            # A commit does not count every writer; which ones is what the queue alone knows.
            counted = {marker.producer_id: marker.outcome for marker in queue if outcome is ControlType.COMMIT}
            writer_ids = (writer.writer_producer_id for writer in what.writers.get(name, []))
            outcomes = {writer_id: counted.get(writer_id, int(ControlType.ABORT)) for writer_id in writer_ids}
            outcomes[row.producer_id] = int(outcome)
            expected = {
                (open_.partition_id, producer_id, min(row.producer_epoch, EPOCH_MAX), outcome_of_writer)
                for producer_id, outcome_of_writer in outcomes.items()
                for open_ in what.in_partitions.get(producer_id, [])
            }
        found = {(marker.partition_id, *identity_of(marker), marker.outcome) for marker in queue}
        if not (found >= expected if what.of_several else found == expected):
            seen = f"{found} is queued where {expected} is needed: partition, producer id, epoch, outcome"
            yield Violation(Invariant.OUTBOX_RIGHT, Place(transactional_id=name), seen)


def _hanging_violations(what: _Open) -> Iterator[Violation]:
    unfinished: set[Identity] = set()
    for name, row in what.transactions.items():
        if _S(row.state) in _UNFINISHED:
            writers = (writer.writer_producer_id for writer in what.writers.get(name, []))
            unfinished |= {(producer_id, row.begin_epoch) for producer_id in (row.producer_id, *writers)}
    for row in (row for rows in what.in_partitions.values() for row in rows):
        if identity_of(row) not in unfinished:
            place = Place(row.partition_id, row.transaction_first_offset)
            yield Violation(Invariant.NOTHING_HANGS, place, f"producer {text_of(identity_of(row))} has no transaction")
    for row in (row for rows in what.pending.values() for row in rows):
        if identity_of(row) not in unfinished:
            place = Place(row.partition_id, group_id=row.group_id)
            seen = f"offsets of {text_of(identity_of(row))}, which has no transaction, are pending"
            yield Violation(Invariant.NOTHING_HANGS, place, seen)


def fence_violations(member: Connection, database_id: int) -> Iterator[Violation]:
    """Return which offsets nothing guards that transactions hold in this database and another one coordinates."""
    for row in _UNFENCED.rows(member):
        if coordinator_of_producer(row.producer_id) != database_id:
            noted = "is not noted" if row.noted_epoch is None else f"is noted with epoch {row.noted_epoch}"
            place = Place(row.partition_id, group_id=row.group_id)
            yield Violation(Invariant.OFFSETS_FENCED, place, f"the producer of {text_of(identity_of(row))} {noted}")
