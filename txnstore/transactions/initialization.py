"""InitProducerId, pure: what a producer that starts finds, and what becomes of the row of its transactional id.

The rules stand in the order of Kafka's TransactionCoordinator (protocol TV2, KIP-890), as those of `protocol`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from txnstore.errors import (
    ConcurrentTransactions,
    InvalidRequest,
    InvalidTransactionTimeout,
    TransactionalIdAuthorizationFailed,
)
from txnstore.model import NO_PRODUCER_EPOCH, ClientProcess, ProducerIdentity
from txnstore.transactions.protocol import (
    AT_REST,
    DECIDED,
    EPOCH_EXHAUSTED,
    NO_START_MS,
    TIMEOUT_NEVER_MS,
    AllocateProducerId,
    FenceReason,
    TransactionMetadata,
    TransactionState,
    fence_and_abort,
    fenced,
)

_S = TransactionState


@dataclass(frozen=True, slots=True)
class InitRequest:
    """What a producer sends when it starts, and what the store allows."""

    transactional_id: str
    timeout_ms: int
    timeout_max_ms: int
    expected: ProducerIdentity | None = None
    """Who the producer was before, if it only wants a new epoch (KIP-360)."""

    enable_two_phase_commit: bool = False
    keep_prepared: bool = False
    two_phase_commit_allowed: bool = False
    client: ClientProcess | None = None
    """The process that starts, for people who look for it."""

    has_several_databases: bool = False
    """Whether what it writes may live in other databases than the coordinator's row."""

    @property
    def needs_new_producer_id(self) -> bool:
        """Whether nobody else may ever have had the producer id, whatever its epoch.

        The epochs that a row has given out are forgotten with the last changes of its database; where they wrote is in
        the others, which would take the next one who gets them for the one who had them.
        """
        return self.has_several_databases and self.expected is None


class InitAction(enum.Enum):
    """What a producer that starts finds."""

    SAVE = "save"
    """The row is to be written; the producer is the one in it."""

    ANSWER = "answer"
    """A repetition: the producer is the one in the row already."""

    ABORT_FIRST = "abort first"
    """A transaction is open: the returned row fences and aborts it; then ask again."""

    KEEP_ONGOING = "keep ongoing"
    """A prepared transaction stays open; the row has a fresh epoch to end it with (KIP-939)."""


def check_init_request(request: InitRequest) -> None:
    """Refuse a request that is wrong whatever the row says.

    Raises:
        InvalidRequest: the transactional id is empty, half of the expected producer is missing, or keep_prepared comes
            without two-phase commit.
        InvalidTransactionTimeout: the timeout is not a whole number from 1 to transaction.max.timeout.ms.
        TransactionalIdAuthorizationFailed: two-phase commit is not enabled in this store.
    """
    if not isinstance(request.transactional_id, str) or not request.transactional_id:
        raise InvalidRequest("the transactional id is empty")
    if request.expected is not None and min(request.expected.producer_id, request.expected.epoch) < 0:
        raise InvalidRequest("the expected producer needs both a producer id and an epoch; without them it is None")
    if request.keep_prepared and not request.enable_two_phase_commit:
        raise InvalidRequest("keep_prepared needs transaction.two.phase.commit.enable (KIP-939)")
    if request.enable_two_phase_commit:
        if not request.two_phase_commit_allowed:
            raise TransactionalIdAuthorizationFailed
        return
    if type(request.timeout_ms) is not int or not 0 < request.timeout_ms <= request.timeout_max_ms:
        raise InvalidTransactionTimeout(
            f"transaction.timeout.ms is {request.timeout_ms!r}; this store allows 1 to {request.timeout_max_ms}"
            " (transaction.max.timeout.ms)"
        )


def new_transactional_id(request: InitRequest, producer_id: int, now_ms: int) -> TransactionMetadata:
    """Return the row of a transactional id that nobody has used."""
    return TransactionMetadata(
        transactional_id=request.transactional_id,
        producer_id=producer_id,
        producer_epoch=NO_PRODUCER_EPOCH,
        timeout_ms=_timeout_ms(request),
        state=_S.EMPTY,
        last_update_ms=now_ms,
    )


