"""A program that turns the records of one topic into those of another, exactly once, whatever befalls it.

It is written as users of `confluent_kafka` write it: with the public names alone, offsets in the transaction, and an
answer to each of the three kinds of errors.
"""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import dataclass

import txnstore as confluent_kafka
from tests.tools.workload import Job

CALL_SECONDS = 60.0
#: How often a transaction is aborted on purpose.
CHANGES_ITS_MIND = 0.1
#: How often, and for how long at most, it dawdles between two steps: that is when it is killed.
DAWDLES = 0.2
DAWDLES_SECONDS = 0.06
GROUP = "workers"


@dataclass(frozen=True)
class Plan:
    """What is turned into what."""

    source: str
    target: str
    target_partition_count: int
    assigned: tuple[int, ...] | None
    """The partitions that the worker reads; None: those that its group gives it."""
    session_timeout_ms: int


class Fenced(Exception):
    """A newer process does the work."""


def transform(job: Job, plan: Plan) -> None:
    """Work until killed or fenced."""
    with contextlib.suppress(Fenced):
        Worker(job, plan).run()


class Worker:
    def __init__(self, job: Job, plan: Plan) -> None:
        self._plan = plan
        self._random = random.Random(f"{job.seed}/{job.process}")
        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": job.url, "transactional.id": job.name, "transaction.timeout.ms": job.timeout_ms}
        )
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": job.url,
                "group.id": GROUP,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "session.timeout.ms": plan.session_timeout_ms,
                "heartbeat.interval.ms": plan.session_timeout_ms // 4,
            }
        )

    def run(self) -> None:
        self._call(self._producer.init_transactions)
        # Only now: what an earlier life left open has been aborted, so that the committed offsets are final.
        if self._plan.assigned is None:
            self._consumer.subscribe([self._plan.source])
        else:
            self._consumer.assign(
                [confluent_kafka.TopicPartition(self._plan.source, number) for number in self._plan.assigned]
            )
        while True:
            messages = [
                message
                for message in self._consumer.consume(self._random.randint(1, 20), 0.1)
                if message.error() is None
            ]
            if messages and not self._is_done(messages):
                self._rewind()

    def _is_done(self, messages: list[confluent_kafka.Message]) -> bool:
        """Write what the messages become, in one transaction with their offsets; whether that is committed."""
        self._call(self._producer.begin_transaction)
        try:
            for message in messages:
                name = f"{message.partition()}/{message.offset()}"
                self._producer.produce(
                    self._plan.target,
                    message.value(),
                    name,
                    partition=self._random.randrange(self._plan.target_partition_count),
                )
            positions = _positions_after(messages)
            metadata = self._consumer.consumer_group_metadata()
            self._dawdle()
            self._call(lambda timeout: self._producer.send_offsets_to_transaction(positions, metadata, timeout))
            self._dawdle()
            if self._random.random() >= CHANGES_ITS_MIND:
                self._call(self._producer.commit_transaction)
                self._dawdle()
                return True
        except confluent_kafka.KafkaException as exception:
            if not exception.args[0].txn_requires_abort():
                raise
        self._call(self._producer.abort_transaction)
        return False

    def _dawdle(self) -> None:
        if self._random.random() < DAWDLES:
            time.sleep(self._random.uniform(0, DAWDLES_SECONDS))

    def _rewind(self) -> None:
        """Read on from where the last committed transaction ended."""
        assignment = self._consumer.assignment()
        if not assignment:
            return
        for position in self._consumer.committed(assignment, CALL_SECONDS):
            if position.offset < 0:
                position.offset = confluent_kafka.OFFSET_BEGINNING
            self._consumer.seek(position)

    def _call(self, call) -> None:
        """Call until it goes through, as long as calling again is allowed."""
        arguments = () if call == self._producer.begin_transaction else (CALL_SECONDS,)
        while True:
            try:
                call(*arguments)
            except confluent_kafka.KafkaException as exception:
                error = exception.args[0]
                if error.fatal():
                    raise Fenced(str(error)) from exception
                if not error.retriable():
                    raise
            else:
                return


def _positions_after(messages: list[confluent_kafka.Message]) -> list[confluent_kafka.TopicPartition]:
    """Return where to read on in each partition."""
    last = {(message.topic(), message.partition()): message for message in messages}
    positions = []
    for (topic, partition), message in last.items():
        offset = message.offset()
        assert topic is not None
        assert partition is not None
        assert offset is not None
        positions.append(confluent_kafka.TopicPartition(topic, partition, offset + 1))
    return positions
