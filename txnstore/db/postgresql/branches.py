"""The PostgreSQL side of a branch: look at its database, PREPARE TRANSACTION, COMMIT PREPARED.

The connection of a branch is its owner's: nothing on it may change, except that its database transaction ends.
"""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row
from psycopg.sql import SQL, Identifier

from txnstore.db.postgresql.backend import IDENTIFY, MAKE_DURABLE, connect_driver
from txnstore.db.postgresql.connecting import connecting_error
from txnstore.db.postgresql.connections import PostgreSQLConnection
from txnstore.db.postgresql.exchange import AnswerKind, ServerAnswer, Statement, exchange
from txnstore.db.url import DatabaseUrl
from txnstore.errors import BranchUnfinished, InvalidRequest, InvalidUrl, StoreUnavailable

#: The connection of a branch.
Driver = psycopg.Connection[Any]

#: https://www.postgresql.org/docs/current/errcodes-appendix.html
INSUFFICIENT_PRIVILEGE: Final = "42501"
UNDEFINED_OBJECT: Final = "42704"
#: Of a prepared transaction: somebody else is ending it at this moment.
NOT_IN_PREREQUISITE_STATE: Final = "55000"
DIVISION_BY_ZERO: Final = "22012"
NUMERIC_VALUE_OUT_OF_RANGE: Final = "22003"
#: Of a transaction id: it lies in the future.
INVALID_PARAMETER_VALUE: Final = "22023"

_BUSY_PAUSE_SECONDS: Final = 0.01

#: Gids are put into statements as they are: PREPARE TRANSACTION takes no parameters.
_GID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,199}", re.ASCII)
_TRANSACTION_ID: Final = re.compile(r"[0-9]{1,20}", re.ASCII)

_DOES_NOT_ANSWER: Final = "the connection to the other database does not answer ({}); nothing was changed"
#: What to do where a database cannot vote.
OUTBOX_INSTEAD: Final = "write the records to an outbox in that database instead (txnstore.Outbox)"

_LOOK_AT_SERVER: Final = (
    "SELECT pg_catalog.current_setting('max_prepared_transactions')::int, pg_catalog.pg_is_in_recovery(),"
    " pg_catalog.has_function_privilege('pg_catalog.pg_control_system()', 'execute')"
)
_TRANSACTION: Final = (
    "SELECT pg_catalog.pg_current_xact_id()::text,"
    " pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'off'"
    " AND pg_catalog.current_setting('synchronous_standby_names') OPERATOR(pg_catalog.<>) ''"
)
# Once it has ended the coordinator forgets it: a standby that only knows its vote would be told to roll it back.
_WAIT_FOR_STANDBYS: Final = (
    "SELECT CASE WHEN pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'off'"
    " THEN pg_catalog.set_config('synchronous_commit', 'on', false) END"
)
# By the lock that lasts until the database transaction ends: a rollback, to a savepoint as well, has let go of it.
_HOLDS_GROUP: Final = (
    "SELECT EXISTS (SELECT FROM pg_catalog.pg_locks l"
    " JOIN pg_catalog.pg_class c ON c.oid OPERATOR(pg_catalog.=) l.relation"
    " JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace"
    " WHERE l.pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid() AND l.locktype OPERATOR(pg_catalog.=) 'relation'"
    " AND l.mode OPERATOR(pg_catalog.=) 'RowExclusiveLock' AND c.relname OPERATOR(pg_catalog.=) 'groups'"
    " AND n.nspname OPERATOR(pg_catalog.=) %s)"
)
_PREPARED: Final = (
    "SELECT gid, owner::text FROM pg_catalog.pg_prepared_xacts"
    " WHERE database = pg_catalog.current_database() AND pg_catalog.starts_with(gid, %s) ORDER BY prepared"
)
_DATABASE_OF_PREPARED: Final = (
    "SELECT pg_catalog.pg_is_in_recovery(),"
    " (SELECT database::text FROM pg_catalog.pg_prepared_xacts WHERE gid OPERATOR(pg_catalog.=) %s)"
)


@dataclass(frozen=True, slots=True)
class ParticipatingDatabase:
    """A database that has a share in transactions of a store; nothing here is secret."""

    label: str
    """host:port/name, as its client calls it."""

    identity: str
    """system identifier:oid, as its server knows it: the same by whatever name and user it is reached."""


@dataclass(frozen=True, slots=True)
class PreparedBranch:
    """A prepared transaction as its server lists it."""

    gid: str
    owner: str | None
    """The role that prepared it; it and superusers may end it.  None: it has been dropped since."""


