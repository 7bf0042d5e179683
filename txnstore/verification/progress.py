"""The rules of progress: how far queries of Spark and relays are, and which runs and batches of queries are known.

What lies below where a query stands is taken for written when it comes again, and left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sqlalchemy import Connection, cast, func, or_, select

from txnstore.db.ddl import String
from txnstore.db.schema import (
    partition_heads,
    partitions,
    relay_positions,
    sink_batches,
    sink_inputs,
    sink_positions,
    sink_runs,
    topics,
    transactions,
)
from txnstore.db.statements import HotStatement
from txnstore.model import NO_PRODUCER_ID
from txnstore.transactions.sinks import OF_LAST_BATCH
from txnstore.verification.invariants import Invariant, Place, Violation
from txnstore.verification.reading import VIOLATIONS_MAX, Holding

_HOLDING: Final = Holding(sink_positions, sink_inputs, sink_runs, relay_positions)
_END: Final = partition_heads.c.next_offset.label("end_offset")
_QUERIES_AHEAD: Final = HotStatement(
    select(sink_positions.c.partition_id, sink_positions.c.sink_id, sink_positions.c.next_offset, _END)
    .join(partition_heads, partition_heads.c.partition_id == sink_positions.c.partition_id)
    .where(sink_positions.c.next_offset > partition_heads.c.next_offset)
    .limit(VIOLATIONS_MAX)
)
# Those of relays to Kafka: a relay from it stands at an offset there, in a topic that has another identity.
_RELAYS_AHEAD: Final = HotStatement(
    select(partitions.c.partition_id, relay_positions.c.relay_id, relay_positions.c.next_offset, _END)
    .join(
        topics,
        (cast(topics.c.topic_uuid, String) == relay_positions.c.topic_uuid)
        & (topics.c.name == relay_positions.c.topic),
    )
    .join(
        partitions,
        (partitions.c.topic_id == topics.c.topic_id)
        & (partitions.c.partition_number == relay_positions.c.partition_number),
    )
    .join(partition_heads, partition_heads.c.partition_id == partitions.c.partition_id)
    .where(relay_positions.c.next_offset > partition_heads.c.next_offset)
    .limit(VIOLATIONS_MAX)
)
_LAST: Final = (
    select(func.max(sink_batches.c.batch_id)).where(sink_batches.c.sink_id == sink_inputs.c.sink_id).scalar_subquery()
)
# A sink that is forgotten has no batches any more.
_NOT_OF_LAST: Final = HotStatement(
    select(sink_inputs.c.sink_id, sink_inputs.c.batch_id, _LAST.label("last_batch_id"))
    .distinct()
    .where(sink_inputs.c.run_id == OF_LAST_BATCH, sink_inputs.c.batch_id != _LAST)
    .limit(VIOLATIONS_MAX)
)
_RUNS_OF_OTHERS: Final = HotStatement(
    select(
        sink_runs.c.transactional_id,
        sink_runs.c.run_id,
        sink_runs.c.producer_id,
        sink_runs.c.producer_epoch,
        transactions.c.transactional_id.label("whose"),
        transactions.c.producer_epoch.label("last_epoch"),
    )
    .join(transactions, transactions.c.producer_id == sink_runs.c.producer_id)
    .where(
        sink_runs.c.producer_id != NO_PRODUCER_ID,
        or_(
            sink_runs.c.transactional_id != transactions.c.transactional_id,
            sink_runs.c.producer_epoch > transactions.c.producer_epoch,
        ),
    )
    .limit(VIOLATIONS_MAX)
)


def progress_violations(connection: Connection) -> Iterator[Violation]:
    """Return what is wrong with the progress that one database knows of, as far as it leads the partitions."""
    holding = _HOLDING.tables(connection)
    for row in _QUERIES_AHEAD.rows(connection) if sink_positions in holding else ():
        seen = f"the query {row.sink_id!r} has read up to {row.next_offset}, and the log ends at {row.end_offset}"
        yield Violation(Invariant.PROGRESS_IN_LOG, Place(row.partition_id), seen)
    for row in _RELAYS_AHEAD.rows(connection) if relay_positions in holding else ():
        seen = f"the relay {row.relay_id!r} has begun at {row.next_offset}, and the log ends at {row.end_offset}"
        yield Violation(Invariant.PROGRESS_IN_LOG, Place(row.partition_id), seen)
    for row in _NOT_OF_LAST.rows(connection) if sink_inputs in holding else ():
        seen = f"of the query {row.sink_id!r} it is noted what batch {row.batch_id} read, its last is "
        yield Violation(Invariant.SINKS_SOUND, Place(), f"{seen}{row.last_batch_id}")
    for row in _RUNS_OF_OTHERS.rows(connection) if sink_runs in holding else ():
        seen = (
            f"the run {row.run_id!r} writes as producer {row.producer_id}, epoch {row.producer_epoch}, which is that of"
            f" {row.whose!r}, epoch {row.last_epoch}"
        )
        yield Violation(Invariant.SINKS_SOUND, Place(transactional_id=row.transactional_id), seen)
