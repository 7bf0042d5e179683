"""This file is how far a stream has come, as Spark keeps it in its checkpoint.

It is the JSON of Spark's Kafka source, {"topic": {"0": 23}}, so that it can be given to startingOffsets.  Beside the
topics there may be "$from": where this batch begins in partitions that it is the first one to read, or in which it
has to go on elsewhere than the batch before it ended.  Spark asks a Python source for its first offset again after a
restart and forgets the answer; what it does keep, before a batch runs, is the batch's end.  So the beginning travels
there, and a batch that is run again begins where it began the first time, whatever has happened to the log meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from txnstore.errors import InvalidConfiguration
from txnstore.model import TopicPartition

#: No topic can be called so.
FROM: Final = "$from"

Offsets = Mapping[TopicPartition, int]
#: What goes into the checkpoint; JSON.
StreamOffset = dict[str, Any]

#: Before the first batch.  It says nothing, so it is the same whenever Spark asks for it.
INITIAL: Final[StreamOffset] = {}


def stream_offset(ends: Offsets, begins: Offsets | None = None) -> StreamOffset:
    """Return the end of a batch: offsets by partition, and where it begins in those of `begins`.

    Always the same text for the same offsets, whatever the order in which they come.
    """
    offset: StreamOffset = _by_topic(ends)
    if begins is not None or not ends:
        # Without a single partition it still is not INITIAL.
        offset[FROM] = _by_topic(begins or {})
    return offset


def ends_of(offset: StreamOffset) -> dict[TopicPartition, int]:
    """Return the end of each partition."""
    return _by_partition({topic: numbers for topic, numbers in offset.items() if topic != FROM}, offset)


def begins_of(start: StreamOffset, end: StreamOffset) -> dict[TopicPartition, int]:
    """Return where the batch between two offsets begins in each partition that is still read at its end."""
    ends = ends_of(end)
    begins = {**ends_of(start), **_by_partition(end.get(FROM, {}), end)}
    missing = ends.keys() - begins.keys()
    if missing:
        raise _unreadable(f"nothing says where {', '.join(sorted(map(str, missing))[:5])} begins")
    return {partition: begins[partition] for partition in ends}


def _by_topic(offsets: Offsets) -> dict[str, dict[str, int]]:
    topics: dict[str, dict[str, int]] = {}
    for partition in sorted(offsets):
        topics.setdefault(partition.topic, {})[str(partition.partition)] = offsets[partition]
    return topics


def _by_partition(topics: Mapping[str, Any], whole: StreamOffset) -> dict[TopicPartition, int]:
    try:
        found = {
            TopicPartition(topic, int(number)): offset
            for topic, numbers in topics.items()
            for number, offset in numbers.items()
        }
    except (AttributeError, ValueError, TypeError):
        raise _unreadable(json.dumps(whole)[:200]) from None
    if set(map(type, found.values())) - {int}:
        raise _unreadable(json.dumps(whole)[:200])
    return found


def _unreadable(why: str) -> InvalidConfiguration:
    return InvalidConfiguration(
        f"the query's checkpoint holds offsets that txnstore's source did not write ({why}); was it made by another"
        " source? Use a checkpointLocation of its own"
    )
