"""The relay to Kafka, with a store in Kafka's place: a death at each call, positions, gaps, and wrong calls."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from sqlalchemy import select

import txnstore
from tests.relay.kafka_side import Sent
from tests.relay.running import beside, wait_until
from tests.relay.stand_in import CALLS, CrashingLibrary
from tests.relay.store_side import begin, copy, make_topic, make_topic_with, numbered, put, read, ship
from tests.tools.crashes import Crash, CrashPoint, When
from txnstore.db.opening import open_store
from txnstore.db.schema import partition_heads, relay_positions
from txnstore.db.store import server_now_ms
from txnstore.errors import StoreUnavailable
from txnstore.log.deleting import purge_deleted_partitions
from txnstore.log.topics import grow_topic
from txnstore.model import PartitionName
from txnstore.relay.errors import KafkaUnavailable, RelayFailed, RelayFenced
from txnstore.relay.kafka_cluster import KafkaCluster
from txnstore.relay.options import OnGap, RelayOptions, RelayStart, relay_id_to, start_id_of
from txnstore.relay.positions import RelayPosition, begin_relay_positions, forget_relay
from txnstore.relay.to_kafka import ToKafka

NULLS = [
    Sent(None, None),
    Sent(b"", b""),
    Sent(b"v", None, (("a", b"1"), ("a", None), ("b", b""))),
    Sent(None, b"k", (), 1),
]


def test_everything_of_a_record_arrives(store, stand_in):
    make_topic(store, "shop", 3)
    put(store, "shop", NULLS, partition=1)
    put(store, "shop", numbered(5), partition=2)
    assert ship(store, stand_in.cluster()) == 9
    assert stand_in.side.read("shop") == {0: [], 1: NULLS, 2: numbered(5)} == read(store, "shop")


def test_what_came_from_the_same_cluster_is_not_shipped_back(store, stand_in):
    stand_in.side.create("shop", 1)
    stand_in.side.send("shop", numbered(3))
    make_topic(store, "other")
    assert copy(store, stand_in.cluster(), topics=["shop"], name="one") == 3
    with pytest.raises(RelayFailed, match="topic shop: another relay copies it in the other direction"):
        ship(store, stand_in.cluster(), name="two")
    assert ship(store, stand_in.cluster(), topics=["other"], name="two") == 0
    assert stand_in.side.read("shop") == {0: numbered(3)}


def test_what_does_not_fit_into_kafka_is_in_the_way_of_nobody(store, stand_in):
    """A relay that is refused has begun nothing."""
    stand_in.side.create("shop", 1)
    stand_in.side.send("shop", numbered(3))
    make_topic(store, "shop", 2)
    with pytest.raises(RelayFailed, match="has 2 partitions, but only 1 in Kafka"):
        ship(store, stand_in.cluster())
    assert stands_in(store) == []
    assert copy(store, stand_in.cluster()) == 3


@pytest.mark.slow
def test_a_topic_that_kafka_refuses_is_shipped_once_it_takes_it_or_forgotten_by_the_command_that_the_error_names(
    store, stand_in, monkeypatch
):
    def refuse(_, counts, __):
        return {name: RelayFailed(f"creating topic {name} in Kafka: Topic authorization failed") for name in counts}

    make_topic(store, "shop")
    put(store, "shop", numbered(2))
    with monkeypatch.context() as patched:
        patched.setattr(KafkaCluster, "create_topics", refuse)
        for name in ("one", "two"):
            with pytest.raises(
                RelayFailed, match=r"shop in Kafka: Topic authorization failed\. Started again"
            ) as refused:
                ship(store, stand_in.cluster(), name=name, start=RelayStart.LATEST)
    *_, relay_id, option, topic = str(refused.value).split()
    assert (relay_id.endswith("/two"), option, topic) == (True, "--topic", "shop")
    put(store, "shop", numbered(3))
    # It begins where it was to begin the first time.
    assert ship(store, stand_in.cluster(), name="one", start=RelayStart.LATEST) == 3
    assert stand_in.side.read("shop") == {0: numbered(3)}
    with pytest.raises(RelayFailed, match=f"in the other direction.* --forget {relay_id.replace('two', 'one')} "):
        copy(store, stand_in.cluster())
    assert store.write(lambda connection: forget_relay(connection, relay_id, ["shop"])) == 1
    assert set(stands_in(store)) == {"shop"}
    assert store.write(lambda connection: forget_relay(connection, "one", ["shop"])) == 1
    assert stands_in(store) == []
    assert copy(store, stand_in.cluster()) == 3


def test_each_topic_that_another_relay_copies_is_to_be_forgotten_by_name(store, stand_in):
    """To forget the others with them would have them copied once more."""
    for topic in ("a", "b", "c"):
        stand_in.side.create(topic, 1)
        stand_in.side.send(topic, numbered(1))
    assert copy(store, stand_in.cluster(), name="one") == 3
    assert copy(store, stand_in.cluster(), name="two", topics=["a"]) == 1
    with pytest.raises(RelayFailed, match=r"topic a, c: .* --forget from/[^/]*/one --topic a --topic c$"):
        ship(store, stand_in.cluster(), topics=["a", "c"])


def test_a_second_run_ships_what_is_new(store, stand_in):
    make_topic(store, "shop")
    put(store, "shop", numbered(3))
    assert ship(store, stand_in.cluster()) == 3
    assert ship(store, stand_in.cluster()) == 0
    put(store, "shop", numbered(2, 3))
    assert ship(store, stand_in.cluster()) == 2
    assert stand_in.side.read("shop") == {0: numbered(5)}


def test_what_is_aborted_never_arrives_and_what_is_open_comes_later(store, stand_in):
    make_topic(store, "shop")
    begin(store, "aborted", "shop", numbered(3, 100))(False)
    begin(store, "committed", "shop", numbered(3))(True)
    end = begin(store, "open", "shop", numbered(2, 3))
    put(store, "shop", numbered(1, 5))
    assert ship(store, stand_in.cluster()) == 3
    end(True)
    assert ship(store, stand_in.cluster()) == 3
    assert stand_in.side.read("shop") == {0: numbered(6)}


@pytest.mark.slow
def test_a_death_at_each_call_loses_nothing_and_repeats_nothing(txnstore_sqlite_url, stand_in):
    calls = set()
    with open_store(txnstore_sqlite_url) as store:
        for run in itertools.count(1):
            topic = f"topic-{run}"
            make_topic(store, topic)
            put(store, topic, numbered(2))
            begin(store, "aborted", topic, numbered(1, 50))(False)
            step, when = (run + 1) // 2, (When.BEFORE, When.AFTER)[(run + 1) % 2]
            library = CrashingLibrary(step, when)
            try:
                ship(store, stand_in.cluster(library), topics=[topic])
            except Crash as crash:
                calls.add((crash.point.statement, crash.point.when))
            put(store, topic, numbered(2, 2))
            ship(store, stand_in.cluster(), topics=[topic])
            assert stand_in.side.read(topic) == {0: numbered(4)}, library.point
            if library.point is None:
                break
    assert calls == {(name, when) for name in CALLS for when in When}


def test_it_begins_where_it_is_told_to_and_only_the_first_time(store, stand_in):
    make_topic(store, "shop")
    put(store, "shop", numbered(3))
    assert ship(store, stand_in.cluster(), start=RelayStart.LATEST) == 0
    put(store, "shop", numbered(2, 3))
    assert ship(store, stand_in.cluster(), start=RelayStart.LATEST) == 2
    assert stand_in.side.read("shop") == {0: numbered(2, 3)}


def test_what_was_there_when_an_earliest_one_died_is_left_out_by_a_latest_one_and_by_no_other(store, stand_in):
    """It had told of the topic's end before it was to copy anything."""
    for start, expected in ((RelayStart.LATEST, numbered(2, 3)), (RelayStart.EARLIEST, numbered(5))):
        topic = start.name
        make_topic(store, topic)
        put(store, topic, numbered(3))
        with pytest.raises(Crash):
            ship(store, stand_in.cluster(CrashingLibrary(1, When.BEFORE)), topics=(topic,), start=RelayStart.EARLIEST)
        put(store, topic, numbered(2, 3))
        ship(store, stand_in.cluster(), topics=(topic,), start=start)
        assert stand_in.side.read(topic) == {0: expected}


