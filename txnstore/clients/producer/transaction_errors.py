"""This file is what an error of the coordinator means for a transactional producer: abort the transaction, or the end.

Kafka's table of error classes by request, with DESIGN's decision that only a newer producer is fatal `_FENCED`: a
transaction that was aborted for its age, or by an administrator, can be aborted here too and started over.
"""

from __future__ import annotations

from typing import Final

from txnstore.clients.model.errors import KafkaError, kafka_error_of
from txnstore.clients.producer.transaction_states import TransactionCall
from txnstore.errors import (
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidTransactionState,
    OutcomeForgotten,
    PermissionDenied,
    ProducerFenced,
    TransactionalIdAuthorizationFailed,
    TransactionCoordinatorFenced,
    TxnStoreError,
)

#: A newer producer has taken over; librdkafka has one code for what Kafka has two for.
FENCED: Final = (ProducerFenced, InvalidProducerEpoch)
#: Fatal whatever was asked for.
_FATAL: Final = (
    InvalidProducerIdMapping,
    OutcomeForgotten,
    TransactionalIdAuthorizationFailed,
    TransactionCoordinatorFenced,
)
#: Fatal where the transaction itself was asked about; for records alone it is abortable.
_FATAL_FOR_CALLS: Final = (InvalidTransactionState, PermissionDenied)


def transaction_error_of(error: TxnStoreError, call: TransactionCall | None) -> KafkaError:
    """Return the error with its class: `fatal()` or `txn_requires_abort()`.

    `call` is what ran into it; None stands for records on their way to the log.
    """
    if isinstance(error, FENCED):
        return KafkaError(KafkaError._FENCED, str(error), fatal=True)
    is_fatal = (
        call is TransactionCall.INIT
        or isinstance(error, _FATAL)
        or (call is not None and isinstance(error, _FATAL_FOR_CALLS))
    )
    return kafka_error_of(error, fatal=is_fatal, retriable=False, txn_requires_abort=not is_fatal)
