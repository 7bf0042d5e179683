"""The sequencer: rows that callers have committed into the outbox become records in their partitions.

One round is one database transaction, so a row is either in the outbox or in its partition, never in both and never in
neither.  All rows of a caller's database transaction go in the same round: readers see all of them or none of them.
They go in the order of their numbers, which follows causes: a writer that has seen a row's commit gets a higher number.
`OutboxPoller` is the pace of a process that does it again and again: often while rows come, rarely while there are
none.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sqlalchemy import Connection, select

from txnstore.db.cluster.catalogue import read_store_settings, read_version
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.cluster.membership import CONTROLLER_ID
from txnstore.db.portions import FOUND_MAX, HELD_SECONDS, LEAST_BYTES, Portions
from txnstore.db.store import Store, note_change, server_now_ms
from txnstore.errors import InvalidTimestamp, StoreBusy, StoreUnavailable, UnknownTopicOrPartition, WriteConflict
from txnstore.log.append import append
from txnstore.log.outbox.records import Destinations, Sorted, find_destinations, sort_rows
from txnstore.log.outbox.rows import (
    PAGE_BYTES_MAX,
    PAGE_ROWS_MAX,
    ROW_BYTES_MAX,
    CallerId,
    Listed,
    Listing,
    Lock,
    callers_going_on,
    count_moved,
    delete_refused_rows,
    destinations,
    first_waiting_id,
    has_outbox_rows,
    last_before_others,
    last_ids_of_callers,
    last_waiting_id,
    list_rows,
    lock_outbox,
    next_before_others,
    old_refused,
    refuse_rows,
    take_rows,
)
from txnstore.log.partition_rows import lock_heads
from txnstore.log.partition_storage import last_that_fits

_log = logging.getLogger(__name__)
#: How often a round is begun again because a topic was changed under it.
_TRIES: Final = 3
#: Between two looks: after something was found, and at last.
PAUSE_FIRST_SECONDS: Final = 0.005
PAUSE_LAST_SECONDS: Final = 0.2
_TOO_LARGE: Final = f"it takes more than {ROW_BYTES_MAX} bytes"
#: No limit: kept for ever.
FOR_EVER: Final = -1
_NOW: Final = select(server_now_ms())
#: How many rows a round takes where all writers wait for its end: about 8 ms of a core, and a commit.
ROUND_ROWS_MAX: Final = 500
#: And at least, where it takes long: without any, it would take most of that time.
ROUND_ROWS_LEAST: Final = 100
#: How long a round waits for a database whose write lock somebody holds; then it is tried at the next look.
TRY_TIMEOUT_MS: Final = 500


@dataclass(frozen=True, slots=True)
class Sequenced:
    """What one round has done."""

    moved_count: int = 0
    """How many rows have become records."""

    is_busy: bool = False
    """Whether somebody else is sequencing at this moment."""

    has_more: bool = False
    """Whether there may be more rows to move now."""


@dataclass(frozen=True, slots=True)
class _ChosenCallers:
    """The database transactions of callers whose rows go in this round: all of their rows, up to `last_id`."""

    callers: frozenset[CallerId] | None
    """None: everybody's who has rows up to there."""

    last_id: int
    fits: bool
    """Whether the rows are all in the first page."""


class _RowsRefused(Exception):
    """Some rows cannot become records: this round is rolled back, and they are marked."""

    def __init__(
        self, refusals: dict[int, str], callers: list[tuple[int, str]], *, first_unsure_id: int | None
    ) -> None:
        super().__init__()
        self.refusals = refusals
        self.callers = callers
        self.first_unsure_id = first_unsure_id
        self.version: int | None = None
        """Up to which of the controller's changes this was judged, if it is a member that may not have the newest."""