class _SecondFailsLibrary:
    """confluent-kafka's names, whose first producer of partition 1 raises an error when it begins."""

    def __init__(self, error: Callable[[], BaseException]) -> None:
        """Raise what `error` returns."""
        self._errors = iter([error])

    def __getattr__(self, name):
        return getattr(txnstore, name)

    def Producer(self, settings):  # noqa: N802 - it stands for a class
        if settings["transactional.id"].endswith("-1"):
            for error in self._errors:
                raise error()
        return txnstore.Producer(settings)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("dies", [True, False], ids=["dies", "tries again"])
def test_all_partitions_begin_at_the_ends_that_the_first_look_found(store, stand_in, dies):
    make_topic(store, "shop", 2)
    for partition in range(2):
        put(store, "shop", numbered(3), partition=partition)

    def error():
        put(store, "shop", numbered(2, 3), partition=1)
        return Crash(CrashPoint(1, When.BEFORE, "")) if dies else KafkaUnavailable("away")

    with pytest.raises(Crash) if dies else nullcontext():
        ship(store, stand_in.cluster(_SecondFailsLibrary(error)), start=RelayStart.LATEST)
    put(store, "shop", numbered(2, 3), partition=0)
    ship(store, stand_in.cluster(), start=RelayStart.LATEST)
    assert stand_in.side.read("shop") == {0: numbered(2, 3), 1: numbered(2, 3)}


