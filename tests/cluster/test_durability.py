"""Durability of what databases of a cluster go by: it waits for the disk although the store's commits need not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.conftest import Bench, Producer, Site
from tests.db.test_durability import seen, set_for_database, watch, watch_also
from txnstore.db.backend import Durability, Limits
from txnstore.log.append import Append
from txnstore.log.cluster_topics import create_topic
from txnstore.log.codec import encode
from txnstore.model import Record
from txnstore.transactions.recovery import abort_timed_out
from txnstore.transactions.transaction import abort_if_timed_out
from txnstore.transactions.writers import append_as_writer, begin_transaction, join_transaction

TIMEOUT_MS = 60_000
#: Of the coordinator's database: who takes part elsewhere, and what the others are still to be told.
AT_COORDINATOR = ("transaction_partitions", "transaction_groups", "transaction_writer_partitions", "pending_markers")
#: Of the others: records and markers, and consumed offsets before and after the decision.
ELSEWHERE = ("partition_heads", "pending_group_offsets", "group_offsets")


@pytest.fixture
def risky(postgresql_site: Site) -> Iterator[Bench]:
    """A cluster of which each database commits without waiting, as its clients want it."""
    site = postgresql_site
    for url in site.urls:
        set_for_database(url, "off")
    with site.open(limits=Limits(durability=Durability.DATABASE)) as cluster:
        topic = create_topic(cluster, "orders", partition_count=6, config={"txnstore.placement": "roundrobin"})
        for url, tables in zip(site.urls[:2], (AT_COORDINATOR, ELSEWHERE), strict=True):
            first, *others = (f"txnstore.{name}" for name in tables)
            watch(url, first)
            for name in others:
                watch_also(url, name)
        yield Bench(site, cluster, topic)


def opened(bench: Bench) -> Producer:
    """Return a producer of the first database that has written to the second one."""
    producer = bench.producer_at(1)
    producer.send(bench.partition_at(2), b"a")
    return producer


def both(bench: Bench) -> list[set[str]]:
    """Return what the commits of both databases went by since the last look."""
    return [seen(url) for url in bench.site.urls[:2]]


@pytest.mark.slow
def test_who_takes_part_elsewhere_what_is_written_there_and_the_decision_are_lasting(risky: Bench):
    producer = opened(risky)
    assert both(risky) == [{"on"}, {"on"}]
    producer.send_offsets(risky.name_at(2, "group"), {risky.partition_at(2): 1})
    assert both(risky) == [{"on"}, {"on"}]
    producer.end(commit=True)
    assert both(risky) == [{"on"}, {"on"}]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("how", ["together", "alone"])
def test_so_is_that_it_is_aborted_for_its_age(risky: Bench, how: str):
    producer = opened(risky)
    both(risky)
    risky.clock.advance(TIMEOUT_MS + 1)
    store = risky.cluster.own(1)
    if how == "together":
        assert abort_timed_out(store, risky.cluster) == (producer.transactional_id,)
    else:
        assert abort_if_timed_out(store, producer.transactional_id, risky.cluster)
    assert both(risky) == [{"on"}, {"on"}]


@pytest.mark.slow
def test_so_is_what_a_further_writer_writes_there(risky: Bench):
    producer = risky.producer_at(1)
    store = risky.cluster.own(1)
    begin_transaction(store, producer.transactional_id, producer.identity, cluster=risky.cluster)
    writer = join_transaction(store, producer.transactional_id, producer.identity, cluster=risky.cluster)
    batch = encode([Record(b"w")], producer=writer.identity, base_sequence=0, is_transactional=True)
    append_as_writer(store, writer, [Append(risky.partition_at(2), batch)], cluster=risky.cluster)
    assert both(risky) == [{"on"}, {"on"}]


@pytest.mark.slow
def test_what_is_all_in_one_database_takes_the_risk(risky: Bench):
    watch_also(risky.site.urls[0], "txnstore.partition_heads")
    producer = risky.producer_at(1)
    producer.send(risky.partition_at(1), b"a")
    producer.end(commit=True)
    assert both(risky) == [{"off"}, set()]
