"""Committed offsets of the two orders of delivery: whatever way they come, none takes the place of the other."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from tests.tools.elsewhere import Elsewhere
from txnstore.db.store import Store
from txnstore.errors import InvalidRequest, TxnStoreError
from txnstore.groups.administration import alter_offsets, delete_offsets, list_offsets
from txnstore.groups.offsets import commit_offsets, read_offsets
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.log.topics import create_topic
from txnstore.model import GroupMembership, OffsetAndMetadata, ProducerIdentity, Record
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.transaction import SentOffsets

#: One of each order; the numbers differ, so that a mixture shows.
BY_OFFSET, BY_PLACE = OffsetAndMetadata(5), OffsetAndMetadata(9, offset_in_transaction=3)
BOTH = pytest.mark.parametrize(
    ("own", "other"), [(BY_OFFSET, BY_PLACE), (BY_PLACE, BY_OFFSET)], ids=["offset", "commit"]
)
_numbers = itertools.count(1)


class Group:
    """A group and a partition that nobody else uses, and the ways in which offsets come to it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.group_id = uuid.uuid4().hex
        topic = store.write(lambda connection: create_topic(connection, self.group_id))
        self.topic, (self.partition_id,) = topic.name, topic.partition_ids

    def sent(self, offset: OffsetAndMetadata) -> SentOffsets:
        return SentOffsets(GroupMembership(self.group_id), {self.partition_id: offset})

    def producer(self, *, writes_elsewhere: bool = False) -> OpenTransaction:
        coordinator = TransactionCoordinator(self.store, Elsewhere(self.store) if writes_elsewhere else None)
        return OpenTransaction(coordinator, f"{self.group_id}-{next(_numbers)}", self.partition_id)

    def commit(self, offset: OffsetAndMetadata) -> None:
        sent = self.sent(offset)
        self.store.write(lambda connection: commit_offsets(connection, sent.committer, sent.offsets))

    def committed(self) -> OffsetAndMetadata | None:
        found = self.store.read(lambda connection: read_offsets(connection, self.group_id, [self.partition_id]))
        return found.offsets.get(self.partition_id)

    # The ways.

    def plainly(self, offset: OffsetAndMetadata) -> None:
        self.commit(offset)

    def with_a_transaction(self, offset: OffsetAndMetadata) -> None:
        producer = self.producer()
        producer.send_offsets(self.sent(offset))
        producer.commit()

    def with_records_before(self, offset: OffsetAndMetadata) -> None:
        producer = self.producer()
        producer.append()
        producer.commit(offsets=[self.sent(offset)])

    def at_once(self, offset: OffsetAndMetadata) -> None:
        """The short way: all of it is still in the client."""
        producer = self.producer()
        producer.commit(appends=[producer.batch()], offsets=[self.sent(offset)])

    def with_offsets_alone(self, offset: OffsetAndMetadata) -> None:
        """The short way of those that cannot wait for their commit."""
        producer = self.producer()
        producer.send_offsets(self.sent(offset), has_begun=False)
        producer.commit(has_begun=True, open_group_id=self.group_id)

    def with_a_transaction_that_writes_elsewhere(self, offset: OffsetAndMetadata) -> None:
        producer = self.producer(writes_elsewhere=True)
        producer.send_offsets(self.sent(offset))
        producer.commit()


class OpenTransaction:
    def __init__(self, coordinator: TransactionCoordinator, transactional_id: str, partition_id: int) -> None:
        self.coordinator, self.transactional_id, self.partition_id = coordinator, transactional_id, partition_id
        self.identity: ProducerIdentity = coordinator.init_producer_id(transactional_id).identity

    def batch(self) -> Append:
        batch = encode([Record(b"value")], producer=self.identity, base_sequence=0, is_transactional=True)
        return Append(self.partition_id, batch)

    def append(self) -> None:
        self.coordinator.append(self.transactional_id, self.identity, [self.batch()])

    def send_offsets(self, sent: SentOffsets, **options: Any) -> None:
        self.coordinator.send_offsets(self.transactional_id, self.identity, sent, **options)

    def commit(self, **options: Any) -> None:
        self.coordinator.end_transaction(self.transactional_id, self.identity, commit=True, **options)


