"""This file is the table from txnstore's errors to Kafka's: what users of the clients see of every error below.

An error that is Kafka's own keeps its code.  The text is always the error's own: it says what to do.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from txnstore import errors
from txnstore.clients.model.kafka_error import KafkaError, KafkaException
from txnstore.errors import ERRORS, TxnStoreError


class ErrorRow(NamedTuple):
    """What an error becomes."""

    code: int
    retriable: bool
    suffix: str = ""
    """Added to the error's text if that does not say it."""


_OUTCOME_UNKNOWN: Final = "the outcome is unknown"

#: The errors that Kafka does not have.
_OWN_ROWS: Final[dict[type[TxnStoreError], ErrorRow]] = {
    errors.StoreUnavailable: ErrorRow(KafkaError._TRANSPORT, retriable=True),
    errors.OutcomeUnknown: ErrorRow(KafkaError._TIMED_OUT, retriable=False, suffix=_OUTCOME_UNKNOWN),
    errors.OutcomeForgotten: ErrorRow(KafkaError._TIMED_OUT, retriable=False, suffix=_OUTCOME_UNKNOWN),
    errors.StoreBusy: ErrorRow(KafkaError._TIMED_OUT, retriable=True),
    errors.StatementTimedOut: ErrorRow(KafkaError._TIMED_OUT, retriable=True),
    errors.WriteConflict: ErrorRow(KafkaError._TIMED_OUT, retriable=True),
    errors.TransactionPoisoned: ErrorRow(KafkaError._TIMED_OUT, retriable=True),
    errors.StoreFull: ErrorRow(KafkaError.KAFKA_STORAGE_ERROR, retriable=False),
    errors.StoreReadOnly: ErrorRow(KafkaError.KAFKA_STORAGE_ERROR, retriable=False),
    errors.StoreDamaged: ErrorRow(KafkaError.KAFKA_STORAGE_ERROR, retriable=False),
    errors.PermissionDenied: ErrorRow(KafkaError.CLUSTER_AUTHORIZATION_FAILED, retriable=False),
    errors.InvalidUrl: ErrorRow(KafkaError._INVALID_ARG, retriable=False),
    errors.SchemaOutdated: ErrorRow(KafkaError.UNSUPPORTED_VERSION, retriable=False),
    errors.SchemaTooNew: ErrorRow(KafkaError.UNSUPPORTED_VERSION, retriable=False),
    errors.ForeignSchema: ErrorRow(KafkaError._INVALID_ARG, retriable=False),
    errors.StoreCopied: ErrorRow(KafkaError._INVALID_ARG, retriable=False),
    errors.WrongCluster: ErrorRow(KafkaError._INVALID_ARG, retriable=False),
    errors.MissingMember: ErrorRow(KafkaError._INVALID_ARG, retriable=False),
    errors.StatementFailed: ErrorRow(KafkaError.UNKNOWN, retriable=False),
    errors.BranchUnfinished: ErrorRow(KafkaError._TIMED_OUT, retriable=True),
    errors.StoreClosed: ErrorRow(KafkaError._DESTROY, retriable=False),
}

#: Every error of txnstore with what it becomes.
ERROR_ROWS: Final[dict[type[TxnStoreError], ErrorRow]] = _OWN_ROWS | {
    error: ErrorRow(error.code, retriable=error.recovery is errors.Recovery.RETRY)
    for error in ERRORS.values()
    if error.kafka_name is not None
}


def kafka_error_of(
    error: TxnStoreError, *, fatal: bool = False, retriable: bool | None = None, txn_requires_abort: bool = False
) -> KafkaError:
    """Return the error as the clients' users see it; its text is kept.

    Args:
        error: what came from below.
        fatal: whether the client is finished by it.
        retriable: whether the user may repeat the call; default: what the table says.
        txn_requires_abort: whether the user's transaction has to be aborted.
    """
    row = _row_of(type(error))
    text = str(error)
    if row.suffix and row.suffix not in text:
        text = f"{text} ({row.suffix})"
    return KafkaError(row.code, text, fatal, row.retriable if retriable is None else retriable, txn_requires_abort)


def kafka_exception_of(
    error: TxnStoreError, *, fatal: bool = False, retriable: bool | None = None, txn_requires_abort: bool = False
) -> KafkaException:
    """Return the exception to raise, with `from error`, in a client's call; arguments as in `kafka_error_of`."""
    kafka_error = kafka_error_of(error, fatal=fatal, retriable=retriable, txn_requires_abort=txn_requires_abort)
    return KafkaException(kafka_error)


def joined_error_of(error: TxnStoreError) -> KafkaError:
    """Return the error of a statement within a database transaction of the caller's, which he has to roll back.

    It is never retriable: not the call is to be repeated, but the whole database transaction.
    """
    if isinstance(error, errors.TransactionPoisoned):
        return KafkaError(KafkaError._STATE, str(error))
    return kafka_error_of(error, retriable=False)


def _row_of(error: type[TxnStoreError]) -> ErrorRow:
    """Return the row of the class, or of its nearest base with one: an error that comes to be later is not lost."""
    for base in error.__mro__:
        row = ERROR_ROWS.get(base)
        if row is not None:
            return row
    return ErrorRow(KafkaError._FAIL, retriable=error.recovery is errors.Recovery.RETRY)
