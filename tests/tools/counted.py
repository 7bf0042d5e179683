"""PostgreSQL's counters, brought up to date, so that tests can go by them."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection, text

from txnstore.db.store import Store

CAN_COUNT_NOW = text("SELECT pg_catalog.to_regproc('pg_catalog.pg_stat_force_next_flush') IS NOT NULL")
COUNT_NOW = text("SELECT pg_catalog.pg_stat_force_next_flush()")


def count_now(store: Store) -> None:
    """Let what this connection has done be counted at the end of the transaction; skip the test if it cannot be.

    PostgreSQL 14 counts some time later, and cannot be told to do it now.
    """

    def count(connection: Connection) -> bool:
        can_count: bool = connection.execute(CAN_COUNT_NOW).scalar_one()
        if can_count:
            connection.execute(COUNT_NOW).all()
        return can_count

    # As what was written: on the same connection.
    if not store.write(count):
        pytest.skip("needs PostgreSQL 15 or newer: 14 counts what was written some time later")
