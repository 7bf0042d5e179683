"""The choice of the tests' PostgreSQL: a URL, else a container, else a private cluster.

Choosing starts nothing and takes less than a second, so that a test run can say at its start what it will use and
why; `start` then does it.

Environment variables:
    TXNSTORE_TEST_POSTGRES: `url`, `testcontainers` or `private` forces one source; what it lacks is then an error, as
        it is of what one of the next two names. `none`: tests on PostgreSQL are skipped.
    TXNSTORE_TEST_POSTGRES_URL: a server that runs already; its role may create databases and roles.
    TXNSTORE_TEST_POSTGRES_PROGRAMS: a folder with `bin/postgres` and `bin/initdb`, of whatever version, for a private
        cluster; it comes before a container.
    TXNSTORE_TEST_POSTGRES_IMAGE: the container image, `postgres:18` by default; it is never pulled.
"""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from txnstore.testing.containers import ContainerServer, why_no_container
from txnstore.testing.postgres_server import ExistingServer
from txnstore.testing.private_cluster import (
    NoServerProgramsError,
    PrivateCluster,
    find_programs,
    server_user,
    version_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from txnstore.testing.postgres_server import PostgresServer

_FORCE_VARIABLE: Final = "TXNSTORE_TEST_POSTGRES"
_URL_VARIABLE: Final = "TXNSTORE_TEST_POSTGRES_URL"
_PROGRAMS_VARIABLE: Final = "TXNSTORE_TEST_POSTGRES_PROGRAMS"
_IMAGE_VARIABLE: Final = "TXNSTORE_TEST_POSTGRES_IMAGE"
_DEFAULT_IMAGE: Final = "postgres:18"


#: Who sets one of them does not want tests on PostgreSQL to be skipped, but for `none`.
_ASKING_VARIABLES: Final = (_FORCE_VARIABLE, _URL_VARIABLE, _PROGRAMS_VARIABLE)
_NONE: Final = "none"


class ServerSource(enum.Enum):
    """Where a PostgreSQL server may come from; the values are those of TXNSTORE_TEST_POSTGRES."""

    URL = "url"
    TESTCONTAINERS = "testcontainers"
    PRIVATE = "private"


class NoServerError(RuntimeError):
    """There is no PostgreSQL for the tests: the text says what was looked for."""


def is_asked_for(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment names a source of PostgreSQL, so that to have none is an error."""
    wanted = environment.get(_FORCE_VARIABLE) != _NONE
    return wanted and any(name in environment for name in _ASKING_VARIABLES)


@dataclass(frozen=True)
class ServerChoice:
    """A source of PostgreSQL that will work as far as one can tell without starting it."""

    source: ServerSource
    #: One line: what is used, and why nothing that would come first.
    reason: str
    image: str
    #: May contain a password: never shown.
    url: str | None = None
    #: The folder of the programs for a private cluster; None: those of the wheel.
    programs: Path | None = None

    def __repr__(self) -> str:
        """Show the source and the reason, never the URL."""
        return f"ServerChoice({self.source.value}: {self.reason})"

    def start(self, *, fsync: bool = True, settings: Mapping[str, str] | None = None) -> PostgresServer:
        """Start the server, or take the running one; the caller closes it.

        `fsync` and `settings` are for servers that are started here; a running one keeps its own.
        """
        server: PostgresServer
        if self.url is not None:
            server = ExistingServer(self.url)
        elif self.source is ServerSource.TESTCONTAINERS:
            server = ContainerServer(self.image, fsync=fsync, settings=settings)
        else:
            server = PrivateCluster(fsync=fsync, settings=settings, programs=self.programs)
        server.description = f"{server.description} ({self.reason})"
        return server


def choose_server(environment: Mapping[str, str] = os.environ) -> ServerChoice:
    """Choose by the environment variables above and by what this machine has.

    Raises:
        NoServerError: the source that is forced does not work here, or no source does.
    """
    forced = _forced_source(environment)
    url = environment.get(_URL_VARIABLE)
    image = environment.get(_IMAGE_VARIABLE, _DEFAULT_IMAGE)
    if forced is ServerSource.URL and not url:
        raise NoServerError(f"{_FORCE_VARIABLE}=url needs {_URL_VARIABLE}")
    if url and forced in {None, ServerSource.URL}:
        return ServerChoice(ServerSource.URL, f"{_URL_VARIABLE} is set", image, url)
    programs = told_programs(environment)
    if programs is not None and forced in {None, ServerSource.PRIVATE}:
        return _private(f"{_PROGRAMS_VARIABLE} is set", image, programs)
    if forced is ServerSource.PRIVATE:
        return _private(f"{_FORCE_VARIABLE}=private", image)
    why_not = why_no_container(image)
    if why_not is None:
        return ServerChoice(ServerSource.TESTCONTAINERS, f"a container engine answers and has {image}", image)
    if forced is ServerSource.TESTCONTAINERS:
        raise NoServerError(f"{_FORCE_VARIABLE}=testcontainers, but {why_not}")
    return _private(f"no {_URL_VARIABLE}, and no testcontainers: {why_not}", image)


def told_programs(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of programs that the environment names, for private clusters beside the tests' own."""
    programs = environment.get(_PROGRAMS_VARIABLE)
    return Path(programs) if programs else None


def _forced_source(environment: Mapping[str, str]) -> ServerSource | None:
    name = environment.get(_FORCE_VARIABLE)
    if not name:
        return None
    if name == _NONE:
        raise NoServerError(f"{_FORCE_VARIABLE}=none")
    try:
        return ServerSource(name)
    except ValueError:
        allowed = ", ".join([*(source.value for source in ServerSource), _NONE])
        raise NoServerError(f"{_FORCE_VARIABLE}={name!r} is not one of {allowed}") from None


def _private(reason: str, image: str, programs: Path | None = None) -> ServerChoice:
    try:
        version_of(programs) if programs else find_programs()
        server_user()
    except NoServerProgramsError as error:
        raise NoServerError(f"{reason}; {error}") from None
    return ServerChoice(ServerSource.PRIVATE, reason, image, programs=programs)
