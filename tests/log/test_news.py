"""What is new for a reader that had read everything: the same as a fetch brings, or nothing at all."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import closing

import pytest
from sqlalchemy import Connection, delete, update

from tests.log.histories import COMMITTED, LEVELS, UNCOMMITTED, Log, values_of
from txnstore.db.backend import Subjects, Waiter
from txnstore.db.schema import outbox, partition_heads, record_batches
from txnstore.db.store import Store
from txnstore.log import news as news_module
from txnstore.log.bounds import read_bounds
from txnstore.log.commit_order import CommitPage, CommitPosition, fetch_in_commit_order
from txnstore.log.deleting import advance_log_start
from txnstore.log.fetch import Page, Room
from txnstore.log.news import (
    BATCH_BYTES_MAX,
    BATCHES_MAX,
    OFFSETS_MAX,
    PARTITIONS_MAX,
    read_news,
    read_news_in_commit_order,
)
from txnstore.log.topics import create_topic, delete_topic
from txnstore.model import ControlType, IsolationLevel

ROOM = Room(10_000, 8 * 1024 * 1024)


class News:
    """A log, and a reader that asks on its waiter's connection."""

    def __init__(self, log: Log, waiter: Waiter) -> None:
        self.log = log
        self.waiter = waiter

    def of(
        self, positions: Mapping[int, int], isolation: IsolationLevel = COMMITTED, room: Room = ROOM
    ) -> dict[int, Page] | None:
        return read_news(self.waiter.rows, positions, isolation, room)

    def __call__(self, position: int = 0, isolation: IsolationLevel = COMMITTED, room: Room = ROOM) -> Page | None:
        found = self.of({self.log.id: position}, isolation, room)
        return None if found is None else found[self.log.id]


@pytest.fixture
def log(shared_store: Store) -> Log:
    return Log(shared_store)


@pytest.fixture
def news(log: Log) -> Iterator[News]:
    with closing(log.store.waiter(Subjects(frozenset(log.partition_ids)))) as waiter:
        yield News(log, waiter)


def test_what_was_committed_since_comes_at_once(log: Log, news: News) -> None:
    for position in range(3):
        page = news(position)
        assert page is not None
        assert (page.batches, page.next_offset) == ((), position)
        log.plain(b"%d" % position)
        page = news(position)
        assert page is not None
        assert (values_of(page, position), page.next_offset) == ([b"%d" % position], position + 1)


@pytest.mark.slow_but_first
@pytest.mark.slow_on_postgresql
@pytest.mark.parametrize("seed", range(20))
@LEVELS
def test_it_is_what_a_fetch_brings_whatever_has_happened(
    log: Log, news: News, isolation: IsolationLevel, seed: int
) -> None:
    chance = random.Random(seed)
    open_in: dict[str, set[int]] = {}
    for _ in range(chance.randrange(1, 25)):
        producer, to = chance.choice("ABC"), chance.choice(log.partition_ids)
        match chance.randrange(4):
            case 0:
                log.plain(*[b"plain"] * chance.randrange(1, 4), partition_id=to)
            case 1 | 2:
                log.write(producer, *[b"in a transaction"] * chance.randrange(1, 3), partition_id=to)
                open_in.setdefault(producer, set()).add(to)
            case _:
                if producer in open_in:
                    kind = chance.choice([ControlType.COMMIT, ControlType.ABORT])
                    log.end(producer, kind, *sorted(open_in.pop(producer)))
    for _ in range(10):
        count = chance.randrange(1, 4)
        positions = {
            partition_id: chance.randrange(log.pages({partition_id: 0})[partition_id].bounds.high_watermark + 1)
            for partition_id in chance.sample(log.partition_ids, count)
        }
        found, fetched = news.of(positions, isolation), log.pages(positions, isolation=isolation)
        assert found is not None
        assert list(found) == list(positions)
        for partition_id, page in found.items():
            assert page == fetched[partition_id]
            assert values_of(page, positions[partition_id]) == values_of(fetched[partition_id], positions[partition_id])


@LEVELS
def test_the_records_of_an_open_transaction_come_once_it_has_ended(
    log: Log, news: News, isolation: IsolationLevel
) -> None:
    log.write("A", b"a")
    log.plain(b"behind")
    page = news(0, isolation)
    assert page is not None
    assert values_of(page) == ([b"a", b"behind"] if isolation is UNCOMMITTED else [])
    assert page.bounds.last_stable_offset == 0
    log.commit("A")
    page = news(0, isolation)
    assert page is not None
    assert (values_of(page), page.next_offset) == ([b"a", b"behind"], 3)


