"""The program: its commands, its own options, and how it ends.

A call imports the command that it names and no other: all of them together bring SQLAlchemy, which `--help` and the
shell's user need not wait for.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import logging
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Final, NamedTuple

import typer

from txnstore.cli.options import ProgramUrl, examples
from txnstore.cli.output import FAILED, CommandFailed, exit_code, report, say
from txnstore.clients.model.errors import KafkaException
from txnstore.errors import TxnStoreError

_EXAMPLES: Final = examples(
    "export TXNSTORE_URL=sqlite:///shop.db",
    "txnstore migrate",
    "txnstore topics create orders --partitions 3",
)


class _Command(NamedTuple):
    """A command, and where it is."""

    name: str
    help: str
    """The first paragraph of its own help."""

    module: str
    """In this folder; the command is the function of its name there."""

    epilog: str = "EXAMPLES"


class _CommandGroup(NamedTuple):
    """A noun with commands of its own: `app` in the module of its name."""

    name: str
    help: str


_COMMANDS: Final = (
    _Command(
        "migrate",
        "Create the tables in a database, or bring those of an older version up to date.",
        "databases",
        "MIGRATE_EXAMPLES",
    ),
    _Command(
        "adopt",
        "Make a restored dump or a copied file a store of its own; for several databases give all URLs.",
        "databases",
        "ADOPT_EXAMPLES",
    ),
    _Command(
        "copy", "Move a store to another database, with all that it holds; clients go on there where they were.", "copy"
    ),
    _Command(
        "maintain",
        "Complete decided transactions, abort timed-out ones and delete what has expired, until stopped by Ctrl-C.",
        "maintenance",
    ),
    _Command("info", "Show what a store is: its identity, versions, counts, sizes and settings.", "information"),
    _Command(
        "verify",
        "Read the whole store, and say what is wrong with it: where, what was seen, and what to do.",
        "verify",
    ),
    _Command(
        "doctor",
        "Say what would bite in a database, before it bites: what was seen, what comes of it, and what to do.",
        "doctor",
    ),
    _Command("produce", "Write records: one for each line, as it is, or with a key, or as JSON.", "produce"),
    _Command("consume", "Read records from the first one up to the end, or as the options say.", "consume"),
    _Command("export", "Write the committed records of a topic to a Parquet file.", "archive", "EXPORT_EXAMPLES"),
    _Command("load", "Produce the records of an exported file to a topic, each once.", "archive", "LOAD_EXAMPLES"),
    _Command(
        "relay",
        "Move the rows of the outbox into their topics; or copy topics to or from Kafka, each record once.",
        "relay",
    ),
    _Command(
        "timeline",
        "Draw a partition: records by transaction, markers, last stable offset, high watermark and positions of"
        " groups.",
        "timeline",
    ),
)
_GROUPS: Final = (
    _CommandGroup("databases", "List the databases of a cluster, or add one."),
    _CommandGroup("topics", "Make, list, describe, change and delete topics."),
    _CommandGroup("groups", "List, describe, reset and delete consumer groups."),
    _CommandGroup("transactions", "List, describe and abort transactions."),
    _CommandGroup("roles", "Let roles of PostgreSQL do what they are for and no more, or take that from them."),
    _CommandGroup("dump", "Print what the tables hold, as kafka-dump-log prints it."),
)
NAMES: Final = frozenset(entry.name for entry in (*_COMMANDS, *_GROUPS))
#: How a stream writes what its encoding lacks.
_AS_NUMBERS: Final = "backslashreplace"
#: Set by the shell's completion, which has the words of the line in variables of its own.
_COMPLETION_VARIABLE: Final = "_TXNSTORE_COMPLETE"


@functools.cache
def program_with(names: frozenset[str]) -> typer.Typer:
    """Return the program with these commands; of the others it only knows what they are called and are for."""
    # No pretty tracebacks: they show variables, and one of them may be a password.
    program = typer.Typer(
        name="txnstore",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    program.callback(epilog=_EXAMPLES)(_txnstore)
    for command in _COMMANDS:
        if command.name in names:
            module = importlib.import_module(f"txnstore.cli.{command.module}")
            program.command(command.name, epilog=getattr(module, command.epilog))(getattr(module, command.name))
        else:
            program.command(command.name, help=command.help)(_not_imported)
    for group in _GROUPS:
        if group.name in names:
            program.add_typer(importlib.import_module(f"txnstore.cli.{group.name}").app)
        else:
            program.add_typer(typer.Typer(name=group.name, help=group.help))
    return program


def _not_imported() -> None:
    raise AssertionError("the command that is named is imported")


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"txnstore {_version()}")
        raise typer.Exit


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("txnstore")
    except metadata.PackageNotFoundError:
        return "from a folder that is not installed"


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
    with _open_streams():
        _run(arguments)


def _run(arguments: Sequence[str] | None) -> None:
    # The driver warns of what fails behind an error, which is told of by itself.
    logging.getLogger("psycopg").addFilter(_is_no_echo)
    try:
        try:
            program_with(_named(sys.argv[1:] if arguments is None else arguments))(args=arguments, prog_name="txnstore")
        finally:
            # What a full disk does not take shows here, and not when nobody can tell of it any more.
            sys.stdout.flush()
    except (CommandFailed, KafkaException, TxnStoreError) as error:
        report(error)
        sys.exit(exit_code(error))
    except OSError as error:
        # Commands tell of the files that they were given by themselves: this is the output.
        _write_no_more()
        if not isinstance(error, BrokenPipeError):
            report(CommandFailed(f"the output cannot be written: {error.strerror or error}"))
        sys.exit(FAILED)


@contextlib.contextmanager
def _open_streams() -> Iterator[None]:
    """Let nothing that is opened later take the number of a closed stream, and get what is meant for that.

    The output refuses what is written to it, as a closed one does: records that nobody gets must not count as printed.
    What is said beside them goes nowhere.  What the encoding of a stream lacks is written as its number,
    by this call and not by what its program writes after it.
    """
    before: list[tuple[io.TextIOWrapper, str | None]] = []
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)
    for name, mode in (("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, mode), "w", encoding="utf-8"))  # noqa: PTH123, SIM115 - for good
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.errors != _AS_NUMBERS:
            before.append((stream, stream.errors))
            _set_errors(stream, _AS_NUMBERS)
    try:
        yield
    finally:
        for stream, errors in before:
            _set_errors(stream, errors)


def _set_errors(stream: io.TextIOWrapper, errors: str | None) -> None:
    # It is done before the stream may say that it does not know its position; and it may be closed by now.
    with contextlib.suppress(OSError, ValueError):
        stream.reconfigure(errors=errors)


def _is_no_echo(record: logging.LogRecord) -> bool:
    """Return whether a record of the driver's tells anything beside the error that is on its way to the user."""
    return not str(record.msg).startswith("error ignored ")


def _write_no_more() -> None:
    """Let what is left of the output go nowhere: the interpreter would fail at it once more as it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _named(arguments: Collection[str]) -> frozenset[str]:
    """Return the commands that may be meant: whichever of the words are names of some."""
    return NAMES if _COMPLETION_VARIABLE in os.environ else NAMES.intersection(arguments)
