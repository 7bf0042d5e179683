"""The rules of decisions: the journal, the coordinator's rows, and how transactions ended in partitions and groups."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, Final

from sqlalchemy import Row, bindparam, func, select, union

from txnstore.db.cluster.membership import PRODUCER_ID_BITS
from txnstore.db.schema import (
    finished_transactions,
    group_offsets,
    record_batches,
    stores,
    transaction_log,
    transactions,
)
from txnstore.db.statements import HotStatement, are_among
from txnstore.errors import TxnStoreError
from txnstore.groups.offsets import check_form, from_journal_text, journal_text
from txnstore.model import NO_PRODUCER_ID, ControlType, GroupMembership, OffsetAndMetadata
from txnstore.transactions.protocol import DECIDED, PREVIOUS_STATES, TransactionState
from txnstore.transactions.rows import JournalEntry, changes_of
from txnstore.verification.invariants import Invariant, Place, Violation
from txnstore.verification.reading import PAGE_ROWS, Pages, Snapshot

#: A producer id and an epoch.
Identity = tuple[int, int]

#: Consumed offsets by group and partition id.
_SentOffsets = Mapping[str, Mapping[int, OffsetAndMetadata]]

_S = TransactionState
#: What may tell of consumed offsets: those of a group in the coordinator's database take effect with either.
_TELLING: Final = {_S.PREPARE_COMMIT, _S.COMPLETE_COMMIT}
_state_of: Final = attrgetter("state", "producer_id", "producer_epoch", "transaction_number", "timeout_ms", "start_ms")
_JOURNAL: Final = Pages(select(transaction_log), transaction_log.c.entry_id)
_ROWS: Final = Pages(select(transactions), transactions.c.transactional_id)
_OF_PRODUCERS: Final = HotStatement(
    select(transaction_log)
    .where(are_among("identities", transaction_log.c.producer_id, transaction_log.c.producer_epoch))
    # One producer's are all in one database.
    .order_by(transaction_log.c.entry_id)
)
_OF_TRANSACTIONS: Final = HotStatement(
    select(transaction_log)
    .where(are_among("transactions", transaction_log.c.producer_id, transaction_log.c.transaction_number))
    .order_by(transaction_log.c.entry_id)
)
_GIVEN: Final = HotStatement(select(stores.c.next_producer_id))
_USED: Final = union(
    select(record_batches.c.producer_id.label("producer_id")),
    select(transactions.c.producer_id),
    select(transactions.c.next_producer_id),
).subquery()
_LARGEST_USED: Final = HotStatement(
    select(func.max(_USED.c.producer_id)).where(_USED.c.producer_id.between(bindparam("first"), bindparam("last")))
)
_FINISHED: Final = select(
    finished_transactions.c.producer_id,
    finished_transactions.c.producer_epoch,
    finished_transactions.c.outcome,
    finished_transactions.c.partition_id,
    finished_transactions.c.marker_offset,
)
_COMMITTED: Final = Pages(
    select(
        group_offsets.c.group_id,
        group_offsets.c.partition_id,
        group_offsets.c.committed_offset,
        group_offsets.c.offset_in_transaction,
        group_offsets.c.producer_id,
        group_offsets.c.producer_epoch,
    ),
    group_offsets.c.group_id,
    group_offsets.c.partition_id,
)
_TOLD: Final = select(
    transaction_log.c.entry_id,
    transaction_log.c.transaction_number,
    transaction_log.c.producer_id,
    transaction_log.c.producer_epoch,
    transaction_log.c.sent_offsets,
).where(
    transaction_log.c.producer_id.in_(bindparam("producer_ids", expanding=True)),
    transaction_log.c.sent_offsets.is_not(None),
)


def decision_violations(snapshot: Snapshot) -> Iterator[Violation]:
    """Return what is wrong with journal, coordinator's rows and outcomes.

    Memory grows with the transactional ids and their producers, not with the transactions they have had.
    """
    yield from _history_violations(snapshot)
    yield from _given_violations(snapshot)
    for identities in _chunks(_finished_by_identity(snapshot)):
        yield from _finished_violations(identities, begun_by(snapshot, identities))
    commits = snapshot.pages(_COMMITTED)
    in_transactions = (row for row in commits if row.producer_id != NO_PRODUCER_ID)
    while rows := list(islice(in_transactions, PAGE_ROWS)):
        begun = begun_by(snapshot, {identity_of(row) for row in rows})
        yield from _committed_violations(rows, begun)
        yield from _told_violations(rows, begun)
        yield from _overtaken_violations(snapshot, rows, begun)


# --- the journal and the rows -----------------------------------------------------------------------------------------


def _history_violations(snapshot: Snapshot) -> Iterator[Violation]:
    last: dict[str, JournalEntry] = {}
    newest: dict[int, int] = {}
    rows = snapshot.pages(_JOURNAL)
    for entry in (change for row in rows for change in changes_of(row)):
        name, place = entry.transactional_id, Place(transactional_id=entry.transactional_id)
        before = last.get(name)
        if before is not None:
            old, new = before.state, entry.state
            # An id that was forgotten may be used again.
            if not (new is _S.EMPTY if old is _S.DEAD else old in PREVIOUS_STATES[new]):
                move = f"{old.kafka_name} -> {new.kafka_name} in entries {before.entry_id}, {entry.entry_id}"
                yield Violation(Invariant.MOVES_LEGAL, place, move)
        last[name] = entry
        if entry.sent_offsets is not None:
            if entry.state not in _TELLING:
                seen = f"entry {entry.entry_id} tells of consumed offsets, and is {entry.state.kafka_name}"
                yield Violation(Invariant.OFFSETS_TOLD, place, seen)
            if _sent_offsets(entry.sent_offsets) is None:
                seen = f"what entry {entry.entry_id} tells of consumed offsets cannot be read"
                yield Violation(Invariant.OFFSETS_TOLD, place, seen)
        if entry.state is _S.ONGOING and (before is None or before.state is not _S.ONGOING):
            epoch = newest.get(entry.producer_id, -1)
            if entry.producer_epoch <= epoch:
                seen = f"it began a transaction as {text_of(identity_of(entry))} after epoch {epoch}"
                yield Violation(Invariant.IDENTITIES_UNIQUE, place, seen)
            newest[entry.producer_id] = entry.producer_epoch
    yield from _row_violations(snapshot, last)


def _row_violations(snapshot: Snapshot, last: dict[str, JournalEntry]) -> Iterator[Violation]:
    """Compare the coordinator's rows with the last entry of each transactional id, and with each other."""
    owners: dict[int, str] = {}
    for row in snapshot.pages(_ROWS):
        place, entry = Place(transactional_id=row.transactional_id), last.pop(row.transactional_id, None)
        if entry is not None and _state_of(row) != _state_of(entry):
            yield Violation(Invariant.JOURNAL_CURRENT, place, f"the row is {tuple(row)}, the last entry {entry}")
        for producer_id in {row.producer_id, row.next_producer_id} - {NO_PRODUCER_ID}:
            owner = owners.setdefault(producer_id, row.transactional_id)
            if owner != row.transactional_id:
                yield Violation(Invariant.PRODUCER_IDS_GIVEN, place, f"{owner!r} has producer id {producer_id}, too")
    for name, entry in last.items():
        if entry.state is not _S.DEAD:
            seen = f"there is no row, the last entry is {entry}"
            yield Violation(Invariant.JOURNAL_CURRENT, Place(transactional_id=name), seen)