def rounds_of(store: Store, portions: Portions | None = None) -> Portions:
    """Return how large rounds are in this store, and until when one may begin.

    Where all writers wait for its end, a round is a portion as any other.  Elsewhere it is as large as a page.
    """
    if store.backend.has_one_writer:
        portions = portions or Portions()
        rows = ROUND_ROWS_LEAST if portions.is_bounded else ROUND_ROWS_MAX
        least = (ROUND_ROWS_LEAST, LEAST_BYTES)
        return portions.resized(rows, rows_max=ROUND_ROWS_MAX, held_seconds=HELD_SECONDS, least=least)
    pages = Portions()
    pages.rows, pages.size_bytes = PAGE_ROWS_MAX, PAGE_BYTES_MAX
    return pages


def sequence_outbox(
    store: Store,
    *,
    waits: bool = False,
    retry_timeout_ms: int | None = None,
    rounds: Portions | None = None,
    cluster: Cluster | None = None,
) -> Sequenced:
    """Move a round of rows from the outbox into their partitions, in one database transaction of its own.

    Anybody may call it at any time; two at once do no harm.  With `waits` it waits for the one at work, otherwise it
    returns at once.  Rows that cannot become records are marked, with all others of their caller's database
    transaction.  (SQLite does not know which rows belong together: there a row is marked alone.)  Readers are told.
    Who moves more than one round keeps `rounds_of` the store for all of them.

    In a member of a cluster nothing is refused by topics and settings that are not the newest: its `cluster` brings
    those first, and who has none leaves such rows, and what is behind them, to others.

    Raises:
        StoreUnavailable: a member has rows that cannot become records, nobody can say if they still could, and nothing
            in front of them could be moved.
        TxnStoreError: the database refused or cannot be reached; the round was made as a whole or not at all.
    """
    rounds = rounds or rounds_of(store)
    in_order = store.backend.has_one_writer
    before_id: int | None = None
    unsure: StoreUnavailable | None = None
    for tries_left in reversed(range(_TRIES)):
        try:
            done = rounds.write(
                store,
                partial(_round, rounds=rounds, waits=waits, in_order=in_order, before_id=before_id),
                wakes_readers=True,
                retry_timeout_ms=retry_timeout_ms,
                is_apart=True,
                goes_on=lambda done: done.has_more,
            )
            if unsure is not None and not done.moved_count and not done.is_busy:
                raise unsure
            return done
        except _RowsRefused as refused:
            if refused.version is None:
                return _mark(store, refused, retry_timeout_ms)
            try:
                if _has_newer(store, cluster, refused.version):
                    return Sequenced(has_more=True)
            except StoreUnavailable as error:
                # It waits, and what is behind it: what is in front goes.
                before_id, unsure = refused.first_unsure_id, error
            else:
                return _mark(store, refused, retry_timeout_ms)
        except (UnknownTopicOrPartition, InvalidTimestamp):
            # A topic was deleted or configured in between; the next try sees it as it is now.
            if tries_left == 0:
                raise
    assert unsure is not None
    raise unsure


def drain_outbox(store: Store, portions: Portions | None = None, cluster: Cluster | None = None) -> int:
    """Move everything that is committed into the outbox when this is called; return how many rows were moved.

    What is committed later may go with it, or not: this ends, however fast rows come.

    With `portions` only as much as there is time for, and nothing while somebody else is at it.

    Raises:
        TxnStoreError: as `sequence_outbox`; what was moved before stays moved.
    """
    moved_count = 0
    rounds = rounds_of(store, portions)
    last_id = first_id = store.read(last_waiting_id)
    # Numbers up to there have been given out already, so that only so many rows can come yet, however late.
    while last_id is not None and first_id is not None and first_id <= last_id:
        try:
            waits = portions is None or not portions.is_bounded
            done = sequence_outbox(store, waits=waits, rounds=rounds, cluster=cluster)
        except (StoreBusy, WriteConflict):
            if not rounds.is_bounded:
                raise
            break
        moved_count += done.moved_count
        if not done.has_more or (portions is not None and portions.is_over):
            break
        first_id = store.read(first_waiting_id)
    return moved_count


