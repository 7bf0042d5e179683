"""Producers and consumers whose server is killed, whose file is locked, full or not to be written: they go on.

Nothing that was reported as delivered is lost and nothing is there twice.  What a transaction became is said, or is
resolved when its call is made again; a worker that consumes and produces writes each result once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import subprocess
import threading
import time
from collections import Counter

import pytest

from txnstore import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Producer, TopicPartition
from txnstore.testing.private_cluster import NoServerProgramsError, PrivateCluster

PATIENCE_SECONDS = 60.0
#: How often the server is killed, and how much each client does before and after.
KILLS = 2
PROGRESS = 10


@pytest.fixture(scope="module")
def cluster():
    try:
        cluster = PrivateCluster(fsync=False)
    except NoServerProgramsError as error:
        pytest.skip(str(error))
    with cluster:
        cluster.create_database("clients")
        yield cluster


@pytest.fixture
def url(cluster):
    return cluster.url("clients")


class Work:
    """What a client does again and again in a thread, until told to stop; counts what it has done."""

    def __init__(self, step):
        self._step = step
        self._over = threading.Event()
        self._error = []
        self.done = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        try:
            while not self._over.is_set():
                self.done += bool(self._step())
        except BaseException as error:  # noqa: BLE001 - `stop` raises it
            self._error.append(error)

    @property
    def is_running(self):
        return self._thread.is_alive()

    def stop(self):
        self._over.set()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "it hangs"
        if self._error:
            raise self._error[0]


class Delivered(Counter):
    """Counts delivery reports by value; a failed one is an error."""

    def __call__(self, error, message):
        assert error is None, error
        self[message.value()] += 1


def producer_of(url, error_cb=None, **configuration):
    settings = {name.replace("_", "."): value for name, value in configuration.items()}
    if error_cb is not None:
        settings["error_cb"] = error_cb
    return Producer({"bootstrap.servers": url, "linger.ms": 0, **settings})


def consumer_of(url, error_cb=None, **configuration):
    settings = {name.replace("_", "."): value for name, value in configuration.items()}
    if error_cb is not None:
        settings["error_cb"] = error_cb
    return Consumer({"bootstrap.servers": url, "group.id": "workers", "enable.auto.commit": False, **settings})


def resumed(call, *arguments):
    """Call until it goes through, as long as the error says that it may be called again."""
    while True:
        try:
            return call(*arguments)
        except KafkaException as exception:
            if not exception.args[0].retriable():
                raise


def records(url, topic, isolation="read_committed"):
    """Return the values of a topic's only partition."""
    with consumer_of(url, enable_partition_eof=True, isolation_level=isolation) as consumer:
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        found = []
        while True:
            message = consumer.poll(PATIENCE_SECONDS)
            assert message is not None
            if message.error() is None:
                found.append(message.value())
            elif message.error().code() == KafkaError._PARTITION_EOF:
                return found
            else:
                assert message.error().retriable(), message.error()


def kill_and_start(cluster, works, until):
    """Kill the server while all are at work, and again once all are at work again."""
    for _ in range(KILLS):
        before = [work.done for work in works]
        until(lambda before=before: has_progress(works, before), PATIENCE_SECONDS)
        cluster.kill()
        cluster.start()
    before = [work.done for work in works]
    until(lambda: has_progress(works, before), PATIENCE_SECONDS)


def has_progress(works, before):
    assert all(work.is_running for work in works) or any(work.stop() for work in works)
    return all(work.done >= done + PROGRESS for work, done in zip(works, before, strict=True))


class Pairs:
    """Writes pairs of records in transactions, and knows which were committed."""

    def __init__(self, producer, topic):
        self.committed: list[bytes] = []
        self.aborted: list[bytes] = []
        self._producer = producer
        self._topic = topic

    def __call__(self):
        value = b"%d" % (len(self.committed) + len(self.aborted))
        resumed(self._producer.begin_transaction)
        self._producer.produce(self._topic, value + b" left")
        if len(value) % 2:
            self._producer.flush(0.02)
        self._producer.produce(self._topic, value + b" right")
        is_committed = committed_or_aborted(self._producer)
        (self.committed if is_committed else self.aborted).append(value)
        return True


