"""What a consumer that assigns its partitions reads: order, positions, transactions, ends, and where it begins."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import update

from tests.clients.consumer.log_writer import PATIENCE_SECONDS, error_code, eventually, polled_until, texts
from txnstore import OFFSET_BEGINNING, OFFSET_END, OFFSET_INVALID, KafkaError, KafkaException, TopicPartition
from txnstore.clients import topic_directory
from txnstore.clients.consumer import reader
from txnstore.db.schema import partition_heads, record_batches
from txnstore.errors import PermissionDenied, StoreReadOnly
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.deleting import advance_log_start
from txnstore.log.fetch import fetch
from txnstore.log.news import read_news
from txnstore.log.topics import create_topic, delete_topic, find_topics
from txnstore.model import Record


@pytest.fixture
def assigned(make_consumer, log):
    """A consumer of partition 0 of the topic t, from the beginning unless told otherwise."""

    def make(configuration=(), /, *, offset=OFFSET_BEGINNING):
        consumer = make_consumer(configuration)
        consumer.assign([TopicPartition("t", 0, offset)])
        return consumer

    return make


def position(consumer, number=0):
    return consumer.position([TopicPartition("t", number)])[0].offset


def test_records_come_in_order_with_all_they_hold(log, assigned):
    log.topic()
    log.write("t", 0, b"a", b"b")
    log.write("t", 0, b"c", timestamp_ms=7)
    messages = assigned().consume(3, PATIENCE_SECONDS)
    assert texts(messages) == [b"a", b"b", b"c"]
    assert [message.offset() for message in messages] == [0, 1, 2]
    assert [message.timestamp() for message in messages] == [(1, 1_000), (1, 1_000), (1, 7)]
    assert {(message.topic(), message.partition(), message.error()) for message in messages} == {("t", 0, None)}


def test_poll_waits_for_a_record_that_comes_later(log, assigned):
    log.topic()
    consumer = assigned()
    assert consumer.poll(0.3) is None
    log.write("t", 0, b"late")
    assert consumer.poll(PATIENCE_SECONDS).value() == b"late"


@pytest.mark.slow
def test_commits_to_other_topics_cost_a_waiting_consumer_nothing(log, assigned, monkeypatch):
    log.topic()
    log.topic("other")
    readings = []

    def counted(connection, positions, **options):
        readings.append(positions)
        return fetch(connection, positions, **options)

    def asked(run, positions, *options):
        readings.append(positions)
        return read_news(run, positions, *options)

    monkeypatch.setattr(reader, "fetch", counted)
    monkeypatch.setattr(reader, "read_news", asked)
    consumer = assigned({"isolation.level": "read_uncommitted"})
    assert consumer.poll(0.5) is None
    readings.clear()
    start = time.monotonic()
    for _ in range(30):
        for _ in range(5):
            log.write("other", 0, b"not for it")
            transaction = log.transaction()
            transaction.write("other", 0, b"nor this")
            transaction.end(commit=True)
        assert consumer.poll(0) is None
    # It looks by itself from time to time: after half a second at first.
    assert len(readings) <= 3 + (time.monotonic() - start) / 0.5
    # Records alone, and a transaction's before it ends.
    log.write("t", 0, b"for it")
    assert consumer.poll(PATIENCE_SECONDS).value() == b"for it"
    transaction = log.transaction()
    transaction.write("t", 0, b"this, too")
    assert consumer.poll(PATIENCE_SECONDS).value() == b"this, too"


def test_consume_returns_what_there_is_when_the_time_is_up(log, assigned):
    log.topic()
    log.write("t", 0, b"a", b"b")
    consumer = assigned()
    assert consumer.consume(0) == []
    # Once one has come the other is at hand.
    assert texts(consumer.consume(1, PATIENCE_SECONDS)) == [b"a"]
    assert texts(consumer.consume(5, 0.5)) == [b"b"]


def test_aborted_records_never_come_and_open_ones_hold_back_what_follows(log, assigned):
    log.topic()
    aborted, open_ = log.transaction(), log.transaction()
    aborted.write("t", 0, b"no")
    log.write("t", 0, b"before")
    open_.write("t", 0, b"yes")
    log.write("t", 0, b"after")
    aborted.end(commit=False)
    consumer = assigned()
    assert texts(consumer.consume(1, PATIENCE_SECONDS)) == [b"before"]
    assert consumer.consume(9, 0.5) == []
    open_.end(commit=True)
    assert texts(consumer.consume(2, PATIENCE_SECONDS)) == [b"yes", b"after"]


def test_read_uncommitted_gets_everything(log, assigned):
    log.topic()
    transaction = log.transaction()
    transaction.write("t", 0, b"open")
    log.write("t", 0, b"after")
    assert texts(assigned({"isolation.level": "read_uncommitted"}).consume(2, PATIENCE_SECONDS)) == [b"open", b"after"]


def test_the_position_steps_over_markers_and_aborted_records(log, assigned):
    log.topic()
    for commit, value in ((True, b"yes"), (False, b"no")):
        transaction = log.transaction()
        transaction.write("t", 0, value)
        transaction.end(commit=commit)
    consumer = assigned()
    assert position(consumer) == OFFSET_INVALID
    message = consumer.poll(PATIENCE_SECONDS)
    assert (message.value(), message.offset()) == (b"yes", 0)
    assert position(consumer) == 4
    assert consumer.commit(asynchronous=False)[0].offset == 4
    assert consumer.commit(message=message, asynchronous=False)[0].offset == 1
    log.write("t", 0, b"next")
    assert consumer.poll(PATIENCE_SECONDS).offset() == 4


def test_a_marker_that_comes_after_the_record_was_handed_out_is_stepped_over(log, assigned):
    log.topic()
    transaction = log.transaction()
    transaction.write("t", 0, b"open")
    consumer = assigned({"isolation.level": "read_uncommitted"})
    assert consumer.poll(PATIENCE_SECONDS).value() == b"open"
    assert position(consumer) == 1
    transaction.end(commit=False)
    eventually(lambda: position(consumer) == 2)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("offset", "reset", "expected"),
    [
        (1, "error", b"b"),
        (OFFSET_BEGINNING, "error", b"a"),
        (OFFSET_INVALID, "earliest", b"a"),
        (99, "earliest", b"a"),
        (OFFSET_END, "error", b"new"),
        (OFFSET_INVALID, "latest", b"new"),
        (99, "latest", b"new"),
        (-2002, "error", b"b"),
    ],
)
def test_reading_begins_where_the_assignment_says_or_the_reset_policy(log, assigned, offset, reset, expected):
    log.topic()
    log.write("t", 0, b"a", b"b", b"c")
    consumer = assigned({"auto.offset.reset": reset, "enable.partition.eof": True}, offset=offset)
    message = consumer.poll(PATIENCE_SECONDS)
    if message.error() is not None:
        assert (message.error().code(), message.offset()) == (KafkaError._PARTITION_EOF, 3)
        log.write("t", 0, b"new")
        message = consumer.poll(PATIENCE_SECONDS)
    assert message.value() == expected


def test_reading_begins_at_the_committed_offset(log, assigned):
    log.topic()
    log.write("t", 0, b"a", b"b", b"c")
    first = assigned()
    first.poll(PATIENCE_SECONDS)
    first.commit(asynchronous=False)
    assert assigned({"auto.offset.reset": "error"}, offset=OFFSET_INVALID).poll(PATIENCE_SECONDS).value() == b"b"


def test_reading_waits_for_a_committed_offset_that_may_still_change(log, assigned):
    log.topic()
    log.write("t", 0, b"a", b"b", b"c")
    transaction = log.transaction()
    transaction.send_offset("readers", "t", 0, 2)
    consumer = assigned(offset=OFFSET_INVALID)
    assert consumer.poll(0.4) is None
    transaction.end(commit=True)
    assert consumer.poll(PATIENCE_SECONDS).value() == b"c"


@pytest.fixture
def resets(caplog):
    """What was logged of them."""
    return lambda: [
        (it.levelname, it.group, it.topic, it.partition, vars(it)["from"], it.to)
        for it in caplog.records
        if getattr(it, "event", None) == "offset_reset"
    ]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("reset", "begins_at"), [("earliest", 2), ("latest", 3)])
def test_a_reset_of_what_was_committed_is_logged(log, assigned, resets, reset, begins_at):
    log.topic()
    log.write("t", 0, b"a", b"b", b"c")
    ends = {"enable.partition.eof": True, "fetch.wait.max.ms": 10, "auto.offset.reset": reset}
    # Nothing is committed yet: that is nobody's trouble.
    assert assigned(ends, offset=OFFSET_INVALID).poll(PATIENCE_SECONDS).offset() == (0 if reset == "earliest" else 3)
    first = assigned()
    assert first.poll(PATIENCE_SECONDS).value() == b"a"
    first.commit(asynchronous=False)
    assert assigned(ends, offset=OFFSET_INVALID).poll(PATIENCE_SECONDS).value() == b"b"
    assert resets() == []
    log.store.write(lambda connection: advance_log_start(connection, log.partition_id("t", 0), 2))
    consumer = assigned(ends, offset=OFFSET_INVALID)
    assert consumer.poll(PATIENCE_SECONDS).offset() == begins_at
    assert resets() == [("WARNING", "readers", "t", 0, 1, begins_at)]
    consumer.seek(TopicPartition("t", 0, 99))
    assert consumer.poll(PATIENCE_SECONDS).offset() == begins_at
    assert resets()[1:] == [("WARNING", "readers", "t", 0, 99, begins_at)]


def until_end(consumer, number, offset):
    """Poll until this end of this partition is said; records, and other ends, may come before it."""
    end = None
    while end != (number, offset):
        message = consumer.poll(PATIENCE_SECONDS)
        end = (message.partition(), message.offset()) if error_code(message) == KafkaError._PARTITION_EOF else None


def with_records(log, count, *changes):
    """Make these changes of a topic, and write so many records to its last partition, before anybody sees it."""
    batch = encode([Record(b"new", timestamp_ms=1_000)] * count)

    def work(connection):
        *_, topic = [change(connection) for change in changes]
        append(connection, [Append(topic.partition_ids[-1], batch)])

    log.store.write(work, wakes_readers=True)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("reset", ["earliest", "latest"])
def test_that_latest_passes_over_records_of_a_partition_made_anew_is_logged(log, assigned, resets, reset):
    log.topic()
    log.write("t", 0, b"old")
    ends = {"enable.partition.eof": True, "fetch.wait.max.ms": 10, "auto.offset.reset": reset}
    consumer = assigned(ends, offset=OFFSET_INVALID)
    until_end(consumer, 0, 1)
    with_records(
        log, 3, lambda connection: delete_topic(connection, "t"), lambda connection: create_topic(connection, "t")
    )
    until_end(consumer, 0, 3)
    assert resets() == ([("WARNING", "readers", "t", 0, 0, 3)] if reset == "latest" else [])


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("offset", "said", "text"),
    [(OFFSET_INVALID, None, "no previously committed offset available"), (99, 99, "Offset out of range")],
)
def test_without_a_reset_policy_the_application_is_told_once_and_can_seek(log, assigned, offset, said, text):
    log.topic()
    log.write("t", 0, b"a")
    consumer = assigned({"auto.offset.reset": "error"}, offset=offset)
    message = consumer.poll(PATIENCE_SECONDS)
    assert error_code(message) == KafkaError._AUTO_OFFSET_RESET
    assert (message.topic(), message.partition(), message.offset()) == ("t", 0, said)
    assert text in message.error().str()
    assert consumer.poll(0.3) is None
    consumer.seek(TopicPartition("t", 0, 0))
    assert consumer.poll(PATIENCE_SECONDS).value() == b"a"


def test_an_offset_that_retention_has_passed_is_reset(log, assigned):
    topic = log.topic()
    log.write("t", 0, b"a")
    consumer = assigned()
    assert consumer.poll(PATIENCE_SECONDS).value() == b"a"
    log.store.write(
        lambda connection: connection.execute(
            update(partition_heads)
            .where(partition_heads.c.partition_id == topic.partition_ids[0])
            .values(next_offset=50, log_start_offset=50)
        )
    )
    log.write("t", 0, b"much later")
    message = consumer.poll(PATIENCE_SECONDS)
    assert (message.value(), message.offset()) == (b"much later", 50)


def test_the_end_of_a_partition_is_said_once_for_each_arrival(log, assigned):
    log.topic()
    log.write("t", 0, b"a")
    consumer = assigned({"enable.partition.eof": True})
    assert consumer.poll(PATIENCE_SECONDS).value() == b"a"
    end = consumer.poll(PATIENCE_SECONDS)
    assert error_code(end) == KafkaError._PARTITION_EOF
    assert (end.topic(), end.partition(), end.offset()) == ("t", 0, 1)
    assert end.value() == end.error().str().encode()
    assert consumer.poll(0.3) is None
    log.write("t", 0, b"b")
    assert consumer.poll(PATIENCE_SECONDS).value() == b"b"
    assert consumer.poll(PATIENCE_SECONDS).offset() == 2


#: Longer than any test takes.
NEVER_MS = 300_000


def test_the_end_is_not_said_while_records_may_arrive(log, assigned):
    """As a broker holds an empty answer back for fetch.wait.max.ms; what arrives meanwhile comes at once."""
    log.topic()
    consumer = assigned({"enable.partition.eof": True, "fetch.wait.max.ms": NEVER_MS})
    assert consumer.poll(0.2) is None
    for value in (b"a", b"b"):
        log.write("t", 0, value)
        assert consumer.poll(PATIENCE_SECONDS).value() == value
        assert consumer.poll(0.2) is None


def test_the_end_is_said_after_what_a_broker_waits(log, assigned):
    log.topic()
    log.write("t", 0, b"a")
    began = time.monotonic()
    consumer = assigned({"enable.partition.eof": True, "fetch.wait.max.ms": 300})
    assert consumer.poll(PATIENCE_SECONDS).value() == b"a"
    assert error_code(consumer.poll(PATIENCE_SECONDS)) == KafkaError._PARTITION_EOF
    assert time.monotonic() - began >= 0.3


@pytest.mark.parametrize("waits_for_nothing", [{"fetch.wait.max.ms": 0}, {"fetch.min.bytes": 0}])
def test_whoever_asks_for_nothing_is_told_of_the_end_at_once(log, assigned, waits_for_nothing):
    log.topic()
    log.write("t", 0, b"a")
    consumer = assigned({"enable.partition.eof": True, "fetch.wait.max.ms": NEVER_MS, **waits_for_nothing})
    assert [message.offset() for message in consumer.consume(2, PATIENCE_SECONDS)] == [0, 1]


def test_the_end_of_a_partition_is_said_with_the_records_of_another(log, make_consumer):
    """They make a broker's answer, in which the other is empty."""
    log.topic(partition_count=2)
    log.write("t", 1, b"a")
    consumer = make_consumer({"enable.partition.eof": True, "fetch.wait.max.ms": NEVER_MS})
    consumer.assign([TopicPartition("t", number, OFFSET_BEGINNING) for number in range(2)])
    messages = consumer.consume(2, PATIENCE_SECONDS)
    assert sorted((message.partition(), message.offset(), error_code(message)) for message in messages) == [
        (0, 0, KafkaError._PARTITION_EOF),
        (1, 0, None),
    ]
    # The one that had records ends with an answer that is held.
    assert consumer.poll(0.2) is None


