"""The endings of a producer's transactions: a block commits what it has begun or aborts it, and closing aborts it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from txnstore.backoff import Backoff
from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.producer.state import (
    IN_TRANSACTION,
    INTERRUPTED_SECONDS,
    TransactionCall,
    TransactionStage,
    is_closed,
)
from txnstore.deadline import Deadline

# A producer without transactions does without what they take.
if TYPE_CHECKING:
    from txnstore.clients.producer.progress import TransactionProgress
    from txnstore.clients.producer.transactions import ProducerTransactions

_log = logging.getLogger(__name__)


def abort_after(
    error: BaseException, abort: Callable[[float], None], transactions: ProducerTransactions, timeout_seconds: float
) -> None:
    """Abort what a block has begun because of `error`, which stays the one to be raised."""
    if not transactions.is_open:
        if transactions.progress.stage is TransactionStage.PREPARED:
            error.add_note("The transaction is prepared, and stays open until complete_transaction() ends it")
        return
    if not isinstance(error, Exception):
        timeout_seconds = min(timeout_seconds, INTERRUPTED_SECONDS)
    try:
        abort(timeout_seconds)
    except Exception as aborting:  # noqa: BLE001 - what a callback raised, too: the block's own error tells more
        if is_closed(aborting):
            return
        if transactions.progress.stage is not TransactionStage.READY:
            error.add_note(f"The transaction could not be aborted either: {aborting}")
        elif transactions.progress.last is TransactionCall.COMMIT:
            error.add_note("The transaction was not aborted: the block has asked for its commit itself")
        else:
            error.add_note(f"The transaction was aborted; meanwhile this was raised as well: {aborting!r}")


def check_committed(progress: TransactionProgress) -> None:
    """Let a block be that has committed its transaction itself: who repeats it after an error would write it twice.

    Raises:
        KafkaException: `_STATE`: it has aborted it itself.
    """
    if progress.last is not TransactionCall.COMMIT:
        reason = "the block has aborted its transaction itself, so that nothing of it is committed"
        raise KafkaException(KafkaError(KafkaError._STATE, reason)) from None


def commit_block(
    transactions: ProducerTransactions,
    commit: Callable[..., None],
    abort: Callable[[float], None],
    timeout_seconds: float,
) -> None:
    """Commit what a block has begun, and ask again until the time is up; what cannot be committed is aborted.

    Raises:
        KafkaException: see `Producer.transaction`.
    """
    progress, deadline = transactions.progress, Deadline(timeout_seconds)
    has_ended = progress.stage is TransactionStage.READY
    _end_own_abort(abort, transactions, timeout_seconds)
    # Of a commit that the block has begun itself, and whose time was up.
    begun = progress.writers
    backoff: Backoff | None = None
    while True:
        try:
            if backoff is not None:
                time.sleep(min(max(0.0, backoff.not_before_seconds - time.monotonic()), deadline.left_seconds()))
            commit(deadline.left_seconds(), **({} if begun is None else {"writers": begun}))
        except KafkaException as error:
            kafka_error: KafkaError = error.args[0]
            if has_ended and kafka_error.code() == KafkaError._STATE:
                check_committed(progress)
                return
            if kafka_error.txn_requires_abort():
                abort_after(error, abort, transactions, timeout_seconds)
            elif kafka_error.retriable() and deadline.left_seconds() > 0:
                if kafka_error.code() != KafkaError._TIMED_OUT:
                    # What was refused at once, for another call that is being made, would be again.
                    backoff = backoff or progress.sender.thread.backoff.another()
                    backoff.back_off()
                continue
            raise
        except BaseException as error:
            if progress.stage in {IN_TRANSACTION, TransactionStage.ABORTABLE_ERROR}:
                # Interrupted, or out of memory, before the commit was asked for.
                abort_after(error, abort, transactions, timeout_seconds)
            raise
        return


def _end_own_abort(abort: Callable[[float], None], transactions: ProducerTransactions, timeout_seconds: float) -> None:
    """Wait for an abort that a block has begun and not waited for, which leaves nothing to be committed."""
    if transactions.progress.current is not TransactionCall.ABORT:
        return
    try:
        check_committed(transactions.progress)
    except KafkaException as error:
        abort_after(error, abort, transactions, timeout_seconds)
        raise


def finish_or_leave(transactions: ProducerTransactions, timeout_seconds: float, errors: list[Exception]) -> None:
    """Abort what is open as its producer is closed, or let a commit or abort end that its caller has not waited for.

    What a callback raises though the transaction has ended is put into `errors`.
    """
    try:
        transactions.finish(timeout_seconds)
    except Exception as error:  # noqa: BLE001 - it is logged, or raised in the end
        has_ended = transactions.progress.stage is TransactionStage.READY and not transactions.is_open
        if has_ended and not is_closed(error):
            errors.append(error)
            return
        name = transactions.transactional_id[:80]
        fields = {"event": "transaction_left", "transactional_id": name}
        told = error.args[0].str() if isinstance(error, KafkaException) else error
        _log.warning("the transaction of %s was left for recovery: %s", name, told, extra=fields)
