"""Transactions as their users write them: who sees what and when, and the offsets that go along."""

from __future__ import annotations

import itertools
import threading

import pytest

from tests.clients.producer.transactional import *  # noqa: F403 - the fixtures
from tests.clients.producer.transactional import TOPIC, assigned, committed, read, seen
from tests.clients.steps import (
    NO_MEMBER,
    PATIENCE_SECONDS,
    Refusal,
    create_topic,
    error_of,
    read_to_end,
    refusal_of,
    values,
)
from txnstore import OFFSET_INVALID, KafkaError, Message, TopicPartition
from txnstore.clients.configuration.configuration import producer_configuration
from txnstore.clients.producer import progress as progress_module
from txnstore.clients.producer import sender as sender_module
from txnstore.clients.producer.sender import linger_seconds_of
from txnstore.db.store import Store
from txnstore.groups.offsets import check_committer

pytestmark = pytest.mark.least_privilege

# Who sees what.


def test_what_is_committed_is_seen_by_everybody_as_soon_as_commit_returns(producer, url, topic):
    producer.begin_transaction()
    for value in (b"1", b"2"):
        producer.produce(topic, value, partition=0)
    producer.commit_transaction(PATIENCE_SECONDS)

    assert seen(url, topic) == ([b"1", b"2"], [b"1", b"2"])


def test_what_is_open_is_seen_by_readers_of_uncommitted_records_alone(producer, plainly, url, topic):
    plainly(topic, b"before")
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=0)
    assert producer.flush(PATIENCE_SECONDS) == 0
    plainly(topic, b"after")

    assert seen(url, topic) == ([b"before"], [b"before", b"open", b"after"])
    producer.commit_transaction(PATIENCE_SECONDS)
    assert seen(url, topic) == ([b"before", b"open", b"after"], [b"before", b"open", b"after"])


def test_what_is_aborted_is_seen_by_readers_of_uncommitted_records_alone(producer, plainly, url, topic):
    producer.begin_transaction()
    producer.produce(topic, b"aborted", partition=0)
    assert producer.flush(PATIENCE_SECONDS) == 0
    producer.abort_transaction(PATIENCE_SECONDS)
    plainly(topic, b"after")
    producer.begin_transaction()
    producer.produce(topic, b"committed", partition=0)
    producer.commit_transaction(PATIENCE_SECONDS)

    assert seen(url, topic) == ([b"after", b"committed"], [b"aborted", b"after", b"committed"])


def test_markers_take_offsets_and_are_never_returned(producer, plainly, url, topic):
    for end in (producer.commit_transaction, producer.abort_transaction):
        producer.begin_transaction()
        producer.produce(topic, b"v", partition=0)
        assert producer.flush(PATIENCE_SECONDS) == 0
        end(PATIENCE_SECONDS)
    plainly(topic, b"plain")

    assert [message.offset() for message in read_to_end(url, topic)] == [0, 4]
    assert [message.offset() for message in read_to_end(url, topic, isolation="read_uncommitted")] == [0, 2, 4]


def test_all_partitions_of_all_topics_change_at_once(producer, make_consumer, url):
    partitions = [("one", 0), ("one", 1), ("two", 2)]
    for name in ("one", "two"):
        create_topic(url, name, partition_count=3)
    producer.begin_transaction()
    for name, partition in partitions:
        producer.produce(name, f"{name}-{partition}".encode(), partition=partition)
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert [seen(url, name, partitions=(partition,))[0] for name, partition in partitions] == [[], [], []]

    producer.commit_transaction(PATIENCE_SECONDS)

    assert [seen(url, name, partitions=(partition,))[0] for name, partition in partitions] == [
        [b"one-0"],
        [b"one-1"],
        [b"two-2"],
    ]


def test_a_reader_who_waits_is_given_the_records_once_they_are_committed(producer, make_consumer, topic):
    consumer = assigned(make_consumer, topic)
    producer.begin_transaction()
    producer.produce(topic, b"v", partition=0)
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert consumer.poll(0.3) is None

    committing = threading.Thread(target=producer.commit_transaction, args=(PATIENCE_SECONDS,))
    committing.start()
    assert values(read(consumer, 1)) == [b"v"]
    committing.join(PATIENCE_SECONDS)


