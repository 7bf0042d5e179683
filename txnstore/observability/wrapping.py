"""Methods of the clients that somebody looks at for a while; without an onlooker they are the classes' own.

So what nobody watches costs nothing: no hook is asked in any call.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final

#: `around(original, client, ...)` makes the call of `original`, and whatever comes before and after it.
Around = Callable[..., Any]

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