def committed_or_aborted(producer):
    """Commit, or abort if that is what the error asks for; return whether it was committed."""
    try:
        resumed(producer.commit_transaction, 0.3)
    except KafkaException as exception:
        if not exception.args[0].txn_requires_abort():
            raise
        resumed(producer.abort_transaction, 0.3)
        return False
    return True


class Reading:
    """Reads topics, whatever the server does."""

    def __init__(self, consumer, topics):
        self.records: list[tuple[str | None, bytes | None]] = []
        self._consumer = consumer
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING) for topic in topics])

    def __call__(self):
        message = self._consumer.poll(0.05)
        if message is None:
            return False
        error = message.error()
        if error is not None:
            # A topic may not have been made yet; and the server may be away.
            assert error.retriable() or error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART
            return False
        self.records.append((message.topic(), message.value()))
        return True


def test_clients_go_on_by_themselves_when_the_server_is_killed(cluster, url, topic, until):
    """A producer, one with transactions, and a reader of both: nothing lost, nothing doubled, nothing half."""
    plain_topic, pairs_topic = f"{topic}-plain", f"{topic}-pairs"
    delivered, numbers = Delivered(), itertools.count()
    with (
        producer_of(url) as plain,
        producer_of(url, transactional_id=topic) as transactional,
        consumer_of(url, error_cb=lambda error: None) as consumer,
    ):

        def produce():
            plain.produce(plain_topic, b"%d" % next(numbers), on_delivery=delivered)
            return plain.flush(0.05) == 0

        transactional.init_transactions(PATIENCE_SECONDS)
        pairs = Pairs(transactional, pairs_topic)
        reading = Reading(consumer, [plain_topic, pairs_topic])
        writers, reader = [Work(produce), Work(pairs)], Work(reading)
        try:
            kill_and_start(cluster, [*writers, reader], until)
        finally:
            for writer in writers:
                writer.stop()
        assert plain.flush(PATIENCE_SECONDS) == 0
        values = {name: records(url, name) for name in (plain_topic, pairs_topic)}
        everything = Counter((name, value) for name, found in values.items() for value in found)
        until(lambda: len(reading.records) >= everything.total() or not reader.is_running, PATIENCE_SECONDS)
        reader.stop()
    assert Counter(values[plain_topic]) == delivered
    assert set(delivered.values()) == {1}
    assert values[plain_topic] == sorted(values[plain_topic], key=int)
    assert values[pairs_topic] == [value + side for value in pairs.committed for side in (b" left", b" right")]
    assert Counter(reading.records) == everything


@pytest.mark.slow
def test_a_worker_that_consumes_and_produces_does_each_thing_once_when_the_server_is_killed(cluster, url, topic, until):
    source, target = f"{topic}-in", f"{topic}-out"
    numbers = itertools.count()
    writer = producer_of(url)
    consumer, producer = consumer_of(url, auto_offset_reset="earliest"), producer_of(url, transactional_id=topic)
    source_partition = TopicPartition(source, 0)

    def write():
        # As long as the server is killed now and then: the worker never runs out of work.
        writer.produce(source, b"%d" % next(numbers))
        return writer.flush(0.05) == 0

    def transform():
        messages = [message for message in consumer.consume(5, 0.1) if message.error() is None]
        if not messages:
            return False
        resumed(producer.begin_transaction)
        for message in messages:
            producer.produce(target, message.value())
        if not (sent_offsets(producer, consumer, messages) and committed_or_aborted(producer)):
            (position,) = resumed(consumer.committed, [source_partition], PATIENCE_SECONDS)
            consumer.seek(position if position.offset >= 0 else TopicPartition(source, 0, OFFSET_BEGINNING))
        return True

    try:
        producer.init_transactions(PATIENCE_SECONDS)
        consumer.assign([source_partition])
        writing, work = Work(write), Work(transform)
        try:
            try:
                kill_and_start(cluster, [writing, work], until)
            finally:
                writing.stop()
            assert writer.flush(PATIENCE_SECONDS) == 0
            count = next(numbers)
            until(lambda: committed_offset(consumer, source_partition) == count, PATIENCE_SECONDS)
        finally:
            work.stop()
    finally:
        consumer.close()
        producer.close()
        writer.close()
    assert records(url, target) == [b"%d" % number for number in range(count)]


