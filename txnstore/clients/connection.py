"""A client's way to its databases: opened at the first use, never before, and by one thread only.

So a client can be made before a fork and while a database is away.  librdkafka connects by itself and says at once
that all brokers are down.  Here nobody connects before there is something to ask; so a client with an `error_cb` that
has nothing to ask looks now and then, while its program polls.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from sqlalchemy import Connection, select

from txnstore.backoff import Backoff
from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.upkeep import Upkeep
from txnstore.db.backend import Durability, Limits
from txnstore.db.cluster.cluster import Cluster, open_cluster
from txnstore.db.store import Store
from txnstore.db.url import CurrentOptions, DatabaseUrl
from txnstore.deadline import Deadline
from txnstore.errors import OutcomeUnknown, StoreBusy, StoreClosed, StoreUnavailable, TxnStoreError, WriteConflict

if TYPE_CHECKING:
    from txnstore.clients.configuration.configuration import Configuration

_POOL_SIZE: Final = 5
#: Readers are told of the last commits; that is only a hint, and not worth a long wait for a database that hangs.
ANNOUNCE_TIMEOUT_SECONDS: Final = 0.5
#: A store that has been closed is noticed after this long at most.
_TRY_SECONDS: Final = 1.0
#: Between two tries of a change whose outcome is not known: at first, and at most.
_PAUSE_FIRST_SECONDS: Final = 0.05
_PAUSE_LAST_SECONDS: Final = 0.5
_AGAIN: Final = (OutcomeUnknown, StoreBusy, StoreUnavailable, WriteConflict)

Result = TypeVar("Result")


class OfOneProcess:
    """What every client is: of the process that made it, whose connections and threads no copy could have."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"cannot pickle or copy {name!r} object: make a client of its own in each process")


