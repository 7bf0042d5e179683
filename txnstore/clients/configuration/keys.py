"""This file is the configuration keys that mean something here: their defaults, types, ranges and other names.

Those that librdkafka knows and that mean nothing without brokers are in `ignored_configuration_keys`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from txnstore.clients.configuration.ignored_keys import IGNORED
from txnstore.clients.configuration.values import (
    Boolean,
    Callback,
    Choice,
    ConfigurationError,
    Flags,
    Float,
    Instance,
    Integer,
    Kind,
    Name,
    Names,
    Refused,
    Text,
    Token,
)
from txnstore.log.partitioners import PARTITIONERS

_INT32_MAX: Final = 2**31 - 1
_FETCH_BYTES_MAX: Final = _INT32_MAX - 512
#: As in txnstore.groups and txnstore.transactions: what fits the index of every database.
_ID_LENGTH_MAX: Final = 1000


class User(enum.Enum):
    """Which clients a key is for."""

    PRODUCER = "P"
    CONSUMER = "C"
    BOTH = "*"


@dataclass(frozen=True, slots=True)
class Key:
    """One configuration key."""

    name: str
    """The name by which it is looked up."""

    kind: Kind
    default: Any
    user: User = User.BOTH
    native_name: str = ""
    """The name that librdkafka's errors give it; default: the same."""

    aliases: tuple[str, ...] = ()
    ignored: bool = False
    """Whether it is accepted for the sake of copied configurations, and means nothing here."""

    secret: bool = False
    only_user: bool = False
    """Whether other clients do not even know the name."""

    @property
    def error_name(self) -> str:
        """The name in error texts."""
        return self.native_name or self.name


def _words(*names: str, **others: str) -> Mapping[str, str]:
    return MappingProxyType({name: name for name in names} | others)


_C: Final = User.CONSUMER
_P: Final = User.PRODUCER
_FUNCTION: Final = "expected {key} property as a callable function"
_CALLABLE: Final = "{key} requires a callable object"
_DEBUG_CONTEXTS: Final = (
    "generic broker topic metadata feature queue msg protocol cgrp security fetch interceptor plugin consumer admin eos"
    " mock assignor conf telemetry all"
)
_OFFSET_RESETS: Final = {
    "smallest": "earliest",
    "earliest": "earliest",
    "beginning": "earliest",
    "largest": "latest",
    "latest": "latest",
    "end": "latest",
    "error": "error",
}
_ASSIGNORS: Final = Names(
    frozenset({"range", "roundrobin", "cooperative-sticky"}),
    ("range", "roundrobin"),
    "Failed to create consumer: Unsupported partition.assignment.strategy",
)

