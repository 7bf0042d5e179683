"""The coordinator's protocol, pure: the states of a transaction, the row of a transactional id, what requests change.

Each function of a request is one table of Kafka's TransactionCoordinator (protocol TV2, KIP-890) and looks at its
conditions in Kafka's order. It returns the new row, or raises what the client is told. Where Kafka lets a
client come back until an earlier step is done, the caller does that step within the same database transaction. Whether
a move is one of the table's is checked once, where the row is written (`check_change`). The README's
diagram is drawn from `PREVIOUS_STATES`; what a starting producer finds is in `initialization`.
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
    ProducerFenced,
    TransactionAbortable,
)
from txnstore.model import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, ProducerIdentity

AllocateProducerId = Callable[[], int]
#: Epochs have 16 bits. From this one on a producer gets a new producer id at the next chance; the one above it is
#: only used to fence (TransactionMetadata.isProducerEpochExhausted).
EPOCH_EXHAUSTED: Final = 2**15 - 2
#: The last epoch of records and markers. A prepared transaction may be taken over as often as processes die: those who
#: take it over have the epochs above it, of which there are always more, and write nothing until it has ended.
EPOCH_MAX: Final = 2**15 - 1
#: A transaction with this timeout is never aborted for its age: it takes part in two-phase commit (KIP-939).
TIMEOUT_NEVER_MS: Final = 2**31 - 1
#: Why one is that had a timeout: for how long it was open, and its timeout.
TIMEOUT_DETAIL: Final = "it was open for {} ms, longer than its timeout of {} ms"
#: Why one is that somebody has ended by hand.
ADMINISTRATOR_DETAIL: Final = "by an administrator"
#: Of a transaction that has not begun.
NO_START_MS: Final = -1


# --- the states, and the row ------------------------------------------------------------------------------------------


class TransactionState(enum.IntEnum):
    """Where the transaction of a transactional id stands; Kafka's numbers, as stored."""

    EMPTY = 0
    """No transaction was begun since the producer was initialised."""

    ONGOING = 1
    """It is open: something was written."""

    PREPARE_COMMIT = 2
    """Decided: it commits, whatever crashes. Kafka says "prepare"; nobody votes any more."""

    PREPARE_ABORT = 3
    """Decided: it aborts, whatever crashes."""

    COMPLETE_COMMIT = 4
    """Every partition has its COMMIT marker."""

    COMPLETE_ABORT = 5
    """Every partition has its ABORT marker."""

    DEAD = 6
    """The transactional id has expired; its row is deleted in the same moment, so this is never stored there."""

    PREPARE_EPOCH_FENCE = 7
    """The epoch is being raised to abort it from outside; a step on the way, never stored."""

    @property
    def kafka_name(self) -> str:
        """The name that DescribeTransactions prints: CompleteCommit."""
        return "".join(word.capitalize() for word in self.name.split("_"))


_S = TransactionState
#: The states that each state may follow. What is not here is a defect of ours.
PREVIOUS_STATES: Final[Mapping[TransactionState, frozenset[TransactionState]]] = MappingProxyType(
    {
        _S.EMPTY: frozenset({_S.EMPTY, _S.COMPLETE_COMMIT, _S.COMPLETE_ABORT}),
        _S.ONGOING: frozenset({_S.ONGOING, _S.EMPTY, _S.COMPLETE_COMMIT, _S.COMPLETE_ABORT}),
        _S.PREPARE_COMMIT: frozenset({_S.ONGOING}),
        # The last three: a producer aborts a transaction in which nothing was written (KAFKA-18401).
        _S.PREPARE_ABORT: frozenset(
            {_S.ONGOING, _S.PREPARE_EPOCH_FENCE, _S.EMPTY, _S.COMPLETE_COMMIT, _S.COMPLETE_ABORT}
        ),
        _S.COMPLETE_COMMIT: frozenset({_S.PREPARE_COMMIT}),
        _S.COMPLETE_ABORT: frozenset({_S.PREPARE_ABORT}),
        _S.DEAD: frozenset({_S.EMPTY, _S.COMPLETE_ABORT, _S.COMPLETE_COMMIT}),
        _S.PREPARE_EPOCH_FENCE: frozenset({_S.ONGOING}),
    }
)
#: Decided, but not every marker is written: new work waits, it is not wrong.
DECIDED: Final = frozenset({_S.PREPARE_COMMIT, _S.PREPARE_ABORT})
#: Nothing is open: a new transaction may begin.
AT_REST: Final = frozenset({_S.EMPTY, _S.COMPLETE_COMMIT, _S.COMPLETE_ABORT})
#: A transactional id in one of these may be forgotten.
EXPIRABLE: Final = AT_REST
#: What is written in the coordinator's row; the others are steps on the way.
STORED: Final = frozenset(_S) - {_S.DEAD, _S.PREPARE_EPOCH_FENCE}


