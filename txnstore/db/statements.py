"""How statements are run: at the time of the database server, on a known number of rows, and in portions.

A statement that must hit a number of rows hits them, or nothing of its database transaction is committed.  Work on
many rows is cut into database transactions so short that nobody waits long for one.  Whoever waits for the write lock
of SQLite asks for it again and again, so it is left free between two portions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from sqlalchemy import BigInteger, Connection, Delete, Update
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import bindparam
from sqlalchemy.sql.functions import FunctionElement

from txnstore.db.store import CONTENTION_PAUSE_SECONDS, Store

Item = TypeVar("Item")
Result = TypeVar("Result")

#: How many rows one portion deletes at most.
ROWS_AT_ONCE: Final = 200
#: How many values one statement lists: SQLite takes 32,766 parameters, PostgreSQL 65,535.
LISTED_MAX: Final = 10_000
#: The pause after a portion: as long as it took, but long enough for others to ask for the lock a few times.
_PAUSE_MIN_SECONDS: Final = 4 * CONTENTION_PAUSE_SECONDS
_PAUSE_MAX_SECONDS: Final = 0.02


class server_now_ms(FunctionElement[int]):  # noqa: N801 - reads as the SQL function it stands for
    """Milliseconds since 1970 at the moment the statement runs.

    The database server's clock, so that all clients of a store agree; a store that was opened with a `Clock` uses
    that one.
    """

    type = BigInteger()
    inherit_cache = True
    name = "server_now_ms"


@compiles(server_now_ms)
def _compile_server_now_ms(element: server_now_ms, compiler: SQLCompiler, **keywords: Any) -> str:
    """Render the clock of the store that runs the statement; it hangs on the store's own dialect object."""
    clock = getattr(compiler.dialect, "clock", None)
    if clock is None:
        return "CAST(extract(epoch from pg_catalog.clock_timestamp()) * 1000 AS BIGINT)"
    value: Any = bindparam("server_now_ms", callable_=clock.now_ms, type_=BigInteger(), unique=True)
    return str(compiler.process(value, **keywords))


class RowsMissedError(AssertionError):
    """A row that was read under its lock was not there to be written: a defect, and nothing was committed."""


def must_hit(connection: Connection, statement: Update | Delete, parameters: Mapping[str, Any]) -> None:
    """Run a statement that hits exactly one row.

    Raises:
        RowsMissedError: it did not; the database transaction is to be rolled back.
    """
    _check_count(statement, connection.execute(statement, parameters).rowcount, 1)


def must_hit_each(
    connection: Connection, statement: Update | Delete, parameters: Sequence[Mapping[str, Any]], count: int = -1
) -> None:
    """Run a statement once for each of the parameters, at least one: it hits a row for each, or `count` in all.

    Raises:
        RowsMissedError: it did not; the database transaction is to be rolled back.
    """
    # Both drivers count over all of the parameters: `supports_sane_multi_rowcount` of their dialects.
    hit = connection.execute(statement, parameters).rowcount
    _check_count(statement, hit, len(parameters) if count < 0 else count)


def _check_count(statement: Update | Delete, hit: int, wanted: int) -> None:
    if hit != wanted:
        name = getattr(statement.table, "name", statement.table)
        raise RowsMissedError(
            f"{type(statement).__name__} of {name} hit {hit} rows where {wanted} were to be hit; nothing is committed"
        )


def write_portion(store: Store, work: Callable[[Connection], Result], *, retry_timeout_ms: int | None = None) -> Result:
    """Run one portion as `Store.write` does, then let others go first.

    Raises:
        TxnStoreError: see `Store.write`; the portions before stay done.
    """
    began = time.monotonic()
    result = store.write(work, retry_timeout_ms=retry_timeout_ms)
    time.sleep(min(max(time.monotonic() - began, _PAUSE_MIN_SECONDS), _PAUSE_MAX_SECONDS))
    return result


def chunks(items: Sequence[Item], size: int = LISTED_MAX) -> Iterator[Sequence[Item]]:
    """Cut a list that grows with the data into parts that one statement takes."""
    return (items[start : start + size] for start in range(0, len(items), size))
