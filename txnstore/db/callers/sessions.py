"""Sessions of the ORM whose database transaction is ended by others: which can be, and what they do before.

    check_sessions(callers)                    # nothing would be committed apart, or left out
    prepare_session(callers)                   # its hooks run, and what it holds back is written
    ...                                        # others decide
    callers.session.commit()                   # what is left to do: the COMMIT, and the hooks after it

In between it runs no statement, as SQLAlchemy has it for a session that is prepared for a two-phase commit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import psycopg
from sqlalchemy.exc import SQLAlchemyError

from txnstore.db.callers.connections import callers_connection
from txnstore.errors import InvalidRequest, TxnStoreError

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from txnstore.db.callers.connections import CallersConnection

_ENLIST_IT: Final = (
    "what it holds back would not be written before the commit, and be missing: enlist the session itself"
)


def check_sessions(callers: CallersConnection) -> None:
    """Refuse a session that has written on others as well, and the connection of one that is not handed over itself.

    Raises:
        InvalidRequest: one of both.
    """
    if callers.session is not None:
        _check_one_connection(callers.session, callers.owner)
    elif any(other.bind is not callers.owner or _holds_back(other) for other in _others(callers)):
        # One that was given the connection, and has only read, is asked again before the commit.
        raise InvalidRequest(
            f"this connection is one that a Session of SQLAlchemy's has in its transaction; {_ENLIST_IT}"
        )


def prepare_session(callers: CallersConnection) -> None:
    """Let the session, if one was handed over, do all that comes before a COMMIT; a second call does nothing.

    Its `before_commit` hooks are called and what it holds back is written, also within its savepoints, which end.

    Raises:
        InvalidRequest: it has written on another connection meanwhile, or another session holds something back for the
            connection.
        Exception: of a hook of the application's, or SQLAlchemyError: what is to be written was refused.
    """
    if callers.session is not None:
        _prepare(callers.session)
        # Afterwards it runs nothing.
        _check_one_connection(callers.session, callers.owner)
    if any(map(_holds_back, _others(callers))):
        raise InvalidRequest(f"a Session of SQLAlchemy's was given the enlisted connection; {_ENLIST_IT}, or flush it")


def _check_one_connection(session: Session, enlisted: Connection | None) -> None:
    """Refuse a session whose commit would be several, one after the other, unless all but one have only read."""
    if any(map(_may_have_written, set(_connections_of(session)) - {enlisted})):
        raise InvalidRequest(
            "this session has written on several connections (binds), or may have, and would commit them one after the"
            " other: what one of them has written could stand without the rest; give each engine a session of its own,"
            " and enlist those (another PostgreSQL database votes), or write to one engine only"
        )


def _may_have_written(connection: Connection) -> bool:
    try:
        callers = callers_connection(connection)
        return callers.is_closed or callers.may_have_written()
    except (TypeError, TxnStoreError, SQLAlchemyError, psycopg.Error):
        # Of a kind that nothing is known of, or in no state to say so.
        return True


def _holds_back(session: Session) -> bool:
    return bool(session.new or session.dirty or session.deleted)


def _prepare(session: Session) -> None:
    # Only who has a session has imported it.
    from sqlalchemy.orm.session import SessionTransactionState

    outermost = session.get_transaction()
    if outermost is None:
        return
    if outermost._state is SessionTransactionState.PREPARED:  # noqa: SLF001 - it is shown nowhere else
        return
    # Its own commit() goes on from there.
    outermost._prepare_impl()  # noqa: SLF001 - prepare() is for two-phase sessions only


def _others(callers: CallersConnection) -> Iterator[Session]:
    """Give the sessions that have the connection in their transaction, but for the one that was handed over."""
    if callers.owner is None or "sqlalchemy.orm" not in sys.modules:
        return
    from sqlalchemy.orm import session as orm

    # Not by its values(), which fail while another thread makes a session.
    for reference in orm._sessions.valuerefs():  # noqa: SLF001 - a connection does not know whose it is
        found = reference()
        if found is not None and found is not callers.session and callers.owner in _connections_of(found):
            yield found


def _connections_of(session: Session) -> list[Connection]:
    outermost = session.get_transaction()
    # By connection and by engine, in one step: it may be another thread's.
    known = [] if outermost is None else list(outermost._connections.values())  # noqa: SLF001 - public from 2.1.7 on
    return [connection for connection, *_ in known]