def test_a_partition_that_comes_up_before_a_relay_is_started_again_is_shipped_from_its_first_record(store, stand_in):
    """The relay died when it had written where it begins, and nothing else."""
    make_topic(store, "shop")
    put(store, "shop", numbered(3))
    with pytest.raises(Crash):
        ship(store, stand_in.cluster(CrashingLibrary(1, When.BEFORE)), start=RelayStart.LATEST)
    stand_in.side.grow("shop", 2)
    store.write(lambda connection: grow_topic(connection, "shop", partition_count=2))
    put(store, "shop", numbered(2), partition=1)
    assert ship(store, stand_in.cluster(), start=RelayStart.LATEST) == 2
    assert stand_in.side.read("shop") == {0: [], 1: numbered(2)}


def test_a_relay_that_begins_at_the_first_record_after_all_does_so(store, stand_in):
    make_topic(store, "shop")
    put(store, "shop", numbered(3))
    with pytest.raises(Crash):
        ship(store, stand_in.cluster(CrashingLibrary(1, When.BEFORE)), start=RelayStart.LATEST)
    assert ship(store, stand_in.cluster()) == 3


def test_a_partition_that_comes_up_beside_what_was_relayed_is_shipped_from_its_first_record(store, stand_in):
    """Also by a relay that has not written where it was to begin, as those from the first record once did not."""
    make_topic(store, "shop")
    ship(store, stand_in.cluster())
    of_start = relay_positions.c.relay_id.startswith("start/")
    store.write(lambda connection: connection.execute(relay_positions.delete().where(of_start)))
    stand_in.side.grow("shop", 2)
    store.write(lambda connection: grow_topic(connection, "shop", partition_count=2))
    put(store, "shop", numbered(2), partition=1)
    assert ship(store, stand_in.cluster(), start=RelayStart.LATEST) == 2


