"""The processes that the tests of enlist() kill: transfers, each a row, a record and an offset."""

from __future__ import annotations

import time

from sqlalchemy import Engine, text

from tests.clients.callers import application_engine
from tests.clients.membership.steps import TP
from tests.clients.steps import NO_MEMBER, PATIENCE_SECONDS
from txnstore import Producer

TOPIC = "transfers"
TRANSACTIONAL_ID = "transfers"
Task = tuple[str, int]
Worker = tuple[Producer, Engine, int]


def prepare(task: Task) -> Worker:
    """Return a producer that is ready to begin, and the application's engine."""
    url, number = task
    producer = Producer({"bootstrap.servers": url, "transactional.id": TRANSACTIONAL_ID})
    producer.init_transactions(PATIENCE_SECONDS)
    return producer, application_engine(url), number


def transfer(worker: Worker) -> None:
    """Commit one row, one record and one offset."""
    producer, engine, number = worker
    with engine.connect() as connection, producer.transaction(PATIENCE_SECONDS):
        producer.enlist(connection)
        connection.execute(text("INSERT INTO ledger VALUES (:entry)"), {"entry": str(number)})
        producer.produce(TOPIC, str(number).encode(), partition=0)
        producer.send_offsets_to_transaction([TP(TOPIC, 0, number)], NO_MEMBER, PATIENCE_SECONDS)


def transfer_without_end(task: Task) -> None:
    """Commit transfers, from this number on, until somebody ends the process."""
    producer, engine, number = prepare(task)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        transfer((producer, engine, number))
        number += 1
