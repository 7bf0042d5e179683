"""The shares of committed transactions: in which other partitions one that is delivered here was committed, and where.

All markers that a transaction has in one database are written by one database transaction.  So whoever has seen one of
them can ask for the others at any later time: only retention and compaction take some away.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import Connection, and_, bindparam, select

from txnstore.db.schema import finished_transactions
from txnstore.db.statements import HotStatement
from txnstore.model import ControlType, ProducerIdentity


@dataclass(frozen=True, slots=True)
class CommittedShares:
    """One producer's committed transaction in some partitions of a database."""

    producer: ProducerIdentity
    """Whose records they are, with the epoch that this transaction alone has."""

    places: Mapping[int, int]
    """Where it was committed, by partition id: the offset of its marker."""

    first_offsets: Mapping[int, int] = field(default_factory=dict)
    """Where it begins, by partition id; 0 where that is not known."""


_own: Final = finished_transactions.alias("own")
_SHARES: Final = HotStatement(
    select(
        _own.c.marker_offset.label("own_marker_offset"),
        _own.c.producer_id,
        _own.c.producer_epoch,
        finished_transactions.c.partition_id,
        finished_transactions.c.marker_offset,
        finished_transactions.c.first_offset,
    )
    .join_from(
        _own,
        finished_transactions,
        and_(
            finished_transactions.c.partition_id.in_(bindparam("partition_ids", expanding=True)),
            finished_transactions.c.producer_id == _own.c.producer_id,
            finished_transactions.c.producer_epoch == _own.c.producer_epoch,
        ),
    )
    .where(
        _own.c.partition_id == bindparam("of_partition_id"),
        _own.c.marker_offset >= bindparam("first_marker_offset"),
        _own.c.marker_offset <= bindparam("last_marker_offset"),
        _own.c.outcome == int(ControlType.COMMIT),
    )
)


def read_shares(
    connection: Connection, partition_id: int, among: Collection[int], *, first_place: int, last_place: int
) -> dict[int, CommittedShares]:
    """Return the transactions that were committed at these places of the partition, by place, with their shares.

    Shares are looked for in the partitions `among`; those that are not in this database have none.
    """
    rows = _SHARES.rows(
        connection,
        {
            "of_partition_id": partition_id,
            "partition_ids": sorted(among),
            "first_marker_offset": first_place,
            "last_marker_offset": last_place,
        },
    )
    shares: dict[int, CommittedShares] = {}
    places: dict[int, tuple[dict[int, int], dict[int, int]]] = {}
    for row in rows:
        place = row.own_marker_offset
        if place not in shares:
            producer = ProducerIdentity(row.producer_id, row.producer_epoch)
            shares[place] = CommittedShares(producer, *places.setdefault(place, ({}, {})))
        marker_offsets, first_offsets = places[place]
        marker_offsets[row.partition_id] = row.marker_offset
        first_offsets[row.partition_id] = row.first_offset
    return shares
