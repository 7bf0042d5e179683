"""Spans of clients: whose children they are, what they link to, what they say, and that records stay as they were."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from sqlalchemy import create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from txnstore import Consumer, DeserializingConsumer, KafkaException, Producer, SerializingProducer
from txnstore.aio import AIOConsumer, AIOProducer
from txnstore.clients.aio.calls import AsyncCalls
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.opening import open_store
from txnstore.observability import tracing
from txnstore.observability.tracing import LINKS_MAX, TxnStoreInstrumentor, process
from txnstore.observability.wrapping import aside
from txnstore.outbox import Outbox
from txnstore.serialization import StringDeserializer, StringSerializer
from txnstore.trouble import RepeatedTrouble

PATIENCE_SECONDS = 60


class Spans:
    """The spans that have ended, and what makes others."""

    def __init__(self):
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("application")

    def named(self, name):
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name):
        (span,) = self.named(name)
        return span

    @property
    def names(self):
        return [span.name for span in self._exporter.get_finished_spans()]

    def current(self, name):
        return self.tracer.start_as_current_span(name)


@pytest.fixture
def spans():
    """All clients are watched until the test is over."""
    spans = Spans()
    TxnStoreInstrumentor().instrument(tracer_provider=spans.provider)
    yield spans
    TxnStoreInstrumentor().uninstrument()


@pytest.fixture
def make(url):
    """Make a client on the test's store; it is closed after the test."""
    with contextlib.ExitStack() as opened:

        def make(kind, **keys):
            own = {"group.id": "readers", "auto.offset.reset": "earliest", "enable.auto.commit": False}
            configuration = {
                "bootstrap.servers": url,
                **(own if issubclass(kind, Consumer) else {}),
                **{_key(name): value for name, value in keys.items()},
            }
            return opened.enter_context(kind(configuration))

        yield make


def _key(name):
    return name if name == "on_delivery" else name.replace("_", ".")


def sent_by(spans, producer, *values, topic="orders", **rest):
    for value in values:
        producer.produce(topic, value, on_delivery=lambda *_: None, **rest)
    assert producer.flush(PATIENCE_SECONDS) == 0


def polled(consumer, topic="orders"):
    if not consumer.assignment():
        consumer.subscribe([topic])
    message = consumer.poll(PATIENCE_SECONDS)
    assert message is not None
    return message


def contexts_of(links):
    return [(link.context.trace_id, link.context.span_id) for link in links]


def context_of(span):
    return span.context.trace_id, span.context.span_id


def test_a_record_carries_its_trace_from_the_producer_to_who_processes_it(spans, make):
    producer, consumer = make(Producer, client_id="till"), make(Consumer, client_id="books")
    with spans.current("request") as request:
        sent_by(spans, producer, b"apples", key="customer-7")
    send = spans.one("send orders")
    assert send.kind is SpanKind.PRODUCER
    assert send.parent.span_id == request.context.span_id
    assert send.attributes == {
        "messaging.system": "txnstore",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
        "messaging.client.id": "till",
        "messaging.message.body.size": 6,
        "messaging.kafka.message.key": "customer-7",
        "messaging.destination.partition.id": "0",
        "messaging.kafka.offset": 0,
    }

    message = polled(consumer)
    version, trace_id, span_id, _ = dict(message.headers())["traceparent"].decode().split("-")
    assert (version, int(trace_id, 16), int(span_id, 16)) == ("00", *context_of(send))
    poll = spans.one("poll orders")
    assert poll.kind is SpanKind.CONSUMER
    assert poll.parent is None
    assert contexts_of(poll.links) == [context_of(send)]
    assert poll.attributes["messaging.operation.type"] == "receive"
    assert poll.attributes["messaging.consumer.group.name"] == "readers"
    assert poll.attributes["messaging.client.id"] == "books"
    assert poll.attributes["messaging.kafka.offset"] == 0

    with process(message, tracer_provider=spans.provider) as processing:
        assert trace.get_current_span() is processing
    processed = spans.one("process orders")
    assert processed.kind is SpanKind.CONSUMER
    assert (processed.context.trace_id, processed.parent.span_id) == context_of(send)
    assert contexts_of(processed.links) == [context_of(send)]
    assert processed.attributes["messaging.operation.type"] == "process"

    consumer.commit(message, asynchronous=False)
    commit = spans.one("commit")
    assert (commit.kind, commit.attributes["messaging.operation.type"]) == (SpanKind.CLIENT, "settle")


