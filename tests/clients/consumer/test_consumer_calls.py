"""The consumer's calls as confluent-kafka 2.16.1 was seen to answer them: refusals, closed consumers, lookups."""

from __future__ import annotations

import gc
import math
import threading
from typing import Any

import pytest

from tests.clients.consumer.log_writer import PATIENCE_SECONDS, eventually, texts
from txnstore import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    OFFSET_STORED,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from txnstore.clients.worker import Duties

TP = TopicPartition


@pytest.fixture
def alone(tmp_path):
    """A consumer whose store nobody has opened: what is refused is refused before anything happens."""
    consumer = Consumer({"bootstrap.servers": f"sqlite:///{tmp_path / 'never.db'}", "group.id": "g"})
    yield consumer
    consumer.close()
    assert not (tmp_path / "never.db").exists()


@pytest.fixture
def reader(make_consumer, log):
    """A consumer that has read two of five records of partition 0 of t, which has two partitions."""
    log.topic(partition_count=2)
    log.write("t", 0, b"0", b"1", b"2", b"3", b"4")
    consumer = make_consumer({"enable.auto.commit": False})
    consumer.assign([TP("t", 0)])
    assert texts(consumer.consume(2, PATIENCE_SECONDS)) == [b"0", b"1"]
    return consumer


def raised(call, *arguments, **named):
    with pytest.raises(KafkaException) as caught:
        call(*arguments, **named)
    error = caught.value.args[0]
    return error.code(), error.str()


STATE, INVALID, UNKNOWN = KafkaError._STATE, KafkaError._INVALID_ARG, KafkaError._UNKNOWN_PARTITION
REFUSED = [
    ("seek", [TP("t", 0, 3)], UNKNOWN, "Failed to seek to offset 3: Local: Unknown partition"),
    ("seek", [TP("t", 0, -1)], UNKNOWN, "Failed to seek to offset -1: Local: Unknown partition"),
    ("subscribe", [[]], INVALID, "Failed to set subscription: Local: Invalid argument or configuration"),
    ("subscribe", [["t", "t"]], INVALID, "Failed to set subscription: Local: Invalid argument or configuration"),
    ("subscribe", [[""]], INVALID, "Failed to set subscription: Local: Invalid argument or configuration"),
    ("assign", [[TP("t", 0, 1), TP("t", 0, 3)]], INVALID, "Failed to set assignment: Local: Invalid argument or"),
    ("assign", [[TP("t", 0, -5)]], INVALID, "Failed to set assignment: t [0]: offset -5 is below zero, and not one of"),
    ("incremental_assign", [[TP("t", 0, -1999)]], INVALID, "Failed to set assignment: t [0]: offset -1999 is below"),
    ("incremental_unassign", [[TP("t", 1)]], INVALID, "t [1] can't be unassigned since it is not in the current"),
    ("offsets_for_times", [[]], INVALID, "Failed to get offsets: Local: Invalid argument or configuration"),
    ("store_offsets", [None, [TP("t", 0, 3)]], INVALID, "StoreOffsets failed: Local: Invalid argument or"),
    ("commit", [None, None, False], KafkaError._NO_OFFSET, "Commit failed: Local: No offset stored"),
    ("commit", [None, [], False], KafkaError._NO_OFFSET, "Commit failed: Local: No offset stored"),
    ("commit", [None, [TP("t", 0)], False], KafkaError._NO_OFFSET, "Commit failed: Local: No offset stored"),
    ("commit", [None, [TP("t", 0, -1)], False], KafkaError._NO_OFFSET, "Commit failed: Local: No offset stored"),
    ("commit", [Message("t", 0), None, False], INVALID, "Cannot commit offsets for a message without"),
]