def test_the_end_that_is_due_is_the_one_of_where_the_reader_is(log, assigned):
    log.topic()
    log.write("t", 0, b"a")
    consumer = assigned({"enable.partition.eof": True, "fetch.wait.max.ms": 300})
    assert consumer.poll(PATIENCE_SECONDS).value() == b"a"
    consumer.seek(TopicPartition("t", 0, 0))
    assert [message.offset() for message in consumer.consume(2, PATIENCE_SECONDS)] == [0, 1]
    assert consumer.poll(0.5) is None


def test_records_of_too_few_bytes_are_held_until_there_are_enough(log, assigned):
    log.topic()
    log.write("t", 0, b"few")
    consumer = assigned({"fetch.min.bytes": 10_000, "fetch.wait.max.ms": NEVER_MS})
    assert consumer.poll(0.3) is None
    log.write("t", 0, b"still few")
    assert consumer.poll(0.3) is None
    log.write("t", 0, b"x" * 10_000)
    assert [len(text) for text in texts(consumer.consume(3, PATIENCE_SECONDS))] == [3, 9, 10_000]
    log.write("t", 0, b"few again")
    assert consumer.poll(0.3) is None


def test_records_of_too_few_bytes_are_held_no_longer_than_a_broker_waits(log, assigned):
    log.topic()
    log.write("t", 0, b"few")
    began = time.monotonic()
    consumer = assigned({"fetch.min.bytes": 10_000, "fetch.wait.max.ms": 300})
    assert consumer.poll(PATIENCE_SECONDS).value() == b"few"
    assert time.monotonic() - began >= 0.3
    log.write("t", 0, b"few again")
    assert consumer.poll(PATIENCE_SECONDS).value() == b"few again"


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("isolation", "end_offset"), [("read_committed", 1), ("read_uncommitted", 2)])
def test_the_end_is_the_last_stable_offset_or_the_high_watermark(log, assigned, isolation, end_offset):
    log.topic()
    log.write("t", 0, b"a")
    transaction = log.transaction()
    transaction.write("t", 0, b"open")
    consumer = assigned({"enable.partition.eof": True, "isolation.level": isolation})
    assert [message.offset() for message in consumer.consume(end_offset + 1, PATIENCE_SECONDS)][-1] == end_offset
    tp = TopicPartition("t", 0)
    assert consumer.get_watermark_offsets(tp, cached=True) == (0, 2)
    assert consumer.get_watermark_offsets(tp, PATIENCE_SECONDS) == (0, end_offset)


