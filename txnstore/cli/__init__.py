"""The command line: one noun a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

from txnstore.cli import database, maintenance
from txnstore.cli.terminal import exit_code, report, say
from txnstore.errors import TxnStoreError

# No pretty tracebacks: they show variables, and one of them may be a password.
app = typer.Typer(name="txnstore", no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
app.command()(database.migrate)
app.command()(maintenance.maintain)


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"txnstore {_version()}")
        raise typer.Exit


def _version() -> str:
    try:
        return metadata.version("txnstore")
    except metadata.PackageNotFoundError:
        return "from a folder that is not installed"


@app.callback()
def _txnstore(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Look after stores of txnstore, in SQLite files and PostgreSQL databases."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that `arguments`, or those of the process, name; this is the program `txnstore`.

    It exits with 0 when all is done, 1 for an error, 2 for a wrong call, and 75 if the same call may succeed later.
    """
    try:
        app(args=arguments, prog_name="txnstore")
    except TxnStoreError as error:
        report(error)
        sys.exit(exit_code(error))
