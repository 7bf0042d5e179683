"""This file is what can go wrong in a proxy, when, and how a test learns that it did."""

from __future__ import annotations

import enum
import re
import threading

from tests.tools.wire import contains_statement

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
