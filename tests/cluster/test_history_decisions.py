"""A controller that has lost its last changes: decisions come to the partitions that they are about."""

from __future__ import annotations

from typing import NoReturn

import pytest
from sqlalchemy import Connection, delete, select

from tests.cluster.conftest import Bench, Producer, Site
from tests.cluster.conftest import down as down_for
from tests.cluster.test_history import back_up, records, restore, topic_at
from tests.tools.cluster_changes import delete_topic
from txnstore.db.cluster.membership import touch_catalogue
from txnstore.db.schema import databases, partition_heads, partitions, topics
from txnstore.errors import OutcomeUnknown, StoreCopied, StoreUnavailable, WrongCluster
from txnstore.log import topics as topic_rows
from txnstore.testing.invariants import assert_cluster_sound
from txnstore.transactions import delivery
from txnstore.transactions.distributed import RemoteTransaction
from txnstore.transactions.recovery import complete_all_decided


@pytest.mark.slow
@pytest.mark.parametrize("changed_since", [0, 1])
@pytest.mark.parametrize("is_copied", [True, False])
def test_a_decision_comes_to_a_partition_that_the_controller_has_lost(
    bench: Bench, changed_since: int, is_copied: bool
):
    """Whether or not the coordinator has ever heard of it, and whatever has been made since."""
    backup = back_up(bench.cluster)
    with bench.site.open() as others:
        # It had them open before, and remembers nothing of the topic.
        assert [others.own(number).database_id for number in (2, 3)] == [2, 3]
        producer = bench.producer_at(2)
        lost = topic_at(bench.cluster, 3, "payments")
        if not is_copied:
            for table in (partitions, topics):
                this = delete(table).where(table.c.topic_id == lost.topic_id)
                bench.cluster.own(2).write(lambda connection, this=this: connection.execute(this))
        producer.send(lost.partition_ids[0], b"a")
        with bench.down(3), pytest.raises(OutcomeUnknown, match="is decided"):
            producer.end(commit=True)
        restore(bench.cluster, backup)
        for number in range(changed_since):
            topic_at(others, 1 + number, "refunds")
        with down_for(others, others.own(3)), pytest.raises(StoreUnavailable, match="third"):
            complete_all_decided(others.own(2), others)
        others.own(3).gone_back = "it has gone back to an older state"
        with pytest.raises(StoreCopied if is_copied else StoreUnavailable, match=r"third.*it has gone back"):
            complete_all_decided(others.own(2), others)
        others.own(3).gone_back = None
        assert bench.queued(producer.transactional_id) == set(lost.partition_ids)
        if is_copied:
            # The coordinator's copy tells.
            with down_for(others, others.controller):
                complete_all_decided(others.own(2), others)
        complete_all_decided(others.own(2), others)
    assert bench.queued(producer.transactional_id) == set()
    assert records(bench.cluster.own(3), lost.partition_ids[0]) == [b"a"]


def test_a_decision_waits_for_nobody_where_the_topic_was_deleted(bench: Bench):
    """Even where the coordinator has never heard of it."""
    producer = bench.producer_at(2)
    with bench.down(2):
        topic = topic_at(bench.cluster, 3, "payments")
    producer.send(topic.partition_ids[0], b"a")
    with bench.down(3), pytest.raises(OutcomeUnknown, match="is decided"):
        producer.end(commit=True)
    with bench.down(2), bench.down(3):
        # The coordinator does not hear of it, nor can it be asked whether it is in use.
        delete_topic(bench.cluster, "payments")
    with bench.site.open() as others:
        store = others.own(3)
        with down_for(others, store):
            complete_all_decided(others.own(2), others)
    assert bench.queued(producer.transactional_id) == set()


