"""What the tests of clusters share: places for several databases, a cluster over them, and producers that count."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import select

from tests.transactions.bench import sent_offsets
from txnstore.db.cluster.cluster import Cluster, open_cluster
from txnstore.db.postgresql.connections import ListenWaiter
from txnstore.db.schema import pending_markers, record_batches
from txnstore.db.sqlite.waiter import FileWaiter
from txnstore.db.store import Store
from txnstore.errors import StoreUnavailable
from txnstore.groups.offsets import CommittedOffsets, read_offsets
from txnstore.log.append import Append, Appended
from txnstore.log.cluster_topics import create_topic
from txnstore.log.codec import encode
from txnstore.log.fetch import fetch
from txnstore.log.topics import Topic
from txnstore.model import (
    NO_PRODUCER,
    IsolationLevel,
    ProducerIdentity,
    Record,
)
from txnstore.testing.manual_clock import ManualClock
from txnstore.testing.postgres_server import PostgresServer
from txnstore.testing.store_databases import StoreDatabases
from txnstore.transactions import rows
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.outcome import Ended
from txnstore.transactions.protocol import TransactionMetadata

_numbers = itertools.count(1)


def new_identity() -> list[str]:
    """Return the statements that make a store that was copied one of its own."""
    store_uuid = uuid.uuid4()
    return [f"UPDATE txnstore.{table} SET store_uuid = '{store_uuid}'" for table in ("stores", "databases")]


@dataclass
class Site:
    """Where databases are made, and one clock for all of them."""

    make: Callable[[str], str]
    clock: ManualClock
    urls: list[str]
    kind: str = "sqlite"

    def open(self, *urls: str, **options: Any) -> Cluster:
        return open_cluster(list(urls or self.urls), clock=self.clock, **options)

    def new(self, name: str) -> str:
        """Return the URL of one more fresh database."""
        return self.make(name)


@dataclass
class Producer:
    """A client of one transactional id in a cluster: it knows who it is, what it added, and counts."""

    cluster: Cluster
    transactional_id: str
    identity: ProducerIdentity = NO_PRODUCER
    sequences: dict[int, int] = field(default_factory=dict)
    added: set[int] = field(default_factory=set)

    @property
    def coordinator(self) -> TransactionCoordinator:
        return TransactionCoordinator(self.cluster.coordinator_of(self.transactional_id), self.cluster)

    def start(self, *arguments: Any, **options: Any) -> Producer:
        self.become(self.coordinator.init_producer_id(self.transactional_id, *arguments, **options).identity)
        return self

    def become(self, identity: ProducerIdentity) -> None:
        self.identity = identity
        self.sequences.clear()
        self.added.clear()

    def twin(self) -> Producer:
        return Producer(self.cluster, self.transactional_id, self.identity, dict(self.sequences), set(self.added))

    def batch(self, partition_id: int, *values: bytes) -> Append:
        first = self.sequences.get(partition_id, 0)
        self.sequences[partition_id] = first + len(values)
        records = [Record(value) for value in values]
        return Append(partition_id, encode(records, producer=self.identity, base_sequence=first, is_transactional=True))

    def send(self, partition_id: int, *values: bytes) -> Appended:
        return self.send_again([self.batch(partition_id, *values)])[0]

    def send_again(self, appends: list[Append]) -> list[Appended]:
        return self.coordinator.append(self.transactional_id, self.identity, appends, added=self.added)

    def send_offsets(self, group_id: str, offsets: Mapping[int, int]) -> None:
        self.coordinator.send_offsets(self.transactional_id, self.identity, sent_offsets(group_id, offsets))

    def end(self, *, commit: bool, **rest: Any) -> Ended:
        ended = self.coordinator.end_transaction(self.transactional_id, self.identity, commit=commit, **rest)
        self.become(ended.identity)
        return ended


@dataclass
class Bench:
    """A cluster with a topic of which each database has two partitions."""

    site: Site
    cluster: Cluster
    topic: Topic

    @property
    def clock(self) -> ManualClock:
        return self.site.clock

    def partition_at(self, database_id: int, nth: int = 0) -> int:
        return [
            number
            for number, leader in zip(self.topic.partition_ids, self.topic.leaders, strict=True)
            if leader == database_id
        ][nth]

    def name_at(self, database_id: int, prefix: str = "name") -> str:
        """Return a transactional id or group that lives in the database."""
        names = (f"{prefix}-{next(_numbers)}" for _ in itertools.count())
        return next(name for name in names if self.cluster.coordinator_id_of(name) == database_id)

    def producer_at(self, database_id: int) -> Producer:
        return Producer(self.cluster, self.name_at(database_id, "id")).start()

    def read(self, partition_id: int, isolation: IsolationLevel = IsolationLevel.READ_COMMITTED) -> list[bytes | None]:
        return read(self.cluster, partition_id, isolation)

    def offsets(self, group_id: str) -> CommittedOffsets:
        return self.cluster.coordinator_of(group_id).read(
            lambda connection: read_offsets(connection, group_id, self.topic.partition_ids)
        )

    def committed(self, group_id: str) -> dict[int, int]:
        return {number: offset.offset for number, offset in self.offsets(group_id).offsets.items()}

    def row(self, transactional_id: str) -> TransactionMetadata:
        return row_of(self.cluster, transactional_id)

    def queued(self, transactional_id: str) -> set[int]:
        """Return the partitions whose markers are queued."""
        statement = select(pending_markers.c.partition_id).where(pending_markers.c.transactional_id == transactional_id)
        store = self.cluster.coordinator_of(transactional_id)
        return set(store.read(lambda connection: connection.execute(statement).scalars().all()))

    def markers(self, partition_id: int) -> list[tuple[int, int]]:
        """Return kind and epoch of each marker."""
        statement = (
            select(record_batches.c.control_type, record_batches.c.producer_epoch)
            .where(record_batches.c.partition_id == partition_id, record_batches.c.control_type.is_not(None))
            .order_by(record_batches.c.last_offset)
        )
        store = self.cluster.own(self.cluster.leader_of_partition(partition_id))
        return [(kind, epoch) for kind, epoch in store.read(lambda connection: connection.execute(statement).all())]

    @contextmanager
    def down(self, database_id: int) -> Iterator[None]:
        """Let a member be away for this client."""
        with down(self.cluster, self.cluster.own(database_id)):
            yield


def read(
    cluster: Cluster, partition_id: int, isolation: IsolationLevel = IsolationLevel.READ_COMMITTED
) -> list[bytes | None]:
    store = cluster.own(cluster.leader_of_partition(partition_id))
    pages = store.read(lambda connection: fetch(connection, {partition_id: 0}, isolation=isolation))
    return [record.value for batch in pages[partition_id].batches for record in batch.records()]


def row_of(cluster: Cluster, transactional_id: str) -> TransactionMetadata:
    store = cluster.coordinator_of(transactional_id)
    row = store.read(lambda connection: rows.read_row(connection, transactional_id)).row
    assert row is not None
    return row


#: What reads on the connection that waits for commits, and the stores that are away.
_ROWS: Final[dict[Any, Any]] = {waiter: waiter.rows for waiter in (FileWaiter, ListenWaiter)}
_down: Final[list[Store]] = []


@contextmanager
def down(cluster: Cluster, store: Store) -> Iterator[None]:
    """Let a database be away: everything on the store fails as if it could not be reached.

    What waits for commits reads nothing either, whichever database it waits for.
    """

    def refuse(*_: object) -> None:
        raise StoreUnavailable(f"the database {store.label or ''!r}: it is away")

    store._attempt = refuse  # type: ignore[method-assign, assignment]
    _down.append(store)
    for waiter in _ROWS:
        waiter.rows = lambda *_: None
    try:
        yield
    finally:
        del store._attempt
        _down.remove(store)
        if not _down:
            for waiter, rows_of_waiter in _ROWS.items():
                waiter.rows = rows_of_waiter
        # As if the pause were over.
        cluster._pauses.clear()


@pytest.fixture
def sqlite_site(make_sqlite_store: Callable[[Path], str], tmp_path: Path) -> Site:
    def make(name: str) -> str:
        return make_sqlite_store(tmp_path / f"{name}.db")

    return Site(make, ManualClock(), [make(name) for name in ("first", "second", "third")])


@pytest.fixture
def postgresql_site(
    txnstore_postgres_server: PostgresServer, _txnstore_postgresql_databases: StoreDatabases
) -> Iterator[Site]:
    made: list[str] = []

    def make(name: str) -> str:
        database = _txnstore_postgresql_databases.take(f"_{name}")
        made.append(database)
        with txnstore_postgres_server.connect(database) as connection:
            for statement in new_identity():
                connection.execute(statement)
        return txnstore_postgres_server.url(database)

    yield Site(make, ManualClock(), [make(name) for name in ("first", "second", "third")], "postgresql")
    for name in made:
        _txnstore_postgresql_databases.give_back(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def site(request: pytest.FixtureRequest) -> Site:
    """Three fresh databases: files of SQLite, then databases of one PostgreSQL server."""
    found: Site = request.getfixturevalue(f"{request.param}_site")
    return found


def _bench(site: Site) -> Iterator[Bench]:
    with site.open() as cluster:
        topic = create_topic(cluster, "orders", partition_count=6, config={"txnstore.placement": "roundrobin"})
        yield Bench(site, cluster, topic)


@pytest.fixture
def bench(site: Site) -> Iterator[Bench]:
    yield from _bench(site)


@pytest.fixture
def sqlite_bench(sqlite_site: Site) -> Iterator[Bench]:
    yield from _bench(sqlite_site)
