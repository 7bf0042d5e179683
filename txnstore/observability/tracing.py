"""OpenTelemetry spans of the clients: sent with records as W3C headers, and found again where they are processed.

from txnstore.observability.tracing import TxnStoreInstrumentor, process

TxnStoreInstrumentor().instrument()
for message in consumer:
    with process(message):
        ...
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from txnstore.clients.aio.calls import AsyncCalls
from txnstore.clients.aio.consumer import AIOConsumer
from txnstore.clients.aio.producer import AIOProducer
from txnstore.clients.consumer.consumer import Consumer
from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.model.message import Message
from txnstore.clients.model.metadata import VERSION
from txnstore.clients.producer.producer import Producer
from txnstore.observability.wrapping import Onlooker, around_reading, aside
from txnstore.outbox.outbox import Outbox

try:
    from opentelemetry import context, propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.propagators.textmap import Getter, Setter, TextMapPropagator
    from opentelemetry.trace import (
        INVALID_SPAN,
        Link,
        Span,
        SpanContext,
        SpanKind,
        Status,
        StatusCode,
        Tracer,
        TracerProvider,
    )
except ImportError:
    raise ModuleNotFoundError(
        "tracing needs the package opentelemetry-api: pip install 'txnstore[opentelemetry]'", name="opentelemetry"
    ) from None

AnyProducer = TypeVar("AnyProducer", bound=Producer | AIOProducer)
AnyConsumer = TypeVar("AnyConsumer", bound=Consumer | AIOConsumer)
Headers = list[tuple[str, Any]]

#: The value of `messaging.system`, for systems to which the conventions give no name.
SYSTEM: Final = "txnstore"
#: How many links a span has at most: as many as the SDK keeps by default.
LINKS_MAX: Final = 128
#: The header of what applications hand on beside the trace.
BAGGAGE: Final = "baggage"
#: How much of a key an attribute holds.
KEY_LENGTH_MAX: Final = 120
_PAIR: Final = 2


class _HeadersSetter(Setter[Headers]):
    def set(self, carrier: Headers, key: str, value: str) -> None:
        carrier.append((key, value.encode()))


class _HeadersGetter(Getter[Sequence[tuple[str, Any]]]):
    def get(self, carrier: Sequence[tuple[str, Any]], key: str) -> list[str] | None:
        if key == BAGGAGE:
            # Nothing is made of it, and one that cannot be read would stand in the log, as somebody has written it.
            return None
        found = [_text(value) for name, value in carrier if _text(name) == key and value is not None]
        # As in Kafka, what was written last counts.
        return found[-1:] or None

    def keys(self, carrier: Sequence[tuple[str, Any]]) -> list[str]:
        return [_text(name) for name, _ in carrier]


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


_SETTER: Final = _HeadersSetter()
_GETTER: Final = _HeadersGetter()


@dataclass(frozen=True, slots=True)
class _Tracing:
    """Where spans go, and how their context travels."""

    tracer: Tracer
    propagator: TextMapPropagator

    @classmethod
    def of(cls, tracer_provider: TracerProvider | None, propagator: TextMapPropagator | None) -> _Tracing:
        tracer = trace.get_tracer("txnstore", VERSION, tracer_provider)
        return cls(tracer, propagator or propagate.get_global_textmap())

    def creation_context(self, message: Message) -> SpanContext | None:
        """Return the context that the message came with."""
        return self.context_in(message.headers() or ())

    def context_in(self, headers: Sequence[tuple[str, Any]]) -> SpanContext | None:
        found = trace.get_current_span(self.propagator.extract(headers, Context(), _GETTER)).get_span_context()
        return found if found.is_valid else None


class TxnStoreInstrumentor:
    """Makes spans of what clients do, of all in this process or of single ones; shared by all its instances.

    Without it the clients' methods are the classes' own, and nothing of OpenTelemetry is imported.  Spans follow the
    conventions for messaging: `send` (PRODUCER) until the record is delivered, `poll` and `consume` (CONSUMER) with a
    link to each record's `send`, and, as CLIENT, the commits of consumers and the commits and aborts of transactions.
    """

    def instrument(
        self, *, tracer_provider: TracerProvider | None = None, propagator: TextMapPropagator | None = None
    ) -> None:
        """Make spans of every client in this process, outboxes too, also of those that are there already.

        Args:
            tracer_provider: where they go; by default to the global provider.
            propagator: how their context is written into headers; by default as the global one does, W3C's
                `traceparent` and `tracestate`.
        """
        _clients.everyone = _Tracing.of(tracer_provider, propagator)
        _clients.look()

    def uninstrument(self) -> None:
        """Make no spans any more, of any client."""
        _clients.everyone = None
        _clients.single.clear()
        _clients.go()

    def instrument_producer(self, producer: AnyProducer, tracer_provider: TracerProvider | None = None) -> AnyProducer:
        """Make spans of what this producer does, which may be one for asyncio; return it.

        Raises:
            TypeError: it is no producer of txnstore.
        """
        _clients.single[_watched(producer, Producer)] = _Tracing.of(tracer_provider, None)
        _clients.look()
        return producer

    def instrument_consumer(self, consumer: AnyConsumer, tracer_provider: TracerProvider | None = None) -> AnyConsumer:
        """Make spans of what this consumer does, which may be one for asyncio; return it.

        Raises:
            TypeError: it is no consumer of txnstore.
        """
        _clients.single[_watched(consumer, Consumer)] = _Tracing.of(tracer_provider, None)
        _clients.look()
        return consumer

    def uninstrument_producer(self, producer: AnyProducer) -> AnyProducer:
        """Make no spans of what this producer does, unless all clients are watched; return it."""
        _clients.single.pop(_watched(producer, Producer), None)
        return producer

    def uninstrument_consumer(self, consumer: AnyConsumer) -> AnyConsumer:
        """Make no spans of what this consumer does, unless all clients are watched; return it."""
        _clients.single.pop(_watched(consumer, Consumer), None)
        return consumer


def _watched(client: object, kind: type[Producer | Consumer]) -> Producer | Consumer:
    """Return whose calls pass by: of a client for asyncio it is the blocking one that it calls."""
    if isinstance(client, AIOProducer):
        client = client._producer
    elif isinstance(client, AIOConsumer):
        client = client._consumer
    if not isinstance(client, kind):
        raise TypeError(f"expected a {kind.__name__} of txnstore, not {type(client).__name__}")
    return client


@contextmanager
def process(
    messages: Message | Sequence[Message],
    *,
    tracer_provider: TracerProvider | None = None,
    propagator: TextMapPropagator | None = None,
) -> Iterator[Span]:
    """Make a span, the current one in the block, of the processing of a message or of several together.

    The span of one message goes on with the trace that the message came with; that of several is in the current
    trace.  It has a link to each message's `send`.  An exception of the block is recorded, and goes on.

    Args:
        messages: what is processed.
        tracer_provider: where the span goes; by default to the global provider.
        propagator: how contexts are read from headers; by default as the global one does.
    """
    several = (messages,) if isinstance(messages, Message) else tuple(messages)
    span: Span = INVALID_SPAN
    with aside:
        span = _start_process(_Tracing.of(tracer_provider, propagator), messages, several)
    try:
        with trace.use_span(span):
            yield span
    except Exception as error:
        with aside:
            span.set_attribute("error.type", _error_type(error))
        raise
    finally:
        with aside:
            span.end()


def _start_process(tracing: _Tracing, messages: Message | Sequence[Message], several: Sequence[Message]) -> Span:
    parent: Context | None = None
    links = _links_to(tracing, several)
    if isinstance(messages, Message) and links:
        current = trace.get_current_span().get_span_context()
        if current.is_valid and current.trace_id != links[0].context.trace_id:
            # Neither of the two traces is to lose the other.
            links.append(Link(current))
        parent = trace.set_span_in_context(trace.NonRecordingSpan(links[0].context))
    attributes = _attributes("process", "process", _topic_of(several)) | _attributes_of_messages(several)
    name = _span_name("process", _topic_of(several))
    return tracing.tracer.start_span(name, parent, kind=SpanKind.CONSUMER, attributes=attributes, links=links)


# --- what passes by -------------------------------------------------------------------------------------------------


class _Clients:
    """Which clients are watched, and what is made of their calls."""

    def __init__(self) -> None:
        self.everyone: _Tracing | None = None
        self.single: weakref.WeakKeyDictionary[Any, _Tracing] = weakref.WeakKeyDictionary()
        #: Of the producers with an open transaction: what was sent in it.
        self._sent: weakref.WeakKeyDictionary[Producer, list[SpanContext]] = weakref.WeakKeyDictionary()
        self._onlooker: Onlooker | None = None

    def look(self) -> None:
        """Look at the clients' methods."""
        if self._onlooker is not None:
            return
        self._onlooker = Onlooker()
        for owner, name, around in (
            (Producer, "produce", self._around_produce),
            (Outbox, "produce", self._around_outbox),
            (Outbox, "produce_all", self._around_outbox_all),
            (Producer, "commit_transaction", partial(self._around_end, "commit")),
            (Producer, "commit_transaction_async", self._around_commit_async),
            (Producer, "abort_transaction", partial(self._around_end, "abort")),
            (Consumer, "poll", around_reading(partial(self._received, "poll"))),
            (Consumer, "consume", around_reading(partial(self._received, "consume"))),
            (Consumer, "consume_transaction", around_reading(partial(self._received, "consume_transaction"))),
            (Consumer, "commit", self._around_consumer_commit),
            (AsyncCalls, "run", _in_the_callers_context),
        ):
            self._onlooker.look_at(owner, name, around)

    def go(self) -> None:
        """Look no more."""
        if self._onlooker is not None:
            self._onlooker.go()
            self._onlooker = None
        self._sent.clear()

    def _tracing_of(self, client: Any) -> _Tracing | None:
        with aside:
            return self.single.get(client, self.everyone)
        return None

    def _around_produce(  # noqa: PLR0917 - the signature is Kafka's
        self,
        original: Callable[..., None],
        producer: Producer,
        topic: str,
        value: Any = None,
        key: Any = None,
        partition: int = -1,
        callback: Any = None,
        on_delivery: Any = None,
        timestamp: int = 0,
        headers: Any = None,
    ) -> None:
        tracing = self._tracing_of(producer)
        own = None if tracing is None else _copied(headers)
        if tracing is None or own is None or not isinstance(topic, str):
            # What is not watched, or will be refused.
            original(producer, topic, value, key, partition, callback, on_delivery, timestamp, headers)
            return
        span, headers = _start_send(tracing, producer, topic, value=value, key=key, headers=headers, own=own)
        reported = None
        with aside:
            reported = _reported(producer, span, callback if callback is not None else on_delivery)
        try:
            if reported is None:
                original(producer, topic, value, key, partition, callback, on_delivery, timestamp, headers)
            else:
                original(producer, topic, value, key, partition, reported, None, timestamp, headers)
        except BaseException as error:
            _end(span, error)
            raise
        if reported is None:
            # Nobody is told of the delivery: a callback of ours would let the record wait for a poll.
            _end(span)
        with aside:
            if producer._transactions is not None and span.get_span_context().is_valid:
                sent = self._sent.setdefault(producer, [])
                if len(sent) < LINKS_MAX:
                    sent.append(span.get_span_context())

    def _around_outbox(  # noqa: PLR0917 - the signature of `Outbox.produce`
        self,
        original: Callable[..., None],
        outbox: Outbox,
        connection: Any,
        topic: str,
        value: Any = None,
        key: Any = None,
        partition: int | None = None,
        headers: Any = None,
        timestamp: int | None = None,
    ) -> None:
        tracing = self._tracing_of(outbox)
        own = None if tracing is None else _copied(headers)
        if tracing is None or own is None or not isinstance(topic, str):
            original(outbox, connection, topic, value, key, partition, headers, timestamp)
            return
        span, headers = _start_send(tracing, outbox, topic, value=value, key=key, headers=headers, own=own)
        try:
            original(outbox, connection, topic, value, key, partition, headers, timestamp)
        except BaseException as error:
            _end(span, error)
            raise
        _end(span)

    def _around_outbox_all(
        self, original: Callable[..., int], outbox: Outbox, connection: Any, records: Iterable[Any]
    ) -> int:
        tracing = self._tracing_of(outbox)
        if tracing is None:
            return original(outbox, connection, records)
        spans: list[Span] = []
        try:
            count = original(outbox, connection, _each_sent(tracing, outbox, records, spans))
        except BaseException as error:
            for span in spans:
                _end(span, error)
            raise
        for span in spans:
            _end(span)
        return count

    def _around_end(
        self, name: str, original: Callable[..., None], producer: Producer, *rest: Any, **keywords: Any
    ) -> None:
        tracing = self._tracing_of(producer)
        if tracing is None:
            original(producer, *rest, **keywords)
            return
        span = self._start_end(tracing, producer, name)
        try:
            # The callbacks that are served meanwhile belong to what the application does.
            original(producer, *rest, **keywords)
        except BaseException as error:
            _end(span, error)
            raise
        self._ended(span, producer, "committed" if name == "commit" else "aborted")

    def _around_commit_async(self, original: Callable[..., Future[None]], producer: Producer) -> Future[None]:
        tracing = self._tracing_of(producer)
        if tracing is None:
            return original(producer)
        span = self._start_end(tracing, producer, "commit")
        try:
            future = original(producer)
        except BaseException as error:
            _end(span, error)
            raise
        with aside:
            self._sent.pop(producer, None)

        def end(done: Future[None]) -> None:
            with aside:
                error = CancelledError() if done.cancelled() else done.exception()
                if error is None:
                    span.set_attribute("txnstore.transaction.outcome", "committed")
                _end(span, error)

        future.add_done_callback(end)
        return future

    def _start_end(self, tracing: _Tracing, producer: Producer, name: str) -> Span:
        with aside:
            attributes = {
                "messaging.system": SYSTEM,
                "messaging.operation.name": name,
                **_attributes_of_client(producer),
            }
            if producer._transactions is not None:
                attributes["txnstore.transactional_id"] = producer._transactions.transactional_id
            links = [Link(sent) for sent in self._sent.get(producer, ())]
            return tracing.tracer.start_span(name, kind=SpanKind.CLIENT, attributes=attributes, links=links)
        return INVALID_SPAN

    def _ended(self, span: Span, producer: Producer, outcome: str) -> None:
        """Tell of a transaction that has ended so, whatever becomes of what is told."""
        with aside:
            self._sent.pop(producer, None)
            span.set_attribute("txnstore.transaction.outcome", outcome)
        _end(span)

    def _received(self, name: str, consumer: Consumer, messages: Sequence[Message], began_ns: int) -> None:
        """Make a span of a call that has handed out records; of one that has not, there is nothing to tell."""
        tracing = self._tracing_of(consumer)
        records = [message for message in messages if message.error() is None]
        if tracing is None or not records:
            return
        topic = _topic_of(records)
        attributes = _attributes(name, "receive", topic) | _attributes_of_messages(records)
        span = tracing.tracer.start_span(
            _span_name(name, topic),
            kind=SpanKind.CONSUMER,
            attributes=attributes | _attributes_of_client(consumer),
            links=_links_to(tracing, records),
            start_time=began_ns,
        )
        span.end()

    def _around_consumer_commit(
        self, original: Callable[..., Any], consumer: Consumer, *rest: Any, **keywords: Any
    ) -> Any:
        tracing = self._tracing_of(consumer)
        if tracing is None:
            return original(consumer, *rest, **keywords)
        span: Span = INVALID_SPAN
        with aside:
            attributes = _attributes("commit", "settle", None) | _attributes_of_client(consumer)
            span = tracing.tracer.start_span("commit", kind=SpanKind.CLIENT, attributes=attributes)
        try:
            answer = original(consumer, *rest, **keywords)
        except BaseException as error:
            _end(span, error)
            raise
        _end(span)
        return answer


