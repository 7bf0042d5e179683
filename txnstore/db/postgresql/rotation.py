"""The rotation of the segments: what is appended goes to the next one, and one of which nothing is left is emptied.

Retention deletes what is oldest, so segments lose their last row in the order in which they were written to.  Vacuuming
makes room for what is written next, unless somebody holds an old snapshot; a segment that is emptied gives all of its
room back, even then.

A segment is emptied once nothing is seen in it, while it is locked against everybody and nothing that can be read is
seen under the lock: earlier writers have committed by then, and later ones find an empty table.  So
which one a partition's head names is of no matter to what is kept, and a rotation that stops halfway is continued at
the next look.  Nobody waits longer than for a moment: a segment that somebody is reading, or has read in a transaction
that goes on, has its turn again later.

To a snapshot from before its last row was deleted an emptied segment looks as it does now, as if it had been empty
then.  So it is left for a while, longer than a client may stand between two statements of one snapshot.

Some partitions keep their batches much longer than others.  Where a few of them, with little of what is stored, are
all that holds the oldest segment, they are led to a segment that is not emptied, and hold no other one from then on.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary

import psycopg
from psycopg import sql
from sqlalchemy import Engine

from txnstore.db.postgresql.connections import PostgreSQLConnection
from txnstore.db.postgresql.segments import LASTING_SEGMENT, TURNING_SEGMENTS, index_by_time, name_of

_log = logging.getLogger(__name__)

#: The next one's turn comes once a segment has this size, with its indexes.
SEGMENT_BYTES_MIN: Final = 16 * 1024 * 1024
#: And this part of what all of them take: then they hold little more together than what the topics keep.
_PART_DUE: Final = len(TURNING_SEGMENTS)
#: What is not larger than that has been emptied: PostgreSQL gives each index a few pages to begin with.
_EMPTY_BYTES: Final = 128 * 1024
#: How long a segment has to be without rows: the server ends a client that stands for ten (`db.backend.Limits`).
_EMPTY_SECONDS: Final = 15.0
#: Those that hold a segment are led to the lasting one if they have at most this part of what is stored.
_LASTING_PART: Final = 8
#: How long they are not looked for again: so many times as long as that took.
_PAUSE_TIMES: Final = 20
#: How long everybody may have to wait for the wish to empty a segment, and for the look at it under the lock.
_WAIT_MS: Final = 20
_LOOK_MS: Final = 100
#: How long a head is waited for that somebody has locked.
_HEAD_WAIT_MS: Final = 200
#: How many heads are changed at once, which producers wait for.
_HEADS: Final = 100

# Whatever the role's own settings are.  A look narrowed by row-level security must fail: it would take a segment for
# empty that is not.  A commit need not wait for a standby, its locks held: no kept record depends on it.
_BEGIN: Final = """
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    SET LOCAL search_path = pg_catalog, pg_temp;
    SET LOCAL statement_timeout = 0;
    SET LOCAL row_security = off;
    SET LOCAL synchronous_commit = local;
"""
_SIZES: Final = """
    SELECT relname::text, pg_total_relation_size(oid), pg_relation_filenode(oid) FROM pg_class
    WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = {schema})
      AND relname = ANY (ARRAY[{names}]) AND pg_has_role(relowner, 'USAGE')
"""
_HEADS_IN: Final = """
    SELECT segment, count(*) FROM {heads} WHERE segment <> {lasting} GROUP BY segment
"""
# Without a lock: what is in use is not to be waited for.
_HAS_ROWS: Final = """
    SELECT EXISTS (SELECT FROM {segment})
"""
# By the index: beside an old snapshot a segment is full of dead rows, too many to pass while everybody waits.  What has
# no head is as good as deleted.  What lies below the log start is not: who deletes it takes it off the counted size.
_IS_WANTED: Final = """EXISTS (
        SELECT FROM {heads} AS head LEFT JOIN {storage} AS storage USING (partition_id) WHERE EXISTS (
            SELECT FROM {segment} AS batch
            WHERE batch.partition_id = head.partition_id
                AND batch.last_offset >= coalesce(storage.first_stored_offset, 0)
            OFFSET 0
        )
    )"""
_BY_INDEX: Final = "SET LOCAL enable_seqscan = off"
# First without the lock, because what is given up, and what comes from the disk then, is not waited for.  The index by
# time begins with the first pages entered, see `segments`; somebody may have dropped it.
_EMPTY: Final = f"""
    SET LOCAL lock_timeout = {{wait_ms}};
    SET LOCAL statement_timeout = {{look_ms}};
    {_BY_INDEX};
    SELECT {_IS_WANTED};
    LOCK TABLE {{segment}} IN ACCESS EXCLUSIVE MODE;
    DO $segment$ BEGIN
        IF NOT {_IS_WANTED} THEN
            TRUNCATE {{segment}};
            PERFORM brin_desummarize_range(to_regclass({{by_time}}), 0);
        END IF;
    END $segment$;
    SELECT pg_total_relation_size({{name}})
