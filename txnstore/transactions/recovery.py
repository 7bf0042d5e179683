"""The help that any client gives: finish what is decided, abort what is open for too long, forget what is old.

Any client that meets a transaction whose time is up aborts it, by the clock of the database that coordinates it.  Every
function may be run by anyone, at any time, by several at once, and again after a crash: each step locks the row it is
about and looks again before it does anything.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from sqlalchemy import BindParameter, Connection, bindparam, delete, select, tuple_

from txnstore.db.cluster.catalogue import read_store_settings
from txnstore.db.cluster.cluster import Cluster, several
from txnstore.db.cluster.locality import Locality
from txnstore.db.cluster.membership import coordinator_of_producer
from txnstore.db.portions import FOUND_MAX, Portions
from txnstore.db.schema import (
    MINUTE_MS,
    pending_group_offsets,
    producer_states,
    sink_batches,
    sink_runs,
    transaction_log,
    transactions,
)
from txnstore.db.statements import begins_with
from txnstore.db.store import Store, pause_after_portion, server_now_ms
from txnstore.errors import (
    StoreBusy,
    StoreUnavailable,
    TxnStoreError,
    WriteConflict,
)
from txnstore.groups.offsets_from_elsewhere import forget_offset_producers
from txnstore.log.partition_rows import forget_producers
from txnstore.transactions import protocol, rows
from txnstore.transactions.delivery import PendingDelivery
from txnstore.transactions.protocol import (
    DECIDED,
    EXPIRABLE,
    FenceReason,
    TransactionMetadata,
    TransactionState,
)
from txnstore.transactions.together import (
    AbortedTogether,
    abort_together,
    complete_together,
    fitting,
    is_as_shown,
    shares_of,
)
from txnstore.transactions.transaction import (
    LockedTransaction,
    abort_if_timed_out,
    complete_if_possible,
    log_put_off,
    log_timed_out,
)

_log = logging.getLogger(__name__)
#: How many transactions a client that is held back asks about, of which some are open and none may be late.
LOOKED_AT_FIRST: Final = 21
#: How many of what holds one partition back are asked about.
OPEN_MAX: Final = 20
#: How long a client helps before it has its turn; a portion that has begun is done.
HELP_SECONDS: Final = 0.1
#: How many are aborted together first: about as many as then may be.
ABORTED_FIRST: Final = 100
#: However long fewer have held their locks: what a portion takes at least goes to its statements, not to its rows.  Of
#: those that have written to several partitions it is as many as have so many of them together.
ABORTED_MIN: Final = 100
#: Of more than that each would take as long.
ABORTED_MAX: Final = 500
#: How many maintenance aborts, at most, before its other duties have their turn.
ABORTED_IN_A_ROW: Final = 10_000
#: How many that are decided are completed together, and how many partitions and offsets they have: each other database
#: holds their partitions meanwhile.
COMPLETED_TOGETHER: Final = 100
COMPLETED_SHARES_MAX: Final = 200
#: How long aborts together are to hold their locks: readers wait for them, and writers no longer than twice that.
HELD_SECONDS: Final = 0.015
#: When to look again at what could not be aborted now.
AGAIN_MS: Final = 1_000
#: When to look again where another helper is at work, which all that are due wake: each at another moment.
AFTER_OTHERS_MS: Final = (500, 1_500)
#: How far a transaction begins in the future that is taken to be begun by a clock that was ahead.
AHEAD_MS: Final = 1_000
#: How the sink id of a job begins; a query's begins otherwise.
SINK_OF_JOB: Final = "job:"
#: Somebody else holds what is needed.
_HELD: Final = (StoreBusy, WriteConflict)
#: What the next one would meet as well.
_IN_VAIN: Final = (StoreUnavailable, *_HELD)
_EXPIRATION: Final = "transactional.id.expiration.ms"
_IDS: Final[BindParameter[Any]] = bindparam("partition_ids", expanding=True)
_BY_DEADLINE: Final = (transactions.c.deadline_ms, transactions.c.transactional_id)
_AFTER_DEADLINE: Final = tuple_(*_BY_DEADLINE) > tuple_(bindparam("after_deadline_ms"), bindparam("after_id"))
_FIRST_DEADLINE: Final = {"after_deadline_ms": -1, "after_id": ""}
# At least zero, as every deadline is: SQLite takes the partial index for that, though not for IS NOT NULL.
_NEXT_DEADLINES: Final = (
    select(
        transactions.c.transactional_id,
        transactions.c.deadline_ms,
        (transactions.c.deadline_ms - server_now_ms()).label("left_ms"),
    )
    .where(transactions.c.deadline_ms >= 0, _AFTER_DEADLINE)
    .order_by(*_BY_DEADLINE)
    .limit(bindparam("count_max"))
)
# The producers with records of an open transaction in the partitions, the oldest first, or offsets for them.
_OPEN_IN: Final = (
    select(producer_states.c.producer_id)
    .where(producer_states.c.partition_id.in_(_IDS), producer_states.c.transaction_first_offset >= 0)
    .order_by(producer_states.c.transaction_first_offset)
    .limit(OPEN_MAX)
)
_PENDING_IN: Final = (
    select(pending_group_offsets.c.producer_id).where(pending_group_offsets.c.partition_id.in_(_IDS)).limit(OPEN_MAX)
)
# As numbers in the statement's text: SQLite takes no partial index for parameters.
_DECIDED_STATES: Final[BindParameter[Any]] = bindparam(
    "states", sorted(int(state) for state in DECIDED), expanding=True, literal_execute=True
)
_DECIDED: Final = (
    select(transactions.c.transactional_id)
    .where(transactions.c.state.in_(_DECIDED_STATES), transactions.c.transactional_id > bindparam("after_id"))
    .order_by(transactions.c.transactional_id)
    .limit(FOUND_MAX)
)
_TIMED_OUT: Final = (
    select(*_BY_DEADLINE)
    # The time as a subquery, which is asked once: the index then ends at what has timed out.
    .where(transactions.c.deadline_ms >= 0, transactions.c.deadline_ms < select(server_now_ms()).scalar_subquery())
    .where(_AFTER_DEADLINE)
    .order_by(*_BY_DEADLINE)
    .limit(FOUND_MAX)
)
# The last deadlines of all, whatever is open: those of the future that are not among them are once these are changed.
_LAST_DEADLINES: Final = (
    select(transactions.c.transactional_id, transactions.c.start_ms)
    .where(transactions.c.deadline_ms >= 0)
    .order_by(transactions.c.deadline_ms.desc())
    .limit(FOUND_MAX)
    .subquery()
)
_OF_THE_FUTURE: Final = select(_LAST_DEADLINES).where(
    _LAST_DEADLINES.c.start_ms > select(server_now_ms() + AHEAD_MS).scalar_subquery()
)
_EXPIRED: Final = (
    select(transactions.c.transactional_id, transactions.c.last_update_ms)
    .where(
        transactions.c.last_update_minute <= bindparam("before_minute"),
        transactions.c.last_update_ms <= bindparam("before_ms"),
        transactions.c.state.in_(sorted(int(state) for state in EXPIRABLE)),
    )
    .order_by(transactions.c.last_update_minute)
    .limit(FOUND_MAX)
)
# Here and not with the sink: it goes in processes without Spark too. No index finds the batches of an id's jobs: those
# of all are passed once for all ids, where nobody waits. Whoever uses an id meanwhile keeps it.
_JOB_BATCHES: Final = select(sink_batches.c.transactional_id, sink_batches.c.sink_id, sink_batches.c.batch_id).where(
    begins_with(sink_batches.c.sink_id, SINK_OF_JOB),
    sink_batches.c.transactional_id.in_(bindparam("transactional_ids", expanding=True)),
)
_FORGET_JOB_RUNS: Final = delete(sink_runs).where(
    sink_runs.c.transactional_id == bindparam("of_transactional_id"), begins_with(sink_runs.c.sink_id, SINK_OF_JOB)
)
_FORGET_JOB_BATCH: Final = delete(sink_batches).where(
    sink_batches.c.sink_id == bindparam("of_sink_id"),
    sink_batches.c.batch_id == bindparam("of_batch_id"),
    sink_batches.c.transactional_id == bindparam("of_transactional_id"),
)
_NOW: Final = select(server_now_ms())
# In the order of their numbers, which is about that of their age. The journal of a transaction that is not complete is
# kept, however old; one that is complete stays so, whatever its transactional id begins next.
_OLDEST: Final = (
    select(
        transaction_log.c.entry_id,
        transaction_log.c.update_ms,
        # Its state by a look for each entry: for EXISTS, PostgreSQL may read all transactional ids.
        select(transactions.c.state)
        .where(
            transactions.c.transactional_id == transaction_log.c.transactional_id,
            transactions.c.transaction_number == transaction_log.c.transaction_number,
            # An id that was forgotten counts from the start, with another producer id.
            transactions.c.producer_id == transaction_log.c.producer_id,
        )
        .scalar_subquery()
        .label("state_now"),
    )
    .where(transaction_log.c.entry_id > bindparam("after_entry_id"))
    .order_by(transaction_log.c.entry_id)
    .limit(FOUND_MAX)
)
#: None: the transactional id has gone on, or is gone.
_COMPLETE: Final = {None, *map(int, EXPIRABLE)}
# Behind entries that a clock has written which was ahead, and which by now are of the future.
_NEXT_OF_THE_PAST_MS: Final = (
    select(transaction_log.c.update_ms)
    .where(transaction_log.c.entry_id > bindparam("after_entry_id"), transaction_log.c.update_ms <= bindparam("now_ms"))
    .order_by(transaction_log.c.entry_id)
    .limit(1)
)
_TRIM: Final = delete(transaction_log).where(transaction_log.c.entry_id.in_(bindparam("entry_ids", expanding=True)))


def abort_overdue(store: Store, cluster: Cluster | None = None) -> int | None:
    """Abort the transactions coordinated in this database whose time is up, those first that have waited longest.

    Returns in how many milliseconds there may be something to do again; None: no transaction with a deadline is open.
    0: so many were aborted that the helper's own work comes first.  One statement if there is nothing to do, whatever
    is open.
    """
    portions = Portions(seconds=HELP_SECONDS, held_seconds=HELD_SECONDS, rows_max=ABORTED_MAX)
    portions.rows = ABORTED_FIRST
    again_ms, aborted, has_tried = None, 0, False
    page: dict[str, Any] = {**_FIRST_DEADLINE, "count_max": LOOKED_AT_FIRST}
    while found := store.read(partial(_next_deadlines, page), retry_timeout_ms=0):
        late = [row.transactional_id for row in found if row.left_ms < 0]
        if len(late) == LOOKED_AT_FIRST and page["count_max"] != FOUND_MAX:
            # Many: the lock, which others may have until the time is over, is worth more than so few.
            page["count_max"] = FOUND_MAX
            continue
        left: Sequence[str] = late
        shares = shares_of(store, late)
        while left:
            if has_tried and portions.is_over:
                return 0 if aborted else AGAIN_MS
            has_tried = True
            some, left = next_portion(left, shares, max(ABORTED_MIN, portions.rows))
            # The holder of a lock, perhaps for long, is at work on it: the reader that is helped here does not
            # wait, and those after it have their turn.
            portion = _abort_portion(store, some, cluster, portions, waits=False)
            log_timed_out(store, *portion.together)
            aborted += len(portion.aborted)
            if portion.error is not None:
                # Others can, or the next look.
                _log.debug("a transaction could not be aborted for its age: %s", portion.error)
                again_ms = AGAIN_MS
            if isinstance(portion.error, _IN_VAIN):
                return _after_ms(portion.error, aborted)
            if portion.left or portion.busy:
                again_ms = AGAIN_MS
            if portion.left and aborted and portions.is_over:
                return 0
        if len(late) < len(found):
            # A transaction has timed out once it is open for longer than its timeout.
            left_ms = int(found[len(late)].left_ms) + 1
            return left_ms if again_ms is None else min(left_ms, again_ms)
        page = {
            "after_deadline_ms": found[-1].deadline_ms,
            "after_id": found[-1].transactional_id,
            "count_max": FOUND_MAX,
        }
    return again_ms


def _after_ms(error: TxnStoreError | AssertionError, aborted: int) -> int:
    if isinstance(error, StoreUnavailable):
        return AGAIN_MS
    # Whoever has got on with them goes on, all others leave that to it for a while.
    return 0 if aborted else random.randint(*AFTER_OTHERS_MS)


@dataclass(slots=True)
class _AbortedPortion:
    """What became of some transactions that were to be aborted for their age."""

    aborted: list[str] = field(default_factory=list)
    together: Sequence[str] = ()
    """Those of them that nobody was told of yet."""

    left: list[str] = field(default_factory=list)
    """Those that are open all the same, or not late any more."""

    busy: Sequence[str] = ()
    """Those that somebody is at work on."""

    error: TxnStoreError | AssertionError | None = None
    """Why one of them could not be aborted; those after it were tried all the same, unless it would be in vain."""


def _abort_portion(
    store: Store, some: Sequence[str], cluster: Cluster | None, portions: Portions, *, waits: bool
) -> _AbortedPortion:
    portion = _AbortedPortion()
    try:
        done = portions.write(
            store,
            # As it is then: it may hear of other databases in between.
            lambda connection: abort_together(some, Locality.of(store, cluster), connection),
            wakes_readers=True,
            is_awaited=True,
        )
    except (TxnStoreError, AssertionError) as error:
        # Another helper that holds the lock is at the same: a hundred waits, one by one, would only be in its way.
        if isinstance(error, StoreUnavailable if waits else _IN_VAIN):
            portion.error = error
            return portion
        # Of one of them something is damaged, also so that no rule has a move for it (`protocol.check_change`), or
        # somebody holds what it needs: that keeps no other one open.
        _log.debug("%s transactions could not be aborted together for their age: %s", len(some), error)
        done = AbortedTogether(aborted=(), unusual=some)
    portion.together = done.aborted
    complete_each_if_possible(store, cluster, done.pending)
    portion.aborted.extend(done.aborted)
    portion.busy = done.busy
    _abort_each(store, done.unusual, cluster, portion, portions, waits=waits)
    return portion


def _abort_each(
    store: Store,
    some: Sequence[str],
    cluster: Cluster | None,
    portion: _AbortedPortion,
    portions: Portions,
    *,
    waits: bool,
) -> None:
    """Abort them one by one, each of which may wait for long; unless this call `waits`, only while there is time."""
    for count, transactional_id in enumerate(some):
        if portions.is_stopped or (not waits and count and portions.is_over):
            portion.left.extend(some[count:])
            break
        if store.backend.has_one_writer and portion.aborted:
            pause_after_portion(0)
        try:
            if abort_if_timed_out(store, transactional_id, cluster, waits=waits, retry_timeout_ms=None if waits else 0):
                portion.aborted.append(transactional_id)
            else:
                portion.left.append(transactional_id)
        except (TxnStoreError, AssertionError) as error:
            portion.error = portion.error or error
            if not waits and isinstance(error, _IN_VAIN):
                # Not for what it is.
                portion.error = error
                portion.left.extend(some[count + 1 :])
                break


def complete_each_if_possible(store: Store, cluster: Cluster | None, left: Mapping[str, PendingDelivery]) -> None:
    """Complete what was decided just now, unless a database that takes part is away: once it is back recovery does."""
    if not left:
        return
    put_off: Mapping[str, TxnStoreError | AssertionError]
    try:
        put_off = complete_together(store, cluster, left, left).put_off
    except TxnStoreError as error:
        put_off = dict.fromkeys(left, error)
    for transactional_id, why in put_off.items():
        log_put_off(transactional_id, why)


def _next_deadlines(after: Mapping[str, Any], connection: Connection) -> Sequence[Any]:
    return connection.execute(_NEXT_DEADLINES, after).all()


def abort_overdue_in(store: Store, partition_ids: Collection[int], cluster: Cluster | None = None) -> int | None:
    """Do the same for the transactions that hold partitions of this database back, wherever they are coordinated."""
    others = several(cluster)
    if others is None:
        return abort_overdue(store, cluster)

    def producers(connection: Connection) -> set[int]:
        of = {"partition_ids": sorted(partition_ids)}
        statements = (_OPEN_IN, _PENDING_IN)
        return {number for statement in statements for number in connection.execute(statement, of).scalars()}

    coordinators = {coordinator_of_producer(number) for number in store.read(producers, retry_timeout_ms=0)}
    due_ms: list[int | None] = []
    for database_id in sorted(coordinators):
        try:
            due_ms.append(abort_overdue(others.own(database_id), others))
        except TxnStoreError as error:
            _log.debug("database %s could not be asked for transactions whose time is up: %s", database_id, error)
            due_ms.append(AGAIN_MS)
    return min((left_ms for left_ms in due_ms if left_ms is not None), default=None)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What one round of recovery has done."""

    completed: tuple[str, ...]
    """Transactional ids whose decided transaction was completed."""

    aborted: tuple[str, ...]
    """Transactional ids whose open transaction was aborted for its age."""


