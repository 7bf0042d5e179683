"""What both clients make of bad arguments: the documented error before anything is done, and they go on as before.

No message, and nothing that is logged, shows a payload or the password of the URL.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy.engine import make_url

from tests.clients.steps import NO_MEMBER, PATIENCE_SECONDS, create_topic, read_to_end, values
from txnstore import Consumer, KafkaError, KafkaException, Producer, TopicPartition

TOPIC = "orders"
#: Nothing like it may be seen outside of a record.
PAYLOAD = b"the card number 4111-1111-1111-1111"
GROUP_OF_LONG_NAME = b"CGMDv2:\xff\xff\xff\xff" + b"a" * 5_000 + b"\x00\x00\x01"

#: Names that Kafka allows no topic to have.
BAD_TOPICS = (
    "", " ", "a" * 250, "a" * 512, ".", "..", "a/b", "a\0b", "é", "e\u0301", "\u202eabc", "🙂", "a ", "a\nb",
    "\x1b[31m", "%s", "{}", "$1", ":name", "?", "'; DROP TABLE txnstore_topics--", '"x"; --', "$$", "E'\\\\'",
)  # fmt: skip
#: Longer than those that librdkafka sends to a broker.
OVERLONG_TOPICS = ("a" * 513, "é" * 257, "a" * 10_240)
#: Those that a TopicPartition takes.
NAMEABLE_TOPICS = tuple(name for name in (*BAD_TOPICS, *OVERLONG_TOPICS) if "\0" not in name)
#: Text that may stand in an id or beside an offset, and that has to be the same afterwards.
HOSTILE_TEXTS = (
    " ", "a ", " a", "a" * 255, "a" * 256, ".", "..", "a/b", "__internal", "é", "e\u0301", "A", "a", "ß", "ss",
    "\u202eabc", "🙂", "a\nb", "\x1b[31m", "%s{}$1:name?", "%", "_", "'; DROP TABLE txnstore_topics--", '"x"; --', "$$",
    "E'\\\\'", "\\", "pg_catalog", 'public"; SET search_path TO x', "a" * 63 + "b", "a" * 63 + "c", "\\.",
)  # fmt: skip
LONE_SURROGATE = "\ud800"

NUMBERS_REFUSED: dict[str, tuple[Any, type[Exception]]] = {
    "text": ("0", TypeError),
    "none": (None, TypeError),
    "float": (1.0, TypeError),
    "nan": (math.nan, TypeError),
    "bytes": (b"0", TypeError),
    "list": ([0], TypeError),
    "too large": (2**63, OverflowError),
    "far too large": (10**400, OverflowError),
    "too small": (-(2**63) - 1, OverflowError),
}
TIMEOUTS_REFUSED: dict[str, tuple[Any, type[Exception]]] = {
    "text": ("5", TypeError),
    "none": (None, TypeError),
    "bytes": (b"1", TypeError),
    "complex": (1 + 2j, TypeError),
    "list": ([1], TypeError),
    "nan": (math.nan, ValueError),
}
TIMEOUTS_TAKEN: tuple[Any, ...] = (0, 1e-9, 1e300, math.inf, 2**63, 10**400, Decimal("0.01"))
BAD_HEADERS = {
    "text": ("x", TypeError),
    "number": (5, TypeError),
    "tuple": ((("a", b"b"),), TypeError),
    "none within": ([None], TypeError),
    "single": ([("a",)], TypeError),
    "triple": ([("a", b"b", b"c")], TypeError),
    "value number": ({"a": 1}, TypeError),
    "name surrogate": ([(LONE_SURROGATE, b"")], UnicodeEncodeError),
    "value surrogate": ([("a", LONE_SURROGATE)], UnicodeEncodeError),
    "name not text": ([(b"\xff", b"")], UnicodeDecodeError),
}
BAD_CONTENTS: tuple[object, ...] = (
    1,
    1.5,
    True,
    ["v"],
    {},
    object(),
    LONE_SURROGATE,
    PAYLOAD.decode() + LONE_SURROGATE,
)
BAD_MEMBERSHIPS = {
    "empty": b"",
    "other bytes": b"x",
    "nothing behind the magic": b"CGMDv2:",
    "cut short": NO_MEMBER[:-1],
    "no group": b"CGMDv2:\xff\xff\xff\xff\x00\x00\x01",
    "not text": b"CGMDv2:\xff\xff\xff\xffre\xff\x00\x00\x01",
}


#: For refusals that never reach the database.
on_sqlite_alone = pytest.mark.parametrize("module_url", ["sqlite"], indirect=True)


@pytest.fixture(scope="module")
def url(module_url):
    """One store of each database for all these tests; a refused call changes nothing in it."""
    create_topic(module_url, TOPIC, partition_count=2)
    with Producer({"bootstrap.servers": module_url}) as producer:
        producer.produce(TOPIC, PAYLOAD, partition=0)
        assert producer.flush(PATIENCE_SECONDS) == 0
    return module_url


@pytest.fixture(autouse=True)
def told(url, caplog):
    """Everything that a test was told; none of it, nor what was logged, may show a payload or a password."""
    texts: list[str] = []
    yield texts
    password = make_url(url).password
    shown = "\n".join([*texts, caplog.text])
    assert PAYLOAD.decode() not in shown
    assert str(PAYLOAD) not in shown
    assert password is None or str(password) not in shown


@pytest.fixture
def producer(url):
    with Producer({"bootstrap.servers": url, "linger.ms": 0}) as producer:
        producer.list_topics(TOPIC, PATIENCE_SECONDS)
        yield producer
        assert len(producer) == 0, "what was refused was queued"
        assert delivered(producer, TOPIC, value=PAYLOAD) is None, "it is of no use any more"


@pytest.fixture
def consumer(url):
    with consumer_of(url) as consumer:
        consumer.assign([TopicPartition(TOPIC, 0, 0)])
        yield consumer
        consumer.assign([TopicPartition(TOPIC, 0, 0)])
        message = consumer.poll(PATIENCE_SECONDS)
        assert message is not None, "it is of no use any more"
        assert message.value() == PAYLOAD


def consumer_of(url, group_id="readers", **configuration):
    settings = {name.replace("_", "."): value for name, value in configuration.items()}
    return Consumer({"bootstrap.servers": url, "group.id": group_id, "enable.auto.commit": False, **settings})


def delivered(producer, *arguments, **named):
    """Produce one record and return the error of its report."""
    reports = []
    producer.produce(*arguments, on_delivery=lambda error, message: reports.append(error), **named)
    assert producer.flush(PATIENCE_SECONDS) == 0
    (error,) = reports
    return error


def refused(told, kind, call, *arguments, **named):
    """Call, and return the exception; it is of this kind and no other."""
    with pytest.raises(kind) as caught:
        call(*arguments, **named)
    assert isinstance(caught.value, kind)
    told.append(str(caught.value))
    if kind is KafkaException:
        return caught.value.args[0]
    return caught.value


class TestProduce:
    @pytest.mark.slow_but_first
    @pytest.mark.parametrize("name", BAD_TOPICS, ids=lambda name: ascii(name[:12]) + str(len(name)))
    def test_a_topic_that_cannot_be_fails_its_delivery_alone(self, producer, told, name):
        error = delivered(producer, name, value=PAYLOAD)
        assert error.code() == KafkaError.TOPIC_EXCEPTION
        assert len(error.str()) < 300
        assert "\n" not in error.str()
        told.append(error.str())
        metadata = producer.list_topics(name, PATIENCE_SECONDS)
        if name:
            assert metadata.topics[name].error.code() == KafkaError.TOPIC_EXCEPTION

    @on_sqlite_alone
    @pytest.mark.parametrize("name", OVERLONG_TOPICS, ids=lambda name: ascii(name[:12]) + str(len(name)))
    def test_a_topic_whose_name_is_far_too_long_is_refused_at_once(self, producer, told, name):
        error = refused(told, KafkaException, producer.produce, name, PAYLOAD)
        assert error.code() == KafkaError._INVALID_ARG
        assert error.str() == "Unable to produce message: Local: Invalid argument or configuration"
        messages: list[dict[str, Any]] = [{"value": PAYLOAD}]
        assert producer.produce_batch(name, messages) == 0
        assert messages[0]["_error"].code() == KafkaError._INVALID_ARG
        assert producer.list_topics(name, PATIENCE_SECONDS).topics[name].error.code() == KafkaError.TOPIC_EXCEPTION

    @on_sqlite_alone
    def test_text_that_is_none_is_refused_at_once(self, producer, told):
        refused(told, UnicodeEncodeError, producer.produce, LONE_SURROGATE, PAYLOAD)
        refused(told, UnicodeEncodeError, producer.produce_batch, LONE_SURROGATE, [{"value": PAYLOAD}])
        refused(told, UnicodeEncodeError, producer.list_topics, LONE_SURROGATE)
        for other in (None, 5, b"orders", ["orders"]):
            refused(told, TypeError, producer.produce, other, PAYLOAD)

    @pytest.mark.slow_but_first
    @on_sqlite_alone
    @pytest.mark.parametrize("where", ["partition", "timestamp"])
    @pytest.mark.parametrize("case", NUMBERS_REFUSED)
    def test_numbers(self, producer, told, where, case):
        number, kind = NUMBERS_REFUSED[case]
        refused(told, kind, producer.produce, TOPIC, PAYLOAD, **{where: number})
        messages = [{"value": PAYLOAD}, {"value": PAYLOAD, where: number}]
        refused(told, kind, producer.produce_batch, TOPIC, messages)

    @on_sqlite_alone
    @pytest.mark.parametrize("partition", [-(2**31) + 1, -2, 2, 2**31 - 1])
    def test_partitions_that_there_are_not(self, producer, told, partition):
        error = refused(told, KafkaException, producer.produce, TOPIC, PAYLOAD, partition=partition)
        assert error.code() == KafkaError._UNKNOWN_PARTITION

    @pytest.mark.slow_but_first
    @pytest.mark.parametrize("timestamp", [-1, -(2**62), -62_135_596_800_000, 253_402_300_799_999, 2**63 - 1])
    def test_times_that_the_store_does_not_take_fail_their_delivery_alone(self, producer, told, timestamp):
        error = delivered(producer, TOPIC, value=PAYLOAD, timestamp=timestamp)
        assert error.code() == KafkaError.INVALID_TIMESTAMP
        told.append(error.str())

    @pytest.mark.slow_but_first
    @on_sqlite_alone
    @pytest.mark.parametrize("case", BAD_HEADERS)
    def test_headers(self, producer, told, case):
        headers, kind = BAD_HEADERS[case]
        refused(told, kind, producer.produce, TOPIC, PAYLOAD, headers=headers)
        messages = [{"value": PAYLOAD}, {"value": PAYLOAD, "headers": headers}]
        refused(told, kind, producer.produce_batch, TOPIC, messages)

    @on_sqlite_alone
    @pytest.mark.parametrize("content", BAD_CONTENTS, ids=range(len(BAD_CONTENTS)))
    def test_contents(self, producer, told, content):
        kind = UnicodeEncodeError if isinstance(content, str) else TypeError
        for where in ("value", "key"):
            refused(told, kind, producer.produce, TOPIC, **{where: content})
            refused(told, kind, producer.produce_batch, TOPIC, [{"value": PAYLOAD}, {where: content}])

    @on_sqlite_alone
    @pytest.mark.parametrize("size", [1_000_001, 20_000_000])
    def test_a_record_that_is_too_large(self, producer, told, size):
        large = PAYLOAD * (size // len(PAYLOAD) + 1)
        for arguments in ({"value": large}, {"key": large}, {"headers": {"a": large}}):
            error = refused(told, KafkaException, producer.produce, TOPIC, **arguments)
            assert error.code() == KafkaError.MSG_SIZE_TOO_LARGE

    @pytest.mark.slow_but_first
    @on_sqlite_alone
    @pytest.mark.parametrize("messages", [None, "x", {"value": b"v"}, [None], [b"v"], [{"value": 1}], [{"key": []}]])
    def test_batches(self, producer, told, messages):
        refused(told, TypeError, producer.produce_batch, TOPIC, messages)

    @on_sqlite_alone
    @pytest.mark.parametrize("callback", [5, "x", b"", []])
    def test_callbacks(self, producer, told, callback):
        refused(told, TypeError, producer.produce, TOPIC, PAYLOAD, on_delivery=callback)
        refused(told, TypeError, producer.produce_batch, TOPIC, [{"value": PAYLOAD, "callback": callback}])

    @pytest.mark.slow_but_first
    @pytest.mark.parametrize("call", ["poll", "flush", "list_topics", "cluster_id"])
    def test_timeouts(self, producer, told, call):
        method = getattr(producer, call)
        for timeout, kind in TIMEOUTS_REFUSED.values():
            refused(told, kind, method, timeout=timeout)
        if call == "poll":
            # Something to serve: it waits no longer than until then.
            for timeout in TIMEOUTS_TAKEN:
                producer.produce(TOPIC, PAYLOAD, on_delivery=lambda error, message: None)
                while len(producer):
                    method(timeout)
            return
        for timeout in TIMEOUTS_TAKEN[2:-1]:
            method(timeout=timeout)


class TestTransactions:
    @pytest.fixture
    def in_transaction(self, url):
        with Producer({"bootstrap.servers": url, "transactional.id": "bad"}) as producer:
            producer.init_transactions(PATIENCE_SECONDS)
            producer.begin_transaction()
            yield producer
            producer.abort_transaction(PATIENCE_SECONDS)
            with producer.transaction():
                producer.produce(TOPIC, PAYLOAD, partition=1)

    @on_sqlite_alone
    @pytest.mark.parametrize("positions", [None, (), "x", [None], ["orders"], [("orders", 0)]])
    def test_positions_of_another_type(self, in_transaction, told, positions):
        refused(told, TypeError, in_transaction.send_offsets_to_transaction, positions, NO_MEMBER)

    @on_sqlite_alone
    @pytest.mark.parametrize("metadata", [None, 5, "CGMDv2:", [NO_MEMBER], object()])
    def test_memberships_of_another_type(self, in_transaction, told, metadata):
        send = in_transaction.send_offsets_to_transaction
        refused(told, TypeError, send, [TopicPartition(TOPIC, 0, 1)], metadata)

    @on_sqlite_alone
    @pytest.mark.parametrize("case", BAD_MEMBERSHIPS)
    def test_memberships_that_are_damaged(self, in_transaction, told, case):
        send = in_transaction.send_offsets_to_transaction
        error = refused(told, KafkaException, send, [TopicPartition(TOPIC, 0, 1)], BAD_MEMBERSHIPS[case])
        assert (error.code(), error.txn_requires_abort(), error.fatal()) == (KafkaError._BAD_MSG, False, False)

    @pytest.mark.slow_but_first
    @pytest.mark.parametrize(
        ("position", "membership", "code"),
        [
            (TopicPartition("nowhere", 0, 1), NO_MEMBER, KafkaError.UNKNOWN_TOPIC_OR_PART),
            (TopicPartition("'; DROP", 0, 1), NO_MEMBER, KafkaError.UNKNOWN_TOPIC_OR_PART),
            (TopicPartition(TOPIC, 2, 1), NO_MEMBER, KafkaError.UNKNOWN_TOPIC_OR_PART),
            (TopicPartition(TOPIC, -1, 1), NO_MEMBER, KafkaError.UNKNOWN_TOPIC_OR_PART),
            (TopicPartition(TOPIC, 0, 1, "m" * 10_240), NO_MEMBER, KafkaError.OFFSET_METADATA_TOO_LARGE),
            (TopicPartition(TOPIC, 0, 1, "a\0b"), NO_MEMBER, KafkaError.INVALID_REQUEST),
            (TopicPartition(TOPIC, 0, 1), GROUP_OF_LONG_NAME, KafkaError.INVALID_GROUP_ID),
        ],
    )
    def test_positions_that_cannot_be_ask_for_an_abort(self, in_transaction, told, position, membership, code):
        send = in_transaction.send_offsets_to_transaction
        error = refused(told, KafkaException, send, [position], membership, PATIENCE_SECONDS)
        assert (error.code(), error.txn_requires_abort(), error.fatal()) == (code, True, False)
        assert len(error.str()) < 300

    def test_timeouts(self, in_transaction, told):
        for timeout, kind in TIMEOUTS_REFUSED.values():
            refused(told, kind, in_transaction.commit_transaction, timeout)
            refused(told, kind, in_transaction.abort_transaction, timeout)
            send = in_transaction.send_offsets_to_transaction
            refused(told, kind, send, [TopicPartition(TOPIC, 0, 1)], NO_MEMBER, timeout)

    @pytest.mark.slow
    def test_ids_are_taken_as_they_are_and_never_for_one_another(self, url):
        producers = [Producer({"bootstrap.servers": url, "transactional.id": text}) for text in HOSTILE_TEXTS]
        topic = create_topic(url, "by-hostile-ids")
        try:
            for producer in producers:
                producer.init_transactions(PATIENCE_SECONDS)
            # Had two of them been taken for one, the first would be fenced now.
            for text, producer in zip(HOSTILE_TEXTS, producers, strict=True):
                with producer.transaction():
                    producer.produce(topic, text)
        finally:
            for producer in producers:
                producer.close()
        assert values(read_to_end(url, topic)) == [text.encode() for text in HOSTILE_TEXTS]

    @pytest.mark.parametrize("text", ["a\0b", LONE_SURROGATE, "a" * 10_240])
    def test_ids_that_no_database_keeps(self, url, told, text):
        for kind, key in ((Producer, "transactional.id"), (Consumer, "group.id")):
            settings = {"bootstrap.servers": url, key: text}
            error = refused(told, KafkaException, kind, settings)
            assert error.code() == KafkaError._INVALID_ARG
            assert len(error.str()) < 300


class TestConsume:
    @pytest.mark.slow_but_first
    @pytest.mark.parametrize("name", NAMEABLE_TOPICS, ids=lambda name: ascii(name[:12]) + str(len(name)))
    def test_topics_that_cannot_be(self, url, consumer, told, name):
        position = TopicPartition(name, 0, 5)
        error = refused(told, KafkaException, consumer.commit, offsets=[position], asynchronous=False)
        assert error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART
        error = refused(told, KafkaException, consumer.get_watermark_offsets, position, PATIENCE_SECONDS)
        assert error.code() == KafkaError._UNKNOWN_PARTITION
        error = refused(told, KafkaException, consumer.offsets_for_times, [position], PATIENCE_SECONDS)
        assert error.code() == KafkaError._UNKNOWN_PARTITION
        (answer,) = consumer.committed([position], PATIENCE_SECONDS)
        assert answer.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART
        consumer.assign([position])
        message = consumer.poll(PATIENCE_SECONDS)
        assert message.error().code() == KafkaError.UNKNOWN_TOPIC_OR_PART

    @on_sqlite_alone
    def test_names_that_are_no_text(self, consumer, told):
        refused(told, UnicodeEncodeError, TopicPartition, LONE_SURROGATE)
        refused(told, UnicodeEncodeError, TopicPartition, TOPIC, 0, 1, LONE_SURROGATE)
        refused(told, ValueError, TopicPartition, "a\0b")
        for other in (None, 5, b"orders"):
            refused(told, TypeError, TopicPartition, other)

    @on_sqlite_alone
    @pytest.mark.parametrize("topics", [None, "orders", ("orders",), {"orders"}, 5])
    def test_subscriptions_of_another_type(self, consumer, told, topics):
        refused(told, TypeError, consumer.subscribe, topics)

    @pytest.mark.slow_but_first
    @on_sqlite_alone
    @pytest.mark.parametrize("topics", [[], [""], ["a", "a"], ["^["], ["^("]])
    def test_subscriptions_that_cannot_be(self, consumer, told, topics):
        assert refused(told, KafkaException, consumer.subscribe, topics).code() == KafkaError._INVALID_ARG

    @on_sqlite_alone
    @pytest.mark.parametrize("case", NUMBERS_REFUSED)
    def test_numbers(self, told, case):
        number, kind = NUMBERS_REFUSED[case]
        refused(told, kind, TopicPartition, TOPIC, number)
        refused(told, kind, TopicPartition, TOPIC, 0, number)
        position = TopicPartition(TOPIC, 0, 5)
        with pytest.raises(kind):
            position.offset = number
        assert position.offset == 5

    @pytest.mark.slow_but_first
    @pytest.mark.parametrize("offset", [11**9, 2**31, 2**63 - 2, 2**63 - 1])
    def test_offsets_that_are_not_in_the_log_lead_to_where_the_reset_says(self, url, consumer, told, offset):
        consumer.seek(TopicPartition(TOPIC, 0, offset))
        with consumer_of(url, auto_offset_reset="error") as strict:
            strict.assign([TopicPartition(TOPIC, 0, offset)])
            message = strict.poll(PATIENCE_SECONDS)
            assert message.error().code() == KafkaError._AUTO_OFFSET_RESET
            told.append(message.error().str())
        assert consumer.commit(offsets=[TopicPartition(TOPIC, 0, offset)], asynchronous=False)[0].offset == offset
        assert consumer.committed([TopicPartition(TOPIC, 0)], PATIENCE_SECONDS)[0].offset == offset
        (found,) = consumer.offsets_for_times([TopicPartition(TOPIC, 0, offset)], PATIENCE_SECONDS)
        assert found.offset in (0, -1)

    @on_sqlite_alone
    @pytest.mark.parametrize("offset", [-1, -2, -3, -1000, -1001, -(2**63)])
    def test_offsets_that_are_none_are_not_committed(self, consumer, told, offset):
        positions = [TopicPartition(TOPIC, 0, offset)]
        error = refused(told, KafkaException, consumer.commit, offsets=positions, asynchronous=False)
        assert error.code() == KafkaError._NO_OFFSET

    @on_sqlite_alone
    @pytest.mark.parametrize("count", [-1, 1_000_001, 2**63])
    def test_counts_out_of_range(self, consumer, told, count):
        refused(told, ValueError, consumer.consume, count, 0)

    @on_sqlite_alone
    @pytest.mark.parametrize("count", [1.5, "1", None, b"2", math.nan])
    def test_counts_of_another_type(self, consumer, told, count):
        refused(told, TypeError, consumer.consume, count, 0)

    @pytest.mark.slow_but_first
    @pytest.mark.parametrize(
        "call",
        [
            lambda consumer, timeout: consumer.poll(timeout),
            lambda consumer, timeout: consumer.consume(1, timeout),
            lambda consumer, timeout: consumer.committed([TopicPartition(TOPIC, 0)], timeout),
            lambda consumer, timeout: consumer.get_watermark_offsets(TopicPartition(TOPIC, 0), timeout),
            lambda consumer, timeout: consumer.offsets_for_times([TopicPartition(TOPIC, 0, 0)], timeout),
            lambda consumer, timeout: consumer.list_topics(None, timeout),
            lambda consumer, timeout: consumer.cluster_id(timeout),
        ],
        ids=["poll", "consume", "committed", "watermarks", "times", "list_topics", "cluster_id"],
    )
    def test_timeouts(self, consumer, told, call):
        for timeout, kind in TIMEOUTS_REFUSED.values():
            refused(told, kind, call, consumer, timeout)
        for timeout in (1e300, math.inf, 2**63):
            consumer.assign([TopicPartition(TOPIC, 0, 0)])
            assert call(consumer, timeout) is not None

    @pytest.mark.parametrize("text", ["m" * 10_240, "a\0b"])
    def test_metadata_that_is_not_kept(self, consumer, told, text):
        before = consumer.committed([TopicPartition(TOPIC, 1)], PATIENCE_SECONDS)[0].offset
        positions = [TopicPartition(TOPIC, 1, 7, text)]
        error = refused(told, KafkaException, consumer.commit, offsets=positions, asynchronous=False)
        assert error.code() in (KafkaError.OFFSET_METADATA_TOO_LARGE, KafkaError.INVALID_REQUEST)
        assert consumer.committed([TopicPartition(TOPIC, 1)], PATIENCE_SECONDS)[0].offset == before

    def test_metadata_comes_back_as_it_was(self, consumer):
        for text in HOSTILE_TEXTS:
            consumer.commit(offsets=[TopicPartition(TOPIC, 0, 1, text)], asynchronous=False)
            assert consumer.committed([TopicPartition(TOPIC, 0)], PATIENCE_SECONDS)[0].metadata == text

    @pytest.mark.slow
    def test_groups_are_taken_as_they_are_and_never_for_one_another(self, url):
        for number, text in enumerate(HOSTILE_TEXTS):
            with consumer_of(url, text) as consumer:
                consumer.commit(offsets=[TopicPartition(TOPIC, 1, number)], asynchronous=False)
        for number, text in enumerate(HOSTILE_TEXTS):
            with consumer_of(url, text) as consumer:
                assert consumer.committed([TopicPartition(TOPIC, 1)], PATIENCE_SECONDS)[0].offset == number

    @pytest.mark.slow_but_first
    @on_sqlite_alone
    @pytest.mark.parametrize("method", ["assign", "incremental_assign", "position", "pause", "resume", "committed"])
    @pytest.mark.parametrize("partitions", [None, "orders", ("orders",), [None], ["orders"], 5])
    def test_partitions_of_another_type(self, consumer, told, method, partitions):
        refused(told, TypeError, getattr(consumer, method), partitions)