class StoreConnection:
    """The cluster of one client, mostly of one database; safe to share between its threads."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        limits: Limits | None = None,
        current_options: CurrentOptions | None = None,
    ) -> None:
        """Keep what it takes to open the databases, with these limits; nothing is opened yet.

        `current_options` are what each connection to the controller is given besides its URL.
        """
        self._configuration = configuration
        self._current_options = current_options
        self._limits = replace(
            limits or Limits(),
            durability=Durability(configuration["txnstore.durability"]),
            on_unavailable=self._noticed,
        )
        self._trouble: StoreUnavailable | None = None
        self._trouble_seconds = -math.inf
        self.on_unavailable: Callable[[StoreUnavailable], None] | None = None
        """Hears of each try for which a database was away; on the thread that tries."""
        self._opening = threading.Lock()
        self._state = threading.Lock()
        self._cluster: Cluster | None = None
        self._closed = False
        self._gives_up = False
        self.process_id = os.getpid()
        """The process that may use it."""
        self.is_inherited = False
        """Whether this is a child of that process: asked so often that the system is not."""
        self.on_inherited: Callable[[], object] | None = None
        """Called in such a child, of one thread."""
        self.upkeep = Upkeep(configuration, lambda: self._cluster)
        """The client's part in the maintenance of the databases that are open."""
        _of_this_process.add(self)

    def __repr__(self) -> str:
        """Return the address without its password."""
        return f"StoreConnection({str(self._configuration.url)!r})"

    @property
    def url(self) -> DatabaseUrl:
        """The address of the controller, as it was configured."""
        return self._configuration.url

    @property
    def opened(self) -> Cluster | None:
        """The cluster if it has been opened and not closed; asks no database."""
        return self._cluster

    @property
    def is_alone(self) -> bool:
        """Whether one database is all there is, as far as anybody has looked; asks no database."""
        cluster = self._cluster
        return cluster is None or cluster.is_alone

    def trouble_since(self, seconds: float) -> StoreUnavailable | None:
        """Return why a database could not be reached, if one could not since this moment of the monotonic clock."""
        return self._trouble if self._trouble_seconds >= seconds else None

    def give_up(self) -> None:
        """Wait for no database that is away any more: the client is being closed. What can be done is done."""
        self._gives_up = True

    def _noticed(self, error: StoreUnavailable) -> None:
        self._trouble, self._trouble_seconds = error, time.monotonic()
        if self._gives_up:
            raise self._closed_error()
        if self.on_unavailable is not None:
            self.on_unavailable(error)

    def store(self) -> Store:
        """Return the controller: the store of a cluster of one; see `cluster`."""
        return self.cluster().controller

    def cluster(self) -> Cluster:
        """Return the cluster, opened by the first call that succeeds; others wait for the one that is opening it.

        Raises:
            StoreClosed: the connection has been closed.
            TxnStoreError: the controller cannot be reached or refuses; the next call tries again.
            KafkaException: `_STATE`: this is another process than the client's.
        """
        cluster = self._cluster
        if cluster is not None and self.process_id == os.getpid():
            return cluster
        self.check_process()
        with self._opening:
            cluster = self._cluster
            if cluster is not None:
                return cluster
            self._refuse_if_closed()
            cluster = open_cluster(
                self._configuration["bootstrap.servers"],
                schema=self._configuration["txnstore.schema"],
                clock=self._configuration["txnstore.clock"],
                limits=self._limits,
                pool_size=_POOL_SIZE,
                current_options=self._current_options,
            )
            with self._state:
                if not self._closed:
                    self._cluster = cluster
                    return cluster
            cluster.close()
            raise self._closed_error()

    @property
    def is_lifeless(self) -> bool:
        """Whether none of its threads runs here, and one may hold a lock for ever: in a child, or as Python ends."""
        return self.is_inherited or sys.is_finalizing()

    def check_process(self) -> None:
        """Refuse to be used in another process than the client's, and while the interpreter ends.

        Raises:
            KafkaException: `_STATE`: the process was forked after the client had been made, or its interpreter ends.
        """
        if sys.is_finalizing():
            raise KafkaException(
                KafkaError(
                    KafkaError._STATE,
                    "the interpreter is shutting down, and its threads with it: a client can now only be closed; use it"
                    " earlier, in an atexit function at the latest",
                )
            )
        if self.process_id != os.getpid():
            raise KafkaException(
                KafkaError(
                    KafkaError._STATE,
                    f"this client was made in process {self.process_id} and cannot be used in its child"
                    f" {os.getpid()}: make a new client in each process",
                )
            )

    def close(self, timeout_seconds: float = ANNOUNCE_TIMEOUT_SECONDS) -> None:
        """Close the databases; a second call does nothing.

        Readers are told of the last commits before, if that takes less than `timeout_seconds` and half a second.  Who
        has more than that to spare does a moment's work for the maintenance.  An opening that is under way is not
        waited for: it closes what it opens.  In a forked child, where it is the parent's, and while the interpreter
        ends the store is only forgotten.
        """
        if self.is_lifeless:
            self._closed, self._cluster = True, None
            return
        if timeout_seconds > ANNOUNCE_TIMEOUT_SECONDS and not self._gives_up:
            self.upkeep.part()
        self.upkeep.stop()
        with self._state:
            self._closed = True
            cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close(timeout_seconds=max(0.0, min(timeout_seconds, ANNOUNCE_TIMEOUT_SECONDS)))

    def leave_to(self, do_last: Callable[[Callable[[], None]], bool]) -> bool:
        """Have this closed by a thread of a client that nobody closes, after a last turn in the maintenance.

        Returns False where no such turn is due, or `do_last` says that the thread does nothing any more: then it is
        for the caller to close this.
        """
        turn = None if self._gives_up or self.is_lifeless else self.upkeep.last_turn()
        if turn is None:
            return False

        def end() -> None:
            try:
                turn()
            finally:
                self.close()

        if not do_last(end):
            self.upkeep.leave_to_others()
            return False
        return True

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> StoreClosed:
        return StoreClosed(f"the client's connection to {self._configuration.url} has been closed")


