"""A controller that has lost its last changes: nothing is deleted or mixed up in the others, and who is refused."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from sqlalchemy import Connection, delete, insert, select, update

from tests.cluster.conftest import Bench, Site, read
from tests.conftest import FIRST_PARTITION_ID_MAX
from tests.tools.cluster_changes import change_store_settings, change_topic_configs, delete_topic, grow_topic
from tests.tools.crashes import every_crash, noting
from txnstore import Consumer, Producer, TopicPartition
from txnstore.cli import maintenance
from txnstore.cli.output import FAILED
from txnstore.db.cluster import catalogue
from txnstore.db.cluster.catalogue import COPIED, Catalogue, copy_catalogue, read_catalogue
from txnstore.db.cluster.cluster import Cluster, LeftOut, repaired
from txnstore.db.cluster.membership import ALONE_LABEL, STEP_MIN
from txnstore.db.opening import open_store
from txnstore.db.schema import databases, deleted_numbers, partitions, topics
from txnstore.errors import UnknownTopicOrPartition, WrongCluster
from txnstore.log import topics as topic_rows
from txnstore.log.append import Append, append
from txnstore.log.cluster_topics import bring_up_to_date, create_topic
from txnstore.log.codec import encode
from txnstore.log.deleting import purge_deleted_partitions
from txnstore.log.topics import Topic, find_topics
from txnstore.maintenance.duties import DUTIES
from txnstore.model import Record
from txnstore.testing.invariants import assert_cluster_sound
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.verification.invariants import Invariant
from txnstore.verification.verify import verify

LOST = "restored from an older backup, or a failover has lost its last changes"
_KEYS = {topics: "topic_id", partitions: "partition_id"}


@dataclass
class Backup:
    """What a controller has of topics, settings and members, and what it has deleted."""

    catalogue: Catalogue
    deletions: Sequence[Mapping[str, Any]]


def back_up(cluster: Cluster) -> Backup:
    return cluster.controller.read(
        lambda connection: Backup(
            read_catalogue(connection), [dict(row) for row in connection.execute(select(deleted_numbers)).mappings()]
        )
    )


def restore(cluster: Cluster, backup: Backup) -> None:
    """Let the controller have what is in the backup again, and give out the numbers after it."""
    store = cluster.controller

    def work(connection: Connection) -> None:
        rows_of = [(table, list(backup.catalogue.rows[str(table.name)].values())) for table, _ in COPIED]
        for table, rows in [*rows_of, (deleted_numbers, backup.deletions)]:
            connection.execute(delete(table))
            if rows:
                connection.execute(insert(table), [dict(row) for row in rows])
            if table in _KEYS:
                column = _KEYS[table]
                last = max((row[column] for row in rows), default=0)
                store.backend.set_next_key(connection, store.schema, str(table.name), column, last + 1)

    store.write(work)


def topic_at(cluster: Cluster, database_id: int, name: str, *, partition_count: int = 1) -> Topic:
    """Make a topic that lives in one database."""
    placement = {"txnstore.placement": cluster.label_of(database_id)}
    return create_topic(cluster, name, partition_count=partition_count, config=placement)


def write(cluster: Cluster, number: int, value: bytes = b"a") -> None:
    batch = Append(number, encode([Record(value)]))
    leader = cluster.leader_of_partition(number)
    repaired(cluster, leader, lambda store: store.write(lambda connection: append(connection, [batch])))


def records(store: Any, number: int) -> list[bytes | None]:
    """Return what is in a log, whatever the controller knows of it."""

    class Alone:
        leader_of_partition = staticmethod(lambda _: 0)
        own = staticmethod(lambda _: store)

    return read(Alone(), number)  # type: ignore[arg-type]


def names_at(store: Any) -> set[str]:
    return {row["name"] for row in store.read(read_catalogue).rows["topics"].values()}


def version_of(store: Any) -> int:
    return int(store.read(read_catalogue).version)


def losses(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if getattr(record, "event", None) == "changes_lost"]


def maintain(cluster: Cluster) -> None:
    """Run all duties but those by age: the records are as old as the tests' clock is young."""
    maintenance._run_once(cluster, tuple(duty for duty in DUTIES if "retention" not in duty.name))


