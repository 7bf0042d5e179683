"""Groups that read in commit order: where the next consumer goes on, with whatever the offsets were committed."""

from __future__ import annotations

import asyncio
import json

import pytest
import sqlalchemy
from typer.testing import CliRunner

from tests.clients.consumer.log_writer import PATIENCE_SECONDS, error_code, texts
from txnstore import (
    OFFSET_INVALID,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from txnstore.admin import AdminClient
from txnstore.aio import AIOConsumer
from txnstore.cli.program import NAMES, program_with
from txnstore.log import commit_order
from txnstore.log.deleting import advance_log_start

COMMIT_ORDER = {"txnstore.delivery.order": "commit", "enable.auto.commit": False}
PLAIN = {"enable.auto.commit": False}
#: A transaction, with a record outside of it that was appended in its middle and comes before it.
VALUES = [b"N", b"0", b"1", b"2", b"3", b"4", b"5"]
MARKER_OFFSET = 7


@pytest.fixture
def history(log, monkeypatch):
    """Write the records; a page holds two batches, so the transaction is larger than one."""
    monkeypatch.setattr(commit_order, "PAGE_BATCHES_MAX", 2)
    log.topic()
    transaction = log.transaction()
    for number in range(6):
        transaction.write("t", 0, b"%d" % number)
        if number == 2:
            log.write("t", 0, b"N")
    transaction.end(commit=True)


@pytest.fixture
def member(make_consumer):
    """Make a consumer that is subscribed to t."""

    def make(configuration=()):
        consumer = make_consumer({**COMMIT_ORDER, **dict(configuration)})
        consumer.subscribe(["t"])
        return consumer

    return make


def committed(consumer):
    (partition,) = consumer.committed([TopicPartition("t", 0)], PATIENCE_SECONDS)
    return partition.offset, partition.offset_in_transaction


@pytest.mark.usefixtures("history")
def test_a_member_that_leaves_within_a_transaction_is_followed_by_one_that_goes_on_there(member):
    first = member({"enable.auto.commit": True})
    assert texts(first.consume(3, PATIENCE_SECONDS)) == VALUES[:3]
    first.close()
    second = member({"enable.auto.commit": True})
    assert texts(second.consume(2, PATIENCE_SECONDS)) == VALUES[3:5]
    assert committed(second) == (MARKER_OFFSET, 2)
    # A rebalance takes the partition away, or leaves it: either way each record comes once.
    third = member({"enable.auto.commit": True})
    found: list[bytes] = []
    while len(found) < 2:
        found += texts([*second.consume(2, 0.05), *third.consume(2, 0.05)])
    assert found == VALUES[5:]


@pytest.mark.slow
@pytest.mark.usefixtures("history")
def test_a_worker_commits_what_it_read_of_a_transaction_with_what_it_wrote(member, make_producer, make_consumer):
    """Each output is one transaction; the worker is gone after any of them, and one transaction is aborted."""
    for number in range(len(VALUES)):
        worker = member()
        producer = make_producer({"transactional.id": "worker"})
        producer.init_transactions(PATIENCE_SECONDS)
        for commit in (False, True):
            message = worker.poll(PATIENCE_SECONDS)
            producer.begin_transaction()
            producer.produce("out", message.value())
            position = worker.position(worker.assignment())
            producer.send_offsets_to_transaction(position, worker.consumer_group_metadata())
            if commit:
                producer.commit_transaction(PATIENCE_SECONDS)
            else:
                producer.abort_transaction(PATIENCE_SECONDS)
                worker.seek(*worker.committed(worker.assignment(), PATIENCE_SECONDS)) if number else worker.seek(
                    TopicPartition("t", 0, 0)
                )
        assert message.value() == VALUES[number]
        worker.close()
    reader = make_consumer({"group.id": "other"})
    reader.assign([TopicPartition("out", 0, 0)])
    assert texts(reader.consume(len(VALUES), PATIENCE_SECONDS)) == VALUES
    assert reader.consume(1, 0.5) == []


@pytest.mark.usefixtures("history")
def test_rows_and_the_position_within_a_transaction_are_one_commit_of_the_caller(make_consumer, url):
    engine = sqlalchemy.create_engine(url)
    consumer = make_consumer(COMMIT_ORDER)
    consumer.assign([TopicPartition("t", 0)])
    messages = consumer.consume(3, PATIENCE_SECONDS)
    with engine.connect() as connection:
        consumer.commit(messages[2], connection=connection)
        connection.rollback()
        assert committed(consumer) == (OFFSET_INVALID, None)
        consumer.commit(messages[2], connection=connection)
        connection.commit()
    engine.dispose()
    assert committed(consumer) == (MARKER_OFFSET, 2)
    other = make_consumer(COMMIT_ORDER)
    other.assign([TopicPartition("t", 0)])
    assert texts(other.consume(4, PATIENCE_SECONDS)) == VALUES[3:]


def commit_with(producer, consumer):
    """Commit a transaction with what the consumer has read: it is refused at once, or at the end."""
    position = consumer.position(consumer.assignment())
    producer.send_offsets_to_transaction(position, consumer.consumer_group_metadata(), PATIENCE_SECONDS)
    producer.commit_transaction(PATIENCE_SECONDS)


@pytest.mark.slow_but_first
@pytest.mark.usefixtures("history")
@pytest.mark.parametrize("first", [COMMIT_ORDER, PLAIN], ids=["commit", "offset"])
def test_a_group_changes_its_order_only_by_a_reset_that_says_so(make_consumer, make_producer, url, first):
    """Who reads in the other order is told so, and does not move what is committed, in no way."""
    second, order = (PLAIN, "offset") if first is COMMIT_ORDER else (COMMIT_ORDER, "commit")
    consumer = make_consumer(first)
    consumer.assign([TopicPartition("t", 0)])
    consumer.consume(2, PATIENCE_SECONDS)
    consumer.commit(asynchronous=False)
    before = committed(consumer)
    other = make_consumer(second)
    other.assign([TopicPartition("t", 0)])
    message = other.poll(PATIENCE_SECONDS)
    assert error_code(message) == KafkaError.INVALID_REQUEST
    assert f"means nothing in {order} order" in message.error().str()
    assert "txnstore groups reset-offsets" in message.error().str()
    assert other.poll(0.3) is None
    other.seek(TopicPartition("t", 0, 0))
    assert other.poll(PATIENCE_SECONDS).error() is None
    with pytest.raises(KafkaException, match="reset-offsets"):
        other.commit(asynchronous=False)
    producer = make_producer({"transactional.id": "worker"})
    producer.init_transactions(PATIENCE_SECONDS)
    for number in range(2):
        producer.begin_transaction()
        if number:
            producer.produce("out", b"x")
            producer.flush(PATIENCE_SECONDS)
        with pytest.raises(KafkaException, match="reset-offsets") as raised:
            commit_with(producer, other)
        assert raised.value.args[0].txn_requires_abort()
        producer.abort_transaction(PATIENCE_SECONDS)
    assert committed(consumer) == before
    for client in (consumer, other):
        client.close()
    reset = ["groups", "reset-offsets", "readers", "--to-earliest", "--execute", "--json", "--url", url]
    program = program_with(NAMES)
    # Without an order it keeps the one that is there.
    ended = CliRunner().invoke(program, reset)
    assert ended.exit_code == 0, ended.output
    assert [row["order"] for row in json.loads(ended.stdout)] != [order]
    ended = CliRunner().invoke(program, [*reset, "--order", order])
    assert ended.exit_code == 0, ended.output
    assert [row["order"] for row in json.loads(ended.stdout)] == [order]
    again = make_consumer(second)
    again.assign([TopicPartition("t", 0)])
    assert len(again.consume(7, PATIENCE_SECONDS)) == 7


@pytest.mark.usefixtures("history")
def test_the_admin_client_lists_and_changes_positions_and_says_so(make_consumer, url):
    consumer = make_consumer(COMMIT_ORDER)
    consumer.assign([TopicPartition("t", 0)])
    consumer.consume(2, PATIENCE_SECONDS)
    consumer.commit(asynchronous=False)
    consumer.close()
    with AdminClient({"bootstrap.servers": url}) as admin:

        def listed():
            asked = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions("readers")])
            (partition,) = asked["readers"].result(PATIENCE_SECONDS).topic_partitions
            return partition

        def altered(partition):
            request = [ConsumerGroupTopicPartitions("readers", [partition])]
            return admin.alter_consumer_group_offsets(request)["readers"].result(PATIENCE_SECONDS)

        assert (listed().offset, listed().offset_in_transaction) == (MARKER_OFFSET, 1)
        with pytest.raises(KafkaException, match="in commit order"):
            altered(TopicPartition("t", 0, 1))
        assert (listed().offset, listed().offset_in_transaction) == (MARKER_OFFSET, 1)
        altered(TopicPartition("t", 0, MARKER_OFFSET, offset_in_transaction=5))
        assert "offset_in_transaction=5" in str(listed())
    other = make_consumer(COMMIT_ORDER)
    other.assign([TopicPartition("t", 0)])
    assert texts(other.consume(2, PATIENCE_SECONDS)) == VALUES[-2:]
    assert other.consume(1, 0.5) == []


