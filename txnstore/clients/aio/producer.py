"""The producers for asyncio: the methods of `Producer` as coroutines, a future for every message, and serializers."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, Final, Generic, ParamSpec, Self, TypeVar

from txnstore.clients.aio.calls import AsyncCalls, forwarding
from txnstore.clients.connection import OfOneProcess
from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.model.message import Message
from txnstore.clients.model.serializers import (
    Converter,
    Key,
    Value,
    close_converters_async,
    finished_async,
    offer_cluster_id_async,
    serialized,
    take_converters_async,
)
from txnstore.clients.producer.arguments import check_same_writers, writer_ids_of
from txnstore.clients.producer.producer import Producer
from txnstore.deadline import check_timeout

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_logger = logging.getLogger(__name__)

#: How long a thread waits for reports at a time; a report ends the wait.
_SLICE_SECONDS: Final = 0.1


class AIOProducer(OfOneProcess):
    """A `Producer` whose methods are coroutines; made while a loop runs, and used on that loop.

    Callbacks of the configuration may be coroutine functions; they run on the loop.  It has no `transaction`, `enlist`,
    `prepare_transaction`, `complete_transaction` or `produce_batch`: these are for `Producer`.

    Args:
        producer_conf: the configuration of `Producer`; it is not changed.
        max_workers: how many threads there may be.
        executor: where to run the calls instead; it stays the caller's.  One of your own has to mark a future as
            running (`set_running_or_notify_cancel`) before its call: a cancelled call would go on beside the next.
        batch_size: taken for confluent-kafka's sake; here `batch.size` and `batch.num.messages` decide.
        buffer_timeout: taken for confluent-kafka's sake; here `linger.ms` decides.

    Raises:
        ValueError: `max_workers` is below one.
        RuntimeError: no loop is running.
        KafkaException: as of `Producer`.
    """

    def __init__(
        self,
        producer_conf: dict[str, Any],
        max_workers: int = 4,
        executor: Executor | None = None,
        batch_size: int = 1000,
        buffer_timeout: float = 1.0,
    ) -> None:
        self._calls = AsyncCalls(max_workers, executor, name="txnstore-aio-producer", one_at_a_time=False)
        configuration = self._calls.with_callbacks(producer_conf, "on_delivery")
        self._on_delivery = configuration.pop("on_delivery", None)
        # Each future waits for its report, the good ones included.
        configuration.pop("delivery.report.only.error", None)
        self._producer = Producer(configuration)
        self._pending: set[asyncio.Future[Message]] = set()
        #: Reports on their way from the threads to the loop.
        self._reports: deque[tuple[asyncio.Future[Message], KafkaError | None, Message]] = deque()
        self._serving: asyncio.Task[None] | None = None
        #: By call: what tells of one that was cancelled and went on, until the same call takes that up.
        self._left: dict[str, Future[BaseException | None]] = {}
        #: The writers that the last commit has named.
        self._writers: Collection[int] | None = None

    @property
    def executor(self) -> Executor:
        """Where the calls run."""
        return self._calls.executor

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def __len__(self) -> int:
        return len(self._producer)

    def __bool__(self) -> bool:
        return True

    async def produce(  # noqa: PLR0917 - as of Producer
        self,
        topic: str,
        value: str | bytes | None = None,
        key: str | bytes | None = None,
        partition: int = -1,
        timestamp: int = 0,
        headers: Any = None,
    ) -> asyncio.Future[Message]:
        """Queue a message and return a future of it as it was delivered; waits while the queue is full.

        The future raises `KafkaException` if the message is not delivered.  Cancelling it does not take the message
        back.

        Args:
            topic: the topic's name.
            value: the value.
            key: the key.
            partition: the partition; -1: the partitioner chooses.
            timestamp: milliseconds since 1970; 0: now.
            headers: a list of pairs or a dictionary.

        Raises:
            RuntimeError: the producer has been closed, or it belongs to another loop; nothing is queued.
            KafkaException: as of `Producer.produce`.
        """
        self._check()
        delivered: asyncio.Future[Message] = self._calls.loop.create_future()
        report = functools.partial(self._report, delivered)
        while True:
            try:
                self._producer.produce(
                    topic, value, key, partition=partition, on_delivery=report, timestamp=timestamp, headers=headers
                )
            except BufferError:
                await self.poll(_SLICE_SECONDS)
                self._check()
            else:
                break
        self._pending.add(delivered)
        if self._serving is None or self._serving.done():
            self._serving = self._calls.loop.create_task(self._serve_reports())
        return delivered

    async def poll(self, timeout: float = 0) -> int:
        """Serve callbacks as `Producer.poll` does, and return how many; `timeout` in seconds."""
        return await self._call(self._producer.poll, timeout)

    async def flush(self, timeout: float = -1) -> int:
        """Wait for all messages as `Producer.flush` does, and return how many are left; `timeout` in seconds."""
        return await self._call(self._producer.flush, timeout)

    async def purge(self, in_queue: bool = True, in_flight: bool = True, blocking: bool = True) -> None:
        """Give up messages as `Producer.purge` does; their futures raise."""
        await self._call(self._producer.purge, in_queue, in_flight, blocking)

    list_topics = forwarding("_producer", Producer.list_topics)
    cluster_id = forwarding("_producer", Producer.cluster_id)

    async def init_transactions(self, timeout: float = -1) -> None:
        """As `Producer.init_transactions`; cancelled, it goes on as `commit_transaction` does."""
        if not await self._take_up("init", timeout):
            await self._resumable("init", self._producer.init_transactions, timeout)

    async def begin_transaction(self) -> None:
        """As `Producer.begin_transaction`."""
        await self._call(self._begin)

    send_offsets_to_transaction = forwarding("_producer", Producer.send_offsets_to_transaction)

    async def commit_transaction(self, timeout: float = -1, *, writers: Collection[int] | None = None) -> None:
        """Deliver what was produced, so that the futures are done, then as `Producer.commit_transaction`.

        Cancelled before it has come to commit, it commits nothing.  Afterwards the commit goes on, and the next
        `commit_transaction` waits for it and returns its answer.

        Raises:
            RuntimeError: the producer has been closed, or it belongs to another loop.
            KafkaException: as of `Producer.commit_transaction`.
        """
        named = None if writers is None else writer_ids_of(writers)
        if "commit" in self._left:
            check_same_writers(named, self._writers)
        if not await self._take_up("commit", timeout):
            await self.flush(timeout)
            self._writers = named
            commit = functools.partial(self._producer.commit_transaction, writers=named)
            await self._resumable("commit", commit, timeout)

    async def commit_transaction_async(self) -> asyncio.Future[None]:
        """As `Producer.commit_transaction_async`; the futures of the messages are done when they are committed."""
        committed = await self._call(self._producer.commit_transaction_async)
        return asyncio.wrap_future(committed, loop=self._calls.loop)

    transaction_token = forwarding("_producer", Producer.transaction_token)

    async def report_writer(self, timeout: float = -1) -> int:
        """Deliver what was produced, so that the futures are done, then as `Producer.report_writer`."""
        await self.flush(timeout)
        return await self._call(self._producer.report_writer, timeout)

    async def abort_transaction(self, timeout: float = -1) -> None:
        """Deliver what was produced, so that the futures are done, then as `Producer.abort_transaction`.

        After a commit that was cancelled and goes on, it waits for that, and aborts only if that has failed.  If it is
        cancelled itself, it goes on as `commit_transaction` does.

        Raises:
            RuntimeError: the producer has been closed, or it belongs to another loop.
            KafkaException: as of `Producer.abort_transaction`; `_STATE`: that commit has committed the transaction.
        """
        has_left_commit = "commit" in self._left
        try:
            is_committed = await self._take_up("commit", timeout)
        except Exception as error:
            is_committed = False
            # One that has failed without an end is the producer's to judge: it refuses while the commit may stand.
            is_fatal = isinstance(error, KafkaException) and error.args[0].fatal()
            if is_fatal or not has_left_commit or "commit" in self._left:
                raise
        if is_committed:
            reason = "the transaction is committed: its commit went on after the call was cancelled"
            raise KafkaException(KafkaError(KafkaError._STATE, reason))
        if not await self._take_up("abort", timeout):
            await self.flush(timeout)
            await self._resumable("abort", self._producer.abort_transaction, timeout)

    set_sasl_credentials = forwarding("_producer", Producer.set_sasl_credentials)

    async def close(self) -> None:
        """Close as `Producer.close` does and end the threads; no future stays pending.  Again: wait until that is done.

        An open transaction is aborted; the futures of what was not delivered raise `KafkaException`.  It goes on even
        if the call is cancelled.  Within a callback it may be called, too, and the callbacks that it waits for may use
        the producer.

        Raises:
            RuntimeError: the producer belongs to another loop, which is not closed.
        """
        await self._calls.close_once(self._close)

    async def _close(self) -> None:
        serving = self._serving
        if serving is not None and not self._calls.is_in_callback and serving.get_loop() is self._calls.loop:
            await asyncio.wait([serving])
        try:
            await self._calls.run(self._producer.close)
        finally:
            self._settle()
            error = KafkaError(KafkaError._DESTROY, "the producer was closed before the message was delivered")
            for delivered in self._pending:
                _finish(delivered, error, None)
            self._pending.clear()
            await self._calls.close()

    def _check(self) -> None:
        self._calls.check("Producer has been closed")

    async def _call(
        self, work: Callable[_Parameters, _Result], *arguments: _Parameters.args, **keywords: _Parameters.kwargs
    ) -> _Result:
        self._check()
        try:
            return await self._calls.run(work, *arguments, **keywords)
        finally:
            self._settle()

    def _begin(self) -> None:
        self._producer.begin_transaction()
        # Here, for this may have been cancelled: what is told of the transaction before is no answer for this one.
        self._left = {}

    async def _resumable(self, name: str, work: Callable[[float], None], timeout: float) -> None:
        """Make a call whose answer is kept if it is cancelled and goes on."""
        told: Future[BaseException | None] = Future()
        # As it is before: a transaction may have begun by the time this is told that it is cancelled.
        left = self._left
        try:
            await self._call(_tell, told, functools.partial(work, timeout))
        except asyncio.CancelledError:
            if not told.cancel():
                left[name] = told
            raise

    async def _take_up(self, name: str, timeout: float) -> bool:
        """Wait for such a call that goes on; return whether it was answered, and raise what it raised."""
        self._check()
        timeout_seconds, left = check_timeout(timeout), self._left
        told = left.get(name)
        if told is None:
            return False
        await asyncio.wait([asyncio.wrap_future(told)], timeout=None if timeout_seconds < 0 else timeout_seconds)
        if not told.done():
            reason = "Timed out waiting for operation to finish, retry call to resume"
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, reason, retriable=True))
        left.pop(name, None)
        error = told.result()
        if isinstance(error, KafkaException) and error.args[0].code() == KafkaError._TIMED_OUT:
            # Its own time was up, which is no answer: made again, it is resumed.
            return False
        if error is not None:
            raise error
        return True

    async def _serve_reports(self) -> None:
        """Serve reports as long as a future waits for its own."""
        while self._pending and not self._calls.is_closed:
            try:
                await self._calls.run(self._producer.poll, _SLICE_SECONDS)
            except Exception:
                # A callback of the configuration has raised: it is nobody's call that could raise it again.
                _logger.exception("a callback of the producer raised", extra={"event": "callback_failed"})
                await asyncio.sleep(_SLICE_SECONDS)
            finally:
                self._settle()

    def _report(self, delivered: asyncio.Future[Message], error: KafkaError | None, message: Message) -> None:
        """Keep a report for the loop; called in the thread that polls."""
        self._reports.append((delivered, error, message))
        if self._on_delivery is not None:
            self._on_delivery(error, message)

    def _settle(self) -> None:
        while self._reports:
            delivered, error, message = self._reports.popleft()
            self._pending.discard(delivered)
            _finish(delivered, error, message)


def _finish(delivered: asyncio.Future[Message], error: KafkaError | None, message: Message | None) -> None:
    if delivered.done() or delivered.get_loop().is_closed():
        return
    if error is not None:
        delivered.set_exception(KafkaException(error))
    elif message is not None:
        delivered.set_result(message)


def _tell(told: Future[BaseException | None], work: Callable[[], None]) -> None:
    """Do it in a thread, unless whoever wanted it is gone, and tell what it raises."""
    if told.set_running_or_notify_cancel():
        try:
            work()
        except BaseException as error:
            told.set_result(error)
            raise
        told.set_result(None)


class AsyncSerializingProducer(AIOProducer, Generic[Key, Value]):
    """An `AIOProducer` of objects; made by `await AsyncSerializingProducer(conf)`.

    Beside the keys of `Producer` the configuration takes `key.serializer` and `value.serializer`, asynchronous or not,
    or in their place `key.serializer.builder` and `value.serializer.builder`.  What builders have made is closed with
    the producer.  A serializer that is not asynchronous runs on the loop.

    Args:
        conf: the configuration; it is not changed.
        kwargs: as of `AIOProducer`.

    Raises:
        TypeError: the configuration is not a dictionary, or a serializer is not callable.
        ValueError: both a serializer and its builder are given.
        KafkaException: as of `Producer`.
    """

    _serializers: tuple[Converter | None, ...]
    _owned_serializers: list[Converter]

    def __new__(cls, conf: dict[str, Any], **kwargs: Any) -> Coroutine[Any, Any, Self]:  # type: ignore[misc]  # awaited
        """Return a coroutine that makes the producer: builders may be asynchronous."""
        return cls._make(conf, kwargs)

    @classmethod
    async def _make(cls, conf: dict[str, Any], keywords: dict[str, Any]) -> Self:
        self = object.__new__(cls)
        async with take_converters_async(conf, "key.serializer", "value.serializer") as taken:
            AIOProducer.__init__(self, taken.rest, **keywords)
        self._serializers = taken.converters
        self._owned_serializers = taken.owned
        offer_cluster_id_async(self.cluster_id, *taken.converters)
        return self

    async def _close(self) -> None:
        # Here, for it goes on though close() is cancelled.
        try:
            await super()._close()
        finally:
            owned, self._owned_serializers = self._owned_serializers, []
            await close_converters_async(owned)

    async def produce(  # type: ignore[override]  # noqa: PLR0917 - confluent-kafka's signature: the key is first here
        self,
        topic: str,
        key: Key | None = None,
        value: Value | None = None,
        partition: int = -1,
        timestamp: int = 0,
        headers: Any = None,
    ) -> asyncio.Future[Message]:
        """Serialize key and value, the key first, and queue the message; the rest is as in `AIOProducer.produce`.

        Raises:
            KeySerializationError: the key's serializer raised `exception`.
            ValueSerializationError: the value's serializer raised `exception`.
            RuntimeError: the producer has been closed, or it belongs to another loop; nothing is queued.
            TypeError: the topic is not text.
            KafkaException: as of `Producer.produce`.
        """
        # Of a closed producer the serializers see nothing.
        self._check()
        steps = serialized(self._serializers, topic, key, value, headers)
        serialized_key, serialized_value = await finished_async(steps)
        return await super().produce(topic, serialized_value, serialized_key, partition, timestamp, headers)
