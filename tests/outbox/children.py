"""Processes to be killed: callers with database transactions of their own, and sequencers."""

from __future__ import annotations

import json
import random
import sqlite3
import time
from contextlib import suppress
from typing import Any

import psycopg

from tests.outbox.conftest import plain_connection
from txnstore import Outbox
from txnstore.db.opening import open_store
from txnstore.errors import TxnStoreError
from txnstore.log.outbox import rows as outbox_rows
from txnstore.log.outbox.sequencer import OutboxPoller

AGGREGATES = 3
TOPICS = ("one", "two")


def create_tables(url: str) -> None:
    connection = plain_connection(url)
    connection.execute("CREATE TABLE aggregates (id INTEGER PRIMARY KEY, version INTEGER NOT NULL)")
    connection.execute("CREATE TABLE business (tag TEXT, number INTEGER, total INTEGER)")
    for number in range(AGGREGATES):
        connection.execute(f"INSERT INTO aggregates VALUES ({number}, 0)")
    connection.commit()
    connection.close()


def call(url: str, name: str, seed: int) -> None:
    """Commit and roll back business rows and records with them, until killed."""
    random_ = random.Random(seed)
    outbox = Outbox(url, sequencer=False)
    number = 0
    while True:
        number += 1
        with suppress(sqlite3.OperationalError, psycopg.Error):
            connection = plain_connection(url)
            try:
                for _ in range(20):
                    number += 1
                    transact(connection, outbox, f"{name}-{number}", random_)
            finally:
                connection.close()


def transact(connection: Any, outbox: Outbox, tag: str, random_: random.Random) -> None:
    mark = "?" if isinstance(connection, sqlite3.Connection) else "%s"
    if mark == "?":
        connection.execute("BEGIN IMMEDIATE")
    total = random_.randint(1, 5)
    aggregates = sorted(random_.sample(range(AGGREGATES), k=random_.randint(1, 2)))
    for aggregate in aggregates:
        # Holds the aggregate's row until the end: versions follow each other, and so must their records.
        connection.execute(f"UPDATE aggregates SET version = version + 1 WHERE id = {aggregate}")
    for index in range(total):
        connection.execute(f"INSERT INTO business VALUES ({mark}, {mark}, {mark})", (tag, index, total))
        aggregate = aggregates[index % len(aggregates)]
        ((version,),) = connection.execute(f"SELECT version FROM aggregates WHERE id = {aggregate}").fetchall()
        record = {"tag": tag, "number": index, "total": total, "aggregate": aggregate, "version": version}
        key = str(aggregate)
        if random_.random() < 0.2:
            connection.execute("SAVEPOINT s")
            outbox.produce(connection, random_.choice(TOPICS), json.dumps(record | {"tag": "ghost"}), key)
            connection.execute("ROLLBACK TO SAVEPOINT s")
        outbox.produce(connection, TOPICS[int(key) % len(TOPICS)], json.dumps(record), key)
        if mark == "%s" and random_.random() < 0.1:
            # Others commit in between, and are numbered in between.
            time.sleep(random_.random() * 0.01)
    if random_.random() < 0.2:
        connection.rollback()
    else:
        connection.commit()


def sequence(url: str, rows_max: int) -> None:
    """Move rows until killed."""
    outbox_rows.PAGE_ROWS_MAX = rows_max
    with open_store(url) as store:
        poller = OutboxPoller(store)
        while True:
            # Locks of those who were killed: the next look goes on.
            with suppress(TxnStoreError):
                time.sleep(min(poller.turn(), 0.005))
