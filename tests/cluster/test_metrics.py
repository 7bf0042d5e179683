"""The figures of several databases: each of what it leads and coordinates, and one that is away holds up no other."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from txnstore.errors import StoreUnavailable
from txnstore.groups.administration import alter_offsets
from txnstore.model import OffsetAndMetadata, PartitionName
from txnstore.observability.metrics import StoreCollector
from txnstore.observability.store_figures import FigureLimits, StoreFigures, read_cluster_figures


@pytest.fixture
def held(bench):
    """A partition of the first database that a transaction of the second one holds, and a group of the third reads."""
    partition_id = bench.partition_at(1)
    producer = bench.producer_at(2)
    producer.send(partition_id, b"a", b"b")
    producer.end(commit=True)
    producer.send(partition_id, b"c")
    bench.clock.advance(7_000)
    group_id = bench.name_at(3, "group")
    offsets = {partition_id: OffsetAndMetadata(1), bench.partition_at(2): OffsetAndMetadata(0)}
    bench.cluster.coordinator_of(group_id).write(lambda connection: alter_offsets(connection, group_id, offsets))
    return producer, group_id


def holders_of(figures):
    assert isinstance(figures, StoreFigures)
    return [partition.holder for partition in figures.partitions if partition.holder is not None]


def test_names_and_positions_are_found_where_they_are_coordinated(bench, held):
    producer, group_id = held
    found = read_cluster_figures(bench.cluster, FigureLimits())
    assert sorted(found) == [1, 2, 3]
    ((holder,), second, third) = (holders_of(found[1]), found[2], found[3])
    assert (holder.transactional_id, holder.age_ms) == (producer.transactional_id, 7_000)
    assert isinstance(second, StoreFigures)
    assert isinstance(third, StoreFigures)
    assert holders_of(second) == holders_of(third) == []
    assert isinstance(found[1], StoreFigures)
    assert [figures.open_transactions for figures in (found[1], second, third)] == [0, 1, 0]
    # The lag is told where the partition is: one committed record, and the marker behind it.
    (lag,) = found[1].lags
    assert (lag.group_id, lag.partition, lag.offsets, lag.counted.records) == (
        group_id,
        PartitionName("orders", bench.topic.partition_ids.index(bench.partition_at(1))),
        2,
        1,
    )
    assert [lag.counted.records for lag in second.lags] == [0]
    assert third.members == {group_id: 0}
    assert all(len(figures.partitions) == 2 for figures in found.values() if isinstance(figures, StoreFigures))


def test_a_database_that_is_away_is_said_to_be_and_the_others_tell_what_they_know(bench, held):
    with bench.down(2):
        found = read_cluster_figures(bench.cluster, FigureLimits())
    assert isinstance(found[2], StoreUnavailable)
    (holder,) = holders_of(found[1])
    assert holder.transactional_id is None
    assert isinstance(found[1], StoreFigures)
    assert [lag.counted.records for lag in found[1].lags] == [1]


def test_a_collector_learns_of_databases_that_join_later(site):
    first, second, _ = site.urls
    with site.open(first) as alone:
        alone.controller.read(lambda connection: None)
    collector = StoreCollector(f"{first},{second}", timeout_seconds=60)
    registry = CollectorRegistry()
    registry.register(collector)
    told = collected(registry)
    assert list(told.values()) == [1]
    with site.open(first, second):
        pass
    told = collected(registry)
    assert list(told.values()) == [1, 1]
    collector.close()


def collected(registry):
    """Return which databases are up, by their labels."""
    return {
        sample.labels["database"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "txnstore_up"
    }
