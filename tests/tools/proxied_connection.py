"""This file is one connection through the proxy: two sockets, a thread for each direction, and what befalls them.

The thread that reads the client owns the connection: it alone closes the sockets, when the other thread has ended.
Others wake a blocked thread by `shutdown`; a plain `close` would leave it, and the server, waiting.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from tests.tools.proxy_faults import Effect, Fault
from tests.tools.wire import ENCRYPTION, QUERY, READY_FOR_QUERY, SYNC, Message, MessageReader, StatementTracker

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Where a server listens: host and port, or the path of a Unix socket.
Address = tuple[str, int] | Path

_PIECE_BYTES: Final = 65_536
_CONNECT_TIMEOUT_SECONDS: Final = 10.0
_SERVER_END_TIMEOUT_SECONDS: Final = 10.0
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_NO_ENCRYPTION: Final = b"N"
#: The messages that end a request: the server answers, and says at the end that it is ready for the next.
_ENDS_OF_REQUEST: Final = frozenset({QUERY, SYNC})


class Overseer(Protocol):
    """What a connection asks of its proxy."""

    def fault_at(self, statement: str | None) -> Fault | None:
        """Count a client's message, which executes `statement` if any, and return the fault that strikes here."""
        ...

    def count_reply(self) -> None:
        """Count a message of the server."""
        ...


