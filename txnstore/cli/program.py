"""The program: its commands, its own options, and how it ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Final

import typer

from txnstore.cli import (
    consume,
    databases,
    dump,
    groups,
    information,
    maintenance,
    produce,
    relay,
    timeline,
    topics,
    transactions,
)
from txnstore.cli.options import ProgramUrl, examples
from txnstore.cli.output import CommandFailed, exit_code, report, say
from txnstore.clients.model.errors import KafkaException
from txnstore.errors import TxnStoreError

_EXAMPLES: Final = examples(
    "export TXNSTORE_URL=sqlite:///shop.db",
    "txnstore migrate",
    "txnstore topics create orders --partitions 3",
)

# No pretty tracebacks: they show variables, and one of them may be a password.
app = typer.Typer(name="txnstore", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.command(epilog=databases.MIGRATE_EXAMPLES)(databases.migrate)
app.command(epilog=databases.ADOPT_EXAMPLES)(databases.adopt)
app.command(epilog=maintenance.EXAMPLES)(maintenance.maintain)
app.command(name="info", epilog=information.EXAMPLES)(information.info)
app.add_typer(databases.app)
app.add_typer(topics.app)
app.command(epilog=produce.EXAMPLES)(produce.produce)
app.command(epilog=consume.EXAMPLES)(consume.consume)
app.command(epilog=relay.EXAMPLES)(relay.relay)
app.add_typer(groups.app)
app.add_typer(transactions.app)
app.add_typer(dump.app)
app.command(epilog=timeline.EXAMPLES)(timeline.timeline)


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"txnstore {_version()}")
        raise typer.Exit


def _version() -> str:
    try:
        return metadata.version("txnstore")
    except metadata.PackageNotFoundError:
        return "from a folder that is not installed"


@app.callback(epilog=_EXAMPLES)
def _txnstore(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
    url: ProgramUrl = None,
) -> None:
    """Look after stores of txnstore, in SQLite files and PostgreSQL databases."""


def run(arguments: Sequence[str] | None) -> None:
    """Run the command and exit; see `txnstore.cli.main`."""
    try:
        app(args=arguments, prog_name="txnstore")
    except (CommandFailed, KafkaException, TxnStoreError) as error:
        report(error)
        sys.exit(exit_code(error))
