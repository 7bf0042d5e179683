"""The outbox of a member that has not heard of the newest topics and settings: none of its rows is refused for that."""

from __future__ import annotations

import pytest
from sqlalchemy import delete, insert, select

from tests.clients.steps import PATIENCE_SECONDS
from tests.cluster.conftest import down, read
from tests.tools.cluster_changes import change_topic_configs, delete_topic, grow_topic
from txnstore import Consumer
from txnstore.db.portions import Portions
from txnstore.db.schema import deleted_partitions, outbox, partition_heads
from txnstore.errors import StoreUnavailable
from txnstore.log.cluster_topics import bring_up_to_date, create_topic
from txnstore.log.outbox import sequencer
from txnstore.log.outbox.sequencer import drain_outbox
from txnstore.maintenance.duties import DUTIES
from txnstore.maintenance.turns import take_turn


@pytest.fixture
def cluster(site):
    with site.open() as found:
        create_topic(found, "known", config={"txnstore.placement": found.label_of(2)})
        create_topic(found, "far", config={"txnstore.placement": found.label_of(1)})
        yield found


def put(store, *values, topic="known", **columns):
    rows = [{"topic": topic, "value": value, **columns} for value in values]
    store.write(lambda connection: connection.execute(insert(outbox), rows))


def left(store):
    """Return what is still in the outbox: values, and why they were refused."""
    return store.read(
        lambda connection: [
            (row.value, row.refusal) for row in connection.execute(select(outbox).order_by(outbox.c.outbox_id))
        ]
    )


def create(cluster):
    create_topic(cluster, "late", config={"txnstore.placement": cluster.label_of(2)})


def grow(cluster):
    grow_topic(cluster, "known", partition_count=2)


def grow_into_it(cluster):
    change_topic_configs(cluster, "far", {"txnstore.placement": cluster.label_of(2)})
    grow_topic(cluster, "far", partition_count=2)


def create_again(cluster):
    delete_topic(cluster, "far")
    create_topic(cluster, "far", config={"txnstore.placement": cluster.label_of(2)})


def allow(cluster):
    change_topic_configs(cluster, "known", {"max.message.bytes": "2000000"})


@pytest.fixture(
    params=[
        (create, {"topic": "late"}),
        (grow, {"partition_number": 1}),
        (grow_into_it, {"topic": "far"}),
        (create_again, {"topic": "far", "partition_number": 0}),
        (allow, {}),
    ],
    ids=["topic", "partition", "place", "recreation", "size"],
)
def member(request, cluster):
    """A member that was away when a change was made, without which a row in its outbox is no record."""
    change, columns = request.param
    found = cluster.own(2)
    with down(cluster, found):
        change(cluster)
    put(found, b"v" * (1_500_000 if change is allow else 1), **columns)
    put(found, b"behind")
    return found


def lengths(cluster):
    """Return the lengths of the records that the member holds."""
    ids = cluster.own(2).read(
        lambda connection: connection.execute(select(partition_heads.c.partition_id)).scalars().all()
    )
    return sorted(len(value or b"") for number in ids for value in read(cluster, number))


@pytest.mark.slow_but_first
def test_the_maintenance_brings_what_a_row_needs_before_it_would_refuse_it(cluster, member):
    take_turn(member, cluster, DUTIES, Portions(), forced=True)
    assert left(member) == []
    assert lengths(cluster) in ([1, 6], [6, 1_500_000])


def test_a_consumer_brings_what_a_row_needs_before_it_would_refuse_it(site, cluster, member):
    urls = ", ".join(site.urls)
    with Consumer({"bootstrap.servers": urls, "group.id": "g", "auto.offset.reset": "earliest"}) as consumer:
        consumer.subscribe(["known"])
        while left(member):
            assert consumer.poll(PATIENCE_SECONDS) is not None
    assert len(lengths(cluster)) == 2