def sent_offsets(producer, consumer, messages):
    """Let the transaction hold the place behind the messages; return False if it had to be aborted."""
    end = TopicPartition(messages[-1].topic(), 0, messages[-1].offset() + 1)
    try:
        resumed(producer.send_offsets_to_transaction, [end], consumer.consumer_group_metadata(), 0.3)
    except KafkaException as exception:
        if not exception.args[0].txn_requires_abort():
            raise
        resumed(producer.abort_transaction, 0.3)
        return False
    return True


def committed_offset(consumer, partition):
    (position,) = resumed(consumer.committed, [partition], PATIENCE_SECONDS)
    return position.offset


@pytest.mark.slow_but_first
@pytest.mark.parametrize("moment", ["before the commit", "while it is away", "while records wait"])
def test_a_commit_that_meets_a_killed_server_is_resumed(cluster, url, topic, moment):
    """Every call that was told to wait a moment says so, and the same call brings it to its end."""
    producer = producer_of(url, transactional_id=topic)
    try:
        producer.init_transactions(PATIENCE_SECONDS)
        producer.begin_transaction()
        producer.produce(topic, b"a")
        if moment != "while records wait":
            assert producer.flush(PATIENCE_SECONDS) == 0
        cluster.kill()
        try:
            if moment != "before the commit":
                with pytest.raises(KafkaException) as refusal:
                    producer.commit_transaction(0.2)
                error = refusal.value.args[0]
                assert (error.code(), error.retriable(), error.fatal()) == (KafkaError._TIMED_OUT, True, False)
                with pytest.raises(KafkaException) as refusal:
                    producer.abort_transaction(0.2)
                assert refusal.value.args[0].code() == KafkaError._CONFLICT
        finally:
            cluster.start()
        producer.commit_transaction(PATIENCE_SECONDS)
        with producer.transaction():
            producer.produce(topic, b"b")
    finally:
        producer.close()
    assert records(url, topic) == [b"a", b"b"]


def test_an_init_that_meets_a_killed_server_is_resumed(cluster, url, topic):
    cluster.kill()
    try:
        producer = producer_of(url, transactional_id=topic)
        with pytest.raises(KafkaException) as refusal:
            producer.init_transactions(0.2)
        assert refusal.value.args[0].retriable()
    finally:
        cluster.start()
    with producer:
        producer.init_transactions(PATIENCE_SECONDS)
        with producer.transaction():
            producer.produce(topic, b"a")
    assert records(url, topic) == [b"a"]


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk takes root")
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=False, capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


class Reports:
    """Delivery reports: values by what became of them."""

    def __init__(self):
        self.delivered = []
        self.failed = {}

    def __call__(self, error, message):
        if error is None:
            self.delivered.append(message.value())
        else:
            self.failed[message.value()] = error