@pytest.mark.parametrize(("method", "arguments", "code", "text"), REFUSED)
def test_a_refused_call_has_the_code_and_the_text_that_were_seen(alone, method, arguments, code, text):
    found_code, found_text = raised(getattr(alone, method), *arguments)
    assert (found_code, found_text[: len(text)]) == (code, text)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("method", "arguments", "error", "text"),
    [
        ("subscribe", ["t"], TypeError, "expected list of topic unicode strings"),
        ("subscribe", [("t",)], TypeError, "expected list of topic unicode strings"),
        ("subscribe", [["t"], 3], TypeError, "on_assign expects a callable"),
        ("subscribe", [["t"], None, 3], TypeError, "on_revoke expects a callable"),
        ("subscribe", [["t"], None, None, 3], TypeError, "on_lost expects a callable"),
        ("consume", [-1], ValueError, r"num_messages must be between 0 and 1000000 \(1M\)"),
        ("consume", [1_000_001], ValueError, r"num_messages must be between 0 and 1000000 \(1M\)"),
        ("consume", ["1"], TypeError, "cannot be interpreted as an integer"),
        ("poll", ["x"], TypeError, "must be real number, not str"),
        ("poll", [None], TypeError, "must be real number, not NoneType"),
        ("poll", [math.nan], ValueError, "NaN"),
        ("assign", ["t"], TypeError, "requires list of TopicPartition"),
        ("assign", [["t"]], TypeError, "expected txnstore.TopicPartition"),
        ("incremental_assign", [3], TypeError, "requires list of TopicPartition"),
        ("incremental_unassign", [3], TypeError, "requires list of TopicPartition"),
        ("seek", ["t"], TypeError, "expected txnstore.TopicPartition"),
        ("pause", ["t"], TypeError, "requires list of TopicPartition"),
        ("resume", ["t"], TypeError, "requires list of TopicPartition"),
        ("position", ["t"], TypeError, "requires list of TopicPartition"),
        ("committed", [["x"]], TypeError, "expected txnstore.TopicPartition"),
        ("committed", ["x"], TypeError, "requires list of TopicPartition"),
        ("offsets_for_times", ["x"], TypeError, "requires list of TopicPartition"),
        ("get_watermark_offsets", ["x"], TypeError, "expected txnstore.TopicPartition"),
        ("store_offsets", [], ValueError, "expected either message or offsets"),
        ("store_offsets", [1, []], ValueError, "message and offsets are mutually exclusive"),
        ("commit", [1, []], ValueError, "message and offsets are mutually exclusive"),
        ("commit", [1], TypeError, "expected txnstore.Message"),
        ("commit", [None, 1], TypeError, "requires list of TopicPartition"),
        ("set_sasl_credentials", ["u", None], TypeError, "must be str"),
    ],
)
def test_a_wrong_argument_is_refused(alone, method, arguments, error, text):
    with pytest.raises(error, match=text):
        getattr(alone, method)(*arguments)


def test_what_is_no_regular_expression_is_refused(alone):
    code, text = raised(alone.subscribe, ["^("])
    assert code == INVALID
    assert "regular expression" in text


def test_a_message_with_an_error_is_neither_committed_nor_stored(alone):
    message = Message("t", 0, 3, error=KafkaError(KafkaError._AUTO_OFFSET_RESET, "why"))
    assert raised(alone.commit, message) == (INVALID, "Cannot commit offsets for message with error: 'why'")
    assert raised(alone.store_offsets, message) == (INVALID, "Cannot store offsets for message with error: 'why'")


def test_what_asks_for_nothing_is_no_error(alone):
    assert alone.poll(0) is None
    assert alone.consume(0) == []
    assert alone.position([TP("t", 0)])[0].offset == OFFSET_INVALID
    assert alone.committed([]) == []
    assert alone.assignment() == []
    assert alone.memberid() is None
    assert alone.consumer_group_metadata() == b"CGMDv2:\xff\xff\xff\xffg\x00\x00\x01"
    assert alone.get_watermark_offsets(TP("t", 0), cached=True) == (OFFSET_INVALID, OFFSET_INVALID)
    for call in (alone.pause, alone.resume):
        assert call([TP("t", 0)]) is None
    for call in (alone.unassign, alone.unsubscribe, alone.commit):
        assert call() is None
    assert alone.set_sasl_credentials("user", "password") is None
    assert alone.poll(0) is None