def recover(store: Store, cluster: Cluster | None = None) -> Recovered:
    """Complete what is decided and abort what is open for longer than its timeout.

    Raises:
        TxnStoreError: some of it could not be done now; all else is.
        AssertionError: the same, for a row that is damaged: no rule has a move for it.
    """
    try:
        completed = complete_all_decided(store, cluster)
    except (TxnStoreError, AssertionError):
        # What waits for a database that is away, or is damaged, keeps no other transaction open.
        abort_timed_out(store, cluster)
        raise
    return Recovered(completed, abort_timed_out(store, cluster))


def complete_all_decided(
    store: Store, cluster: Cluster | None = None, portions: Portions | None = None
) -> tuple[str, ...]:
    """Complete every decided transaction, or those that there is time for; return their transactional ids.

    Raises:
        TxnStoreError: some of them could not be completed, because a database that takes part is away; all others are.
        AssertionError: the same, for a row that is damaged: no rule has a move for it.
    """
    completed: list[str] = []
    failed: TxnStoreError | AssertionError | None = None
    for some in _all_decided(store):
        done = complete_together(store, cluster, some)
        completed += done.completed
        failed = failed or next(iter(done.put_off.values()), None)
        # What waits for a database that is away costs next to nothing, and has no end: it stands before nothing else.
        only_waits = not done.completed and all(isinstance(why, StoreUnavailable) for why in done.put_off.values())
        if portions is not None and (portions.is_stopped or not only_waits) and portions.is_over:
            break
    if failed is not None:
        raise failed
    return tuple(completed)