@pytest.mark.needs_root
def test_a_full_disk_fails_deliveries_with_its_reason_and_the_producer_goes_on_when_there_is_room(small_disk):
    url = f"sqlite:///{small_disk / 'store.db'}"
    reports = Reports()
    with producer_of(url, transactional_id="shop") as transactional, producer_of(url) as plain:
        transactional.init_transactions(PATIENCE_SECONDS)
        plain.produce("t", b"first", on_delivery=reports)
        assert plain.flush(PATIENCE_SECONDS) == 0
        ballast = small_disk / "ballast"
        fill(ballast)
        number = 0
        while not reports.failed:
            number += 1
            plain.produce("t", b"%d" % number + bytes(100_000), on_delivery=reports)
            assert plain.flush(PATIENCE_SECONDS) == 0
        (failure,) = reports.failed.values()
        assert failure.code() == KafkaError.KAFKA_STORAGE_ERROR
        transactional.begin_transaction()
        # Refused as soon as the first ones have failed: the transaction can only be aborted then.
        with contextlib.suppress(KafkaException):
            for _ in range(3):
                transactional.produce("t", b"in a transaction" + os.urandom(300_000))
        with pytest.raises(KafkaException) as refusal:
            transactional.commit_transaction(PATIENCE_SECONDS)
        assert refusal.value.args[0].txn_requires_abort(), refusal.value
        ballast.unlink()
        transactional.abort_transaction(PATIENCE_SECONDS)
        with transactional.transaction():
            transactional.produce("t", b"committed")
        plain.produce("t", b"last", on_delivery=reports)
        assert plain.flush(PATIENCE_SECONDS) == 0
    found = records(url, "t")
    assert found[-2:] == [b"committed", b"last"]
    assert Counter(found) == Counter([*reports.delivered, b"committed"])


def fill(path):
    """Fill the disk up."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.mark.slow
def test_a_lock_that_somebody_holds_for_seconds_delays_and_loses_nothing(tmp_path, start_child):
    path = tmp_path / "store.db"
    url = f"sqlite:///{path}"
    reports = Reports()
    with (
        producer_of(url, transactional_id="shop") as transactional,
        producer_of(url) as plain,
        consumer_of(url, auto_offset_reset="earliest") as consumer,
    ):
        transactional.init_transactions(PATIENCE_SECONDS)
        plain.produce("t", b"first", on_delivery=reports)
        assert plain.flush(PATIENCE_SECONDS) == 0
        transactional.begin_transaction()
        consumer.assign([TopicPartition("t", 0)])
        message = consumer.poll(PATIENCE_SECONDS)
        assert message is not None
        child = start_child("hold_write_lock", path)
        assert child.read() == "locked"
        plain.produce("t", b"second", on_delivery=reports)
        transactional.produce("t", b"in a transaction", on_delivery=reports)
        consumer.commit(message=message)
        began = time.monotonic()
        with pytest.raises(KafkaException) as refusal:
            transactional.commit_transaction(1.0)
        assert refusal.value.args[0].retriable()
        # Longer than one try of the sender; whoever asks is told.
        assert plain.flush(1.0) == 1
        assert 1.9 < time.monotonic() - began < PATIENCE_SECONDS
        assert reports.delivered == [b"first"]
        child.tell()
        assert child.read() == "unlocked"
        assert plain.flush(PATIENCE_SECONDS) == 0
        transactional.commit_transaction(PATIENCE_SECONDS)
        until_committed(consumer)
    assert not reports.failed
    assert sorted(records(url, "t")) == sorted(reports.delivered) == [b"first", b"in a transaction", b"second"]


def until_committed(consumer):
    """Wait until what was committed in the background is there."""
    assert consumer.commit(offsets=[TopicPartition("t", 0, 1)], asynchronous=False)[0].offset == 1
    assert consumer.committed([TopicPartition("t", 0)], PATIENCE_SECONDS)[0].offset == 1


@pytest.mark.slow
def test_a_file_that_may_not_be_written_for_a_while_is_an_error_that_passes(tmp_path, start_child):
    """Root may write everything: somebody else tries."""
    path = tmp_path / "store.db"
    url = f"sqlite:///{path}"
    with producer_of(url) as producer:
        producer.produce("t", b"first")
        assert producer.flush(PATIENCE_SECONDS) == 0
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | stat.S_IXOTH | stat.S_IROTH)
    path.chmod(0o444)
    tmp_path.chmod(0o777)
    child = start_child("produce_as_somebody_else", url)
    assert child.read() == "KAFKA_STORAGE_ERROR"
    # The child's files beside it have the rights that the file had.
    for file in tmp_path.glob("store.db*"):
        file.chmod(0o666)
    child.tell()
    assert child.read() == "delivered"
    assert child.end() == 0
    assert records(url, "t") == [b"first", b"in time"]