class IllegalTransition(AssertionError):
    """A transaction was about to make a move that the table does not have: a defect of ours, never of a caller."""


def check_transition(before: TransactionState, after: TransactionState) -> None:
    """Return if the table has the move.

    Raises:
        IllegalTransition: it has not.
    """
    if before not in PREVIOUS_STATES[after]:
        raise IllegalTransition(f"{before.kafka_name} -> {after.kafka_name}")


class FenceReason(enum.StrEnum):
    """Why the epoch was raised by somebody else than the producer."""

    TIMEOUT = "timeout"
    INIT = "init"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class TransactionMetadata:
    """The coordinator's row of one transactional id."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    state: TransactionState
    last_update_ms: int
    previous_producer_id: int = NO_PRODUCER_ID
    next_producer_id: int = NO_PRODUCER_ID
    last_producer_epoch: int = NO_PRODUCER_EPOCH
    start_ms: int = NO_START_MS
    transaction_number: int = 0
    begin_epoch: int = NO_PRODUCER_EPOCH
    fence_reason: FenceReason | None = None
    fence_detail: str | None = None

    @property
    def identity(self) -> ProducerIdentity:
        """The producer that may write now."""
        return ProducerIdentity(self.producer_id, self.producer_epoch)

    @property
    def begin_identity(self) -> ProducerIdentity:
        """The producer that wrote the records of the open or decided transaction."""
        return ProducerIdentity(self.producer_id, self.begin_epoch)

    @property
    def next_identity(self) -> ProducerIdentity:
        """The producer that may write once a decided transaction is complete; else the one that may write now."""
        if self.next_producer_id == NO_PRODUCER_ID:
            return self.identity
        return ProducerIdentity(self.next_producer_id, 0)

    @property
    def marker_identity(self) -> ProducerIdentity:
        """The producer of the markers of a decided transaction: their epoch is above that of its records."""
        return ProducerIdentity(self.producer_id, min(self.producer_epoch, EPOCH_MAX))

    @property
    def epoch_exhausted(self) -> bool:
        """Whether the producer id has no epoch left to give out."""
        return self.producer_epoch >= EPOCH_EXHAUSTED

    @property
    def deadline_ms(self) -> int | None:
        """When the transaction is aborted for its age; None if it is not."""
        return deadline_of(self.state, self.start_ms, self.timeout_ms)

    def is_repetition(self, requested: ProducerIdentity) -> bool:
        """Return whether `requested` is the identity before the last EndTxn, whose answer may be lost (KIP-890)."""
        if requested.producer_id == self.producer_id:
            return self.producer_epoch == requested.epoch + 1
        return self.is_rotated_from(requested)

    def is_rotated_from(self, requested: ProducerIdentity) -> bool:
        """Return whether the last EndTxn replaced the exhausted producer id of `requested` by a new one."""
        return (
            requested.producer_id == self.previous_producer_id
            and self.previous_producer_id != NO_PRODUCER_ID
            and requested.epoch >= EPOCH_EXHAUSTED
            # Of those who may have had the last epochs, each was fenced by the next one.
            and self.last_producer_epoch in (requested.epoch, NO_PRODUCER_EPOCH)
            and self.producer_epoch == 0
        )


def deadline_of(state: int, start_ms: int, timeout_ms: int) -> int | None:
    """Return when a transaction with these numbers in its row is aborted for its age; None if it is not."""
    return start_ms + timeout_ms if state == TransactionState.ONGOING and timeout_ms != TIMEOUT_NEVER_MS else None


def check_change(before: TransactionMetadata | None, after: TransactionMetadata) -> None:
    """Assert what Kafka's completeTransitionTo asserts; a failure is a defect of ours.

    Raises:
        AssertionError: the change breaks one of the invariants.
    """
    assert after.state in STORED, f"{after.state.kafka_name} is never stored"
    assert after.producer_epoch >= NO_PRODUCER_EPOCH, f"epoch {after.producer_epoch}"
    # A producer that takes over a prepared transaction has any epoch: see EPOCH_MAX.
    assert after.producer_epoch <= EPOCH_MAX or after.state not in AT_REST, f"epoch {after.producer_epoch}"
    if before is None:
        assert after.state is TransactionState.EMPTY, f"a new transactional id is {after.state.kafka_name}"
        return
    check_transition(before.state, after.state)
    _CHECKS[after.state](before, after)


def _check_empty(before: TransactionMetadata, after: TransactionMetadata) -> None:
    assert after.start_ms == NO_START_MS
    assert after.begin_epoch == NO_PRODUCER_EPOCH
    if after.producer_id == before.producer_id:
        assert after.producer_epoch - before.producer_epoch in (0, 1)
    else:
        assert after.producer_epoch == 0


def _check_ongoing(before: TransactionMetadata, after: TransactionMetadata) -> None:
    assert after.producer_id == before.producer_id
    assert after.timeout_ms == before.timeout_ms
    assert after.start_ms != NO_START_MS
    assert NO_PRODUCER_EPOCH < after.begin_epoch < EPOCH_MAX, "no marker could have an epoch above it"
    if before.state is TransactionState.ONGOING:
        assert after.begin_epoch == before.begin_epoch
        # Only a producer that takes over a prepared transaction raises the epoch of an open one (KIP-939).
        assert after.producer_epoch - before.producer_epoch in (0, 1)


def _check_decided(before: TransactionMetadata, after: TransactionMetadata) -> None:
    assert after.producer_id == before.producer_id
    assert after.producer_epoch == before.producer_epoch + 1
    assert after.begin_epoch < after.marker_identity.epoch, "a marker's epoch is above that of its records"
    # A fenced producer has nothing to ask for again; at the last epochs `last_producer_epoch` tells several apart.
    repeatable = after.fence_reason is None or before.producer_epoch >= EPOCH_MAX
    assert after.last_producer_epoch == (before.producer_epoch if repeatable else NO_PRODUCER_EPOCH)
    if before.state not in AT_REST:
        assert after.start_ms == before.start_ms
        assert after.begin_epoch == before.begin_epoch


def _check_complete(before: TransactionMetadata, after: TransactionMetadata) -> None:
    assert after.start_ms != NO_START_MS
    assert after.start_ms == before.start_ms
    if before.next_producer_id == NO_PRODUCER_ID and after.producer_id == before.producer_id:
        assert after.identity == before.identity
    else:
        # Where there was none to come, it is one that was allocated just now.
        assert before.next_producer_id in (NO_PRODUCER_ID, after.producer_id)
        assert after.producer_epoch == 0
        assert after.previous_producer_id == before.producer_id


_CHECKS: Final = {
    TransactionState.EMPTY: _check_empty,
    TransactionState.ONGOING: _check_ongoing,
    TransactionState.PREPARE_COMMIT: _check_decided,
    TransactionState.PREPARE_ABORT: _check_decided,
    TransactionState.COMPLETE_COMMIT: _check_complete,
    TransactionState.COMPLETE_ABORT: _check_complete,
}


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
        # A commit that comes after somebody else's abort lost the race (KAFKA-20785), whether or not its markers are
        # written yet: Kafka lets such a commit wait in PrepareAbort for a moment, then answers it in CompleteAbort.
        _S.PREPARE_ABORT: (_A.WAIT, _A.FENCED, _A.FENCED, _A.FENCED),
        _S.PREPARE_COMMIT: (_A.WRONG_STATE, _A.FENCED, _A.WAIT, _A.FENCED),
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
    """Return what an EndTxn of `producer` does, and the new row (decided, or unchanged for ANSWER).

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
        raise fenced(known, producer)
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