def test_the_applications_headers_stay_as_they_are_and_come_first(spans, make):
    producer, consumer = make(Producer), make(Consumer)
    pairs = [("a", b"1"), ("b", None), ("a", "2")]
    sent_by(spans, producer, b"v", headers=pairs)
    sent_by(spans, producer, b"v", headers={"c": b"3"})
    sent_by(spans, producer, b"v", headers=[])
    assert pairs == [("a", b"1"), ("b", None), ("a", "2")]
    sent_by(spans, producer, b"v", headers=[["d", b"4"]])
    found = [polled(consumer).headers() for _ in range(4)]
    assert [headers[:-1] for headers in found] == [
        [("a", b"1"), ("b", None), ("a", b"2")],
        [("c", b"3")],
        [],
        [("d", b"4")],
    ]
    assert {headers[-1][0] for headers in found} == {"traceparent"}


def test_a_context_that_the_application_gives_a_record_is_the_only_one(spans, make):
    producer, consumer = make(Producer), make(Consumer)
    # Of several it is the last one, as everywhere in Kafka.
    given = [("traceparent", f"00-{number:032x}-{8:016x}-01".encode()) for number in (6, 7)]
    sent_by(spans, producer, b"v", headers=given)
    message = polled(consumer)
    assert message.headers() == given
    assert contexts_of(spans.one("send orders").links) == [(7, 8)] == contexts_of(spans.one("poll orders").links)


def test_what_cannot_be_produced_is_an_error_of_its_span_alone(spans, make):
    producer = make(Producer, message_max_bytes=1_000)
    with pytest.raises(KafkaException):
        producer.produce("orders", b"x" * 2_000)
    send = spans.one("send orders")
    assert send.status.status_code is StatusCode.ERROR
    assert send.attributes["error.type"] == "MSG_SIZE_TOO_LARGE"
    assert [event.name for event in send.events] == ["exception"]
    for refused in (5, [5], "text", [("a",)], (("a", b"1"),)):
        with pytest.raises(TypeError):
            producer.produce("orders", b"x", headers=refused)
    with pytest.raises(TypeError):
        producer.produce(5, b"x")


def test_a_send_ends_with_its_report_or_at_once_where_nobody_hears_of_it(spans, make):
    quiet, told = make(Producer, linger_ms=60_000), []
    quiet.produce("orders", b"a")
    assert spans.names == ["send orders"]
    heard = make(Producer, linger_ms=60_000, on_delivery=lambda error, message: told.append((error, message)))
    heard.produce("orders", b"b")
    heard.produce("orders", b"c")
    assert len(spans.names) == 1
    heard.purge()
    heard.poll(0)
    assert [error.name() for error, _ in told] == ["_PURGE_QUEUE"] * 2
    failed = spans.named("send orders")[1:]
    assert [span.attributes["error.type"] for span in failed] == ["_PURGE_QUEUE"] * 2
    assert {span.status.status_code for span in failed} == {StatusCode.ERROR}
    only_errors = make(Producer, **{"delivery.report.only.error": True}, on_delivery=told.append)
    only_errors.produce("orders", b"d")
    assert len(spans.named("send orders")) == 4


