"""The engines of applications: where one leads, and what it gives its driver to get there.

Our own connections are of another kind than the application's, so they are not made by its engine.  What it was given
besides its URL counts all the same: `connect_args`, and listeners to `do_connect`, which often fetch a password that
is soon over; they are asked again for each connection.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo
from sqlalchemy import URL, Engine
from sqlalchemy.exc import MissingGreenlet

from txnstore.db.url import CurrentOptions, secret_option_names
from txnstore.errors import InvalidUrl

#: The module of the function that a pool calls for a connection, unless the application has one of its own.
_SQLALCHEMYS_OWN: Final = "sqlalchemy.engine.create"
_IN_MEMORY: Final = ("", ":memory:")
NEEDS_FILE: Final = "the database is in memory, where no consumer can read it; an outbox needs a file"

#: Drivers that give what they do not know themselves to libpq, PostgreSQL's own client library.
_LIBPQ_DRIVERS: Final = frozenset({"psycopg", "psycopg_async", "psycopg2"})
#: What others call the same.
_NAMES: Final = {"database": "dbname", "ssl": "sslmode"}
#: What others take that has nothing to do with where a connection leads, nor with how it is protected.
_WITHOUT_MEANING: Final = frozenset(
    {
        "async_fallback",
        "command_timeout",
        "connection_class",
        "loop",
        "max_cacheable_statement_size",
        "max_cached_statement_lifetime",
        "prepared_statement_cache_size",
        "prepared_statement_name_func",
        "record_class",
        "server_settings",
        "statement_cache_size",
        "tcp_keepalive",
        "timeout",
    }
)
#: All of it as one text, in libpq's form.
_AS_TEXT: Final = ("conninfo", "dsn")
#: Text is Unicode on our connections, whatever it is on the application's.
_OURS: Final = "client_encoding"

_MAKES_ITS_OWN: Final = (
    "the engine makes its connections by a function of the application's own (creator, async_creator or pool), which"
    " txnstore cannot use: give the driver's arguments by a do_connect listener of the engine, or by connect_args, or"
)
_LISTENER: Final = "a do_connect listener of the engine"
#: What else to do, by the kind of the database.
_FROM_ITS_URL: Final = {
    "postgresql": "make the outbox from the database's URL",
    "sqlite": "make the outbox from the file's URL, sqlite:////path/to/file.db",
}


def address_of_engine(engine: Engine) -> tuple[str, CurrentOptions | None]:
    """Return the URL under which txnstore reaches the engine's database, and what it is to give the driver besides.

    Raises:
        InvalidUrl: txnstore cannot connect as the engine does.
    """
    kind = engine.dialect.name
    if kind == "sqlite":
        return _url_of_file(engine), None
    if kind != "postgresql":
        raise InvalidUrl(f"an outbox is on PostgreSQL or SQLite, not on {kind}")
    return _url_of_options(_for_libpq(engine, *_given_to_driver(engine))), partial(_current_options, engine)


def database_of_engine(engine: Engine) -> str | None:
    """Return the name of the engine's PostgreSQL database, as far as it is known without asking anybody."""
    options: Mapping[str, Any] = {}
    with suppress(InvalidUrl):
        _, options = _given_to_driver(engine)
    return options.get("dbname") or options.get("database") or engine.url.database


def _given_to_driver(engine: Engine) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that the engine's driver is given, but for the listeners.

    SQLAlchemy keeps them in the function that makes connections.  A listener of ours would hear them as well, but to
    add one to an engine in use makes other threads fail that are connecting.
    """
    creator = getattr(engine.pool, "_creator", None)
    instead = _FROM_ITS_URL[engine.dialect.name]
    if creator is not None and getattr(creator, "__module__", None) != _SQLALCHEMYS_OWN:
        raise InvalidUrl(f"{_MAKES_ITS_OWN} {instead}")
    kept = inspect.getclosurevars(creator).nonlocals if inspect.isfunction(creator) else {}
    if not {"cargs_tup", "cparams"} <= kept.keys():
        raise InvalidUrl(f"this version of SQLAlchemy does not show what an engine gives its driver: {instead}")
    return list(kept["cargs_tup"]), dict(kept["cparams"])


def _given_now(engine: Engine) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that the engine would give its driver now, with what its listeners make of them."""
    arguments, options = _given_to_driver(engine)
    instead = _FROM_ITS_URL[engine.dialect.name]
    for listener in engine.dialect.dispatch.do_connect:
        try:
            made = listener(engine.dialect, SimpleNamespace(info={}), arguments, options)
        except MissingGreenlet:
            raise InvalidUrl(f"{_LISTENER} awaits, where only the engine itself can: {instead}") from None
        if made is not None:
            # Left as it is: it may be one that the application has in use.
            raise InvalidUrl(
                f"{_LISTENER} returns a connection of its own, which txnstore cannot use: let it change the parameters"
                f" that it is given instead, or {instead}"
            )
    return arguments, options