"""
# Those that somebody has locked are left out, so nobody waits for a head whose lock waits for another one.
_MOVE_FREE: Final = """
    UPDATE {heads} SET segment = {to_segment} WHERE partition_id = ANY (ARRAY(
        SELECT partition_id FROM {heads} WHERE segment NOT IN ({lasting}, {to_segment})
        ORDER BY partition_id LIMIT {count} FOR UPDATE SKIP LOCKED
    )) RETURNING 1
"""
_LEFT: Final = """
    SELECT partition_id FROM {heads} WHERE segment NOT IN ({lasting}, {to_segment}) ORDER BY partition_id LIMIT {count}
"""
_MOVE_ONE: Final = """
    SET LOCAL lock_timeout = {wait_ms};
    UPDATE {heads} SET segment = {to_segment} WHERE partition_id = {partition_id} RETURNING 1
"""


# What takes little room is counted as well.
_OUTLASTING: Final = """
    WITH stored AS (
        SELECT partition_id, sum(size_bytes + 200) AS bytes, bool_or(segment = {oldest}) AS holds
        FROM {batches} WHERE segment IN ({turning}) GROUP BY partition_id
    )
    SELECT partition_id FROM stored
    WHERE holds AND {part} * (SELECT sum(bytes) FROM stored WHERE holds) <= (SELECT sum(bytes) FROM stored)
