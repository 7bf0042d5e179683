"""The consumers for asyncio: the methods of `Consumer` as coroutines, and deserializers."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, Final, Generic, ParamSpec, Self, TypeVar

from txnstore.clients.aio.calls import AsyncCalls, forwarding
from txnstore.clients.connection import OfOneProcess
from txnstore.clients.consumer.consumer import Consumer
from txnstore.clients.consumer.whole_transactions import MESSAGES_MAX, ConsumedTransaction
from txnstore.clients.model.message import Message
from txnstore.clients.model.serializers import (
    ConsumeError,
    Converter,
    Key,
    Value,
    close_converters_async,
    deserialized,
    finished_async,
    offer_cluster_id_async,
    take_converters_async,
)
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.deadline import Deadline, check_timeout

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

#: How long a call pauses that may not read on until another one has returned what it holds.
_PAUSE_SECONDS: Final = 0.02

#: A long wait is cut into pieces: between them other calls have their turn, and after a cancelled one the next begins.
_SLICE_SECONDS: Final = 0.2

_CLOSED_TEXT: Final = "Consumer closed"

_CONSUME_MAX: Final = 1_000_000


class _ReturningConsumer(Consumer):
    """A consumer that takes back what its caller did not wait for; until that has it, nothing of it is committed."""

    def __init__(self, configuration: dict[str, Any]) -> None:
        super().__init__(configuration)
        self._core.withholds_what_was_read = True

    def consume_with(self, held_count: int, count: int, timeout: float) -> list[Message]:
        """Consume while so many calls hold what they have read: no partition is taken away before they return it."""
        self._core.holds_some = held_count > 0
        return self.consume(count, timeout)

    @property
    def is_held_up(self) -> bool:
        """Whether those calls are to return."""
        return self._core.is_first_returned()

    def change(self, held: list[list[Message]], work: Callable[[], None]) -> None:
        """Change the assignment; what is held of partitions that go is their next reader's, and is dropped."""
        subscription = self._core.subscription
        with self._core.arrived:
            before = list(subscription)
            try:
                work()
            finally:
                gone = {(it.topic, it.number) for it in before if subscription.find(it.topic, it.number) is not it}
                for messages in list(held):
                    messages[:] = [it for it in messages if (it.topic(), it.partition()) not in gone]

    def let_go(self, unreturned: list[Message]) -> None:
        """Count as read what was handed out, up to what is unreturned: the caller has it."""
        self._core.let_go(unreturned)

    def give_back(self, messages: list[Message]) -> None:
        """Hand these messages out again; the group's offsets do not count them as read."""
        self._core.give_back(messages)