def delete_refused(store: Store, portions: Portions | None = None) -> int:
    """Delete rows that were refused longer ago than txnstore.outbox.refused.retention.ms; return how many.

    At least FOUND_MAX, or all that there are, or what there is time for.

    Raises:
        TxnStoreError: the database refused; what was deleted before stays so.
    """
    portions = portions or Portions()

    def find(connection: Connection) -> tuple[int, list[tuple[int, int]]]:
        retention_ms: int = read_store_settings(connection)["txnstore.outbox.refused.retention.ms"]
        before_ms = connection.execute(_NOW).scalar_one() - retention_ms
        return before_ms, [] if retention_ms == FOR_EVER else old_refused(connection, before_ms, FOUND_MAX)

    before_ms, left = store.read(find)
    deleted = 0
    while left:
        # Never one that its owner has just told to be tried again: its row is looked at again under its lock.
        fitting = [outbox_id for outbox_id, _ in left[: portions.rows]]
        some = fitting[: fitting.index(last_that_fits(left[: portions.rows], portions.size_bytes)) + 1]
        left = left[len(some) :]
        delete = partial(delete_refused_rows, outbox_ids=some, before_ms=before_ms)
        deleted += portions.write_unless_busy(store, delete, 0)
        if portions.is_over:
            break
    if deleted:
        _log.warning(
            "outbox of %s: %d refused rows that nobody asked to retry were deleted",
            store.url,
            deleted,
            extra={"event": "outbox_rows_deleted", "store": str(store.url), "count": deleted},
        )
    return deleted


def _round(
    connection: Connection, *, rounds: Portions, waits: bool, in_order: bool, before_id: int | None
) -> Sequenced:
    # Without rows to move there is nothing to tell.
    note_change(connection)
    lock = lock_outbox(connection, waits=waits)
    if lock is None:
        return Sequenced(is_busy=True)
    window = list_rows(connection, rows_max=rounds.rows, bytes_max=rounds.size_bytes)
    if not window.rows:
        return Sequenced()
    # Before anything is judged: what comes meanwhile makes it no newer than that.
    version = None if lock.database_id == CONTROLLER_ID else read_version(connection)
    try:
        if before_id is None:
            choice = _choose(connection, window, in_order=in_order)
        elif (choice_before := _choose_before(connection, window.rows, before_id, in_order=in_order)) is not None:
            choice = choice_before
        else:
            return Sequenced()
        moved_count = _move(connection, window, choice, lock)
    except _RowsRefused as refused:
        refused.version = None if refused.first_unsure_id is None else version
        raise
    return Sequenced(moved_count, has_more=window.is_cut or not choice.fits or before_id is not None)


def _move(connection: Connection, window: Listing, choice: _ChosenCallers, lock: Lock) -> int:
    random_ = random.Random()
    found = None if choice.fits else _prepare(connection, choice, lock.database_id)
    moved_count = 0
    for page in _pages(connection, window, choice):
        # Unread: as an error of the database it would stop all others, too.
        if refusals := {row.outbox_id: _TOO_LARGE for row in page if row.size_bytes > ROW_BYTES_MAX}:
            raise _refused(page, Sorted(refusals=refusals), fits=choice.fits)
        rows = take_rows(connection, [listed.outbox_id for listed in page])
        known = found or find_destinations(connection, {row.topic for row in rows}, lock.database_id)
        result = sort_rows(rows, known, lock.now_ms, random_)
        if result.refusals:
            raise _refused(rows, result, fits=choice.fits)
        append(connection, result.appends)
        moved_count += result.record_count
    count_moved(connection, moved_count)
    return moved_count


