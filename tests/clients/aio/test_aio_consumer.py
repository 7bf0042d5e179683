"""AIOConsumer: calls in turn, callbacks on the loop, and no message lost to a call that was cancelled.

On SQLite alone: it hands calls to a Consumer, whose own tests show on both databases what comes of them there.
"""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.clients.consumer.log_writer import eventually
from tests.databases import on_sqlite_alone
from txnstore import KafkaException, TopicPartition
from txnstore.aio import AIOConsumer

pytestmark = on_sqlite_alone

WAIT_SECONDS = 60


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, WAIT_SECONDS))


@pytest.fixture
def configuration(url):
    return {"bootstrap.servers": url, "group.id": "readers", "auto.offset.reset": "earliest"}


@pytest.fixture
def fill(make_producer):
    """Write numbered values to partition 0 of a topic."""

    def write(topic, count, first=0):
        producer = make_producer()
        for number in range(first, first + count):
            producer.produce(topic, b"%d" % number, partition=0)
        assert producer.flush(WAIT_SECONDS) == 0

    return write


async def value_of(polled):
    message = await polled
    assert message is not None
    return message.value()


async def in_thread(function, *arguments):
    return await asyncio.to_thread(function, *arguments)


def test_messages_are_polled_one_by_one_and_many_at_a_time(configuration, fill):
    fill("t", 10)

    async def scenario():
        async with AIOConsumer(configuration) as consumer:
            await consumer.subscribe(["t"])
            first = await value_of(consumer.poll(WAIT_SECONDS))
            others = await consumer.consume(9, WAIT_SECONDS)
            assert [first, *(message.value() for message in others)] == [b"%d" % number for number in range(10)]
            assert await consumer.poll(0) is None
            assert await consumer.poll(0.05) is None
            assert await consumer.consume(5, 0.05) == []
            assert await consumer.consume(0, 0) == []

    run(scenario())


@pytest.mark.parametrize("count", [-1, 1_000_001])
def test_a_nonsensical_number_of_messages_is_refused(configuration, count):
    async def scenario():
        async with AIOConsumer(configuration) as consumer:
            with pytest.raises(ValueError, match="num_messages must be between 0 and 1000000"):
                await consumer.consume(count)

    run(scenario())


def test_a_poll_without_end_waits_for_the_message_and_lets_others_call(configuration, fill):
    async def scenario():
        async with AIOConsumer(configuration) as consumer:
            await in_thread(fill, "t", 1)
            await consumer.assign([TopicPartition("t", 0, 1)])
            polling = asyncio.create_task(consumer.poll())
            assert await consumer.assignment() == [TopicPartition("t", 0)]
            assert not polling.done()
            await in_thread(fill, "t", 1, 1)
            assert await value_of(polling) == b"1"

    run(scenario())


def test_a_cancelled_poll_loses_no_message(configuration, fill):
    fill("t", 40)

    async def scenario():
        read = []
        async with AIOConsumer(configuration) as consumer:
            await consumer.subscribe(["t"])
            read.append(await value_of(consumer.poll(WAIT_SECONDS)))
            while len(read) < 40:
                polling = asyncio.create_task(consumer.poll(WAIT_SECONDS))
                # It has begun, and may have read already what it is now not asked for any more.
                await asyncio.sleep(0)
                # Python 3.14 hands over at once what a thread has by then: the call has returned, and is not cancelled.
                if not polling.cancel():
                    read.append(await value_of(polling))
                await asyncio.wait([polling])
                consuming = asyncio.create_task(consumer.consume(3, WAIT_SECONDS))
                await asyncio.sleep(0)
                if not consuming.cancel():
                    read += [message.value() for message in await consuming]
                await asyncio.wait([consuming])
                if len(read) < 40:
                    read.append(await value_of(consumer.poll(WAIT_SECONDS)))
        assert read == [b"%d" % number for number in range(40)]

    run(scenario())