class AIOConsumer(OfOneProcess):
    """A `Consumer` whose methods are coroutines; made while a loop runs, and used on that loop.

    Calls are made one after the other, in threads.  Callbacks may be coroutine functions; they run on the loop, get
    this object as their consumer, and may await its methods.  Cancelling `poll` or `consume`, as `asyncio.wait_for`
    does, loses no message: the next call returns it.

    Args:
        consumer_conf: the configuration of `Consumer`; it is not changed.
        max_workers: how many threads there may be.
        executor: where to run the calls instead; it stays the caller's.  One of your own has to mark a future as
            running (`set_running_or_notify_cancel`) before its call: a cancelled call would go on beside the next.

    Raises:
        ValueError: `max_workers` is below one, or there is no `group.id`.
        RuntimeError: no loop is running.
        KafkaException: as of `Consumer`.
    """

    def __init__(self, consumer_conf: dict[str, Any], max_workers: int = 100, executor: Executor | None = None) -> None:
        self._calls = AsyncCalls(max_workers, executor, name="txnstore-aio-consumer", one_at_a_time=True)
        self._consumer = _ReturningConsumer(self._calls.with_callbacks(consumer_conf, "on_commit"))
        self._taking = threading.Lock()
        #: What a thread has read and has not reached its call: it was cancelled, or is about to get it.
        self._taken: list[Message] = []
        #: What calls had read that were cancelled afterwards, to be given back by the next one.
        self._left: list[Message] = []
        #: What calls have read and not returned: they wait for more, or for a deserializer.
        self._held: list[list[Message]] = []
        #: Whether something has reached the caller that does not count as read yet.
        self._lets_go = False

    @property
    def executor(self) -> Executor:
        """Where the calls run."""
        return self._calls.executor

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def poll(self, timeout: float = -1) -> Message | None:
        """Return the next message or event, or None if none came within `timeout` seconds; below zero: for ever.

        Within a callback it also returns None where a rebalance waits for what only the callback's end lets go of.
        """
        messages = await self._read(1, timeout)
        return messages[0] if messages else None

    async def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        """Return up to so many messages and events: as many as came in time; arguments as of `Consumer.consume`.

        Raises:
            ValueError: `num_messages` is not from 0 to 1000000.
            RuntimeError: the consumer has been closed.
        """
        if not 0 <= num_messages <= _CONSUME_MAX:
            raise ValueError("num_messages must be between 0 and 1000000 (1M)")
        return await self._read(num_messages, timeout)

    async def consume_transaction(
        self, timeout: float = -1, *, messages_max: int = MESSAGES_MAX
    ) -> ConsumedTransaction | None:
        """Return the next committed transaction, or None if none came in time; as `Consumer.consume_transaction`."""
        deadline = Deadline(check_timeout(timeout))
        while True:
            left_seconds = deadline.left_seconds()
            found = await self._call(self._read_transaction, min(left_seconds, _SLICE_SECONDS), messages_max)
            self._take()
            if found is not None or left_seconds <= _SLICE_SECONDS:
                self._let_go()
                return found

    async def subscribe(
        self,
        topics: list[str],
        on_assign: Callable[..., Any] | None = None,
        on_revoke: Callable[..., Any] | None = None,
        on_lost: Callable[..., Any] | None = None,
    ) -> None:
        """Subscribe as `Consumer.subscribe` does; the callbacks get this object and the partitions."""
        callbacks = {"on_assign": on_assign, "on_revoke": on_revoke, "on_lost": on_lost}
        given = {name: self._rebalance_callback(function) for name, function in callbacks.items() if function}
        await self._call(self._consumer.subscribe, topics, **given)

    unsubscribe = forwarding("_consumer", Consumer.unsubscribe)

    async def assign(self, partitions: list[TopicPartition]) -> None:
        """As `Consumer.assign`."""
        await self._change(self._consumer.assign, partitions)

    async def unassign(self) -> None:
        """As `Consumer.unassign`."""
        await self._change(self._consumer.unassign)

    incremental_assign = forwarding("_consumer", Consumer.incremental_assign)

    async def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        """As `Consumer.incremental_unassign`."""
        await self._change(self._consumer.incremental_unassign, partitions)

    assignment = forwarding("_consumer", Consumer.assignment)

    async def commit(
        self,
        message: Message | None = None,
        offsets: list[TopicPartition] | None = None,
        asynchronous: bool = True,
        *,
        connection: Any = None,
    ) -> list[TopicPartition] | None:
        """As `Consumer.commit`; the connection may also be an `AsyncConnection` or `AsyncSession` of SQLAlchemy.

        Raises:
            KafkaException: as of `Consumer.commit`.
            RuntimeError: the consumer has been closed.
        """
        commit = functools.partial(self._consumer.commit, message, offsets, asynchronous)
        if connection is None:
            return await self._call(commit)
        if not hasattr(connection, "run_sync"):
            return await self._call(functools.partial(commit, connection=connection))
        self._calls.check(_CLOSED_TEXT)
        if self._lets_go:
            await self._call(lambda: None)
        # Its statements are only understood on the loop's own thread.
        answered: list[TopicPartition] | None = await connection.run_sync(functools.partial(self._commit_on, commit))
        return answered

    store_offsets = forwarding("_consumer", Consumer.store_offsets)
    committed = forwarding("_consumer", Consumer.committed)
    position = forwarding("_consumer", Consumer.position)
    seek = forwarding("_consumer", Consumer.seek)
    pause = forwarding("_consumer", Consumer.pause)
    resume = forwarding("_consumer", Consumer.resume)
    get_watermark_offsets = forwarding("_consumer", Consumer.get_watermark_offsets)
    offsets_for_times = forwarding("_consumer", Consumer.offsets_for_times)
    consumer_group_metadata = forwarding("_consumer", Consumer.consumer_group_metadata)
    memberid = forwarding("_consumer", Consumer.memberid)
    list_topics = forwarding("_consumer", Consumer.list_topics)
    cluster_id = forwarding("_consumer", Consumer.cluster_id)
    set_sasl_credentials = forwarding("_consumer", Consumer.set_sasl_credentials)

    async def close(self) -> None:
        """Leave the group, as `Consumer.close` does, and end the threads; again: wait until that is done.

        It goes on even if the call is cancelled.  Within a callback it may be called, too.  The callbacks that it waits
        for may use the consumer: on_revoke may commit.

        Raises:
            RuntimeError: the consumer belongs to another loop, which is not closed.
            Exception: what a callback raised; the consumer is closed nevertheless.
        """
        await self._calls.close_once(self._close)

    async def _close(self) -> None:
        try:
            await self._calls.run(self._in_turn, self._consumer.close)
        finally:
            await self._calls.close()

    async def _call(
        self, work: Callable[_Parameters, _Result], *arguments: _Parameters.args, **keywords: _Parameters.kwargs
    ) -> _Result:
        self._calls.check(_CLOSED_TEXT)
        return await self._calls.run(self._in_turn, functools.partial(work, *arguments, **keywords))

    async def _change(self, work: Callable[..., None], *arguments: Any) -> None:
        await self._call(self._consumer.change, self._held, functools.partial(work, *arguments))

    async def _read(self, count: int, timeout: float) -> list[Message]:
        """Return up to `count` messages within the timeout, asked for in pieces of it."""
        deadline = Deadline(check_timeout(timeout))
        read: list[Message] = []
        failure, is_any = None, True
        try:
            # Once more if all of it was dropped meanwhile, with its partitions.
            while is_any and not read and failure is None:
                await self._gather(read, count, deadline)
                is_any = bool(read)
                failure = await self._convert(read)
        except BaseException:
            with self._taking:
                self._left += read
            raise
        finally:
            self._held[:] = (held for held in self._held if held is not read)
        self._let_go()
        if failure is not None:
            raise failure
        return read

    async def _gather(self, read: list[Message], count: int, deadline: Deadline) -> None:
        """Add what comes until there are `count`, the time is up, or it is to be returned; it is held meanwhile."""
        while True:
            left_seconds = deadline.left_seconds()
            await self._call(self._read_some, count - len(read), min(left_seconds, _SLICE_SECONDS))
            read += self._take()
            if read and not any(held is read for held in self._held):
                self._held.append(read)
            if len(read) == count or left_seconds <= _SLICE_SECONDS:
                return
            if self._consumer.is_held_up:
                # A call within a callback has nothing to wait for then: what is held returns only after the callback.
                if read or self._calls.is_in_callback:
                    return
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _convert(self, messages: list[Message]) -> Exception | None:
        """Make of messages what the caller gets; return the error that it gets in the place of a single one."""
        return None

    def _leave(self, messages: list[Message], count: int) -> None:
        """Leave only so many to the caller; the next call gives back the others."""
        with self._taking:
            self._left += messages[count:]
        del messages[count:]

    def _let_go(self) -> None:
        """Count as read what was handed out: at once, or before the next call if one is under way, which may read."""
        self._lets_go = True
        if not self._calls.is_busy and not self._taken:
            self._settle()

    def _settle(self) -> None:
        """Count as read what was, up to what calls of other tasks hold, unless one has left some; no thread reads."""
        # In this order: what is left was held before.
        held = [message for messages in list(self._held) for message in list(messages)]
        if self._lets_go and not self._left:
            self._lets_go = bool(held)
            self._consumer.let_go(held)

    def _read_some(self, count: int, timeout: float) -> None:
        messages = self._consumer.consume_with(len(self._held), count, timeout)
        with self._taking:
            self._taken += messages

    def _read_transaction(self, timeout: float, messages_max: int) -> ConsumedTransaction | None:
        found = self._consumer.consume_transaction(timeout, messages_max=messages_max)
        if found is not None:
            with self._taking:
                self._taken += found.messages
        return found

    def _take(self) -> list[Message]:
        with self._taking:
            taken, self._taken = self._taken, []
        return taken

    def _in_turn(self, work: Callable[[], _Result]) -> _Result:
        """Call the consumer, which is told first what was read; used only by commits on a connection."""
        self._give_back()
        self._settle()
        return work()

    def _give_back(self) -> None:
        """Give back what cancelled calls have read, as if it had never been read."""
        with self._taking:
            taken, self._left, self._taken = [*self._left, *self._taken], [], []
        if taken:
            self._consumer.give_back(taken)

    def _commit_on(self, commit: Callable[..., _Result], connection: object) -> _Result:
        self._give_back()
        return commit(connection=connection)

    def _rebalance_callback(self, function: Callable[..., Any]) -> Callable[..., Any] | None:
        return self._calls.callback(lambda _, partitions: function(self, partitions))


