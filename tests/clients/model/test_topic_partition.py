"""TopicPartition: what is compared, what can be set, and what its copies keep."""

from __future__ import annotations

import copy
import pickle

import pytest

from txnstore.clients.model.errors import KafkaError
from txnstore.clients.model.topic_partition import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    OFFSET_STORED,
    TopicPartition,
    with_committed,
)
from txnstore.model import OffsetAndMetadata


def everything(partition):
    return (
        partition.topic,
        partition.partition,
        partition.offset,
        partition.metadata,
        partition.leader_epoch,
        partition.error,
    )


def test_the_defaults_name_no_partition_and_no_offset():
    assert everything(TopicPartition("t")) == ("t", -1, OFFSET_INVALID, None, None, None)


def test_the_constants_have_librdkafkas_numbers():
    assert (OFFSET_BEGINNING, OFFSET_END, OFFSET_STORED, OFFSET_INVALID) == (-2, -1, -1000, -1001)


def test_the_arguments_come_back():
    assert everything(TopicPartition("t", 1, 2, "m", 3)) == ("t", 1, 2, "m", 3, None)


@pytest.mark.parametrize(("given", "told"), [(None, None), (-1, None), (0, 0), (5, 5)])
def test_a_leader_epoch_below_zero_is_none(given, told):
    assert TopicPartition("t", leader_epoch=given).leader_epoch == told


def test_the_text_is_confluents():
    assert (
        repr(TopicPartition("t", 0)) == "TopicPartition{topic=t,partition=0,offset=-1001,leader_epoch=None,error=None}"
    )
    failed = TopicPartition("t", 1, 2, "m", 3).with_error(KafkaError(3))
    assert str(failed) == (
        "TopicPartition{topic=t,partition=1,offset=2,leader_epoch=3,"
        'error=KafkaError{code=UNKNOWN_TOPIC_OR_PART,val=3,str="Broker: Unknown topic or partition"}}'
    )


def test_topic_and_partition_alone_make_partitions_equal():
    one, same = TopicPartition("t", 1, 5), TopicPartition("t", 1, 6, "m", 7)
    assert one == same
    assert hash(one) == hash(same)
    assert {one: "found"}[same] == "found"
    assert one != TopicPartition("t", 2, 5)
    assert one != TopicPartition("u", 1, 5)


def test_partitions_are_ordered_by_topic_and_then_by_number():
    partitions = [TopicPartition("b", 0), TopicPartition("a", 10), TopicPartition("a", 2)]
    assert [(item.topic, item.partition) for item in sorted(partitions)] == [("a", 2), ("a", 10), ("b", 0)]
    assert TopicPartition("a", 1) <= TopicPartition("a", 1, 5) >= TopicPartition("a", 1)
    assert TopicPartition("b", 1) > TopicPartition("a", 2)


def test_a_partition_equals_nothing_else():
    assert TopicPartition("t", 1) != ("t", 1)
    with pytest.raises(TypeError):
        TopicPartition("t", 1) < 5  # type: ignore[operator]  # noqa: B015 - comparing is the test


def test_partition_and_offset_can_be_set():
    partition = TopicPartition("t", 1)
    partition.offset = 5
    partition.partition = 2
    assert (partition.partition, partition.offset) == (2, 5)
    with pytest.raises(TypeError):
        partition.offset = "x"  # type: ignore[assignment]
    assert partition.offset == 5


def test_what_is_committed_for_a_partition_comes_whole():
    found = with_committed(TopicPartition("t", 1), OffsetAndMetadata(7, 3, "note", 2))
    assert (found.topic, found.partition, found.offset) == ("t", 1, 7)
    assert (found.leader_epoch, found.metadata, found.offset_in_transaction) == (3, "note", 2)
    assert with_committed(TopicPartition("t", 1, 9), None).offset == OFFSET_INVALID


@pytest.mark.parametrize("name", ["topic", "metadata", "leader_epoch", "error", "nonsense"])
def test_nothing_else_can_be_set(name):
    with pytest.raises(AttributeError):
        setattr(TopicPartition("t"), name, None)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((5,), TypeError, "argument 1 must be str, not int"),
        ((None,), TypeError, "argument 1 must be str, not None"),
        ((b"t",), TypeError, "argument 1 must be str, not bytes"),
        (("t", "a"), TypeError, "integer"),
        (("t", None), TypeError, "integer"),
        (("t", 1, None), TypeError, "integer"),
        (("t", 1, 2.0), TypeError, "integer"),
        (("t", 1, 2, 5), TypeError, "argument 4 must be str, not int"),
        (("t", 1, 2, "m", "x"), TypeError, "integer"),
        (("a\0b",), ValueError, "null character"),
        (("t", 2**31), OverflowError, "32 bits"),
        (("t", 1, 2**63), OverflowError, "64 bits"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        TopicPartition(*arguments)


def test_the_error_is_that_of_the_copy_alone():
    partition = TopicPartition("t", 1, 2, "m", 3)
    failed = partition.with_error(KafkaError(3))
    assert everything(failed) == ("t", 1, 2, "m", 3, KafkaError(3))
    assert partition.error is None


@pytest.mark.parametrize("copied", [lambda item: pickle.loads(pickle.dumps(item)), copy.copy, copy.deepcopy])
def test_a_copy_has_everything(copied):
    partition = TopicPartition("t", 1, 2, "m", 3).with_error(KafkaError(3))
    assert everything(copied(partition)) == everything(partition)