@pytest.mark.slow_but_first
@pytest.mark.parametrize("held", [0, 1])
def test_what_is_deleted_after_a_latest_one_has_begun_and_died_is_missed(store, stand_in, delete_records, held):
    """Also from a topic that held nothing then: 0 is a place to begin as any other."""
    make_topic(store, "shop")
    if held:
        put(store, "shop", numbered(held))
    with pytest.raises(Crash):
        ship(store, stand_in.cluster(CrashingLibrary(1, When.BEFORE)), start=RelayStart.LATEST)
    put(store, "shop", numbered(10, held))
    delete_records(store, "shop", before=7)
    for _ in range(2):
        with pytest.raises(RelayFailed, match=f"begins at 7, after the relay's position {held}; --on-gap"):
            ship(store, stand_in.cluster(), start=RelayStart.LATEST)
    assert ship(store, stand_in.cluster(), start=RelayStart.LATEST, on_gap=OnGap.EARLIEST) == 3 + held


def test_a_topic_that_has_lost_records_before_the_relay_saw_it_has_no_gap(
    store, stand_in, delete_records, delete_topic
):
    """It comes in the place of one in which the relay had begun, so it is shipped from its first record."""
    make_topic(store, "shop")
    with pytest.raises(Crash):
        ship(store, stand_in.cluster(CrashingLibrary(1, When.BEFORE)), start=RelayStart.LATEST)
    delete_topic(store, "shop")
    make_topic(store, "shop")
    put(store, "shop", numbered(5))
    delete_records(store, "shop", before=2)
    assert ship(store, stand_in.cluster(), start=RelayStart.LATEST) == 3


def test_a_topic_that_is_deleted_a_moment_after_it_came_up_stops_nobody(store, stand_in, delete_topic, monkeypatch):
    make_topic(store, "shop")
    monkeypatch.setattr("txnstore.relay.to_kafka.LOOK_AGAIN_SECONDS", 0)
    relay = ToKafka(store, stand_in.cluster(), RelayOptions())
    with beside(relay.run):
        put(store, "shop", numbered(1))
        wait_until(lambda: relay.shipped_count == 1)
        seen = []

        def delete(topic, _):
            seen.append(topic.name)
            delete_topic(store, topic.name)

        monkeypatch.setattr("txnstore.relay.to_kafka.check_leaders", delete)
        make_topic(store, "goes")
        wait_until(lambda: seen)
        put(store, "shop", numbered(1, 1))
        wait_until(lambda: relay.shipped_count == 2)
    assert seen == ["goes"]


@pytest.mark.slow
def test_what_comes_up_later_is_shipped_from_its_first_record(store, stand_in, monkeypatch):
    make_topic(store, "shop")
    put(store, "shop", numbered(3))
    ship(store, stand_in.cluster(), start=RelayStart.LATEST)
    stand_in.side.grow("shop", 2)
    store.write(lambda connection: grow_topic(connection, "shop", partition_count=2))
    put(store, "shop", numbered(2), partition=1)
    assert ship(store, stand_in.cluster(), start=RelayStart.LATEST) == 2
    monkeypatch.setattr("txnstore.relay.to_kafka.LOOK_AGAIN_SECONDS", 0)
    relay = ToKafka(store, stand_in.cluster(), RelayOptions(start=RelayStart.LATEST))
    with beside(relay.run):
        put(store, "shop", numbered(1))
        wait_until(lambda: relay.shipped_count == 1)
        make_topic_with(store, "later", numbered(4))
        wait_until(lambda: relay.shipped_count > 1)
    assert stand_in.side.read("later") == {0: numbered(4)}
    assert stand_in.side.read("shop") == {0: numbered(1), 1: numbered(2)}


def test_relays_of_two_names_each_ship_everything(store, stand_in):
    make_topic(store, "shop")
    put(store, "shop", numbered(2))
    assert [ship(store, stand_in.cluster(), name=name) for name in ("a", "b", "a")] == [2, 2, 0]


