"""A topic that is deleted and created again under its name while clients know it: nobody confuses the two."""

from __future__ import annotations

import pytest

from tests.clients.consumer.log_writer import PATIENCE_SECONDS, eventually, texts
from tests.clients.steps import error_of
from txnstore import OFFSET_BEGINNING, OFFSET_INVALID, KafkaError, KafkaException, TopicPartition
from txnstore.admin import AdminClient, NewTopic
from txnstore.groups.offsets import read_offsets
from txnstore.log.topics import delete_topic

OLD = [b"old"] * 5
NEW = [b"%d" % number for number in range(9)]
#: No client looks at its topics by itself again.
NEVER = {"topic.metadata.refresh.interval.ms": -1}


@pytest.fixture
def anew(log):
    """Delete the topic and make it anew, at once; with records if there are to be any."""

    def make(*values, partition_count=1):
        log.store.write(lambda connection: delete_topic(connection, "t"), wakes_readers=True)
        topic = log.topic("t", partition_count)
        if values:
            log.write("t", 0, *values)
        return topic

    return make


@pytest.fixture
def consumer(make_consumer, log):
    """A consumer of a group that has read and committed everything of the topic as it was."""
    log.topic()
    log.write("t", 0, *OLD)
    consumer = make_consumer({**NEVER, "enable.auto.commit": False})
    consumer.subscribe(["t"])
    assert texts(consumer.consume(len(OLD), PATIENCE_SECONDS)) == OLD
    consumer.commit(asynchronous=False)
    return consumer


def committed(consumer):
    (partition,) = consumer.committed([TopicPartition("t", 0)], PATIENCE_SECONDS)
    return partition.offset


def everything(make_consumer, count):
    reader = make_consumer({"group.id": "another"})
    reader.assign([TopicPartition("t", 0, OFFSET_BEGINNING)])
    return texts(reader.consume(count, PATIENCE_SECONDS))


# --- reading ----------------------------------------------------------------------------------------------------------


def test_a_consumer_reads_all_of_the_new_topic_also_if_that_is_longer(consumer, anew):
    """Its position would be within the new log: all below it would be skipped."""
    anew(*NEW)
    assert texts(consumer.consume(len(NEW), PATIENCE_SECONDS)) == NEW
    consumer.commit(asynchronous=False)
    assert committed(consumer) == len(NEW)


def test_what_was_read_of_the_old_topic_is_not_committed_to_the_new_one(consumer, anew, log, make_consumer):
    log.write("t", 0, b"more")
    assert consumer.poll(PATIENCE_SECONDS).value() == b"more"
    consumer.pause(consumer.assignment())
    anew(*NEW)
    error = error_of(consumer.commit, asynchronous=False)
    assert error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert committed(consumer) == OFFSET_INVALID
    consumer.close()
    follower = make_consumer()
    follower.subscribe(["t"])
    assert texts(follower.consume(len(NEW), PATIENCE_SECONDS)) == NEW


@pytest.mark.slow_but_first
@pytest.mark.parametrize("stores", [False, True], ids=["committed", "stored"])
def test_an_old_message_is_not_committed_to_the_new_topic_that_is_being_read(make_consumer, log, anew, stores):
    """Whoever was at work on it when the topic went away commits it late: what is below would be skipped."""
    log.topic()
    log.write("t", 0, *OLD)
    consumer = make_consumer({**NEVER, "enable.auto.commit": False, "enable.auto.offset.store": False})
    consumer.subscribe(["t"])
    (*_, old) = consumer.consume(len(OLD), PATIENCE_SECONDS)
    anew(*NEW)
    eventually(lambda: consumer._core.subscription.find("t", 0).buffered_records == len(NEW))
    if stores:
        assert error_of(consumer.store_offsets, message=old).code() == KafkaError._UNKNOWN_PARTITION
    else:
        error = error_of(consumer.commit, message=old, asynchronous=False)
        assert error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    new = consumer.poll(PATIENCE_SECONDS)
    assert new.value() == NEW[0]
    assert committed(consumer) == OFFSET_INVALID
    consumer.seek(TopicPartition("t", 0, 0))
    consumer.commit(message=new, asynchronous=False)
    assert committed(consumer) == 1


def test_a_commit_by_the_name_is_for_the_new_topic(make_consumer, log, anew):
    """Of a partition that is not assigned, nothing that was read of the old topic can be meant."""
    log.topic()
    consumer = make_consumer(NEVER)
    offset = [TopicPartition("t", 0, 3)]
    consumer.commit(offsets=offset, asynchronous=False)
    anew(*NEW)
    assert committed(consumer) == OFFSET_INVALID
    consumer.commit(offsets=offset, asynchronous=False)
    assert committed(consumer) == 3
    assert committed(make_consumer()) == 3


