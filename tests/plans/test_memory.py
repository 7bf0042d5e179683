"""What each call brings to this process of a store that has been in use for years: pages, however much there is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, select
from typer.testing import CliRunner

from tests.plans.big_store import ABORTED, COPIES, OPEN_OFFSET, OPEN_PRODUCER_ID, PRODUCERS, TRANSACTIONS, BigStore
from tests.plans.measuring import Touched, measured
from txnstore.cli.consume import ReadingStart, StartKind, read_positions
from txnstore.cli.program import NAMES, program_with
from txnstore.cli.timeline import read_timeline
from txnstore.db.schema import record_batches
from txnstore.log.bounds import offset_for_time, offset_of_max_timestamp
from txnstore.log.fetch import PAGE_BATCHES_MAX, fetch
from txnstore.model import IsolationLevel
from txnstore.transactions.listing import TransactionFilter, hanging_transactions, list_transactions

pytestmark = pytest.mark.slow

COMMITTED, UNCOMMITTED = IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED


def _times(big: BigStore, connection: Connection) -> None:
    for partition_id in (big.plain, big.held_back):
        for behind_ms in (0, 100_000, 499_000, 10_000_000):
            for isolation in (COMMITTED, UNCOMMITTED):
                offset_for_time(connection, partition_id, big.first_ms + behind_ms, isolation)
        offset_of_max_timestamp(connection, partition_id, COMMITTED)


def _page(big: BigStore, connection: Connection) -> None:
    for position in (0, ABORTED.start * COPIES, 250_000):
        fetch(connection, {big.transactions: position}, isolation=COMMITTED)


def _last_records(big: BigStore, connection: Connection) -> None:
    for count in (1, 5_000, 50_000):
        read_positions(
            lambda ids, work: work(connection, list(ids)),
            connection,
            big.topic,
            None,
            ReadingStart(StartKind.LAST, count),
            COMMITTED,
        )


def _timeline(big: BigStore, connection: Connection) -> None:
    for partition in (0, 1, 2):
        read_timeline(connection, big.topic, partition, from_offset=OPEN_OFFSET - 10, count=100)


def _listed(big: BigStore, connection: Connection) -> None:
    pattern = re.compile("id 77")
    (found,) = list_transactions(connection, TransactionFilter(transactional_id_pattern=pattern))
    assert found.transactional_id == "id 77"
    assert len(list_transactions(connection, TransactionFilter(producer_ids=[OPEN_PRODUCER_ID, 5]))) == 2
    hanging_transactions(big.store, connection, 0)


def assert_pages(found: list[Touched]) -> None:
    beyond = [touched for touched in found if touched.fetched > PAGE_BATCHES_MAX]
    assert found
    assert not beyond, "\n".join(map(str, beyond))


@pytest.mark.parametrize("work", [_times, _page, _last_records, _timeline, _listed])
def test_what_is_asked_comes_in_pages(big: BigStore, work: Callable[[BigStore, Connection], None]) -> None:
    with measured(big.store.backend.name) as found:
        big.store.read(lambda connection: work(big, connection))
    assert_pages(found)


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["log", "big", "-p", "1", "--batches", "--from", "497000"], 3_000),
        (["index", "big", "--from", str(TRANSACTIONS * COPIES - 4_999)], 5_000),
        (["producers", "big"], PRODUCERS),
        (["journal", "--transactional-id", "id 8"], 30),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_is_dumped_comes_in_pages(big: BigStore, arguments: list[str], lines: int) -> None:
    with measured(big.store.backend.name) as found:
        ended = CliRunner().invoke(program_with(NAMES), ["dump", *arguments, "--json", "--url", big.url])
    assert ended.exit_code == 0, ended.output
    assert lines <= len(ended.stdout.splitlines()) < lines + 100
    assert_pages(found)


def test_the_measure_notices_who_reads_everything(big: BigStore) -> None:
    everything: Any = select(record_batches.c.last_offset).where(record_batches.c.partition_id == big.plain)
    with measured(big.store.backend.name) as found:
        big.store.read(lambda connection: connection.execute(everything.limit(3_000)).all())
    assert [touched.fetched for touched in found] == [3_000]
    assert found[0].count >= 3_000