CALLS = {
    "poll": [0],
    "consume": [1, 0],
    "consume_transaction": [0],
    "assignment": [],
    "memberid": [],
    "consumer_group_metadata": [],
    "subscribe": [["t"]],
    "unsubscribe": [],
    "assign": [[TP("t", 0)]],
    "incremental_assign": [[TP("t", 0)]],
    "incremental_unassign": [[TP("t", 0)]],
    "unassign": [],
    "commit": [],
    "store_offsets": [None, [TP("t", 0, 1)]],
    "committed": [[TP("t", 0)]],
    "position": [[TP("t", 0)]],
    "seek": [TP("t", 0, 0)],
    "pause": [[TP("t", 0)]],
    "resume": [[TP("t", 0)]],
    "get_watermark_offsets": [TP("t", 0)],
    "offsets_for_times": [[TP("t", 0)]],
    "list_topics": [],
    "cluster_id": [],
    "set_sasl_credentials": ["u", "p"],
}


@pytest.mark.parametrize("method", CALLS)
def test_a_closed_consumer_refuses_every_call(alone, method):
    alone.close()
    alone.close()
    of_all_clients = method in {"list_topics", "cluster_id", "set_sasl_credentials"}
    with pytest.raises(RuntimeError, match="Handle has been closed" if of_all_clients else "Consumer closed"):
        getattr(alone, method)(*CALLS[method])


def test_every_public_method_was_tried():
    public = {name for name in dir(Consumer) if not name.startswith("_")}
    assert public == {*CALLS, "close"}


def test_the_context_closes_the_consumer_and_lets_exceptions_pass(tmp_path):
    with (
        pytest.raises(ZeroDivisionError),
        Consumer({"bootstrap.servers": f"sqlite:///{tmp_path / 's.db'}", "group.id": "g"}) as consumer,
    ):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="Consumer closed"):
        consumer.poll(0)


def test_a_consumer_needs_a_group(tmp_path):
    with pytest.raises(ValueError, match=r"Failed to create consumer: group\.id must be set"):
        Consumer({"bootstrap.servers": f"sqlite:///{tmp_path / 's.db'}"})
    with pytest.raises(TypeError, match="expected configuration dict"):
        Consumer()


def test_a_seek_is_followed_and_makes_the_position_unknown(reader):
    reader.seek(TP("t", 0, 4))
    assert reader.position([TP("t", 0)])[0].offset == OFFSET_INVALID
    assert reader.poll(PATIENCE_SECONDS).value() == b"4"
    reader.seek(TP("t", 0, OFFSET_BEGINNING))
    assert reader.poll(PATIENCE_SECONDS).value() == b"0"
    reader.seek(TP("t", 0, OFFSET_INVALID))
    assert reader.poll(PATIENCE_SECONDS).value() == b"0"
    reader.seek(TP("t", 0, OFFSET_END))
    assert reader.poll(0.3) is None
    code, text = raised(reader.seek, TP("t", 0, OFFSET_STORED))
    assert (code, text) == (INVALID, "Failed to seek to offset -1000: Local: Invalid argument or configuration")


def test_one_cannot_seek_below_zero_where_a_program_has_counted_too_far_back(reader):
    code, text = raised(reader.seek, TP("t", 0, 2 - 10))
    assert (code, text[:40]) == (INVALID, "Failed to seek to offset -8: t [0]: offs")
    assert reader.poll(PATIENCE_SECONDS).value() == b"2"