def _current_options(engine: Engine) -> Mapping[str, str]:
    """Return what the engine would give its driver now."""
    return _for_libpq(engine, *_given_now(engine))


def _for_libpq(engine: Engine, arguments: Sequence[Any], options: Mapping[str, Any]) -> dict[str, str]:
    driver = engine.dialect.driver
    known = {option.keyword.decode() for option in Conninfo.get_defaults()}
    text_given = next(filter(None, (*arguments[:1], *map(options.get, _AS_TEXT))), "")
    try:
        of_text = conninfo_to_dict(text_given)
    except psycopg.Error:
        # Its text has the options, and so the password.
        raise InvalidUrl("the engine gives its driver a connection string that cannot be understood") from None
    found: dict[str, str] = {}
    for given_name, value in {**of_text, **options}.items():
        name = given_name if driver in _LIBPQ_DRIVERS else _NAMES.get(given_name, given_name)
        if value is None or name in (_OURS, *_AS_TEXT):
            continue
        text = "disable" if value is False and given_name == "ssl" else _text_of(value)
        if name in known and text is not None:
            found[name] = text
        elif name in known or (driver not in _LIBPQ_DRIVERS and name not in _WITHOUT_MEANING):
            raise InvalidUrl(
                f"the engine gives its driver, {driver}, an argument {given_name!r} that no other driver understands:"
                " make the outbox from the database's URL, with the options of PostgreSQL's own client library in it"
                " (sslmode and sslrootcert, say)"
            )
    return found


def _text_of(value: object) -> str | None:
    """Return a value as libpq takes it, or None."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, list | tuple):
        # Of several hosts.
        return ",".join("" if each is None else str(each) for each in value)
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None


def _url_of_options(options: dict[str, str]) -> str:
    """Return the URL without a secret; several hosts, and folders of sockets, are among its options."""
    secrets = secret_option_names()
    rest = {name: value for name, value in options.items() if name not in secrets}
    parts: dict[str, Any] = {"username": rest.pop("user", None), "database": rest.pop("dbname", None)}
    if rest.get("host", ",").isprintable() and not set(rest.get("host", ",")) & set(",/@"):
        parts["host"] = rest.pop("host")
        port = rest.get("port", "")
        if port.isascii() and port.isdigit():
            parts["port"] = int(rest.pop("port"))
    return URL.create("postgresql", **parts, query=rest).render_as_string(hide_password=False)


def _url_of_file(engine: Engine) -> str:
    arguments, options = _given_now(engine)
    # SQLAlchemy has made it absolute where the engine was made.
    file = os.fsdecode((*arguments, options.get("database") or "")[0])
    if options.get("uri"):
        file = _file_of_uri(file)
    if file in _IN_MEMORY:
        raise InvalidUrl(NEEDS_FILE)
    # A folder whose name can stand in no URL is left to be the one that the process is in.
    return URL.create("sqlite", database=file if file.isprintable() else engine.url.database).render_as_string()


def _file_of_uri(text: str) -> str:
    """Return the file that SQLite opens for this text, where it may be a URI: https://www.sqlite.org/uri.html."""
    if not text.startswith("file:"):
        return text
    uri = urlsplit(text)
    options = parse_qs(uri.query)
    is_in_memory = options.get("mode") == ["memory"] or options.get("vfs") == ["memdb"]
    return "" if is_in_memory else unquote(uri.path)
