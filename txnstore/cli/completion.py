"""This file is what a shell completes: names that are in the store.

A key press is answered soon or not at all, and never with an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import typer
from sqlalchemy import Connection, select

from txnstore.cli.options import URL_VARIABLE
from txnstore.db.backend import Limits
from txnstore.db.cluster.cluster import open_cluster
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.db.schema import groups, topics, transactions

_LIMITS: Final = Limits(statement_timeout_ms=1_000, lock_timeout_ms=1_000, retry_timeout_ms=0)
_NAMES_MAX: Final = 1_000


def complete_topic(context: typer.Context, incomplete: str) -> list[str]:
    """Return the topics whose names begin like this."""
    return _names(context, incomplete, _reader(topics.c.name))


def complete_group(context: typer.Context, incomplete: str) -> list[str]:
    """Return the groups whose names begin like this."""
    return _names(context, incomplete, _reader(groups.c.group_id))


def complete_transactional_id(context: typer.Context, incomplete: str) -> list[str]:
    """Return the transactional ids that begin like this."""
    return _names(context, incomplete, _reader(transactions.c.transactional_id))


def _reader(column: object) -> Callable[[Connection], list[str]]:
    statement = select(column).order_by(column).limit(_NAMES_MAX)  # type: ignore[call-overload]  # any column
    return lambda connection: list(connection.execute(statement).scalars())


def _names(context: typer.Context, incomplete: str, read: Callable[[Connection], list[str]]) -> list[str]:
    url = context.params.get("url") or context.find_root().params.get("url") or os.environ.get(URL_VARIABLE)
    schema = context.params.get("schema") or DEFAULT_SCHEMA
    try:
        with open_cluster(url or "", schema=schema, create=False, limits=_LIMITS) as cluster:
            names = {name for store in cluster.stores() for name in store.read(read)}
            return sorted(name for name in names if name.startswith(incomplete))
    except Exception:  # noqa: BLE001 - whatever it is, the line that is being typed must stay whole
        return []
