"""The view `records` in the programs `sqlite3` and `psql`: what they print is what fetch returns."""

from __future__ import annotations

import csv
import io
import json

import pytest

from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.columns import Codec
from txnstore.log.fetch import fetch
from txnstore.log.topics import create_topic, find_topics
from txnstore.model import IsolationLevel, Record
from txnstore.transactions.coordinator import TransactionCoordinator

COLUMNS = 'topic, partition, "offset", timestamp_ms, {key}, {value}, headers, is_transactional, status, codec'
RECORDS = [
    Record(b"value", b"key", 1_000),
    Record(b"", b"", 2_000),
    Record(None, None, 999),
    Record(
        b"\x00\xff\n\"',;", None, 1_000, [("name", b"text"), ("name", None), ("b\0n", b"\xff"), ("é", "ü".encode())]
    ),
    Record("a longer value, \U0001f600".encode() * 20, b"k" * 300, 1_700_000_000_000, [("", b"")]),
    Record(None, b"tombstone", 5),
]


@pytest.fixture
def filled(store, clock):
    """Two topics with all kinds of records: plain, compressed, of committed, aborted and open transactions."""
    for name in ("orders", "other"):
        topic = store.write(lambda connection, name=name: create_topic(connection, name, partition_count=2))
        for partition_id in topic.partition_ids:
            fill(store, partition_id, f"{name}-{partition_id}")
    return store


def fill(store, partition_id, transactional_id):
    coordinator = TransactionCoordinator(store)
    producer = coordinator.init_producer_id(transactional_id).identity

    def write(*records, codec=Codec.NONE):
        batch = encode(records, codec=codec)
        store.write(lambda connection: append(connection, [Append(partition_id, batch)]))

    def begin(*records):
        batch = encode(records, producer=producer, base_sequence=0, is_transactional=True)
        coordinator.append(transactional_id, producer, [Append(partition_id, batch)])

    write(*RECORDS)
    begin(*RECORDS[:3])
    write(RECORDS[0])
    producer = coordinator.end_transaction(transactional_id, producer, commit=True).identity
    begin(*RECORDS[3:])
    producer = coordinator.end_transaction(transactional_id, producer, commit=False).identity
    write(*RECORDS, codec=Codec.GZIP)
    begin(Record(b"open"))
    write(Record(b"behind the open one"))


def printed(store, url, sql_program, condition="TRUE", order='topic, partition, "offset"'):
    """The rows of the view as its program prints them."""
    if store.backend.name == "sqlite":
        columns, view = COLUMNS.format(key="hex(key)", value="hex(value)"), "txnstore_records"
        # hex() of NULL is empty text.
        columns = columns.replace("hex(key)", "CASE WHEN key IS NOT NULL THEN hex(key) END")
        columns = columns.replace("hex(value)", "CASE WHEN value IS NOT NULL THEN hex(value) END")
    else:
        columns, view = COLUMNS.format(key="encode(key, 'hex')", value="encode(value, 'hex')"), "txnstore.records"
    text = sql_program(url, f"SELECT {columns} FROM {view} WHERE {condition} ORDER BY {order};")
    return [tuple(row) for row in csv.reader(io.StringIO(text))]


def plain(row):
    topic, partition, offset, timestamp_ms, key, value, headers, transactional, status, codec = row
    return (
        topic,
        int(partition),
        int(offset),
        int(timestamp_ms),
        None if key == "NULL" else bytes.fromhex(key),
        None if value == "NULL" else bytes.fromhex(value),
        None if headers == "NULL" else json.loads(headers),
        transactional in ("1", "t"),
        status,
        codec,
    )


def read_by_fetch(store, topic_name, number, isolation):
    (topic,) = store.read(lambda connection: find_topics(connection, [topic_name]))
    partition_id = topic.partition_ids[number]
    page = store.read(lambda connection: fetch(connection, {partition_id: 0}, isolation=isolation))[partition_id]
    return [
        (record.offset, record.timestamp_ms, record.key, record.value, batch.codec is not Codec.NONE)
        for batch in page.batches
        for record in batch.records()
    ], page.bounds.last_stable_offset


@pytest.mark.slow_but_first
@pytest.mark.parametrize("isolation", list(IsolationLevel))
def test_what_is_printed_is_what_fetch_returns(filled, url, sql_program, isolation):
    rows = [plain(row) for row in printed(filled, url, sql_program)]
    assert {row[:2] for row in rows} == {(name, number) for name in ("orders", "other") for number in (0, 1)}
    for name in ("orders", "other"):
        for number in (0, 1):
            fetched, last_stable_offset = read_by_fetch(filled, name, number, isolation)
            shown = [row for row in rows if row[:2] == (name, number)]
            if isolation is IsolationLevel.READ_COMMITTED:
                shown = [row for row in shown if row[8] == "committed" and row[2] < last_stable_offset]
            assert [row[2:6] for row in shown] == [
                # The view does not open what is compressed; it says so instead.
                (offset, timestamp_ms, None if compressed else key, None if compressed else value)
                for offset, timestamp_ms, key, value, compressed in fetched
            ]
            assert [row[9] == "gzip" for row in shown] == [compressed for *_, compressed in fetched]
            assert len(shown) > 10


def test_every_status_and_every_codec_is_told(filled, url, sql_program):
    rows = [plain(row) for row in printed(filled, url, sql_program, "topic = 'orders' AND partition = 0")]
    told = [(row[2], row[7], row[8], row[9]) for row in rows]
    assert told == [
        *((offset, False, "committed", "none") for offset in range(6)),
        *((offset, True, "committed", "none") for offset in range(6, 9)),
        (9, False, "committed", "none"),
        # 10 is a marker.
        *((offset, True, "aborted", "none") for offset in range(11, 14)),
        # 14 is a marker.
        *((offset, False, "committed", "gzip") for offset in range(15, 21)),
        (21, True, "open", "none"),
        (22, False, "committed", "none"),
    ]


def test_headers_are_readable_json(filled, url, sql_program):
    rows = [plain(row) for row in printed(filled, url, sql_program, "topic = 'orders' AND partition = 0")]
    assert [row[6] for row in rows[:6]] == [
        None,
        None,
        None,
        ["name", "text", "name", None, ["62006e"], ["ff"], "é", "ü"],
        ["", ""],
        None,
    ]


@pytest.mark.slow
def test_people_ask_in_plain_sql(filled, url, sql_program):
    view = "txnstore_records" if filled.backend.name == "sqlite" else "txnstore.records"
    by_status = f"SELECT status, count(*) FROM {view} WHERE topic = 'orders' GROUP BY status ORDER BY status;"
    assert sql_program(url, by_status).split() == ["aborted,6", "committed,34", "open,2"]
    newest = f'SELECT "offset" FROM {view} WHERE topic = \'other\' AND partition = 1 ORDER BY "offset" DESC LIMIT 1;'
    assert sql_program(url, newest).split() == ["22"]
    tombstones = f"SELECT count(*) FROM {view} WHERE value IS NULL AND key IS NOT NULL AND codec = 'none';"
    assert sql_program(url, tombstones).split() == ["8"]