def test_a_consume_that_is_cancelled_half_way_loses_nothing(configuration, fill):
    fill("t", 3)

    async def scenario():
        async with AIOConsumer(configuration) as consumer:
            await consumer.assign([TopicPartition("t", 0, 0)])
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(consumer.consume(5), 1)
            # It does not count as read either, for a commit or for a transaction.
            (position,) = await consumer.position([TopicPartition("t", 0)])
            assert position.offset <= 0
            messages = await consumer.consume(3, WAIT_SECONDS)
            assert [message.value() for message in messages] == [b"0", b"1", b"2"]

    run(scenario())


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_a_call_has_read_and_not_returned_is_not_committed(configuration, fill, make_consumer, is_cancelled):
    fill("t", 3)
    here = [TopicPartition("t", 0)]

    async def scenario():
        async with AIOConsumer({**configuration, "auto.commit.interval.ms": 10}) as consumer:
            await consumer.assign(here)
            core = consumer._consumer._core
            reading = asyncio.create_task(consumer.consume(5, -1))
            await in_thread(eventually, lambda: any(partition.position == 3 for partition in core.subscription))
            # Another call has its turn once what was read has come from the thread to the first one.
            await consumer.consumer_group_metadata()
            if is_cancelled:
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
            future = core._commit_in_background()
            if future is not None:
                await in_thread(future.result, WAIT_SECONDS)
            assert (await consumer.committed(here))[0].offset < 0
            if is_cancelled:
                return
            await in_thread(fill, "t", 2, 3)
            assert len(await reading) == 5
            other = make_consumer()
            await in_thread(eventually, lambda: other.committed(here, WAIT_SECONDS)[0].offset == 5)

    run(scenario())


def test_what_a_cancelled_call_had_read_is_read_again_after_closing(configuration, fill):
    fill("t", 3)

    async def scenario():
        async with AIOConsumer(configuration) as consumer:
            await consumer.subscribe(["t"])
            assert await value_of(consumer.poll(WAIT_SECONDS)) == b"0"
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(consumer.consume(5), 1)
        async with AIOConsumer(configuration) as consumer:
            await consumer.subscribe(["t"])
            assert await value_of(consumer.poll(WAIT_SECONDS)) == b"1"

    run(scenario())


@pytest.mark.parametrize("wraps", [True, False], ids=["coroutine function", "function"])
def test_the_callbacks_of_a_rebalance_get_this_consumer(configuration, fill, wraps):
    fill("t", 1)

    async def scenario():
        calls = []

        def note(name):
            def plain(consumer, partitions):
                calls.append((name, consumer, partitions, threading.current_thread()))

            async def coroutine(consumer, partitions):
                plain(consumer, partitions)

            return coroutine if wraps else plain

        async with AIOConsumer(configuration) as consumer:
            await consumer.subscribe(["t"], note("assign"), note("revoke"))
            assert await value_of(consumer.poll(WAIT_SECONDS)) == b"0"
        here = threading.current_thread()
        partitions = [TopicPartition("t", 0)]
        assert calls == [("assign", consumer, partitions, here), ("revoke", consumer, partitions, here)]

    run(scenario())


def test_a_callback_of_a_rebalance_may_assign(configuration, fill):
    fill("t", 5)

    async def scenario():
        async def on_assign(consumer, partitions):
            for partition in partitions:
                partition.offset = 3
            await consumer.assign(partitions)

        async with AIOConsumer(configuration, max_workers=1) as consumer:
            await consumer.subscribe(["t"], on_assign=on_assign)
            assert await value_of(consumer.poll(WAIT_SECONDS)) == b"3"

    run(scenario())


def test_offsets_are_committed_and_told(configuration, fill):
    fill("t", 5)
    partition = TopicPartition("t", 0)

    async def scenario():
        async with AIOConsumer({**configuration, "enable.auto.commit": False}) as consumer:
            await consumer.subscribe(["t"])
            message = await consumer.poll(WAIT_SECONDS)
            (committed,) = await consumer.commit(message, asynchronous=False)
            assert committed.offset == 1
            (committed,) = await consumer.commit(offsets=[TopicPartition("t", 0, 3)], asynchronous=False)
            assert committed.offset == 3
            assert [item.offset for item in await consumer.committed([partition], WAIT_SECONDS)] == [3]
            assert [item.offset for item in await consumer.position([partition])] == [1]
            assert await consumer.get_watermark_offsets(partition, WAIT_SECONDS) == (0, 5)
            (found,) = await consumer.offsets_for_times([TopicPartition("t", 0, 0)], WAIT_SECONDS)
            assert found.offset == 0

    run(scenario())


def test_the_callback_of_a_commit_runs_on_the_loop(configuration, fill):
    fill("t", 1)

    async def scenario():
        commits = []

        async def on_commit(error, partitions):
            commits.append((error, [item.offset for item in partitions], threading.current_thread()))

        async with AIOConsumer({**configuration, "enable.auto.commit": False, "on_commit": on_commit}) as consumer:
            await consumer.subscribe(["t"])
            message = await consumer.poll(WAIT_SECONDS)
            await consumer.commit(message)
            for _ in range(WAIT_SECONDS):
                if commits:
                    break
                await consumer.poll(1)
        assert commits == [(None, [1], threading.current_thread())]

    run(scenario())


