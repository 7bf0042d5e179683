"""The seam between txnstore and a kind of database.

A member belongs here only when its bodies differ between the databases; everything else is one SQLAlchemy Core
statement for all of them.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from txnstore.clock import Clock
from txnstore.db.statements import HotStatement
from txnstore.db.url import DatabaseUrl
from txnstore.errors import StoreUnavailable, TxnStoreError

Holder = TypeVar("Holder")

#: A reader that nobody wakes looks again after this long at first, then ever more rarely.
POLL_FIRST_MS: Final = 1
POLL_LAST_MS: Final = 40


class Access(enum.Enum):
    """What a database transaction is for."""

    READ = "read"
    """One snapshot of the whole database; takes no locks that others wait for."""

    WRITE = "write"
    """Reads what is committed at each statement and locks the rows it changes."""


class Stage(enum.Enum):
    """How far a database transaction had come when an error struck; decides between "not done" and "unknown"."""

    CONNECT = "connecting"
    STATEMENT = "running a statement"
    COMMIT = "committing"


class Durability(enum.Enum):
    """What a commit of the store's has outlived when it returns."""

    FULL = "full"
    """The loss of power, whatever else the role or the database has set."""

    DATABASE = "database"
    """What the role or the database has set; with PostgreSQL's `synchronous_commit = off`, only the client's end."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of every database transaction of a store, in milliseconds, and how lasting its commit is."""

    statement_timeout_ms: int = 30_000
    """How long one statement may run (PostgreSQL)."""

    lock_timeout_ms: int = 10_000
    """How long one statement may wait for a row lock (PostgreSQL)."""

    idle_timeout_ms: int = 10_000
    """How long a process may do nothing within a database transaction before it loses it (PostgreSQL)."""

    transaction_timeout_ms: int = 60_000
    """How long a whole database transaction may take before it loses its connection (PostgreSQL 17 and newer)."""

    answer_timeout_ms: int = 10_000
    """How long after its time was up a statement's answer may still come before the connection is given up
    (PostgreSQL)."""

    retry_timeout_ms: int = 30_000
    """How long a unit of work waits for a free connection, and is tried again after conflicts and lost connections."""

    durability: Durability = Durability.FULL
    """What a commit has outlived when it returns, also one on a connection that a producer has enlisted."""

    waits_for_disk: bool = True
    """Whether a commit waits for the disk where the loss of power ends all clients as well (SQLite); one that does not
    is as lasting as the next one that does. On PostgreSQL each waits."""

    on_unavailable: Callable[[StoreUnavailable], None] | None = field(default=None, compare=False)
    """Hears of each try for which the database was away, while it is still being tried again."""


#: Partitions, and groups as well, share so many places where their readers are told of commits.
SUBJECT_BUCKETS: Final = 256


@dataclass(frozen=True, slots=True)
class Subjects:
    """What a commit has changed, or a reader waits for."""

    partition_ids: frozenset[int] = frozenset()
    """Partitions whose logs have grown, by records or markers."""

    group_ids: frozenset[str] = frozenset()
    """Groups that have rebalanced, or whose members have given something back."""

    is_everything: bool = False
    """Whether it may be anything; then the others are empty."""

    def meets(self, other: Subjects) -> bool:
        """Return whether they may have something in common."""
        if self.is_everything or other.is_everything:
            return True
        return not (self.partition_ids.isdisjoint(other.partition_ids) and self.group_ids.isdisjoint(other.group_ids))

    def buckets(self) -> frozenset[int]:
        """Return the numbers of the places where it is told; not for everything."""
        partitions = {partition_id % SUBJECT_BUCKETS for partition_id in self.partition_ids}
        groups = {SUBJECT_BUCKETS + zlib.crc32(name.encode()) % SUBJECT_BUCKETS for name in self.group_ids}
        return frozenset(partitions | groups)


EVERYTHING: Final = Subjects(is_everything=True)
NOTHING: Final = Subjects()


@dataclass(frozen=True, slots=True)
class OffsetGroup:
    """The group that a whole transaction commits offsets of, and the member that consumed them."""

    group_id: str
    generation: int
    member_id: str
    """Empty: nobody in particular."""

    group_instance_id: str | None


@dataclass(frozen=True, slots=True)
class WholeTransaction:
    """All that a transaction writes, before anything of it is in the database; or what belongs to no transaction.

    That is batches, or the offsets of a group.
    """

    transactional_id: str | None
    """None: batches or offsets belong to no transaction, and nothing ends."""

    producer_id: int
    producer_epoch: int
    """Both -1: the batches, of no transaction, have no sequence numbers."""

    earliest_ms: int
    """The earliest time at which the topics take the records' timestamps."""

    latest_ms: int
    """The latest one."""

    marker_crc: int
    """The checksum of the marker that ends it, if the marker had the time 0."""

    partitions: Sequence[tuple[int, int]]
    """Partition ids, ascending, and how many batches go to each."""

    batches: Sequence[tuple[Any, ...]]
    """The columns of each batch that differ from batch to batch, in the order of the partitions."""

    group: OffsetGroup | None
    offsets: Sequence[tuple[int, int, int, str | None]]
    """Partition id, committed offset, leader epoch, metadata; ascending."""

    open_group_id: str | None = None
    """The one group whose offsets it holds already, and nothing else; None: it has not begun."""

    stays_open: bool = False
    """Whether it only begins, and holds the offsets until it is committed."""


