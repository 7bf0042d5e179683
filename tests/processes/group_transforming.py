"""A member of a group that turns the records of one topic into those of another, exactly once.

It is written as users of `confluent_kafka` write it, and so that rebalances fall into its transactions: a transaction
spans several calls of consume(), and what is revoked meanwhile is committed first or, as often, given up.  Each output
names its transaction and the interval of input offsets that the transaction has consumed in the partition.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

import txnstore as confluent_kafka
from tests.tools.workload import Job

CALL_SECONDS: Final = 60.0
#: What it does how often: aborts on purpose, gives a transaction up at a rebalance instead of committing it.
CHANGES_ITS_MIND: Final = 0.07
GIVES_UP: Final = 0.5
#: How often, and for how long at most, it dawdles between two steps: that is when it is killed.
DAWDLES: Final = 0.4
DAWDLES_SECONDS: Final = 0.06
#: How many calls of consume() a transaction spans at most, and how many records each brings at most.
STEPS_MAX: Final = 10
MESSAGES_MAX: Final = 6


@dataclass(frozen=True)
class GroupPlan:
    """What is turned into what, and how."""

    source: str
    target: str
    group: str
    assignor: str
    session_timeout_ms: int
    transactional_id: str


@dataclass
class Count:
    """What a life went through, in a file of its own that outlives it."""

    assigns: int = 0
    commits: int = 0
    aborts: int = 0
    refused: int = 0
    """Transactions that the group or the store refused to commit."""
    revokes: int = 0
    rebalanced: int = 0
    """Transactions that a rebalance fell into."""
    lost: int = 0


class Fenced(Exception):
    """The producer is finished; a new process goes on."""


class NotOurs(Exception):
    """A record came of a partition that the application was not given."""


def transform_in_group(job: Job, plan: GroupPlan) -> None:
    """Work until killed, or leave the group in good order at SIGTERM."""
    member = TransformingMember(job, plan)
    try:
        member.run()
    except Fenced:
        member.note("refused")


class TransformingMember:
    def __init__(self, job: Job, plan: GroupPlan) -> None:
        self._plan = plan
        self._process = job.process
        self._random = random.Random(f"{job.seed}/{job.process}")
        self._is_to_leave = False
        signal.signal(signal.SIGTERM, self._ask_to_leave)
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": job.url,
                "transactional.id": plan.transactional_id,
                "transaction.timeout.ms": job.timeout_ms,
            }
        )
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": job.url,
                "group.id": plan.group,
                "client.id": job.process,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "partition.assignment.strategy": plan.assignor,
                "session.timeout.ms": plan.session_timeout_ms,
                "heartbeat.interval.ms": plan.session_timeout_ms // 4,
            }
        )
        self._count = Count()
        self._count_file = job.folder / f"{job.process}.count"
        self._owned: set[int] = set()
        self._transactions = 0
        self._taken: list[confluent_kafka.Message] = []
        """What the open transaction has consumed; none is open while it is empty."""
        self._has_to_rewind = False

    def _ask_to_leave(self, *_: object) -> None:
        self._is_to_leave = True

    def note(self, what: str) -> None:
        """Count something."""
        setattr(self._count, what, getattr(self._count, what) + 1)
        written = self._count_file.with_suffix(".new")
        written.write_text(json.dumps(asdict(self._count)))
        written.replace(self._count_file)

    def run(self) -> None:
        self._call(self._producer.init_transactions)
        self._consumer.subscribe(
            [self._plan.source], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
        )
        while not self._is_to_leave:
            for _ in range(self._random.randint(1, STEPS_MAX)):
                self._take(self._random.randint(1, MESSAGES_MAX))
                self._dawdle()
            if self._taken:
                self._end(gives_up=self._random.random() < CHANGES_ITS_MIND)
            if self._has_to_rewind:
                self._rewind()
        if self._taken:
            self._end(gives_up=self._random.random() < GIVES_UP)
        self._consumer.close()
        self._producer.close()

    # --- a transaction

    def _take(self, count: int) -> None:
        """Consume some records into the transaction."""
        messages = self._consumer.consume(count, 0.05)
        for message in messages:
            error = message.error()
            if error is not None:
                if error.fatal():
                    raise Fenced(str(error))
                continue
            if message.partition() not in self._owned:
                raise NotOurs(f"{message.partition()}/{message.offset()} came, and ours are {sorted(self._owned)}")
            if self._has_to_rewind:
                # What came behind a callback that gave the transaction up; it comes again.
                continue
            if not self._taken:
                self._call(self._producer.begin_transaction)
                self._transactions += 1
            self._taken.append(message)

    def _end(self, *, gives_up: bool) -> None:
        """Commit the open transaction, or abort it: as it is told to, or as it has to."""
        taken, self._taken = self._taken, []
        if gives_up or not self._is_committed(taken):
            self._call(self._producer.abort_transaction)
            self.note("aborts")
            self._has_to_rewind = True

    def _is_committed(self, taken: Sequence[confluent_kafka.Message]) -> bool:
        intervals = _intervals(taken)
        name = f"{self._process}:{self._transactions}"
        try:
            for message in taken:
                partition = message.partition()
                assert partition is not None
                first, end = intervals[partition]
                self._producer.produce(
                    self._plan.target,
                    message.value(),
                    f"{partition}/{message.offset()}",
                    partition=partition,
                    headers=[("transaction", name), ("interval", f"{first}-{end}")],
                )
            self._dawdle()
            positions = [
                confluent_kafka.TopicPartition(self._plan.source, partition, end)
                for partition, (_, end) in intervals.items()
            ]
            metadata = self._consumer.consumer_group_metadata()
            self._call(lambda timeout: self._producer.send_offsets_to_transaction(positions, metadata, timeout))
            self._dawdle()
            self._call(self._producer.commit_transaction)
        except confluent_kafka.KafkaException as exception:
            if not exception.args[0].txn_requires_abort():
                raise
            self.note("refused")
            return False
        self.note("commits")
        self._dawdle()
        return True

    def _rewind(self) -> None:
        """Read on from where the last committed transaction ended."""
        self._has_to_rewind = False
        mine = [confluent_kafka.TopicPartition(self._plan.source, number) for number in sorted(self._owned)]
        if not mine:
            return
        for position in self._consumer.committed(mine, CALL_SECONDS):
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

    def _dawdle(self) -> None:
        if self._random.random() < DAWDLES:
            time.sleep(self._random.uniform(0, DAWDLES_SECONDS))

    # --- callbacks

    def _assigned(self, _: object, partitions: list[confluent_kafka.TopicPartition]) -> None:
        self.note("assigns")
        self._owned |= {partition.partition for partition in partitions}

    def _revoked(self, _: object, partitions: list[confluent_kafka.TopicPartition]) -> None:
        self.note("revokes")
        gone = {partition.partition for partition in partitions}
        if self._taken:
            self.note("rebalanced")
            # Its offsets still count in here; what it read of the others is read again if it is given up.
            self._end(gives_up=self._random.random() < GIVES_UP)
        self._owned -= gone

    def _lost(self, _: object, partitions: list[confluent_kafka.TopicPartition]) -> None:
        self.note("lost")
        if self._taken:
            self.note("rebalanced")
            # Half of the time it tries to commit what is not its own any more: that has to be refused.
            self._end(gives_up=self._random.random() < GIVES_UP)
        self._owned -= {partition.partition for partition in partitions}


def _intervals(messages: Sequence[confluent_kafka.Message]) -> dict[int, tuple[int, int]]:
    """Return by partition the first offset and the one behind the last."""
    found: dict[int, tuple[int, int]] = {}
    for message in messages:
        partition, offset = message.partition(), message.offset()
        assert partition is not None
        assert offset is not None
        first, _ = found.get(partition, (offset, offset))
        found[partition] = (first, offset + 1)
    return found
