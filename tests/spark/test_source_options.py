"""Options of the source: what is taken, what each refusal says, and that no refusal shows a password."""

from __future__ import annotations

import logging
import pickle

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from txnstore.db.url import parse_url
from txnstore.errors import InvalidConfiguration
from txnstore.model import IsolationLevel, PartitionName
from txnstore.spark.options import Side, read_options
from txnstore.spark.source_options import AtOffsets, AtTime, AtTimes, Edge, read_source_options
from txnstore.spark.source_schema import COLUMNS, HEADERS, check_schema, source_schema
from txnstore.spark.stores import store_address

URL = "postgresql://reader:pa55word@db.example/shop"
T0, T1 = PartitionName("t", 0), PartitionName("t", 1)


def options(*, streaming=False, **given):
    """Read options as Spark hands them over; __ stands for a dot."""
    names = CaseInsensitiveDict({"url": URL, "subscribe": "t"})
    for name, value in given.items():
        names[name.replace("__", ".")] = value
    return read_source_options({name: value for name, value in names.items() if value is not None}, streaming=streaming)


def test_the_defaults_are_those_of_sparks_kafka_source_but_for_isolation():
    batch, stream = options(), options(streaming=True)
    assert (batch.start, batch.end, stream.start) == (Edge.EARLIEST, Edge.LATEST, Edge.LATEST)
    assert stream.isolation is stream.bounding_isolation is IsolationLevel.READ_COMMITTED
    assert not stream.in_commit_order
    assert stream.fail_on_data_loss
    assert not stream.include_headers
    assert stream.max_offsets_per_trigger is stream.min_partitions is stream.group_id is None
    assert stream.max_trigger_delay_ms == 15 * 60 * 1000


@pytest.mark.parametrize(
    "name", ["url", "kafka__bootstrap__servers", "bootstrap__servers", "path", "KAFKA__BOOTSTRAP__SERVERS"]
)
def test_the_database_comes_under_any_of_its_names(name):
    given = {"url": None, name: URL}
    assert options(**given).address == options().address


def test_kafka_keys_come_with_or_without_their_prefix():
    assert options(kafka__group__id="g").group_id == options(group__id="g").group_id == "g"
    read = options(kafka__isolation__level="read_uncommitted")
    assert read.isolation is IsolationLevel.READ_UNCOMMITTED


def test_the_order_comes_in_any_spelling_and_for_batches_and_streams():
    for name, order in (("txnstore__delivery__order", "commit"), ("KAFKA__TXNSTORE__DELIVERY__ORDER", " Commit ")):
        for streaming in (True, False):
            read = options(streaming=streaming, isolation__level="read_committed", **{name: order})
            assert read.in_commit_order
            # What is open holds it back in no partition.
            assert read.bounding_isolation is IsolationLevel.READ_UNCOMMITTED
    assert not options(txnstore__delivery__order="offset").in_commit_order


def test_the_password_may_come_by_itself_and_shows_nowhere():
    apart = options(url="postgresql://reader@db.example/shop", password="pa55word")
    assert apart.address == options().address
    for shown in (repr(apart), str(apart.address), str(apart)):
        assert "pa55word" not in shown
    assert pickle.loads(pickle.dumps(apart)) == apart


def test_a_relative_file_is_the_drivers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert options(url="sqlite:///log.db").address.url == f"sqlite:///{tmp_path}/log.db"


@pytest.mark.parametrize(
    ("given", "streaming", "start"),
    [
        ({"startingOffsets": "Earliest"}, True, Edge.EARLIEST),
        ({"startingOffsets": " latest "}, True, Edge.LATEST),
        ({"startingOffsets": "group", "group__id": "g"}, True, Edge.GROUP),
        ({"startingOffsets": '{"t": {"0": -2, "1": 7}}'}, False, AtOffsets("startingOffsets", {T0: -2, T1: 7})),
        ({"startingOffsets": '{"t": {"0": -1}}'}, True, AtOffsets("startingOffsets", {T0: -1})),
        ({"startingTimestamp": "5", "startingOffsetsByTimestamp": "no JSON"}, False, AtTime(5)),
        (
            {"startingOffsetsByTimestamp": '{"t": {"0": 5}}', "startingOffsets": "no JSON"},
            False,
            AtTimes("startingOffsetsByTimestamp", {T0: 5}),
        ),
    ],
    ids=["earliest", "latest", "group", "offsets", "minus_one", "time_wins", "times_win"],
)
def test_where_a_read_begins(given, streaming, start):
    assert options(streaming=streaming, **given).start == start


