"""A bank: two tables of accounts in two PostgreSQL databases, and a log of the transfers between them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

import psycopg
from sqlalchemy import delete

from txnstore.db.schema import transaction_branches
from txnstore.db.store import Store
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.log.fetch import fetch
from txnstore.log.topics import create_topic
from txnstore.model import IsolationLevel, ProducerIdentity, Record
from txnstore.participants.branch_rules import PREFIX
from txnstore.participants.branches import Branches
from txnstore.participants.recovery import RecoveredBranches, raise_failed, recover_branches
from txnstore.testing.manual_clock import ManualClock
from txnstore.testing.postgres_server import PostgresServer, connection_string
from txnstore.transactions.branch_rows import RegisteredBranch, all_branches
from txnstore.transactions.coordinator import TransactionCoordinator

DATABASES = ("checking", "savings")
#: A stranger's, and another store's, which begins as ours do.
FOREIGN_GIDS = ("a stranger in {}", f"{PREFIX}{'0' * 32}_{{}}", "txnstore in {}")


def make_table(server: PostgresServer, database: str) -> None:
    with server.connect(database) as connection:
        connection.execute("CREATE TABLE account (name text PRIMARY KEY, balance bigint NOT NULL)")


@dataclass
class Table:
    """The accounts in one database."""

    url: str
    _watching: psycopg.Connection | None = None

    @property
    def watching(self) -> psycopg.Connection:
        """The superuser's connection, in autocommit mode."""
        if self._watching is not None:
            try:
                self._watching.execute("SELECT 1")
            except psycopg.OperationalError:
                # The server was killed meanwhile.
                self._watching.close()
                self._watching = None
        if self._watching is None:
            self._watching = self.connect(autocommit=True)
        return self._watching

    def close(self) -> None:
        if self._watching is not None:
            self._watching.close()

    def connect(self, **options: object) -> psycopg.Connection:
        bounds = "-c lock_timeout=5s -c statement_timeout=20s"
        return psycopg.connect(connection_string(self.url), options=bounds, **options)  # type: ignore[arg-type]

    def begin_test(self) -> None:
        watching = self.watching
        watching.execute("DELETE FROM account")
        for gid in self.foreign_gids:
            watching.execute("BEGIN")
            watching.execute("INSERT INTO account VALUES (%s, 1)", [gid])
            watching.execute(f"PREPARE TRANSACTION '{gid}'")

    @property
    def foreign_gids(self) -> list[str]:
        return sorted(gid.format(self.url.rpartition("/")[2]) for gid in FOREIGN_GIDS)

    def end_test(self) -> None:
        for gid in self.gids():
            self.watching.execute(f"ROLLBACK PREPARED '{gid}'")
        self.close()

    def gids(self) -> list[str]:
        found = self.watching.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")
        return sorted(gid for (gid,) in found)

    def our_gids(self) -> list[str]:
        return [gid for gid in self.gids() if gid not in self.foreign_gids]

    def balances(self) -> dict[str, int]:
        return dict(self.watching.execute("SELECT name, balance FROM account").fetchall())


@dataclass
class Transfer:
    """One transfer of 1 from the first table to the second, by a coordinator of its own."""

    bank: Bank
    store: Store
    name: str
    producer: ProducerIdentity
    branches: Branches
    drivers: list[psycopg.Connection]

    def write(self) -> None:
        """Move the money, on each connection; the owner's part."""
        for driver, amount in zip(self.drivers, (-1, 1), strict=False):
            self.branches.enlist(driver)
            driver.execute("INSERT INTO account VALUES (%s, %s)", [self.name, amount])

    def prepare(self) -> None:
        self.branches.prepare(self.producer)

    def record(self) -> Append:
        batch = encode([Record(self.name.encode())], producer=self.producer, base_sequence=0, is_transactional=True)
        return Append(self.bank.partition_id, batch)

    def decide(self, *, commit: bool) -> None:
        appends = [self.record()] if commit else []
        coordinator = TransactionCoordinator(self.store)
        coordinator.end_transaction(self.name, self.producer, commit=commit, appends=appends)

    def finish(self, *, commit: bool, **options: int) -> None:
        self.branches.finish(commit=commit, **options)

    def commit(self) -> None:
        self.prepare()
        self.decide(commit=True)
        self.finish(commit=True)

    def abort(self) -> None:
        self.decide(commit=False)
        self.finish(commit=False)

    def die(self) -> None:
        """Leave nothing behind but what the servers know."""
        for driver in self.drivers:
            driver.close()


@dataclass
class Bank:
    store: Store
    clock: ManualClock
    tables: list[Table]
    partition_id: int = -1
    drivers: list[psycopg.Connection] = field(default_factory=list)

    def close(self) -> None:
        for driver in self.drivers:
            driver.close()

    def __post_init__(self) -> None:
        if self.partition_id != -1:
            return
        # Others use the store as well, one after the other.
        self.store.write(lambda connection: connection.execute(delete(transaction_branches)))
        topic = self.store.write(lambda connection: create_topic(connection, f"transfers-{uuid.uuid4().hex[:8]}"))
        (self.partition_id,) = topic.partition_ids

    def transfer(self, *, store: Store | None = None, name: str | None = None, timeout_ms: int = 60_000) -> Transfer:
        """Return a transfer that its producer has started, with a connection to each table."""
        store = store or self.store
        name = name or f"transfer-{uuid.uuid4().hex[:8]}"
        producer = TransactionCoordinator(store).init_producer_id(name, timeout_ms).identity
        drivers = [table.connect() for table in self.tables]
        self.drivers.extend(drivers)
        return Transfer(self, store, name, producer, Branches(store, name), drivers)

    def written(self, **options: object) -> Transfer:
        transfer = self.transfer(**options)  # type: ignore[arg-type]
        transfer.write()
        return transfer

    def prepared(self, **options: object) -> Transfer:
        transfer = self.written(**options)
        transfer.prepare()
        return transfer

    def recover(self) -> list[RecoveredBranches]:
        found = [recover_branches(self.store, table.url) for table in self.tables]
        for recovered in found:
            raise_failed(recovered)
        return found

    def rows(self) -> list[RegisteredBranch]:
        return self.store.read(all_branches)

    def records(self) -> list[str]:
        """Return the names of the transfers in the log, as a reader of committed records sees them."""
        pages = self.store.read(
            lambda connection: fetch(connection, {self.partition_id: 0}, isolation=IsolationLevel.READ_COMMITTED)
        )
        return [(record.value or b"").decode() for b in pages[self.partition_id].batches for record in b.records()]

    def is_in(self, name: str) -> list[bool]:
        """Return where the transfer is visible: in the log, in each table."""
        return [name in self.records(), *(name in table.balances() for table in self.tables)]

    def assert_whole(self, name: str, *, committed: bool) -> None:
        """D1, D4, D5: the transfer is everywhere or nowhere, nothing of ours is left, nothing of others is touched."""
        assert self.is_in(name) == [committed] * (1 + len(self.tables))
        for table in self.tables:
            assert table.our_gids() == []
            assert table.gids() == table.foreign_gids
            assert not set(table.foreign_gids) & set(table.balances())
