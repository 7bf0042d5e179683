"""A member of a group that gets transactions whole, as far as its partitions go, and notes what befalls it.

One life commits by itself what it says that it has done with, another one asks the group to; some take transactions
whole, others as many records as they please.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Final

from tests.processes.ordering import EXPELLED, LAST, PATIENCE_SECONDS, SIZES, TOPIC, Notes, positions_of
from tests.tools.workload import Job
from txnstore import Consumer, KafkaError, KafkaException, Message, TopicPartition
from txnstore.log import commit_order

GROUP: Final = "members"
GO_ON, LEAVE = "go on", "leave"
#: How often it commits after it has got something, and before it gives partitions back.
COMMITS: Final = 0.7
#: How many lives do so.
COMMITS_AUTOMATICALLY: Final = 0.4
TAKES_WHOLE: Final = 0.3
#: How many records others take at once; that is in the middle of a transaction, most of the time.
COUNTS: Final = (1, 2, 5, 100)
#: How long it waits for records; for a whole transaction ever longer, as long as none comes: what is not there in time
#: is read again from the beginning, and a busy machine would never come to its end.
TAKE_SECONDS: Final = 0.1
TAKE_WHOLE_SECONDS_MAX: Final = 3.2


def read_in_group(job: Job, pipe: Connection, assignor: str) -> None:
    """Read until told to leave; tell how many records have come, and wait until told to go on.

    There it can be killed within a transaction.
    """
    Member(job, pipe, assignor).run()


class Member:
    """One life of it."""

    def __init__(self, job: Job, pipe: Connection, assignor: str) -> None:
        self._notes, self._chance, self._pipe = Notes(job), job.chance(), pipe
        vars(commit_order).update(self._chance.choice(SIZES))
        self._is_automatic = self._chance.random() < COMMITS_AUTOMATICALLY
        self._takes_whole = self._chance.random() < TAKES_WHOLE
        self._take_seconds = TAKE_SECONDS
        self._was_refused = False
        """Whether the group has refused a commit, and no other one has been tried since."""
        self._consumer = Consumer(
            {
                "bootstrap.servers": job.url,
                "group.id": GROUP,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": self._is_automatic,
                "auto.commit.interval.ms": 50,
                # What is committed has been noted before.
                "enable.auto.offset.store": False,
                "txnstore.delivery.order": "commit",
                "txnstore.delivery.atomic": True,
                "partition.assignment.strategy": assignor,
                # Who is killed is missed soon.
                "session.timeout.ms": 1_000,
                "heartbeat.interval.ms": 100,
                "on_commit": self._told,
            }
        )

    def run(self) -> None:
        self._consumer.subscribe([TOPIC], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)
        while True:
            got = [(one.partition(), one.offset(), (one.value() or b"").decode()) for one in self._take()]
            if got:
                self._notes.note("got", got, self._takes_whole)
            has_ended = any(value == LAST for _, _, value in got)
            if has_ended or self._was_refused or (got and self._chance.random() < COMMITS):
                self._commit()
            if got:
                self._pipe.send(len(got))
            if (got or self._pipe.poll()) and self._pipe.recv() == LEAVE:
                break
        self._notes.note("leaves")
        self._consumer.close()
        self._notes.note("left")

    def _take(self) -> Sequence[Message]:
        if self._takes_whole:
            transaction = self._consumer.consume_transaction(self._take_seconds)
            if transaction is None:
                self._take_seconds = min(2 * self._take_seconds, TAKE_WHOLE_SECONDS_MAX)
                return []
            self._take_seconds = TAKE_SECONDS
            return transaction.messages
        messages = self._consumer.consume(self._chance.choice(COUNTS), TAKE_SECONDS)
        assert not any(message.error() for message in messages), [message.error() for message in messages]
        return messages

    def _commit(self) -> None:
        """Commit all positions, which are those of one moment, or let them be committed soon."""
        positions = [one for one in self._consumer.position(self._consumer.assignment()) if one.offset >= 0]
        self._notes.note("commits", positions_of(positions))
        self._was_refused = False
        if not positions:
            return
        if self._is_automatic:
            self._consumer.store_offsets(offsets=positions)
            return
        try:
            self._consumer.commit(offsets=positions, asynchronous=False)
        except KafkaException as error:
            if error.args[0].code() not in EXPELLED:
                raise
            self._was_refused = True
        else:
            self._told(None, positions)

    # --- callbacks

    def _told(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        self._notes.note("has committed", None if error is not None else positions_of(partitions))

    def _assigned(self, _: object, partitions: list[TopicPartition]) -> None:
        numbers = [partition.partition for partition in partitions]
        self._notes.note("asks for", numbers)
        committed = self._consumer.committed(partitions, PATIENCE_SECONDS)
        self._notes.note("is given", numbers, positions_of(committed))

    def _revoked(self, _: object, partitions: list[TopicPartition]) -> None:
        is_to_commit = self._is_automatic or self._chance.random() < COMMITS
        if is_to_commit:
            self._commit()
        self._notes.note("gives", [partition.partition for partition in partitions], self._is_automatic)

    def _lost(self, _: object, partitions: list[TopicPartition]) -> None:
        self._notes.note("loses", [partition.partition for partition in partitions])
