"""The coordinator's rules, pure: what each request changes, given the row and the time.

Each function is one table of Kafka's TransactionCoordinator (protocol TV2, KIP-890) and looks at its conditions in
Kafka's order. It returns the row as it shall be, or raises what the client is told. Where Kafka lets a client come
back until an earlier step is done, the caller does that step within the same database transaction. Whether a move is
one of the table's is checked once, where the row is written (`states.check_change`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from txnstore.errors import (
    ConcurrentTransactions,
    InvalidProducerIdMapping,
    InvalidRequest,
    InvalidTransactionState,
    InvalidTransactionTimeout,
    ProducerFenced,
    TransactionAbortable,
    TransactionalIdAuthorizationFailed,
)
from txnstore.model import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, ProducerIdentity
from txnstore.transactions.states import (
    AT_REST,
    DECIDED,
    EPOCH_EXHAUSTED,
    EPOCH_MAX,
    EXPIRABLE,
    NO_START_MS,
    PREVIOUS_STATES,
    TIMEOUT_NEVER_MS,
    FenceReason,
    TransactionMetadata,
    TransactionState,
)

AllocateProducerId = Callable[[], int]
_S = TransactionState


# --- InitProducerId --------------------------------------------------------------------------------------------------


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
        InvalidTransactionTimeout: the timeout is no whole number from 1 to transaction.max.timeout.ms.
        TransactionalIdAuthorizationFailed: two-phase commit is not enabled in this store.
    """
    if not isinstance(request.transactional_id, str) or not request.transactional_id:
        raise InvalidRequest("the transactional id is empty")
    if request.expected is not None and min(request.expected.producer_id, request.expected.epoch) < 0:
        raise InvalidRequest("the expected producer has a producer id and an epoch; without either there is None")
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
    """Return what a starting producer finds, and the row as it shall be.

    Raises:
        ProducerFenced: the producer is not the one that it expects to be: a newer one has taken over.
        ConcurrentTransactions: a decided transaction is not complete; complete it, then ask again.
    """
    expected = request.expected
    if expected is not None and not _may_be(row, expected):
        raise _fenced(row, expected)
    if row.state in DECIDED:
        raise ConcurrentTransactions
    if row.state is _S.ONGOING:
        # Kafka aborts first and refuses then; we let no producer of the past abort the work of the present.
        if expected is not None and expected != row.identity:
            raise _fenced(row, expected)
        if request.keep_prepared:
            return InitAction.KEEP_ONGOING, _with_fresh_epoch(row, now_ms)
        detail = "a producer with the same transactional id was initialised"
        return InitAction.ABORT_FIRST, fence_and_abort(row, FenceReason.INIT, detail, now_ms=now_ms, allocate=allocate)
    return _init_at_rest(row, request, now_ms, allocate)


def init_after_abort(
    before: TransactionMetadata, aborted: TransactionMetadata, request: InitRequest
) -> TransactionMetadata:
    """Return the row for a producer whose start has aborted the open transaction of `before`.

    The abort has raised the epoch, or replaced the producer id, already: once is enough (KAFKA-19367).
    """
    return replace(
        aborted,
        state=_S.EMPTY,
        start_ms=NO_START_MS,
        begin_epoch=NO_PRODUCER_EPOCH,
        timeout_ms=_timeout_ms(request),
        last_producer_epoch=before.producer_epoch if request.expected is not None else NO_PRODUCER_EPOCH,
        fence_reason=None,
        fence_detail=None,
    )


def _init_at_rest(
    row: TransactionMetadata, request: InitRequest, now_ms: int, allocate: AllocateProducerId
) -> tuple[InitAction, TransactionMetadata]:
    assert row.state in AT_REST, row.state
    expected = request.expected
    is_current = expected is None or row.producer_epoch in {expected.epoch, NO_PRODUCER_EPOCH}
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
    if is_current and row.epoch_exhausted:
        return InitAction.SAVE, replace(
            fresh, producer_id=allocate(), previous_producer_id=row.producer_id, producer_epoch=0
        )
    if is_current:
        return InitAction.SAVE, replace(fresh, producer_epoch=row.producer_epoch + 1)
    assert expected is not None
    if _is_answered_already(row, expected):
        return InitAction.ANSWER, row
    raise _fenced(row, expected)


