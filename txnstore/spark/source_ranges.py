"""The range of offsets that one task reads: page after page, each in a database transaction of its own.

No database transaction is open while Spark takes the records: it takes them as slowly as it likes.  Where records that
a query has to read are gone, that is an error or a warning, as the query chose (`DataLoss`).

In commit order the range is one of places (see `log.commit_order`), and what comes are the records at these places: a
transaction is in the range in which its marker is, whole, wherever its records are.  So ranges may be split there, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType
from sqlalchemy import Connection

from txnstore.db.store import Store
from txnstore.errors import OffsetOutOfRange, UnknownTopicOrPartition
from txnstore.log.bounds import Bounds, read_bounds
from txnstore.log.codec import RecordBatch
from txnstore.log.commit_order import CommitPosition, fetch_in_commit_order, first_cut
from txnstore.log.fetch import fetch
from txnstore.model import IsolationLevel, PartitionName

if TYPE_CHECKING:
    import pyarrow as pa

_logger: Final = logging.getLogger("txnstore")
#: How much a task has in memory at a time; at least one batch.
PAGE_RECORDS_MAX: Final = 50_000
PAGE_BYTES_MAX: Final = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The offsets, or places, of one partition from where it begins up to, and without, `end_offset`."""

    partition: PartitionName
    partition_id: int
    begin: CommitPosition
    """In commit order this may be within a transaction, of which the query's group has read a part."""

    end_offset: int
    whole_from: int = 0
    """In commit order: a transaction that begins here or later comes, or is reported as lost (see `whole_from`)."""

    @property
    def start_offset(self) -> int:
        """The first offset, or place."""
        return self.begin.place

    @property
    def size(self) -> int:
        """How many offsets: at most as many records, but for those of transactions in commit order."""
        return self.end_offset - self.start_offset


def whole_from(begin: int, bounds: Bounds) -> int:
    """Return where a transaction may begin that a query is to have read whole, if it begins there in commit order.

    A query that begins where the log does has lost nothing that was deleted before.
    """
    return begin if begin == bounds.log_start_offset else 0


