"""The processes at work while the maintenance forgets, trims and deletes: each goes on until it is killed.

Producers stay away for about as long as it takes to be forgotten, as live objects and by name alone; they write as
users of `confluent_kafka` do. What they do and what they are told is noted in a ledger of their own.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import txnstore as confluent_kafka
from tests.processes.group_transforming import Fenced, GroupPlan, TransformingMember
from tests.processes.upkeep_ledger import COMMITTED, REFUSED, UNKNOWN, Ledger, read_ledgers
from tests.tools.workload import Job, again
from txnstore.admin import AdminClient, NewTopic
from txnstore.db.opening import open_store
from txnstore.db.store import Store
from txnstore.errors import ProducerFenced, TxnStoreError
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.log.topics import get_topic
from txnstore.maintenance.duties import DUTIES
from txnstore.maintenance.loop import Maintenance
from txnstore.maintenance.turns import MaintenanceDuty, Portion
from txnstore.model import Record
from txnstore.spark.sink_coordination import decide, open_writer
from txnstore.spark.sink_run import run_of_query
from txnstore.transactions.writers import append_as_writer

#: What the programs write to, with how many partitions; the first is the source of the transforming group.
ORDERS, PAYMENTS, PLAIN, TOTALS, SINK = "orders", "payments", "plain", "totals", "sink"
TOPICS: Final = {ORDERS: 4, PAYMENTS: 3, PLAIN: 3, TOTALS: 4, SINK: 2}
GROUP: Final = "transformers"
CHURN: Final = "churn-"

TOPIC_IS_GONE: Final = (
    confluent_kafka.KafkaError._UNKNOWN_PARTITION,
    confluent_kafka.KafkaError._UNKNOWN_TOPIC,
    confluent_kafka.KafkaError.UNKNOWN_TOPIC_OR_PART,
)

CALL_SECONDS: Final = 10.0
#: How long what is committed may take to be read where nobody else writes.
PATIENCE_SECONDS: Final = 60.0
#: How often a pause is about as long as it takes to be forgotten, ends just when it is, or is that of the longer
#: expiry, of transactional ids; others are short.
ABOUT, JUST, LONG = 0.3, 0.4, 0.06
AROUND: Final = (0.8, 1.2)
JUST_SECONDS: Final = (-0.01, 0.04)
SHORT_SECONDS: Final = (0.0, 0.05)
#: How often a transaction is paused in the middle, aborted, or of a transactional id that is never used again.
PAUSES, ABORTS, ONCE = 0.15, 0.1, 0.15
#: Where the verifier has come to: partitions by topic. The deletion of records looks there.
POSITIONS_FILE: Final = "verified.positions"

Steps = Generator[float, None, None]
"""What a producer does; it yields how many seconds to wait."""


@dataclass(frozen=True)
class Times:
    """After how long somebody is forgotten."""

    producer_ms: int
    transactional_id_ms: int
    journal_ms: int
    transaction_timeout_ms: int


class Renewed(Exception):
    """The producer is finished; another one goes on in its place."""


# --- writers


def write_in_transactions(job: Job, times: Times, count: int) -> None:
    """Run so many transactional producers, in one thread."""
    _take_turns([TransactionalSteps(job, times, number).steps() for number in range(count)])


def write_idempotently(job: Job, times: Times, count: int) -> None:
    """Run so many idempotent producers, in one thread."""
    _take_turns([_plain_steps(job, times, number) for number in range(count)])


def _take_turns(producers: list[Steps]) -> None:
    due = [(time.monotonic(), number) for number in range(len(producers))]
    while due:
        at, number = heapq.heappop(due)
        time.sleep(max(0.0, at - time.monotonic()))
        seconds = next(producers[number])
        heapq.heappush(due, (time.monotonic() + seconds, number))


def _pause(chance: random.Random, times: Times) -> float:
    dice = chance.random()
    if dice < ABOUT:
        return times.producer_ms / 1000 * chance.uniform(*AROUND)
    if dice < ABOUT + JUST:
        return times.producer_ms / 1000 + chance.uniform(*JUST_SECONDS)
    if dice < ABOUT + JUST + LONG:
        return times.transactional_id_ms / 1000 * chance.uniform(*AROUND)
    return chance.uniform(*SHORT_SECONDS)


class TransactionalSteps:
    """A transactional producer over and over."""

    def __init__(self, job: Job, times: Times, number: int) -> None:
        self._job = job
        self._times = times
        self._name = f"{job.process}/{number}"
        self._id = f"{job.name}/{number}"
        self._chance = random.Random(f"{job.seed}/{self._name}")
        self._ledger = Ledger(job.folder, job.process)
        self._count = self._values = 0

    def steps(self) -> Steps:
        """Write transactions, with pauses between them, as one live object for as long as it may."""
        while True:
            is_once = self._chance.random() < ONCE
            transactional_id = f"{self._name}/{self._count}" if is_once else self._id
            producer = transactional_producer(self._job, transactional_id)
            try:
                call(producer.init_transactions)
                for _ in range(2 if is_once else 1_000):
                    yield from self._transaction(producer)
                    yield _pause(self._chance, self._times)
            except Renewed:
                self._ledger.note("renewed")
            producer.close()
            yield 0.0

    def _transaction(self, producer: confluent_kafka.Producer) -> Steps:
        self._count += 1
        name = f"{self._name}/{self._count}"
        chance = self._chance
        places = [(topic, number) for topic in (ORDERS, PAYMENTS) for number in range(TOPICS[topic])]
        producer.begin_transaction()
        try:
            for index in range(parts := chance.randint(1, 2)):
                sent = [
                    (topic, number, [self._value() for _ in range(chance.randint(1, 2))])
                    for topic, number in chance.sample(places, chance.randint(1, 4))
                ]
                send(producer, self._ledger, name, sent)
                if index + 1 < parts and chance.random() < PAUSES:
                    while producer.flush(CALL_SECONDS):
                        pass
                    yield _pause(chance, self._times)
            if chance.random() < ABORTS:
                call(producer.abort_transaction)
                return
        except confluent_kafka.KafkaException as exception:
            _abort(producer, exception)
            return
        commit(producer, self._ledger, name)

    def _value(self) -> str:
        self._values += 1
        return f"{self._name}:{self._values}"


def transactional_producer(job: Job, transactional_id: str) -> confluent_kafka.Producer:
    """Return a producer of transactions."""
    return confluent_kafka.Producer(
        {"bootstrap.servers": job.url, "transactional.id": transactional_id, "transaction.timeout.ms": job.timeout_ms}
    )


def send(
    producer: confluent_kafka.Producer, ledger: Ledger, transaction: str, sent: list[tuple[str, int, list[str]]]
) -> None:
    """Note what is sent where, then send it."""
    ledger.note("send", transaction=transaction, to=sent)
    for topic, number, values in sent:
        for value in values:
            producer.produce(topic, value, partition=number)


def commit(producer: confluent_kafka.Producer, ledger: Ledger, transaction: str) -> bool:
    """Commit, and note what came of it.

    Raises:
        Renewed: the producer is finished.
    """
    ledger.note("committing", transaction=transaction)
    try:
        call(producer.commit_transaction)
    except Renewed as renewed:
        # Fenced: somebody else has its name, and what was open is aborted. Of other errors nothing follows.
        is_fenced = renewed.args[0].code() == confluent_kafka.KafkaError._FENCED
        ledger.note(REFUSED if is_fenced else UNKNOWN, transaction=transaction, why=str(renewed))
        raise
    except confluent_kafka.KafkaException as exception:
        if not exception.args[0].txn_requires_abort():
            raise
        ledger.note(REFUSED, transaction=transaction, why=str(exception))
        call(producer.abort_transaction)
        return False
    ledger.note(COMMITTED, transaction=transaction)
    return True


def _abort(producer: confluent_kafka.Producer, exception: confluent_kafka.KafkaException) -> None:
    error = exception.args[0]
    # As with the real client, a produce() after a fatal error says no more than that there was one.
    if error.fatal() or error.code() == confluent_kafka.KafkaError._FATAL:
        raise Renewed(error) from exception
    if not error.txn_requires_abort():
        raise exception
    call(producer.abort_transaction)


def call(method: Callable[[float], object]) -> None:
    """Call until it goes through, as long as calling again is allowed.

    Raises:
        Renewed: the producer is finished.
        KafkaException: another error.
    """
    while True:
        try:
            method(CALL_SECONDS)
        except confluent_kafka.KafkaException as exception:
            error = exception.args[0]
            if error.fatal():
                raise Renewed(error) from exception
            if not error.retriable():
                raise
        else:
            return


def _plain_steps(job: Job, times: Times, number: int) -> Steps:
    name = f"{job.process}/{number}"
    chance = random.Random(f"{job.seed}/{name}")
    ledger = Ledger(job.folder, job.process)
    count = 0
    while True:
        producer = confluent_kafka.Producer({"bootstrap.servers": job.url, "enable.idempotence": True})
        is_finished = False
        while not is_finished:
            sent = []
            for partition in chance.sample(range(TOPICS[PLAIN]), chance.randint(1, 2)):
                values = [f"{name}:{count + index}" for index in range(1, chance.randint(2, 4))]
                count += len(values)
                sent.append((PLAIN, partition, values))
            ledger.note("send", to=sent)
            delivered: list[str] = []
            failed: list[Any] = []

            def told(error: Any, message: Any, delivered=delivered, failed=failed) -> None:
                failed.append(error) if error is not None else delivered.append(message.value().decode())

            for topic, partition, values in sent:
                for value in values:
                    producer.produce(topic, value, partition=partition, on_delivery=told)
            while producer.flush(CALL_SECONDS):
                pass
            ledger.note("delivered", values=delivered)
            is_finished = bool(failed)
            yield _pause(chance, times)
        ledger.note("renewed")
        producer.close()


# --- a group


def transform(job: Job, plan: GroupPlan) -> None:
    """Turn the records of one topic into those of another as a member of a group."""
    ledger = Ledger(job.folder, job.process)
    try:
        TransformingMember(job, plan).run()
    except Fenced:
        ledger.note("renewed")
    except confluent_kafka.KafkaException as exception:
        error = exception.args[0]
        if not error.fatal() and error.code() != confluent_kafka.KafkaError._FATAL:
            raise
        ledger.note("renewed")


def visit(job: Job) -> None:
    """Join a group that was not there before, read a little, commit, leave; again and again."""
    chance = job.chance()
    ledger = Ledger(job.folder, job.process)
    for number in range(1_000_000):
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": job.url,
                "group.id": f"visitors-{job.process}-{number}",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
            }
        )
        consumer.subscribe([PAYMENTS])
        _note_seen(ledger, consumer.consume(chance.randint(5, 50), 1.0), what="seen")
        with contextlib.suppress(confluent_kafka.KafkaException):
            consumer.commit(asynchronous=False)
            ledger.note("visits")
        consumer.close()
        time.sleep(chance.uniform(0.0, 1.0))


# --- readers


def verify(job: Job) -> None:
    """Read all that is committed, from where the last life came to, and check what can be checked at once."""
    ledger = Ledger(job.folder, job.process)
    positions = {(topic, number): 0 for topic, count in TOPICS.items() for number in range(count)}
    for line in read_ledgers(job.folder, job.name):
        for topic, number, offset, _, _ in line.get("records", ()):
            positions[topic, number] = max(positions[topic, number], offset + 1)
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": job.url, "group.id": "verifier", "enable.auto.commit": False}
    )
    consumer.assign([confluent_kafka.TopicPartition(*partition, offset) for partition, offset in positions.items()])
    file = job.folder / POSITIONS_FILE
    values: set[tuple[str, str]] = set()
    while True:
        messages = consumer.consume(500, 0.1)
        for topic, number, offset, value, _ in _note_seen(ledger, messages, what="seen"):
            if offset < positions[topic, number]:
                ledger.note("violation", text=f"{topic}/{number} went back to {offset} from {positions[topic, number]}")
            if (topic, value) in values and topic != PLAIN:
                ledger.note("violation", text=f"{value} was read twice, again at {topic}/{number}/{offset}")
            values.add((topic, value))
            positions[topic, number] = offset + 1
        if messages:
            _replace(file, [[*partition, offset] for partition, offset in positions.items()])


def verified(folder: Path) -> dict[tuple[str, int], int]:
    """Return up to where the verifier has read."""
    try:
        return {(topic, number): offset for topic, number, offset in json.loads((folder / POSITIONS_FILE).read_text())}
    except FileNotFoundError:
        return {}


def _replace(file: Path, content: object) -> None:
    new = file.with_suffix(".new")
    new.write_text(json.dumps(content))
    new.replace(file)


def record_of(message: Any) -> tuple[str, int, int, str, int]:
    """Return what a ledger keeps of a record."""
    value = message.value().decode()
    text = f"{message.key().decode()}={value}" if message.topic() == TOTALS else value
    return message.topic(), message.partition(), message.offset(), text, message.timestamp()[1]


def _note_seen(ledger: Ledger, messages: list[Any], *, what: str) -> list[tuple[str, int, int, str, int]]:
    records = [record_of(message) for message in messages if message.error() is None]
    if records:
        ledger.note(what, records=records, count=len(records))
    return records


# --- what deletes


def delete_old_records(job: Job) -> None:
    """Delete what was read by the verifier, and by the group where it is the source."""
    chance = job.chance()
    ledger = Ledger(job.folder, job.process)
    admin = AdminClient({"bootstrap.servers": job.url})
    consumer = confluent_kafka.Consumer({"bootstrap.servers": job.url, "group.id": GROUP})
    sources = [confluent_kafka.TopicPartition(ORDERS, number) for number in range(TOPICS[ORDERS])]
    while True:
        time.sleep(chance.uniform(0.1, 0.6))
        limits = verified(job.folder)
        wanted = []
        try:
            for position in consumer.committed(sources, CALL_SECONDS):
                place = (ORDERS, position.partition)
                limits[place] = min(limits.get(place, 0), max(0, position.offset))
            for (topic, number), limit in limits.items():
                offset = limit - chance.choice((0, 0, 1, 7, 100))
                if offset > 0 and chance.random() < 0.3:
                    wanted.append(confluent_kafka.TopicPartition(topic, number, offset))
            if not wanted:
                continue
            for future in admin.delete_records(wanted).values():
                future.result(CALL_SECONDS)
            ledger.note("deletions of records", count=len(wanted))
        except (confluent_kafka.KafkaException, TimeoutError) as error:
            ledger.note("deletions that failed", why=str(error))


def make_and_delete_topics(job: Job, times: Times) -> None:
    """Make topics, fill them together with one that stays, read them, and delete them, some with something open."""
    Churner(job, times).run()


class Churner:
    def __init__(self, job: Job, times: Times) -> None:
        self._job = job
        self._times = times
        self._chance = job.chance()
        self._ledger = Ledger(job.folder, job.process)
        self._admin = AdminClient({"bootstrap.servers": job.url})
        self._transactions = self._values = 0

    def run(self) -> None:
        for topic in self._admin.list_topics(timeout=CALL_SECONDS).topics:
            # What an earlier life left; some of it may have been read.
            if topic.startswith(f"{CHURN}{self._job.name}-"):
                self._delete(topic)
        for number in range(1_000_000):
            self._topic(f"{CHURN}{self._job.process.replace('#', '-')}-{number}")

    def _topic(self, topic: str) -> None:
        count = self._chance.choice((1, 2, 2, 40))
        made = self._admin.create_topics([NewTopic(topic, count, 1)])
        if not self._has_worked(made[topic]):
            self._delete(topic)
            return
        producer = transactional_producer(self._job, f"{self._job.name}-{self._chance.randrange(3)}")
        try:
            call(producer.init_transactions)
            wanted: set[str] = set()
            for _ in range(self._chance.randint(1, 6)):
                sent = self._begin(producer, topic, count)
                if commit(producer, self._ledger, self._name):
                    wanted.update(sent)
            self._read(topic, count, wanted)
            is_open = self._chance.random() < 0.4
            if is_open:
                self._begin(producer, topic, count)
                while producer.flush(CALL_SECONDS):
                    pass
            self._delete(topic)
            if is_open:
                commit(producer, self._ledger, self._name)
        except Renewed:
            self._ledger.note("renewed")
            self._delete(topic)
        except confluent_kafka.KafkaException as exception:
            if exception.args[0].code() not in TOPIC_IS_GONE:
                raise
            # A newer life has cleaned up behind this one.
            with contextlib.suppress(Renewed, confluent_kafka.KafkaException):
                call(producer.abort_transaction)
        producer.close()
        time.sleep(self._times.producer_ms / 1000 * self._chance.uniform(0.0, AROUND[1]))

    @property
    def _name(self) -> str:
        return f"{self._job.process}/{self._transactions}"

    def _begin(self, producer: confluent_kafka.Producer, topic: str, count: int) -> list[str]:
        self._transactions += 1
        producer.begin_transaction()
        sent = [
            (name, self._chance.randrange(of), [self._value() for _ in range(3)])
            for name, of in ((topic, count), (PAYMENTS, TOPICS[PAYMENTS]))
        ]
        send(producer, self._ledger, self._name, sent)
        return sent[0][2]

    def _value(self) -> str:
        self._values += 1
        return f"{self._job.process}:{self._values}"

    def _read(self, topic: str, count: int, wanted: set[str]) -> None:
        with contextlib.closing(
            confluent_kafka.Consumer({"bootstrap.servers": self._job.url, "group.id": "churn"})
        ) as consumer:
            beginning = confluent_kafka.OFFSET_BEGINNING
            consumer.assign([confluent_kafka.TopicPartition(topic, number, beginning) for number in range(count)])
            missing = set(wanted)
            deadline = time.monotonic() + PATIENCE_SECONDS
            while missing and time.monotonic() < deadline:
                records = _note_seen(self._ledger, consumer.consume(100, 0.2), what="seen")
                missing -= {record[3] for record in records}
        if missing:
            self._ledger.note("violation", text=f"lost: of the new topic {topic} nobody sees {sorted(missing)}")

    def _delete(self, topic: str) -> None:
        self._ledger.note("doomed", topic=topic)
        while not self._has_worked(self._admin.delete_topics([topic])[topic]):
            time.sleep(0.1)
        self._ledger.note("topics deleted")

    @staticmethod
    def _has_worked(future: Any) -> bool:
        try:
            future.result(CALL_SECONDS)
        except (confluent_kafka.KafkaException, TimeoutError) as error:
            # That it is there, or gone, already is what was asked for.
            told = (
                error.args[0].code() if error.args and isinstance(error.args[0], confluent_kafka.KafkaError) else None
            )
            return told in {
                confluent_kafka.KafkaError.UNKNOWN_TOPIC_OR_PART,
                confluent_kafka.KafkaError.TOPIC_ALREADY_EXISTS,
            }
        return True


# --- a sink


def run_query(job: Job, times: Times) -> None:
    """Run the micro-batches of a streaming query as Spark has its sink run them; the ledger is its checkpoint."""
    chance = job.chance()
    ledger = Ledger(job.folder, job.process)
    batch_id, values, is_done = -1, {}, True
    for line in read_ledgers(job.folder, job.name):
        if line["what"] == "send":
            batch_id, values, is_done = line["batch"], dict(enumerate(of for _, _, of in line["to"])), False
        elif line["what"] == COMMITTED:
            is_done = True
    with open_store(job.url, pool_size=1, create=False) as store:
        partition_ids = again(lambda: store.read(lambda connection: get_topic(connection, SINK))).partition_ids
        for number in range(1_000_000):
            if is_done:
                batch_id += 1
                values = {
                    partition: [f"{job.name}:{batch_id * 100 + partition * 10 + index}" for index in range(3)]
                    for partition in range(len(partition_ids))
                }
                sent = [(SINK, partition, of) for partition, of in values.items()]
                ledger.note("send", transaction=f"{job.name}/{batch_id}", to=sent, batch=batch_id)
            try:
                _run_batch(job, store, ledger, f"{job.process}/{number}", batch_id, partition_ids, values)
            except ProducerFenced as error:
                is_done = False
                ledger.note("renewed", why=str(error))
                time.sleep(chance.uniform(0.0, 0.3))
                continue
            is_done = True
            time.sleep(min(_pause(chance, times), 2.0))


def _run_batch(
    job: Job,
    store: Store,
    ledger: Ledger,
    run_id: str,
    batch_id: int,
    partition_ids: tuple[int, ...],
    values: dict[int, list[str]],
) -> None:
    chance = random.Random(f"{job.seed}/{run_id}")
    run = run_of_query(job.name, run_id)
    named = []
    # Each task writes to one partition; some attempts nobody names.
    for partition, of in values.items():
        for is_named in [False] * (chance.random() < 0.2) + [True]:
            writer = again(lambda: open_writer(store, run, batch_id, timeout_ms=job.timeout_ms))
            if writer is None:
                continue
            batch = encode(
                [Record(value.encode()) for value in of],
                producer=writer.identity,
                base_sequence=0,
                is_transactional=True,
            )
            append = Append(partition_ids[partition], batch)
            again(lambda writer=writer, append=append: append_as_writer(store, writer, [append], report=True))
            if is_named:
                named.append(writer.writer_id)
        if chance.random() < PAUSES:
            time.sleep(chance.uniform(0.0, 1.5))
    ledger.note("committing", transaction=f"{job.name}/{batch_id}")
    again(lambda: decide(store, run, batch_id, named, timeout_ms=job.timeout_ms))
    ledger.note(COMMITTED, transaction=f"{job.name}/{batch_id}")
    ledger.note("batches")


# --- the maintenance


def maintain(job: Job) -> None:
    """Run the loop of the maintenance, and note how much it does."""
    ledger = Ledger(job.folder, job.process)
    logging.getLogger("txnstore.maintenance").addHandler(_Noted(ledger))
    with _opened(job) as store:
        Maintenance(store, duties=[_counted(duty, ledger) for duty in DUTIES]).run(threading.Event())


@contextlib.contextmanager
def _opened(job: Job) -> Iterator[Store]:
    while True:
        try:
            store = open_store(job.url, create=False)
        except TxnStoreError:
            time.sleep(0.1)
            continue
        with store:
            yield store
        return


def _counted(duty: MaintenanceDuty, ledger: Ledger) -> MaintenanceDuty:
    def do(portion: Portion) -> int:
        count = duty.load()(portion)
        if count:
            ledger.note("did", duty=duty.name, count=count)
        return count

    return duty._replace(load=lambda: do)


class _Noted(logging.Handler):
    """Notes what the maintenance could not do; an error that nobody foresaw is a violation."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(logging.WARNING)
        self._ledger = ledger

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            error = record.exc_info[1] if record.exc_info else None
            self._ledger.note("violation", text=f"the maintenance failed: {record.getMessage()}: {error!r}")
        else:
            self._ledger.note("duties not done", why=record.getMessage())
