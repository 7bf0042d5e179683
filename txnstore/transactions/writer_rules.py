"""This file is the rules of a transaction's further writers, pure: who may write, and whose records count."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from txnstore.errors import InvalidRequest, InvalidTransactionState, ProducerFenced
from txnstore.log.append import Appended
from txnstore.model import ProducerIdentity
from txnstore.transactions.metadata import TransactionMetadata
from txnstore.transactions.protocol import check_in_time
from txnstore.transactions.states import TransactionState


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


def check_unreported(writer: TransactionWriter, appended: Iterable[Appended], *, has_reported: bool) -> None:
    """Return unless a writer goes on that has said that it wrote everything; its last batches may come again.

    Raises:
        InvalidTransactionState: it does.
    """
    if has_reported and not all(place.is_duplicate for place in appended):
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
