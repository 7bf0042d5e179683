"""A consumer dies while it commits a position within a transaction: it is the former one or the next, as a pair."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.tools.crashes import every_crash, noting
from txnstore.db.store import Store
from txnstore.groups.offsets import commit_offsets, read_offsets
from txnstore.log.topics import create_topic
from txnstore.model import GroupMembership, OffsetAndMetadata
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.transaction import SentOffsets

FORMER = OffsetAndMetadata(40, offset_in_transaction=17)
NEXT = OffsetAndMetadata(50, offset_in_transaction=3)
pytestmark = [pytest.mark.slow_on_postgresql, pytest.mark.crashes]

_numbers = itertools.count(1)


def plainly(store: Store, sent: SentOffsets) -> None:
    store.write(lambda connection: commit_offsets(connection, sent.committer, sent.offsets))


def with_a_transaction(store: Store, sent: SentOffsets) -> None:
    coordinator = TransactionCoordinator(store)
    name = f"worker {sent.committer.group_id}"
    identity = coordinator.init_producer_id(name).identity
    coordinator.send_offsets(name, identity, sent)
    coordinator.end_transaction(name, identity, commit=True)


def at_its_end(store: Store, sent: SentOffsets) -> None:
    coordinator = TransactionCoordinator(store)
    name = f"worker {sent.committer.group_id}"
    identity = coordinator.init_producer_id(name).identity
    coordinator.end_transaction(name, identity, commit=True, offsets=[sent])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("commit", [plainly, with_a_transaction, at_its_end])
def test_a_crash_at_any_step_leaves_one_position_or_the_other(
    url: str, txnstore_open: Callable[..., Store], commit: Callable[[Store, SentOffsets], None]
) -> None:
    others, victims = txnstore_open(url), txnstore_open(url, pool_size=1)
    (partition_id,) = others.write(lambda connection: create_topic(connection, "t")).partition_ids

    def make() -> GroupMembership:
        group = GroupMembership(f"group {next(_numbers)}")
        plainly(others, SentOffsets(group, {partition_id: FORMER}))
        return group

    def act(group: GroupMembership) -> None:
        commit(victims, SentOffsets(group, {partition_id: NEXT}))

    left = []
    for crash in every_crash(make, act, statements_are_all=True):
        crash.revive()
        with noting(crash):
            left.append(committed(others, crash.subject, partition_id))
            assert left[-1] in (FORMER, NEXT)
            # Whoever comes next commits, whatever is left.
            if left[-1] == FORMER:
                with_a_transaction(others, SentOffsets(crash.subject, {partition_id: NEXT}))
            assert committed(others, crash.subject, partition_id) == NEXT
    assert {FORMER, NEXT} == set(left)


def committed(store: Store, group: GroupMembership, partition_id: int) -> OffsetAndMetadata | None:
    found = store.read(lambda connection: read_offsets(connection, group.group_id, [partition_id]))
    return found.offsets.get(partition_id)
