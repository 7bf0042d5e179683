"""Changes of ORM objects that become records: seen at each flush, inserted on the session's connection."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from sqlalchemy import event, inspect
from sqlalchemy.exc import InvalidRequestError, NoInspectionAvailable

from txnstore.clients.model.errors import kafka_exception_of
from txnstore.errors import InvalidTopic
from txnstore.log.topics import check_topic_name

if TYPE_CHECKING:
    from sqlalchemy.orm import InstanceState, Session, UOWTransaction

#: What a flush says of an object: whether it is to be deleted, and whether the flush does nothing by itself for it.
_WRITTEN: Final = (False, False)
_DELETED: Final = (True, False)

#: The watches that are not stopped, the oldest first, by their ids.
_watching: Final = weakref.WeakValueDictionary[int, "Watch"]()


class ChangeKind(enum.StrEnum):
    """What a flush does to an object."""

    INSERT = "insert"
    UPDATE = "update"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Change:
    """What a flush did to an object."""

    kind: ChangeKind
    attributes: frozenset[str]
    """The names of the attributes that it changed, relationships too; of a deleted object there are no names."""


class TakesRecords(Protocol):
    """An outbox, as far as a watch has to do with it."""

    def produce_all(self, connection: Any, records: Iterable[Mapping[str, Any]]) -> int:
        """Insert several records."""
        ...


class Watch:
    """Objects of one model becoming records, until `stop`.

    Once the outbox is closed a flush that would make a record is refused, until `stop`, or until a watch of another
    outbox that began later takes over: of the same model, for the same topic and the same sessions.
    """

    def __init__(
        self,
        outbox: TakesRecords,
        model: type,
        topic: str,
        *,
        key: Callable[[Any], Any] | None,
        value: Callable[[Any, Change], Any],
        headers: Callable[[Any, Change], Any] | None,
        when: Callable[[Any, Change], bool] | None,
        sessions: Any,
    ) -> None:
        """Use `Outbox.watch` instead."""
        from sqlalchemy.orm import Mapper, Session  # slow to import, and only needed with mapped classes

        mapper: Any
        try:
            mapper = inspect(model)
        except NoInspectionAvailable:
            mapper = None
        if not isinstance(mapper, Mapper):
            raise TypeError(f"{model!r} is not a mapped class of SQLAlchemy's ORM")
        try:
            check_topic_name(topic)
        except InvalidTopic as error:
            raise kafka_exception_of(error) from error
        for name, function in (("key", key), ("value", value), ("headers", headers), ("when", when)):
            if not callable(function) and (function is not None or name == "value"):
                raise TypeError(f"{name} must be a function, not {type(function).__name__}")
        self.outbox = outbox
        self._model = model
        self._topic = topic
        self._key = key
        self._value = value
        self._headers = headers
        self._when = when
        self._sessions = Session if sessions is None else sessions
        self.what: Final = (model, topic, id(self._sessions))
        """What it makes records of, for whom, and of whose changes."""

        self._is_stopped = self.is_refusing = self._has_taken_over = False
        #: By session that flushes: the attributes that no object to be written had changed, just before it was.
        self._unchanged: Final = weakref.WeakKeyDictionary[Session, dict[Any, set[str]]]()
        before_writing = weakref.WeakMethod(self._before_writing)

        def note(mapper: object, connection: object, state: InstanceState[Any]) -> None:
            # A class outlives its sessions, and would keep all that ever watched one, with their outboxes.
            if (noting := before_writing()) is not None:
                noting(mapper, connection, state)

        self._listeners: Final[list[tuple[Any, str, Any]]] = [
            (self._sessions, "after_flush", self._after_flush),
            (self._sessions, "before_flush", self._before_flush),
            (model, "before_insert", note),
            (model, "before_update", note),
        ]
        try:
            for target, name, listener in self._listeners:
                event.listen(target, name, listener, **({"raw": True, "propagate": True} if target is model else {}))
        except InvalidRequestError:
            raise TypeError(
                "sessions must be a Session class, a sessionmaker or a session (of asynchronous ones: the class that"
                f" they have as sync_session_class), not {type(sessions).__name__}"
            ) from None
        _watching[id(self)] = self
        self.take_over()

    def stop(self) -> None:
        """Stop making records of changes, and let them be committed without; a second call does nothing."""
        if not self._is_stopped:
            self._is_stopped = True
            _watching.pop(id(self), None)
            for target, name, listener in self._listeners:
                event.remove(target, name, listener)

    def refuse(self) -> None:
        """Let no change be flushed from now on that would have to become a record: the outbox is closed.

        Not if somebody watches the same by now: that one takes over.
        """
        if self._is_stopped:
            return
        self.is_refusing = True
        watching = _all_watching()
        for later in watching[watching.index(self) + 1 :]:
            # Those of the same outbox are closed together.
            if later.outbox is not self.outbox:
                later.take_over()

    def take_over(self) -> None:
        """Stop one earlier watch of a closed outbox whose records this one makes; one for one."""
        if self._has_taken_over or self.is_refusing:
            return
        for other in _all_watching():
            if other is self:
                return
            if other.is_refusing and other.what == self.what:
                self._has_taken_over = True
                other.stop()
                return

    def _before_flush(self, session: Session, _flush: UOWTransaction, _objects: object) -> None:
        self._unchanged[session] = {}

    def _before_writing(self, _mapper: object, _connection: object, state: InstanceState[Any]) -> None:
        # The session may be one of those that are not watched.
        if state.session is not None and (unchanged := self._unchanged.get(state.session)) is not None:
            unchanged[state] = state.unmodified

    def _after_flush(self, session: Session, flush: UOWTransaction) -> None:
        connections: dict[Any, list[dict[str, Any]]] = {}
        for found, change in self._changes(session, flush, self._unchanged.pop(session, {})):
            if self._when is None or self._when(found, change):
                if self.is_refusing:
                    raise RuntimeError(
                        f"the outbox that makes records of {self._model.__name__} for the topic {self._topic!r} has"
                        f" been closed, and this {change.kind} is not committed without its record: close the outbox"
                        " after the last commit, or call stop() on its watch to go on without records"
                    )
                # Several engines may serve one session: the record goes where the object's row went.
                connection = session.connection(bind_arguments={"mapper": inspect(found).mapper})
                connections.setdefault(connection, []).append(self._record(found, change))
        for connection, records in connections.items():
            self.outbox.produce_all(connection, records)

    def _changes(
        self, session: Session, flush: UOWTransaction, unchanged: dict[Any, set[str]]
    ) -> Iterator[tuple[Any, Change]]:
        """Yield what the flush has done: inserts in the order of `session.add`, then updates, then deletions.

        The session says what was to be done, the flush what was: it may have been one of a few objects, it deletes
        orphans too, and the row of a deleted object stays where another one has been added in its place.
        """
        for found in sorted(self._written(session.new, flush), key=_insert_order):
            yield found, Change(ChangeKind.INSERT, _changed(found) | _forgotten(found, unchanged))
        for found in self._written(session.dirty, flush):
            forgotten = _forgotten(found, unchanged)
            if forgotten or session.is_modified(found):
                yield found, Change(ChangeKind.UPDATE, _changed(found) | forgotten)
        # As far as somebody has asked for them, in that order.
        for state in dict.fromkeys([*map(inspect, session.deleted), *flush.states]):
            if flush.states.get(state) == _DELETED and isinstance(found := state.obj(), self._model):
                yield found, Change(ChangeKind.DELETE, frozenset())

    def _written(self, objects: Any, flush: UOWTransaction) -> list[Any]:
        return [
            found
            for found in objects
            if isinstance(found, self._model) and flush.states.get(inspect(found)) == _WRITTEN
        ]

    def _record(self, found: Any, change: Change) -> dict[str, Any]:
        return {
            "topic": self._topic,
            "key": None if self._key is None else self._key(found),
            "value": self._value(found, change),
            "headers": None if self._headers is None else self._headers(found, change),
        }


def _all_watching() -> list[Watch]:
    return [watch for reference in _watching.valuerefs() if (watch := reference()) is not None]


def _insert_order(found: Any) -> int:
    order: int = getattr(inspect(found), "insert_order", 0)
    return order


def _changed(found: Any) -> frozenset[str]:
    return frozenset(attribute.key for attribute in inspect(found).attrs if attribute.history.has_changes())


def _forgotten(found: Any, unchanged: dict[Any, set[str]]) -> set[str]:
    """Return the names of attributes that the flush has written and has forgotten the change of.

    Where a value was an SQL expression, say, only the database knows what it is now.  What is changed without being
    written, as it is set back to what it was, is still remembered.
    """
    state = inspect(found)
    before = unchanged.get(state)
    return set() if before is None else state.unmodified - before
