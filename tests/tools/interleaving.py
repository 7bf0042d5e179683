"""The deterministic scheduler: every order in which actors can take the steps of their database work.

An actor is a function that runs in a thread of its own. It stops before each of its steps (a database transaction,
or a single statement) until the scheduler lets it take that step; only one takes one at a time. `explore` goes
through all orders, depth first, each from a state that the caller makes anew:

    def two_commits():
        return Scenario({"first": lambda: first.commit(), "second": lambda: second.commit()}, after_step=check)

    assert explore(two_commits).orders == 2

The code under test carries no marks for it: steps are seen through SQLAlchemy's events, whatever engine an actor
uses. An actor that waits for a lock of another one is found by asking the database.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Engine, event

from tests.tools.crashes import is_commit
from txnstore.db.postgresql.backend import connect_driver
from txnstore.db.store import Store

#: Whether a session waits for a lock that one of these sessions holds or has asked for before it.
LockWaits = Callable[[int, Sequence[int]], bool]


@contextmanager
def lock_waits_of(store: Store | None) -> Iterator[LockWaits]:
    """Give a function that asks PostgreSQL; on SQLite nobody ever waits, for it refuses instead."""
    if store is None or store.backend.name != "postgresql":
        yield _nobody_waits
        return
    with connect_driver(store.url) as connection:

        def waits(backend: int, for_any_of: Sequence[int]) -> bool:
            row = connection.execute("SELECT pg_blocking_pids(%s) && %s::int[]", [backend, list(for_any_of)]).fetchone()
            return row is not None and bool(row[0])

        yield waits


def _nobody_waits(backend: int, for_any_of: Sequence[int]) -> bool:
    del backend, for_any_of
    return False


#: Whether an actor stops before a statement.
Stops = Callable[[str], bool]

_STEP_LENGTH: Final = 60
_here: Final = threading.local()


class ActorStuckError(AssertionError):
    """Actors neither came to their next step nor wait for a lock of another actor."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(f"nothing happens any more: {', '.join(names)}")


@dataclass(frozen=True, slots=True)
class Finished:
    """How an actor ended: with a value, or with an error that it did not handle."""

    value: Any = None
    error: BaseException | None = None

    def result(self) -> Any:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value


class _State(enum.Enum):
    NEW = enum.auto()
    RUNNING = enum.auto()
    STOPPED = enum.auto()
    FINISHED = enum.auto()


def current_actor() -> Actor | None:
    """Return the actor whose thread this is."""
    return getattr(_here, "actor", None)


class Actor:
    """A function in a thread of its own, which the scheduler lets go on from step to step."""

    def __init__(
        self,
        name: str,
        work: Callable[[], object],
        changed: threading.Condition,
        stops: Stops,
        timeout_seconds: float,
    ) -> None:
        """Make an actor that `start` starts; `changed` is notified whenever it stops or ends."""
        self.name = name
        self.next_step = ""
        self.backend: int | None = None
        """The process id of its PostgreSQL session."""
        self.finished_as = Finished()
        self._work = work
        self._changed = changed
        self._stops = stops
        self._timeout_seconds = timeout_seconds
        self._state = _State.NEW
        self._is_free = False
        self._must_wait = False
        self._ended_transaction = False
        self._executing: str | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_running(self) -> bool:
        """Whether it is on its way to its next step, or waits for a lock."""
        return self._state is _State.RUNNING

    @property
    def is_finished(self) -> bool:
        """Whether its function has ended."""
        return self._state is _State.FINISHED

    @property
    def is_ready(self) -> bool:
        """Whether it stands before a step that it can take."""
        return self._state is _State.STOPPED and not self._must_wait

    @property
    def waits(self) -> bool:
        """Whether it waits for what another actor holds; meaningful while all stand still."""
        return self.is_running or (self._state is _State.STOPPED and self._must_wait)

    def start(self) -> None:
        """Begin; it runs to its first step."""
        self._state = _State.RUNNING
        self._thread.start()

    def let_go(self) -> None:
        """Let it take the step before which it stands."""
        with self._changed:
            assert self._state is _State.STOPPED
            self._state = _State.RUNNING
            self._changed.notify_all()

    def take_note_of_end(self) -> bool:
        """Return whether it has ended a database transaction since the last call."""
        ended, self._ended_transaction = self._ended_transaction, False
        return ended

    def may_try_again(self) -> None:
        """Somebody has ended a database transaction: what could not begin may begin now."""
        self._must_wait = False

    def set_free(self) -> None:
        """Never stop it again."""
        with self._changed:
            self._is_free = True
            self._changed.notify_all()

    def join(self) -> None:
        """Return when its thread has ended, if it was ever started."""
        if self._state is _State.NEW:
            return
        self._thread.join(self._timeout_seconds)
        if self._thread.is_alive():
            raise ActorStuckError([self.name])

    def reach(self, statement: str, connection: Any) -> None:
        """Stand still before the statement if it begins a step; called in the actor's own thread."""
        # SQLite does not queue for its write lock: the store tries again, and the same statement comes once more.
        is_repeated = self._executing == statement
        self._executing = statement if connection is not None else None
        if not self._stops(statement) and connection is not None:
            return
        with self._changed:
            if self._is_free:
                return
            self.backend = _backend_of(connection) or self.backend
            self.next_step = " ".join(statement.split())[:_STEP_LENGTH]
            self._must_wait = is_repeated
            self._state = _State.STOPPED
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._is_free or self.is_running, 10 * self._timeout_seconds):
                raise ActorStuckError([self.name])
            self._state = _State.RUNNING

    def passed(self, statement: str) -> None:
        """Note that the statement was executed."""
        self._executing = None
        if statement == "ROLLBACK" or is_commit(statement):
            self._ended_transaction = True

    def _run(self) -> None:
        _here.actor = self
        try:
            finished = Finished(value=self._work())
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the actor's result
            finished = Finished(error=error)
        with self._changed:
            self.finished_as = finished
            self._state = _State.FINISHED
            self._changed.notify_all()