#: By connection, for as long as it lives: what does not change meanwhile is asked once.
_known: Final[weakref.WeakKeyDictionary[Any, ParticipatingDatabase]] = weakref.WeakKeyDictionary()
#: By connection: the schemas of the stores in which consumers have committed offsets on it, at any time.
_group_schemas: Final[weakref.WeakKeyDictionary[Any, set[str]]] = weakref.WeakKeyDictionary()


def check_usable(driver: object) -> Driver:
    """Return the connection if a database transaction is open on it, or would be with its next statement.

    Raises:
        InvalidRequest: it is not a connection to PostgreSQL, or not in a state to take part; says what to do.
    """
    if not isinstance(driver, psycopg.Connection):
        raise InvalidRequest(
            f"a {type(driver).__module__}.{type(driver).__name__} cannot vote on a transaction: only a synchronous"
            f" connection to PostgreSQL can bring another database in; {OUTBOX_INSTEAD}"
        )
    if driver.closed or driver.broken:
        raise InvalidRequest("the connection to enlist is closed; nothing was changed")
    if driver.pgconn.pipeline_status != PipelineStatus.OFF:
        raise InvalidRequest("the connection to enlist is in pipeline mode: leave its pipeline() block first")
    status = driver.info.transaction_status
    if status == TransactionStatus.INERROR:
        raise InvalidRequest("a statement has failed on the connection to enlist: roll it back first")
    if status == TransactionStatus.IDLE and driver.autocommit:
        raise InvalidRequest(
            "the connection to enlist is in autocommit mode and no transaction is open on it: begin one first (psycopg:"
            " `with connection.transaction():`, around the producer's block)"
        )
    if status not in (TransactionStatus.IDLE, TransactionStatus.INTRANS):
        raise InvalidRequest("the connection to enlist is in use; nothing was changed")
    return driver


def look_at_database(driver: Driver) -> ParticipatingDatabase:
    """Return which database the connection leads to, if that can vote.

    Raises:
        InvalidRequest: it cannot; says why and what to do instead.
        StoreUnavailable: the connection broke.
    """
    found = _known.get(driver)
    if found is None:
        found = _known[driver] = _look(driver)
    return found


def note_offsets(driver: object, schema: str) -> None:
    """Take note that a consumer commits offsets on the connection, to the store in this schema of its database."""
    _group_schemas.setdefault(driver, set()).add(schema)


def check_no_offsets(driver: Driver) -> None:
    """Refuse a database transaction in which a consumer has committed offsets: prepared, it keeps the group locked.

    Raises:
        InvalidRequest: it has; says what to do instead.
        StoreUnavailable: the connection broke.
    """
    for schema in _group_schemas.get(driver, ()):
        if _ask(driver, _HOLDS_GROUP, [schema])[0]:
            raise InvalidRequest(
                "a consumer has committed offsets in the database transaction of the connection to enlist, which would"
                " keep the group locked until the producer's transaction is decided: commit it first, or hand the"
                " offsets to send_offsets_to_transaction() of a producer of the group's own store"
            )


def can_prepare(driver: Driver) -> bool:
    """Return whether anything can be prepared on the server.

    Raises:
        StoreUnavailable: the connection broke.
    """
    return bool(_ask(driver, _LOOK_AT_SERVER)[0])


def begin_branch(driver: Driver) -> tuple[str, bool]:
    """Return the id of the database transaction that is open on the connection; one is begun if none is.

    And whether its end would not wait for standbys that its server has, for `synchronous_commit` is off: its end is for
    a connection of our own then.

    Raises:
        StoreUnavailable: the connection broke.
    """
    transaction_id, is_hasty = _ask(driver, _TRANSACTION)
    return str(transaction_id), is_hasty


def prepare_statement(driver: Driver, gid: str, transaction_id: str) -> Statement:
    """Return what prepares the database transaction of this id; another one, or none, is refused (22012).

    PostgreSQL writes a vote to its disk whatever the setting is; where it waits for standbys, the vote does, too.
    """
    assert _TRANSACTION_ID.fullmatch(transaction_id)
    text = (
        "SELECT 1 / COALESCE((pg_catalog.pg_current_xact_id_if_assigned() OPERATOR(pg_catalog.=)"
        f" '{transaction_id}'::pg_catalog.xid8)::int, 0); {MAKE_DURABLE}; PREPARE TRANSACTION '{_checked(gid)}'"
    )
    return Statement(driver, text, "PREPARE TRANSACTION")


def end_statement(driver: Driver, gid: str, *, commit: bool) -> Statement:
    """Return what ends a prepared branch."""
    tag = f"{'COMMIT' if commit else 'ROLLBACK'} PREPARED"
    return Statement(driver, f"{tag} '{_checked(gid)}'", tag)