def _may_be(row: TransactionMetadata, expected: ProducerIdentity) -> bool:
    if row.producer_epoch == NO_PRODUCER_EPOCH or expected.producer_id == row.producer_id:
        return True
    return expected.producer_id == row.previous_producer_id and expected.epoch >= EPOCH_EXHAUSTED


def _is_answered_already(row: TransactionMetadata, expected: ProducerIdentity) -> bool:
    """Return whether the same request was answered before and the answer was lost (KIP-360)."""
    return row.last_producer_epoch != NO_PRODUCER_EPOCH and expected.epoch == row.last_producer_epoch


def _with_fresh_epoch(row: TransactionMetadata, now_ms: int) -> TransactionMetadata:
    return replace(
        row,
        producer_epoch=min(row.producer_epoch + 1, EPOCH_MAX),
        last_producer_epoch=NO_PRODUCER_EPOCH,
        last_update_ms=now_ms,
    )


def _timeout_ms(request: InitRequest) -> int:
    return TIMEOUT_NEVER_MS if request.enable_two_phase_commit else request.timeout_ms


# --- AddPartitionsToTxn, AddOffsetsToTxn -----------------------------------------------------------------------------


def add_to_transaction(
    row: TransactionMetadata | None, producer: ProducerIdentity, *, now_ms: int, holds_all: bool
) -> TransactionMetadata:
    """Return the row once the producer writes to partitions, or sends offsets of a group; the very row if unchanged.

    `holds_all` says that the transaction has all of these partitions and groups already.

    Raises:
        InvalidProducerIdMapping: the transactional id has expired or belongs to another producer id.
        ProducerFenced: a newer producer has taken over.
        TransactionAbortable: the transaction was aborted for its age or by an administrator, or its time is up.
        ConcurrentTransactions: the last transaction is decided but not complete.
        InvalidTransactionState: the transaction was prepared by a producer before this one (KIP-939).
    """
    known = _check_mapping(row, producer)
    _check_current(known, producer)
    if known.state in DECIDED:
        raise ConcurrentTransactions
    if known.state is _S.ONGOING:
        if known.begin_epoch != producer.epoch:
            # Its records have the epoch of the producer that prepared it; what came now would not be among them.
            raise InvalidTransactionState("a transaction that was prepared before can only be committed or aborted")
        check_in_time(known, now_ms)
        return known if holds_all else replace(known, last_update_ms=now_ms)
    assert known.state in AT_REST, known.state
    return replace(
        known,
        state=_S.ONGOING,
        start_ms=now_ms,
        last_update_ms=now_ms,
        transaction_number=known.transaction_number + 1,
        begin_epoch=known.producer_epoch,
        fence_reason=None,
        fence_detail=None,
    )


# --- EndTxn ----------------------------------------------------------------------------------------------------------


class EndAction(enum.Enum):
    """What an EndTxn does."""

    DECIDE = "decide"
    """The open transaction is decided now."""

    ABORT_EMPTY = "abort empty"
    """Nothing is open: the epoch goes up and nothing else happens (KAFKA-18401)."""

    ANSWER = "answer"
    """A repetition: it is done already, tell the producer who it is now."""

    FENCED = "fenced"
    WRONG_STATE = "wrong state"
    WAIT = "wait"


_A = EndAction


