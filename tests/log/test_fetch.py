"""Fetches: what readers of each isolation level get, page by page, and where they go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from sqlalchemy import event, text, update

from tests.log.histories import COMMITTED, LEVELS, UNCOMMITTED, Log, values_of
from txnstore.db.schema import partition_heads, record_batches
from txnstore.db.store import Store
from txnstore.errors import CorruptBatch, OffsetOutOfRange, UnknownTopicOrPartition
from txnstore.log import fetch as fetch_module
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.log.fetch import fetch
from txnstore.model import ControlType, IsolationLevel, Record


@pytest.fixture
def log(shared_store: Store) -> Log:
    return Log(shared_store)


@LEVELS
def test_an_empty_partition_gives_an_empty_page_and_the_position_back(log: Log, isolation: IsolationLevel) -> None:
    page = log.page(0, isolation)
    assert (page.batches, page.next_offset) == ((), 0)
    assert (page.bounds.log_start_offset, page.bounds.high_watermark, page.bounds.last_stable_offset) == (0, 0, 0)


@LEVELS
def test_records_outside_transactions_are_read_from_any_position(log: Log, isolation: IsolationLevel) -> None:
    log.plain(b"0", b"1", b"2")
    log.plain(b"3")
    for position in range(5):
        expected = [b"0", b"1", b"2", b"3"][position:]
        assert log.read(position, isolation) == (expected, 4)


def test_a_reader_of_committed_records_stops_at_the_first_open_transaction(log: Log) -> None:
    log.plain(b"0")
    log.write("A", b"open")
    log.plain(b"2")
    assert log.read() == ([b"0"], 1)
    assert log.read(0, UNCOMMITTED) == ([b"0", b"open", b"2"], 3)
    log.commit("A")
    assert log.read() == ([b"0", b"open", b"2"], 4)
    assert log.read(1) == ([b"open", b"2"], 4)


def test_the_record_before_the_last_stable_offset_is_seen_and_the_one_at_it_is_not(log: Log) -> None:
    log.write("A", b"0")
    log.commit("A")  # 1
    before = log.plain(b"2")
    at = log.write("B", b"3")
    page = log.page()
    assert page.bounds.last_stable_offset == at == before + 1
    assert values_of(page) == [b"0", b"2"]
    assert page.next_offset == at
    assert log.read(before) == ([b"2"], at)
    for position in (at, at + 1):
        assert log.read(position) == ([], position)


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_the_only_record_of_a_transaction_just_before_its_marker(log: Log, commit: bool) -> None:
    log.write("A", b"a")
    log.end("A", ControlType.COMMIT if commit else ControlType.ABORT)
    log.write("B", b"b")
    assert log.read() == ([b"a"] if commit else [], 2)


def test_transactions_of_several_producers_that_lie_among_each_other_are_told_apart(log: Log) -> None:
    log.write("A", b"a0", b"a1")  # 0, 1
    log.write("B", b"b2")  # 2
    log.plain(b"p3")  # 3
    log.write("A", b"a4")  # 4
    log.write("C", b"c5")  # 5
    # However often it has written since, it began there.
    assert log.read() == ([], 0)
    log.abort("A")  # 6
    assert log.read() == ([], 2)
    log.write("A", b"a7")  # 7: the next transaction of the same producer
    log.commit("B")  # 8
    assert log.read() == ([b"b2", b"p3"], 5)
    log.abort("C")  # 9
    assert log.read() == ([b"b2", b"p3"], 7)
    log.commit("A")  # 10
    assert log.read() == ([b"b2", b"p3", b"a7"], 11)
    assert log.read(0, UNCOMMITTED)[0] == [b"a0", b"a1", b"b2", b"p3", b"a4", b"c5", b"a7"]


@LEVELS
def test_markers_are_never_returned_and_the_position_moves_over_them(log: Log, isolation: IsolationLevel) -> None:
    log.write("A", b"a")
    log.commit("A")
    for number in range(3):
        log.write("B", b"%d" % number)
        log.commit("B")
    page = log.page(0, isolation)
    assert not any(batch.is_control for batch in page.batches)
    assert page.next_offset == 8
    assert log.read(7, isolation) == ([], 8)


def test_the_position_moves_over_a_range_that_was_aborted(log: Log) -> None:
    for _ in range(5):
        log.write("A", b"x", b"y")
    log.abort("A")
    assert log.read() == ([], 11)
    assert log.read(3) == ([], 11)
    log.plain(b"after")
    assert log.read() == ([b"after"], 12)
    assert log.read(11) == ([b"after"], 12)


@LEVELS
def test_a_page_is_bounded_in_records_but_has_at_least_one_batch(log: Log, isolation: IsolationLevel) -> None:
    for first in (0, 3, 6):
        log.plain(*(b"%d" % number for number in range(first, first + 3)))

    def records(records_max: int, position: int = 0) -> tuple[int, int]:
        page = log.page(position, isolation, records_max=records_max)
        return sum(batch.record_count for batch in page.batches), page.next_offset

    assert records(1) == (3, 3)
    assert records(3) == (3, 3)
    assert records(5) == (3, 3)
    assert records(6) == (6, 6)
    assert records(8) == (6, 6)
    assert records(9) == (9, 9)
    assert records(10) == (9, 9)
    # The batch that holds the position counts as a whole.
    assert records(3, position=5) == (3, 6)


@LEVELS
def test_a_page_is_bounded_in_bytes_but_has_at_least_one_batch(log: Log, isolation: IsolationLevel) -> None:
    for _ in range(3):
        log.plain(b"x" * 1_000)
    size_bytes = log.page(0, isolation).batches[0].size_bytes

    def batches(bytes_max: int) -> tuple[int, int]:
        page = log.page(0, isolation, bytes_max=bytes_max)
        return len(page.batches), page.next_offset

    assert batches(1) == (1, 1)
    assert batches(2 * size_bytes - 1) == (1, 1)
    assert batches(2 * size_bytes) == (2, 2)
    assert batches(3 * size_bytes) == (3, 3)


@pytest.mark.parametrize("options", [{"records_max": 0}, {"bytes_max": 0}, {"records_max": -1}], ids=str)
def test_a_page_without_room_is_empty_and_gives_the_position_back(log: Log, options: dict) -> None:
    log.plain(b"a")
    page = log.page(0, **options)
    assert (page.batches, page.next_offset, page.bounds.high_watermark) == ((), 0, 1)


@pytest.mark.slow_but_first
@pytest.mark.slow_on_postgresql
@LEVELS
@pytest.mark.parametrize("offsets_max", [1, 2, 5, 50_000])
@pytest.mark.parametrize("options", [{"records_max": 1}, {"records_max": 4}, {"bytes_max": 1}, {}], ids=str)
def test_read_page_by_page_nothing_is_left_out_or_comes_twice(
    log: Log, monkeypatch: pytest.MonkeyPatch, isolation: IsolationLevel, options: dict, offsets_max: int
) -> None:
    monkeypatch.setattr(fetch_module, "PAGE_BATCHES_MAX", 3)
    monkeypatch.setattr(fetch_module, "PAGE_OFFSETS_MAX", offsets_max)
    expected: list[tuple[int, bytes]] = []
    for number in range(6):
        for producer in "AB":
            offset = log.write(producer, b"%d" % number, b"+")
            if isolation is UNCOMMITTED or producer == "B":
                expected += [(offset, b"%d" % number), (offset + 1, b"+")]
        if number % 2:
            log.abort("A")
            log.commit("B")
        offset = log.plain(b"p")
        expected.append((offset, b"p"))
    assert log.read_all(isolation, **options) == expected


def test_many_aborted_batches_cost_a_reader_no_pages_of_their_own(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "PAGE_BATCHES_MAX", 2)
    for _ in range(8):
        log.write("A", b"x")
    log.abort("A")
    log.plain(b"p")
    assert log.read() == ([b"p"], 10)


def test_very_many_aborted_batches_are_passed_page_by_page(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "PAGE_OFFSETS_MAX", 4)
    for _ in range(8):
        log.write("A", b"x")
    log.abort("A")
    log.plain(b"p")
    assert [(values_of(page), page.next_offset) for page in map(log.page, (0, 4, 8))] == [
        ([], 4),
        ([], 8),
        ([b"p"], 10),
    ]


def test_a_gap_in_the_log_is_passed_in_one_page_however_wide(log: Log) -> None:
    log.plain(b"a")
    moved = update(partition_heads).where(partition_heads.c.partition_id == log.id).values(next_offset=2**40)
    log.store.write(lambda connection: connection.execute(moved))
    log.plain(b"b")
    assert values_of(log.page(1)) == [b"b"]
    log.store.write(lambda connection: connection.execute(moved.values(next_offset=2**41)))
    assert (values_of(log.page(2**40 + 1)), log.page(2**40 + 1).next_offset) == ([], 2**41)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("position", [-1, -2, -1001, 3, 2**31, 2**63 - 1, 2**63, -(2**63) - 1], ids=str)
@LEVELS
def test_a_position_outside_the_log_is_refused(log: Log, isolation: IsolationLevel, position: int) -> None:
    log.plain(b"0", b"1")
    with pytest.raises(OffsetOutOfRange, match=rf"partition id {log.id}: offset {position} is not within 0 to 2"):
        log.page(position, isolation)
    assert log.page(2, isolation).batches == ()


@LEVELS
def test_a_position_before_the_start_of_the_log_is_refused(log: Log, isolation: IsolationLevel) -> None:
    log.plain(b"0", b"1", b"2", b"3")
    moved = update(partition_heads).where(partition_heads.c.partition_id == log.id).values(log_start_offset=2)
    log.store.write(lambda connection: connection.execute(moved))
    with pytest.raises(OffsetOutOfRange, match="offset 1 is not within 2 to 4"):
        log.page(1, isolation)
    assert log.read(2, isolation) == ([b"2", b"3"], 4)


def test_beyond_the_last_stable_offset_a_position_is_fine_up_to_the_high_watermark(log: Log) -> None:
    log.write("A", b"0", b"1")
    for position in (0, 1, 2):
        assert log.read(position) == ([], position)
    with pytest.raises(OffsetOutOfRange):
        log.page(3)


def test_an_unknown_partition_is_refused(log: Log) -> None:
    with pytest.raises(UnknownTopicOrPartition):
        log.pages({log.id: 0, 10**12: 0})
    assert log.pages({}) == {}


def test_each_of_several_partitions_has_its_own_page(log: Log) -> None:
    one, two, three = log.partition_ids
    log.plain(b"1", partition_id=one)
    log.write("A", b"2", partition_id=two)
    log.write("A", b"3", partition_id=three)
    log.commit("A", two)
    pages = log.pages(dict.fromkeys((three, one, two), 0))
    assert {partition_id: (values_of(page), page.next_offset) for partition_id, page in pages.items()} == {
        one: ([b"1"], 1),
        two: ([b"2"], 2),
        three: ([], 0),
    }


def test_the_bounds_of_a_page_hold_for_all_partitions_together(log: Log) -> None:
    for partition_id in log.partition_ids:
        for _ in range(4):
            log.plain(b"x", b"y", partition_id=partition_id)
    pages = log.pages(dict.fromkeys(log.partition_ids, 0), records_max=10)
    found = [sum(batch.record_count for batch in pages[partition_id].batches) for partition_id in log.partition_ids]
    assert found == [8, 2, 0]
    assert [pages[partition_id].next_offset for partition_id in log.partition_ids] == [8, 2, 0]


def test_all_pages_are_of_one_snapshot_whatever_is_committed_meanwhile(log: Log) -> None:
    """Between two statements of the fetch somebody commits a transaction in two partitions."""
    one, two, _ = log.partition_ids
    log.write("A", b"1", partition_id=one)
    log.write("A", b"2", partition_id=two)
    statements = 0

    def commit_meanwhile(connection, cursor, statement: str, *_: object) -> None:
        nonlocal statements
        if "partition_heads" in statement and statement.startswith("SELECT"):
            statements += 1
            if statements == 1:
                log.commit("A", one, two)
                log.plain(b"later", partition_id=one)

    def fetch_both(isolation: IsolationLevel) -> list[tuple[list[bytes | None], int]]:
        pages = log.pages({one: 0, two: 0}, isolation=isolation)
        return [(values_of(pages[partition_id]), pages[partition_id].next_offset) for partition_id in (one, two)]

    event.listen(log.store.engine, "after_cursor_execute", commit_meanwhile)
    try:
        assert fetch_both(UNCOMMITTED) == [([b"1"], 1), ([b"2"], 1)]
    finally:
        event.remove(log.store.engine, "after_cursor_execute", commit_meanwhile)
    assert statements > 1
    assert fetch_both(COMMITTED) == [([b"1", b"later"], 3), ([b"2"], 2)]


@LEVELS
def test_a_commit_in_the_middle_of_a_fetch_does_not_show_half_a_transaction(
    log: Log, isolation: IsolationLevel
) -> None:
    one, two, _ = log.partition_ids
    log.write("A", b"1", partition_id=one)
    log.write("A", b"2", partition_id=two)
    done: list[int] = []

    def commit_meanwhile(connection, cursor, statement: str, *_: object) -> None:
        if "record_batches" in statement and statement.startswith("SELECT") and not done:
            done.append(1)
            log.commit("A", one, two)

    log.plain(b"p", partition_id=two)
    event.listen(log.store.engine, "before_cursor_execute", commit_meanwhile)
    try:
        pages = log.pages({one: 0, two: 0}, isolation=isolation)
    finally:
        event.remove(log.store.engine, "before_cursor_execute", commit_meanwhile)
    seen = [values_of(pages[partition_id]) for partition_id in (one, two)]
    assert seen == ([[b"1"], [b"2", b"p"]] if isolation is UNCOMMITTED else [[], []])


def zero_byte(column: str) -> Callable[[Store, int], None]:
    """Return what overwrites the middle of a column of the batch at offset 2 with another byte."""

    def damage(store: Store, partition_id: int) -> None:
        def work(connection) -> None:
            name = record_batches.c[column]
            where = (record_batches.c.partition_id == partition_id) & (record_batches.c.last_offset == 3)
            value = connection.execute(record_batches.select().with_only_columns(name).where(where)).scalar_one()
            middle = len(value) // 2
            other = b"#" if isinstance(value, bytes) else "#"
            changed = value[:middle] + other + value[middle + 1 :]
            connection.execute(update(record_batches).where(where).values({column: changed}))

        store.write(work)

    return damage


def add_one(column: str) -> Callable[[Store, int], None]:
    def damage(store: Store, partition_id: int) -> None:
        where = (record_batches.c.partition_id == partition_id) & (record_batches.c.last_offset == 3)
        statement = update(record_batches).where(where).values({column: record_batches.c[column] + 1})
        store.write(lambda connection: connection.execute(statement))

    return damage


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "damage",
    [
        *(
            pytest.param(zero_byte(column), id=column)
            for column in ("key_data", "value_data", "headers", "key_positions", "timestamp_deltas_ms")
        ),
        *(
            pytest.param(add_one(column), id=column)
            for column in ("crc", "record_count", "base_timestamp_ms", "base_sequence", "codec")
        ),
    ],
)
def test_a_damaged_batch_is_named_and_everything_before_it_can_still_be_read(
    log: Log, damage: Callable[[Store, int], None]
) -> None:
    secret = b"the-secret-payload"
    log.plain(b"0", b"1")
    batch = encode(
        [Record(secret, b"key-a", 5, [("h", b"1")]), Record(secret, b"key-b", 6)],
        producer=log.producers["A"],
        base_sequence=0,
    )
    log._append(Append(log.id, batch))
    log.plain(b"4")
    damage(log.store, log.id)
    for position in (0, 2, 3):
        with pytest.raises(
            CorruptBatch, match=f"partition {log.id}: the record batch of the offsets 2 to 3 "
        ) as raised:
            log.page(position)
        assert "secret" not in str(raised.value)
    assert values_of(log.page(0, records_max=2)) == [b"0", b"1"]
    assert log.read(4) == ([b"4"], 5)


def test_the_statement_that_damages_is_an_ordinary_one(log: Log) -> None:
    """The checksum also notices what somebody with the database's own tools does."""
    log.plain(b"0")
    prefix = "txnstore_" if log.store.backend.name == "sqlite" else "txnstore."
    changed = text(f"UPDATE {prefix}record_batches SET value_data = :data WHERE partition_id = :partition_id")
    log.store.write(lambda connection: connection.execute(changed, {"data": b"1", "partition_id": log.id}))
    with pytest.raises(CorruptBatch, match=f"partition {log.id}: the record batch of the offsets 0 to 0 "):
        log.page()


