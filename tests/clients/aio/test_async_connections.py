"""Connections of async SQLAlchemy, handed over within `run_sync`; needs greenlet, and aiosqlite for SQLite."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import event, text

from tests.clients.callers import ledger_of, make_ledger
from tests.clients.membership.steps import TP
from tests.clients.steps import PATIENCE_SECONDS, read_to_end, values
from txnstore import Consumer, KafkaError, KafkaException, Producer
from txnstore.aio import AIOConsumer

pytest.importorskip("greenlet", reason="async SQLAlchemy needs greenlet, which is not installed")

from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

INSERT = text("INSERT INTO ledger (entry) VALUES (:entry)")


@pytest.fixture
def async_url(url, log):
    """The URL for async SQLAlchemy, next to the application's own table and a topic."""
    make_ledger(url)
    log.topic()
    log.write("t", 0, b"0", b"1")
    if url.startswith("sqlite"):
        pytest.importorskip("aiosqlite", reason="async SQLAlchemy on SQLite needs aiosqlite, which is not installed")
        return url.replace("sqlite://", "sqlite+aiosqlite://", 1)
    return url.replace("postgresql://", "postgresql+psycopg://", 1)


def committed(url):
    consumer = Consumer({"bootstrap.servers": url, "group.id": "readers"})
    offset = consumer.committed([TP("t", 0)], PATIENCE_SECONDS)[0].offset
    consumer.close()
    return offset


def test_offsets_and_rows_of_an_async_session_are_one_commit(url, async_url):
    async def work():
        consumer = AIOConsumer({"bootstrap.servers": url, "group.id": "readers", "enable.auto.commit": False})
        engine = create_async_engine(async_url)
        async with AsyncSession(engine) as session:
            await session.execute(INSERT, {"entry": "never"})
            await consumer.commit(offsets=[TP("t", 0, 1)], connection=session)
            await session.rollback()
        async with engine.begin() as connection:
            await connection.execute(INSERT, {"entry": "row"})
            await consumer.commit(offsets=[TP("t", 0, 2)], connection=connection)
            assert committed(url) < 0
        await engine.dispose()
        await consumer.close()

    asyncio.run(work())
    assert (committed(url), ledger_of(url)) == (2, ["row"])


def test_records_and_rows_of_an_async_connection_are_one_commit(url, async_url):
    producer = Producer({"bootstrap.servers": url, "transactional.id": "anna"})
    producer.init_transactions(PATIENCE_SECONDS)

    lost = []

    async def work():
        engine = create_async_engine(async_url)
        event.listen(engine.sync_engine, "invalidate", lambda *what: lost.append(what))
        async with engine.connect() as connection:
            for end in (producer.abort_transaction, producer.commit_transaction):
                producer.begin_transaction()
                await connection.run_sync(producer.enlist)
                await connection.execute(INSERT, {"entry": end.__name__})
                producer.produce("t", end.__name__)
                await connection.run_sync(lambda _, end=end: end(PATIENCE_SECONDS))
        await engine.dispose()

    asyncio.run(work())
    producer.close()
    assert ledger_of(url) == ["commit_transaction"]
    assert values(read_to_end(url, "t"))[2:] == [b"commit_transaction"]
    # The answer to the COMMIT was understood: the connection is its owner's again, as it was.
    assert lost == []


def test_an_async_session_that_is_ended_outside_of_run_sync_says_so_and_stays_enlisted(url, async_url):
    """An abort that only seemed to be one would leave the rows to the session's own commit."""
    producer = Producer({"bootstrap.servers": url, "transactional.id": "anna"})
    producer.init_transactions(PATIENCE_SECONDS)

    async def work():
        engine = create_async_engine(async_url)
        async with AsyncSession(engine) as session:
            for end in (producer.abort_transaction, producer.commit_transaction):
                producer.begin_transaction()
                await session.run_sync(producer.enlist)
                await session.execute(INSERT, {"entry": end.__name__})
                producer.produce("t", end.__name__)
                with pytest.raises(KafkaException, match="within run_sync only") as refused:
                    end(PATIENCE_SECONDS)
                assert refused.value.args[0].code() == KafkaError._STATE
                with pytest.raises(KafkaException, match="enlisted"):
                    await session.commit()
                await session.run_sync(lambda _, end=end: end(PATIENCE_SECONDS))
        await engine.dispose()

    asyncio.run(work())
    producer.close()
    assert ledger_of(url) == ["commit_transaction"]
    assert values(read_to_end(url, "t"))[2:] == [b"commit_transaction"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("is_failed", [True, False], ids=["by an error", "at its end"])
def test_an_async_session_that_was_closed_within_the_block_is_in_the_way_of_nothing(url, async_url, is_failed):
    """Its rows are gone; where its end comes is outside of run_sync, and the producer goes on all the same."""
    producer = Producer({"bootstrap.servers": url, "transactional.id": "anna"})
    producer.init_transactions(PATIENCE_SECONDS)

    async def work(engine):
        with producer.transaction(PATIENCE_SECONDS):
            producer.produce("t", b"lost")
            async with AsyncSession(engine) as session:
                await session.run_sync(producer.enlist)
                await session.execute(INSERT, {"entry": "lost"})
                if is_failed:
                    raise ZeroDivisionError

    async def work_and_go_on():
        engine = create_async_engine(async_url)
        with pytest.raises(ZeroDivisionError if is_failed else KafkaException) as raised:
            await work(engine)
        if not is_failed:
            assert raised.value.args[0].txn_requires_abort()
            assert "closed by its owner" in raised.value.args[0].str()
        with producer.transaction(PATIENCE_SECONDS):
            producer.produce("t", b"1")
        await engine.dispose()

    asyncio.run(work_and_go_on())
    producer.close()
    assert ledger_of(url) == []
    assert values(read_to_end(url, "t"))[2:] == [b"1"]


def test_an_async_connection_that_another_producer_has_enlisted_is_refused(url, async_url):
    producers = [Producer({"bootstrap.servers": url, "transactional.id": name}) for name in ("anna", "bert")]
    for producer in producers:
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
    first, second = producers

    async def work():
        engine = create_async_engine(async_url)
        async with engine.connect() as connection:
            await connection.run_sync(first.enlist)
            await connection.execute(INSERT, {"entry": "row"})
            first.produce("t", b"anna")
            with pytest.raises(KafkaException, match="another producer"):
                await connection.run_sync(second.enlist)
            await connection.run_sync(lambda _: first.commit_transaction(PATIENCE_SECONDS))
        await engine.dispose()

    asyncio.run(work())
    for producer in producers:
        producer.close()
    assert (ledger_of(url), values(read_to_end(url, "t"))) == (["row"], [b"0", b"1", b"anna"])