def _given_violations(snapshot: Snapshot) -> Iterator[Violation]:
    for connection in snapshot.connections:
        # Of the range that this database gives out; others of its cluster have theirs.
        given = _GIVEN.value(connection)
        first = given >> PRODUCER_ID_BITS << PRODUCER_ID_BITS
        ids = {"first": first, "last": first + (1 << PRODUCER_ID_BITS) - 1}
        largest = _LARGEST_USED.value(connection, ids)
        if largest is not None and largest >= given:
            seen = f"producer id {largest} is used, {given} is the next to give out"
            yield Violation(Invariant.PRODUCER_IDS_GIVEN, Place(), seen)


# --- decisions and outcomes -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Begun:
    """A transaction that the journal knows the beginning of."""

    transactional_id: str
    transaction_number: int
    decision: ControlType | None = None
    told: dict[str, Mapping[int, OffsetAndMetadata]] = field(default_factory=dict)
    """The offsets that took effect with its end, of groups in its coordinator's database."""


def begun_by(snapshot: Snapshot, identities: Collection[Identity]) -> dict[Identity, Begun]:
    """Return the transactions that were begun with these identities, as far as the journal goes back."""
    # A decision raises the epoch.
    both = sorted({(number, epoch + raised) for number, epoch in identities for raised in (0, 1)})
    begun: dict[Identity, Begun] = {}
    by_number: dict[tuple[int, int], Begun] = {}
    for entry in (change for row in snapshot.rows(_OF_PRODUCERS, {"identities": both}) for change in changes_of(row)):
        number, epoch = identity_of(entry)
        if entry.state is _S.ONGOING:
            new = Begun(entry.transactional_id, entry.transaction_number)
            begun.setdefault((number, epoch), by_number.setdefault((number, entry.transaction_number), new))
        elif entry.state in DECIDED:
            for identity in ((number, epoch), (number, epoch - 1)):
                of = begun.get(identity)
                if of is not None and of.decision is None and of.transaction_number == entry.transaction_number:
                    of.decision = outcome_of(entry.state)
        if entry.sent_offsets is not None:
            of = begun.get((number, epoch - 1), begun.get((number, epoch)))
            if of is not None and of.transaction_number == entry.transaction_number:
                of.told.update(_sent_offsets(entry.sent_offsets) or {})
    _find_later_decisions(snapshot, {key: of for key, of in by_number.items() if of.decision is None})
    return begun


