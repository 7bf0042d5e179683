"""AsyncDeserializingConsumer: what was read is not lost while its deserializer takes its time."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.clients.steps import PATIENCE_SECONDS, create_topic, values
from txnstore import TopicPartition
from txnstore.aio import AIOConsumer, AIOProducer, AsyncDeserializingConsumer
from txnstore.error import ValueDeserializationError

HERE = [TopicPartition("t", 0)]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE_SECONDS))


class Slow:
    """A deserializer that takes until it is let through."""

    def __init__(self):
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()

    async def __call__(self, value, ctx=None):
        self.begun.set()
        await self.ended.wait()
        if value == b"bad":
            raise ValueError("why")
        return value.decode()

    async def cancel(self, call):
        """Cancel a call that deserializes."""
        task = asyncio.ensure_future(call)
        await self.begun.wait()
        self.begun.clear()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.fixture
def open_consumer(url):
    """Make a consumer of numbered values."""

    def make(deserializer, **settings):
        configuration = {"bootstrap.servers": url, "group.id": "readers", "auto.offset.reset": "earliest", **settings}
        return AsyncDeserializingConsumer({**configuration, "value.deserializer": deserializer})

    return make


@pytest.fixture
def fill(url, make_producer):
    """Write values to partition 0 of a topic."""

    def write(*written, topic="t"):
        create_topic(url, topic)
        producer = make_producer()
        for value in written:
            producer.produce(topic, value, partition=0)
        assert producer.flush(PATIENCE_SECONDS) == 0

    return write


def committed(make_consumer):
    return make_consumer().committed(HERE, PATIENCE_SECONDS)[0].offset


def stored(consumer):
    """Return what an automatic commit would commit now."""
    return consumer._consumer._core.subscription.find("t", 0).stored


@pytest.mark.slow_but_first
@pytest.mark.parametrize("count", [None, 3], ids=["poll", "consume"])
def test_a_call_that_is_cancelled_while_it_deserializes_loses_no_message(open_consumer, fill, make_consumer, count):
    fill(b"0", b"1", b"2", b"3")

    async def scenario():
        slow = Slow()

        def call():
            return consumer.poll(PATIENCE_SECONDS) if count is None else consumer.consume(count, PATIENCE_SECONDS)

        async with await open_consumer(slow) as consumer:
            await consumer.subscribe(["t"])
            for _ in range(2):
                await slow.cancel(call())
            # Neither for a transaction nor for a commit it counts as read.
            assert (await consumer.position(HERE))[0].offset <= 0
            slow.ended.set()
            read = [(await call()).value()] if count is None else [message.value() for message in await call()]
            assert read == ["0", "1", "2"][: len(read)]
            slow.ended.clear()
            slow.begun.clear()
            await slow.cancel(consumer.poll(PATIENCE_SECONDS))
        return len(read)

    assert committed(make_consumer) < 0
    read_count = run(scenario())
    assert committed(make_consumer) == read_count


@pytest.mark.slow_but_first
@pytest.mark.parametrize("bad", [[0], [3], [9], [0, 1, 5]])
def test_what_is_read_with_a_message_that_cannot_be_deserialized_is_not_lost(open_consumer, fill, make_consumer, bad):
    fill(*[b"bad" if number in bad else b"%d" % number for number in range(10)])

    async def scenario():
        slow = Slow()
        seen: list[int] = []
        failed: list[Any] = []
        slow.ended.set()
        async with await open_consumer(slow) as consumer:
            await consumer.subscribe(["t"])
            while (count := len(seen) + len(failed)) < 10:
                try:
                    seen += [int(it.value()) for it in await consumer.consume(10 - count, PATIENCE_SECONDS)]
                except ValueDeserializationError as error:
                    failed += [error.kafka_message and error.kafka_message.offset()]
                await consumer.commit(asynchronous=False)
                # Nothing is committed that was not handed out.
                assert (await consumer.committed(HERE))[0].offset == len(seen) + len(failed)
        return seen, failed

    assert run(scenario()) == ([number for number in range(10) if number not in bad], bad)
    assert committed(make_consumer) == 10


def test_what_is_behind_a_bad_message_is_not_committed_by_a_close(open_consumer, fill, make_consumer):
    fill(b"0", b"bad", b"2")

    async def scenario():
        slow = Slow()
        slow.ended.set()
        async with await open_consumer(slow) as consumer:
            await consumer.subscribe(["t"])
            return [it.value() for it in await consumer.consume(3, PATIENCE_SECONDS)]

    assert run(scenario()) == ["0"]
    assert committed(make_consumer) == 1


def test_a_copy_loop_whose_poll_is_cancelled_copies_each_message_once(url, open_consumer, fill, make_consumer):
    fill(b"0", b"1", b"2")
    fill(topic="copies")

    async def scenario():
        slow = Slow()
        producer = AIOProducer({"bootstrap.servers": url, "transactional.id": "copier"})
        async with producer, await open_consumer(slow, **{"enable.auto.commit": False}) as consumer:
            await producer.init_transactions(PATIENCE_SECONDS)
            await consumer.subscribe(["t"])
            for number in range(3):
                await producer.begin_transaction()
                slow.ended.clear()
                await slow.cancel(consumer.poll(PATIENCE_SECONDS))
                if number == 1:
                    slow.ended.set()
                    message = await consumer.poll(PATIENCE_SECONDS)
                    await producer.produce("copies", message.value())
                    slow.begun.clear()
                group = await consumer.consumer_group_metadata()
                await producer.send_offsets_to_transaction(await consumer.position(HERE), group, PATIENCE_SECONDS)
                await producer.commit_transaction(PATIENCE_SECONDS)
            slow.ended.set()
            for _ in range(2):
                await producer.begin_transaction()
                message = await consumer.poll(PATIENCE_SECONDS)
                await producer.produce("copies", message.value())
                group = await consumer.consumer_group_metadata()
                await producer.send_offsets_to_transaction(await consumer.position(HERE), group, PATIENCE_SECONDS)
                await producer.commit_transaction(PATIENCE_SECONDS)

    run(scenario())
    assert committed(make_consumer) == 3
    copies = make_consumer({"group.id": "checkers"})
    copies.assign([TopicPartition("copies", 0, 0)])
    assert values(copies.consume(3, PATIENCE_SECONDS)) == [b"0", b"1", b"2"]
    assert copies.consume(1, 0) == []


def test_what_is_deserialized_is_not_committed_while_another_task_reads_on(open_consumer, fill, make_consumer):
    fill(b"0", b"1")

    async def scenario():
        slow = Slow()
        first = slow.__call__

        async def deserialize(value, ctx=None):
            return await first(value, ctx) if value == b"0" else value.decode()

        async with await open_consumer(deserialize) as consumer:
            await consumer.subscribe(["t"])
            polling = asyncio.create_task(consumer.poll(PATIENCE_SECONDS))
            await slow.begun.wait()
            assert (await consumer.poll(PATIENCE_SECONDS)).value() == "1"
            assert stored(consumer) < 1
            polling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await polling

    run(scenario())
    assert committed(make_consumer) <= 0


def test_what_a_task_leaves_is_no_other_tasks_answer(open_consumer, fill, monkeypatch):
    fill(b"0", b"1")
    read_some = AIOConsumer._read_some

    async def scenario():
        slow, loop = Slow(), asyncio.get_running_loop()
        first = slow.__call__

        async def deserialize(value, ctx=None):
            return await first(value, ctx) if value == b"0" else value.decode()

        async def cancel():
            polling.cancel()
            await asyncio.wait([polling])

        def read_and_cancel_the_other(consumer, count, timeout):
            read_some(consumer, count, timeout)
            if consumer._taken:
                # Between the thread, which has read, and the task that gets it.
                asyncio.run_coroutine_threadsafe(cancel(), loop).result(PATIENCE_SECONDS)

        async with await open_consumer(deserialize) as consumer:
            await consumer.subscribe(["t"])
            polling = asyncio.create_task(consumer.poll(PATIENCE_SECONDS))
            await slow.begun.wait()
            with monkeypatch.context() as patch:
                patch.setattr(AIOConsumer, "_read_some", read_and_cancel_the_other)
                assert (await consumer.poll(PATIENCE_SECONDS)).value() == "1"
            assert stored(consumer) < 1
            slow.ended.set()
            # They come again, in order: nothing behind what nobody has got counts as read.
            assert (await consumer.position(HERE))[0].offset == 0
            assert [message.value() for message in await consumer.consume(2, PATIENCE_SECONDS)] == ["0", "1"]

    run(scenario())


@pytest.mark.slow_but_first
@pytest.mark.parametrize("is_cancelled", [True, False])
def test_what_another_call_reads_does_not_count_as_read_when_a_deserializer_ends(
    open_consumer, fill, make_consumer, monkeypatch, is_cancelled
):
    fill(b"0", b"1")

    async def scenario():
        slow, loop, has_read = Slow(), asyncio.get_running_loop(), asyncio.Event()
        go_on = threading.Event()

        def read_and_wait(*arguments):
            messages = consume_with(*arguments)
            if messages:
                loop.call_soon_threadsafe(has_read.set)
                assert go_on.wait(PATIENCE_SECONDS)
            return messages

        async with await open_consumer(slow) as consumer:
            await consumer.subscribe(["t"])
            polling = asyncio.create_task(consumer.poll(PATIENCE_SECONDS))
            await slow.begun.wait()
            consume_with = consumer._consumer.consume_with
            monkeypatch.setattr(consumer._consumer, "consume_with", read_and_wait)
            other = asyncio.create_task(consumer.poll(PATIENCE_SECONDS))
            await has_read.wait()
            if is_cancelled:
                other.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await other
                go_on.set()
                # It has its turn once the thread has ended.
                await consumer._calls.run(int)
            # The thread has read it, and it has not reached the caller.
            slow.ended.set()
            assert (await polling).value() == "0"
            assert stored(consumer) < 1
            go_on.set()
            # What has reached its caller counts from the next call on.
            await consumer.memberid()
            assert stored(consumer) == (1 if is_cancelled else 2)
            if not is_cancelled:
                assert (await other).value() == "1"

    run(scenario())
    assert committed(make_consumer) == (1 if is_cancelled else 2)


def test_a_message_that_cannot_be_deserialized_counts_as_read(open_consumer, fill, make_consumer):
    fill(b"bad", b"1")

    async def scenario():
        slow = Slow()
        slow.ended.set()
        async with await open_consumer(slow) as consumer:
            await consumer.subscribe(["t"])
            with pytest.raises(ValueDeserializationError, match="why"):
                await consumer.poll(PATIENCE_SECONDS)
            assert (await consumer.position(HERE))[0].offset == 1
        # Closing commits it.

    run(scenario())
    assert committed(make_consumer) == 1


def test_what_is_deserialized_of_partitions_that_are_given_back_is_not_returned(open_consumer, fill):
    fill(b"0")
    fill(b"other", topic="u")

    async def scenario():
        slow = Slow()
        async with await open_consumer(slow) as consumer:
            await consumer.assign([TopicPartition("t", 0, 0)])
            polling = asyncio.create_task(consumer.poll(PATIENCE_SECONDS))
            await slow.begun.wait()
            await consumer.assign([TopicPartition("u", 0, 0)])
            slow.ended.set()
            assert (await polling).value() == "other"

    run(scenario())


def test_a_poll_beside_one_that_deserializes_waits_until_that_returns_before_partitions_go(open_consumer, fill):
    fill(b"0")
    revoked: list[object] = []

    async def scenario():
        slow = Slow()
        async with await open_consumer(slow) as consumer:
            await consumer.subscribe(["t"], on_revoke=lambda _, partitions: revoked.extend(partitions))
            polling = asyncio.create_task(consumer.poll(PATIENCE_SECONDS))
            await slow.begun.wait()
            await consumer.unsubscribe()
            assert await consumer.poll(0.01) is None
            other = asyncio.create_task(consumer.poll(-1))
            assert await consumer.poll(0.3) is None
            assert revoked == []
            slow.ended.set()
            assert (await polling).value() == "0"
            while not revoked:
                await consumer.poll(0)
            other.cancel()
            await asyncio.wait([other])

    run(scenario())


class OneByOne:
    """A deserializer that takes until this very value is let through."""

    def __init__(self, count):
        self.begun = [asyncio.Event() for _ in range(count)]
        self.ended = [asyncio.Event() for _ in range(count)]

    async def __call__(self, value, ctx=None):
        self.begun[int(value)].set()
        await self.ended[int(value)].wait()
        return value.decode()


def test_offsets_are_stored_up_to_the_first_that_is_held_where_calls_always_overlap(open_consumer, fill):
    fill(*(b"%d" % number for number in range(6)))

    async def scenario():
        one_by_one = OneByOne(6)
        async with await open_consumer(one_by_one) as consumer:
            await consumer.assign([TopicPartition("t", 0, 0)])

            async def begin(number):
                polling = asyncio.create_task(consumer.poll(PATIENCE_SECONDS))
                await one_by_one.begun[number].wait()
                return polling

            calls = [await begin(0), await begin(1)]
            # Behind one that is still held, nothing counts.
            one_by_one.ended[1].set()
            await calls[1]
            calls.append(await begin(2))
            assert stored(consumer) <= 0
            for number in (0, 2, 3):
                calls.append(await begin(len(calls)))
                one_by_one.ended[number].set()
                await calls[number]
                await consumer.position(HERE)
                assert stored(consumer) == {0: 2, 2: 3, 3: 4}[number]
            for ended in one_by_one.ended:
                ended.set()
            await asyncio.gather(*calls)
            assert stored(consumer) == 6

    run(scenario())


def test_what_was_left_later_and_lies_before_the_rest_comes_again_too(open_consumer, fill):
    fill(b"0", b"1")

    async def scenario():
        one_by_one = OneByOne(2)
        async with await open_consumer(one_by_one) as consumer:
            await consumer.assign([TopicPartition("t", 0, 0)])
            calls = []
            for begun in one_by_one.begun:
                calls.append(asyncio.create_task(consumer.poll(PATIENCE_SECONDS)))
                await begun.wait()
            for call in reversed(calls):
                call.cancel()
                await asyncio.wait([call])
            for ended in one_by_one.ended:
                ended.set()
            return [(await consumer.poll(PATIENCE_SECONDS)).value() for _ in range(2)]

    assert run(scenario()) == ["0", "1"]


def test_what_is_held_stores_nothing_before_it_that_has_yet_to_come_again(open_consumer, fill):
    fill(b"0", b"1", b"2")

    async def scenario():
        one_by_one = OneByOne(3)
        async with await open_consumer(one_by_one) as consumer:
            await consumer.assign([TopicPartition("t", 0, 0)])
            calls = []
            for begun in one_by_one.begun:
                calls.append(asyncio.create_task(consumer.poll(PATIENCE_SECONDS)))
                await begun.wait()
            for call in calls[:2]:
                call.cancel()
                await asyncio.wait([call])
            one_by_one.ended[0].set()
            assert (await consumer.poll(PATIENCE_SECONDS)).value() == "0"
            assert stored(consumer) == 1
            one_by_one.ended[2].set()
            await calls[2]

    run(scenario())