def _choose(connection: Connection, window: Listing, *, in_order: bool) -> _ChosenCallers:
    """Return whose rows go: everybody's whose last row is not after the window's.

    A caller with rows on both sides committed after every row of the window was numbered, so none of them can be
    an effect of theirs.  Where that leaves nobody, the window is moved on to where the first of them ends.

    Once chosen, it is by name: what is committed while the round goes on is for the next one.  Where rows are committed
    `in_order` of their numbers, nothing is: there it is by the place where another caller's begin.
    """
    callers = {listed.caller_id for listed in window.rows}
    last_id = window.rows[-1].outbox_id
    if not window.is_cut:
        return _ChosenCallers(frozenset(callers), last_id, fits=True)
    if in_order and (last_in_window := last_before_others(window.rows)) is not None:
        return _ChosenCallers(None, last_in_window, fits=True)
    complete = callers - callers_going_on(connection, callers, last_id)
    if complete:
        return _ChosenCallers(frozenset(complete), last_id, fits=True)
    if in_order and (next_last := next_before_others(connection, last_id)) is not None:
        return _ChosenCallers(None, next_last, fits=next_last == last_id)
    last_ids = last_ids_of_callers(connection)
    # Without those whose rows were all taken back meanwhile.
    last_id = min((last_ids[caller_id] for caller_id in callers if caller_id in last_ids), default=0)
    complete = {caller for caller, last in last_ids.items() if last <= last_id}
    return _ChosenCallers(frozenset(complete), last_id, fits=False)


def _choose_before(
    connection: Connection, rows: Sequence[Listed], before_id: int, *, in_order: bool
) -> _ChosenCallers | None:
    """Return whose rows go while that row, and with it all of its caller's, has to wait; None: nobody's."""
    if in_order:
        # With that row: whose the one before it is, it tells.
        last_id = last_before_others([row for row in rows if row.outbox_id <= before_id])
        return None if last_id is None else _ChosenCallers(None, last_id, fits=True)
    front = [row for row in rows if row.outbox_id < before_id]
    if not front:
        return None
    callers, last_id = {row.caller_id for row in front}, front[-1].outbox_id
    complete = callers - callers_going_on(connection, callers, last_id)
    return _ChosenCallers(frozenset(complete), last_id, fits=True) if complete else None


def _prepare(connection: Connection, choice: _ChosenCallers, database_id: int) -> Destinations:
    """Lock all heads that the pages will need: page by page they would not be locked in the order of their ids."""
    wanted = destinations(connection, choice.last_id)
    found = find_destinations(connection, {topic for topic, _ in wanted}, database_id)
    partition_ids = found.partition_ids(wanted)
    if partition_ids:
        lock_heads(connection, partition_ids)
    return found


def _pages(connection: Connection, window: Listing, choice: _ChosenCallers) -> Iterator[list[Listed]]:
    """Return the rows that go, a page at a time."""
    # Who committed between the window and the choice of all has rows that the window does not show.
    listing = window if choice.fits else list_rows(connection)
    while listing.rows:
        page = [
            row
            for row in listing.rows
            if row.outbox_id <= choice.last_id and (choice.callers is None or row.caller_id in choice.callers)
        ]
        if page:
            yield page
        last_id = listing.rows[-1].outbox_id
        if choice.fits or last_id >= choice.last_id:
            break
        listing = list_rows(connection, from_id=last_id + 1)


def _refused(rows: Sequence[Any], found: Sorted, *, fits: bool) -> _RowsRefused:
    """Return which rows are to be marked, for some that cannot become records."""
    refusals = found.refusals
    first_of: dict[int, int] = {}
    for outbox_id, caller_id, *_ in rows:
        if outbox_id in refusals and caller_id is not None:
            first_of.setdefault(caller_id, outbox_id)
    whys = {
        caller_id: f"row {number} of the same database transaction was refused: {refusals[number]}"
        for caller_id, number in first_of.items()
    }
    marked = {outbox_id: whys[caller_id] for outbox_id, caller_id, *_ in rows if caller_id in whys}
    # Where a caller's rows fill several pages, most of them are not here.
    callers = [] if fits else list(whys.items())
    return _RowsRefused({**marked, **refusals}, callers, first_unsure_id=found.first_unsure_id)


