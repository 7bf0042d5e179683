"""Topics: which names there are, how they are made, found, grown, configured and deleted."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import func, select

from txnstore.db.portions import Portions
from txnstore.db.schema import (
    deleted_partitions,
    finished_transactions,
    group_offsets,
    partition_heads,
    partitions,
    pending_group_offsets,
    producer_states,
    record_batches,
    topic_configs,
    topics,
)
from txnstore.db.store import Store
from txnstore.errors import (
    InvalidConfiguration,
    InvalidPartitions,
    InvalidTopic,
    InvalidTransactionState,
    TopicAlreadyExists,
    UnknownTopicOrPartition,
)
from txnstore.groups.offsets import commit_offsets
from txnstore.log import deleting
from txnstore.log.append import Append, append
from txnstore.log.bounds import read_bounds
from txnstore.log.codec import encode
from txnstore.log.deleting import purge_deleted_partitions
from txnstore.log.fetch import fetch
from txnstore.log.topics import (
    Topic,
    check_topic_name,
    create_topic,
    delete_topic,
    ensure_topic,
    find_topics,
    get_topic,
    grow_topic,
    list_topics,
)
from txnstore.model import GroupMembership, OffsetAndMetadata, ProducerIdentity, Record
from txnstore.transactions.coordinator import TransactionCoordinator

GOOD_NAMES = ["a", "A", "0", "_", "-", "...", "a.b_c-d", "x" * 249, "__internal", "__consumer_offsets", "TOPIC", ".a"]
BAD_NAMES: list[object] = [
    "",
    " ",
    ".",
    "..",
    "x" * 250,
    "x" * 10_240,
    "a b",
    "a ",
    " a",
    "a/b",
    "../a",
    "a\\b",
    "a\0b",
    "a\n",
    "\na",
    "a\x1b[31m",
    "a\ud800",
    "ä",
    "a\u0308",
    "\uff41",
    "\u0430",
    "😀",
    "\u202ea",
    "ß",
    "\u0661",
    "a%sb",
    "{}",
    "$1",
    ":name",
    "?",
    "a*",
    "%",
    "'; DROP TABLE topics; --",
    '"a"',
    "a;b",
    None,
    7,
    b"a",
    ["a"],
]


def short(name: object) -> str:
    text = ascii(name)
    return text if len(text) < 50 else f"{len(text)} characters"


def unique() -> str:
    return uuid.uuid4().hex


def make(store: Store, name: str, **options: Any) -> Topic:
    return store.write(lambda connection: create_topic(connection, name, **options))


def find(store: Store, name: str) -> Topic:
    return store.read(lambda connection: get_topic(connection, name))


@pytest.mark.parametrize("name", GOOD_NAMES, ids=short)
def test_a_name_that_kafka_allows_passes(name: str) -> None:
    check_topic_name(name)


@pytest.mark.parametrize("name", BAD_NAMES, ids=short)
def test_a_name_that_kafka_does_not_allow_is_refused_and_not_repeated_in_full(name: object) -> None:
    with pytest.raises(InvalidTopic) as raised:
        check_topic_name(name)
    assert len(str(raised.value)) < 250
    assert "\0" not in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", BAD_NAMES, ids=short)
def test_such_a_name_is_never_created_and_never_found(shared_store: Store, name: Any) -> None:
    for create in (create_topic, ensure_topic):
        with pytest.raises(InvalidTopic):
            shared_store.write(lambda connection, create=create: create(connection, name))
    with pytest.raises(UnknownTopicOrPartition):
        shared_store.read(lambda connection: get_topic(connection, name))
    with pytest.raises(UnknownTopicOrPartition):
        shared_store.write(lambda connection: grow_topic(connection, name, partition_count=2))
    with pytest.raises(UnknownTopicOrPartition):
        shared_store.write(lambda connection: delete_topic(connection, name))
    assert shared_store.read(lambda connection: find_topics(connection, [name])) == []


def test_every_good_name_is_a_topic_of_its_own(store: Store) -> None:
    for name in GOOD_NAMES:
        topic = make(store, name)
        assert find(store, name) == topic
    assert store.read(list_topics) == sorted(GOOD_NAMES)
    with pytest.raises(UnknownTopicOrPartition):
        find(store, "b")


def test_names_that_differ_in_case_are_different_topics(shared_store: Store) -> None:
    name = "a" + unique()
    assert make(shared_store, name).topic_id != make(shared_store, name.upper()).topic_id


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("first", "second", "collide"),
    [
        ("a.b", "a_b", True),
        ("a_b", "a.b", True),
        ("a._b", "a_.b", True),
        ("a.b.c", "a_b_c", True),
        ("a.b", "a-b", False),
        ("a.b", "ab", False),
        ("a_b", "axb", False),
        ("a.b", "A_b", False),
    ],
)
def test_names_that_differ_only_in_dots_and_underscores_collide(
    shared_store: Store, first: str, second: str, collide: bool
) -> None:
    prefix = unique()
    make(shared_store, prefix + first)
    if not collide:
        make(shared_store, prefix + second)
        return
    for create in (create_topic, ensure_topic):
        with pytest.raises(InvalidTopic, match="only in dots and underscores"):
            shared_store.write(lambda connection, create=create: create(connection, prefix + second))


def test_a_new_topic_has_empty_partitions_with_ids_of_their_own(shared_store: Store) -> None:
    name = unique()
    topic = make(shared_store, name, partition_count=3)
    assert find(shared_store, name) == topic
    assert len(set(topic.partition_ids)) == 3
    assert [topic.partition_id(number) for number in range(3)] == list(topic.partition_ids)
    bounds = shared_store.read(lambda connection: read_bounds(connection, topic.partition_ids))
    assert {(b.log_start_offset, b.high_watermark, b.last_stable_offset) for b in bounds.values()} == {(0, 0, 0)}
    assert uuid.UUID(topic.topic_uuid).version == 4


@pytest.mark.parametrize("number", [-1, 3, 2**31, 2**63, 1.0, True, None, "0"])
def test_a_partition_that_the_topic_does_not_have_is_refused(shared_store: Store, number: Any) -> None:
    topic = make(shared_store, unique(), partition_count=3)
    with pytest.raises(UnknownTopicOrPartition, match="has partitions 0 to 2"):
        topic.partition_id(number)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("count", [0, -1, 100_001, 2**63, 1.5, True, None, "2"], ids=str)
def test_a_number_of_partitions_that_is_none_is_refused(shared_store: Store, count: Any) -> None:
    name = unique()
    for create in (create_topic, ensure_topic):
        with pytest.raises(InvalidPartitions):
            shared_store.write(lambda connection, create=create: create(connection, name, partition_count=count))
    make(shared_store, name)
    with pytest.raises(InvalidPartitions):
        shared_store.write(lambda connection: grow_topic(connection, name, partition_count=count))


def test_a_topic_that_exists_is_not_created_again(shared_store: Store) -> None:
    name = unique()
    topic = make(shared_store, name, partition_count=2)
    with pytest.raises(TopicAlreadyExists):
        make(shared_store, name, partition_count=5)
    assert find(shared_store, name) == topic


def test_auto_creation_makes_a_topic_once_with_default_settings(shared_store: Store) -> None:
    name = unique()
    made = shared_store.write(lambda connection: ensure_topic(connection, name, partition_count=3))
    again = shared_store.write(lambda connection: ensure_topic(connection, name, partition_count=7))
    assert again == made
    assert len(made.partition_ids) == 3
    assert made.config == {}


def test_auto_creation_by_several_at_once_makes_one_topic(shared_store: Store) -> None:
    names = [unique() for _ in range(3)]
    barrier = threading.Barrier(4)

    def create() -> list[Topic]:
        made = []
        for name in names:
            barrier.wait(timeout=60)
            made.append(shared_store.write(lambda connection, name=name: ensure_topic(connection, name)))
        return made

    with ThreadPoolExecutor(4) as pool:
        found = [task.result(timeout=60) for task in [pool.submit(create) for _ in range(4)]]
    assert all(topics_ == found[0] for topics_ in found)


def test_settings_are_kept_as_they_were_set_and_have_defaults(shared_store: Store) -> None:
    name = unique()
    make(shared_store, name, config={"max.message.bytes": "100", "message.timestamp.type": "LogAppendTime"})
    topic = find(shared_store, name)
    assert topic.config == {"max.message.bytes": "100", "message.timestamp.type": "LogAppendTime"}
    assert topic.settings["max.message.bytes"] == 100
    assert topic.settings["retention.ms"] == 604_800_000


@pytest.mark.parametrize(
    "config",
    [
        {"max.message.byte": "1"},
        {"max.message.bytes": "-1"},
        {"max.message.bytes": "many"},
        {"max.message.bytes": 1},
        {"message.timestamp.type": "logappendtime"},
        {"": ""},
    ],
    ids=str,
)
def test_a_topic_with_a_setting_that_is_none_is_not_created(shared_store: Store, config: Any) -> None:
    name = unique()
    with pytest.raises(InvalidConfiguration):
        make(shared_store, name, config=config)
    with pytest.raises(UnknownTopicOrPartition):
        find(shared_store, name)


def test_several_topics_are_found_at_once_by_name(shared_store: Store) -> None:
    prefix = unique()
    made = [make(shared_store, f"{prefix}-{number}", partition_count=number + 1) for number in range(3)]
    wanted = [f"{prefix}-2", f"{prefix}-missing", f"{prefix}-0", f"{prefix}-0"]
    assert shared_store.read(lambda connection: find_topics(connection, wanted)) == [made[0], made[2]]
    assert shared_store.read(lambda connection: find_topics(connection, [])) == []


def test_a_topic_grows_and_keeps_what_it_has(shared_store: Store) -> None:
    name = unique()
    topic = make(shared_store, name, partition_count=2)
    item = Append(topic.partition_ids[1], encode([Record(b"a")]))
    shared_store.write(lambda connection: append(connection, [item]))
    grown = shared_store.write(lambda connection: grow_topic(connection, name, partition_count=5))
    assert grown.partition_ids[:2] == topic.partition_ids
    assert len(set(grown.partition_ids)) == 5
    bounds = shared_store.read(lambda connection: read_bounds(connection, grown.partition_ids))
    assert [bounds[partition_id].high_watermark for partition_id in grown.partition_ids] == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("count", [1, 2])
def test_a_topic_never_shrinks(shared_store: Store, count: int) -> None:
    name = unique()
    make(shared_store, name, partition_count=2)
    with pytest.raises(InvalidPartitions, match="has 2 partitions already"):
        shared_store.write(lambda connection: grow_topic(connection, name, partition_count=count))


def test_with_a_topic_everything_of_its_partitions_goes(store: Store) -> None:
    doomed, kept = make(store, "doomed", config={"retention.ms": "1"}), make(store, "kept")
    coordinator = TransactionCoordinator(store)
    identity = coordinator.init_producer_id("payments").identity
    for topic in (doomed, kept):
        batch = encode([Record(b"a")], producer=identity, base_sequence=0, is_transactional=True)
        coordinator.append("payments", identity, [Append(topic.partition_ids[0], batch)])
    coordinator.end_transaction("payments", identity, commit=True)
    offsets = {topic.partition_ids[0]: OffsetAndMetadata(1) for topic in (doomed, kept)}
    store.write(lambda connection: commit_offsets(connection, GroupMembership("readers"), offsets))

    store.write(lambda connection: delete_topic(connection, "doomed"))
    assert store.read(list_topics) == ["kept"]
    # Batches, a producer, a transaction, an offset.
    assert purge_deleted_partitions(store, rows_max=100) == 5
    assert purge_deleted_partitions(store, rows_max=100) == 0

    def left(connection) -> dict[str, int]:
        tables = (
            topics,
            deleted_partitions,
            partitions,
            partition_heads,
            record_batches,
            producer_states,
            finished_transactions,
            group_offsets,
            pending_group_offsets,
            topic_configs,
        )
        return {
            table.name: connection.execute(select(func.count()).select_from(table)).scalar_one() for table in tables
        }

    assert store.read(left) == {
        "topics": 1,
        "deleted_partitions": 0,
        "partitions": 1,
        "partition_heads": 1,
        "record_batches": 2,
        "producer_states": 1,
        "finished_transactions": 1,
        "group_offsets": 1,
        "pending_group_offsets": 0,
        "topic_configs": 0,
    }
    for call in (
        lambda connection: append(connection, [Append(doomed.partition_ids[0], encode([Record(b"late")]))]),
        lambda connection: fetch(connection, {doomed.partition_ids[0]: 0}),
        lambda connection: read_bounds(connection, [kept.partition_ids[0], doomed.partition_ids[0]]),
        lambda connection: delete_topic(connection, "doomed"),
        lambda connection: grow_topic(connection, "doomed", partition_count=2),
    ):
        with pytest.raises(UnknownTopicOrPartition):
            store.write(call)


def test_a_topic_that_is_made_again_shares_nothing_with_the_one_before(shared_store: Store) -> None:
    name = unique()
    first = make(shared_store, name)
    item = Append(first.partition_ids[0], encode([Record(b"a")]))
    shared_store.write(lambda connection: append(connection, [item]))
    shared_store.write(lambda connection: delete_topic(connection, name))
    second = make(shared_store, name)
    assert second.topic_id != first.topic_id
    assert second.topic_uuid != first.topic_uuid
    assert set(second.partition_ids).isdisjoint(first.partition_ids)
    bounds = shared_store.read(lambda connection: read_bounds(connection, second.partition_ids))
    assert bounds[second.partition_ids[0]].high_watermark == 0


def test_partition_ids_of_the_newest_topic_are_not_given_out_again(shared_store: Store) -> None:
    """SQLite would, without AUTOINCREMENT: the newest row's key is the next one's."""
    ids: list[int] = []
    for _ in range(3):
        name = unique()
        ids.extend(make(shared_store, name).partition_ids)
        shared_store.write(lambda connection, name=name: delete_topic(connection, name))
    assert len(set(ids)) == 3


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_a_topic_with_an_open_transaction_is_deleted_only_after_its_end(shared_store: Store, commit: bool) -> None:
    name = unique()
    topic = make(shared_store, name, partition_count=2)
    coordinator = TransactionCoordinator(shared_store)
    identity = coordinator.init_producer_id(name).identity
    batch = encode([Record(b"a")], producer=identity, base_sequence=0, is_transactional=True)
    coordinator.append(name, identity, [Append(topic.partition_ids[1], batch)])
    with pytest.raises(InvalidTransactionState, match=f"open transaction of '{name}'"):
        shared_store.write(lambda connection: delete_topic(connection, name))
    coordinator.end_transaction(name, identity, commit=commit)
    shared_store.write(lambda connection: delete_topic(connection, name))
    with pytest.raises(UnknownTopicOrPartition):
        find(shared_store, name)


def test_a_topic_can_be_deleted_under_a_transaction_that_has_not_written_to_it(shared_store: Store) -> None:
    name = unique()
    make(shared_store, name)
    other = make(shared_store, name + "-other")
    coordinator = TransactionCoordinator(shared_store)
    identity: ProducerIdentity = coordinator.init_producer_id(name).identity
    batch = encode([Record(b"a")], producer=identity, base_sequence=0, is_transactional=True)
    coordinator.append(name, identity, [Append(other.partition_ids[0], batch)])
    shared_store.write(lambda connection: delete_topic(connection, name))
    coordinator.end_transaction(name, identity, commit=True)
    page = shared_store.read(lambda connection: fetch(connection, {other.partition_ids[0]: 0}))
    assert [record.value for found in page[other.partition_ids[0]].batches for record in found.records()] == [b"a"]


def test_deleted_partitions_are_struck_off_while_there_is_time(store, monkeypatch) -> None:
    store.write(lambda connection: create_topic(connection, "doomed", partition_count=5))
    store.write(lambda connection: delete_topic(connection, "doomed"))
    # After the first portion.
    portions = Portions(seconds=0.0)
    portions.rows = 2
    monkeypatch.setattr(portions, "_adapt", lambda _: None)

    def left() -> int:
        return len(store.read(lambda connection: connection.execute(deleting._DELETED).all()))

    purge_deleted_partitions(store, portions, rows_max=100)
    assert left() == 3
    purge_deleted_partitions(store, portions, rows_max=100)
    purge_deleted_partitions(store, portions, rows_max=100)
    assert left() == 0