def _backend_of(connection: Any) -> int | None:
    if connection is None or connection.dialect.name != "postgresql":
        return None
    return int(connection.connection.driver_connection.info.backend_pid)


#: How long nothing may happen before an order is given up as stuck.
TIMEOUT_SECONDS: Final = 30.0
#: A scenario with more orders than this was not meant to be explored whole.
ORDERS_MAX: Final = 20_000
#: After this long without news of an actor the database is asked what it waits for.
_ASK_AFTER_SECONDS: Final = 0.002
_NOT_THE_SAME: Final = "the scenario does not do the same when it is run again"


def before_transactions(statement: str) -> bool:
    """Stop before each database transaction."""
    return statement.startswith("BEGIN") or (statement != "COMMIT" and is_commit(statement))


def before_statements(statement: str) -> bool:
    """Stop before each statement, BEGIN and COMMIT included."""
    del statement
    return True


def before_locks(statement: str) -> bool:
    """Stop before each statement that reads, may wait for a lock, or ends a database transaction.

    Writes to rows that are locked already are left out: others cannot tell whether they have happened yet.
    """
    return statement.startswith(("BEGIN", "SELECT", "DELETE", "COMMIT", "ROLLBACK")) or any(
        words in statement for words in ("ON CONFLICT", "RETURNING")
    )


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Scenario:
    """Actors on a fresh state, and what is looked at on the way."""

    actors: Mapping[str, Callable[[], object]]
    #: Called before an actor is let go on, with its name.
    before_step: Callable[[str], object] = _nothing
    #: Called while every actor stands still, after each step that ended a database transaction.
    after_step: Callable[[], object] = _nothing
    #: Called once all actors have finished, with what they returned or raised.
    at_end: Callable[[Mapping[str, Finished]], object] = _nothing


@dataclass
class Explored:
    """What an exploration went through."""

    orders: int = 0
    steps: int = 0
    #: Orders in which an actor had to wait for a lock of another one.
    orders_with_waiting: int = 0
    #: Times that all actors waited for each other, until the database chose a victim.
    deadlocks: int = 0


