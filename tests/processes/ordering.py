"""Writers of transactions, and readers in commit order, that note what they do: a file a life, a line of JSON a step.

What they note is written in one call, before and after what may be cut short by the end of the process.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any, Final

from tests.tools.workload import Job
from txnstore import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from txnstore.clients.consumer.positions import position_behind
from txnstore.db.opening import open_store
from txnstore.db.store import Store
from txnstore.log import commit_order
from txnstore.log.bounds import read_bounds
from txnstore.log.commit_order import CommitPosition, fetch_in_commit_order

TOPIC: Final = "t"
PATIENCE_SECONDS: Final = 60
#: What a member is told whose group has begun anew.
EXPELLED: Final = (
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.UNKNOWN_MEMBER_ID,
)
#: What each partition ends with.
LAST: Final = "last"
ABORTS: Final = 0.2
FLUSHES: Final = 0.25
LOOKS: Final = 0.5
COMMITS_POSITIONS: Final = 0.3
PAUSE_SECONDS: Final = 0.02
#: What a page, a stretch and a walk of a life are: less than a transaction, or what they always are.
SIZES: Final[tuple[dict[str, int], ...]] = (
    {"PAGE_BATCHES_MAX": 2, "STRETCH_BATCHES": 4, "WALK_BATCHES": 3, "PAGE_OFFSETS_MAX": 5},
    {},
)


class Notes:
    """The notes of one life."""

    def __init__(self, job: Job) -> None:
        path = job.folder / f"{job.process}.notes"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, *facts: Any) -> None:
        os.write(self._file, json.dumps([time.monotonic_ns(), *facts]).encode() + b"\n")


def name_of(value: str) -> str:
    """Return the name of what a record was written in."""
    return value.rpartition("/")[0]


def notes_of(job: Job) -> Iterator[list[list[Any]]]:
    """Return the notes of each life, the first one first; a line that was never finished is left out."""
    for life in range(1, job.life + 1):
        path = job.folder / f"{job.name}#{life}.notes"
        if path.exists():
            yield [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


class Look:
    """A look at what has been committed of late, of all partitions in one snapshot."""

    def __init__(self, job: Job, store: Store) -> None:
        self._store = store
        bounds = store.read(partial(read_bounds, partition_ids=list(job.partitions.values())))
        self._positions = {number: CommitPosition(bound.high_watermark) for number, bound in bounds.items()}

    def names(self) -> set[str]:
        """Return the names of the transactions that are there now and were not at the last look."""
        pages = self._store.read(partial(fetch_in_commit_order, positions=dict(self._positions)))
        self._positions = {partition_id: page.next_position for partition_id, page in pages.items()}
        return {
            name_of((record.value or b"").decode())
            for page in pages.values()
            for placed in page.batches
            for record in placed.batch.records(placed.from_offset)
        }


def write_transactions(job: Job, count: int) -> None:
    """Run transactions until so many have been begun in all lives; that of a killed life ends as it may.

    Before some of them are committed their writer looks at what others have committed, and notes it.
    """
    with open_store(job.url, pool_size=1, create=False) as store:
        _write_transactions(job, count, Look(job, store))


def _write_transactions(job: Job, count: int, look: Look) -> None:
    begun = sum(note[1] == "begins" for life in notes_of(job) for note in life)
    notes, chance = Notes(job), job.chance()
    # Some commit one after the other, others at once, and by the short way.
    group = {"txnstore.transaction.group": chance.choice(("ledger", ""))}
    producer = Producer({"bootstrap.servers": job.url, "transactional.id": job.name, **group})
    producer.init_transactions(PATIENCE_SECONDS)
    for number in range(begun, count):
        name = f"{job.process}/{number}"
        notes.note("begins", name)
        producer.begin_transaction()
        values: dict[int, list[str]] = {}
        for _ in range(chance.randint(1, 3)):
            _produce(producer, name, job, chance, values)
            if chance.random() < FLUSHES:
                producer.flush(PATIENCE_SECONDS)
        if chance.random() < ABORTS:
            producer.abort_transaction(PATIENCE_SECONDS)
            continue
        if chance.random() < LOOKS:
            notes.note("reads", name, sorted(look.names()))
        notes.note("asks", name, values)
        producer.commit_transaction(PATIENCE_SECONDS)
        notes.note("committed", name)
    producer.close()


def write_plainly(job: Job, count: int) -> None:
    """Write records outside transactions, each time to some partitions."""
    notes, chance = Notes(job), job.chance()
    producer = Producer({"bootstrap.servers": job.url})
    for number in range(count):
        values: dict[int, list[str]] = {}
        _produce(producer, f"{job.process}/{number}", job, chance, values)
        notes.note("asks", f"{job.process}/{number}", values)
        producer.flush(PATIENCE_SECONDS)
        notes.note("committed", f"{job.process}/{number}")
        time.sleep(PAUSE_SECONDS)
    producer.close()


def _produce(producer: Producer, name: str, job: Job, chance: random.Random, values: dict[int, list[str]]) -> None:
    for number in chance.sample(range(len(job.partitions)), chance.randint(1, len(job.partitions))):
        own = values.setdefault(number, [])
        for _ in range(chance.randint(1, 3)):
            own.append(f"{name}/{len(own)}")
            producer.produce(TOPIC, own[-1], partition=number)


def read(job: Job, is_member: bool, is_atomic: bool) -> None:
    """Read in commit order from where the group was, until the last record of each partition has come.

    What comes is noted, and what is committed now and then.  Who is atomic gets transactions whole.
    """
    notes, chance = Notes(job), job.chance()
    vars(commit_order).update(chance.choice(SIZES))
    settings = {
        "bootstrap.servers": job.url,
        "group.id": job.name,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "txnstore.delivery.order": "commit",
        "txnstore.delivery.atomic": is_atomic,
        # Who is killed is missed soon.
        "session.timeout.ms": 600,
        "heartbeat.interval.ms": 100,
    }
    consumer = Consumer(settings)
    partitions = [TopicPartition(TOPIC, number) for number in range(len(job.partitions))]

    def begin() -> None:
        notes.note("begins", positions_of(consumer.committed(partitions, PATIENCE_SECONDS)))

    def assigned(_: object, given: list[TopicPartition]) -> None:
        if is_atomic and len(given) < len(partitions):
            # The group still counts a former life as well; what several owners get has no common order.
            consumer.assign([])
        else:
            begin()

    if is_member:
        # It is given them again once the group misses its former life.
        consumer.subscribe([TOPIC], on_assign=assigned)
    else:
        begin()
        consumer.assign(partitions)
    waits_for = {partition.partition for partition in partitions}
    while True:
        messages = consumer.consume(chance.choice((1, 5, 500)), 0.1 if waits_for else 0.5)
        if not messages:
            if waits_for:
                continue
            break
        assert not any(message.error() for message in messages), [message.error() for message in messages]
        got = [(message.partition(), message.offset(), (message.value() or b"").decode()) for message in messages]
        notes.note("got", got)
        waits_for -= {number for number, _, value in got if value == LAST}
        if chance.random() < COMMITS_POSITIONS:
            # Who gets transactions whole commits where he is in all partitions.
            ways = ("positions", "stored") if is_atomic else ("positions", "stored", "message")
            _commit(consumer, messages[-1], notes, chance.choice(ways))
    consumer.close()


def _commit(consumer: Consumer, last: Message, notes: Notes, how: str) -> None:
    positions = [one for one in consumer.position(consumer.assignment()) if one.offset >= 0]
    try:
        if how == "message":
            behind = position_behind(last, TOPIC, last.partition() or 0, last.offset() or 0)
            notes.note("commits", positions_of([behind]))
            consumer.commit(last, asynchronous=False)
        else:
            notes.note("commits", positions_of(positions))
            consumer.commit(offsets=positions if how == "positions" else None, asynchronous=False)
    except KafkaException as error:
        if error.args[0].code() not in EXPELLED:
            raise
    else:
        notes.note("has committed")


def positions_of(partitions: list[TopicPartition]) -> list[tuple[int, int, int | None]]:
    """Return number, place and offset in the transaction of each of them that has a position."""
    return [(one.partition, one.offset, one.offset_in_transaction) for one in partitions if one.offset >= 0]


def read_cuts(job: Job) -> None:
    """Read all partitions to their ends in one snapshot, again and again; each life from a little before."""
    notes = Notes(job)
    vars(commit_order).update(job.chance().choice(SIZES))
    numbers = {partition_id: number for number, partition_id in enumerate(job.partitions.values())}
    waits_for = set(numbers.values())
    with open_store(job.url, pool_size=1, create=False) as store, closing(store.waiter()) as waiter:
        bounds = store.read(partial(read_bounds, partition_ids=list(numbers)))
        positions = {number: CommitPosition(max(0, bounds[number].high_watermark - 100)) for number in numbers}
        notes.note("begins", [(numbers[number], position.place) for number, position in positions.items()])
        while waits_for:
            began_ns = time.monotonic_ns()
            pages = store.read(partial(fetch_in_commit_order, positions=dict(positions)))
            positions = {partition_id: page.next_position for partition_id, page in pages.items()}
            got = [
                (numbers[partition_id], record.offset, (record.value or b"").decode())
                for partition_id, page in pages.items()
                for placed in page.batches
                for record in placed.batch.records(placed.from_offset)
            ]
            # Where one of them was not read to its end another one may be of an older snapshot than the rest.
            ends = {
                numbers[partition_id]: page.bounds.high_watermark
                for partition_id, page in pages.items()
                if page.next_position == CommitPosition(page.bounds.high_watermark)
            }
            notes.note("looked", began_ns, got, sorted(ends.items()) if len(ends) == len(numbers) else None)
            waits_for -= {number for number, _, value in got if value == LAST}
            if not got:
                waiter.wait(50)
