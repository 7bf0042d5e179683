"""The further writers of a transaction: other processes join it, write, and report that all is written.

A writer has a producer id of its own and the epoch of the transaction, so its batches are numbered, recognised and
ended like any producer's; and whatever it sends once the transaction is over is fenced by that epoch.  Its request
locks the coordinator's row, as all requests of a transactional id do: it comes before a decision or after it.  Joining,
and beginning to write, changes the row: a decision by a snapshot from before, which sees none of it, is refused.

    writer = join_transaction(store, "transfer-1", producer)      # in any process
    append_as_writer(store, writer, appends, report=True)
    coordinator.end_transaction("transfer-1", producer, commit=True, writers=[writer.writer_id])
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sqlalchemy import Connection

from txnstore.db.cluster.cluster import Cluster, several
from txnstore.db.store import Store
from txnstore.log.append import Append, Appended, check_sizes, place_all, producers_of
from txnstore.log.locked_partitions import LockedPartitions
from txnstore.log.partition_rows import allocate_producer_id
from txnstore.model import ClientProcess, ProducerIdentity
from txnstore.transactions import rows
from txnstore.transactions.distributed import RemoteWriter
from txnstore.transactions.protocol import TransactionWriter, check_open, check_unreported
from txnstore.transactions.transaction import LockedTransaction, check_batches, write_in_time

__all__ = [
    "TransactionWriter",
    "append_as_writer",
    "begin_transaction",
    "enter_writer",
    "join_transaction",
    "report_writer",
]


def begin_transaction(
    store: Store,
    transactional_id: str,
    producer: ProducerIdentity,
    cluster: Cluster | None = None,
    *,
    retry_timeout_ms: int | None = None,
) -> None:
    """Make the producer's transaction open in the store before anything is written, so that writers can join it.

    Safe to repeat; its timeout runs from now on.
    """

    def work(connection: Connection) -> None:
        transaction = LockedTransaction.lock(connection, transactional_id)
        transaction.begin(producer)
        transaction.save("AddWriters")

    write_in_time(store, cluster, transactional_id, work, retry_timeout_ms=retry_timeout_ms)


def join_transaction(
    store: Store,
    transactional_id: str,
    transaction: ProducerIdentity,
    cluster: Cluster | None = None,
    *,
    client: ClientProcess | None = None,
    retry_timeout_ms: int | None = None,
) -> TransactionWriter:
    """Join the open transaction of the producer `transaction` as one more writer, from the process `client`.

    After `OutcomeUnknown` join again: a writer that nobody knows of has written nothing, and is never counted.

    Raises:
        ProducerFenced: the transaction is over; the text says how it ended.
    """

    def work(connection: Connection) -> TransactionWriter:
        locked = rows.lock_row(connection, transactional_id)
        check_open(locked.row, transactional_id, transaction, now_ms=locked.now_ms)
        rows.touch_row(connection, transactional_id, locked.now_ms)
        return enter_writer(connection, transactional_id, transaction, client)

    return write_in_time(store, cluster, transactional_id, work, retry_timeout_ms=retry_timeout_ms)


def enter_writer(
    connection: Connection, transactional_id: str, transaction: ProducerIdentity, client: ClientProcess | None = None
) -> TransactionWriter:
    """Enter a new writer into an open transaction, whose row is locked."""
    identity = ProducerIdentity(allocate_producer_id(connection), transaction.epoch)
    rows.insert_writer(connection, transactional_id, identity, client)
    return TransactionWriter(transactional_id, transaction, identity)


def append_as_writer(
    store: Store,
    writer: TransactionWriter,
    appends: Sequence[Append],
    cluster: Cluster | None = None,
    *,
    report: bool = False,
    retry_timeout_ms: int | None = None,
) -> list[Appended]:
    """Append batches of the writer to its transaction, all or none; with `report` they are its last.

    Batches for other databases than the coordinator's are all or none in each of them.

    The batches carry `writer.identity`, are transactional, and are numbered from 0 in each partition.  Safe to repeat
    after `OutcomeUnknown`: a batch that is there already is recognised.

    Raises:
        InvalidRequest: a batch is not one of this writer's.
        ProducerFenced: the transaction is over; the text says how it ended.
        InvalidTransactionState: the writer has reported already.
        TxnStoreError: see `log.append.append`.
    """
    check_batches(writer.identity, appends)
    check_sizes(appends)
    others = several(cluster)
    if others is not None and appends:
        remote = RemoteWriter(store, others, writer, retry_timeout_ms)
        return _append_over_several(store, remote, appends, report=report)
    work = partial(_append, writer, appends, report)
    return write_in_time(
        store, cluster, writer.transactional_id, work, wakes_readers=True, retry_timeout_ms=retry_timeout_ms
    )


def report_writer(
    store: Store, writer: TransactionWriter, cluster: Cluster | None = None, *, retry_timeout_ms: int | None = None
) -> None:
    """Let the transaction know, durably, that the writer has written everything; it can write no more then.

    Safe to repeat.

    Raises:
        ProducerFenced: the transaction is over; the text says how it ended.
    """
    work = partial(_append, writer, (), True)
    write_in_time(store, cluster, writer.transactional_id, work, retry_timeout_ms=retry_timeout_ms)


def _append_over_several(
    store: Store, remote: RemoteWriter, appends: Sequence[Append], *, report: bool
) -> list[Appended]:
    """Append to each database: what lives elsewhere first, because the coordinator's own part reports."""
    leaders = remote.cluster.by_leader(appends)
    own = leaders.pop(store.database_id, [])
    found = remote.append(leaders) if leaders else []
    if own or report:
        work = partial(_append, remote.writer, own, report)
        found += write_in_time(
            store,
            remote.cluster,
            remote.writer.transactional_id,
            work,
            wakes_readers=True,
            retry_timeout_ms=remote.retry_timeout_ms,
        )
    # In the order of the call: several of one partition stand in theirs already.
    places: dict[int, list[Appended]] = {}
    for place in found:
        places.setdefault(place.partition_id, []).append(place)
    return [places[item.partition_id].pop(0) for item in appends]


def _append(
    writer: TransactionWriter, appends: Sequence[Append], report: bool, connection: Connection
) -> list[Appended]:
    # The row's lock: a decision waits for what is being appended, or this append finds it taken.
    locked = rows.lock_row(connection, writer.transactional_id)
    check_open(locked.row, writer.transactional_id, writer.transaction, now_ms=locked.now_ms)
    has_reported = rows.has_reported(connection, writer)
    appended: list[Appended] = []
    if appends:
        work = LockedPartitions.lock(connection, producers_of(appends))
        appended = place_all(work, appends, coordinated=True)
        check_unreported(writer, is_new=not all(place.is_duplicate for place in appended), has_reported=has_reported)
        work.save()
        begun = {place.partition_id for place in appended if place.begins_transaction}
        if begun:
            rows.add_writer_partitions(connection, writer, begun)
            rows.touch_row(connection, writer.transactional_id, locked.now_ms)
    if report and not has_reported:
        rows.set_reported(connection, writer)
    return appended