def complete(
    row: TransactionMetadata, *, now_ms: int, outrun_allocate: AllocateProducerId | None = None
) -> TransactionMetadata:
    """Return the row of a decided transaction once all of its markers are written.

    With `outrun_allocate` its producer id is given up: epochs of it are in use that this row has not given out.
    """
    assert row.state in DECIDED, row.state
    after = _S.COMPLETE_COMMIT if row.state is _S.PREPARE_COMMIT else _S.COMPLETE_ABORT
    finished = replace(
        row, state=after, last_update_ms=now_ms, next_producer_id=NO_PRODUCER_ID, begin_epoch=NO_PRODUCER_EPOCH
    )
    if row.next_producer_id != NO_PRODUCER_ID:
        new_id = row.next_producer_id
    elif outrun_allocate is not None:
        new_id = outrun_allocate()
        # Of the old one nobody is told that a request of the last epochs is a repetition: see `is_rotated_from`.
        finished = replace(finished, last_producer_epoch=row.producer_epoch - 1)
    else:
        return finished
    return replace(finished, producer_id=new_id, previous_producer_id=row.producer_id, producer_epoch=0)


def _decide(
    row: TransactionMetadata,
    decided: TransactionState,
    *,
    now_ms: int,
    allocate: AllocateProducerId,
    fence_reason: FenceReason | None = None,
    fence_detail: str | None = None,
) -> TransactionMetadata:
    """Return the row with the decision: the epoch is above that of the records, and the next producer is known.

    With a reason its producer is fenced, whose requests then repeat nothing.
    """
    is_open = row.state is _S.ONGOING
    is_told_apart = fence_reason is None or row.producer_epoch >= EPOCH_MAX
    return replace(
        row,
        state=decided,
        producer_epoch=row.producer_epoch + 1,
        last_producer_epoch=row.producer_epoch if is_told_apart else NO_PRODUCER_EPOCH,
        next_producer_id=allocate() if row.epoch_exhausted else NO_PRODUCER_ID,
        start_ms=row.start_ms if is_open else now_ms,
        begin_epoch=row.begin_epoch if is_open else NO_PRODUCER_EPOCH,
        last_update_ms=now_ms,
        fence_reason=fence_reason,
        fence_detail=fence_detail,
    )