def test_what_others_have_committed_in_the_new_topic_is_seen(consumer, anew, make_consumer):
    anew(*NEW)
    make_consumer({"group.id": "others"}).commit(offsets=[TopicPartition("t", 0, 2)], asynchronous=False)
    knows_the_old = make_consumer({**NEVER, "group.id": "others"})
    assert committed(knows_the_old) == 2
    anew(*NEW)
    make_consumer({"group.id": "others"}).commit(offsets=[TopicPartition("t", 0, 4)], asynchronous=False)
    assert committed(knows_the_old) == 4


def test_a_commit_for_a_deleted_topic_is_refused(consumer, log):
    consumer.pause(consumer.assignment())
    log.store.write(lambda connection: delete_topic(connection, "t"))
    error = error_of(consumer.commit, offsets=[TopicPartition("t", 0, 3)], asynchronous=False)
    assert error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART


def test_of_several_topics_the_others_are_committed(anew, log, make_consumer):
    for name in ("t", "u"):
        log.topic(name)
    log.write("t", 0, *OLD)
    consumer = make_consumer({**NEVER, "enable.auto.commit": False})
    consumer.assign([TopicPartition("t", 0)])
    assert texts(consumer.consume(len(OLD), PATIENCE_SECONDS)) == OLD
    consumer.pause(consumer.assignment())
    both = [TopicPartition("t", 0, 4), TopicPartition("u", 0, 7)]
    consumer.commit(offsets=both, asynchronous=False)
    anew(*NEW)
    with pytest.raises(KafkaException):
        consumer.commit(offsets=[TopicPartition("t", 0, 5), TopicPartition("u", 0, 8)], asynchronous=False)
    assert [partition.offset for partition in make_consumer().committed(both, PATIENCE_SECONDS)] == [OFFSET_INVALID, 8]


def test_lookups_are_of_the_new_topic(make_consumer, log, anew):
    log.topic()
    log.write("t", 0, *OLD)
    consumer = make_consumer(NEVER)
    partition = TopicPartition("t", 0)
    assert consumer.get_watermark_offsets(partition, PATIENCE_SECONDS) == (0, len(OLD))
    anew(*NEW)
    assert consumer.get_watermark_offsets(partition, PATIENCE_SECONDS) == (0, len(NEW))
    anew(b"one")
    (found,) = consumer.offsets_for_times([TopicPartition("t", 0, 0)], PATIENCE_SECONDS)
    assert found.offset == 0


# --- producing --------------------------------------------------------------------------------------------------------


@pytest.mark.slow_but_first
@pytest.mark.parametrize("idempotent", [True, False], ids=["idempotent", "plain"])
def test_a_producer_goes_on_in_the_new_topic(make_producer, make_consumer, log, anew, idempotent):
    log.topic()
    producer = make_producer({**NEVER, "enable.idempotence": idempotent})
    producer.produce("t", b"old", partition=0)
    assert producer.flush(PATIENCE_SECONDS) == 0
    anew()
    fates = []
    for value in NEW[:3]:
        producer.produce("t", value, partition=0, on_delivery=lambda error, message: fates.append(error))
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert fates == [None] * 3
    assert everything(make_consumer, 3) == NEW[:3]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("flushes", [True, False], ids=["flushed", "with the commit"])
def test_a_transaction_goes_on_in_the_new_topic(make_producer, make_consumer, log, anew, flushes):
    log.topic()
    producer = make_producer({**NEVER, "transactional.id": "x"})
    producer.init_transactions(PATIENCE_SECONDS)
    producer.begin_transaction()
    producer.produce("t", b"old", partition=0)
    producer.commit_transaction(PATIENCE_SECONDS)
    anew()
    for value in NEW[:2]:
        producer.begin_transaction()
        producer.produce("t", value, partition=0)
        if flushes:
            assert producer.flush(PATIENCE_SECONDS) == 0
        producer.commit_transaction(PATIENCE_SECONDS)
    assert everything(make_consumer, 2) == NEW[:2]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("count", [1, 3], ids=["alone", "together"])