@pytest.mark.slow
def test_of_what_one_database_is_to_write_only_what_was_deleted_is_left_out(bench: Bench):
    gone, producer = topic_at(bench.cluster, 3, "gone"), bench.producer_at(2)
    backup = back_up(bench.cluster)
    lost = topic_at(bench.cluster, 3, "payments")
    for topic in (gone, lost):
        producer.send(topic.partition_ids[0], b"a")
    with bench.down(3), pytest.raises(OutcomeUnknown, match="is decided"):
        producer.end(commit=True)
    restore(bench.cluster, backup)
    with bench.down(2):
        bench.cluster.controller.write(lambda connection: topic_rows.delete_topic(connection, "gone"))
        assert bench.cluster.reconcile(3)
    # Where the partitions live is known: nobody asks.
    complete_all_decided(bench.cluster.own(2), bench.cluster)
    assert bench.queued(producer.transactional_id) == set()
    assert records(bench.cluster.own(3), lost.partition_ids[0]) == [b"a"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("knows", ["remembers", "copies", "nothing"])
def test_a_decision_for_a_lost_partition_that_never_came_to_be_hangs_for_nobody(bench: Bench, knows: str):
    backup = back_up(bench.cluster)
    producer = bench.producer_at(2)
    with bench.down(3):
        (number,) = topic_at(bench.cluster, 3, "payments").partition_ids
    remote = RemoteTransaction(bench.cluster.own(2), bench.cluster, producer.transactional_id, producer.identity, None)
    remote.add_partitions([number], None)
    with bench.down(3), pytest.raises(OutcomeUnknown, match="is decided"):
        producer.end(commit=False)
    restore(bench.cluster, backup)
    with bench.site.open() as others:
        if knows == "nothing":
            forget = delete(partitions).where(partitions.c.partition_id == number)
            others.own(2).write(lambda connection: connection.execute(forget))
        by = bench.cluster if knows == "remembers" else others
        complete_all_decided(by.own(2), by)
    assert bench.queued(producer.transactional_id) == set()
    heads = select(partition_heads.c.partition_id)
    assert number not in bench.cluster.own(3).read(lambda connection: connection.execute(heads).scalars().all())


@pytest.mark.slow
def test_a_partition_that_was_added_and_not_written_to_makes_nobody_a_condition(bench: Bench):
    producer, number = bench.producer_at(2), bench.partition_at(3)
    remote = RemoteTransaction(bench.cluster.own(2), bench.cluster, producer.transactional_id, producer.identity, None)
    remote.add_partitions([number], None)
    with bench.down(1):
        producer.end(commit=False)
    assert bench.queued(producer.transactional_id) == set()
    assert_cluster_sound(bench.cluster, at_rest=True)


@pytest.mark.slow
def test_a_database_whose_registration_was_lost_holds_up_no_decision_of_others(bench: Bench):
    number, kept = bench.partition_at(3), bench.partition_at(1)
    held, free = bench.producer_at(2), bench.producer_at(2)
    held.send(number, b"a")
    free.send(kept, b"b")
    for producer, database_id in ((held, 3), (free, 1)):
        with bench.down(database_id), pytest.raises(OutcomeUnknown, match="is decided"):
            producer.end(commit=True)

    def lose(connection: Connection) -> None:
        connection.execute(delete(databases).where(databases.c.database_id == 3))
        touch_catalogue(connection)

    bench.cluster.controller.write(lose)
    forget = delete(partition_heads).where(partition_heads.c.partition_id == number)
    bench.cluster.own(3).write(lambda connection: connection.execute(forget))
    with pytest.raises(WrongCluster, match="no longer number 3"):
        complete_all_decided(bench.cluster.own(2), bench.cluster)
    assert bench.queued(held.transactional_id) == {number}
    assert bench.queued(free.transactional_id) == set()
    assert bench.read(kept) == [b"b"]


@pytest.mark.slow
def test_a_decision_waits_also_for_a_database_that_its_client_has_not_heard_of(site: Site):
    with site.open(*site.urls[:2]) as old, site.open() as cluster:
        assert len(old.databases) == 2
        backup = back_up(cluster)
        lost = topic_at(cluster, 3, "payments")
        name = next(name for name in map(str, range(99)) if cluster.coordinator_id_of(name) == 2)
        producer = Producer(cluster, name).start()
        producer.send(lost.partition_ids[0], b"a")
        with down_for(cluster, cluster.own(3)), pytest.raises(OutcomeUnknown, match="is decided"):
            producer.end(commit=True)
        restore(cluster, backup)
        bench = Bench(site, cluster, lost)
        for table in (partitions, topics):
            cluster.own(2).write(lambda connection, table=table: connection.execute(delete(table)))
        # No URL of its list leads there.
        with pytest.raises(StoreUnavailable, match=r"third.*add its URL.*it may have a partition"):
            complete_all_decided(old.own(2), old)
        assert bench.queued(name) == set(lost.partition_ids)
        with site.open() as others:
            complete_all_decided(others.own(2), others)
        assert bench.queued(name) == set()
        assert records(cluster.own(3), lost.partition_ids[0]) == [b"a"]


@pytest.mark.slow
def test_a_sound_cluster_is_asked_nothing_more_to_deliver_a_decision(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("looked for what is known")

    for name in ("read_deleted", "_heads"):
        monkeypatch.setattr(delivery, name, refuse)
    producer = bench.producer_at(2)
    for number in bench.topic.partition_ids:
        producer.send(number, b"a")
    with bench.down(3), pytest.raises(OutcomeUnknown, match="is decided"):
        producer.end(commit=True)
    with bench.site.open() as others:
        # It remembers nothing.
        complete_all_decided(others.own(2), others)
    assert bench.read(bench.partition_at(3)) == [b"a"]
