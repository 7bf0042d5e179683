"""Database URLs: parsed once, checked, and never printed with their password."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from txnstore.errors import InvalidUrl

_KINDS: Final = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
    "postgresql": "postgresql",
    "postgres": "postgresql",
    "postgresql+psycopg": "postgresql",
}
#: SQLAlchemy's other drivers for them, named as somebody may copy them from an engine's URL.
_OTHER_DRIVERS: Final = {
    "sqlite": frozenset({"aiosqlite", "pysqlcipher"}),
    "postgresql": frozenset({"asyncpg", "pg8000", "psycopg2", "psycopg2cffi", "psycopg_async"}),
}
_FORMS: Final = "sqlite:///path/to/file.db or postgresql://user:password@host:port/database"
_NO_FILE: Final = (
    "the SQLite URL names no file, as it does where what follows its slashes was empty: write"
    " sqlite:///path/to/file.db, or sqlite:// for a store in memory, which is gone with its process"
)
_UNCLEAR: Final = f"the database URL cannot be understood; expected {_FORMS}"
_NOT_A_BROKER: Final = f"this takes the URL of a database, not the address of a Kafka broker; expected {_FORMS}"
_NOT_A_PATH: Final = f"this takes the URL of a database, not a path; sqlite:/// before it makes it one: {_FORMS}"
_NOT_A_LIST: Final = "a list is not understood: the URLs of several databases are one text, with commas between them"
_SEVERAL_PORTS: Final = (
    "the PostgreSQL URL has several hosts with ports before the database's name, where there is room for one port:"
    " write them as options, postgresql://user:password@/database?host=HOST1:PORT1&host=HOST2:PORT2"
)
#: What stands between the slashes of a libpq URL with several hosts, after the user and the password.
_HOST_AND_PORT: Final = r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\])(?::\d*)?"
_HOSTS_AND_PORTS: Final = re.compile(
    rf"postgres(?:ql)?(?:\+\w+)?://(?:[^/?]*@)?{_HOST_AND_PORT}(?:,{_HOST_AND_PORT})+(?:[/?]|$)"
)

#: What is no URL, and why somebody may have taken it for one; the first that fits.
_MISTAKEN: Final = (
    (_HOSTS_AND_PORTS, _SEVERAL_PORTS),
    (re.compile(r"[\[({]"), _NOT_A_LIST),
    (re.compile(r"[\w.-]*/(?!/)|[\w.-]+\.(?:db|sqlite3?)$|[A-Za-z]:\\"), _NOT_A_PATH),
    (re.compile(r"[\w.-]+(?::\d+)?(?:,[\w.-]+(?::\d+)?)*$"), _NOT_A_BROKER),
)

#: Parts of a PostgreSQL URL that libpq also takes as options after the question mark.
_PARTS: Final = {"user": "username", "password": "password", "dbname": "database"}
#: Options that hold a secret, whether or not this version of libpq knows them and says so.
_SECRET_OPTIONS: Final = frozenset(
    {"oauth_client_secret", "password", "scram_client_key", "scram_server_key", "sslpassword"}
)
#: Options that may come several times: one for each server.
_OPTIONS_BY_HOST: Final = frozenset({"host", "port"})
_PORT_MAX: Final = 65535

#: What a driver is given besides the URL, and in its place, by the names of PostgreSQL's client library; asked for each
#: connection.
CurrentOptions: TypeAlias = Callable[[], Mapping[str, str]]


@dataclass(frozen=True)
class DatabaseUrl:
    """The address of one database; its text forms never show the password."""

    kind: str
    """`sqlite` or `postgresql`."""

    url: URL = field(repr=False)
    secret_options: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Options of the connection that are not in `url`, so that nothing made of it prints them."""

    current_options: CurrentOptions | None = field(default=None, repr=False, compare=False)

    @property
    def is_in_memory(self) -> bool:
        """Whether it is an SQLite database in the memory of its connection, which nobody else can open."""
        return self.kind == "sqlite" and self.url.database in (None, ":memory:")

    def option(self, name: str) -> str:
        """Return an option of the URL, the first where it comes several times; empty where it does not come."""
        value = self.url.query.get(name)
        return (value if isinstance(value, str) else value[0]) if value else ""

    def __str__(self) -> str:
        """Return the URL with the password, and every option that may hold one, left out."""
        if self.is_in_memory and self.url.database:
            # As it is written: its colons would be shown percent-encoded.
            return f"{self.url.drivername}:///{self.url.database}"
        return self.url.set(query={}).render_as_string(hide_password=True)

    def __repr__(self) -> str:
        """Return the same as `str`, for tracebacks and logs."""
        return f"DatabaseUrl({str(self)!r})"


