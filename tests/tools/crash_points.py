"""This file is the steps that code takes on its databases: each statement, BEGIN and COMMIT too, with its two sides.

They are seen through SQLAlchemy's engine events, so the code that takes them carries no marks and need not be ours.
What one thread does is what counts: a thread stands for a process.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Engine, event

_STATEMENT_LENGTH_MAX: Final = 120


class When(enum.Enum):
    """A side of a step."""

    BEFORE = "before"
    """The statement was not sent."""

    AFTER = "after"
    """The statement took effect, and nobody has heard of it: its answer is lost."""


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """One side of one step."""

    step: int
    """The number of the statement, from 1."""

    when: When
    statement: str
    """The statement, shortened."""

    def __str__(self) -> str:
        """Return what a failed test says: after step 7 (COMMIT)."""
        return f"{self.when.value} step {self.step} ({self.statement})"


#: Is called at each side of each step, on the connection that the statement runs on.
AtStep = Callable[[Connection, CrashPoint], None]


@contextmanager
def at_each_step(call: AtStep) -> Iterator[None]:
    """Call `call` before and after each statement that this thread runs on any engine.

    What `call` itself does on a database is no step. A statement that fails has no side after.
    """
    thread = threading.get_ident()
    step = 0
    calling = False

    def arrive(connection: Connection, when: When, statement: str) -> None:
        nonlocal calling
        calling = True
        try:
            call(connection, CrashPoint(step, when, _shortened(statement)))
        finally:
            calling = False

    def counts() -> bool:
        return not calling and threading.get_ident() == thread

    def before(connection: Connection, cursor: Any, statement: str, *_: object) -> None:
        nonlocal step
        if counts():
            step += 1
            arrive(connection, When.BEFORE, statement)

    def after(connection: Connection, cursor: Any, statement: str, *_: object) -> None:
        if counts():
            arrive(connection, When.AFTER, statement)

    # On the class: engines that are made meanwhile are seen as well.
    event.listen(Engine, "before_cursor_execute", before)
    event.listen(Engine, "after_cursor_execute", after)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", before)
        event.remove(Engine, "after_cursor_execute", after)


def _shortened(statement: str) -> str:
    words = " ".join(statement.split())
    return words if len(words) <= _STATEMENT_LENGTH_MAX else words[: _STATEMENT_LENGTH_MAX - 3] + "..."