_clients: Final = _Clients()


async def _in_the_callers_context(
    original: Callable[..., Any], calls: AsyncCalls, work: Callable[..., Any], *rest: Any, **keywords: Any
) -> Any:
    """Let what an asynchronous client does in a thread belong to the trace of the coroutine that has asked for it."""
    current = context.get_current()

    def in_context(*arguments: Any, **named: Any) -> Any:
        token = None
        with aside:
            token = context.attach(current)
        try:
            return work(*arguments, **named)
        finally:
            with aside:
                if token is not None:
                    context.detach(token)

    return await original(calls, in_context, *rest, **keywords)


def _start_send(
    tracing: _Tracing, client: Producer | Outbox, topic: str, *, value: Any, key: Any, headers: Any, own: Headers
) -> tuple[Span, Any]:
    """Begin the span of a record; return it, and its headers with its context: `own` is a copy of `headers`."""
    span: Span = INVALID_SPAN
    with aside:
        # A context that the application gives the record is its creation context, and stays the only one.
        given = tracing.context_in(own)
        attributes = _attributes("send", "send", topic) | _attributes_of_client(client) | _body(value, key)
        span = tracing.tracer.start_span(
            _span_name("send", topic),
            kind=SpanKind.PRODUCER,
            attributes=attributes,
            links=[Link(given)] if given is not None else (),
        )
        if given is None:
            added: Headers = []
            tracing.propagator.inject(added, trace.set_span_in_context(span), _SETTER)
            headers = own + added or None
    return span, headers


