"""Deleting records with the admin client."""

from __future__ import annotations

import pytest

from tests.clients.admin.help import error_of, result
from txnstore import OFFSET_END, KafkaError, TopicPartition
from txnstore.admin import AdminClient, NewTopic, OffsetSpec


@pytest.fixture
def admin(url):
    with AdminClient({"bootstrap.servers": url}) as admin:
        yield admin


def test_records_are_deleted_and_the_low_watermark_is_told(admin, log, make_consumer):
    log.topic("t", 2)
    log.write("t", 0, b"a", b"b", b"c")
    log.write("t", 1, b"d")
    some, all_ = TopicPartition("t", 0, 2), TopicPartition("t", 1, OFFSET_END)
    futures = admin.delete_records([some, all_], operation_timeout=5, request_timeout=30)
    assert (result(futures[some]).low_watermark, result(futures[all_]).low_watermark) == (2, 1)
    earliest = admin.list_offsets({some: OffsetSpec.earliest()})[some]
    assert result(earliest).offset == 2
    consumer = make_consumer()
    # An offset that is gone: the consumer begins where auto.offset.reset says.
    consumer.assign([TopicPartition("t", 0, 1)])
    assert consumer.poll(60).value() == b"c"
    assert consumer.get_watermark_offsets(TopicPartition("t", 0)) == (2, 3)


def test_each_partition_fails_by_itself(admin, log):
    log.topic("t")
    log.write("t", 0, b"a")
    good = TopicPartition("t", 0, 1)
    wrong = [TopicPartition("t", 1, 0), TopicPartition("nobody", 0, 0), TopicPartition("", 0, 0)]
    futures = admin.delete_records([good, *wrong])
    assert result(futures[good]).low_watermark == 1
    for partition in wrong:
        assert error_of(futures[partition]) == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert admin.delete_records([]) == {}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("offset", [2, -2, -1001, 2**63 - 1])
def test_an_offset_outside_the_log_is_refused(admin, log, offset):
    log.topic("t")
    log.write("t", 0, b"a")
    partition = TopicPartition("t", 0, offset)
    error = error_of(admin.delete_records([partition])[partition])
    assert error == KafkaError.OFFSET_OUT_OF_RANGE
    assert result(admin.list_offsets({partition: OffsetSpec.earliest()})[partition]).offset == 0


def test_a_partition_given_twice_is_refused_with_all_others(admin, log):
    log.topic("t", 2)
    log.write("t", 1, b"a")
    partitions = [TopicPartition("t", 0, 0), TopicPartition("t", 0, -1), TopicPartition("t", 1, -1)]
    futures = admin.delete_records(partitions)
    assert [error_of(future).code() for future in futures.values()] == [KafkaError._INVALID_ARG] * 2
    assert result(admin.list_offsets({partitions[2]: OffsetSpec.earliest()})[partitions[2]]).offset == 0


@pytest.mark.parametrize(("policy", "is_refused"), [("compact", True), ("compact,delete", False), ("delete", False)])
def test_a_topic_that_is_compacted_only_keeps_its_records(admin, policy, is_refused):
    result(admin.create_topics([NewTopic("t", config={"cleanup.policy": policy})])["t"])
    future = admin.delete_records([TopicPartition("t", 0, -1)])[TopicPartition("t", 0)]
    if is_refused:
        assert error_of(future) == KafkaError.POLICY_VIOLATION
    else:
        assert result(future).low_watermark == 0


@pytest.mark.parametrize(
    ("partitions", "error", "text"),
    [
        (None, TypeError, r"^Expected Request to be a list, got 'NoneType'$"),
        ({TopicPartition("t", 0, 1): 1}, TypeError, r"^Expected Request to be a list, got 'dict'$"),
        (["t"], TypeError, r"^Element of the request list must be of type 'TopicPartition' got 'str'$"),
        ([TopicPartition("t", -1, 1)], ValueError, r"^'partition' cannot be negative$"),
    ],
    ids=str,
)
def test_what_is_no_list_of_partitions_is_refused(tmp_path, partitions, error, text):
    with AdminClient({"bootstrap.servers": f"sqlite:///{tmp_path}/log.db"}) as admin:
        with pytest.raises(error, match=text):
            admin.delete_records(partitions)
        assert admin._connection.opened is None
