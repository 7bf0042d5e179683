"""How a producer's block and its close end a transaction though callbacks raise: what is told is true."""

from __future__ import annotations

import pytest

from tests.clients.steps import PATIENCE_SECONDS, create_topic, read_to_end, values
from txnstore import KafkaError, KafkaException

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
    assert "the transaction of anna was left for recovery" in caplog.text
