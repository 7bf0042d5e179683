"""The segments of the log: tables of which one is written to while another is emptied, and freed as a whole.

PostgreSQL frees the room of deleted rows only once nobody has a snapshot from before their deletion.  A table that is
truncated gives its room back at once, whatever snapshots there are, unless one has read that very table.  So the rows
of `record_batches` are in a few partitions by `segment`, of which a partition's head names the one that is written to
(`rotation`).  Which one a row is in means nothing else: all are read, by the name of the whole.

They are few, and stay the same.  A reader of the whole opens an index of each; and to attach or to drop one would
wait for everybody who has read the whole, and let everybody wait.
"""

from __future__ import annotations

from typing import Final

from txnstore.db.names import identifier, literal

#: Where batches stay that outlast the turns of the others.
LASTING_SEGMENT: Final = 0
#: These are written to in turns.
TURNING_SEGMENTS: Final = (1, 2, 3)
#: As many rows go as come, from the old end on: autovacuum comes when a twentieth of the table is dead, not a fifth.
PASSED_THROUGH: Final = {
    "autovacuum_vacuum_scale_factor": 0.05,
    "autovacuum_vacuum_threshold": 500,
    "toast.autovacuum_vacuum_scale_factor": 0.05,
    "toast.autovacuum_vacuum_threshold": 500,
}


def name_of(segment: int) -> str:
    """Return the name of the table that holds the rows of a segment."""
    return f"record_batches_{segment}"


#: All of them, by name.
SEGMENT_TABLES: Final = tuple(name_of(segment) for segment in (LASTING_SEGMENT, *TURNING_SEGMENTS))


# Leads whoever asks the view `records` for a time to its pages.  Full pages are entered by autovacuum, not by appends:
# it comes once a minute and remembers 256 requests, which at 2 MiB each is room for 8 MiB a second.
_BY_TIME: Final = "USING brin (running_max_timestamp_ms) WITH (pages_per_range = 256, autosummarize = on)"


def index_by_time(segment: int) -> str:
    """Return the name of the index that leads to the pages of a segment by time."""
    return f"{name_of(segment)}_time"


def create_segments(schema: str) -> list[str]:
    """Return the statements that make the segments in `schema`, where the whole is."""
    quoted = identifier(schema)
    options = ", ".join(f"{name} = {value}" for name, value in PASSED_THROUGH.items())
    tables = [
        f"CREATE TABLE {quoted}.{name} PARTITION OF {quoted}.record_batches"
        f" (CONSTRAINT {name}_pk PRIMARY KEY (partition_id, last_offset))"
        f" FOR VALUES IN ({segment}) WITH ({options})"
        for segment, name in enumerate(SEGMENT_TABLES)
    ]
    for segment, name in enumerate(SEGMENT_TABLES):
        index = f"{quoted}.{index_by_time(segment)}"
        tables.append(f"CREATE INDEX {index_by_time(segment)} ON {quoted}.{name} {_BY_TIME}")
        # PostgreSQL has entered the first pages, empty as they are, and would enter each row of theirs.
        tables.append(f"SELECT pg_catalog.brin_desummarize_range({literal(index)}, 0)")
    return tables
