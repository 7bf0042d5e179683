"""The views of what is open: `open_transactions`, for which readers of records wait, and `pending_offsets`, for groups.

A reader of a partition stops at the first record of the oldest transaction that is open there, its last stable offset.
This is who wrote it, since when, and the command that ends it:

    SELECT * FROM txnstore.open_transactions WHERE topic = 'orders' ORDER BY first_offset

It has one row for each partition that a transaction is open in, and begins at the partial index of what is open, so
that it costs nothing where nothing is; conditions on `topic`, `partition` and `partition_id` bound what is read.  The
coordinator's row is found by its key.

A transaction belongs to the transactional id whose coordinator lists it in this partition.  Where nobody does, the
columns of the coordinator are NULL: another database of the cluster coordinates it (`coordinator_database_id`), or it
hangs, and no timeout will ever end it.

A transaction may hold offsets of groups and no record: it holds no log back, but whoever asks for these offsets waits
for its end.  `pending_offsets` has a row for each group and partition in which one holds some, whatever it wrote.

On PostgreSQL a session that works on the transaction holds the lock of the coordinator's row: its number stands in
that row's `xmax`, and `pg_locks` tells whose that is.
"""

# ruff: noqa: S608 - what is put into the text are the names of our tables and expressions from this file

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from sqlalchemy import Column, MetaData, Table

from txnstore.db.names import (
    CODE_SCHEMA,
    OPEN_TRANSACTIONS_VIEW,
    PENDING_OFFSETS_VIEW,
    SQLITE_PREFIX,
    StoreName,
    identifier,
    literal,
)

#: The columns of the view, in order, and what each holds.
OPEN_TRANSACTIONS_COLUMNS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "topic": "The topic's name.",
        "partition": "The partition's number within the topic.",
        "first_offset": "Where the transaction begins in the partition.",
        "is_oldest": "Whether readers of the partition wait for this one: its last stable offset is first_offset.",
        "transactional_id": "The transactional id; NULL, as all of the coordinator's columns, if nobody here lists it.",
        "state": "Ongoing, PrepareCommit or PrepareAbort; the last two are decided, and only not complete.",
        "client_id": "The client.id of the process that writes here, as it says itself; NULL: not told.",
        "client_host": "The host on which it runs, as it says itself; NULL: not told.",
        "client_process_id": "Its process there, as it says itself; NULL: not told.",
        "open_for_ms": "For how long it has been open, by the database's clock; if nobody here lists it, silent.",
        "timeout_ms": "Its transaction.timeout.ms, after which any client aborts it; 2147483647: never.",
        "started_ms": "When it began, in milliseconds since 1970.",
        "last_write_ms": "When its producer last wrote to the partition.",
        "prepared_gids": "What it has prepared in other databases, by the names in their pg_prepared_xacts.",
        "backend_pid": "PostgreSQL's session that works on it now and keeps its lock; NULL: no session does.",
        "freed_by": "The command that ends it, with --url or TXNSTORE_URL; NULL: its program completes it (KIP-939).",
        "producer_id": "The producer that wrote there.",
        "producer_epoch": "The epoch of its records.",
        "coordinator_epoch": "The coordinator's epoch in the producer's last marker there; -1: there was no marker.",
        "coordinator_database_id": "The number of the database that coordinates it.",
        "partition_id": "The partition's number in the whole cluster; for use in conditions, with an index.",
    }
)
#: The same of the view `pending_offsets`.
PENDING_OFFSETS_COLUMNS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "group_id": "The group.",
        "topic": "The topic's name.",
        "partition": "The partition's number within the topic.",
        "pending_offset": "What the group will have committed there if the transaction commits.",
        "transactional_id": "The transactional id; NULL, as all of the coordinator's columns, if nobody here lists it.",
        "state": "Ongoing, PrepareCommit or PrepareAbort; the last two are decided, and only not complete.",
        "client_id": "The client.id of the producer, as it says itself; NULL: not told.",
        "client_host": "The host on which it runs, as it says itself; NULL: not told.",
        "client_process_id": "Its process there, as it says itself; NULL: not told.",
        "open_for_ms": "For how long it has been open, by the database's clock; else since sent_ms.",
        "timeout_ms": "Its transaction.timeout.ms, after which any client aborts it; 2147483647: never.",
        "started_ms": "When it began, in milliseconds since 1970.",
        "sent_ms": "When the offset was sent.",
        "freed_by": "The command that ends it, with --url or TXNSTORE_URL; NULL: its program completes it (KIP-939).",
        "producer_id": "The producer of the transaction.",
        "producer_epoch": "Its epoch.",
        "coordinator_database_id": "The number of the database that coordinates it.",
        "partition_id": "The partition's number in the whole cluster; for use in conditions.",
    }
)
# For statements of ours; `metadata` is not to make tables of them.
open_transactions: Final = Table(
    StoreName(OPEN_TRANSACTIONS_VIEW),
    MetaData(schema=CODE_SCHEMA),
    *(Column(name) for name in OPEN_TRANSACTIONS_COLUMNS),
)
pending_offsets: Final = Table(
    StoreName(PENDING_OFFSETS_VIEW),
    MetaData(schema=CODE_SCHEMA),
    *(Column(name) for name in PENDING_OFFSETS_COLUMNS),
)