def test_topics_that_are_not_named_stay_at_home(store, stand_in):
    for topic in ("a", "b"):
        make_topic(store, topic)
        put(store, topic, numbered(1))
    assert ship(store, stand_in.cluster(), topics=["b"]) == 1
    with pytest.raises(KeyError):
        stand_in.side.read("a")


def test_a_topic_with_a_name_of_kafkas_own_is_shipped_only_if_it_is_asked_for(store, stand_in):
    for topic in ("__own", "_a", "shop"):
        make_topic(store, topic)
        put(store, topic, numbered(1))
    assert ship(store, stand_in.cluster()) == 2
    assert not stand_in.side.has("__own")
    assert ship(store, stand_in.cluster(), topics=["__own"]) == 1


def test_records_that_were_deleted_before_they_were_shipped_are_missed(store, stand_in, delete_records):
    make_topic(store, "shop")
    put(store, "shop", numbered(2))
    ship(store, stand_in.cluster())
    put(store, "shop", numbered(4, 2))
    delete_records(store, "shop", before=4)
    with pytest.raises(RelayFailed, match=r"shop-0: its log begins at 4, after the relay's position 2; --on-gap"):
        ship(store, stand_in.cluster())
    assert ship(store, stand_in.cluster(), on_gap=OnGap.EARLIEST) == 2
    assert stand_in.side.read("shop") == {0: numbered(2) + numbered(2, 4)}


def test_a_page_may_begin_in_the_middle_of_a_batch(store, stand_in, delete_records):
    make_topic(store, "shop")
    put(store, "shop", numbered(4), batch_records=4)
    delete_records(store, "shop", before=3)
    assert ship(store, stand_in.cluster()) == 1
    assert stand_in.side.read("shop") == {0: numbered(1, 3)}


def test_a_topic_made_anew_is_noticed(store, stand_in, delete_topic):
    make_topic(store, "shop")
    put(store, "shop", numbered(2))
    ship(store, stand_in.cluster())
    delete_topic(store, "shop")
    make_topic(store, "shop")
    put(store, "shop", numbered(3, 10))
    with pytest.raises(RelayFailed, match="recreated in the store"):
        ship(store, stand_in.cluster())
    assert ship(store, stand_in.cluster(), on_gap=OnGap.EARLIEST) == 3


@pytest.mark.slow_but_first
@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_topic_that_is_deleted_while_it_is_shipped_is_named(store, stand_in, delete_topic, is_made_anew):
    for topic in ("goes", "stays"):
        make_topic(store, topic)
        put(store, topic, numbered(2))
    relay = ToKafka(store, stand_in.cluster(), RelayOptions())

    def run(stop):
        with pytest.raises(RelayFailed, match="topic goes was deleted in the store") as raised:
            relay.run(stop)
        assert raised.value.may_pass
        return relay.shipped_count

    with beside(run) as runs:
        wait_until(lambda: relay.shipped_count == 4)
        delete_topic(store, "goes")
        if is_made_anew:
            make_topic(store, "goes")
        wait_until(runs[0].done)
    put(store, "stays", numbered(1, 2))
    topics = ["stays"] if is_made_anew else []
    assert ship(store, stand_in.cluster(), topics=topics) == 1


@pytest.mark.slow
def test_another_store_under_the_same_name_is_refused_before_it_fences_anybody(store, stand_in, tmp_path):
    make_topic(store, "shop")
    put(store, "shop", numbered(2))
    relay = ToKafka(store, stand_in.cluster(), RelayOptions(name="x"))
    with open_store(f"sqlite:///{tmp_path / 'other.db'}") as other, beside(relay.run) as runs:
        wait_until(lambda: relay.shipped_count == 2)
        make_topic(other, "shop")
        with pytest.raises(RelayFailed, match=r"shop-0: .* not written by a relay of this store"):
            ship(other, stand_in.cluster(), name="x")
        # In a topic that the other one does not ship it is in nobody's way.
        make_topic(other, "elsewhere")
        put(other, "elsewhere", numbered(1))
        assert ship(other, stand_in.cluster(), name="x", topics=["elsewhere"]) == 1
        put(store, "shop", numbered(2, 2))
        wait_until(lambda: relay.shipped_count == 4 or runs[0].done())
    assert stand_in.side.read("shop") == {0: numbered(4)}


