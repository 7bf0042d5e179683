"""The README of the database layer: its SQL reads the log on both databases."""

from __future__ import annotations

from tests.tools.readmes import block_of
from txnstore import Producer


def test_the_view_shows_the_records(url, store, sql_program):
    with Producer({"bootstrap.servers": url}) as producer:
        producer.produce("payments", "42 EUR", key="anna")
    kind = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}[store.backend.name]
    lines = block_of(__file__, "Tables", "sql").text.splitlines()
    assert len(lines) == 2
    (line,) = (line for line in lines if line.endswith(f"-- {kind}"))
    printed = sql_program(url, line)
    assert printed.startswith("0,")
    assert printed.rstrip().endswith(",committed")
