"""This file is the answer to "did my commit land?", for whoever has only the transactional id and "pid:epoch" left.

Reading alone cannot tell: a COMMIT that seemed to fail may still become durable, on SQLite even after the next
crash. So the epoch is raised first, durably. After that nothing of the old one can happen any more, and what the
coordinator's rows say is final.
"""

from __future__ import annotations

import enum
from functools import partial
from typing import Final

from sqlalchemy import Connection, and_, bindparam, exists, or_, select

from txnstore.db.cluster import Home
from txnstore.db.schema import transaction_log, transactions
from txnstore.db.store import Store
from txnstore.errors import TransactionalIdNotFound
from txnstore.model import ProducerIdentity
from txnstore.transactions import protocol, rows
from txnstore.transactions.completion import complete_if_possible
from txnstore.transactions.metadata import FenceReason, TransactionMetadata
from txnstore.transactions.states import DECIDED, TransactionState
from txnstore.transactions.work import TransactionWork


class Outcome(enum.Enum):
    """How a transaction ended, for good, or that it has not."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    OPEN = "open"
    """Nothing is decided: it may still go either way."""


_OF_PRODUCER: Final = and_(
    transaction_log.c.producer_id == bindparam("of_producer_id"),
    transaction_log.c.producer_epoch == bindparam("of_epoch"),
    transaction_log.c.transactional_id == bindparam("of_transactional_id"),
)
_BEGAN: Final = (
    select(transaction_log.c.transaction_number)
    .where(_OF_PRODUCER)
    .where(transaction_log.c.state == int(TransactionState.ONGOING))
    .order_by(transaction_log.c.entry_id)
    .limit(1)
)
# An identity is given out before it begins anything, and the journal is trimmed from its old end: while it is here,
# what it began would be as well.
_GIVEN_OUT: Final = select(exists().where(_OF_PRODUCER))
_DECISION: Final = (
    select(transaction_log.c.state)
    .where(transaction_log.c.transactional_id == bindparam("of_transactional_id"))
    .where(transaction_log.c.producer_id == bindparam("of_producer_id"))
    .where(transaction_log.c.transaction_number == bindparam("of_number"))
    .where(transaction_log.c.state.in_(sorted(int(state) for state in DECIDED)))
    .order_by(transaction_log.c.entry_id)
    .limit(1)
)


# There is one at most: producer ids are never given out twice. After more changes of it only the journal knows.
_OWNER: Final = select(transactions.c.transactional_id).where(
    or_(
        transactions.c.producer_id == bindparam("of_producer_id"),
        transactions.c.previous_producer_id == bindparam("of_producer_id"),
    )
)
_FORMER_OWNER: Final = (
    select(transaction_log.c.transactional_id)
    .where(transaction_log.c.producer_id == bindparam("of_producer_id"))
    .limit(1)
)


def read_outcome(connection: Connection, producer: ProducerIdentity) -> Outcome:
    """Return how the transaction that `producer` began has ended, or that it has not; changes nothing.

    For whoever has "producer id:epoch" left and nothing else.  OPEN is no promise: the next moment may decide it.

    Raises:
        TransactionalIdNotFound: nothing is remembered of such a producer.
    """
    of = {"of_producer_id": producer.producer_id, "of_epoch": producer.epoch}
    found = connection.execute(_OWNER, of).scalars().first() or connection.execute(_FORMER_OWNER, of).scalars().first()
    if found is None:
        raise _not_remembered(producer, None)
    row = rows.read_row(connection, found).row
    is_current = row is not None and row.identity == producer
    of["of_transactional_id"] = found
    number = connection.execute(_BEGAN, of).scalar_one_or_none()
    if number is None:
        if is_current:
            return Outcome.OPEN
        if connection.execute(_GIVEN_OUT, of).scalar_one():
            return Outcome.ABORTED
        raise _not_remembered(producer, found)
    of["of_number"] = number
    state = connection.execute(_DECISION, of).scalar_one_or_none()
    if state is None:
        return Outcome.OPEN
    return Outcome.COMMITTED if state == TransactionState.PREPARE_COMMIT else Outcome.ABORTED


def _not_remembered(producer: ProducerIdentity, transactional_id: str | None) -> TransactionalIdNotFound:
    whose = "" if transactional_id is None else f" of {transactional_id[:80]!r}"
    return TransactionalIdNotFound(
        f"nothing is remembered of producer {producer}{whose}: it began no transaction, or its journal has been trimmed"
    )


def resolve_outcome(store: Store, transactional_id: str, producer: ProducerIdentity) -> Outcome:
    """Return how the transaction that `producer` began ended; one that is still open is aborted by the question.

    `producer` is fenced: its own process must be gone, or have given up.  The answer does not change any more.

    Raises:
        TransactionalIdNotFound: nothing is remembered of such a producer.
    """
    outcome = store.write(partial(_resolve, transactional_id, producer, store.home), wakes_readers=True)
    complete_if_possible(store, transactional_id)
    return outcome


def _resolve(transactional_id: str, producer: ProducerIdentity, home: Home | None, connection: Connection) -> Outcome:
    transaction = TransactionWork.lock(connection, transactional_id, home)
    row = transaction.row
    if row is not None:
        if row.state in DECIDED:
            transaction.finish()
        elif row.state is TransactionState.ONGOING and _may_end(row, producer):
            transaction.fence_and_abort(FenceReason.INIT, "its outcome was asked for")
        elif row.identity == producer:
            # Nothing began under this epoch, or nothing durable; nothing will.
            transaction.step(protocol.fence_at_rest(row, now_ms=transaction.now_ms, allocate=transaction.allocate))
        transaction.save("outcome")
    of = {"of_transactional_id": transactional_id, "of_producer_id": producer.producer_id, "of_epoch": producer.epoch}
    number = connection.execute(_BEGAN, of).scalar_one_or_none()
    if number is None:
        if (row is not None and row.identity == producer) or connection.execute(_GIVEN_OUT, of).scalar_one():
            return Outcome.ABORTED
        raise _not_remembered(producer, transactional_id)
    state = connection.execute(
        _DECISION,
        {"of_transactional_id": transactional_id, "of_producer_id": producer.producer_id, "of_number": number},
    ).scalar_one()
    return Outcome.COMMITTED if state == TransactionState.PREPARE_COMMIT else Outcome.ABORTED


def _may_end(row: TransactionMetadata, producer: ProducerIdentity) -> bool:
    """Return whether the open transaction is one that the producer began, or took over as it was prepared."""
    return producer.producer_id == row.producer_id and row.begin_epoch <= producer.epoch <= row.producer_epoch