def test_without_the_setting_no_end_is_said(log, assigned):
    log.topic()
    assert assigned().poll(0.3) is None


def test_an_unknown_topic_is_said_once_and_read_once_it_is_there(log, assigned):
    consumer = assigned()
    message = consumer.poll(PATIENCE_SECONDS)
    assert error_code(message) == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert (message.topic(), message.partition()) == ("t", 0)
    assert consumer.poll(0.5) is None
    log.topic()
    log.write("t", 0, b"there")
    assert consumer.poll(PATIENCE_SECONDS).value() == b"there"


def test_a_topic_is_created_by_a_consumer_only_if_it_may(log, assigned):
    consumer = assigned({"allow.auto.create.topics": True})
    polled_until(consumer, lambda: log.store.read(lambda connection: find_topics(connection, ["t"])))
    log.write("t", 0, b"there")
    assert consumer.poll(PATIENCE_SECONDS).value() == b"there"


@pytest.mark.slow_but_first
@pytest.mark.parametrize("refusal", [PermissionDenied, StoreReadOnly])
@pytest.mark.parametrize("is_member", [False, True], ids=["assigned", "member"])
def test_a_topic_that_may_not_be_created_holds_up_no_other(log, make_consumer, monkeypatch, is_member, refusal):
    def refuse(*_, **__):
        raise refusal("the store takes no topic")

    monkeypatch.setattr(topic_directory, "create_used_topic", refuse)
    log.topic()
    log.write("t", 0, b"one")
    consumer = make_consumer({"allow.auto.create.topics": True})
    if is_member:
        consumer.subscribe(["missing", "t"])
    else:
        consumer.assign([TopicPartition(name, 0, 0) for name in ("missing", "t")])
    messages = [consumer.poll(PATIENCE_SECONDS) for _ in range(2)]
    assert [message.value() for message in messages if message.error() is None] == [b"one"]
    (error,) = [message.error() for message in messages if message.error() is not None]
    assert error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert error.str().startswith("missing does not exist, and cannot be created: the store takes no topic")
    log.write("t", 0, b"two")
    assert consumer.poll(PATIENCE_SECONDS).value() == b"two"