def abort_timed_out(store: Store, cluster: Cluster | None = None, portions: Portions | None = None) -> tuple[str, ...]:
    """Abort transactions that are open for longer than their timeout; return their transactional ids.

    Many by one database transaction.  ABORTED_IN_A_ROW, or all that there are, or those that there is time for.

    Raises:
        TxnStoreError: some of them could not be aborted now; all others are.
        AssertionError: the same, for a row that is damaged: no rule has a move for it.
    """
    portions = portions or Portions()
    own = portions.resized(ABORTED_FIRST, rows_max=ABORTED_MAX, held_seconds=HELD_SECONDS)
    together: list[str] = []
    try:
        return _abort_timed_out(store, cluster, portions, own, together)
    finally:
        # At the end: readers wait for the others.
        log_timed_out(store, *together)


def _abort_timed_out(
    store: Store, cluster: Cluster | None, portions: Portions, own: Portions, together: list[str]
) -> tuple[str, ...]:
    aborted: list[str] = []
    busy: list[str] = []
    failed: TxnStoreError | AssertionError | None = None

    def abort(some: Sequence[str]) -> _AbortedPortion:
        nonlocal failed
        portion = _abort_portion(store, some, cluster, own, waits=True)
        together.extend(portion.together)
        failed = failed or portion.error
        return portion

    for page in _all_timed_out(store):
        left: Sequence[str] = page
        shares = shares_of(store, page)
        while left:
            some, left = next_portion(left, shares, max(ABORTED_MIN, own.rows), ABORTED_IN_A_ROW - len(aborted))
            portion = abort(some)
            aborted += portion.aborted
            busy += portion.busy
            if len(aborted) >= ABORTED_IN_A_ROW:
                # What failed comes with the next call.
                return tuple(aborted)
            if portions.is_over:
                left, busy = (), []
        if portions.left_seconds <= 0:
            break
    # The client that was at work on these is done with most of them by now, and with the rest soon.
    left, shares = busy, shares_of(store, busy)
    while left and not portions.is_over:
        some, left = next_portion(left, shares, max(ABORTED_MIN, own.rows))
        portion = abort(some)
        _abort_each(store, portion.busy, cluster, portion, own, waits=True)
        failed = failed or portion.error
        aborted += portion.aborted
    if failed is not None:
        raise failed
    return tuple(aborted)


