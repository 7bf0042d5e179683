"""The options that commands share: the database, times, settings, and the names that a shell completes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.markup import escape

# What has to do with databases takes longer to import than the help of the program may take.
if TYPE_CHECKING:
    from sqlalchemy import Connection

    from txnstore.db.backend import Limits
    from txnstore.db.cluster.cluster import Cluster
    from txnstore.db.store import Store
    from txnstore.errors import TxnStoreError

URL_VARIABLE: Final = "TXNSTORE_URL"

_FORMS: Final = "sqlite:///path/to/file.db or postgresql://user@host/database"
_SEVERAL: Final = "For several databases give all URLs, separated by commas, the controller's first."
_SECRETS: Final = (
    "Others on this machine can see a command line: put a password into TXNSTORE_URL, PGPASSWORD or ~/.pgpass."
)
_MISSING: Final = f"which database? Give --url, or set {URL_VARIABLE}, to {_FORMS}"

#: That a server cannot be reached is said within seconds.
_RETRY_TIMEOUT_MS: Final = 10_000
_WHOLE_TABLES_MS: Final = 24 * 3_600_000


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
PARTICIPANTS_VARIABLE: Final = "TXNSTORE_PARTICIPANTS"

Participants = Annotated[
    list[str] | None,
    typer.Option(
        "--participant",
        metavar="URL",
        envvar=PARTICIPANTS_VARIABLE,
        show_envvar=False,
        show_default=False,
        help=(
            "A PostgreSQL database that takes part in transactions, as the role that its applications use; repeatable,"
            f" or several in {PARTICIPANTS_VARIABLE}, separated by spaces."
        ),
    ),
]
PartitionShown = Annotated[
    int | None,
    typer.Option("--partition", "-p", metavar="N", min=0, show_default=False, help="The partition; default: 0."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def one_url(context: typer.Context, argument: str | None, option: str | None) -> str:
    """Return the database of a command that takes it as an argument, too."""
    if argument is not None and option is not None:
        raise typer.BadParameter("the database was given twice: as an argument and as --url")
    url = argument if argument is not None else option
    if url is None:
        url = context.find_root().params.get("url")
    if url is None:
        raise typer.BadParameter(_MISSING)
    return str(url)


def patient_limits() -> Limits:
    """Return the limits of a command that may pass over whole tables in one database transaction."""
    from txnstore.db.backend import Limits

    return Limits(
        statement_timeout_ms=_WHOLE_TABLES_MS,
        transaction_timeout_ms=_WHOLE_TABLES_MS,
        retry_timeout_ms=_RETRY_TIMEOUT_MS,
    )


@contextmanager
def about(url: str, urls: Sequence[str]) -> Iterator[None]:
    """Let an error that comes while `url` is looked after say so, if it is one of several.

    Raises:
        TxnStoreError: what came, with the address in front.
    """
    from txnstore.db.url import parse_url
    from txnstore.errors import TxnStoreError

    try:
        yield
    except TxnStoreError as error:
        if len(urls) == 1 or str(address := parse_url(url)) in str(error):
            raise
        raise type(error)(f"{address}: {error}") from error


def opened(url: str | None, schema: str, *, limits: Limits | None = None) -> Cluster:
    """Open the databases of a command; no tables are made.

    Raises:
        TxnStoreError: the first cannot be reached, or the tables are not those of this version.
    """
    from txnstore.db.backend import Limits
    from txnstore.db.cluster.cluster import open_cluster

    assert url is not None
    limits = limits or Limits(retry_timeout_ms=_RETRY_TIMEOUT_MS)
    return open_cluster(url, schema=schema, create=False, limits=limits)


def partition_shown(cluster: Cluster, topic: str, number: int | None) -> int:
    """Return the partition that a command shows; where none was named, the others that there are get a hint.

    Raises:
        UnknownTopicOrPartition: there is no such topic.
    """
    from txnstore.cli.output import hint
    from txnstore.log.topics import get_topic

    if number is not None:
        return number
    count = len(cluster.controller.read(lambda connection: get_topic(connection, topic)).partition_ids)
    if count > 1:
        hint(f"this is partition 0 of the {count} that {topic} has; --partition shows another")
    return 0


def reached(cluster: Cluster, left_out: list[TxnStoreError]) -> Iterator[Store]:
    """Yield the stores of all databases that can be reached; why the others cannot is put into `left_out`."""
    from txnstore.errors import TxnStoreError

    for member in cluster.databases:
        try:
            store = cluster.own(member.database_id)
        except TxnStoreError as error:
            left_out.append(error)
        else:
            yield store


def key_values(texts: list[str], *, form: str = "KEY=VALUE", once: bool = False) -> dict[str, str]:
    """Return texts of this form as a dict; with `once` none may be given twice, else the last value counts."""
    pairs: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{text!r} is not {form}", param_hint="--config")
        if once and key in pairs:
            raise typer.BadParameter(f"{key} was given twice", param_hint="--config")
        pairs[key] = value
    return pairs


def examples(*lines: str) -> str:
    """Return the end of a command's help: how it is used."""
    return "\n".join(["[bold]Examples[/bold]", *(f"[dim]$[/dim] {escape(line)}" for line in lines)])


