"""A cluster in which every partition and every group is elsewhere, though all of it is one database.

A coordinator that is given it takes the way over several databases: what is sent is announced first, the decision is
one database transaction, the markers of each partition are another one, then the offsets of all groups, and at last the
completion.  So whoever explores orders, crashes and refusals sees each step of it, with one database to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from sqlalchemy import Connection

from txnstore.db.cluster.cluster import Cluster
from txnstore.db.cluster.locality import Locality
from txnstore.db.store import Store
from txnstore.model import ProducerIdentity
from txnstore.transactions.transaction import LockedTransaction
from txnstore.verification.invariants import Violation
from txnstore.verification.partitions import partition_violations
from txnstore.verification.reading import Snapshot
from txnstore.verification.verify import coordinator_violations

#: What is sent goes to one database; the markers of each partition go to one of their own.
_OTHER = 2


class Elsewhere(Cluster):
    """Says of everything that it is in another database, and finds all of them in the one store."""

    def __init__(self, store: Store, *, sends_here: bool = False) -> None:
        """Make a cluster of which the store is the coordinator of every transaction.

        With `sends_here` only the markers go elsewhere: all that a transaction holds is taken for the store's own.
        """
        learns = store.has_learned_of_others
        super().__init__(store, (), _open_nothing)
        store.has_learned_of_others = learns
        self._sent_to = store.database_id if sends_here else _OTHER

    @property
    def is_alone(self) -> bool:
        """Other databases take part."""
        return False

    def own(self, database_id: int) -> Store:
        """Return the one store."""
        del database_id
        return self.controller

    def write_at(self, database_id: int, work: Callable[[Connection], Any], **options: Any) -> Any:
        """Write to the one store."""
        del database_id
        return self.controller.write(work, **options)

    def each(self, calls: Mapping[int, Callable[[], Any]]) -> dict[int, Any]:
        """Make one call after the other: each is a step of the actor or process that makes it."""
        self.parallel = False
        return super().each(calls)

    def by_leader(self, items: Iterable[Any], partition_id_of: Callable[[Any], int] | None = None) -> dict[int, Any]:
        """Return everything as that of one database."""
        del partition_id_of
        items = list(items)
        return {self._sent_to: items} if items else {}

    def known_leaders(self, partition_ids: Collection[int], connection: Connection | None = None) -> dict[int, int]:
        """Return another database for each of the partitions."""
        del connection
        return {number: number + _OTHER for number in partition_ids}

    def leaders_of(self, partition_ids: Collection[int]) -> dict[int, int]:
        """Return the same."""
        return self.known_leaders(partition_ids)

    def coordinator_id_of(self, name: str | None) -> int:
        """Return one database for all groups."""
        del name
        return self._sent_to

    def reconcile(self, database_id: int) -> bool:
        """Change nothing: every copy is the original."""
        del database_id
        return False


def _open_nothing(url: str, create: bool) -> Store:
    raise AssertionError(f"there is one store only: {url!r}, {create}")


def decide(
    store: Store,
    transactional_id: str,
    producer: ProducerIdentity,
    *,
    commit: bool,
    writers: Collection[int] | None = None,
) -> None:
    """End a transaction as a process does that dies before it has delivered the first marker."""

    def work(connection: Connection) -> None:
        transaction = LockedTransaction.lock(connection, transactional_id, Locality.of(store, Elsewhere(store)))
        transaction.end(producer, commit=commit, writers=writers)
        transaction.save("EndTxn")

    store.write(work)


def assert_sound_elsewhere(store: Store, *, partition_ids: Collection[int]) -> None:
    """Refuse what is wrong in a store of such a cluster: a marker may be delivered and still be queued."""

    def violations(connection: Connection) -> list[Violation]:
        found = [each for number in partition_ids for each in partition_violations(connection, number)]
        return [*found, *coordinator_violations(Snapshot((connection,), of_several=True))]

    assert store.read(violations) == []