@pytest.mark.slow
def test_a_position_that_kafka_has_lost_is_noticed(store, stand_in):
    make_topic(store, "shop")
    put(store, "shop", numbered(2))
    ship(store, stand_in.cluster(), name="x")
    stand_in.side.admin.delete_consumer_groups(["txnstore-relay-x"])["txnstore-relay-x"].result(60)
    make_topic(store, "other")
    put(store, "other", numbered(1))
    with pytest.raises(RelayFailed, match=r"Kafka has lost its position.* --topic shop --name OTHER .* topics$"):
        ship(store, stand_in.cluster(), name="x")
    assert ship(store, stand_in.cluster(), topics=["shop"], name="OTHER") == 2
    ship(store, stand_in.cluster(), topics=["other"], name="x")
    assert stand_in.side.read("other") == {0: numbered(1)}


def test_a_lost_position_is_noticed_also_if_the_relay_died_after_its_first_commit(store, stand_in):
    make_topic(store, "shop")
    put(store, "shop", numbered(2))
    library = CrashingLibrary(CALLS.index("commit_transaction"), When.AFTER)  # without a record, so one call less
    with pytest.raises(Crash, match="commit_transaction"):
        ship(store, stand_in.cluster(library), name="x")
    assert ship(store, stand_in.cluster(), name="x") == 2
    stand_in.side.admin.delete_consumer_groups(["txnstore-relay-x"])["txnstore-relay-x"].result(60)
    with pytest.raises(RelayFailed, match="Kafka has lost its position"):
        ship(store, stand_in.cluster(), name="x")


def test_positions_go_with_their_topic(store, stand_in, delete_topic):
    for topic in ("goes", "stays"):
        make_topic(store, topic, 2)
        put(store, topic, numbered(2))
    ship(store, stand_in.cluster(), start=RelayStart.LATEST)
    ship(store, stand_in.cluster(), name="other")
    assert stands_in(store) == ["goes"] * 8 + ["stays"] * 8
    delete_topic(store, "goes")
    # Under the same name there is another one: what stands in the one before is of no use there.
    make_topic(store, "goes", 2)
    assert purge_deleted_partitions(store, rows_max=100) >= 8
    assert stands_in(store) == ["stays"] * 8
    put(store, "stays", numbered(1, 2))
    assert ship(store, stand_in.cluster(), topics=["stays"]) == 1


def test_a_position_that_comes_after_all_else_of_its_topic_is_gone_goes_as_well(store, stand_in):
    """Its relay began in the topic while somebody deleted it."""
    make_topic(store, "stays")
    ship(store, stand_in.cluster())
    late = {PartitionName("gone", 0): RelayPosition("uuid", 0)}
    for relay_id in (relay_id_to("kafka", "x"), start_id_of(relay_id_to("kafka", "x"))):
        store.write(lambda connection, of=relay_id: begin_relay_positions(connection, of, late))
    assert stands_in(store) == ["gone"] * 2 + ["stays"] * 2
    assert purge_deleted_partitions(store, rows_max=100) == 2
    assert stands_in(store) == ["stays"] * 2
    assert purge_deleted_partitions(store, rows_max=100) == 0


