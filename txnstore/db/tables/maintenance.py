"""The tables of the maintenance."""

from __future__ import annotations

from typing import Final

from sqlalchemy import PrimaryKeyConstraint

from txnstore.db.ddl import Flag, Int64, String
from txnstore.db.tables.building import column, table

maintenance_duties: Final = table(
    "maintenance_duties",
    column("duty", String, "What is to be done again and again."),
    column("begun_ms", Int64, "When somebody last began to do all of it."),
    column("is_unfinished", Flag, "Whether some of that is left, and due at once."),
    column("position", String, "Where the next portion goes on; NULL: at the beginning.", null=True),
    column("turn_ms", Int64, "When somebody last was at it, whether or not something was done."),
    column("holder", String, "Who is at it, or was when it died: host:process:number; NULL: nobody.", null=True),
    column("held_until_ms", Int64, "Until when nobody else takes it; NULL: anybody may.", null=True),
    PrimaryKeyConstraint("duty", name="maintenance_duties_pk"),
    comment="What clients, or `txnstore maintain`, do now and then; who takes the lease in a row does a portion.",
    sqlite_with_rowid=False,
    is_hot=True,
)
