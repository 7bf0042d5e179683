"""The rows of the outbox: which are there, taken out, or marked as unable to become records.

Rows are found by being visible and taken by being deleted, never by a position that somebody remembers: numbers are
given out in one order and committed in another, so a row may appear below all that were taken before.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Row, and_, bindparam, delete, exists, func, select, update

from txnstore.db.schema import databases, outbox, outbox_sequencers, stores
from txnstore.db.sqlite.any_text import any_text
from txnstore.db.statements import is_listed
from txnstore.db.store import must_hit, server_now_ms
from txnstore.errors import WriteConflict

#: How many rows are in memory at once, and about how many bytes of them.
PAGE_ROWS_MAX: Final = 5_000
PAGE_BYTES_MAX: Final = 8 * 1024 * 1024
#: What a row may hold: PostgreSQL sends two digits for each byte, and no row above 1 GiB.
ROW_BYTES_MAX: Final = 500_000_000
#: The smallest number that a row can have: those that the database gives out begin with 1, but a caller may set one.
FIRST_ID: Final = -(2**63)

#: A database transaction of a caller; None stands for the rows of which the database does not know it.
CallerId = int | None


class Listed(NamedTuple):
    """A row of the outbox without what it carries."""

    outbox_id: int
    caller_id: CallerId
    size_bytes: int
    committed_id: int | None
    """SQLite: a row that was committed when this one was inserted, if somebody looked."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Rows in the order of their numbers, as many as make a page."""

    rows: Sequence[Listed]
    is_cut: bool
    """Whether there may be more after them."""


@dataclass(frozen=True, slots=True)
class Lock:
    """The sequencer's lock is held."""

    now_ms: int
    """The store's clock when it was given."""

    database_id: int
    """The number of this database in its cluster."""


_WAITS: Final = outbox.c.refusal.is_(None)
# One look into the partial index on those that wait.  By the order of that index, for PostgreSQL without statistics
# takes the first row of the whole table to be one that waits.
_FIRST_WAITING: Final = select(outbox.c.outbox_id).where(_WAITS).order_by(outbox.c.outbox_id).limit(1)
_LAST_WAITING: Final = select(outbox.c.outbox_id).where(_WAITS).order_by(outbox.c.outbox_id.desc()).limit(1)
#: Whether a row waits, as a column of any statement.
OUTBOX_WAITS: Final = _FIRST_WAITING.correlate(None).scalar_subquery().is_not(None)
# This lock makes one sequencer of many. The statements after it see all that the one before has committed; without
# it, a later row could pass an earlier one that somebody else is about to append.
_LOCKED: Final = select(
    server_now_ms().label("now_ms"),
    # By its uuid, for this connection may know nothing of the cluster; alone, the list has this one.
    select(databases.c.database_id)
    .join(stores, stores.c.store_uuid == databases.c.store_uuid)
    .scalar_subquery()
    .label("database_id"),
).select_from(outbox_sequencers)
_LOCK: Final = _LOCKED.with_for_update()
_TRY_LOCK: Final = _LOCKED.with_for_update(skip_locked=True)
_SIZE: Final = (
    func.coalesce(func.length(outbox.c.key), 0)
    + func.coalesce(func.length(outbox.c.value), 0)
    + func.coalesce(func.length(outbox.c.headers), 0)
)
_LIST: Final = (
    select(outbox.c.outbox_id, outbox.c.transaction_id, _SIZE, outbox.c.committed_id)
    .where(_WAITS, outbox.c.outbox_id >= bindparam("from_id"))
    .order_by(outbox.c.outbox_id)
    .limit(bindparam("rows_max"))
)
_EARLIER: Final = outbox.alias("earlier")
_BEFORE_IT: Final = (
    select(_EARLIER.c.outbox_id)
    .where(_EARLIER.c.refusal.is_(None), _EARLIER.c.outbox_id < outbox.c.outbox_id)
    .order_by(_EARLIER.c.outbox_id.desc())
    .limit(1)
    .correlate(outbox)
    .scalar_subquery()
)
_LAST_BEFORE_OTHERS: Final = (
    select(_BEFORE_IT)
    .where(
        _WAITS,
        outbox.c.outbox_id > bindparam("from_id"),
        outbox.c.committed_id >= _BEFORE_IT,
        outbox.c.committed_id < outbox.c.outbox_id,
    )
    .order_by(outbox.c.outbox_id)
    .limit(1)
)
_GOES_ON: Final = (
    select(outbox.c.transaction_id)
    .distinct()
    .where(
        _WAITS,
        outbox.c.outbox_id > bindparam("last_id"),
        outbox.c.transaction_id.in_(bindparam("caller_ids", expanding=True)),
    )
)
_UNKNOWN_GOES_ON: Final = select(
    exists().where(_WAITS, outbox.c.outbox_id > bindparam("last_id"), outbox.c.transaction_id.is_(None))
)
_LAST_IDS: Final = (
    select(outbox.c.transaction_id, func.max(outbox.c.outbox_id)).where(_WAITS).group_by(outbox.c.transaction_id)
)
_DESTINATIONS: Final = (
    select(outbox.c.topic, outbox.c.partition_number)
    .distinct()
    .where(_WAITS, outbox.c.outbox_id <= bindparam("last_id"))
)
_BETWEEN: Final = outbox.c.outbox_id.between(bindparam("first_id"), bindparam("last_id"))
_THESE: Final = is_listed("outbox_ids", outbox.c.outbox_id)
# By one statement: what its owner changes between one that reads and one that deletes would be deleted unread.  What
# lies between and is not to go is neither locked nor waited for.
_TAKE: Final = (
    delete(outbox)
    .where(_WAITS, _BETWEEN)
    .returning(
        outbox.c.outbox_id,
        outbox.c.transaction_id,
        outbox.c.topic,
        outbox.c.partition_number,
        outbox.c.key,
        outbox.c.value,
        outbox.c.headers,
        outbox.c.timestamp_ms,
        outbox.c.inserted_ms,
    )
)
_TAKE_LISTED: Final = _TAKE.where(_THESE)
_COUNT: Final = update(outbox_sequencers).values(
    sequenced_count=outbox_sequencers.c.sequenced_count + bindparam("moved_count")
)
_REFUSE_ROW: Final = (
    update(outbox)
    .where(outbox.c.outbox_id == bindparam("of_outbox_id"))
    .values(refusal=bindparam("why"), refused_ms=server_now_ms())
)
_REFUSE_CALLER: Final = (
    update(outbox)
    .where(outbox.c.transaction_id == bindparam("of_caller_id"), _WAITS)
    .values(refusal=bindparam("why"), refused_ms=server_now_ms())
)
# One that is to be tried again is not refused any more, whenever it was.
_REFUSED_BEFORE: Final = and_(outbox.c.refused_ms <= bindparam("before_ms"), outbox.c.refusal.is_not(None))
_OLD_REFUSED: Final = (
    select(outbox.c.outbox_id, _SIZE).where(_REFUSED_BEFORE).order_by(outbox.c.refused_ms).limit(bindparam("rows_max"))
)
_DELETE_REFUSED: Final = delete(outbox).where(
    outbox.c.outbox_id.in_(bindparam("outbox_ids", expanding=True)), _REFUSED_BEFORE
)

