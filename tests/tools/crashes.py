"""Crashes: a piece of code dies at one step after another, and a test looks at what each one leaves.

    for crash in every_crash(lambda: open_store(url), lambda store: produce(store, b"x", b"y")):
        with open_store(url) as store:
            assert len(offsets(store)) % 2 == 0, crash

Complete, not random: every statement, BEGIN and COMMIT too, is a step, and on both sides of every step there is a
crash (one where two sides are the same, see `every_crash`). It is one of a process: from then on nothing that the code
does reaches the database, not even a ROLLBACK; its connections are cut. For a process that really dies see
`tests.tools.killed_children`.

Steps are seen through SQLAlchemy's engine events, so the code that takes them carries no marks and need not be ours.
What one thread does is what counts: a thread stands for a process.
"""

from __future__ import annotations

import enum
import itertools
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NoReturn, Protocol, TypeVar, runtime_checkable

from sqlalchemy import Connection, Engine, Pool, event

from tests.tools.living_sessions import sessions_cut
from txnstore.db.store import CONNECTION_CHECK

_STATEMENT_LENGTH_MAX: Final = 120
#: Where sessions of PostgreSQL live on after a crash, those of one step in so many are cut all the same, for the server
#: to find out; it is a step that even the shortest actions have.
CUT_STEPS: Final = 8
CUT_STEP: Final = 2


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

    What `call` itself does on a database is not a step, nor is what a new connection is asked, which changes nothing:
    whether there is one depends on who has died before. A statement that fails has no side after.
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

    def checked_out(driver: Any, record: Any, _: object) -> None:
        if counts():
            record.info.pop(CONNECTION_CHECK, None)

    # On the class: engines that are made meanwhile are seen as well.
    were_listened_to = Engine._has_events
    event.listen(Pool, "checkout", checked_out)
    event.listen(Engine, "before_cursor_execute", before)
    event.listen(Engine, "after_cursor_execute", after)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", before)
        event.remove(Engine, "after_cursor_execute", after)
        event.remove(Pool, "checkout", checked_out)
        # SQLAlchemy leaves it at that, and each statement from then on would ask who listens.
        Engine._has_events = were_listened_to


def is_commit(statement: str) -> bool:
    """Return whether a statement commits: COMMIT, the one that commits a whole transaction at once, or a message."""
    is_whole = statement.startswith("SELECT ") and ".commit_transaction(" in statement
    return is_whole or statement == "COMMIT" or statement.endswith(";COMMIT")


def _shortened(statement: str) -> str:
    words = " ".join(statement.split())
    return words if len(words) <= _STATEMENT_LENGTH_MAX else words[: _STATEMENT_LENGTH_MAX - 3] + "..."


Subject = TypeVar("Subject")
Result = TypeVar("Result")
Make = Callable[[], Subject]
Action = Callable[[Subject], object]


class Crash(BaseException):
    """The process is dead. No `except Exception` survives it."""

    def __init__(self, point: CrashPoint) -> None:
        """Remember where it happened."""
        super().__init__(f"crashed {point}")
        self.point = point


@runtime_checkable
class Closable(Protocol):
    """What holds something that has to be let go, like a `Store`."""

    def close(self) -> None:
        """Let it go."""
        ...


@dataclass(frozen=True, slots=True)
class Crashed(Generic[Subject]):
    """What a crash has left."""

    subject: Subject
    """What the crashed code worked on: as dead as the code. Look at its database through another store."""

    point: CrashPoint
    """Where it happened."""

    _graves: Sequence[_Grave] = field(default=(), repr=False)

    @property
    def step(self) -> int:
        """The number of the statement, from 1."""
        return self.point.step

    @property
    def when(self) -> When:
        """The side of the statement."""
        return self.point.when

    @property
    def statement(self) -> str:
        """The statement, shortened."""
        return self.point.statement

    def __str__(self) -> str:
        """Return where it happened, for messages."""
        return str(self.point)

    def revive(self) -> None:
        """Let the engines that the code used reach their database again, over new connections.

        For tests that crash many times and would rather not open a store for each: it serves as the next process.
        """
        for grave in self._graves:
            grave.open()


@dataclass(frozen=True, slots=True)
class CrashedTwice(Generic[Subject]):
    """What a second crash has left, in the recovery from the first."""

    first: Crashed[Subject]
    second: Crashed[Subject]

    @property
    def subject(self) -> Subject:
        """What both worked on."""
        return self.second.subject

    def __str__(self) -> str:
        """Return where both happened, for messages."""
        return f"{self.first}, then in the recovery {self.second}"

    def revive(self) -> None:
        """Let the engines that both used reach their database again, over new connections."""
        self.first.revive()
        self.second.revive()


def every_crash(
    make: Make[Subject], action: Action[Subject], *, statements_are_all: bool = False
) -> Iterator[Crashed[Subject]]:
    """Yield what a crash of `action` leaves at each side of each of its steps, in order.

    `make` returns what the action works on, once for each crash: a store, or whatever holds one. It must be fresh,
    for the last crash has left its traces. A subject that has a method `close` is closed as soon as it is dead. It
    ends once the action comes to its end untouched.

    With `statements_are_all` nobody sees anything of the action but its statements: who dies before one has left what
    who died after the one before it did, so of these two sides there is one crash. It is the one after; before a
    statement there is one where it fails, or where the last one failed, or there was none.
    """
    yield from every_side(
        lambda step, when: _crash_of_new(make, action, step, when), statements_are_all=statements_are_all
    )


