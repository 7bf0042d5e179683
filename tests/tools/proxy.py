"""This file is a TCP proxy that knows PostgreSQL's messages, and breaks a connection at exactly the one a test names.

    with Proxy(upstream_of(server.url("shop"))) as proxy:
        connection = psycopg.connect(connection_string(proxy.url(server.url("shop"))))
        connection.execute("INSERT INTO orders VALUES (1)")
        lost = proxy.cut(after="COMMIT")
        with pytest.raises(psycopg.OperationalError):
            connection.commit()
        assert lost.wait()  # and the order is there: only the acknowledgement was lost

It answers requests for encryption with no, so that it can read what passes.  It waits for events, never for a time:
what happens depends on the messages alone.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from sqlalchemy.engine import make_url

from tests.tools.proxied_connection import Address, ProxiedConnection
from tests.tools.proxy_faults import Effect, Fault, Target
from txnstore.testing.private_cluster import LOCALHOST, free_port

if TYPE_CHECKING:
    from types import TracebackType

_END_TIMEOUT_SECONDS: Final = 25.0
_DEFAULT_PORT: Final = 5432


def upstream_of(url: str) -> Address:
    """Return where the server of a SQLAlchemy URL listens."""
    parsed = make_url(url)
    host = parsed.query.get("host", parsed.host) or LOCALHOST
    port = int(str(parsed.query.get("port", parsed.port or _DEFAULT_PORT)))
    if isinstance(host, str) and host.startswith("/"):
        return Path(host) / f".s.PGSQL.{port}"
    return str(host), port


class Proxy:
    """Listens on a port of its own on 127.0.0.1 and forwards to a PostgreSQL server.

    Faults strike the first connection whose message matches, once each; several can wait at the same time. A restart
    of the server as clients see it is `refuse_connections`, `cut_connections`, `accept_connections`.
    """

    def __init__(self, upstream: Address) -> None:
        """Start to listen, and forward to `upstream`, to which nothing is connected yet."""
        #: Where new connections go; may be changed.
        self.upstream = upstream
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._connections: list[ProxiedConnection] = []
        self._swallows_new_connections = False
        self._request_count = 0
        self._reply_count = 0
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._port = free_port()
        self.accept_connections()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to connect to, the same for the life of the proxy."""
        return LOCALHOST, self._port

    def url(self, url: str) -> str:
        """Return a SQLAlchemy URL of the server as one that leads through the proxy."""
        through = make_url(url).difference_update_query(["host", "port"]).set(host=LOCALHOST, port=self._port)
        return through.render_as_string(hide_password=False)

    @property
    def request_count(self) -> int:
        """How many messages of clients have arrived, the first one of each connection included."""
        with self._lock:
            return self._request_count

    @property
    def reply_count(self) -> int:
        """How many messages of the server have arrived."""
        with self._lock:
            return self._reply_count

    def cut(self, *, before: Target | None = None, after: Target | None = None) -> Fault:
        """Reset the connection before the message reaches the server, or after it but before its answer returns.

        The server reads all that was forwarded, and then the end of the session. When the fault has fired, what
        became of the session's transaction is settled (unless the server was busy for more than ten seconds).
        """
        return self._add(Fault(Effect.CUT, before=before, after=after))

    def black_hole(self, *, before: Target | None = None, after: Target | None = None) -> Fault:
        """From the message on (not with it, or with it but not its answer), forward nothing and close nothing.

        The sockets stay open, whatever both sides do, until `cut_connections`, `heal` or `close`.
        """
        return self._add(Fault(Effect.BLACK_HOLE, before=before, after=after))

    def pause(self, *, before: Target | None = None, after: Target | None = None) -> Fault:
        """Hold the message, or its answer, and all that follows, until `resume` is called on the returned fault."""
        return self._add(Fault(Effect.PAUSE, before=before, after=after))

    def _add(self, fault: Fault) -> Fault:
        with self._lock:
            self._faults.append(fault)
        return fault

    def swallow_everything(self) -> None:
        """Forward nothing on any connection, present or new, and close nothing: the network is gone. See `heal`."""
        with self._lock:
            self._swallows_new_connections = True
            for connection in self._connections:
                connection.swallow()

    def heal(self) -> None:
        """Forget all faults, end all connections, and forward new ones as if nothing had been."""
        with self._lock:
            self._faults.clear()
            self._swallows_new_connections = False
        self.cut_connections()
        self.accept_connections()

    def cut_connections(self) -> None:
        """Reset all clients and end their sessions in the server; returns when both are done."""
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            connection.cut()
        for connection in connections:
            assert connection.join(_END_TIMEOUT_SECONDS), "a connection through the proxy did not end"

    def refuse_connections(self) -> None:
        """Stop to listen: new connections are refused, those that are open go on."""
        listener, self._listener = self._listener, None
        acceptor, self._acceptor = self._acceptor, None
        if listener is not None and acceptor is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            acceptor.join(_END_TIMEOUT_SECONDS)
            listener.close()

    def accept_connections(self) -> None:
        """Listen, on the same port as before; nothing changes if it does already."""
        if self._listener is None:
            self._listener = socket.create_server(self.address)
            self._acceptor = threading.Thread(
                target=self._accept, args=[self._listener], name="proxy-acceptor", daemon=True
            )
            self._acceptor.start()

    def close(self) -> None:
        """End everything; may be called again."""
        self.refuse_connections()
        self.cut_connections()

    def _accept(self, listener: socket.socket) -> None:
        # The listener is shut down to end this.
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._take_over(client)

    def _take_over(self, client: socket.socket) -> None:
        connection = ProxiedConnection(self, client, self.upstream)
        with self._lock:
            self._connections = [known for known in self._connections if not known.join(0)]
            self._connections.append(connection)
            if self._swallows_new_connections:
                connection.swallow()
            connection.start()

    def fault_at(self, statement: str | None) -> Fault | None:
        """Count a client's message, which executes `statement` if any, and return the fault that strikes here."""
        with self._lock:
            self._request_count += 1
            matching = [fault for fault in self._faults if fault.matches(statement)]
            if not matching:
                return None
            self._faults.remove(matching[0])
            return matching[0]

    def count_reply(self) -> None:
        """Count a message of the server."""
        with self._lock:
            self._reply_count += 1

    def __enter__(self) -> Self:
        """Return the proxy itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the proxy."""
        self.close()
