"""The command that says what a store is: its identity, versions, counts, sizes and settings."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import typer
from sqlalchemy import Connection, Table, func, select

from txnstore.cli.options import Json, Schema, UrlArgument, UrlBesideArgument, examples, one_url, opened
from txnstore.cli.output import Column, say, show_facts, show_json, show_rows, size_text, tell_and_exit, time_text
from txnstore.clients.brokers import broker_id_of
from txnstore.clients.model.metadata import version
from txnstore.config import STORE_SETTINGS
from txnstore.db.cluster.catalogue import read_store_config
from txnstore.db.cluster.cluster import Cluster, LeftOut
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.db.schema import (
    group_members,
    groups,
    partition_heads,
    partitions,
    pending_group_offsets,
    record_batches,
    stores,
    topics,
    transactions,
)
from txnstore.db.store import Store
from txnstore.transactions.protocol import DECIDED, TransactionState

EXAMPLES: Final = examples("txnstore info", "txnstore info --json | jq .counts.open_transactions")

_FACTS: Final = (
    Column("store_uuid", "store"),
    Column("database", "database"),
    Column("server", "server"),
    Column("schema_version", "tables of version"),
    Column("oldest_writer_version", "writable from version"),
    Column("txnstore_version", "this txnstore"),
    Column("created_ms", "created", time_text),
)
_DATABASE_COLUMNS: Final = (Column("broker", "BROKER"), Column("database", "DATABASE"), Column("counted", "COUNTED"))
_COUNTED: Final[tuple[tuple[str, Table], ...]] = (
    ("topics", topics),
    ("partitions", partitions),
    ("record_batches", record_batches),
    ("transactional_ids", transactions),
    ("groups", groups),
    ("group_members", group_members),
    ("pending_group_offsets", pending_group_offsets),
)
_OFFSETS: Final = select(func.sum(partition_heads.c.next_offset - partition_heads.c.log_start_offset))
_STATES: Final = select(transactions.c.state, func.count()).group_by(transactions.c.state)


def info(
    context: typer.Context,
    *,
    url: UrlArgument = None,
    url_option: UrlBesideArgument = None,
    as_json: Json = False,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Show what a store is: its identity, versions, counts, sizes and settings."""
    left_out: LeftOut = {}
    with opened(one_url(context, url, url_option), schema) as cluster:
        store = cluster.controller
        facts = store.read(lambda connection: _facts(store, connection))
        if not cluster.is_alone:
            _add_others(cluster, left_out, facts)
    if as_json:
        show_json(facts)
    else:
        _show(facts)
    tell_and_exit(left_out.values())


def _show(facts: dict[str, Any]) -> None:
    show_facts(facts, _FACTS)
    if "databases" in facts:
        say("")
        show_rows(facts["databases"], _DATABASE_COLUMNS, as_json=False)
    say("")
    counts = [{"what": name.replace("_", " "), "count": count} for name, count in facts["counts"].items()]
    show_rows(counts, (Column("what", "WHAT"), Column("count", "COUNT")), as_json=False)
    say("")
    sizes = [{"what": name.replace("_", " "), "size": size} for name, size in facts["sizes_bytes"].items()]
    show_rows(sizes, (Column("what", "WHAT"), Column("size", "SIZE", size_text)), as_json=False)
    say("")
    show_rows(
        facts["settings"],
        (Column("name", "SETTING"), Column("value", "VALUE"), Column("is_default", "DEFAULT")),
        as_json=False,
    )


def _facts(store: Store, connection: Connection) -> dict[str, Any]:
    row = connection.execute(select(stores)).one()
    config = read_store_config(connection)
    return {
        "store_uuid": row.store_uuid,
        "database": str(store.url),
        "kind": store.backend.name,
        "server": store.backend.version(connection),
        "schema_version": row.schema_version,
        "oldest_writer_version": row.oldest_writer_version,
        "txnstore_version": version(),
        "created_ms": row.created_ms,
        "counts": _counts(connection),
        "sizes_bytes": store.backend.storage_sizes(connection, store.schema),
        "settings": [
            {"name": name, "value": config.get(name, setting.default_text), "is_default": name not in config}
            for name, setting in STORE_SETTINGS.items()
        ],
    }


def _add_others(cluster: Cluster, left_out: LeftOut, facts: dict[str, Any]) -> None:
    """Add what the other databases of the cluster hold; topics and partitions are those of the controller."""
    for store in cluster.stores(left_out):
        if store is cluster.controller:
            continue
        with cluster.leaving_out(store.database_id, left_out):
            counts, sizes = store.read(partial(_held, store))
            for name, count in counts.items():
                if name not in {"topics", "partitions"}:
                    facts["counts"][name] += count
            for name, size in sizes.items():
                facts["sizes_bytes"][name] = facts["sizes_bytes"].get(name, 0) + size
    facts["databases"] = [
        {"broker": broker_id_of(number), "database": cluster.label_of(number), "counted": number not in left_out}
        for number in (member.database_id for member in cluster.databases)
    ]


def _held(store: Store, connection: Connection) -> tuple[dict[str, int], dict[str, int]]:
    return _counts(connection), store.backend.storage_sizes(connection, store.schema)


def _counts(connection: Connection) -> dict[str, int]:
    counts = {
        name: int(connection.execute(select(func.count()).select_from(table)).scalar_one()) for name, table in _COUNTED
    }
    counts["offsets"] = int(connection.execute(_OFFSETS).scalar_one() or 0)
    states = {TransactionState(state): count for state, count in connection.execute(_STATES)}
    counts["open_transactions"] = states.get(TransactionState.ONGOING, 0)
    counts["decided_transactions"] = sum(states.get(state, 0) for state in DECIDED)
    return counts
