"""Connections to PostgreSQL: given up when the server is silent, and kept for telling readers of commits.

The server itself ends what takes too long, and says so.  If it says nothing either, it was stopped, or something on
the way swallows what is sent and keeps the connection open: no timeout of TCP notices that.  Where a statement may take
for hours, silence says nothing; then somebody asks now and then, by another connection, whether the server is there.

After a commit NOTIFY tells waiting readers, many commits in one.  It is a statement of its own on a connection of its
own, sent by the writer if nothing is under way there, else by a thread: within the appending transaction it would take
a database-wide lock at commit and forbid PREPARE TRANSACTION.

Each partition and group has a channel, which some share.  A notification wakes all sessions of the database that listen
to anything (before PostgreSQL 19), whatever their channels, if only to find that it is not for them: a hundred idle
readers make it twenty times as dear.  So a listener to a channel holds an advisory lock in its name, shared with
the others, and where nobody holds it nobody is notified.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import re
import select
import selectors
import threading
import time
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, TypeVar

import psycopg
from psycopg import generators, pq, sql
from psycopg.adapt import Transformer
from sqlalchemy import Dialect

from txnstore.background_thread import BackgroundThread
from txnstore.db.backend import POLL_FIRST_MS, SUBJECT_BUCKETS, Limits, Subjects
from txnstore.db.statements import HotStatement
from txnstore.db.wake_signal import WakeSignal
from txnstore.errors import StoreUnavailable

_log = logging.getLogger(__name__)

Result = TypeVar("Result")
Connect = Callable[[], "PostgreSQLConnection"]

#: Until a database transaction says how long its statements may take; LISTEN and NOTIFY take no time.
ANSWER_TIMEOUT_MS: Final = 10_000
#: After so long without an answer the server is asked whether it is there, again and again, and has so long to say so.
ASK_SECONDS: Final = 60.0
SAY_SECONDS: Final = 30
#: How long a listener waits for a lock, of a channel or of a table that it reads. A stranger may hold it for hours, and
#: a session whose client has given up would go on waiting.
LOCK_WAIT_MS: Final = 1_000
#: A listener that hears nothing looks by itself after this long: a pooler may have lost its LISTEN.
SILENCE_MS: Final = 2_000
#: One that cannot listen looks at last in these intervals: each look is a database transaction.
LOOK_LAST_MS: Final = 200
#: After the buckets of partitions and groups: the channel of readers that wait for many of them, where all is told,
#: and the one to which every reader listens, for what may concern anybody.
_MANY: Final = 2 * SUBJECT_BUCKETS
_ANYBODY: Final = _MANY + 1
#: A reader that waits for more listens to the channel of all: each is a lock in the server's memory.
_BUCKETS_MAX: Final = 12
#: Where a value stands in a text for psycopg, and a percent sign.
_PLACE: Final = re.compile("%[s%]")
#: Between two notifications an announcer pauses: at first, and at most while there is always something to tell, where
#: somebody listens and where nobody does.  A reader that begins to listen in a long one hears that much later.
_NOTIFY_FIRST_SECONDS: Final = 0.001
_NOTIFY_LAST_SECONDS: Final = 0.008
_UNHEARD_LAST_SECONDS: Final = 0.032
_NOTIFY: Final = (
    "SELECT pg_catalog.pg_notify(pg_catalog.concat({0}::pg_catalog.text, told), '')"
    " FROM pg_catalog.unnest({1}::pg_catalog.int4[]) AS told"
    " WHERE NOT pg_catalog.pg_try_advisory_xact_lock({2}::pg_catalog.int4, told)"
)
#: What comes before a statement that reads by itself, in the same message, which makes one database transaction of all
#: of it.  A plan made for values is never kept, and costs more than what it finds; the key bounds what is read.
_READ_ALONE: Final = (
    "SET TRANSACTION ISOLATION LEVEL READ COMMITTED READ ONLY;"
    f"SET LOCAL lock_timeout = {LOCK_WAIT_MS};"
    "SET LOCAL search_path = pg_catalog, pg_temp;"
    "SET LOCAL plan_cache_mode = force_generic_plan;"
    "SET LOCAL enable_seqscan = off"
)
#: An announcer whose connection failed waits this long before it tries again.
RECONNECT_SECONDS: Final = 0.5
#: And a listener this long: until then it looks by itself, and a server that is full is not asked all the time.
RELISTEN_SECONDS: Final = 5.0

#: Connections of the parent process, neither used nor closed here.
_inherited: Final[list[Any]] = []


class PostgreSQLConnection(psycopg.Connection[Any]):
    """A connection that counts as broken once an answer is overdue."""

    _silence_seconds: float | None = ANSWER_TIMEOUT_MS / 1000
    #: For `HotStatement.run_each`: every database transaction that we begin to write says so.
    reads_nulls_in_arrays: Final = True

    def __init__(self, pgconn: pq.abc.PGconn, *arguments: Any, **options: Any) -> None:
        """Speak through what libpq has connected."""
        super().__init__(pgconn, *arguments, **options)
        self.is_of_standby = pgconn.parameter_status(b"in_hot_standby") == b"on"
        """What the server was then: one that is promoted says so before it has ended what began on the standby."""

    def expect_answers_within(self, limits: Limits) -> None:
        """Give up when the server is silent for longer than a statement of these limits can take."""
        self._silence_seconds = None
        if limits.statement_timeout_ms > 0:
            self._silence_seconds = (limits.statement_timeout_ms + limits.answer_timeout_ms) / 1000

    def call(
        self, statement: str, parameters: Sequence[bytes | None], types: Sequence[int], formats: Sequence[int]
    ) -> bytes | None:
        """Run one statement by itself, which returns one value, and return that as text; the parameters are binary.

        Raises:
            psycopg.Error: it failed, or the connection broke.
        """
        with self.lock:
            self.pgconn.send_query_params(statement.encode(), parameters, types, formats)
            results = self._answers()
        # The server says that the statement is done before it commits: why the COMMIT was refused comes afterwards.
        for result in results:
            if result.status != pq.ExecStatus.TUPLES_OK:
                raise psycopg.errors.error_from_result(result, encoding="utf-8")
        value: bytes | None = results[0].get_value(0, 0)
        return value

    def read_last(self, statements: str) -> list[Any]:
        """Run these statements, one database transaction of their own, and return the rows of the last one.

        Raises:
            psycopg.Error: one failed, or the connection broke.
        """
        with self.lock:
            self.pgconn.send_query(statements.encode())
            result = self._answers()[-1]
        if result.status != pq.ExecStatus.TUPLES_OK:
            raise psycopg.errors.error_from_result(result, encoding="utf-8")
        values = Transformer.from_context(self)
        values.set_pgresult(result)
        return values.load_rows(0, result.ntuples, tuple)

    def run_at_once(self, statements: str) -> list[pq.abc.PGresult]:
        """Run these statements, sent in one message, and return what the server says to each.

        Raises:
            psycopg.Error: one failed, or the connection broke.
        """
        with self.lock:
            self.pgconn.send_query(statements.encode())
            results = self._answers()
        for result in results:
            if result.status == pq.ExecStatus.FATAL_ERROR:
                raise psycopg.errors.error_from_result(result, encoding="utf-8")
        return results

    def refuse_if_ended(self) -> None:
        """Return if the server has said nothing since the last answer: as a rule it has ended what speaks by itself.

        Raises:
            StoreUnavailable: it has; nothing was sent.
        """
        if _has_input(self.pgconn.socket) if self._poll is None else self._poll.poll(0):
            self.pgconn.finish()
            raise StoreUnavailable("the server has ended the connection; nothing was changed")

    @cached_property
    def _poll(self) -> select.poll | None:
        """What waits for input of this connection; None where there is no such thing (Windows)."""
        if not hasattr(select, "poll"):
            return None
        poll = select.poll()
        poll.register(self.pgconn.socket, select.POLLIN)
        return poll

    def _answers(self) -> list[pq.abc.PGresult]:
        """Return what the server says to the statements that were sent.

        It is what `wait` does, without the steps of psycopg, which take twice as long as a small answer itself.
        """
        poll = self._poll
        if poll is None or self.pgconn.flush():
            return self.wait(generators.execute(self.pgconn))
        answers: list[pq.abc.PGresult] = []
        heard = asked = time.monotonic()
        while True:
            # Before each result, also the end of them: what has not come yet is waited for, and all of Python with it.
            while self.pgconn.is_busy():
                if poll.poll(1000 * min(ASK_SECONDS, self._silence_seconds or ASK_SECONDS)):
                    heard = time.monotonic()
                    self.pgconn.consume_input()
                else:
                    asked = self._bear_silence(heard, asked)
            result = self.pgconn.get_result()
            if result is None:
                return answers
            answers.append(result)

    def wait(self, gen: Generator[Any, Any, Result], *arguments: Any, **options: Any) -> Result:
        """Do what psycopg does to send and receive, and look at the clock whenever nothing comes.

        Raises:
            psycopg.OperationalError: the connection is given up.
        """
        return super().wait(self._bounded(gen), *arguments, **options)

    def _bounded(self, steps: Generator[Any, Any, Result]) -> Generator[Any, Any, Result]:
        heard = asked = time.monotonic()
        try:
            wanted = next(steps)
            while True:
                # False at intervals, while the socket is not ready.
                ready = yield wanted
                if ready:
                    heard = time.monotonic()
                else:
                    asked = self._bear_silence(heard, asked)
                wanted = steps.send(ready)
        except StopIteration as end:
            result: Result = end.value
            return result

    def _bear_silence(self, heard: float, asked: float) -> float:
        """Return when the server was last asked whether it is there, `asked` or now, if its answer may still come."""
        now = time.monotonic()
        if self._silence_seconds is None or now - heard < self._silence_seconds:
            if now - max(heard, asked) < ASK_SECONDS:
                return asked
            if self._server_is_there():
                return time.monotonic()
        self.pgconn.finish()
        raise psycopg.OperationalError("the server did not answer in time")

    def _server_is_there(self) -> bool:
        """Return whether the server takes another connection, or says why not; one that was stopped says nothing.

        A pooler on the way takes it by itself. It is not asked for more: one that has no session left is silent, too,
        and a statement would be given up that is well on its way.
        """
        parameters: dict[str, Any] = self.info.get_parameters() | {"connect_timeout": str(SAY_SECONDS)}
        if self.info.password:
            parameters["password"] = self.info.password
        try:
            psycopg.connect(**parameters).close()
        except psycopg.errors.ConnectionTimeout:
            return _has_input(self.pgconn.socket)
        except psycopg.Error:
            # Also where it went away: then this connection breaks by itself.
            return True
        return True


def _has_input(descriptor: int) -> bool:
    """Return whether something has come, or the other side has closed."""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(0))


class _Channels:
    """The channels of one store."""

    def __init__(self, name: str) -> None:
        """Begin the names of all of them with `name`."""
        self.prefix = f"{name}_"
        self.lock_class = zlib.crc32(name.encode()) - 2**31
        """The first number of the locks; the second one is the channel's."""

    def are_of(self, store_uuid: str) -> bool:
        """Return whether they are those of the store with this uuid."""
        return self.prefix == f"txnstore_{store_uuid.replace('-', '')}_"

    @staticmethod
    def heard(subjects: Subjects) -> frozenset[int]:
        """Return the channels to which a reader listens."""
        if subjects.is_everything:
            return frozenset((_MANY, _ANYBODY))
        buckets = subjects.buckets()
        return (buckets if len(buckets) <= _BUCKETS_MAX else frozenset((_MANY,))) | {_ANYBODY}

    @staticmethod
    def told(subjects: Subjects) -> frozenset[int]:
        """Return the channels on which a commit is told."""
        return frozenset((_ANYBODY,)) if subjects.is_everything else subjects.buckets() | {_MANY}

    def statement(self, leave: frozenset[int], enter: frozenset[int]) -> sql.Composed:
        """Return the statements by which a session leaves some channels and enters others."""
        lock = "SELECT pg_catalog.pg_advisory_lock_shared({}, {})"
        unlock = "SELECT pg_catalog.pg_advisory_unlock_shared({}, {})"
        steps = [*((unlock, "UNLISTEN {}", channel) for channel in sorted(leave))]
        steps += [(lock, "LISTEN {}", channel) for channel in sorted(enter)]
        parts = [sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(LOCK_WAIT_MS))]
        for locking, listening, channel in steps:
            parts.append(sql.SQL(locking).format(sql.Literal(self.lock_class), sql.Literal(channel)))
            parts.append(sql.SQL(listening).format(sql.Identifier(f"{self.prefix}{channel}")))
        return sql.SQL("; ").join(parts)


