"""AIOProducer: a future for every message, transactions as coroutines, and nothing that stays pending.

On SQLite alone: it hands calls to a Producer, whose own tests show on both databases what comes of them there.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.databases import on_sqlite_alone
from txnstore import KafkaError, KafkaException, TopicPartition
from txnstore.aio import AIOProducer

pytestmark = on_sqlite_alone

WAIT_SECONDS = 60

#: No message is sent by itself while a test lasts; below message.timeout.ms, and transaction.timeout.ms.
LONG_MS = 50_000


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, WAIT_SECONDS))


def values_of(make_consumer, topic, count):
    consumer = make_consumer()
    consumer.subscribe([topic])
    return sorted(message.value() for message in consumer.consume(count, WAIT_SECONDS))


def test_a_message_that_was_delivered_comes_out_of_its_future(url, make_consumer):
    async def scenario():
        async with AIOProducer({"bootstrap.servers": url}) as producer:
            delivered = await producer.produce(
                "t", b"value", b"key", partition=0, timestamp=1234, headers=[("h", b"1"), ("h", None)]
            )
            assert isinstance(delivered, asyncio.Future)
            message = await delivered
            assert (message.topic(), message.partition(), message.offset()) == ("t", 0, 0)
            assert (message.key(), message.value(), message.timestamp()) == (b"key", b"value", (1, 1234))
            assert len(producer) == 0
            assert producer

    run(scenario())
    consumer = make_consumer()
    consumer.subscribe(["t"])
    assert consumer.poll(WAIT_SECONDS).headers() == [("h", b"1"), ("h", None)]


def test_many_messages_are_delivered_in_order(url):
    async def scenario():
        async with AIOProducer({"bootstrap.servers": url}) as producer:
            futures = [await producer.produce("t", str(number), partition=0) for number in range(500)]
            messages = await asyncio.gather(*futures)
            assert [message.offset() for message in messages] == list(range(500))
            assert [message.value() for message in messages] == [b"%d" % number for number in range(500)]

    run(scenario())


def test_flush_waits_for_what_was_produced(url):
    async def scenario():
        async with AIOProducer({"bootstrap.servers": url, "linger.ms": LONG_MS}) as producer:
            delivered = await producer.produce("t", b"v")
            assert await producer.flush(WAIT_SECONDS) == 0
            assert delivered.done()
            assert delivered.result().value() == b"v"

    run(scenario())


def test_a_message_that_is_given_up_raises(url):
    async def scenario():
        async with AIOProducer({"bootstrap.servers": url, "linger.ms": LONG_MS}) as producer:
            delivered = await producer.produce("t", b"v")
            await producer.purge()
            with pytest.raises(KafkaException) as caught:
                await delivered
            assert caught.value.args[0] == KafkaError._PURGE_QUEUE

    run(scenario())


def test_a_message_that_is_too_large_raises_at_once(url):
    async def scenario():
        async with AIOProducer({"bootstrap.servers": url, "message.max.bytes": 1000}) as producer:
            with pytest.raises(KafkaException) as caught:
                await producer.produce("t", b"v" * 2000)
            assert caught.value.args[0] == KafkaError.MSG_SIZE_TOO_LARGE
            assert len(producer) == 0

    run(scenario())


def test_a_full_queue_makes_produce_wait(url, make_consumer):
    async def scenario():
        configuration = {"bootstrap.servers": url, "queue.buffering.max.messages": 5, "linger.ms": 0}
        async with AIOProducer(configuration) as producer:
            futures = [await producer.produce("t", b"%03d" % number) for number in range(50)]
            assert len(await asyncio.gather(*futures)) == 50

    run(scenario())
    assert values_of(make_consumer, "t", 50) == [b"%03d" % number for number in range(50)]


def test_reports_of_success_come_even_if_the_configuration_leaves_them_out(url):
    async def scenario():
        async with AIOProducer({"bootstrap.servers": url, "delivery.report.only.error": True}) as producer:
            assert (await (await producer.produce("t", b"v"))).value() == b"v"

    run(scenario())


def test_a_transaction_is_committed_as_a_whole(url, make_consumer):
    async def scenario():
        async with AIOProducer({"bootstrap.servers": url, "transactional.id": "x"}) as producer:
            await producer.init_transactions(WAIT_SECONDS)
            await producer.begin_transaction()
            aborted = await producer.produce("t", b"aborted")
            await producer.abort_transaction(WAIT_SECONDS)
            # It was written before the abort, and nobody reads it.
            assert aborted.done()
            await producer.begin_transaction()
            futures = [await producer.produce("t", b"%d" % number) for number in range(3)]
            await producer.commit_transaction(WAIT_SECONDS)
            assert all(delivered.done() for delivered in futures)

    run(scenario())
    assert values_of(make_consumer, "t", 3) == [b"0", b"1", b"2"]


def test_commits_that_nobody_waits_for_are_made_in_order(url, make_consumer):
    async def scenario():
        async with AIOProducer({"bootstrap.servers": url, "transactional.id": "x"}) as producer:
            await producer.init_transactions(WAIT_SECONDS)
            committed, delivered = [], []
            for number in range(10):
                await producer.begin_transaction()
                delivered.append(await producer.produce("t", b"%d" % number))
                committed.append(await producer.commit_transaction_async())
            await asyncio.wait_for(asyncio.gather(*committed), WAIT_SECONDS)
            messages = await asyncio.wait_for(asyncio.gather(*delivered), WAIT_SECONDS)
            assert [message.value() for message in messages] == [b"%d" % number for number in range(10)]

    run(scenario())
    assert values_of(make_consumer, "t", 10) == [b"%d" % number for number in range(10)]


def test_offsets_go_with_the_transaction(url, make_consumer):
    consumer = make_consumer()
    consumer.assign([TopicPartition("in", 0)])

    async def scenario():
        async with AIOProducer({"bootstrap.servers": url, "transactional.id": "x"}) as producer:
            await producer.init_transactions(WAIT_SECONDS)
            await producer.begin_transaction()
            await (await producer.produce("in", b"v", partition=0))
            await producer.send_offsets_to_transaction(
                [TopicPartition("in", 0, 7)], consumer.consumer_group_metadata(), WAIT_SECONDS
            )
            await producer.commit_transaction(WAIT_SECONDS)

    run(scenario())
    (committed,) = consumer.committed([TopicPartition("in", 0)], WAIT_SECONDS)
    assert committed.offset == 7


def test_the_transactional_calls_need_a_transactional_id(url):
    async def scenario():
        async with AIOProducer({"bootstrap.servers": url}) as producer:
            with pytest.raises(KafkaException) as caught:
                await producer.init_transactions(WAIT_SECONDS)
            assert caught.value.args[0] == KafkaError._NOT_CONFIGURED

    run(scenario())


def test_closing_aborts_the_transaction_and_leaves_no_future_pending(url, make_consumer):
    async def scenario():
        producer = AIOProducer({"bootstrap.servers": url, "transactional.id": "x", "linger.ms": LONG_MS})
        await producer.init_transactions(WAIT_SECONDS)
        await producer.begin_transaction()
        delivered = await producer.produce("t", b"aborted")
        await producer.close()
        assert delivered.done()
        assert isinstance(delivered.exception(), KafkaException)
        await producer.close()
        with pytest.raises(RuntimeError, match="Producer has been closed"):
            await producer.produce("t", b"v")
        with pytest.raises(RuntimeError, match="Producer has been closed"):
            await producer.flush()
        assert len(producer) == 0

    before = set(threading.enumerate())
    run(scenario())
    for thread in set(threading.enumerate()) - before:
        # A last look at the maintenance may end a moment later.
        thread.join(WAIT_SECONDS)
    assert set(threading.enumerate()) <= before


def test_closing_delivers_what_was_produced(url, make_consumer):
    async def scenario():
        async with AIOProducer({"bootstrap.servers": url, "linger.ms": LONG_MS}) as producer:
            delivered = await producer.produce("t", b"v")
        assert delivered.result().value() == b"v"

    run(scenario())
    assert values_of(make_consumer, "t", 1) == [b"v"]


def test_closing_goes_on_though_its_call_was_cancelled(url, make_consumer):
    async def scenario():
        producer = AIOProducer({"bootstrap.servers": url, "linger.ms": LONG_MS})
        delivered = await producer.produce("t", b"v")
        closing = asyncio.create_task(producer.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await producer.close()
        assert delivered.result().value() == b"v"

    run(scenario())
    assert values_of(make_consumer, "t", 1) == [b"v"]


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_it_is_closed_on_another_loop_once_its_own_is_closed(url, make_consumer, is_cancelled):
    async def scenario():
        producer = AIOProducer({"bootstrap.servers": url, "linger.ms": LONG_MS})
        delivered = await producer.produce("t", b"v")
        # Somebody waits for it, and never hears of it.
        delivered.add_done_callback(lambda _: None)
        return producer

    loop = asyncio.new_event_loop()
    try:
        producer = loop.run_until_complete(scenario())
        if is_cancelled:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0.01))
    finally:
        loop.close()
    run(producer.close())
    assert values_of(make_consumer, "t", 1) == [b"v"]


def test_a_callback_may_close(url):
    async def scenario():
        closed = asyncio.Event()

        async def close(*_):
            await producer.close()
            closed.set()

        producer = AIOProducer({"bootstrap.servers": url, "on_delivery": close})
        delivered = await producer.produce("t", b"v")
        await closed.wait()
        assert delivered.result().value() == b"v"
        await producer.close()

    run(scenario())


def test_an_error_in_the_block_closes_and_goes_on(url):
    async def scenario():
        with pytest.raises(ZeroDivisionError):
            async with AIOProducer({"bootstrap.servers": url}) as producer:
                raise ZeroDivisionError
        with pytest.raises(RuntimeError, match="closed"):
            await producer.poll()

    run(scenario())


def test_a_future_that_is_cancelled_disturbs_nobody(url):
    async def scenario():
        async with AIOProducer({"bootstrap.servers": url}) as producer:
            cancelled = await producer.produce("t", b"1")
            cancelled.cancel()
            assert (await (await producer.produce("t", b"2"))).value() == b"2"
            assert cancelled.cancelled()

    run(scenario())


def test_the_callback_of_the_configuration_is_called_on_the_loop(url):
    async def scenario():
        reports = []

        async def on_delivery(error, message):
            reports.append((error, message.value(), threading.current_thread()))

        async with AIOProducer({"bootstrap.servers": url, "on_delivery": on_delivery}) as producer:
            await (await producer.produce("t", b"v"))
        assert reports == [(None, b"v", threading.current_thread())]

    run(scenario())


def test_a_callback_that_raises_leaves_the_futures_alone(url, caplog):
    def on_delivery(error, message):
        raise ValueError("why")

    async def scenario():
        async with AIOProducer({"bootstrap.servers": url, "on_delivery": on_delivery}) as producer:
            assert (await (await producer.produce("t", b"v"))).value() == b"v"

    run(scenario())
    assert "a callback of the producer raised" in caplog.text


def test_the_cluster_is_told(url):
    async def scenario():
        async with AIOProducer({"bootstrap.servers": url}) as producer:
            await (await producer.produce("t", b"v"))
            metadata = await producer.list_topics(timeout=WAIT_SECONDS)
            assert "t" in metadata.topics
            assert await producer.cluster_id(WAIT_SECONDS) == metadata.cluster_id
            await producer.set_sasl_credentials("user", "password")

    run(scenario())


def test_one_thread_of_the_callers_is_enough(url):
    async def scenario(executor):
        async with AIOProducer({"bootstrap.servers": url}, executor=executor) as producer:
            assert producer.executor is executor
            futures = [await producer.produce("t", b"v") for _ in range(10)]
            assert await producer.flush(WAIT_SECONDS) == 0
            await asyncio.gather(*futures)

    with ThreadPoolExecutor(1) as executor:
        run(scenario(executor))
        assert executor.submit(lambda: 1).result(WAIT_SECONDS) == 1


def test_the_configuration_is_checked_at_once(url):
    async def scenario():
        with pytest.raises(KafkaException) as caught:
            AIOProducer({"bootstrap.servers": url, "nonsense": 1})
        assert caught.value.args[0] == KafkaError._INVALID_ARG

    run(scenario())


def test_a_loop_has_to_run(url):
    with pytest.raises(RuntimeError, match="no running event loop"):
        AIOProducer({"bootstrap.servers": url})
