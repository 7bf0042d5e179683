"""A controller that was restored without its members: who is refused, who is not, and that nothing is deleted there."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, insert, update

from tests.cluster.conftest import Bench, Site, read
from txnstore.cli import maintenance
from txnstore.cli.output import FAILED
from txnstore.db.cluster.cluster import Cluster, repaired
from txnstore.db.cluster.membership import CONTROLLER_ID
from txnstore.db.opening import open_store
from txnstore.db.schema import databases, partitions
from txnstore.errors import UnknownTopicOrPartition, WrongCluster
from txnstore.log import topics as topic_rows
from txnstore.log.append import Append, append
from txnstore.log.cluster_topics import bring_up_to_date, create_topic
from txnstore.log.codec import encode
from txnstore.log.deleting import purge_deleted_partitions
from txnstore.maintenance.duties import DUTIES
from txnstore.model import Record
from txnstore.testing.invariants import assert_cluster_sound

LOST = "restored from an older backup, or a failover has lost its last changes"


def get_ahead(cluster: Cluster, database_id: int) -> None:
    """Let a member have a partition that its controller has not made."""
    row = {"partition_id": 1 << 40, "topic_id": 1, "partition_number": 1 << 20, "leader_database_id": database_id}

    def work(connection: Connection) -> None:
        connection.execute(insert(partitions).values(row))
        newer = update(databases).where(databases.c.database_id == CONTROLLER_ID)
        connection.execute(newer.values(catalogue_version=1 << 60))

    cluster.own(database_id).write(work)


def test_a_database_that_refuses_keeps_nobody_from_the_others(bench: Bench, capsys: pytest.CaptureFixture[str]):
    get_ahead(bench.cluster, 2)
    with bench.site.open() as cluster:
        stores = cluster.stores()
        assert [next(stores).database_id, next(stores).database_id] == [1, 3]
        with pytest.raises(WrongCluster, match=LOST):
            next(stores)
        assert maintenance._run_once(cluster, DUTIES[:1]) == FAILED
    told = capsys.readouterr()
    assert told.out == f"0 {DUTIES[0].name}\n"
    assert LOST in told.err


def write(cluster: Cluster, number: int) -> None:
    batch = Append(number, encode([Record(b"a")]))
    leader = cluster.leader_of_partition(number)
    repaired(cluster, leader, lambda store: store.write(lambda connection: append(connection, [batch])))


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
    assert_cluster_sound(cluster, at_rest=True)


def test_a_database_that_still_deletes_by_numbers_of_its_own_gets_others_with_these_numbers_later(site: Site):
    with open_store(site.urls[1]) as store:
        topic = store.write(lambda connection: topic_rows.create_topic(connection, "mine"))
        batch = Append(topic.partition_ids[0], encode([Record(b"old")]))
        store.write(lambda connection: append(connection, [batch]))
        store.write(lambda connection: topic_rows.delete_topic(connection, "mine"))
    with site.open() as cluster:
        made = create_topic(cluster, "orders", config={"txnstore.placement": cluster.label_of(2)})
        assert made.partition_ids == topic.partition_ids
        assert_written_once_nothing_is_deleted_by_its_number(cluster, made.partition_ids[0])