class ListenWaiter:
    """Waits for a notification; without a connection that can listen it looks again and again instead."""

    def __init__(self, connect: Connect, channel: str, subjects: Subjects, dialect: Dialect) -> None:
        """Listen from now on, on those of the channels of this name that concern the subjects."""
        self._connect = connect
        self._dialect = dialect
        self._prepared: set[str] = set()
        self._may_read: bool | None = None
        """Whether to read on the connection; None: it has yet to be asked to which store it leads."""
        self._newest_producer_id = 0
        self._is_notified = False
        self._channels = _Channels(channel)
        self._subjects = subjects
        self._heard: frozenset[int] = frozenset()
        self._pause_ms = float(POLL_FIRST_MS)
        self._connection: PostgreSQLConnection | None = None
        self._process_id = os.getpid()
        self._signal = WakeSignal()
        self._listen()

    def listen(self, subjects: Subjects) -> bool:
        """Wait for commits about these from now on; return whether they are others than before."""
        if subjects == self._subjects:
            return False
        self._subjects = subjects
        wanted = self._channels.heard(subjects)
        if self._connection is not None and wanted != self._heard and self._process_id == os.getpid():
            try:
                self._connection.execute(self._channels.statement(self._heard - wanted, wanted - self._heard))
            except psycopg.Error:
                self._close_connection()
                self._listen()
            else:
                self._heard = wanted
        return True

    def wait(self, timeout_ms: int) -> bool:
        """Return True when notified, or when it is time to look anyway; False after `timeout_ms`."""
        if self._process_id != os.getpid():
            self._forget_connection_after_fork()
        if self._connection is None:
            return self._pause(timeout_ms)
        try:
            if self._is_woken(self._connection, min(timeout_ms, SILENCE_MS)):
                return True
        except psycopg.Error:
            self._close_connection()
            self._listen()
            return True
        return timeout_ms > SILENCE_MS

    def rows(self, statement: HotStatement, parameters: Mapping[str, int]) -> list[Any] | None:
        """Run a statement that reads on the connection that listens; None if that cannot be."""
        if self._connection is None or self._may_read is False or self._process_id != os.getpid():
            return None
        rendered = statement.rendered(self._dialect, parameters)
        if rendered is None:
            return None
        values = rendered.values_from(parameters, self._dialect)
        assert set(map(type, values)) == {int}, "a value that is no integer"
        try:
            if self._may_read is None:
                self._may_read = self._leads_to_same_store(self._connection)
            if not self._may_read:
                return None
            name = self._prepare(self._connection, rendered.text)
            values_text = ", ".join(map(str, values))
            return rendered.named(self._connection.read_last(f"{_READ_ALONE};EXECUTE {name}({values_text})"))
        except psycopg.errors.LockNotAvailable:
            # Later it may be.
            return None
        except psycopg.Error as error:
            # The session is another one, behind a pooler, or a table was changed.
            _log.debug("cannot read on the connection that listens (%s)", error.sqlstate)
            self._may_read = False
            return None

    def _leads_to_same_store(self, connection: PostgreSQLConnection) -> bool:
        """Return whether no other store, and no older state of this one, has taken its place since the last connection.

        If one has, `Store.read` says so, which looks at each new connection of its own.
        """
        table = sql.Identifier(getattr(self._dialect, "store_schema", ""), "stores").as_string(connection)
        for store_uuid, next_producer_id in connection.read_last(
            f"{_READ_ALONE};SELECT store_uuid, next_producer_id FROM {table}"  # noqa: S608 - a quoted name
        ):
            if self._channels.are_of(str(store_uuid)) and next_producer_id >= self._newest_producer_id:
                self._newest_producer_id = next_producer_id
                return True
        return False

    def _prepare(self, connection: psycopg.Connection[Any], text: str) -> str:
        """Return the name of the prepared statement of this text.

        No other text has the name: behind a pooler the session may be one of another program tomorrow.
        """
        name = f"txnstore_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
        if name not in self._prepared:
            numbers = itertools.count(1)
            numbered = _PLACE.sub(lambda place: "%" if place[0] == "%%" else f"${next(numbers)}", text)
            with contextlib.suppress(psycopg.errors.DuplicatePreparedStatement):
                connection.execute(f"{_READ_ALONE};PREPARE {name} AS {numbered}".encode())
            self._prepared.add(name)
        return name

    def wake(self) -> None:
        """Let the wait that is under way, or else the next one, return True at once."""
        self._signal.set()

    def close(self) -> None:
        """Close the connection, and what wakes it."""
        self._close_connection()
        self._signal.close()

    def _close_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._signal.watch(-1)
            connection.close()

    def _is_woken(self, connection: psycopg.Connection[Any], timeout_ms: int) -> bool:
        """Wait for a notification or a `wake`; psycopg's own `notifies` would keep the processor busier."""
        pgconn = connection.pgconn
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            is_notified, self._is_notified = self._is_notified, False
            if pgconn.notifies() is not None:
                is_notified = True
                # Those that came with it say the same.
                while pgconn.notifies() is not None:
                    pass
            if is_notified:
                return True
            if not self._signal.wait(max(0.0, deadline - time.monotonic())):
                return False
            if self._signal.take():
                return True
            pgconn.consume_input()

    def _pause(self, timeout_ms: int) -> bool:
        pause_ms = min(self._pause_ms, timeout_ms)
        if self._signal.wait(pause_ms / 1000):
            return self._signal.take()
        self._pause_ms = min(self._pause_ms * 1.5, LOOK_LAST_MS)
        if time.monotonic() >= self._listen_again:
            self._listen()
        return pause_ms < timeout_ms

    def _listen(self) -> None:
        self._listen_again = time.monotonic() + RELISTEN_SECONDS
        self._heard = self._channels.heard(self._subjects)
        try:
            self._connection = self._connect()
            # psycopg takes those that come with an answer.
            self._connection.add_notify_handler(self._note)
            self._connection.execute(self._channels.statement(frozenset(), self._heard))
            self._signal.watch(self._connection.pgconn.socket)
        except psycopg.Error:
            _log.debug("cannot listen for appended records; looking for them at intervals instead")
            self._close_connection()
        else:
            self._pause_ms = float(POLL_FIRST_MS)
            self._prepared, self._may_read = set(), None

    def _note(self, _: object) -> None:
        self._is_notified = True

    def _forget_connection_after_fork(self) -> None:
        # It is the parent's: used by both, each would get half of the answers.
        _inherited.append((self._connection, self._signal))
        self._signal = WakeSignal()
        self._connection = None
        self._process_id = os.getpid()
        self._listen()


