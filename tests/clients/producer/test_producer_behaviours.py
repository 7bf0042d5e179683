"""What a producer does with what it was given: queues it, delivers it, and says so from poll() and flush() alone.

The rows are reference/kafka.md 1.1, 1.8 and 1.10; what says [run] there was observed with confluent-kafka 2.16.1.
"""

from __future__ import annotations

import multiprocessing
import pickle
import threading
import time
from collections import Counter

import pytest

from tests.clients.steps import PATIENCE_SECONDS, create_topic, error_of, read_to_end, values
from txnstore import TIMESTAMP_CREATE_TIME, KafkaError, KafkaException, Message, Producer

TOPIC = "orders"
#: So long that nothing is sent before a flush.
NEVER_MS = 50_000


@pytest.fixture
def topic(url):
    return create_topic(url, TOPIC)


@pytest.fixture
def producer(make_producer, topic):
    return make_producer()


class Reports(list):
    """A delivery callback that keeps what it is told."""

    def __call__(self, error, message):
        self.append((error, message))

    def __bool__(self):
        return True

    @property
    def values(self):
        return [message.value() for _, message in self]

    @property
    def errors(self):
        return [error for error, _ in self]


def poll_until(producer, is_so):
    """Serve callbacks until it is so."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to that"
        producer.poll(0.05)


def test_a_report_tells_what_was_written_and_where(producer, topic):
    reports = Reports()
    producer.produce(topic, b"first", partition=0)
    producer.produce(
        topic, b"value", b"key", partition=0, timestamp=1_234_567, headers={"a": b"1"}, on_delivery=reports
    )
    assert producer.flush(PATIENCE_SECONDS) == 0

    ((error, message),) = reports
    assert error is None
    assert isinstance(message, Message)
    assert (message.topic(), message.partition(), message.offset()) == (topic, 0, 1)
    assert (message.key(), message.value(), message.error()) == (b"key", b"value", None)
    assert message.timestamp() == (TIMESTAMP_CREATE_TIME, 1_234_567)
    assert message.headers() is None
    assert len(message) == len(b"value")
    assert isinstance(message.latency(), float)
    assert (message.latency() or 0) >= 0


def test_reports_of_a_partition_come_in_the_order_of_produce(producer, topic):
    reports = Reports()
    for number in range(500):
        producer.produce(topic, b"%d" % number, partition=0, on_delivery=reports)
        producer.poll(0)
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert reports.values == [b"%d" % number for number in range(500)]
    assert [message.offset() for _, message in reports] == list(range(500))


def test_reports_come_from_poll_and_flush_alone(producer, topic, url):
    served_by = []
    producer.produce(topic, b"1", on_delivery=lambda *_: served_by.append(threading.get_ident()))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not values(read_to_end(url, topic)):
        assert time.monotonic() < deadline
    # It is in the log, and nobody has asked.
    producer.produce(topic, b"2")
    assert served_by == []

    poll_until(producer, lambda: served_by)
    assert served_by == [threading.get_ident()]


def test_poll_returns_that_it_served_something(producer, topic):
    reports = Reports()
    for _ in range(3):
        producer.produce(topic, b"v", on_delivery=reports)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(reports) < 3:
        assert time.monotonic() < deadline
        before = len(reports)
        served = producer.poll(0.05)
        # Several reports may be one event.
        assert (served > 0) == (len(reports) > before)
        assert served <= len(reports) - before

    assert producer.poll(0) == 0


def test_poll_waits_no_longer_than_for_its_first_event(producer, topic):
    producer.produce(topic, b"v", on_delivery=lambda *_: None)

    started = time.monotonic()
    assert producer.poll(PATIENCE_SECONDS) == 1
    assert time.monotonic() - started < PATIENCE_SECONDS / 2


def test_poll_waits_as_long_as_it_is_told(producer):
    started = time.monotonic()
    assert producer.poll(0.2) == 0
    assert 0.19 <= time.monotonic() - started < PATIENCE_SECONDS / 2


def test_without_a_callback_there_is_no_event_but_a_delivery(producer, topic, url):
    producer.produce(topic, b"v")
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert producer.poll(0) == 0
    assert values(read_to_end(url, topic)) == [b"v"]


def test_flush_sends_what_would_still_wait_for_more(make_producer, topic):
    producer = make_producer({"linger.ms": NEVER_MS})
    reports = Reports()
    producer.produce(topic, b"v", on_delivery=reports)
    assert len(producer) == 1

    assert producer.flush(PATIENCE_SECONDS) == 0
    assert (reports.errors, len(producer)) == ([None], 0)


def test_flush_returns_how_many_are_left_when_its_time_is_over(producer, topic, url, hold_database):
    producer.list_topics(topic, PATIENCE_SECONDS)
    with hold_database(url):
        for _ in range(3):
            producer.produce(topic, b"v", partition=0)
        started = time.monotonic()
        assert producer.flush(0.2) == 3
        assert time.monotonic() - started < PATIENCE_SECONDS / 2
        assert producer.flush(0) == 3
        assert len(producer) == 3
    assert producer.flush(PATIENCE_SECONDS) == 0


@pytest.mark.parametrize("call", ["poll", "flush"])
@pytest.mark.parametrize("timeout", ["soon", None, b"1"])
def test_a_timeout_is_a_number_of_seconds(producer, call, timeout):
    with pytest.raises(TypeError):
        getattr(producer, call)(timeout)


def test_what_is_queued_counts_until_its_report_is_served(make_producer, topic):
    producer = make_producer({"linger.ms": NEVER_MS})
    assert (len(producer), bool(producer)) == (0, True)
    for number in range(1, 4):
        producer.produce(topic, b"v", on_delivery=lambda *_: None)
        assert len(producer) == number

    assert producer.flush(PATIENCE_SECONDS) == 0
    assert (len(producer), bool(producer)) == (0, True)


def test_a_full_queue_is_a_buffer_error_and_poll_makes_room(make_producer, topic):
    producer = make_producer({"queue.buffering.max.messages": 3, "linger.ms": NEVER_MS})
    reports = Reports()
    for _ in range(3):
        producer.produce(topic, b"v", on_delivery=reports)

    with pytest.raises(BufferError, match=r"^Local: Queue full$"):
        producer.produce(topic, b"one too many", on_delivery=reports)

    assert len(producer) == 3
    assert producer.flush(PATIENCE_SECONDS) == 0
    producer.produce(topic, b"fits", on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert reports.values == [b"v", b"v", b"v", b"fits"]


def test_the_queue_is_bounded_in_bytes_too(make_producer, topic):
    producer = make_producer({"queue.buffering.max.kbytes": 1, "linger.ms": NEVER_MS})

    def produce_on_and_on():
        for _ in range(10):
            producer.produce(topic, b"x" * 500)

    with pytest.raises(BufferError, match=r"^Local: Queue full$"):
        produce_on_and_on()
    assert 1 <= len(producer) <= 3


def test_what_a_callback_raises_comes_out_of_flush_and_the_rest_is_served(producer, topic):
    served = []

    def report(error, message):
        served.append(message.value())
        if message.value() == b"1":
            raise ValueError("told by the callback")

    for number in range(3):
        producer.produce(topic, b"%d" % number, partition=0, on_delivery=report)

    with pytest.raises(ValueError, match="told by the callback"):
        producer.flush(PATIENCE_SECONDS)
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert served == [b"0", b"1", b"2"]


def test_each_poll_raises_what_its_callback_raised(producer, topic):
    def report(error, message):
        raise ValueError(message.value().decode())

    raised: list[str] = []
    for number in range(3):
        producer.produce(topic, b"%d" % number, partition=0, on_delivery=report)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(raised) < 3:
        assert time.monotonic() < deadline
        try:
            producer.poll(0.05)
        except ValueError as error:
            raised.append(str(error))

    assert raised == ["0", "1", "2"]
    assert producer.poll(0) == 0


def test_an_interrupt_in_a_callback_comes_out_as_one(producer, topic):
    def report(error, message):
        raise KeyboardInterrupt

    producer.produce(topic, b"v", on_delivery=report)
    with pytest.raises(KeyboardInterrupt):
        producer.flush(PATIENCE_SECONDS)


def test_what_a_callback_raises_in_a_commit_comes_out_of_it(make_producer, topic, url):
    def report(error, message):
        raise ValueError("told by the callback")

    producer = make_producer({"transactional.id": "anna"})
    producer.init_transactions(PATIENCE_SECONDS)
    producer.begin_transaction()
    producer.produce(topic, b"v", on_delivery=report)

    with pytest.raises(ValueError, match="told by the callback"):
        producer.commit_transaction(PATIENCE_SECONDS)
    # The transaction is committed nevertheless [run].
    producer.begin_transaction()
    assert values(read_to_end(url, topic)) == [b"v"]


def test_a_callback_may_produce(producer, topic):
    reports = Reports()

    def report(error, message):
        reports(error, message)
        if len(reports) < 4:
            producer.produce(topic, b"%d" % len(reports), on_delivery=report)

    producer.produce(topic, b"0", on_delivery=report)
    poll_until(producer, lambda: len(reports) == 4)

    assert reports.values == [b"0", b"1", b"2", b"3"]


def test_a_callback_may_poll(producer, topic):
    reports = Reports()

    def report(error, message):
        reports(error, message)
        producer.poll(0)

    for _ in range(3):
        producer.produce(topic, b"v", partition=0, on_delivery=report)
    assert producer.flush(PATIENCE_SECONDS) == 0
    poll_until(producer, lambda: len(reports) == 3)


def test_the_configured_callback_is_for_messages_without_one_of_their_own(make_producer, topic):
    everybody, own, both = Reports(), Reports(), Reports()
    producer = make_producer({"on_delivery": everybody})
    producer.produce(topic, b"1", partition=0)
    producer.produce(topic, b"2", partition=0, on_delivery=own)
    producer.produce(topic, b"3", partition=0, callback=own)
    producer.produce(topic, b"4", partition=0, callback=own, on_delivery=both)
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert (everybody.values, own.values, both) == ([b"1"], [b"2", b"3", b"4"], [])


def test_a_callback_that_is_false_is_one_nevertheless(producer, topic):
    class Falsy(Reports):
        def __bool__(self):
            return False

    reports = Falsy()
    producer.produce(topic, b"1", on_delivery=reports)
    producer.produce_batch(topic, [{"value": b"2"}, {"value": b"3", "callback": reports}], on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert sorted(reports.values) == [b"1", b"2", b"3"]


def test_only_errors_are_reported_where_that_is_configured(make_producer, topic):
    reports = Reports()
    producer = make_producer({"delivery.report.only.error": True, "linger.ms": NEVER_MS})
    producer.produce(topic, b"good", on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert reports == []

    producer.produce(topic, b"bad", on_delivery=reports)
    producer.purge()
    poll_until(producer, lambda: len(reports) == 1)
    assert (reports.errors, reports.values) == ([KafkaError._PURGE_QUEUE], [b"bad"])


def test_a_record_that_the_topic_does_not_take_is_reported_with_the_reason(make_producer, url):
    topic = create_topic(url, "small", max_message_bytes="1000")
    producer = make_producer()
    reports = Reports()
    producer.produce(topic, b"x" * 2000, b"key", partition=0, on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0

    ((error, message),) = reports
    assert error == KafkaError.MSG_SIZE_TOO_LARGE
    assert message.error() == error
    assert (message.topic(), message.partition(), message.offset(), message.key()) == (topic, 0, None, b"key")


def test_records_that_the_topic_takes_are_not_held_up_by_one_that_it_refuses(make_producer, url):
    topic = create_topic(url, "small", max_message_bytes="1000")
    producer = make_producer({"linger.ms": NEVER_MS})
    reports = Reports()
    other = create_topic(url, "other")
    producer.produce(topic, b"x" * 2000, partition=0, on_delivery=reports)
    producer.produce(other, b"fine", partition=0, on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0
    producer.produce(topic, b"afterwards", partition=0, on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert sorted((message.value()[:10], error and error.code()) for error, message in reports) == [
        (b"afterwards", None),
        (b"fine", None),
        (b"xxxxxxxxxx", KafkaError.MSG_SIZE_TOO_LARGE),
    ]
    assert values(read_to_end(url, topic)) == [b"afterwards"]


@pytest.mark.parametrize("named", [{}, {"in_queue": True, "in_flight": True, "blocking": True}, {"blocking": False}])
def test_purge_drops_what_was_not_sent(make_producer, topic, url, named):
    producer = make_producer({"linger.ms": NEVER_MS})
    reports = Reports()
    for number in range(3):
        producer.produce(topic, b"%d" % number, partition=0, on_delivery=reports)
    producer.purge(**named)
    assert reports == []

    poll_until(producer, lambda: len(reports) == 3)
    assert reports.errors == [KafkaError._PURGE_QUEUE] * 3
    assert [message.offset() for _, message in reports] == [None] * 3
    assert len(producer) == 0
    assert values(read_to_end(url, topic)) == []


def test_purge_of_what_is_in_flight_leaves_the_queue_alone(make_producer, topic, url):
    producer = make_producer({"linger.ms": NEVER_MS})
    reports = Reports()
    producer.produce(topic, b"kept", on_delivery=reports)
    producer.purge(in_queue=False)
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert (reports.errors, values(read_to_end(url, topic))) == ([None], [b"kept"])


def test_a_message_that_cannot_be_delivered_in_time_is_given_up():
    producer = Producer({"bootstrap.servers": "postgresql://nobody@127.0.0.1:1/nothing", "message.timeout.ms": 200})
    reports = Reports()
    producer.produce(TOPIC, b"v", on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0

    ((error, message),) = reports
    assert error == KafkaError._MSG_TIMED_OUT
    assert (message.value(), message.offset(), message.partition()) == (b"v", None, None)
    producer.close()


def test_a_message_outlives_a_database_that_is_away_for_less_than_its_time(producer, topic, url, hold_database):
    reports = Reports()
    producer.list_topics(topic, PATIENCE_SECONDS)
    with hold_database(url):
        producer.produce(topic, b"v", on_delivery=reports)
        assert producer.flush(0.5) == 1
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert (reports.errors, values(read_to_end(url, topic))) == ([None], [b"v"])


def test_closing_delivers_and_reports_what_is_left(make_producer, topic, url):
    producer = make_producer({"linger.ms": NEVER_MS})
    reports = Reports()
    producer.produce(topic, b"v", on_delivery=reports)

    assert producer.close() is True
    assert (reports.errors, len(producer)) == ([None], 0)
    assert producer.close() is True
    assert values(read_to_end(url, topic)) == [b"v"]


def test_closing_aborts_an_open_transaction(make_producer, topic, url):
    producer = make_producer({"transactional.id": "anna"})
    producer.init_transactions(PATIENCE_SECONDS)
    producer.begin_transaction()
    producer.produce(topic, b"aborted")
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert producer.close() is True

    other = make_producer()
    other.produce(topic, b"plain", partition=0)
    assert other.flush(PATIENCE_SECONDS) == 0
    assert values(read_to_end(url, topic)) == [b"plain"]


def test_a_with_block_closes_the_producer(url, topic):
    reports = Reports()
    with Producer({"bootstrap.servers": url}) as producer:
        producer.produce(topic, b"v", on_delivery=reports)

    assert reports.errors == [None]
    with pytest.raises(RuntimeError, match="Producer has been closed"):
        producer.poll(0)


def test_a_with_block_that_raises_aborts_its_transaction_and_lets_the_exception_out(url, topic):
    reports = Reports()

    def program():
        with Producer({"bootstrap.servers": url, "transactional.id": "anna", "linger.ms": NEVER_MS}) as producer:
            producer.init_transactions(PATIENCE_SECONDS)
            producer.begin_transaction()
            producer.produce(topic, b"aborted", on_delivery=reports)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program()
    assert reports.errors == [KafkaError._PURGE_QUEUE]
    assert values(read_to_end(url, topic)) == []


def test_several_threads_produce_and_one_polls(producer, topic, url):
    reports, served_by = Reports(), set()

    def report(error, message):
        served_by.add(threading.get_ident())
        reports(error, message)

    def produce(name):
        for number in range(100):
            producer.produce(topic, b"%d" % number, b"%d" % name, partition=0, on_delivery=report)

    threads = [threading.Thread(target=produce, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert served_by == {threading.get_ident()}
    assert len(reports) == 400
    messages = read_to_end(url, topic)
    for name in range(4):
        assert [message.value() for message in messages if message.key() == b"%d" % name] == [
            b"%d" % number for number in range(100)
        ]


def test_several_threads_flush_at_once(producer, topic):
    reports = Reports()
    for number in range(200):
        producer.produce(topic, b"%d" % number, partition=0, on_delivery=reports)
    left = []
    threads = [threading.Thread(target=lambda: left.append(producer.flush(PATIENCE_SECONDS))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)

    assert left == [0, 0, 0, 0]
    assert sorted(reports.values, key=int) == [b"%d" % number for number in range(200)]


def test_a_topic_that_is_not_there_is_made_by_the_first_record(make_producer, url):
    producer = make_producer()
    reports = Reports()
    producer.produce("made-on-the-way", b"v", on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert reports.errors == [None]
    assert "made-on-the-way" in producer.list_topics(timeout=PATIENCE_SECONDS).topics
    partition = reports[0][1].partition()
    assert values(read_to_end(url, "made-on-the-way", partitions=(partition,))) == [b"v"]


def test_a_topic_that_may_not_be_made_fails_the_delivery(make_producer):
    producer = make_producer({"allow.auto.create.topics": False, "message.timeout.ms": 3_000, "linger.ms": 0})
    reports = Reports()
    producer.produce("not-made", b"v", on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert [error.code() for error in reports.errors] in (
        [KafkaError.UNKNOWN_TOPIC_OR_PART],
        [KafkaError._UNKNOWN_TOPIC],
        [KafkaError._MSG_TIMED_OUT],
    )
    assert "not-made" not in producer.list_topics(timeout=PATIENCE_SECONDS).topics


def test_list_topics_tells_of_topics_and_of_the_one_broker(producer, url, topic):
    create_topic(url, "other", partition_count=3)
    metadata = producer.list_topics(timeout=PATIENCE_SECONDS)

    assert {name: len(metadata.topics[name].partitions) for name in (topic, "other")} == {topic: 1, "other": 3}
    assert metadata.topics["other"].error is None
    assert sorted(metadata.topics["other"].partitions) == [0, 1, 2]
    assert len(metadata.brokers) == 1
    (broker,) = metadata.brokers
    partition = metadata.topics["other"].partitions[2]
    assert (partition.id, partition.leader, partition.replicas, partition.isrs, partition.error) == (
        2,
        broker,
        [broker],
        [broker],
        None,
    )
    assert set(producer.list_topics("other", timeout=PATIENCE_SECONDS).topics) == {"other"}


def test_the_cluster_id_is_the_same_for_every_client(make_producer, topic):
    one, other = make_producer(), make_producer()
    cluster_id = one.cluster_id(PATIENCE_SECONDS)

    assert isinstance(cluster_id, str)
    assert cluster_id
    assert other.cluster_id(timeout=PATIENCE_SECONDS) == cluster_id
    assert other.list_topics(timeout=PATIENCE_SECONDS).cluster_id == cluster_id


@pytest.mark.parametrize("call", ["list_topics", "cluster_id"])
def test_asking_a_database_that_is_away_ends_in_time(call):
    producer = Producer({"bootstrap.servers": "postgresql://nobody:hidden-word@127.0.0.1:1/nothing"})
    started = time.monotonic()
    error = error_of(getattr(producer, call), timeout=0.3)

    assert error.code() in (KafkaError._TRANSPORT, KafkaError._TIMED_OUT)
    assert "hidden-word" not in str(error)
    assert time.monotonic() - started < PATIENCE_SECONDS / 2
    producer.close()


@pytest.mark.parametrize(
    ("arguments", "named", "error", "text"),
    [
        (("sqlite:///x.db",), {}, TypeError, "expected configuration dict"),
        ((None,), {}, TypeError, "expected configuration dict"),
        (({"foo": 1},), {}, KafkaException, 'No such configuration property: "foo"'),
        ((), {"bootstrap_servers": "x"}, KafkaException, 'No such configuration property: "bootstrap_servers"'),
    ],
    ids=["text", "None", "unknown", "underscore"],
)
def test_a_producer_is_made_of_a_dictionary_of_known_keys(arguments, named, error, text):
    with pytest.raises(error, match=text):
        Producer(*arguments, **named)


def test_a_report_travels_between_processes(producer, topic):
    reports = Reports()
    producer.produce(topic, b"value", b"key", partition=0, on_delivery=reports)
    assert producer.flush(PATIENCE_SECONDS) == 0

    assert pickle.loads(pickle.dumps(reports[0][1])) == reports[0][1]


def test_a_forked_child_is_told_to_make_a_producer_of_its_own(producer, topic, url):
    producer.produce(topic, b"parent", partition=0)
    assert producer.flush(PATIENCE_SECONDS) == 0
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_use_in_child, args=(theirs, producer, url, topic), daemon=True)
    child.start()
    theirs.close()
    assert ours.poll(PATIENCE_SECONDS)
    told = ours.recv()
    child.join(PATIENCE_SECONDS)
    ours.close()

    code, text, closed, own = told
    assert code == KafkaError._STATE
    assert "process" in text
    assert (closed, own) == (True, 0)
    producer.produce(topic, b"parent again", partition=0)
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert Counter(values(read_to_end(url, topic))) == Counter([b"parent", b"child", b"parent again"])


def _use_in_child(pipe, inherited, url, topic):
    try:
        inherited.produce(topic, b"stolen", partition=0)
        inherited.flush(1)
        code, text = None, "it went through"
    except KafkaException as exception:
        code, text = exception.args[0].code(), exception.args[0].str()
    closed = inherited.close()
    own = Producer({"bootstrap.servers": url})
    own.produce(topic, b"child", partition=0)
    left = own.flush(PATIENCE_SECONDS)
    own.close()
    pipe.send((code, text, closed, left))
    pipe.close()
