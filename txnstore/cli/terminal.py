"""This file is how the commands talk: what they take alike, and errors as one line and an exit code."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from rich.console import Console

from txnstore.errors import Recovery, TxnStoreError

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        envvar="TXNSTORE_URL",
        show_default=False,
        help="The database: sqlite:///path/to/file.db or postgresql://user@host/database. Others on this machine see"
        " what is in a command line: put a password into TXNSTORE_URL, PGPASSWORD or ~/.pgpass.",
    ),
]
Schema = Annotated[str, typer.Option("--schema", metavar="NAME", help="The PostgreSQL schema that holds the tables.")]

#: EX_TEMPFAIL of sysexits.h.
TRY_AGAIN_LATER: Final = 75
#: Errors after which the same call may be made again.
_MAY_PASS: Final = frozenset({Recovery.RETRY, Recovery.RESOLVE})

_console: Final = Console(highlight=False, markup=False, soft_wrap=True)
_errors: Final = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def say(line: str) -> None:
    """Print one line of result."""
    _console.print(_printable(line))


def report(error: TxnStoreError) -> None:
    """Print an error as one line, whatever characters the database put into it."""
    _errors.print(_printable(f"txnstore: {error}"), style="red")


def exit_code(error: TxnStoreError) -> int:
    """Return what the program exits with after an error."""
    return TRY_AGAIN_LATER if error.recovery in _MAY_PASS else 1


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)
