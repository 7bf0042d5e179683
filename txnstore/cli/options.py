"""This file is what the commands take alike: the database, its schema, JSON, and how they open the store."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from rich.markup import escape

from txnstore.db.backend import Limits
from txnstore.db.cluster.cluster import Cluster, open_cluster

URL_VARIABLE: Final = "TXNSTORE_URL"

_FORMS: Final = "sqlite:///path/to/file.db or postgresql://user@host/database"
_SEVERAL: Final = "Of several databases all URLs, with commas, the controller's first."
_SECRETS: Final = (
    "Others on this machine see what is in a command line: put a password into TXNSTORE_URL, PGPASSWORD or ~/.pgpass."
)
_MISSING: Final = f"which database? Give --url, or set {URL_VARIABLE}, to {_FORMS}"

#: A server that is not there is told within seconds.
_LIMITS: Final = Limits(retry_timeout_ms=10_000)


def _url_or_that_of_the_program(context: typer.Context, url: str | None) -> str | None:
    """Return the URL that stands nearest: at the command, before it, in the environment."""
    if url is None and not context.resilient_parsing:
        url = context.find_root().params.get("url")
        if url is None:
            raise typer.BadParameter(_MISSING)
    return url


#: Before the command; the only one that looks into the environment, so that what is typed wins.
ProgramUrl = Annotated[
    str | None,
    typer.Option(
        "--url", metavar="URL", envvar=URL_VARIABLE, show_default=False, help=f"The database: {_FORMS}. {_SEVERAL}"
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        show_default=False,
        callback=_url_or_that_of_the_program,
        help=f"The database: {_FORMS}; default: {URL_VARIABLE}. {_SECRETS}",
    ),
]
UrlArgument = Annotated[
    str | None,
    typer.Argument(metavar="[URL]", show_default=False, help=f"The database: {_FORMS}; or --url. {_SECRETS}"),
]
UrlBesideArgument = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", show_default=False, help=f"The database; default: {URL_VARIABLE}."),
]
Schema = Annotated[str, typer.Option("--schema", metavar="NAME", help="The PostgreSQL schema that holds the tables.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def one_url(context: typer.Context, argument: str | None, option: str | None) -> str:
    """Return the database of a command that takes it as an argument, too.

    Raises:
        typer.BadParameter: none was given, or two.
    """
    if argument is not None and option is not None:
        raise typer.BadParameter("the database was given twice: as an argument and as --url")
    url = argument if argument is not None else option
    if url is None:
        url = context.find_root().params.get("url")
    if url is None:
        raise typer.BadParameter(_MISSING)
    return str(url)


def opened(url: str | None, schema: str) -> Cluster:
    """Open the databases of a command; one without tables stays without.

    Raises:
        TxnStoreError: the first cannot be reached, or the tables are not those of this version.
    """
    assert url is not None
    return open_cluster(url, schema=schema, create=False, limits=_LIMITS)


def examples(*lines: str) -> str:
    """Return the end of a command's help: how it is used."""
    return "\n".join(["[bold]Examples[/bold]", *(f"[dim]$[/dim] {escape(line)}" for line in lines)])