def test_a_lost_position_is_noticed_also_in_a_topic_that_was_made_anew(store, stand_in, delete_topic):
    """Its relay came before whoever deletes what the topic of this name before has left."""
    make_topic(store, "shop")
    put(store, "shop", numbered(2))
    ship(store, stand_in.cluster(), name="x")
    delete_topic(store, "shop")
    make_topic(store, "shop")
    put(store, "shop", numbered(3, 10))
    assert ship(store, stand_in.cluster(), name="x", on_gap=OnGap.EARLIEST) == 3
    purge_deleted_partitions(store, rows_max=100)
    # Also where it was to begin, which tells relays from Kafka that it does.
    assert stands_in(store) == ["shop"] * 2
    stand_in.side.admin.delete_consumer_groups(["txnstore-relay-x"])["txnstore-relay-x"].result(60)
    with pytest.raises(RelayFailed, match="Kafka has lost its position"):
        ship(store, stand_in.cluster(), name="x")


def stands_in(store) -> list[str]:
    """Return the topic of each position of a relay."""
    statement = select(relay_positions.c.topic).order_by(relay_positions.c.topic)
    return list(store.read(lambda connection: connection.execute(statement).scalars().all()))


def test_a_store_that_is_older_than_its_relay_is_noticed(store, stand_in, delete_topic):
    make_topic(store, "shop")
    put(store, "shop", numbered(5))
    ship(store, stand_in.cluster())
    store.write(lambda connection: connection.execute(partition_heads.update().values(next_offset=2)))
    with pytest.raises(RelayFailed, match="has copied up to 5, but the log ends at 2"):
        ship(store, stand_in.cluster())


def test_a_store_that_is_put_back_while_it_is_shipped_is_noticed(store, stand_in):
    """A failover to a standby that had not heard of the last records: others get their offsets."""
    make_topic(store, "shop")
    put(store, "shop", numbered(5))
    relay = ToKafka(store, stand_in.cluster(), RelayOptions())

    def run(stop):
        with pytest.raises(RelayFailed, match="has copied up to 5, but the log ends at 2"):
            relay.run(stop)
        return relay.shipped_count

    with beside(run) as runs:
        wait_until(lambda: relay.shipped_count == 5)
        store.write(lambda connection: connection.execute(partition_heads.update().values(next_offset=2)))
        wait_until(runs[0].done)


def test_a_record_that_kafka_will_not_have_is_named(store, stand_in):
    stand_in.side.create("shop", 1, {"cleanup.policy": "compact"})
    make_topic(store, "shop")
    put(store, "shop", numbered(2))
    ship(store, stand_in.cluster())
    put(store, "shop", [Sent(b"without a key")])
    with pytest.raises(RelayFailed, match=r"^shop-0, from offset 2 on: .*; a topic that is compacted, for example"):
        ship(store, stand_in.cluster())
    assert stand_in.side.read("shop") == {0: numbered(2)}


class _FencedLibrary:
    """confluent-kafka's names, whose producer is fenced: each of its calls raises that from then on."""

    def __getattr__(self, name):
        return getattr(txnstore, name)

    def Producer(self, settings):  # noqa: N802 - it stands for a class
        def fenced(*arguments, **keywords):
            raise txnstore.KafkaException(txnstore.KafkaError(txnstore.KafkaError._FENCED, fatal=True))

        calls = dict.fromkeys((*CALLS, "poll"), fenced)
        fine = dict.fromkeys(("init_transactions", "begin_transaction", "close"), lambda *_: None)
        return SimpleNamespace(**calls | fine)


def test_a_relay_that_is_fenced_says_so(store, stand_in):
    make_topic(store, "shop")
    with pytest.raises(RelayFenced, match="shop-0, up to offset 0: another relay of this name has taken over"):
        ship(store, stand_in.cluster(_FencedLibrary()))