# --- what is lost stays, and refuses nobody ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("changed_since", [0, 1, 3])
def test_records_of_a_topic_that_the_controller_has_lost_stay_whatever_it_changes_since(
    bench: Bench, changed_since: int, caplog: pytest.LogCaptureFixture
):
    backup = back_up(bench.cluster)
    lost = topic_at(bench.cluster, 2, "payments", partition_count=2)
    write(bench.cluster, lost.partition_ids[0])
    restore(bench.cluster, backup)
    for number in range(changed_since):
        change_store_settings(bench.cluster, {"num.partitions": str(number + 1)})
    with bench.site.open() as cluster:
        for number in (2, 3):
            store = cluster.own(number)
            bring_up_to_date(store, cluster)
            assert version_of(store) == version_of(cluster.controller)
            assert not cluster.reconcile(number)
            assert bring_up_to_date(store, cluster) == 0
            assert names_at(store) == {"orders", "payments"}
        told = next(told for told in losses(caplog) if repr(cluster.label_of(2)) in told)
        assert LOST in told
        assert "[payments]" in told
        maintain(cluster)
        with pytest.raises(UnknownTopicOrPartition):
            cluster.leader_of_partition(lost.partition_ids[0])
        write(cluster, bench.partition_at(2))
        caplog.clear()
        assert not cluster.reconcile(2)
        assert not losses(caplog)
        # It is told with each change.
        change_store_settings(cluster, {"num.partitions": None})
        assert len(losses(caplog)) == 2
    assert records(bench.cluster.own(2), lost.partition_ids[0]) == [b"a"]
    (kept,) = bench.cluster.own(2).read(lambda connection: find_topics(connection, ["payments"]))
    assert kept == lost


def test_what_came_back_with_the_controllers_last_state_is_as_it_was(bench: Bench):
    backup = back_up(bench.cluster)
    lost = topic_at(bench.cluster, 2, "payments")
    write(bench.cluster, lost.partition_ids[0])
    newest = back_up(bench.cluster)
    restore(bench.cluster, backup)
    # It takes the name.
    assert topic_at(bench.cluster, 3, "payments").partition_ids != lost.partition_ids
    for number in (2, 3):
        bench.cluster.reconcile(number)
    assert names_at(bench.cluster.own(2)) == {"orders", "payments", lost.topic_uuid}
    restore(bench.cluster, newest)
    with bench.site.open() as cluster:
        for number in (2, 3):
            assert cluster.reconcile(number)
            (kept,) = cluster.own(number).read(lambda connection: find_topics(connection, ["payments"]))
            assert kept == lost
        write(cluster, lost.partition_ids[0], b"b")
        assert read(cluster, lost.partition_ids[0]) == [b"a", b"b"]


@pytest.mark.slow
def test_a_topic_whose_deletion_was_lost_is_back_and_empty_where_it_was_deleted(bench: Bench):
    topic = topic_at(bench.cluster, 2, "payments")
    write(bench.cluster, topic.partition_ids[0])
    backup = back_up(bench.cluster)
    delete_topic(bench.cluster, "payments")
    restore(bench.cluster, backup)
    change_store_settings(bench.cluster, {"num.partitions": "3"})
    assert_written_once_nothing_is_deleted_by_its_number(bench.cluster, topic.partition_ids[0])


def assert_written_once_nothing_is_deleted_by_its_number(cluster: Cluster, number: int) -> None:
    """Until then nobody writes there, and what is written then stays."""
    store = cluster.own(cluster.leader_of_partition(number))
    for _ in range(2):
        with pytest.raises(UnknownTopicOrPartition):
            write(cluster, number)
    assert bring_up_to_date(store, cluster) == 0
    assert purge_deleted_partitions(store, rows_max=100)
    assert [bring_up_to_date(store, cluster) for _ in range(2)] == [1, 0]
    write(cluster, number)
    assert read(cluster, number) == [b"a"]
    assert purge_deleted_partitions(store, rows_max=100) == 0
    assert read(cluster, number) == [b"a"]
    for member in cluster.stores():
        purge_deleted_partitions(member, rows_max=100)
        bring_up_to_date(member, cluster)
    assert_cluster_sound(cluster, at_rest=True)