def at_its_place(url: DatabaseUrl) -> DatabaseUrl:
    """Return the same, but so that a relative path leads to the same file when the process has changed its folder.

    A folder whose name can stand in no URL has its path stay as it is.

    Raises:
        InvalidUrl: the current folder is not there any more.
    """
    database = url.url.database
    if url.kind != "sqlite" or url.is_in_memory or str(database).startswith(("/", "file:")):
        return url
    try:
        path = str(Path(str(database)).absolute())
    except FileNotFoundError:
        raise InvalidUrl("the SQLite file's path is relative, and the current folder is not there any more") from None
    return replace(url, url=url.url.set(database=path)) if path.isprintable() else url


def parse_url(text: object) -> DatabaseUrl:
    """Return the database that `text` names.

    Raises:
        InvalidUrl: it is not a URL, or not of a kind that txnstore supports. The text is not repeated: a URL that
            cannot be understood may hold a password anywhere.
    """
    if not isinstance(text, str):
        raise InvalidUrl(f"a database URL is text like {_FORMS}, not {type(text).__name__}")
    if not text.isprintable():
        raise InvalidUrl(f"the database URL holds unprintable characters; expected {_FORMS}")
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        why = next((why for mistaken, why in _MISTAKEN if mistaken.match(text)), _UNCLEAR)
        raise InvalidUrl(why) from None
    kind = _KINDS.get(url.drivername)
    if kind is None:
        database, _, driver = url.drivername.partition("+")
        if driver in _OTHER_DRIVERS.get(database, ()):
            raise InvalidUrl(
                f"txnstore brings its own driver: leave +{driver} out of the URL, or make an Outbox from the engine"
                " that the application has with it"
            )
        raise InvalidUrl(f"txnstore has no support for this kind of database; expected {_FORMS}")
    if not all(part.isprintable() for part in _parts_to_show(url)):
        # What was percent-encoded shows only now; a NUL would cut the name, a line break would forge a log.
        raise InvalidUrl(f"the database URL holds unprintable characters; expected {_FORMS}")
    return _parse_sqlite(url) if kind == "sqlite" else _parse_postgresql(url, text)


def secret_option_names() -> frozenset[str]:
    """Return which options of libpq hold a secret: those that it asks programs to hide, and those known here."""
    # Slow to import, and not needed for SQLite.
    from psycopg.pq import Conninfo

    return _SECRET_OPTIONS | {option.keyword.decode() for option in Conninfo.get_defaults() if option.dispchar == b"*"}


def _parts_to_show(url: URL) -> Iterator[str]:
    for part in (url.username, url.host, url.database, *url.query.values()):
        yield from (part,) if isinstance(part, str) else part or ()


def _parse_sqlite(url: URL) -> DatabaseUrl:
    if url.host or url.port or url.username or url.password:
        raise InvalidUrl("an SQLite URL has three slashes before a relative path and four before an absolute one")
    if url.query:
        raise InvalidUrl("an SQLite URL takes no options: only sqlite:///path/to/file.db")
    if url.database == "":
        # To SQLAlchemy it is in memory, too, as without a slash.
        raise InvalidUrl(_NO_FILE)
    return DatabaseUrl("sqlite", url)