#: A client that is polled looks for its database at most this often.
LOOK_SECONDS: Final = 1.0
#: What was heard of a database so long before a call is still the reason why that gets no answer.
RECENT_SECONDS: Final = 1.0


def unreachable(
    connection: StoreConnection, prefix: str, began_seconds: float, *, code: int = KafkaError._TRANSPORT
) -> KafkaException:
    """Return what a call reports whose time is up, or that cannot reach the database: the cause, where it is known."""
    # Between two tries nothing new is heard of a database that is away.
    trouble = connection.trouble_since(began_seconds - RECENT_SECONDS)
    waited_seconds = time.monotonic() - began_seconds
    cause = f"the database has not answered within {waited_seconds:.1f} s" if trouble is None else str(trouble)
    return KafkaException(KafkaError(code, f"{prefix}: {cause}", retriable=True))


class DatabaseLook:
    """Looks whether the database is there, for a client whose application wants to hear of it."""

    def __init__(
        self,
        connection: StoreConnection,
        submit: Callable[[Callable[[], None]], object],
        report: Callable[[StoreUnavailable], None],
    ) -> None:
        """Look on the thread that `submit` hands work to; `report` is told on it."""
        self._connection = connection
        self._submit = submit
        self._report = report
        self._is_looking = False
        self._next_seconds = 0.0

    def polled(self) -> None:
        """Look, in the background, if that was not done for a while."""
        now_seconds = time.monotonic()
        if now_seconds < self._next_seconds or self._is_looking:
            return
        self._is_looking = True
        try:
            self._submit(self._look)
        except BaseException:
            self._is_looking = False
            raise

    def _look(self) -> None:
        # Told of the first try that fails, not of the last one.
        self._connection.on_unavailable = self._report
        try:
            # What is not an outage is reported by the call that asks for something.
            with contextlib.suppress(TxnStoreError, KafkaException):
                self._connection.store().read(_nothing, retry_timeout_ms=0)
        finally:
            self._connection.on_unavailable = None
            self._next_seconds = time.monotonic() + LOOK_SECONDS
            self._is_looking = False


def _nothing(connection: Connection) -> None:
    connection.execute(select(1))


def write_repeatable(
    store: Store, work: Callable[[Connection], Result], *, timeout_seconds: float, wakes_readers: bool = False
) -> Result:
    """Run `work`, which may run twice, in one database transaction; again if nobody knows whether it was committed.

    With `wakes_readers`, waiting readers are told afterwards.

    Raises:
        TxnStoreError: the database refused, or could not be reached in time; OutcomeUnknown only if the last try ended
            so.
    """

    def write(retry_timeout_ms: int) -> Result:
        return store.write(work, wakes_readers=wakes_readers, retry_timeout_ms=retry_timeout_ms)

    return repeat(write, timeout_seconds=timeout_seconds)


def repeat(write: Callable[[int], Result], *, timeout_seconds: float) -> Result:
    """Call `write`, which may run twice, with its retry_timeout_ms; again if nobody knows whether it was committed.

    Raises:
        TxnStoreError: as `write_repeatable`.
    """
    deadline = Deadline(timeout_seconds)
    backoff = Backoff(_PAUSE_FIRST_SECONDS, _PAUSE_LAST_SECONDS)
    while True:
        left_seconds = deadline.left_seconds()
        try:
            retry_timeout_ms = int(min(left_seconds, _TRY_SECONDS) * 1000)
            return write(retry_timeout_ms)
        except _AGAIN:
            if left_seconds <= _TRY_SECONDS:
                raise
        time.sleep(backoff.back_off())


_of_this_process: Final[weakref.WeakSet[StoreConnection]] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Mark in a forked child the connections that it has inherited."""
    for connection in list(_of_this_process):
        connection.is_inherited = True
        if connection.on_inherited is not None:
            connection.on_inherited()
    _of_this_process.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