def test_stored_offsets_are_committed(configuration, fill):
    fill("t", 5)

    async def scenario():
        async with AIOConsumer({**configuration, "enable.auto.offset.store": False}) as consumer:
            await consumer.subscribe(["t"])
            message = await consumer.poll(WAIT_SECONDS)
            await consumer.store_offsets(message)
            await consumer.store_offsets(offsets=[TopicPartition("t", 0, 2)])
            (committed,) = await consumer.commit(asynchronous=False)
            assert committed.offset == 2
            with pytest.raises(ValueError, match="expected either message or offsets"):
                await consumer.store_offsets()

    run(scenario())


def test_the_position_is_changed_and_reading_is_paused(configuration, fill):
    fill("t", 3)
    partition = TopicPartition("t", 0)

    async def scenario():
        async with AIOConsumer(configuration) as consumer:
            await consumer.assign([TopicPartition("t", 0, 0)])
            assert await value_of(consumer.poll(WAIT_SECONDS)) == b"0"
            await consumer.pause([partition])
            assert await consumer.poll(0.05) is None
            await consumer.seek(TopicPartition("t", 0, 2))
            await consumer.resume([partition])
            assert await value_of(consumer.poll(WAIT_SECONDS)) == b"2"
            await consumer.unassign()
            assert await consumer.assignment() == []
            await consumer.incremental_assign([TopicPartition("t", 0, 1)])
            assert await value_of(consumer.poll(WAIT_SECONDS)) == b"1"
            await consumer.incremental_unassign([partition])
            assert await consumer.assignment() == []

    run(scenario())


def test_the_group_and_the_cluster_are_told(configuration, fill):
    fill("t", 1)

    async def scenario():
        async with AIOConsumer(configuration) as consumer:
            await consumer.subscribe(["t"])
            assert await consumer.poll(WAIT_SECONDS)
            assert bytes(await consumer.consumer_group_metadata()).startswith(b"CGMDv2:")
            assert await consumer.memberid()
            metadata = await consumer.list_topics("t", WAIT_SECONDS)
            assert list(metadata.topics) == ["t"]
            assert await consumer.cluster_id(WAIT_SECONDS) == metadata.cluster_id
            await consumer.set_sasl_credentials("user", "password")
            await consumer.unsubscribe()

    run(scenario())


def test_a_closed_consumer_refuses_every_call(configuration):
    async def scenario():
        consumer = AIOConsumer(configuration)
        await consumer.close()
        await consumer.close()
        for call in (consumer.poll(0), consumer.consume(1, 0), consumer.subscribe(["t"]), consumer.assignment()):
            with pytest.raises(RuntimeError, match="Consumer closed"):
                await call

    before = set(threading.enumerate())
    run(scenario())
    for thread in set(threading.enumerate()) - before:
        # A last look at the maintenance may end a moment later.
        thread.join(WAIT_SECONDS)
    assert set(threading.enumerate()) <= before


def test_what_was_read_before_a_callback_raised_comes_again(configuration, fill):
    def refuse(error, partitions):
        raise ZeroDivisionError

    async def scenario():
        settings = {**configuration, "enable.auto.commit": False, "on_commit": refuse}
        async with AIOConsumer(settings) as consumer:
            await consumer.subscribe(["t"])
            assert await value_of(consumer.poll(WAIT_SECONDS)) == b"0"
            reading = asyncio.create_task(consumer.consume(5, WAIT_SECONDS))
            await asyncio.sleep(0)
            # It has its turn once the other call has read what is there; the callback comes while that waits for more.
            await consumer.commit()
            with pytest.raises(ZeroDivisionError):
                await reading
            assert [message.value() for message in await consumer.consume(2, WAIT_SECONDS)] == [b"1", b"2"]

    fill("t", 3)
    run(scenario())


