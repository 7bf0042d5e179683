"""A broker that refuses whoever connects to it: it takes no password, and no TLS."""

from __future__ import annotations

import socketserver
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from txnstore.testing.private_cluster import LOCALHOST

_SASL_HANDSHAKE, _API_VERSIONS, _SASL_AUTHENTICATE = 17, 18, 36
#: With the newest version of each that it has.
_APIS: Final = {_SASL_HANDSHAKE: 1, _API_VERSIONS: 3, _SASL_AUTHENTICATE: 0}
_SASL_AUTHENTICATION_FAILED: Final = 58


def _text(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


#: Each as Kafka writes it: https://kafka.apache.org/protocol
_ANSWERS: Final = {
    _API_VERSIONS: (
        struct.pack(">hB", 0, len(_APIS) + 1)
        + b"".join(struct.pack(">hhhB", key, 0, newest, 0) for key, newest in _APIS.items())
        + struct.pack(">iB", 0, 0)
    ),
    _SASL_HANDSHAKE: struct.pack(">hi", 0, 1) + _text("PLAIN"),
    _SASL_AUTHENTICATE: struct.pack(">h", _SASL_AUTHENTICATION_FAILED) + _text("who is that?") + struct.pack(">i", 0),
}


class _Refusing(socketserver.StreamRequestHandler):
    """Answers until it has refused a password; after what is no request of Kafka's it says one thing, or nothing."""

    to_others = b""

    def handle(self) -> None:
        while (head := self.rfile.read(12)) and len(head) == 12:
            size_bytes, key, _, correlation_id = struct.unpack(">ihhi", head)
            if key not in _ANSWERS:
                self.wfile.write(self.to_others)
                break
            self.rfile.read(size_bytes - 8)
            answer = struct.pack(">i", correlation_id) + _ANSWERS[key]
            self.wfile.write(struct.pack(">i", len(answer)) + answer)
            if key == _SASL_AUTHENTICATE:
                break


@contextmanager
def refusing_broker(to_others: bytes = b"") -> Iterator[str]:
    """Run one; the address is given."""
    handler = type("Refusing", (_Refusing,), {"to_others": to_others})
    with socketserver.ThreadingTCPServer((LOCALHOST, 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield f"{LOCALHOST}:{server.server_address[1]}"
        server.shutdown()