"""


@dataclass
class _Seen:
    """What is remembered of the segments of a store, by the clock of this process."""

    #: Since when segments are without rows.
    empty_since: dict[int, float] = field(default_factory=dict)
    #: The files that this is said of: once somebody has emptied a segment, it has another one.
    files: dict[int, int] = field(default_factory=dict)
    #: Until when it is not asked whose batches outlast the others'.
    paused_until: float = 0.0
    #: Whether it was said that they belong to another role.
    was_told: bool = False


_seen: Final[WeakKeyDictionary[Engine, _Seen]] = WeakKeyDictionary()


def rotate_segments(connection: PostgreSQLConnection, engine: Engine, schema: str) -> int:
    """Empty the segments that have been without rows for a while, and let appends go to the next one when it is due.

    `connection` is in no database transaction; `engine` stands for the database in what is remembered.  Returns how
    many segments were emptied; none of those that do not belong to this role.

    Raises:
        psycopg.Error: the database refused, or is away.
    """
    return _Segments(connection, schema, _seen.setdefault(engine, _Seen())).rotate()


class _Segments:
    """The segments of one store, as its database knows them."""

    def __init__(self, connection: PostgreSQLConnection, schema: str, seen: _Seen) -> None:
        self._connection = connection
        self._schema = schema
        self._seen = seen

    def rotate(self) -> int:
        sizes = self._sizes()
        if len(sizes) < len(TURNING_SEGMENTS):
            if not sizes and not self._seen.was_told:
                self._seen.was_told = True
                _log.info(
                    "the tables of schema %s are another role's: the room of what was deleted is left to autovacuum",
                    self._schema,
                    extra={"event": "room_left", "schema": self._schema},
                )
            return 0
        heads_in: dict[int, int] = dict(self._read(_HEADS_IN))
        # After a rotation that stopped halfway, and of topics that are new since, some are elsewhere.
        current = max(TURNING_SEGMENTS, key=lambda segment: heads_in.get(segment, 0))
        emptied = 0
        for segment in TURNING_SEGMENTS:
            if segment in heads_in:
                # What is appended and deleted between two looks nobody sees.
                self._seen.empty_since.pop(segment, None)
            elif sizes[segment] > _EMPTY_BYTES and self._is_over(segment):
                before_bytes, sizes[segment] = sizes[segment], self._emptied(segment, sizes[segment])
                emptied += sizes[segment] < before_bytes
        place = TURNING_SEGMENTS.index(current)
        following = (*TURNING_SEGMENTS[place + 1 :], *TURNING_SEGMENTS[:place])
        is_due = sizes[current] >= max(SEGMENT_BYTES_MIN, sum(sizes.values()) // _PART_DUE)
        free = [segment for segment in following if sizes[segment] <= _EMPTY_BYTES]
        if is_due and not free:
            self._part_from_lasting(following)
        self._let_append_to(free[0] if is_due and free else current)
        return emptied

    def _sizes(self) -> dict[int, int]:
        """Return what the segments take that belong to this role; one that is in another file starts over."""
        segments = {name_of(segment): segment for segment in TURNING_SEGMENTS}
        sizes: dict[int, int] = {}
        rows = self._read(_SIZES, schema=sql.Literal(self._schema), names=_list_of(list(segments)))
        for name, size_bytes, file in rows:
            segment = segments[name]
            sizes[segment] = size_bytes
            if self._seen.files.get(segment) != file:
                self._seen.files[segment] = file
                self._seen.empty_since.pop(segment, None)
        return sizes

    def _is_over(self, segment: int) -> bool:
        """Return whether nothing has been in a segment for a while."""
        if self._read(_HAS_ROWS, segment=self._table(segment)) == [(True,)]:
            self._seen.empty_since.pop(segment, None)
            return False
        now_seconds = time.monotonic()
        return now_seconds - self._seen.empty_since.setdefault(segment, now_seconds) >= _EMPTY_SECONDS

    def _emptied(self, segment: int, size_bytes: int) -> int:
        """Empty a segment if nothing is in it under its lock; return what it takes then."""
        table, by_time = self._table(segment), sql.Identifier(self._schema, index_by_time(segment))
        try:
            ((left_bytes,),) = self._read(
                _EMPTY,
                segment=table,
                name=sql.Literal(table.as_string(self._connection)),
                by_time=sql.Literal(by_time.as_string(self._connection)),
                wait_ms=sql.Literal(_WAIT_MS),
                look_ms=sql.Literal(_LOOK_MS),
            )
        except (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled, psycopg.errors.DeadlockDetected):
            return size_bytes
        if left_bytes < size_bytes:
            name = f"{self._schema}.{name_of(segment)}"
            fields = {"event": "segment_emptied", "table": name, "freed_bytes": size_bytes - left_bytes}
            _log.info("the segment %s was emptied: %d bytes are free", name, size_bytes - left_bytes, extra=fields)
        return int(left_bytes)

    def _part_from_lasting(self, following: Sequence[int]) -> None:
        """Lead those to the lasting segment that hold the oldest one with little."""
        begun = time.monotonic()
        if begun < self._seen.paused_until:
            return
        outlasting = self._read(
            _OUTLASTING,
            batches=sql.Identifier(self._schema, "record_batches"),
            oldest=sql.Literal(following[0]),
            turning=_list_of(TURNING_SEGMENTS),
            part=sql.Literal(_LASTING_PART),
        )
        for (partition_id,) in outlasting:
            self._lead(partition_id, LASTING_SEGMENT)
        ended = time.monotonic()
        self._seen.paused_until = ended + _PAUSE_TIMES * (ended - begun)

    def _let_append_to(self, segment: int) -> None:
        """Let all heads name the segment, but for those of partitions whose batches outlast the rotation."""
        to = {"to_segment": sql.Literal(segment), "count": sql.Literal(_HEADS)}
        while len(self._read(_MOVE_FREE, **to)) == _HEADS:
            pass
        for (partition_id,) in self._read(_LEFT, **to):
            self._lead(partition_id, segment)

    def _lead(self, partition_id: int, segment: int) -> None:
        """Let what is appended to a partition go to the segment, unless somebody keeps its head for long."""
        with contextlib.suppress(psycopg.errors.LockNotAvailable):
            self._read(
                _MOVE_ONE,
                to_segment=sql.Literal(segment),
                partition_id=sql.Literal(partition_id),
                wait_ms=sql.Literal(_HEAD_WAIT_MS),
            )

    def _table(self, segment: int) -> sql.Identifier:
        return sql.Identifier(self._schema, name_of(segment))

    def _read(self, statements: str, **parts: sql.Composable) -> list[Any]:
        heads, storage = (sql.Identifier(self._schema, name) for name in ("partition_heads", "partition_storage"))
        lasting = sql.Literal(LASTING_SEGMENT)
        composed = sql.SQL(_BEGIN + statements).format(heads=heads, storage=storage, lasting=lasting, **parts)
        return self._connection.read_last(composed.as_string(self._connection))


def _list_of(values: Sequence[int | str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Literal, values))
