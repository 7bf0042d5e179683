"""The way an administrative call runs: in the background, item by item, and never longer than it may take.

The caller gets a future for each item at once.  The work is done on the client's worker; what is not answered by the
deadline fails with `_TIMED_OUT`, and what has not begun by then is dropped.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from typing import Any, Final, Generic, TypeVar

from sqlalchemy import Connection

from txnstore.clients.connection import RECENT_SECONDS, StoreConnection, unreachable
from txnstore.clients.model.errors import KafkaError, KafkaException, kafka_exception_of
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.clients.worker import Worker
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.store import Store
from txnstore.deadline import Deadline, new_future
from txnstore.errors import TxnStoreError

Item = TypeVar("Item")
Answer = TypeVar("Answer")

#: How the names of the calls begin that change nothing.
_READS: Final = ("cluster_id", "describe_", "find_", "list_")
#: The longest timeout that librdkafka takes.
TIMEOUT_SECONDS_MAX: Final = 3600


def check_call_timeout(name: str, seconds: float | None, *, low_seconds: int = 0) -> None:
    """Refuse what cannot be a timeout; None is the default."""
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"must be real number, not {type(seconds).__name__}")
    if not low_seconds <= seconds <= TIMEOUT_SECONDS_MAX:
        limits = f"{low_seconds}..{TIMEOUT_SECONDS_MAX * 1000}"
        raise ValueError(f'Invalid value type for "{name}": expecting integer in range {limits}')


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"Expected {name} to be bool type, not {type(value).__name__}")


def check_partition(partition: object) -> None:
    """Refuse what names no partition."""
    if not isinstance(partition, TopicPartition):
        raise TypeError(f"Expected a TopicPartition, not {type(partition).__name__}")
    if not partition.topic:
        raise ValueError("the topic of a partition cannot be empty")
    if partition.partition < 0:
        raise ValueError("'partition' cannot be negative")


def check_partitions(partitions: object) -> list[TopicPartition]:
    """Return the partitions of a list that is not empty."""
    if not isinstance(partitions, list):
        raise TypeError(f"Expected a list of TopicPartition, not {type(partitions).__name__}")
    if not partitions:
        raise ValueError("Expected at least one partition")
    for partition in partitions:
        check_partition(partition)
    return partitions


def check_number(name: str, number: object, largest: int, *, smallest: int = 0) -> None:
    """Refuse what is not a whole number in this range."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{name} must be int, not {type(number).__name__}")
    if not smallest <= number <= largest:
        raise ValueError(f"{name} must be from {smallest} to {largest}, not {str(number)[:40]}")


class Call(Generic[Item, Answer]):
    """One call: its items, a future for each, and the time by which they are settled."""

    def __init__(self, name: str, items: Iterable[Item], timeout_seconds: float | None) -> None:
        """Begin the time of the call; None: it has as long as it takes."""
        self.name = name
        self.timeout_seconds = timeout_seconds
        self._began_seconds = time.monotonic()
        self._deadline = Deadline(-1 if timeout_seconds is None else timeout_seconds)
        self.futures: dict[Item, Future[Answer]] = {}
        for item in items:
            future: Future[Answer] = new_future()
            # As confluent-kafka's: it cannot be cancelled.
            future.set_running_or_notify_cancel()
            self.futures[item] = future

    def retry_ms(self, store: Store) -> int:
        """Return how long a unit of work may be tried again: within the time that is left."""
        return min(store.limits.retry_timeout_ms, int(self._deadline.left_seconds() * 1000))

    def retry_ms_of_each(self, cluster: Cluster) -> int:
        """Return the same for work on all databases, one after the other: one that is away leaves the others time."""
        return self.retry_ms(cluster.controller) // len(cluster.databases)

    def settle(self, item: Item, work: Callable[[], Answer]) -> None:
        """Give the item's future what `work` returns or raises; nothing is done if it is settled already."""
        future = self.futures[item]
        if future.done():
            return
        try:
            answer = work()
        except Exception as error:  # noqa: BLE001 - whoever waits gets it, whatever it is
            self.fail(item, error)
        else:
            # Its time may have been up while the work was done.
            with contextlib.suppress(InvalidStateError):
                future.set_result(answer)

    def fail(self, item: Item, error: Exception) -> None:
        """Give the item's future the error, in the shape of the clients', unless it is settled."""
        if isinstance(error, TxnStoreError):
            cause, error = error, kafka_exception_of(error)
            error.__cause__ = cause
        with contextlib.suppress(InvalidStateError):
            self.futures[item].set_exception(error)

    def fail_all(self, error: Exception) -> None:
        """Give every future that is not settled the error."""
        for item in self.futures:
            self.fail(item, error)

    def time_out(self, connection: StoreConnection) -> None:
        """Fail what is not settled: the time is up."""
        if self.name == "list_topics":
            self.fail_all(unreachable(connection, "Failed to get metadata", self._began_seconds))
            return
        trouble = connection.trouble_since(self._began_seconds - RECENT_SECONDS)
        text = f"{self.name}: the database has not answered within {self.timeout_seconds:g} s"
        if trouble is not None:
            text = f"{text}: {trouble}"
        if not self.name.startswith(_READS):
            text = f"{text}; it may still be carried out"
        self.fail_all(KafkaException(KafkaError(KafkaError._TIMED_OUT, text, retriable=True)))


