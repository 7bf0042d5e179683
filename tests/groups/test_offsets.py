"""Offsets of groups in the database: committed by themselves, or pending until their transaction ends."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Connection, insert, select, update

from tests.tools.elsewhere import Elsewhere
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.schema import group_members, group_offsets, groups, pending_group_offsets
from txnstore.db.store import Store
from txnstore.errors import (
    FencedInstance,
    IllegalGeneration,
    InvalidGroupId,
    InvalidRequest,
    OffsetMetadataTooLarge,
    TxnStoreError,
    UnknownMember,
    UnstableOffsetCommit,
)
from txnstore.groups.offsets import (
    CommittedOffsets,
    add_pending_offsets,
    commit_offsets,
    finish_pending_offsets,
    read_offsets,
    read_stable_offsets,
)
from txnstore.log.deleting import purge_deleted_partitions
from txnstore.log.topics import create_topic, delete_topic
from txnstore.model import OFFSET_MAX, GroupMembership, OffsetAndMetadata, ProducerIdentity
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.transaction import SentOffsets

ANNA, BERT = ProducerIdentity(10, 0), ProducerIdentity(11, 0)


@dataclass
class Group:
    """A group and a topic of two partitions that nobody else uses."""

    store: Store
    group_id: str
    topic: str
    partition_ids: tuple[int, ...]

    def commit(self, offsets: Mapping[int, int], **membership: Any) -> None:
        committer = GroupMembership(self.group_id, **membership)
        self.store.write(lambda connection: commit_offsets(connection, committer, self.by_id(offsets)))

    def pend(self, offsets: Mapping[int, int], producer: ProducerIdentity = ANNA, **membership: Any) -> None:
        committer = GroupMembership(self.group_id, **membership)
        self.store.write(lambda connection: add_pending_offsets(connection, committer, self.by_id(offsets), producer))

    def finish(self, producer: ProducerIdentity = ANNA, *, commit: bool) -> None:
        self.store.write(
            lambda connection: finish_pending_offsets(connection, [self.group_id], producer.producer_id, commit=commit)
        )

    def by_id(self, offsets: Mapping[int, int]) -> dict[int, OffsetAndMetadata]:
        return {self.partition_ids[number]: OffsetAndMetadata(offset) for number, offset in offsets.items()}

    def read(self) -> CommittedOffsets:
        return self.store.read(lambda connection: read_offsets(connection, self.group_id, self.partition_ids))

    @property
    def offsets(self) -> dict[int, int]:
        """The committed offsets by partition number."""
        found = self.read().offsets
        return {self.partition_ids.index(partition_id): offset.offset for partition_id, offset in found.items()}

    @property
    def unstable(self) -> set[int]:
        """The numbers of the partitions that an open transaction holds offsets of."""
        return {self.partition_ids.index(partition_id) for partition_id in self.read().unstable}

    def join(self, member_id: str, group_instance_id: str | None = None, *, generation: int) -> None:
        """Let a member in, as a rebalance does."""

        def work(connection) -> None:
            connection.execute(update(groups).where(groups.c.group_id == self.group_id).values(generation=generation))
            connection.execute(
                insert(group_members).values(
                    group_id=self.group_id,
                    member_id=member_id,
                    group_instance_id=group_instance_id,
                    client_id="test",
                    generation=generation,
                    session_timeout_ms=45_000,
                    deadline_ms=0,
                    subscription=json.dumps({"owned_ids": self.partition_ids}),
                    assignment="{}",
                )
            )

        self.store.write(work)


@pytest.fixture
def group(shared_store: Store) -> Group:
    name = uuid.uuid4().hex
    topic = shared_store.write(lambda connection: create_topic(connection, name, partition_count=2))
    return Group(shared_store, f"group-{name}", name, topic.partition_ids)


def test_offsets_are_committed_and_read_back_with_all_that_came_with_them(group: Group) -> None:
    sent = {
        group.partition_ids[0]: OffsetAndMetadata(0, leader_epoch=3, metadata="read ä 😀 \n%s"),
        group.partition_ids[1]: OffsetAndMetadata(OFFSET_MAX),
    }
    committer = GroupMembership(group.group_id)
    group.store.write(lambda connection: commit_offsets(connection, committer, sent))
    assert group.read() == CommittedOffsets(sent, frozenset())


def test_the_last_commit_counts_also_if_it_goes_back(group: Group) -> None:
    for offset in (5, 9, 2):
        group.commit({0: offset})
    group.commit({1: 7})
    assert group.offsets == {0: 2, 1: 7}


def test_a_group_that_nobody_used_has_committed_nothing(group: Group) -> None:
    assert group.read() == CommittedOffsets({}, frozenset())
    group.commit({})
    assert group.read() == CommittedOffsets({}, frozenset())


def test_groups_do_not_see_each_others_offsets(group: Group) -> None:
    other = Group(group.store, group.group_id.upper(), group.topic, group.partition_ids)
    group.commit({0: 5})
    other.commit({0: 6})
    assert (group.offsets, other.offsets) == ({0: 5}, {0: 6})


BAD_OFFSETS: dict[str, tuple[OffsetAndMetadata, type[TxnStoreError]]] = {
    "an offset of -1": (OffsetAndMetadata(-1), InvalidRequest),
    "an offset of -1001": (OffsetAndMetadata(-1001), InvalidRequest),
    "an offset above 2**63 - 1": (OffsetAndMetadata(OFFSET_MAX + 1), InvalidRequest),
    "an offset that is a float": (OffsetAndMetadata(1.0), InvalidRequest),  # type: ignore[arg-type]
    "an offset that is a flag": (OffsetAndMetadata(True), InvalidRequest),
    "an offset that is text": (OffsetAndMetadata("1"), InvalidRequest),  # type: ignore[arg-type]
    "a leader epoch of more than 32 bits": (OffsetAndMetadata(1, leader_epoch=2**31), InvalidRequest),
    "a leader epoch below -1": (OffsetAndMetadata(1, leader_epoch=-2), InvalidRequest),
    "metadata with NUL": (OffsetAndMetadata(1, metadata="a\0b"), InvalidRequest),
    "metadata with half a surrogate pair": (OffsetAndMetadata(1, metadata="\ud800"), InvalidRequest),
    "metadata that is not text": (OffsetAndMetadata(1, metadata=b"a"), InvalidRequest),  # type: ignore[arg-type]
    "metadata of 4097 bytes": (OffsetAndMetadata(1, metadata="x" * 4097), OffsetMetadataTooLarge),
}


# On SQLite alone: they are refused before anything is written.
@pytest.mark.parametrize("shared_store", ["sqlite"], indirect=True)
@pytest.mark.parametrize("is_transactional", [True, False], ids=["transactional", "plain"])
@pytest.mark.parametrize(("bad", "error"), BAD_OFFSETS.values(), ids=BAD_OFFSETS)
def test_an_invalid_offset_is_refused_and_nothing_of_the_commit_counts(
    group: Group, is_transactional: bool, bad: OffsetAndMetadata, error: type[TxnStoreError]
) -> None:
    offsets = {group.partition_ids[0]: OffsetAndMetadata(1), group.partition_ids[1]: bad}
    committer = GroupMembership(group.group_id)

    def commit(connection: Connection) -> None:
        if is_transactional:
            add_pending_offsets(connection, committer, offsets, ANNA)
        else:
            commit_offsets(connection, committer, offsets)

    with pytest.raises(error):
        group.store.write(commit)
    assert group.read() == CommittedOffsets({}, frozenset())


@pytest.mark.parametrize("shared_store", ["sqlite"], indirect=True)
@pytest.mark.parametrize("group_id", ["", None, "a\0b", "\ud800"], ids=ascii)
def test_what_is_no_group_id_is_refused(group: Group, group_id: str) -> None:
    group.group_id = group_id
    with pytest.raises(InvalidGroupId):
        group.commit({0: 1})
    with pytest.raises(InvalidGroupId):
        group.pend({0: 1})


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "name",
    [" ", "x" * 1000, "ä", "a\u0308", "\u202eevil", "😀", "'; DROP TABLE groups; --", "%s {} $1 :name ?"],
    ids=lambda name: ascii(name)[:12],
)
def test_any_other_text_names_a_group_of_its_own(group: Group, name: str) -> None:
    group.group_id = (group.group_id + name)[-1000:]
    group.commit({0: 3})
    group.pend({1: 4})
    group.finish(commit=True)
    assert group.offsets == {0: 3, 1: 4}


def test_how_much_metadata_fits_is_a_setting_of_the_store(store: Store) -> None:
    topic = store.write(lambda connection: create_topic(connection, "orders"))
    store.write(lambda connection: change_store_settings(connection, {"offset.metadata.max.bytes": "3"}))
    for metadata in ("abc", "ä"):
        offsets = {topic.partition_ids[0]: OffsetAndMetadata(1, metadata=metadata)}
        store.write(lambda connection, offsets=offsets: commit_offsets(connection, GroupMembership("g"), offsets))
    with pytest.raises(OffsetMetadataTooLarge):
        store.write(
            lambda connection: commit_offsets(
                connection,
                GroupMembership("g"),
                {topic.partition_ids[0]: OffsetAndMetadata(1, metadata="ää")},
            )
        )


#: Who commits for a group of generation 4 with the members m1 and, static, m2: what it is told.
MEMBERSHIPS: dict[str, tuple[dict[str, Any], type[TxnStoreError] | None]] = {
    "member and generation": ({"generation": 4, "member_id": "m1"}, None),
    "static member": ({"generation": 4, "member_id": "m2", "group_instance_id": "static"}, None),
    "older generation": ({"generation": 3, "member_id": "m1"}, IllegalGeneration),
    "newer generation": ({"generation": 5, "member_id": "m1"}, IllegalGeneration),
    "a member without its generation": ({"member_id": "m1"}, IllegalGeneration),
    "unknown member": ({"generation": 4, "member_id": "m9"}, UnknownMember),
    "unknown instance": ({"generation": 4, "member_id": "m2", "group_instance_id": "other"}, UnknownMember),
    "fenced instance": ({"generation": 4, "member_id": "m1", "group_instance_id": "static"}, FencedInstance),
}
#: One that may commit, and one for each refusal: the rest is told by the rules, and above over the rows.
REPRESENTATIVES = ("static member", "older generation", "unknown member", "fenced instance")


@pytest.mark.slow_but_first
@pytest.mark.parametrize("is_transactional", [True, False], ids=["transactional", "plain"])
@pytest.mark.parametrize(("membership", "error"), MEMBERSHIPS.values(), ids=MEMBERSHIPS)
def test_in_a_group_with_members_only_they_commit_and_only_in_their_generation(
    group: Group, is_transactional: bool, membership: dict[str, Any], error: type[TxnStoreError] | None
) -> None:
    group.commit({0: 1, 1: 1})
    group.join("m1", generation=4)
    group.join("m2", "static", generation=4)
    send = group.pend if is_transactional else group.commit
    if error is not None:
        with pytest.raises(error):
            send({0: 9}, **membership)
        assert (group.offsets, group.unstable) == ({0: 1, 1: 1}, set())
        return
    send({0: 9}, **membership)
    if is_transactional:
        group.finish(commit=True)
    assert group.offsets == {0: 9, 1: 1}


def test_without_membership_a_group_with_members_takes_transactional_commits_and_no_plain_ones(group: Group) -> None:
    group.commit({0: 1})
    group.join("m1", generation=4)
    group.pend({0: 9})
    group.finish(commit=True)
    with pytest.raises(UnknownMember):
        group.commit({0: 5})
    assert group.offsets == {0: 9}


@pytest.mark.parametrize("is_transactional", [True, False], ids=["transactional", "plain"])
def test_a_generation_of_a_group_that_does_not_exist_is_refused_and_the_group_is_not_made(
    group: Group, is_transactional: bool
) -> None:
    send = group.pend if is_transactional else group.commit
    with pytest.raises(IllegalGeneration):
        send({0: 1}, generation=0, member_id="m1")
    made = group.store.read(
        lambda connection: connection.execute(select(groups).where(groups.c.group_id == group.group_id)).all()
    )
    assert made == []
    send({0: 1})


@pytest.mark.slow_but_first
@pytest.mark.parametrize("writes_elsewhere", [False, True], ids=["in one database", "over several databases"])
@pytest.mark.parametrize("with_commit", [False, True], ids=["sent before", "sent with the commit"])
@pytest.mark.parametrize(("membership", "error"), [MEMBERSHIPS[who] for who in REPRESENTATIVES], ids=REPRESENTATIVES)
def test_the_coordinator_lets_the_same_members_through(
    group: Group,
    writes_elsewhere: bool,
    with_commit: bool,
    membership: dict[str, Any],
    error: type[TxnStoreError] | None,
) -> None:
    group.commit({0: 1, 1: 1})
    group.join("m1", generation=4)
    group.join("m2", "static", generation=4)
    coordinator = TransactionCoordinator(group.store, Elsewhere(group.store) if writes_elsewhere else None)
    transactional_id = f"id-{uuid.uuid4().hex}"
    identity = coordinator.init_producer_id(transactional_id).identity
    sent = SentOffsets(GroupMembership(group.group_id, **membership), group.by_id({0: 9}))

    def send() -> None:
        if with_commit:
            coordinator.end_transaction(transactional_id, identity, commit=True, offsets=[sent])
        else:
            coordinator.send_offsets(transactional_id, identity, sent)

    if error is not None:
        with pytest.raises(error):
            send()
        assert (group.offsets, group.unstable) == ({0: 1, 1: 1}, set())
        return
    send()
    if not with_commit:
        assert group.unstable == {0}
        coordinator.end_transaction(transactional_id, identity, commit=True)
    assert (group.offsets, group.unstable) == ({0: 9, 1: 1}, set())


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_pending_offsets_count_only_once_their_transaction_commits(group: Group, commit: bool) -> None:
    group.commit({0: 1})
    group.pend({0: 5, 1: 6})
    assert (group.offsets, group.unstable) == ({0: 1}, {0, 1})
    group.finish(commit=commit)
    assert (group.offsets, group.unstable) == ({0: 5, 1: 6} if commit else {0: 1}, set())


def test_offsets_that_a_transaction_sends_again_replace_those_it_sent_before(group: Group) -> None:
    group.pend({0: 5, 1: 6})
    group.pend({0: 4})
    group.finish(commit=True)
    assert group.offsets == {0: 4, 1: 6}


def test_a_plain_commit_that_came_after_the_pending_one_wins(group: Group) -> None:
    group.pend({0: 5, 1: 5})
    group.commit({0: 9})
    group.finish(commit=True)
    assert group.offsets == {0: 9, 1: 5}


def test_a_plain_commit_that_came_before_the_pending_one_loses(group: Group) -> None:
    group.commit({0: 9})
    group.pend({0: 5})
    group.finish(commit=True)
    assert group.offsets == {0: 5}


def test_of_two_transactions_the_offsets_that_were_sent_later_win_whichever_commits_first(group: Group) -> None:
    for first, last in ((ANNA, BERT), (BERT, ANNA)):
        group.pend({0: 5}, ANNA)
        group.pend({0: 6}, BERT)
        group.finish(first, commit=True)
        assert group.unstable == {0}
        group.finish(last, commit=True)
        assert (group.offsets, group.unstable) == ({0: 6}, set())


def test_the_end_of_one_transaction_leaves_the_offsets_of_another_pending(group: Group) -> None:
    group.pend({0: 5, 1: 5}, ANNA)
    group.pend({1: 6}, BERT)
    group.finish(ANNA, commit=False)
    assert (group.offsets, group.unstable) == ({}, {1})
    group.finish(BERT, commit=True)
    assert (group.offsets, group.unstable) == ({1: 6}, set())


def test_finishing_again_changes_nothing_not_even_what_was_committed_since(group: Group) -> None:
    group.pend({0: 5})
    group.finish(commit=True)
    group.commit({0: 9})
    for commit in (True, False):
        group.finish(commit=commit)
    assert group.offsets == {0: 9}


def test_a_reader_that_wants_stable_offsets_waits_for_its_partitions_only(group: Group) -> None:
    group.commit({0: 1, 1: 1})
    group.pend({1: 6})

    def read_stable(*numbers: int) -> CommittedOffsets:
        wanted = [group.partition_ids[number] for number in numbers]
        return group.store.read(lambda connection: read_stable_offsets(connection, group.group_id, wanted))

    assert read_stable(0).offsets == group.by_id({0: 1})
    for numbers in ((1,), (0, 1)):
        with pytest.raises(UnstableOffsetCommit) as raised:
            read_stable(*numbers)
        assert raised.value.retriable
    group.finish(commit=False)
    assert read_stable(0, 1).offsets == group.by_id({0: 1, 1: 1})


def test_offsets_remember_the_transaction_that_committed_them(group: Group) -> None:
    def committed_by() -> tuple[int, int]:
        statement = select(group_offsets.c.producer_id, group_offsets.c.producer_epoch).where(
            group_offsets.c.group_id == group.group_id
        )
        return tuple(group.store.read(lambda connection: connection.execute(statement).one()))

    group.commit({0: 1})
    assert committed_by() == (-1, -1)
    group.pend({0: 5}, ProducerIdentity(10, 3))
    group.finish(commit=True)
    assert committed_by() == (10, 3)
    coordinator = TransactionCoordinator(group.store)
    transactional_id = f"id-{uuid.uuid4().hex}"
    identity = coordinator.init_producer_id(transactional_id).identity
    sent = SentOffsets(GroupMembership(group.group_id), group.by_id({0: 6}))
    coordinator.end_transaction(transactional_id, identity, commit=True, offsets=[sent])
    assert committed_by() == (identity.producer_id, identity.epoch)


def test_the_offsets_of_a_deleted_topic_are_gone_and_its_transaction_still_commits(group: Group) -> None:
    kept = group.store.write(lambda connection: create_topic(connection, group.topic + "-kept"))
    coordinator = TransactionCoordinator(group.store)
    transactional_id = f"id-{uuid.uuid4().hex}"
    identity = coordinator.init_producer_id(transactional_id).identity
    offsets = {**group.by_id({0: 5}), kept.partition_ids[0]: OffsetAndMetadata(8)}
    group.commit({1: 3})
    coordinator.send_offsets(transactional_id, identity, SentOffsets(GroupMembership(group.group_id), offsets))
    group.store.write(lambda connection: delete_topic(connection, group.topic))
    coordinator.end_transaction(transactional_id, identity, commit=True)
    purge_deleted_partitions(group.store, rows_max=100)
    group.partition_ids = (*group.partition_ids, *kept.partition_ids)
    assert (group.offsets, group.unstable) == ({2: 8}, set())
    left = select(pending_group_offsets).where(pending_group_offsets.c.group_id == group.group_id)
    assert group.store.read(lambda connection: connection.execute(left).all()) == []
