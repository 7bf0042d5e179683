"""The deterministic scheduler: every order in which actors can take the steps of their database work.

An actor is a function that runs in a thread of its own. It stops before each of its steps (a database transaction,
or a single statement) until the scheduler lets it take that step; only one takes one at a time. `explore` goes
through all orders, depth first, each from a state that the caller makes anew:

    def two_commits():
        return Scenario({"first": lambda: first.commit(), "second": lambda: second.commit()}, after_step=check)

    assert explore(two_commits).orders == 2

The code under test carries no marks for it: steps are seen through SQLAlchemy's events, whatever engine an actor
uses. An actor that waits for a lock of another one is found by asking the database.

Of orders that nobody can tell apart one is run.

- What only its own actor can see is no step of its own (`_Transaction`): that a database transaction begins, which
  takes neither a lock nor a snapshot; what is read from a snapshot that is there already; what is done in SQLite's file
  between taking its one write lock and giving it back.
- Where an actor could not but wait, for a lock that another one keeps while it goes on, it comes once, the first time:
  it waits all the same.
- Where two next to each other take a step that changes nothing, whichever comes first, one order of the two is enough.
  So it is without a bound on interruptions: the one that is left out may be the one with fewer of them.
- Of actors that do the same (`Scenario.alike`) the first one begins.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final

from sqlalchemy import Engine, event

from tests.tools.crashes import is_commit
from txnstore.db import statements
from txnstore.db.postgresql.backend import connect_driver
from txnstore.db.store import Store


class Waiting(enum.Enum):
    """What a session waits for, and with what."""

    NO = enum.auto()
    """It goes on, or waits for something else."""

    WITH_LOCKS = enum.auto()
    """For a lock that another session holds or has asked for before it, with locks or changes of its own."""

    EMPTY_HANDED = enum.auto()
    """The same, and it has changed and locked nothing: nobody can tell since when it waits."""


#: How a session waits for any of these sessions.
LockWaits = Callable[[int, Sequence[int]], Waiting]

# A row that is locked takes an id of the transaction, which is a lock itself. The place in the queue for a row does no
# harm, nor do locks of tables that everybody takes who reads or writes.
_WAITS: Final = """
    SELECT CASE WHEN pg_blocking_pids(%(pid)s) && %(others)s::int[] THEN EXISTS (
        SELECT FROM pg_locks WHERE pid = %(pid)s AND granted AND locktype NOT IN ('virtualxid', 'tuple')
        AND NOT (locktype = 'relation' AND mode IN ('AccessShareLock', 'RowShareLock', 'RowExclusiveLock'))) END