#: By state: what an EndTxn does for (abort, repeated), (abort, current), (commit, repeated), (commit, current).
#: A request is *current* if it has the row's epoch and *repeated* if it has the one before: its answer may be lost.
END_TRANSACTION: Final[Mapping[TransactionState, tuple[EndAction, EndAction, EndAction, EndAction]]] = MappingProxyType(
    {
        _S.EMPTY: (_A.FENCED, _A.ABORT_EMPTY, _A.FENCED, _A.WRONG_STATE),
        _S.ONGOING: (_A.FENCED, _A.DECIDE, _A.FENCED, _A.DECIDE),
        _S.PREPARE_ABORT: (_A.WAIT, _A.FENCED, _A.WRONG_STATE, _A.FENCED),
        _S.PREPARE_COMMIT: (_A.WRONG_STATE, _A.FENCED, _A.WAIT, _A.FENCED),
        # A commit that comes after somebody else's abort lost the race: KAFKA-20785.
        _S.COMPLETE_ABORT: (_A.ANSWER, _A.ABORT_EMPTY, _A.FENCED, _A.WRONG_STATE),
        _S.COMPLETE_COMMIT: (_A.WRONG_STATE, _A.ABORT_EMPTY, _A.ANSWER, _A.WRONG_STATE),
    }
)


def end_transaction(
    row: TransactionMetadata | None,
    producer: ProducerIdentity,
    *,
    commit: bool,
    now_ms: int,
    allocate: AllocateProducerId,
) -> tuple[EndAction, TransactionMetadata]:
    """Return what an EndTxn of `producer` does, and the row as it shall be (decided, or unchanged for ANSWER).

    Raises:
        InvalidProducerIdMapping: the transactional id has expired or belongs to another producer id.
        ProducerFenced: a newer producer has taken over, or the request comes from an older transaction.
        TransactionAbortable: the transaction was aborted for its age or by an administrator, or it is to be committed
            and its time is up.
        InvalidTransactionState: there is nothing to commit, or it has ended the other way.
        ConcurrentTransactions: the same request is decided but not complete; complete it, then ask again.
    """
    known = _check_mapping(row, producer)
    repeated = known.is_repetition(producer)
    if not repeated:
        _check_current(known, producer)
    if known.state not in END_TRANSACTION:
        raise AssertionError(f"{known.state.kafka_name} is never stored")
    action = END_TRANSACTION[known.state][2 * commit + (not repeated)]
    verb = "commit" if commit else "abort"
    if action is _A.FENCED:
        _raise_if_aborted_from_outside(known, producer)
        raise _fenced(known, producer)
    if action is _A.WRONG_STATE:
        raise InvalidTransactionState(
            f"the transaction of {known.transactional_id[:80]!r} cannot {verb}: it is {known.state.kafka_name}"
        )
    if action is _A.WAIT:
        raise ConcurrentTransactions
    if action is _A.ANSWER:
        return action, known
    if commit:
        check_in_time(known, now_ms)
    decided = _S.PREPARE_COMMIT if commit else _S.PREPARE_ABORT
    return action, _decide(known, decided, now_ms=now_ms, allocate=allocate)


def complete(row: TransactionMetadata, *, now_ms: int) -> TransactionMetadata:
    """Return the row of a decided transaction once all of its markers are written."""
    assert row.state in DECIDED, row.state
    after = _S.COMPLETE_COMMIT if row.state is _S.PREPARE_COMMIT else _S.COMPLETE_ABORT
    finished = replace(
        row, state=after, last_update_ms=now_ms, next_producer_id=NO_PRODUCER_ID, begin_epoch=NO_PRODUCER_EPOCH
    )
    if row.next_producer_id == NO_PRODUCER_ID:
        return finished
    return replace(finished, producer_id=row.next_producer_id, previous_producer_id=row.producer_id, producer_epoch=0)


def _decide(
    row: TransactionMetadata, decided: TransactionState, *, now_ms: int, allocate: AllocateProducerId
) -> TransactionMetadata:
    """Return the row with the decision: the epoch is above that of the records, and the next producer is known."""
    is_open = row.state is _S.ONGOING
    return replace(
        row,
        state=decided,
        producer_epoch=min(row.producer_epoch + 1, EPOCH_MAX),
        last_producer_epoch=row.producer_epoch,
        next_producer_id=allocate() if row.epoch_exhausted else NO_PRODUCER_ID,
        start_ms=row.start_ms if is_open else now_ms,
        begin_epoch=row.begin_epoch if is_open else NO_PRODUCER_EPOCH,
        last_update_ms=now_ms,
        fence_reason=None,
        fence_detail=None,
    )