def each_once(
    work: Callable[[Cluster, Any, Item], Answer], items: str, *, twice: bool
) -> Callable[[Cluster, Any, Item], Answer]:
    """Return `work`, or what refuses every item because one of them was given twice."""
    if not twice:
        return work

    def refuse(cluster: Cluster, call: Any, item: Item) -> Answer:
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG, f"Duplicate {items} not allowed"))

    return refuse


class _Rehearsed(Exception):
    """Ends a database transaction that was only to show whether it would have worked."""


def write(
    store: Store, call: Call[Any, Any], work: Callable[[Connection], object], *, validate_only: bool = False
) -> None:
    """Run `work` in one database transaction within the call's time; with `validate_only` roll it back at its end."""

    def work_or_rehearse(connection: Connection) -> None:
        work(connection)
        if validate_only:
            raise _Rehearsed

    with contextlib.suppress(_Rehearsed):
        store.write(work_or_rehearse, retry_timeout_ms=call.retry_ms(store))


class AdminCalls:
    """The calls of one client: they run one after the other on its worker."""

    def __init__(
        self, connection: StoreConnection, *, default_timeout_seconds: float, report: Callable[[KafkaError], None]
    ) -> None:
        """Make ready; no thread is started before the first call.

        `report` is told, on the worker, of every time that the database could not be reached.
        """
        self.connection = connection
        self._default_timeout_seconds = default_timeout_seconds
        self._report = report
        self._worker = Worker("txnstore-admin")

    def for_each(
        self,
        owner: object,
        name: str,
        items: Iterable[Item],
        work: Callable[[Cluster, Call[Item, Answer], Item], Answer],
        timeout_seconds: float | None,
    ) -> dict[Item, Future[Answer]]:
        """Do `work` for one item after the other, and return a future for each.

        The `owner` is kept until all is done: a client that its program has forgotten finishes what it began.
        """

        def work_all(cluster: Cluster, call: Call[Item, Answer]) -> None:
            for item in call.futures:
                call.settle(item, functools.partial(work, cluster, call, item))

        return self.together(owner, name, items, work_all, timeout_seconds)

    def together(
        self,
        owner: object,
        name: str,
        items: Iterable[Item],
        work: Callable[[Cluster, Call[Item, Answer]], None],
        timeout_seconds: float | None,
    ) -> dict[Item, Future[Answer]]:
        """Do `work`, which settles the items, and return a future for each; the `owner` is kept as by `for_each`."""
        seconds = self._default_timeout_seconds if timeout_seconds is None else timeout_seconds
        return self._submit(owner, Call(name, items, seconds), work)

    def once(
        self,
        owner: object,
        name: str,
        work: Callable[[Cluster, Call[str, Answer]], Answer],
        timeout_seconds: float | None,
    ) -> Future[Answer]:
        """Do `work`, which is about no item in particular, and return its future."""
        return self.for_each(owner, name, [name], lambda store, call, _: work(store, call), timeout_seconds)[name]

    def run(self, owner: object, name: str, work: Callable[[Cluster], Answer], timeout_seconds: float) -> Answer:
        """Do `work` and return what it returned; a negative timeout waits for as long as it takes.

        Raises:
            KafkaException: `_TIMED_OUT`, or what the database's error became.
        """
        call: Call[str, Answer] = Call(name, [name], None if timeout_seconds < 0 else timeout_seconds)
        futures = self._submit(owner, call, lambda cluster, call: call.settle(name, lambda: work(cluster)))
        return futures[name].result()

    def close(self, timeout_seconds: float) -> None:
        """End: what has not begun fails, and what runs is waited for that long; a second call does nothing."""
        if self.connection.process_id == os.getpid():
            self.connection.give_up()
            self._worker.close(timeout_seconds)
        self.connection.close()

    def _submit(
        self, owner: object, call: Call[Item, Answer], work: Callable[[Cluster, Call[Item, Answer]], None]
    ) -> dict[Item, Future[Answer]]:
        # The caller's own: what is taken out of it is settled as well.
        answer = dict(call.futures)
        if not answer:
            return answer

        def job() -> None:
            assert owner is not None  # and lives until here
            work(self.connection.cluster(), call)

        job_done = self._worker.submit(job)
        if call.timeout_seconds is not None:

            def time_out() -> None:
                call.time_out(self.connection)
                # What has not begun is not to be done later.
                job_done.cancel()

            timer = threading.Timer(call.timeout_seconds, time_out)
            timer.daemon = True
            timer.start()
            job_done.add_done_callback(lambda _: timer.cancel())
        job_done.add_done_callback(functools.partial(self._finish, call))
        return answer

    def _finish(self, call: Call[Any, Any], job_done: Future[None]) -> None:
        """Settle what the job left open: it failed as a whole, or never ran."""
        if job_done.cancelled():
            call.fail_all(
                KafkaException(
                    KafkaError(KafkaError._DESTROY, f"{call.name} was not carried out: the client is closed")
                )
            )
        else:
            error = job_done.exception()
            if error is not None:
                call.fail_all(error if isinstance(error, Exception) else RuntimeError(f"{call.name} was interrupted"))
        for future in call.futures.values():
            failure = future.exception()
            if isinstance(failure, KafkaException) and failure.args[0] == KafkaError._TRANSPORT:
                self._report(failure.args[0])
                break