NO_PLACE = "order=commit requires isolation.level=read_committed: what is not committed has no place in that order"
REFUSED = [
    ({"subscribe": None}, False, "one of the options subscribe, subscribePattern, assign"),
    ({"assign": '{"t": [0]}'}, False, "subscribe and assign are given together"),
    ({"subscribe": " , "}, False, "subscribe does not name a topic"),
    ({"subscribe": "t, no/topic"}, False, "subscribe: a topic's name"),
    ({"subscribe": None, "subscribePattern": "["}, False, "subscribePattern is not a regular expression"),
    ({"subscribe": None, "assign": '{"t": 0}'}, False, "assign is JSON like"),
    ({"subscribe": None, "assign": '{"t": [-1]}'}, False, "assign is JSON like"),
    ({"startingOffsets": "latest"}, False, "startingOffsets=latest is for streams"),
    ({"startingOffsets": '{"t": {"0": -1}}'}, False, "startingOffsets: -1"),
    ({"startingOffsets": '{"t": {"0": -3}}'}, True, "startingOffsets is JSON like"),
    ({"startingOffsets": '{"t": {"0": true}}'}, True, "startingOffsets is JSON like"),
    ({"startingOffsets": '{"t": {"0": 1, "0": 2}}'}, True, "startingOffsets is JSON like"),
    ({"startingOffsets": '{"t": {"zero": 1}}'}, True, "startingOffsets is JSON like"),
    ({"startingOffsets": f'{{"t": {{"{"9" * 5000}": 1}}}}'}, True, "startingOffsets is JSON like"),
    ({"startingOffsets": f'{{"t": {{"0": {"9" * 5000}}}}}'}, True, "startingOffsets is JSON like"),
    ({"startingOffsets": "erliest"}, True, "startingOffsets is earliest, latest, group, or offsets as JSON, not 'erl"),
    ({"startingOffsets": "erliest"}, False, "startingOffsets is earliest, group, or offsets as JSON, not 'erliest'"),
    ({"startingOffsets": '["t"]'}, True, "startingOffsets is JSON like"),
    ({"endingOffsets": "lates"}, False, "endingOffsets is latest or offsets as JSON, not 'lates'"),
    ({"kafka__group__id": ""}, True, "group.id is empty"),
    ({"startingTimestamp": "1700000000"}, False, "if seconds are meant, write 1700000000000"),
    ({"endingTimestamp": "1700000000"}, False, "endingTimestamp is in milliseconds since 1970"),
    ({"startingOffsetsByTimestamp": '{"t": {"0": 1700000000}}'}, True, "if seconds are meant, write 1700000000000"),
    ({"startingOffsets": "group"}, True, "startingOffsets=group takes the group's name"),
    ({"endingOffsets": "earliest"}, False, "endingOffsets is latest or offsets as JSON"),
    ({"endingOffsets": '{"t": {"0": -2}}'}, False, "endingOffsets: -2"),
    ({"endingOffsets": "latest"}, True, "endingOffsets is for batch reads"),
    ({"endingTimestamp": "5"}, True, "endingTimestamp is for batch reads"),
    ({"startingTimestamp": "-5"}, False, "startingTimestamp must be a whole number of at least 0"),
    ({"startingTimestamp": "1_0"}, False, "startingTimestamp must be a whole number of at least 0"),
    ({"startingTimestamp": "9" * 5000}, False, "startingTimestamp must be a whole number of at least 0"),
    ({"minPartitions": "9" * 5000}, False, "minPartitions must be a whole number of at least 1"),
    (
        {"startingOffsetsByTimestampStrategy": "never"},
        False,
        "startingOffsetsByTimestampStrategy is error or latest",
    ),
    ({"maxOffsetsPerTrigger": "0"}, True, "maxOffsetsPerTrigger must be a whole number of at least 1"),
    ({"maxOffsetsPerTrigger": "5", "minOffsetsPerTrigger": "6"}, True, "minOffsetsPerTrigger is 6, above"),
    ({"maxTriggerDelay": "soon"}, True, "maxTriggerDelay is a time"),
    ({"minPartitions": "many"}, False, "minPartitions must be a whole number"),
    ({"failOnDataLoss": "yes"}, False, "failOnDataLoss is true or false"),
    ({"includeHeaders": "1"}, False, "includeHeaders is true or false"),
    ({"isolation__level": "serializable"}, False, "isolation.level is read_committed or read_uncommitted"),
    (
        {"maxOffsetPerTrigger": "5"},
        True,
        "there is no option 'maxoffsetpertrigger'; did you mean 'maxOffsetsPerTrigger'",
    ),
    ({"kafka__isolation_level": "x"}, True, "did you mean 'kafka.isolation.level'"),
    ({"kafka__includeHeaders": "true"}, True, "did you mean 'includeHeaders'"),
    ({"kafka__subscribe": "t"}, True, "there is no option 'kafka.subscribe'"),
    ({"maxOffsetsPerTrigger": str(2**63)}, True, "at most 9223372036854775807, not '9223372036854775808'"),
    ({"maxTriggerDelay": "15 minutes"}, True, "such as 500ms, 30s, 15m (or 15min), 2h or 1d"),
    ({"startingOffsets": '{"t": {"0": 5}, "$in_transaction": {"t": {"0": 1}}}'}, True, "begins within a transaction"),
    ({"kafka__partitioner__class": "x"}, True, "partitioner.class is an option of the sink"),
    ({"kafka__nonsense": "x"}, True, "there is no option 'kafka.nonsense'"),
    ({"topic": "t"}, False, "topic is an option of the sink"),
    ({"kafka__auto__offset__reset": "earliest"}, True, "kafka.auto.offset.reset cannot be given: say where"),
    (
        {"txnstore__delivery__atomic": "true"},
        True,
        "delivery.atomic cannot be given: it is for consumers; with",
    ),
    ({"txnstore__delivery__order": "time"}, True, "txnstore.delivery.order is offset or commit, not 'time'"),
    ({"txnstore__delivery_order": "commit"}, True, "did you mean 'txnstore.delivery.order'"),
    ({"txnstore__delivery__order": "commit", "isolation__level": "read_uncommitted"}, False, NO_PLACE),
    ({"txnstore__delivery__order": "commit", "maxRecordsPerPartition": "9"}, True, "; minPartitions splits between"),
    ({"kafka__group__id": "a", "group__id": "b"}, True, "group.id and kafka.group.id are names of the same option"),
]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("given", "streaming", "text"), REFUSED, ids=[f"{index}_{case[2]}" for index, case in enumerate(REFUSED)]
)
def test_what_is_refused_is_named(given, streaming, text):
    with pytest.raises(InvalidConfiguration) as caught:
        options(streaming=streaming, **given)
    assert text in str(caught.value)
    assert "pa55word" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        (None, "no database is named: the option url (or kafka.bootstrap.servers)"),
        ("broker:9092", "not the address of a Kafka broker"),
        ("mysql://u:pa55word@h/d", "no support for this kind of database"),
        ("postgresql://u:pa55@word@h/d", "several @"),
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
    ],
)
def test_a_url_that_cannot_be_used_is_not_repeated(url, text):
    with pytest.raises(InvalidConfiguration) as caught:
        store_address({} if url is None else {"url": url})
    assert text in str(caught.value)
    assert "pa55" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://db.example/shop",
        "postgresql:///shop?user=u&host=/tmp",
        "postgresql://u@db.example/shop?password=other",
        "postgresql://u:other@db.example/shop",
        "postgresql://u@[::1]/shop",
        "postgresql://u@one,two/shop",
        "postgresql://u@/shop?host=one:5432&host=two:5433",
    ],
)
def test_a_password_of_its_own_counts_whether_or_not_the_url_names_a_user(url):
    password = "p@ss/w&x +é%:?"
    address = store_address({"url": url, "password": password})
    found, without = parse_url(address.url), parse_url(url)
    assert found.url.password == password
    assert found.url._replace(password=None) == without.url._replace(password=None)
    assert "p@ss" not in f"{address}{address!r}"
    assert "other" not in address.url