def test_a_pause_outlives_an_assignment_and_ends_as_it_is_resumed(reader, log):
    log.write("t", 1, b"other")
    reader.pause([TP("t", 0)])
    reader.assign([TP("t", 1), TP("t", 0)])
    assert reader.poll(PATIENCE_SECONDS).value() == b"other"
    assert reader.poll(0.2) is None
    reader.unassign()
    reader.resume([TP("t", 0)])
    reader.assign([TP("t", 0)])
    assert reader.poll(PATIENCE_SECONDS).value() == b"0"


def test_a_paused_partition_gives_nothing_until_it_is_resumed(reader, log):
    reader.pause([TP("t", 0), TP("zz", 9)])
    assert reader.poll(0.2) is None
    log.write("t", 0, b"5")
    assert reader.poll(0.2) is None
    reader.seek(TP("t", 0, 4))
    assert reader.poll(0.2) is None
    reader.resume([TP("t", 0)])
    assert texts(reader.consume(2, PATIENCE_SECONDS)) == [b"4", b"5"]


def test_a_paused_partition_keeps_no_other_from_being_read_whatever_is_buffered_of_it(make_consumer, log):
    log.topic(partition_count=2)
    log.write("t", 0, *[b"much"] * 50)
    reader = make_consumer({"queued.min.messages": 10})
    reader.assign([TP("t", 0), TP("t", 1)])
    assert reader.poll(PATIENCE_SECONDS).value() == b"much"
    reader.pause([TP("t", 0)])
    log.write("t", 1, b"other")
    assert reader.poll(PATIENCE_SECONDS).value() == b"other"
    reader.resume([TP("t", 0)])
    assert len(reader.consume(49, PATIENCE_SECONDS)) == 49


def test_what_has_come_while_a_partition_was_paused_comes_at_once_when_it_is_resumed(make_consumer, log):
    log.topic(partition_count=2)
    # Who is not woken does nothing by itself before the test is over.
    reader = make_consumer({"fetch.wait.max.ms": 300_000})
    reader._core.fetcher._first._duties = Duties()
    reader.assign([TP("t", 0), TP("t", 1)])
    log.write("t", 1, b"first")
    assert reader.poll(PATIENCE_SECONDS).value() == b"first"
    reader.pause([TP("t", 1)])
    # It listens to what is not paused from now on.
    log.write("t", 0, b"other")
    assert reader.poll(PATIENCE_SECONDS).value() == b"other"
    assert reader.poll(0.2) is None
    log.write("t", 1, b"second")
    assert reader.poll(0.2) is None
    reader.resume([TP("t", 1)])
    assert reader.poll(PATIENCE_SECONDS).value() == b"second"


def test_assigning_again_begins_again(reader):
    reader.assign([TP("t", 0, 3), TP("t", 1, 0)])
    assert [(tp.partition, tp.offset) for tp in reader.assignment()] == [(0, 3), (1, 0)]
    assert reader.poll(PATIENCE_SECONDS).value() == b"3"
    reader.unassign()
    assert reader.assignment() == []
    assert reader.poll(0.2) is None


def test_partitions_are_added_and_taken_away(reader, log):
    log.write("t", 1, b"other")
    reader.incremental_assign([TP("t", 1, 0)])
    assert sorted(texts(reader.consume(4, PATIENCE_SECONDS))) == [b"2", b"3", b"4", b"other"]
    code, text = raised(reader.incremental_assign, [TP("t", 1, 0)])
    assert (code, text) == (KafkaError._CONFLICT, "t [1] is already part of the current assignment")
    reader.incremental_unassign([TP("t", 0)])
    assert [tp.partition for tp in reader.assignment()] == [1]


def test_watermarks(reader, log):
    assert reader.get_watermark_offsets(TP("t", 0), cached=True) == (0, 5)
    assert reader.get_watermark_offsets(TP("t", 0)) == (0, 5)
    assert reader.get_watermark_offsets(TP("t", 1), timeout=PATIENCE_SECONDS) == (0, 0)
    text = "Failed to get watermark offsets: Local: Unknown partition"
    for unknown in (TP("nope", 0), TP("t", 77), TP("t", -1)):
        assert raised(reader.get_watermark_offsets, unknown, 5) == (KafkaError._UNKNOWN_PARTITION, text)
    log.grow("t", 3)
    assert reader.get_watermark_offsets(TP("t", 2)) == (0, 0)