def check_end_statement(driver: Driver, transaction_id: str, *, commit: bool) -> Statement:
    """Return what is refused (22012) if the database transaction of this id has ended, and otherwise than this.

    One that is too old to be known counts as aborted.  Refused as well is (22003) one in progress, as a prepared one
    is, and (22023) an id that the server has not come to yet.
    """
    assert _TRANSACTION_ID.fullmatch(transaction_id)
    if_committed, if_not = (1, 0) if commit else (0, 1)
    # 99999 is out of the range of smallint.
    text = (
        f"SELECT 1 / (CASE WHEN status OPERATOR(pg_catalog.=) 'committed' THEN {if_committed}"  # noqa: S608 - numbers
        f" WHEN status OPERATOR(pg_catalog.=) 'in progress' THEN 99999 ELSE {if_not} END)::smallint"
        f" FROM pg_catalog.pg_xact_status('{transaction_id}'::pg_catalog.xid8) AS status"
    )
    return Statement(driver, text, "SELECT 1")


def has_ended_otherwise(driver: Driver, transaction_id: str, *, commit: bool, timeout_seconds: float) -> bool:
    """Return whether the database transaction of this id, which is not prepared any more, has not ended as was decided.

    Where the server does not know it (any more), it has not committed.  True proves nothing of an abort if it was
    perhaps not prepared: a server that crashes before that may have forgotten its number, and give it to another one.

    Raises:
        BranchUnfinished: it does not say.
    """
    (found,) = exchange([check_end_statement(driver, transaction_id, commit=commit)], timeout_seconds)
    if found.kind is AnswerKind.DONE:
        return False
    if found.sqlstate == INVALID_PARAMETER_VALUE:
        # Not even begun there: a standby that knew nothing of it has taken over, or this is a copy of the server.
        return commit
    if found.sqlstate == NUMERIC_VALUE_OUT_OF_RANGE:
        raise BranchUnfinished("how it has ended is not known: it is in progress")
    if found.sqlstate != DIVISION_BY_ZERO:
        raise BranchUnfinished(f"how it has ended is not known: {found.told}")
    return True


def roll_back(driver: Driver, timeout_seconds: float) -> None:
    """Roll back what is open on the connection; if that cannot be said, close it, which does the same."""
    if driver.closed or driver.info.transaction_status == TransactionStatus.IDLE:
        return
    if exchange([Statement(driver, "ROLLBACK", "ROLLBACK")], timeout_seconds)[0].kind is not AnswerKind.DONE:
        driver.pgconn.finish()


def is_idle(driver: Driver) -> bool:
    """Return whether the connection is open and no database transaction is open on it."""
    return not driver.closed and driver.info.transaction_status == TransactionStatus.IDLE


class BranchAddress:
    """Where a connection leads and as whom, kept in memory to get there again once it is broken; never printed."""

    def __init__(self, driver: Driver) -> None:
        """Take it from a connection that is open."""
        self._parameters: dict[str, Any] = dict(driver.info.get_parameters())
        self._password = driver.info.password

    def connect(self, timeout_seconds: float) -> PostgreSQLConnection:
        """Open another connection.

        Raises:
            TxnStoreError: the database cannot be reached, or lets this user in no more.
        """
        # libpq turns a timeout of one second into two.
        parameters = self._parameters | {"connect_timeout": max(2, int(timeout_seconds))}
        if self._password:
            parameters["password"] = self._password
        return _connected(lambda: PostgreSQLConnection.connect(**parameters, autocommit=True, prepare_threshold=None))


def connect_participant(url: DatabaseUrl) -> PostgreSQLConnection:
    """Open a connection to a participating database.

    Raises:
        InvalidUrl: it is not a URL of PostgreSQL.
        TxnStoreError: the database cannot be reached, or does not let this user in.
    """
    if url.kind != "postgresql":
        raise InvalidUrl(f"{url} is not a PostgreSQL database: databases of other kinds cannot vote on transactions")
    return _connected(lambda: connect_driver(url))


def list_prepared(driver: PostgreSQLConnection, prefix: str) -> list[PreparedBranch]:
    """Return what is prepared in this database, by whomever, under gids that begin with `prefix`; the oldest first.

    Raises:
        StoreUnavailable: the connection broke.
    """
    try:
        with psycopg.Cursor(driver, row_factory=tuple_row) as cursor:
            return [PreparedBranch(*row) for row in cursor.execute(_PREPARED, [prefix])]
    except psycopg.Error as error:
        raise StoreUnavailable(_DOES_NOT_ANSWER.format(error.sqlstate or type(error).__name__)) from None


