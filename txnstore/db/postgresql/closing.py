"""PostgreSQL's way to close a store: a trigger on each table that refuses every statement that writes to it.

It asks no table: an application's database transaction may have a snapshot from before the closing, and would see there
that the store is open.  A process that fills a closed store says for which move, in a setting of the database
transaction, and may.

It refuses tools as well that turn triggers off by `session_replication_role = replica`.  A subscription's changes come
by no statement, so a store that is left has a trigger for each row besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from txnstore.db.names import identifier, literal
from txnstore.db.postgresql.segments import SEGMENT_TABLES

#: The SQLSTATE of the refusal.
CLOSED: Final = "TXN02"
#: That of a function which a trigger calls, as it is to be dropped.
STILL_USED: Final = "2BP01"
#: The setting in which a process that fills a store names the move.
_SETTING: Final = "txnstore.move"
_TRIGGER: Final = "txnstore_closed"
_ROW_TRIGGER: Final = "txnstore_closed_row"
_FUNCTION: Final = "refuse_write"

# By the rights of the role that closed the store: a role that may only write to the outbox is refused for the same
# reason.
_CREATE_FUNCTION: Final = f"""\
CREATE OR REPLACE FUNCTION {{schema}}.{_FUNCTION}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF TG_NARGS < 2 OR current_setting('{_SETTING}', true) IS DISTINCT FROM TG_ARGV[1] THEN
        RAISE USING MESSAGE = TG_ARGV[0], ERRCODE = '{CLOSED}';
    END IF;
    RETURN NULL;
END
$function$"""


def lock(schema: str, names: Iterable[str]) -> str:
    """Return the statement that lets nobody else write to the tables.

    It waits for those that are writing: what they have written is committed by then, and is seen.
    """
    quoted = identifier(schema)
    return f"LOCK TABLE {', '.join(f'{quoted}.{identifier(name)}' for name in names)} IN SHARE ROW EXCLUSIVE MODE"


def close(
    schema: str, tables: Iterable[tuple[str, Sequence[str] | None]], message: str, move_uuid: str | None
) -> list[str]:
    """Return the statements that let all writes to the tables, and to segments by name, fail with `message`.

    A table may come with the columns whose updates are meant, instead of all.  With `move_uuid`, the database
    transactions that `admit` that move may write.
    """
    quoted = identifier(schema)
    arguments = ", ".join(literal(value) for value in (message, move_uuid) if value is not None)
    statements = [_CREATE_FUNCTION.replace("{schema}", quoted)]
    # Segments first: PostgreSQL before 14.5 looks in each for what is enabled in the whole, by its name.
    for name, columns in (*((segment, None) for segment in SEGMENT_TABLES), *tables):
        update = "UPDATE" if columns is None else f"UPDATE OF {', '.join(map(identifier, columns))}"
        triggers = [(_TRIGGER, f"INSERT OR DELETE OR TRUNCATE OR {update}", "STATEMENT")]
        # Whatever is to be filled is spared the time of a call for each row; segments have those of the whole.
        if move_uuid is None and name not in SEGMENT_TABLES:
            triggers.append((_ROW_TRIGGER, f"INSERT OR DELETE OR {update}", "ROW"))
        table = f"{quoted}.{identifier(name)}"
        for trigger, events, each in triggers:
            statements.append(
                f"CREATE TRIGGER {trigger} BEFORE {events} ON {table}"
                f" FOR EACH {each} EXECUTE FUNCTION {quoted}.{_FUNCTION}({arguments})"
            )
            statements.append(f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER {trigger}")
    return statements


def open_(schema: str, names: Sequence[str]) -> list[str]:
    """Return the statements that let them be written to again."""
    quoted = identifier(schema)
    return [
        *(f"DROP TRIGGER IF EXISTS {_ROW_TRIGGER} ON {quoted}.{identifier(name)}" for name in names),
        *(f"DROP TRIGGER IF EXISTS {_TRIGGER} ON {quoted}.{identifier(name)}" for name in (*names, *SEGMENT_TABLES)),
        f"DROP FUNCTION IF EXISTS {quoted}.{_FUNCTION}()",
    ]


def admit(move_uuid: str) -> str:
    """Return the statement by which a database transaction may write to what is closed for that move."""
    return f"SET LOCAL {_SETTING} = {literal(move_uuid)}"