class AsyncDeserializingConsumer(AIOConsumer, Generic[Key, Value]):
    """An `AIOConsumer` of objects; made by `await AsyncDeserializingConsumer(conf)`.

    Beside the keys of `Consumer` the configuration takes `key.deserializer` and `value.deserializer`, asynchronous or
    not, or in their place `key.deserializer.builder` and `value.deserializer.builder`.  What builders have made is
    closed with the consumer.  A deserializer that is not asynchronous runs on the loop.

    Args:
        conf: the configuration; it is not changed.
        kwargs: as of `AIOConsumer`.

    Raises:
        TypeError: the configuration is not a dictionary, or a deserializer is not callable.
        ValueError: there is no `group.id`, or both a deserializer and its builder are given.
        KafkaException: as of `Consumer`.
    """

    _deserializers: tuple[Converter | None, ...]
    _owned_deserializers: list[Converter]

    def __new__(cls, conf: dict[str, Any], **kwargs: Any) -> Coroutine[Any, Any, Self]:  # type: ignore[misc]  # awaited
        """Return a coroutine that makes the consumer: builders may be asynchronous."""
        return cls._make(conf, kwargs)

    @classmethod
    async def _make(cls, conf: dict[str, Any], keywords: dict[str, Any]) -> Self:
        self = object.__new__(cls)
        async with take_converters_async(conf, "key.deserializer", "value.deserializer") as taken:
            AIOConsumer.__init__(self, taken.rest, **keywords)
        self._deserializers = taken.converters
        self._owned_deserializers = taken.owned
        offer_cluster_id_async(self.cluster_id, *taken.converters)
        return self

    async def _close(self) -> None:
        # Here, for it goes on though close() is cancelled.
        try:
            await super()._close()
        finally:
            owned, self._owned_deserializers = self._owned_deserializers, []
            await close_converters_async(owned)

    async def poll(self, timeout: float = -1) -> Message | None:
        """Return the next message, its key and value deserialized, or None if none came within `timeout` seconds.

        A message that cannot be deserialized has been consumed all the same.  Deserializing takes as long as it takes;
        if the call is cancelled meanwhile, the next one returns the message.

        Raises:
            ConsumeError: the consumer has an event to tell; `kafka_message` is the message that carries it.
            KeyDeserializationError: the key's deserializer raised `exception`; `kafka_message` has the bytes.
            ValueDeserializationError: the value's deserializer raised `exception`; `kafka_message` has the bytes.
            RuntimeError: the consumer has been closed.
        """
        message = await super().poll(timeout)
        error = None if message is None else message.error()
        if error is not None:
            raise ConsumeError(error, kafka_message=message)
        return message

    async def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        """Return up to so many messages, deserialized, and events as they are.

        Those before one that cannot be deserialized are returned without it, and the next call raises its error.  That
        one has been consumed then; what comes behind it is returned by the call after that.

        Raises:
            KeyDeserializationError, ValueDeserializationError: as `poll`, of the first message.
            RuntimeError: the consumer has been closed.
        """
        return await super().consume(num_messages, timeout)

    async def consume_transaction(
        self, timeout: float = -1, *, messages_max: int = MESSAGES_MAX
    ) -> ConsumedTransaction | None:
        """Refuse, as `DeserializingConsumer.consume_transaction` does.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("an AsyncDeserializingConsumer has no consume_transaction(): call poll()")

    async def _convert(self, messages: list[Message]) -> Exception | None:
        for message in list(messages):
            if message.error() is None:
                try:
                    await finished_async(deserialized(self._deserializers, message))
                except ConsumeError as error:
                    place = next((at for at, it in enumerate(messages) if it is message), None)
                    if place is None:
                        # Dropped meanwhile, with its partition.
                        continue
                    # It is the answer if it is the first, and else comes again with what is behind it.
                    self._leave(messages, max(1, place))
                    return None if place else error
        return None