"""


@contextmanager
def lock_waits_of(store: Store | None) -> Iterator[LockWaits]:
    """Give a function that asks PostgreSQL; on SQLite nobody ever waits, for it refuses instead."""
    if store is None or store.backend.name != "postgresql":
        yield _nobody_waits
        return
    with connect_driver(store.url) as connection:

        def waits(backend: int, for_any_of: Sequence[int]) -> Waiting:
            row = connection.execute(_WAITS, {"pid": backend, "others": list(for_any_of)}, prepare=True).fetchone()
            has_locks = None if row is None else row[0]
            if has_locks is None:
                return Waiting.NO
            return Waiting.WITH_LOCKS if has_locks else Waiting.EMPTY_HANDED

        yield waits


def _nobody_waits(backend: int, for_any_of: Sequence[int]) -> Waiting:
    del backend, for_any_of
    return Waiting.NO


#: Whether an actor stops before a statement.
Stops = Callable[[str], bool]

_STEP_LENGTH: Final = 60
_BEGIN_OF_SNAPSHOT: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY;"
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


class _Transaction(enum.Enum):
    """What others can see of the statements of a database transaction."""

    NONE = enum.auto()
    """There is none."""

    SNAPSHOT = enum.auto()
    """It reads what there was at its first statement, and changes nothing: none of the others."""

    ALONE = enum.auto()
    """It has SQLite's write lock: only its end, for which others wait."""

    SHARED = enum.auto()
    """Each of them; before the first one nothing has happened."""

    @classmethod
    def begun_by(cls, statement: str, dialect_name: str) -> _Transaction:
        """Return what a BEGIN begins."""
        if dialect_name == "sqlite":
            return cls.ALONE if statement == "BEGIN IMMEDIATE" else cls.SNAPSHOT
        return cls.SNAPSHOT if statement.startswith(_BEGIN_OF_SNAPSHOT) else cls.SHARED


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
        sees_all: Callable[[Actor], bool],
    ) -> None:
        """Make an actor that `start` starts; `changed` is notified whenever it stops or ends.

        Where `sees_all` says so it stops as well before what the database keeps from others.
        """
        self.name = name
        self.next_step = ""
        self.is_before_own_step = False
        """Whether its next step is one that the database does not see, of `stop_here`."""
        self.has_taken_steps = False
        self._has_changed = False
        self.waiting = Waiting.NO
        """How it waits for what another actor holds, as long as it does."""
        self.backend: int | None = None
        """The process id of its PostgreSQL session."""
        self.finished_as = Finished()
        self._work = work
        self._changed = changed
        self._stops = stops
        self._timeout_seconds = timeout_seconds
        self._sees_all = sees_all
        self._state = _State.NEW
        self._is_free = False
        self._must_wait = False
        self._ended_transaction = False
        self._transaction = _Transaction.NONE
        self._has_just_begun = False
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

    @property
    def may_have_changed(self) -> bool:
        """Whether its last step may have changed something, or may do so once its transaction ends."""
        return self._has_changed or self._transaction is not _Transaction.NONE or self.is_running

    @property
    def waits_empty_handed(self) -> bool:
        """Whether it waits and has nothing that another actor could wait for, or see."""
        return self.waits and self.waiting is Waiting.EMPTY_HANDED

    def start(self) -> None:
        """Begin; it runs to its first step."""
        self._state = _State.RUNNING
        self._thread.start()

    def let_go(self) -> None:
        """Let it take the step before which it stands."""
        with self._changed:
            assert self._state is _State.STOPPED
            self._state = _State.RUNNING
            self.has_taken_steps = True
            self._has_changed = self.is_before_own_step
            self.is_before_own_step = False
            self.waiting = Waiting.NO
            self._changed.notify_all()

    def take_note_of_end(self) -> bool:
        """Return whether it has ended a database transaction that could change something since the last call."""
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
            if connection is not None and self._is_hidden(statement) and not self._sees_all(self):
                return
            self.backend = _backend_of(connection) or self.backend
            self.next_step = " ".join(statement.split())[:_STEP_LENGTH]
            self.is_before_own_step = connection is None
            self._must_wait = is_repeated
            self.waiting = Waiting.EMPTY_HANDED if is_repeated else Waiting.NO
            self._state = _State.STOPPED
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._is_free or self.is_running, 10 * self._timeout_seconds):
                raise ActorStuckError([self.name])
            self._state = _State.RUNNING

    def passed(self, statement: str, connection: Any) -> None:
        """Note that the statement was executed."""
        self._executing = None
        self._has_just_begun = False
        if statement == "ROLLBACK" or is_commit(statement):
            if self._transaction is not _Transaction.SNAPSHOT:
                self._ended_transaction = True
                self._has_changed = self._has_changed or statement != "ROLLBACK"
            self._transaction = _Transaction.NONE
        elif statement.startswith("BEGIN"):
            self._has_just_begun = True
            self._transaction = _Transaction.begun_by(statement, connection.dialect.name)
        elif self._transaction is _Transaction.NONE:
            self._has_changed = True
        elif self._transaction is _Transaction.SNAPSHOT and not statement.startswith(("SELECT", "WITH")):
            # On SQLite nothing keeps it from writing.
            self._transaction = _Transaction.SHARED

    def _is_hidden(self, statement: str) -> bool:
        """Return whether others find the same before the statement as before the one that came before it."""
        if statement.startswith("BEGIN"):
            return False
        match self._transaction:
            case _Transaction.SNAPSHOT:
                return statement.startswith(("SELECT", "WITH", "COMMIT", "ROLLBACK"))
            case _Transaction.ALONE:
                return statement not in ("COMMIT", "ROLLBACK")
            case _Transaction.SHARED:
                return self._has_just_begun
        return False

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
#: After this long without news of an actor the database is asked what it waits for; then after twice as long.
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
    #: Called while every actor stands still, after each step that ended a database transaction, unless it only read.
    after_step: Callable[[], object] = _nothing
    #: Called once all actors have finished, with what they returned or raised.
    at_end: Callable[[Mapping[str, Finished]], object] = _nothing
    #: Actors that do the same, with nothing to tell them apart but their name and connections.
    alike: Collection[str] = ()


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
    all_orders: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Explored:
    """Run the actors that `make` returns in every order of their steps; `make` is called anew for each order.

    Of orders that come to the same one is run, see the module; with `all_orders` each, for actors that have more in
    common than the database, as a clock that one of them moves on its way.  A step of `stop_here` may do that, too:
    while one is next, the other actors stop before all of theirs.

    With `preemptions_max` only those orders are run in which an actor that could go on is interrupted at most so
    often.  `store` is any store on the actors' database; it is needed where actors may wait for locks of each other,
    which takes steps that are smaller than database transactions.

    Raises:
        ActorStuckError: an actor neither took its next step nor waits for a lock of another one.
        Exception: whatever the functions of a scenario raise; a note says in which order.
    """
    explored = Explored()
    with _steps_seen(), lock_waits_of(store) as lock_waits:

        def explore_from(prescribed: list[int], explored_before: Collection[str] = ()) -> _Order:
            order = _Order(make(), stops, preemptions_max, lock_waits, all_orders, timeout_seconds)
            order.run(prescribed, explored_before)
            explored.orders += not order.is_known
            explored.steps += len(order.taken)
            explored.orders_with_waiting += order.waited
            explored.deadlocks += order.deadlocks
            assert explored.orders <= ORDERS_MAX, f"more than {ORDERS_MAX} orders"
            waits_until: dict[str, int] = {}
            for index in range(len(prescribed), len(order.choices)):
                known = {*order.known[index], *order.known_behind(index)}
                for number, name in enumerate(order.options[index]):
                    if number == order.choices[index] or name in order.known[index]:
                        continue
                    if all_orders or waits_until.get(name, 0) <= index:
                        other = explore_from([*order.choices[:index], number], known)
                        waits_until[name] = index + 1 + _steps_beside_who_waits(order, other, index)
                        known |= other.known_behind(index)
            return order

        explore_from([])
    return explored


