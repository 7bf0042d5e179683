"""The places where a process that coordinates branches dies: each side of each statement, wherever it runs.

A place is a moment before or after a statement at the coordinator, or before, in the middle of and after an exchange
with the databases that take part.  From the place of its death on nothing that the process does reaches a database.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection

from tests.tools.crashes import Crash, CrashPoint, When, _cut, at_each_step
from txnstore.db.postgresql import branches as postgresql_branches
from txnstore.db.postgresql import exchange as postgresql_exchange
from txnstore.db.postgresql.exchange import ServerAnswer, Statement
from txnstore.participants import branches

#: Is told where the process has arrived; may raise, or not return.
AtPlace = Callable[[str, Connection | None, CrashPoint], None]

_EXCHANGE = postgresql_exchange.exchange


@contextmanager
def at_each_place(arrive: AtPlace) -> Iterator[None]:
    def in_log_database(connection: Connection, point: CrashPoint) -> None:
        arrive(str(point), connection, point)

    def exchanged(statements: Sequence[Statement], timeout_seconds: float) -> list[ServerAnswer]:
        if not statements:
            return []
        told = " | ".join(statement.text.rpartition("; ")[2].split(" '")[0] for statement in statements)
        point = CrashPoint(0, When.BEFORE, told)
        arrive(f"before {told}", None, point)
        answers: list[ServerAnswer] = []
        for number, statement in enumerate(statements, 1):
            # As if the first answer had come, and the second statement not yet been sent.
            answers += _EXCHANGE([statement], timeout_seconds)
            arrive(f"after {number} of {told}", None, point)
        return answers

    modules = (branches, postgresql_branches)
    for module in modules:
        module.exchange = exchanged  # type: ignore[attr-defined]  # what it imported
    try:
        with at_each_step(in_log_database):
            yield
    finally:
        for module in modules:
            module.exchange = _EXCHANGE  # type: ignore[attr-defined]  # as before


def places_of(action: Callable[[], object]) -> list[str]:
    """Run the action to its end and return the places where it could have died."""
    places: list[str] = []
    with at_each_place(lambda place, *_: places.append(place)):
        action()
    return places


def die_at(number: int, action: Callable[[], object]) -> str | None:
    """Let the process die at its place of this number, from 1; return where that was, None if it came to its end."""
    seen = 0
    died: str | None = None

    def arrive(place: str, connection: Connection | None, point: CrashPoint) -> None:
        nonlocal seen, died
        seen += 1
        if seen >= number:
            died = died or place
            if connection is not None:
                _cut(connection, point)
            raise Crash(point)

    try:
        with at_each_place(arrive):
            action()
    except Crash:
        pass
    return died


def kill_at(number: int, action: Callable[[], object]) -> None:
    """Kill this very process, SIGKILL, at its place of this number."""
    seen = 0

    def arrive(*_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    with at_each_place(arrive):
        action()
