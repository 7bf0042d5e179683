"""What the sink is told is checked before anything is written: options, columns and modes."""

from __future__ import annotations

import pickle

import pytest

from tests.spark.sink_schemas import schema_of
from txnstore.clients.model.errors import KafkaException
from txnstore.errors import InvalidConfiguration, TxnStoreError, UnsupportedCompression
from txnstore.log.columns import Codec
from txnstore.spark import sink_options as subject
from txnstore.spark.sink_options import SinkColumns, find_columns, sink_options
from txnstore.spark.sink_writer import batch_writer, stream_writer

URL = "postgresql://user:hunter2@localhost/db"


def options(is_stream=False, **given):
    names = {name.replace("__", "."): text for name, text in given.items()}
    return sink_options({"url": URL, **names}, is_stream=is_stream)


def test_without_options_it_is_a_producer_with_its_defaults_and_a_transaction_of_fifteen_minutes():
    found = options()
    assert found.partitioner == "consistent_random"
    assert found.codec is Codec.NONE
    assert found.batch_bytes_max == 1_000_000
    assert found.batch_records_max == 10_000
    assert found.sticky_seconds == 0.01
    assert (found.transaction_timeout_ms, found.delivery_timeout_ms) == (None, 300_000)
    assert found.allow_create is True
    assert (found.topic, found.transactional_id, found.app_id, found.version) == (None, None, None, None)


def test_options_may_have_the_prefix_that_sparks_kafka_sink_wants_and_any_case():
    found = sink_options(
        {
            "kafka.bootstrap.servers": URL,
            "kafka.compression.type": "gzip",
            "kafka.transactional.id": "refunds",
            "KAFKA.Transaction.Timeout.MS": "20000",
            "kafka.partitioner": "murmur2_random",
            "kafka.batch.size": "500",
            "kafka.partitioner.ignore.keys": "False",
            "kafka.compression.gzip.level": "9",
            "kafka.compression.lz4.level": "9",
            "kafka.compression.zstd.level": "3",
            "kafka.acks": "1",
            "kafka.linger.ms": "5",
            "checkpointlocation": "/somewhere",
            "queryname": "q",
            "includeheaders": "true",
        },
        is_stream=True,
    )
    assert found.codec is Codec.GZIP
    assert found.transactional_id == "refunds"
    assert found.transaction_timeout_ms == found.delivery_timeout_ms == 20_000
    assert found.partitioner == "murmur2_random"
    assert found.batch_bytes_max == 500


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"topicc": "t"}, "there is no option 'topicc'; did you mean 'topic'?"),
        ({"txnappid": "a", "txnverson": "1"}, "there is no option 'txnverson'; did you mean 'txnVersion'?"),
        ({"transactional__idd": "a"}, "did you mean 'transactional.id'?"),
        ({"subscribe": "t"}, "subscribe is an option of the source; the sink does not take it"),
        ({"kafka__group__id": "g"}, "group.id is an option of the source; the sink does not take it"),
        ({"topic": "a/b"}, "topic: a topic's name has only the characters"),
        ({"topic": ""}, "topic: a topic's name is not empty"),
        ({"partitioner": "hash"}, 'Invalid value for configuration property "partitioner": hash'),
        ({"compression__type": "bzip2"}, 'Invalid value "bzip2" for configuration property "compression.codec"'),
        ({"transaction__timeout__ms": "1"}, '"transaction.timeout.ms" value 1 is outside allowed range 1000'),
        ({"batch__size": "many"}, 'Invalid value for configuration property "batch.size"'),
        ({"allow__auto__create__topics": "maybe"}, 'Expected bool value for "allow.auto.create.topics"'),
        ({"txnAppId": "\u20ac" * 301, "txnVersion": "1"}, "txnAppId has at most 900 bytes of UTF-8, not 903"),
        ({"transactional__id": ""}, "transactional.id is empty"),
        ({"transactional__id": "x" * 1001}, "transactional.id: a transactional id has at most 1000 characters"),
        ({"txnappid": "a"}, "give both, or neither"),
        ({"txnversion": "1"}, "give both, or neither"),
        ({"txnappid": "", "txnversion": "1"}, "give both, or neither"),
        ({"txnappid": "a", "txnversion": "-1"}, "txnVersion must be a whole number of at least 0"),
        ({"txnappid": "a", "txnversion": "1.5"}, "txnVersion must be a whole number of at least 0"),
        ({"txnappid": "a", "txnversion": "9223372036854775808"}, "txnVersion must be a whole number of at least 0"),
        ({"txnappid": "a" * 701, "txnversion": "1"}, "txnAppId has at most 700 characters, not 701"),
        ({"txnappid": "a\0", "txnversion": "1"}, "txnAppId: a transactional id holds a NUL"),
        ({"txnappid": "a", "txnversion": "1", "transactional__id": "t"}, "give either it or transactional.id"),
        ({"kafka__partitioner__ignore__keys": "true"}, "cannot be given: partitioner=random does not look at keys"),
        ({"key__serializer": "x"}, "the option key.serializer cannot be given"),
    ],
)
def test_a_wrong_option_is_named_with_what_to_do(given, text):
    with pytest.raises(InvalidConfiguration) as caught:
        options(**given)
    assert text in str(caught.value)
    assert "hunter2" not in str(caught.value)
    # What led to it is not shown either.
    assert caught.value.__suppress_context__ or not isinstance(caught.value.__context__, KafkaException)


