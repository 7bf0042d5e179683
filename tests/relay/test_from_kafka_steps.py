"""The relay from Kafka, with a store in Kafka's place: a death at each statement, two at once, positions and gaps."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from typing import NamedTuple

import pytest
from sqlalchemy import select

import txnstore
from tests.relay.kafka_side import Sent
from tests.relay.running import beside, wait_until
from tests.relay.store_side import copy, make_topic, make_topic_with, numbered, put, read, ship
from tests.relay.test_to_kafka_steps import NULLS
from tests.tools.crashes import every_crash, noting
from txnstore.db.opening import open_store
from txnstore.db.schema import record_batches, relay_positions
from txnstore.db.store import Store
from txnstore.errors import OutcomeUnknown, RecordTooLarge, UnsupportedCompression
from txnstore.log.append import append as append_records
from txnstore.log.columns import Codec
from txnstore.log.deleting import purge_deleted_partitions
from txnstore.log.topics import create_topic, get_topic, grow_topic, list_topics
from txnstore.relay.errors import KafkaUnavailable, RelayFailed
from txnstore.relay.from_kafka import FromKafka
from txnstore.relay.kafka_cluster import KafkaCluster
from txnstore.relay.options import OnGap, RelayOptions, RelayStart, relay_id_to
from txnstore.relay.positions import begin_relay_positions, forget_relay


class Place(NamedTuple):
    """What a relay works on."""

    store: Store
    topic: str

    def close(self):
        self.store.close()


def positions(store) -> list[int]:
    of_shop = relay_positions.c.topic == "shop"
    statement = select(relay_positions.c.next_offset).where(of_shop).order_by(relay_positions.c.partition_number)
    return list(store.read(lambda connection: connection.execute(statement).scalars().all()))


def test_everything_of_a_record_arrives(store, stand_in):
    stand_in.side.create("shop", 3)
    stand_in.side.send("shop", NULLS, partition=1)
    stand_in.side.send("shop", numbered(5), partition=2)
    assert copy(store, stand_in.cluster()) == 9
    assert read(store, "shop") == {0: [], 1: NULLS, 2: numbered(5)}
    assert positions(store) == [0, len(NULLS), 5]


def test_what_went_to_the_same_cluster_is_not_copied_back(store, stand_in):
    make_topic(store, "shop")
    put(store, "shop", numbered(3))
    stand_in.side.create("other", 1)
    assert ship(store, stand_in.cluster(), topics=["shop"], name="one") == 3
    with pytest.raises(RelayFailed, match="topic shop: another relay copies it in the other direction"):
        copy(store, stand_in.cluster(), name="two")
    assert copy(store, stand_in.cluster(), topics=["other"], name="two") == 0
    assert read(store, "shop") == {0: numbered(3)}


def test_what_a_relay_to_kafka_is_about_to_ship_is_not_copied_back(store, stand_in, monkeypatch):
    """It has created the topic in Kafka, and has no position there yet."""
    make_topic(store, "shop")
    put(store, "shop", numbered(3))
    create_topics = KafkaCluster.create_topics
    refused = []

    def look_at_once(*arguments):
        errors = create_topics(*arguments)
        with pytest.raises(RelayFailed, match="topic shop: another relay copies it in the other direction") as raised:
            copy(store, stand_in.cluster(), name="two")
        refused.append(str(raised.value))
        return errors

    monkeypatch.setattr(KafkaCluster, "create_topics", look_at_once)
    assert ship(store, stand_in.cluster(), name="one") == 3
    cluster_id = stand_in.cluster().cluster_id()
    assert [said.partition(" --forget ")[2] for said in refused] == [f"{relay_id_to(cluster_id, 'one')} --topic shop"]
    assert read(store, "shop") == {0: numbered(3)} == stand_in.side.read("shop")


@pytest.mark.slow
def test_what_a_relay_to_kafka_begins_to_ship_meanwhile_is_not_copied_back(store, stand_in, monkeypatch):
    stand_in.side.create("shop", 1)
    make_topic(store, "shop")
    put(store, "shop", numbered(3))
    bounds_of = FromKafka._bounds

    def ship_first(*arguments):
        assert ship(store, stand_in.cluster(), name="one") == 3
        return bounds_of(*arguments)

    monkeypatch.setattr(FromKafka, "_bounds", ship_first)
    with pytest.raises(RelayFailed, match="topic shop: another relay copies it in the other direction"):
        copy(store, stand_in.cluster(), name="two")
    assert read(store, "shop") == {0: numbered(3)} == stand_in.side.read("shop")
    # The refused one is in nobody's way.
    put(store, "shop", numbered(1, 3))
    assert ship(store, stand_in.cluster(), name="one") == 1


def test_what_is_refused_leaves_no_topic_in_the_store(store, stand_in):
    make_topic(store, "shop")
    ship(store, stand_in.cluster())
    stand_in.side.create("other", 1)
    with pytest.raises(RelayFailed, match="other direction"):
        copy(store, stand_in.cluster())
    assert store.read(list_topics) == ["shop"]


def test_a_second_run_copies_what_is_new(store, stand_in):
    stand_in.side.create("shop", 1)
    stand_in.side.send("shop", numbered(3))
    assert copy(store, stand_in.cluster()) == 3
    assert copy(store, stand_in.cluster()) == 0
    stand_in.side.send("shop", numbered(2, 3))
    assert copy(store, stand_in.cluster()) == 2
    assert read(store, "shop") == {0: numbered(5)}


def test_what_is_aborted_never_arrives_and_markers_are_skipped(store, stand_in):
    stand_in.side.create("shop", 1)
    producer = stand_in.side.transactional("x")
    for records, commit in ((numbered(2), True), (numbered(2, 50), False), (numbered(2, 2), True)):
        producer.begin_transaction()
        stand_in.side.send("shop", records, producer=producer)
        (producer.commit_transaction if commit else producer.abort_transaction)()
    producer.close()
    assert copy(store, stand_in.cluster()) == 4
    assert read(store, "shop") == {0: numbered(4)}
    # Behind the last marker.
    assert positions(store) == [9]


@pytest.mark.slow
def test_a_death_at_each_statement_loses_nothing_and_repeats_nothing(url, store, stand_in):
    numbers = itertools.count()
    cluster = stand_in.cluster()

    def make() -> Place:
        topic = f"topic-{next(numbers)}"
        stand_in.side.create(topic, 2)
        for number in range(2):
            stand_in.side.send(topic, numbered(3, number * 10), partition=number)
        return Place(open_store(url), topic)

    crashes = 0

    def act(place: Place) -> None:
        copy(place.store, cluster, topics=[place.topic])

    for crash in every_crash(make, act, statements_are_all=True):
        with noting(crash.point):
            copy(store, cluster, topics=[crash.subject.topic])
            assert read(store, crash.subject.topic) == {0: numbered(3), 1: numbered(3, 10)}
        crashes += 1
    assert crashes > 20


@pytest.mark.slow
def test_two_relays_at_once_copy_everything_once(store, stand_in):
    stand_in.side.create("shop", 2)
    make_topic(store, "shop", 2)
    relays = [FromKafka(store, stand_in.cluster(), RelayOptions()) for _ in range(2)]
    with beside(*[relay.run for relay in relays]):
        for first in range(0, 100, 5):
            stand_in.side.send("shop", numbered(5, first), partition=first % 2)
        wait_until(lambda: sum(map(len, read(store, "shop").values())) >= 100)
    expected = {
        half: [record for first in range(half * 5, 100, 10) for record in numbered(5, first)] for half in (0, 1)
    }
    assert read(store, "shop") == expected
    assert sum(relay.copied_count for relay in relays) == 100


def test_another_relay_may_copy_beyond_the_end_that_was_seen_while_this_one_begins(store, stand_in, monkeypatch):
    stand_in.side.create("shop", 1)
    bounds_of = FromKafka._bounds
    looks = itertools.count()

    def look_first(*arguments):
        bounds = bounds_of(*arguments)
        if next(looks) == 0:
            stand_in.side.send("shop", numbered(3))
            assert copy(store, stand_in.cluster()) == 3
        return bounds

    monkeypatch.setattr(FromKafka, "_bounds", look_first)
    assert copy(store, stand_in.cluster()) == 0
    assert read(store, "shop") == {0: numbered(3)}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("took_effect", [True, False])
def test_an_answer_that_is_lost_is_found_out(store, stand_in, monkeypatch, took_effect):
    stand_in.side.create("shop", 1)
    stand_in.side.send("shop", numbered(3))
    write = store.write
    lost: list = []

    def lose_one(work, **options):
        if options.get("wakes_readers") and not lost:
            lost.append(work)
            if took_effect:
                write(work, **options)
            raise OutcomeUnknown
        return write(work, **options)

    monkeypatch.setattr(store, "write", lose_one)
    copy(store, stand_in.cluster())
    assert lost
    assert read(store, "shop") == {0: numbered(3)}


def test_it_begins_where_it_is_told_to_and_only_the_first_time(store, stand_in):
    stand_in.side.create("shop", 1)
    stand_in.side.send("shop", numbered(3))
    assert copy(store, stand_in.cluster(), start=RelayStart.LATEST) == 0
    stand_in.side.send("shop", numbered(2, 3))
    assert copy(store, stand_in.cluster(), start=RelayStart.LATEST) == 2
    assert read(store, "shop") == {0: numbered(2, 3)}


@pytest.mark.slow
def test_what_comes_up_later_is_copied_from_its_first_record(store, stand_in, monkeypatch):
    side = stand_in.side
    side.create("shop", 1)
    side.send("shop", numbered(3))
    copy(store, stand_in.cluster(), start=RelayStart.LATEST)
    side.grow("shop", 2)
    store.write(lambda connection: grow_topic(connection, "shop", partition_count=2))
    with side.library.Producer(side.settings) as producer:  # the one before goes on with what it knows of the topic
        side.send("shop", numbered(2), partition=1, producer=producer)
    assert copy(store, stand_in.cluster(), start=RelayStart.LATEST) == 2
    monkeypatch.setattr("txnstore.relay.from_kafka.LOOK_AGAIN_SECONDS", 0)
    relay = FromKafka(store, stand_in.cluster(), RelayOptions(start=RelayStart.LATEST))
    with beside(relay.run), open_store(stand_in.url) as kafka:
        side.send("shop", numbered(1))
        wait_until(lambda: relay.copied_count == 1)
        make_topic_with(kafka, "later", numbered(4))
        wait_until(lambda: relay.copied_count > 1)
    assert read(store, "later") == {0: numbered(4)}
    assert read(store, "shop") == {0: numbered(1), 1: numbered(2)}


def test_records_that_were_deleted_before_they_were_copied_are_missed(store, stand_in):
    side = stand_in.side
    side.create("shop", 1)
    side.send("shop", numbered(2))
    copy(store, stand_in.cluster())
    side.send("shop", numbered(4, 2))
    (future,) = side.admin.delete_records([side.library.TopicPartition("shop", 0, 4)]).values()
    future.result(60)
    with pytest.raises(RelayFailed, match="shop-0: in Kafka it begins at 4, after the relay's position 2; --on-gap"):
        copy(store, stand_in.cluster())
    assert copy(store, stand_in.cluster(), on_gap=OnGap.EARLIEST) == 2
    assert read(store, "shop") == {0: numbered(2) + numbered(2, 4)}


def test_a_topic_made_anew_is_noticed(store, stand_in):
    stand_in.side.create("shop", 1)
    stand_in.side.send("shop", numbered(2))
    copy(store, stand_in.cluster())
    stand_in.side.delete("shop")
    stand_in.side.create("shop", 1)
    stand_in.side.send("shop", numbered(3))
    with pytest.raises(RelayFailed, match="deleted and recreated in Kafka"):
        copy(store, stand_in.cluster())


@pytest.mark.slow
def test_a_topic_made_anew_is_copied_by_a_relay_of_its_own_beside_the_one_before(store, stand_in):
    """As the error says; the one before goes on with the other topics, and nothing comes twice."""
    side = stand_in.side
    for topic in ("other", "shop"):
        side.create(topic, 1)
        side.send(topic, numbered(2))
    copy(store, stand_in.cluster())
    side.delete("shop")
    side.create("shop", 1)
    with side.library.Producer(side.settings) as producer:
        side.send("shop", numbered(3, 10), producer=producer)
    side.send("other", numbered(1, 2))
    for _ in range(2):
        with pytest.raises(RelayFailed, match=r"relay with --topic shop --name OTHER .* each of the other topics$"):
            copy(store, stand_in.cluster())
        for options in ({"topics": ["shop"], "name": "OTHER"}, {"topics": ["other"]}):
            copy(store, stand_in.cluster(), **options)
        assert read(store, "shop") == {0: numbered(2) + numbered(3, 10)}
        assert read(store, "other") == {0: numbered(3)}


@pytest.mark.slow
def test_a_topic_deleted_meanwhile_is_told_of_and_the_others_are_copied_to_their_ends(
    store, stand_in, monkeypatch, caplog
):
    side = stand_in.side
    for topic in ("done", "gone", "other"):
        side.create(topic, 1)
    side.send("done", numbered(2))
    copy(store, stand_in.cluster())
    for topic in ("gone", "other"):
        side.send(topic, numbered(3))
    check_unchanged = FromKafka._check_unchanged

    def delete_first(*given):
        for topic in ("done", "gone"):
            if side.has(topic):
                side.delete(topic)
        check_unchanged(*given)

    monkeypatch.setattr(FromKafka, "_check_unchanged", delete_first)
    assert copy(store, stand_in.cluster()) == 3
    assert read(store, "other") == {0: numbered(3)}
    assert read(store, "gone") == {0: []}
    told = [vars(record) for record in caplog.records if vars(record).get("event") == "relay_topic_gone"]
    assert [(fields["partition"], fields["offset"]) for fields in told] == [("gone-0", 0)]


def test_a_topic_deleted_while_a_relay_goes_on_is_told_of(store, stand_in, monkeypatch, caplog):
    side = stand_in.side
    for topic in ("gone", "other"):
        side.create(topic, 1)
        side.send(topic, numbered(2))
    monkeypatch.setattr("txnstore.relay.from_kafka.LOOK_AGAIN_SECONDS", 0)
    relay = FromKafka(store, stand_in.cluster(), RelayOptions())
    with beside(relay.run):
        wait_until(lambda: relay.copied_count == 4)
        side.delete("gone")
        wait_until(lambda: "deleted in Kafka" in caplog.text)
        side.send("other", numbered(1, 2))
        wait_until(lambda: relay.copied_count == 5)
    told = [vars(record) for record in caplog.records if vars(record).get("event") == "relay_topic_gone"]
    assert [(fields["partition"], fields["offset"]) for fields in told] == [("gone-0", 2)]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("once", [True, False])
def test_nothing_is_read_at_the_position_in_a_topic_that_was_made_anew_meanwhile(store, stand_in, monkeypatch, once):
    side = stand_in.side
    side.create("shop", 1)
    side.send("shop", numbered(2))
    copy(store, stand_in.cluster())
    consumer = side.library.Consumer
    assign = consumer.assign

    def assign_later(*given):
        side.delete("shop")
        side.create("shop", 1)
        with side.library.Producer(side.settings) as producer:
            side.send("shop", numbered(5, 2), producer=producer)
        assign(*given)

    side.send("shop", numbered(1))
    relay = FromKafka(store, stand_in.cluster(), RelayOptions(once=once))
    with monkeypatch.context() as patch:
        patch.setattr(consumer, "assign", assign_later)
        with pytest.raises(RelayFailed, match="deleted and recreated in Kafka"):
            relay.run(threading.Event())
    assert read(store, "shop") == {0: numbered(2)}
    assert positions(store) == [2]


@pytest.mark.slow
@pytest.mark.parametrize("left_in", ["Kafka", "store", "nowhere"])
def test_a_position_is_forgotten_once_its_topic_is_nowhere(store, stand_in, delete_topic, left_in):
    side = stand_in.side
    for topic in ("other", "shop"):
        side.create(topic, 1)
        side.send(topic, numbered(2))
    copy(store, stand_in.cluster())
    if left_in != "Kafka":
        side.delete("shop")
    if left_in != "store":
        delete_topic(store, "shop")
        purge_deleted_partitions(store, rows_max=100)
    # Who asks for one topic does not know of the others.
    assert copy(store, stand_in.cluster(), topics=["other"]) == 0
    assert positions(store) == [2]
    assert copy(store, stand_in.cluster()) == 0
    assert positions(store) == ([] if left_in == "nowhere" else [2])


def test_a_broker_that_knows_of_no_topic_makes_nothing_forgotten(store, stand_in, delete_topic, monkeypatch):
    stand_in.side.create("shop", 1)
    stand_in.side.send("shop", numbered(2))
    copy(store, stand_in.cluster())
    delete_topic(store, "shop")
    with monkeypatch.context() as patched:
        patched.setattr(KafkaCluster, "topics", lambda *_: {})
        copy(store, stand_in.cluster())
    assert positions(store) == [2]


def run_until_forgotten(relay, stop):
    with pytest.raises(RelayFailed, match="shop-0: the relay's position was forgotten while it ran"):
        relay.run(stop)
    return relay.copied_count


def test_a_relay_that_is_forgotten_while_it_runs_copies_nothing_twice(store, stand_in):
    stand_in.side.create("shop", 1)
    stand_in.side.send("shop", numbered(2))
    relay = FromKafka(store, stand_in.cluster(), RelayOptions())

    with beside(partial(run_until_forgotten, relay)) as runs:
        wait_until(lambda: relay.copied_count == 2)
        cluster_id = stand_in.cluster().cluster_id()
        assert store.write(lambda connection: forget_relay(connection, cluster_id)) == 1
        stand_in.side.send("shop", numbered(1, 2))
        wait_until(runs[0].done)
    assert read(store, "shop") == {0: numbered(2)}
    assert copy(store, stand_in.cluster()) == 3


@pytest.mark.slow
@pytest.mark.parametrize("is_once", [True, False])
def test_a_topic_that_is_gone_and_forgotten_by_another_relay_ends_nobody(
    store, stand_in, delete_topic, monkeypatch, caplog, is_once
):
    side = stand_in.side
    for topic in ("gone", "other"):
        side.create(topic, 1)
        side.send(topic, numbered(2))
        make_topic(store, topic)
    monkeypatch.setattr("txnstore.relay.from_kafka.LOOK_AGAIN_SECONDS", 0)
    check_unchanged = FromKafka._check_unchanged
    relay = FromKafka(store, stand_in.cluster(), RelayOptions(once=is_once))
    done: list[bool] = []

    def delete_first(asked, arrived):
        if asked is relay and not done:
            done.append(True)
            side.delete("gone")
            delete_topic(store, "gone")
            # Of the same name: it copies what is left, and forgets where they stood in the other.
            assert copy(store, stand_in.cluster()) == 2
            side.send("other", numbered(1, 2))
        check_unchanged(asked, arrived)

    monkeypatch.setattr(FromKafka, "_check_unchanged", delete_first)
    if is_once:
        relay.run(threading.Event())
    else:
        with beside(relay.run) as runs:
            wait_until(lambda: len(read(store, "other")[0]) == 3 or runs[0].done())
    assert read(store, "other") == {0: numbered(2 if is_once else 3)}
    told = [vars(record) for record in caplog.records if vars(record).get("event") == "relay_topic_gone"]
    assert [(fields["partition"], fields["offset"]) for fields in told] == [("gone-0", 0)]


def test_a_position_that_is_forgotten_while_a_relay_begins_ends_it(store, stand_in, monkeypatch):
    stand_in.side.create("shop", 1)
    stand_in.side.send("shop", numbered(2))
    cluster_id = stand_in.cluster().cluster_id()

    def begin_and_forget(connection, *given):
        begin_relay_positions(connection, *given)
        assert forget_relay(connection, cluster_id) == 1

    with monkeypatch.context() as patched:
        patched.setattr("txnstore.relay.from_kafka.begin_relay_positions", begin_and_forget)
        with pytest.raises(RelayFailed, match="shop-0: the relay's position was forgotten while it ran"):
            copy(store, stand_in.cluster())
    assert copy(store, stand_in.cluster()) == 2


def test_a_topic_with_fewer_partitions_in_the_store_is_refused(store, stand_in):
    stand_in.side.create("shop", 3)
    make_topic(store, "shop", 2)
    with pytest.raises(RelayFailed, match="has 3 partitions in Kafka, but only 2 in the store"):
        copy(store, stand_in.cluster())


def test_a_topic_that_is_not_there_is_refused(store, stand_in):
    with pytest.raises(RelayFailed, match="there is no topic nowhere in Kafka"):
        copy(store, stand_in.cluster(), topics=["nowhere"])


def test_batches_are_as_small_as_their_topic_wants_them(store, stand_in):
    stand_in.side.create("shop", 1)
    large = [Sent(b"x" * 300_000, b"%d" % number) for number in range(8)]
    stand_in.side.send("shop", large)
    assert copy(store, stand_in.cluster()) == 8
    assert read(store, "shop") == {0: large}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"max.message.bytes": "1000"}, Sent(b"x" * 300_000, b"k")),
        ({"cleanup.policy": "compact"}, Sent(b"without a key")),
        ({"message.timestamp.before.max.ms": "86400000"}, Sent(b"old", b"k", timestamp_ms=1)),
    ],
    ids=["large", "keyless", "old"],
)
def test_a_record_that_its_topic_will_not_have_ends_the_relay_and_is_named(store, stand_in, config, refused):
    side = stand_in.side
    for topic in ("first", "shop"):
        side.create(topic, 1)
        side.send(topic, numbered(2))
    side.send("shop", [refused, *numbered(1, 2)])
    store.write(lambda connection: create_topic(connection, "shop", config=config))
    for _ in range(2):
        with pytest.raises(RelayFailed, match=r"^shop-0, offset 2 in Kafka: "):
            copy(store, stand_in.cluster())
        assert read(store, "shop") == {0: numbered(2)}
    assert positions(store) == [2]


def test_what_is_refused_at_first_and_then_taken_is_copied_once(store, stand_in, monkeypatch):
    stand_in.side.create("shop", 1)
    stand_in.side.send("shop", numbered(3))
    refused: list[bool] = []

    def refuse_first(*arguments):
        if not refused:
            refused.append(True)
            raise RecordTooLarge("too large")
        return append_records(*arguments)

    monkeypatch.setattr("txnstore.relay.from_kafka.append", refuse_first)
    assert copy(store, stand_in.cluster()) == 3
    assert read(store, "shop") == {0: numbered(3)}


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("there", "codec"), [(True, Codec.ZSTD), (False, Codec.NONE)], ids=["there", "missing"])
def test_a_topic_that_compresses_compresses_what_is_copied_where_the_package_is_there(
    store, stand_in, monkeypatch, there, codec
):
    def missing(_):
        raise UnsupportedCompression

    if not there:
        monkeypatch.setattr("txnstore.log.columns._cramjam", missing)
    stand_in.side.create("shop", 1)
    stand_in.side.send("shop", numbered(3))
    store.write(lambda connection: create_topic(connection, "shop", config={"compression.type": "zstd"}))
    assert copy(store, stand_in.cluster()) == 3
    statement = select(record_batches.c.codec).distinct()
    assert store.read(lambda connection: connection.execute(statement).scalars().all()) == [codec]
    assert read(store, "shop") == {0: numbered(3)}


def test_an_append_that_fails_moves_no_position(store, stand_in, monkeypatch):
    stand_in.side.create("shop", 1)
    stand_in.side.send("shop", numbered(3))
    failures = itertools.count()

    def fail_once(connection, appends):
        if next(failures) == 0:
            append_records(connection, appends)
            raise OutcomeUnknown
        return append_records(connection, appends)

    monkeypatch.setattr("txnstore.relay.from_kafka.append", fail_once)
    copy(store, stand_in.cluster())
    assert read(store, "shop") == {0: numbered(3)}
    assert len(store.read(lambda connection: get_topic(connection, "shop")).partition_ids) == 1


class _Leaderless:
    """Partitions that have no leader in Kafka, as librdkafka tells of them."""

    def __init__(self, stand_in, monkeypatch) -> None:
        """Let all have one."""
        self.partitions: set[tuple[str, int]] = set()
        #: And those of which the cluster's list of topics does not know it yet.
        self.just_lost: set[tuple[str, int]] = set()
        library = stand_in.side.library
        list_topics, offsets = library.admin.AdminClient.list_topics, library.Consumer.get_watermark_offsets

        def list_leaders(*given, **more):
            listed = list_topics(*given, **more)
            for name, number in self.partitions:
                if name in listed.topics:
                    listed.topics[name].partitions[number].leader = -1
            return listed

        def offsets_of(consumer, partition, **more):
            if (partition.topic, partition.partition) in self.partitions | self.just_lost:
                self.just_lost.clear()
                raise txnstore.KafkaException(txnstore.KafkaError(txnstore.KafkaError._UNKNOWN_PARTITION))
            return offsets(consumer, partition, **more)

        monkeypatch.setattr(library.admin.AdminClient, "list_topics", list_leaders)
        monkeypatch.setattr(library.Consumer, "get_watermark_offsets", offsets_of)
        monkeypatch.setattr("txnstore.relay.from_kafka.LOOK_AGAIN_SECONDS", 0)


@pytest.fixture
def leaderless(stand_in, monkeypatch):
    return _Leaderless(stand_in, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("is_known", [False, True])
def test_a_partition_without_a_leader_is_in_the_way_of_no_other_and_copied_once_it_has_one(
    store, stand_in, leaderless, caplog, is_known
):
    caplog.set_level("INFO")
    side = stand_in.side
    side.create("shop", 2)
    first = 0
    if is_known:
        side.send("shop", numbered(2), partition=1)
        assert copy(store, stand_in.cluster()) == 2
        first = 2
    side.send("shop", numbered(2), partition=0)
    side.send("shop", numbered(3, first), partition=1)
    leaderless.partitions.add(("shop", 1))
    relay = FromKafka(store, stand_in.cluster(), RelayOptions())
    with beside(relay.run):
        wait_until(lambda: relay.copied_count == 2)
        side.send("shop", numbered(2, 2), partition=0)
        wait_until(lambda: relay.copied_count == 4)
        assert read(store, "shop") == {0: numbered(4), 1: numbered(first)}
        leaderless.partitions.clear()
        wait_until(lambda: relay.copied_count == 7)
        # And one that is being read.
        leaderless.partitions.add(("shop", 0))
        side.send("shop", numbered(1, first + 3), partition=1)
        wait_until(lambda: relay.copied_count == 8)
        leaderless.partitions.clear()
        side.send("shop", numbered(1, 4), partition=0)
        wait_until(lambda: relay.copied_count == 9)
    assert read(store, "shop") == {0: numbered(5), 1: numbered(first + 4)}
    assert "partitions without a leader: shop-1 cannot be read until a leader is elected; trying" in caplog.text
    assert "partitions without a leader: going on" in caplog.text
    assert "deleted in Kafka" not in caplog.text


def test_a_single_run_copies_the_others_and_waits_for_a_partition_without_a_leader(store, stand_in, leaderless):
    stand_in.side.create("shop", 2)
    for partition in range(2):
        stand_in.side.send("shop", numbered(2), partition=partition)
    leaderless.partitions.add(("shop", 1))
    with pytest.raises(RelayFailed, match="shop-1 cannot be read until a leader is elected") as raised:
        copy(store, stand_in.cluster(), patience_seconds=0.0)
    assert raised.value.may_pass
    assert read(store, "shop") == {0: numbered(2), 1: []}
    relay = FromKafka(store, stand_in.cluster(), RelayOptions(once=True))
    stand_in.side.send("shop", numbered(1, 2), partition=0)
    with beside(relay.run) as (run,):
        wait_until(lambda: relay.copied_count == 1)
        leaderless.partitions.clear()
        assert run.result(60) == 3
    assert read(store, "shop") == {0: numbered(3), 1: numbered(2)}


def test_a_single_run_waits_for_a_partition_that_loses_its_leader_meanwhile(store, stand_in, leaderless, monkeypatch):
    stand_in.side.create("shop", 2)
    for partition in range(2):
        stand_in.side.send("shop", numbered(2), partition=partition)
    relay = FromKafka(store, stand_in.cluster(), RelayOptions(once=True))
    copy_some = FromKafka._copy

    def lose_leader(asked, consumer):
        monkeypatch.setattr(FromKafka, "_copy", copy_some)
        leaderless.partitions.add(("shop", 1))
        raise KafkaUnavailable("the broker is gone")

    monkeypatch.setattr(FromKafka, "_copy", lose_leader)
    with beside(relay.run) as (run,):
        wait_until(lambda: relay.copied_count == 2)
        leaderless.partitions.clear()
        assert run.result(20) == 4
    assert read(store, "shop") == {0: numbered(2), 1: numbered(2)}


def test_a_partition_that_has_just_lost_its_leader_ends_nobody(store, stand_in, leaderless):
    stand_in.side.create("shop", 1)
    stand_in.side.send("shop", numbered(2))
    leaderless.just_lost.add(("shop", 0))
    assert copy(store, stand_in.cluster()) == 2


@pytest.mark.slow
def test_a_latest_one_goes_on_with_the_others_and_begins_at_its_first_look_where_it_could_be_told_the_end(
    store, stand_in, leaderless, monkeypatch
):
    side = stand_in.side
    side.create("shop", 2)
    side.create("other", 1)
    for partition in range(2):
        side.send("shop", numbered(2), partition=partition)
    leaderless.partitions.add(("shop", 1))
    relay = FromKafka(store, stand_in.cluster(), RelayOptions(start=RelayStart.LATEST))
    assign, assigned = FromKafka._assign, []

    def assign_noted(asked, consumer):
        assign(asked, consumer)
        assigned.append(dict(asked._positions))

    monkeypatch.setattr(FromKafka, "_assign", assign_noted)
    with beside(relay.run):
        wait_until(lambda: assigned)
        side.send("other", numbered(2))
        wait_until(lambda: relay.copied_count == 2)
        # After the relay has begun, where it could be told; what the other holds meanwhile nobody knows.
        for partition in range(2):
            side.send("shop", numbered(1, 2), partition=partition)
        looked_at = relay._looked_at
        wait_until(lambda: relay._looked_at > looked_at)
        assert positions(store) == []
        assert len(assigned) == 1
        leaderless.partitions.clear()
        wait_until(lambda: len(assigned) == 2)
        for partition in range(2):
            side.send("shop", numbered(1, 3), partition=partition)
        wait_until(lambda: relay.copied_count == 5)
    assert read(store, "shop") == {0: numbered(2, 2), 1: numbered(1, 3)}


def test_a_topic_made_anew_beside_a_latest_one_that_waits_for_its_leader_is_copied_from_its_first_record(
    store, stand_in, leaderless, monkeypatch
):
    side = stand_in.side
    side.create("shop", 1)
    leaderless.partitions.add(("shop", 0))
    relay = FromKafka(store, stand_in.cluster(), RelayOptions(start=RelayStart.LATEST))
    with beside(relay.run):
        wait_until(lambda: relay._unbegun)
        with monkeypatch.context() as patched:
            # Between two looks.
            patched.setattr("txnstore.relay.from_kafka.LOOK_AGAIN_SECONDS", 3_600.0)
            side.delete("shop")
            side.create("shop", 1)
        with side.library.Producer(side.settings) as producer:
            side.send("shop", numbered(3), producer=producer)
        leaderless.partitions.clear()
        wait_until(lambda: relay.copied_count == 3)
    assert read(store, "shop") == {0: numbered(3)}


def test_where_a_partition_without_a_leader_ends_is_waited_for_by_a_latest_one(store, stand_in, leaderless):
    """It would copy what was there, or leave out what came."""
    stand_in.side.create("shop", 2)
    for partition in range(2):
        stand_in.side.send("shop", numbered(2), partition=partition)
    leaderless.partitions.add(("shop", 1))
    with pytest.raises(RelayFailed, match="shop-1 cannot be read until a leader is elected"):
        copy(store, stand_in.cluster(), start=RelayStart.LATEST, patience_seconds=0.0)
    assert positions(store) == []
    leaderless.partitions.clear()
    assert copy(store, stand_in.cluster(), start=RelayStart.LATEST) == 0
    stand_in.side.send("shop", numbered(1, 2), partition=1)
    assert copy(store, stand_in.cluster(), start=RelayStart.LATEST) == 1
    # From there on it is known where each begins.
    leaderless.partitions.add(("shop", 1))
    stand_in.side.send("shop", numbered(1, 2), partition=0)
    with pytest.raises(RelayFailed, match="until a leader is elected"):
        copy(store, stand_in.cluster(), start=RelayStart.LATEST, patience_seconds=0.0)
    assert read(store, "shop") == {0: numbered(1, 2), 1: numbered(1, 2)}


def test_a_topic_without_a_leader_that_comes_up_beside_a_latest_relay_is_not_taken_for_an_old_one_by_the_next(
    store, stand_in, leaderless
):
    stand_in.side.create("shop", 1)
    relay = FromKafka(store, stand_in.cluster(), RelayOptions(start=RelayStart.LATEST))
    with beside(relay.run):
        wait_until(lambda: relay._found)
        leaderless.partitions.add(("later", 0))
        stand_in.side.create("later", 1)
        stand_in.side.send("later", numbered(3))
        wait_until(lambda: relay._leaderless)
    leaderless.partitions.clear()
    assert copy(store, stand_in.cluster(), start=RelayStart.LATEST) == 3
    assert read(store, "later") == {0: numbered(3)}


def test_a_position_in_a_partition_without_a_leader_that_is_forgotten_ends_the_relay(store, stand_in, leaderless):
    """What it has copied would come twice."""
    stand_in.side.create("shop", 1)
    stand_in.side.send("shop", numbered(2))
    relay = FromKafka(store, stand_in.cluster(), RelayOptions())

    with beside(partial(run_until_forgotten, relay)) as runs:
        wait_until(lambda: relay.copied_count == 2)
        leaderless.partitions.add(("shop", 0))
        wait_until(lambda: relay._leaderless)
        cluster_id = stand_in.cluster().cluster_id()
        assert store.write(lambda connection: forget_relay(connection, cluster_id)) == 1
        # It begins anew where something has changed, and this one is still without a leader.
        stand_in.side.create("other", 1)
        wait_until(runs[0].done)
    assert read(store, "shop") == {0: numbered(2)}


def test_a_cluster_that_says_nothing_is_not_waited_for_for_ever(store, stand_in, monkeypatch):
    stand_in.side.create("shop", 1)
    stand_in.side.send("shop", numbered(1))
    monkeypatch.setattr(stand_in.side.library.Consumer, "poll", lambda *_: None)
    with pytest.raises(RelayFailed, match="neither records nor the end") as ended:
        copy(store, stand_in.cluster(), patience_seconds=0.0)
    assert ended.value.may_pass


def test_what_comes_before_the_first_look_is_no_silence_of_the_cluster(store, stand_in, monkeypatch):
    stand_in.side.create("shop", 1)
    stand_in.side.send("shop", numbered(3))
    consumer = stand_in.side.library.Consumer
    poll, silences = consumer.poll, iter([True])
    monkeypatch.setattr(consumer, "poll", lambda *given: None if next(silences, False) else poll(*given))
    relay = FromKafka(store, stand_in.cluster(), RelayOptions(once=True))
    relay._heard_at -= 2 * relay._options.patience_seconds
    assert relay.run(threading.Event()) == 3
