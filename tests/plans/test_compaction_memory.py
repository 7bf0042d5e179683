"""What a compaction remembers does not grow with the keys of a partition, nor with its log."""

from __future__ import annotations

import tracemalloc

import pytest

from txnstore.db import portions
from txnstore.db.store import Store
from txnstore.log import compaction
from txnstore.log.append import Append, append
from txnstore.log.bounds import read_bounds
from txnstore.log.codec import encode
from txnstore.log.compaction import compact_partitions
from txnstore.log.partition_storage import read_storage
from txnstore.log.topics import create_topic
from txnstore.model import Record

pytestmark = pytest.mark.slow

KEYS_MAX = 500
BATCH_RECORDS = 100
SETTINGS = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"}


def _filled(store: Store, keys: int) -> int:
    topic = store.write(lambda connection: create_topic(connection, f"keys-{keys}", config=SETTINGS))
    (partition_id,) = topic.partition_ids
    for start in range(0, keys, BATCH_RECORDS):
        batch = encode([Record(b"v" * 50, key=b"key %d" % number) for number in range(start, start + BATCH_RECORDS)])
        store.write(lambda connection, batch=batch: append(connection, [Append(partition_id, batch)]))
    return partition_id


def _compacted(store: Store, partition_id: int) -> int:
    """Compact to the end; return how many passes it took."""
    (bounds,) = store.read(lambda connection: read_bounds(connection, [partition_id])).values()
    passes = 0
    while (
        store.read(lambda connection: read_storage(connection, partition_id)).compacted_offset < bounds.high_watermark
    ):
        compact_partitions(store)
        passes += 1
    return passes


def test_a_compaction_remembers_a_bounded_number_of_keys(
    txnstore_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "KEYS_MAX", KEYS_MAX)
    monkeypatch.setattr(portions, "BYTES_AT_ONCE", 16 * 1024)
    peaks, passes = [], []
    # The first one warms up: what is compiled and cached once is no part of it.
    for keys in (KEYS_MAX, 2 * KEYS_MAX, 8 * KEYS_MAX):
        partition_id = _filled(txnstore_store, keys)
        tracemalloc.start()
        passes.append(_compacted(txnstore_store, partition_id))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert passes[1:] == [2, 8]
    assert peaks[2] < 1.5 * peaks[1], peaks