def test_more_than_comes_at_once_does_not_come_at_all(log: Log, news: News) -> None:
    for _ in range(BATCHES_MAX):
        log.plain(b"0")
    page = news()
    assert page is not None
    assert len(page.batches) == BATCHES_MAX
    log.plain(b"0")
    assert news() is None
    assert news(1) is not None


def test_a_batch_that_ends_too_far_away_does_not_come(log: Log, news: News) -> None:
    log.plain(*[b"0"] * (OFFSETS_MAX + 1))
    assert news() is None
    page = news(1)
    assert page is not None
    assert len(values_of(page, 1)) == OFFSETS_MAX


def test_a_large_batch_does_not_come_nor_is_it_sent(log: Log, news: News) -> None:
    log.plain(bytes(BATCH_BYTES_MAX - 100))
    page = news()
    assert page is not None
    assert len(values_of(page)) == 1
    log.plain(bytes(BATCH_BYTES_MAX))
    assert news() is None
    sent: list[object] = []

    def watched(*arguments: object) -> object:
        rows = news.waiter.rows(*arguments)  # type: ignore[arg-type]  # as they are given
        sent.extend(row.value_data for row in rows or [])
        return rows

    assert read_news(watched, {log.id: 1}, COMMITTED, ROOM) is None  # type: ignore[arg-type]  # as above
    assert sent == [None]


@pytest.mark.parametrize("room", [Room(2, 1_000), Room(10, 40)], ids=str)
def test_what_has_no_room_in_the_page_does_not_come(log: Log, news: News, room: Room) -> None:
    for _ in range(2):
        log.plain(b"ten bytes.")
    page = news(0, COMMITTED, room)
    assert page is not None
    assert len(page.batches) == 2
    log.plain(b"ten bytes.", partition_id=log.partition_ids[1])
    assert news.of({log.id: 0, log.partition_ids[1]: 0}, COMMITTED, room) is None


@pytest.mark.parametrize("position", [-1, 2, 2**40])
def test_a_position_outside_the_log_is_for_the_fetch(log: Log, news: News, position: int) -> None:
    log.plain(b"0")
    assert news(position) is None


def test_a_deleted_partition_is_for_the_fetch(log: Log, news: News) -> None:
    name = f"deleted-{log.id}"
    topic = log.store.write(lambda connection: create_topic(connection, name))
    positions = {log.id: 0, topic.partition_ids[0]: 0}
    assert news.of(positions) is not None
    log.store.write(lambda connection: delete_topic(connection, name))
    log.store.write(
        lambda connection: connection.execute(
            delete(partition_heads).where(partition_heads.c.partition_id == topic.partition_ids[0])
        )
    )
    assert news.of(positions) is None


def test_a_damaged_batch_is_for_the_fetch(log: Log, news: News) -> None:
    log.plain(b"0")
    damage = update(record_batches).where(record_batches.c.partition_id == log.id).values(crc=record_batches.c.crc + 1)
    log.store.write(lambda connection: connection.execute(damage))
    assert news() is None


def test_very_many_partitions_are_for_the_fetch(log: Log, news: News) -> None:
    def make(connection: object) -> tuple[int, ...]:
        return create_topic(connection, f"many-{log.id}", partition_count=PARTITIONS_MAX + 1).partition_ids  # type: ignore[arg-type]

    partition_ids = log.store.write(make)
    assert news.of(dict.fromkeys(partition_ids, 0)) is None
    log.plain(b"new", partition_id=partition_ids[-1])
    found = news.of(dict.fromkeys(partition_ids[1:], 0))
    assert found is not None
    assert [len(page.batches) for page in found.values()] == [0] * (PARTITIONS_MAX - 1) + [1]


def test_it_tells_whether_rows_wait_in_the_outbox(txnstore_store: Store) -> None:
    log = Log(txnstore_store)
    with closing(log.store.waiter(Subjects(frozenset(log.partition_ids)))) as waiter:
        news = News(log, waiter)
        for refusal, waits in (("refused", False), (None, True)):
            row = {"topic": "t", "refusal": refusal}
            log.store.write(lambda connection, row=row: connection.execute(outbox.insert(), row))
            for count in (1, 3):
                found = news.of(dict.fromkeys(log.partition_ids[:count], 0))
                assert found is not None
                assert [page.bounds.outbox_waits for page in found.values()] == [waits] * count


def test_it_is_one_statement_on_a_connection_that_has_no_transaction_open_after_it(
    log: Log, news: News, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log.store, "_attempt", None)
    asked: list[object] = []

    def counted(*arguments: object) -> object:
        asked.append(arguments)
        return news.waiter.rows(*arguments)  # type: ignore[arg-type]  # as they are given

    assert news_module.read_news(counted, dict.fromkeys(log.partition_ids, 0), COMMITTED, ROOM) is not None  # type: ignore[arg-type]
    assert len(asked) == 1
    connection = vars(news.waiter)["_connection"]
    if log.store.backend.name == "sqlite":
        assert not connection.in_transaction
    else:
        assert connection.info.transaction_status == connection.info.transaction_status.IDLE