def test_an_unknown_partition_is_said_and_read_once_it_is_there(log, make_consumer):
    log.topic()
    consumer = make_consumer()
    consumer.assign([TopicPartition("t", 1, 0)])
    assert error_code(consumer.poll(PATIENCE_SECONDS)) == KafkaError._UNKNOWN_PARTITION
    log.grow("t", 2)
    log.write("t", 1, b"there")
    assert consumer.poll(PATIENCE_SECONDS).value() == b"there"


@pytest.mark.slow
def test_a_topic_that_is_deleted_is_said_and_a_new_one_of_its_name_is_read(log, assigned):
    log.topic()
    log.write("t", 0, b"old", b"old")
    consumer = assigned()
    assert len(consumer.consume(2, PATIENCE_SECONDS)) == 2
    log.store.write(lambda connection: delete_topic(connection, "t"), wakes_readers=True)
    assert error_code(consumer.poll(PATIENCE_SECONDS)) == KafkaError.UNKNOWN_TOPIC_OR_PART
    log.topic()
    log.write("t", 0, b"new")
    assert consumer.poll(PATIENCE_SECONDS).value() == b"new"


def test_a_topic_is_read_from_its_beginning_though_it_replaces_one_that_had_left_the_reader_behind(
    log, assigned, monkeypatch
):
    """It is made anew just before the reader asks where to go on: its own offset would be one of the new topic too."""
    log.topic()
    log.write("t", 0, b"old", b"old")
    consumer = assigned()
    assert len(consumer.consume(2, PATIENCE_SECONDS)) == 2
    partition_id = log.partition_id("t", 0)
    resolve = reader.PartitionReader.resolve

    def made_anew_before(self, positions):
        monkeypatch.undo()
        log.store.write(lambda connection: delete_topic(connection, "t"))
        log.topic()
        log.write("t", 0, b"0", b"1", b"2", b"3", b"4")
        consumer._core.directory.forget("t")
        return resolve(self, positions)

    monkeypatch.setattr(reader.PartitionReader, "resolve", made_anew_before)

    def leave_behind(connection):
        """At once: the reader, which waits, sees nothing in between."""
        append(connection, [Append(partition_id, encode([Record(b"old"), Record(b"old")]))])
        advance_log_start(connection, partition_id, 4)

    log.store.write(leave_behind, wakes_readers=True)
    assert texts(consumer.consume(5, PATIENCE_SECONDS)) == [b"0", b"1", b"2", b"3", b"4"]


