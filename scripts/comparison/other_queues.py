"""One other queue in a SQL database, measured: run by the Python of the environment that has its package.

    python other_queues.py NAME DATABASE SECONDS RECORDS      prints a JSON object: what, and items a second

DATABASE is a file, or what psycopg connects to.
Each is as lasting as a store: an item that was put, or acknowledged, has been waited for on the disk.
"""

# ruff: noqa: D102 - Queue says what they do

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

VALUE: Final = b"x" * 100
AT_ONCE: Final = 1_000
PUT_ONE: Final = "put one, wait until it is there"
TAKE_ONE: Final = "take one and acknowledge it"
PUT_MANY: Final = "put 1,000 at once"
TAKE_MANY: Final = "take 1,000 at once and acknowledge them"


class Queue(Protocol):
    """What is measured of a queue."""

    def put(self, count: int) -> None:
        """Put so many items in one go."""

    def take(self, count: int) -> int:
        """Take so many items and acknowledge them; return how many there were."""


class Huey:
    """huey on SQLite, its storage alone: what is taken is gone, without an acknowledgement."""

    def __init__(self, database: str) -> None:
        from huey.storage import SqliteStorage

        self._storage = SqliteStorage(filename=database, fsync=True)

    def put(self, count: int) -> None:
        self._storage.enqueue(VALUE)

    def take(self, count: int) -> int:
        return self._storage.dequeue() is not None


class LiteQueue:
    """litequeue, with SQLite told to wait for the disk, which by itself it does not."""

    def __init__(self, database: str) -> None:
        import litequeue

        self._queue = litequeue.LiteQueue(database)
        self._queue.conn.execute("PRAGMA synchronous = FULL")

    def put(self, count: int) -> None:
        self._queue.put(VALUE.decode())

    def take(self, count: int) -> int:
        message = self._queue.pop()
        if message is None:
            return 0
        self._queue.done(message.message_id)
        return 1


class PersistQueue:
    """persist-queue's SQLiteAckQueue."""

    def __init__(self, database: str) -> None:
        import persistqueue

        self._queue = persistqueue.SQLiteAckQueue(database + "-persistqueue", auto_commit=True)

    def put(self, count: int) -> None:
        self._queue.put(VALUE)

    def take(self, count: int) -> int:
        if not self._queue.size:
            return 0
        self._queue.ack(self._queue.get(block=False))
        return 1


class LikePgmq:
    """The statements of pgmq's send_batch, read and delete, without the extension: a table, SKIP LOCKED, a timeout."""

    def __init__(self, database: str) -> None:
        import psycopg

        self.connection = psycopg.connect(database, autocommit=True, prepare_threshold=0)
        self.connection.execute(
            "CREATE TABLE IF NOT EXISTS other_messages (message_id BIGINT PRIMARY KEY GENERATED ALWAYS AS IDENTITY,"
            " read_count INTEGER NOT NULL DEFAULT 0, enqueued_at TIMESTAMPTZ NOT NULL DEFAULT now(),"
            " visible_at TIMESTAMPTZ NOT NULL, message JSONB)"
        )
        self.connection.execute("CREATE INDEX IF NOT EXISTS other_messages_visible ON other_messages (visible_at)")
        self._message = json.dumps({"value": VALUE.decode()})

    def put(self, count: int) -> None:
        self.connection.execute(
            "INSERT INTO other_messages (visible_at, message)"
            " SELECT clock_timestamp(), each FROM unnest(CAST(%s AS jsonb[])) each",
            ([self._message] * count,),
        )

    def take(self, count: int) -> int:
        found = self.connection.execute(
            "WITH chosen AS (SELECT message_id FROM other_messages WHERE visible_at <= clock_timestamp()"
            " ORDER BY message_id LIMIT %s FOR UPDATE SKIP LOCKED)"
            " UPDATE other_messages m SET visible_at = clock_timestamp() + interval '30 s', read_count = read_count + 1"
            " FROM chosen WHERE m.message_id = chosen.message_id RETURNING m.message_id, m.read_count, m.message",
            (count,),
        ).fetchall()
        self.connection.execute(
            "DELETE FROM other_messages WHERE message_id = ANY(%s)", ([message_id for message_id, *_ in found],)
        )
        return len(found)


class EventSourcing:
    """The recorder of eventsourcing's applications: events in order, without transactions of several requests.

    Who reads keeps in a tracking record, in a commit of its own, how far it has come.
    """

    def __init__(self, database: str) -> None:
        from eventsourcing.persistence import StoredEvent, Tracking
        from eventsourcing.postgres import PostgresDatastore, PostgresProcessRecorder
        from psycopg.conninfo import conninfo_to_dict

        datastore = PostgresDatastore(**{"password": "", **conninfo_to_dict(database)})
        self._recorder = PostgresProcessRecorder(
            datastore, events_table_name="other_events", tracking_table_name="other_tracking"
        )
        self._recorder.create_table()
        self._event: Callable[..., Any] = StoredEvent
        self._tracking: Callable[..., Any] = Tracking
        # What was put in an earlier round is not read again.
        self._stream, self._version, self._position = uuid.uuid4(), 0, self._recorder.max_notification_id() or 0

    def put(self, count: int) -> None:
        begin, self._version = self._version, self._version + count
        self._recorder.insert_events(
            [self._event(self._stream, version, "topic", VALUE) for version in range(begin, self._version)]
        )

    def take(self, count: int) -> int:
        found: Sequence[Any] = self._recorder.select_notifications(self._position + 1, count)
        if found:
            self._position = found[-1].id
            self._recorder.insert_events([], tracking=self._tracking(str(self._stream), self._position))
        return len(found)


#: Which database each is for, and whether it puts and takes many at once.
QUEUES: Final[dict[str, tuple[str, bool, Callable[[str], Queue]]]] = {
    "huey": ("sqlite", False, Huey),
    "litequeue": ("sqlite", False, LiteQueue),
    "persist-queue": ("sqlite", False, PersistQueue),
    "SQL like pgmq's": ("postgresql", True, LikePgmq),
    "eventsourcing": ("postgresql", True, EventSourcing),
}


def measured(queue: Queue, seconds: float, records: int, *, has_many: bool) -> dict[str, float]:
    """Return items a second of each thing that the queue does."""
    rates = _put_and_take(queue, (PUT_ONE, TAKE_ONE), 1, seconds, records)
    if has_many:
        rates |= _put_and_take(queue, (PUT_MANY, TAKE_MANY), AT_ONCE, seconds, records)
    return rates


def _put_and_take(queue: Queue, whats: tuple[str, str], at_once: int, seconds: float, records: int) -> dict[str, float]:
    """Put as many as there are to be, or as there is time for, then take them; the queue is empty before and after."""
    queue.put(at_once)
    assert queue.take(at_once) == at_once
    put, begun = 0, time.perf_counter()
    while put < records and time.perf_counter() < begun + seconds:
        queue.put(at_once)
        put += at_once
    rates, taken = {whats[0]: put / (time.perf_counter() - begun)}, 0
    begun = time.perf_counter()
    while taken < put:
        found = queue.take(min(at_once, put - taken))
        assert found, f"{taken} of {put} items came back"
        taken += found
    return {**rates, whats[1]: taken / (time.perf_counter() - begun)}


def main() -> None:
    """Print what is measured of one queue."""
    name, database, seconds, records = sys.argv[1:]
    _, has_many, queue = QUEUES[name]
    print(json.dumps(measured(queue(database), float(seconds), int(records), has_many=has_many)))


if __name__ == "__main__":
    main()
