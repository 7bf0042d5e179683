"""The floors: the rows of a small transaction by the raw driver, without txnstore, on the same database.

A row for the record's batch and one for the marker, the head of the partition, the producer's state, the index of ended
transactions, the row of the transactional id, an entry of its journal, and with an offset that of the group: what any
client has to write that keeps the same promises, with the same locks and one commit.  Likewise one row that is put, and
the row of a member that joins a group or leaves it, under the lock of the group.

Who is to be woken is told with the commit: by NOTIFY, or on SQLite by a touch of the log behind it.
"""

# ruff: noqa: S608 - what stands in these statements are constants of this file

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final

import psycopg

from scripts.bench_support import VALUE
from scripts.comparison.sides import SQLITE, Side
from txnstore.db.url import parse_url
from txnstore.testing.postgres_server import connection_string

PLAIN: Final = "plain statements"
FUNCTION: Final = "one function"
CHANNEL: Final = "floor"
_TELL: Final = f"NOTIFY {CHANNEL}"
_TABLES: Final = {
    "floor_batches": "partition_id BIGINT, last_offset BIGINT, producer_id BIGINT, epoch INTEGER, control INTEGER,"
    " crc BIGINT, value {bytes}, PRIMARY KEY (partition_id, last_offset)",
    "floor_heads": "partition_id BIGINT PRIMARY KEY, next_offset BIGINT, timestamp_ms BIGINT",
    "floor_producers": "partition_id BIGINT, producer_id BIGINT, epoch INTEGER, recent TEXT,"
    " PRIMARY KEY (partition_id, producer_id)",
    "floor_finished": "partition_id BIGINT, marker_offset BIGINT, producer_id BIGINT, epoch INTEGER,"
    " first_offset BIGINT, PRIMARY KEY (partition_id, marker_offset)",
    "floor_transactions": "transactional_id TEXT PRIMARY KEY, producer_id BIGINT, epoch INTEGER, state INTEGER",
    "floor_journal": "entry_id {identity}, transactional_id TEXT, epoch INTEGER, state INTEGER",
    "floor_offsets": "group_id TEXT PRIMARY KEY, committed BIGINT",
    "floor_groups": "group_id TEXT PRIMARY KEY, generation BIGINT",
    "floor_members": "group_id TEXT, member_id TEXT, PRIMARY KEY (group_id, member_id)",
}
#: Rows that change all the time have room beside them, as those of a store have.
_HOT: Final = {"floor_heads", "floor_producers", "floor_transactions", "floor_offsets", "floor_groups"}
_FUNCTIONS: Final = """
CREATE FUNCTION floor_commit(of_number BIGINT, of_id TEXT, of_epoch INTEGER, of_value BYTEA, with_offset BOOLEAN)
RETURNS BIGINT LANGUAGE plpgsql AS $function$
DECLARE
    first BIGINT;
BEGIN
    UPDATE floor_transactions SET epoch = of_epoch, state = 4 WHERE transactional_id = of_id;
    UPDATE floor_heads SET next_offset = next_offset + 2, timestamp_ms = of_epoch WHERE partition_id = of_number
    RETURNING next_offset - 2 INTO first;
    UPDATE floor_producers SET epoch = of_epoch, recent = '[[0, 0, ' || first || ', ' || first || ', 0]]'
    WHERE partition_id = of_number AND producer_id = of_number;
    INSERT INTO floor_batches VALUES
        (of_number, first, of_number, of_epoch, NULL, 1, of_value),
        (of_number, first + 1, of_number, of_epoch, 1, 1, NULL);
    INSERT INTO floor_finished VALUES (of_number, first + 1, of_number, of_epoch, first);
    INSERT INTO floor_journal (transactional_id, epoch, state) VALUES (of_id, of_epoch, 4);
    IF with_offset THEN
        UPDATE floor_offsets SET committed = of_epoch WHERE group_id = of_id;
    END IF;
    RETURN first;
END
$function$;

CREATE FUNCTION floor_put(of_number BIGINT, of_offset BIGINT, of_value BYTEA)
RETURNS VOID LANGUAGE plpgsql AS $function$
BEGIN
    INSERT INTO floor_batches VALUES (of_number, of_offset, 0, 0, NULL, 1, of_value);
    PERFORM pg_notify('floor', '');
END
$function$
"""

