"""The state machine of a transactional producer as its caller sees it, as tables, and what errors do to it.

The names of the states are librdkafka's.  "Not acked" is what was done in the background after the call that asked for
it had timed out: the same call has to be made again to take the answer.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from txnstore.clients.model.errors import KafkaError, kafka_error_of
from txnstore.errors import (
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidTransactionState,
    OutcomeForgotten,
    PermissionDenied,
    ProducerFenced,
    StoreCopied,
    TransactionalIdAuthorizationFailed,
    TransactionCoordinatorFenced,
    TxnStoreError,
)

#: Why two connections are refused of which one is to SQLite.
SQLITE_HOLDS: Final = (
    "a connection to the SQLite file of the log and one to another database cannot be enlisted together: the first"
    " holds the file's only write lock, and the second has to be made known in it before it may vote; enlist one of"
    " them, or write to the outbox in the SQLite file"
)
#: Why no other database takes part: G7, of a transaction whose producer has died.
NEVER_TIMES_OUT: Final = (
    "a producer with transaction.two.phase.commit.enable cannot enlist a connection to another database: its"
    " transactions never time out, so what is prepared there would keep its locks for ever if the producer died; use a"
    " producer without it, or write to an outbox in that database"
)
#: How long an interrupted block waits for its abort, and an interrupted `close` for its thread: Ctrl-C is to be felt.
INTERRUPTED_SECONDS: Final = 0.5
CLOSED_TEXT: Final = "Producer has been closed"
NEEDS_TWO_PHASE_COMMIT: Final = "needs transaction.two.phase.commit.enable in the producer's configuration"


class TransactionStage(enum.Enum):
    """Where a transactional producer is; the values are the names in error texts."""

    INIT = "Init"
    WAIT_PRODUCER_ID = "WaitPID"
    READY_NOT_ACKED = "ReadyNotAcked"
    READY = "Ready"
    IN_TRANSACTION = "InTransaction"
    PREPARED = "PreparedTransaction"
    BEGIN_COMMIT = "BeginCommit"
    COMMITTING = "CommittingTransaction"
    COMMIT_NOT_ACKED = "CommitNotAcked"
    BEGIN_ABORT = "BeginAbort"
    ABORTING = "AbortingTransaction"
    ABORT_NOT_ACKED = "AbortedNotAcked"
    ABORTABLE_ERROR = "AbortableError"
    FATAL_ERROR = "FatalError"

    # Enum's own is written in Python, and every call looks its stage up.
    __hash__ = object.__hash__


_S = TransactionStage

#: The stage in which records are taken: it is looked at for each of them, and what an enum holds takes longer to find.
IN_TRANSACTION: Final = _S.IN_TRANSACTION

#: By state: the states that it may be entered from.
ENTERED_FROM: Final[Mapping[TransactionStage, frozenset[TransactionStage]]] = MappingProxyType(
    {
        # Left by an error that nobody foresaw.
        _S.INIT: frozenset({_S.WAIT_PRODUCER_ID}),
        _S.WAIT_PRODUCER_ID: frozenset({_S.INIT}),
        _S.READY_NOT_ACKED: frozenset({_S.WAIT_PRODUCER_ID}),
        # From a transaction: its commit is not waited for.
        _S.READY: frozenset({_S.READY_NOT_ACKED, _S.COMMIT_NOT_ACKED, _S.ABORT_NOT_ACKED, _S.IN_TRANSACTION}),
        _S.IN_TRANSACTION: frozenset({_S.READY}),
        # By itself, or by a producer of the past (KIP-939); or its commit was left before it was asked for.
        _S.PREPARED: frozenset({_S.IN_TRANSACTION, _S.READY_NOT_ACKED, _S.BEGIN_COMMIT}),
        # From a commit that is refused for the sake of some records, and is asked for again without them.
        _S.BEGIN_COMMIT: frozenset({_S.IN_TRANSACTION, _S.PREPARED, _S.COMMITTING}),
        # It may stand from now on: entered right before it is asked for.
        _S.COMMITTING: frozenset({_S.BEGIN_COMMIT}),
        # An empty transaction has nothing that would have to be committed.
        _S.COMMIT_NOT_ACKED: frozenset({_S.BEGIN_COMMIT, _S.COMMITTING}),
        _S.BEGIN_ABORT: frozenset({_S.IN_TRANSACTION, _S.PREPARED, _S.ABORTING, _S.ABORTABLE_ERROR}),
        _S.ABORTING: frozenset({_S.BEGIN_ABORT}),
        _S.ABORT_NOT_ACKED: frozenset({_S.BEGIN_ABORT, _S.ABORTING}),
        # Between two transactions: a commit that was not waited for has failed.
        _S.ABORTABLE_ERROR: frozenset({_S.READY, _S.IN_TRANSACTION, _S.BEGIN_COMMIT, _S.COMMITTING}),
        _S.FATAL_ERROR: frozenset(TransactionStage),
    }
)


class TransactionCall(enum.Enum):
    """The calls of the transactional API; the values are their names."""

    INIT = "init_transactions"
    BEGIN = "begin_transaction"
    SEND_OFFSETS = "send_offsets_to_transaction"
    COMMIT = "commit_transaction"
    ABORT = "abort_transaction"
    ENLIST = "enlist"
    PREPARE = "prepare_transaction"
    COMPLETE = "complete_transaction"
    TOKEN = "transaction_token"  # noqa: S105 - the name of a call

    __hash__ = object.__hash__


_C = TransactionCall

#: By call: the states in which it may begin.
ALLOWED_IN: Final[Mapping[TransactionCall, frozenset[TransactionStage]]] = MappingProxyType(
    {
        _C.INIT: frozenset({_S.INIT}),
        _C.BEGIN: frozenset({_S.READY}),
        _C.SEND_OFFSETS: frozenset({_S.IN_TRANSACTION}),
        _C.TOKEN: frozenset({_S.IN_TRANSACTION}),
        _C.ENLIST: frozenset({_S.IN_TRANSACTION}),
        # Prepared already: it says the same again.
        _C.PREPARE: frozenset({_S.IN_TRANSACTION, _S.PREPARED}),
        # Ready: where nothing was kept, what is remembered is looked at.
        _C.COMPLETE: frozenset({_S.PREPARED, _S.READY}),
        _C.COMMIT: frozenset({_S.IN_TRANSACTION, _S.PREPARED}),
        # Aborting: the last try was refused for a reason that may be gone by now.
        _C.ABORT: frozenset({_S.IN_TRANSACTION, _S.PREPARED, _S.ABORTABLE_ERROR, _S.ABORTING}),
    }
)

#: The calls that go on in the background after their time is up, until they are made again.
RESUMABLE: Final = frozenset({_C.INIT, _C.COMMIT, _C.ABORT})

#: By resumable call: the state in which its work begins, and the one in which its answer waits to be taken.
WORKS_BETWEEN: Final[Mapping[TransactionCall, tuple[TransactionStage, TransactionStage]]] = MappingProxyType(
    {
        _C.INIT: (_S.WAIT_PRODUCER_ID, _S.READY_NOT_ACKED),
        _C.COMMIT: (_S.BEGIN_COMMIT, _S.COMMIT_NOT_ACKED),
        _C.ABORT: (_S.BEGIN_ABORT, _S.ABORT_NOT_ACKED),
    }
)

#: By resumable call: the state in which it is made again if an error that nobody foresaw has ended its work; a commit,
#: of what is prepared.
MADE_AGAIN_IN: Final[Mapping[TransactionCall, TransactionStage]] = MappingProxyType(
    {_C.INIT: _S.INIT, _C.COMMIT: _S.PREPARED, _C.ABORT: _S.ABORTING}
)

#: The states between the calls; in all others a call is not done.
BETWEEN_CALLS: Final = frozenset(
    {_S.INIT, _S.READY, _S.IN_TRANSACTION, _S.PREPARED, _S.ABORTABLE_ERROR, _S.FATAL_ERROR}
)

#: A newer producer has taken over; librdkafka has one code for what Kafka has two for.
FENCED: Final = (ProducerFenced, InvalidProducerEpoch)
#: Fatal whatever was asked for.
_FATAL: Final = (
    InvalidProducerIdMapping,
    OutcomeForgotten,
    StoreCopied,
    TransactionalIdAuthorizationFailed,
    TransactionCoordinatorFenced,
)
#: Fatal where the transaction itself was asked about; for records alone it is abortable.
_FATAL_FOR_CALLS: Final = (InvalidTransactionState, PermissionDenied)


#: Of why a record was not delivered a commit repeats so much.
FAILURE_CHARACTERS_MAX: Final = 300


def failed_delivery(count: int, first_failure: str) -> str:
    """Return what is told where records were not delivered: librdkafka's text, and why the first of them was not."""
    told = f"{count} message(s) failed delivery (see individual delivery reports)"
    return f"{told}: {first_failure[:FAILURE_CHARACTERS_MAX]}"


def transaction_error_of(error: TxnStoreError, call: TransactionCall | None) -> KafkaError:
    """Return the error with its class: `fatal()` (the end of the producer) or `txn_requires_abort()`.

    `call` is what ran into it; None stands for records on their way to the log.  The table is Kafka's, of error
    classes by request, but only a newer producer is a fatal `_FENCED`: a transaction that was aborted for its age, or
    by an administrator, can be aborted here too and started over.
    """
    if isinstance(error, FENCED):
        return KafkaError(KafkaError._FENCED, str(error), fatal=True)
    is_fatal = (
        call is TransactionCall.INIT
        or isinstance(error, _FATAL)
        or (call is not None and isinstance(error, _FATAL_FOR_CALLS))
    )
    return kafka_error_of(error, fatal=is_fatal, retriable=False, txn_requires_abort=not is_fatal)


def is_closed(error: BaseException) -> bool:
    """Return whether this is what a call raises whose producer has been closed."""
    return isinstance(error, RuntimeError) and error.args == (CLOSED_TEXT,)
