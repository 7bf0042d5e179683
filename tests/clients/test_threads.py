"""Several threads on one client at once: each record has one report and one place in the log, each call an answer."""

from __future__ import annotations

import itertools
import threading
from collections import Counter

import pytest

from tests.clients.steps import PATIENCE_SECONDS, create_topic, read_to_end, values
from txnstore import Consumer, KafkaError, KafkaException, TopicPartition
from txnstore.clients.producer.state import TransactionStage

_numbers = itertools.count(1)
#: How many transactions are committed while threads meet.
ROUNDS = 60
#: What a thread may hear because another one ends or begins a transaction at that moment.
BECAUSE_OF_OTHERS = {KafkaError._STATE, KafkaError._CONFLICT, KafkaError._PREV_IN_PROGRESS}


class Accounts:
    """What became of each record, as its producer heard; every report is counted."""

    def __init__(self):
        self._lock = threading.Lock()
        self.accepted = []
        self.delivered: Counter[bytes] = Counter()
        self.failed: Counter[bytes] = Counter()

    def accept(self, value):
        with self._lock:
            self.accepted.append(value)

    def __call__(self, error, message):
        with self._lock:
            (self.delivered if error is None else self.failed)[message.value()] += 1

    def assert_complete(self):
        assert len(self.accepted) == len(set(self.accepted))
        assert self.delivered + self.failed == Counter(self.accepted)


class Threads:
    """Threads that run until told to end; what one of them raises is raised by `join`."""

    def __init__(self):
        self.errors = []
        self._threads = []

    def start(self, *works):
        for work in works:
            thread = threading.Thread(target=self._guarded, args=(work,))
            self._threads.append(thread)
            thread.start()

    def _guarded(self, work):
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.errors.append(error)

    def join(self):
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive(), "a thread hangs"
        if self.errors:
            raise self.errors[0]


def heard_of_others(call, *arguments):
    """Call, and return whether it went through; it may be refused because of what another thread does."""
    try:
        call(*arguments)
    except KafkaException as exception:
        error = exception.args[0]
        if error.code() not in BECAUSE_OF_OTHERS:
            raise
        assert not error.fatal()
        return False
    return True


@pytest.fixture(scope="module")
def url(module_url):
    """One store of each database for all these tests."""
    return module_url


@pytest.fixture
def topic(url):
    return create_topic(url, f"orders-{next(_numbers)}", partition_count=2)


def queued(producer, topic, value, key, accounts):
    """Return whether there was room for the record."""
    try:
        producer.produce(topic, value, key, on_delivery=accounts)
    except BufferError:
        return False
    return True


def test_threads_that_produce_flush_poll_and_purge_get_one_report_for_each_record(make_producer, topic, url):
    producer = make_producer({"linger.ms": 1, "queue.buffering.max.messages": 500})
    accounts, threads, over = Accounts(), Threads(), threading.Event()

    def produce(name):
        for number in range(1_000):
            value = b"%s-%d" % (name, number)
            while not queued(producer, topic, value, name, accounts):
                producer.poll(0.01)
            accounts.accept(value)

    def repeat(call, *arguments):
        def run():
            while not over.is_set():
                call(*arguments)

        return run

    def purge():
        for _ in range(20):
            over.wait(0.01)
            producer.purge(in_flight=False)

    producing = Threads()
    producing.start(*[lambda name=name: produce(name) for name in (b"a", b"b", b"c")], purge)
    threads.start(repeat(producer.flush, 0.01), repeat(producer.flush), repeat(producer.poll, 0.01))
    try:
        producing.join()
    finally:
        over.set()
        threads.join()
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert len(producer) == 0
    accounts.assert_complete()
    in_log = values(read_to_end(url, topic, partitions=(0, 1)))
    assert Counter(in_log) == accounts.delivered
    for name in (b"a", b"b", b"c"):
        mine = [value for value in in_log if value is not None and value.startswith(name)]
        assert mine == sorted(mine, key=accounts.accepted.index)