def _steps_beside_who_waits(order: _Order, other: _Order, index: int) -> int:
    """Return how many steps later an actor may come as well that comes at `index` in the other order.

    There it waits from its first step on, with empty hands, while another one takes the same steps as without it.
    """
    waiter, runner = other.taken[index].name, order.taken[index].name
    if waiter not in other.taken[index].who_waits:
        return 0
    both = zip(order.taken[index:], other.taken[index + 1 :], strict=False)
    beside = takewhile(
        lambda pair: (
            not pair[0].is_own
            and (pair[0].name, pair[0].text) == (pair[1].name, pair[1].text)
            and pair[0].name == runner
            and waiter in pair[1].who_waits
        ),
        both,
    )
    return sum(1 for _ in beside)


def stop_here(label: str) -> None:
    """Let the actor that calls this stop as before a step of its own; without a scheduler nothing happens."""
    actor = current_actor()
    if actor is not None:
        actor.reach(label, None)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that was taken."""

    name: str
    text: str
    #: Whether the database does not see it.
    is_own: bool
    #: Whether it may have changed what others find.
    changes: bool
    #: The actors that waited with empty hands when it had been taken.
    who_waits: frozenset[str]

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


@dataclass
class _Order:
    """One order: the actors of one scenario, from their start to the end of all."""

    scenario: Scenario
    stops: Stops
    preemptions_max: int | None
    lock_waits: LockWaits
    all_orders: bool
    timeout_seconds: float
    taken: list[_Step] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    #: The names of those who might have taken each step.
    options: list[list[str]] = field(default_factory=list)
    #: The names of those among them whose step has been taken in an order that comes to the same.
    known: list[frozenset[str]] = field(default_factory=list)
    #: Whether everybody's next step has: it was not run to its end.
    is_known: bool = False
    waited: bool = False
    deadlocks: int = 0

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._actors = [
            Actor(name, work, self._changed, self.stops, self.timeout_seconds, self._sees_all)
            for name, work in self.scenario.actors.items()
        ]
        self._current: Actor | None = None
        self._preemptions = 0

    def run(self, prescribed: Sequence[int], explored_before: Collection[str] = ()) -> None:
        """Follow the prescribed choices, then always the first one.

        The steps of `explored_before` have been taken instead of the last prescribed one, and had changed nothing.
        """
        known: frozenset[str] = frozenset()
        try:
            for actor in self._actors:
                # One after the other: what an actor does before its first step does not depend on the order.
                actor.start()
                self._settle()
            while options := self._options():
                index = len(self.choices)
                if index == len(prescribed) - 1:
                    known = frozenset(explored_before)
                new = [number for number, actor in enumerate(options) if actor.name not in known]
                if index >= len(prescribed) and not new:
                    self.is_known = True
                    return
                number = prescribed[index] if index < len(prescribed) else new[0]
                assert number < len(options), _NOT_THE_SAME
                self.choices.append(number)
                self.options.append([actor.name for actor in options])
                self.known.append(known)
                self._take(options[number])
                # Who changes nothing leaves to others what they had before it, and they to it.
                known = frozenset() if self.taken[-1].changes else known - {options[number].name}
            assert len(self.choices) >= len(prescribed), _NOT_THE_SAME
            self.scenario.at_end({actor.name: actor.finished_as for actor in self._actors})
        except BaseException as error:
            error.add_note(f"in this order: {', '.join(map(str, self.taken))}")
            raise
        finally:
            for actor in self._actors:
                actor.set_free()
            for actor in self._actors:
                actor.join()

    def known_behind(self, index: int) -> set[str]:
        """Return who has taken the step, if others need not let it come behind one of theirs that changes nothing."""
        step = self.taken[index]
        return {step.name} if self.preemptions_max is None and not (step.changes or self.all_orders) else set()

    def _options(self) -> list[Actor]:
        """Return who may take the next step, the one that took the last step first."""
        ready = [actor for actor in self._actors if actor.is_ready]
        while not ready and not all(actor.is_finished for actor in self._actors):
            self._break_deadlock()
            ready = [actor for actor in self._actors if actor.is_ready]
        new = [actor for actor in ready if actor.name in self.scenario.alike and not actor.has_taken_steps]
        ready = [actor for actor in ready if actor not in new[1:]]
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
        text, is_own = actor.next_step, actor.is_before_own_step
        self.scenario.before_step(actor.name)
        actor.let_go()
        has_ended = False
        try:
            self._settle()
            self.waited = self.waited or any(other.waits for other in self._actors)
            has_ended = any([other.take_note_of_end() for other in self._actors])  # noqa: C419 - each is to take note
            if has_ended:
                # SQLite: whoever could not begin may try again.
                for other in self._actors:
                    other.may_try_again()
        finally:
            who_waits = {other.name for other in self._actors if other.waits_empty_handed}
            self.taken.append(_Step(actor.name, text, is_own, actor.may_have_changed, frozenset(who_waits)))
        if has_ended:
            self.scenario.after_step()

    def _settle(self) -> None:
        """Return once every actor stands before its next step, has finished, or waits for a lock of another one."""
        deadline = time.monotonic() + self.timeout_seconds
        ask_after_seconds = _ASK_AFTER_SECONDS
        while running := self._running(ask_after_seconds):
            backends = [actor.backend for actor in self._actors if actor.backend is not None]
            for actor in running:
                actor.waiting = Waiting.NO if actor.backend is None else self.lock_waits(actor.backend, backends)
                if actor.waiting is Waiting.NO:
                    break
            else:
                return
            if time.monotonic() > deadline:
                raise ActorStuckError([actor.name for actor in running])
            ask_after_seconds *= 2

    def _sees_all(self, actor: Actor) -> bool:
        return self.all_orders or any(other is not actor and other.is_before_own_step for other in self._actors)

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


@contextmanager
def _steps_seen() -> Iterator[None]:
    has_listeners = statements.has_listeners
    # What is no actor's is no step: it goes the short way, as statements do that nobody listens to.
    statements.has_listeners = lambda connection: current_actor() is not None and has_listeners(connection)
    were_listened_to = Engine._has_events
    event.listen(Engine, "before_cursor_execute", _before)
    event.listen(Engine, "after_cursor_execute", _after)
    try:
        yield
    finally:
        statements.has_listeners = has_listeners
        event.remove(Engine, "before_cursor_execute", _before)
        event.remove(Engine, "after_cursor_execute", _after)
        # SQLAlchemy leaves it at that, and each statement from then on would ask who listens.
        Engine._has_events = were_listened_to


def _before(connection: Any, cursor: Any, statement: str, *_: object) -> None:
    actor = current_actor()
    if actor is not None:
        actor.reach(statement, connection)


def _after(connection: Any, cursor: Any, statement: str, *_: object) -> None:
    actor = current_actor()
    if actor is not None:
        actor.passed(statement, connection)
