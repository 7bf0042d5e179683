"""The locality: which partitions and groups live in one database of several, and which elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Self

from sqlalchemy import Connection

from txnstore.db.cluster.cluster import Cluster
from txnstore.db.store import Store


@dataclass(frozen=True, slots=True)
class Locality:
    """What lives in one database of several, and what elsewhere."""

    cluster: Cluster = field(repr=False)
    database_id: int

    @classmethod
    def of(cls, store: Store, cluster: Cluster | None) -> Self | None:
        """Return what is local to the store; None while it is alone: everything is."""
        return None if cluster is None or cluster.is_alone else cls(cluster, store.database_id)

    def partitions_elsewhere(self, connection: Connection, partition_ids: Collection[int]) -> set[int]:
        """Return those of the partitions that live in other databases, or that this one does not know."""
        leaders = self.cluster.known_leaders(partition_ids, connection)
        return {number for number in partition_ids if leaders.get(number) != self.database_id}

    def groups_elsewhere(self, group_ids: Iterable[str]) -> set[str]:
        """Return those of the groups that live in other databases."""
        return {name for name in group_ids if self.cluster.coordinator_id_of(name) != self.database_id}