def test_a_poll_begins_with_its_call_and_one_that_brings_no_record_has_no_span(spans, make):
    producer, consumer = make(Producer), make(Consumer, enable_partition_eof=True)
    sent_by(spans, producer, b"a")
    assigned_ns = []
    consumer.subscribe(["orders"], on_assign=lambda *_: assigned_ns.append(time.time_ns()))
    message = consumer.poll(PATIENCE_SECONDS)
    assert message.error() is None
    poll = spans.one("poll orders")
    assert poll.start_time <= assigned_ns[0] <= poll.end_time
    assert consumer.poll(PATIENCE_SECONDS).error().name() == "_PARTITION_EOF"
    assert consumer.poll(0) is None
    assert spans.names == ["send orders", "poll orders"]


def test_a_batch_links_to_each_of_its_records(spans, make):
    producer, consumer = make(Producer), make(Consumer)
    sent_by(spans, producer, b"a", b"b", b"c")
    consumer.subscribe(["orders"])
    messages = consumer.consume(3, PATIENCE_SECONDS)
    assert len(messages) == 3
    sent = [context_of(span) for span in spans.named("send orders")]
    consume = spans.one("consume orders")
    assert contexts_of(consume.links) == sent
    assert [link.attributes["messaging.kafka.offset"] for link in consume.links] == [0, 1, 2]
    assert consume.attributes["messaging.batch.message_count"] == 3
    with spans.current("job") as job, process(messages, tracer_provider=spans.provider):
        pass
    processed = spans.one("process orders")
    assert processed.parent.span_id == job.context.span_id
    assert contexts_of(processed.links) == sent
    assert consumer.consume(3, 0) == []
    assert consumer.poll(0) is None
    assert len(spans.named("consume orders")) == 1


def test_a_transaction_that_comes_whole_links_to_each_of_its_records(spans, make):
    producer = make(Producer, transactional_id="till-7")
    producer.init_transactions()
    with producer.transaction():
        producer.produce("orders", b"a")
        producer.produce("orders", b"b")
    consumer = make(Consumer, txnstore_delivery_order="commit", txnstore_delivery_atomic=True)
    consumer.subscribe(["orders"])
    assert consumer.consume_transaction(PATIENCE_SECONDS) is not None
    sent = [context_of(span) for span in spans.named("send orders")]
    assert contexts_of(spans.one("consume_transaction orders").links) == sent
    assert len(sent) == 2
    assert consumer.consume_transaction(0) is None
    assert len(spans.named("consume_transaction orders")) == 1


def test_processing_in_another_trace_links_to_that_and_records_what_goes_wrong(spans, make):
    producer, consumer = make(Producer), make(Consumer)
    sent_by(spans, producer, None)
    message = polled(consumer)
    with (
        spans.current("worker") as worker,
        pytest.raises(ZeroDivisionError),
        process(message, tracer_provider=spans.provider),
    ):
        _ = 1 // 0
    processed, send = spans.one("process orders"), spans.one("send orders")
    assert contexts_of(processed.links) == [context_of(send), (worker.context.trace_id, worker.context.span_id)]
    assert processed.status.status_code is StatusCode.ERROR
    assert processed.attributes["error.type"] == "ZeroDivisionError"
    assert [event.name for event in processed.events] == ["exception"]
    assert processed.attributes["messaging.kafka.message.tombstone"] is True


def test_a_message_without_a_context_is_processed_in_the_current_trace(spans, make):
    TxnStoreInstrumentor().uninstrument()
    producer, consumer = make(Producer), make(Consumer)
    sent_by(spans, producer, b"a")
    message = polled(consumer)
    assert message.headers() is None
    with spans.current("worker") as worker, process(message, tracer_provider=spans.provider):
        pass
    processed = spans.one("process orders")
    assert processed.parent.span_id == worker.context.span_id
    assert list(processed.links) == []


