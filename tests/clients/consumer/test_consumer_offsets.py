"""Committed offsets: by hand, by themselves, stored before, in somebody's transaction, and what on_commit hears."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.clients.consumer.log_writer import PATIENCE_SECONDS, eventually, polled_until, texts
from txnstore import OFFSET_INVALID, ConsumerGroupTopicPartitions, KafkaError, KafkaException, Message, TopicPartition
from txnstore.admin import AdminClient
from txnstore.log.topics import delete_topic

pytestmark = pytest.mark.least_privilege

TP = TopicPartition


@pytest.fixture
def topic(log):
    log.topic(partition_count=2)
    log.write("t", 0, *[b"%d" % number for number in range(10)])


@pytest.fixture
def reader(make_consumer, topic):
    def make(configuration=(), /):
        consumer = make_consumer({"enable.auto.commit": False, **dict(configuration)})
        consumer.assign([TP("t", 0)])
        return consumer

    return make


def committed(consumer, number=0):
    return consumer.committed([TP("t", number)], PATIENCE_SECONDS)[0].offset


def raised(call, *arguments, **named):
    with pytest.raises(KafkaException) as caught:
        call(*arguments, **named)
    return caught.value.args[0]


def test_a_commit_without_arguments_commits_what_was_handed_out_once(reader):
    consumer = reader()
    consumer.consume(3, PATIENCE_SECONDS)
    answer = consumer.commit(asynchronous=False)
    assert [(tp.topic, tp.partition, tp.offset, tp.error) for tp in answer] == [("t", 0, 3, None)]
    assert committed(consumer) == 3
    assert raised(consumer.commit, asynchronous=False).code() == KafkaError._NO_OFFSET


def test_what_is_assigned_again_is_read_on_behind_the_own_commits_of_before(reader):
    consumer = reader({"enable.auto.commit": True})
    assert texts(consumer.consume(3, PATIENCE_SECONDS)) == [b"0", b"1", b"2"]
    core, goes_on = consumer._core, threading.Event()
    core.worker.submit(lambda: goes_on.wait(PATIENCE_SECONDS))
    with core.arrived:
        # What is stored is committed, behind what the worker does now.
        consumer.assign([TP("t", 0), TP("t", 1, 0)])
        (begins,) = core.subscription.to_resolve(time.monotonic())
    assert begins.partition.number == 1
    goes_on.set()
    assert texts(consumer.consume(7, PATIENCE_SECONDS)) == [b"%d" % number for number in range(3, 10)]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_commit_without_arguments_takes_back_no_later_one_of_another_thread(reader, monkeypatch, asynchronous):
    consumer = reader()
    consumer.consume(1, PATIENCE_SECONDS)
    commits = consumer._core.commits
    stored, done = commits.stored, threading.Event()

    def read_and_commit():
        consumer.consume(2, PATIENCE_SECONDS)
        consumer.commit(asynchronous=False)
        done.set()

    def overtaken(*arguments):
        monkeypatch.setattr(commits, "stored", stored)
        found = stored(*arguments)
        threads.append(pool.submit(read_and_commit))
        # It is done by now if it may be.
        done.wait(0.5)
        return found

    threads: list = []
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(commits, "stored", overtaken)
        consumer.commit(asynchronous=asynchronous)
        threads[0].result(PATIENCE_SECONDS)
    assert committed(consumer) == 3


@pytest.fixture
def gathers(reader):
    """A consumer that commits by itself, has returned two records, and has gathered all others in a call that waits."""
    consumer = reader({"enable.auto.commit": True, "auto.commit.interval.ms": 10})
    assert len(consumer.consume(2, PATIENCE_SECONDS)) == 2
    eventually(lambda: committed(consumer) == 2)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(consumer.consume, 9, PATIENCE_SECONDS)
        eventually(lambda: position_of(consumer) == 10)
        yield consumer, call


def position_of(consumer):
    return consumer.position([TP("t", 0)])[0].offset


def commit_what_is_stored(consumer):
    """Do what is done every so often, and wait for its end."""
    future = consumer._core._commit_in_background()
    if future is not None:
        assert future.result(PATIENCE_SECONDS).error is None


def test_what_a_call_has_gathered_and_not_returned_is_not_committed(gathers, log):
    consumer, call = gathers
    commit_what_is_stored(consumer)
    assert committed(consumer) == 2
    log.write("t", 0, b"10")
    assert texts(call.result(PATIENCE_SECONDS)) == [b"%d" % number for number in range(2, 11)]
    eventually(lambda: committed(consumer) == 11)


def test_the_end_of_another_call_commits_nothing_that_a_call_has_gathered(gathers, log):
    consumer, call = gathers
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(consumer.consume, 9, 0)
        assert other.result(PATIENCE_SECONDS) == []
    commit_what_is_stored(consumer)
    assert committed(consumer) == 2
    log.write("t", 0, b"10")
    assert texts(call.result(PATIENCE_SECONDS)) == [b"%d" % number for number in range(2, 11)]
    eventually(lambda: committed(consumer) == 11)


def test_what_a_call_has_gathered_when_the_consumer_is_closed_comes_again(gathers, reader):
    consumer, call = gathers
    consumer.close()
    with pytest.raises(RuntimeError, match="closed"):
        call.result(PATIENCE_SECONDS)
    assert texts(reader().consume(8, PATIENCE_SECONDS)) == [b"%d" % number for number in range(2, 10)]


def test_what_is_gathered_while_another_thread_takes_out_what_it_gives_back_stays(reader, log):
    consumer, told = reader(), Message("t", 0, error=KafkaError(KafkaError._FAIL))
    subscription = consumer._core.subscription

    class Taken(Message):
        def topic(self):
            if len(gathered) == 1:
                gathered.append(told)
            return "t"

    gathered: list[Message] = [Taken("t", 0, 0, None, b"record")]
    subscription.gathered[id(gathered)] = gathered, {consumer._core.find(TP("t", 0)): 0}
    subscription.remove("t", 0)
    assert [id(message) for message in gathered] == [id(told)]


def test_a_call_does_not_return_what_it_has_gathered_of_a_partition_that_another_thread_gives_back(gathers, log):
    consumer, call = gathers
    consumer.unassign()
    eventually(lambda: committed(consumer) == 2)
    log.write("t", 1, *[b"of 1: %d" % number for number in range(9)])
    consumer.assign([TP("t", 1, 0)])
    # The others are the next owner's, who reads on where the group's offset is.
    assert texts(call.result(PATIENCE_SECONDS)) == [b"of 1: %d" % number for number in range(9)]
    assert committed(consumer) == 2


@pytest.mark.parametrize("way", ["poll", "consume"])
def test_what_one_thread_has_got_is_stored_while_a_call_of_another_one_serves_a_callback(reader, way):
    is_called, goes_on = threading.Event(), threading.Event()

    def on_commit(*_):
        is_called.set()
        goes_on.wait(PATIENCE_SECONDS)

    consumer = reader({"on_commit": on_commit})
    consumer.commit(offsets=[TP("t", 1, 0)])
    core = consumer._core
    eventually(lambda: core.inbox.events and core.subscription.has_messages)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(consumer.consume, 8, PATIENCE_SECONDS)
        assert is_called.wait(PATIENCE_SECONDS)
        try:
            for offset in (0, 1):
                messages = [consumer.poll(0)] if way == "poll" else consumer.consume(1, 0)
                assert texts(messages) == [b"%d" % offset]
                assert [tp.offset for tp in core.commits.stored()] == [offset + 1]
        finally:
            goes_on.set()
        assert texts(call.result(PATIENCE_SECONDS)) == [b"%d" % number for number in range(2, 10)]


def test_a_marker_behind_what_was_returned_is_committed_while_a_call_waits(reader, log):
    transaction = log.transaction()
    transaction.write("t", 0, b"10")
    transaction.end(commit=True)
    consumer = reader({"enable.auto.commit": True, "auto.commit.interval.ms": 10})
    assert len(consumer.consume(11, PATIENCE_SECONDS)) == 11
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(consumer.consume, 1, PATIENCE_SECONDS)
        eventually(lambda: committed(consumer) == 12)
        log.write("t", 0, b"12")
        assert texts(call.result(PATIENCE_SECONDS)) == [b"12"]


def test_a_message_commits_the_offset_behind_it(reader):
    consumer = reader()
    message = consumer.consume(3, PATIENCE_SECONDS)[1]
    assert consumer.commit(message=message, asynchronous=False)[0].offset == 2
    assert committed(consumer) == 2


def test_offsets_are_committed_as_given_with_their_metadata(reader):
    consumer = reader()
    answer = consumer.commit(offsets=[TP("t", 0, 7, "why"), TP("t", 1)], asynchronous=False)
    assert [(tp.partition, tp.offset, tp.error) for tp in answer] == [(0, 7, None), (1, OFFSET_INVALID, None)]
    found = consumer.committed([TP("t", 0), TP("t", 1)])
    assert [(tp.offset, tp.metadata) for tp in found] == [(7, "why"), (OFFSET_INVALID, None)]
    assert consumer.commit(offsets=[TP("t", 0, 2)], asynchronous=False)[0].offset == 2
    assert committed(consumer) == 2


def test_of_several_offsets_those_that_can_be_are_committed(reader):
    consumer = reader()
    error = raised(consumer.commit, offsets=[TP("t", 99, 3), TP("t", 0, 4), TP("nope", 0, 1)], asynchronous=False)
    assert error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert error.str() == "Commit failed: Broker: Unknown topic or partition"
    assert committed(consumer) == 4
    found = consumer.committed([TP("nope", 0), TP("t", 99)])
    assert [(tp.offset, tp.error.code()) for tp in found] == [(OFFSET_INVALID, KafkaError.UNKNOWN_TOPIC_OR_PART)] * 2


@pytest.mark.parametrize("offset", [2**63 - 1])
def test_the_largest_offset_can_be_committed(reader, offset):
    assert reader().commit(offsets=[TP("t", 0, offset)], asynchronous=False)[0].offset == offset


@pytest.mark.slow_but_first
@pytest.mark.parametrize("metadata", [None, "", "why"])
@pytest.mark.parametrize("way", ["commit", "transaction", "admin"])
def test_no_metadata_and_an_empty_one_read_back_as_what_they_were(reader, make_producer, url, way, metadata):
    """As from a broker: in whichever way the offset is committed, and whoever asks."""
    consumer, offsets = reader(), [TP("t", 0, 7, metadata)]
    with AdminClient({"bootstrap.servers": url}) as admin:
        if way == "commit":
            assert consumer.commit(offsets=offsets, asynchronous=False)[0].metadata == metadata
        elif way == "admin":
            wanted = ConsumerGroupTopicPartitions("readers", offsets)
            admin.alter_consumer_group_offsets([wanted])["readers"].result(PATIENCE_SECONDS)
        else:
            producer = make_producer({"transactional.id": "worker"})
            producer.init_transactions(PATIENCE_SECONDS)
            producer.begin_transaction()
            producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), PATIENCE_SECONDS)
            producer.commit_transaction(PATIENCE_SECONDS)
        asked = [ConsumerGroupTopicPartitions("readers")]
        listed = admin.list_consumer_group_offsets(asked)["readers"].result(PATIENCE_SECONDS).topic_partitions
    found = consumer.committed([TP("t", 0)], PATIENCE_SECONDS)
    assert [(tp.offset, tp.metadata) for tp in (*found, *listed)] == [(7, metadata)] * 2


def test_metadata_that_no_database_stores_is_refused(reader):
    error = raised(reader().commit, offsets=[TP("t", 0, 1, "nul\0")], asynchronous=False)
    assert error.code() == KafkaError.INVALID_REQUEST


def test_on_commit_hears_of_asynchronous_commits_from_poll(reader):
    heard = []
    consumer = reader({"on_commit": lambda error, partitions: heard.append((error, partitions))})
    consumer.consume(2, PATIENCE_SECONDS)
    consumer.pause([TP("t", 0)])
    assert consumer.commit() is None
    polled_until(consumer, lambda: heard)
    ((error, (partition,)),) = heard
    assert (error, partition.offset, partition.error) == (None, 2, None)
    heard.clear()
    consumer.commit()
    consumer.poll(0)
    ((error, partitions),) = heard
    assert (error.code(), partitions) == (KafkaError._NO_OFFSET, [])
    heard.clear()
    consumer.commit(offsets=[TP("nope", 0, 3)])
    polled_until(consumer, lambda: heard)
    ((error, (partition,)),) = heard
    assert error.code() == partition.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART


def test_close_tells_on_commit_of_a_commit_that_ended_while_partitions_were_given_back(make_consumer, topic):
    heard = []
    configuration = {"enable.auto.commit": False, "on_commit": lambda error, partitions: heard.append(partitions)}
    consumer = make_consumer(configuration)

    def revoked(consumer, partitions):
        consumer.commit(offsets=[TP("t", 0, 3)])
        # One worker does both, so this is behind the commit.
        assert committed(consumer) == 3

    consumer.subscribe(["t"], on_revoke=revoked)
    assert consumer.poll(PATIENCE_SECONDS) is not None
    consumer.close()
    assert [(tp.partition, tp.offset) for tp in heard[0]] == [(0, 3)]
    assert len(heard) == 1


def test_what_on_commit_raises_comes_out_of_poll(reader):
    def refuse(error, partitions):
        raise ZeroDivisionError

    consumer = reader({"on_commit": refuse})
    consumer.commit(offsets=[TP("t", 0, 3)])
    consumer.pause([TP("t", 0)])
    with pytest.raises(ZeroDivisionError):
        polled_until(consumer, lambda: False)
    assert committed(consumer) == 3


def test_offsets_are_committed_by_themselves(reader):
    consumer = reader({"enable.auto.commit": True, "auto.commit.interval.ms": 20})
    consumer.consume(4, PATIENCE_SECONDS)
    eventually(lambda: committed(consumer) == 4)


def test_after_a_call_that_was_interrupted_as_it_began_offsets_are_stored_as_before(reader, monkeypatch):
    consumer = reader({"enable.auto.commit": True, "auto.commit.interval.ms": 3_600_000})
    polled = consumer._core.polled

    def interrupted(**options):
        polled(**options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(consumer._core, "polled", interrupted)
        with pytest.raises(KeyboardInterrupt):
            consumer.consume(2, 0)
    assert consumer.poll(PATIENCE_SECONDS).value() == b"0"
    commit_what_is_stored(consumer)
    assert committed(consumer) == 1


def test_no_commit_of_more_comes_before_that_of_what_was_stored_a_moment_ago(reader, monkeypatch):
    consumer = reader({"enable.auto.commit": True, "auto.commit.interval.ms": 3_600_000})
    assert len(consumer.consume(4, PATIENCE_SECONDS)) == 4
    submit, lock, seen = consumer._core.commits.submit, consumer._core.lock, []

    def is_free():
        if not lock.acquire(blocking=False):
            return False
        lock.release()
        return True

    def submit_alone(offsets, removed=()):
        with ThreadPoolExecutor(1) as pool:
            # Whoever reads on, or commits what is stored, needs the lock.
            seen.append(pool.submit(is_free).result())
        return submit(offsets, removed)

    monkeypatch.setattr(consumer._core.commits, "submit", submit_alone)
    commit_what_is_stored(consumer)
    assert (seen, committed(consumer)) == ([False], 4)


def test_the_last_offsets_are_committed_when_the_consumer_is_closed(reader):
    with reader({"enable.auto.commit": True}) as consumer:
        consumer.consume(4, PATIENCE_SECONDS)
    assert committed(reader()) == 4


def test_nothing_is_committed_at_the_end_unless_that_is_set(reader):
    with reader() as consumer:
        consumer.consume(4, PATIENCE_SECONDS)
    assert committed(reader()) == OFFSET_INVALID


def test_offsets_of_partitions_that_go_are_committed(reader):
    consumer = reader({"enable.auto.commit": True})
    consumer.consume(4, PATIENCE_SECONDS)
    consumer.assign([TP("t", 1)])
    assert committed(consumer) == 4


@pytest.mark.slow_but_first
@pytest.mark.parametrize("way", ["close", "assign"])
def test_offsets_of_a_partition_that_goes_are_not_committed_for_one_that_has_its_name_now(reader, log, way):
    consumer = reader({"enable.auto.commit": True, "auto.commit.interval.ms": 3_600_000})
    consumer.consume(4, PATIENCE_SECONDS)
    # So that it does not find out before.
    consumer.pause([TP("t", 0)])
    log.store.write(lambda connection: delete_topic(connection, "t"))
    log.topic()
    log.write("t", 0, *[b"%d" % number for number in range(10)])
    if way == "close":
        consumer.close()
    else:
        consumer.unassign()
    assert committed(consumer if way == "assign" else reader()) == OFFSET_INVALID


def test_offsets_of_a_deleted_topic_are_not_those_of_the_new_one_in_which_the_application_seeks(reader, log):
    consumer = reader({"enable.auto.commit": True, "auto.commit.interval.ms": 3_600_000})
    assert len(consumer.consume(4, PATIENCE_SECONDS)) == 4
    consumer.commit(asynchronous=False)
    assert len(consumer.consume(2, PATIENCE_SECONDS)) == 2
    # So that it does not find out before.
    consumer.pause([TP("t", 0)])
    log.store.write(lambda connection: delete_topic(connection, "t"))
    partition_id = log.topic().partition_ids[0]
    log.write("t", 0, *[b"%d" % number for number in range(10)])
    consumer.seek(TP("t", 0, 1))
    assigned = consumer._core.find(TP("t", 0))
    eventually(lambda: assigned.start is None and assigned.partition_id == partition_id)
    commit_what_is_stored(consumer)
    assert committed(consumer) == OFFSET_INVALID
    consumer.resume([TP("t", 0)])
    assert consumer.poll(PATIENCE_SECONDS).value() == b"1"
    commit_what_is_stored(consumer)
    assert committed(consumer) == 2


def test_what_was_read_ahead_but_not_handed_out_is_not_committed(reader):
    with reader({"enable.auto.commit": True}) as consumer:
        assert consumer.poll(PATIENCE_SECONDS).value() == b"0"
    assert committed(reader()) == 1


def test_only_what_was_stored_is_committed(reader):
    with reader({"enable.auto.commit": True, "enable.auto.offset.store": False}) as consumer:
        messages = consumer.consume(4, PATIENCE_SECONDS)
        assert raised(consumer.commit, asynchronous=False).code() == KafkaError._NO_OFFSET
        consumer.store_offsets(message=messages[1])
        consumer.store_offsets(offsets=[TP("t", 1, 5), TP("t", 0, 3)])
        consumer.store_offsets(offsets=[])
        error = raised(consumer.store_offsets, offsets=[TP("t", 1, 5)])
        assert (error.code(), error.str()) == (
            KafkaError._STATE,
            "StoreOffsets failed: Local: Erroneous state",
        )
    assert committed(reader()) == 3


@pytest.mark.slow_but_first
@pytest.mark.parametrize("below_zero", [-5, OFFSET_INVALID])
def test_an_offset_below_zero_takes_back_what_was_stored(reader, below_zero):
    with reader({"enable.auto.commit": True, "enable.auto.offset.store": False}) as consumer:
        consumer.poll(PATIENCE_SECONDS)
        consumer.store_offsets(offsets=[TP("t", 0, 3)])
        consumer.store_offsets(offsets=[TP("t", 0, below_zero)])
        assert raised(consumer.commit, asynchronous=False).code() == KafkaError._NO_OFFSET
    assert committed(reader()) == OFFSET_INVALID


def test_a_commit_of_less_than_is_committed_needs_to_be_asked_for(reader):
    consumer = reader({"enable.auto.offset.store": False})
    consumer.poll(PATIENCE_SECONDS)
    consumer.store_offsets(offsets=[TP("t", 0, 3)])
    consumer.commit(asynchronous=False)
    consumer.store_offsets(offsets=[TP("t", 0, 1)])
    assert raised(consumer.commit, asynchronous=False).code() == KafkaError._NO_OFFSET


def test_committed_waits_for_a_transaction_that_may_change_it(reader, log):
    consumer = reader()
    consumer.commit(offsets=[TP("t", 0, 1)], asynchronous=False)
    transaction = log.transaction()
    transaction.send_offset("readers", "t", 0, 8)
    error = raised(consumer.committed, [TP("t", 0)], 0.2)
    assert (error.code(), error.str()) == (KafkaError._TIMED_OUT, "Failed to get committed offsets: Local: Timed out")
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(committed(consumer)))
    waiting.start()
    transaction.end(commit=True)
    waiting.join(PATIENCE_SECONDS)
    assert answers == [8]


def test_committed_does_not_wait_if_uncommitted_records_are_read_too(reader, log):
    consumer = reader({"isolation.level": "read_uncommitted"})
    consumer.commit(offsets=[TP("t", 0, 1)], asynchronous=False)
    log.transaction().send_offset("readers", "t", 0, 8)
    assert committed(consumer) == 1


def test_records_that_a_failed_call_had_gathered_come_again(reader):
    def refuse(error, partitions):
        raise ZeroDivisionError

    consumer = reader({"on_commit": refuse})
    assert texts(consumer.consume(2, PATIENCE_SECONDS)) == [b"0", b"1"]
    consumer.commit(offsets=[TP("t", 0, 1)])
    gathered = []
    for _ in range(100):
        try:
            gathered += consumer.consume(20, 0.1)
        except ZeroDivisionError:
            break
    gathered += consumer.consume(8 - len(gathered), PATIENCE_SECONDS)
    assert texts(gathered) == [b"%d" % number for number in range(2, 10)]
