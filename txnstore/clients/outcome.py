"""The outcome of a transaction that an application has prepared, for a caller that remembers only its name."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from txnstore.clients.configuration.configuration import admin_configuration
from txnstore.clients.connection import StoreConnection
from txnstore.clients.model.errors import kafka_exception_of
from txnstore.clients.producer.arguments import prepared_state_of
from txnstore.errors import TxnStoreError
from txnstore.model import ProducerIdentity
from txnstore.transactions.outcome import Outcome, owner_of, read_outcome, resolve_outcome
from txnstore.transactions.tokens import PreparedTxnState

__all__ = ["Outcome", "PreparedTxnState", "outcome"]


def outcome(state: PreparedTxnState | str, configuration: Mapping[str, Any] | str, *, fence: bool = False) -> Outcome:
    """Return whether the transaction that `state` names was committed, was aborted, or is still open.

    Nothing is changed, and nobody is fenced.  COMMITTED and ABORTED are final; OPEN may be something else the next
    moment, because its producer may live: `Producer.init_transactions(keep_prepared_txn=True)` keeps it from that.

    Args:
        state: what `prepare_transaction()` returned, or its text "producer id:epoch".
        configuration: what an `AdminClient` takes, or the database URL.
        fence: make the answer final: what is open is aborted, its producer is fenced, and OPEN is never returned.

    Raises:
        TypeError, ValueError: it is not the state of a transaction, or is the empty one, which names no transaction.
        KafkaException: TRANSACTIONAL_ID_NOT_FOUND: nothing is remembered of such a transaction: it never began, or
            was longer ago than `txnstore.transaction.log.retention.ms`; or what the database answers.
    """
    prepared = prepared_state_of(state)
    if prepared == PreparedTxnState():
        raise ValueError("the state is empty: it names no transaction")
    given = {"bootstrap.servers": configuration} if isinstance(configuration, str) else configuration
    producer = ProducerIdentity(prepared.producer_id, prepared.epoch)
    with contextlib.closing(StoreConnection(admin_configuration((given,), {}))) as connection:
        try:
            cluster = connection.cluster()
            store = cluster.coordinator_of_producer(producer.producer_id)
            if not fence:
                return store.read(lambda opened: read_outcome(opened, producer))
            return resolve_outcome(store, store.read(lambda opened: owner_of(opened, producer)), producer, cluster)
        except TxnStoreError as error:
            raise kafka_exception_of(error) from error