def test_a_topic_whose_deletion_was_lost_has_its_records_where_nobody_had_heard_of_it(bench: Bench):
    topic = topic_at(bench.cluster, 2, "payments")
    write(bench.cluster, topic.partition_ids[0])
    backup = back_up(bench.cluster)
    with bench.down(2):
        delete_topic(bench.cluster, "payments")
    restore(bench.cluster, backup)
    change_store_settings(bench.cluster, {"num.partitions": "3"})
    purge_deleted_partitions(bench.cluster.own(3), rows_max=100)
    for number in (2, 3):
        bring_up_to_date(bench.cluster.own(number), bench.cluster)
    assert bench.read(topic.partition_ids[0]) == [b"a"]
    assert_cluster_sound(bench.cluster, at_rest=True)


@pytest.mark.slow
@pytest.mark.parametrize("changed_since", [0, 1, 2])
def test_where_settings_were_lost_the_controllers_hold_from_the_next_look_on(
    bench: Bench, changed_since: int, caplog: pytest.LogCaptureFixture
):
    kept = bench.partition_at(2)
    write(bench.cluster, kept)
    backup = back_up(bench.cluster)
    change_topic_configs(bench.cluster, "orders", {"retention.ms": "1"})
    restore(bench.cluster, backup)
    with bench.down(2), bench.down(3):
        for number in range(changed_since):
            change_topic_configs(bench.cluster, "orders", {"retention.ms": str(1 << (60 + number))})
    with bench.site.open() as cluster:
        # Before the retention deletes anything.
        assert [bring_up_to_date(cluster.own(number), cluster) for number in (2, 3)] == [1, 1]
        assert [bring_up_to_date(cluster.own(number), cluster) for number in (2, 3)] == [0, 0]
    assert_cluster_sound(bench.cluster, at_rest=True)
    assert bench.read(kept) == [b"a"]
    if changed_since == 0:
        assert len(losses(caplog)) == 2


