"""The closing of a store that moves: the mark in its row, and what refuses every write, from anybody.

The database itself refuses: clients that were open before, SQL functions, applications that insert into the outbox in
whatever language.  A store that was opened is asked for its mark; a client of a closed one is told where it went.

    FROM:  in use -> closed -> gone            TO:  fresh -> arriving -> in use

FROM is gone before TO is in use, each by one commit: the two are never writable at once.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import Connection, bindparam, select, update
from sqlalchemy.exc import DBAPIError

from txnstore.db import ddl
from txnstore.db.postgresql import closing as closing_postgresql
from txnstore.db.schema import metadata, stores
from txnstore.db.sqlite import closing as closing_sqlite
from txnstore.errors import InvalidRequest, StoreMoved


class MoveState(enum.IntEnum):
    """What a move has done with a store; as in `stores.move_state`."""

    CLOSED = 0
    """It is being copied to another database; until that is complete, it can be opened again."""

    GONE = 1
    """It lives in another database now; nothing opens it again."""

    ARRIVING = 2
    """It is being filled by a copy, which alone may write to it."""


@dataclass(frozen=True, slots=True)
class Move:
    """The mark of a store that moves."""

    state: MoveState
    uuid: str
    peer: str
    """The other database, without its password."""

    position: str | None = None
    """How far an arriving store is filled, as the process that fills it has written it.

    Of one that is closed, which of its moves were cancelled before.
    """

    def __str__(self) -> str:
        """Return what a client is told."""
        if self.state is MoveState.GONE:
            return f"it has moved to {self.peer}: use that one"
        if self.state is MoveState.CLOSED:
            return f"it is being copied to {self.peer}; run `txnstore copy` to its end, and use that one"
        return f"it is being filled by a copy of {self.peer}; run `txnstore copy` to its end"


#: All of them but the columns of the mark itself, and where the store is: its file may be another one after a start.
_OF_STORE: Final = tuple(
    column.name for column in stores.c if not column.name.startswith(("move_", "singleton", "database_identity"))
)
#: In the order in which everybody locks rows: few have to be told that they met us the other way round.
_FIRST: Final = ("stores", "transactions", "partition_heads")

_MARK: Final = select(stores.c.move_state, stores.c.move_uuid, stores.c.move_peer, stores.c.move_position)
_SET_MARK: Final = update(stores).values(
    move_state=bindparam("new_state"),
    move_uuid=bindparam("new_uuid"),
    move_peer=bindparam("new_peer"),
    move_position=bindparam("new_position"),
)
_ADMIT: Final = update(stores).where(
    stores.c.move_uuid == bindparam("of_uuid"), stores.c.move_position == bindparam("of_position")
)


def move_of(row: Any) -> Move | None:
    """Return the mark in a row of `stores`; None: the store is in use, and anybody may write to it."""
    if row.move_state is None:
        return None
    return Move(MoveState(row.move_state), str(row.move_uuid), row.move_peer, row.move_position)


def read_move(connection: Connection) -> Move | None:
    """Return the mark of the store; None: it is in use."""
    return move_of(connection.execute(_MARK).one())


def read_last_move(connection: Connection) -> str | None:
    """Return the last move of a store that is in use: it has come by it, or it was cancelled; None: there is none."""
    row = connection.execute(_MARK).one()
    return None if row.move_state is not None or row.move_uuid is None else str(row.move_uuid)


def read_cancelled_moves(connection: Connection) -> list[str]:
    """Return all moves of a store that were cancelled since it came here: none of them is taken up again."""
    row = connection.execute(_MARK).one()
    assert row.move_state is None or row.move_state == MoveState.CLOSED, "it is not here"
    return list(json.loads(row.move_position or "[]"))


def cancel(connection: Connection, move: Move) -> None:
    """Open a store that is closed for this move, after `wait_for_writers`, and remember that it was cancelled."""
    cancelled = [*read_cancelled_moves(connection), move.uuid]
    open_(connection, replace(move, position=json.dumps(cancelled)))


def set_move(connection: Connection, move: Move) -> None:
    """Write the mark; what refuses writes is put up and taken down by `close` and `open_`."""
    connection.execute(
        _SET_MARK,
        {
            "new_state": int(move.state),
            "new_uuid": move.uuid,
            "new_peer": move.peer,
            "new_position": move.position,
        },
    )


def wait_for_writers(connection: Connection) -> None:
    """Let nobody else write to the store before this database transaction ends; writers at work commit before.

    It comes first: a holder of rows that waits for those of others could meet them the other way round.

    Raises:
        sqlalchemy.exc.DBAPIError: somebody writes for longer than statements wait for locks.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(ddl.Verbatim(closing_postgresql.lock(_schema(connection), _names())))


def close(connection: Connection, move: Move) -> None:
    """Let every write fail from now on, after `wait_for_writers`, and write the mark."""
    tables = [(name, _OF_STORE if name == "stores" else None) for name in _names()]
    # The text stays as it is once the store has gone.
    is_arriving = move.state is MoveState.ARRIVING
    told = str(move) if is_arriving else f"it moves to {move.peer}: use that one once `txnstore copy` has ended"
    told = f"{closing_sqlite.CLOSED}: {told}"
    if connection.dialect.name == "sqlite":
        statements = closing_sqlite.close(tables, told)
    else:
        admitted = move.uuid if move.state is MoveState.ARRIVING else None
        statements = closing_postgresql.close(_schema(connection), tables, told, admitted)
    for statement in statements:
        connection.execute(ddl.Verbatim(statement))
    set_move(connection, move)


def open_(connection: Connection, last: Move | None = None) -> None:
    """Let everybody write again, and take the mark away; of the move that is over by this, name and position stay.

    Raises:
        InvalidRequest: the store was closed in a way that this version does not know.
    """
    is_sqlite = connection.dialect.name == "sqlite"
    names = _names()
    statements = closing_sqlite.open_(names) if is_sqlite else closing_postgresql.open_(_schema(connection), names)
    try:
        for statement in statements:
            connection.execute(ddl.Verbatim(statement))
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != closing_postgresql.STILL_USED:
            raise
        raise InvalidRequest(
            "writes are also refused by triggers that this version of txnstore does not know; run this with the version"
            " that closed the store"
        ) from error
    connection.execute(
        _SET_MARK,
        {
            "new_state": None,
            "new_uuid": None if last is None else last.uuid,
            "new_peer": None if last is None else last.peer,
            "new_position": None if last is None else last.position,
        },
    )


def admit(connection: Connection, move: Move) -> bool:
    """Let this database transaction fill the store; False: it was filled further, or does not belong to this move.

    It ends with `set_move`, or nothing is refused any more.
    """
    found = connection.execute(
        _ADMIT.values(move_state=None), {"of_uuid": move.uuid, "of_position": move.position}
    ).rowcount
    if connection.dialect.name == "postgresql":
        connection.execute(ddl.Verbatim(closing_postgresql.admit(move.uuid)))
    return found == 1


def refuse(url: object, move: Move) -> StoreMoved:
    """Return the error for opening a store that is not in use."""
    return StoreMoved(f"the store in {url} is closed: {move}")


def _names() -> list[str]:
    names = [str(table.name) for table in metadata.tables.values()]
    return sorted(names, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))


def _schema(connection: Connection) -> str:
    dialect: Any = connection.dialect
    schema: str = dialect.store_schema
    return schema
