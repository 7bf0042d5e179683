"""This file is a PostgreSQL server that was there before the tests, given by its URL."""

from __future__ import annotations

from sqlalchemy.engine import URL, make_url

from txnstore.testing.postgres_server import PostgresServer


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