# --- from outside: the reaper, an administrator, expiry --------------------------------------------------------------


def has_timed_out(row: TransactionMetadata, now_ms: int) -> bool:
    """Return whether the transaction is open for longer than its timeout."""
    return row.deadline_ms is not None and row.deadline_ms < now_ms


def timeout_detail(row: TransactionMetadata, now_ms: int) -> str:
    """Return for people why a transaction that has timed out is aborted."""
    return TIMEOUT_DETAIL.format(now_ms - row.start_ms, row.timeout_ms)


def fence_and_abort(
    row: TransactionMetadata, reason: FenceReason, detail: str, *, now_ms: int, allocate: AllocateProducerId
) -> TransactionMetadata:
    """Return the row of an open transaction that somebody else than its producer aborts.

    The epoch goes up (KAFKA-6119) by one (KAFKA-19367), or the producer id is replaced if it has none left
    (KAFKA-20090); the old producer's requests do not repeat anything.
    """
    # Of all that may become PREPARE_ABORT, only what is open is aborted from outside: Kafka's PREPARE_EPOCH_FENCE.
    assert row.state in PREVIOUS_STATES[_S.PREPARE_EPOCH_FENCE], row.state
    return _decide(row, _S.PREPARE_ABORT, now_ms=now_ms, allocate=allocate, fence_reason=reason, fence_detail=detail)


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
    raise fenced(row, producer) if producer.producer_id == row.producer_id else _wrong_mapping(row, producer)


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


def fenced(row: TransactionMetadata, producer: ProducerIdentity) -> ProducerFenced:
    """Return the error of a producer that a newer one has replaced, or of which the store does not know yet."""
    if (row.producer_id, row.producer_epoch) < (producer.producer_id, producer.epoch) and producer.epoch <= EPOCH_MAX:
        # Nobody was given this epoch, or producer id, by what is here.
        why = "was an older state restored, or did a standby take over without the last commits?"
        now = f"this database knows only producer {row.identity}: {why}"
    else:
        now = f"it is {row.identity} now{f' ({row.fence_detail})' if row.fence_detail else ''}"
    return ProducerFenced(f"producer {producer} of {row.transactional_id[:80]!r} is fenced: {now}")


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
