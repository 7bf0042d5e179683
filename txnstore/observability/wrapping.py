"""Methods of the clients that somebody looks at for a while; without an onlooker they are the classes' own.

So what nobody watches costs nothing: no hook is asked in any call.  What an onlooker does never changes what the
application is told: it would repeat what is committed, or leave out what it has not got.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final

from txnstore.clients.consumer.consumer import Consumer
from txnstore.clients.consumer.whole_transactions import ConsumedTransaction
from txnstore.clients.model.message import Message
from txnstore.trouble import RepeatedTrouble

#: `around(original, client, ...)` makes the call of `original`, and whatever comes before and after it.
Around = Callable[..., Any]

_log: Final = logging.getLogger(__name__)
_lock: Final = threading.Lock()
#: What stands in for a method: whose it is, and what stood there before.
_passings: Final[dict[Any, tuple[Onlooker, Any]]] = {}


class Onlooker:
    """Calls of methods that pass by one onlooker, until it is gone; for all objects of the classes."""

    def __init__(self) -> None:
        """Look at nothing yet."""
        self._is_gone = False
        self._methods: list[tuple[type, str]] = []

    def look_at(self, owner: type, name: str, around: Around) -> None:
        """Let calls of the class's method pass by `around`; onlookers that came before stay."""
        with _lock:
            original = vars(owner)[name]

            @functools.wraps(original)
            def passing(*arguments: Any, **keywords: Any) -> Any:
                if self._is_gone:
                    return original(*arguments, **keywords)
                return around(original, *arguments, **keywords)

            _passings[passing] = self, original
            setattr(owner, name, passing)
            self._methods.append((owner, name))

    def go(self) -> None:
        """Look no more.

        A method that others have come to look at since still passes by here, unnoticed, until they have gone too.
        """
        with _lock:
            self._is_gone = True
            for owner, name in reversed(self._methods):
                method = vars(owner)[name]
                while method in _passings and _passings[method][0]._is_gone:
                    _, method = _passings.pop(method)
                    setattr(owner, name, method)
            self._methods.clear()


class _Aside:
    """A block in which an onlooker takes a step of its own: what that raises is logged, and the application goes on."""

    def __init__(self) -> None:
        self._trouble = RepeatedTrouble()

    def __enter__(self) -> None:
        """Begin the step."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Keep an error to ourselves, but no interrupt."""
        if not isinstance(error, Exception):
            return False
        name = type(error).__qualname__
        if self._trouble.may_be_told(name):
            text = "what looks at the clients has failed: spans or counts are missing, and nothing else is"
            _log.error(text, exc_info=error, extra={"event": "onlooker_failed", "error": name})
        return True


aside: Final = _Aside()


def around_reading(note: Callable[[Consumer, Sequence[Message], int], object]) -> Around:
    """Let `note(consumer, messages, began_ns)` see what a call hands out; what an interrupt takes comes again."""

    def around(original: Callable[..., Any], consumer: Consumer, *rest: Any, **keywords: Any) -> Any:
        found: Message | list[Message] | ConsumedTransaction | None = None
        try:
            began_ns = time.time_ns()
            found = original(consumer, *rest, **keywords)
            if found is not None:
                with aside:
                    note(consumer, _messages_of(found), began_ns)
            return found
        except BaseException:
            if found is not None:
                # The application never gets it, and its next commit would be past it.
                consumer._core.give_back(list(_messages_of(found)))
            raise

    return around


def _messages_of(found: Message | list[Message] | ConsumedTransaction) -> Sequence[Message]:
    if isinstance(found, ConsumedTransaction):
        return found.messages
    return (found,) if isinstance(found, Message) else found