WAYS: list[Callable[[Group, OffsetAndMetadata], None]] = [
    Group.plainly,
    Group.with_a_transaction,
    Group.with_records_before,
    Group.at_once,
    Group.with_offsets_alone,
    Group.with_a_transaction_that_writes_elsewhere,
]
EACH_WAY = pytest.mark.parametrize("commit", WAYS, ids=lambda way: way.__name__)


@pytest.fixture
def group(shared_store: Store) -> Group:
    return Group(shared_store)


@pytest.mark.slow_but_first
@EACH_WAY
@BOTH
def test_an_offset_of_the_other_order_is_refused_and_changes_nothing(
    group: Group, own: OffsetAndMetadata, other: OffsetAndMetadata, commit: Callable[[Group, OffsetAndMetadata], None]
) -> None:
    commit(group, own)
    assert group.committed() == own
    for way in WAYS:
        with pytest.raises(TxnStoreError) as raised:
            way(group, other)
        assert isinstance(raised.value, InvalidRequest) or isinstance(raised.value.__cause__, InvalidRequest)
        assert "reset-offsets" in str(raised.value)
        assert group.committed() == own


@BOTH
def test_of_two_open_transactions_the_second_cannot_hold_an_offset_of_the_other_order(
    group: Group, own: OffsetAndMetadata, other: OffsetAndMetadata
) -> None:
    first, second = group.producer(), group.producer()
    first.send_offsets(group.sent(own))
    for has_begun in (False, True):
        with pytest.raises(InvalidRequest, match="reset-offsets"):
            second.send_offsets(group.sent(other), has_begun=has_begun)
    with pytest.raises(InvalidRequest, match="reset-offsets"):
        first.send_offsets(group.sent(other))
    second.send_offsets(group.sent(own))
    second.commit()
    first.commit()
    assert group.committed() == own


@pytest.mark.parametrize("at_once", [False, True])
@BOTH
def test_what_is_committed_plainly_while_a_transaction_is_open_holds(
    group: Group, own: OffsetAndMetadata, other: OffsetAndMetadata, at_once: bool
) -> None:
    producer = group.producer()
    producer.send_offsets(group.sent(own), has_begun=not at_once)
    group.commit(other)
    producer.commit(has_begun=True, open_group_id=group.group_id if at_once else None)
    assert group.committed() == other


@BOTH
def test_only_a_reset_that_says_so_changes_the_order(
    group: Group, own: OffsetAndMetadata, other: OffsetAndMetadata
) -> None:
    group.commit(own)
    offsets = {group.partition_id: other}

    def alter(**options: Any) -> None:
        group.store.write(lambda connection: alter_offsets(connection, group.group_id, offsets, **options))

    if other is BY_OFFSET:
        with pytest.raises(InvalidRequest, match="in commit order"):
            alter()
        alter(changes_order=True)
    else:
        # It says so itself.
        alter()
    listed = group.store.read(lambda connection: list_offsets(connection, group.group_id))
    assert list(listed.offsets.values()) == [other]
    with pytest.raises(InvalidRequest):
        group.commit(own)
    group.store.write(
        lambda connection: delete_offsets(connection, group.group_id, {group.topic: [group.partition_id]})
    )
    group.commit(own)
    assert group.committed() == own


@pytest.mark.slow_but_first
@pytest.mark.parametrize("within", [-1, 2**63, 1.5, True, "1"], ids=str)
def test_an_offset_within_a_transaction_that_is_no_number_of_a_record_is_refused(group: Group, within: Any) -> None:
    for way in WAYS:
        with pytest.raises(TxnStoreError, match="an offset in a transaction has to be a number from 0 to"):
            way(group, OffsetAndMetadata(1, offset_in_transaction=within))
    assert group.committed() is None