# --- from outside: the reaper, an administrator, expiry --------------------------------------------------------------


def has_timed_out(row: TransactionMetadata, now_ms: int) -> bool:
    """Return whether the transaction is open for longer than its timeout."""
    return row.deadline_ms is not None and row.deadline_ms < now_ms


def timeout_detail(row: TransactionMetadata, now_ms: int) -> str:
    """Return for people why a transaction that has timed out is aborted."""
    return f"it was open for {now_ms - row.start_ms} ms, longer than its timeout of {row.timeout_ms} ms"


def fence_and_abort(
    row: TransactionMetadata, reason: FenceReason, detail: str, *, now_ms: int, allocate: AllocateProducerId
) -> TransactionMetadata:
    """Return the row of an open transaction that somebody else than its producer aborts.

    The epoch goes up (KAFKA-6119) by one (KAFKA-19367), or the producer id is replaced if it has none left
    (KAFKA-20090); the old producer's requests are no repetitions of anything.
    """
    # Of all that may become PREPARE_ABORT, only what is open is aborted from outside: Kafka's PREPARE_EPOCH_FENCE.
    assert row.state in PREVIOUS_STATES[_S.PREPARE_EPOCH_FENCE], row.state
    return replace(
        _decide(row, _S.PREPARE_ABORT, now_ms=now_ms, allocate=allocate),
        last_producer_epoch=NO_PRODUCER_EPOCH,
        fence_reason=reason,
        fence_detail=detail,
    )


def fence_at_rest(row: TransactionMetadata, *, now_ms: int, allocate: AllocateProducerId) -> TransactionMetadata:
    """Return the row of an id without a transaction, under whose present epoch nothing can begin any more."""
    assert row.state in AT_REST, row.state
    fenced = replace(
        row,
        state=_S.EMPTY,
        last_producer_epoch=NO_PRODUCER_EPOCH,
        start_ms=NO_START_MS,
        begin_epoch=NO_PRODUCER_EPOCH,
        last_update_ms=now_ms,
        fence_reason=None,
        fence_detail=None,
    )
    if row.epoch_exhausted:
        return replace(fenced, producer_id=allocate(), previous_producer_id=row.producer_id, producer_epoch=0)
    return replace(fenced, producer_epoch=row.producer_epoch + 1)


def may_expire(row: TransactionMetadata, now_ms: int, expiration_ms: int) -> bool:
    """Return whether the transactional id may be forgotten (transactional.id.expiration.ms)."""
    return row.state in EXPIRABLE and row.last_update_ms <= now_ms - expiration_ms


# --- what all of them share ------------------------------------------------------------------------------------------


def _check_mapping(row: TransactionMetadata | None, producer: ProducerIdentity) -> TransactionMetadata:
    if row is None:
        raise InvalidProducerIdMapping
    if producer.producer_id != row.producer_id and not row.is_rotated_from(producer):
        raise _wrong_mapping(row, producer)
    return row


def _check_current(row: TransactionMetadata, producer: ProducerIdentity) -> None:
    """Refuse a producer that may not write now."""
    if producer == row.identity:
        return
    _raise_if_aborted_from_outside(row, producer)
    raise _fenced(row, producer) if producer.producer_id == row.producer_id else _wrong_mapping(row, producer)


def check_in_time(row: TransactionMetadata, now_ms: int) -> None:
    """Refuse what comes after the deadline, whether or not anybody has aborted the transaction for it yet.

    Kafka leaves that to a reaper (every ten seconds: transaction.abort.timed.out.transaction.cleanup.interval.ms)
    and takes what comes before it; here nothing may depend on who happens to be running.

    Raises:
        TransactionAbortable: the transaction is open for longer than its timeout.
    """
    if has_timed_out(row, now_ms):
        raise _aborted(row, timeout_detail(row, now_ms))