def test_offsets_for_times(reader, log):
    log.write("t", 0, b"5", timestamp_ms=2_000)
    found = reader.offsets_for_times([TP("t", 0, 0), TP("t", 0, 1_001), TP("t", 0, 2**63 - 1), TP("t", 1, 0)])
    assert [(tp.partition, tp.offset) for tp in found] == [(0, 0), (0, 5), (0, OFFSET_END), (1, OFFSET_END)]
    text = "Failed to get offsets: Local: Unknown partition"
    assert raised(reader.offsets_for_times, [TP("nope", 0, 0)]) == (KafkaError._UNKNOWN_PARTITION, text)


def test_an_unknown_partition_is_an_error_of_its_own_among_offsets_for_times(reader, log):
    log.write("t", 0, b"5", timestamp_ms=2_000)
    found = reader.offsets_for_times([TP("nope", 0, 7), TP("t", 0, 1_001), TP("t", 77, 8)])
    assert [(tp.topic, tp.partition, tp.offset) for tp in found] == [("nope", 0, 7), ("t", 0, 5), ("t", 77, 8)]
    assert [tp.error and tp.error.code() for tp in found] == [
        KafkaError._UNKNOWN_PARTITION, None, KafkaError._UNKNOWN_PARTITION
    ]  # fmt: skip


def test_the_cluster_and_its_topics(reader, log):
    metadata = reader.list_topics(timeout=PATIENCE_SECONDS)
    assert list(metadata.topics) == ["t"]
    assert list(metadata.topics["t"].partitions) == [0, 1]
    assert reader.cluster_id() == metadata.cluster_id == log.store.store_uuid
    unknown = reader.list_topics("nope").topics["nope"]
    assert unknown.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART


def test_a_call_without_time_times_out_and_the_consumer_goes_on(reader):
    held = threading.Event()
    reader._core.worker.submit(held.wait)
    late = [
        (reader.get_watermark_offsets, [TP("t", 0), 0]),
        (reader.offsets_for_times, [[TP("t", 0, 0)], 0]),
        (reader.committed, [[TP("t", 0)], 0]),
    ]
    for call, arguments in late:
        code, text = raised(call, *arguments)
        assert code == KafkaError._TIMED_OUT
        assert text.endswith(": Local: Timed out")
    assert reader.poll(PATIENCE_SECONDS).value() == b"2"
    held.set()
    assert reader.get_watermark_offsets(TP("t", 0), PATIENCE_SECONDS) == (0, 5)


@pytest.mark.slow
def test_a_consumer_that_nobody_holds_ends_its_threads(url, log):
    log.topic()
    log.write("t", 0, b"0")
    consumer: Any = Consumer({"bootstrap.servers": url, "group.id": "forgotten", "auto.offset.reset": "earliest"})
    consumer.assign([TP("t", 0)])
    assert consumer.poll(PATIENCE_SECONDS).value() == b"0"
    consumer.commit(asynchronous=False)
    assert any("forgotten" in thread.name for thread in threading.enumerate())
    del consumer
    # What holds it while a thread is at work goes a moment later.
    eventually(lambda: gc.collect() >= 0 and not any("forgotten" in thread.name for thread in threading.enumerate()))


def test_the_time_minus_one_is_the_end(reader, log):
    log.write("t", 0, b"5", timestamp_ms=2_000)
    found = reader.offsets_for_times([TP("t", 0, -1), TP("t", 1, -1)])
    assert [(tp.partition, tp.offset) for tp in found] == [(0, log_end(reader, 0)), (1, log_end(reader, 1))]


def log_end(reader, number):
    """Return the end as the consumer sees it."""
    return reader.get_watermark_offsets(TP("t", number), PATIENCE_SECONDS)[1]