class Waiter(Protocol):
    """One reader's place to wait until something is committed that it reads; for one thread, but for `wake`.

    A wake-up is a hint and nothing more: a reader that is woken reads again, and one that is not looks again after
    a while.  So a lost, late or forged one costs time, never a record.
    """

    def listen(self, subjects: Subjects) -> bool:
        """Wait for commits about these from now on; return whether they are others than before.

        Then the reader reads before it waits: nobody tells of what was committed until now.
        """
        ...

    def wait(self, timeout_ms: int) -> bool:
        """Return True as soon as something may have been committed since the last call, False after `timeout_ms`.

        Commits between two calls count: the second one returns at once.
        """
        ...

    def rows(self, statement: HotStatement, parameters: Mapping[str, int]) -> list[Any] | None:
        """Run a statement that reads, by itself, on the waiter's own connection: one snapshot, and one way there.

        None: it cannot be run so, or it failed; then it is for `Store.read`, which also says what is wrong.
        """
        ...

    def wake(self) -> None:
        """Let the wait that is under way, or else the next one, return True at once; for any thread."""
        ...

    def close(self) -> None:
        """Give back what it holds; a second call does nothing."""
        ...


class CommitWhole(Protocol):
    """Commits or begins a transaction that is wholly in the client, or appends batches of no transaction.

    It is one statement, and that is a database transaction of its own.
    """

    def __call__(
        self,
        connection: Connection,
        schema: str,
        whole: WholeTransaction,
        limits: Limits,
        clock: Clock | None,
    ) -> list[int] | None:
        """Commit it if nothing about it is unusual; the connection is in no database transaction before and after.

        Returns for each batch its base offset and the log start offset of its partition, or of offsets that belong to
        no transaction how many there were; None: nothing was changed.

        Raises:
            NoWholeCommits: the database has no such statement, or this role may not use it; nothing was changed.
            OutcomeUnknown: the connection broke: it may have been committed.
            TxnStoreError: the database is busy or away; nothing was changed.
        """
        ...


class WriteAtOnce(Protocol):
    """Runs statements in one database transaction, all of it in one message."""

    def __call__(self, connection: Connection, statements: Sequence[tuple[str, Any]], limits: Limits) -> list[int]:
        """Return how many rows each has hit; the connection is in no database transaction before and after.

        Raises:
            OutcomeUnknown: the connection broke: it may have been committed.
            TxnStoreError: the database refused, is busy or away; nothing was changed.
        """
        ...


class NoWholeCommits(Exception):
    """Nothing is committed by one statement here."""


class Announcer(Protocol):
    """Wakes the readers that wait, in this process and others; for all threads."""

    def announce(self, subjects: Subjects) -> None:
        """Say that something about these was committed; returns at once."""
        ...

    def close(self, timeout_seconds: float) -> None:
        """Give back what it holds; what is due is told for at most `timeout_seconds`."""
        ...


