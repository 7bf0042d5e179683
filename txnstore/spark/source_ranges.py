"""This file is what one task reads: ranges of offsets, split so that there is work for several tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from txnstore.model import TopicPartition


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The offsets of one partition from `start_offset` up to, and without, `end_offset`."""

    partition: TopicPartition
    partition_id: int
    start_offset: int
    end_offset: int

    @property
    def size(self) -> int:
        """How many offsets; at most as many records."""
        return self.end_offset - self.start_offset


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
    return [replace(whole, start_offset=start, end_offset=end) for start, end in pairwise(edges)]


def admit(
    starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], max_offsets: int | None
) -> dict[TopicPartition, int]:
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
