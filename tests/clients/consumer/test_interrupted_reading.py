"""Ctrl-C at every moment of a call that reads: what it kept from the application comes again, nothing is held up."""

from __future__ import annotations

import _thread
import contextlib
import gc
import itertools
import signal
import sys
import weakref
from functools import partial
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider

import txnstore
from tests.clients.bulk_paths import all_spare_messages
from tests.clients.consumer.log_writer import PATIENCE_SECONDS, texts
from tests.clients.moments import attempt, every_interrupt
from tests.databases import on_sqlite_alone
from txnstore import OFFSET_BEGINNING, Consumer, DeserializingConsumer, TopicPartition, bulk
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.topics import delete_topic
from txnstore.model import Record
from txnstore.observability.client_metrics import ClientCollector
from txnstore.observability.tracing import TxnStoreInstrumentor
from txnstore.serialization import StringDeserializer

#: Whose moments are tried: what lies below is tried as one.
FILES = {
    "consumer/assigned_partition.py",
    "consumer/consumer.py",
    "consumer/core.py",
    "consumer/orders.py",
    "consumer/subscription.py",
    "consumer/whole_transactions.py",
}
RECORD_COUNT = 800


def test_the_files_whose_moments_are_tried_are_there():
    present = {"/".join(path.parts[-2:]) for path in Path(txnstore.__file__).parent.rglob("*.py")}
    assert present >= FILES | BETWEEN


def is_left_alone(frame, event):
    # Python looks for signals as its functions begin and as those of C come back, not as its own return.
    return event == "return"


def next_transaction(consumer):
    return consumer.consume_transaction(PATIENCE_SECONDS).messages


CALLS = {
    "poll": lambda consumer: [consumer.poll(PATIENCE_SECONDS)],
    "poll that waits": lambda consumer: [consumer.poll(PATIENCE_SECONDS)],
    "consume": lambda consumer: consumer.consume(2, PATIENCE_SECONDS),
    "consume_transaction": next_transaction,
}
ATOMIC = {"txnstore.delivery.order": "commit", "txnstore.delivery.atomic": True}


@pytest.mark.slow
@on_sqlite_alone  # No moment of the database is tried.
@pytest.mark.parametrize(
    ("interrupted", "goes_on"),
    [
        ("poll", "poll"),
        pytest.param("poll that waits", "poll", marks=pytest.mark.slow),
        ("consume", "poll"),
        pytest.param("poll", "consume", marks=pytest.mark.slow),
        pytest.param("consume", "consume", marks=pytest.mark.slow),
        pytest.param("consume_transaction", "poll", marks=pytest.mark.slow),
        pytest.param("consume_transaction", "consume", marks=pytest.mark.slow),
    ],
)
def test_what_an_interrupted_call_has_not_returned_comes_again(log, make_consumer, interrupted, goes_on):
    log.topic()
    partition_id = log.partition_id("t", 0)
    # Of two records a batch: some moments are those of its end.
    batches = [encode([Record(b"%d" % (number + place)) for place in (0, 1)]) for number in range(0, RECORD_COUNT, 2)]
    log.store.write(lambda connection: [append(connection, [Append(partition_id, batch)]) for batch in batches])
    configuration = {"enable.auto.commit": True, "auto.commit.interval.ms": 0}
    consumer = make_consumer(configuration | (ATOMIC if interrupted == "consume_transaction" else {}))
    consumer.assign([TopicPartition("t", 0, OFFSET_BEGINNING)])
    seen: list[bytes] = [consumer.poll(PATIENCE_SECONDS).value()]

    def note(messages):
        seen.extend(message.value() for message in messages)

    for _, interrupt in every_interrupt(FILES, is_left_alone):
        if interrupted == "poll that waits":
            consumer.seek(TopicPartition("t", 0, len(seen)))
        attempt(interrupt, lambda: note(CALLS[interrupted](consumer)))
        note(CALLS[goes_on](consumer))
        assert seen == [b"%d" % number for number in range(len(seen))], interrupt.where
        assert [tp.offset for tp in consumer._core.commits.stored()] == [len(seen)], interrupt.where
    # Something was interrupted.
    assert len(seen) > 5


#: Whose moments are tried of what comes between the application and the call that reads.
BETWEEN = {
    "model/serializers.py",
    "observability/client_metrics.py",
    "observability/tracing.py",
    "observability/wrapping.py",
    "txnstore/deserializing_consumer.py",
}


@contextlib.contextmanager
def looked_at():
    """Let all clients be looked at for metrics and spans."""
    collector, instrumentor = ClientCollector(), TxnStoreInstrumentor()
    instrumentor.instrument(tracer_provider=TracerProvider())
    try:
        yield
    finally:
        instrumentor.uninstrument()
        collector.close()