def _find_later_decisions(snapshot: Snapshot, begun: Mapping[tuple[int, int], Begun]) -> None:
    """Find the decisions of transactions, by producer id and number, whose epoch had been raised by a takeover."""
    if not begun:
        return
    rows = snapshot.rows(_OF_TRANSACTIONS, {"transactions": sorted(begun)})
    for entry in (change for row in rows for change in changes_of(row)):
        of = begun[entry.producer_id, entry.transaction_number]
        if entry.state in DECIDED and of.decision is None:
            of.decision = outcome_of(entry.state)
        if entry.sent_offsets is not None:
            of.told.update(_sent_offsets(entry.sent_offsets) or {})


def _finished_by_identity(snapshot: Snapshot) -> Iterator[tuple[Identity, list[Row[Any]]]]:
    rows = snapshot.merged(_FINISHED, "producer_id", "producer_epoch", "partition_id")
    for identity, of_identity in groupby(rows, identity_of):
        yield identity, list(of_identity)


def _chunks(finished: Iterable[tuple[Identity, list[Row[Any]]]]) -> Iterator[dict[Identity, list[Row[Any]]]]:
    pairs = iter(finished)
    while chunk := dict(islice(pairs, PAGE_ROWS)):
        yield chunk


def _finished_violations(
    finished: Mapping[Identity, list[Row[Any]]], begun: Mapping[Identity, Begun]
) -> Iterator[Violation]:
    for identity, rows in finished.items():
        transaction = f"the transaction of {text_of(identity)}"
        of = begun.get(identity)
        for row in rows:
            place = Place(
                row.partition_id, row.marker_offset, transactional_id=None if of is None else of.transactional_id
            )
            if row.outcome != rows[0].outcome:
                seen = f"{transaction} ended differently in partition {rows[0].partition_id}"
                yield Violation(Invariant.ALL_OR_NOTHING, place, seen)
            if of is None or of.decision == row.outcome:
                continue
            decision = "not decided" if of.decision is None else f"decided to {of.decision.name}"
            seen = f"{transaction} is {decision}, and ended with {ControlType(row.outcome).name} here"
            yield Violation(Invariant.DECISION_STANDS, place, seen)


def _committed_violations(rows: Iterable[Row[Any]], begun: Mapping[Identity, Begun]) -> Iterator[Violation]:
    for row in rows:
        of = begun.get(identity_of(row))
        if of is not None and of.decision is not ControlType.COMMIT:
            place = Place(row.partition_id, group_id=row.group_id, transactional_id=of.transactional_id)
            seen = f"the group has offsets of {text_of(identity_of(row))}, whose transaction did not commit"
            yield Violation(Invariant.DECISION_STANDS, place, seen)


