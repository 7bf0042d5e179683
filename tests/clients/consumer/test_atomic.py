"""Consumers that get each transaction from all of its partitions at once, whatever they stop and begin with."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete

from tests.clients.consumer.log_writer import PATIENCE_SECONDS, LogWriter, eventually, texts
from tests.log.places import Model
from tests.tools.campaigns import times
from txnstore import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition
from txnstore.clients.consumer import reader
from txnstore.clients.consumer.whole_transactions import _Gathering
from txnstore.db.opening import open_store
from txnstore.db.schema import transaction_log
from txnstore.log import commit_order
from txnstore.log.deleting import advance_log_start
from txnstore.log.topics import delete_topic
from txnstore.model import INTERNAL_GROUP_PREFIX
from txnstore.transactions import rows

ATOMIC = {"txnstore.delivery.order": "commit", "txnstore.delivery.atomic": True, "enable.auto.commit": False}
_numbers = itertools.count(1)


@pytest.fixture
def assigned(make_consumer):
    """A consumer of some partitions of the topic t, from the beginning."""

    def make(*numbers, configuration=(), offset=OFFSET_BEGINNING):
        consumer = make_consumer({**ATOMIC, **dict(configuration)})
        consumer.assign([TopicPartition("t", number, offset) for number in numbers])
        return consumer

    return make


@pytest.fixture
def small_pages(monkeypatch):
    """Let a page hold two batches, and a stretch or a walk few."""
    monkeypatch.setattr(commit_order, "PAGE_BATCHES_MAX", 2)
    monkeypatch.setattr(commit_order, "STRETCH_BATCHES", 3)
    monkeypatch.setattr(commit_order, "WALK_BATCHES", 3)
    monkeypatch.setattr(commit_order, "PAGE_OFFSETS_MAX", 4)


def values_of(transaction):
    return [message.value() for message in transaction.messages]


def test_a_foreign_open_transaction_never_lets_another_one_show_in_one_partition_alone(log, assigned):
    """The anomaly G-single of two partitions of which one is held back."""
    log.topic(partition_count=2)
    consumer = assigned(0, 1)
    foreign = log.transaction()
    foreign.write("t", 0, b"foreign")
    for number in range(20):
        both = log.transaction()
        for partition in (0, 1):
            both.write("t", partition, b"%d" % number)
        both.end(commit=True)
        assert texts(consumer.consume(2, PATIENCE_SECONDS)) == [b"%d" % number] * 2
    foreign.end(commit=True)
    assert texts(consumer.consume(1, PATIENCE_SECONDS)) == [b"foreign"]


def test_half_a_transaction_that_was_gathered_is_not_committed(log, assigned, monkeypatch):
    log.topic(partition_count=2)
    both = log.transaction()
    for partition in (0, 1):
        both.write("t", partition, b"both")
    both.end(commit=True)
    is_there, takes = threading.Event(), _Gathering._take
    monkeypatch.setattr(
        _Gathering, "_take", lambda self: (is_there.is_set() or not self._subscription.kept) and takes(self)
    )
    consumer = assigned(0, 1, configuration={"enable.auto.commit": True, "auto.commit.interval.ms": 10})
    partitions = [TopicPartition("t", number) for number in (0, 1)]
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(consumer.consume_transaction, PATIENCE_SECONDS)
        eventually(lambda: any(one.offset >= 0 for one in consumer.position(partitions)))
        future = consumer._core._commit_in_background()
        if future is not None:
            future.result(PATIENCE_SECONDS)
        assert all(one.offset < 0 for one in consumer.committed(partitions, PATIENCE_SECONDS))
        is_there.set()
        assert values_of(call.result(PATIENCE_SECONDS)) == [b"both"] * 2
    eventually(lambda: all(one.offset == 2 for one in consumer.committed(partitions, PATIENCE_SECONDS)))


def test_a_transaction_comes_from_all_partitions_with_its_producer_and_what_is_in_none_by_itself(log, assigned):
    log.topic(partition_count=3)
    one, two, aborted = log.transaction(), log.transaction(), log.transaction()
    for partition in range(3):
        for transaction in (one, two, aborted):
            transaction.write("t", partition, transaction.transactional_id.encode())
    one.write("t", 2, b"last")
    aborted.end(commit=False)
    two.end(commit=True)
    log.write("t", 1, b"plain")
    one.end(commit=True)
    consumer = assigned(0, 1, 2)
    found = [consumer.consume_transaction(PATIENCE_SECONDS) for _ in range(3)]
    assert consumer.consume_transaction(0.1) is None
    by_producer = {transaction.producer_id: transaction for transaction in found}
    for writer in (one, two):
        transaction = by_producer[writer.identity.producer_id]
        assert transaction.producer_epoch == writer.identity.epoch
        assert transaction.transactional_id == writer.transactional_id
        assert sorted({message.partition() for message in transaction.messages}) == [0, 1, 2]
        name = writer.transactional_id.encode()
        assert sorted(values_of(transaction)) == sorted([name] * 3 + [b"last"] * (writer is one))
    plain = by_producer[None]
    assert (values_of(plain), plain.producer_epoch) == ([b"plain"], None)
    assert found.index(by_producer[two.identity.producer_id]) < found.index(by_producer[one.identity.producer_id])
    ends = [(position.offset, position.offset_in_transaction) for position in consumer.position(consumer.assignment())]
    heads = [consumer.get_watermark_offsets(TopicPartition("t", number))[1] for number in range(3)]
    assert ends == [(head, 0) for head in heads]


@pytest.mark.slow
def test_what_is_in_no_transaction_comes_behind_what_was_committed_when_it_was_written(log, assigned):
    """A reader of all partitions never sees an answer before its question, whatever of both is in a transaction."""
    log.topic(partition_count=3)
    consumer = assigned(0, 1, 2)
    expected = []
    for number in range(10):
        question, answer, note = (b"%s %d" % (what, number) for what in (b"question", b"answer", b"note"))
        asked, answered = log.transaction(), log.transaction()
        for partition in (2, 1):
            asked.write("t", partition, question)
        # It stands before the question in its partition, which counts once it is committed.
        log.write("t", 1, b"before %d" % number)
        asked.end(commit=True)
        log.write("t", number % 3, note)
        log.write("t", (number + 1) % 3, note)
        answered.write("t", 0, answer)
        answered.end(commit=True)
        expected += [b"before %d" % number, question, question, note, note, answer]
    assert texts(consumer.consume(len(expected), PATIENCE_SECONDS)) == expected


def test_a_transaction_with_more_records_than_wanted_is_refused_and_can_be_read_piece_by_piece(log, assigned):
    log.topic(partition_count=2)
    large = log.transaction()
    for partition in (0, 1):
        large.write("t", partition, *(b"%d" % number for number in range(10)))
    large.end(commit=True)
    consumer = assigned(0, 1)
    for _ in range(2):
        with pytest.raises(KafkaException) as refused:
            consumer.consume_transaction(PATIENCE_SECONDS, messages_max=19)
        assert refused.value.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE
    assert len(consumer.consume_transaction(PATIENCE_SECONDS, messages_max=20).messages) == 20
    for partition in (0, 1):
        consumer.seek(TopicPartition("t", partition, OFFSET_BEGINNING))
    assert len(consumer.consume(20, PATIENCE_SECONDS)) == 20


def test_without_the_setting_transactions_are_not_asked_for_and_it_needs_commit_order(make_consumer):
    with pytest.raises(KafkaException, match=r"txnstore\.delivery\.atomic=true"):
        make_consumer({"txnstore.delivery.order": "commit"}).consume_transaction(0.1)
    with pytest.raises(KafkaException, match=r"requires `txnstore\.delivery\.order=commit`"):
        make_consumer({"txnstore.delivery.atomic": True})


def test_while_a_partition_is_paused_no_transaction_with_a_share_in_it_comes(log, assigned):
    log.topic(partition_count=2)
    consumer = assigned(0, 1)
    log.write("t", 0, b"first")
    assert texts(consumer.consume(1, PATIENCE_SECONDS)) == [b"first"]
    consumer.pause([TopicPartition("t", 1)])
    both = log.transaction()
    for partition in (0, 1):
        both.write("t", partition, b"both")
    log.write("t", 0, b"plain")
    alone = log.transaction()
    alone.write("t", 0, b"alone")
    alone.end(commit=True)
    both.end(commit=True)
    log.write("t", 0, b"behind")
    assert texts(consumer.consume(2, PATIENCE_SECONDS)) == [b"plain", b"alone"]
    assert consumer.poll(0.3) is None
    consumer.resume([TopicPartition("t", 1)])
    assert texts(consumer.consume(3, PATIENCE_SECONDS)) == [b"both", b"both", b"behind"]


def test_a_transaction_of_which_retention_has_taken_one_partitions_part_comes_from_the_others(log, assigned):
    log.topic(partition_count=2)
    both = log.transaction()
    for partition in (0, 1):
        both.write("t", partition, b"both", b"more")
    both.end(commit=True)
    log.write("t", 0, b"plain")
    partition_id = log.partition_id("t", 0)
    log.store.write(lambda connection: advance_log_start(connection, partition_id, 1))
    assert sorted(texts(assigned(0, 1).consume(3, PATIENCE_SECONDS))) == [b"both", b"more", b"plain"]


@pytest.mark.slow
def test_a_consumer_that_has_little_room_does_not_wait_for_itself(log, assigned):
    """What has no room in the buffer is what the buffered records wait for."""
    log.topic(partition_count=3)
    for number in range(30):
        transaction = log.transaction()
        for partition in (2, 1, 0) if number % 2 else (0, 1):
            transaction.write("t", partition, *(b"%d" % number for _ in range(3)))
        transaction.end(commit=True)
    consumer = assigned(0, 1, 2, configuration={"queued.min.messages": 1})
    found = [int(value) for value in texts(consumer.consume(15 * 15, PATIENCE_SECONDS))]
    assert [number for number, _ in itertools.groupby(found)] == list(range(30))


@pytest.mark.usefixtures("small_pages")
def test_what_could_not_be_gathered_in_time_comes_whole_the_next_time(log, assigned):
    log.topic(partition_count=2)
    for name in (b"one", b"two"):
        transaction = log.transaction()
        for _ in range(4):
            for partition in (0, 1):
                transaction.write("t", partition, name)
        transaction.end(commit=True)
    consumer = assigned(0, 1)
    for name in (b"one", b"two"):
        found = None
        for timeout in (0, 0, 0.001, 0.001, 0.002, PATIENCE_SECONDS):
            found = found or consumer.consume_transaction(timeout)
        assert values_of(found) == [name] * 8


def test_while_producers_write_at_once_each_of_their_transactions_comes_whole_and_once(log, assigned, make_producer):
    """Three of them, over partitions that overlap; what each of them wrote comes in its own order."""
    log.topic(partition_count=3)
    transactions, choices = 15, ((0, 1), (1, 2), (2, 0))
    consumer = assigned(0, 1, 2)

    def produce(name):
        producer = make_producer({"transactional.id": f"writer-{name}"})
        producer.init_transactions()
        for number in range(transactions):
            producer.begin_transaction()
            for partition in choices[(name + number) % 3]:
                producer.produce("t", f"{name}:{number}", partition=partition)
            if number % 4 == 2:
                # So that it is not committed as a whole by the client.
                producer.flush()
            if number % 5 == 4:
                producer.abort_transaction()
            else:
                producer.commit_transaction()

    with ThreadPoolExecutor() as pool:
        ends = [pool.submit(produce, name) for name in range(3)]
        found: list[tuple[int, int]] = []
        while len(found) < 3 * transactions * 4 // 5:
            transaction = consumer.consume_transaction(PATIENCE_SECONDS)
            assert transaction is not None
            first, second = transaction.messages
            assert first.value() == second.value()
            name, number = map(int, first.value().split(b":"))
            assert {first.partition(), second.partition()} == set(choices[(name + number) % 3])
            found.append((name, number))
        for end in ends:
            end.result(PATIENCE_SECONDS)
    assert sorted(found) == [(name, number) for name in range(3) for number in range(transactions) if number % 5 != 4]


def test_a_transaction_tells_whose_it_is_for_as_long_as_the_journal_does(log, assigned, make_producer):
    log.topic(partition_count=2)
    for name in ("one", "two"):
        producer = make_producer({"transactional.id": name})
        producer.init_transactions()
        for flushes in (False, True):
            producer.begin_transaction()
            for partition in (0, 1):
                producer.produce("t", name, partition=partition)
            if flushes:
                producer.flush()
            producer.commit_transaction()
    consumer = assigned(0, 1)
    found = [consumer.consume_transaction(PATIENCE_SECONDS) for _ in range(4)]
    assert [transaction.transactional_id for transaction in found] == ["one", "one", "two", "two"]
    assert [values_of(transaction) for transaction in found] == [[b"one"] * 2] * 2 + [[b"two"] * 2] * 2
    log.store.write(lambda connection: connection.execute(delete(transaction_log)))
    again = assigned(0, 1).consume_transaction(PATIENCE_SECONDS)
    assert (values_of(again), again.transactional_id) == ([b"one"] * 2, None)
    assert again.producer_id == found[0].producer_id


def test_a_transaction_tells_which_consumed_offsets_it_has_committed(
    log, assigned, make_consumer, make_producer, monkeypatch
) -> None:
    monkeypatch.setattr(commit_order, "PAGE_BATCHES_MAX", 2)
    log.topic(partition_count=2)
    for name in ("in", "gone"):
        log.topic(name, 2)
    producer = make_producer({"transactional.id": "worker"})
    producer.init_transactions()
    plain = make_consumer({"group.id": "plain"}).consumer_group_metadata()
    internal = make_consumer({"group.id": f"{INTERNAL_GROUP_PREFIX}load"}).consumer_group_metadata()
    ordered = make_consumer({"group.id": "ordered", "txnstore.delivery.order": "commit"}).consumer_group_metadata()

    def write(*sent: tuple[bytes, list[TopicPartition]], flushes: bool = False) -> None:
        with producer.transaction():
            # Batches of several pages, if they are flushed.
            for _ in range(3):
                for partition in (0, 1):
                    producer.produce("t", "both", partition=partition)
                if flushes:
                    producer.flush()
            for metadata, offsets in sent:
                producer.send_offsets_to_transaction(offsets, metadata)

    def told(transaction) -> dict[str, list[tuple[str, int, int, int | None]]]:
        return {
            group_id: [(one.topic, one.partition, one.offset, one.offset_in_transaction) for one in offsets]
            for group_id, offsets in transaction.offsets.items()
        }

    # The same group later: of its own offsets it keeps the newest alone.
    for number, flushes in ((5, False), (6, True)):
        write((plain, [TopicPartition("in", 1, number), TopicPartition("in", 0, 3)]), flushes=flushes)
    write()
    within = TopicPartition("in", 0, 9, offset_in_transaction=4)
    write((plain, [TopicPartition("gone", 0, 8)]), (ordered, [within, TopicPartition("gone", 1, 8)]))
    write((plain, [TopicPartition("gone", 0, 9)]), (internal, [TopicPartition("in", 0, 9)]))
    log.store.write(lambda connection: delete_topic(connection, "gone"))
    numbers: list[int] = []

    def noted(connection, commit_numbers):
        numbers.extend(commit_numbers)
        return rows.commits_of(connection, commit_numbers)

    monkeypatch.setattr(reader, "commits_of", noted)
    consumer = assigned(0, 1)
    found = [consumer.consume_transaction(PATIENCE_SECONDS) for _ in range(5)]
    assert [told(transaction) for transaction in found] == [
        {"plain": [("in", 0, 3, None), ("in", 1, 5, None)]},
        {"plain": [("in", 0, 3, None), ("in", 1, 6, None)]},
        {},
        {"ordered": [("in", 0, 9, 4)]},
        {},
    ]
    assert all(transaction.transactional_id == "worker" for transaction in found)
    # The journal is asked once about each.
    assert len(numbers) == len(set(numbers)) == 5
    log.store.write(lambda connection: connection.execute(delete(transaction_log)))
    again = assigned(0, 1).consume_transaction(PATIENCE_SECONDS)
    assert (again.transactional_id, again.offsets) == (None, {})


def test_what_several_writers_wrote_is_one_transaction(log, assigned, make_producer):
    log.topic(partition_count=2)
    producer = make_producer({"transactional.id": "many"})
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce("t", "own", partition=0)
    writers = [make_producer({"txnstore.transaction.token": producer.transaction_token()}) for _ in range(3)]
    for number, writer in enumerate(writers):
        for partition in (0, 1):
            writer.produce("t", f"{number}", partition=partition)
    reported = [writer.report_writer() for writer in writers[:2]]
    producer.commit_transaction(writers=reported)
    transaction = assigned(0, 1).consume_transaction(PATIENCE_SECONDS)
    assert sorted(values_of(transaction)) == [b"0", b"0", b"1", b"1", b"own"]
    assert transaction.transactional_id == "many"


PARTITIONS = 3
STEPS = st.one_of(
    st.tuples(st.just("plain"), st.integers(0, PARTITIONS - 1), st.integers(1, 3)),
    st.tuples(st.just("write"), st.sampled_from("ABC"), st.integers(0, PARTITIONS - 1), st.integers(1, 3)),
    st.tuples(st.just("end"), st.sampled_from("ABC"), st.booleans()),
)


class History:
    """What is written to the partitions of a topic, and what a reader may see of it."""

    def __init__(self, log: LogWriter) -> None:
        self.log = log
        self.name = f"atomic-{next(_numbers)}"
        self.models = [Model() for _ in range(PARTITIONS)]
        self.open: dict[str, Any] = {}
        #: Of each record in what it was written, and of those what was committed, one after the other.
        self.unit_of: dict[tuple[int, int], int] = {}
        self.committed: list[int] = []
        log.topic(self.name, PARTITIONS)

    def run(self, steps: list[tuple[Any, ...]]) -> None:
        for step in (*steps, *(("end", name, True) for name in "AB")):
            getattr(self, step[0])(*step[1:])

    def plain(self, partition: int, count: int) -> None:
        values = self.models[partition].values(count)
        self.log.write(self.name, partition, *(value for _, value in values))
        self.models[partition].plain(count)
        self.committed.append(next(_numbers))
        self.unit_of.update({(partition, offset): self.committed[-1] for offset, _ in values})

    def write(self, name: str, partition: int, count: int) -> None:
        if name not in self.open:
            self.open[name] = (next(_numbers), self.log.transaction())
        number, transaction = self.open[name]
        values = self.models[partition].values(count)
        transaction.write(self.name, partition, *(value for _, value in values))
        self.models[partition].write(name, count)
        self.unit_of.update({(partition, offset): number for offset, _ in values})

    def end(self, name: str, commit: bool) -> None:
        if name in self.open:
            number, transaction = self.open.pop(name)
            transaction.end(commit=commit)
            self.committed += [number] * commit
            for model in self.models:
                if name in model.open:
                    model.end(name, commit=commit)

    @property
    def count(self) -> int:
        return sum(len(model.delivered) for model in self.models)

    def check(self, seen: list[tuple[int, int]]) -> None:
        """Each partition in its own order, and all of it in the order in which it was committed."""
        for partition, model in enumerate(self.models):
            assert [offset for number, offset in seen if number == partition] == [one.offset for one in model.delivered]
        assert [unit for unit, _ in itertools.groupby(seen, key=self.unit_of.__getitem__)] == self.committed, seen


def consumer_of(url: str, history: History, configuration: Mapping[str, Any] = MappingProxyType({})) -> Consumer:
    group = {"bootstrap.servers": url, "group.id": history.name, "auto.offset.reset": "earliest"}
    consumer = Consumer({**group, **ATOMIC, **configuration})
    consumer.assign([TopicPartition(history.name, number) for number in range(PARTITIONS)])
    return consumer


@pytest.fixture(scope="module")
def module_log(module_url) -> Iterator[LogWriter]:
    with open_store(module_url) as store:
        yield LogWriter(store)


@pytest.mark.slow
@pytest.mark.usefixtures("small_pages")
@pytest.mark.campaign
@settings(max_examples=times(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STEPS, max_size=30), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_whoever_stops_anywhere_goes_on_and_transactions_are_whole(module_url, module_log, steps, stops):
    """Every consumer gets a few records, commits where it is, and is gone."""
    history = History(module_log)
    history.run(steps)
    seen: list[tuple[int, int]] = []
    for count in itertools.cycle(stops):
        if len(seen) == history.count:
            break
        with consumer_of(module_url, history) as consumer:
            messages = consumer.consume(min(count, history.count - len(seen)), PATIENCE_SECONDS)
            assert messages
            seen += [(message.partition(), message.offset()) for message in messages]
            consumer.commit(asynchronous=False)
    history.check(seen)