def test_a_damaged_batch_is_said_after_what_lies_before_it_and_the_position_stays(log, assigned, make_consumer):
    topic = log.topic(partition_count=2)
    log.write("t", 0, b"good")
    log.write("t", 0, b"damaged")
    log.write("t", 1, b"other")
    damage = update(record_batches).where(
        record_batches.c.partition_id == topic.partition_ids[0], record_batches.c.base_offset == 1
    )
    log.store.write(lambda connection: connection.execute(damage.values(crc=1)))
    consumer = make_consumer()
    consumer.assign([TopicPartition("t", 0, 0), TopicPartition("t", 1, 0)])
    messages = consumer.consume(3, PATIENCE_SECONDS)
    assert {message.value() for message in messages if message.error() is None} == {b"good", b"other"}
    (error,) = [message for message in messages if message.error() is not None]
    assert (error.partition(), error.offset(), error.error().code()) == (0, 1, 2)
    assert "damaged" not in error.error().str().replace("is corrupt", "")
    assert position(consumer) == 1
    log.write("t", 1, b"goes on")
    assert consumer.poll(PATIENCE_SECONDS).value() == b"goes on"
    consumer.seek(TopicPartition("t", 0, 2))
    log.write("t", 0, b"behind it")
    assert consumer.poll(PATIENCE_SECONDS).value() == b"behind it"


