"""A program that is a member of a group with nothing to do, and counts what it asks the database."""

from __future__ import annotations

import sqlite3
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

from sqlalchemy import Engine, event

import txnstore as confluent_kafka
from tests.tools.workload import Job


def idle(job: Job, pipe: Connection, topic: str) -> None:
    """Poll for ever; answer "owned" with how many partitions it has, "statements" with what it ran since then."""
    statements: Counter[str] = Counter()
    _count(job.url, statements)
    owned = 0

    def assigned(_: object, partitions: list[confluent_kafka.TopicPartition]) -> None:
        nonlocal owned
        owned += len(partitions)

    def revoked(_: object, partitions: list[confluent_kafka.TopicPartition]) -> None:
        nonlocal owned
        owned -= len(partitions)

    # The heartbeats, the session and all else as they are for everybody who sets nothing.
    consumer = confluent_kafka.Consumer({"bootstrap.servers": job.url, "group.id": "idle"})
    consumer.subscribe([topic], on_assign=assigned, on_revoke=revoked)
    while True:
        assert consumer.poll(0.2) is None
        while pipe.poll():
            if pipe.recv() == "owned":
                pipe.send(owned)
            else:
                pipe.send(dict(statements))
                statements.clear()


def _count(url: str, statements: Counter[str]) -> None:
    """Count every statement by its first words, as the database gets it."""
    if not url.startswith("sqlite"):

        @event.listens_for(Engine, "before_cursor_execute")
        def _(_connection: object, _cursor: object, statement: str, *_: object) -> None:
            # What is sent together is counted apart.
            statements.update(" ".join(part.split()[:3]) for part in statement.split(";") if part.strip())

        return
    connect = sqlite3.connect

    def connect_and_trace(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.set_trace_callback(lambda statement: statements.update([" ".join(statement.split()[:3])]))
        return connection

    sqlite3.connect = connect_and_trace  # type: ignore[assignment]