#: A transactional id that is a word for a shell and no option; of others the command that ends it names the place.
is_plain_name: Final = re.compile("[A-Za-z0-9_][A-Za-z0-9._:-]*").fullmatch
#: As many bits of a producer id are the number of a producer within the range of its database.
_PRODUCER_ID_BITS: Final = 40
_BOTH: Final = (OPEN_TRANSACTIONS_VIEW, PENDING_OFFSETS_VIEW)
#: Between the parts of a list.
_SEPARATOR: Final = "', '"


@dataclass(frozen=True, slots=True)
class _Words:
    """What the two databases call differently."""

    table: Callable[[str], str]
    now_ms: str
    is_plain: Callable[[str], str]
    """Whether a text is as `is_plain_name` wants it."""

    listed: Callable[[str], str]
    """The values of several rows as one text."""

    backend_pid: Callable[[str], str]
    """Which session holds the lock of a row, by the row's xmax."""


def _view(words: _Words) -> str:
    table = words.table
    running = "state IN (1, 2, 3)"

    def owner(column: str) -> str:
        return f"coalesce(own.{column}, joined.{column})"

    def client(column: str) -> str:
        return f"CASE WHEN joined.transactional_id IS NULL THEN own.{column} ELSE writer.{column} END"

    return f"""\
CREATE VIEW {table(OPEN_TRANSACTIONS_VIEW)} AS
SELECT
    topics.name AS topic,
    partitions.partition_number AS partition,
    opened.transaction_first_offset AS first_offset,
    NOT EXISTS (
        SELECT 1 FROM {table("producer_states")} AS older
        WHERE older.partition_id = opened.partition_id
            AND older.transaction_first_offset >= 0
            AND older.transaction_first_offset < opened.transaction_first_offset
    ) AS is_oldest,
    {owner("transactional_id")} AS transactional_id,
    CASE {owner("state")} WHEN 1 THEN 'Ongoing' WHEN 2 THEN 'PrepareCommit' WHEN 3 THEN 'PrepareAbort' END AS state,
    {client("client_id")} AS client_id,
    {client("client_host")} AS client_host,
    {client("client_process_id")} AS client_process_id,
    {words.now_ms} - coalesce(own.start_ms, joined.start_ms, opened.last_timestamp_ms) AS open_for_ms,
    {owner("timeout_ms")} AS timeout_ms,
    {owner("start_ms")} AS started_ms,
    opened.last_timestamp_ms AS last_write_ms,
    (
        SELECT {words.listed("branch.gid")} FROM {table("transaction_branches")} AS branch
        WHERE branch.transactional_id = {owner("transactional_id")}
    ) AS prepared_gids,
    {words.backend_pid(owner("xmax"))} AS backend_pid,
    CASE
        WHEN {owner("state")} IN (2, 3) THEN 'txnstore maintain --once'
        WHEN {owner("timeout_ms")} = 2147483647 THEN NULL
        WHEN {words.is_plain(owner("transactional_id"))}
            THEN 'txnstore transactions abort ' || {owner("transactional_id")}
        ELSE 'txnstore transactions abort --topic ' || topics.name
            || ' --partition ' || partitions.partition_number
            || ' --start-offset ' || opened.transaction_first_offset
    END AS freed_by,
    opened.producer_id,
    opened.producer_epoch,
    opened.coordinator_epoch,
    (opened.producer_id >> {_PRODUCER_ID_BITS}) + 1 AS coordinator_database_id,
    opened.partition_id
FROM {table("producer_states")} AS opened
JOIN {table("partitions")} AS partitions ON partitions.partition_id = opened.partition_id
JOIN {table("topics")} AS topics ON topics.topic_id = partitions.topic_id
LEFT JOIN {table("transactions")} AS own
    ON own.producer_id = opened.producer_id
    AND own.{running}
    AND EXISTS (
        SELECT 1 FROM {table("transaction_partitions")} AS listed
        WHERE listed.transactional_id = own.transactional_id AND listed.partition_id = opened.partition_id
    )
LEFT JOIN {table("transaction_writers")} AS writer
    ON writer.writer_producer_id = opened.producer_id
    AND EXISTS (
        SELECT 1 FROM {table("transaction_writer_partitions")} AS listed
        WHERE listed.transactional_id = writer.transactional_id
            AND listed.writer_producer_id = writer.writer_producer_id
            AND listed.partition_id = opened.partition_id
    )
LEFT JOIN {table("transactions")} AS joined
    ON joined.transactional_id = writer.transactional_id AND joined.{running}
WHERE opened.transaction_first_offset >= 0
"""


