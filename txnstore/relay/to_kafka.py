"""This file is the relay to Kafka: which partitions there are, which of them have news, and their turns.

Each partition has a producer with a transactional id of its own, so partitions take their turns side by side, and a
relay that is started while another one works fences it partition by partition.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from txnstore.clients.overdue_help import OverdueHelp
from txnstore.db.identity import check_original
from txnstore.db.store import Store
from txnstore.log.bounds import read_bounds
from txnstore.log.topics import Topic, find_topics, list_topics
from txnstore.model import IsolationLevel, TopicPartition
from txnstore.relay.errors import KafkaUnavailable, RelayFailed
from txnstore.relay.homes import check_homes
from txnstore.relay.kafka_cluster import KafkaCluster
from txnstore.relay.names import check_relay_name, group_of, relay_id_to
from txnstore.relay.options import RelayOptions
from txnstore.relay.shipped_partition import ShippedPartition
from txnstore.relay.trouble import Trouble, may_pass

_log = logging.getLogger(__name__)

#: How many partitions take their turns at once.
SIDE_BY_SIDE_MAX: Final = 8
#: How often the relay looks for new topics and partitions.
LOOK_AGAIN_SECONDS: Final = 5.0
#: How long it waits for news before it looks whether it is to end.
_WAIT_MS: Final = 250


class ToKafka:
    """Ships topics of a store to a Kafka cluster, each record once."""

    def __init__(self, store: Store, cluster: KafkaCluster, options: RelayOptions) -> None:
        """Nothing happens before `run`.

        Raises:
            RelayFailed: the relay's name is none.
        """
        self._store = store
        self._cluster = cluster
        self._options = options
        self._name = check_relay_name(options.name or store.store_uuid)
        self._relay_id = ""
        self._shipped: dict[TopicPartition, ShippedPartition] = {}
        self._trouble: dict[TopicPartition, Trouble] = {}
        self._looked_at: float | None = None
        self._overdue = OverdueHelp(lambda: store)
        self._stop = threading.Event()
        self.shipped_count = 0

    def run(self, stop: threading.Event) -> int:
        """Ship until `stop` is set, or with `once` up to the ends of now; return how many records were shipped.

        Raises:
            RelayFenced: another relay of this name has taken over.
            RelayFailed: Kafka is not reached at the start, or will not have a record, or records are gone, or ...
            StoreCopied: the store is a copy: it would take the place of the original's relay.
            TxnStoreError: the store refuses.
        """
        self._stop = stop
        check_original(self._store)
        try:
            self._relay_id = relay_id_to(self._cluster.cluster_id(), self._name)
            self._look(must_be_there=True)
        except KafkaUnavailable as error:
            raise RelayFailed(str(error), may_pass=True) from None
        ends = None
        if self._options.once:
            # The second look comes after the end of transactions whose time is up.
            self._ends()
            ends = self._ends()
        consumer = self._cluster.consumer(group_of(self._name))
        waiter = self._store.waiter()
        try:
            with ThreadPoolExecutor(SIDE_BY_SIDE_MAX, thread_name_prefix="txnstore-relay") as pool:
                while not stop.is_set():
                    is_busy = self._round(pool, consumer, ends)
                    if ends is not None and self._has_reached(ends):
                        break
                    if not is_busy:
                        waiter.wait(_WAIT_MS)
        finally:
            waiter.close()
            for shipped in self._shipped.values():
                shipped.close()
            consumer.close()
        return self.shipped_count

    def _round(self, pool: ThreadPoolExecutor, consumer: Any, ends: Mapping[int, int] | None) -> bool:
        """Give each partition that has news a turn; return whether one had."""
        try:
            if ends is None:
                self._look(must_be_there=False)
            reached = self._ends()
        except Exception as error:
            if not may_pass(error):
                raise
            self._stop.wait(_WAIT_MS / 1000)
            return False
        limits = reached if ends is None else {id_: min(reached[id_], end) for id_, end in ends.items()}
        due = [
            (shipped, limits[shipped.partition_id])
            for partition, shipped in self._shipped.items()
            if shipped.partition_id in limits
            and self._trouble[partition].is_over()
            and shipped.is_due(limits[shipped.partition_id])
        ]
        counts = list(pool.map(lambda item: self._turn(item[0], item[1], consumer), due))
        self.shipped_count += sum(counts)
        return any(counts)

    def _turn(self, shipped: ShippedPartition, end_offset: int, consumer: Any) -> int:
        trouble = self._trouble[shipped.partition]
        try:
            count = shipped.turn(end_offset, consumer)
        except Exception as error:
            shipped.forget()
            if not may_pass(error):
                raise
            if not self._stop.is_set():
                trouble.met(error)
            return 0
        trouble.passed()
        return count

    def _has_reached(self, ends: Mapping[int, int]) -> bool:
        return all(
            shipped.position is not None and shipped.position >= ends[shipped.partition_id]
            for shipped in self._shipped.values()
            if shipped.partition_id in ends
        )

    def _ends(self) -> dict[int, int]:
        ids = [shipped.partition_id for shipped in self._shipped.values()]
        if not ids:
            return {}
        self._overdue.help()
        bounds = self._store.read(lambda connection: read_bounds(connection, ids))
        for of in bounds.values():
            if of.last_stable_offset < of.high_watermark:
                self._overdue.held_back(of.partition_id, of.last_stable_offset)
            else:
                self._overdue.let_go(of.partition_id)
        return {id_: bounds[id_].end(IsolationLevel.READ_COMMITTED) for id_ in ids}

    def _look(self, *, must_be_there: bool) -> None:
        """Find topics and partitions that are new in the store, and have them in Kafka."""
        now = time.monotonic()
        if self._looked_at is not None and now - self._looked_at < LOOK_AGAIN_SECONDS:
            return
        topics = self._topics()
        if must_be_there:
            missing = sorted(set(self._options.topics) - {topic.name for topic in topics})
            if missing:
                raise RelayFailed(f"there is no topic {', '.join(missing)} in the store")
        new = [topic for topic in topics if self._is_new(topic)]
        for topic in new:
            check_homes(topic, self._store.database_id)
        if new:
            self._have_in_kafka(new)
            for topic in new:
                self._add(topic)
        self._looked_at = now

    def _topics(self) -> list[Topic]:
        names = self._options.topics
        return self._store.read(lambda connection: find_topics(connection, names or list_topics(connection)))

    def _is_new(self, topic: Topic) -> bool:
        return any(
            TopicPartition(topic.name, number) not in self._shipped for number in range(len(topic.partition_ids))
        )

    def _have_in_kafka(self, topics: Sequence[Topic]) -> None:
        """Create what is missing in Kafka, and refuse what would not fit there."""
        there = self._cluster.topics([topic.name for topic in topics])
        for topic in topics:
            count = len(topic.partition_ids)
            if topic.name not in there:
                self._cluster.create_topic(topic.name, count)
                _log.info("topic %s was created in Kafka with %s partitions", topic.name, count)
            elif there[topic.name].partition_count < count:
                raise RelayFailed(
                    f"topic {topic.name} has {count} partitions, but only {there[topic.name].partition_count} in Kafka:"
                    " give it as many there, or take another topic"
                )

    def _add(self, topic: Topic) -> None:
        patience_seconds = self._options.patience_seconds if self._options.once else None
        for number, partition_id in enumerate(topic.partition_ids):
            partition = TopicPartition(topic.name, number)
            if partition in self._shipped:
                continue
            self._trouble[partition] = Trouble(str(partition), patience_seconds)
            self._shipped[partition] = ShippedPartition(
                self._store,
                self._cluster,
                partition,
                partition_id=partition_id,
                topic_uuid=topic.topic_uuid,
                name=self._name,
                relay_id=self._relay_id,
                start=self._options.start,
                on_gap=self._options.on_gap,
                is_stopped=self._stop.is_set,
            )