class NotifyAnnouncer:
    """Sends notifications, for whose answers no writer waits.

    A writer sends one itself, right after its commit, where nothing is under way: that is one write to a socket. What
    comes sooner than the last one is answered, or comes all the time, is collected and sent by a thread.
    """

    def __init__(self, connect: Connect, channel: str) -> None:
        """Notify on the channels of this name; nothing is opened before the first announcement."""
        self._connect = connect
        self._channels = _Channels(channel)
        self._told: set[int] = set()
        self._asked: set[int] = set()
        """What the statement tells whose answer has not been taken yet."""
        self._results: list[pq.abc.PGresult] = []
        """What has come of that answer."""
        self._connection: PostgreSQLConnection | None = None
        self._is_free = False
        """Whether a writer may send: the thread waits, and does not use the connection."""
        self._has_told = False
        """Whether a statement has succeeded on the connection."""
        self._sends_again_at = 0.0
        self._due = threading.Event()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread = BackgroundThread("txnstore-announcer")

    def announce(self, subjects: Subjects) -> None:
        """Say that something was committed; announcements that meet before they are sent become one."""
        with self._lock:
            self._told |= self._channels.told(subjects)
            if self._is_free and time.monotonic() >= self._sends_again_at and self._sends_at_once():
                return
        self._due.set()
        if not self._thread.is_started:
            # Where no thread can be started, as while the interpreter ends, only a hint is lost.
            with self._lock, contextlib.suppress(RuntimeError):
                if not self._closing.is_set():
                    self._thread.start(self._run)

    def close(self, timeout_seconds: float) -> None:
        """Send what is due, then end the thread and its connection; one that takes longer ends by itself."""
        with self._lock:
            self._closing.set()
        self._due.set()
        self._thread.close(timeout_seconds)

    def _sends_at_once(self) -> bool:
        """Send what is to be told, without waiting for anything; False: it is for the thread. The lock is held."""
        assert self._connection is not None
        pgconn = self._connection.pgconn
        try:
            if self._asked:
                pgconn.consume_input()
                # Asked before each result, because what has not come yet is waited for, and all of Python with it.
                while not pgconn.is_busy():
                    result = pgconn.get_result()
                    if result is None:
                        self._take_answer([])
                        break
                    self._results.append(result)
                else:
                    return False
            self._send(self._connection)
        except psycopg.Error:
            return False
        self._sends_again_at = time.monotonic() + _NOTIFY_FIRST_SECONDS
        return True

    def _send(self, connection: psycopg.Connection[Any]) -> None:
        """Send a notification of all that is to be told; the lock is held, and no answer is under way."""
        self._asked, self._told = self._told, set()
        channels = ",".join(map(str, sorted(self._asked)))
        # Nothing of it can be mistaken for the end of a text: the store's channel, and numbers.
        values = f"'{self._channels.prefix}'", f"'{{{channels}}}'", str(self._channels.lock_class)
        connection.pgconn.send_query(_NOTIFY.format(*values).encode())
        connection.pgconn.flush()

    def _take_answer(self, results: Sequence[pq.abc.PGresult]) -> bool:
        """Return whether somebody was notified, given what has come since `_results`; the lock is held."""
        results, self._results = [*self._results, *results], []
        if any(result.status == pq.ExecStatus.FATAL_ERROR for result in results):
            self._told, self._asked = self._told | self._asked, set()
            raise psycopg.OperationalError("nobody was notified")
        self._asked, self._has_told = set(), True
        return any(result.ntuples > 0 for result in results)

    def _run(self) -> None:
        pause_seconds = _NOTIFY_FIRST_SECONDS
        while True:
            self._due.wait()
            with self._lock:
                self._is_free = False
                self._due.clear()
            self._closing.wait(max(0.0, self._sends_again_at - time.monotonic()))
            longest_seconds = _NOTIFY_LAST_SECONDS
            try:
                if not self._tell_all():
                    longest_seconds = _UNHEARD_LAST_SECONDS
            except psycopg.Error:
                # Where the connection has broken it is told once more, on another one. After that only a hint is lost;
                # readers look by themselves after a while.
                pause_seconds = _NOTIFY_FIRST_SECONDS if self._has_told else RECONNECT_SECONDS
                self._forget_connection()
            self._closing.wait(pause_seconds)
            if self._closing.is_set():
                if not self._told:
                    break
                continue
            with self._lock:
                is_busy = self._due.is_set()
                self._is_free = not is_busy and self._connection is not None
            pause_seconds = min(2 * pause_seconds, longest_seconds) if is_busy else _NOTIFY_FIRST_SECONDS
        self._forget_connection()

    def _tell_all(self) -> bool:
        """Tell what is to be told, and wait for the answer; return whether somebody heard the last of it."""
        connection = self._connection
        if connection is None:
            connection = self._connection = self._connect()
        is_heard, has_sent = True, False
        while self._asked or not has_sent:
            with self._lock:
                if not self._asked:
                    if not self._told:
                        break
                    self._send(connection)
                    has_sent = True
            results = connection.wait(generators.execute(connection.pgconn))
            with self._lock:
                is_heard = self._take_answer(results)
        return is_heard

    def _forget_connection(self) -> None:
        """Close the connection; what could not be told is to be told again if it could before, and lost otherwise."""
        with self._lock:
            connection, self._connection = self._connection, None
            self._told = self._told | self._asked if self._has_told else set()
            self._asked, self._results, self._has_told = set(), [], False
            if self._told:
                self._due.set()
        if connection is not None:
            connection.close()
