"""This file is the application's callbacks as a client keeps them: held by the client alone.

A callback is often a method of the object that holds the client.  The client's threads know callbacks weakly: if they
held them, they would keep alive who owns the client, and a client that is dropped would never be collected.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

Callback = Callable[..., Any]


class Callbacks:
    """Named callbacks, each of which may be missing."""

    def __init__(self, **functions: Callback | None) -> None:
        """Hold the functions."""
        self._functions = functions

    def __getitem__(self, name: str) -> Callback | None:
        """Return the function, or None if the application gave none."""
        return self._functions[name]

    def weakly(self, name: str) -> Callback | None:
        """Return what calls the function for as long as these callbacks are held; None if there is none."""
        if self._functions[name] is None:
            return None
        weak = weakref.ref(self)

        def call(*arguments: Any) -> Any:
            callbacks = weak()
            function = None if callbacks is None else callbacks[name]
            return None if function is None else function(*arguments)

        return call
