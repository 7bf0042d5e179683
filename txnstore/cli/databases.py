"""This file is the commands about the databases of a cluster: which there are, and one more."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from txnstore.cli.options import Json, Schema, Url, examples, opened
from txnstore.cli.output import Column, show_rows
from txnstore.cli.terminal import say
from txnstore.clients.brokers import broker_id_of
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.names import DEFAULT_SCHEMA
from txnstore.errors import MissingMember, TxnStoreError

app = typer.Typer(name="databases", no_args_is_help=True, help="The databases of a cluster, and one more.")

_COLUMNS: Final = (
    Column("broker", "BROKER"),
    Column("database", "DATABASE"),
    Column("role", "ROLE"),
    Column("store_uuid", "STORE"),
    Column("state", "STATE"),
)


@app.command(name="list", epilog=examples("txnstore databases list", "txnstore databases list --json"))
def list_(*, as_json: Json = False, url: Url = None, schema: Schema = DEFAULT_SCHEMA) -> None:
    """List the databases: the controller has the topics, coordinators have transactions and groups, all have records.

    STATE says whether this command could reach it.
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
    """Let a fresh database join the cluster: topics that are made from now on may be placed there.

    What there is stays where it is.  Clients go on with the URLs that they have until something of theirs lives there;
    give them the new URL, behind the others, before that.
    """
    with opened(url, schema) as cluster:
        before = {member.database_id for member in cluster.databases}
        member = cluster.add_database(new_url)
        if member.database_id in before:
            say(f"the database {member.label} was there already")
        else:
            say(f"the database {member.label} was added; give its URL to the clients, behind the others")


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
