"""Databases of one cluster whose tables are of different versions: each is used or refused for itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.conftest import Bench, Producer, Site, read
from tests.tools.later_versions import FIRST_LATER, THIRD_LATER
from txnstore.db import opening
from txnstore.db.opening import connect_store
from txnstore.db.schema import SCHEMA_VERSION
from txnstore.errors import OutcomeUnknown, SchemaOutdated, SchemaTooNew
from txnstore.testing.invariants import assert_cluster_sound
from txnstore.transactions.recovery import complete_all_decided

Become = Callable[[int], None]


def upgrade(*urls: str) -> None:
    for url in urls:
        with connect_store(url) as store:
            opening.upgrade(store)


@pytest.mark.slow
def test_newer_code_uses_the_members_of_its_version_and_refuses_the_others_by_name(
    bench: Bench, code_of_version: Become
):
    site, names = bench.site, [bench.name_at(1, "id") for _ in range(2)]
    (mine, other) = (bench.partition_at(number) for number in (1, 2))
    code_of_version(FIRST_LATER)
    with pytest.raises(SchemaOutdated, match=r"first.*run `txnstore migrate`"):
        site.open()
    upgrade(site.urls[0])
    with site.open() as cluster:
        refused = Producer(cluster, names[0]).start()
        refused.send(mine, b"a")
        with pytest.raises(SchemaOutdated, match=rf"second.*of version {SCHEMA_VERSION}.*run `txnstore migrate`"):
            refused.send(other, b"b")
        with pytest.raises(SchemaOutdated, match="second"):
            read(cluster, other)
        with pytest.raises(OutcomeUnknown, match=r"decided, but .*second.*run `txnstore migrate`"):
            refused.end(commit=False)
        producer = Producer(cluster, names[1]).start()
        producer.send(mine, b"c")
        producer.end(commit=True)
        assert read(cluster, mine) == [b"c"]
    upgrade(*site.urls)
    with site.open() as cluster:
        assert list(complete_all_decided(cluster.own(1), cluster)) == [names[0]]
        assert read(cluster, other) == []
        producer = Producer(cluster, names[0]).start()
        producer.send(mine, b"d")
        producer.send(other, b"e")
        producer.end(commit=True)
        assert (read(cluster, mine), read(cluster, other)) == ([b"c", b"d"], [b"e"])
        assert_cluster_sound(cluster, at_rest=True)


@pytest.mark.slow
def test_older_code_refuses_the_members_that_are_newer(bench: Bench, code_of_version: Become):
    site, name = bench.site, bench.name_at(1, "id")
    (mine, other) = (bench.partition_at(number) for number in (1, 2))
    code_of_version(FIRST_LATER)
    upgrade(site.urls[1])
    code_of_version(SCHEMA_VERSION)
    with site.open() as cluster:
        producer = Producer(cluster, name).start()
        producer.send(mine, b"a")
        with pytest.raises(SchemaTooNew, match=rf"second.*of version {FIRST_LATER}.*upgrade the package"):
            read(cluster, other)
        producer.end(commit=True)
        assert read(cluster, mine) == [b"a"]


@pytest.mark.slow
def test_what_was_decided_before_the_upgrade_is_delivered_after_it(bench: Bench, code_of_version: Become):
    site, producer = bench.site, bench.producer_at(1)
    partitions = [bench.partition_at(number) for number in (1, 2, 3)]
    for number in partitions:
        producer.send(number, b"a")
    with bench.down(2), pytest.raises(OutcomeUnknown, match="decided"):
        producer.end(commit=True)
    code_of_version(THIRD_LATER)
    upgrade(site.urls[0], site.urls[2])
    with site.open() as cluster:
        with pytest.raises(SchemaOutdated, match="second"):
            complete_all_decided(cluster.own(1), cluster)
        assert [read(cluster, partitions[place]) for place in (0, 2)] == [[b"a"], [b"a"]]
    upgrade(site.urls[1])
    with site.open() as cluster:
        complete_all_decided(cluster.own(1), cluster)
        assert [read(cluster, number) for number in partitions] == [[b"a"]] * 3
        assert_cluster_sound(cluster, at_rest=True)


def test_a_fresh_database_whose_tables_are_older_does_not_join(site: Site, code_of_version: Become):
    with site.open(*site.urls[:2]) as cluster:
        before = [member.label for member in cluster.databases]
    code_of_version(FIRST_LATER)
    upgrade(*site.urls[:2])
    with pytest.raises(SchemaOutdated, match="third"):
        site.open()
    with site.open(*site.urls[:2]) as cluster:
        assert [member.label for member in cluster.databases] == before
    upgrade(site.urls[2])
    with site.open() as cluster:
        assert len(cluster.databases) == len(before) + 1
