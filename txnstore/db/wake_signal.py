"""A wake-up call between threads, for a thread that waits for a file descriptor at the same time."""

from __future__ import annotations

import contextlib
import selectors
import socket
from typing import Final

_RECEIVE_BYTES: Final = 64


class WakeSignal:
    """Wakes one thread that waits, now or the next time; calls that meet become one."""

    def __init__(self) -> None:
        """Open what it takes; see `close`."""
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._receiver, selectors.EVENT_READ)
        self._descriptor = -1

    def set(self) -> None:
        """Let the wait that is under way, or else the next one, return at once; for any thread."""
        # A full buffer or a closed socket: it is awake, or there is nobody to wake.
        with contextlib.suppress(OSError):
            self._sender.send(b"\0")

    def watch(self, descriptor: int) -> None:
        """Wait for input on this descriptor, too, in place of the one before; -1 for none."""
        if self._descriptor >= 0:
            # A descriptor that was closed has left by itself.
            with contextlib.suppress(KeyError, ValueError, OSError):
                self._selector.unregister(self._descriptor)
        self._descriptor = descriptor
        if descriptor >= 0:
            self._selector.register(descriptor, selectors.EVENT_READ)

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for the signal or for input; return whether there was any. The signal stays set until `take`."""
        return bool(self._selector.select(timeout_seconds))

    def take(self) -> bool:
        """Return whether the signal was set, and reset it."""
        is_set = False
        with contextlib.suppress(BlockingIOError):
            while self._receiver.recv(_RECEIVE_BYTES):
                is_set = True
        return is_set

    def close(self) -> None:
        """Give back what it holds; a second call does nothing."""
        self._selector.close()
        self._receiver.close()
        self._sender.close()
