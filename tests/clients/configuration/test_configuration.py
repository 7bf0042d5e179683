"""Configurations: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import pytest

from tests.clients.configuration.configured import TRANSACTIONAL, URL, consumer, producer, refusal_of
from txnstore.clients.configuration.configuration import (
    admin_configuration,
    consumer_configuration,
    producer_configuration,
)
from txnstore.clients.configuration.keys import KEYS, KEYS_BY_ALIAS, Boolean, Choice, Float, Integer
from txnstore.clients.model.errors import KafkaException


def test_a_dict_keywords_or_both_make_one_and_keywords_win():
    settings = {"bootstrap.servers": URL, "linger.ms": 1}
    assert producer_configuration((settings,), {})["linger.ms"] == 1
    assert producer_configuration((), settings)["linger.ms"] == 1
    assert producer_configuration((settings,), {"linger.ms": 2})["linger.ms"] == 2
    assert settings == {"bootstrap.servers": URL, "linger.ms": 1}


@pytest.mark.parametrize("argument", [None, 5, [], "linger.ms=5", [("linger.ms", 5)]], ids=ascii)
def test_one_argument_that_is_no_dict_is_refused(argument):
    for make in (producer_configuration, consumer_configuration, admin_configuration):
        with pytest.raises(TypeError, match=r"^expected configuration dict$"):
            make((argument,), {})


def test_two_arguments_are_refused():
    with pytest.raises(TypeError, match="single dict"):
        producer_configuration(({}, {}), {})


def test_a_configuration_is_frozen_and_is_no_longer_the_users_dict():
    settings = {"bootstrap.servers": URL, "linger.ms": 1}
    configuration = producer_configuration((settings,), {})
    settings["linger.ms"] = 9
    assert configuration["linger.ms"] == 1
    with pytest.raises(TypeError):
        configuration["linger.ms"] = 3  # type: ignore[index]
    with pytest.raises(KeyError):
        configuration["no.such.key"]


def test_default_topic_config_is_merged_under_the_rest():
    configuration = producer(**{"default.topic.config": {"acks": 1, "linger.ms": 7}, "linger.ms": 8})
    assert (configuration["acks"], configuration["linger.ms"]) == (1, 8)
    assert refusal_of(producer, {"default.topic.config": {"foo": 1}}) == 'No such configuration property: "foo"'
    assert producer(**{"default.topic.config": None})["acks"] == -1
    with pytest.raises(TypeError, match=r"default\.topic\.config takes a dict, not int"):
        producer(**{"default.topic.config": 5})


# --- values -----------------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_librdkafka_but_for_idempotence():
    values = producer()
    assert {
        name: values[name]
        for name in (
            "linger.ms", "batch.size", "batch.num.messages", "queue.buffering.max.messages",
            "queue.buffering.max.kbytes", "compression.type", "message.max.bytes", "message.timeout.ms",
            "request.timeout.ms", "socket.timeout.ms", "retries", "retry.backoff.ms", "retry.backoff.max.ms", "acks",
            "partitioner", "delivery.report.only.error", "allow.auto.create.topics", "transactional.id",
            "transaction.timeout.ms", "enable.idempotence", "max.in.flight", "client.id", "statistics.interval.ms",
            "txnstore.schema", "txnstore.clock", "txnstore.durability", "on_delivery", "error_cb", "logger",
        )
    } == {
        "linger.ms": 5.0, "batch.size": 1_000_000, "batch.num.messages": 10_000,
        "queue.buffering.max.messages": 100_000, "queue.buffering.max.kbytes": 1_048_576, "compression.type": "none",
        "message.max.bytes": 1_000_000, "message.timeout.ms": 300_000, "request.timeout.ms": 30_000,
        "socket.timeout.ms": 60_000, "retries": 2**31 - 1, "retry.backoff.ms": 100, "retry.backoff.max.ms": 1_000,
        "acks": -1, "partitioner": "consistent_random", "delivery.report.only.error": False,
        "allow.auto.create.topics": True, "transactional.id": None, "transaction.timeout.ms": 60_000,
        "enable.idempotence": True, "max.in.flight": 5, "client.id": "rdkafka", "statistics.interval.ms": 0,
        "txnstore.schema": "txnstore", "txnstore.clock": None, "txnstore.durability": "full",
        "on_delivery": None, "error_cb": None, "logger": None,
    }  # fmt: skip
    values = consumer()
    assert {
        name: values[name]
        for name in (
            "session.timeout.ms", "heartbeat.interval.ms", "max.poll.interval.ms", "enable.auto.commit",
            "auto.commit.interval.ms", "enable.auto.offset.store", "auto.offset.reset", "isolation.level",
            "enable.partition.eof", "fetch.min.bytes", "fetch.wait.max.ms", "fetch.max.bytes",
            "max.partition.fetch.bytes", "queued.min.messages", "queued.max.messages.kbytes", "group.protocol",
            "partition.assignment.strategy", "group.instance.id", "allow.auto.create.topics",
            "txnstore.commit.ownership", "txnstore.delivery.order", "txnstore.delivery.atomic", "check.crcs",
            "on_commit",
        )
    } == {
        "session.timeout.ms": 45_000, "heartbeat.interval.ms": 3_000, "max.poll.interval.ms": 300_000,
        "enable.auto.commit": True, "auto.commit.interval.ms": 5_000, "enable.auto.offset.store": True,
        "auto.offset.reset": "latest", "isolation.level": "read_committed", "enable.partition.eof": False,
        "fetch.min.bytes": 1, "fetch.wait.max.ms": 500, "fetch.max.bytes": 52_428_800,
        "max.partition.fetch.bytes": 1_048_576, "queued.min.messages": 100_000,
        "queued.max.messages.kbytes": 65_536, "group.protocol": "classic",
        "partition.assignment.strategy": ("range", "roundrobin"), "group.instance.id": None,
        "allow.auto.create.topics": False,
        "txnstore.commit.ownership": "owned", "txnstore.delivery.order": "offset",
        "txnstore.delivery.atomic": False, "check.crcs": False, "on_commit": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("batch.size", "5000", 5000),
        ("batch.size", 5000, 5000),
        ("batch.size", " 5000 ", 5000),
        ("batch.size", "+5000", 5000),
        ("batch.size", 5000.0, 5000),
        ("batch.size", "0x10", 16),
        ("batch.size", "007", 7),
        ("linger.ms", "5000", 5000.0),
        ("linger.ms", 0.5, 0.5),
        ("linger.ms", "1e3", 1000.0),
        ("linger.ms", "0x10", 16.0),
        ("enable.idempotence", "t", True),
        ("enable.idempotence", "FALSE", False),
        ("enable.idempotence", 0, False),
        ("enable.idempotence", True, True),
        ("acks", "all", -1),
        ("acks", "ALL", -1),
        ("acks", "-1", -1),
        ("acks", 0, 0),
        ("acks", 1, 1),
        ("acks", 2, 2),
        ("compression.type", "GZIP", "gzip"),
        ("partitioner", "murmur2_random", "murmur2_random"),
        ("debug", "eos, msg", ("eos", "msg")),
        ("debug", "", ()),
        ("client.id", 5, "5"),
        ("client.id", ["a", "b"], "['a', 'b']"),
        ("client.id", b"x", "b'x'"),
        ("client.id", "", "rdkafka"),
        ("client.id", None, "rdkafka"),
        ("transactional.id", None, None),
        ("transactional.id", "", None),
        ("isolation.level", "READ_COMMITTED", "read_committed"),
        ("auto.offset.reset", "smallest", "earliest"),
        ("auto.offset.reset", "Beginning", "earliest"),
        ("auto.offset.reset", "largest", "latest"),
        ("auto.offset.reset", "end", "latest"),
        ("auto.offset.reset", "error", "error"),
        ("partition.assignment.strategy", "roundrobin, range,range", ("roundrobin", "range")),
        ("partition.assignment.strategy", "cooperative-sticky", ("cooperative-sticky",)),
        ("partition.assignment.strategy", "", ("range", "roundrobin")),
    ],
    ids=ascii,
)
def test_a_value_is_read_by_its_text_whatever_its_type(name, given, value):
    make = consumer if KEYS[name].user.value == "C" else producer
    found = make(**{name: given})[name]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"foo": 1}, 'No such configuration property: "foo"'),
        ({"": 1}, 'No such configuration property: ""'),
        ({"linger.ms": "abc"}, 'Invalid value for configuration property "queue.buffering.max.ms"'),
        ({"linger.ms": True}, 'Invalid value for configuration property "queue.buffering.max.ms"'),
        ({"linger.ms": [5]}, 'Invalid value for configuration property "queue.buffering.max.ms"'),
        ({"linger.ms": b"5"}, 'Invalid value for configuration property "queue.buffering.max.ms"'),
        ({"linger.ms": "1_000"}, 'Invalid value for configuration property "queue.buffering.max.ms"'),
        ({"linger.ms": "5ms"}, 'Invalid value for configuration property "queue.buffering.max.ms"'),
        ({"linger.ms": float("nan")}, 'Invalid value for configuration property "queue.buffering.max.ms"'),
        ({"linger.ms": ""}, 'Float configuration property "queue.buffering.max.ms" cannot be set to empty value'),
        ({"linger.ms": None}, 'Float configuration property "queue.buffering.max.ms" cannot be set to empty value'),
        (
            {"linger.ms": -5},
            'Configuration property "queue.buffering.max.ms" value -5 is outside allowed range 0..900000',
        ),
        (
            {"linger.ms": float("inf")},
            'Configuration property "queue.buffering.max.ms" value inf is outside allowed range 0..900000',
        ),
        (
            {"linger.ms": 2**63},
            'Configuration property "queue.buffering.max.ms" value 9.22337e+18 is outside allowed range 0..900000',
        ),
        ({"batch.size": 0}, 'Configuration property "batch.size" value 0 is outside allowed range 1..2147483647'),
        (
            {"batch.size": 2**63},
            'Configuration property "batch.size" value 9223372036854775808 is outside allowed range 1..2147483647',
        ),
        ({"batch.size": 5.5}, 'Invalid value for configuration property "batch.size"'),
        ({"batch.size": True}, 'Invalid value for configuration property "batch.size"'),
        ({"batch.size": float("inf")}, 'Invalid value for configuration property "batch.size"'),
        ({"batch.size": "9" * 100}, 'Invalid value for configuration property "batch.size"'),
        ({"batch.size": "٣"}, 'Invalid value for configuration property "batch.size"'),
        ({"batch.size": None}, 'Integer configuration property "batch.size" cannot be set to empty value'),
        (
            {"delivery.timeout.ms": -1},
            'Configuration property "message.timeout.ms" value -1 is outside allowed range 0..2147483647',
        ),
        (
            TRANSACTIONAL | {"transaction.timeout.ms": 500},
            'Configuration property "transaction.timeout.ms" value 500 is outside allowed range 1000..2147483647',
        ),
        ({"acks": 1001}, 'Configuration property "request.required.acks" value 1001 is outside allowed range -1..1000'),
        ({"acks": "one"}, 'Invalid value for configuration property "request.required.acks"'),
        ({"enable.idempotence": "yes"}, 'Expected bool value for "enable.idempotence": true or false'),
        ({"enable.idempotence": 2}, 'Expected bool value for "enable.idempotence": true or false'),
        ({"enable.idempotence": " true"}, 'Expected bool value for "enable.idempotence": true or false'),
        (
            {"enable.idempotence": None},
            'Bool configuration property "enable.idempotence" cannot be set to empty value',
        ),
        ({"compression.type": "bad"}, 'Invalid value "bad" for configuration property "compression.codec"'),
        ({"compression.type": 1}, 'Invalid value "1" for configuration property "compression.codec"'),
        ({"compression.type": None}, 'Configuration property "compression.codec" cannot be set to empty value'),
        ({"partitioner": "bad"}, 'Invalid value for configuration property "partitioner": bad'),
        ({"partitioner": ""}, 'Invalid value for configuration property "partitioner": (null)'),
        ({"debug": "eos,nonsense"}, 'Invalid value "nonsense" for configuration property "debug"'),
        ({"security.protocol": "bad"}, 'Invalid value "bad" for configuration property "security.protocol"'),
        ({"log_level": 9}, 'Configuration property "log_level" value 9 is outside allowed range 0..7'),
        (
            TRANSACTIONAL | {"acks": 1},
            "Failed to create producer: `acks` must be set to `all` when `enable.idempotence` is true",
        ),
        (
            {"txnstore.transaction.group": "ledger"},
            "Failed to create producer: `txnstore.transaction.group` requires `transactional.id`",
        ),
        (
            {"transactional.id": "a", "txnstore.transaction.group": "x" * 901},
            'Invalid value for configuration property "txnstore.transaction.group": longer than 900 characters',
        ),
        (
            TRANSACTIONAL | {"enable.idempotence": False},
            "Failed to create producer: `transactional.id` requires `enable.idempotence=true`",
        ),
        (
            TRANSACTIONAL | {"max.in.flight": 6},
            "Failed to create producer: `max.in.flight` must be set <= 5 when `enable.idempotence` is true",
        ),
        (
            TRANSACTIONAL | {"retries": 0},
            "Failed to create producer: `retries` must be set >= 1 when `enable.idempotence` is true",
        ),
        (
            TRANSACTIONAL | {"queuing.strategy": "lifo"},
            "Failed to create producer: `queuing.strategy` must be set to `fifo` when `enable.idempotence` is true",
        ),
        (
            TRANSACTIONAL | {"message.timeout.ms": 70_000},
            "Failed to create producer: `message.timeout.ms` must be set <= `transaction.timeout.ms`",
        ),
        (
            {"enable.idempotence": True, "acks": 1},
            "Failed to create producer: `acks` must be set to `all` when `enable.idempotence` is true",
        ),
        (
            {"enable.idempotence": False, "enable.gapless.guarantee": True},
            "Failed to create producer: `enable.gapless.guarantee` requires `enable.idempotence` to be enabled",
        ),
        (
            {"message.timeout.ms": 5, "linger.ms": 5},
            "Failed to create producer: `message.timeout.ms` must be greater than `linger.ms`",
        ),
        ({"on_delivery": 5}, "on_delivery requires a callable object"),
        ({"on_delivery": None}, "on_delivery requires a callable object"),
        ({"on_commit": print}, 'No such configuration property: "on_commit"'),
        ({"client.id": "a\0b"}, 'Invalid value for configuration property "client.id": a NUL or half of a surrogate'),
        ({"transactional.id": "\ud800"}, 'Invalid value for configuration property "transactional.id": a NUL or half'),
        (
            {"transactional.id": "x" * 1001},
            'Invalid value for configuration property "transactional.id": longer than 1000 characters',
        ),
        (
            {"transactional.id": "\U0001f600" * 301},
            'Invalid value for configuration property "transactional.id": longer than 1200 bytes of UTF-8',
        ),
        (
            {"transactional.id": "a", "txnstore.transaction.group": "\U0001f600" * 276},
            'Invalid value for configuration property "txnstore.transaction.group": longer than 1100 bytes of UTF-8',
        ),
        ({"dr_cb": print}, 'Configuration property "dr_cb" cannot be set from Python; use "on_delivery"'),
        ({"test.mock.num.brokers": 1}, 'Configuration property "test.mock.num.brokers" cannot be set from Python; '),
    ],
    ids=ascii,
)
def test_a_producers_configuration_is_refused_in_librdkafkas_words(settings, text):
    assert refusal_of(producer, settings).startswith(text)


@pytest.mark.parametrize("name", ["queue.buffering.max.ms", "message.send.max.retries", "client.id", "debug"])
def test_a_number_of_which_python_makes_no_text_is_refused(name):
    assert refusal_of(producer, {name: 10**5000}) == f'Invalid value for configuration property "{name}"'


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"max.poll.interval.ms": 1000},
            "Failed to create consumer: `max.poll.interval.ms` must be >= `session.timeout.ms`",
        ),
        (
            {"fetch.max.bytes": 100},
            "Failed to create consumer: `fetch.max.bytes` must be >= `message.max.bytes`",
        ),
        (
            {"group.protocol": "consumer", "session.timeout.ms": 5000},
            "Failed to create consumer: `session.timeout.ms` is not supported for `group.protocol=consumer`",
        ),
        (
            {"group.protocol": "consumer", "heartbeat.interval.ms": 5},
            "Failed to create consumer: `heartbeat.interval.ms` is not supported for `group.protocol=consumer`",
        ),
        (
            {"group.protocol": "consumer", "partition.assignment.strategy": "range"},
            "Failed to create consumer: `partition.assignment.strategy` is not supported",
        ),
        (
            {"partition.assignment.strategy": "sticky"},
            "Failed to create consumer: Unsupported partition.assignment.strategy: sticky",
        ),
        (
            {"partition.assignment.strategy": "range,cooperative-sticky"},
            "Failed to create consumer: All partition.assignment.strategy (range,cooperative-sticky) assignors must",
        ),
        ({"isolation.level": "0"}, 'Invalid value "0" for configuration property "isolation.level"'),
        ({"auto.offset.reset": "none"}, 'Invalid value "none" for configuration property "auto.offset.reset"'),
        ({"session.timeout.ms": 0}, 'Configuration property "session.timeout.ms" value 0 is outside allowed range'),
        ({"linger.ms": "abc"}, 'Invalid value for configuration property "queue.buffering.max.ms"'),
        ({"on_commit": 5}, "on_commit requires a callable object"),
        ({"on_delivery": print}, 'No such configuration property: "on_delivery"'),
        (
            {"txnstore.delivery.atomic": "true"},
            "Failed to create consumer: `txnstore.delivery.atomic=true` requires `txnstore.delivery.order=commit`",
        ),
        ({"txnstore.delivery.order": "time"}, 'Invalid value "time" for configuration property'),
        (
            {"txnstore.delivery.order": "commit", "isolation.level": "read_uncommitted"},
            "Failed to create consumer: `txnstore.delivery.order=commit` requires `isolation.level=read_committed`",
        ),
        (
            {"fetch.max.wait.ms": 5},
            'No such configuration property: "fetch.max.wait.ms" (did you mean "fetch.wait.max.ms"?)',
        ),
    ],
    ids=ascii,
)
def test_a_consumers_configuration_is_refused_in_librdkafkas_words(settings, text):
    assert refusal_of(consumer, settings).startswith(text)


@pytest.mark.parametrize("settings", [{}, {"group.id": None}, {"group.id": ""}], ids=ascii)
def test_a_consumer_without_a_group_is_a_value_error(settings):
    with pytest.raises(ValueError, match=r"^Failed to create consumer: group\.id must be set$"):
        consumer_configuration(({"bootstrap.servers": URL},), settings)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("bootstrap_servers", "bootstrap.servers"),
        ("bootstrap.server", "bootstrap.servers"),
        ("Linger.ms", "linger.ms"),
        ("enable.idempotent", "enable.idempotence"),
        ("transactional_id", "transactional.id"),
        ("group_id", "group.id"),
        ("auto.offset.rest", "auto.offset.reset"),
    ],
    ids=ascii,
)
def test_an_unknown_key_is_told_the_nearest_one(name, near):
    assert refusal_of(producer, {name: 1}) == f'No such configuration property: "{name}" (did you mean "{near}"?)'


@pytest.mark.parametrize("name", [1, b"linger.ms", None, ("a", "b")], ids=ascii)
def test_a_key_that_is_no_text_is_unknown(name):
    with pytest.raises(KafkaException, match="No such configuration property"):
        producer_configuration(({"bootstrap.servers": URL, name: 1},), {})


def _out_of_range() -> list:
    return [
        (key.name, number)
        for key in KEYS.values()
        if isinstance(key.kind, Integer | Float)
        for number in (key.kind.low - 1, key.kind.high + 1)
    ]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("name", "number"), _out_of_range(), ids=ascii)
def test_every_number_is_kept_within_its_range(name, number):
    text = refusal_of(producer, {name: number})
    assert f'"{KEYS[name].error_name}"' in text
    assert "is outside allowed range" in text


@pytest.mark.parametrize(
    "name", [key.name for key in KEYS.values() if isinstance(key.kind, Choice | Boolean)], ids=ascii
)
def test_every_word_is_one_of_its_keys(name):
    assert f'"{KEYS[name].error_name}"' in refusal_of(producer, {name: "no-such-word"})


def test_every_other_name_of_a_key_means_the_same():
    values = {"acks": "1", "linger.ms": "7", "compression.type": "lz4", "retries": "3", "max.in.flight": "4",
              "message.timeout.ms": "777", "bootstrap.servers": "sqlite:///other.db"}  # fmt: skip
    several = {key.name for alias, key in KEYS_BY_ALIAS.items() if alias != key.name and not key.ignored}
    assert several == {*values, "max.partition.fetch.bytes", "enable.auto.commit"}
    for alias, key in KEYS_BY_ALIAS.items():
        if key.name in values:
            given = producer_configuration(({"bootstrap.servers": URL},), {alias: values[key.name]})
            assert given[key.name] == given[alias] == producer(**{key.name: values[key.name]})[key.name]
            assert given.was_given(key.name)
    assert consumer(**{"fetch.message.max.bytes": 9})["max.partition.fetch.bytes"] == 9
    assert consumer(**{"auto.commit.enable": "false"})["enable.auto.commit"] is False


# --- what follows -----------------------------------------------------------------------------------------------------
