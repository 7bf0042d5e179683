"""What is read of several databases at once, and which one it is said of that it broke."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection, Select, column, select, table

from txnstore.db.opening import open_store
from txnstore.db.schema import stores
from txnstore.db.statements import HotStatement
from txnstore.errors import StoreUnavailable, TxnStoreError
from txnstore.verification.reading import in_snapshots

STATEMENT = select(stores.c.store_uuid)


@pytest.mark.parametrize("is_hot", [True, False])
def test_the_database_that_broke_is_named(txnstore_postgresql_url, txnstore_sqlite_url, is_hot):
    with open_store(txnstore_postgresql_url) as first, open_store(txnstore_sqlite_url) as second:
        first.label, second.label = "first", "second"
        first.limits = replace(first.limits, retry_timeout_ms=0)

        def work(connections):
            connections[0].connection.driver_connection.pgconn.finish()
            return HotStatement(STATEMENT).rows(connections[0]) if is_hot else connections[0].execute(STATEMENT).all()

        with pytest.raises(StoreUnavailable, match=r"^the database 'first'"):
            in_snapshots([first, second], work)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("way", ["hot", "cold", "streamed"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_database_whose_statement_failed_is_named(
    txnstore_postgresql_url, make_sqlite_store, tmp_path, way, number
):
    urls = [make_sqlite_store(tmp_path / "first.db"), txnstore_postgresql_url, make_sqlite_store(tmp_path / "third.db")]
    wrong: Select[Any] = select(column("nothing")).select_from(table("nowhere"))

    def work(connections: Sequence[Connection]) -> object:
        failing = connections[number]
        if way == "hot":
            return HotStatement(wrong).rows(failing)
        return list(failing.execute(wrong, execution_options={"yield_per": 1} if way == "streamed" else {}))

    with ExitStack() as stack:
        members = [stack.enter_context(open_store(url)) for url in urls]
        for member, label in zip(members, ("first", "second", "third"), strict=True):
            member.label = label
            member.limits = replace(member.limits, retry_timeout_ms=0)
        for _ in range(2):
            with pytest.raises(TxnStoreError, match=f"^the database '{members[number].label}'"):
                in_snapshots(members, work)
        assert in_snapshots(members, len) == 3


def test_all_of_them_are_read_again_where_one_was_away_for_a_moment(txnstore_postgresql_url, txnstore_sqlite_url):
    with open_store(txnstore_postgresql_url) as first, open_store(txnstore_sqlite_url) as second:
        tries: list[None] = []

        def work(connections):
            tries.append(None)
            if len(tries) == 1:
                connections[0].connection.driver_connection.pgconn.finish()
            return [connection.execute(STATEMENT).scalar_one() for connection in connections]

        assert in_snapshots([first, second], work) == [first.store_uuid, second.store_uuid]
        assert len(tries) == 2
