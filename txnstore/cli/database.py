"""This file is the commands about a database and its tables."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Final

import typer

from txnstore.cli.options import Schema, UrlArgument, UrlBesideArgument, examples, one_url
from txnstore.cli.terminal import say
from txnstore.db import migrating
from txnstore.db.backend import Limits
from txnstore.db.cluster.cluster import split_urls
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.db.opening import Found, check_schema_name, connect_store, open_store, upgrade
from txnstore.db.schema import SCHEMA_VERSION
from txnstore.db.url import parse_url
from txnstore.participants import adoption

#: A migration may rebuild an index over the whole log; a server that is not there is told within seconds.
_LIMITS: Final = Limits(statement_timeout_ms=24 * 3_600_000, retry_timeout_ms=10_000)

EXAMPLES: Final = examples(
    "txnstore migrate sqlite:///shop.db",
    "txnstore migrate --url postgresql://alice@db.example/shop --schema messages",
    "txnstore migrate postgresql://db.example/shop --sql | psql -1 shop",
)

ADOPT_EXAMPLES: Final = examples(
    "txnstore adopt postgresql://db2.example/shop",
    "txnstore adopt --same sqlite:///moved/shop.db",
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


def adopt(
    context: typer.Context,
    url: UrlArgument = None,
    *,
    url_option: UrlBesideArgument = None,
    same: Annotated[
        bool,
        typer.Option("--same", help="It is no copy: the original has moved here, and is gone for good where it was."),
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Although it seems to be the original: a copy of a whole server, or of a disk."),
    ] = False,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Let a restored dump or a copied file be a store of its own; of several databases give all URLs.

    A copy has its original's identity, and so must not end the original's transactions in other databases: until this
    is done recovery is refused there, and so are enlisted connections to other databases, clusters and relays to Kafka.
    Stop its clients before. Records, offsets and producers stay as they are.
    """
    if same and force:
        raise typer.BadParameter("an original that has moved is no copy: give one of --same and --force")
    with ExitStack() as stack:
        stores = [
            stack.enter_context(open_store(each, schema=schema, limits=_LIMITS, create=False))
            for each in split_urls(one_url(context, url, url_option))
        ]
        for adopted in adoption.adopt(stores, same=same, force=force):
            if same:
                say(f"{adopted.store.url}: the store {adopted.uuid_after} lives here now")
            else:
                say(f"{adopted.store.url}: the copy of {adopted.uuid_before} is the store {adopted.uuid_after} now")


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
