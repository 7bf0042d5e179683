"""Statements sent on connections of others, on several at once, and answers waited for until a deadline.

They go past psycopg's own idea of transactions, straight to libpq, and one thread waits for all of the answers:

    answers = exchange([Statement(driver, "ROLLBACK", "ROLLBACK") for driver in drivers], 30.0)
"""

from __future__ import annotations

import enum
import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, starmap
from operator import methodcaller
from typing import Any, Final

import psycopg
from psycopg.pq import DiagnosticField, ExecStatus

from txnstore.db.postgresql.backend import DATA_EXCEPTION, may_have_committed

#: How often a wait looks at its deadline even if nothing comes.
_LOOK_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement to send on one connection."""

    driver: psycopg.Connection[Any]
    text: str
    tag: str
    """What the server says when it has done (the last of) it."""


class AnswerKind(enum.Enum):
    """What an answer says."""

    DONE = "done"

    REFUSED = "refused"
    """The server has not done it."""

    UNKNOWN = "unknown"
    """It may have been done: the answer did not come, or says that the server went away."""


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """What became of a statement."""

    kind: AnswerKind
    sqlstate: str | None = None
    detail: str = ""
    """The server's primary line, or what happened to the connection; holds no values."""

    @property
    def told(self) -> str:
        """Both, for people."""
        return f"{self.sqlstate}: {self.detail}" if self.sqlstate else self.detail


def exchange(statements: Sequence[Statement], timeout_seconds: float) -> list[ServerAnswer]:
    """Send each statement on its connection and return the answers, in order, when all have come or time is up.

    A connection whose answer did not come is closed, after an interrupt too: nobody knows what it would say next.
    """
    deadline = time.monotonic() + timeout_seconds
    conversations = [_Conversation(statement) for statement in statements]
    locked: list[Any] = []
    # In one call of C, as they are taken: Ctrl-C leaves no lock behind, for which its connection's owner would wait.
    unlock: Callable[[], object] = partial(deque, map(methodcaller("release"), locked), 0)
    with selectors.DefaultSelector() as selector:
        try:
            for conversation in conversations:
                if conversation.lock(deadline, locked):
                    conversation.send()
                if conversation.answer is None:
                    selector.register(conversation.socket, conversation.events, conversation)
            while selector.get_map():
                left_seconds = deadline - time.monotonic()
                for key, events in selector.select(max(0.0, min(left_seconds, _LOOK_SECONDS))):
                    _go_on(selector, key, events)
                if left_seconds <= 0:
                    break
        finally:
            try:
                for conversation in conversations:
                    conversation.close_if_unanswered()
            finally:
                unlock()
    return [conversation.answer for conversation in conversations if conversation.answer is not None]


def _go_on(selector: selectors.BaseSelector, key: selectors.SelectorKey, events: int) -> None:
    conversation: _Conversation = key.data
    conversation.go_on(events)
    if conversation.answer is not None:
        selector.unregister(key.fileobj)
    elif conversation.events != key.events:
        selector.modify(key.fileobj, conversation.events, conversation)


class _Conversation:
    """One statement on one connection, from sending to the last of its results."""

    def __init__(self, statement: Statement) -> None:
        self._statement = statement
        self._driver = statement.driver
        self._pgconn = statement.driver.pgconn
        self._refusal: ServerAnswer | None = None
        self._tag = ""
        self.answer: ServerAnswer | None = None
        #: What it waits for, and where; the socket of a closed connection cannot be asked for any more.
        self.events = selectors.EVENT_READ | selectors.EVENT_WRITE
        self.socket = -1

    def lock(self, deadline: float, locked: list[Any]) -> bool:
        """Keep other threads off the connection, and note its lock; False, and an answer, if one does not leave it."""
        lock, before = self._driver.lock, len(locked)
        timeout_seconds = max(0.0, deadline - time.monotonic())
        locked.extend(compress([lock], starmap(lock.acquire, [(True, timeout_seconds)])))
        if len(locked) == before:
            self.answer = ServerAnswer(AnswerKind.REFUSED, None, "another thread is using the connection")
            return False
        return True

    def send(self) -> None:
        """Begin to send."""
        if self._driver.closed:
            self.answer = ServerAnswer(AnswerKind.REFUSED, None, "the connection was closed before")
            return
        self.socket = self._pgconn.socket
        try:
            self._pgconn.send_query(self._statement.text.encode())
        except psycopg.Error:
            # Some of it may have been sent.
            self._give_up("the connection broke")

    def go_on(self, events: int) -> None:
        """Send more of it, or take what has come."""
        try:
            if events & selectors.EVENT_WRITE and not self._pgconn.flush():
                self.events = selectors.EVENT_READ
            if events & selectors.EVENT_READ:
                self._read()
        except psycopg.Error:
            self._give_up("the connection broke")

    def close_if_unanswered(self) -> None:
        """Close the connection if nobody waits for its answer any more; one that was not sent on is its owner's."""
        if self.answer is None and self.socket != -1:
            self._give_up("no answer came in time")

    def _give_up(self, detail: str) -> None:
        self.answer = ServerAnswer(AnswerKind.UNKNOWN, None, detail)
        self._pgconn.finish()

    def _read(self) -> None:
        self._pgconn.consume_input()
        while self.answer is None and not self._pgconn.is_busy():
            result = self._pgconn.get_result()
            if result is None:
                self._conclude()
            else:
                self._take(result)

    def _take(self, result: Any) -> None:
        if result.status in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
            self._tag = (result.command_status or b"").decode()
            return
        state = result.error_field(DiagnosticField.SQLSTATE)
        if state is None:
            # libpq's own words: the connection is gone.
            self._give_up("the connection broke")
            return
        sqlstate = state.decode()
        told = (result.error_field(DiagnosticField.MESSAGE_PRIMARY) or b"").decode(errors="replace")
        if sqlstate.startswith(DATA_EXCEPTION):
            told = "a value is not in the form that was expected"
        severity = (result.error_field(DiagnosticField.SEVERITY_NONLOCALIZED) or b"").decode()
        kind = AnswerKind.UNKNOWN if may_have_committed(sqlstate, severity) else AnswerKind.REFUSED
        self._refusal = ServerAnswer(kind, sqlstate, told)

    def _conclude(self) -> None:
        if self._refusal is not None:
            self.answer = self._refusal
        elif self._tag == self._statement.tag:
            self.answer = ServerAnswer(AnswerKind.DONE)
        else:
            # PREPARE TRANSACTION of a failed database transaction is answered ROLLBACK, without an error.
            self.answer = ServerAnswer(AnswerKind.REFUSED, None, f"the server answered {self._tag or 'nothing'}")
