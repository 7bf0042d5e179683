"""A controller that was restored without its members: who is refused, who is not, and that nothing is deleted there."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, insert, update

from tests.cluster.conftest import Bench
from txnstore.cli import maintenance
from txnstore.cli.output import FAILED
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.cluster.membership import CONTROLLER_ID
from txnstore.db.schema import databases, partitions
from txnstore.errors import WrongCluster
from txnstore.maintenance.duties import DUTIES

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
