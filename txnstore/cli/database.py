"""This file is the commands about a database and its tables."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from txnstore.cli.options import Schema, UrlArgument, UrlBesideArgument, examples, one_url
from txnstore.cli.terminal import say
from txnstore.db import migrating
from txnstore.db.backend import Limits
from txnstore.db.cluster import split_urls
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.db.opening import Found, check_schema_name, upgrade
from txnstore.db.schema import SCHEMA_VERSION
from txnstore.db.store import connect_store
from txnstore.db.url import parse_url

#: A migration may rebuild an index over the whole log; a server that is not there is told within seconds.
_LIMITS: Final = Limits(statement_timeout_ms=24 * 3_600_000, retry_timeout_ms=10_000)

EXAMPLES: Final = examples(
    "txnstore migrate sqlite:///shop.db",
    "txnstore migrate --url postgresql://alice@db.example/shop --schema messages",
    "txnstore migrate postgresql://db.example/shop --sql | psql -1 shop",
)


def migrate(
    context: typer.Context,
    url: UrlArgument = None,
    *,
    url_option: UrlBesideArgument = None,
    sql: Annotated[
        bool,
        typer.Option("--sql", help="Print the SQL for psql or sqlite3 instead of running it; connects to nothing."),
    ] = False,
    from_version: Annotated[
        int,
        typer.Option("--from", metavar="VERSION", min=0, max=SCHEMA_VERSION, help="With --sql: the version there is."),
    ] = 0,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Create the tables in a database, or bring those of an older version up to date."""
    urls = split_urls(one_url(context, url, url_option))
    if sql:
        if len(urls) > 1:
            raise typer.BadParameter("--sql prints the statements for one database: give one URL", param_hint="--sql")
        address = parse_url(urls[0])
        check_schema_name(schema)
        typer.echo(migrating.upgrade_sql(kind=address.kind, schema=schema, from_version=from_version), nl=False)
        return
    if from_version:
        raise typer.BadParameter("it goes with --sql only: otherwise the database itself is asked", param_hint="--from")
    for each in urls:
        _migrate(each, schema)


def _migrate(url: str, schema: str) -> None:
    with connect_store(url, schema=schema, limits=_LIMITS) as store:
        before = upgrade(store)
        if before.found is Found.NOTHING:
            what = "made"
        elif before.schema_version < SCHEMA_VERSION:
            what = f"upgraded from version {before.schema_version}"
        else:
            what = "there already"
        say(f"{store.url}: the tables of version {SCHEMA_VERSION} were {what}")