@pytest.mark.slow_but_first
@pytest.mark.slow_on_postgresql
@pytest.mark.parametrize("seed", range(20))
def test_in_commit_order_it_is_what_a_fetch_brings_whatever_has_happened(
    log: Log, news: News, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(news_module, "OFFSETS_MAX", 12)
    chance = random.Random(seed)
    open_in: dict[str, set[int]] = {}
    for _ in range(chance.randrange(5, 40)):
        producer, to = chance.choice("ABC"), chance.choice(log.partition_ids)
        match chance.randrange(4):
            case 0:
                log.plain(*[b"plain"] * chance.randrange(1, 4), partition_id=to)
            case 1 | 2:
                log.write(producer, *[b"in a transaction"] * chance.randrange(1, 3), partition_id=to)
                open_in.setdefault(producer, set()).add(to)
            case _:
                if producer in open_in:
                    kind = chance.choice([ControlType.COMMIT, ControlType.COMMIT, ControlType.ABORT])
                    log.end(producer, kind, *sorted(open_in.pop(producer)))
    cut = chance.randrange(3)
    for partition_id in log.partition_ids:
        log.store.write(lambda connection, cut=cut, at=partition_id: _advance(connection, at, cut))
    brought = 0
    for _ in range(20):
        positions = {}
        for partition_id in chance.sample(log.partition_ids, chance.randrange(1, 4)):
            bounds = log.pages({partition_id: cut})[partition_id].bounds
            positions[partition_id] = CommitPosition(
                chance.randrange(bounds.log_start_offset, bounds.high_watermark + 1)
            )
        found = read_news_in_commit_order(news.waiter.rows, positions, ROOM)
        fetched = log.store.read(lambda connection, positions=positions: fetch_in_commit_order(connection, positions))
        is_all = all(page.next_position.place - positions[at].place <= 12 for at, page in fetched.items())
        assert (found is None) or is_all
        if found is not None:
            brought += 1
            assert list(found) == list(positions)
            assert {at: (page.bounds, page.next_position) for at, page in found.items()} == {
                at: (page.bounds, page.next_position) for at, page in fetched.items()
            }
            assert {at: _placed(page) for at, page in found.items()} == {
                at: _placed(page) for at, page in fetched.items()
            }
    assert brought


def _advance(connection: Connection, partition_id: int, offset: int) -> None:
    bounds = read_bounds(connection, [partition_id])[partition_id]
    if bounds.high_watermark >= offset:
        advance_log_start(connection, partition_id, offset)


def _placed(page: CommitPage) -> list[tuple[CommitPosition, int, int | None, list[bytes | None]]]:
    return [
        (
            placed.start,
            placed.from_offset,
            placed.marker_offset,
            [record.value for record in placed.batch.records(placed.from_offset)],
        )
        for placed in page.batches
    ]


@pytest.mark.slow
def test_in_commit_order_what_began_long_ago_or_is_read_from_within_does_not_come_at_once(log: Log, news: News) -> None:
    def ask(*position: int) -> CommitPage | None:
        found = read_news_in_commit_order(news.waiter.rows, {log.id: CommitPosition(*position)}, ROOM)
        return None if found is None else found[log.id]

    log.write("A", b"a")
    log.plain(*[b"x"] * (OFFSETS_MAX - 1))
    page = ask(OFFSETS_MAX)
    assert page is not None
    assert (page.batches, page.next_position) == ((), CommitPosition(OFFSETS_MAX))
    # What is open is no news, wherever it stands.
    log.write("B", b"b")
    page = ask(OFFSETS_MAX)
    assert page is not None
    assert (page.batches, page.next_position) == ((), CommitPosition(OFFSETS_MAX + 1))
    log.commit("A")
    page = ask(OFFSETS_MAX)
    assert page is not None
    assert [placed.marker_offset for placed in page.batches] == [OFFSETS_MAX + 1]
    assert ask(OFFSETS_MAX + 1, 1) is None
    assert ask(OFFSETS_MAX + 1) is None
    assert ask(OFFSETS_MAX + 3) is None
    for number in range(OFFSETS_MAX):
        log.plain(b"%d" % number)
    first = log.write("C", b"c", b"d")
    log.commit("C")
    page = ask(first + 2)
    assert page is not None
    assert _placed(page) == [(CommitPosition(first + 2), first, first + 2, [b"c", b"d"])]
    assert ask(first + 2, first + 1) is None
