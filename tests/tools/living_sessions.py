"""Sessions of PostgreSQL that outlive their connections in a test, each to be the next connection to its database.

To the database the death of a client is the rollback of its transaction and the end of all that its session held:
locks, settings, temporary tables, what it listened to. That is done here at once, and nothing that the dead client has
can reach the session any more. A new session costs its server and its client more than most tests do in one: above all
what it has to read of the catalogue, to plan and to compile again.

What lives on is the server's half alone. Each connection is an object of its own, made as psycopg makes it.
"""

from __future__ import annotations

import selectors
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final
from weakref import WeakKeyDictionary

import psycopg
from psycopg import pq
from psycopg.adapt import AdaptersMap

#: What DISCARD ALL does, but for the plans: to forget those is what costs.
_END_OF_SESSION: Final = b"""
    CLOSE ALL; SET SESSION AUTHORIZATION DEFAULT; RESET ALL; DEALLOCATE ALL; UNLISTEN *;
    SELECT pg_catalog.pg_advisory_unlock_all(); DISCARD TEMP; DISCARD SEQUENCES"""
_AT_REST: Final = (pq.TransactionStatus.IDLE, pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR)

#: To which database, as whom and with which options: what two connections have in common that can be one session.
_Aim = tuple[str, str]

#: What never was a connection is closed, whoever asks.
_NO_SESSION: Final = pq.PGconn.connect_start(b"port=none")

_cuts: Final = ContextVar("_cuts", default=False)


@contextmanager
def sessions_living_on() -> Iterator[None]:
    """Let each connection that is opened meanwhile leave its session, when it is closed, to the next with its options.

    Where it is in the middle of a conversation it is closed, as it is meanwhile in `sessions_cut`.
    """
    left: defaultdict[_Aim, list[pq.abc.PGconn]] = defaultdict(list)
    aims: WeakKeyDictionary[psycopg.Connection[Any], _Aim] = WeakKeyDictionary()
    connection_class: Any = psycopg.Connection
    real_connect, real_close, real_function = vars(connection_class)["connect"], connection_class.close, psycopg.connect

    def connect(cls: type[psycopg.Connection[Any]], /, conninfo: str = "", **options: Any) -> psycopg.Connection[Any]:
        aim = conninfo, repr(sorted((name, value) for name, value in options.items() if name not in _OF_CLIENT))
        connection = _revived(cls, left[aim], options)
        if connection is None:
            connection = real_connect.__func__(cls, conninfo, **options)
        aims[connection] = aim
        return connection

    def close(self: psycopg.Connection[Any]) -> None:
        session = None if _cuts.get() or self.closed or self not in aims else _ended(self)
        if session is None:
            real_close(self)
        else:
            left[aims[self]].append(session)

    connection_class.connect, connection_class.close = classmethod(connect), close
    psycopg.connect = connection_class.connect
    try:
        yield
    finally:
        connection_class.connect, connection_class.close, psycopg.connect = real_connect, real_close, real_function
        for sessions in left.values():
            for session in sessions:
                session.finish()


@contextmanager
def sessions_cut() -> Iterator[None]:
    """Let no session outlive what this thread closes meanwhile: the server has to find out that the client is gone."""
    token = _cuts.set(True)
    try:
        yield
    finally:
        _cuts.reset(token)


#: Options of `connect` that say nothing to the server.
_OF_CLIENT: Final = frozenset({"autocommit", "prepare_threshold", "context", "row_factory", "cursor_factory"})


def _revived(
    cls: type[psycopg.Connection[Any]], sessions: list[pq.abc.PGconn], options: dict[str, Any]
) -> psycopg.Connection[Any] | None:
    while sessions:
        session = sessions.pop()
        if not _is_open(session):
            session.finish()
            continue
        connection = cls(session)
        # As `connect` of psycopg does it.
        connection.prepare_threshold = options.get("prepare_threshold", 5)
        connection.row_factory = options.get("row_factory") or connection.row_factory
        connection.cursor_factory = options.get("cursor_factory") or connection.cursor_factory
        connection._autocommit = bool(options.get("autocommit"))
        if options.get("context"):
            connection._adapters = AdaptersMap(options["context"].adapters)
        return connection
    return None


def _is_open(session: pq.abc.PGconn) -> bool:
    """Return whether the server has said nothing since: as a rule it has ended what speaks by itself."""
    with selectors.DefaultSelector() as selector:
        selector.register(session.socket, selectors.EVENT_READ)
        return not selector.select(0)


def _ended(connection: psycopg.Connection[Any]) -> pq.abc.PGconn | None:
    """Take the session from a connection, which is closed then, and end what it held; None: it is to be closed."""
    session = connection.pgconn
    if session.transaction_status not in _AT_REST:
        return None
    if session.transaction_status != pq.TransactionStatus.IDLE:
        session.exec_(b"ROLLBACK")
    if session.exec_(_END_OF_SESSION).status != pq.ExecStatus.COMMAND_OK:
        return None
    while session.notifies() is not None:
        pass
    connection.pgconn = _NO_SESSION
    connection._closed = True
    return session