def test_the_end_of_the_log_is_the_last_stable_offset_for_readers_of_committed_records(
    producer, plainly, make_consumer, topic
):
    plainly(topic, b"0", b"1")
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=0)
    assert producer.flush(PATIENCE_SECONDS) == 0
    partition = TopicPartition(topic, 0)
    committed_reader = make_consumer({"isolation.level": "read_committed"})
    uncommitted_reader = make_consumer({"isolation.level": "read_uncommitted"})

    assert committed_reader.get_watermark_offsets(partition, PATIENCE_SECONDS) == (0, 2)
    assert uncommitted_reader.get_watermark_offsets(partition, PATIENCE_SECONDS) == (0, 3)
    producer.commit_transaction(PATIENCE_SECONDS)
    assert committed_reader.get_watermark_offsets(partition, PATIENCE_SECONDS) == (0, 4)


def test_the_position_of_a_reader_moves_over_markers(producer, make_consumer, topic):
    """Whoever has read everything has no lag."""
    producer.begin_transaction()
    producer.produce(topic, b"v", partition=0)
    producer.commit_transaction(PATIENCE_SECONDS)
    consumer = assigned(make_consumer, topic, enable_partition_eof=True)
    read(consumer, 1)
    end = consumer.poll(PATIENCE_SECONDS)

    assert end.error() == KafkaError._PARTITION_EOF
    (position,) = consumer.position([TopicPartition(topic, 0)])
    assert position.offset == 2
    (stored,) = consumer.commit(asynchronous=False)
    assert stored.offset == 2


def test_transactions_of_several_producers_are_told_apart(make_transactional, url, topic):
    producers = {name: make_transactional(name) for name in ("anna", "bert", "carl")}
    for producer in producers.values():
        producer.begin_transaction()
    for number, name in itertools.product(range(3), producers):
        producers[name].produce(topic, f"{name}{number}", partition=0)
        assert producers[name].flush(PATIENCE_SECONDS) == 0
    producers["bert"].abort_transaction(PATIENCE_SECONDS)
    producers["carl"].commit_transaction(PATIENCE_SECONDS)
    assert seen(url, topic)[0] == []

    producers["anna"].commit_transaction(PATIENCE_SECONDS)
    assert seen(url, topic)[0] == [f"{name}{number}".encode() for number in range(3) for name in ("anna", "carl")]


def test_many_small_transactions_one_after_the_other(producer, url, topic):
    for number in range(30):
        producer.begin_transaction()
        producer.produce(topic, b"%d" % number, partition=0)
        if number % 3:
            producer.commit_transaction(PATIENCE_SECONDS)
        else:
            producer.abort_transaction(PATIENCE_SECONDS)

    assert seen(url, topic)[0] == [b"%d" % number for number in range(30) if number % 3]


# Offsets that go along.


@pytest.fixture
def written(monkeypatch):
    """What was written by this process: an entry for each database transaction."""
    written = []
    write = Store.write

    def count(store, work, **options):
        written.append(work)
        return write(store, work, **options)

    commit_whole = Store.commit_whole

    def count_whole(store, whole, **options):
        places = commit_whole(store, whole, **options)
        if places is not None:
            written.append(whole)
        return places

    monkeypatch.setattr(Store, "write", count)
    monkeypatch.setattr(Store, "commit_whole", count_whole)
    return written


@pytest.mark.parametrize("exists", [True, False], ids=["there", "to be created"])
def test_records_of_a_topic_that_is_used_for_the_first_time_go_with_the_commit(
    make_transactional, url, written, exists
):
    if exists:
        create_topic(url, TOPIC)
    producer = make_transactional(linger_ms=9_000)
    reports = []
    producer.begin_transaction()
    for number in range(3):
        producer.produce(TOPIC, b"%d" % number, on_delivery=lambda error, message: reports.append(message.offset()))
    written.clear()
    producer.commit_transaction(PATIENCE_SECONDS)
    # Each is a database transaction: the commit, and before it the creation of the topic and its copies.
    assert len(written) == (1 if exists else 2 + url.count(","))
    assert reports == [0, 1, 2]
    assert values(read_to_end(url, TOPIC)) == [b"0", b"1", b"2"]