@pytest.mark.slow
def test_threads_that_begin_commit_and_abort_at_will_never_break_a_transaction(make_producer, topic, url):
    producer = make_producer({"transactional.id": topic, "linger.ms": 1})
    producer.init_transactions(PATIENCE_SECONDS)
    accounts, threads = Accounts(), Threads()
    done: Counter[str] = Counter()
    over = threading.Event()

    def produce(name):
        number = 0
        while not over.wait(0.0001):
            value = b"%s-%d" % (name, number)
            # Between two transactions nothing is open to produce into.
            if heard_of_others(producer.produce, topic, value, name, -1, accounts):
                accounts.accept(value)
                number += 1

    def repeat(name, call, pause_seconds, *arguments):
        def run():
            while not over.wait(pause_seconds):
                done[name] += heard_of_others(call, *arguments)
                if done["committed"] >= ROUNDS and done["aborted"] >= ROUNDS / 4:
                    over.set()

        return run

    threads.start(
        *[lambda name=name: produce(name) for name in (b"a", b"b")],
        repeat("begun", producer.begin_transaction, 0.0005),
        repeat("begun", producer.begin_transaction, 0.0005),
        repeat("committed", producer.commit_transaction, 0.004, PATIENCE_SECONDS),
        repeat("committed", producer.commit_transaction, 0.005, PATIENCE_SECONDS),
        repeat("aborted", producer.abort_transaction, 0.013, PATIENCE_SECONDS),
        repeat("polled", producer.poll, 0, 0.001),
        repeat("flushed", producer.flush, 0.003, 0.01),
    )
    over.wait(PATIENCE_SECONDS)
    over.set()
    threads.join()
    assert min(done["begun"], done["committed"], done["aborted"]) > 3, done
    if producer._transactions.progress.stage is TransactionStage.IN_TRANSACTION:
        producer.commit_transaction(PATIENCE_SECONDS)
    assert producer._transactions.progress.stage is TransactionStage.READY
    assert producer.flush(PATIENCE_SECONDS) == 0
    accounts.assert_complete()
    # Nothing in the log that was not reported, nothing twice; what is visible was reported as delivered.
    everything = values(read_to_end(url, topic, partitions=(0, 1), isolation="read_uncommitted"))
    visible = values(read_to_end(url, topic, partitions=(0, 1)))
    assert Counter(everything) == accounts.delivered
    assert max(Counter(visible).values()) == 1
    assert Counter(visible) <= accounts.delivered
    # No transaction was left open behind the producer's back: an empty one is begun and ended without a word of it.
    producer.begin_transaction()
    producer.commit_transaction(PATIENCE_SECONDS)
    assert values(read_to_end(url, topic, partitions=(0, 1))) == visible
    stable, end = bounds(url, topic)
    assert stable == end


def bounds(url, topic):
    """Return the last stable offsets of the partitions, and their ends."""
    found = []
    for isolation in ("read_committed", "read_uncommitted"):
        consumer = Consumer({"bootstrap.servers": url, "group.id": "looks", "isolation.level": isolation})
        try:
            found.append([consumer.get_watermark_offsets(TopicPartition(topic, number))[1] for number in (0, 1)])
        finally:
            consumer.close()
    return found


class EndsTheTransaction(dict[str, bytes]):
    """Headers during whose reading another thread ends the transaction."""

    def __init__(self, end):
        super().__init__({"a": b"b"})
        self._end = end

    def items(self):
        ending = threading.Thread(target=self._end, args=(PATIENCE_SECONDS,))
        ending.start()
        ending.join(PATIENCE_SECONDS)
        return super().items()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("end", ["commit_transaction", "abort_transaction"])
def test_a_record_whose_transaction_ends_while_it_is_being_produced_is_refused(make_producer, topic, url, end):
    """It would wait for the next transaction, or open one in the store of which the producer knows nothing."""
    producer = make_producer({"transactional.id": topic, "linger.ms": 0})
    producer.list_topics(topic, PATIENCE_SECONDS)
    producer.init_transactions(PATIENCE_SECONDS)
    producer.begin_transaction()
    producer.produce(topic, b"in time")
    with pytest.raises(KafkaException) as refusal:
        producer.produce(topic, b"late", headers=EndsTheTransaction(getattr(producer, end)))
    assert refusal.value.args[0].code() == KafkaError._STATE
    assert len(producer) == 0
    producer.begin_transaction()
    producer.commit_transaction(PATIENCE_SECONDS)
    expected = [b"in time"] if end == "commit_transaction" else []
    assert values(read_to_end(url, topic, partitions=(0, 1))) == expected
    stable, end = bounds(url, topic)
    assert stable == end