def _raise_if_aborted_from_outside(row: TransactionMetadata, producer: ProducerIdentity) -> None:
    if row.fence_reason in (FenceReason.TIMEOUT, FenceReason.ADMIN) and row.is_repetition(producer):
        raise _aborted(row, row.fence_detail)


def _aborted(row: TransactionMetadata, detail: str | None) -> TransactionAbortable:
    return TransactionAbortable(
        f"the transaction of {row.transactional_id[:80]!r} was aborted: {detail}; abort it here too"
    )


def _fenced(row: TransactionMetadata, producer: ProducerIdentity) -> ProducerFenced:
    why = f" ({row.fence_detail})" if row.fence_detail else ""
    return ProducerFenced(
        f"producer {producer} of {row.transactional_id[:80]!r} is fenced: it is {row.identity} now{why}"
    )


def _wrong_mapping(row: TransactionMetadata, producer: ProducerIdentity) -> InvalidProducerIdMapping:
    return InvalidProducerIdMapping(
        f"producer id {producer.producer_id} is not the one of {row.transactional_id[:80]!r}"
    )


# --- the further writers of a transaction: who may write, and whose records count ------------------------------------


@dataclass(frozen=True, slots=True)
class TransactionWriter:
    """A further writer of a transaction; it can be pickled and holds no credentials."""

    transactional_id: str
    transaction: ProducerIdentity
    """The producer whose transaction it joined."""

    identity: ProducerIdentity
    """What its batches carry: a producer id of its own, and the transaction's epoch."""

    @property
    def writer_id(self) -> int:
        """The number by which the transaction's commit names it."""
        return self.identity.producer_id


def check_open(
    row: TransactionMetadata | None, transactional_id: str, transaction: ProducerIdentity, *, now_ms: int
) -> None:
    """Return if the transaction that `transaction` began is open, and its producer still the one that began it.

    Raises:
        ProducerFenced: it is not: it has ended, was aborted from outside, or a newer producer has come.
        TransactionAbortable: its time is up.
    """
    if row is not None and row.state is TransactionState.ONGOING and row.begin_identity == row.identity == transaction:
        check_in_time(row, now_ms)
        return
    raise ProducerFenced(
        f"the transaction that producer {transaction} of {transactional_id[:80]!r} began is over:"
        f" {_how_it_ended(row, transaction)}; nothing was written, and its writers can write no more"
    )


def check_unreported(writer: TransactionWriter, *, is_new: bool, has_reported: bool) -> None:
    """Return unless a writer goes on that has said that it wrote everything; its last batches may come again.

    Raises:
        InvalidTransactionState: it does.
    """
    if has_reported and is_new:
        raise InvalidTransactionState(
            f"writer {writer.writer_id} of {writer.transactional_id[:80]!r} has reported that it wrote everything;"
            " nothing was appended"
        )


def counted_writers(has_reported: Mapping[int, bool], named: Collection[int] | None) -> frozenset[int]:
    """Return the writers whose records a commit counts: those that are named, by default all that have reported.

    Raises:
        InvalidRequest: one that is named is not in the transaction, or has not reported.
    """
    if named is None:
        return frozenset(writer_id for writer_id, reported in has_reported.items() if reported)
    for writer_id in named:
        if writer_id not in has_reported:
            raise InvalidRequest(f"writer {writer_id} is not in the transaction; nothing was committed")
        if not has_reported[writer_id]:
            raise InvalidRequest(f"writer {writer_id} has not reported that it wrote everything; nothing was committed")
    return frozenset(named)


def _how_it_ended(row: TransactionMetadata | None, transaction: ProducerIdentity) -> str:
    if row is None:
        return "the transactional id is not known, or has expired"
    if row.is_repetition(transaction) and row.fence_detail is not None:
        return f"it was aborted ({row.fence_detail})"
    if row.is_repetition(transaction) and row.state is not TransactionState.EMPTY:
        return f"it is {row.state.kafka_name}"
    if row.identity == transaction:
        return f"it is not open ({row.state.kafka_name})"
    return f"the producer is {row.identity} now"
