"""Every table of the schema is moved, and every value of every column is the same on the other side."""

from __future__ import annotations

import random

import pytest
from sqlalchemy import BigInteger, Boolean, Integer, LargeBinary, SmallInteger, Text, Uuid, insert, select

from tests.moving.histories import all_rows
from txnstore.db.ddl import CoarseTime, Flag, Int16, Int32, Int64, String, UuidText
from txnstore.db.schema import metadata, stores
from txnstore.moving import pages as paging
from txnstore.moving.digests import NOTHING, Digest, Part, differences, digest_of, row_digest
from txnstore.moving.move import move
from txnstore.moving.pages import pages
from txnstore.moving.tables import COPIED, COPIED_BY_NAME, MADE_WITH_TABLES, OWN

ROWS = 7


def test_every_table_of_the_schema_has_a_place_in_a_move() -> None:
    """A table that is new: say in txnstore/moving/tables.py how it moves."""
    known = [*(copied.table for copied in COPIED), *OWN]
    assert sorted(known, key=str) == sorted(metadata.tables.values(), key=str)
    for table in MADE_WITH_TABLES:
        assert str(table.name) in COPIED_BY_NAME
    own = {column.name for column in stores.c if not column.name.startswith("move_")}
    # What of the source's row does not go to the target: the schema's version is what both have.
    assert own - {"singleton", "store_uuid", "schema_version", "database_identity"} == {
        "next_producer_id",
        "oldest_writer_version",
        "created_ms",
    }


def test_only_known_types_are_moved() -> None:
    """A type that is new: see that both databases return the same values of it."""
    known = (BigInteger, Boolean, Integer, LargeBinary, SmallInteger, Text, Uuid, type(Flag))
    for copied in COPIED:
        for column in copied.table.c:
            assert isinstance(column.type, known), column
            assert column.computed is None or isinstance(column.computed, CoarseTime), column


def value_of(column, number, chance):
    """Return a value as odd as the column takes it; its row has this number."""
    if column.name in SMALL:
        return SMALL[column.name](number)
    if column.nullable and number == 1:
        return None
    if isinstance(column.type, LargeBinary):
        return bytes(range(256)) + b"\0" * number + chance.randbytes(50)
    if column.type in LARGEST:
        return LARGEST[column.type] - number
    return {
        Flag: number % 2 == 0,
        UuidText: f"00000000-0000-4000-8000-{number:012}",
        String: f"{TEXTS[number % len(TEXTS)]}{number}",
    }[column.type]


#: Columns of which CHECKs, or the move itself, say what they take.
_ZERO = (
    "base_offset log_start_offset first_stored_offset compacted_bytes first_offset start_offset codec timestamp_type"
    " control_type"
)
_TENS = "outbox_id topic_id partition_id entry_id"
SMALL = {
    **dict.fromkeys(_ZERO.split(), lambda _: 0),
    **dict.fromkeys(_TENS.split(), lambda number: 10 * number),
    "singleton": lambda _: 1,
    # What was committed has a number, and nothing else has.
    "outcome": lambda number: int(number > 1),
    "state": lambda _: 1,
    "segment": lambda number: number % 4,
    "start_ms": lambda number: 2**62 + number,
    "deadline_ms": lambda number: number,
    "producer_epoch": lambda number: number,
    # PostgreSQL numbers its database transactions; the other one's numbers are told apart.
    "transaction_id": lambda number: -number,
}
LARGEST = {Int16: 2**15 - 1, Int32: 2**31 - 1, Int64: 2**63 - 1}
TEXTS = ("", " ", "ünïcødé ✓ \U0001f600", "quote' \" \\ % :x $1", '["a",null]\n\t', "Z", "a")


def read_one_by_one(store):
    """Return the rows of all tables by a plain SELECT of each, as `all_rows` returns them."""

    def told(column, value):
        if isinstance(value, bytes):
            return value.hex().upper()
        return value.replace("-", "") if isinstance(column.type, Uuid) and value else value

    found = {}
    for table in metadata.tables.values():
        columns = [column for column in table.c if column.computed is None]
        rows = store.read(lambda connection, columns=columns: connection.execute(select(*columns)).all())
        found[str(table.name)] = sorted((tuple(map(told, columns, row)) for row in rows), key=repr)
    del found["stores"]
    return found


