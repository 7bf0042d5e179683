"""This file is the admin client without its calls: how it is made, what it checks of every call, and how it ends."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

from txnstore.clients.admin.calls import AdminCalls, check_flag, check_timeout
from txnstore.clients.callbacks import Callbacks, ErrorReporter
from txnstore.clients.configuration.configuration import admin_configuration
from txnstore.clients.connection import DatabaseLook, StoreConnection
from txnstore.clients.model.error_mapping import kafka_error_of
from txnstore.clients.topic_directory import TopicDirectory

#: How long the end of a client waits for the call that is running.
_CLOSE_SECONDS: Final = 10.0


class AdminHandle:
    """A connection to the store for administration; `AdminClient` adds the calls."""

    def __init__(self, conf: dict[str, Any], **kwargs: Any) -> None:
        self._configuration = admin_configuration((conf,), kwargs)
        self._connection = StoreConnection(self._configuration)
        self._directory = TopicDirectory(
            self._connection,
            refresh_ms=self._configuration["topic.metadata.refresh.interval.ms"],
            allow_create=self._configuration["allow.auto.create.topics"],
        )
        self._events: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        # What outlives a client that its program has forgotten holds neither it nor its callback.
        connection = self._connection
        self._callbacks = Callbacks(error_cb=self._configuration["error_cb"])
        trouble = ErrorReporter(
            self._callbacks.weakly("error_cb") or (lambda _: None), self._events.put, lambda: connection.is_alone
        )
        self._calls = AdminCalls(
            self._connection,
            default_timeout_seconds=self._configuration["socket.timeout.ms"] / 1000,
            report=trouble.report,
        )
        # In a thread of its own: who closes the client does not wait for a database that is away.
        self._look = (
            None
            if self._configuration["error_cb"] is None
            else DatabaseLook(self._connection, _in_thread, lambda error: trouble.report(kafka_error_of(error)))
        )
        # A client that its program has forgotten is closed, at the program's end without waiting for anything.
        self._forgotten = weakref.finalize(self, self._calls.close, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._forgotten.detach() is not None:
            self._calls.close(_CLOSE_SECONDS)

    def __len__(self) -> int:
        """Return 0: an admin client sends no messages."""
        return 0

    def __bool__(self) -> bool:
        return True

    def poll(self, timeout: float = -1) -> int:
        """Call `error_cb` for what went wrong, and return how often; wait up to `timeout` seconds if nothing did.

        A negative timeout waits until something goes wrong.  Calls need no polling to be carried out.
        """
        self._refuse_if_closed()
        check_wait(timeout)
        deadline = None if timeout < 0 else time.monotonic() + timeout
        if self._look is not None:
            self._look.polled()
        served = 0
        while True:
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                event = self._events.get_nowait() if served else self._events.get(timeout=left)
            except queue.Empty:
                return served
            served += 1
            event()

    def _check_call(
        self, operation_timeout: float | None, request_timeout: float | None, *, validate_only: object = False
    ) -> None:
        self._refuse_if_closed()
        check_timeout("operation_timeout", operation_timeout, low_seconds=-1)
        check_timeout("request_timeout", request_timeout)
        check_flag("validate_only", validate_only)

    def _refuse_if_closed(self, text: str = "AdminClient has been closed") -> None:
        if not self._forgotten.alive:
            raise RuntimeError(text)
        self._connection.check_process()


def _in_thread(look: Callable[[], None]) -> None:
    threading.Thread(target=look, name="txnstore-admin-look", daemon=True).start()


def check_wait(seconds: object) -> None:
    """Refuse what is no timeout of a call that waits; a negative one waits for ever."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"must be real number, not {type(seconds).__name__}")