def test_commits_that_nobody_waits_for_go_on_in_the_new_topic(
    url, make_producer, make_consumer, log, anew, hold_database, count
):
    log.topic()
    log.topic("kept")
    producer = make_producer({**NEVER, "transactional.id": "x"})
    producer.init_transactions(PATIENCE_SECONDS)
    producer.begin_transaction()
    producer.produce("t", b"old", partition=0)
    producer.produce("kept", b"old", partition=0)
    producer.commit_transaction(PATIENCE_SECONDS)
    futures = []
    for values in (NEW[:count], NEW[count : 2 * count]):
        anew()
        with hold_database(url):
            for value in values:
                producer.begin_transaction()
                producer.produce("t", value, partition=0)
                producer.produce("kept", value, partition=0)
                futures.append(producer.commit_transaction_async())
        assert [future.result(PATIENCE_SECONDS) for future in futures] == [None] * len(futures)
        assert everything(make_consumer, count) == values


def test_a_producer_says_of_a_partition_that_the_new_topic_lacks(make_producer, log, anew):
    log.topic(partition_count=2)
    producer = make_producer(NEVER)
    producer.produce("t", b"old", partition=1)
    assert producer.flush(PATIENCE_SECONDS) == 0
    anew(partition_count=1)
    fates = []
    producer.produce("t", b"new", partition=1, on_delivery=lambda error, message: fates.append(error.code()))
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert fates == [KafkaError.UNKNOWN_TOPIC_OR_PART]


# --- offsets of transactions ------------------------------------------------------------------------------------------


@pytest.mark.slow_but_first
@pytest.mark.parametrize("member", [True, False], ids=["with the commit", "pending"])
def test_offsets_of_a_transaction_never_get_lost_in_the_old_topic(consumer, make_producer, log, anew, member):
    """They would be committed where nobody looks: the records that were consumed would be consumed again."""
    metadata = consumer.consumer_group_metadata()
    if not member:
        # Of no generation: what is sent is pending at once, in place of riding with the commit.
        consumer.close()
        metadata = b"CGMDv2:\xff\xff\xff\xffreaders\x00\x00\x01"
    log.topic("out")
    producer = make_producer({**NEVER, "transactional.id": "x"})
    producer.init_transactions(PATIENCE_SECONDS)

    def transform(value, offset):
        producer.begin_transaction()
        producer.produce("out", value)
        producer.send_offsets_to_transaction([TopicPartition("t", 0, offset)], metadata, PATIENCE_SECONDS)
        producer.commit_transaction(PATIENCE_SECONDS)

    transform(b"old", 4)
    anew(*NEW)
    if member:
        assert texts(consumer.consume(2, PATIENCE_SECONDS)) == NEW[:2]
    error = error_of(transform, b"new", 2)
    assert (error.code(), error.txn_requires_abort(), error.fatal()) == (KafkaError.UNKNOWN_TOPIC_OR_PART, True, False)
    producer.abort_transaction(PATIENCE_SECONDS)
    transform(b"new", 2)
    ids = [log.partition_id("t", 0)]
    offsets = log.store.read(lambda connection: read_offsets(connection, "readers", ids)).offsets
    assert {number: offset.offset for number, offset in offsets.items()} == {ids[0]: 2}


# --- administration ---------------------------------------------------------------------------------------------------


def test_an_admin_client_sees_the_new_topic(url, log, anew):
    with AdminClient({"bootstrap.servers": url, **NEVER}) as admin:
        admin.create_topics([NewTopic("t", 1, config={"retention.ms": "5"})])["t"].result(PATIENCE_SECONDS)
        assert len(admin.list_topics("t", PATIENCE_SECONDS).topics["t"].partitions) == 1
        anew(*NEW, partition_count=2)
        assert len(admin.list_topics("t", PATIENCE_SECONDS).topics["t"].partitions) == 2
        deleted = admin.delete_records([TopicPartition("t", 0, 3)])
        assert [future.result(PATIENCE_SECONDS).low_watermark for future in deleted.values()] == [3]


def test_offsets_that_are_stored_by_themselves_are_those_of_the_new_topic(make_consumer, log, anew):
    log.topic()
    log.write("t", 0, *OLD)
    consumer = make_consumer({**NEVER, "auto.commit.interval.ms": 50})
    consumer.subscribe(["t"])
    assert texts(consumer.consume(len(OLD), PATIENCE_SECONDS)) == OLD
    eventually(lambda: committed(make_consumer()) == len(OLD))
    anew(*NEW)
    assert texts(consumer.consume(3, PATIENCE_SECONDS)) == NEW[:3]
    consumer.close()
    assert committed(make_consumer()) == 3
