"""The guard of producer ids: who may only draw the next one cannot set it back, nor so far ahead that none is left.

An id that is given out twice makes two producers one: the records of the second are taken for repetitions of the
first one's.  Whoever writes draws ids, so each of them may update the one row that counts; a trigger sees to it that
this is all they do with it.  It asks about updates of that very column, and nothing else runs it.
"""

from __future__ import annotations

from typing import Final

from txnstore.db.names import identifier

#: What the trigger calls.
GUARD: Final = "keep_producer_ids"
_TRIGGER: Final = "stores_producer_ids"
#: As the ids were when these tables were made: each database has so many, and one comes in so many milliseconds.
_RANGE_BITS: Final = 40
_MS_EACH: Final = 10

# Who may change the store's identity may change this as well: the owner, a coordinator, a copy that is being filled.
# An id may come early by what a clock or the first hour of a store would have it wait for: that costs nobody anything.
_CREATE_FUNCTION: Final = f"""\
CREATE FUNCTION {{schema}}.{GUARD}() RETURNS trigger LANGUAGE plpgsql SECURITY INVOKER
SET search_path = pg_catalog, pg_temp
AS $function$
DECLARE
    age_ms bigint := CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint) - OLD.created_ms;
    by_age bigint := ((OLD.next_producer_id >> {_RANGE_BITS}) << {_RANGE_BITS}) + age_ms / {_MS_EACH};
BEGIN
    IF NEW.next_producer_id NOT BETWEEN OLD.next_producer_id + 1 AND greatest(OLD.next_producer_id, by_age) + 1
        AND NOT has_column_privilege(TG_RELID, 'store_uuid', 'UPDATE') THEN
        RAISE 'permission denied for column next_producer_id: this role may draw the next producer id, and no other'
            USING ERRCODE = 'insufficient_privilege';
    END IF;
    RETURN NEW;
END
$function$"""


def create_guard(schema: str) -> list[str]:
    """Return the statements that make the guard in `schema`, where the tables are."""
    quoted = identifier(schema)
    return [
        _CREATE_FUNCTION.replace("{schema}", quoted),
        f"COMMENT ON FUNCTION {quoted}.{GUARD} IS 'Refuses all but the next producer id to who may only draw one.'",
        (
            f"CREATE TRIGGER {_TRIGGER} BEFORE UPDATE OF next_producer_id ON {quoted}.stores"
            f" FOR EACH ROW EXECUTE FUNCTION {quoted}.{GUARD}()"
        ),
    ]


def drop_guard(schema: str) -> list[str]:
    """Return the statements that remove it from `schema`, where the tables still are."""
    quoted = identifier(schema)
    return [f"DROP TRIGGER IF EXISTS {_TRIGGER} ON {quoted}.stores", f"DROP FUNCTION IF EXISTS {quoted}.{GUARD}"]