def test_records_that_need_not_linger_wait_for_a_commit_that_is_soon_to_come(
    make_transactional, make_consumer, url, topic, written, monkeypatch
):
    monkeypatch.setattr(sender_module, "COMMIT_COMES_SECONDS", 3_600.0)
    producer = make_transactional(linger_ms=0, message_timeout_ms=0)
    metadata = make_consumer().consumer_group_metadata()
    with producer.transaction(PATIENCE_SECONDS):
        producer.produce(topic, b"looks the topic up", partition=0)
    written.clear()
    with producer.transaction(PATIENCE_SECONDS):
        producer.produce(topic, b"0", partition=0)
        for _ in range(2):
            # The sender has come by.
            producer._sender.thread.submit(lambda: None).result(PATIENCE_SECONDS)
        assert written == []
    assert len(written) == 1
    with producer.transaction(PATIENCE_SECONDS):
        producer.produce(topic, b"1", partition=0)
        producer.send_offsets_to_transaction([TopicPartition(topic, 0, 7)], metadata, PATIENCE_SECONDS)
    # Beside the commit, which has the record: the offsets of a consumer that belongs to no group. (Of a cluster, what
    # goes to other databases is asked for and delivered there.)
    assert len(written) == 3 or "," in url
    assert values(read_to_end(url, topic)) == [b"looks the topic up", b"0", b"1"]


@pytest.mark.parametrize(
    ("properties", "linger_seconds"),
    [
        ({"linger.ms": 0}, 0.0),
        ({"linger.ms": 0, "transactional.id": "anna"}, 0.05),
        ({"linger.ms": 70, "transactional.id": "anna"}, 0.07),
        # Never for so long that a record's time would be over.
        ({"linger.ms": 0, "transactional.id": "anna", "message.timeout.ms": 4}, 0.002),
        ({"linger.ms": 0, "transactional.id": "anna", "message.timeout.ms": 0}, 0.05),
    ],
)
def test_how_long_a_record_waits_for_others_or_for_its_commit(properties, linger_seconds):
    configuration = producer_configuration(({"bootstrap.servers": "sqlite:///log.db", **properties},), {})
    assert linger_seconds_of(configuration) == pytest.approx(linger_seconds)


def test_records_of_a_topic_that_cannot_be_had_keep_the_others_from_being_committed(make_transactional, url, topic):
    producer = make_transactional(linger_ms=9_000, allow_auto_create_topics=False)
    producer.begin_transaction()
    producer.produce(topic, b"lost")
    producer.produce("nowhere", b"lost")
    error = error_of(producer.commit_transaction, PATIENCE_SECONDS)
    assert (error.code(), error.txn_requires_abort()) == (KafkaError._INCONSISTENT, True)
    assert error.str().endswith(" failed delivery (see individual delivery reports): there is no topic 'nowhere'")
    producer.abort_transaction(PATIENCE_SECONDS)
    assert read_to_end(url, topic) == []
    with producer.transaction(PATIENCE_SECONDS):
        producer.produce(topic, b"next")
    assert values(read_to_end(url, topic)) == [b"next"]


def test_a_commit_that_fails_says_why_the_first_record_was_not_delivered(make_transactional, topic):
    producer = make_transactional(linger_ms=9_000, allow_auto_create_topics=False)
    for _ in range(2):
        producer.begin_transaction()
        producer.produce(topic, b"purged")
        producer.purge()
        producer.produce("nowhere", b"lost")
        reason = "2 message(s) failed delivery (see individual delivery reports): Local: Purged in queue"
        expected = Refusal(KafkaError._INCONSISTENT, reason, requires_abort=True)
        assert refusal_of(producer.commit_transaction, PATIENCE_SECONDS) == expected
        producer.abort_transaction(PATIENCE_SECONDS)
        producer.begin_transaction()
        producer.produce("nowhere", b"lost")
        assert "nowhere" in error_of(producer.commit_transaction, PATIENCE_SECONDS).str()
        producer.abort_transaction(PATIENCE_SECONDS)