def split(
    ranges: Sequence[OffsetRange], *, min_partitions: int | None = None, max_records: int | None = None
) -> list[OffsetRange]:
    """Return the ranges in at least about `min_partitions` parts, none with more than `max_records` offsets.

    Larger ranges are split into more parts.  A range of no offsets stays as it is.
    """
    if max_records is not None:
        ranges = [part for whole in ranges for part in _split_evenly(whole, -(-whole.size // max_records))]
    if min_partitions is None or len(ranges) >= min_partitions:
        return list(ranges)
    total = sum(whole.size for whole in ranges)
    # What is smaller than an even share is read in one part; the others have the rest of the parts to themselves.
    small = sum(1 for whole in ranges if whole.size * min_partitions <= total)
    large_total = sum(whole.size for whole in ranges if whole.size * min_partitions > total)
    return [
        part
        for whole in ranges
        for part in _split_evenly(
            whole,
            1
            if whole.size * min_partitions <= total
            else max(1, -(-whole.size * (min_partitions - small) // large_total)),
        )
    ]


def _split_evenly(whole: OffsetRange, count: int) -> Iterable[OffsetRange]:
    count = max(1, min(count, whole.size))
    edges = [whole.start_offset + whole.size * index // count for index in range(count + 1)]
    begins = [whole.begin, *map(CommitPosition, edges[1:-1])]
    return [replace(whole, begin=begin, end_offset=end) for begin, end in zip(begins, edges[1:], strict=True)]


def admit(
    starts: Mapping[PartitionName, int], ends: Mapping[PartitionName, int], max_offsets: int | None
) -> dict[PartitionName, int]:
    """Return how far each partition may be read so that about `max_offsets` offsets are read of all of them.

    Each gets its share of what is there, and at least one offset, so that a busy partition starves no other: only
    with more partitions than `max_offsets` do they get more than that in all.
    """
    sizes = {partition: ends[partition] - starts[partition] for partition in sorted(ends)}
    total = sum(sizes.values())
    if max_offsets is None or total <= max_offsets:
        return {partition: starts[partition] + size for partition, size in sizes.items()}
    shares = {partition: max(size * max_offsets // total, min(size, 1)) for partition, size in sizes.items()}
    excess = sum(shares.values()) - max_offsets
    for partition in sorted(shares, key=lambda partition: -shares[partition]):
        if excess <= 0:
            break
        taken = min(excess, max(shares[partition] - 1, 0))
        shares[partition] -= taken
        excess -= taken
    return {partition: starts[partition] + share for partition, share in shares.items()}


class RangePartition(InputPartition):
    """One range of offsets, for one task."""

    def __init__(self, wanted: OffsetRange, store_uuid: str, reader_id: int = 0) -> None:
        """Keep the range, the store it is of, and which reader of the query has made it; Spark pickles them."""
        super().__init__(wanted)
        self.wanted = wanted
        self.store_uuid = store_uuid
        self.reader_id = reader_id

    def __repr__(self) -> str:
        """Return the range, as Spark's logs show it."""
        return f"{self.wanted.partition} {self.wanted.start_offset}..{self.wanted.end_offset}"


class DataLoss:
    """Reports what is lost in the way that the query chose: `failOnDataLoss`."""

    def __init__(self, *, fails: bool) -> None:
        """Raise if `fails`, else warn."""
        self._fails = fails

    def report(self, what: str, instead: str) -> None:
        """Say what is lost, and what a query that can live with it does instead.

        Raises:
            OffsetOutOfRange: the query cannot.
        """
        if self._fails:
            raise OffsetOutOfRange(f"{what}. With failOnDataLoss=false the query {instead}, and loses what is gone")
        _logger.warning("%s; the query %s (failOnDataLoss=false)", what, instead, extra={"event": "source_data_lost"})

    def begin_within(self, partition: PartitionName, offset: int, bounds: Bounds) -> int:
        """Return where reading from `offset` on can begin: there, or where the log starts.

        Raises:
            OffsetOutOfRange: what lies there is gone, or never was, and the query fails on it.
        """
        if offset < bounds.log_start_offset:
            self.report(
                f"the records of {partition} from offset {offset} to {bounds.log_start_offset - 1} are gone: retention"
                " or delete_records took them before they were read",
                f"goes on at offset {bounds.log_start_offset}",
            )
            return bounds.log_start_offset
        if offset > bounds.high_watermark:
            self.report(
                f"{partition} was to be read from offset {offset} on, but its log ends at {bounds.high_watermark}: its"
                " topic was deleted and created again, or the database was restored, or the url leads to another store",
                f"begins at offset {bounds.log_start_offset}",
            )
            return bounds.log_start_offset
        return offset

    def go_on_within(
        self, partition: PartitionName, position: CommitPosition, bounds: Bounds, *, has_begun: bool = False
    ) -> CommitPosition:
        """Return where reading can go on that has come to this position, as `begin_within`.

        Raises:
            OffsetOutOfRange: what lies there is gone, and the query fails on it, or its task `has_begun` and read a
                part of the transaction.
        """
        if position.offset_in_transaction == 0 or position.place >= bounds.high_watermark:
            # In what is not there nobody is in the middle, and another transaction may come to be committed there.
            return CommitPosition(self.begin_within(partition, position.place, bounds))
        if position.offset_in_transaction >= bounds.log_start_offset:
            return position
        gone = (
            f"the records of {partition} from offset {position.offset_in_transaction} to"
            f" {bounds.log_start_offset - 1} are gone: retention or delete_records took them"
        )
        its_place = f"their transaction, which was committed at {position.place}"
        if has_begun:
            # Whatever the query chose: a task writes no half of a transaction.
            raise OffsetOutOfRange(f"{gone} while {its_place}, was read; a task that begins again reads none of it")
        self.report(f"{gone} when the group had read the beginning of {its_place}", "leaves out the rest of it")
        return CommitPosition(max(position.place, bounds.log_start_offset))

    def report_cut(self, connection: Connection, wanted: OffsetRange, begin: CommitPosition, bounds: Bounds) -> None:
        """Report a transaction that does not come any more, because a part of it has been deleted.

        Raises:
            OffsetOutOfRange: there is one, and the query fails on it.
        """
        places = range(begin.place + (begin.offset_in_transaction > 0), wanted.end_offset)
        cut = first_cut(connection, bounds, places, wanted.whole_from)
        if cut is not None:
            self.report(
                f"the transaction of {wanted.partition} that begins at offset {cut.first_offset} and was committed at"
                f" {cut.place} is not whole any more: retention or delete_records took what lies before offset"
                f" {bounds.log_start_offset}",
                "leaves it out, and all others of which a part is gone",
            )


@dataclass(frozen=True, slots=True)
class _Piece:
    """What a task has read in one go."""

    log_start_offset: int
    begin: CommitPosition
    """Where it begins: later than asked if what lay there is gone and the query goes on."""

    next_position: CommitPosition
    batches: Sequence[tuple[RecordBatch, range]] = ()
    """Each with the offsets that are wanted of it."""


@dataclass(frozen=True, slots=True)
class RangeReader:
    """Reads ranges at one isolation level, or in commit order, as Arrow batches with the columns of `schema`."""

    store: Store
    schema: StructType
    isolation: IsolationLevel
    loss: DataLoss
    in_commit_order: bool = False
    first_timestamp_ms: int = 0
    """Batches whose records are all older may be left out."""

    def read(self, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
        """Return the records of the range, in order; all that there are, or an error, or a warning.

        Raises:
            OffsetOutOfRange: records of the range are gone, and the query fails on that.
            TxnStoreError: a batch is damaged, or the database cannot be asked.
        """
        from txnstore.spark.source_batches import ArrowReader  # planning alone needs none

        arrow = ArrowReader(self.schema, wanted.partition)
        position = wanted.begin
        while position.place < wanted.end_offset:
            try:
                piece = self._piece(wanted, position)
            except UnknownTopicOrPartition:
                self.loss.report(
                    f"{wanted.partition} is gone, with the records from offset {position.place} on: its topic was"
                    " deleted",
                    "goes on without it",
                )
                return
            if piece.begin.place >= wanted.end_offset:
                return
            if piece.next_position <= piece.begin:
                self.loss.report(
                    f"{wanted.partition} was to be read up to offset {wanted.end_offset}, but now it ends at"
                    f" {piece.begin.place} or before: was the database restored?",
                    "goes on without the rest",
                )
                return
            yield from arrow.read(
                (batch, offsets)
                for batch, offsets in piece.batches
                if batch.max_timestamp_ms >= self.first_timestamp_ms
            )
            position = piece.next_position
            # What was cut until now has been reported.
            wanted = replace(wanted, whole_from=max(wanted.whole_from, piece.log_start_offset))

    def _piece(self, wanted: OffsetRange, position: CommitPosition) -> _Piece:
        """Return a page, or nothing if the log has become shorter than it was when the range was planned."""

        def work(connection: Connection) -> _Piece:
            bounds = read_bounds(connection, [wanted.partition_id])[wanted.partition_id]
            if position.place > bounds.high_watermark:
                return _Piece(bounds.log_start_offset, position, position)
            begin = self.loss.go_on_within(wanted.partition, position, bounds, has_begun=position != wanted.begin)
            if begin.place >= wanted.end_offset:
                return _Piece(bounds.log_start_offset, begin, begin)
            if self.in_commit_order and wanted.whole_from < bounds.log_start_offset:
                self.loss.report_cut(connection, wanted, begin, bounds)
            read = self._in_commit_order if self.in_commit_order else self._in_offset_order
            batches, next_position = read(connection, wanted, begin)
            return _Piece(bounds.log_start_offset, begin, next_position, batches)

        return self.store.read(work)

    def _in_offset_order(
        self, connection: Connection, wanted: OffsetRange, begin: CommitPosition
    ) -> tuple[Sequence[tuple[RecordBatch, range]], CommitPosition]:
        page = fetch(
            connection,
            {wanted.partition_id: begin.place},
            isolation=self.isolation,
            records_max=PAGE_RECORDS_MAX,
            bytes_max=PAGE_BYTES_MAX,
            end_offsets={wanted.partition_id: wanted.end_offset},
        )[wanted.partition_id]
        offsets = range(begin.place, wanted.end_offset)
        return [(batch, offsets) for batch in page.batches], CommitPosition(page.next_offset)

    def _in_commit_order(
        self, connection: Connection, wanted: OffsetRange, begin: CommitPosition
    ) -> tuple[Sequence[tuple[RecordBatch, range]], CommitPosition]:
        page = fetch_in_commit_order(
            connection,
            {wanted.partition_id: begin},
            records_max=PAGE_RECORDS_MAX,
            bytes_max=PAGE_BYTES_MAX,
            end_places={wanted.partition_id: wanted.end_offset},
        )[wanted.partition_id]
        # A record is at its place or before it, so what lies after the range is the rest of a batch that ends there.
        batches = [(placed.batch, range(placed.from_offset, wanted.end_offset)) for placed in page.batches]
        return batches, page.next_position
