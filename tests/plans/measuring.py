"""How much of a store each statement touches: what PostgreSQL says with EXPLAIN ANALYZE, or SQLite's instructions."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, event
from sqlalchemy.engine import Engine

#: SQLite tells of its instructions in steps of so many.
_STEP = 10
#: Statements that have a plan.
_CURRENT = "tests.plans"
_PLANNED = ("SELECT", "INSERT", "UPDATE", "DELETE", "WITH")


@dataclass
class Touched:
    """What one statement has touched, and brought to this process."""

    statement: str
    plan: str
    count: int = 0
    """Rows or blocks on PostgreSQL, with the rows that a filter threw away; instructions on SQLite."""
    fetched: int = 0
    """Rows that came to this process, whoever looked at them."""

    def __str__(self) -> str:
        return f"{self.count} touched, {self.fetched} fetched: {self.statement}\n{self.plan}"


@contextmanager
def measured(database: str) -> Iterator[list[Touched]]:
    """Collect what every statement of this process touches in databases of this kind, in whatever thread."""
    found: list[Touched] = []

    def before(connection: Connection, cursor: Any, statement: str, parameters: Any, _: Any, many: bool) -> None:
        driver: Any = connection.connection.driver_connection
        if connection.dialect.name != database:
            return
        touched = None
        if statement.startswith(_PLANNED) and "pg_catalog.pg_" not in statement:
            found.append(touched := Touched(statement, ""))
        connection.info[_CURRENT] = touched
        if database == "sqlite":
            _watch(driver, cursor, touched)
        elif touched is not None and driver.info.transaction_status == TransactionStatus.INTRANS:
            _explain(driver, touched, parameters[0] if many else parameters)

    def after(connection: Connection, cursor: Any, *_: Any) -> None:
        touched = connection.info.get(_CURRENT)
        if connection.dialect.name == database == "postgresql" and touched is not None:
            # The driver has all of it by now; the statement that commits a whole transaction has no cursor.
            touched.fetched = cursor.rowcount if cursor is not None and cursor.description else 0

    event.listen(Engine, "before_cursor_execute", before)
    event.listen(Engine, "after_cursor_execute", after)
    try:
        yield found
    finally:
        event.remove(Engine, "before_cursor_execute", before)
        event.remove(Engine, "after_cursor_execute", after)


def _watch(driver: sqlite3.Connection, cursor: sqlite3.Cursor, touched: Touched | None) -> None:
    """Count until the connection's next statement: rows are looked for as they are fetched."""
    if touched is None:
        driver.set_progress_handler(None, 0)
        return

    def step() -> None:
        touched.count += _STEP

    def row(_: Any, values: Any) -> Any:
        touched.fetched += 1
        return values

    driver.set_progress_handler(step, _STEP)
    cursor.row_factory = row


def _explain(driver: psycopg.Connection[Any], touched: Touched, parameters: Any) -> None:
    """Run the statement, see what it does, and let it not have happened."""
    with driver.cursor() as cursor:
        cursor.execute("SAVEPOINT plans")
        with contextlib.suppress(psycopg.Error):
            explain: Any = f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {touched.statement}"
            answer = cursor.execute(explain, parameters).fetchone()
            assert answer is not None
            plan = answer[0][0]["Plan"]
            scans = [node for node in _nodes(plan) if "Scan" in node["Node Type"]]
            touched.count = int(max(sum(map(_rows, scans)), sum(map(_blocks, scans))))
            touched.plan = "\n".join(_line(node) for node in _nodes(plan))
        cursor.execute("ROLLBACK TO plans")


def _nodes(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)


def _rows(node: Mapping[str, Any]) -> float:
    """Return how many rows a scan has looked at."""
    removed = sum(value for name, value in node.items() if name.startswith("Rows Removed by"))
    return float(node["Actual Loops"] * (node["Actual Rows"] + removed))


def _blocks(node: Mapping[str, Any]) -> int:
    """Return how many blocks a scan has looked at itself: what is said of it has those of its subqueries in it."""

    def with_children(node: Mapping[str, Any]) -> int:
        return int(node["Shared Hit Blocks"] + node["Shared Read Blocks"])

    return with_children(node) - sum(map(with_children, node.get("Plans", ())))


def _line(node: Mapping[str, Any]) -> str:
    names = ("Relation Name", "Index Name", "Index Cond", "Filter", "Actual Rows", "Actual Loops")
    return json.dumps([node["Node Type"], *(f"{name}: {node[name]}" for name in names if name in node)])