def test_what_another_task_has_read_and_not_got_yet_is_not_committed(configuration, fill, monkeypatch):
    read_some = AIOConsumer._read_some

    def read_what_comes_meanwhile(consumer, count, timeout):
        if count == 1:
            fill("t", 1, 3)
            timeout = WAIT_SECONDS
        read_some(consumer, count, timeout)

    async def scenario():
        async with AIOConsumer({**configuration, "enable.auto.commit": False}) as consumer:
            await consumer.subscribe(["t"])
            assert await value_of(consumer.poll(WAIT_SECONDS)) == b"0"
            reading = asyncio.create_task(consumer.consume(5, WAIT_SECONDS))
            await asyncio.sleep(0)
            with monkeypatch.context() as patch:
                patch.setattr(AIOConsumer, "_read_some", read_what_comes_meanwhile)
                # Its turn comes once that call has read what is there, and waits for more.
                assert await value_of(consumer.poll(WAIT_SECONDS)) == b"3"
            await consumer.commit(asynchronous=False)
            reading.cancel()
            await asyncio.wait([reading])
        async with AIOConsumer(configuration) as consumer:
            await consumer.subscribe(["t"])
            assert [message.value() for message in await consumer.consume(3, WAIT_SECONDS)] == [b"1", b"2", b"3"]

    fill("t", 3)
    run(scenario())


@pytest.mark.slow_but_first
@pytest.mark.parametrize("change", ["assign", "unassign", "incremental_unassign"])
def test_what_a_call_holds_of_partitions_that_another_task_gives_back_is_not_returned(
    configuration, fill, monkeypatch, change
):
    monkeypatch.setattr("txnstore.clients.aio.consumer._SLICE_SECONDS", 0.02)
    here, other = TopicPartition("t", 0), TopicPartition("u", 0)
    arguments = {"assign": [[here, other]], "unassign": [], "incremental_unassign": [[here]]}[change]

    async def scenario():
        async with AIOConsumer({**configuration, "enable.auto.commit": False}) as consumer:
            await consumer.assign([here])
            assert await value_of(consumer.poll(WAIT_SECONDS)) == b"0"
            reading = asyncio.create_task(consumer.consume(3, WAIT_SECONDS))
            await asyncio.sleep(0)
            # It has its turn once that call has read what is there, and waits for more.
            await getattr(consumer, change)(*arguments)
            if change != "assign":
                await consumer.incremental_assign([other])
            await in_thread(fill, "u", 3)
            read = await reading
            again = [message.value() for message in read if message.topic() == "t"]
            # What is assigned anew begins anew.
            assert again == [b"%d" % number for number in range(len(again) if change == "assign" else 0)]
            assert len(read) == 3

    fill("t", 3)
    run(scenario())


def test_what_a_call_holds_is_returned_before_its_partitions_are_taken_away(configuration, fill, monkeypatch):
    monkeypatch.setattr("txnstore.clients.aio.consumer._SLICE_SECONDS", 0.02)
    revoked = []

    async def scenario():
        async with AIOConsumer(configuration) as consumer:
            await consumer.subscribe(["t"], on_revoke=lambda _, partitions: revoked.extend(partitions))
            assert await value_of(consumer.poll(WAIT_SECONDS)) == b"0"
            reading = asyncio.create_task(consumer.consume(5, WAIT_SECONDS))
            await asyncio.sleep(0)
            # It has its turn once that call has read what is there, and waits for more.
            await consumer.unsubscribe()
            assert [message.value() for message in await reading] == [b"1", b"2"]
            assert revoked == []
            assert await consumer.poll(0) is None
            assert [partition.partition for partition in revoked] == [0]

    fill("t", 3)
    run(scenario())


def test_a_poll_without_end_in_a_callback_lets_go_what_its_call_holds_before_partitions_are_taken_away(
    configuration, fill, monkeypatch
):
    monkeypatch.setattr("txnstore.clients.aio.consumer._SLICE_SECONDS", 0.02)
    polled: list[object] = []
    revoked = []

    async def scenario():
        async def on_commit(error, partitions):
            await consumer.unsubscribe()
            polled.append(await consumer.poll(-1))

        async with AIOConsumer({**configuration, "enable.auto.commit": False, "on_commit": on_commit}) as consumer:
            await consumer.subscribe(["t"], on_revoke=lambda _, partitions: revoked.extend(partitions))
            assert await value_of(consumer.poll(WAIT_SECONDS)) == b"0"
            reading = asyncio.create_task(consumer.consume(5, WAIT_SECONDS))
            await asyncio.sleep(0)
            # It has its turn once that call has read what is there, and waits for more.
            await consumer.commit()
            assert [message.value() for message in await reading] == [b"1", b"2"]
            assert polled == [None]
            assert revoked == []
            assert await consumer.poll(0) is None
            assert [partition.partition for partition in revoked] == [0]

    fill("t", 3)
    run(scenario())