def _parse_postgresql(url: URL, text: str) -> DatabaseUrl:
    if text.partition("?")[0].count("@") > 1:
        # The part after the first one would be taken for the host, and printed.
        raise InvalidUrl("the PostgreSQL URL holds several @; one in the user or the password is written %40")
    url = _with_parts_from_options(url)
    if not url.database:
        raise InvalidUrl("the PostgreSQL URL names no database; add /name after the host")
    if any(mark in url.database for mark in "@/"):
        # With a slash too many, what follows may be the user and the password.
        raise InvalidUrl("the PostgreSQL URL has an @ or a slash in the database's name; is there a slash too many?")
    if "\0" in (url.password or ""):
        raise InvalidUrl("the password in the PostgreSQL URL holds a NUL")
    if url.port is not None and not 1 <= url.port <= _PORT_MAX:
        raise InvalidUrl(f"the port in the PostgreSQL URL is not one of 1 to {_PORT_MAX}")
    url = _with_socket_as_option(url)
    _check_options(url)
    # SQLAlchemy would show them in the engine's text form.
    secrets = {name: str(url.query[name]) for name in secret_option_names() if name in url.query}
    return DatabaseUrl("postgresql", url.difference_update_query(secrets), secrets)


def _with_parts_from_options(url: URL) -> URL:
    for option, part in _PARTS.items():
        value = url.query.get(option)
        if value is None:
            continue
        if getattr(url, part) or not isinstance(value, str):
            raise InvalidUrl(f"the PostgreSQL URL names its {option} twice")
        components: dict[str, Any] = {part: value}
        url = url.difference_update_query([option]).set(**components)
    return url


def _with_socket_as_option(url: URL) -> URL:
    """Return the folder of a Unix socket as the option that SQLAlchemy has for it: libpq takes it as a host, too."""
    folder = unquote(url.host or "")
    if not folder.startswith("/"):
        return url
    if not folder.isprintable():
        raise InvalidUrl(f"the database URL holds unprintable characters; expected {_FORMS}")
    if "host" in url.query:
        raise InvalidUrl("the PostgreSQL URL names its host twice")
    port = {} if url.port is None else {"port": str(url.port)}
    # Not by `set`, for which None is a part that stays.
    return url._replace(host=None, port=None).update_query_dict({"host": folder, **port})


def _meant(given: Iterable[str]) -> str:
    """Return which known option a misspelt one is like; what it is itself may be the rest of a password with a `?`."""
    from psycopg.pq import Conninfo

    known = [option.keyword.decode() for option in Conninfo.get_defaults()]
    unknown = (name for name in given if name not in known)
    found = (near for name in unknown for near in get_close_matches(name, known, n=1, cutoff=0.8))
    near = next(found, None)
    return f"; did you mean {near}?" if near is not None else ""


def _check_options(url: URL) -> None:
    """Refuse options that libpq does not know; a value that it does not know shows when it connects."""
    # Slow to import, and not needed for SQLite.
    import psycopg
    from psycopg.conninfo import make_conninfo
    from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

    for name, value in url.query.items():
        if not isinstance(value, str) and name not in _OPTIONS_BY_HOST:
            raise InvalidUrl("the PostgreSQL URL has the same option twice")
    try:
        make_conninfo(**dict.fromkeys(url.query, ""))
    except (psycopg.Error, TypeError, ValueError):
        what = "the PostgreSQL URL has an option that PostgreSQL's client library does not know"
        raise InvalidUrl(f"{what}{_meant(url.query)}") from None
    dialect: Any = PGDialect_psycopg
    try:
        dialect().create_connect_args(url)
    except (ArgumentError, ValueError):
        raise InvalidUrl("the hosts and ports among the options of the PostgreSQL URL do not fit together") from None
