"""A PostgreSQL server in a container, through testcontainers; nothing is ever pulled."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import secrets
import socket
import time
from typing import TYPE_CHECKING, Any, ClassVar, Final

import psycopg
from sqlalchemy.engine import make_url

from txnstore.testing.postgres_server import PostgresServer, connection_string

if TYPE_CHECKING:
    from collections.abc import Mapping

_SUPERUSER: Final = "postgres"
_ENGINE_TIMEOUT_SECONDS: Final = 5
_START_TIMEOUT_SECONDS: Final = 60.0
_RETRY_SECONDS: Final = 0.1
_UNIX: Final = "unix://"
_DEFAULT_ENGINE: Final = "unix:///var/run/docker.sock"
_REAPER_SWITCH: Final = "TESTCONTAINERS_RYUK_DISABLED"

_SETTINGS: Final = {"listen_addresses": "*", "max_prepared_transactions": "64"}
_WITHOUT_FSYNC: Final = {"fsync": "off", "full_page_writes": "off"}


def why_no_container(image: str) -> str | None:
    """Return in one line why no container of this image can be started, or None if one can."""
    if importlib.util.find_spec("testcontainers") is None:
        return "testcontainers is not installed"
    try:
        from testcontainers.core.docker_client import get_docker_host
    except ImportError:
        return "this testcontainers is too old"

    host = get_docker_host() or _DEFAULT_ENGINE
    if not _may_answer(host):
        return "no container engine answers"
    docker = importlib.import_module("docker")  # it comes with testcontainers, and without types
    environment = os.environ | {"DOCKER_HOST": host}
    try:
        with contextlib.closing(docker.from_env(timeout=_ENGINE_TIMEOUT_SECONDS, environment=environment)) as client:
            client.images.get(image)
    except docker.errors.ImageNotFound:
        return f"the container engine does not have the image {image}"
    except (docker.errors.DockerException, OSError):
        return "no container engine answers"
    return None


def _may_answer(host: str) -> bool:
    """Return False if nobody listens on a Unix socket, which the library finds out by leaving a socket open."""
    if not host.startswith(_UNIX):
        return True
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_ENGINE_TIMEOUT_SECONDS)
        return probe.connect_ex(host.removeprefix(_UNIX)) == 0


class ContainerServer(PostgresServer):
    """A server in a container, running when the constructor returns.

    After `kill` and `start` it may listen on another port: ask `url` again.
    """

    can_be_killed: ClassVar[bool] = True

    def __init__(self, image: str, *, fsync: bool = True, settings: Mapping[str, str] | None = None) -> None:
        """Start a container of an image that works as the official one of PostgreSQL.

        Args:
            image: name and tag; `why_no_container` says whether it is there.
            fsync: False is faster, for tests that do not show durability.
            settings: more settings of PostgreSQL by name; they win over this class's own.
        """
        merged = _SETTINGS | ({} if fsync else _WITHOUT_FSYNC) | dict(settings or {})
        self._container = _postgres_container(image, merged)
        try:
            self._container.start()
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        self.description = f"a container of {image}"

    def url(self, database: str, user: str | None = None, password: str | None = None) -> str:
        """Return the URL of the port that the container has now, by default of the superuser."""
        url = self._url.set(database=database)
        if user is not None:
            url = url.set(username=user, password=password or "")
        return url.render_as_string(hide_password=False)

    def kill(self) -> None:
        """SIGKILL the container's first process, and with it all others."""
        container = self._container.get_wrapped_container()
        container.kill("SIGKILL")
        container.wait(timeout=_START_TIMEOUT_SECONDS)

    def stop(self) -> None:
        """Stop the container; its first process gets the signal its image asks for."""
        self._container.get_wrapped_container().stop()

    def start(self) -> None:
        """Start the container again; returns when the server takes connections."""
        self._container.get_wrapped_container().start()
        self._wait_until_ready()

    def close(self) -> None:
        """Remove the container and its volumes; may be called again."""
        if self._container is not None:
            self._container.stop()
            self._container = None

    def _wait_until_ready(self) -> None:
        # Asked for at every start, because the port changes; while it is down, nobody could tell it.
        self._url = make_url(self._container.get_connection_url(driver="psycopg"))
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS
        while True:
            try:
                psycopg.connect(
                    connection_string(self.url("postgres")), connect_timeout=_ENGINE_TIMEOUT_SECONDS
                ).close()
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_SECONDS)
            else:
                return


def _postgres_container(image: str, settings: Mapping[str, str]) -> Any:
    _do_without_reaper_that_would_be_pulled()
    from testcontainers.community.postgres import PostgresContainer

    command = ["postgres"]
    for name, value in settings.items():
        command += ["-c", f"{name}={value}"]
    password = secrets.token_urlsafe(16)
    container = PostgresContainer(image, username=_SUPERUSER, password=password, dbname="postgres", driver="psycopg")
    return container.with_command(command)


def _do_without_reaper_that_would_be_pulled() -> None:
    from testcontainers.core.config import testcontainers_config

    if _REAPER_SWITCH not in os.environ and why_no_container(testcontainers_config.ryuk_image) is not None:
        # The price: a killed test run leaves its container behind.
        testcontainers_config.ryuk_disabled = True