def begin_anew(store: Store, portions: Portions | None = None) -> int:
    """Let open transactions that begin in the future begin now; return how many, FOUND_MAX at most.

    The clock was ahead, and was set back meanwhile: each would be open for as much longer than its timeout.

    Raises:
        TxnStoreError: the database refused; what was changed before stays so.
        AssertionError: the same, for a row that is damaged.
    """
    portions = portions or Portions()
    changed = 0
    for row in store.read(lambda connection: connection.execute(_OF_THE_FUTURE).all()):
        changed += portions.write_unless_busy(
            store, partial(_begin_now, row.transactional_id, row.start_ms), busy=False
        )
        if portions.is_over:
            break
    return changed


def next_timeout_ms(store: Store) -> int | None:
    """Return in how many milliseconds a transaction that is open now may have timed out; None: none ever will.

    Less than zero: one has, and is there all the same.
    """
    found = store.read(partial(_next_deadlines, {**_FIRST_DEADLINE, "count_max": 1}))
    return int(found[0].left_ms) + 1 if found else None


def abort_by_administrator(
    store: Store,
    transactional_id: str,
    detail: str = protocol.ADMINISTRATOR_DETAIL,
    cluster: Cluster | None = None,
    *,
    shown: TransactionMetadata | None = None,
) -> bool:
    """Abort the open transaction whatever its age; its producer is told and may go on.

    Returns False if none is open, or if nobody has used the transactional id; or if it is another than was `shown`.
    """

    def work(connection: Connection) -> bool:
        transaction = LockedTransaction.lock(connection, transactional_id, Locality.of(store, cluster))
        row = transaction.row
        if row is None or not is_as_shown(row, shown or row):
            return False
        transaction.fence_and_abort(FenceReason.ADMIN, detail)
        transaction.save("administrator")
        return True

    aborted = store.write(work, wakes_readers=True)
    if aborted:
        log_aborted(store, detail, transactional_id)
        complete_if_possible(store, cluster, transactional_id)
    return aborted


