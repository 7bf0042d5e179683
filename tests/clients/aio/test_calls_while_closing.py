"""The asyncio clients while they are closed: callbacks still use them; and they are used on their own loop alone."""

from __future__ import annotations

import asyncio

import pytest

from tests.clients.callers import ledger_of, make_ledger
from tests.clients.steps import PATIENCE_SECONDS, create_topic
from txnstore import Message, TopicPartition
from txnstore.aio import AIOConsumer, AIOProducer

HERE = [TopicPartition("t", 0)]

OTHER_LOOP = "belongs to another event loop"


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE_SECONDS))


@pytest.fixture
def configuration(url, make_producer):
    """The configuration of a consumer, and two messages to read."""
    create_topic(url, "t")
    producer = make_producer()
    for value in (b"0", b"1"):
        producer.produce("t", value, partition=0)
    assert producer.flush(PATIENCE_SECONDS) == 0
    return {
        "bootstrap.servers": url,
        "group.id": "readers",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }


def committed(make_consumer):
    return make_consumer().committed(HERE, PATIENCE_SECONDS)[0].offset


def test_on_revoke_commits_while_the_consumer_is_closed(configuration, make_consumer):
    async def scenario():
        async def on_revoke(consumer, partitions):
            await consumer.commit(asynchronous=False)

        consumer = AIOConsumer(configuration)
        await consumer.subscribe(["t"], on_revoke=on_revoke)
        assert await consumer.poll(PATIENCE_SECONDS)
        await consumer.close()
        with pytest.raises(RuntimeError, match="Consumer closed"):
            await consumer.commit(asynchronous=False)

    run(scenario())
    assert committed(make_consumer) == 1


def test_on_revoke_ends_a_transaction_with_its_offsets_while_the_consumer_is_closed(url, configuration, make_consumer):
    async def scenario():
        async def on_revoke(consumer, partitions):
            group = await consumer.consumer_group_metadata()
            await producer.send_offsets_to_transaction(await consumer.position(partitions), group, PATIENCE_SECONDS)
            await producer.commit_transaction(PATIENCE_SECONDS)

        async with AIOProducer({"bootstrap.servers": url, "transactional.id": "copier"}) as producer:
            await producer.init_transactions(PATIENCE_SECONDS)
            async with AIOConsumer(configuration) as consumer:
                await consumer.subscribe(["t"], on_revoke=on_revoke)
                await producer.begin_transaction()
                message = await consumer.poll(PATIENCE_SECONDS)
                assert message is not None
                await producer.produce("copies", message.value())

    run(scenario())
    assert committed(make_consumer) == 1
    copies = make_consumer({"group.id": "checkers"})
    copies.assign([TopicPartition("copies", 0, 0)])
    assert [message.value() for message in copies.consume(1, PATIENCE_SECONDS)] == [b"0"]


def test_a_task_that_is_no_callback_is_refused_while_the_consumer_is_closed(configuration):
    async def scenario():
        revoked, may_end = asyncio.Event(), asyncio.Event()

        async def on_revoke(consumer, partitions):
            revoked.set()
            await may_end.wait()

        consumer = AIOConsumer(configuration)
        await consumer.subscribe(["t"], on_revoke=on_revoke)
        assert await consumer.poll(PATIENCE_SECONDS)
        closing = asyncio.create_task(consumer.close())
        await revoked.wait()
        with pytest.raises(RuntimeError, match="Consumer closed"):
            await consumer.poll(0)
        may_end.set()
        await closing

    run(scenario())