Transact = Callable[..., object]


def connect(side: Side) -> Any:
    """Return a raw connection that commits as durably as a store does."""
    address = parse_url(side.url)
    if side.name == SQLITE:
        connection = sqlite3.connect(str(address.url.database), isolation_level=None, timeout=30)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        return connection
    return psycopg.connect(connection_string(side.url), autocommit=True, prepare_threshold=0)


def log_path(side: Side) -> str:
    """Return the path of a SQLite file's log."""
    return f"{parse_url(side.url).url.database}-wal"


def marked(side: Side, statement: str) -> str:
    """Return the statement with the driver's mark for `?`."""
    return statement if side.name == SQLITE else statement.replace("?", "%s")


def make_tables(side: Side) -> None:
    """Make the tables anew."""
    connection = connect(side)
    is_sqlite = side.name == SQLITE
    types = {
        "bytes": "BLOB" if is_sqlite else "BYTEA",
        "identity": "INTEGER PRIMARY KEY" if is_sqlite else "BIGSERIAL PRIMARY KEY",
    }
    for table, columns in _TABLES.items():
        connection.execute(f"DROP TABLE IF EXISTS {table}")
        room = " WITH (fillfactor = 50)" if not is_sqlite and table in _HOT else ""
        connection.execute(f"CREATE TABLE {table} ({columns.format(**types)}){room}")
    if not is_sqlite:
        connection.execute("DROP FUNCTION IF EXISTS floor_commit, floor_put")
        connection.execute(_FUNCTIONS, prepare=False)
    connection.close()


def _prepare(connection: Any, number: int, transactional_id: str, mark: str) -> None:
    for statement, parameters in (
        (f"INSERT INTO floor_heads VALUES ({mark}, 0, 0)", (number,)),
        (f"INSERT INTO floor_producers VALUES ({mark}, {mark}, 0, '')", (number, number)),
        (f"INSERT INTO floor_transactions VALUES ({mark}, {mark}, 0, 0)", (transactional_id, number)),
        (f"INSERT INTO floor_offsets VALUES ({mark}, 0)", (transactional_id,)),
    ):
        connection.execute(statement, parameters)


def plain(connection: Any, side: Side, number: int, name: str, *, has_offset: bool, is_told: bool = False) -> Transact:
    """Return a transaction by one statement after the other."""
    is_sqlite = side.name == SQLITE
    mark, lock = ("?", "") if is_sqlite else ("%s", " FOR UPDATE")
    wal = log_path(side)
    begin = "BEGIN IMMEDIATE" if is_sqlite else "BEGIN"
    _prepare(connection, number, name, mark)
    epoch, run = 0, connection.cursor().execute

    def sql(statement: str) -> str:
        return statement.replace("?", mark) + (lock if statement.startswith("SELECT") else "")

    find_transaction = sql("SELECT epoch, state FROM floor_transactions WHERE transactional_id = ?")
    find_head = sql("SELECT next_offset FROM floor_heads WHERE partition_id = ?")
    find_producer = sql("SELECT epoch, recent FROM floor_producers WHERE partition_id = ? AND producer_id = ?")
    add_batches = sql("INSERT INTO floor_batches VALUES (?, ?, ?, ?, NULL, 1, ?), (?, ?, ?, ?, 1, 1, NULL)")
    move_head = sql("UPDATE floor_heads SET next_offset = ?, timestamp_ms = ? WHERE partition_id = ?")
    note_producer = sql("UPDATE floor_producers SET epoch = ?, recent = ? WHERE partition_id = ? AND producer_id = ?")
    add_finished = sql("INSERT INTO floor_finished VALUES (?, ?, ?, ?, ?)")
    end = sql("UPDATE floor_transactions SET epoch = ?, state = 4 WHERE transactional_id = ?")
    add_entry = sql("INSERT INTO floor_journal (transactional_id, epoch, state) VALUES (?, ?, 4)")
    commit_offset = sql("UPDATE floor_offsets SET committed = ? WHERE group_id = ?")

    def transact(value: bytes = VALUE) -> None:
        nonlocal epoch
        epoch += 1
        run(begin)
        run(find_transaction, (name,)).fetchone()
        first = run(find_head, (number,)).fetchone()[0]
        run(find_producer, (number, number)).fetchone()
        run(add_batches, (number, first, number, epoch, value, number, first + 1, number, epoch))
        run(move_head, (first + 2, epoch, number))
        run(note_producer, (epoch, f"[[0, 0, {first}, {first}, 0]]", number, number))
        run(add_finished, (number, first + 1, number, epoch, first))
        run(end, (epoch, name))
        run(add_entry, (name, epoch))
        if has_offset:
            run(commit_offset, (epoch, name))
        if is_told and not is_sqlite:
            run(_TELL)
        run("COMMIT")
        if is_told and is_sqlite:
            os.utime(wal)

    return transact