def test_a_streams_batches_have_numbers_of_their_own():
    with pytest.raises(InvalidConfiguration, match="txnAppId and txnVersion are for batch writes"):
        options(is_stream=True, txnappid="a", txnversion="1")


def test_a_codec_that_is_not_installed_is_said_while_the_query_is_planned(monkeypatch):
    def missing(codec):
        raise UnsupportedCompression("pip install")

    monkeypatch.setattr(subject, "require_codec", missing)
    with pytest.raises(UnsupportedCompression, match=r"compression\.type=zstd: pip install"):
        options(compression__type="zstd")


def test_no_text_shows_the_password_and_the_executors_get_it():
    given = sink_options({"url": "postgresql://user@localhost/db", "password": "hunter2", "topic": "t"}, is_stream=True)
    schema = schema_of("value string")
    for shown in (given, given.address, stream_writer({"url": URL, "topic": "t"}, schema, overwrite=False)):
        assert "hunter2" not in repr(shown)
        assert "hunter2" not in str(shown)
    copy = pickle.loads(pickle.dumps(given))
    assert copy == given
    assert "hunter2" in copy.address.url


@pytest.mark.parametrize(
    ("ddl", "expected"),
    [
        ("value string", SinkColumns(value=0)),
        ("VALUE binary, Key string", SinkColumns(value=0, key=1)),
        (
            (
                "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp,"
                " timestampType int, headers array<struct<key:string,value:binary>>"
            ),
            SinkColumns(key=0, value=1, topic=2, partition=3, timestamp=5, headers=7),
        ),
        ("value string, timestampType int, offset bigint", SinkColumns(value=0)),
        ("value string, partition bigint, name string", SinkColumns(value=0, partition=1)),
    ],
    ids=["value", "any-case", "of-the-source", "of-the-source-alone", "others"],
)
def test_columns_are_found_by_their_names(ddl, expected):
    assert find_columns(schema_of(ddl), topic="t") == expected


@pytest.mark.parametrize(
    ("ddl", "topic", "text"),
    [
        ("key string", "t", "has no column 'value'"),
        ("value string", None, "neither an option 'topic' nor a column 'topic'"),
        ("value int", "t", "the column 'value' is int, but the sink takes string or binary"),
        ("value string, key int", "t", "the column 'key' is int"),
        ("value string, topic binary", None, "the column 'topic' is binary, but the sink takes string"),
        ("value string, partition string", "t", "the column 'partition' is string, but the sink takes int"),
        ("value string, timestamp bigint", "t", "the column 'timestamp' is bigint, but the sink takes timestamp"),
        ("value string, timestamp timestamp_ntz", "t", "the column 'timestamp' is timestamp_ntz"),
        ("value string, headers map<string,binary>", "t", "the column 'headers' is map<string,binary>"),
        ("value string, headers array<struct<key:string,value:string>>", "t", "takes array<struct<key:string"),
        ("value string, headers array<struct<value:binary,key:string>>", "t", "takes array<struct<key:string"),
        ("value string, Value binary", "t", "two columns 'value'"),
        ("value string, header array<int>", "t", "no column 'header' (did you mean 'headers'?)"),
        ("value string, `time stamp` timestamp", "t", "no column 'time stamp' (did you mean 'timestamp'?)"),
        ("valeu string", "t", "no column 'valeu' (did you mean 'value'?)"),
    ],
)
def test_a_column_that_cannot_be_meant_is_refused(ddl, topic, text):
    with pytest.raises(InvalidConfiguration) as caught:
        find_columns(schema_of(ddl), topic=topic)
    assert text in str(caught.value)


def test_only_appending_is_right():
    schema = schema_of("value string")
    given = {"url": URL, "topic": "t"}
    with pytest.raises(TxnStoreError, match=r'outputMode\("append"\), not "complete"'):
        stream_writer(given, schema, overwrite=True)
    with pytest.raises(TxnStoreError, match=r'only ever appended to: write with .mode\("append"\)'):
        batch_writer(given, schema, overwrite=True)
