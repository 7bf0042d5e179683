"""A TCP proxy that knows PostgreSQL's messages, and breaks a connection at exactly the one a test names.

    with Proxy(upstream_of(server.url("shop"))) as proxy:
        connection = psycopg.connect(connection_string(proxy.url(server.url("shop"))))
        connection.execute("INSERT INTO orders VALUES (1)")
        lost = proxy.cut(after="COMMIT")
        with pytest.raises(psycopg.OperationalError):
            connection.commit()
        assert lost.wait()  # and the order is there: only the acknowledgement was lost

It answers requests for encryption with no, so that it can read what passes. It waits for events, never for a time:
what happens depends on the messages alone.

Messages (version 3): https://www.postgresql.org/docs/current/protocol-message-formats.html
"""

from __future__ import annotations

import contextlib
import enum
import re
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from sqlalchemy.engine import make_url

from txnstore.testing.private_cluster import LOCALHOST

_LENGTH: Final = struct.Struct("!I")
_CODE: Final = struct.Struct("!I")
_CODE_END: Final = 8

_SSL_REQUEST: Final = 80877103
_GSS_ENCRYPTION_REQUEST: Final = 80877104
_CANCEL_REQUEST: Final = 80877102

#: Kinds that this file gives to the messages that come before a session and have no type byte.
STARTUP: Final = "startup"
CANCEL: Final = "cancel"
ENCRYPTION: Final = "encryption"

QUERY: Final = "Q"
PARSE: Final = "P"
BIND: Final = "B"
EXECUTE: Final = "E"
SYNC: Final = "S"
#: From the server: the answer is complete, the next request may come.
READY_FOR_QUERY: Final = "Z"


@dataclass(frozen=True)
class Message:
    """One message: its type byte (or one of the kinds above) and all of its bytes, header included."""

    kind: str
    raw: bytes

    def strings(self, count: int) -> list[str]:
        """Return the first `count` NUL-terminated strings of the body of a typed message."""
        return [part.decode(errors="replace") for part in self.raw[5:].split(b"\0", count)[:count]]


class MessageReader:
    """Cuts a stream of bytes into messages, whatever pieces it arrives in."""

    def __init__(self, *, from_client: bool) -> None:
        """Make a reader at the start of a connection; a client's first messages have no type byte."""
        self._buffer = bytearray()
        self._in_session = not from_client

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that are complete with `data`."""
        self._buffer += data
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def _next(self) -> Message | None:
        header = 1 if self._in_session else 0
        if len(self._buffer) < header + _LENGTH.size:
            return None
        end = header + _LENGTH.unpack_from(self._buffer, header)[0]
        if len(self._buffer) < end:
            return None
        raw = bytes(self._buffer[:end])
        del self._buffer[:end]
        if self._in_session:
            return Message(chr(raw[0]), raw)
        return Message(self._kind_before_session(raw), raw)

    def _kind_before_session(self, raw: bytes) -> str:
        (code,) = _CODE.unpack(raw[_LENGTH.size : _CODE_END])
        if code in {_SSL_REQUEST, _GSS_ENCRYPTION_REQUEST}:
            return ENCRYPTION
        self._in_session = True
        return CANCEL if code == _CANCEL_REQUEST else STARTUP


class StatementTracker:
    """Knows which SQL each message of a client makes the server execute.

    In the extended protocol that is Execute, of a portal that Bind made of a statement that Parse named: a prepared
    statement is parsed once and executed often.
    """

    def __init__(self) -> None:
        """Start with no statement known, as a session does."""
        self._statements: dict[str, str] = {}
        self._portals: dict[str, str] = {}

    def executed_by(self, message: Message) -> str | None:
        """Return the SQL that this message executes, or None; call it for every message in order."""
        if message.kind == QUERY:
            return message.strings(1)[0]
        if message.kind == PARSE:
            name, text = message.strings(2)
            self._statements[name] = text
        elif message.kind == BIND:
            portal, name = message.strings(2)
            self._portals[portal] = self._statements.get(name, "")
        elif message.kind == EXECUTE:
            return self._portals.get(message.strings(1)[0])
        return None


# What may contain a semicolon that ends no statement: quoted text, quoted names, comments.
_OPAQUE: Final = re.compile(
    r"""'(?:[^']|'')*' | "(?:[^"]|"")*" | (?P<tag>\$\w*\$).*?(?P=tag) | --[^\n]* | /\*.*?\*/""",
    re.VERBOSE | re.DOTALL,
)


