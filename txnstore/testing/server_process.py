"""This file is one run of the program `postgres`: started, waited for, killed, and waited for again.

Every wait is bounded.  When the last process of a server is gone is not guessed from process lists: all of them
inherit the write end of one pipe, whose read end reports the end when the last of them has exited.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from txnstore.testing.server_programs import User

_LAUNCHER: Final = Path(__file__).with_name("server_launcher.py")
_LOG_TAIL_BYTES: Final = 2_000
_PID_LINE, _STATUS_LINE = 0, 7
_PATIENCE_SECONDS: Final = 2.0
#: A standby takes connections as well, for reading.
_READY: Final = ("ready", "standby")

# The kernel ends a server with the *thread* that started it. The main thread lasts as long as the process; a server
# that is started from another one is started by this one instead, which stays.
_STARTER: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="postgres-starter")


class ServerStartError(RuntimeError):
    """PostgreSQL did not start; the text holds the end of its log."""


def clean_environment() -> Mapping[str, str]:
    """Return the environment without the variables that PostgreSQL's programs read."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


class ServerProcess:
    """A postmaster and its children."""

    def __init__(self, command: Sequence[str], data: Path, log: Path, user: User | None) -> None:
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
        children = _children_of(self.pid)
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


def _children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _kill(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _still_there(pid: int, how: signal.Signals) -> TimeoutError:
    return TimeoutError(f"processes of the PostgreSQL server {pid} are still there after {how.name}")


def _launch_command(command: Sequence[str], user: User | None) -> list[str]:
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
