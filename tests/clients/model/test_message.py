"""A message tells what it was made from, whichever of the three ways it was made."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from tests.clients.bulk_paths import made_of
from txnstore.clients.model.errors import KafkaError
from txnstore.clients.model.message import (
    TIMESTAMP_CREATE_TIME,
    TIMESTAMP_LOG_APPEND_TIME,
    Message,
    RecordSource,
    message_of,
    messages_in_python,
)
from txnstore.model import StoredRecord

SOURCE = RecordSource("orders", 3, TIMESTAMP_LOG_APPEND_TIME)
RECORD = StoredRecord(offset=7, timestamp_ms=1234, key=b"k", value=b"value", headers=(("h", b"1"), ("h", None)))


def everything(message):
    return (
        message.topic(),
        message.partition(),
        message.offset(),
        message.key(),
        message.value(),
        message.headers(),
        message.error(),
        message.timestamp(),
        message.latency(),
        message.leader_epoch(),
        message.delivery_count(),
    )


def test_an_empty_message_knows_nothing():
    assert everything(Message()) == (None, None, None, None, None, None, None, (0, 0), None, None, None)
    assert len(Message()) == 0


def test_the_constructor_takes_everything_by_position():
    error = KafkaError(3)
    given = ("t", 1, 2, b"k", b"v", [("h", b"1")], error, (1, 5), 0.5, 3, 4)
    assert everything(Message(*given)) == given


def test_a_record_becomes_a_message():
    message = message_of(SOURCE, RECORD)
    assert everything(message) == (
        *("orders", 3, 7, b"k", b"value"),
        [("h", b"1"), ("h", None)],
        None,
        (TIMESTAMP_LOG_APPEND_TIME, 1234),
        *(None, None, None),
    )
    assert len(message) == 5


def test_a_plain_tuple_of_the_log_becomes_a_message_as_well():
    row = (RECORD.offset, RECORD.timestamp_ms, RECORD.key, RECORD.value, RECORD.headers)
    assert message_of(SOURCE, row) == message_of(SOURCE, RECORD)


def test_a_record_without_headers_has_none():
    assert message_of(SOURCE, RECORD._replace(headers=())).headers() is None


def test_offset_partition_and_timestamp_zero_are_told():
    message = message_of(RecordSource("t", 0, 1), StoredRecord(0, 0, None, None))
    assert (message.partition(), message.offset(), message.timestamp()) == (0, 0, (1, 0))


def test_null_and_empty_are_not_the_same():
    message = message_of(SOURCE, StoredRecord(0, 0, b"", b""))
    assert (message.key(), message.value(), len(message)) == (b"", b"", 0)
    assert message != message_of(SOURCE, StoredRecord(0, 0, None, None))


def test_a_delivery_report_has_latency_and_no_headers():
    message = made_of(Message, SOURCE, (7, 1234, b"k", b"v", None), (None, 0.25, -1, -1))
    assert everything(message) == (
        *("orders", 3, 7, b"k", b"v", None, None),
        (TIMESTAMP_LOG_APPEND_TIME, 1234),
        *(0.25, None, None),
    )


def test_messages_of_reports_are_made_as_they_are_asked_for():
    """Nobody asks for those of records without a callback."""
    made: list[type] = []

    class Noted(Message):
        def __new__(cls):
            made.append(cls)
            return super().__new__(cls)

    pairs = messages_in_python(
        message_type=Noted,
        callbacks=iter([None, None]),
        sources=SOURCE,
        offset=7,
        timestamps_ms=1234,
        keys=[b"j", b"k"],
        values=[b"u", b"v"],
        queued_seconds=[1.0, 2.0],
        error=None,
        done_seconds=4.0,
    )
    assert not made
    for place, found in enumerate([(7, b"j", b"u", 3.0), (8, b"k", b"v", 2.0)], start=1):
        _, message = next(pairs)
        assert (message.offset(), message.key(), message.value(), message.latency()) == found
        assert len(made) == place


def test_a_report_of_a_failure_has_an_error_and_no_offset():
    error = KafkaError(KafkaError._MSG_TIMED_OUT)
    source = RecordSource("orders", -1, TIMESTAMP_CREATE_TIME)
    message = made_of(Message, source, (-1001, 1234, b"k", b"v", None), (error, 0.25, -1, -1))
    assert (message.offset(), message.partition()) == (None, None)
    assert message.error() is error


@pytest.mark.parametrize(
    ("arguments", "method", "expected"),
    [
        ({"partition": -1}, "partition", None),
        ({"offset": -1001}, "offset", None),
        ({"offset": -1}, "offset", None),
        ({"leader_epoch": -1}, "leader_epoch", None),
        ({"leader_epoch": 0}, "leader_epoch", 0),
        ({"latency": 0}, "latency", 0.0),
        ({"latency": -1}, "latency", None),
        ({"delivery_count": 0}, "delivery_count", None),
        ({"timestamp": None}, "timestamp", (0, 0)),
        ({"timestamp": (0, 5)}, "timestamp", (0, 5)),
        ({"headers": []}, "headers", []),
        ({"headers": {"h": b"1"}}, "headers", {"h": b"1"}),
        ({"key": 5}, "deserialized_key", 5),
        ({"value": [1, 2]}, "deserialized_value", [1, 2]),
    ],
)
def test_the_constructors_arguments_come_back(arguments, method, expected):
    assert getattr(Message(**arguments), method)() == expected


@pytest.mark.parametrize(
    "arguments",
    [
        {"partition": "a"},
        {"partition": None},
        {"offset": None},
        {"timestamp": 5},
        {"timestamp": (1,)},
        {"timestamp": [1, 2]},
        {"timestamp": ("a", 1)},
        {"latency": None},
        {"leader_epoch": None},
        {"delivery_count": "x"},
        {"nonsense": 1},
    ],
)
def test_arguments_of_a_wrong_type_are_refused(arguments):
    with pytest.raises(TypeError):
        Message(**arguments)


def test_each_part_can_be_set_and_leaves_the_others():
    message = message_of(SOURCE, RECORD)
    message.set_topic("other")
    message.set_key("key")
    message.set_value({"deserialized": True})
    message.set_headers([("x", b"y")])
    message.set_error(KafkaError(3))
    assert everything(message) == (
        *("other", 3, 7, "key", {"deserialized": True}, [("x", b"y")], 3),
        (TIMESTAMP_LOG_APPEND_TIME, 1234),
        *(None, None, None),
    )
    assert (message.deserialized_key(), message.deserialized_value()) == ("key", {"deserialized": True})


def test_setting_a_part_of_one_message_leaves_its_neighbour_alone():
    one, other = message_of(SOURCE, RECORD), message_of(SOURCE, RECORD)
    one.set_topic("other")
    one.set_value(b"changed")
    headers = one.headers()
    assert headers is not None
    headers.append(("mine", None))
    assert (other.topic(), other.value(), other.headers()) == ("orders", b"value", [("h", b"1"), ("h", None)])


def test_the_length_is_the_values():
    assert len(Message(value=b"abc", key=b"kk")) == 3
    assert len(Message(value="abé")) == 3
    with pytest.raises(TypeError):
        len(Message(value=5))


def test_a_tombstone_is_false_and_not_none():
    tombstone = message_of(SOURCE, StoredRecord(0, 0, b"k", None))
    assert not tombstone
    assert tombstone is not None


FULL: dict[str, Any] = {
    "topic": "t",
    "partition": 1,
    "offset": 2,
    "key": b"k",
    "value": b"v",
    "headers": [("h", b"1")],
    "error": KafkaError(3),
    "timestamp": (1, 5),
    "leader_epoch": 3,
}


def test_equal_messages_are_equal():
    assert Message(**FULL) == Message(**FULL)
    assert not Message(**FULL) != Message(**FULL)  # noqa: SIM202 - the other operator


@pytest.mark.parametrize(
    "difference",
    [
        {"topic": "u"},
        {"partition": 2},
        {"offset": 3},
        {"key": b"l"},
        {"value": b"w"},
        {"value": None},
        {"headers": None},
        {"error": None},
        {"error": KafkaError(4)},
        {"timestamp": (2, 5)},
        {"timestamp": (1, 6)},
        {"leader_epoch": 4},
    ],
)
def test_messages_that_differ_are_not_equal(difference):
    assert Message(**FULL) != Message(**{**FULL, **difference})


def test_latency_and_delivery_count_make_no_difference():
    assert Message(**FULL, latency=1, delivery_count=1) == Message(**FULL, latency=2, delivery_count=2)


def test_a_message_equals_nothing_else_and_is_not_ordered():
    assert Message() != 5
    with pytest.raises(TypeError):
        Message() < Message()  # type: ignore[operator]  # noqa: B015 - comparing is the test


def test_a_message_has_no_hash():
    with pytest.raises(TypeError, match="unhashable"):
        hash(Message())


@pytest.mark.parametrize("copied", [lambda message: pickle.loads(pickle.dumps(message)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize(
    "message",
    [
        Message(),
        Message(**FULL, latency=0.5, delivery_count=4),
        message_of(SOURCE, RECORD),
        message_of(SOURCE, RECORD._replace(headers=())),
        made_of(Message, SOURCE, (7, 1234, b"k", b"v", None), (None, 0.25, -1, -1)),
    ],
    ids=["empty", "full", "record", "without headers", "report"],
)
def test_a_copy_has_everything(copied, message):
    assert everything(copied(message)) == everything(message)


def test_the_text_of_a_message_shows_where_it_is_and_no_payload():
    text = repr(message_of(SOURCE, StoredRecord(7, 0, b"secret-key", b"secret-value", (("h", b"secret"),))))
    assert "orders[3]@7" in text
    assert "secret" not in text