@pytest.mark.slow
def test_odd_values_of_every_column_are_the_same_on_the_other_side(urls, opened, monkeypatch) -> None:
    monkeypatch.setattr(paging, "PAGE_ROWS_MAX", 3)
    monkeypatch.setattr(paging, "PAGE_BYTES_MAX", 900)
    source, target = map(opened, urls)
    chance = random.Random(7)

    def fill(connection):
        for copied in COPIED:
            if copied.name == "transaction_branches" or copied.table in MADE_WITH_TABLES:
                continue
            rows = [
                {column.name: value_of(column, number, chance) for column in copied.columns}
                for number in range(1, ROWS + 1)
            ]
            connection.execute(insert(copied.table), rows)

    source.write(fill)
    before = all_rows(source)
    assert before == read_one_by_one(source)
    assert {len(rows) for name, rows in before.items() if name != "transaction_branches"} == {1, ROWS}
    move(source, target, even_if_damaged=True)
    assert all_rows(target) == before
    coarse = [column for copied in COPIED for column in copied.table.c if column.computed is not None]
    assert coarse
    for column in coarse:
        statement = select(column).order_by(column)
        assert read(source, statement) == read(target, statement), column


def read(store, statement):
    return store.read(lambda connection: connection.execute(statement).scalars().all())


def test_pages_hold_all_rows_in_order_once_and_not_more_than_they_may(store, monkeypatch) -> None:
    monkeypatch.setattr(paging, "PAGE_ROWS_MAX", 4)
    monkeypatch.setattr(paging, "PAGE_BYTES_MAX", 100)
    outbox = COPIED_BY_NAME["outbox"]
    sizes = [10, 40, 40, 20, 0, 0, 0, 0, 0, 500, 1, 99, 1]
    rows = [{"topic": "t", "value": b"x" * size} for size in sizes]
    store.write(lambda connection: connection.execute(insert(outbox.table), rows))
    found = [[len(row.value) for row in page] for page in pages(store, outbox)]
    assert found == [[10, 40, 40], [20, 0, 0, 0], [0, 0], [500], [1, 99], [1]]
    keys = [row.outbox_id for page in pages(store, outbox) for row in page]
    assert [row.outbox_id for page in pages(store, outbox, (keys[5],)) for row in page] == keys[6:]
    small = COPIED_BY_NAME["store_configs"]
    names = sorted("abcdefgh")
    store.write(
        lambda connection: connection.execute(insert(small.table), [{"name": name, "value": ""} for name in names])
    )
    assert [[row.name for row in page] for page in pages(store, small)] == [names[:4], names[4:]]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((1, 2), (12,)),
        ((1, 2), (2, 1)),
        (("ab", "c"), ("a", "bc")),
        ((b"1",), ("1",)),
        ((None,), ("",)),
        ((None,), ("-",)),
        ((True,), (1,)),
        (("a", None), (None, "a")),
        ((b"",), ("",)),
    ],
)
def test_rows_that_differ_have_different_digests(left, right) -> None:
    assert row_digest(left) != row_digest(right)
    assert row_digest(left) == row_digest(list(left))


def test_a_digest_says_in_which_table_and_partition_two_stores_differ(store) -> None:
    heads = COPIED_BY_NAME["partition_heads"].table
    row = {"partition_id": 3, "log_start_offset": 0, "next_offset": 5, "running_max_timestamp_ms": -1, "segment": 1}
    before = digest_of(store)
    assert list(differences(before, digest_of(store))) == []
    store.write(lambda connection: connection.execute(insert(heads), [row, row | {"partition_id": 4}]))
    after = digest_of(store)
    assert [each.partition(":")[0] for each in differences(before, after)] == [
        "partition_heads of partition 3",
        "partition_heads of partition 4",
    ]
    store.write(lambda connection: connection.execute(heads.update().values(next_offset=6)))
    assert len(list(differences(after, digest_of(store)))) == 2
    assert after[Part("partition_heads", 3)].row_count == 1
    # A number that is given out next is a part of a store, too.
    outbox = COPIED_BY_NAME["outbox"].table
    store.write(lambda connection: connection.execute(insert(outbox), {"topic": "t"}))
    store.write(lambda connection: connection.execute(outbox.delete()))
    assert [each.partition(":")[0] for each in differences(after, digest_of(store))][-1] == "the next outbox_id"
    assert Digest(1, 2**128 - 1) + Digest(1, 2) == Digest(2, 1)
    assert NOTHING + NOTHING == NOTHING