# The server that the rows come from numbered its transactions; this one may come to the same numbers.  So those of
# before stand below zero, and those of each server below those of the one before it.
_LAST_FORMER: Final = select(func.min(outbox.c.transaction_id)).where(outbox.c.transaction_id < 0)
_TELL_APART: Final = (
    update(outbox)
    .where(outbox.c.transaction_id > 0)
    .values(transaction_id=bindparam("last_former", type_=outbox.c.transaction_id.type) - outbox.c.transaction_id)
)


def old_refused(connection: Connection, before_ms: int, rows_max: int) -> list[tuple[int, int]]:
    """Return number and size of rows that were refused by then and are still, the oldest refusals first."""
    of = {"before_ms": before_ms, "rows_max": rows_max}
    return [(row[0], row[1]) for row in connection.execute(_OLD_REFUSED, of)]


def delete_refused_rows(connection: Connection, outbox_ids: Sequence[int], before_ms: int) -> int:
    """Delete those of these rows that were refused by then and are still; return how many."""
    return connection.execute(_DELETE_REFUSED, {"outbox_ids": outbox_ids, "before_ms": before_ms}).rowcount


def has_outbox_rows(connection: Connection) -> bool:
    """Return whether a row waits to become a record; cheap enough to be asked again and again."""
    return first_waiting_id(connection) is not None


def first_waiting_id(connection: Connection) -> int | None:
    """Return the number of the first row that waits to become a record."""
    found: int | None = connection.execute(_FIRST_WAITING).scalar()
    return found


def last_waiting_id(connection: Connection) -> int | None:
    """Return the number of the last row that waits to become a record."""
    found: int | None = connection.execute(_LAST_WAITING).scalar()
    return found


def lock_outbox(connection: Connection, *, waits: bool) -> Lock | None:
    """Become the sequencer until the database transaction ends; None if another one is and nobody is to wait for it."""
    row = connection.execute(_LOCK if waits else _TRY_LOCK).one_or_none()
    return None if row is None else Lock(row.now_ms, row.database_id)