def _told_violations(rows: Iterable[Row[Any]], begun: Mapping[Identity, Begun]) -> Iterator[Violation]:
    """Compare offsets with what the journal tells of the transactions that have committed them.

    Of groups in other databases it tells nothing.
    """
    for row in rows:
        of = begun.get(identity_of(row))
        told = None if of is None else of.told.get(row.group_id)
        if of is None or told is None:
            continue
        one = told.get(row.partition_id)
        if one is None or (one.offset, one.offset_in_transaction) != (row.committed_offset, row.offset_in_transaction):
            place = Place(row.partition_id, group_id=row.group_id, transactional_id=of.transactional_id)
            seen = (
                f"the group has {_offset_text(row)}, and the journal tells of {'none' if one is None else one.offset}"
            )
            yield Violation(Invariant.OFFSETS_TOLD, place, seen)


def _overtaken_violations(
    snapshot: Snapshot, rows: Iterable[Row[Any]], begun: Mapping[Identity, Begun]
) -> Iterator[Violation]:
    """Find offsets that a later transaction of the same producer has committed again.

    A producer has one transaction after the other.  What others commit takes the producer's name away, and of two
    producers the journal does not know who came later.
    """
    by_place = {(row.group_id, row.partition_id): row for row in rows}
    these = {"producer_ids": sorted({row.producer_id for row in by_place.values()})}
    overtaken: dict[tuple[str, int], Row[Any]] = {}
    for entry in snapshot.streamed(_TOLD, these):
        for group_id, offsets in (_sent_offsets(entry.sent_offsets) or {}).items():
            for partition_id, told in offsets.items():
                row = by_place.get((group_id, partition_id))
                if row is not None and row.producer_id == entry.producer_id and _is_overtaken(row, entry, told, begun):
                    overtaken[group_id, partition_id] = entry
    for (group_id, partition_id), entry in overtaken.items():
        seen = f"the group has {_offset_text(by_place[group_id, partition_id])}, and entry {entry.entry_id} tells of a"
        place = Place(partition_id, group_id=group_id)
        yield Violation(Invariant.OFFSETS_TOLD, place, f"{seen} later one of this producer")


def _is_overtaken(row: Row[Any], entry: Row[Any], told: OffsetAndMetadata, begun: Mapping[Identity, Begun]) -> bool:
    """Return whether the entry of a producer tells of a later transaction than the one that its offsets are of."""
    # The end of a transaction is told with the next epoch, or with a later one if it was taken over.
    if row.producer_epoch + 1 >= entry.producer_epoch:
        return False
    of = begun.get(identity_of(row))
    if of is not None:
        return of.transaction_number < int(entry.transaction_number)
    # The beginning is not known any more: its own end tells of the same.
    return told != OffsetAndMetadata(row.committed_offset, offset_in_transaction=row.offset_in_transaction)


def _offset_text(row: Row[Any]) -> str:
    return f"offset {row.committed_offset} of {text_of(identity_of(row))}"


def _sent_offsets(text: str) -> _SentOffsets | None:
    """Return the offsets that an entry of the journal tells of; None: nothing that txnstore writes reads like that."""
    try:
        sent = from_journal_text(text)
        for group_id, offsets in sent.items():
            check_form(GroupMembership(group_id), offsets)
    except (TxnStoreError, ValueError, TypeError, AttributeError):
        return None
    is_sane = all(type(number) is int and number > 0 for offsets in sent.values() for number in offsets)
    return sent if is_sane and journal_text(sent) == text else None


def outcome_of(decided: TransactionState) -> ControlType:
    """Return how a decided transaction ends."""
    return ControlType.COMMIT if decided is _S.PREPARE_COMMIT else ControlType.ABORT


def identity_of(row: Row[Any] | JournalEntry) -> Identity:
    """Return who wrote it."""
    return row.producer_id, row.producer_epoch


def text_of(identity: Identity) -> str:
    """Return an identity for people: producer id and epoch."""
    return f"{identity[0]}:{identity[1]}"
