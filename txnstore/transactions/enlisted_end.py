"""This file is the end of a transaction in a database transaction of somebody else's, and how it is found out about.

    store.write(...)                      the coordinator's own way: see `coordinator`
    end_within(connection, request)       here: whoever owns `connection` commits, and the application's rows with it

An answer to that COMMIT may be lost, and nobody can repeat it: its other rows were not ours.  So `resolve_end` asks
what became of it, and sees to it that the answer holds: what is not committed then never will be.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection

from txnstore.db.store import Store
from txnstore.errors import InvalidProducerIdMapping, ProducerFenced
from txnstore.log.append import Append
from txnstore.log.finding import find_appended
from txnstore.model import ProducerIdentity
from txnstore.transactions.coordinator import Ended, recall_commit
from txnstore.transactions.locked import LockedTransaction, SentOffsets
from txnstore.transactions.states import TransactionState


@dataclass(frozen=True, slots=True)
class EndRequest:
    """A commit of a transaction, with everything that was not sent before."""

    transactional_id: str
    producer: ProducerIdentity
    appends: Sequence[Append] = ()
    offsets: Sequence[SentOffsets] = ()
    writers: Collection[int] | None = None


@dataclass(frozen=True, slots=True)
class Resolved:
    """What became of an end whose answer was lost."""

    ended: Ended
    """Who the producer is for its next transaction, and if it was committed, where the records stand."""

    is_committed: bool


def end_within(connection: Connection, request: EndRequest) -> Ended:
    """Commit the transaction with the database transaction that is open on `connection`; its owner commits that.

    A transaction that holds nothing is committed all the same, so that there is a trace of the COMMIT.  The locks of
    the coordinator's row, of the partitions and of the groups are held until then: let nothing else follow.

    Raises:
        TxnStoreError: see `coordinator.end_transaction`; the database transaction has to be rolled back.
    """
    transaction = LockedTransaction.lock(connection, request.transactional_id)
    transaction.begin(request.producer)
    if request.appends:
        transaction.append(request.producer, request.appends)
    for sent in request.offsets:
        transaction.send_offsets(request.producer, sent)
    transaction.end(request.producer, commit=True, writers=request.writers)
    appended = transaction.save("EndTxn")
    return Ended(transaction.known.next_identity, appended)


def resolve_end(store: Store, request: EndRequest, *, retry_timeout_ms: int | None = None) -> Resolved:
    """Return what became of the COMMIT after `end_within`; what had not been committed by now is aborted.

    It waits for the row that the database transaction had locked, so that one is over when it is looked at.  Safe to
    repeat after `OutcomeUnknown`.

    Raises:
        TransactionAbortable: it was not committed, and somebody has aborted it from outside since.
        ProducerFenced, InvalidProducerIdMapping: it was not committed, and a newer producer has taken over.
        OutcomeForgotten: a newer producer has taken over, and nothing is remembered of this one.
    """

    def work(connection: Connection) -> Resolved:
        transaction = LockedTransaction.lock(connection, request.transactional_id)
        row = transaction.row
        is_committed = (
            row is not None
            and row.is_repetition(request.producer)
            and row.state in (TransactionState.PREPARE_COMMIT, TransactionState.COMPLETE_COMMIT)
        )
        # Not committed: the epoch goes up, durably. A COMMIT that SQLite could not sync may otherwise come back after
        # a crash, and one that the server has not seen yet must find nothing to commit.
        transaction.end(request.producer, commit=is_committed)
        transaction.save("EndTxn")
        found = find_appended(connection, request.appends) if is_committed else ()
        return Resolved(Ended(transaction.known.next_identity, found), is_committed)

    try:
        return store.write(work, wakes_readers=True, retry_timeout_ms=retry_timeout_ms)
    except (ProducerFenced, InvalidProducerIdMapping):
        # The newer producer may have come after the COMMIT: the journal knows.
        recall = partial(
            recall_commit,
            transactional_id=request.transactional_id,
            producer=request.producer,
            appends=request.appends,
            is_alone=False,
        )
        ended = store.read(recall, retry_timeout_ms=retry_timeout_ms)
        if ended is None:
            raise
        return Resolved(ended, is_committed=True)