def test_a_standby_in_the_controllers_place_may_be_behind_the_others(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    backup = back_up(bench.cluster)
    newest = topic_at(bench.cluster, 2, "payments")
    restore(bench.cluster, backup)
    with bench.site.open() as cluster:
        monkeypatch.setattr(cluster.controller.backend, "is_standby", lambda _: True)
        before = version_of(cluster.own(2))
        assert not cluster.reconcile(2)
        assert bring_up_to_date(cluster.own(2), cluster) == 0
        assert version_of(cluster.own(2)) == before
        assert names_at(cluster.own(2)) == {"orders", newest.name}


def test_a_standby_that_is_promoted_after_it_was_read_has_not_gone_back(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    store, newest = bench.cluster.controller, version_of(bench.cluster.own(2))
    behind = replace(back_up(bench.cluster).catalogue, version=newest - 1)
    is_standby = [True]

    def read_and_promote(*_: object) -> Catalogue:
        is_standby[0] = False
        return behind

    monkeypatch.setattr(store.backend, "is_standby", lambda _: is_standby[0])
    monkeypatch.setattr(catalogue, "read_catalogue", read_and_promote)
    assert catalogue.look(store, newest).replaces is None
    # From now on it has.
    assert catalogue.look(store, newest).replaces == newest


def test_a_look_from_before_the_loss_loses_nothing_after_it(bench: Bench):
    """By a client that read the controller before it was restored, and copies only afterwards."""
    backup = back_up(bench.cluster)
    lost = topic_at(bench.cluster, 2, "payments")
    write(bench.cluster, lost.partition_ids[0])
    late = back_up(bench.cluster).catalogue
    restore(bench.cluster, backup)
    made = topic_at(bench.cluster, 2, "refunds")
    write(bench.cluster, made.partition_ids[0], b"b")
    copy_catalogue(bench.cluster.controller, late, 2, bench.cluster.own(2).write)
    with bench.site.open() as cluster:
        cluster.reconcile(2)
        assert version_of(cluster.own(2)) == version_of(cluster.controller)
        assert read(cluster, made.partition_ids[0]) == [b"b"]
        assert names_at(cluster.own(2)) == {"orders", "payments", "refunds"}
        assert records(cluster.own(2), lost.partition_ids[0]) == [b"a"]


@pytest.mark.slow
@pytest.mark.crashes
def test_who_dies_deleting_a_topic_has_deleted_it_everywhere_or_nowhere(sqlite_bench: Bench):
    names = (f"doomed-{number}" for number in itertools.count())
    outcomes = set()
    with sqlite_bench.site.open() as caller, sqlite_bench.site.open() as others:
        for cluster in (caller, others):
            cluster.parallel = False
            assert len(list(cluster.stores())) == 3

        def make() -> Topic:
            topic = topic_at(others, 2, next(names))
            write(others, topic.partition_ids[0])
            return topic

        for crash in every_crash(make, lambda topic: delete_topic(caller, topic.name), statements_are_all=True):
            crash.revive()
            topic = crash.subject
            with noting(crash):
                for number in (2, 3):
                    others.reconcile(number)
                found = {topic.name in names_at(store) for store in others.stores()}
                assert found == {topic.name in names_at(others.controller)}
                assert found == {False} or read(others, topic.partition_ids[0]) == [b"a"]
            outcomes |= found
        assert outcomes == {True, False}
        assert_cluster_sound(others, at_rest=True)


# --- who was away -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_who_has_missed_a_deletion_and_thousands_of_changes_deletes_it_and_waits_for_nobody(
    bench: Bench, caplog: pytest.LogCaptureFixture
):
    gone = topic_at(bench.cluster, 2, "payments")
    write(bench.cluster, gone.partition_ids[0])
    with bench.down(2):
        delete_topic(bench.cluster, "payments")
        again = topic_at(bench.cluster, 2, "payments")
        # In one database transaction they may take longer than a server lets it, on a machine that is busy.
        for _ in range(15):
            bench.cluster.controller.write(lambda connection: change(connection, 100))
    with bench.site.open() as cluster:
        assert cluster.own(2).database_id == 2
        write(cluster, again.partition_ids[0], b"b")
        assert read(cluster, again.partition_ids[0]) == [b"b"]
        assert cluster.reconcile(3)
        assert_cluster_sound(cluster, at_rest=True)
        while purge_deleted_partitions(cluster.own(2), rows_max=100):
            pass
        with pytest.raises(UnknownTopicOrPartition):
            records(cluster.own(2), gone.partition_ids[0])
    assert not losses(caplog)


def change(connection: Connection, times: int) -> None:
    for _ in range(times):
        orders = topic_rows.lock_topic_configs(connection, "orders")
        topic_rows.change_topic_configs(connection, orders, {"retention.ms": "-1"})


def test_of_more_deletions_than_are_remembered_the_first_are_kept_and_in_nobodys_way(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("txnstore.db.cluster.catalogue.DELETIONS_KEPT", 2)
    made = [topic_at(bench.cluster, 2, name) for name in ("one", "two", "three")]
    for topic in made:
        write(bench.cluster, topic.partition_ids[0])
    with bench.down(2):
        for topic in made:
            delete_topic(bench.cluster, topic.name)
    assert len(back_up(bench.cluster).deletions) == 2
    assert bench.cluster.reconcile(2)
    assert names_at(bench.cluster.own(2)) == {"orders", "one"}
    (told,) = losses(caplog)
    assert "[one]" in told
    again = topic_at(bench.cluster, 2, "one")
    write(bench.cluster, again.partition_ids[0], b"b")
    assert bench.read(again.partition_ids[0]) == [b"b"]
    assert records(bench.cluster.own(2), made[0].partition_ids[0]) == [b"a"]


def test_a_database_alone_remembers_no_deletion(sqlite_site: Site):
    with sqlite_site.open(sqlite_site.urls[0]) as cluster:
        create_topic(cluster, "orders")
        delete_topic(cluster, "orders")
        assert back_up(cluster).deletions == []


def test_nobody_who_writes_in_a_member_waits_while_the_controller_is_asked_for_deletions(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    gone, kept = topic_at(bench.cluster, 2, "payments"), bench.partition_at(2)
    with bench.down(2):
        delete_topic(bench.cluster, "payments")
    found = catalogue.read_deleted
    written: list[set[int]] = []

    def write_to_copies(connection: Connection) -> None:
        # What whoever copies locks.
        connection.execute(catalogue._LOCK_COPY)
        append(connection, [Append(kept, encode([Record(b"a")]))])

    def write_meanwhile(connection: Connection, numbers: Collection[int]) -> set[int]:
        if numbers:
            with bench.site.open() as others:
                others.own(2).write(write_to_copies)
            written.append(set(numbers))
        return found(connection, numbers)

    monkeypatch.setattr(catalogue, "read_deleted", write_meanwhile)
    assert bench.cluster.reconcile(2)
    assert written == [set(gone.partition_ids)]
    assert names_at(bench.cluster.own(2)) == {"orders"}
    assert bench.read(kept) == [b"a"]


def test_what_comes_while_the_controller_is_asked_for_deletions_is_left_to_the_next_look(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    gone, late = topic_at(bench.cluster, 2, "payments"), topic_at(bench.cluster, 2, "late")
    write(bench.cluster, late.partition_ids[0])
    row = bench.cluster.own(2).read(read_catalogue).rows["partitions"][late.partition_ids[0],]
    with bench.down(2), bench.down(3):
        for topic in (gone, late):
            delete_topic(bench.cluster, topic.name)
    before = version_of(bench.cluster.own(2))
    store = bench.cluster.own(2)
    hide = delete(partitions).where(partitions.c.partition_id == late.partition_ids[0])
    store.write(lambda connection: connection.execute(hide))
    found = catalogue.read_deleted

    def come_meanwhile(connection: Connection, numbers: Collection[int]) -> set[int]:
        if numbers:
            store.write(lambda c: c.execute(insert(partitions).values(dict(row))))
        return found(connection, numbers)

    with monkeypatch.context() as patch:
        patch.setattr(catalogue, "read_deleted", come_meanwhile)
        assert bench.cluster.reconcile(2)
    assert names_at(store) == {"orders", "late"}
    assert version_of(store) == before
    assert records(store, late.partition_ids[0]) == [b"a"]
    assert bench.cluster.reconcile(2)
    assert names_at(store) == {"orders"}
    assert version_of(store) == version_of(bench.cluster.controller)


# --- numbers are not given out again ----------------------------------------------------------------------------------


def test_a_cluster_gives_out_no_number_of_a_database_that_was_alone(site: Site):
    with open_store(site.urls[1]) as store:
        topic = store.write(lambda connection: topic_rows.create_topic(connection, "mine", partition_count=3))
        batch = Append(topic.partition_ids[0], encode([Record(b"old")]))
        store.write(lambda connection: append(connection, [batch]))
        store.write(lambda connection: topic_rows.delete_topic(connection, "mine"))
    with site.open(site.urls[0]) as alone:
        first = create_topic(alone, "first", partition_count=3)
    with site.open() as cluster:
        made = topic_at(cluster, 2, "orders", partition_count=3)
        grown = grow_topic(cluster, "orders", partition_count=5)
        assert grown.partition_ids[:3] == made.partition_ids
        numbers = [*topic.partition_ids, *first.partition_ids, *grown.partition_ids]
        assert sorted(set(numbers[3:])) == numbers[3:]
        assert min(grown.partition_ids) > max(*topic.partition_ids, *first.partition_ids, topic.topic_id)
        write(cluster, made.partition_ids[0])
        while purge_deleted_partitions(cluster.own(2), rows_max=100):
            pass
        bring_up_to_date(cluster.own(2), cluster)
        assert read(cluster, made.partition_ids[0]) == [b"a"]
        assert_cluster_sound(cluster, at_rest=True)


def test_numbers_are_those_of_the_one_change_that_made_a_topic_or_partitions(sqlite_bench: Bench):
    cluster = sqlite_bench.cluster
    for count in (2, 5):
        before = version_of(cluster.controller)
        if count == 2:
            made = create_topic(cluster, "payments", partition_count=count)
            new = [*made.partition_ids, made.topic_id]
        else:
            new = list(grow_topic(cluster, "payments", partition_count=count).partition_ids[2:])
        after = version_of(cluster.controller)
        assert new == list(range(after - len(new) + 1, after + 1))
        assert STEP_MIN <= after - before < 2 * STEP_MIN
    # No two changes share one.
    assert STEP_MIN > 1 + topic_rows.PARTITIONS_MAX


def test_a_controller_that_would_give_its_numbers_out_again_is_found(sqlite_bench: Bench):
    cluster = sqlite_bench.cluster
    made = topic_at(cluster, 2, "payments")
    assert made.partition_ids == (made.topic_id - 1,)
    for version, expected in ((made.topic_id, []), (made.topic_id - 1, ["topics"]), (1, ["topics", "partitions"])):
        set_back = update(databases).where(databases.c.database_id == 1).values(catalogue_version=version)
        for store in cluster.stores():
            store.write(lambda connection, set_back=set_back: connection.execute(set_back))
        found = verify(cluster)
        assert {violation.invariant for violation in found} <= {Invariant.NUMBERS_AHEAD}
        assert [violation.seen.split()[0] for violation in found] == expected
        assert {violation.place.database for violation in found} <= {cluster.label_of(1)}


def test_the_first_number_of_a_database_alone_is_below_the_first_of_a_cluster():
    assert 1 < FIRST_PARTITION_ID_MAX < STEP_MIN


@pytest.mark.slow
@pytest.mark.parametrize("name", ["refunds", "payments"])
@pytest.mark.parametrize("changed_since", [0, 3])
def test_what_is_made_after_the_loss_has_other_numbers_and_both_have_their_records(
    bench: Bench, name: str, changed_since: int
):
    """By who has the others open, and by who opens them."""
    backup = back_up(bench.cluster)
    lost = topic_at(bench.cluster, 2, "payments", partition_count=2)
    write(bench.cluster, lost.partition_ids[0])
    restore(bench.cluster, backup)
    made = topic_at(bench.cluster, 2, name, partition_count=2)
    for number in range(changed_since):
        change_store_settings(bench.cluster, {"num.partitions": str(number + 1)})
    assert made.topic_id != lost.topic_id
    assert not set(made.partition_ids) & set(lost.partition_ids)
    write(bench.cluster, made.partition_ids[0], b"b")
    with bench.site.open() as cluster:
        write(cluster, made.partition_ids[0], b"c")
        assert read(cluster, made.partition_ids[0]) == [b"b", b"c"]
        cluster.reconcile(3)
        maintain(cluster)
        assert records(cluster.own(2), lost.partition_ids[0]) == [b"a"]
        delete_topic(cluster, name)
        assert names_at(cluster.own(2)) == {"orders", lost.topic_uuid if name == lost.name else lost.name}
    assert records(bench.cluster.own(2), lost.partition_ids[0]) == [b"a"]


def test_partitions_that_were_lost_and_made_again_are_never_mixed(bench: Bench):
    topic_at(bench.cluster, 2, "payments")
    backup = back_up(bench.cluster)
    grown = grow_topic(bench.cluster, "payments", partition_count=2)
    write(bench.cluster, grown.partition_ids[1])
    restore(bench.cluster, backup)
    again = grow_topic(bench.cluster, "payments", partition_count=2)
    assert again.partition_ids[1] != grown.partition_ids[1]
    with pytest.raises(WrongCluster, match=f"partition 1 of the topic 'payments'.*{LOST}"):
        write(bench.cluster, again.partition_ids[1])
    # Whatever else lives there goes on.
    write(bench.cluster, bench.partition_at(2))
    # As it says.
    delete_topic(bench.cluster, "payments")
    with bench.site.open() as cluster:
        for number in (2, 3):
            cluster.reconcile(number)
            assert version_of(cluster.own(number)) == version_of(cluster.controller)
        assert records(cluster.own(2), grown.partition_ids[1]) == [b"a"]
        made = topic_at(cluster, 2, "payments")
        write(cluster, made.partition_ids[0], b"b")
        assert read(cluster, made.partition_ids[0]) == [b"b"]


def test_clients_that_were_open_before_the_loss_write_and_read_nothing_of_another_topic(bench: Bench):
    backup = back_up(bench.cluster)
    lost = topic_at(bench.cluster, 2, "payments")
    servers = {"bootstrap.servers": ", ".join(bench.site.urls)}
    with Producer(servers) as producer, Consumer({**servers, "group.id": "g"}) as consumer:
        producer.produce("payments", b"a", partition=0)
        assert producer.flush(60) == 0
        consumer.assign([TopicPartition("payments", 0, 0)])
        message = consumer.poll(60)
        assert message is not None
        assert message.value() == b"a"
        restore(bench.cluster, backup)
        with bench.site.open() as others:
            others.controller.write(
                lambda connection: topic_rows.create_topic(
                    connection, "refunds", config={"txnstore.placement": others.label_of(2)}
                )
            )
        producer.produce("refunds", b"other", partition=0)
        assert producer.flush(60) == 0
        consumer.assign([TopicPartition("refunds", 0, 0)])
        message = consumer.poll(60)
        assert message is not None
        assert message.value() == b"other"
    assert records(bench.cluster._stores[2], lost.partition_ids[0]) == [b"a"]


def test_a_database_that_refuses_keeps_nobody_from_the_others(bench: Bench, capsys: pytest.CaptureFixture[str]):
    """As one with a topic under a number that a controller has given out again which was alone once more."""
    another = update(topics).values(topic_uuid="7d1f4d0c-1a2e-4a53-9f7b-0e6d3f3a1c11")
    bench.cluster.own(2).write(lambda connection: connection.execute(another))
    with bench.site.open() as cluster:
        left_out: LeftOut = {}
        assert [store.database_id for store in cluster.stores(left_out)] == [1, 3]
        with pytest.raises(WrongCluster, match=LOST):
            raise left_out[2]
        assert maintenance._run_once(cluster, DUTIES[:1]) == FAILED
    told = capsys.readouterr()
    assert told.out == f"0 {DUTIES[0].name}\n"
    assert LOST in told.err
    with pytest.raises(WrongCluster, match=f"has reused their numbers: .*{LOST}"):
        bench.cluster.reconcile(2)


# --- members ----------------------------------------------------------------------------------------------------------


def test_a_database_whose_registration_was_lost_is_the_same_one_again(site: Site):
    first, second, _ = site.urls
    with site.open(first, second) as cluster:
        backup = back_up(cluster)
        with site.open() as longer:
            lost = topic_at(longer, 3, "payments")
            write(longer, lost.partition_ids[0])
        restore(cluster, backup)
    with site.open() as cluster:
        assert [(member.database_id, member.coordinates) for member in cluster.databases] == [
            (1, True),
            (2, True),
            (3, False),
        ]
        assert records(cluster.own(3), lost.partition_ids[0]) == [b"a"]
        kept = create_topic(cluster, "refunds", config={"txnstore.placement": cluster.label_of(1)})
        assert kept.leaders == (1,)


def test_a_controller_from_before_its_cluster_makes_the_same_one_with_its_members(site: Site):
    with site.open(site.urls[0]) as alone:
        backup = back_up(alone)
    with site.open() as cluster:
        lost = topic_at(cluster, 2, "payments")
        write(cluster, lost.partition_ids[0])
        restore(cluster, backup)
        coordinators = {name: cluster.coordinator_id_of(name) for name in map(str, range(99))}
    first, second, third = site.urls
    with site.open(first, third, second) as cluster:
        assert {name: cluster.coordinator_id_of(name) for name in coordinators} == coordinators
        assert cluster.own(2).store_uuid != cluster.own(3).store_uuid
        assert records(cluster.own(2), lost.partition_ids[0]) == [b"a"]


@pytest.mark.slow
def test_a_database_that_has_the_label_of_one_that_was_lost_is_copied(site: Site, monkeypatch: pytest.MonkeyPatch):
    first, second, third = site.urls
    with site.open(first, second) as cluster:
        backup = back_up(cluster)
        cluster.add_database(third)
        cluster.add_database(site.new("fourth"))
        label = cluster.label_of(4)
        restore(cluster, backup)
    fresh = site.new("fifth")
    with site.open(first, second) as cluster:
        # It was made anew at the same address.
        monkeypatch.setattr("txnstore.db.cluster.membership.label_of_address", lambda _: label)
        assert cluster.add_database(fresh).label == label
        cluster.reconcile(2)
        assert not cluster.reconcile(2)
        copies = cluster.own(2).read(read_catalogue).rows["databases"]
        labels = {member.database_id: member.label for member in cluster.databases}
        assert {number: row["label"] for (number,), row in copies.items()} == labels


@pytest.mark.slow_but_first
@pytest.mark.parametrize("is_taken", [False, True])
def test_nothing_is_copied_to_a_database_that_is_not_the_one_that_is_registered(
    site: Site, caplog: pytest.LogCaptureFixture, *, is_taken: bool
):
    """By a client that had it open when the controller lost that it had joined."""
    first, second, _ = site.urls
    with site.open(first, second) as cluster, contextlib.ExitStack() as stack:
        backup = back_up(cluster)
        old = stack.enter_context(site.open())
        before = old.own(3).read(read_catalogue)
        restore(cluster, backup)
        if is_taken:
            cluster.add_database(site.new("fourth"))
        with pytest.raises(WrongCluster, match=f"no longer number 3 of the cluster: .*{LOST}"):
            old.reconcile(3)
        for name in ("payments", "refunds"):
            # After the first the controller may have come to a lower number than it had, which is copied to nobody.
            caplog.clear()
            create_topic(old, name, config={"txnstore.placement": cluster.label_of(2)})
        assert [getattr(record, "database", None) for record in caplog.records] == [old.label_of(3)]
        if is_taken:
            made = topic_at(cluster, 3, "orders")
            with pytest.raises(WrongCluster, match=LOST):
                write(old, made.partition_ids[0])
            write(cluster, made.partition_ids[0], b"b")
            assert read(cluster, made.partition_ids[0]) == [b"b"]
        assert old.own(3).read(read_catalogue) == before


@pytest.mark.slow_but_first
@pytest.mark.parametrize("taken", ["the number", "a name"])
def test_a_database_whose_registration_was_lost_is_refused_where_something_else_has_come_in_its_place(
    site: Site, taken: str
):
    first, second, third = site.urls
    with site.open(first) as alone:
        before = back_up(alone)
    with site.open(*([first, second] if taken == "the number" else site.urls)) as cluster:
        backup = back_up(cluster)
        if taken == "the number":
            with site.open() as longer:
                assert len(longer.databases) == 3
            restore(cluster, backup)
            cluster.add_database(site.new("fourth"))
        else:
            restore(cluster, before)
            with site.open(first) as alone:
                bench_producer(alone)
    for _ in range(2):
        with pytest.raises(WrongCluster, match=rf"third.* was number 3 of this cluster.*{LOST}|second.*number 2"):
            site.open(first, second, third)
    if taken == "a name":
        # Another cluster can take it in, once nothing is in it.
        with site.open(first) as alone:
            assert [member.label for member in alone.databases] == [ALONE_LABEL]


def bench_producer(cluster: Cluster) -> None:
    """Let the controller coordinate a name."""
    TransactionCoordinator(cluster.controller, cluster).init_producer_id("id", 60_000)
