"""The vacuuming: the room of deleted rows is free for new ones soon after their deletion.

PostgreSQL's autovacuum looks at a database once a minute at best (`autovacuum_naptime`, which is the server's), and
takes its time.  What is written and deleted until then comes on top of what topics keep, and stays allocated.  So
a process that deletes vacuums as well: the tables of which a good part is dead, and no large ones,
which would take long and are left to autovacuum.

While somebody holds an old snapshot nothing that was deleted since can be freed, by anybody.  A table that was vacuumed
in vain has its turn again later.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

import psycopg
from psycopg import sql
from sqlalchemy import Engine

from txnstore.db.postgresql.connections import PostgreSQLConnection

_log = logging.getLogger(__name__)

#: A table is due once so much of it is dead, and that is more than this part of what lives in it.
DEAD_BYTES_DUE: Final = 8 * 1024 * 1024
_DEAD_PART_DUE: Final = 8
#: Larger tables, with their indexes, are left to autovacuum.
_TABLE_BYTES_MAX: Final = 4 * 1024**3
#: What takes longer is given up, and left to autovacuum as well.
_SECONDS_MAX: Final = 60.0
#: How long a table is left alone that was vacuumed in vain: so many times as long as that took, within these bounds.
_PAUSE_TIMES: Final = 20
_PAUSE_MIN_SECONDS: Final = 5.0
_PAUSE_MAX_SECONDS: Final = 60.0

# A row takes no more than the part of a page from which on PostgreSQL moves values out of it, nor does such a part.
_TABLES: Final = """
    SET LOCAL search_path = pg_catalog, pg_temp;
    WITH ours AS (
        SELECT relname, unnest(ARRAY[oid, nullif(reltoastrelid, 0)]) AS part
        FROM pg_class
        WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = {schema})
          AND relkind = 'r' AND pg_has_role(relowner, 'USAGE') AND pg_total_relation_size(oid) <= {bytes_max}
    ), counted AS (
        SELECT relname, pg_stat_get_dead_tuples(part) AS dead, pg_stat_get_live_tuples(part) AS live,
               pg_stat_get_tuples_deleted(part) + pg_stat_get_tuples_updated(part) AS died,
               pg_relation_size(part) AS size
        FROM ours WHERE part IS NOT NULL
    ), weighed AS (
        SELECT relname, dead, live, died, least(size / greatest(dead + live, 1), 2048) AS row_bytes FROM counted
    )
    SELECT relname::text, sum(dead * row_bytes)::int8, sum(live * row_bytes)::int8, sum(dead)::int8, sum(died)::int8
    FROM weighed GROUP BY relname
"""


@dataclass(frozen=True, slots=True)
class _Table:
    """What the server's statistics say of a table and of what is kept beside its rows (TOAST)."""

    name: str
    dead_bytes: int
    live_bytes: int
    dead_rows: int
    died_rows: int
    """How many rows have ever been deleted or replaced."""

    @property
    def is_due(self) -> bool:
        """Whether enough of it is dead."""
        return self.dead_bytes >= max(DEAD_BYTES_DUE, self.live_bytes // _DEAD_PART_DUE)


#: Until when tables are left alone, by the clock of this process.
_paused: Final[WeakKeyDictionary[Engine, dict[str, float]]] = WeakKeyDictionary()


def vacuum_due_tables(connection: PostgreSQLConnection, engine: Engine, schema: str) -> int:
    """Vacuum the tables of the schema that are due and belong to this role; return how many.

    `connection` is in no database transaction; `engine` stands for the database in what is remembered.

    Raises:
        psycopg.Error: the database refused, or is away.
    """
    paused = _paused.setdefault(engine, {})
    vacuumed = 0
    for table in _tables(connection, schema):
        if not table.is_due or time.monotonic() < paused.get(table.name, 0.0):
            continue
        begun = time.monotonic()
        _vacuum(connection, schema, table.name)
        ended = time.monotonic()
        after = next((each for each in _tables(connection, schema) if each.name == table.name), table)
        # What has died meanwhile is for the next time.
        freed_rows = table.dead_rows + (after.died_rows - table.died_rows) - after.dead_rows
        if freed_rows < table.dead_rows // 2:
            pause_seconds = max(_PAUSE_MIN_SECONDS, _PAUSE_TIMES * (ended - begun))
            paused[table.name] = ended + min(pause_seconds, _PAUSE_MAX_SECONDS)
        vacuumed += 1
    return vacuumed


def _tables(connection: PostgreSQLConnection, schema: str) -> list[_Table]:
    statements = sql.SQL(_TABLES).format(schema=sql.Literal(schema), bytes_max=sql.Literal(_TABLE_BYTES_MAX))
    return [_Table(*row) for row in connection.read_last(statements.as_string(connection))]


def _vacuum(connection: PostgreSQLConnection, schema: str, name: str) -> None:
    """Vacuum a table, unless somebody has it locked, or it takes too long."""
    # No setting: behind a pooler it would stay with a session that is not ours.
    limit = threading.Timer(_SECONDS_MAX, connection.cancel)
    limit.daemon = True
    limit.start()
    try:
        connection.execute(sql.SQL("VACUUM (SKIP_LOCKED) {}").format(sql.Identifier(schema, name)))
    except psycopg.errors.QueryCanceled:
        fields = {"event": "vacuum_left", "table": f"{schema}.{name}"}
        _log.info("the table %s.%s takes too long to vacuum: it is left to autovacuum", schema, name, extra=fields)
    finally:
        limit.cancel()
