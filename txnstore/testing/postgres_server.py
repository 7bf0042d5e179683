"""A PostgreSQL server of a test: what every one of them can do, and the one that was there before the tests.

What is the same for all of them is SQL, and stands in the class above all; a subclass knows where the server listens
and how it is killed and started.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar, Self

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from sqlalchemy.engine import URL, make_url

if TYPE_CHECKING:
    from types import TracebackType

_CONNECT_TIMEOUT_SECONDS = 10
#: From here on CREATE DATABASE takes a STRATEGY.
_COPY_STRATEGY_VERSION = 150_000


class ServerCannotBeKilledError(RuntimeError):
    """This PostgreSQL server is not ours to kill, stop or start."""


def connection_string(url: str) -> str:
    """Return a SQLAlchemy URL as what `psycopg.connect` takes."""
    parsed = make_url(url)
    parameters = {name: value if isinstance(value, str) else ",".join(value) for name, value in parsed.query.items()}
    parameters |= parsed.translate_connect_args(username="user", database="dbname")
    return make_conninfo(**parameters)


def _copies_files_faster(connection: psycopg.Connection) -> bool:
    """Return whether a database is copied faster file by file than through the WAL.

    So it is where nobody waits for a disk, and three times as fast: the checkpoints that it takes cost nothing there.
    """
    if connection.info.server_version < _COPY_STRATEGY_VERSION:
        return False
    row = connection.execute("SELECT current_setting('fsync')").fetchone()
    return row == ("off",)


class PostgresServer(abc.ABC):
    """A running PostgreSQL server that tests may make databases and roles in.

    As a context manager it closes the server at the end.
    """

    #: One line for people: which server this is, and why this one.
    description: str = "PostgreSQL"

    #: Whether `kill`, `stop` and `start` work; otherwise they raise `ServerCannotBeKilledError`.
    can_be_killed: ClassVar[bool] = False

    @abc.abstractmethod
    def url(self, database: str, user: str | None = None, password: str | None = None) -> str:
        """Return a SQLAlchemy URL (`postgresql+psycopg://...`), by default for the superuser.

        Ask again after `start`: some servers come back on another port.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """End a server that was started for this run and remove its files; may be called again."""

    @property
    def maintenance_database(self) -> str:
        """The database to connect to in order to make and drop others."""
        return "postgres"

    @property
    def version(self) -> int:
        """The version as PostgreSQL counts it: 180004 is 18.4."""
        with self.connect() as connection:
            return connection.info.server_version

    @property
    def keeps_prepared_transactions(self) -> bool:
        """Whether PREPARE TRANSACTION works here (max_prepared_transactions is not 0)."""
        with self.connect() as connection:
            row = connection.execute("SELECT current_setting('max_prepared_transactions')::int").fetchone()
        return row is not None and row[0] > 0

    def connect(self, database: str | None = None) -> psycopg.Connection:
        """Open a connection of the superuser in autocommit mode."""
        url = self.url(database or self.maintenance_database)
        return psycopg.connect(connection_string(url), autocommit=True, connect_timeout=_CONNECT_TIMEOUT_SECONDS)

    def create_database(self, name: str, template: str | None = None) -> None:
        """Create a database; as a copy of `template` if one is named, to which nobody may be connected."""
        statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
        with self.connect() as connection:
            if template is not None:
                statement += sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
                if _copies_files_faster(connection):
                    statement += sql.SQL(" STRATEGY file_copy")
            connection.execute(statement)

    def drop_database(self, name: str) -> None:
        """Drop a database with all that holds it: sessions are ended, prepared transactions rolled back.

        A database that does not exist is left at that.
        """
        with self.connect() as connection:
            prepared = connection.execute("SELECT gid FROM pg_prepared_xacts WHERE database = %s", [name]).fetchall()
            if prepared:
                self._roll_back_prepared(name, [gid for (gid,) in prepared])
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def _roll_back_prepared(self, database: str, gids: list[str]) -> None:
        # PostgreSQL lets nobody do so from another database.
        with self.connect(database) as connection:
            for gid in gids:
                connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))

    def create_role(self, name: str, password: str) -> None:
        """Create a role that may log in with this password and owns nothing."""
        statement = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(sql.Identifier(name), sql.Literal(password))
        with self.connect() as connection:
            connection.execute(statement)

    def drop_role(self, name: str) -> None:
        """Drop a role that owns nothing any more; one that does not exist is left at that."""
        with self.connect() as connection:
            connection.execute(sql.SQL("DROP ROLE IF EXISTS {}").format(sql.Identifier(name)))

    def kill(self) -> None:
        """SIGKILL the server, as a power cut would; returns when all of its processes are gone.

        Raises:
            ServerCannotBeKilledError: it was not started by these tools.
        """
        raise ServerCannotBeKilledError(self.description)

    def stop(self) -> None:
        """Shut the server down: sessions are ended, what is prepared stays prepared.

        Raises:
            ServerCannotBeKilledError: it was not started by these tools.
        """
        raise ServerCannotBeKilledError(self.description)

    def start(self) -> None:
        """Start the killed or stopped server again; returns when it takes connections.

        Raises:
            ServerCannotBeKilledError: it was not started by these tools.
        """
        raise ServerCannotBeKilledError(self.description)

    def __enter__(self) -> Self:
        """Return the server itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the server."""
        self.close()


class ExistingServer(PostgresServer):
    """A server that somebody else runs: tests make databases in it, but do not kill or stop it.

    Databases and roles outlive the run unless they are dropped.
    """

    def __init__(self, url: str) -> None:
        """Take the URL of a role that may create databases and roles.

        Raises:
            ValueError: the URL is not one of PostgreSQL.
        """
        parsed = make_url(url)
        if parsed.get_backend_name() not in {"postgresql", "postgres"}:
            raise ValueError(f"not the URL of a PostgreSQL server: {parsed.render_as_string(hide_password=True)}")
        self._url: URL = parsed.set(drivername="postgresql+psycopg")
        self.description = f"PostgreSQL at {self._url.render_as_string(hide_password=True)}"

    @property
    def maintenance_database(self) -> str:
        """The database that the URL names, else `postgres`."""
        return self._url.database or "postgres"

    def url(self, database: str, user: str | None = None, password: str | None = None) -> str:
        """Return the given URL for another database and, if one is named, another role."""
        url = self._url.set(database=database)
        if user is not None:
            url = URL.create(url.drivername, user, password, url.host, url.port, database, url.query)
        return url.render_as_string(hide_password=False)

    def close(self) -> None:
        """Leave the server as it is."""