def test_what_only_brokers_could_use_is_taken_and_logged_by_name(caplog):
    with caplog.at_level(logging.DEBUG, "txnstore"):
        found = read_options({"url": URL, "kafka.security.protocol": "SASL_SSL", "groupidprefix": "p"}, Side.SOURCE)
    assert found == {"url": URL}
    assert "groupidprefix, kafka.security.protocol" in caplog.text
    assert "SASL_SSL" not in caplog.text


def test_what_clients_in_java_are_given_is_taken():
    of_both = (
        "sasl.jaas.config sasl.client.callback.handler.class ssl.truststore.location ssl.truststore.password"
        " default.api.timeout.ms receive.buffer.bytes metadata.max.age.ms"
    )
    sides = {
        Side.SOURCE: f"{of_both} exclude.internal.topics fetch.max.wait.ms max.poll.records",
        Side.SINK: f"{of_both} max.request.size buffer.memory max.block.ms",
    }
    for side, names in sides.items():
        assert read_options({f"kafka.{name}": "x" for name in names.split()}, side) == {}
    assert read_options({"kafka.allow.auto.create.topics": "true"}, Side.SOURCE) is not None
    with pytest.raises(InvalidConfiguration, match=r"no option 'default\.api\.timeout\.ms'"):
        read_options({"default.api.timeout.ms": "1"}, Side.SOURCE)


def test_columns_are_those_of_sparks_kafka_source():
    assert source_schema(include_headers=True).simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,"
        "timestampType:int,headers:array<struct<key:string,value:binary>>>"
    )
    assert source_schema(include_headers=False) == COLUMNS


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ([StructField("value", StringType())], "the column value as string; it is binary"),
        ([StructField("valu", BinaryType())], "a column 'valu'"),
        ([StructField("offset", LongType(), nullable=False)], "not null; it is bigint"),
        ([HEADERS], "which needs includeHeaders=true"),
        ([COLUMNS["value"], COLUMNS["value"]], "twice"),
    ],
    ids=["type", "name", "not_null", "headers", "twice"],
)
def test_a_schema_of_other_columns_is_refused(fields, text):
    with pytest.raises(InvalidConfiguration, match=text):
        check_schema(StructType(fields), include_headers=False)


def test_a_schema_of_some_columns_is_taken():
    check_schema(StructType([COLUMNS["offset"], COLUMNS["value"]]), include_headers=False)
