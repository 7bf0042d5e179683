"""This file is one partition on its way to Kafka: pages of records, each in a Kafka transaction with the position.

The position is the store's offset of the next record, committed for the relay's group in the transaction that holds
the records before it.  So Kafka has both or neither, and whoever comes next reads it back after `init_transactions`,
which has fenced whoever was there before and ended what he had left open.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from txnstore.db.store import Store
from txnstore.errors import OffsetOutOfRange
from txnstore.log.bounds import Bounds, read_bounds
from txnstore.log.fetch import Page, fetch
from txnstore.model import TopicPartition
from txnstore.relay.errors import KafkaUnavailable, RelayFailed
from txnstore.relay.kafka_cluster import ANSWER_SECONDS, KafkaCluster
from txnstore.relay.names import group_of, transactional_id_of
from txnstore.relay.options import IsStopped, OnGap, Start
from txnstore.relay.positions import RelayPosition, begin_relay_positions, read_relay_positions
from txnstore.relay.settings import TRANSACTION_TIMEOUT_MS

_log = logging.getLogger(__name__)

#: What one Kafka transaction holds at most, but for a single batch that is larger.
PAGE_RECORDS_MAX: Final = 5_000
PAGE_BYTES_MAX: Final = 4 * 1024 * 1024
#: Kafka forgets positions that nobody has committed for a week (offsets.retention.minutes).
REFRESH_SECONDS: Final = 12 * 3600.0

_TRANSACTION_SECONDS: Final = TRANSACTION_TIMEOUT_MS / 1000
_POLL_EVERY: Final = 1_000
_QUEUE_FULL_SECONDS: Final = 0.1


class ShippedPartition:
    """One partition; for one thread at a time."""

    def __init__(
        self,
        store: Store,
        cluster: KafkaCluster,
        partition: TopicPartition,
        *,
        partition_id: int,
        topic_uuid: str,
        name: str,
        relay_id: str,
        start: Start,
        on_gap: OnGap,
        is_stopped: IsStopped,
    ) -> None:
        """Connect to nothing yet."""
        self.partition = partition
        self.partition_id = partition_id
        #: The offset of the next record; None until it was read back from Kafka.
        self.position: int | None = None
        self._store = store
        self._cluster = cluster
        self._topic_uuid = topic_uuid
        self._name = name
        self._relay_id = relay_id
        self._start = start
        self._on_gap = on_gap
        self._is_stopped = is_stopped
        self._producer: Any = None
        self._refused: Any = None
        self._committed_at = 0.0

    def is_due(self, end_offset: int) -> bool:
        """Return whether there is something to do up to this offset."""
        if self.position is None or self.position < end_offset:
            return True
        return time.monotonic() - self._committed_at > REFRESH_SECONDS

    def turn(self, end_offset: int, consumer: Any) -> int:
        """Ship a page that ends about there; return how many records that were.

        Raises:
            RelayFenced, RelayFailed: it cannot go on.
            KafkaUnavailable, TxnStoreError: call `forget`, then try again.
        """
        if self.position is None:
            self.position = self._open(consumer)
        page = self._page(self.position, end_offset)
        count = self._commit(page, page.next_offset, consumer)
        self.position = page.next_offset
        return count

    def forget(self) -> None:
        """Let the producer go, whatever it was doing: Kafka knows the position."""
        # Not `close`, which would first end what is open, and complain if it cannot.
        self._producer = None
        self.position = None

    def close(self) -> None:
        """Let the producer go between two turns."""
        if self._producer is not None and self.position is not None:
            self._producer.close()
        self.forget()

    def _open(self, consumer: Any) -> int:
        cluster = self._cluster
        self._producer = cluster.producer(transactional_id_of(self._name, *_pair(self.partition)))
        with cluster.translated(f"taking over {self.partition}"):
            cluster.in_slices(self._producer.init_transactions, _TRANSACTION_SECONDS, self._is_stopped)
            asked = cluster.library.TopicPartition(*_pair(self.partition))
            (answer,) = consumer.committed([asked], timeout=ANSWER_SECONDS)
            if answer.error is not None:
                raise cluster.error(answer.error, f"the position of {self.partition} in Kafka")
        self._committed_at = time.monotonic()
        bounds = self._bounds()
        if answer.offset < 0:
            position = self._first_position(bounds, consumer)
        elif self._is_of_this_topic(answer.metadata):
            position = int(answer.offset)
        else:
            position = self._after_gap(bounds, "its topic has been deleted and made anew in the store")
        return self._within(bounds, position)

    def _first_position(self, bounds: Bounds, consumer: Any) -> int:
        """Return where the relay begins; Kafka has it first, so that a position that is lost later is missed."""
        known = self._store.read(lambda connection: read_relay_positions(connection, self._relay_id))
        if self.partition in known:
            raise RelayFailed(
                f"{self.partition}: this relay has been at work, but Kafka has lost its position, the committed offset"
                f" of group {group_of(self._name)}: it is forgotten after offsets.retention.minutes without a relay."
                " A relay of another --name begins anew"
            )
        position = bounds.log_start_offset if self._start is Start.EARLIEST else bounds.last_stable_offset
        self._commit(None, position, consumer)
        begun = {self.partition: RelayPosition(self._topic_uuid, position)}
        self._store.write(lambda connection: begin_relay_positions(connection, self._relay_id, begun))
        return position

    def _is_of_this_topic(self, metadata: str | None) -> bool:
        store_uuid, _, topic_uuid = (metadata or "").partition(" ")
        if store_uuid != self._store.store_uuid:
            raise RelayFailed(
                f"{self.partition}: the committed offset of group {group_of(self._name)} in Kafka was not written by a"
                " relay of this store; choose another --name"
            )
        return topic_uuid == self._topic_uuid

    def _within(self, bounds: Bounds, position: int) -> int:
        if position < bounds.log_start_offset:
            why = f"its log begins at {bounds.log_start_offset}, behind the relay's position {position}"
            return self._after_gap(bounds, why)
        if position > bounds.high_watermark:
            raise RelayFailed(
                f"{self.partition}: the relay has copied up to {position}, but the log ends at"
                f" {bounds.high_watermark}: is this an older copy of the store?"
            )
        return position

    def _after_gap(self, bounds: Bounds, why: str) -> int:
        if self._on_gap is OnGap.ERROR:
            raise RelayFailed(f"{self.partition}: {why}; --on-gap earliest goes on with the first record there is")
        _log.warning("%s: %s; going on at %s", self.partition, why, bounds.log_start_offset)
        return bounds.log_start_offset

    def _page(self, position: int, end_offset: int) -> Page:
        try:
            return self._fetch(position, end_offset)
        except OffsetOutOfRange:
            self.position = self._within(self._bounds(), position)
            return self._fetch(self.position, end_offset)

    def _fetch(self, position: int, end_offset: int) -> Page:
        pages = self._store.read(
            lambda connection: fetch(
                connection,
                {self.partition_id: position},
                records_max=PAGE_RECORDS_MAX,
                bytes_max=PAGE_BYTES_MAX,
                end_offsets={self.partition_id: end_offset},
            )
        )
        return pages[self.partition_id]

    def _bounds(self) -> Bounds:
        bounds = self._store.read(lambda connection: read_bounds(connection, [self.partition_id]))
        return bounds[self.partition_id]

    def _commit(self, page: Page | None, next_offset: int, consumer: Any) -> int:
        """Give Kafka the records and the position behind them; return how many records."""
        cluster, producer = self._cluster, self._producer
        self._refused = None
        count = 0
        try:
            producer.begin_transaction()
            if page is not None and self.position is not None:
                count = self._produce(page, self.position)
            position = cluster.library.TopicPartition(
                *_pair(self.partition), next_offset, metadata=f"{self._store.store_uuid} {self._topic_uuid}"
            )
            group = consumer.consumer_group_metadata()
            cluster.in_slices(
                lambda timeout: producer.send_offsets_to_transaction([position], group, timeout),
                _TRANSACTION_SECONDS,
                self._is_stopped,
            )
            cluster.in_slices(producer.commit_transaction, _TRANSACTION_SECONDS, self._is_stopped)
        except cluster.library.KafkaException as exception:
            what = f"{self.partition}, up to offset {next_offset}"
            raise cluster.error(self._refused or exception.args[0], what) from None
        self._committed_at = time.monotonic()
        return count

    def _produce(self, page: Page, position: int) -> int:
        count = 0
        for batch in page.batches:
            for _, timestamp_ms, key, value, headers in batch.rows(position):
                record: dict[str, Any] = {
                    "key": key,
                    "partition": self.partition.partition,
                    # librdkafka takes 0 for now.
                    "timestamp": timestamp_ms or 1,
                    "headers": list(headers) or None,
                    "on_delivery": self._delivered,
                }
                self._produce_one(value, record)
                count += 1
                if count % _POLL_EVERY == 0:
                    self._producer.poll(0)
        return count

    def _produce_one(self, value: bytes | None, record: dict[str, Any]) -> None:
        deadline = time.monotonic() + _TRANSACTION_SECONDS
        while True:
            try:
                self._producer.produce(self.partition.topic, value, **record)
            except BufferError:
                if self._is_stopped() or time.monotonic() > deadline:
                    raise KafkaUnavailable(f"{self.partition}: Kafka takes no more records") from None
                self._producer.poll(_QUEUE_FULL_SECONDS)
            else:
                return

    def _delivered(self, error: Any, _: Any) -> None:
        """Note why Kafka refused a record: the transaction says only that it did."""
        kinds = self._cluster.library.KafkaError
        if (
            error is not None
            and self._refused is None
            and error.code()
            not in (
                kinds._PURGE_QUEUE,
                kinds._PURGE_INFLIGHT,
            )
        ):
            self._refused = error


def _pair(partition: TopicPartition) -> tuple[str, int]:
    return partition.topic, partition.partition