def log_aborted(store: Store, detail: str, *transactional_ids: str) -> None:
    """Tell people that somebody has ended the transactions by hand."""
    url = str(store.url)
    for transactional_id in transactional_ids:
        fields = {"event": "transaction_aborted", "store": url, "transactional_id": transactional_id}
        _log.info("the transaction of %.80r was aborted %s", transactional_id, detail, extra=fields)


def expire_transactional_ids(store: Store, portions: Portions | None = None) -> tuple[str, ...]:
    """Forget transactional ids that were not used for transactional.id.expiration.ms; return them.

    At most FOUND_MAX, those first that have been silent for longest.
    """
    portions = portions or Portions()

    def find(connection: Connection) -> tuple[Sequence[Any], dict[str, list[Mapping[str, Any]]]]:
        _, before_ms = _age_of(connection, _EXPIRATION)
        of = {"before_ms": before_ms, "before_minute": before_ms // MINUTE_MS}
        found = connection.execute(_EXPIRED, of).all()
        batches: dict[str, list[Mapping[str, Any]]] = {}
        if found:
            of_ids = {"transactional_ids": [row.transactional_id for row in found]}
            for name, sink_id, batch_id in connection.execute(_JOB_BATCHES, of_ids):
                batches.setdefault(name, []).append(
                    {"of_sink_id": sink_id, "of_batch_id": batch_id, "of_transactional_id": name}
                )
        return found, batches

    expired: list[str] = []
    ids, batches_of = store.read(find)
    for row in ids:
        left, may_expire = batches_of.get(row.transactional_id, []), True
        while may_expire:
            some, left = left[: portions.rows], left[portions.rows :]
            expire = partial(_expire, row.transactional_id, row.last_update_ms, some, is_last=not left)
            may_expire = portions.write_unless_busy(store, expire, busy=False)
            if may_expire and not left:
                expired.append(row.transactional_id)
            if portions.is_over:
                return tuple(expired)
            if not left:
                break
    return tuple(expired)


def expire_producers(store: Store, portions: Portions | None = None) -> int:
    """Forget the sequence numbers of producers that were silent for producer.id.expiration.ms; return how many.

    At least FOUND_MAX, or all that there are, or what there is time for.
    """
    portions = portions or Portions()
    _, before_ms = store.read(lambda connection: _age_of(connection, "producer.id.expiration.ms"))
    forgotten = forget_producers(store, portions, before_ms=before_ms, rows_max=FOUND_MAX)
    if forgotten and portions.is_over:
        return forgotten
    return forgotten + forget_offset_producers(store, portions, before_ms=before_ms, rows_max=FOUND_MAX)


def trim_journal(store: Store, portions: Portions | None = None) -> int:
    """Delete journal entries of completed transactions beyond their retention; return how many.

    At least FOUND_MAX, or all that there are, or what there is time for.
    """
    portions = portions or Portions()
    age_ms, before_ms = store.read(lambda connection: _age_of(connection, "txnstore.transaction.log.retention.ms"))
    trimmed, after_entry_id = 0, -1
    while trimmed < FOUND_MAX:
        of = {"after_entry_id": after_entry_id}
        found = store.read(lambda connection, of=of: connection.execute(_OLDEST, of).all())  # type: ignore[misc]
        # From the old end on, never out of the middle: outcomes are told by what is left of an identity's entries.
        old = _old_entries(store, found, before_ms=before_ms, now_ms=before_ms + age_ms)
        left = [entry.entry_id for entry in old if entry.state_now in _COMPLETE]
        while left:
            some, left = left[: portions.rows], left[portions.rows :]
            trimmed += portions.write(store, partial(_trim, some))
            if portions.is_over:
                return trimmed
        if len(old) < FOUND_MAX:
            break
        after_entry_id = old[-1].entry_id
    return trimmed


def _old_entries(store: Store, found: Sequence[Any], *, before_ms: int, now_ms: int) -> Sequence[Any]:
    """Return the first of these entries, all that are old enough.

    One of the future, by a clock that was ahead, is at least as old as the next one that is not.
    """
    next_ms: int | None = None
    if found and found[-1].update_ms > now_ms:
        behind = {"after_entry_id": found[-1].entry_id, "now_ms": now_ms}
        next_ms = store.read(lambda connection: connection.execute(_NEXT_OF_THE_PAST_MS, behind).scalar())
    are_old: deque[bool] = deque()
    for entry in reversed(found):
        next_ms = entry.update_ms if entry.update_ms <= now_ms else next_ms
        are_old.appendleft(next_ms is not None and next_ms < before_ms)
    return found[: next((count for count, is_old in enumerate(are_old) if not is_old), len(found))]


def _age_of(connection: Connection, setting: str) -> tuple[int, int]:
    """Return the age at which something is forgotten, and the time before which it is old enough now."""
    age_ms: int = read_store_settings(connection)[setting]
    return age_ms, connection.execute(_NOW).scalar_one() - age_ms


def _trim(entry_ids: Sequence[int], connection: Connection) -> int:
    return connection.execute(_TRIM, {"entry_ids": entry_ids}).rowcount


def next_portion(
    left: Sequence[str], shares: Mapping[str, int], rows_max: int, count_max: int | None = None
) -> tuple[Sequence[str], Sequence[str]]:
    """Return the transactions of the next portion, and those after them."""
    count = fitting(left[:count_max], shares, rows_max)
    return left[:count], left[count:]


def _all_decided(store: Store) -> Iterator[Sequence[str]]:
    """Yield the ids of decided transactions in parts; those that cannot be completed now stand before no other."""
    found: Sequence[str] = ("",)
    while found:
        after = {"after_id": found[-1]}
        found = store.read(lambda connection, after=after: connection.execute(_DECIDED, after).scalars().all())  # type: ignore[misc]
        left, shares = found, shares_of(store, found)
        while left:
            some, left = next_portion(left, shares, COMPLETED_SHARES_MAX, COMPLETED_TOGETHER)
            yield some


def _all_timed_out(store: Store) -> Iterator[list[str]]:
    """Yield the ids of transactions whose time is up, page by page, those first that have waited longest."""
    after: Mapping[str, Any] = _FIRST_DEADLINE
    while found := store.read(partial(_timed_out, after)):
        yield [row.transactional_id for row in found]
        after = {"after_deadline_ms": found[-1].deadline_ms, "after_id": found[-1].transactional_id}


def _timed_out(after: Mapping[str, Any], connection: Connection) -> Sequence[Any]:
    return connection.execute(_TIMED_OUT, after).all()


def _begin_now(transactional_id: str, start_ms: int, connection: Connection) -> bool:
    if not rows.try_lock(connection, transactional_id):
        # Somebody is at work on it; if that does not end it, the next look finds it.
        return False
    transaction = LockedTransaction.lock(connection, transactional_id)
    row, now_ms = transaction.row, transaction.now_ms
    if row is None or row.state is not TransactionState.ONGOING or row.start_ms != start_ms or start_ms <= now_ms:
        return False
    transaction.step(replace(row, start_ms=now_ms, last_update_ms=now_ms))
    transaction.save("clock set back")
    return True


def _expire(
    transactional_id: str,
    last_update_ms: int,
    batches: Sequence[Mapping[str, Any]],
    connection: Connection,
    *,
    is_last: bool,
) -> bool:
    """Delete these batches of jobs, and with the last ones all else of the id; False if it has been used since.

    It then stays without those that went before: a replay of one so old is written again, as after the id had gone.
    """
    transaction = LockedTransaction.lock(connection, transactional_id)
    row = transaction.row
    # As it is by now: somebody may have put it up so that the id stays.
    expiration_ms = read_store_settings(connection)[_EXPIRATION]
    if row is None or row.last_update_ms != last_update_ms:
        return False
    if not protocol.may_expire(row, transaction.now_ms, expiration_ms):
        return False
    if batches:
        connection.execute(_FORGET_JOB_BATCH, batches)
    if not is_last:
        return True
    rows.journal(
        connection, [replace(row, state=TransactionState.DEAD, last_update_ms=transaction.now_ms)], reason="expiry"
    )
    rows.delete_row(connection, row)
    # At the latest in this database transaction: by the time the id is used again, no batch of a job is remembered.
    connection.execute(_FORGET_JOB_RUNS, {"of_transactional_id": transactional_id})
    return True