class Backend(Protocol):
    """What one kind of database does in its own way."""

    name: str
    #: Whether the database keeps prepared transactions (two-phase commit).
    keeps_prepared: bool
    #: Whether a writer keeps everybody else from writing, whatever the rows.
    has_one_writer: bool
    #: Whether readers that wait are woken by every commit, also one of an application's own rows.
    every_commit_wakes_readers: bool

    @property
    def commit_whole(self) -> CommitWhole | None:
        """What commits a transaction that is wholly in the client at once; None where nothing does."""
        ...

    @property
    def write_at_once(self) -> WriteAtOnce | None:
        """What runs a database transaction of several statements in one message; None where there are no messages."""
        ...

    @property
    def commit_whole_in(self) -> CommitWhole | None:
        """The same within the database transaction that is open on the connection, which its owner commits.

        What the database refuses it with is a `DBAPIError`, as of any statement.
        """
        ...

    def create_engine(
        self, url: DatabaseUrl, *, schema: str, clock: Clock | None, limits: Limits, pool_size: int
    ) -> Engine:
        """Return an engine whose connections are in the state that the other members expect: no open transaction."""
        ...

    def close_before_fork(self, holder: Holder, let_go: Callable[[Holder], None]) -> None:
        """Call `let_go(holder)` before a fork, if connections to this database must not be open then."""
        ...

    def let_go(self, engine: Engine) -> None:
        """Close what is open beside the connections of the engine's pool; it may be opened again."""
        ...

    def begin(self, connection: Connection, access: Access, limits: Limits) -> None:
        """Begin a database transaction on a connection that is in none."""
        ...

    def commit(self, connection: Connection) -> None:
        """Commit it; returns only if the database said that it is committed.

        Raises:
            TransactionPoisoned: the database had rolled back already; nothing was changed.
        """
        ...

    def rollback(self, connection: Connection) -> None:
        """Roll back whatever is open; harmless if nothing is."""
        ...

    def translate(self, error: DBAPIError, stage: Stage) -> TxnStoreError:
        """Return our error for the driver's, without its text where that may hold secrets or data."""
        ...

    def is_contended(self, error: DBAPIError) -> bool:
        """Return whether the database only asks to try the same again in a moment."""
        ...

    def after_commit(self, engine: Engine) -> None:
        """Do what the database needs after a commit and what must not be part of it."""
        ...

    def reclaim(self, engine: Engine, url: DatabaseUrl, *, schema: str) -> int:
        """Free the room of deleted rows for new ones where much of it waits for that; return of how many tables.

        It may take a minute, and keeps nobody from reading or writing meanwhile.
        """
        ...

    def waiter(self, engine: Engine, url: DatabaseUrl, subjects: Subjects, *, channel: str) -> Waiter:
        """Return what a reader waits on until somebody has committed something about these."""
        ...

    def announcer(self, url: DatabaseUrl, *, channel: str) -> Announcer | None:
        """Return what wakes waiting readers; None where they notice commits by themselves."""
        ...

    def exists(self, url: DatabaseUrl) -> bool:
        """Return whether there is something to connect to; a connection would make what is not there."""
        ...

    def identity(self, connection: Connection) -> str | None:
        """Return where the store's tables are: the numbers that their server or file system gives the place.

        A dump that is restored elsewhere, under another name or again, and a copied file have other ones; a standby, a
        physical copy of a whole server and a copied disk have the same.  None: this role may not ask.
        """
        ...

    def running(self, connection: Connection) -> str:
        """Return which database the connection is to, as long as its server runs; any role may ask.

        No other database has the same, not even a copy, or a standby.
        """
        ...

    def is_standby(self, connection: Connection) -> bool:
        """Return whether the database follows another one: it may show less than another one has shown before."""
        ...

    def is_known_standby(self, connection: Connection) -> bool:
        """Return whether it has said so of itself when the connection was made; asks nothing, also after an error."""
        ...

    def check_database(self, connection: Connection, names: Collection[str]) -> None:
        """Refuse a database that cannot hold a store, with tables and views of these names, whatever is in it.

        Raises:
            InvalidUrl: its version is too old, or its encoding does not hold all text.
            ForeignSchema: others have put something on those that could change or refuse what is written.
        """
        ...

    def version(self, connection: Connection) -> str:
        """Return what the database is and its version, as people call it."""
        ...

    def storage_sizes(self, connection: Connection, schema: str) -> dict[str, int]:
        """Return the sizes in bytes of what holds the tables, by what it is; it may hold tables of others as well."""
        ...

    def prepare_place(self, connection: Connection, schema: str) -> None:
        """Make the place ready in which the tables are about to be created."""
        ...

    def table_names(self, connection: Connection, schema: str) -> frozenset[str]:
        """Return the names, without prefix, of the tables and views that stand where ours would."""
        ...

    def schemas_of_stores(self, connection: Connection) -> list[str]:
        """Return the schemas that hold a store each, or seem to; none where a database has one store at most."""
        ...

    def hidden_tables(self, connection: Connection, schema: str) -> frozenset[str]:
        """Return those of them that seem to be empty to this role, whatever is in them, though it may read them."""
        ...

    def narrowed_tables(
        self, connection: Connection, schema: str, names: Collection[str], *, when_locking: bool = False
    ) -> list[str]:
        """Return those of these tables of which this role may not be shown every row, or not when it locks them."""
        ...

    def checked_relations(self, connection: Connection, schema: str) -> list[str]:
        """Return the names of what `check_relation` can be asked about here: tables with their indexes, or indexes."""
        ...

    def check_relation(self, connection: Connection, schema: str, name: str) -> None:
        """Compare indexes with their table, row by row.

        Raises:
            StoreDamaged: they do not agree.
        """
        ...

    def table_rules(self, connection: Connection, schema: str) -> list[tuple[str, str, frozenset[str]]]:
        """Return of each table with rows what it is called, which of ours it is, and what it holds each row to.

        That is PRIMARY KEY (columns), NOT NULL column, IDENTITY column, and CHECK or UNIQUE with the rule's name.
        """
        ...

    def next_key(self, connection: Connection, schema: str, table: str, column: str) -> int | None:
        """Return the key that a table, which gives out its own, gives out next; None: this role may not know it."""
        ...

    def set_next_key(self, connection: Connection, schema: str, table: str, column: str, key: int) -> None:
        """Let it give out this one next; nobody else writes to the table meanwhile."""
        ...