def _each_sent(tracing: _Tracing, outbox: Outbox, records: Iterable[Any], spans: list[Span]) -> Iterator[Any]:
    """Yield the records with the contexts of their spans, which are added to `spans`; what will be refused as it is."""
    for record in records:
        topic = record.get("topic") if isinstance(record, Mapping) else None
        own = _copied(record.get("headers")) if isinstance(topic, str) else None
        if topic is None or own is None:
            yield record
            continue
        span, headers = _start_send(
            tracing,
            outbox,
            topic,
            value=record.get("value"),
            key=record.get("key"),
            headers=record.get("headers"),
            own=own,
        )
        spans.append(span)
        yield {**record, "headers": headers}


def _copied(headers: Any) -> Headers | None:
    """Return the application's headers as pairs, to be added to; None if they will be refused."""
    if headers is None:
        return []
    if isinstance(headers, Mapping):
        return list(headers.items())
    if isinstance(headers, list) and all(isinstance(pair, tuple | list) and len(pair) == _PAIR for pair in headers):
        return [(name, value) for name, value in headers]
    return None


def _reported(producer: Producer, span: Span, callback: Any) -> Callable[..., Any] | None:
    """Return a callback that ends the span as well; None if none is called, or nobody would see it."""
    if callback is None:
        callback = producer._callbacks["on_delivery"]
    hears = callable(callback) and not producer._configuration["delivery.report.only.error"]
    if not hears or not span.is_recording():
        return None

    def report(error: KafkaError | None, message: Message) -> Any:
        try:
            with aside:
                if error is None:
                    span.set_attributes(_place_of(message))
            _end(span, None if error is None else KafkaException(error))
        finally:
            # Whatever keeps the span from its end: this report comes once.
            answer = callback(error, message)
        return answer

    return report