FORMS: Final = (
    "2026-01-31T12:00:00 (UTC, unless it ends in a zone such as +01:00), milliseconds since 1970,"
    " or 90s, 15m, 2h, 7d ago"
)

_TIME_MS_MAX: Final = 2**63 - 1
#: In 1973. What is less is rather meant as seconds, or as a date without hyphens.
_MILLISECONDS_MIN: Final = 10**11
_AGO: Final = re.compile(r"(\d{1,12})(s|m|h|d)")
_MILLISECONDS: Final = re.compile(r"\d{1,19}")
_UNIT_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def parse_time(text: str) -> int:
    """Return the time that `text` names, in milliseconds since 1970."""
    found = _AGO.fullmatch(text)
    if found is not None:
        return max(0, int(time.time() * 1000) - int(found[1]) * _UNIT_MS[found[2]])
    if _MILLISECONDS.fullmatch(text):
        milliseconds = int(text)
        # Zero is the time before all records, and nothing else.
        if 0 < milliseconds < _MILLISECONDS_MIN:
            read = datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            are_seconds = milliseconds * 1000 >= _MILLISECONDS_MIN
            raise typer.BadParameter(
                f"{text} is {read} in milliseconds since 1970; "
                + (f"if seconds are meant, write {text}000, and a date" if are_seconds else "write a date")
                + f" with its hyphens; a time is {FORMS}"
            )
    else:
        try:
            moment = datetime.fromisoformat(text)
            moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
            milliseconds = int(moment.timestamp() * 1000)
        except (ValueError, OverflowError):
            raise typer.BadParameter(f"{text[:40]!r} is not a time; a time is {FORMS}") from None
    if not 0 <= milliseconds <= _TIME_MS_MAX:
        raise typer.BadParameter(f"{text[:40]!r} is before 1970 or too late; a time is {FORMS}")
    return milliseconds


_NAMES_MAX: Final = 1_000


def complete_topic(context: typer.Context, incomplete: str) -> list[str]:
    """Return the topics whose names begin like this."""
    from txnstore.db.schema import topics

    return _completed_names(context, incomplete, _reader(topics.c.name))


def complete_group(context: typer.Context, incomplete: str) -> list[str]:
    """Return the groups whose names begin like this."""
    from txnstore.db.schema import groups

    return _completed_names(context, incomplete, _reader(groups.c.group_id))


def complete_transactional_id(context: typer.Context, incomplete: str) -> list[str]:
    """Return the transactional ids that begin like this."""
    from txnstore.db.schema import transactions

    return _completed_names(context, incomplete, _reader(transactions.c.transactional_id))


def _reader(column: object) -> Callable[[Connection], list[str]]:
    from sqlalchemy import select

    statement = select(column).order_by(column).limit(_NAMES_MAX)  # type: ignore[call-overload]  # any column
    return lambda connection: list(connection.execute(statement).scalars())


def _completed_names(context: typer.Context, incomplete: str, read: Callable[[Connection], list[str]]) -> list[str]:
    from txnstore.db.backend import Limits
    from txnstore.db.cluster.cluster import open_cluster
    from txnstore.db.names import DEFAULT_SCHEMA

    # A key press is answered soon or not at all, and never with an error.
    limits = Limits(statement_timeout_ms=1_000, lock_timeout_ms=1_000, retry_timeout_ms=0)
    url = context.params.get("url") or context.find_root().params.get("url") or os.environ.get(URL_VARIABLE)
    schema = context.params.get("schema") or DEFAULT_SCHEMA
    try:
        with open_cluster(url or "", schema=schema, create=False, limits=limits) as cluster:
            names = {name for _, found in cluster.read_all(read, {}) for name in found}
            return sorted(name for name in names if name.startswith(incomplete))
    except Exception:  # noqa: BLE001 - whatever it is, the line that is being typed must stay whole
        return []
