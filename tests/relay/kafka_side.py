"""The Kafka side of a test: topics with names of their own, records written and read back."""

from __future__ import annotations

import importlib
import time
import uuid
from typing import Any, NamedTuple

SECONDS = 20.0
NOW_MS = time.time_ns() // 1_000_000


class Sent(NamedTuple):
    """A record, as it has to arrive."""

    value: bytes | None
    key: bytes | None = None
    headers: tuple = ()
    # Kafka deletes what is older than a week.
    timestamp_ms: int = NOW_MS


class KafkaSide:
    """A cluster; `library` has confluent-kafka's names."""

    def __init__(self, bootstrap: str, library: Any = None) -> None:
        """Connect."""
        self.library = library or importlib.import_module("confluent_kafka")
        importlib.import_module(f"{self.library.__name__}.admin")
        self.bootstrap = bootstrap
        self.settings = {"bootstrap.servers": bootstrap, "log_level": 2}
        self.admin = self.library.admin.AdminClient(self.settings)
        self._producer = self.library.Producer(self.settings)

    def close(self):
        self._producer.close()

    def new_name(self) -> str:
        return f"t{uuid.uuid4().hex[:12]}"

    def new_topic(self, partitions: int = 1, config: dict[str, str] | None = None) -> str:
        topic = self.new_name()
        self.create(topic, partitions, config)
        return topic

    def has(self, topic: str) -> bool:
        return topic in self.admin.list_topics(timeout=SECONDS).topics

    def create(self, topic: str, partitions: int, config: dict[str, str] | None = None) -> None:
        new = self.library.admin.NewTopic(topic, num_partitions=partitions, replication_factor=1, config=config or {})
        self.admin.create_topics([new])[topic].result(SECONDS)

    def grow(self, topic: str, partitions: int) -> None:
        self.admin.create_partitions([self.library.admin.NewPartitions(topic, partitions)])[topic].result(SECONDS)

    def delete(self, topic: str) -> None:
        self.admin.delete_topics([topic])[topic].result(SECONDS)

    def partition_count(self, topic: str) -> int:
        return len(self.admin.list_topics(timeout=SECONDS).topics[topic].partitions)

    def send(self, topic: str, records, *, partition: int = 0, producer=None) -> None:
        producer = producer or self._producer
        for record in records:
            producer.produce(
                topic,
                record.value,
                key=record.key,
                headers=list(record.headers) or None,
                timestamp=record.timestamp_ms,
                partition=partition,
            )
        assert producer.flush(SECONDS) == 0

    def transactional(self, name: str):
        producer = self.library.Producer(self.settings | {"transactional.id": f"{name}-{uuid.uuid4().hex}"})
        producer.init_transactions(SECONDS)
        return producer

    def read(self, topic: str) -> dict[int, list[Sent]]:
        """Return what a reader of committed records gets, by partition."""
        consumer = self.library.Consumer(
            self.settings
            | {"group.id": "reader", "enable.auto.commit": False, "enable.partition.eof": True, "fetch.wait.max.ms": 0}
            | {"auto.offset.reset": "error", "isolation.level": "read_committed"}
        )
        numbers = range(self.partition_count(topic))
        found: dict[int, list[Sent]] = {number: [] for number in numbers}
        consumer.assign([self.library.TopicPartition(topic, number, 0) for number in numbers])
        left = set(numbers)
        while left:
            first = consumer.poll(SECONDS)
            assert first is not None, f"nothing comes any more of the partitions {left}"
            for message in [first, *consumer.consume(1000, 0)]:
                error = message.error()
                if error is None:
                    found[message.partition()].append(
                        Sent(
                            message.value(),
                            message.key(),
                            tuple(message.headers() or ()),
                            message.timestamp()[1],
                        )
                    )
                else:
                    assert error.code() == self.library.KafkaError._PARTITION_EOF, error
                    left.discard(message.partition())
        consumer.close()
        return found

    def expect(self, topic: str, records: dict[int, list[Sent]]) -> None:
        """Assert that a reader of committed records gets these and no others.

        Kafka answers a commit before it has written the markers, so they may be seen a moment later.
        """
        deadline = time.monotonic() + SECONDS
        while (found := self.read(topic)) != records and time.monotonic() < deadline:
            pass
        assert found == records