def test_offsets_are_committed_with_the_transaction(producer, make_consumer, topic):
    consumer = make_consumer({"isolation.level": "read_uncommitted"})
    producer.begin_transaction()
    producer.send_offsets_to_transaction(
        [TopicPartition(topic, 0, 7)], consumer.consumer_group_metadata(), PATIENCE_SECONDS
    )
    assert committed(consumer, topic) == OFFSET_INVALID

    producer.commit_transaction(PATIENCE_SECONDS)
    assert committed(consumer, topic) == 7


def test_offsets_are_dropped_with_the_transaction(producer, make_consumer, topic):
    consumer = make_consumer()
    producer.begin_transaction()
    producer.send_offsets_to_transaction(
        [TopicPartition(topic, 0, 7)], consumer.consumer_group_metadata(), PATIENCE_SECONDS
    )
    producer.abort_transaction(PATIENCE_SECONDS)

    assert committed(consumer, topic) == OFFSET_INVALID


def test_metadata_beside_an_offset_is_kept_and_what_is_no_offset_left_out(producer, make_consumer, topic):
    consumer = make_consumer()
    producer.begin_transaction()
    producer.send_offsets_to_transaction(
        [TopicPartition(topic, 0, 3, "half-way"), TopicPartition(topic, 1)], NO_MEMBER, PATIENCE_SECONDS
    )
    producer.commit_transaction(PATIENCE_SECONDS)

    (position,) = consumer.committed([TopicPartition(topic, 0)], PATIENCE_SECONDS)
    assert (position.offset, position.metadata) == (3, "half-way")


def test_a_reader_of_committed_records_waits_for_offsets_that_are_pending(producer, make_consumer, topic):
    """KIP-447: pending offsets are unstable until their transaction ends."""
    stable = make_consumer({"isolation.level": "read_committed"})
    unstable = make_consumer({"isolation.level": "read_uncommitted"})
    producer.begin_transaction()
    producer.send_offsets_to_transaction([TopicPartition(topic, 0, 7)], NO_MEMBER, PATIENCE_SECONDS)

    assert committed(unstable, topic) == OFFSET_INVALID
    error = error_of(stable.committed, [TopicPartition(topic, 0)], 0.3)
    assert error.code() in (KafkaError._TIMED_OUT, KafkaError.UNSTABLE_OFFSET_COMMIT)
    answers: list[int] = []
    waiting = threading.Thread(target=lambda: answers.append(committed(stable, topic)))
    waiting.start()
    producer.commit_transaction(PATIENCE_SECONDS)
    waiting.join(PATIENCE_SECONDS)
    assert answers == [7]


def test_the_next_producer_makes_pending_offsets_stable(producer, make_transactional, make_consumer, topic):
    """The last flow of confluent-kafka's test_transactions: init_transactions() aborts what was left open."""
    consumer = make_consumer()
    producer.begin_transaction()
    producer.send_offsets_to_transaction([TopicPartition(topic, 0, 7)], NO_MEMBER, PATIENCE_SECONDS)

    make_transactional()

    assert committed(consumer, topic) == OFFSET_INVALID


def test_offsets_alone_are_a_transaction(producer, make_consumer, topic):
    consumer = make_consumer()
    for offset in (3, 9):
        producer.begin_transaction()
        producer.send_offsets_to_transaction([TopicPartition(topic, 0, offset)], NO_MEMBER, PATIENCE_SECONDS)
        producer.commit_transaction(PATIENCE_SECONDS)
        assert committed(consumer, topic) == offset


