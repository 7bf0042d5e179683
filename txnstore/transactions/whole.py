"""Transactions that are wholly in the client: what of them can be committed at once.

Everything that the client knows is asked here, and everything that the database knows is asked by what writes it: a
function of the database (`db.postgresql.commit_function`) or statements (`whole_statements`). What is unusual to
either goes the general way, through `LockedTransaction`, which alone waits, explains and refuses.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from txnstore.db.backend import WholeTransaction
from txnstore.groups.offsets import are_usual, group_of, numbers_of
from txnstore.log.append import Append, WholeAppend
from txnstore.log.codec import control_columns
from txnstore.model import ControlType, ProducerIdentity
from txnstore.transactions.outcome import Ended
from txnstore.transactions.rows import COORDINATOR_EPOCH
from txnstore.transactions.transaction import SentOffsets


class WholeRequest:
    """A commit that brings everything along."""

    def __init__(
        self,
        transactional_id: str,
        producer: ProducerIdentity,
        appends: Sequence[Append],
        offsets: Sequence[SentOffsets],
        *,
        open_group_id: str | None = None,
        stays_open: bool = False,
    ) -> None:
        """Take the request; nothing is checked yet. The last two are those of `WholeTransaction`."""
        self.transactional_id = transactional_id
        self.producer = producer
        self.batches = WholeAppend(producer, appends, is_transactional=True)
        self.offsets = offsets
        self.open_group_id = open_group_id
        self.stays_open = stays_open

    def is_usual(self) -> bool:
        """Return whether nothing that the client knows speaks against writing it at once."""
        group_ids = [sent.committer.group_id for sent in self.offsets]
        if self.open_group_id is not None:
            group_ids.append(self.open_group_id)
        # Several groups would have to be locked in order.
        if len(group_ids) > 1 or not (self.batches.appends or group_ids):
            return False
        return self.batches.is_usual() and all(are_usual(sent.committer, sent.offsets) for sent in self.offsets)

    def transaction(self) -> WholeTransaction:
        """Return what a function of the database writes."""
        marker = control_columns(
            ControlType.COMMIT,
            coordinator_epoch=COORDINATOR_EPOCH,
            producer=ProducerIdentity(self.producer.producer_id, self.producer.epoch + 1),
            timestamp_ms=0,
        )
        return WholeTransaction(
            self.transactional_id,
            self.producer.producer_id,
            self.producer.epoch,
            self.batches.earliest_ms,
            self.batches.latest_ms,
            marker["crc"],
            self.batches.partitions,
            self.batches.columns(),
            group_of(self.offsets[0].committer) if self.offsets else None,
            [numbers for sent in self.offsets for numbers in numbers_of(sent.offsets)],
            self.open_group_id,
            self.stays_open,
        )

    def ended(self, places: Sequence[int]) -> Ended:
        """Return the answer, given for each batch its base offset and the log start offset of its partition."""
        following = ProducerIdentity(self.producer.producer_id, self.producer.epoch + 1)
        return Ended(following, self.batches.appended(places))


def whole_request(
    transactional_id: str,
    producer: ProducerIdentity,
    appends: Sequence[Append],
    offsets: Sequence[SentOffsets],
    writers: Collection[int] | None,
    *,
    open_group_id: str | None = None,
) -> WholeRequest | None:
    """Return the request; None if it has to go the general way."""
    if writers:
        return None
    request = WholeRequest(transactional_id, producer, appends, offsets, open_group_id=open_group_id)
    return request if request.is_usual() else None