def test_many_partitions_are_all_read_while_one_has_more_than_a_page(log, make_consumer):
    log.topic(partition_count=8)
    for _ in range(45):
        log.write("t", 0, *[b"x"] * 1_000)
    for number in range(1, 8):
        log.write("t", number, b"y")
    consumer = make_consumer()
    consumer.assign([TopicPartition("t", number, 0) for number in range(8)])
    messages = consumer.consume(45_007, PATIENCE_SECONDS)
    assert len(messages) == 45_007
    last_small = max(index for index, message in enumerate(messages) if message.partition() > 0)
    assert last_small < 41_000
    assert [m.offset() for m in messages if m.partition() == 0] == list(range(45_000))


def test_iteration_yields_records_and_raises_errors(log, make_consumer):
    log.topic()
    log.write("t", 0, b"a", b"b")
    consumer = make_consumer({"enable.partition.eof": True})
    consumer.assign([TopicPartition("t", 0, 0)])
    seen = []
    for message in consumer:
        if message.error() is not None:
            break
        seen.append(message.value())
    assert seen == [b"a", b"b"]
    consumer.assign([TopicPartition("nope", 0, 0)])
    with pytest.raises(KafkaException) as caught:
        next(iter(consumer))
    assert caught.value.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    consumer.close()
    assert list(consumer) == []


def test_an_expired_transaction_is_aborted_by_the_reader_that_it_holds_back(log, assigned):
    log.topic()
    transaction = log.transaction(timeout_ms=1)
    transaction.write("t", 0, b"abandoned")
    log.write("t", 0, b"after")
    assert assigned().poll(PATIENCE_SECONDS).value() == b"after"