def function(
    connection: Any, side: Side, number: int, name: str, *, has_offset: bool, is_told: bool = False
) -> Transact:
    """Return a transaction by one call of a PL/pgSQL function, which is a database transaction of its own."""
    _prepare(connection, number, name, "%s")
    epoch, cursor = 0, connection.cursor()
    tell = f", pg_notify('{CHANNEL}', '')" if is_told else ""

    def transact(value: bytes = VALUE) -> None:
        nonlocal epoch
        epoch += 1
        cursor.execute(f"SELECT floor_commit(%s, %s, %s, %b, %s){tell}", (number, name, epoch, value, has_offset))
        cursor.fetchone()

    return transact


def ways(side: Side) -> Mapping[str, Callable[..., Transact]]:
    """Return the ways in which a database takes a small transaction from the raw driver."""
    return {PLAIN: plain} if side.name == SQLITE else {PLAIN: plain, FUNCTION: function}


# --- one row, and those who are told of it ----------------------------------------------------------------------------


def put(connection: Any, side: Side, number: int, offset: int, value: bytes) -> None:
    """Commit one row, and tell of it."""
    insert = marked(side, "INSERT INTO floor_batches VALUES (?, ?, 0, 0, NULL, 1, ?)")
    _commit(connection, side, [(insert, (number, offset, value))])


def put_by_function(connection: Any, _: Side, number: int, offset: int, value: bytes) -> None:
    """Do the same by one call of a PL/pgSQL function."""
    connection.execute("SELECT floor_put(%s, %s, %b)", (number, offset, value))


def make_group(side: Side, group: str) -> None:
    """Make a group without members."""
    with closing(connect(side)) as connection:
        connection.execute(marked(side, "INSERT INTO floor_groups VALUES (?, 0)"), (group,))


def change_member(connection: Any, side: Side, group: str, member: str, *, joins: bool) -> None:
    """Commit that a member joins its group, or leaves it, and tell of it."""
    change = (
        "INSERT INTO floor_members VALUES (?, ?)"
        if joins
        else "DELETE FROM floor_members WHERE group_id = ? AND member_id = ?"
    )
    lock = "UPDATE floor_groups SET generation = generation + 1 WHERE group_id = ?"
    _commit(connection, side, [(marked(side, lock), (group,)), (marked(side, change), (group, member))])


def _commit(connection: Any, side: Side, statements: Sequence[tuple[str, tuple[object, ...]]]) -> None:
    is_sqlite = side.name == SQLITE
    with ExitStack() as stack:
        if is_sqlite:
            stack.enter_context(_line(side))
        connection.execute("BEGIN IMMEDIATE" if is_sqlite else "BEGIN")
        for statement, parameters in statements:
            connection.execute(statement, parameters)
        if not is_sqlite:
            connection.execute(_TELL)
        connection.execute("COMMIT")
    if is_sqlite:
        os.utime(log_path(side))


@contextmanager
def _line(side: Side) -> Iterator[None]:
    """Wait in a line of writers: SQLite itself lets those who find another one try again, up to 0.1 s later."""
    with Path(f"{parse_url(side.url).url.database}-floor").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
