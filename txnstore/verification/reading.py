"""Tables read in pages, so that memory is bounded however much a store holds, and snapshots of several databases."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    ExceptionContext,
    Row,
    Select,
    Table,
    bindparam,
    event,
    exists,
    select,
    tuple_,
)
from sqlalchemy.exc import DBAPIError

from txnstore.db.schema import record_batches
from txnstore.db.statements import HotStatement
from txnstore.db.store import Store
from txnstore.log.fetch import PAGE_BATCHES_MAX, PAGE_BYTES_MAX
from txnstore.model import OFFSET_MAX
from txnstore.verification.invariants import Violation

Result = TypeVar("Result")

#: How many rows are in memory at once.
PAGE_ROWS: Final = 500
#: How many violations of a kind of rules are told; a store that is broken throughout has no end of them.
VIOLATIONS_MAX: Final = 1_000

# It opens the log: PostgreSQL's snapshots do not keep what is emptied as a whole (`db.postgresql.rotation`), but no
# segment is emptied that somebody has opened.
_TAKE_SNAPSHOT: Final = HotStatement(select(exists().where(record_batches.c.partition_id < 0)))
_OF_PARTITION: Final = record_batches.c.partition_id == bindparam("of_partition_id")
_FROM: Final = record_batches.c.last_offset >= bindparam("from_offset")
_SIZES: Final = HotStatement(
    select(record_batches.c.last_offset, record_batches.c.size_bytes)
    .where(_OF_PARTITION, _FROM)
    .order_by(record_batches.c.last_offset)
    .limit(PAGE_BATCHES_MAX)
)
_BATCHES: Final = HotStatement(
    select(record_batches)
    .where(_OF_PARTITION, _FROM, record_batches.c.last_offset <= bindparam("through_offset"))
    .order_by(record_batches.c.last_offset)
    .execution_options(binary_rows=True)
)


class Pages:
    """The rows of a statement, however many there are: read page by page, in the order of their keys."""

    def __init__(self, statement: Select[Any], *keys: ColumnElement[Any]) -> None:
        """Read the rows of `statement`; the keys name a row, and there is an index on them."""
        page = statement.order_by(*keys).limit(PAGE_ROWS)
        self._keys = {f"after_{key.key}": str(key.key) for key in keys}
        after = (bindparam(name, type_=key.type) for name, key in zip(self._keys, keys, strict=True))
        self._first = HotStatement(page)
        self._next = HotStatement(page.where(tuple_(*keys) > tuple_(*after)))

    def rows(self, connection: Connection) -> Iterator[Any]:
        """Return them."""
        rows = self._first.rows(connection)
        while rows:
            yield from rows
            if len(rows) < PAGE_ROWS:
                return
            rows = self._next.rows(connection, {name: getattr(rows[-1], key) for name, key in self._keys.items()})


class Holding:
    """Which of some tables have rows at all: most of them have none as a rule, and one statement says so of each."""

    def __init__(self, *tables: Table) -> None:
        """Ask about `tables`."""
        self._tables = tables
        self._statement = HotStatement(
            select(*(exists(select(1).select_from(table)).label(table.name) for table in tables))
        )

    def tables(self, connection: Connection) -> list[Table]:
        """Return those that have rows."""
        return [
            table for table, has_rows in zip(self._tables, self._statement.row(connection), strict=True) if has_rows
        ]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot of the store's database, or one of each database of a cluster."""

    connections: Sequence[Connection]
    of_several: bool = False
    """Whether a transaction may be in several: partitions are added before they are written to, and markers stay queued
    until all that is known to be written is struck off at once."""

    def rows(self, statement: HotStatement, parameters: Mapping[str, Any] = MappingProxyType({})) -> Iterator[Any]:
        """Return the rows of one database after the other: as many as fit into memory."""
        for connection in self.connections:
            yield from statement.rows(connection, parameters)

    def pages(self, pages: Pages) -> Iterator[Any]:
        """Return the same, however many there are."""
        for connection in self.connections:
            yield from pages.rows(connection)

    def streamed(self, statement: Select[Any], parameters: Mapping[str, Any]) -> Iterator[Row[Any]]:
        """Return the rows of one database after the other, which the server keeps until they are asked for."""
        for connection in self.connections:
            yield from connection.execute(statement.execution_options(yield_per=PAGE_ROWS), parameters)

    def merged(self, statement: Select[Any], *names: str) -> Iterator[Row[Any]]:
        """Return the rows of all databases in one order, by these columns, as the databases sort them."""
        ordered = statement.order_by(*names).execution_options(yield_per=PAGE_ROWS)
        return heapq.merge(*(connection.execute(ordered) for connection in self.connections), key=attrgetter(*names))


def batch_pages(connection: Connection, partition_id: int, from_offset: int = 0) -> Iterator[tuple[Sequence[Any], int]]:
    """Return the batches of a partition in order, a page at a time; a page holds one large batch, or many small.

    With each comes the offset through which there are no others: OFFSET_MAX, if the page is known to be the last one.
    """
    of_range = {"of_partition_id": partition_id, "from_offset": from_offset}
    while sizes := _SIZES.rows(connection, of_range):
        through_offset, size_bytes = sizes[0]
        for row in sizes[1:]:
            size_bytes += row.size_bytes
            if size_bytes > PAGE_BYTES_MAX:
                break
            through_offset = row.last_offset
        is_last = len(sizes) < PAGE_BATCHES_MAX and through_offset == sizes[-1].last_offset
        page = _BATCHES.rows(connection, {**of_range, "through_offset": through_offset})
        yield page, OFFSET_MAX if is_last else through_offset
        if is_last:
            return
        of_range["from_offset"] = through_offset + 1


def in_snapshots(members: Sequence[Store], work: Callable[[Sequence[Connection]], Result]) -> Result:
    """Run `work` on a snapshot of each of the databases, all open at once.

    They are taken one after the other: no moment is common to them.
    """

    def nested(connections: tuple[Connection, ...]) -> Result:
        if len(connections) == len(members):
            return worked(connections)
        # It is all tried again, by the first: what broke may be a snapshot that was taken before.
        return members[len(connections)].read(
            lambda connection: taken((*connections, connection)), retry_timeout_ms=0 if connections else None
        )

    def worked(connections: tuple[Connection, ...]) -> Result:
        with _noting_failures(connections) as failed:
            try:
                return work(connections)
            except DBAPIError as error:
                # The last one would take it for its own.
                for member, connection in zip(members, connections, strict=True):
                    if failed and connection is failed[-1]:
                        raise member.translated(error) from None
                raise

    def taken(connections: tuple[Connection, ...]) -> Result:
        # It is taken by the first statement: not only once those before it have been read, which may take minutes.
        _TAKE_SNAPSHOT.value(connections[-1])
        return nested(connections)

    return nested(())


@contextmanager
def _noting_failures(connections: Sequence[Connection]) -> Iterator[list[Connection]]:
    """Yield those of the connections on which something has failed, in that order; an error does not tell its own."""
    failed: list[Connection] = []

    def note(context: ExceptionContext) -> None:
        # Other threads may be at work on the same databases.
        failed.extend(connection for connection in connections if connection is context.connection)

    for connection in connections:
        event.listen(connection.engine, "handle_error", note)
    try:
        yield failed
    finally:
        for connection in connections:
            event.remove(connection.engine, "handle_error", note)


def some_of(violations: Iterable[Violation]) -> list[Violation]:
    """Return the first of the violations."""
    return [violation for violation, _ in zip(violations, range(VIOLATIONS_MAX), strict=False)]