def test_a_callback_produces_while_the_producer_is_closed(url, make_consumer):
    async def scenario():
        async def on_delivery(error, message):
            if message.value() == b"first":
                reports.append(await producer.produce("t", b"second"))

        reports: list[asyncio.Future[Message]] = []
        # Nothing is sent, and so no callback called, before it is closed.
        async with AIOProducer({"bootstrap.servers": url, "linger.ms": 50_000, "on_delivery": on_delivery}) as producer:
            await producer.produce("t", b"first")
        assert [report.done() for report in reports] == [True]

    run(scenario())
    consumer = make_consumer()
    consumer.assign([TopicPartition("t", 0, 0)])
    assert [message.value() for message in consumer.consume(2, PATIENCE_SECONDS)] == [b"first", b"second"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
def test_a_producer_of_another_loop_queues_nothing(url, make_consumer, is_open):
    create_topic(url, "t")

    async def make():
        return AIOProducer({"bootstrap.servers": url})

    async def produce(producer):
        with pytest.raises(RuntimeError, match=OTHER_LOOP):
            await producer.produce("t", b"never")
        with pytest.raises(RuntimeError, match=OTHER_LOOP):
            await producer.flush()
        assert len(producer) == 0
        if is_open:
            with pytest.raises(RuntimeError, match=OTHER_LOOP):
                await producer.close()
        else:
            # What is left of it ends here.
            await producer.close()

    async def close(producer):
        # The refused one was none.
        await (await producer.produce("t", b"value"))
        await producer.close()

    loop = asyncio.new_event_loop()
    try:
        producer = loop.run_until_complete(make())
        if not is_open:
            loop.close()
        run(produce(producer))
        if is_open:
            loop.run_until_complete(close(producer))
    finally:
        loop.close()
    consumer = make_consumer()
    consumer.assign([TopicPartition("t", 0, 0)])
    expected = [b"value"] if is_open else []
    assert [message.value() for message in consumer.consume(2, 0.5)] == expected


def test_a_consumer_of_another_loop_reads_nothing(configuration):
    async def make():
        consumer = AIOConsumer(configuration)
        await consumer.assign([TopicPartition("t", 0, 0)])
        return consumer

    async def read(consumer):
        with pytest.raises(RuntimeError, match=OTHER_LOOP):
            await consumer.poll(0)
        with pytest.raises(RuntimeError, match=OTHER_LOOP):
            await consumer.close()

    async def read_here(consumer):
        async with consumer:
            message = await consumer.poll(PATIENCE_SECONDS)
            assert message.value() == b"0"

    loop = asyncio.new_event_loop()
    try:
        consumer = loop.run_until_complete(make())
        run(read(consumer))
        loop.run_until_complete(read_here(consumer))
    finally:
        loop.close()


def test_on_revoke_commits_with_rows_of_an_async_session_while_the_consumer_is_closed(
    url, configuration, make_consumer
):
    pytest.importorskip("greenlet", reason="async SQLAlchemy needs greenlet, which is not installed")
    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import create_async_engine

    make_ledger(url)
    if url.startswith("sqlite"):
        pytest.importorskip("aiosqlite", reason="async SQLAlchemy on SQLite needs aiosqlite, which is not installed")
    sqlite, postgresql = ("sqlite://", "sqlite+aiosqlite://"), ("postgresql://", "postgresql+psycopg://")
    async_url = url.replace(*(sqlite if url.startswith("sqlite") else postgresql), 1)

    async def scenario():
        engine = create_async_engine(async_url)

        async def on_revoke(consumer, partitions):
            async with engine.begin() as connection:
                await connection.execute(text("INSERT INTO ledger (entry) VALUES ('row')"))
                await consumer.commit(connection=connection)

        async with AIOConsumer(configuration) as consumer:
            await consumer.subscribe(["t"], on_revoke=on_revoke)
            assert await consumer.poll(PATIENCE_SECONDS)
        await engine.dispose()

    run(scenario())
    assert (committed(make_consumer), ledger_of(url)) == (1, ["row"])


@pytest.mark.parametrize("client", [AIOProducer, AIOConsumer])
def test_what_was_closed_on_a_loop_that_is_closed_is_closed_again_on_another_one(configuration, client):
    async def scenario():
        made = client({"bootstrap.servers": configuration["bootstrap.servers"], "group.id": "readers"})
        await made.close()
        return made

    made = run(scenario())
    for _ in range(2):
        run(made.close())
