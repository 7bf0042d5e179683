"""Our end of the pipes to members that do what they are told."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing

import psycopg

import txnstore as confluent_kafka
from tests.processes.remote_member import Told, obey
from tests.tools.workload import Job
from txnstore.admin import AdminClient, NewTopic
from txnstore.testing.postgres_server import connection_string

TOPIC, GROUP = "input", "members"
#: How long a process may take to answer, beside what it was told to wait.
PATIENCE_SECONDS = 60.0
#: How often a process is stopped until it stands outside of database transactions; how often that is looked at.
STOPS_MAX, STILL_LOOKS = 20, 6


class Member:
    """A process with a consumer; `call` waits for the answer, `ask` and `answer` do not."""

    def __init__(self, processes, url, folder, name):
        self._processes = processes
        self._url = url
        self.name = name
        self.process, self._pipe = processes.start_with_pipe(obey, Job(url, folder, name, 1, {}))

    def ask(self, name, *arguments):
        self._pipe.send((name, arguments))

    def answer(self, seconds=0.0):
        assert self._pipe.poll(seconds + PATIENCE_SECONDS), f"{self.name} does not answer"
        return self._pipe.recv()

    def call(self, name, *arguments):
        self.ask(name, *arguments)
        return self.answer()

    def join(self, assignor, session_timeout_ms, heartbeat_interval_ms, **settings):
        return self.call(
            "subscribe",
            [TOPIC],
            {
                "group.id": GROUP,
                "client.id": self.name,
                "partition.assignment.strategy": assignor,
                "session.timeout.ms": session_timeout_ms,
                "heartbeat.interval.ms": heartbeat_interval_ms,
                **settings,
            },
        )

    def told(self):
        return self.call("take_told")

    def stop(self):
        """Stop the process; not in the middle of a database transaction, whose locks the others would wait for."""
        for _ in range(STOPS_MAX):
            self._processes.stop(self.process)
            if not holds_locks(self._url):
                return
            self._processes.go_on(self.process)
            # Whoever held them goes on for a moment.
            self.process.join(0.05)
        raise AssertionError(f"{self.name} is in a database transaction all the time")

    def go_on(self):
        self._processes.go_on(self.process)

    def kill(self):
        at = time.monotonic()
        self._processes.kill(self.process)
        return at


def holds_locks(url):
    """Return whether a session is in a database transaction that writes, and stays in it."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=0.3, isolation_level=None)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return True
            connection.execute("ROLLBACK")
            return False
    with psycopg.connect(connection_string(url), autocommit=True) as connection:
        for _ in range(STILL_LOOKS):
            row = connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_xid IS NOT NULL"
            ).fetchone()
            if row == (0,):
                return False
            time.sleep(0.05)
    return True


def make_topic(url, partition_count, name=TOPIC):
    admin = AdminClient({"bootstrap.servers": url})
    for future in admin.create_topics([NewTopic(name, partition_count, 1)]).values():
        future.result(PATIENCE_SECONDS)


def write(url, records: Sequence[tuple[int, str]]):
    """Write records, each given by its partition and value."""
    with closing(confluent_kafka.Producer({"bootstrap.servers": url})) as producer:
        for partition, value in records:
            producer.produce(TOPIC, value, partition=partition)
        assert producer.flush(PATIENCE_SECONDS) == 0


def callbacks(told: Sequence[Told]):
    return [(each.what, each.partitions) for each in told if each.what != "record"]


def records(told: Sequence[Told]):
    return [(each.partitions[0], each.offset) for each in told if each.what == "record"]
