"""What the tests of faults share: a small application on the log, and stores whose connections can be broken.

A fault ends in one of three ways: done, not done, or unknown.  What the database made of it is asked on a connection
that the fault does not touch.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
from sqlalchemy import Connection

from tests.tools.proxy import Proxy, upstream_of
from txnstore.db.backend import Limits
from txnstore.db.opening import open_store
from txnstore.db.store import Store
from txnstore.log.append import Append, Appended, append
from txnstore.log.bounds import read_bounds
from txnstore.log.codec import encode
from txnstore.log.fetch import fetch
from txnstore.log.topics import ensure_topic
from txnstore.model import NO_PRODUCER, NO_SEQUENCE, IsolationLevel, ProducerIdentity, Record
from txnstore.testing.postgres_server import PostgresServer
from txnstore.transactions.coordinator import TransactionCoordinator

Result = TypeVar("Result")

WAIT_SECONDS = 60

_numbers = itertools.count(1)


@dataclass
class Orders:
    """A topic with one partition, seen through one store."""

    store: Store
    name: str = "orders"
    partition_id: int = field(init=False)

    def __post_init__(self) -> None:
        topic = self.store.write(lambda connection: ensure_topic(connection, self.name))
        (self.partition_id,) = topic.partition_ids

    def batch(
        self,
        *values: bytes,
        producer: ProducerIdentity = NO_PRODUCER,
        sequence: int = 0,
        transactional: bool = False,
    ) -> Append:
        """Return a batch of this topic; one of a producer can be recognised when it comes again."""
        batch = encode(
            [Record(value) for value in values],
            producer=producer,
            base_sequence=NO_SEQUENCE if producer == NO_PRODUCER else sequence,
            is_transactional=transactional,
        )
        return Append(self.partition_id, batch)

    def append(self, *batches: Append, **options: Any) -> list[Appended]:
        return self.store.write(lambda connection: append(connection, batches), **options)

    def add(self, *values: bytes, **options: Any) -> list[Appended]:
        return self.append(self.batch(*values), **options)

    def values(self, isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED) -> list[bytes | None]:
        def read(connection: Connection) -> list[bytes | None]:
            page = fetch(connection, {self.partition_id: 0}, isolation=isolation)[self.partition_id]
            return [record.value for batch in page.batches for record in batch.records()]

        return self.store.read(read)

    def committed(self) -> list[bytes | None]:
        return self.values(IsolationLevel.READ_COMMITTED)

    def next_offset(self) -> int:
        return self.store.read(lambda connection: read_bounds(connection, [self.partition_id]))[
            self.partition_id
        ].high_watermark

    def through(self, store: Store) -> Orders:
        """Return the same topic, seen through another store."""
        return Orders(store, self.name)

    def transaction(self, transactional_id: str, *values: bytes) -> tuple[TransactionCoordinator, ProducerIdentity]:
        """Begin a transaction with one batch; return its coordinator and its producer."""
        coordinator = TransactionCoordinator(self.store)
        producer = coordinator.init_producer_id(transactional_id).identity
        if values:
            coordinator.append(transactional_id, producer, [self.batch(*values, producer=producer, transactional=True)])
        return coordinator, producer


class InBackground(Generic[Result]):
    """A call that runs in a thread of its own."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self._outcome: list[Result] = []
        self._error: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome.append(self._function())
        except BaseException as error:  # noqa: BLE001 - it is raised again where it is asked for
            self._error.append(error)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def result(self, within_seconds: float = WAIT_SECONDS) -> Result:
        """Return what the call returned, or raise what it raised; fail if it is not over in time."""
        self._thread.join(within_seconds)
        assert not self._thread.is_alive(), f"still running after {within_seconds} s"
        if self._error:
            raise self._error[0]
        return self._outcome[0]


@pytest.fixture
def in_background() -> Callable[[Callable[[], Any]], InBackground[Any]]:
    return InBackground


@pytest.fixture
def until() -> Callable[[Callable[[], object]], None]:
    """Wait for a condition that only the database, or the kernel, knows of."""

    def wait(condition: Callable[[], object], within_seconds: float = WAIT_SECONDS) -> None:
        pause = threading.Event()
        deadline = time.monotonic() + within_seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {within_seconds} s"
            pause.wait(0.005)

    return wait


@pytest.fixture
def orders_of() -> Callable[[Store], Orders]:
    return Orders


@pytest.fixture
def orders(store: Store) -> Orders:
    """The topic on a fresh store, on each database."""
    return Orders(store)


@pytest.fixture(scope="session")
def postgresql_url(txnstore_postgres_server: PostgresServer) -> Iterator[str]:
    """One store on PostgreSQL for all tests of faults; each test has a topic of its own in it."""
    name = f"txnstore_faults_{os.getpid()}"
    txnstore_postgres_server.create_database(name)
    yield txnstore_postgres_server.url(name)
    txnstore_postgres_server.drop_database(name)


@pytest.fixture
def topic() -> str:
    return f"orders-{next(_numbers)}"


@pytest.fixture
def proxy(postgresql_url: str) -> Iterator[Proxy]:
    with Proxy(upstream_of(postgresql_url)) as proxy:
        yield proxy


@pytest.fixture
def direct(postgresql_url: str, topic: str) -> Iterator[Orders]:
    """The topic on PostgreSQL, seen without the proxy."""
    with open_store(postgresql_url) as store:
        yield Orders(store, topic)


@pytest.fixture
def fresh(txnstore_postgresql_url: str) -> Iterator[Orders]:
    """A topic in a database on PostgreSQL that the test has for itself."""
    with open_store(txnstore_postgresql_url) as store:
        yield Orders(store)


@pytest.fixture
def open_proxied(proxy: Proxy, postgresql_url: str, topic: str) -> Iterator[Callable[..., Orders]]:
    """Open the topic on PostgreSQL through the proxy; with no second try, so that one fault is one error."""
    stores: list[Store] = []

    def open_(*, retry_timeout_ms: int = 0, options: str = "", **limits: Any) -> Orders:
        stores.append(
            open_store(
                proxy.url(postgresql_url) + options,
                limits=Limits(retry_timeout_ms=retry_timeout_ms, **limits),
            )
        )
        return Orders(stores[-1], topic)

    yield open_
    # Whoever was swallowed would wait for long.
    proxy.close()
    for store in stores:
        store.close()


@pytest.fixture
def proxied(open_proxied: Callable[..., Orders], direct: Orders) -> Orders:
    """The topic on PostgreSQL, seen through the proxy."""
    return open_proxied()


class Child:
    """A process that runs a function of `children.py`; it is killed at the end if it still runs."""

    def __init__(self, function: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("children.py")), function, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self) -> str:
        """Return the next line that it says; an empty one if it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def tell(self) -> None:
        """Let it go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, within_seconds: float = WAIT_SECONDS) -> int:
        """Wait until it has ended by itself, and return its exit code."""
        return self.process.wait(within_seconds)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def start_child() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(function: str, *arguments: object) -> Child:
        children.append(Child(function, *arguments))
        return children[-1]

    yield start
    for child in children:
        child.close()