_MEANINGFUL: Final = (
    # The database
    Key("bootstrap.servers", Text(), None, native_name="metadata.broker.list", aliases=("database.url",), secret=True),
    Key("txnstore.schema", Text(), "txnstore"),
    Key("txnstore.clock", Instance("now_ms", "a txnstore.clock.Clock"), None),
    Key("txnstore.durability", Choice(_words("full", "database")), "full"),
    Key("client.id", Text(_ID_LENGTH_MAX), "rdkafka"),
    Key("request.timeout.ms", Integer(1, 900_000), 30_000, _P),
    Key("socket.timeout.ms", Integer(10, 300_000), 60_000),
    Key("retry.backoff.ms", Integer(1, 300_000), 100),
    Key("retry.backoff.max.ms", Integer(1, 300_000), 1_000),
    Key("message.max.bytes", Integer(1_000, 1_000_000_000), 1_000_000),
    Key("allow.auto.create.topics", Boolean(), None),
    Key("topic.metadata.refresh.interval.ms", Integer(-1, 3_600_000), 300_000),
    # What is reported
    Key("statistics.interval.ms", Integer(0, 86_400_000), 0),
    Key("debug", Flags(frozenset(_DEBUG_CONTEXTS.split())), ()),
    Key("log_level", Integer(0, 7), 6),
    Key("error_cb", Callback(TypeError, _FUNCTION), None),
    Key("stats_cb", Callback(TypeError, _FUNCTION), None),
    Key("throttle_cb", Callback(ValueError, _FUNCTION), None),
    Key("oauth_cb", Callback(TypeError, _FUNCTION), None),
    Key("logger", Instance("log", "a logging.Logger"), None),
    Key("on_delivery", Callback(ConfigurationError, _CALLABLE), None, _P, only_user=True),
    Key("on_commit", Callback(ConfigurationError, _CALLABLE), None, _C, only_user=True),
    # The producer
    Key("transactional.id", Text(_ID_LENGTH_MAX), None, _P),
    Key("transaction.timeout.ms", Integer(1_000, _INT32_MAX), 60_000, _P),
    Key("transaction.two.phase.commit.enable", Boolean(), False, _P, only_user=True),
    Key("txnstore.transaction.token", Token(), None, _P, only_user=True),
    Key("enable.idempotence", Boolean(), None, _P),
    Key("enable.gapless.guarantee", Boolean(), False, _P),
    Key("acks", Integer(-1, 1_000, {"all": -1}), -1, _P, "request.required.acks"),
    Key("retries", Integer(0, _INT32_MAX), _INT32_MAX, _P, "message.send.max.retries"),
    Key("max.in.flight", Integer(1, 1_000_000), None, _P, "max.in.flight.requests.per.connection"),
    Key("linger.ms", Float(0, 900_000), 5.0, _P, "queue.buffering.max.ms"),
    Key("batch.size", Integer(1, _INT32_MAX), 1_000_000, _P),
    Key("batch.num.messages", Integer(1, 1_000_000), 10_000, _P),
    Key("queue.buffering.max.messages", Integer(0, _INT32_MAX), 100_000, _P),
    Key("queue.buffering.max.kbytes", Integer(1, _INT32_MAX), 1_048_576, _P),
    Key("compression.type", Choice(_words("none", "gzip", "snappy", "lz4", "zstd")), "none", _P, "compression.codec"),
    Key("compression.level", Integer(-1, 12), -1, _P),
    Key("message.timeout.ms", Integer(0, _INT32_MAX), 300_000, _P, aliases=("delivery.timeout.ms",)),
    Key("delivery.report.only.error", Boolean(), False, _P),
    Key("partitioner", Name(frozenset(PARTITIONERS)), "consistent_random", _P),
    Key("sticky.partitioning.linger.ms", Integer(0, 900_000), 10, _P),
    Key("queuing.strategy", Choice(_words("fifo", "lifo")), "fifo", _P),
    # The consumer
    Key("group.id", Text(_ID_LENGTH_MAX), None, _C),
    Key("group.instance.id", Text(_ID_LENGTH_MAX), None, _C),
    Key("group.protocol", Choice(_words("classic", "consumer")), "classic", _C),
    Key("group.remote.assignor", Text(_ID_LENGTH_MAX), None, _C),
    Key("partition.assignment.strategy", _ASSIGNORS, _ASSIGNORS.default, _C),
    Key("session.timeout.ms", Integer(1, 3_600_000), 45_000, _C),
    Key("heartbeat.interval.ms", Integer(1, 3_600_000), 3_000, _C),
    Key("max.poll.interval.ms", Integer(1, 86_400_000), 300_000, _C),
    Key("enable.auto.commit", Boolean(), True, _C, aliases=("auto.commit.enable",)),
    Key("auto.commit.interval.ms", Integer(0, 86_400_000), 5_000, _C),
    Key("enable.auto.offset.store", Boolean(), True, _C),
    Key("auto.offset.reset", Choice(MappingProxyType(_OFFSET_RESETS)), "latest", _C),
    Key("isolation.level", Choice(_words("read_uncommitted", "read_committed")), "read_committed", _C),
    Key("enable.partition.eof", Boolean(), False, _C),
    Key("fetch.min.bytes", Integer(0, _INT32_MAX), 1, _C),
    Key("fetch.wait.max.ms", Integer(0, 300_000), 500, _C),
    Key("fetch.max.bytes", Integer(0, _FETCH_BYTES_MAX), 52_428_800, _C),
    Key("max.partition.fetch.bytes", Integer(1, 1_000_000_000), 1_048_576, _C, "fetch.message.max.bytes"),
    Key("fetch.queue.backoff.ms", Integer(0, 300_000), 1_000, _C),
    Key("fetch.error.backoff.ms", Integer(0, 300_000), 500, _C),
    Key("queued.min.messages", Integer(1, 10_000_000), 100_000, _C),
    Key("queued.max.messages.kbytes", Integer(1, 2_097_151), 65_536, _C),
    Key("check.crcs", Boolean(), False, _C),
    Key("txnstore.commit.ownership", Choice(_words("owned", "member")), "owned", _C),
    Key("txnstore.delivery.order", Choice(_words("offset", "commit")), "offset", _C),
    # Kafka's mock broker
    Key(
        "test.mock.num.brokers",
        Refused("there is no mock: with bootstrap.servers sqlite:// a client has a real store that ends with it"),
        None,
    ),
)

#: Every key by the name by which it is looked up.
KEYS: Final[Mapping[str, Key]] = MappingProxyType(
    {key.name: key for key in _MEANINGFUL}
    | {
        row.name: Key(row.name, row.kind, None, User(row.user), row.native_name, ignored=True, secret=row.secret)
        for row in IGNORED
    }
)

#: The key of every name that it may be given by.
KEYS_BY_ALIAS: Final[Mapping[str, Key]] = MappingProxyType(
    {alias: key for key in KEYS.values() for alias in (key.name, key.error_name, *key.aliases)}
)
