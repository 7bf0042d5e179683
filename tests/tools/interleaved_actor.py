"""This file is one actor of an interleaving: a thread that stands still before each of its steps until it is let go."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

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
        if statement in ("COMMIT", "ROLLBACK"):
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
