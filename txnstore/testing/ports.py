"""This file is how a server or a proxy of a test gets a port that stays its own across restarts."""

from __future__ import annotations

import secrets
import socket
from typing import Final

LOCALHOST: Final = "127.0.0.1"

# Below the range from which Linux and macOS give ports to outgoing connections: while a server is down, no
# connection of a test can take the port it will come back to.
_FIRST_PORT: Final = 20_000
_PORT_COUNT: Final = 12_000
_ATTEMPTS: Final = 100


def free_port() -> int:
    """Return a TCP port on 127.0.0.1 that nobody listens on at this moment.

    Somebody may take it before the caller does: whoever binds it must be ready to ask for another.

    Raises:
        OSError: a hundred ports chosen at random were all taken.
    """
    for _ in range(_ATTEMPTS):
        port = _FIRST_PORT + secrets.randbelow(_PORT_COUNT)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOCALHOST, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free TCP port found on {LOCALHOST} in {_ATTEMPTS} attempts")
