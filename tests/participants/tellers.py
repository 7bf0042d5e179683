"""The processes of the bank that are killed: tellers who move money, and one who ends what they left.

A teller moves money between an account in one database and one in another, and writes both entries into the log: one
transaction.  What was acknowledged, and what it aborted itself, it writes into a file outside of all databases.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass

import psycopg

from txnstore import KafkaException, Producer
from txnstore.db.opening import open_store
from txnstore.errors import TxnStoreError
from txnstore.participants.recovery import recover_branches
from txnstore.testing.postgres_server import connection_string
from txnstore.transactions.recovery import recover

TOPIC = "ledger"
#: Both entries go into each of them, so that each has the sum zero by itself: readers get as far in each as no
#: transaction is open there, which need not be equally far.
PARTITIONS = 2
ACCOUNTS = 40
TIMEOUT_MS = 2_000
ABORT_CHANCE = 0.1


@dataclass(frozen=True)
class Job:
    """What a process is to do, and where; it can be pickled."""

    name: str
    log_url: str
    table_urls: tuple[str, str]
    notes: str
    seed: int


class ChangedMindError(Exception):
    """The teller aborts."""


def move_money(job: Job) -> None:
    chance = random.Random(job.seed)
    # Unbuffered: a note is there once it is written, whoever is killed then.
    notes = os.open(job.notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    number = 0
    while True:
        try:
            with Producer(
                {"bootstrap.servers": job.log_url, "transactional.id": job.name, "transaction.timeout.ms": TIMEOUT_MS}
            ) as producer:
                producer.init_transactions(10)
                with _connect(job.table_urls[0]) as first, _connect(job.table_urls[1]) as second:
                    while True:
                        number += 1
                        _transfer(f"{job.name}:{job.seed}:{number}", producer, (first, second), chance, notes)
        except (KafkaException, psycopg.Error):
            # A server was killed, or others were in the way: with new connections, and a new epoch.
            time.sleep(0.05)


def _connect(url: str) -> psycopg.Connection:
    bounds = "-c lock_timeout=1s -c statement_timeout=5s"
    return psycopg.connect(connection_string(url), options=bounds, connect_timeout=5)


def change_mind(chance: random.Random) -> None:
    if chance.random() < ABORT_CHANCE:
        raise ChangedMindError


def _transfer(
    name: str,
    producer: Producer,
    connections: tuple[psycopg.Connection, psycopg.Connection],
    chance: random.Random,
    notes: int,
) -> None:
    amount = chance.randint(1, 100)
    try:
        with producer.transaction(10):
            for connection, change in zip(connections, (-amount, amount), strict=True):
                producer.enlist(connection)
                account = chance.randrange(ACCOUNTS)
                connection.execute("UPDATE account SET balance = balance + %s WHERE name = %s", [change, str(account)])
                connection.execute("INSERT INTO entry VALUES (%s, %s)", [name, change])
                for partition in range(PARTITIONS):
                    producer.produce(TOPIC, str(change), key=name, partition=partition)
            change_mind(chance)
    except ChangedMindError:
        os.write(notes, f"aborted {name}\n".encode())
    else:
        os.write(notes, f"committed {name}\n".encode())


def end_what_was_left(job: Job) -> None:
    notes = os.open(job.notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while True:
        try:
            with open_store(job.log_url) as store:
                while True:
                    recover(store)
                    for url in job.table_urls:
                        done = recover_branches(store, url)
                        os.write(notes, b"recovered commit\n" * len(done.committed))
                        os.write(notes, b"recovered abort\n" * len(done.rolled_back))
                    time.sleep(0.2)
        except TxnStoreError:
            time.sleep(0.1)