def init_producer_id(
    row: TransactionMetadata, request: InitRequest, *, now_ms: int, allocate: AllocateProducerId
) -> tuple[InitAction, TransactionMetadata]:
    """Return what a starting producer finds, and the row as it is to be written.

    Raises:
        ProducerFenced: the producer is not the one that it expects to be: a newer one has taken over.
        ConcurrentTransactions: a decided transaction is not complete; complete it, then ask again.
    """
    expected = request.expected
    if expected is not None and not _may_be(row, expected):
        raise fenced(row, expected)
    if row.state in DECIDED:
        raise ConcurrentTransactions
    if row.state is _S.ONGOING:
        # Kafka aborts first and refuses then; we let no producer of the past abort the work of the present.
        if expected is not None and expected != row.identity:
            raise fenced(row, expected)
        if request.keep_prepared:
            return InitAction.KEEP_ONGOING, _with_fresh_epoch(row, now_ms)
        detail = "a producer with the same transactional id was initialised"
        return InitAction.ABORT_FIRST, fence_and_abort(row, FenceReason.INIT, detail, now_ms=now_ms, allocate=allocate)
    return _init_at_rest(row, request, now_ms, allocate)


def init_after_abort(
    before: TransactionMetadata, aborted: TransactionMetadata, request: InitRequest, *, allocate: AllocateProducerId
) -> TransactionMetadata:
    """Return the row for a producer whose start has aborted the open transaction of `before`.

    The abort has raised the epoch, or replaced the producer id, already: once is enough (KAFKA-19367).
    """
    fresh = replace(
        aborted,
        state=_S.EMPTY,
        start_ms=NO_START_MS,
        begin_epoch=NO_PRODUCER_EPOCH,
        timeout_ms=_timeout_ms(request),
        last_producer_epoch=before.producer_epoch if request.expected is not None else NO_PRODUCER_EPOCH,
        fence_reason=None,
        fence_detail=None,
    )
    if request.needs_new_producer_id and aborted.producer_id == before.producer_id:
        return _with_new_producer_id(fresh, allocate)
    return fresh


def _init_at_rest(
    row: TransactionMetadata, request: InitRequest, now_ms: int, allocate: AllocateProducerId
) -> tuple[InitAction, TransactionMetadata]:
    assert row.state in AT_REST, row.state
    expected = request.expected
    is_current = expected in (None, row.identity) or row.producer_epoch == NO_PRODUCER_EPOCH
    fresh = replace(
        row,
        state=_S.EMPTY,
        timeout_ms=_timeout_ms(request),
        last_producer_epoch=NO_PRODUCER_EPOCH if expected is None else row.producer_epoch,
        start_ms=NO_START_MS,
        begin_epoch=NO_PRODUCER_EPOCH,
        last_update_ms=now_ms,
        fence_reason=None,
        fence_detail=None,
    )
    is_new = row.producer_epoch == NO_PRODUCER_EPOCH
    if is_current and (row.epoch_exhausted or (request.needs_new_producer_id and not is_new)):
        return InitAction.SAVE, _with_new_producer_id(fresh, allocate)
    if is_current:
        return InitAction.SAVE, replace(fresh, producer_epoch=row.producer_epoch + 1)
    assert expected is not None
    if _is_answered_already(row, expected):
        return InitAction.ANSWER, row
    raise fenced(row, expected)


def _with_new_producer_id(row: TransactionMetadata, allocate: AllocateProducerId) -> TransactionMetadata:
    return replace(row, producer_id=allocate(), previous_producer_id=row.producer_id, producer_epoch=0)


def _may_be(row: TransactionMetadata, expected: ProducerIdentity) -> bool:
    if row.producer_epoch == NO_PRODUCER_EPOCH or expected.producer_id == row.producer_id:
        return True
    return expected.producer_id == row.previous_producer_id and expected.epoch >= EPOCH_EXHAUSTED


def _is_answered_already(row: TransactionMetadata, expected: ProducerIdentity) -> bool:
    """Return whether the same request was answered before and the answer was lost (KIP-360)."""
    if row.fence_reason is not None:
        # That epoch is remembered to tell whom an abort from outside has fenced: see `protocol`.
        return False
    return row.last_producer_epoch != NO_PRODUCER_EPOCH and expected.epoch == row.last_producer_epoch


def _with_fresh_epoch(row: TransactionMetadata, now_ms: int) -> TransactionMetadata:
    return replace(
        row,
        producer_epoch=row.producer_epoch + 1,
        last_producer_epoch=NO_PRODUCER_EPOCH,
        last_update_ms=now_ms,
    )


def _timeout_ms(request: InitRequest) -> int:
    # Without two-phase commit it always ends, if as late as a number of 32 bits can say.
    return TIMEOUT_NEVER_MS if request.enable_two_phase_commit else min(request.timeout_ms, TIMEOUT_NEVER_MS - 1)
