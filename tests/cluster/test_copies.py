"""Topics in a cluster: placed once, copied to every database, and mended where a database was away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, delete, insert, select, update

from tests.cluster.conftest import Bench, Producer, Site
from tests.tools.cluster_changes import (
    change_store_settings,
    change_topic_configs,
    delete_topic,
    ensure_topic,
    grow_topic,
)
from txnstore.config import TOPIC_SETTINGS, settings_in_force
from txnstore.db.backend import Limits
from txnstore.db.cluster.catalogue import apply_catalogue, is_current, read_catalogue
from txnstore.db.cluster.cluster import Cluster, repaired
from txnstore.db.cluster.membership import Database, coordinator_of_name, read_databases
from txnstore.db.portions import Portions
from txnstore.db.schema import (
    deleted_partitions,
    groups,
    partition_heads,
    partitions,
    record_batches,
    store_configs,
    topics,
    transactions,
)
from txnstore.errors import (
    InvalidConfiguration,
    StoreUnavailable,
    UnknownTopicOrPartition,
)
from txnstore.log.append import Append, append
from txnstore.log.cluster_topics import bring_up_to_date, create_topic
from txnstore.log.codec import decode, encode
from txnstore.log.partition_rows import producers_of_partition
from txnstore.log.topics import find_topics, leaders_by_hash, leaders_in_turn
from txnstore.maintenance.duties import DUTIES
from txnstore.maintenance.turns import take_turn
from txnstore.model import ProducerIdentity, Record
from txnstore.testing.invariants import Invariant, Violation, assert_cluster_sound, cluster_violations
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.verification import partitions as partitions_module
from txnstore.verification import verify as verify_module
from txnstore.verification.catalogue import placement_violations
from txnstore.verification.verify import WatchState, verify

#: The duties that go by settings.
FORGETTING = {
    "expired transactional ids forgotten",
    "silent producers forgotten",
    "journal entries deleted",
    "refused rows of the outbox deleted",
    "silent sinks of Spark forgotten",
    "batches past their retention deleted",
    "batches read by the compaction",
    "groups cleared of expired offsets",
}
MEMBERS = [Database(number, f"db{number}", "", coordinates=True) for number in (1, 2, 3)]


def test_the_hash_of_its_name_places_a_partition_for_ever():
    leaders = leaders_by_hash(MEMBERS, "orders", range(2000))
    assert leaders[:8] == leaders_by_hash(MEMBERS, "orders", range(8))
    assert leaders[5:8] == leaders_by_hash(MEMBERS, "orders", range(5, 8))
    assert all(600 < count < 740 for count in Counter(leaders).values())


@pytest.mark.parametrize(
    ("counts", "count", "leaders"),
    [
        ({}, 4, [1, 2, 3, 1]),
        ({1: 2, 2: 1}, 4, [3, 2, 3, 1]),
        ({1: 5, 9: 1}, 2, [2, 3]),
        ({}, 0, []),
    ],
)
def test_in_turn_is_where_there_are_the_fewest(counts, count, leaders):
    assert leaders_in_turn(MEMBERS, counts, count) == leaders


def test_a_topic_says_where_its_partitions_live_or_leaves_it_to_the_store(sqlite_site: Site):
    with sqlite_site.open() as cluster:
        label = {"txnstore.placement": "second.db"}
        there = create_topic(cluster, "there", partition_count=3, config=label)
        assert there.leaders == (2, 2, 2)
        assert grow_topic(cluster, "there", partition_count=5).leaders == (2,) * 5
        hashed = create_topic(cluster, "hashed", partition_count=30)
        assert list(hashed.leaders) == leaders_by_hash(MEMBERS, "hashed", range(30))
        change_store_settings(cluster, {"txnstore.placement": "roundrobin"})
        held = Counter([*there.leaders, *hashed.leaders, 2, 2])
        in_turn = create_topic(cluster, "turn", partition_count=12)
        assert list(in_turn.leaders) == leaders_in_turn(MEMBERS, held, 12)
        own = {"txnstore.placement": "hash"}
        assert list(create_topic(cluster, "own", partition_count=9, config=own).leaders) == leaders_by_hash(
            MEMBERS, "own", range(9)
        )
        with pytest.raises(InvalidConfiguration, match=r"first.db, second.db, third.db; not 'fourth.db'"):
            create_topic(cluster, "lost", config={"txnstore.placement": "fourth.db"})
        with pytest.raises(InvalidConfiguration, match="fourth"):
            change_topic_configs(cluster, "own", {"txnstore.placement": "fourth.db"})
        change_topic_configs(cluster, "own", {"txnstore.placement": "third.db"})
        assert grow_topic(cluster, "own", partition_count=10).leaders[9] == 3
        change_topic_configs(cluster, "own", {"txnstore.placement": None})
        for topic in (there, hashed, in_turn):
            assert cluster.by_leader(topic.partition_ids) == {
                leader: [number for number, at in zip(topic.partition_ids, topic.leaders, strict=True) if at == leader]
                for leader in sorted(set(topic.leaders), key=topic.leaders.index)
            }
        assert_cluster_sound(cluster, at_rest=True)


def test_a_cluster_of_one_is_leader_and_coordinator_of_everything(sqlite_site: Site):
    with sqlite_site.open(sqlite_site.urls[0]) as cluster:
        assert create_topic(cluster, "orders", partition_count=3).leaders == (1, 1, 1)
        with pytest.raises(InvalidConfiguration, match=r"one of the databases main; not 'second\.db'"):
            create_topic(cluster, "lost", config={"txnstore.placement": "second.db"})


def test_the_settings_take_what_is_documented():
    assert settings_in_force(TOPIC_SETTINGS, {})["txnstore.placement"] == ""
    with pytest.raises(InvalidConfiguration, match="control characters"):
        settings_in_force(TOPIC_SETTINGS, {"txnstore.placement": "a\nb"})


def test_every_database_has_the_topics_and_the_logs_of_what_lives_there(bench: Bench):
    cluster = bench.cluster
    grow_topic(cluster, "orders", partition_count=9)
    change_topic_configs(cluster, "orders", {"retention.ms": "1000", "txnstore.placement": None})
    change_store_settings(cluster, {"offsets.retention.minutes": "5"})
    ensure_topic(cluster, "orders")
    ensure_topic(cluster, "made-by-use", partition_count=2)
    (wanted,) = cluster.controller.read(lambda connection: find_topics(connection, ["orders"]))
    for number in (1, 2, 3):
        (found,) = cluster.own(number).read(lambda connection: find_topics(connection, ["orders"]))
        assert found == wanted
    assert_cluster_sound(cluster, at_rest=True)
    delete_topic(cluster, "orders")
    create_topic(cluster, "orders", partition_count=4)
    assert_cluster_sound(cluster, at_rest=True)


def plain(number: int) -> Append:
    return Append(number, encode([Record(b"a")]))


def write(bench: Bench, number: int) -> None:
    leader = bench.cluster.leader_of_partition(number)
    repaired(
        bench.cluster,
        leader,
        lambda store: store.write(lambda connection: append(connection, [plain(number)])),
    )


def test_a_database_that_was_away_when_a_topic_came_is_mended_by_who_needs_it(bench: Bench):
    cluster = bench.cluster
    with bench.down(2):
        made = create_topic(cluster, "more", partition_count=3, config={"txnstore.placement": "roundrobin"})
        grown = grow_topic(cluster, "orders", partition_count=9)
        with pytest.raises(StoreUnavailable, match="second"):
            write(bench, made.partition_ids[1])
        write(bench, made.partition_ids[0])
    assert {violation.invariant for violation in cluster_violations(cluster)} == {Invariant.COPIES_CURRENT}
    write(bench, made.partition_ids[1])
    write(bench, grown.partition_ids[7])
    assert_cluster_sound(cluster, at_rest=True)
    assert bench.read(made.partition_ids[1]) == [b"a"]


def test_a_database_that_was_away_when_a_topic_went_forgets_it_with_its_log(bench: Bench):
    cluster = bench.cluster
    number = bench.partition_at(2)
    write(bench, number)
    with bench.down(2):
        delete_topic(cluster, "orders")
        again = create_topic(cluster, "orders", partition_count=3, config={"txnstore.placement": "roundrobin"})
    assert cluster.reconcile(2)
    assert not cluster.reconcile(2)
    assert_cluster_sound(cluster, at_rest=True)
    with pytest.raises(UnknownTopicOrPartition):
        repaired(cluster, 2, lambda store: store.write(lambda connection: append(connection, [plain(number)])))
    write(bench, again.partition_ids[1])
    assert bench.read(again.partition_ids[1]) == [b"a"]


def test_a_log_that_a_database_lacks_is_made_there(sqlite_bench: Bench):
    cluster, number = sqlite_bench.cluster, sqlite_bench.partition_at(2)
    cluster.own(2).write(
        lambda connection: connection.execute(delete(partition_heads).where(partition_heads.c.partition_id == number))
    )
    write(sqlite_bench, number)
    assert sqlite_bench.read(number) == [b"a"]
    assert_cluster_sound(cluster, at_rest=True)


def test_the_maintenance_brings_a_database_up_to_date(sqlite_bench: Bench):
    bench = sqlite_bench
    with bench.down(2):
        create_topic(bench.cluster, "more", partition_count=3)
    assert [bring_up_to_date(bench.cluster.own(number), bench.cluster) for number in (1, 2, 3)] == [0, 1, 0]
    assert bring_up_to_date(bench.cluster.own(2), bench.cluster) == 0
    assert_cluster_sound(bench.cluster, at_rest=True)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("is_reachable", [True, False], ids=["controller there", "controller away"])
def test_nothing_is_forgotten_by_settings_from_before_a_database_was_away(bench: Bench, is_reachable: bool):
    cluster = bench.cluster
    change_topic_configs(cluster, "orders", {"retention.ms": "1000"})
    change_store_settings(cluster, {"producer.id.expiration.ms": "1000"})
    kept = bench.partition_at(2)
    batch = encode([Record(b"a")], producer=ProducerIdentity(70_001, 0), base_sequence=0)
    cluster.own(2).write(lambda connection: append(connection, [Append(kept, batch)]))
    with bench.down(2):
        change_topic_configs(cluster, "orders", {"retention.ms": "-1"})
        change_store_settings(cluster, {"producer.id.expiration.ms": None})
    bench.clock.advance(2_000)
    with nullcontext() if is_reachable else bench.down(1):
        turn = take_turn(cluster.own(2), cluster, DUTIES, Portions(), forced=True)
    assert set(turn.failed) >= FORGETTING if not is_reachable else not turn.failed
    assert bench.read(kept) == [b"a"]
    producers = cluster.own(2).read(lambda connection: producers_of_partition(connection, kept))
    assert [state.producer_id for state in producers] == [70_001]


def test_a_turn_asks_the_controller_for_the_newest_settings_once(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    with bench.down(2):
        create_topic(bench.cluster, "more", partition_count=3)

    def ask(*arguments: Any) -> int:
        asked.append(bring_up_to_date(*arguments))
        return asked[-1]

    monkeypatch.setattr("txnstore.log.cluster_topics.bring_up_to_date", ask)
    for expected in ([1], [1, 0]):
        turn = take_turn(bench.cluster.own(2), bench.cluster, DUTIES, Portions(), forced=True)
        assert not turn.failed
        assert asked == expected


def test_an_old_look_at_the_controller_undoes_nothing(bench: Bench):
    cluster = bench.cluster
    old = cluster.controller.read(read_catalogue)
    made = create_topic(cluster, "more", partition_count=3, config={"txnstore.placement": "roundrobin"})
    write(bench, made.partition_ids[1])
    store = cluster.own(2)
    assert store.read(lambda connection: is_current(connection, old, 2))
    assert not store.write(lambda connection: apply_catalogue(connection, old, 2))
    assert bench.read(made.partition_ids[1]) == [b"a"]
    # Nor does one of the same age that has missed something.
    fresh = cluster.controller.read(read_catalogue)
    missing = {**fresh.rows, "topics": {}, "partitions": {}, "topic_configs": {}}
    same_age = replace(fresh, rows=missing)
    store.write(lambda connection: apply_catalogue(connection, same_age, 2))
    assert bench.read(made.partition_ids[1]) == [b"a"]
    assert_cluster_sound(cluster, at_rest=True)


def test_a_database_added_to_a_running_cluster_gets_everything(site: Site):
    with site.open(*site.urls[:2]) as cluster:
        create_topic(cluster, "orders", partition_count=4, config={"retention.ms": "5"})
        change_store_settings(cluster, {"num.partitions": "3"})
        member = cluster.add_database(site.urls[2])
        assert member.database_id == 3
        assert_cluster_sound(cluster, at_rest=True)
        topic = create_topic(cluster, "new", config={"txnstore.placement": member.label})
        assert topic.leaders == (3,)
        cluster.own(cluster.leader_of_partition(topic.partition_ids[0])).write(
            lambda connection: append(connection, [plain(topic.partition_ids[0])])
        )
        # Who was there before learns of it when it is needed.
        with site.open(*site.urls[:2]) as other:
            assert len(other.databases) == 3


def test_a_change_counts_and_a_rehearsal_does_not(bench: Bench):
    def version() -> int:
        return bench.cluster.controller.read(read_databases)[0].catalogue_version

    before = version()
    with pytest.raises(ZeroDivisionError):
        bench.cluster.controller.write(lambda connection: (create_topic, connection.execute(select(1)), 1 / 0))
    assert version() == before
    change_topic_configs(bench.cluster, "orders", {"retention.ms": "5"})
    assert version() > before
    assert {store.read(read_databases)[0].catalogue_version for store in bench.cluster.stores()} == {version()}


def test_what_only_the_first_of_two_looks_sees_is_not_wrong(sqlite_bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """As what a client does in one database after the other, of which a look may see one half."""
    bench = sqlite_bench
    head = delete(partition_heads).where(partition_heads.c.partition_id == bench.partition_at(2))
    bench.cluster.own(2).write(lambda connection: connection.execute(head))
    looks: list[int] = []

    def mended_behind_the_first(cluster: Cluster, **options: Any) -> list[Violation]:
        found = cluster_violations(cluster, **options)
        looks.append(len(found))
        with bench.site.open() as other:
            other.reconcile(2)
        return found

    monkeypatch.setattr(verify_module, "cluster_violations", mended_behind_the_first)
    assert verify(bench.cluster) == []
    assert looks == [1, 0]


def test_a_watch_tells_of_a_log_that_went_back_though_a_second_look_cannot_see_it(bench: Bench):
    watch, producer, partition_id = WatchState(), bench.producer_at(1), bench.partition_at(2)
    for value in (b"a", b"b"):
        producer.send(partition_id, value)
    assert verify(bench.cluster, watch=watch) == []

    def lose_the_last(connection: Connection) -> None:
        is_last = record_batches.c.partition_id == partition_id, record_batches.c.base_offset == 1
        connection.execute(delete(record_batches).where(*is_last))
        of_partition = partition_heads.c.partition_id == partition_id
        connection.execute(update(partition_heads).where(of_partition).values(next_offset=1))

    bench.cluster.own(2).write(lose_the_last)
    assert Invariant.OFFSETS_FOLLOW in {violation.invariant for violation in verify(bench.cluster, watch=watch)}


@pytest.mark.slow
def test_a_watch_reads_nothing_again_for_its_second_look(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """But for the partition in which the first one has found something."""
    decoded: list[tuple[int, int]] = []

    def counting(row: Any) -> Any:
        decoded.append((row.partition_id, row.base_offset))
        return decode(row)

    def look() -> tuple[set[Invariant], list[tuple[int, int]]]:
        decoded.clear()
        found = {violation.invariant for violation in verify(bench.cluster, watch=watch)}
        return found, sorted(decoded)

    watch = WatchState()
    monkeypatch.setattr(partitions_module, "decode", counting)
    producer = bench.producer_at(1)
    first, second = bench.partition_at(1), bench.partition_at(2)
    for partition_id in (first, second):
        for value in (b"a", b"b"):
            producer.send(partition_id, value)
    assert look() == (set(), [(first, 0), (first, 1), (second, 0), (second, 1)])
    # Of no partition, and there to stay.
    bench.cluster.own(2).write(lambda connection: connection.execute(update(topics).values(created_ms=7)))
    for partition_id in (first, second):
        producer.send(partition_id, b"c")
    assert look() == ({Invariant.COPIES_CURRENT}, [(first, 2), (second, 2)])
    assert look() == ({Invariant.COPIES_CURRENT}, [])

    def written_behind(cluster: Cluster, **options: Any) -> list[Violation]:
        found = cluster_violations(cluster, **options)
        producer.send(second, b"d")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(verify_module, "cluster_violations", written_behind)
        assert look() == ({Invariant.COPIES_CURRENT}, [(second, 3)])
    assert look() == ({Invariant.COPIES_CURRENT}, [(second, 4)])
    producer.send(first, b"d")
    of_last = (record_batches.c.partition_id == first, record_batches.c.base_offset == 3)
    damage = update(record_batches).where(*of_last).values(value_data=b"00")
    bench.cluster.own(1).write(lambda connection: connection.execute(damage))
    whole = [(first, offset) for offset in range(4)]
    assert look() == ({Invariant.COPIES_CURRENT, Invariant.BATCHES_WHOLE}, sorted([*whole, (first, 3)]))
    assert look() == ({Invariant.COPIES_CURRENT, Invariant.BATCHES_WHOLE}, sorted([*whole, *whole]))


def test_the_controller_away_keeps_nobody_from_opening_another_database(bench: Bench, monkeypatch):
    """Nor does anybody wait until it is back, however long he would wait for it otherwise."""
    tries = 0

    def refuse(*_: object, **__: object) -> None:
        nonlocal tries
        tries += 1
        assert tries < 30, "it waits for the controller"
        raise StoreUnavailable("it is away")

    with bench.site.open(limits=Limits(retry_timeout_ms=3_600_000)) as cluster:
        monkeypatch.setattr(cluster.controller, "_run_once", refuse)
        assert cluster.own(2).database_id == 2
    assert tries > 0


@pytest.mark.slow_but_first
@pytest.mark.parametrize("damage", ["a row", "a value", "a head", "a setting"])
def test_the_checker_sees_copies_that_are_wrong(sqlite_bench: Bench, damage: str):
    bench = sqlite_bench
    statement = {
        "a row": delete(partitions).where(partitions.c.partition_id == bench.partition_at(3)),
        "a value": update(topics).values(created_ms=7),
        "a head": delete(partition_heads).where(partition_heads.c.partition_id == bench.partition_at(2)),
        "a setting": store_configs.insert().values(name="num.partitions", value="7"),
    }[damage]
    bench.cluster.own(2).write(lambda connection: connection.execute(statement))
    assert {violation.invariant for violation in cluster_violations(bench.cluster)} == {Invariant.COPIES_CURRENT}
    (lasting,) = {(found.invariant, found.place.database) for found in verify(bench.cluster)}
    assert lasting == (Invariant.COPIES_CURRENT, bench.cluster.databases[1].label)
    with bench.site.open() as other:
        other.reconcile(2)
    remaining = cluster_violations(bench.cluster)
    # What is too much goes with the next change only: a look as old as the copy may have missed it.
    assert bool(remaining) is (damage == "a setting")
    change_topic_configs(bench.cluster, "orders", {"retention.ms": "5"})
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_the_checker_sees_in_each_database_what_would_be_deleted(sqlite_bench: Bench):
    number = sqlite_bench.partition_at(2)
    sqlite_bench.cluster.own(2).write(
        lambda connection: connection.execute(insert(deleted_partitions).values(partition_id=number))
    )
    (found,) = cluster_violations(sqlite_bench.cluster)
    assert (found.invariant, found.place.partition_id) == (Invariant.TOPICS_COMPLETE, number)
    assert found.place.database == sqlite_bench.cluster.databases[1].label


def test_the_checker_sees_what_is_not_in_the_database_that_its_name_selects(sqlite_bench: Bench):
    bench = sqlite_bench
    names = {coordinator_of_name(f"id-{number}", bench.cluster.databases): f"id-{number}" for number in range(50)}
    for number, name in names.items():
        TransactionCoordinator(bench.cluster.own(number)).init_producer_id(name, 60_000)
    assert_cluster_sound(bench.cluster, at_rest=True)
    # As a client that believes in no other database would do.
    (name, other) = names[1], bench.cluster.own(2)
    row = bench.cluster.own(1).read(
        lambda c: c.execute(select(transactions).where(transactions.c.transactional_id == name)).one()
    )
    values = {column: value for column, value in row._mapping.items() if column != "last_update_minute"}
    other.write(lambda c: c.execute(insert(transactions).values(**values)))
    other.write(
        lambda c: c.execute(insert(groups).values(group_id=name, generation=0, commit_number=0, last_update_ms=1))
    )
    found = [each for each in cluster_violations(bench.cluster) if each.invariant is Invariant.AT_COORDINATOR]
    assert [(each.place.transactional_id, each.place.group_id) for each in found] == [(name, None), (None, name)]
    assert {each.place.database for each in found} == {bench.cluster.databases[1].label}
    assert {each.seen for each in found} == {f"its name selects {bench.cluster.databases[0].label!r}"}


class BusyClient:
    """A producer whose transactions have offsets of one group, and records of one partition or the other."""

    def __init__(self, bench: Bench, cluster: Cluster) -> None:
        self.partition_ids = bench.partition_at(2, 0), bench.partition_at(2, 1)
        self.group_id = bench.name_at(2, "group")
        self.producer = Producer(cluster, bench.name_at(1, "id")).start()
        self.begin(0)

    def begin(self, nth: int) -> None:
        self.producer.send(self.partition_ids[nth], b"a")
        self.producer.send_offsets(self.group_id, {self.partition_ids[0]: 1})

    def go_on(self, nth: int) -> None:
        self.producer.end(commit=True)
        self.begin(nth)


@pytest.mark.slow
def test_what_clients_do_between_the_snapshots_of_each_look_is_no_violation(bench: Bench, monkeypatch):
    """At the same places each time, for a transactional id and a group go on."""
    looks: list[int] = []

    def counted(cluster: Cluster, **options: Any) -> list[Violation]:
        found = cluster_violations(cluster, **options)
        looks.append(len(found))
        return found

    def first(work: Any, read: Any) -> Any:
        def read_then(*arguments: Any, **options: Any) -> Any:
            work()
            return read(*arguments, **options)

        return read_then

    with bench.site.open() as others:
        client = BusyClient(bench, others)
        # Before the snapshot of the second database it goes to the other partition, and then comes back.
        for number, nth in ((2, 1), (3, 0)):
            store = bench.cluster.own(number)
            monkeypatch.setattr(store, "read", first(partial(client.go_on, nth), store.read))
        monkeypatch.setattr(verify_module, "cluster_violations", counted)
        found = verify(bench.cluster)
    assert len(looks) == 2
    assert all(looks), "there was nothing in between"
    assert found == []


def test_what_is_done_once_all_snapshots_are_taken_is_not_seen(bench: Bench, monkeypatch):
    """However long the first database takes."""
    read_count = 0
    with bench.site.open() as others:
        client = BusyClient(bench, others)

        def work_meanwhile(connection: Connection) -> Iterator[Violation]:
            nonlocal read_count
            yield from placement_violations(connection)
            read_count += 1
            client.go_on(read_count % 2)

        monkeypatch.setattr(verify_module, "placement_violations", work_meanwhile)
        assert cluster_violations(bench.cluster) == []
    assert read_count == 3