def test_transactions_say_how_they_ended_and_link_to_what_was_sent_in_them(spans, make):
    producer = make(Producer, transactional_id="till-7")
    producer.init_transactions()
    with producer.transaction():
        producer.produce("orders", b"a")
        producer.produce("orders", b"b")
    producer.begin_transaction()
    producer.produce("orders", b"c")
    producer.abort_transaction()
    producer.begin_transaction()
    producer.produce("orders", b"d")
    producer.commit_transaction_async().result(PATIENCE_SECONDS)
    sent = [context_of(span) for span in spans.named("send orders")]
    first, second = spans.named("commit")
    abort = spans.one("abort")
    assert [contexts_of(span.links) for span in (first, abort, second)] == [sent[:2], sent[2:3], sent[3:]]
    assert [span.attributes["txnstore.transaction.outcome"] for span in (first, abort, second)] == [
        "committed",
        "aborted",
        "committed",
    ]
    assert {span.kind for span in (first, second, abort)} == {SpanKind.CLIENT}
    assert first.attributes["txnstore.transactional_id"] == "till-7"
    assert first.attributes["messaging.operation.name"] == "commit"


def test_links_of_a_transaction_are_bounded(spans, make):
    producer = make(Producer, transactional_id="till-7")
    producer.init_transactions()
    with producer.transaction():
        for _ in range(LINKS_MAX + 5):
            producer.produce("orders", b"a")
        # The SDK would keep no more, but they need not be remembered either.
        assert len(tracing._clients._sent[producer]) == LINKS_MAX
    assert producer not in tracing._clients._sent
    assert len(spans.one("commit").links) == LINKS_MAX


def test_a_commit_that_fails_says_why(spans, make):
    fenced = make(Producer, transactional_id="till-7")
    fenced.init_transactions()
    fenced.begin_transaction()
    fenced.produce("orders", b"a")
    make(Producer, transactional_id="till-7").init_transactions()
    with pytest.raises(KafkaException):
        fenced.commit_transaction()
    (commit,) = spans.named("commit")
    assert commit.status.status_code is StatusCode.ERROR
    assert commit.attributes["error.type"] == "_FENCED"
    assert "txnstore.transaction.outcome" not in commit.attributes


class Fails(SpanProcessor):
    """Raises as spans begin, or as they end."""

    def __init__(self, moment):
        setattr(self, moment, self._fail)

    def _fail(self, *_, **__):
        raise ConnectionError("the collector is away")


class FailingPropagator(TextMapPropagator):
    """Raises as contexts are written into headers, or as they are read from them."""

    def __init__(self, moment):
        setattr(self, moment, self._fail)

    def _fail(self, *_, **__):
        raise ConnectionError("no context")

    def inject(self, carrier, context=None, setter=None):
        """Add nothing."""

    def extract(self, carrier, context=None, getter=None):
        return context

    @property
    def fields(self):
        return set()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("moment", ["on_start", "on_end", "inject", "extract"])
def test_what_fails_beside_the_clients_changes_nothing_that_the_application_is_told(make, caplog, monkeypatch, moment):
    provider, propagator = TracerProvider(), None
    if moment.startswith("on"):
        provider.add_span_processor(Fails(moment))
    else:
        propagator = FailingPropagator(moment)
    TxnStoreInstrumentor().instrument(tracer_provider=provider, propagator=propagator)
    monkeypatch.setattr(aside, "_trouble", RepeatedTrouble())
    heard = []
    try:
        plain, till = make(Producer), make(Producer, transactional_id="till-7")
        plain.produce("orders", b"plain", partition=0, on_delivery=lambda error, _: heard.append(error))
        assert plain.flush(PATIENCE_SECONDS) == 0
        till.init_transactions()
        for value in (b"first", b"second"):
            with till.transaction():
                till.produce("orders", value, partition=0, on_delivery=lambda error, _: heard.append(error))
        till.begin_transaction()
        till.produce("orders", b"left to the future", partition=0)
        till.commit_transaction_async().result(PATIENCE_SECONDS)
        till.begin_transaction()
        till.produce("orders", b"aborted", partition=0)
        till.abort_transaction()
        with pytest.raises(TypeError):
            plain.produce("orders", b"x", headers=5)
        consumer = make(Consumer)
        consumer.subscribe(["orders"])
        first = consumer.poll(PATIENCE_SECONDS)
        rest = consumer.consume(3, PATIENCE_SECONDS)
        with process(first, tracer_provider=provider, propagator=propagator):
            heard.append("processed")
        assert consumer.commit(asynchronous=False)[0].offset > 0
    finally:
        TxnStoreInstrumentor().uninstrument()
    assert heard == [None, None, None, "processed"]
    assert [it.value() for it in (first, *rest)] == [b"plain", b"first", b"second", b"left to the future"]
    # Once, however often it happens.
    assert [(it.levelname, it.error) for it in caplog.records if it.event == "onlooker_failed"] == [
        ("ERROR", "ConnectionError")
    ]