def database_of_prepared(driver: PostgreSQLConnection, gid: str) -> str | None:
    """Return in which database of the server there is something prepared under this gid; None: in none.

    Raises:
        InvalidRequest: it is a standby, which does not say.
        StoreUnavailable: the connection broke.
    """
    is_standby, database = _ask(driver, _DATABASE_OF_PREPARED, [gid])
    label = f"{driver.info.host or 'localhost'}:{driver.info.port}"
    if is_standby:
        raise InvalidRequest(f"{label} is a standby: connect to its primary")
    return None if database is None else f"{label}/{database}"


def end_prepared(driver: PostgreSQLConnection, gid: str, *, commit: bool, timeout_seconds: float) -> ServerAnswer:
    """Commit or roll back a prepared branch on a connection of our own, as the role that prepared it if need be.

    While somebody else is ending it, that is waited for.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        answer = _end_prepared_now(driver, gid, commit=commit, timeout_seconds=timeout_seconds)
        if answer.sqlstate != NOT_IN_PREREQUISITE_STATE or time.monotonic() >= deadline:
            return answer
        time.sleep(_BUSY_PAUSE_SECONDS)


def _end_prepared_now(driver: PostgreSQLConnection, gid: str, *, commit: bool, timeout_seconds: float) -> ServerAnswer:
    statement = end_statement(driver, gid, commit=commit)
    (answer,) = exchange([statement], timeout_seconds)
    if answer.sqlstate != INSUFFICIENT_PRIVILEGE:
        return answer
    found = next((branch for branch in list_prepared(driver, gid) if branch.gid == gid), None)
    if found is None:
        # Somebody else was quicker.
        return ServerAnswer(AnswerKind.REFUSED, UNDEFINED_OBJECT)
    owner = found.owner
    if owner is None:
        detail = "the role that prepared it has been dropped: only a superuser may end it"
        return ServerAnswer(AnswerKind.REFUSED, INSUFFICIENT_PRIVILEGE, detail)
    set_role = Statement(driver, SQL("SET ROLE {}").format(Identifier(owner)).as_string(driver), "SET")
    if exchange([set_role], timeout_seconds)[0].kind is not AnswerKind.DONE:
        detail = f"only the role {owner!r}, which prepared it, its members and superusers may end this branch"
        return ServerAnswer(AnswerKind.REFUSED, INSUFFICIENT_PRIVILEGE, detail)
    (answer,) = exchange([statement], timeout_seconds)
    exchange([Statement(driver, "RESET ROLE", "RESET")], timeout_seconds)
    return answer


def _look(driver: Driver) -> ParticipatingDatabase:
    info = driver.info
    label = f"{info.host or 'localhost'}:{info.port}/{info.dbname}"
    prepared_max, is_standby, may_identify = _ask(driver, _LOOK_AT_SERVER)
    if is_standby:
        raise InvalidRequest(f"{label} is a standby: connect to its primary")
    if prepared_max == 0:
        raise InvalidRequest(
            f"{label} cannot vote on a transaction: its server has max_prepared_transactions = 0; set it to the number"
            f" of transactions that may be prepared at once and restart the server, or {OUTBOX_INSTEAD}"
        )
    if not may_identify:
        raise InvalidRequest(
            f"the role of the connection to {label} may not call pg_control_system(), which tells which database it"
            " is: GRANT EXECUTE ON FUNCTION pg_control_system() to it"
        )
    system_identifier, oid = _ask(driver, IDENTIFY)
    return ParticipatingDatabase(label, f"{system_identifier}:{oid}")


def _ask(driver: Driver, question: str, values: Sequence[str] | None = None) -> tuple[Any, ...]:
    try:
        # Not the connection's own factories: rows and cursors may be of any kind there.
        with psycopg.Cursor(driver, row_factory=tuple_row) as cursor:
            row = cursor.execute(question, values).fetchone()
    except psycopg.Error as error:
        raise StoreUnavailable(_DOES_NOT_ANSWER.format(error.sqlstate or type(error).__name__)) from None
    assert row is not None
    return row


def _connected(connect: Callable[[], PostgreSQLConnection]) -> PostgreSQLConnection:
    try:
        driver = connect()
    except psycopg.Error as error:
        raise connecting_error(str(error)) from None
    try:
        _ask(driver, _WAIT_FOR_STANDBYS)
    except BaseException:
        driver.close()
        raise
    return driver


def _checked(gid: str) -> str:
    assert _GID.fullmatch(gid), "a branch's gid has other characters"
    return gid
