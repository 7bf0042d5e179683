"""Programs in Python that are forked from a process that has imported what they need, and not started anew.

What a small program takes is mostly its imports. So what stands for Python hands the arguments that it was given, its
variables and its files to that process, and stays until what was forked has ended.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

#: What the package imports of others: most of the time that a program of it takes to start.
LIBRARIES: Final = (
    "alembic.command",
    "psycopg",
    "pyarrow.parquet",
    "pydantic.type_adapter",
    "rich.progress",
    "rich.table",
    "sqlalchemy.dialects.postgresql",
    "sqlalchemy.dialects.sqlite",
    "typer.rich_utils",
)

# The path of a Unix socket has at most 107 bytes.
_TEMPORARY_FOLDER: Final = "/tmp"
_CHECKOUT: Final = Path(__file__).parents[2]
_LAUNCHER: Final = Path(__file__).with_name("fork_launcher.py")
_READY: Final = b"ready\n"


@contextmanager
def forks(modules: Sequence[str], variables: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Return the start of a command, for a shell, that takes `-m MODULE ARGUMENTS` as Python does.

    It is of use while the context lasts. What is forked has imported `modules`, when there were these variables; of
    its own ones it takes all but those that Python looks at when it starts.
    """
    with tempfile.TemporaryDirectory(prefix="txnstore-forks-", dir=_TEMPORARY_FOLDER) as short:
        address = Path(short, "socket")
        with subprocess.Popen(
            [sys.executable, "-m", __name__, str(address), *modules, "tests.tools.frozen"],
            cwd=_CHECKOUT,
            # What forks has one thread.
            env={**variables, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == _READY
            # It ends when its input does.
            yield shlex.join([sys.executable, "-I", "-S", str(_LAUNCHER), str(address)])


def _serve(address: str, modules: Sequence[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        os.write(1, _READY)
        owner = os.fork()
        if owner == 0:
            # Nothing is ever said: its owner has ended, in whatever way.
            os.read(0, 1)
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        while True:
            connection, _ = listener.accept()
            with connection:
                _, files, *_ = socket.recv_fds(connection, 1, 3)
                with connection.makefile("rb") as reader:
                    given = json.loads(reader.readline())
                if os.fork() == 0:
                    listener.close()
                    code = _become(given, files, connection)
                    # What waits for this process sees it end, not this frame.
                    connection.detach()
                    sys.exit(code)
                for file in files:
                    os.close(file)


def _become(given: dict[str, Any], files: list[int], connection: socket.socket) -> int:
    """Go on as the program that was asked for; return its exit code, which is told, too."""
    process_id, code = os.getpid(), 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(given["variables"])
        os.chdir(given["folder"])
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        option, module, *arguments = given["arguments"]
        assert option == "-m"
        sys.argv = [module, *arguments]
        sys.path.insert(0, given["folder"])
        connection.sendall(b"%d\n" % process_id)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - it stands where the program's errors do
        traceback.print_exc()
    # What it has forked itself is not waited for.
    if os.getpid() == process_id:
        connection.sendall(b"%d\n" % code)
    return code


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
