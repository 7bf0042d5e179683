"""Transactions that are wholly in the client: what of them can be committed at once.

Everything that the client knows is asked here, and everything that the database knows is asked by what writes it: a
function of the database (`db.postgresql.commit_function`) or statements (`whole_statements`). What is unusual to
either goes the general way, through `LockedTransaction`, which alone waits, explains and refuses.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from txnstore.db.backend import OffsetGroup, WholeTransaction
from txnstore.errors import TxnStoreError
from txnstore.groups.offsets import check_form
from txnstore.log.append import Append, WholeAppend
from txnstore.log.codec import control_columns
from txnstore.model import NO_GENERATION, ControlType, ProducerIdentity
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
        return self.batches.is_usual() and all(map(_is_usual_commit, self.offsets))

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
            _group_of(self.offsets),
            [
                (partition_id, offset.offset, offset.leader_epoch, offset.metadata)
                for sent in self.offsets
                for partition_id, offset in sorted(sent.offsets.items())
            ],
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


def _is_usual_commit(sent: SentOffsets) -> bool:
    """Return whether the offsets come from a member, or from nobody in particular, and without metadata."""
    committer = sent.committer
    try:
        check_form(committer, sent.offsets)
    except TxnStoreError:
        return False
    if any(offset.metadata or offset.offset_in_transaction is not None for offset in sent.offsets.values()):
        # The store has a limit for metadata; and the short way is for offset order alone.
        return False
    if committer.member_id:
        return committer.generation > NO_GENERATION
    return committer.generation == NO_GENERATION and committer.group_instance_id is None


def _group_of(offsets: Sequence[SentOffsets]) -> OffsetGroup | None:
    for sent in offsets:
        committer = sent.committer
        return OffsetGroup(committer.group_id, committer.generation, committer.member_id, committer.group_instance_id)
    return None