def explore(
    make: Callable[[], Scenario],
    *,
    stops: Stops = before_transactions,
    preemptions_max: int | None = None,
    store: Store | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Explored:
    """Run the actors that `make` returns in every order of their steps; `make` is called anew for each order.

    With `preemptions_max` only those orders are run in which an actor that could go on is interrupted at most so
    often.  `store` is any store on the actors' database; it is needed where actors may wait for locks of each other,
    which takes steps that are smaller than database transactions.

    Raises:
        ActorStuckError: an actor neither took its next step nor waits for a lock of another one.
        Exception: whatever the functions of a scenario raise; a note says in which order.
    """
    explored = Explored()
    choices: list[int] | None = []
    with _steps_seen(), lock_waits_of(store) as lock_waits:
        while choices is not None:
            order = _Order(make(), stops, preemptions_max, lock_waits, timeout_seconds)
            order.run(choices)
            explored.orders += 1
            explored.steps += len(order.taken)
            explored.orders_with_waiting += order.waited
            explored.deadlocks += order.deadlocks
            assert explored.orders <= ORDERS_MAX, f"more than {ORDERS_MAX} orders"
            choices = _next_choices(order)
    return explored


def stop_here(label: str) -> None:
    """Let the actor that calls this stop as before a step of its own; without a scheduler nothing happens."""
    actor = current_actor()
    if actor is not None:
        actor.reach(label, None)


@dataclass
class _Order:
    """One order: the actors of one scenario, from their start to the end of all."""

    scenario: Scenario
    stops: Stops
    preemptions_max: int | None
    lock_waits: LockWaits
    timeout_seconds: float
    taken: list[str] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    waited: bool = False
    deadlocks: int = 0

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._actors = [
            Actor(name, work, self._changed, self.stops, self.timeout_seconds)
            for name, work in self.scenario.actors.items()
        ]
        self._current: Actor | None = None
        self._preemptions = 0

    def run(self, prescribed: Sequence[int]) -> None:
        """Follow the prescribed choices, then always the first one."""
        try:
            for actor in self._actors:
                # One after the other: what an actor does before its first step does not depend on the order.
                actor.start()
                self._settle()
            while options := self._options():
                number = prescribed[len(self.choices)] if len(self.choices) < len(prescribed) else 0
                assert number < len(options), _NOT_THE_SAME
                self.choices.append(number)
                self.widths.append(len(options))
                self._take(options[number])
            assert len(self.choices) >= len(prescribed), _NOT_THE_SAME
            self.scenario.at_end({actor.name: actor.finished_as for actor in self._actors})
        except BaseException as error:
            error.add_note(f"in this order: {', '.join(self.taken)}")
            raise
        finally:
            for actor in self._actors:
                actor.set_free()
            for actor in self._actors:
                actor.join()

    def _options(self) -> list[Actor]:
        """Return who may take the next step, the one that took the last step first."""
        ready = [actor for actor in self._actors if actor.is_ready]
        while not ready and not all(actor.is_finished for actor in self._actors):
            self._break_deadlock()
            ready = [actor for actor in self._actors if actor.is_ready]
        current = self._current
        if current is None or current not in ready:
            return ready
        others = [actor for actor in ready if actor is not current]
        may_interrupt = self.preemptions_max is None or self._preemptions < self.preemptions_max
        return [current, *others] if may_interrupt else [current]

    def _take(self, actor: Actor) -> None:
        current = self._current
        if current is not None and current is not actor and current.is_ready:
            self._preemptions += 1
        self._current = actor
        self.taken.append(f"{actor.name}: {actor.next_step}")
        self.scenario.before_step(actor.name)
        actor.let_go()
        self._settle()
        self.waited = self.waited or any(other.waits for other in self._actors)
        if any([other.take_note_of_end() for other in self._actors]):  # noqa: C419 - each is to take note
            # SQLite: whoever could not begin may try again.
            for other in self._actors:
                other.may_try_again()
            self.scenario.after_step()

    def _settle(self) -> None:
        """Return once every actor stands before its next step, has finished, or waits for a lock of another one."""
        deadline = time.monotonic() + self.timeout_seconds
        while running := self._running(_ASK_AFTER_SECONDS):
            backends = [actor.backend for actor in self._actors if actor.backend is not None]
            if all(actor.backend is not None and self.lock_waits(actor.backend, backends) for actor in running):
                return
            if time.monotonic() > deadline:
                raise ActorStuckError([actor.name for actor in running])

    def _running(self, within_seconds: float) -> list[Actor]:
        with self._changed:
            self._changed.wait_for(lambda: not any(actor.is_running for actor in self._actors), within_seconds)
            return [actor for actor in self._actors if actor.is_running]

    def _break_deadlock(self) -> None:
        """Wait until the database has chosen a victim of actors that wait for each other."""
        waiting = [actor for actor in self._actors if actor.is_running]
        if waiting:
            self.deadlocks += 1
            with self._changed:
                if not self._changed.wait_for(
                    lambda: not all(actor.is_running for actor in waiting), self.timeout_seconds
                ):
                    raise ActorStuckError([actor.name for actor in waiting])
            self._settle()
        for actor in self._actors:
            actor.may_try_again()


def _next_choices(order: _Order) -> list[int] | None:
    """Return the choices that lead to the next order, depth first; None after the last one."""
    for index in reversed(range(len(order.choices))):
        if order.choices[index] + 1 < order.widths[index]:
            return [*order.choices[:index], order.choices[index] + 1]
    return None


@contextmanager
def _steps_seen() -> Iterator[None]:
    event.listen(Engine, "before_cursor_execute", _before)
    event.listen(Engine, "after_cursor_execute", _after)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", _before)
        event.remove(Engine, "after_cursor_execute", _after)


def _before(connection: Any, cursor: Any, statement: str, *_: object) -> None:
    actor = current_actor()
    if actor is not None:
        actor.reach(statement, connection)


def _after(connection: Any, cursor: Any, statement: str, *_: object) -> None:
    actor = current_actor()
    if actor is not None:
        actor.passed(statement)