@pytest.mark.usefixtures("history")
def test_groups_describe_counts_what_is_left_by_place(log, make_consumer, url):
    open_ = log.transaction()
    open_.write("t", 0, b"open", b"open")
    log.write("t", 0, b"last")

    def described():
        ended = CliRunner().invoke(program_with(NAMES), ["groups", "describe", "readers", "--json", "--url", url])
        (facts,) = json.loads(ended.stdout)
        (row,) = facts["offsets"]
        return row["committed_offset"], row["offset_in_transaction"], row["order"], row["lag"], row["open_records"]

    consumer = make_consumer(COMMIT_ORDER)
    consumer.assign([TopicPartition("t", 0)])
    messages = consumer.consume(8, PATIENCE_SECONDS)
    assert texts(messages) == [*VALUES, b"last"]
    left = []
    for message in messages:
        consumer.commit(message, asynchronous=False)
        left.append(described())
    behind = [(4, 0), *((MARKER_OFFSET, offset) for offset in (1, 2, 3, 5, 6, 7)), (11, 0)]
    assert left == [(*position, "commit", 7 - number, 2) for number, position in enumerate(behind)]
    ended = CliRunner().invoke(program_with(NAMES), ["groups", "describe", "readers", "--url", url])
    assert "IN TRANSACTION" in ended.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("history")
