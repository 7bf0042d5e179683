"""The rotation of the segments: what is appended goes to the next one, and one of which nothing is left is emptied.

Retention deletes what is oldest, so segments lose their last row in the order in which they were written to.  Vacuuming
makes room for what is written next, unless somebody holds an old snapshot; a segment that is emptied gives all of its
room back, whoever holds one.

A segment is emptied while it is locked against everybody, once nothing is seen in it under the lock: whoever has
written to it has committed by then, and whoever comes later finds an empty table.  So which one a partition's head
names is of no matter to what is kept, and a rotation that stops halfway is continued at the next look.  Nobody waits
longer than for a moment: a segment that somebody is reading, or has read in a transaction that goes on, has its turn
again later.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Final

import psycopg
from psycopg import sql

from txnstore.db.postgresql.connections import PostgreSQLConnection
from txnstore.db.postgresql.segments import LASTING_SEGMENT, TURNING_SEGMENTS, name_of

_log = logging.getLogger(__name__)

#: The next one's turn comes once a segment has this size, with its indexes.
SEGMENT_BYTES_MIN: Final = 16 * 1024 * 1024
#: And this part of what all of them take: then they hold little more together than what the topics keep.
_PART_DUE: Final = len(TURNING_SEGMENTS)
#: What is not larger than that has been emptied: PostgreSQL gives an index a page or two to begin with.
_EMPTY_BYTES: Final = 64 * 1024
#: How long everybody may have to wait behind the wish to empty a segment, and for the look at it under the lock.
_WAIT_MS: Final = 20
_LOOK_MS: Final = 100
#: How long a head is waited for that somebody has locked.
_HEAD_WAIT_MS: Final = 200
#: How many heads are changed at once, which producers wait for.
_HEADS: Final = 100

_SIZES: Final = """
    SET LOCAL search_path = pg_catalog, pg_temp;
    SELECT relname::text, pg_total_relation_size(oid) FROM pg_class
    WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = {schema})
      AND relname = ANY (ARRAY[{names}]) AND pg_has_role(relowner, 'USAGE')
"""
_HEADS_IN: Final = """
    SET LOCAL search_path = pg_catalog, pg_temp;
    SELECT segment, count(*) FROM {heads} WHERE segment <> {lasting} GROUP BY segment
"""
# Without a lock: what is in use is not to be waited for.
_HAS_ROWS: Final = """
    SET LOCAL search_path = pg_catalog, pg_temp;
    SELECT EXISTS (SELECT FROM {segment})
"""
_EMPTY: Final = """
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    SET LOCAL search_path = pg_catalog, pg_temp;
    SET LOCAL lock_timeout = {wait_ms};
    SET LOCAL statement_timeout = {look_ms};
    LOCK TABLE {segment} IN ACCESS EXCLUSIVE MODE;
    DO $segment$ BEGIN IF NOT EXISTS (SELECT FROM {segment}) THEN TRUNCATE {segment}; END IF; END $segment$;
    SELECT pg_total_relation_size({name})
"""
# Those that somebody has locked are left out, so nobody waits for a head whose lock waits for another one.
_MOVE_FREE: Final = """
    SET LOCAL search_path = pg_catalog, pg_temp;
    UPDATE {heads} SET segment = {to_segment} WHERE partition_id = ANY (ARRAY(
        SELECT partition_id FROM {heads} WHERE segment NOT IN ({lasting}, {to_segment})
        ORDER BY partition_id LIMIT {count} FOR UPDATE SKIP LOCKED
    )) RETURNING 1
"""
_LEFT: Final = """
    SET LOCAL search_path = pg_catalog, pg_temp;
    SELECT partition_id FROM {heads} WHERE segment NOT IN ({lasting}, {to_segment}) ORDER BY partition_id LIMIT {count}
