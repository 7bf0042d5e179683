"""A program that is told over a pipe, call by call, what to do with a consumer and a producer.

So a test knows what a process is at when it stops it.  Between two orders nothing but the client's own threads run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import txnstore as confluent_kafka
from tests.tools.workload import Job

CALL_SECONDS = 30.0


@dataclass(frozen=True)
class Refused:
    """How a call was refused."""

    name: str
    requires_abort: bool
    is_fatal: bool
    text: str


@dataclass(frozen=True)
class Told:
    """What the application was told of, or given, and when (`time.monotonic`, the same in all processes)."""

    what: str
    partitions: tuple[int, ...]
    at: float
    offset: int = -1


def obey(job: Job, pipe: Connection) -> None:
    """Do what comes over the pipe and answer, until its other end is closed."""
    member = RemoteMember(job.url)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = getattr(member, name)(*arguments)
        except confluent_kafka.KafkaException as exception:
            error = exception.args[0]
            answer = Refused(error.name(), error.txn_requires_abort(), error.fatal(), str(error))
        pipe.send(answer)


class RemoteMember:
    """A consumer, a producer, and what the consumer's application was told since it was last asked."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._told: list[Told] = []
        self._consumer: confluent_kafka.Consumer
        self._producer: confluent_kafka.Producer
        self._owned: set[int] = set()

    def subscribe(self, topics: list[str], settings: dict[str, Any]) -> float:
        """Become a consumer; return when it began to join."""
        self._consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": self._url, "enable.auto.commit": False, "auto.offset.reset": "earliest", **settings}
        )
        at = time.monotonic()
        self._consumer.subscribe(topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)
        return at

    def _assigned(self, _: object, partitions: list[confluent_kafka.TopicPartition]) -> None:
        self._owned |= {partition.partition for partition in partitions}
        self._note("assign", partitions)

    def _revoked(self, _: object, partitions: list[confluent_kafka.TopicPartition]) -> None:
        self._owned -= {partition.partition for partition in partitions}
        self._note("revoke", partitions)

    def _lost(self, _: object, partitions: list[confluent_kafka.TopicPartition]) -> None:
        self._owned -= {partition.partition for partition in partitions}
        self._note("lost", partitions)

    def _note(self, what: str, partitions: list[confluent_kafka.TopicPartition]) -> None:
        self._told.append(Told(what, tuple(sorted(each.partition for each in partitions)), time.monotonic()))

    def poll(self, timeout_seconds: float) -> bool:
        """Poll once; return whether a record came."""
        message = self._consumer.poll(timeout_seconds)
        if message is None:
            return False
        error = message.error()
        if error is not None:
            self._told.append(Told(error.name(), (), time.monotonic()))
            return False
        partition, offset = message.partition(), message.offset()
        assert partition is not None
        assert offset is not None
        self._told.append(Told("record", (partition,), time.monotonic(), offset))
        return True

    def poll_for(self, seconds: float) -> None:
        """Poll in a tight loop for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.poll(0.02)

    def poll_until_owned(self, count: int, seconds: float) -> bool:
        """Poll in a tight loop until so many partitions are the consumer's; False if it takes too long."""
        end = time.monotonic() + seconds
        while len(self._owned) != count:
            if time.monotonic() > end:
                return False
            self.poll(0.02)
        return True

    def poll_until_records(self, count: int, seconds: float) -> int:
        """Poll until the application has so many records that were not taken; return how many it has after so long."""
        end = time.monotonic() + seconds
        while self._records() < count and time.monotonic() < end:
            self.poll(0.05)
        return self._records()

    def _records(self) -> int:
        return sum(each.what == "record" for each in self._told)

    def take_told(self) -> list[Told]:
        """Return what the application was told since this was last asked."""
        told, self._told = self._told, []
        return told

    def owned(self) -> list[int]:
        """Return what the consumer owns, as the application was told."""
        return sorted(self._owned)

    def assignment(self) -> list[int]:
        """Return what the consumer says that it owns."""
        return sorted(partition.partition for partition in self._consumer.assignment())

    def commit(self, topic: str, offsets: dict[int, int]) -> None:
        """Commit offsets by partition."""
        self._consumer.commit(offsets=_positions(topic, offsets), asynchronous=False)

    def committed(self, topic: str, partitions: list[int]) -> list[int]:
        """Return what the group has committed."""
        asked = [confluent_kafka.TopicPartition(topic, number) for number in partitions]
        return [position.offset for position in self._consumer.committed(asked, CALL_SECONDS)]

    def close(self) -> float:
        """Leave the group; return when that began."""
        at = time.monotonic()
        self._consumer.close()
        return at

    # --- the producer

    def begin(self, transactional_id: str, timeout_ms: int) -> None:
        """Become a producer, if it is not one yet, and begin a transaction."""
        if not hasattr(self, "_producer"):
            self._producer = confluent_kafka.Producer(
                {
                    "bootstrap.servers": self._url,
                    "transactional.id": transactional_id,
                    "transaction.timeout.ms": timeout_ms,
                }
            )
            self._producer.init_transactions(CALL_SECONDS)
        self._producer.begin_transaction()

    def produce(self, topic: str, value: str) -> None:
        """Produce a record in the transaction."""
        self._producer.produce(topic, value, partition=0)
        assert self._producer.flush(CALL_SECONDS) == 0

    def send_offsets(self, topic: str, offsets: dict[int, int]) -> None:
        """Let the transaction commit offsets."""
        metadata = self._consumer.consumer_group_metadata()
        self._producer.send_offsets_to_transaction(_positions(topic, offsets), metadata, CALL_SECONDS)

    def commit_transaction(self) -> None:
        """Commit the transaction."""
        self._producer.commit_transaction(CALL_SECONDS)

    def abort_transaction(self) -> None:
        """Abort the transaction."""
        self._producer.abort_transaction(CALL_SECONDS)


def _positions(topic: str, offsets: dict[int, int]) -> list[confluent_kafka.TopicPartition]:
    return [confluent_kafka.TopicPartition(topic, partition, offset) for partition, offset in offsets.items()]
