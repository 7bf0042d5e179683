"""This file is the rows of a transaction's further writers; the coordinator's row is locked wherever they change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, bindparam, delete, insert, literal, null, select, union_all, update

from txnstore.db.row_counts import must_hit
from txnstore.db.schema import (
    transaction_branches,
    transaction_partitions,
    transaction_writer_partitions,
    transaction_writers,
)
from txnstore.db.types import Flag, Int64
from txnstore.errors import InvalidRequest
from txnstore.model import ProducerIdentity
from txnstore.transactions.writer_rules import TransactionWriter

_OF_TRANSACTION: Final = transaction_writers.c.transactional_id == bindparam("of_transactional_id")
_THIS: Final = _OF_TRANSACTION & (transaction_writers.c.writer_producer_id == bindparam("of_writer_id"))
_INSERT: Final = insert(transaction_writers)
_INSERT_PARTITIONS: Final = insert(transaction_writer_partitions)
_REPORTED: Final = select(transaction_writers.c.reported).where(_THIS)
_REPORT: Final = update(transaction_writers).where(_THIS).values(reported=True)
# One statement for the producer's own partitions (its writer is NULL), the writers with theirs (NULL: none yet) and
# undecided branches, so that a transaction without further writers and branches is not asked about them in vain.
_PARTICIPANTS: Final = union_all(
    select(
        null().cast(Int64).label("writer_id"),
        literal(True, Flag).label("reported"),
        transaction_partitions.c.partition_id.label("partition_id"),
        literal(False, Flag).label("is_branch"),
    ).where(transaction_partitions.c.transactional_id == bindparam("of_transactional_id")),
    select(
        transaction_writers.c.writer_producer_id,
        transaction_writers.c.reported,
        transaction_writer_partitions.c.partition_id,
        literal(False, Flag),
    )
    .outerjoin(
        transaction_writer_partitions,
        (transaction_writer_partitions.c.transactional_id == transaction_writers.c.transactional_id)
        & (transaction_writer_partitions.c.writer_producer_id == transaction_writers.c.writer_producer_id),
    )
    .where(_OF_TRANSACTION),
    select(null(), literal(False, Flag), null(), literal(True, Flag))
    .where(transaction_branches.c.transactional_id == bindparam("of_transactional_id"))
    .where(transaction_branches.c.outcome.is_(None)),
)
_DELETE_PARTITIONS: Final = delete(transaction_writer_partitions).where(
    transaction_writer_partitions.c.transactional_id == bindparam("of_transactional_id")
)
_DELETE: Final = delete(transaction_writers).where(_OF_TRANSACTION)


@dataclass(frozen=True, slots=True)
class Participants:
    """The partitions that a transaction was written to, by whom."""

    partition_ids: Sequence[int]
    """Of the producer that began it."""

    writers: Mapping[int, Sequence[int]]
    """By writer id."""

    has_reported: Mapping[int, bool]
    """By writer id: whether the writer has said that it wrote everything."""

    has_branches: bool = False
    """Whether databases other than this one have a share in it."""

    @property
    def all_partition_ids(self) -> list[int]:
        """Every partition that anybody wrote to, sorted."""
        return sorted({*self.partition_ids, *(number for numbers in self.writers.values() for number in numbers)})


#: Of a transaction that nobody has written to.
NO_PARTICIPANTS: Final = Participants((), {}, {})


def insert_writer(connection: Connection, transactional_id: str, identity: ProducerIdentity) -> None:
    """Enter a new writer."""
    connection.execute(
        _INSERT,
        {
            "transactional_id": transactional_id,
            "writer_producer_id": identity.producer_id,
            "producer_epoch": identity.epoch,
            "reported": False,
        },
    )


def add_partitions(connection: Connection, writer: TransactionWriter, partition_ids: Iterable[int]) -> None:
    """Enter partitions that the writer wrote to for the first time."""
    entries = [
        {
            "transactional_id": writer.transactional_id,
            "writer_producer_id": writer.writer_id,
            "partition_id": partition_id,
        }
        for partition_id in sorted(partition_ids)
    ]
    if entries:
        connection.execute(_INSERT_PARTITIONS, entries)


def has_reported(connection: Connection, writer: TransactionWriter) -> bool:
    """Return whether the writer has said that it wrote everything.

    Raises:
        InvalidRequest: nobody with this producer id has joined the transaction.
    """
    reported: bool | None = connection.execute(_REPORTED, _of(writer)).scalar_one_or_none()
    if reported is None:
        raise InvalidRequest(f"writer {writer.writer_id} has not joined the transaction; nothing was written")
    return reported


def set_reported(connection: Connection, writer: TransactionWriter) -> None:
    """Take note that the writer has written everything."""
    must_hit(connection, _REPORT, _of(writer))


def participants_of(connection: Connection, transactional_id: str) -> Participants:
    """Return who has written to what in the open or decided transaction."""
    own: list[int] = []
    writers: dict[int, list[int]] = {}
    reported: dict[int, bool] = {}
    has_branches = False
    for row in connection.execute(_PARTICIPANTS, {"of_transactional_id": transactional_id}):
        if row.is_branch:
            has_branches = True
            continue
        if row.writer_id is None:
            own.append(row.partition_id)
            continue
        reported[row.writer_id] = row.reported
        partition_ids = writers.setdefault(row.writer_id, [])
        if row.partition_id is not None:
            partition_ids.append(row.partition_id)
    by_writer = {number: sorted(found) for number, found in writers.items()}
    return Participants(sorted(own), by_writer, reported, has_branches)


def forget_writers(connection: Connection, transactional_id: str) -> None:
    """Remove the writers of a transaction that is complete."""
    this = {"of_transactional_id": transactional_id}
    connection.execute(_DELETE_PARTITIONS, this)
    connection.execute(_DELETE, this)


def _of(writer: TransactionWriter) -> dict[str, object]:
    return {"of_transactional_id": writer.transactional_id, "of_writer_id": writer.writer_id}