@pytest.mark.slow_but_first
@on_sqlite_alone  # As above.
@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (Consumer, "poll"),
        (Consumer, "consume"),
        (Consumer, "consume_transaction"),
        (DeserializingConsumer, "poll"),
    ],
)
def test_what_is_interrupted_between_the_call_and_the_application_comes_again(log, make_consumer, kind, call):
    log.topic()
    log.write("t", 0, *[b"%d" % number for number in range(RECORD_COUNT)])
    configuration: dict[str, object] = {"enable.auto.commit": True, "auto.commit.interval.ms": 0}
    configuration |= ATOMIC if call == "consume_transaction" else {}
    configuration |= {"value.deserializer": StringDeserializer()} if kind is DeserializingConsumer else {}
    consumer = make_consumer(configuration, kind=kind)
    seen: list[int] = []

    def note(messages):
        seen.extend(int(message.value()) for message in messages)

    def is_no_moment(frame, event):
        # A poll() in C looks for signals itself as it ends, and gives back what it would return.
        is_end_of_poll = event == "c_return" and frame.f_code.co_name in {"around", "poll"}
        return is_end_of_poll or is_left_alone(frame, event)

    with looked_at():
        consumer.assign([TopicPartition("t", 0, OFFSET_BEGINNING)])
        for _, interrupt in every_interrupt(BETWEEN, is_no_moment):
            attempt(interrupt, lambda: note(CALLS[call](consumer)))
            note(CALLS[call](consumer))
            assert seen == list(range(len(seen))), interrupt.where
            assert [tp.offset for tp in consumer._core.commits.stored()] == [len(seen)], interrupt.where
    # Something was interrupted.
    assert len(seen) > 5


@pytest.mark.slow
@on_sqlite_alone  # As above.
@pytest.mark.skipif(not bulk.IN_C or sys.version_info >= (3, 12), reason="no garbage is collected within a call of C")
def test_a_signal_that_comes_while_poll_makes_a_record_takes_none_with_it(log, make_consumer):
    """Python would look for it as the call of C comes back, and drop what was returned."""
    log.topic()
    batch = encode([Record(b"%d" % number) for number in range(RECORD_COUNT)])
    log.store.write(lambda connection: append(connection, [Append(log.partition_id("t", 0), batch)]))
    consumer = make_consumer({"enable.auto.commit": False})
    consumer.assign([TopicPartition("t", 0, OFFSET_BEGINNING)])
    # Nothing here is Python's own code, which would look for signals itself: it is called as garbage goes.
    tripped = map(_thread.interrupt_main, itertools.repeat(signal.SIGINT))
    before, thresholds = signal.signal(signal.SIGINT, signal.default_int_handler), gc.get_threshold()
    callbacks, gc.callbacks[:] = gc.callbacks[:], []
    # What others have left would be interrupted instead.
    gc.collect()
    # Memory has to be asked for, for garbage to be collected.
    spare = all_spare_messages()
    seen: list[bytes] = []
    interrupt_count = 0
    try:
        for _ in range(RECORD_COUNT // 4):
            # By the long way, behind which the short one in C is open.
            spare.append(consumer.poll(PATIENCE_SECONDS))
            seen.append(spare[-1].value())
            message = None
            reference = weakref.ref(circle := Circle(), partial(next, tripped))
            del circle
            try:
                gc.set_threshold(1, 1_000_000, 1_000_000)
                message = consumer.poll(PATIENCE_SECONDS)
            except KeyboardInterrupt:
                interrupt_count += 1
            finally:
                gc.set_threshold(*thresholds)
            assert reference() is None
            spare.append(message)
            seen += [] if message is None else [message.value()]
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks[:] = callbacks
        signal.signal(signal.SIGINT, before)
    assert interrupt_count > RECORD_COUNT // 8
    assert seen == [b"%d" % number for number in range(len(seen))]


@on_sqlite_alone  # As above.
@pytest.mark.parametrize("method", ["give_back", "let_go"])
def test_interrupts_while_the_first_one_gives_back_a_record_take_it_no_more_than_that(
    log, make_consumer, monkeypatch, method
):
    log.topic()
    log.write("t", 0, *[b"%d" % number for number in range(5)])
    consumer = make_consumer({"enable.auto.commit": True, "auto.commit.interval.ms": 0})
    consumer.assign([TopicPartition("t", 0, OFFSET_BEGINNING)])
    assert consumer.poll(PATIENCE_SECONDS).offset() == 0
    message = consumer.poll(PATIENCE_SECONDS)
    subscription = consumer._core.subscription
    does = getattr(subscription, method)
    interrupts = [KeyboardInterrupt] * 3

    def interrupted(*arguments):
        if interrupts:
            raise interrupts.pop()
        return does(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(subscription, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            consumer._not_returned(message)
    assert [tp.offset for tp in consumer._core.commits.stored()] == [1]
    assert [consumer.poll(PATIENCE_SECONDS).offset() for _ in range(4)] == [1, 2, 3, 4]
    assert [tp.offset for tp in consumer._core.commits.stored()] == [5]


class Circle:
    """Goes when garbage is collected."""

    def __init__(self) -> None:
        self.itself = self


def test_what_is_given_back_is_not_looked_for_in_a_topic_made_anew(log, make_consumer):
    log.topic()
    log.write("t", 0, *(b"old %d" % number for number in range(10)))
    consumer = make_consumer({"enable.auto.commit": False})
    consumer.assign([TopicPartition("t", 0)])
    assert len(consumer.consume(5, PATIENCE_SECONDS)) == 5
    message = consumer.poll(PATIENCE_SECONDS)
    log.store.write(lambda connection: delete_topic(connection, "t"))
    log.topic()
    new = [b"new %d" % number for number in range(10)]
    log.write("t", 0, *new)
    consumer._core.give_back([message])
    assert texts(consumer.consume(10, PATIENCE_SECONDS)) == new