def test_a_report_reaches_the_application_though_its_span_is_interrupted(spans, make):
    class Interrupted(SpanProcessor):
        def on_end(self, span):
            raise KeyboardInterrupt

    spans.provider.add_span_processor(Interrupted())
    heard = []
    producer = make(Producer)
    producer.produce("orders", b"a", on_delivery=lambda error, _: heard.append(error))
    with pytest.raises(KeyboardInterrupt):
        producer.flush(PATIENCE_SECONDS)
    assert heard == [None]


def test_single_clients_can_be_watched_and_the_others_are_not(make):
    spans = Spans()
    instrumentor = TxnStoreInstrumentor()
    try:
        watched = instrumentor.instrument_producer(make(Producer), tracer_provider=spans.provider)
        other, reader = make(Producer), instrumentor.instrument_consumer(make(Consumer), spans.provider)
        sent_by(spans, other, b"a", topic="others")
        sent_by(spans, watched, b"b")
        assert polled(reader).headers() is not None
        assert spans.names == ["send orders", "poll orders"]
        assert instrumentor.uninstrument_producer(watched) is watched
        assert instrumentor.uninstrument_consumer(reader) is reader
        sent_by(spans, watched, b"c")
        assert polled(reader).headers() is None
        assert len(spans.names) == 2
    finally:
        instrumentor.uninstrument()


def test_serializing_clients_and_batches_are_traced_as_what_is_stored(spans, make):
    text = StringSerializer("utf_8")
    producer = make(SerializingProducer, key_serializer=text, value_serializer=text)
    producer.produce("orders", key="k", value="v" * 9, headers=[("h", b"1")])
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert spans.one("send orders").attributes["messaging.message.body.size"] == 9
    consumer = make(DeserializingConsumer, value_deserializer=StringDeserializer("utf_8"))
    message = polled(consumer)
    assert message.value() == "v" * 9
    with process(message, tracer_provider=spans.provider):
        pass
    assert contexts_of(spans.one("process orders").links) == [context_of(spans.one("send orders"))]
    batch = [{"value": b"1"}, {"value": b"2"}]
    assert make(Producer).produce_batch("lines", batch) == 2
    assert len(spans.named("send lines")) == 2


def test_asynchronous_clients_stay_in_the_trace_of_their_coroutine(spans, url):
    async def use():
        configuration = {"bootstrap.servers": url}
        async with AIOProducer(configuration) as producer:
            with spans.current("request"):
                await (await producer.produce("orders", b"a"))
        readers = {**configuration, "group.id": "readers", "auto.offset.reset": "earliest"}
        async with AIOConsumer(readers) as consumer:
            await consumer.subscribe(["orders"])
            with spans.current("worker"):
                return await consumer.poll(PATIENCE_SECONDS)

    message = asyncio.run(use())
    assert message is not None
    assert spans.one("send orders").parent.span_id == spans.one("request").context.span_id
    # An asynchronous consumer takes what there is, in a thread.
    assert spans.one("consume orders").parent.span_id == spans.one("worker").context.span_id


