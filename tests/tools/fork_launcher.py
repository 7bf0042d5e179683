"""The program that stands for one that `program_forks.py` has forked: it ends when that does, with its exit code.

It imports little, and nothing of ours: it is started for every such program.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

#: What was killed has said none.
NO_EXIT_CODE = 1


def main(address: str, arguments: list[str]) -> int:
    """Have a program forked that gets these arguments and all that this process was given; return its exit code."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"-"], [0, 1, 2])
        given = {"arguments": arguments, "variables": dict(os.environ), "folder": os.getcwd()}  # noqa: PTH109
        connection.sendall(json.dumps(given).encode() + b"\n")
        with connection.makefile("rb") as reader:
            pid = int(reader.readline())
            signal.signal(signal.SIGTERM, lambda number, _: os.kill(pid, number))
            # What it reads and writes is the program's alone: each sees the end of the other.
            for file in 0, 1, 2:
                os.close(file)
            code = int(reader.readline() or NO_EXIT_CODE)
            reader.read()
            return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
