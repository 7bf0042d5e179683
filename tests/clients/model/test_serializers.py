"""Serializers: the bytes are Kafka's, what does not fit is refused, and no payload gets into an error."""

from __future__ import annotations

import pickle

import pytest

from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.model.message import Message
from txnstore.error import (
    ConsumeError,
    KeyDeserializationError,
    KeySerializationError,
    ProduceError,
    ValueDeserializationError,
    ValueSerializationError,
)
from txnstore.serialization import (
    Deserializer,
    DoubleDeserializer,
    DoubleSerializer,
    IntegerDeserializer,
    IntegerSerializer,
    MessageField,
    SerializationContext,
    SerializationError,
    Serializer,
    StringDeserializer,
    StringSerializer,
)

CONTEXT = SerializationContext("t", MessageField.KEY)


@pytest.mark.parametrize(
    ("serializer", "deserializer", "value", "data"),
    [
        (StringSerializer(), StringDeserializer(), "é", b"\xc3\xa9"),
        (StringSerializer(), StringDeserializer(), "", b""),
        (StringSerializer("utf_16_le"), StringDeserializer("utf_16_le"), "é", b"\xe9\x00"),
        (IntegerSerializer(), IntegerDeserializer(), 5, b"\x00\x00\x00\x05"),
        (IntegerSerializer(), IntegerDeserializer(), -(2**31), b"\x80\x00\x00\x00"),
        (IntegerSerializer(), IntegerDeserializer(), 2**31 - 1, b"\x7f\xff\xff\xff"),
        (DoubleSerializer(), DoubleDeserializer(), 1.5, b"\x3f\xf8" + bytes(6)),
        (DoubleSerializer(), DoubleDeserializer(), -0.0, b"\x80" + bytes(7)),
        (StringSerializer(), StringDeserializer(), None, None),
        (IntegerSerializer(), IntegerDeserializer(), None, None),
        (DoubleSerializer(), DoubleDeserializer(), None, None),
    ],
)
def test_values_become_bytes_and_come_back(serializer, deserializer, value, data):
    assert serializer(value, CONTEXT) == serializer(value) == data
    assert deserializer(data, CONTEXT) == deserializer(data) == value


@pytest.mark.parametrize(
    ("convert", "value"),
    [
        (StringSerializer(), 5),
        (StringSerializer(), b"bytes"),
        (StringSerializer("ascii"), "é"),
        (StringSerializer(), "\ud800"),
        (StringSerializer("nonsense"), "x"),
        (StringDeserializer(), b"\xff"),
        (StringDeserializer(), "text"),
        (StringDeserializer(), 5),
        (StringDeserializer("nonsense"), b"x"),
        (IntegerSerializer(), "5"),
        (IntegerSerializer(), 1.0),
        (IntegerSerializer(), 2**31),
        (IntegerSerializer(), -(2**31) - 1),
        (IntegerDeserializer(), b""),
        (IntegerDeserializer(), b"\x00" * 5),
        (IntegerDeserializer(), "text"),
        (DoubleSerializer(), "1.5"),
        (DoubleSerializer(), 10**400),
        (DoubleDeserializer(), b"\x00" * 7),
        (DoubleDeserializer(), 5),
    ],
)
def test_what_does_not_fit_is_refused(convert, value):
    with pytest.raises(SerializationError) as caught:
        convert(value)
    assert isinstance(caught.value, KafkaException)


@pytest.mark.parametrize(
    ("convert", "value"),
    [(StringDeserializer(), b"secret\xff"), (StringSerializer("ascii"), "secreté"), (IntegerDeserializer(), b"secret")],
)
def test_no_payload_gets_into_an_error(convert, value):
    with pytest.raises(SerializationError) as caught:
        convert(value)
    assert "secret" not in str(caught.value)


def test_the_bases_are_to_be_overridden():
    with pytest.raises(NotImplementedError):
        Serializer()("x", CONTEXT)
    with pytest.raises(NotImplementedError):
        Deserializer()(b"x", CONTEXT)


def test_a_context_has_topic_field_and_headers():
    headers = [("h", b"1")]
    context = SerializationContext("t", MessageField.VALUE, headers)
    assert (context.topic, context.field, context.headers) == ("t", "value", headers)
    assert CONTEXT.headers is None


def test_the_fields_equal_their_texts():
    assert [str(field) for field in MessageField] == ["none", "key", "value"]
    assert MessageField("key") is MessageField.KEY


ERRORS = [
    (KeySerializationError, ProduceError, KafkaError._KEY_SERIALIZATION, "_KEY_SERIALIZATION"),
    (ValueSerializationError, ProduceError, KafkaError._VALUE_SERIALIZATION, "_VALUE_SERIALIZATION"),
    (KeyDeserializationError, ConsumeError, KafkaError._KEY_DESERIALIZATION, "_KEY_DESERIALIZATION"),
    (ValueDeserializationError, ConsumeError, KafkaError._VALUE_DESERIALIZATION, "_VALUE_DESERIALIZATION"),
]


@pytest.mark.parametrize(("error", "base", "code", "name"), ERRORS)
def test_an_error_tells_which_side_failed_and_why(error, base, code, name):
    cause = ValueError("why")
    raised = error(cause)
    assert issubclass(error, base)
    assert issubclass(error, SerializationError)
    assert (raised.code, raised.name, raised.exception) == (code, name, cause)
    assert raised.args == (code,)
    assert raised.args[0].str() == "why"


def test_the_errors_of_consuming_keep_their_message():
    message = Message("t", 1, 2)
    for error in (
        KeyDeserializationError(ValueError("why"), message),
        ValueDeserializationError(ValueError("why"), message),
        ConsumeError(KafkaError(3), kafka_message=message),
    ):
        assert error.kafka_message is message


def test_an_error_of_producing_has_no_message():
    error = ProduceError(KafkaError(10), ValueError("why"))
    assert (error.code, str(error.exception), error.kafka_message) == (10, "why", None)


@pytest.mark.parametrize(
    "error",
    [
        ConsumeError(KafkaError(3, "why", retriable=True), ValueError("x"), Message("t", 1, 2)),
        ProduceError(KafkaError(10), ValueError("x")),
        KeySerializationError(ValueError("x")),
        ValueDeserializationError(ValueError("x"), Message("t", 1, 2)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_pickling(error):
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is type(error)
    assert str(copied) == str(error)
    assert repr(copied.exception) == repr(error.exception)
    assert copied.kafka_message == error.kafka_message
    assert copied.args[0].retriable() == error.args[0].retriable()
