"""The commands about databases: their tables, copies, and the databases of a cluster."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Any, Final

import typer

from txnstore.cli.options import (
    Json,
    Schema,
    Url,
    UrlArgument,
    UrlBesideArgument,
    about,
    examples,
    one_url,
    opened,
    patient_limits,
)
from txnstore.cli.output import Column, say, show_rows
from txnstore.clients.brokers import broker_id_of
from txnstore.db import migrating
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.cluster.membership import split_urls
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.db.opening import Found, check_schema_name, connect_store, open_store, upgrade
from txnstore.db.schema import SCHEMA_VERSION
from txnstore.db.url import parse_url
from txnstore.errors import MissingMember, TxnStoreError
from txnstore.participants import adoption

_FromVersion = Annotated[
    int,
    typer.Option(
        "--from",
        metavar="VERSION",
        min=0,
        max=SCHEMA_VERSION,
        help="With --sql: the version of the present tables.",
    ),
]

MIGRATE_EXAMPLES: Final = examples(
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
    from_version: _FromVersion = 0,
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
        raise typer.BadParameter("this needs --sql: otherwise the database itself is asked", param_hint="--from")
    for each in urls:
        with about(each, urls):
            if parse_url(each).is_in_memory:
                raise typer.BadParameter(f"{each} names no file, so its tables would be gone with this command")
    for each in urls:
        with about(each, urls):
            _migrate(each, schema)


def adopt(
    context: typer.Context,
    url: UrlArgument = None,
    *,
    url_option: UrlBesideArgument = None,
    same: Annotated[
        bool,
        typer.Option(
            "--same", help="This is not a copy: the original has moved here, and the old place is gone for good."
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Adopt it although it looks like the original: it is a copy of a whole server or disk."
        ),
    ] = False,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Make a restored dump or a copied file a store of its own; for several databases give all URLs.

    A copy has the identity of its original and must not end the original's transactions in other databases. Until it
    is adopted, recovery, enlisted connections to other databases, clusters and relays to Kafka are refused. Stop its
    clients first. Records, offsets and producers stay as they are.
    """
    if same and force:
        raise typer.BadParameter("an original that has moved is not a copy: give either --same or --force")
    with ExitStack() as stack:
        stores = [
            stack.enter_context(open_store(each, schema=schema, limits=patient_limits(), create=False))
            for each in split_urls(one_url(context, url, url_option))
        ]
        for adopted in adoption.adopt(stores, same=same, force=force):
            if same:
                say(f"{adopted.store.url}: the store {adopted.uuid_after} lives here now")
            else:
                say(f"{adopted.store.url}: the copy of {adopted.uuid_before} is the store {adopted.uuid_after} now")


def _migrate(url: str, schema: str) -> None:
    # A migration may rebuild an index over the whole log.
    with connect_store(url, schema=schema, limits=patient_limits()) as store:
        before = upgrade(store)
        if before.found is Found.NOTHING:
            what = "made"
        elif before.schema_version < SCHEMA_VERSION:
            what = f"upgraded from version {before.schema_version}"
        else:
            what = "there already"
        say(f"{store.url}: the tables of version {SCHEMA_VERSION} were {what}")


app = typer.Typer(name="databases", no_args_is_help=True, help="List the databases of a cluster, or add one.")

_COLUMNS: Final = (
    Column("broker", "BROKER"),
    Column("database", "DATABASE"),
    Column("role", "ROLE"),
    Column("store_uuid", "STORE"),
    Column("state", "STATE"),
)


@app.command(name="list", epilog=examples("txnstore databases list", "txnstore databases list --json"))
def list_(*, as_json: Json = False, url: Url = None, schema: Schema = DEFAULT_SCHEMA) -> None:
    """List the databases: the controller has the topics, coordinators transactions and groups, and all have records.

    STATE says whether the database could be reached.
    """
    with opened(url, schema) as cluster:
        rows = [
            {
                "broker": broker_id_of(member.database_id),
                "database": member.label,
                "role": _role(is_controller=number == 0, coordinates=member.coordinates),
                "store_uuid": member.store_uuid,
                "state": _state(cluster, member.database_id),
            }
            for number, member in enumerate(cluster.databases)
        ]
    show_rows(rows, _COLUMNS, as_json=as_json)


@app.command(
    name="add",
    epilog=examples("txnstore databases add postgresql://db3.example/shop --url postgresql://db1.example/shop,..."),
)
def add(
    new_url: Annotated[str, typer.Argument(metavar="URL", show_default=False, help="The fresh database.")],
    *,
    url: Url = None,
    schema: Schema = DEFAULT_SCHEMA,
) -> None:
    """Add a fresh database to the cluster: topics created from now on may be placed there.

    What exists stays where it is. Clients need the new URL, after the others, before anything of theirs is placed
    there.
    """
    with opened(url, schema) as cluster:
        before = {member.database_id for member in cluster.databases}
        member = cluster.add_database(new_url)
        if member.database_id in before:
            say(f"the database {member.label} is in the cluster already")
        else:
            say(f"the database {member.label} was added; give its URL to the clients, after the others")


def _role(*, is_controller: bool, coordinates: bool) -> str:
    roles = ["controller"] if is_controller else []
    return ", ".join([*roles, *(["coordinator"] if coordinates else []), "records"])


def _state(cluster: Cluster, database_id: int) -> str:
    try:
        cluster.own(database_id).read(_nothing, retry_timeout_ms=0)
    except MissingMember:
        return "not in the list of URLs"
    except TxnStoreError as error:
        return f"cannot be reached: {type(error).__name__}"
    return "reached"


def _nothing(_: Any) -> None:
    """Begin and end."""