def _has_newer(store: Store, cluster: Cluster | None, version: int) -> bool:
    """Return whether a member has newer topics and settings by now than it had; the controller's are brought first."""
    if cluster is None or cluster.is_alone:
        raise StoreUnavailable(
            "a row cannot become a record by the topics and settings that this database of a cluster knows, and only"
            " with the URLs of all databases can it be said whether they are the newest: `txnstore maintain` or a"
            " consumer of the cluster moves it, and what is behind it, or refuses it"
        )
    # Nobody waits here for a controller that is away.
    newest = cluster.controller.read(read_version, retry_timeout_ms=0)
    if newest == version:
        return False
    if cluster.reconcile(store.database_id) or store.read(read_version) != version:
        return True
    if newest > version:
        raise StoreUnavailable(
            "a row cannot become a record by the topics and settings that this database of a cluster has, and some of"
            " the newest cannot come yet: it still deletes partitions that had their numbers; the row, and what is"
            " behind it, waits for that"
        )
    return False


def _mark(store: Store, refused: _RowsRefused, retry_timeout_ms: int | None) -> Sequenced:
    def work(connection: Connection) -> None:
        lock_outbox(connection, waits=True)
        refuse_rows(connection, refused.refusals, refused.callers)

    store.write(work, retry_timeout_ms=retry_timeout_ms)
    number, why = min(refused.refusals.items())
    _log.error(
        "outbox of %s: %d rows cannot become records and were marked; the first is row %d: %s",
        store.url,
        len(refused.refusals),
        number,
        why,
        extra={
            "event": "outbox_rows_refused",
            "store": str(store.url),
            "count": len(refused.refusals),
            "outbox_id": number,
        },
    )
    return Sequenced(has_more=True)


class OutboxPoller:
    """Looks at one store's outbox again and again; for one thread, which sleeps in between as it is told."""

    def __init__(self, store: Store) -> None:
        """Look after the outbox of `store`."""
        self._store = store
        self._rounds = rounds_of(store)
        self._pause_seconds = PAUSE_FIRST_SECONDS
        self.moved_count = 0
        """How many rows it has moved."""

        self.is_busy = False
        """Whether the last look had to leave rows, for somebody else was at them or had the database to itself."""

    def turn(self) -> float:
        """Look, move a round of rows if there are some, and return in how many seconds to look again.

        Raises:
            TxnStoreError: the database refused or cannot be reached; look again later.
        """
        self.is_busy = False
        if not self._store.read(has_outbox_rows, retry_timeout_ms=TRY_TIMEOUT_MS):
            return self._next_pause()
        try:
            done = sequence_outbox(self._store, retry_timeout_ms=TRY_TIMEOUT_MS, rounds=self._rounds)
        except StoreBusy:
            # Somebody has the whole database to itself (SQLite).
            done = Sequenced(is_busy=True)
        self.moved_count += done.moved_count
        self.is_busy = done.is_busy
        if done.is_busy:
            return self._next_pause()
        self.hurry()
        return 0.0 if done.has_more else PAUSE_FIRST_SECONDS

    def last_waiting_id(self) -> int | None:
        """Return the number of the last row that waits now; None if there is none.

        Raises:
            TxnStoreError: the database refused or cannot be reached.
        """
        return self._store.read(last_waiting_id, retry_timeout_ms=TRY_TIMEOUT_MS)

    def has_none_up_to(self, last_id: int | None) -> bool:
        """Return whether no row up to this number waits any more.

        Raises:
            TxnStoreError: the database refused or cannot be reached.
        """
        first_id = self._store.read(first_waiting_id, retry_timeout_ms=TRY_TIMEOUT_MS)
        return first_id is None or last_id is None or first_id > last_id

    def hurry(self) -> None:
        """Look often again: rows are about to come."""
        self._pause_seconds = PAUSE_FIRST_SECONDS

    def _next_pause(self) -> float:
        pause_seconds = self._pause_seconds
        self._pause_seconds = min(2 * pause_seconds, PAUSE_LAST_SECONDS)
        return pause_seconds
