"""A port at which nobody answers, for as long as a test needs it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from txnstore.testing.private_cluster import LOCALHOST


@contextmanager
def silent_port() -> Iterator[int]:
    """Keep a TCP port of this machine from everybody: whoever connects to it is refused, and no server can take it."""
    with socket.socket() as reserved:
        # Bound, but nobody listens.
        reserved.bind((LOCALHOST, 0))
        yield reserved.getsockname()[1]