# --- attributes -------------------------------------------------------------------------------------------------------


def _span_name(operation: str, topic: str | None) -> str:
    return operation if topic is None else f"{operation} {topic}"


def _attributes(name: str, kind: str, topic: str | None) -> dict[str, Any]:
    attributes = {"messaging.system": SYSTEM, "messaging.operation.name": name, "messaging.operation.type": kind}
    return attributes if topic is None else {**attributes, "messaging.destination.name": topic}


def _attributes_of_client(client: Producer | Consumer | Outbox) -> dict[str, Any]:
    if not isinstance(client, Consumer):
        return {"messaging.client.id": client._configuration["client.id"]}
    options = client._core.options
    return {"messaging.client.id": options.client_id, "messaging.consumer.group.name": options.group_id}


def _attributes_of_messages(messages: Sequence[Message]) -> dict[str, Any]:
    if len(messages) != 1:
        return {"messaging.batch.message_count": len(messages)}
    (message,) = messages
    return {**_place_of(message), **_body(message.value(), message.key())}


def _place_of(message: Message) -> dict[str, Any]:
    place: dict[str, Any] = {}
    partition, offset = message.partition(), message.offset()
    if partition is not None:
        place["messaging.destination.partition.id"] = str(partition)
    if offset is not None and offset >= 0:
        place["messaging.kafka.offset"] = offset
    return place