def test_what_is_left_of_a_transaction_in_part_deleted_is_counted_for_who_has_begun_it(log, make_consumer, url):
    partition_id = log.partition_id("t", 0)
    log.store.write(lambda connection: advance_log_start(connection, partition_id, 2))
    log.write("t", 0, b"last")
    lags, counts = {}, {}
    for place, within in ((3, 0), (MARKER_OFFSET, 0), (MARKER_OFFSET, 1), (MARKER_OFFSET, 2), (MARKER_OFFSET, 5)):
        consumer = make_consumer({**COMMIT_ORDER, "group.id": f"{place} {within}"})
        position = TopicPartition("t", 0, place, offset_in_transaction=within)
        consumer.commit(offsets=[position], asynchronous=False)
        consumer.assign([TopicPartition("t", 0)])
        messages = consumer.consume(1, PATIENCE_SECONDS)
        while texts(messages)[-1] != b"last":
            messages += consumer.consume(1, PATIENCE_SECONDS)
        counts[place, within] = len(messages)
        options = ["groups", "describe", f"{place} {within}", "--json", "--url", url]
        ended = CliRunner().invoke(program_with(NAMES), options)
        (facts,) = json.loads(ended.stdout)
        lags[place, within] = facts["offsets"][0]["lag"]
    assert list(counts.values()) == [2, 1, 5, 5, 3]
    assert lags == counts


@pytest.mark.usefixtures("history")
def test_the_asynchronous_consumer_reads_and_commits_in_commit_order(url):
    async def read(count):
        settings = {"bootstrap.servers": url, "group.id": "readers", "auto.offset.reset": "earliest", **COMMIT_ORDER}
        consumer = AIOConsumer(settings)
        try:
            await consumer.assign([TopicPartition("t", 0)])
            messages = await consumer.consume(count, PATIENCE_SECONDS)
            await consumer.commit(message=messages[-1], asynchronous=False)
            return texts(messages)
        finally:
            await consumer.close()

    assert asyncio.run(read(4)) == VALUES[:4]
    assert asyncio.run(read(3)) == VALUES[4:]