def test_closing_does_not_wait_for_a_poll_without_end(configuration):
    async def scenario():
        consumer = AIOConsumer(configuration)
        polling = asyncio.create_task(consumer.poll())
        await asyncio.sleep(0)
        await consumer.close()
        with pytest.raises(RuntimeError, match="Consumer closed"):
            await polling

    run(scenario())


def test_closing_goes_on_though_its_call_was_cancelled(configuration, fill):
    async def scenario():
        consumer = AIOConsumer(configuration)
        await consumer.subscribe(["t"])
        await value_of(consumer.poll(WAIT_SECONDS))
        end = threading.Event()
        busy = asyncio.create_task(consumer._calls.run(end.wait, WAIT_SECONDS))
        await asyncio.sleep(0)
        closing = asyncio.create_task(consumer.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        end.set()
        await busy
        await consumer.close()
        # It has left its group, so the next one need not wait until it is missed.
        async with AIOConsumer({**configuration, "session.timeout.ms": 60_000}) as following:
            await following.subscribe(["t"])
            assert await value_of(following.poll(WAIT_SECONDS / 2)) == b"1"

    fill("t", 2)
    run(scenario())


def test_it_is_closed_on_another_loop_once_its_own_is_closed(configuration, fill):
    revoked = []

    async def scenario():
        consumer = AIOConsumer(configuration)

        async def on_revoke(_, partitions):
            revoked.append(asyncio.get_running_loop())

        await consumer.subscribe(["t"], on_revoke=on_revoke)
        await value_of(consumer.poll(WAIT_SECONDS))
        # As the loop ends this has its turn.
        polling = asyncio.create_task(consumer.poll(-1))
        await asyncio.sleep(0)
        return consumer, polling

    async def end(consumer):
        await consumer.close()
        await consumer.close()
        return asyncio.get_running_loop()

    fill("t", 1)
    consumer, _ = run(scenario())
    assert run(end(consumer)) is revoked[0]
    with pytest.raises(RuntimeError, match="Consumer closed"):
        run(consumer.poll(0))
    eventually(lambda: not any(thread.name.startswith("txnstore-aio") for thread in threading.enumerate()))


def test_a_callback_may_close(configuration, fill):
    async def scenario():
        consumer = AIOConsumer(configuration)

        async def close(consumer, _):
            await consumer.close()
            await consumer.close()

        await consumer.subscribe(["t"], on_assign=close)
        with pytest.raises(RuntimeError, match="Consumer closed"):
            await consumer.poll(WAIT_SECONDS)

    fill("t", 1)
    run(scenario())


def test_the_configuration_is_checked_at_once(url):
    async def scenario():
        with pytest.raises(ValueError, match=r"group\.id must be set"):
            AIOConsumer({"bootstrap.servers": url})
        with pytest.raises(KafkaException):
            AIOConsumer({"bootstrap.servers": url, "group.id": "g", "nonsense": 1})
        with pytest.raises(ValueError, match="max_workers must be at least 1"):
            AIOConsumer({"bootstrap.servers": url, "group.id": "g"}, max_workers=0)

    run(scenario())


def test_a_transaction_comes_whole_and_comes_again_if_its_call_was_cancelled(configuration, make_producer):
    atomic = {"txnstore.delivery.order": "commit", "txnstore.delivery.atomic": True}
    producer = make_producer({"transactional.id": "writer"})
    producer.init_transactions()

    def write(name):
        producer.begin_transaction()
        for number in range(3):
            producer.produce("t", f"{name} {number}", partition=0)
        producer.commit_transaction()

    async def scenario():
        write("one")
        async with AIOConsumer({**configuration, **atomic}) as consumer:
            await consumer.assign([TopicPartition("t", 0)])
            call = asyncio.ensure_future(consumer.consume_transaction(WAIT_SECONDS))
            # The thread has read it, and the call has not returned.
            while not consumer._taken:
                await asyncio.sleep(0)
                assert not call.done()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            found = await consumer.consume_transaction(WAIT_SECONDS)
            assert found is not None
            assert [message.value() for message in found.messages] == [b"one 0", b"one 1", b"one 2"]
            assert await consumer.consume_transaction(0.05) is None
            waiting = asyncio.ensure_future(consumer.consume_transaction(WAIT_SECONDS))
            await in_thread(write, "two")
            found = await waiting
            assert found is not None
            assert len(found.messages) == 3

    run(scenario())