def test_offsets_of_a_generation_that_is_over_abort_the_transaction(producer, make_consumer, topic):
    consumer = make_consumer()
    consumer.subscribe([topic])
    deadline = itertools.count()
    while not consumer.assignment():
        consumer.poll(0.1)
        assert next(deadline) < PATIENCE_SECONDS * 10
    metadata = consumer.consumer_group_metadata()
    consumer.close()

    producer.begin_transaction()
    error = error_of(producer.send_offsets_to_transaction, [TopicPartition(topic, 0, 1)], metadata, PATIENCE_SECONDS)
    assert error.code() in (
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.FENCED_INSTANCE_ID,
    )
    assert (error.txn_requires_abort(), error.fatal()) == (True, False)
    assert error_of(producer.commit_transaction, PATIENCE_SECONDS).txn_requires_abort()
    producer.abort_transaction(PATIENCE_SECONDS)
    producer.begin_transaction()


def test_a_member_whose_offsets_were_taken_is_asked_about_once_more_by_the_commit_alone(
    make_transactional, plainly, make_consumer, topic, monkeypatch
):
    # Offsets that linger no longer go by themselves.
    producer = make_transactional(linger_ms=50_000)
    plainly(topic, b"0")
    consumer = make_consumer({"enable.auto.commit": False})
    consumer.subscribe([topic])
    read(consumer, 1)
    metadata = consumer.consumer_group_metadata()

    def send(offset):
        producer.begin_transaction()
        producer.send_offsets_to_transaction([TopicPartition(topic, 0, offset)], metadata, PATIENCE_SECONDS)

    send(1)
    producer.commit_transaction(PATIENCE_SECONDS)
    asked = []

    def check(connection, committer):
        asked.append(committer)
        check_committer(connection, committer)

    monkeypatch.setattr(progress_module, "check_committer", check)
    send(2)
    producer.commit_transaction(PATIENCE_SECONDS)
    assert committed(make_consumer(), topic) == 2
    assert asked == []
    # Of one that has left in between, the commit is refused, and nothing of it is there.
    send(3)
    consumer.close()
    assert error_of(producer.commit_transaction, PATIENCE_SECONDS).txn_requires_abort()
    producer.abort_transaction(PATIENCE_SECONDS)
    assert committed(make_consumer(), topic) == 2
    # After that it is asked about at once.
    error = error_of(send, 4)
    assert error.txn_requires_abort()
    assert len(asked) == 1


def test_a_member_sends_the_offsets_of_its_group(producer, plainly, make_consumer, topic):
    plainly(topic, b"0", b"1")
    consumer = make_consumer({"enable.auto.commit": False})
    consumer.subscribe([topic])
    read(consumer, 2)

    producer.begin_transaction()
    producer.send_offsets_to_transaction(
        consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), PATIENCE_SECONDS
    )
    producer.commit_transaction(PATIENCE_SECONDS)

    assert committed(consumer, topic) == 2


def test_offsets_of_a_member_that_leaves_before_the_commit_count_once(producer, plainly, make_consumer, topic):
    """Either the commit holds and its offsets are where the next member goes on, or it is refused."""
    plainly(topic, b"0", b"1")
    leaving = make_consumer({"enable.auto.commit": False})
    leaving.subscribe([topic])
    read(leaving, 2)
    producer.begin_transaction()
    producer.send_offsets_to_transaction(
        leaving.position(leaving.assignment()), leaving.consumer_group_metadata(), PATIENCE_SECONDS
    )
    leaving.close()
    following = make_consumer({"enable.auto.commit": False})
    following.subscribe([topic])
    polls = itertools.count()
    early: list[Message] = []
    while not following.assignment():
        early += following.consume(1, 0.05)
        assert next(polls) < PATIENCE_SECONDS / 0.05
    early += following.consume(2, 0.3)
    refusal = refusal_of(producer.commit_transaction, PATIENCE_SECONDS)
    if refusal is not None:
        assert refusal.requires_abort
        producer.abort_transaction(PATIENCE_SECONDS)
    plainly(topic, b"2")
    count = 3 if refusal else 1
    late = read(following, count - len(early))

    assert values(early + late) == [b"0", b"1", b"2"][-count:]