@pytest.mark.slow_but_first
def test_who_cannot_ask_for_the_newest_leaves_the_rows_to_others(cluster, member):
    with pytest.raises(StoreUnavailable, match="only with the URLs of all databases"):
        drain_outbox(member)
    with down(cluster, cluster.controller), pytest.raises(StoreUnavailable):
        drain_outbox(member, cluster=cluster)
    assert [refusal for _, refusal in left(member)] == [None, None]
    assert drain_outbox(member, cluster=cluster) == 2
    assert len(lengths(cluster)) == 2


def test_what_is_in_front_of_a_row_that_nobody_can_judge_does_not_wait(cluster):
    """But for the rest of the row's database transaction, and what is behind."""
    member = cluster.own(2)
    put(member, b"before")
    put(member, b"no record", headers="[1]")
    # What `produce` notes on SQLite; on PostgreSQL it says nothing.
    put(member, b"of it", committed_id=2)
    member.write(
        lambda connection: connection.execute(
            insert(outbox),
            [
                {"topic": "known", "value": b"with it", "partition_number": 0, "committed_id": 3},
                {"topic": "known", "value": b"unknown", "partition_number": 9, "committed_id": 3},
            ],
        )
    )
    put(member, b"behind", committed_id=5)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="only with the URLs of all databases"):
            drain_outbox(member)
        found = left(member)
        assert [value for value, _ in found] == [b"no record", b"with it", b"unknown", b"behind"]
        assert [value for value, refusal in found if refusal is not None] == [b"no record"]
    assert lengths(cluster) == [len(b"of it"), len(b"before")]


def test_a_row_is_judged_again_if_the_newest_came_by_others_since_it_was(cluster, member, monkeypatch):
    has_newer = sequencer._has_newer

    def has_newer_once_they_have_come(*arguments):
        bring_up_to_date(member, cluster)
        return has_newer(*arguments)

    monkeypatch.setattr(sequencer, "_has_newer", has_newer_once_they_have_come)
    assert drain_outbox(member, cluster=cluster) == 2


def test_a_row_waits_for_a_topic_that_cannot_come_before_others_are_deleted(cluster):
    member = cluster.own(2)
    with down(cluster, member):
        late = create_topic(cluster, "late", config={"txnstore.placement": cluster.label_of(2)})
    still_deleted = {"partition_id": late.partition_ids[0]}
    member.write(lambda connection: connection.execute(insert(deleted_partitions), still_deleted))
    put(member, b"v", topic="late")
    with pytest.raises(StoreUnavailable, match="still deletes"):
        drain_outbox(member, cluster=cluster)
    assert left(member) == [(b"v", None)]
    member.write(lambda connection: connection.execute(delete(deleted_partitions)))
    assert drain_outbox(member, cluster=cluster) == 1
    assert lengths(cluster) == [1]


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"partition_number": 9}, "has partitions 0 to 0, not 9"),
        ({"topic": "nowhere"}, "changed in the controller"),
        ({"timestamp_ms": 2**60}, "after the store's time"),
    ],
)
def test_a_row_that_cannot_become_a_record_by_the_newest_is_refused(cluster, columns, why):
    member = cluster.own(2)
    put(member, b"v", **columns)
    put(member, b"behind")
    with pytest.raises(StoreUnavailable):
        drain_outbox(member)
    assert drain_outbox(member, cluster=cluster) == 1
    ((value, refusal),) = left(member)
    assert value == b"v"
    assert why in refusal


@pytest.mark.parametrize(
    ("columns", "why"),
    [({"topic": "no/topic"}, "a-z A-Z 0-9"), ({"partition_number": -2}, "not -2"), ({"headers": "[1]"}, "its headers")],
)
def test_a_row_that_no_change_would_make_a_record_is_refused_at_once(cluster, columns, why):
    member = cluster.own(2)
    put(member, b"v", **columns)
    put(member, b"behind")
    assert drain_outbox(member) == 1
    ((_, refusal),) = left(member)
    assert why in refusal


def test_the_controller_itself_refuses_by_what_it_has(cluster):
    put(cluster.controller, b"v", topic="no/topic")
    assert drain_outbox(cluster.controller) == 0
    ((_, refusal),) = left(cluster.controller)
    assert "a-z A-Z 0-9" in refusal
