"""How a producer's block and its close end a transaction though callbacks raise: what is told is true."""

from __future__ import annotations

import pytest

from tests.clients.steps import PATIENCE_SECONDS, create_topic, error_of, read_to_end, values
from txnstore import KafkaError, KafkaException
from txnstore.clients.producer import producer as producer_module
from txnstore.clients.producer.state import INTERRUPTED_SECONDS

RAISED = [LookupError("of a callback"), RuntimeError("of a callback"), KafkaException(KafkaError(KafkaError._FAIL))]


@pytest.fixture
def topic(url):
    return create_topic(url, "orders")


@pytest.fixture
def producer(make_producer):
    producer = make_producer({"transactional.id": "anna"})
    producer.init_transactions(PATIENCE_SECONDS)
    return producer


class Raising:
    """A delivery callback that raises once, and notes what it was told."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.codes: list[int | None] = []

    def __call__(self, error, message):
        self.codes.append(error and error.code())
        if len(self.codes) == 1:
            raise self.error


def fail_in_a_block(producer, topic, callback):
    with producer.transaction(PATIENCE_SECONDS):
        for _ in range(3):
            producer.produce(topic, b"never", on_delivery=callback)
        raise ValueError("of the block")


def notes_of(error):
    return " ".join(getattr(error, "__notes__", []))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("raised", RAISED, ids=lambda raised: type(raised).__name__)
def test_what_a_block_raises_comes_out_of_it_though_a_callback_raises_too(producer, topic, url, raised):
    callback = Raising(raised)
    with pytest.raises(ValueError, match="of the block") as caught:
        fail_in_a_block(producer, topic, callback)
    notes = notes_of(caught.value)
    assert ("was aborted" in notes, repr(raised) in notes, "could not" in notes) == (True, True, False)
    with producer.transaction(PATIENCE_SECONDS):
        producer.produce(topic, b"next")
    assert callback.codes == [KafkaError._PURGE_QUEUE] * 3
    assert values(read_to_end(url, topic)) == [b"next"]


def test_that_a_block_could_not_be_aborted_is_told(producer, topic, monkeypatch):
    def fail(*_):
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "too slow"))

    with monkeypatch.context() as patch:
        patch.setattr(producer._transactions, "abort", fail)
        with pytest.raises(ValueError, match="of the block") as caught:
            fail_in_a_block(producer, topic, None)
    assert "could not be aborted either" in notes_of(caught.value)
    assert "too slow" in notes_of(caught.value)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("raised", RAISED, ids=lambda raised: type(raised).__name__)
def test_what_a_callback_raises_in_the_abort_of_a_close_comes_out_of_it(producer, topic, caplog, raised):
    callback = Raising(raised)
    producer.begin_transaction()
    for _ in range(3):
        producer.produce(topic, b"never", on_delivery=callback)
    with pytest.raises(type(raised)) as caught:
        producer.close()
    assert caught.value is raised
    assert "left for recovery" not in caplog.text
    assert callback.codes == [KafkaError._PURGE_QUEUE] * 3
    producer.close()


def test_a_transaction_that_close_could_not_abort_is_left_and_that_is_logged(producer, topic, caplog, monkeypatch):
    def fail(*_):
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "too slow"))

    producer.begin_transaction()
    producer.produce(topic, b"never")
    monkeypatch.setattr(producer._transactions, "abort", fail)
    producer.close()
    assert "the transaction of anna was left for recovery: too slow\n" in caplog.text


# --- blocks that end their transaction themselves ---------------------------------------------------------------------


@pytest.mark.slow_but_first
@pytest.mark.parametrize("how", ["commit", "commit without waiting", "commit of another one"])
def test_a_block_that_has_committed_itself_ends_as_any_other(producer, topic, url, how):
    """Who repeated it after an error would write it twice."""
    with producer.transaction(PATIENCE_SECONDS):
        producer.produce(topic, b"1")
        if how == "commit without waiting":
            producer.commit_transaction_async().result(PATIENCE_SECONDS)
        else:
            producer.commit_transaction(PATIENCE_SECONDS)
        if how == "commit of another one":
            producer.begin_transaction()
            producer.produce(topic, b"2")
    more = [b"2"] if how == "commit of another one" else []
    assert values(read_to_end(url, topic)) == [b"1", *more]
    with producer.transaction(PATIENCE_SECONDS):
        producer.produce(topic, b"3")
    assert values(read_to_end(url, topic)) == [b"1", *more, b"3"]


def test_a_block_that_has_aborted_itself_says_that_nothing_is_committed(producer, topic, url):
    def abort_within():
        with producer.transaction(PATIENCE_SECONDS):
            producer.produce(topic, b"never")
            producer.abort_transaction(PATIENCE_SECONDS)

    error = error_of(abort_within)
    assert (error.code(), error.retriable(), error.txn_requires_abort()) == (KafkaError._STATE, False, False)
    assert "has aborted its transaction itself" in error.str()
    with producer.transaction(PATIENCE_SECONDS):
        producer.produce(topic, b"next")
    assert values(read_to_end(url, topic)) == [b"next"]


def test_a_callback_that_raises_as_the_block_commits_is_not_taken_for_a_block_that_has_ended(producer, topic, url):
    raised = KafkaException(KafkaError(KafkaError._STATE, "of a callback"))

    def commit():
        with producer.transaction(PATIENCE_SECONDS):
            producer.produce(topic, b"1", on_delivery=Raising(raised))

    assert error_of(commit).str() == "of a callback"
    assert values(read_to_end(url, topic)) == [b"1"]


# --- close ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raising", ["the first", "all"])
def test_close_sends_all_and_serves_all_though_callbacks_raise(make_producer, topic, url, raising):
    producer = make_producer({"linger.ms": 50, "batch.num.messages": 10})
    told: list[KafkaError | None] = []

    def report(error, message):
        told.append(error)
        if raising == "all" or len(told) == 1:
            raise LookupError(len(told))

    for number in range(300):
        producer.produce(topic, b"%d" % number, on_delivery=report)
    with pytest.raises(LookupError, match=r"^1$"):
        producer.close()
    assert told == [None] * 300
    assert values(read_to_end(url, topic)) == [b"%d" % number for number in range(300)]
    assert producer.close()


def test_close_reports_each_record_that_it_could_not_send_though_callbacks_raise(
    make_producer, topic, url, monkeypatch
):
    producer = make_producer({"linger.ms": 10_000})
    told: list[int] = []

    def report(error, message):
        told.append(error.code())
        raise LookupError(len(told))

    for _ in range(3):
        producer.produce(topic, b"never", on_delivery=report)
    monkeypatch.setattr(producer_module, "CLOSE_TIMEOUT_SECONDS", 0.0)
    # Nothing is sent: no time is left.
    monkeypatch.setattr(producer._sender, "begin_flush", lambda: None)
    monkeypatch.setattr(producer._sender, "end_flush", lambda: None)
    with pytest.raises(LookupError, match=r"^1$"):
        producer.close()
    assert told == [KafkaError._PURGE_QUEUE] * 3


def test_close_does_not_go_on_for_ever_with_callbacks_that_produce_and_raise(make_producer, topic, monkeypatch):
    producer = make_producer()
    told: list[KafkaError | None] = []

    def report(error, message):
        told.append(error)
        if len(told) < 1000 and not producer._is_closed:
            producer.produce(topic, b"again", on_delivery=report)
        raise LookupError(len(told))

    producer.produce(topic, b"first", on_delivery=report)
    monkeypatch.setattr(producer_module, "CLOSE_TIMEOUT_SECONDS", 0.05)
    with pytest.raises(LookupError, match=r"^1$"):
        producer.close()
    assert len(told) < 1000


def test_close_ends_at_once_if_a_callback_is_interrupted(make_producer, topic, monkeypatch):
    producer = make_producer()
    waited: list[float] = []
    close_now = producer._close_now

    def look(stop_seconds, errors):
        waited.append(stop_seconds)
        close_now(stop_seconds, errors)

    def report(error, message):
        raise KeyboardInterrupt

    monkeypatch.setattr(producer, "_close_now", look)
    producer.produce(topic, b"v", on_delivery=report)
    with pytest.raises(KeyboardInterrupt):
        producer.close()
    assert waited == [INTERRUPTED_SECONDS]
    assert producer.close()