def _body(value: Any, key: Any) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if value is None:
        body["messaging.kafka.message.tombstone"] = True
    elif isinstance(value, bytes):
        body["messaging.message.body.size"] = len(value)
    elif isinstance(value, str):
        body["messaging.message.body.size"] = len(value.encode("utf-8", "surrogatepass"))
    if isinstance(key, str | bytes):
        body["messaging.kafka.message.key"] = _text(key)[:KEY_LENGTH_MAX]
    return body


def _topic_of(messages: Sequence[Message]) -> str | None:
    """Return the topic of the messages if they have one together."""
    topics = {message.topic() for message in messages}
    return topics.pop() if len(topics) == 1 else None


def _links_to(tracing: _Tracing, messages: Sequence[Message]) -> list[Link]:
    links = []
    for message in messages[:LINKS_MAX]:
        found = None
        with aside:
            found = tracing.creation_context(message)
        if found is not None:
            links.append(Link(found, _place_of(message) if len(messages) > 1 else None))
    return links


def _end(span: Span, error: BaseException | None = None) -> None:
    """End the span, and let it say what went wrong, if anything did."""
    with aside:
        if error is not None:
            span.record_exception(error)
            span.set_attribute("error.type", _error_type(error))
            span.set_status(Status(StatusCode.ERROR, str(error)))
    with aside:
        span.end()


def _error_type(error: BaseException) -> str:
    if isinstance(error, KafkaException) and error.args and isinstance(error.args[0], KafkaError):
        return error.args[0].name()
    return type(error).__qualname__