def test_single_asynchronous_clients_can_be_watched(url):
    spans, instrumentor = Spans(), TxnStoreInstrumentor()

    async def use():
        configuration = {"bootstrap.servers": url}
        readers = {**configuration, "group.id": "readers", "auto.offset.reset": "earliest"}
        async with AIOProducer(configuration) as producer, AIOConsumer(readers) as consumer:
            assert instrumentor.instrument_producer(producer, spans.provider) is producer
            assert instrumentor.instrument_consumer(consumer, spans.provider) is consumer
            await (await producer.produce("orders", b"a"))
            await consumer.subscribe(["orders"])
            assert await consumer.poll(PATIENCE_SECONDS) is not None
            assert instrumentor.uninstrument_producer(producer) is producer
            await (await producer.produce("orders", b"b"))
            wrong: tuple[Any, Any] = consumer, 5
            with pytest.raises(TypeError, match="Producer"):
                instrumentor.instrument_producer(wrong[0])
            with pytest.raises(TypeError, match="not int"):
                instrumentor.instrument_consumer(wrong[1])

    try:
        asyncio.run(use())
    finally:
        instrumentor.uninstrument()
    assert spans.names == ["send orders", "consume orders"]


def test_what_somebody_has_written_as_baggage_is_not_logged(spans, make, caplog):
    producer, consumer = make(Producer), make(Consumer)
    context_given = ("traceparent", b"00-%032x-%016x-01" % (6, 8))
    sent_by(spans, producer, b"v", headers=[("baggage", b"%%%=;;secret" * 4_000), context_given])
    message = polled(consumer)
    with process(message, tracer_provider=spans.provider):
        pass
    assert contexts_of(spans.one("process orders").links) == [(6, 8)]
    assert [it.name for it in caplog.records if it.name.startswith("opentelemetry")] == []


def test_the_end_of_a_prepared_transaction_is_a_commit_or_an_abort_as_any_other(spans, make, url):
    with open_store(url) as store:
        store.write(lambda c: change_store_settings(c, {"transaction.two.phase.commit.enable": "true"}))
    producer = make(Producer, transactional_id="till-8", transaction_two_phase_commit_enable=True)
    producer.init_transactions()
    for remembers in (True, False):
        producer.begin_transaction()
        producer.produce("orders", b"a")
        state = producer.prepare_transaction()
        producer.complete_transaction(state if remembers else "1:0")
    commit, abort = spans.one("commit"), spans.one("abort")
    assert commit.attributes["txnstore.transaction.outcome"] == "committed"
    assert abort.attributes["txnstore.transaction.outcome"] == "aborted"
    sent = [context_of(span) for span in spans.named("send orders")]
    assert [contexts_of(span.links) for span in (commit, abort)] == [sent[:1], sent[1:]]


@pytest.fixture
def engine(url):
    """The application's own database, where the store is."""
    engine = create_engine(url)
    yield engine
    engine.dispose()


def written(engine, outbox, write):
    """Let `write` insert into the outbox, commit, and make records of it."""
    with engine.begin() as connection:
        write(connection)
    outbox.sequence()


def test_records_of_an_outbox_carry_their_traces_too(spans, make, url, engine):
    consumer = make(Consumer)
    with Outbox({"bootstrap.servers": url, "client.id": "till"}, sequencer=False).open() as outbox:
        with spans.current("request") as request:
            written(engine, outbox, lambda c: outbox.produce(c, "orders", b"apples", key="7", headers={"till": "7"}))
        records: list[dict[str, Any]] = [
            {"topic": "orders", "value": b"pears"},
            {"topic": "orders", "headers": [("till", b"8")]},
        ]
        written(engine, outbox, lambda c: outbox.produce_all(c, iter(records)))
    sends = spans.named("send orders")
    assert [send.kind for send in sends] == [SpanKind.PRODUCER] * 3
    assert sends[0].parent.span_id == request.context.span_id
    assert sends[0].attributes == {
        "messaging.system": "txnstore",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
        "messaging.client.id": "till",
        "messaging.message.body.size": 6,
        "messaging.kafka.message.key": "7",
    }
    messages = [polled(consumer) for _ in range(3)]
    assert [message.value() for message in messages] == [b"apples", b"pears", None]
    assert [[name for name, _ in message.headers()] for message in messages] == [
        ["till", "traceparent"],
        ["traceparent"],
        ["till", "traceparent"],
    ]
    assert [contexts_of(poll.links) for poll in spans.named("poll orders")] == [[context_of(send)] for send in sends]
    # What the application handed over is as it was.
    assert records == [{"topic": "orders", "value": b"pears"}, {"topic": "orders", "headers": [("till", b"8")]}]