def test_a_relay_that_was_kept_from_working_for_too_long_says_so(store, stand_in, monkeypatch):
    """Kafka fences who has left a transaction open: that is no other relay."""
    clock = SimpleNamespace(time=iter([1000.0, 1061.0]).__next__, monotonic=time.monotonic)
    monkeypatch.setattr("txnstore.relay.to_kafka.time", clock)
    make_topic(store, "shop")
    with pytest.raises(RelayFailed, match="shop-0: a transaction was open for 61 seconds, and Kafka aborts") as raised:
        ship(store, stand_in.cluster(_FencedLibrary()))
    assert raised.value.may_pass
    assert not isinstance(raised.value, RelayFenced)


class _RefusingLibrary:
    """confluent-kafka's names, whose consumer may not use its group: its calls only time out."""

    def __getattr__(self, name):
        return getattr(txnstore, name)

    def Consumer(self, settings):  # noqa: N802 - it stands for a class
        def committed(partitions, timeout):
            raise txnstore.KafkaException(txnstore.KafkaError(txnstore.KafkaError._TIMED_OUT))

        refused = txnstore.KafkaError(txnstore.KafkaError.GROUP_AUTHORIZATION_FAILED, "no right to the group")
        event = SimpleNamespace(error=lambda: refused)
        return SimpleNamespace(committed=committed, poll=lambda timeout: event, close=lambda: None)


def test_a_group_that_kafka_refuses_is_no_trouble_that_passes(store, stand_in):
    make_topic(store, "shop")
    with pytest.raises(RelayFailed, match="the position of shop-0 in Kafka: no right to the group"):
        ship(store, stand_in.cluster(_RefusingLibrary()))


def test_a_topic_with_fewer_partitions_in_kafka_is_refused(store, stand_in):
    stand_in.side.create("shop", 2)
    make_topic(store, "shop", 3)
    with pytest.raises(RelayFailed, match="has 3 partitions, but only 2 in Kafka"):
        ship(store, stand_in.cluster())


def test_a_topic_that_is_not_there_is_refused(store, stand_in):
    with pytest.raises(RelayFailed, match="there is no topic nowhere in the store"):
        ship(store, stand_in.cluster(), topics=["nowhere"])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 101])
def test_a_name_that_is_none_is_refused(store, stand_in, name):
    if name:
        with pytest.raises(RelayFailed, match="a relay's name has"):
            ship(store, stand_in.cluster(), name=name)
    else:
        # As on the command line: none was given.
        assert ship(store, stand_in.cluster(), name=name) == 0


def test_pages_end_where_the_next_ones_begin(store, stand_in, monkeypatch):
    monkeypatch.setattr("txnstore.relay.to_kafka.PAGE_RECORDS_MAX", 3)
    make_topic(store, "shop")
    put(store, "shop", numbered(10))
    assert ship(store, stand_in.cluster()) == 10
    assert stand_in.side.read("shop") == {0: numbered(10)}


def test_what_is_overdue_holds_nothing_back_also_from_a_single_run(store, stand_in):
    make_topic(store, "shop")
    begin(store, "abandoned", "shop", numbered(3, 100), timeout_ms=1)
    put(store, "shop", numbered(2))
    now = select(server_now_ms())
    begun_ms = store.read(lambda connection: connection.execute(now).scalar_one())
    while store.read(lambda connection: connection.execute(now).scalar_one()) < begun_ms + 2:
        pass
    assert ship(store, stand_in.cluster()) == 2
    assert stand_in.side.read("shop") == {0: numbered(2)}


def test_a_store_that_is_away_is_not_waited_for_without_an_end(store, stand_in, monkeypatch):
    make_topic(store, "shop")
    relay = ToKafka(store, stand_in.cluster(), RelayOptions(once=True, patience_seconds=0))
    ends, looks = relay._ends, itertools.count(1)

    def away():
        # Both looks of the start are answered.
        if next(looks) > 2:
            raise StoreUnavailable("away")
        return ends()

    monkeypatch.setattr(relay, "_ends", away)
    with pytest.raises(RelayFailed, match="looking for news: away") as raised:
        relay.run(threading.Event())
    assert raised.value.may_pass