def test_a_transaction_of_many_batches_over_several_pages_is_all_there(log: Log) -> None:
    for number in range(30):
        log.write("A", b"%d" % number)
    log.commit("A")
    assert [value for _, value in log.read_all(records_max=7)] == [b"%d" % number for number in range(30)]


@LEVELS
def test_a_page_ends_before_the_offset_that_is_given(log: Log, isolation: IsolationLevel) -> None:
    log.plain(b"a")
    log.plain(b"b", b"c")
    log.plain(b"d")
    ends = {log.id: 2}
    page = log.page(0, isolation, end_offsets=ends)
    # The batch with the last wanted record comes whole.
    assert (values_of(page), page.next_offset) == ([b"a", b"b", b"c"], 2)
    assert log.page(2, isolation, end_offsets=ends).batches == ()
    assert log.page(2, isolation, end_offsets=ends).next_offset == 2
    assert log.page(0, isolation, end_offsets={log.id: 99}).next_offset == 4
    # What compaction has taken in front of the end brings nothing from behind it.
    gone = record_batches.delete().where(record_batches.c.partition_id == log.id, record_batches.c.last_offset == 2)
    log.store.write(lambda connection: connection.execute(gone))
    page = log.page(0, isolation, end_offsets={log.id: 3})
    assert (values_of(page), page.next_offset) == ([b"a"], 3)


def test_postgresql_sends_payloads_in_binary_form(
    txnstore_postgresql_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As text they are twice as long, and either side has to convert them."""
    forms = []
    execute = psycopg.Cursor.execute

    def noting(cursor: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        answer = execute(cursor, query, *arguments, **options)
        described = [column.name for column in cursor.description or ()]
        if "value_data" in described:
            forms.append(cursor.pgresult.fformat(described.index("value_data")))
        return answer

    log = Log(txnstore_postgresql_store)
    value = bytes(range(256))
    log.plain(value)
    monkeypatch.setattr(psycopg.Cursor, "execute", noting)
    page = log.store.read(lambda connection: fetch(connection, {log.id: 0}))[log.id]
    assert [record.value for batch in page.batches for record in batch.records()] == [value]
    assert forms == [psycopg.pq.Format.BINARY]
