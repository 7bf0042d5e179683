"""A producer whose database is cut off, stands still, or goes away: its reports are true, and it goes on by itself."""

from __future__ import annotations

import itertools
import threading

import pytest

from txnstore import KafkaError, KafkaException, Producer
from txnstore.clients.producer import producer as producer_module
from txnstore.transactions.outcome import Outcome, resolve_outcome

SIDES = pytest.mark.parametrize("side", ["before", "after"])
PATIENCE_SECONDS = 60.0
#: The last rounds of a test that cuts at each message are not cut any more.
UNTOUCHED_AT_THE_END = 2


class Delivered:
    """A delivery callback that remembers."""

    def __init__(self):
        self.values = []
        self.errors = []

    def __call__(self, error, message):
        if error is None:
            self.values.append(message.value())
        else:
            self.errors.append((error.code(), message.value()))


@pytest.fixture
def make_producer(proxy, postgresql_url, direct):
    producers = []

    def make(error_cb=None, **configuration):
        settings = {name.replace("_", "."): value for name, value in configuration.items()}
        settings["retry.backoff.ms"] = 1
        if error_cb is not None:
            settings["error_cb"] = error_cb
        producers.append(Producer({"bootstrap.servers": proxy.url(postgresql_url), "linger.ms": 0, **settings}))
        return producers[-1]

    yield make
    proxy.heal()
    for producer in producers:
        producer.close()


def code_of(call, *arguments):
    with pytest.raises(KafkaException) as caught:
        call(*arguments)
    return caught.value.args[0]


@SIDES
def test_a_record_whose_commit_is_cut_is_there_once(make_producer, proxy, direct, topic, side):
    producer = make_producer()
    producer.produce(topic, b"first")
    assert producer.flush(PATIENCE_SECONDS) == 0
    cut = proxy.cut(**{side: "COMMIT"})
    delivered = Delivered()
    producer.produce(topic, b"second", on_delivery=delivered)
    producer.produce(topic, b"third", on_delivery=delivered)
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert cut.fired
    assert direct.values() == [b"first", b"second", b"third"]
    assert (delivered.values, delivered.errors) == ([b"second", b"third"], [])


@pytest.mark.slow
@SIDES
def test_records_are_there_once_whichever_message_is_cut(make_producer, proxy, direct, topic, side):
    producer = make_producer()
    producer.produce(topic, b"0")
    assert producer.flush(PATIENCE_SECONDS) == 0
    expected = [b"0"]
    untouched = 0
    for number in itertools.count(1):
        cut = proxy.cut(**{side: number})
        expected.append(b"%d" % number)
        producer.produce(topic, expected[-1])
        assert producer.flush(PATIENCE_SECONDS) == 0
        assert direct.values() == expected
        untouched = 0 if cut.fired else untouched + 1
        if untouched:
            proxy.heal()
        if untouched == UNTOUCHED_AT_THE_END:
            break
    assert number > 6, "a request takes more messages than that"


@SIDES
def test_a_commit_that_is_cut_is_resolved_and_the_next_transaction_goes_on(make_producer, proxy, direct, topic, side):
    producer = make_producer(transactional_id=topic)
    producer.init_transactions(PATIENCE_SECONDS)
    for number, value in enumerate([b"a", b"b", b"c"]):
        producer.begin_transaction()
        producer.produce(topic, value)
        if number == 1:
            cut = proxy.cut(**{side: "COMMIT"})
        producer.commit_transaction(PATIENCE_SECONDS)
        assert direct.committed() == [b"a", b"b", b"c"][: number + 1]
    assert cut.fired


@pytest.mark.slow
@SIDES
@pytest.mark.parametrize("ends", ["commit", "abort"])
def test_a_transaction_ends_as_asked_whichever_message_is_cut(make_producer, proxy, direct, topic, side, ends):
    producer = make_producer(transactional_id=topic)
    producer.init_transactions(PATIENCE_SECONDS)
    expected = []
    untouched = 0
    for number in itertools.count(1):
        cut = proxy.cut(**{side: number})
        producer.begin_transaction()
        producer.produce(topic, b"sent %d" % number)
        assert producer.flush(PATIENCE_SECONDS) == 0
        producer.produce(topic, b"buffered %d" % number)
        if ends == "commit":
            producer.commit_transaction(PATIENCE_SECONDS)
            expected += [b"sent %d" % number, b"buffered %d" % number]
        else:
            producer.abort_transaction(PATIENCE_SECONDS)
        assert direct.committed() == expected
        untouched = 0 if cut.fired else untouched + 1
        if untouched:
            proxy.heal()
        if untouched == UNTOUCHED_AT_THE_END:
            break
    assert number > 12, "a transaction takes more messages than that"