def contains_statement(text: str, beginning: str) -> bool:
    """Return whether one of the statements in `text` begins with the words of `beginning`, in any case.

    COMMIT is also the statement that commits a whole transaction.  Alone it does not mean COMMIT PREPARED, nor
    ROLLBACK the rollback to a savepoint or of what is prepared.
    """
    wanted = beginning.upper().split()
    for statement in _OPAQUE.sub(_without_semicolons, text).split(";"):
        words = statement.upper().split()
        if wanted == ["COMMIT"] and words[:1] == ["SELECT"] and ".commit_transaction(" in statement:
            return True
        if words[: len(wanted)] == wanted and _is_the_plain_command(wanted, words):
            return True
    return False


def _without_semicolons(opaque: re.Match[str]) -> str:
    is_comment = opaque.group().startswith(("--", "/*"))
    return " " if is_comment else opaque.group().replace(";", ",")


def _is_the_plain_command(wanted: list[str], words: list[str]) -> bool:
    if wanted in (["COMMIT"], ["ROLLBACK"]):
        return not {"PREPARED", "TO"} & set(words[1:3])
    return True


#: The n-th message of a client from now on, counted from 1 over all connections; or an executed statement: the words
#: it begins with (`"COMMIT"`, `"INSERT INTO orders"`), or a pattern that is searched in its text.
Target = int | str | re.Pattern[str]


class Effect(enum.Enum):
    """What happens to the connection."""

    CUT = "cut"
    BLACK_HOLE = "black hole"
    PAUSE = "pause"


class Fault:
    """One fault that was asked for: it happens once, to the connection whose message is the first to match."""

    def __init__(self, effect: Effect, *, before: Target | None, after: Target | None) -> None:
        """Describe a fault; `Proxy` makes them.

        Raises:
            ValueError: not exactly one of `before` and `after` is given, or it is a number below 1.
        """
        target = after if before is None else before
        if target is None or (before is not None and after is not None):
            raise ValueError("a fault happens either before or after a message: give exactly one of the two")
        if isinstance(target, int) and target < 1:
            raise ValueError(f"messages are counted from 1, not {target}")
        self.effect = effect
        self.lets_message_through = before is None
        self._target = target
        self._messages_seen = 0
        self._fired = threading.Event()
        self._resumed = threading.Event()

    @property
    def targets_statement(self) -> bool:
        """Whether it waits for a statement; otherwise for a number of messages."""
        return not isinstance(self._target, int)

    @property
    def fired(self) -> bool:
        """Whether it has happened."""
        return self._fired.is_set()

    def wait(self, timeout_seconds: float = 10.0) -> bool:
        """Wait until it has happened and return True; False if it did not in time.

        A cut has happened when the server has ended the session as well: what became of its transaction is settled.
        A pause or a black hole *after* a whole request has happened when the server's answer is there.
        """
        return self._fired.wait(timeout_seconds)

    def resume(self) -> None:
        """Let go on what a pause holds."""
        self._resumed.set()

    def matches(self, statement: str | None) -> bool:
        """Count a message, which executes `statement` if it executes any, and return whether it is the one."""
        self._messages_seen += 1
        if isinstance(self._target, int):
            return self._messages_seen == self._target
        if statement is None:
            return False
        if isinstance(self._target, str):
            return contains_statement(statement, self._target)
        return self._target.search(statement) is not None

    def fire(self) -> None:
        """Note that it has happened."""
        self._fired.set()

    def wait_until_resumed(self) -> None:
        """Wait until the test, or the end of the connection, lets it go on."""
        self._resumed.wait()

    def __repr__(self) -> str:
        """Show what happens when, for messages of failed tests."""
        moment = "after" if self.lets_message_through else "before"
        return f"Fault({self.effect.value} {moment} {self._target!r}, {'fired' if self.fired else 'not fired'})"


#: Where a server listens: host and port, or the path of a Unix socket.
Address = tuple[str, int] | Path

_PIECE_BYTES: Final = 65_536
_CONNECT_TIMEOUT_SECONDS: Final = 10.0
_SERVER_END_TIMEOUT_SECONDS: Final = 10.0
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_NO_ENCRYPTION: Final = b"N"
#: The messages that end a request: the server answers, and says at the end that it is ready for the next.
_ENDS_OF_REQUEST: Final = frozenset({QUERY, SYNC})


class ProxiedConnection:
    """Forwards messages between a client and the server until one of them leaves or a fault strikes.

    It has two sockets and a thread for each direction. The thread that reads the client owns the connection: it alone
    closes the sockets, when the other thread has ended. Others wake a blocked thread by `shutdown`; a plain `close`
    would leave it, and the server, waiting.
    """

    def __init__(self, proxy: Proxy, client: socket.socket, upstream: Address) -> None:
        """Take over a client that has just connected; `start` comes next."""
        self._proxy = proxy
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
            fault = self._proxy.fault_at(statements.executed_by(message))
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
                self._proxy.count_reply()
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
        # Holds the port while nobody listens: no other program can take it meanwhile.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind((LOCALHOST, 0))
        self._port = self._reserved.getsockname()[1]
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
        self._reserved.close()

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