def list_rows(
    connection: Connection, *, from_id: int = FIRST_ID, rows_max: int = sys.maxsize, bytes_max: int = sys.maxsize
) -> Listing:
    """Return a page of the rows that wait, from this number on; at least one if there is one.

    No more than `rows_max`, with about `bytes_max`, if that is less than a page.
    """
    rows_max, bytes_max = min(rows_max, PAGE_ROWS_MAX), min(bytes_max, PAGE_BYTES_MAX)
    found = connection.execute(_LIST, {"from_id": from_id, "rows_max": rows_max}).all()
    rows: list[Listed] = []
    size_bytes = 0
    for row in found:
        size_bytes += row[2]
        if rows and size_bytes > bytes_max:
            break
        rows.append(Listed._make(row))
    return Listing(rows, is_cut=len(rows) < len(found) or len(found) == rows_max)


def last_before_others(rows: Sequence[Listed]) -> int | None:
    """Return the last of these rows behind which another caller's begin for sure; None if nobody can tell.

    That is the one before a row that was inserted when the one before it was already committed, and with it all before
    that: where there is one writer, rows are committed in the order of their numbers.  Who looked early, or not at all,
    saw fewer rows as committed than there were, never more.  A number that is not below the row's own says nothing: a
    backup was put back into the file after it was seen, and numbers are given out a second time.
    """
    for row, before in pairwise(reversed(rows)):
        if row.committed_id is not None and before.outbox_id <= row.committed_id < row.outbox_id:
            return before.outbox_id
    return None


def next_before_others(connection: Connection, from_id: int) -> int | None:
    """Return the first row, of those from this one on, that is the last one of its caller in the same way."""
    found: int | None = connection.execute(_LAST_BEFORE_OTHERS, {"from_id": from_id}).scalar()
    return found


def callers_going_on(connection: Connection, caller_ids: Collection[CallerId], last_id: int) -> set[CallerId]:
    """Return which of these database transactions have rows after `last_id`, too."""
    known = [caller_id for caller_id in caller_ids if caller_id is not None]
    going_on: set[CallerId] = set()
    if known:
        going_on.update(connection.execute(_GOES_ON, {"last_id": last_id, "caller_ids": known}).scalars())
    if None in caller_ids and connection.execute(_UNKNOWN_GOES_ON, {"last_id": last_id}).scalar_one():
        going_on.add(None)
    return going_on


def last_ids_of_callers(connection: Connection) -> dict[CallerId, int]:
    """Return the last row of each database transaction, of all rows that wait."""
    return {row[0]: row[1] for row in connection.execute(_LAST_IDS)}


def destinations(connection: Connection, last_id: int) -> list[tuple[str, int | None]]:
    """Return the topics and partitions that the rows up to `last_id` name."""
    with any_text(connection):
        return [(row[0], row[1]) for row in connection.execute(_DESTINATIONS, {"last_id": last_id})]


def take_rows(connection: Connection, outbox_ids: Sequence[int]) -> list[Row[Any]]:
    """Delete these rows, at least one and in the order of their numbers, and return them in it.

    Raises:
        WriteConflict: one waits no more, for somebody else has deleted it or set its refusal; the database transaction
            begins again without it.
    """
    first_id, last_id = outbox_ids[0], outbox_ids[-1]
    parameters: dict[str, Any] = {"first_id": first_id, "last_id": last_id}
    take = _TAKE
    if last_id - first_id >= len(outbox_ids):
        take = _TAKE_LISTED
        parameters |= _THESE.parameters(outbox_ids)
    # Text that is not UTF-8 makes a row that is refused; as an error it would stop all others, too.
    with any_text(connection):
        rows: list[Any] = sorted(connection.execute(take, parameters), key=itemgetter(0))
    if len(rows) != len(outbox_ids):
        # What its owner has taken back is not to become a record.
        raise WriteConflict("a row of the outbox was taken back while it was to become a record; nothing was changed")
    return rows


def count_moved(connection: Connection, moved_count: int) -> None:
    """Add to how many rows have become records."""
    must_hit(connection, _COUNT, {"moved_count": moved_count})


def refuse_rows(connection: Connection, refusals: Mapping[int, str], callers: Iterable[tuple[int, str]]) -> None:
    """Write why these rows, and all others of these database transactions, cannot become records."""
    if refusals:
        connection.execute(_REFUSE_ROW, [{"of_outbox_id": number, "why": why} for number, why in refusals.items()])
    further = [{"of_caller_id": caller_id, "why": why} for caller_id, why in callers]
    if further:
        connection.execute(_REFUSE_CALLER, further)


def tell_callers_apart(connection: Connection) -> None:
    """Let no transaction to come have the number of one that wrote rows of the outbox on another server.

    Nobody moves rows meanwhile.
    """
    connection.execute(_TELL_APART, {"last_former": connection.execute(_LAST_FORMER).scalar() or 0})