class ProxiedConnection:
    """Forwards messages between a client and the server until one of them leaves or a fault strikes."""

    def __init__(self, overseer: Overseer, client: socket.socket, upstream: Address) -> None:
        """Take over a client that has just connected; `start` comes next."""
        self._overseer = overseer
        self._client = client
        self._upstream = upstream
        self._server: socket.socket | None = None
        self._ended = threading.Event()
        self._swallowed = False
        self._discards_replies = False
        #: The fault that has struck here, if any: it withholds replies, or waits to be resumed.
        self._fault: Fault | None = None
        #: The fault that strikes at the end of the request of which an Execute has matched.
        self._at_sync: Fault | None = None
        self._requests = threading.Thread(target=self._run, name="proxy-requests", daemon=True)
        self._replies = threading.Thread(target=self._forward_replies, name="proxy-replies", daemon=True)

    def start(self) -> None:
        """Start forwarding, in threads of its own."""
        self._requests.start()

    def swallow(self) -> None:
        """Let nothing through any more, in either direction, and close nothing."""
        self._discards_replies = True
        self._swallowed = True

    def cut(self) -> None:
        """Reset the client and end the server's session, now; `join` waits until both are done."""
        self._discards_replies = True
        self._reset_client_at_end()
        self._ended.set()
        if self._fault is not None:
            self._fault.resume()
        _shut_down(self._client, socket.SHUT_RD)
        if self._server is not None:
            _shut_down(self._server, socket.SHUT_WR)

    def join(self, timeout_seconds: float) -> bool:
        """Wait, no longer than that, until the connection has ended; return whether it has."""
        self._requests.join(timeout_seconds)
        return not self._requests.is_alive()

    def _run(self) -> None:
        cut_by: Fault | None = None
        try:
            if not self._swallowed:
                self._server = _connect(self._upstream)
                self._replies.start()
                cut_by = self._forward_requests(self._server)
            if self._swallowed:
                self._ended.wait()
        except OSError:
            # Whoever cannot reach the server, or loses it while sending, sees a reset.
            self._reset_client_at_end()
        finally:
            self._end()
            if cut_by is not None:
                cut_by.fire()

    def _forward_requests(self, server: socket.socket) -> Fault | None:
        """Forward until the client leaves, is swallowed, or is cut off; return the fault that cuts it."""
        statements = StatementTracker()
        for message in _messages(self._client, MessageReader(from_client=True)):
            if message.kind == ENCRYPTION:
                self._client.sendall(_NO_ENCRYPTION)
                continue
            fault = self._overseer.fault_at(statements.executed_by(message))
            if self._swallowed or self._ended.is_set():
                return None
            if fault is not None and not fault.lets_message_through:
                self._strike(fault, answer_follows=False)
                if fault.effect is not Effect.PAUSE:
                    return _if_cut(fault)
                if self._ended.is_set():
                    # Cut while it was paused: what was held does not arrive any more.
                    return None
                fault = None
            fault = self._forward(server, message, fault)
            if fault is not None:
                self._strike(fault, answer_follows=message.kind in _ENDS_OF_REQUEST)
                if fault.effect is not Effect.PAUSE:
                    return _if_cut(fault)
        return None

    def _forward(self, server: socket.socket, message: Message, fault: Fault | None) -> Fault | None:
        """Forward one message, and return the fault that strikes after it."""
        if fault is not None:
            # From here on, and before the server can answer.
            self._fault = fault
            if fault.effect is not Effect.PAUSE:
                self._discards_replies = True
        server.sendall(message.raw)
        if fault is not None and fault.targets_statement and message.kind not in _ENDS_OF_REQUEST:
            # An Execute: the server answers, and commits what commits by itself, at the Sync that follows.
            self._at_sync = fault
            return None
        if message.kind == SYNC and self._at_sync is not None:
            fault, self._at_sync = self._at_sync, None
        return fault

    def _strike(self, fault: Fault, *, answer_follows: bool) -> None:
        """Let a fault happen; return when a paused connection may go on, at once for other faults."""
        self._fault = fault
        if fault.effect is Effect.CUT:
            self._discards_replies = True
            self._reset_client_at_end()
            return
        if fault.effect is Effect.BLACK_HOLE:
            self.swallow()
        if not answer_follows:
            fault.fire()
        if fault.effect is Effect.PAUSE:
            if self._ended.is_set():
                # It was cut a moment ago, before there was a pause to end.
                fault.resume()
            fault.wait_until_resumed()

    def _forward_replies(self) -> None:
        assert self._server is not None, "replies are read once the server is connected"
        held: list[bytes] = []
        with contextlib.suppress(OSError):
            for message in _messages(self._server, MessageReader(from_client=False)):
                self._overseer.count_reply()
                fault = self._fault
                if fault is not None and fault.effect is not Effect.CUT and message.kind == READY_FOR_QUERY:
                    fault.fire()
                held.append(message.raw)
                if self._may_pass(fault):
                    self._client.sendall(b"".join(held))
                    held.clear()
        if not self._discards_replies:
            _shut_down(self._client, socket.SHUT_RDWR)

    def _may_pass(self, fault: Fault | None) -> bool:
        """Return whether the replies read so far may go to the client, having waited for a pause to end."""
        if fault is not None and fault.lets_message_through and fault.effect is Effect.PAUSE:
            if not fault.fired:
                return False
            fault.wait_until_resumed()
        return not self._discards_replies

    def _reset_client_at_end(self) -> None:
        with contextlib.suppress(OSError):
            self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)

    def _end(self) -> None:
        """End the server's session, wait until the server has noticed, and close both sockets."""
        if self._server is not None:
            # Nothing is lost that was forwarded: the server reads it all, and then the end.
            _shut_down(self._server, socket.SHUT_WR)
            if not _join(self._replies, _SERVER_END_TIMEOUT_SECONDS):
                _shut_down(self._server, socket.SHUT_RDWR)
                _shut_down(self._client, socket.SHUT_RDWR)
                _join(self._replies, _SERVER_END_TIMEOUT_SECONDS)
            self._server.close()
        self._client.close()


def _if_cut(fault: Fault) -> Fault | None:
    return fault if fault.effect is Effect.CUT else None


def _connect(address: Address) -> socket.socket:
    if isinstance(address, Path):
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.connect(str(address))
        except OSError:
            server.close()
            raise
        return server
    server = socket.create_connection(address, timeout=_CONNECT_TIMEOUT_SECONDS)
    server.settimeout(None)
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return server


def _messages(source: socket.socket, reader: MessageReader) -> Iterator[Message]:
    while data := source.recv(_PIECE_BYTES):
        yield from reader.feed(data)


def _shut_down(end: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(how)


def _join(thread: threading.Thread, timeout_seconds: float) -> bool:
    if thread.ident is not None:
        thread.join(timeout_seconds)
    return not thread.is_alive()
