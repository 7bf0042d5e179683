"""This file is what follows a decision whose markers are delivered one by one: delivery, then completion.

Each step is one short database transaction and leaves what is missing in the outbox, so whoever comes next goes on
where the last one stopped. Recovery is this same code.
"""

from __future__ import annotations

from functools import partial

from sqlalchemy import Connection

from txnstore.db.store import Store
from txnstore.groups.offsets import finish_pending_offsets
from txnstore.log.append import Appended
from txnstore.log.markers import write_markers
from txnstore.model import ProducerIdentity
from txnstore.transactions import marker_outbox, rows, writer_rows
from txnstore.transactions.ending import markers_of
from txnstore.transactions.states import DECIDED, TransactionState
from txnstore.transactions.work import TransactionWork


def decide_separately(work: TransactionWork, reason: str) -> list[Appended]:
    """Write a decision that `work` has taken, with its markers in the outbox instead of the partitions."""
    decided = work.known
    appended = work.save(reason)
    if decided.state in DECIDED:
        # Read after the save: it may have written to further partitions.
        participants = writer_rows.participants_of(work.connection, decided.transactional_id)
        markers = markers_of(decided, participants, work.counted)
        marker_outbox.queue(work.connection, decided.transactional_id, markers)
    return appended


def complete_decided(store: Store, transactional_id: str) -> ProducerIdentity:
    """Deliver the markers of a decided transaction and complete it; return who its producer is then.

    Nothing happens if there is nothing decided.  May be called by anyone, twice, and by two at once.

    Raises:
        InvalidProducerIdMapping: nobody has used the transactional id, or it has expired.
    """

    def complete(connection: Connection) -> ProducerIdentity:
        # Whatever is missing by now, others may have been here too: the row's lock decides.
        work = TransactionWork.lock(connection, transactional_id)
        work.finish()
        work.save("completion")
        return work.known.identity

    while store.write(partial(_deliver_one, transactional_id), wakes_readers=True):
        pass
    return store.write(complete, wakes_readers=True)


def _deliver_one(transactional_id: str, connection: Connection) -> bool:
    """Write the markers of one partition, or finish one group, and strike it off; False if nothing is left to do."""
    decided = rows.lock_row(connection, transactional_id).row
    if decided is None or decided.state not in DECIDED:
        return False
    markers = marker_outbox.queued(connection, transactional_id)
    if markers:
        partition_id = markers[0].partition_id
        write_markers(connection, [marker for marker in markers if marker.partition_id == partition_id])
        marker_outbox.strike_off(connection, transactional_id, partition_id)
        return True
    for group_id in rows.groups_of(connection, transactional_id):
        commit = decided.state is TransactionState.PREPARE_COMMIT
        finish_pending_offsets(connection, [group_id], decided.producer_id, commit=commit)
        rows.forget_group(connection, transactional_id, group_id)
        return True
    return False
