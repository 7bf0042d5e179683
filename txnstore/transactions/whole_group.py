"""Several transactions of one producer, each wholly in the client, committed by one database transaction.

They stand in the log one after the other, each with its markers and its entry in the journal, as if each had been
committed alone; but the disk is waited for once.  All of them are committed, or none is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from txnstore.db.backend import NoWholeCommits
from txnstore.db.store import Store, note_change
from txnstore.errors import TxnStoreError
from txnstore.log.append import Append
from txnstore.log.partition_rows import lock_heads
from txnstore.model import ProducerIdentity
from txnstore.transactions import rows
from txnstore.transactions.outcome import Ended
from txnstore.transactions.transaction import SentOffsets
from txnstore.transactions.whole import WholeRequest, whole_request
from txnstore.transactions.whole_statements import UnusualError, write_whole


@dataclass(frozen=True, slots=True)
class WholeCommit:
    """One of the transactions: who commits it, and all that it holds."""

    producer: ProducerIdentity
    appends: Sequence[Append]
    offsets: Sequence[SentOffsets]


def commit_group(
    store: Store, transactional_id: str, commits: Sequence[WholeCommit], *, retry_timeout_ms: int | None = None
) -> list[Ended] | None:
    """Commit the transactions in this order; None: nothing was changed, for one of them is not a usual one.

    Raises:
        OutcomeUnknown: the connection broke: all of them may have been committed, or none.
        TxnStoreError: the database is busy or away; nothing was changed.
    """
    wholes = _usual(transactional_id, commits)
    if wholes is None:
        return None
    partition_ids = {number for whole in wholes for number, _ in whole.batches.partitions}

    def work(connection: Connection) -> list[list[int]]:
        # The locks of all of them, in the order in which everybody takes them: the transaction, then heads by id.
        rows.lock_row(connection, transactional_id)
        if partition_ids:
            lock_heads(connection, partition_ids)
        note_change(connection, partition_ids=partition_ids)
        if store.has_commit_function:
            return _call_for_each(connection, store, wholes)
        return [write_whole(connection, whole) for whole in wholes]

    try:
        places = store.write(work, wakes_readers=True, retry_timeout_ms=retry_timeout_ms)
    except UnusualError:
        return None
    except NoWholeCommits:
        store.miss_commit_function()
        return None
    except TxnStoreError as error:
        if error.retriable or error.outcome_unknown:
            raise
        # Which of them is at fault is found one by one.
        return None
    return [whole.ended(own) for whole, own in zip(wholes, places, strict=True)]


def _usual(transactional_id: str, commits: Sequence[WholeCommit]) -> list[WholeRequest] | None:
    wholes: list[WholeRequest] = []
    for commit in commits:
        whole = whole_request(transactional_id, commit.producer, commit.appends, commit.offsets, None)
        if whole is None:
            return None
        wholes.append(whole)
    # Several groups would have to be locked in order.
    is_one_group = len({sent.committer.group_id for commit in commits for sent in commit.offsets}) <= 1
    return wholes if is_one_group else None


def _call_for_each(connection: Connection, store: Store, wholes: Sequence[WholeRequest]) -> list[list[int]]:
    commit = store.backend.commit_whole_in
    assert commit is not None, "who has a function for one has it for several"
    places: list[list[int]] = []
    for whole in wholes:
        own = commit(connection, store.schema, whole.transaction(), store.limits, store.clock)
        if own is None:
            raise UnusualError
        places.append(own)
    return places