"""
_MOVE_ONE: Final = """
    SET LOCAL search_path = pg_catalog, pg_temp;
    SET LOCAL lock_timeout = {wait_ms};
    UPDATE {heads} SET segment = {to_segment} WHERE partition_id = {partition_id} RETURNING 1
"""


def rotate_segments(connection: PostgreSQLConnection, schema: str) -> int:
    """Empty the segments that have no rows left, and let appends go to the next one when it is due.

    `connection` is in no database transaction.  Returns how many segments were emptied; none of those that do not
    belong to this role.

    Raises:
        psycopg.Error: the database refused, or is away.
    """
    return _Segments(connection, schema).rotate()


class _Segments:
    """The segments of one store, as its database knows them."""

    def __init__(self, connection: PostgreSQLConnection, schema: str) -> None:
        self._connection = connection
        self._schema = schema
        self._heads = sql.Identifier(schema, "partition_heads")

    def rotate(self) -> int:
        sizes = self._sizes()
        heads_in = dict(self._read(_HEADS_IN))
        if len(sizes) < len(TURNING_SEGMENTS) or not heads_in:
            return 0
        # After a rotation that stopped halfway, and of topics that are new since, some are elsewhere.
        current = max(TURNING_SEGMENTS, key=lambda segment: heads_in.get(segment, 0))
        emptied = 0
        for segment in TURNING_SEGMENTS:
            if segment != current and sizes[segment] > _EMPTY_BYTES:
                before_bytes, sizes[segment] = sizes[segment], self._emptied(segment, sizes[segment])
                emptied += sizes[segment] < before_bytes
        self._let_append_to(self._due(sizes, current))
        return emptied

    def _due(self, sizes: Mapping[int, int], current: int) -> int:
        """Return to which segment to append from now on."""
        if sizes[current] < max(SEGMENT_BYTES_MIN, sum(sizes.values()) // _PART_DUE):
            return current
        place = TURNING_SEGMENTS.index(current)
        following = (*TURNING_SEGMENTS[place + 1 :], *TURNING_SEGMENTS[:place])
        return next((segment for segment in following if sizes[segment] <= _EMPTY_BYTES), current)

    def _sizes(self) -> dict[int, int]:
        """Return what the segments take that belong to this role."""
        segments = {name_of(segment): segment for segment in TURNING_SEGMENTS}
        names = sql.SQL(", ").join(map(sql.Literal, segments))
        rows = self._read(_SIZES, schema=sql.Literal(self._schema), names=names)
        return {segments[name]: size_bytes for name, size_bytes in rows}

    def _emptied(self, segment: int, size_bytes: int) -> int:
        """Empty a segment if nothing is in it; return what it takes then."""
        table = sql.Identifier(self._schema, name_of(segment))
        if self._read(_HAS_ROWS, segment=table) == [(True,)]:
            return size_bytes
        try:
            ((left_bytes,),) = self._read(
                _EMPTY,
                segment=table,
                name=sql.Literal(table.as_string(self._connection)),
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

    def _let_append_to(self, segment: int) -> None:
        """Let all heads name the segment, but for those of partitions whose batches outlast the rotation."""
        to = {"to_segment": sql.Literal(segment), "count": sql.Literal(_HEADS)}
        while len(self._read(_MOVE_FREE, **to)) == _HEADS:
            pass
        for (partition_id,) in self._read(_LEFT, **to):
            with contextlib.suppress(psycopg.errors.LockNotAvailable):
                self._read(
                    _MOVE_ONE,
                    to_segment=to["to_segment"],
                    partition_id=sql.Literal(partition_id),
                    wait_ms=sql.Literal(_HEAD_WAIT_MS),
                )

    def _read(self, statements: str, **parts: sql.Composable) -> list[tuple[int, ...]]:
        composed = sql.SQL(statements).format(heads=self._heads, lasting=sql.Literal(LASTING_SEGMENT), **parts)
        return self._connection.read_last(composed.as_string(self._connection))