def test_what_an_outbox_refuses_is_an_error_of_its_spans(spans, url, engine):
    """In the application's words, and nothing is inserted."""
    refused = "record 1 must be a mapping with a topic, a value and so on, not int"
    outbox: Any = Outbox(url, sequencer=False)
    with outbox.open(), engine.begin() as connection:
        with pytest.raises(TypeError, match=refused):
            outbox.produce_all(connection, [{"topic": "orders"}, 5])
        with pytest.raises(KafkaException):
            outbox.produce(connection, "orders", partition=-2)
        with pytest.raises(TypeError):
            outbox.produce(connection, "orders", headers=5)
        with pytest.raises(TypeError):
            outbox.produce(connection, 5)
        assert connection.execute(text(f"SELECT count(*) FROM {table_of(connection)}")).scalar_one() == 0
    assert [span.attributes["error.type"] for span in spans.named("send orders")] == ["TypeError", "_UNKNOWN_PARTITION"]
    assert {span.status.status_code for span in spans.named("send orders")} == {StatusCode.ERROR}


def table_of(connection):
    return "txnstore_outbox" if connection.dialect.name == "sqlite" else "txnstore.outbox"


def test_objects_that_an_outbox_watches_are_traced_from_when_on_they_are_looked_at(make, url, engine):
    """A watch that is there already is no other one by that."""

    class Base(DeclarativeBase):
        pass

    class Order(Base):
        __tablename__ = "orders"
        number: Mapped[int] = mapped_column(primary_key=True)

    Base.metadata.create_all(engine)
    spans = Spans()
    with Outbox(url, sequencer=False).open() as outbox:
        watch = outbox.watch(Order, "orders", value=lambda order, _: str(order.number))
        try:
            TxnStoreInstrumentor().instrument(tracer_provider=spans.provider)
            with Session(engine) as session:
                session.add(Order(number=7))
                session.commit()
        finally:
            TxnStoreInstrumentor().uninstrument()
            watch.stop()
        outbox.sequence()
    message = polled(make(Consumer))
    assert message.value() == b"7"
    (send,) = spans.named("send orders")
    assert dict(message.headers())["traceparent"].decode().split("-")[2] == f"{send.context.span_id:016x}"


def test_afterwards_the_classes_are_their_own_again():
    owners = {
        Outbox: ("produce", "produce_all"),
        Producer: ("produce", "commit_transaction", "commit_transaction_async", "abort_transaction"),
        Consumer: ("poll", "consume", "consume_transaction", "commit"),
        AsyncCalls: ("run",),
    }

    def methods():
        return [vars(owner)[name] for owner, names in owners.items() for name in names]

    before = methods()
    TxnStoreInstrumentor().instrument()
    TxnStoreInstrumentor().instrument()
    assert not set(before) & set(methods())
    TxnStoreInstrumentor().uninstrument()
    assert methods() == before


def test_without_an_sdk_records_carry_what_the_current_context_is(make):
    TxnStoreInstrumentor().instrument()
    try:
        producer, consumer = make(Producer), make(Consumer)
        sent_by(None, producer, b"a")
        assert polled(consumer).headers() is None
    finally:
        TxnStoreInstrumentor().uninstrument()


@pytest.mark.slow
def test_without_the_package_the_import_names_the_extra():
    program = "import sys; sys.modules['opentelemetry'] = None; import txnstore.observability.tracing"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: tracing needs the package opentelemetry-api: pip install 'txnstore[opentelemetry]'"
    )
