"""The statements that commit a transaction that is wholly in the client, where the database has no function for it.

They take the locks of `LockedTransaction` in its order and write the same rows. But they do not read first what they
then change: each condition stands in the statement that needs it. If one of them does not hold, everything is rolled
back, and the general way explains, waits or refuses.

Offsets that cannot wait for their commit are the one exception to "wholly in the client": they begin such a
transaction, and the commit after them ends it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from sqlalchemy import Connection, and_, bindparam, case, delete, exists, func, insert, literal, or_, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from txnstore.db.backend import WholeTransaction
from txnstore.db.ddl import Int64
from txnstore.db.schema import (
    finished_transactions,
    producer_states,
    transaction_branches,
    transaction_groups,
    transaction_partitions,
    transaction_writers,
    transactions,
)
from txnstore.db.statements import HotStatement, run_on_driver
from txnstore.db.store import note_change
from txnstore.errors import TxnStoreError
from txnstore.groups.offsets import add_pending_offsets, commit_offsets, finish_pending_offsets, journal_text
from txnstore.log.codec import control_columns
from txnstore.log.partition_rows import insert_batches, lock_heads, number_of_entry, save_heads
from txnstore.model import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, ControlType, OffsetAndMetadata, ProducerIdentity
from txnstore.transactions import rows
from txnstore.transactions.outcome import CommitRequest, Ended
from txnstore.transactions.protocol import AT_REST, EPOCH_EXHAUSTED, TIMEOUT_NEVER_MS, TransactionState
from txnstore.transactions.whole import WholeRequest, whole_request

_SAVEPOINT: Final = "txnstore_whole"
_OF_TRANSACTION: Final = transactions.c.transactional_id == bindparam("of_transactional_id")
_OF_ITS_PRODUCER: Final = and_(
    _OF_TRANSACTION,
    transactions.c.producer_id == bindparam("of_producer_id"),
    transactions.c.producer_epoch == bindparam("of_epoch"),
    transactions.c.producer_epoch < EPOCH_EXHAUSTED,
)
_IS_AT_REST: Final = transactions.c.state.in_([literal(int(state)) for state in sorted(AT_REST)])
_COMMITTED: Final[dict[str, Any]] = {
    "producer_epoch": transactions.c.producer_epoch + 1,
    "last_producer_epoch": transactions.c.producer_epoch,
    "next_producer_id": NO_PRODUCER_ID,
    "state": int(TransactionState.COMPLETE_COMMIT),
    "last_update_ms": bindparam("new_now_ms"),
    "deadline_ms": None,
    "begin_epoch": NO_PRODUCER_EPOCH,
    "fence_reason": None,
    "fence_detail": None,
}
# Locked and changed in one: the last holder of the lock left the row as the condition wants it, or nothing is hit.
_BEGIN_AND_COMMIT: Final = HotStatement(
    update(transactions)
    .where(_OF_ITS_PRODUCER, _IS_AT_REST)
    .values(
        **_COMMITTED,
        start_ms=bindparam("new_now_ms"),
        transaction_number=transactions.c.transaction_number + 1,
    )
)
_BEGIN: Final = HotStatement(
    update(transactions)
    .where(_OF_ITS_PRODUCER, _IS_AT_REST)
    .values(
        state=int(TransactionState.ONGOING),
        start_ms=bindparam("new_now_ms"),
        last_update_ms=bindparam("new_now_ms"),
        deadline_ms=case(
            (
                transactions.c.timeout_ms < TIMEOUT_NEVER_MS,
                bindparam("new_now_ms", type_=Int64) + transactions.c.timeout_ms,
            )
        ),
        transaction_number=transactions.c.transaction_number + 1,
        begin_epoch=transactions.c.producer_epoch,
        fence_reason=None,
        fence_detail=None,
    )
)
_COMMIT_OPEN: Final = HotStatement(
    update(transactions)
    .where(
        _OF_ITS_PRODUCER,
        transactions.c.state == int(TransactionState.ONGOING),
        transactions.c.begin_epoch == transactions.c.producer_epoch,
        func.coalesce(transactions.c.deadline_ms, bindparam("new_now_ms", type_=Int64))
        >= bindparam("new_now_ms", type_=Int64),
    )
    .values(**_COMMITTED)
)
# In statements of their own, which see what the last holder of the row's lock has committed.
_ADD_GROUP: Final = HotStatement(upsert(transaction_groups).on_conflict_do_nothing())
_FORGET_GROUP: Final = HotStatement(
    delete(transaction_groups).where(
        transaction_groups.c.transactional_id == bindparam("of_transactional_id"),
        transaction_groups.c.group_id == bindparam("of_group_id"),
    )
)
_HAS_MORE: Final = HotStatement(
    select(
        or_(
            *[
                exists().where(table.c.transactional_id == bindparam("of_transactional_id"))
                for table in (transaction_groups, transaction_partitions, transaction_writers)
            ],
            # The others were decided with earlier transactions.
            exists().where(
                transaction_branches.c.transactional_id == bindparam("of_transactional_id"),
                transaction_branches.c.outcome.is_(None),
            ),
        )
    )
)
_OF_PRODUCER: Final = (producer_states.c.partition_id == bindparam("of_partition_id")) & (
    producer_states.c.producer_id == bindparam("of_producer_id")
)
# In a statement of its own, after the lock of the head: it sees what the last holder of the lock has committed.
_END_IN_PARTITION: Final = HotStatement(
    update(producer_states)
    .where(
        _OF_PRODUCER,
        producer_states.c.transaction_first_offset.is_(None),
        producer_states.c.coordinator_epoch <= rows.COORDINATOR_EPOCH,
        (producer_states.c.producer_epoch < bindparam("of_epoch"))
        | ((producer_states.c.producer_epoch == bindparam("of_epoch")) & (producer_states.c.recent_batches == "[]")),
    )
    .values(
        producer_epoch=bindparam("new_epoch"),
        recent_batches="[]",
        coordinator_epoch=rows.COORDINATOR_EPOCH,
        last_timestamp_ms=bindparam("new_timestamp_ms"),
    )
)
_KNOW_PRODUCER: Final = HotStatement(upsert(producer_states).on_conflict_do_nothing())
_INSERT_FINISHED: Final = HotStatement(
    insert(finished_transactions).values(
        last_stable_offset=func.coalesce(
            select(func.min(producer_states.c.transaction_first_offset))
            .where(
                producer_states.c.partition_id == bindparam("of_partition_id"),
                producer_states.c.transaction_first_offset >= 0,
            )
            .scalar_subquery(),
            bindparam("of_next_offset"),
        )
    )
)


class UnusualError(Exception):
    """Something about the transaction is unusual: it goes the general way."""


def write_whole(connection: Connection, request: WholeRequest) -> list[int]:
    """Write all of the transaction, and return for each batch its base offset and its partition's log start offset.

    Raises:
        UnusualError: what was written is to be rolled back.
    """
    if not request.batches.appends:
        # Readers wait for records and markers alone, not for the transaction.
        note_change(connection)
    producer, now_ms = request.producer, rows.read_now_ms(connection)
    if not request.batches.earliest_ms <= now_ms <= request.batches.latest_ms:
        raise UnusualError
    following = ProducerIdentity(producer.producer_id, producer.epoch + 1)
    _change_transaction(connection, request, now_ms)
    places: list[int] = []
    commit_number: int | None = None
    # Of one group at most: see `WholeRequest.is_usual`.
    committed: dict[str, Mapping[int, OffsetAndMetadata]] = {}
    try:
        if request.batches.appends:
            places, commit_number = _write_partitions(connection, request, following)
        if request.open_group_id is not None:
            committed |= finish_pending_offsets(connection, [request.open_group_id], producer.producer_id, commit=True)
        for sent in request.offsets:
            if request.stays_open:
                add_pending_offsets(connection, sent.committer, sent.offsets, producer)
            else:
                commit_offsets(connection, sent.committer, sent.offsets, producer=producer)
                committed[sent.committer.group_id] = sent.offsets
    except TxnStoreError as error:
        raise UnusualError from error
    rows.journal_row(
        connection,
        request.transactional_id,
        first_state=TransactionState.ONGOING if request.open_group_id is None else TransactionState.PREPARE_COMMIT,
        reason="TxnOffsetCommit" if request.stays_open else "EndTxn",
        entry_id=commit_number,
        sent_offsets=journal_text(committed) if committed else None,
    )
    return places


def end_whole_within(
    connection: Connection, request: CommitRequest, commit_whole: Callable[[WholeTransaction], list[int] | None] | None
) -> Ended | None:
    """Commit the transaction with the database transaction that is open on `connection`; its owner commits that.

    It is `outcome.end_within` on the short way: all of it at once, or nothing, and the owner's rows, which came before,
    stay as they are.  By the database's own function; without one by statements.  None: nothing was changed, for it is
    not a usual one.

    Raises:
        DBAPIError: the database transaction has to be rolled back.
    """
    whole = whole_request(request.transactional_id, request.producer, request.appends, request.offsets, request.writers)
    if whole is None:
        return None
    if commit_whole is not None:
        places = commit_whole(whole.transaction())
        if places is None:
            return None
        note_change(connection, partition_ids=[partition_id for partition_id, _ in whole.batches.partitions])
        return whole.ended(places)
    run_on_driver(connection, f"SAVEPOINT {_SAVEPOINT}")
    try:
        return whole.ended(write_whole(connection, whole))
    except UnusualError:
        run_on_driver(connection, f"ROLLBACK TO {_SAVEPOINT}")
        return None


def _change_transaction(connection: Connection, request: WholeRequest, now_ms: int) -> None:
    """Begin the transaction, commit it, or both, with the groups that it holds offsets of."""
    of = {
        "of_transactional_id": request.transactional_id,
        "of_producer_id": request.producer.producer_id,
        "of_epoch": request.producer.epoch,
        "new_now_ms": now_ms,
    }
    if request.stays_open:
        [sent] = request.offsets
        entry = {"transactional_id": request.transactional_id, "group_id": sent.committer.group_id}
        is_usual = _BEGIN.run(connection, of) and _ADD_GROUP.run(connection, entry)
    elif request.open_group_id is not None:
        this = {"of_transactional_id": request.transactional_id, "of_group_id": request.open_group_id}
        is_usual = (
            _COMMIT_OPEN.run(connection, of)
            and _FORGET_GROUP.run(connection, this)
            and not _HAS_MORE.value(connection, {"of_transactional_id": request.transactional_id})
        )
    else:
        is_usual = _BEGIN_AND_COMMIT.run(connection, of)
    if not is_usual:
        raise UnusualError


def _write_partitions(
    connection: Connection, request: WholeRequest, following: ProducerIdentity
) -> tuple[list[int], int]:
    """Write records and markers; return where the batches stand, and the number of the commit."""
    producer = request.producer
    batch_counts = Counter(item.partition_id for item in request.batches.appends)
    locked = lock_heads(connection, batch_counts)
    commit_number = number_of_entry(connection)
    places: list[int] = []
    placed: list[dict[str, Any]] = []
    finished: list[dict[str, Any]] = []
    # In the order of the partitions.
    appends = iter(request.batches.appends)
    for partition_id, batch_count in batch_counts.items():
        head = locked.heads[partition_id]
        first_offset = head.next_offset
        for _ in range(batch_count):
            places += (head.next_offset, head.log_start_offset)
            placed.append(head.place(next(appends).batch.columns()))
        marker = control_columns(
            ControlType.COMMIT, coordinator_epoch=rows.COORDINATOR_EPOCH, producer=following, timestamp_ms=locked.now_ms
        )
        placed.append(head.place(marker))
        for row in placed[-batch_count - 1 :]:
            row["running_max_timestamp_ms"] = head.running_max_timestamp_ms
        finished.append(
            {
                "partition_id": partition_id,
                "marker_offset": head.next_offset - 1,
                "producer_id": producer.producer_id,
                "producer_epoch": producer.epoch,
                "first_offset": first_offset,
                "outcome": int(ControlType.COMMIT),
                "commit_number": commit_number,
                "of_partition_id": partition_id,
                "of_next_offset": head.next_offset,
            }
        )
    insert_batches(connection, placed)
    save_heads(connection, [locked.heads[partition_id] for partition_id in batch_counts])
    _end_in_partitions(connection, batch_counts, producer, locked.now_ms)
    _INSERT_FINISHED.run_each(connection, finished)
    return places, commit_number


def _end_in_partitions(
    connection: Connection, partition_ids: Collection[int], producer: ProducerIdentity, now_ms: int
) -> None:
    """Let the partitions know the producer by its next epoch."""
    states = [
        {
            "of_partition_id": partition_id,
            "of_producer_id": producer.producer_id,
            "of_epoch": producer.epoch,
            "new_epoch": producer.epoch + 1,
            "new_timestamp_ms": now_ms,
        }
        for partition_id in partition_ids
    ]
    changed_count = _END_IN_PARTITION.run_each(connection, states)
    if changed_count == len(partition_ids):
        return
    new = [
        {
            "partition_id": partition_id,
            "producer_id": producer.producer_id,
            "producer_epoch": producer.epoch + 1,
            "recent_batches": "[]",
            "coordinator_epoch": rows.COORDINATOR_EPOCH,
            "last_timestamp_ms": now_ms,
            "transaction_first_offset": None,
        }
        for partition_id in partition_ids
    ]
    # Where it was changed it is known, and stays as it is. Where it is known and was not changed, something is unusual.
    if changed_count + _KNOW_PRODUCER.run_each(connection, new) != len(partition_ids):
        raise UnusualError
