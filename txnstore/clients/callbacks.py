"""The application's callbacks as a client keeps them, the events that wait to be served, and how trouble is told.

A callback is often a method of the object that holds the client.  The client's threads know callbacks weakly: if they
held them, they would keep alive who owns the client, and a client that is dropped would never be collected.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, NoReturn, TypeVar

from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.trouble import RepeatedTrouble

Callback = Callable[..., Any]
Event = TypeVar("Event")
Result = TypeVar("Result")


class Callbacks:
    """Named callbacks, each of which may be missing."""

    def __init__(self, **functions: Callback | None) -> None:
        """Hold the functions."""
        self._functions = functions

    def __getitem__(self, name: str) -> Callback | None:
        """Return the function, or None if the application gave none."""
        return self._functions[name]

    def weakly(self, name: str) -> WeakCallback | None:
        """Return what calls the function for as long as these callbacks are held; None if there is none."""
        return None if self._functions[name] is None else WeakCallback(weakref.ref(self), name)


@dataclass(frozen=True, slots=True)
class WeakCallback:
    """Calls a function for as long as somebody holds it; from then on it does nothing."""

    holder: weakref.ref[Callbacks]
    name: str

    def function(self) -> Callback | None:
        """Return the function, if it is still held."""
        callbacks = self.holder()
        return None if callbacks is None else callbacks[self.name]

    def __call__(self, *arguments: Any) -> Any:
        """Call it."""
        function = self.function()
        return None if function is None else function(*arguments)


def application_callback(callback: Callback | None) -> Callback | None:
    """Return the application's own function, which is called next: Ctrl-C on the way to it would take the call away."""
    return callback.function() if isinstance(callback, WeakCallback) else callback


class EventQueue(Generic[Event]):
    """The events of one client that wait for the application to serve them, in their order; for all threads."""

    def __init__(self, changed: threading.Condition) -> None:
        """Begin without any; `changed`, whose lock guards them, is notified of each."""
        self._changed = changed
        self.events: deque[Event] = deque()
        """The events that have not been served yet."""

    def put(self, event: Event) -> None:
        """Add an event; waiting threads are woken."""
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def pop(self) -> Event | None:
        """Take the first event; None if there is no event."""
        with self._changed:
            return self.events.popleft() if self.events else None

    def serve_first(self, serve: Callable[[list[Event]], Result]) -> Result:
        """Call `serve` with a list of the first event, or an empty list; what it leaves there if it fails stays."""
        taken: list[Event] = []
        try:
            with self._changed:
                if self.events:
                    # No call in between: Ctrl-C finds it here or there.
                    taken += (self.events[0],)
                    del self.events[0]
            return serve(taken)
        except BaseException:
            # At once, in one call of C, and without the lock: an interrupt that comes meanwhile finds it back.
            self.events.extendleft(taken)
            with self._changed:
                self._changed.notify_all()
            raise


def call_first(taken: list[Callable[[], object]]) -> int:
    """Make the call that is taken, if there is one; return how many were made.  It is for `serve_first`."""
    if not taken:
        return 0
    call = taken[0]
    # No call between these: an interrupt before it leaves this one to the next time.
    del taken[:]
    call()
    return 1


#: `error_cb` hears of the same trouble at most this often.
PERIOD_SECONDS: Final = 1.0


def trouble_of(error: KafkaError) -> tuple[int, str]:
    """Return what the same trouble is told by: what passes by itself, by its code; what stays, by what it says, too."""
    return error.code(), "" if error.retriable() else error.str()


class ErrorReporter:
    """Tells the application's error callback, not too often; holds no producer, so that one can be dropped."""

    def __init__(
        self,
        callback: Callable[[KafkaError], object] | None,
        add_event: Callable[[Callable[[], object]], object],
        is_alone: Callable[[], bool] = lambda: True,
    ) -> None:
        """Tell `callback`, if there is one; `add_event` lets a call wait until it is served.

        While `is_alone`, a database that is away is all that there is.
        """
        self._is_alone = is_alone
        self._add_event = add_event
        self._callback = callback
        #: Several threads of a client may meet the same trouble at once.
        self._lock = threading.Lock()
        self._repeated = RepeatedTrouble(PERIOD_SECONDS)

    def report(self, error: KafkaError) -> None:
        """Tell of an error, unless the same was told a moment ago; a fatal one is raised where it is served."""
        if self._callback is None:
            return
        if error.fatal():
            self._add_event(partial(_raise, error))
            return
        if self._say(error) and error.code() == KafkaError._TRANSPORT and self._is_alone():
            self._say(KafkaError(KafkaError._ALL_BROKERS_DOWN, f"1/1 brokers are down: {error.str()}"))

    def _say(self, error: KafkaError) -> bool:
        callback = self._callback
        with self._lock:
            if callback is None or not self._repeated.may_be_told(trouble_of(error)):
                return False
        self._add_event(lambda: callback(error))
        return True


def _raise(error: KafkaError) -> NoReturn:
    raise KafkaException(error)


def serve_on(serve: Callable[[], object], errors: list[Exception]) -> None:
    """Serve callbacks, and go on with the next one if one raises; the first error is put into `errors` if it is empty.

    Not after an interrupt: that comes out at once.
    """
    while True:
        try:
            serve()
        except Exception as error:  # noqa: BLE001 - it is raised in the end
            if not errors:
                errors.append(error)
        else:
            return
