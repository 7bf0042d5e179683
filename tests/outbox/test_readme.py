"""The README of the outbox: its SQL and its watched objects become records."""

from __future__ import annotations

import json

from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from tests.outbox.steps import records
from tests.tools.readmes import block_of
from txnstore import Outbox
from txnstore.log.outbox.sequencer import drain_outbox


class Base(DeclarativeBase):
    """The application's own tables."""


class Order(Base):
    """What the README watches."""

    __tablename__ = "watched_orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int]


def test_a_row_inserted_in_plain_sql_becomes_a_record(url, store, sql_program):
    kind = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}[store.backend.name]
    lines = block_of(__file__, "Using it", "sql").text.splitlines()
    assert len(lines) == 2
    (line,) = (line for line in lines if line.endswith(f"-- {kind}"))
    sql_program(url, line)
    drain_outbox(store)
    ((record,),) = records(store, "orders")
    assert (record.key, record.value) == (b"k", b"v")


def test_an_object_that_is_watched_becomes_a_record(url, store):
    program = block_of(__file__, "Using it").text
    engine = create_engine(url)
    Base.metadata.create_all(engine)
    with Outbox(engine, sequencer=False) as outbox:
        exec(compile(program, "README.md", "exec"), {"outbox": outbox, "Order": Order, "json": json})
        with Session(engine) as session, session.begin():
            session.add(Order(id=7, amount=42))
    engine.dispose()
    drain_outbox(store)
    ((record,),) = records(store, "orders")
    assert (record.key, json.loads(record.value or b"")) == (b"7", {"change": "insert", "amount": 42})
