"""Tables read in pages, so that memory is bounded however much a store holds, and snapshots of several databases."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, TypeVar

from sqlalchemy import ColumnElement, Connection, Row, Select, bindparam, literal, select, tuple_

from txnstore.db.schema import record_batches
from txnstore.db.store import Store
from txnstore.log.fetch import PAGE_BATCHES_MAX, PAGE_BYTES_MAX
from txnstore.verification.invariants import Violation

Result = TypeVar("Result")

#: How many rows are in memory at once.
PAGE_ROWS: Final = 500
#: How many violations of a kind of rules are told; a store that is broken throughout has no end of them.
VIOLATIONS_MAX: Final = 1_000

_OF_PARTITION: Final = record_batches.c.partition_id == bindparam("of_partition_id")
_FROM: Final = record_batches.c.last_offset >= bindparam("from_offset")
_SIZES: Final = (
    select(record_batches.c.last_offset, record_batches.c.size_bytes)
    .where(_OF_PARTITION, _FROM)
    .order_by(record_batches.c.last_offset)
    .limit(PAGE_BATCHES_MAX)
)
_BATCHES: Final = (
    select(record_batches)
    .where(_OF_PARTITION, _FROM, record_batches.c.last_offset <= bindparam("through_offset"))
    .order_by(record_batches.c.last_offset)
    .execution_options(binary_rows=True)
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot of the store's database, or one of each database of a cluster."""

    connections: Sequence[Connection]
    of_several: bool = False
    """Whether a transaction may be in several: partitions are added before they are written to, and markers stay queued
    until all that is known to be written is struck off at once."""

    def rows(self, statement: Select[Any], parameters: Mapping[str, Any] | None = None) -> Iterator[Row[Any]]:
        """Return the rows of one database after the other: as many as fit into memory."""
        for connection in self.connections:
            yield from connection.execute(statement, parameters or {})

    def pages(self, statement: Select[Any], *keys: ColumnElement[Any]) -> Iterator[Row[Any]]:
        """Return the same, however many there are; the keys name a row, and there is an index on them."""
        for connection in self.connections:
            yield from in_pages(connection, statement, *keys)

    def merged(self, statement: Select[Any], *names: str) -> Iterator[Row[Any]]:
        """Return the rows of all databases in one order, by these columns, as the databases sort them."""
        ordered = statement.order_by(*names).execution_options(yield_per=PAGE_ROWS)
        return heapq.merge(*(connection.execute(ordered) for connection in self.connections), key=attrgetter(*names))


def in_pages(connection: Connection, statement: Select[Any], *keys: ColumnElement[Any]) -> Iterator[Row[Any]]:
    """Return the rows in the order of their keys, read page by page."""
    page = statement.order_by(*keys).limit(PAGE_ROWS)
    place = tuple_(*keys)
    rows = connection.execute(page).all()
    while rows:
        yield from rows
        if len(rows) < PAGE_ROWS:
            return
        last = [literal(getattr(rows[-1], str(key.key)), key.type) for key in keys]
        rows = connection.execute(page.where(place > tuple_(*last))).all()


def batch_pages(connection: Connection, partition_id: int, from_offset: int = 0) -> Iterator[Sequence[Row[Any]]]:
    """Return the batches of a partition in order, a page at a time; a page holds one large batch, or many small."""
    of_range = {"of_partition_id": partition_id, "from_offset": from_offset}
    while sizes := connection.execute(_SIZES, of_range).all():
        through_offset, size_bytes = sizes[0]
        for row in sizes[1:]:
            size_bytes += row.size_bytes
            if size_bytes > PAGE_BYTES_MAX:
                break
            through_offset = row.last_offset
        yield connection.execute(_BATCHES, {**of_range, "through_offset": through_offset}).all()
        of_range["from_offset"] = through_offset + 1


def in_snapshots(stores: Sequence[Store], work: Callable[[Sequence[Connection]], Result]) -> Result:
    """Run `work` on a snapshot of each of the databases, all open at once.

    They are taken one after the other: no moment is common to them.

    Raises:
        TxnStoreError: one of them refused or cannot be reached.
    """

    def nested(connections: tuple[Connection, ...]) -> Result:
        if len(connections) == len(stores):
            return work(connections)
        return stores[len(connections)].read(lambda connection: nested((*connections, connection)))

    return nested(())


def some_of(violations: Iterable[Violation]) -> list[Violation]:
    """Return the first of the violations."""
    return [violation for violation, _ in zip(violations, range(VIOLATIONS_MAX), strict=False)]