def test_a_commit_that_times_out_is_taken_up_again(make_producer, proxy, direct, topic):
    producer = make_producer(transactional_id=topic)
    producer.init_transactions(PATIENCE_SECONDS)
    producer.begin_transaction()
    producer.produce(topic, b"a")
    hold = proxy.pause(before="COMMIT")
    error = code_of(producer.commit_transaction, 0.3)
    assert (error.code(), error.retriable()) == (KafkaError._TIMED_OUT, True)
    assert code_of(producer.begin_transaction).code() == KafkaError._CONFLICT
    assert code_of(producer.abort_transaction).code() == KafkaError._CONFLICT
    assert direct.committed() == []
    hold.resume()
    producer.commit_transaction(PATIENCE_SECONDS)
    assert direct.committed() == [b"a"]
    producer.begin_transaction()


def test_a_producer_that_is_made_while_the_database_is_away_delivers_when_it_is_back(
    make_producer, proxy, direct, topic
):
    proxy.refuse_connections()
    told: list[KafkaError] = []
    delivered = Delivered()
    producer = make_producer(error_cb=told.append)
    producer.produce(topic, b"a", on_delivery=delivered)
    assert producer.flush(0.3) == 1
    while not told:
        assert producer.poll(PATIENCE_SECONDS) > 0
    assert told[0].code() == KafkaError._TRANSPORT
    proxy.accept_connections()
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert delivered.values == direct.values() == [b"a"]


def test_a_record_that_is_not_delivered_in_its_time_is_reported(make_producer, proxy, direct, topic):
    proxy.refuse_connections()
    delivered = Delivered()
    producer = make_producer(message_timeout_ms=200)
    producer.produce(topic, b"late", on_delivery=delivered)
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert delivered.errors == [(KafkaError._MSG_TIMED_OUT, b"late")]
    proxy.accept_connections()
    # The database is back, but 200 ms may be short on a slow machine: whoever is told so tries again.
    while not delivered.values:
        producer.produce(topic, b"in time", on_delivery=delivered)
        assert producer.flush(PATIENCE_SECONDS) == 0
    assert direct.values() == delivered.values == [b"in time"]


@pytest.mark.slow
def test_calls_keep_their_time_while_the_network_swallows_everything(make_producer, proxy, topic, monkeypatch, until):
    monkeypatch.setattr(producer_module, "CLOSE_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(producer_module, "STOP_TIMEOUT_SECONDS", 0.5)
    producer = make_producer(transactional_id=topic)
    producer.init_transactions(PATIENCE_SECONDS)
    with producer.transaction():
        producer.produce(topic, b"before")
    producer.begin_transaction()
    proxy.swallow_everything()
    delivered = Delivered()
    producer.produce(topic, b"a", on_delivery=delivered)
    assert producer.flush(0.2) == 1
    assert producer.poll(0.1) == 0
    assert code_of(producer.list_topics, None, 0.1).code() == KafkaError._TRANSPORT
    assert code_of(producer.commit_transaction, 0.2).code() == KafkaError._TIMED_OUT
    closing = threading.Thread(target=producer.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_SECONDS)
    assert not closing.is_alive()
    assert len(producer) == 0
    assert [code for code, _ in delivered.errors] == [KafkaError._PURGE_INFLIGHT]
    proxy.heal()
    until(lambda: not any(thread.name.startswith("txnstore-producer") for thread in threading.enumerate()))


def test_what_a_closed_producer_left_open_is_aborted_by_the_next_one(make_producer, proxy, direct, topic):
    first = make_producer(transactional_id=topic)
    first.init_transactions(PATIENCE_SECONDS)
    first.begin_transaction()
    first.produce(topic, b"a")
    assert first.flush(PATIENCE_SECONDS) == 0
    identity = first._sender.session.identity
    second = make_producer(transactional_id=topic)
    second.init_transactions(PATIENCE_SECONDS)
    assert resolve_outcome(direct.store, topic, identity) is Outcome.ABORTED
    error = code_of(first.commit_transaction, PATIENCE_SECONDS)
    assert (error.code(), error.fatal()) == (KafkaError._FENCED, True)
    assert direct.committed() == []