def every_side(attempt: Callable[[int, When], Result | None], *, statements_are_all: bool = False) -> Iterator[Result]:
    """Yield what the attempts at each side of each step come to, until there is no such step; see `every_crash`."""
    is_known = False
    for step in itertools.count(1):
        before = None if is_known else attempt(step, When.BEFORE)
        if before is not None:
            yield before
        elif not is_known:
            return
        after = attempt(step, When.AFTER)
        if after is not None:
            yield after
        elif is_known:
            # It has no such step, or one that fails.
            before = attempt(step, When.BEFORE)
            if before is None:
                return
            yield before
        is_known = statements_are_all and after is not None


def _crash_of_new(make: Make[Subject], action: Action[Subject], step: int, when: When) -> Crashed[Subject] | None:
    subject = make()
    crashed = crash_at(step, when, action, subject)
    _close(subject)
    return crashed


def every_second_crash(
    make: Make[Subject],
    action: Action[Subject],
    recovery: Action[Subject],
    *,
    is_first: Callable[[CrashPoint], bool] | None = None,
    statements_are_all: bool = False,
) -> Iterator[CrashedTwice[Subject]]:
    """Yield what is left by each crash of `recovery` after each crash of `action`: all pairs.

    `recovery` gets the same subject, whose engines that the action used are dead; it brings another store along.
    `is_first` picks the first crashes: those just after a COMMIT, say, if it is shown that the others leave no traces.
    `statements_are_all` of the recovery, see `every_crash`.
    """
    subject = make()
    points = steps_of(action, subject)
    _close(subject)
    for point in points if is_first is None else filter(is_first, points):
        firsts: list[Crashed[Subject]] = []

        def make_crashed(point: CrashPoint = point, firsts: list[Crashed[Subject]] = firsts) -> Subject:
            if firsts:
                # A recovery that came to its end was nobody's to revive.
                firsts[-1].revive()
            subject = make()
            first = crash_at(point.step, point.when, action, subject)
            assert first is not None, f"the action does not crash {point} any more"
            assert first.point == point, "its first time took other steps"
            firsts.append(first)
            return subject

        for second in every_crash(make_crashed, recovery, statements_are_all=statements_are_all):
            yield CrashedTwice(firsts[-1], second)
        firsts[-1].revive()


def steps_of(action: Action[Subject], subject: Subject) -> list[CrashPoint]:
    """Run the action to its end and return the places where it could have crashed."""
    points: list[CrashPoint] = []
    with at_each_step(lambda _, point: points.append(point)):
        action(subject)
    return points


def around_transactions(points: Sequence[CrashPoint]) -> list[CrashPoint]:
    """Of these places, keep those that each BEGIN and COMMIT has on its sides: one of two with nothing between them."""
    last, kept = None, []
    for point in points:
        if point.statement.startswith("BEGIN") or is_commit(point.statement):
            if point.when is When.AFTER or (last is None or last.step != point.step - 1):
                kept.append(point)
            last = point
    return kept


def crash_at(step: int, when: When, action: Action[Subject], subject: Subject) -> Crashed[Subject] | None:
    """Run the action until it crashes there, and return what that leaves; None if it comes to its end before."""
    crasher = _Crasher(step, when)
    try:
        with at_each_step(crasher):
            action(subject)
    except Crash as crash:
        if crash.point is not crasher.point:
            raise
    return None if crasher.point is None else Crashed(subject, crasher.point, crasher.graves)


def cut_at_times(step: int) -> AbstractContextManager[None]:
    """Cut the sessions of PostgreSQL that are closed meanwhile, if it is the turn of this step."""
    return sessions_cut() if step % CUT_STEPS == CUT_STEP else nullcontext()


@contextmanager
def noting(place: object) -> Iterator[None]:
    """Let an error say after which crash it came up, for the checks in a loop over crashes."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"after a crash {place}")
        raise


def _close(subject: object) -> None:
    if isinstance(subject, Closable):
        subject.close()


class _Crasher:
    """Crashes at one side of one step, and at everything that comes later."""

    def __init__(self, step: int, when: When) -> None:
        self._step = step
        self._when = when
        self._alive: set[Engine] = set()
        self.point: CrashPoint | None = None
        self.graves: list[_Grave] = []

    def __call__(self, connection: Connection, point: CrashPoint) -> None:
        self._alive.add(connection.engine)
        if self.point is None and (point.step, point.when) == (self._step, self._when):
            self.point = point
        if self.point is not None:
            with cut_at_times(self._step):
                while self._alive:
                    self.graves.append(_Grave(self._alive.pop(), self.point))
                _cut(connection, self.point)


class _Grave:
    """Where an engine of a dead process lies: nothing reaches the database through it, from whichever thread."""

    def __init__(self, engine: Engine, point: CrashPoint) -> None:
        self._engine = engine
        self._point = point
        self._is_open = False
        event.listen(engine, "before_cursor_execute", self._refuse_statement)
        event.listen(engine, "checkout", self._refuse_connection)
        engine.dispose()

    def open(self) -> None:
        """Let the engine out."""
        if self._is_open:
            return
        self._is_open = True
        event.remove(self._engine, "before_cursor_execute", self._refuse_statement)
        event.remove(self._engine, "checkout", self._refuse_connection)

    # A pool that was made anew in the meantime may still call a listener that was removed: open is open.

    def _refuse_statement(self, connection: Connection, *_: object) -> None:
        if not self._is_open:
            _cut(connection, self._point)

    def _refuse_connection(self, *_: object) -> None:
        if not self._is_open:
            raise Crash(self._point)


def _cut(connection: Connection, point: CrashPoint) -> NoReturn:
    """Close the driver's connection without a word: whoever tidies up later has nothing to say ROLLBACK on."""
    driver = None if connection.invalidated else connection.connection.driver_connection
    if isinstance(driver, sqlite3.Connection):
        # Closed while a SELECT is not read to its end, it would keep its locks until the cursor is collected.
        driver.rollback()
    connection.invalidate()
    raise Crash(point)