def _view_of_offsets(words: _Words) -> str:
    table = words.table
    return f"""\
CREATE VIEW {table(PENDING_OFFSETS_VIEW)} AS
SELECT
    held.group_id,
    topics.name AS topic,
    partitions.partition_number AS partition,
    held.pending_offset,
    own.transactional_id,
    CASE own.state WHEN 1 THEN 'Ongoing' WHEN 2 THEN 'PrepareCommit' WHEN 3 THEN 'PrepareAbort' END AS state,
    own.client_id,
    own.client_host,
    own.client_process_id,
    {words.now_ms} - coalesce(own.start_ms, held.commit_ms) AS open_for_ms,
    own.timeout_ms,
    own.start_ms AS started_ms,
    held.commit_ms AS sent_ms,
    CASE
        WHEN own.state IN (2, 3) THEN 'txnstore maintain --once'
        WHEN own.timeout_ms = 2147483647 THEN NULL
        WHEN {words.is_plain("own.transactional_id")} THEN 'txnstore transactions abort ' || own.transactional_id
        ELSE 'txnstore transactions abort --producer-id ' || held.producer_id
    END AS freed_by,
    held.producer_id,
    held.producer_epoch,
    (held.producer_id >> {_PRODUCER_ID_BITS}) + 1 AS coordinator_database_id,
    held.partition_id
FROM {table("pending_group_offsets")} AS held
JOIN {table("partitions")} AS partitions ON partitions.partition_id = held.partition_id
JOIN {table("topics")} AS topics ON topics.topic_id = partitions.topic_id
LEFT JOIN {table("transactions")} AS own
    ON own.producer_id = held.producer_id
    AND own.state IN (1, 2, 3)
    AND EXISTS (
        SELECT 1 FROM {table("transaction_groups")} AS listed
        WHERE listed.transactional_id = own.transactional_id AND listed.group_id = held.group_id
    )
"""


def _name_on_postgresql(schema: str) -> Callable[[str], str]:
    return lambda name: f"{identifier(schema)}.{name}"


def create_on_postgresql(schema: str) -> tuple[str, ...]:
    """Return the statements that make the views in `schema`, where the tables are, and say what their columns hold."""
    name = _name_on_postgresql(schema)
    # Asked once for the whole view, and not at all where no row needs it: the lock tables of the server stand still
    # while they are read.
    backend_pids = (
        "(SELECT pg_catalog.jsonb_object_agg(held.transactionid::pg_catalog.text, held.pid)"
        " FROM pg_catalog.pg_locks AS held"
        " WHERE held.locktype = 'transactionid' AND held.granted AND held.pid IS NOT NULL)"
    )
    words = _Words(
        table=name,
        now_ms="CAST(extract(epoch from pg_catalog.clock_timestamp()) * 1000 AS BIGINT)",
        is_plain=lambda value: f"{value} ~ '^[A-Za-z0-9_][A-Za-z0-9._:-]*$'",
        listed=lambda value: f"pg_catalog.string_agg({value}, {_SEPARATOR} ORDER BY {value})",
        backend_pid=lambda xmax: f"CAST({backend_pids} ->> {xmax}::pg_catalog.text AS integer)",
    )
    about = "What holds readers of committed records back: one row for each partition that a transaction is open in."
    about_offsets = "What open transactions hold of groups' offsets: whoever asks for these waits for their end."
    return (
        _view(words),
        *_comments(name(OPEN_TRANSACTIONS_VIEW), about, OPEN_TRANSACTIONS_COLUMNS),
        _view_of_offsets(words),
        *_comments(name(PENDING_OFFSETS_VIEW), about_offsets, PENDING_OFFSETS_COLUMNS),
    )


def _comments(view: str, about: str, columns: Mapping[str, str]) -> Iterator[str]:
    yield f"COMMENT ON VIEW {view} IS {literal(about)}"
    for column, holds in columns.items():
        yield f"COMMENT ON COLUMN {view}.{identifier(column)} IS {literal(holds)}"


def create_on_sqlite() -> tuple[str, ...]:
    """Return the statements that make the views."""
    words = _Words(
        table=lambda name: SQLITE_PREFIX + name,
        now_ms="CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)",
        is_plain=lambda value: f"{value} NOT GLOB '*[^A-Za-z0-9._:-]*' AND {value} GLOB '[A-Za-z0-9_]*'",
        listed=lambda value: f"group_concat({value}, {_SEPARATOR})",
        backend_pid=lambda xmax: "NULL",  # noqa: ARG005 - there are no sessions
    )
    return _view(words), _view_of_offsets(words)


def drop_on_postgresql(schema: str) -> tuple[str, ...]:
    """Return the statements that remove the views from `schema`, if they are there."""
    return tuple(f"DROP VIEW IF EXISTS {_name_on_postgresql(schema)(view)}" for view in _BOTH)


def drop_on_sqlite() -> tuple[str, ...]:
    """Return the statements that remove the views, if they are there."""
    return tuple(f"DROP VIEW IF EXISTS {SQLITE_PREFIX}{view}" for view in _BOTH)
